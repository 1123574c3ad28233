"""Samples packed into rows: several sequences end to end, each its own attention segment."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.media.item import EncodedPrompt, MediaItem
from megarl.packing.alignment import ANY_LENGTH, Alignment
from megarl.packing.balance import even_parts

if TYPE_CHECKING:
    from megarl.packing.cost import CostModel


NOT_RECORDED = -1
"""In place of an expert: nobody knows where the engine would have sent the token, and its router chooses."""


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """A prompt and the completion whose tokens are trained on or scored."""

    prompt: EncodedPrompt
    completion: Tensor
    """int64 `[n]`, n >= 1."""
    routing_indices: Tensor | None = None
    """integers `[tokens - 1, layers, top-k]`: the experts that the engine sent each token but the last to, for training
    to replay; None: the router chooses."""
    earlier: Tensor | None = None
    """int64 `[k]`: places in the prompt, none the first, of tokens that count as the completion's do: what was sampled
    in earlier turns of a conversation."""

    def __len__(self) -> int:
        return self.prompt.ids.numel() + self.completion.numel()

    @property
    def targets(self) -> Tensor:
        """int64 `[k + n]`: the tokens that are trained on or scored, in their order."""
        return self.completion if self.earlier is None else torch.cat([self.prompt.ids[self.earlier], self.completion])

    @property
    def places(self) -> Tensor:
        """int64 `[k + n]`: where they are in the sequence."""
        n = self.prompt.ids.numel()
        completion = torch.arange(n, n + self.completion.numel())
        return completion if self.earlier is None else torch.cat([self.earlier, completion])


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
    """Cumulative lengths of the segments, before `zigzag`.  Padding at the end of a row is a segment of its own; a
    ring's is at the end of each segment, where no token sees it."""
    predictors: Tensor
    """int64 `[targets]`: the places in the row whose logits predict them."""
    targets: Tensor
    """int64 `[targets]`: the members' `TokenSequence.targets`."""
    members: tuple[int, ...]
    """Which of the packed sequences the row holds, in order."""
    lengths: tuple[int, ...]
    """Targets of each member."""
    routing_indices: Tensor | None = None
    """int16 `[tokens, layers, top-k]`: experts to replay, or `NOT_RECORDED` (last token of a sequence, padding); None:
    the router chooses everywhere."""

    def split(self, values: Tensor) -> list[Tensor]:
        """`[targets]` to one tensor per member."""
        return list(values.split(self.lengths))


def pack(
    sequences: Sequence[TokenSequence],
    tokens_per_row: int,
    merge_size: int,
    alignment: Alignment = ANY_LENGTH,
    cost: "CostModel | None" = None,
) -> list[PackedRow]:
    """Fills rows: few of them, and of even cost.

    Sequences next to each other that have the same media stay together as far as a row holds them, so that it is
    encoded once for them.  First-fit decreasing decides how many rows there are.  Into as many the differencing method
    then deals out the costs; where it would overfill a row, the first packing stays.

    Args:
        sequences: none longer than `tokens_per_row`.
        tokens_per_row: bound of a row's tokens, padding included; a multiple of `alignment.multiple`.
        merge_size: side of the square of patches that becomes one media token.
        alignment: what rows are padded to.
        cost: None counts tokens.

    Raises:
        ValueError: a sequence does not fit into a row.
    """
    held = [_padded(len(sequence), alignment.segment) for sequence in sequences]
    bundles = _bundles(sequences, held, tokens_per_row)
    lengths = [sum(held[i] for i in bundle) for bundle in bundles]
    rows = _first_fit_decreasing(lengths, tokens_per_row)
    costs = lengths if cost is None else [cost.row(sequences[i] for i in bundle) for bundle in bundles]
    even = even_parts(costs, len(rows)) if rows else []
    if all(sum(lengths[b] for b in row) <= tokens_per_row for row in even):
        rows = [row for row in even if row]
    return [_row(sequences, sorted(i for b in row for i in bundles[b]), merge_size, alignment) for row in rows]


def zigzag(bounds: Sequence[int], ranks: int) -> Tensor:
    """The order in which the ranks of a ring hold a row: int64 `[tokens]`, the place of each token before.

    Each segment is cut into 2n parts, and rank r has parts r and 2n - 1 - r of all of them: under a causal mask, early
    tokens see little and late ones much, and so each rank has as much to do.  What rank r of n has is the r-th n-th of
    the row then, as without a ring.  This is how transformer-engine wants packed rows (`thd_get_partitioned_indices`).
    """
    order = []
    for rank in range(ranks):
        for start, end in zip(bounds, bounds[1:], strict=False):
            parts = torch.arange(start, end).chunk(2 * ranks)
            order += [parts[rank], parts[2 * ranks - 1 - rank]]
    return torch.cat(order)


def _padded(tokens: int, multiple: int) -> int:
    return tokens + -tokens % multiple


def by_member(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """What each row's targets have, one tensor per packed sequence, in their order before packing."""
    parts = {
        m: part
        for row, value in zip(rows, values, strict=True)
        for m, part in zip(row.members, row.split(value), strict=True)
    }
    return dict(sorted(parts.items()))


def _bundles(sequences: Sequence[TokenSequence], held: Sequence[int], tokens_per_row: int) -> list[list[int]]:
    """Of sequences that take `held` tokens each of a row."""
    bundles, before, used = [], None, 0
    for index, (sequence, tokens) in enumerate(zip(sequences, held, strict=True)):
        if tokens > tokens_per_row:
            raise ValueError(f"a sequence of {tokens} tokens does not fit into a row of {tokens_per_row}")
        media = tuple(item.digest for item in sequence.prompt.items)
        used += tokens
        if not media or media != before or used > tokens_per_row:
            bundles.append([])
            used = tokens
        bundles[-1].append(index)
        before = media
    return bundles


def _first_fit_decreasing(lengths: Sequence[int], bound: int) -> list[list[int]]:
    rows, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(bound)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def idle_row(tokens: int) -> PackedRow:
    """`tokens` tokens that no sequence needs, one of them with a target, for a rank that has to take part in a pass
    of others."""
    return PackedRow(
        ids=torch.zeros(tokens, dtype=torch.long),
        positions=torch.arange(tokens).expand(3, tokens),
        feature_rows=torch.full((tokens,), -1),
        items=(),
        bounds=(0, tokens),
        predictors=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        members=(),
        lengths=(),
    )


def _row(sequences: Sequence[TokenSequence], members: list[int], merge_size: int, alignment: Alignment) -> PackedRow:
    ids, positions, feature_rows, predictors, bounds = [], [], [], [], [0]

    def pad(tokens: int) -> None:
        ids.append(torch.zeros(tokens, dtype=torch.long))
        positions.append(torch.arange(tokens).expand(3, tokens))
        feature_rows.append(torch.full((tokens,), -1))

    start_of: dict[bytes, int] = {}
    items, features = [], 0
    for index in members:
        prompt, completion = sequences[index].prompt, sequences[index].completion
        whole, start = prompt.followed_by(completion), bounds[-1]
        ids.append(whole.ids)
        positions.append(whole.positions)
        rows = torch.full_like(whole.ids, -1)
        for item in prompt.items:
            if item.digest not in start_of:
                start_of[item.digest] = features
                items.append(item)
                features += item.feature_count(merge_size)
        if prompt.items:
            counts = [(start_of[i.digest], i.feature_count(merge_size)) for i in prompt.items]
            rows[whole.media_mask] = torch.cat([torch.arange(s, s + c) for s, c in counts])
        feature_rows.append(rows)
        predictors.append(start + sequences[index].places - 1)
        held = _padded(whole.ids.numel(), alignment.segment)
        pad(held - whole.ids.numel())
        bounds.append(start + held)
    tokens = _padded(bounds[-1], alignment.multiple)
    if tokens > bounds[-1]:
        pad(tokens - bounds[-1])
        bounds.append(tokens)
    row = PackedRow(
        ids=torch.cat(ids),
        positions=torch.cat(positions, 1),
        feature_rows=torch.cat(feature_rows),
        items=tuple(items),
        bounds=tuple(bounds),
        predictors=torch.cat(predictors),
        targets=torch.cat([sequences[i].targets for i in members]),
        members=tuple(members),
        lengths=tuple(sequences[i].targets.numel() for i in members),
        routing_indices=_routing([sequences[i] for i in members], bounds),
    )
    return row if alignment.ring == 1 else _around(row, alignment.ring)


def _around(row: PackedRow, ranks: int) -> PackedRow:
    """The row in the order of a ring."""
    order = zigzag(row.bounds, ranks)
    place = order.argsort()  # of each token now
    return replace(
        row,
        ids=row.ids[order],
        positions=row.positions[:, order],
        feature_rows=row.feature_rows[order],
        predictors=place[row.predictors],
        routing_indices=None if row.routing_indices is None else row.routing_indices[order],
    )


def _routing(sequences: list[TokenSequence], bounds: list[int]) -> Tensor | None:
    """Of a row whose sequences begin at `bounds`; some of them, or all, may have no record."""
    sizes = [s.routing_indices.shape[1:] for s in sequences if s.routing_indices is not None]
    if not sizes:
        return None
    row = torch.full((bounds[-1], *sizes[0]), NOT_RECORDED, dtype=torch.int16)
    for sequence, start in zip(sequences, bounds, strict=False):
        if sequence.routing_indices is not None:
            row[start : start + len(sequence) - 1] = sequence.routing_indices
    return row
