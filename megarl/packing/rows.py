"""Samples packed into rows: several sequences end to end, each its own attention segment."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.media.item import EncodedPrompt, MediaItem


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A prompt and the completion whose tokens are trained on or scored."""

    prompt: EncodedPrompt
    completion: Tensor
    """int64 `[n]`, n >= 1."""

    def __len__(self) -> int:
        return self.prompt.ids.numel() + self.completion.numel()


@dataclass(frozen=True, eq=False)
class PackedRow:
    ids: Tensor
    """int64 `[tokens]`."""
    positions: Tensor
    """int64 `[3, tokens]`: rotary positions."""
    feature_rows: Tensor
    """int64 `[tokens]`: row of the media features, -1 for text.  Sequences with equal items share their rows."""
    items: tuple[MediaItem, ...]
    """Distinct items, in the order of their feature rows."""
    bounds: tuple[int, ...]
    """Cumulative lengths of the segments; padding at the end is a segment of its own."""
    predictors: Tensor
    """int64 `[completion tokens]`: the places in the row whose logits predict them."""
    targets: Tensor
    """int64 `[completion tokens]`: the completion tokens themselves."""
    members: tuple[int, ...]
    """Which of the packed sequences the row holds, in order."""
    lengths: tuple[int, ...]
    """Completion tokens of each member."""

    def split(self, values: Tensor) -> list[Tensor]:
        """`[completion tokens]` to one tensor per member."""
        return list(values.split(self.lengths))


def pack(
    sequences: Sequence[TokenSequence], tokens_per_row: int, merge_size: int, multiple: int = 1
) -> list[PackedRow]:
    """Fills rows in the given order, so that the rollouts of a group stay together and share their media.

    Args:
        sequences: none longer than `tokens_per_row`.
        tokens_per_row: bound of a row's tokens, padding included; a multiple of `multiple`.
        merge_size: side of the square of patches that becomes one media token.
        multiple: rows are padded to a multiple of this.

    Raises:
        ValueError: a sequence does not fit into a row.
    """
    rows, members, used = [], [], 0
    for index, sequence in enumerate(sequences):
        if len(sequence) > tokens_per_row:
            raise ValueError(f"a sequence of {len(sequence)} tokens does not fit into a row of {tokens_per_row}")
        if used + len(sequence) > tokens_per_row:
            rows.append(_row(sequences, members, merge_size, multiple))
            members, used = [], 0
        members.append(index)
        used += len(sequence)
    if members:
        rows.append(_row(sequences, members, merge_size, multiple))
    return rows


def _row(sequences: Sequence[TokenSequence], members: list[int], merge_size: int, multiple: int) -> PackedRow:
    ids, positions, feature_rows, predictors, bounds = [], [], [], [], [0]
    start_of: dict[bytes, int] = {}
    items, features = [], 0
    for index in members:
        prompt, completion = sequences[index].prompt, sequences[index].completion
        n, m, start = prompt.ids.numel(), completion.numel(), bounds[-1]
        ids += [prompt.ids, completion]
        after = prompt.next_position + torch.arange(m)
        positions += [prompt.positions, after.expand(3, m)]
        rows = torch.full((n + m,), -1)
        for item in prompt.items:
            if item.digest not in start_of:
                start_of[item.digest] = features
                items.append(item)
                features += item.feature_count(merge_size)
        if prompt.items:
            counts = [(start_of[i.digest], i.feature_count(merge_size)) for i in prompt.items]
            rows[:n][prompt.media_mask] = torch.cat([torch.arange(s, s + c) for s, c in counts])
        feature_rows.append(rows)
        predictors.append(start + n - 1 + torch.arange(m))
        bounds.append(start + n + m)
    padding = -bounds[-1] % multiple
    if padding:
        ids.append(torch.zeros(padding, dtype=torch.long))
        positions.append(torch.arange(padding).expand(3, padding))
        feature_rows.append(torch.full((padding,), -1))
        bounds.append(bounds[-1] + padding)
    return PackedRow(
        ids=torch.cat(ids),
        positions=torch.cat(positions, 1),
        feature_rows=torch.cat(feature_rows),
        items=tuple(items),
        bounds=tuple(bounds),
        predictors=torch.cat(predictors),
        targets=torch.cat([sequences[i].completion for i in members]),
        members=tuple(members),
        lengths=tuple(sequences[i].completion.numel() for i in members),
    )
