"""Rotary positions of text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.data.prompt import Grid

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megarl.media.expand import PositionRule


def position_rule(config: "PreTrainedConfig") -> "PositionRule":
    return counted


def counted(
    media_mask: torch.Tensor, grids: Sequence[Grid], merge_size: int, seconds: Sequence[float]
) -> tuple[torch.Tensor, int]:
    """Places in the row, int64 `[3, n]` on three equal axes, and the place after it.  There is no media."""
    assert not grids and not media_mask.any()
    n = len(media_mask)
    return torch.arange(n).expand(3, n), n
