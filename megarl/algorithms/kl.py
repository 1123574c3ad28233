"""Estimates of KL(policy || reference) from the policy's own samples, per token.

Schulman, "Approximating KL divergence" (2020, joschu.net/blog/kl-approx.html); d = log policy - log reference.  All
take and give float32 `[tokens]`, in nats.
"""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d: unbiased, of either sign.  For the reward: as a term of the loss its gradient is that of log policy, whose
    expectation on the policy's own samples is 0, so that there it adds noise and no pull (Tang & Munos 2025,
    arXiv 2506.09477)."""
    return log_probs - reference_log_probs


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """d^2 / 2: biased, never negative.  As a term of the loss its gradient, d times that of log policy, is an unbiased
    estimate of the divergence's own."""
    return k1(log_probs, reference_log_probs).square() / 2


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """exp(-d) + d - 1: unbiased, never negative.  GRPO's (arXiv 2402.03300, eq. 4)."""
    difference = reference_log_probs - log_probs
    return difference.exp() - difference - 1


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name that a recipe gives (`algorithm.kl_estimator`)."""
