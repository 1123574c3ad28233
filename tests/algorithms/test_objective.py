"""The objective: numbers by hand, and what must hold for any input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.objective import (
    METRICS,
    ObjectiveInputs,
    ObjectiveOptions,
    clipped_surrogate,
    cross_entropy,
    k3,
    objective,
)


def test_surrogate_by_hand():
    """Bounds 0.8 and 1.3; the pessimistic one of the two products counts."""
    ratio = torch.tensor([1.0, 2.0, 2.0, 0.5, 0.5, 1.2])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, 2.0])
    expected = torch.tensor([-1.0, -1.3, 2.0, -0.5, 0.8, -2.4])
    torch.testing.assert_close(clipped_surrogate(ratio, advantages, 0.2, 0.3), expected)


def test_k3_by_hand():
    """d = ln 2: 2 - ln 2 - 1;  d = -ln 2: 1/2 + ln 2 - 1."""
    found = k3(torch.log(torch.tensor([0.25, 0.5, 0.3])), torch.log(torch.tensor([0.5, 0.25, 0.3])))
    torch.testing.assert_close(found, torch.tensor([1 - math.log(2), math.log(2) - 0.5, 0.0]), atol=1e-6, rtol=0)


def test_objective_by_hand():
    """Two tokens.  Ratios 2 (clipped at 1.2, A = 1) and 1/2 (A = 2, not clipped: the product is smaller)."""
    inputs = ObjectiveInputs(
        log_probs=torch.log(torch.tensor([0.5, 0.2])),
        entropy=torch.tensor([1.0, 3.0]),
        old_log_probs=torch.log(torch.tensor([0.25, 0.4])),
        advantages=torch.tensor([1.0, 2.0]),
        reference_log_probs=torch.log(torch.tensor([0.25, 0.2])),
    )
    kl = 0.5 + math.log(2) - 1
    loss, sums = objective(inputs, ObjectiveOptions(0.2, 0.2, kl_coefficient=0.5, entropy_coefficient=0.1))
    expected = (-1.2 - 1.0) + 0.5 * kl - 0.1 * 4.0
    assert float(loss) == pytest.approx(expected, abs=1e-6)
    assert dict(zip(METRICS, sums.tolist(), strict=True)) == pytest.approx(
        {"policy/loss": expected, "policy/ratio": 2.5, "policy/clip_fraction": 1, "policy/entropy": 4, "policy/kl": kl}
    )


def test_cross_entropy():
    assert float(cross_entropy(torch.log(torch.tensor([0.5, 0.25])))) == pytest.approx(math.log(8))


def tokens(low, high):
    return st.lists(st.floats(low, high, width=32), min_size=12, max_size=12).map(torch.tensor)


log_probs = tokens(-4, -0.015625)


@given(log_probs, log_probs)
def test_k3_is_not_negative(policy, reference):
    assert (k3(policy, reference) >= -1e-6).all()
    assert (k3(policy, policy) == 0).all()


def test_k3_is_unbiased():
    """Its expectation under the policy is the KL divergence, exactly, on a small vocabulary."""
    generator = torch.Generator().manual_seed(1)
    policy, reference = torch.randn(2, 9, generator=generator, dtype=torch.double).log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3(policy, reference)).sum(), divergence)


@given(log_probs, log_probs, tokens(-2, 2))
def test_gradient_where_nothing_is_clipped_and_where_it_is(policy, old, advantages):
    """-A ratio inside the bounds, and 0 exactly where a token counts as clipped."""
    policy = policy.clone().requires_grad_()
    options = ObjectiveOptions(0.2, 0.3)
    loss, sums = objective(ObjectiveInputs(policy, torch.zeros(12), old, advantages), options)
    loss.backward()
    ratio = (policy.detach() - old).exp()
    clipped = ((ratio > 1.3) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    edge = ((ratio - 1.3).abs() < 1e-5) | ((ratio - 0.8).abs() < 1e-5)
    expected = torch.where(clipped, 0.0, -advantages * ratio)
    torch.testing.assert_close(policy.grad[~edge], expected[~edge], atol=1e-5, rtol=1e-5)
    if not edge.any():
        assert sums[METRICS.index("policy/clip_fraction")] == clipped.sum()


@given(log_probs, tokens(-2, 2), st.integers(1, 11))
def test_sums_add_up(policy, advantages, cut):
    """A batch cut anywhere gives the same sums, so that rows and ranks do not matter."""
    options = ObjectiveOptions(kl_coefficient=0.2, entropy_coefficient=0.1)

    def part(where):
        inputs = ObjectiveInputs(
            policy[where], -policy[where], policy[where].flip(0) * 0 - 1.0, advantages[where], policy[where] * 0.5
        )
        return objective(inputs, options)

    whole, first, second = part(slice(None)), part(slice(None, cut)), part(slice(cut, None))
    torch.testing.assert_close(first[0] + second[0], whole[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(first[1] + second[1], whole[1], atol=1e-4, rtol=1e-5)


def test_gradient_in_double():
    generator = torch.Generator().manual_seed(2)
    policy, old, kept, entropy, advantages = torch.randn(5, 8, generator=generator, dtype=torch.double)
    options = ObjectiveOptions(0.2, 0.3, 0.4, 0.1)

    def function(p, e):
        return objective(ObjectiveInputs(p, e, old, advantages, kept), options)[0]

    assert torch.autograd.gradcheck(function, (policy.requires_grad_(), entropy.requires_grad_()))
