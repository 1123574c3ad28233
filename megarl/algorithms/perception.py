"""Perception-aware policy optimisation: the policy should say something else when it sees less."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.kl import k3


@dataclass(frozen=True)
class PerceptionOptions:
    coefficient: float = 0.0
    """Of the divergence; 0: the term is not computed."""
    mask_ratio: float = 0.6
    """Share of an item's patches that are hidden."""
    entropy_coefficient: float = 0.0
    masked_entropy_coefficient: float = 0.0


@dataclass(frozen=True, eq=False)
class PerceptionInputs:
    """Tensors are `[tokens]`, token for token."""

    masked_log_probs: Tensor
    """float32: of the same tokens where a part of the media is hidden, with gradient."""
    masked_entropy: Tensor
    """float32, in nats, with gradient."""
    sees: Tensor
    """bool: the token's prompt has media."""


def perception_loss(log_probs: Tensor, entropy: Tensor, inputs: PerceptionInputs, options: PerceptionOptions) -> Tensor:
    """float32 `[tokens]`: -g KL(policy || policy that sees less) + e1 H(policy) + e2 H(policy that sees less); 0 for
    tokens of prompts without media.

    PAPO (Wang et al. 2025, arXiv 2507.06448): the implicit perception loss with the k3 estimate, through both of whose
    sides the gradient goes, and the double entropy loss, without which the divergence is had by making either
    distribution flat.
    """
    divergence = k3(log_probs, inputs.masked_log_probs)
    entropies = options.entropy_coefficient * entropy + options.masked_entropy_coefficient * inputs.masked_entropy
    return torch.where(inputs.sees, entropies - options.coefficient * divergence, 0.0)
