"""What is asked of megarl and what it answers, in files: its process has patches that transformers must not meet.

Imports no Megatron.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.verify.cases import Case

ASKED, FOUND, SAMPLED = "asked.pt", "found.pt", "sampled.pt"
"""File names in the working folder of one model."""


@dataclass(frozen=True, eq=False)
class Asked:
    checkpoint: Path
    dtype: torch.dtype
    """Of the weights, and what is computed in."""
    cases: list[Case]
    """With completions that are fixed."""
    new_tokens: int
    """Of the completions that the engine samples, at most; `SAMPLED` has them as cases."""
    rollouts: int
    """That it samples of each prompt."""


@dataclass(frozen=True, eq=False)
class Found:
    """The cases in one packed row, through megarl's training path."""

    logits: list[Tensor]
    """`[tokens, vocabulary]` per case, of the type that was computed in."""
    log_probs: list[Tensor]
    """float32 `[n]` per case."""
    gradients: dict[str, Tensor]
    """float32, of `negative_log_likelihood` per token, by Hugging Face name."""
    experts: list[Tensor]
    """int64 `[tokens, layers, top-k]` per case, each token's in ascending order; empty of a model without experts."""


def negative_log_likelihood(log_probs: Tensor) -> Tensor:
    """The fixed loss, summed over `[n]`."""
    return -log_probs.sum()
