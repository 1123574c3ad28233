"""Rotary positions of Qwen3-VL on three axes (interleaved MRoPE)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megarl.media.expand import PositionRule


def position_rule(config: "PreTrainedConfig") -> "PositionRule":
    return mrope_positions


def mrope_positions(
    media_mask: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    merge_size: int,
    seconds: Sequence[float] = (),
    tokens_per_second: int | None = None,
) -> tuple[torch.Tensor, int]:
    """Positions of one row, as `Qwen3VLModel.get_rope_index` of transformers 5.12 gives them.

    A text token advances all three axes by one.  A run of media tokens that begins at position p has the
    positions p + (frame, row, column) of its merged grid, and what follows it continues at
    p + max(h, w) / merge_size.

    The runs are told apart by their lengths, not by separators and not by token ids, so that two pictures may
    touch.

    Args:
        media_mask: bool `[n]`, true where a media feature goes.
        grids: (t, h, w) in patches of each run, in order.  A picture is one run with t = 1; so is each frame
            of a video, since the text of its timestamp stands between the frames.
        merge_size: side, in patches, of the square that makes one media token.
        seconds: between the temporal patches of each run; read only where `tokens_per_second` is given.
        tokens_per_second: positions that a second counts for on the axis of time, and only whole seconds count;
            None: a temporal patch counts for one.

    Returns:
        int64 `[3, n]` (time, height, width), and the position of the token that follows the row.

    Raises:
        ValueError: the mask and the grids do not fit together.
    """
    places = media_mask.nonzero().flatten().tolist()
    counts = [_merged_count(grid, merge_size) for grid in grids]
    if sum(counts) != len(places):
        raise ValueError(f"{len(places)} media tokens in the mask, {sum(counts)} in the grids {list(grids)}")

    columns = []
    token = position = used = 0
    steps = [1] * len(grids) if tokens_per_second is None else [tokens_per_second * int(s) for s in seconds]
    for (t, h, w), count, step in zip(grids, counts, steps, strict=True):
        first = places[used]
        if places[used + count - 1] != first + count - 1:
            raise ValueError(f"the {count} media tokens of grid {(t, h, w)} at token {first} are not contiguous")
        columns.append(_text(position, first - token))
        position += first - token
        columns.append(_grid(position, t, h // merge_size, w // merge_size, step))
        position += max(h, w) // merge_size
        token = first + count
        used += count
    columns.append(_text(position, len(media_mask) - token))

    positions = torch.cat(columns, dim=1)
    return positions, int(positions.max()) + 1 if positions.numel() else 0


def _merged_count(grid: tuple[int, int, int], merge_size: int) -> int:
    t, h, w = grid
    if min(grid) < 1 or h % merge_size or w % merge_size:
        raise ValueError(f"grid {grid} does not divide into squares of {merge_size} x {merge_size} patches")
    return t * h * w // merge_size**2


def _text(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length).expand(3, -1)


def _grid(start: int, t: int, h: int, w: int, step: int) -> torch.Tensor:
    axes = torch.meshgrid(step * torch.arange(t), torch.arange(h), torch.arange(w), indexing="ij")
    return torch.stack(axes).flatten(1) + start
