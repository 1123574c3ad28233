"""Rotary positions of Qwen2.5-VL on three axes (contiguous MRoPE), of which the first counts a video's time."""

from functools import partial
from typing import TYPE_CHECKING

from megarl.models.qwen3_vl.positions import mrope_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megarl.media.expand import PositionRule


def position_rule(config: "PreTrainedConfig") -> "PositionRule":
    """As `Qwen2_5_VLModel.get_rope_index` of transformers 5.12: a video is one run, whose temporal patches are
    `tokens_per_second` x the whole seconds between them apart.  Whole seconds: closer frames share a position."""
    return partial(mrope_positions, tokens_per_second=config.vision_config.tokens_per_second)
