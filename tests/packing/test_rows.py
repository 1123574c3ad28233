"""Rows hold every token of every sequence once, in order, and say where it is."""

import itertools
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.media.item import EncodedPrompt, MediaItem
from megarl.models.qwen3_vl.positions import mrope_positions
from megarl.packing import rows
from megarl.packing.alignment import Alignment
from megarl.packing.cost import CostModel, StackCost
from megarl.packing.rows import NOT_RECORDED, TokenSequence, pack

MERGE, MEDIA = 2, 99
COST = CostModel(StackCost(100, 10), StackCost(50, 5))
ITEMS = [
    MediaItem("image", torch.full((h * w, 3), float(n)), (1, h, w), bytes([n]), f"{n}.png")
    for n, (h, w) in enumerate([(2, 2), (2, 4), (4, 4)])
]


def sequence(parts, completion):
    """`parts`: numbers are that many text tokens, items stand for themselves."""
    ids, mask, items = [], [], []
    for part in parts:
        media = isinstance(part, MediaItem)
        n = part.feature_count(MERGE) if media else part
        ids += [MEDIA] * n if media else range(len(ids), len(ids) + n)
        mask += [media] * n
        items += [part] * media
    mask = torch.tensor(mask, dtype=torch.bool)
    positions, after = mrope_positions(mask, [item.grid for item in items], MERGE)
    prompt = EncodedPrompt(None, torch.tensor(ids), mask, positions, after, tuple(items))
    return TokenSequence(prompt, torch.arange(200, 200 + completion))


parts = st.lists(st.one_of(st.integers(1, 5), st.sampled_from(ITEMS)), max_size=4)
sequences = st.lists(
    st.builds(lambda head, more, n: sequence([head, *more], n), st.integers(1, 6), parts, st.integers(1, 5)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(sequences, st.sampled_from([(1, 2), (2, 2), (3, 4), (1, 3)]), st.integers(0, 8))
def test_a_ring(given_sequences, sizes, more):
    """Rank r of n has parts r and 2n - 1 - r of each segment, cut into 2n; predictors and all that a token has go with
    their tokens."""
    alignment = Alignment.of(*sizes, "p2p")
    ranks, longest = sizes[1], max(map(len, given_sequences))
    bound = -(-(longest + 8 * more) // alignment.multiple) * alignment.multiple
    packed = pack(given_sequences, bound, MERGE, alignment)
    assert sorted(member for row in packed for member in row.members) == list(range(len(given_sequences)))
    for row in packed:
        n = row.ids.numel()
        assert n == row.bounds[-1] <= bound and n % (sizes[0] * ranks) == 0
        held = [[] for _ in range(ranks)]
        for start, end in pairwise(row.bounds):
            size, rest = divmod(end - start, 2 * ranks)
            assert rest == 0
            for part in range(2 * ranks):
                held[min(part, 2 * ranks - 1 - part)] += range(start + part * size, start + (part + 1) * size)
        place = {token: i for i, token in enumerate(itertools.chain(*held))}
        predictors = row.split(row.predictors)
        for number, member in enumerate(row.members):
            one, start, end = given_sequences[member], row.bounds[number], row.bounds[number + 1]
            (alone,) = pack([one], longest, MERGE)
            here = [place[token] for token in range(start, start + len(one))]
            assert torch.equal(row.ids[here], alone.ids)
            assert torch.equal(row.positions[:, here], alone.positions)
            assert torch.equal(row.feature_rows[here] >= 0, alone.feature_rows >= 0)
            assert predictors[number].tolist() == [here[token] for token in alone.predictors.tolist()]
            padding = [place[token] for token in range(start + len(one), end)]
            assert len(padding) < 2 * ranks and (row.feature_rows[padding] == -1).all()


def test_experts_go_around_a_ring():
    one = replace(sequence([4], 3), routing_indices=torch.arange(6)[:, None, None].expand(6, 2, 2))
    (row,) = pack([one], 8, MERGE, Alignment.of(1, 2, "p2p"))
    assert row.routing_indices[:, 0, 0].tolist() == [0, 1, NOT_RECORDED, NOT_RECORDED, 2, 3, 4, 5]
    assert row.predictors.tolist() == [5, 6, 7]


def test_earlier_turns_are_targets_too():
    """What was sampled in the middle of a prompt is predicted from the place before it; the rest is not."""
    talk = replace(sequence([3, ITEMS[1], 6], 2), earlier=torch.tensor([5, 6, 9]))
    assert talk.targets.tolist() == [*talk.prompt.ids[[5, 6, 9]].tolist(), 200, 201]
    assert talk.places.tolist() == [5, 6, 9, 11, 12]
    (row,) = pack([sequence([4], 3), talk, sequence([2], 1)], 64, MERGE, Alignment(8))
    predictors = dict(zip(row.members, row.split(row.predictors), strict=True))
    targets = dict(zip(row.members, row.split(row.targets), strict=True))
    start = row.bounds[row.members.index(1)]
    assert predictors[1].tolist() == [start + place for place in (4, 5, 8, 10, 11)]
    assert torch.equal(targets[1], talk.targets) and row.lengths[row.members.index(1)] == 5
    assert torch.equal(row.ids[predictors[1] + 1], targets[1])


@settings(deadline=None)
@given(sequences, st.sampled_from([1, 2, 8]), st.integers(0, 8))
def test_rows(given_sequences, multiple, more):
    """Nothing is lost, doubled or moved; a prompt is followed by its completion at consecutive positions."""
    longest = max(map(len, given_sequences))
    bound = -(-(longest + 8 * more) // multiple) * multiple
    packed = pack(given_sequences, bound, MERGE, Alignment(multiple))
    assert sorted(member for row in packed for member in row.members) == list(range(len(given_sequences)))
    for row in packed:
        assert list(row.members) == sorted(row.members)
        n = row.ids.numel()
        assert n <= bound and n % multiple == 0
        assert row.positions.shape == (3, n) and row.feature_rows.shape == (n,) and row.bounds[-1] == n
        padding = n - sum(len(given_sequences[m]) for m in row.members)
        assert padding < multiple
        assert len(row.bounds) == 1 + len(row.members) + (padding > 0)
        features = (
            torch.cat([torch.tensor([i.digest[0]] * i.feature_count(MERGE)) for i in row.items]).tolist()
            if (row.items)
            else []
        )
        assert len({item.digest for item in row.items}) == len(row.items)
        predictors, targets = row.split(row.predictors), row.split(row.targets)
        for place, member in enumerate(row.members):
            one, start, end = given_sequences[member], row.bounds[place], row.bounds[place + 1]
            prompt, m = one.prompt.ids.numel(), one.completion.numel()
            assert row.ids[start:end].tolist() == [*one.prompt.ids.tolist(), *one.completion.tolist()]
            assert torch.equal(row.positions[:, start : start + prompt], one.prompt.positions)
            after = one.prompt.next_position + torch.arange(m)
            assert torch.equal(row.positions[:, start + prompt : end], after.expand(3, m))
            assert predictors[place].tolist() == list(range(start + prompt - 1, end - 1))
            assert torch.equal(targets[place], one.completion)
            rows_of_media = row.feature_rows[start:end]
            assert (rows_of_media >= 0).tolist() == [*one.prompt.media_mask.tolist(), *[False] * m]
            digests = [i.digest[0] for i in one.prompt.items for _ in range(i.feature_count(MERGE))]
            assert [features[r] for r in rows_of_media.tolist() if r >= 0] == digests
        assert (row.feature_rows[n - padding :] == -1).all()


@settings(deadline=None)
@given(sequences, st.integers(0, 12))
def test_few_rows_of_even_cost(given_sequences, more):
    """No more rows than first-fit decreasing makes of the bundles, which is at most 11/9 of the best and 6/9
    (Dosa, 2007), and the dearest row is not dearer than its."""
    bound = max(map(len, given_sequences)) + more
    packed = pack(given_sequences, bound, MERGE, cost=COST)
    bundles = rows._bundles(given_sequences, list(map(len, given_sequences)), bound)
    lengths = [sum(len(given_sequences[i]) for i in bundle) for bundle in bundles]
    greedy = rows._first_fit_decreasing(lengths, bound)
    assert len(packed) <= len(greedy)
    assert sum(lengths) <= bound * len(greedy)
    for one, other in combinations(greedy, 2):
        assert sum(lengths[b] for b in [*one, *other]) > bound


def test_dear_and_cheap_are_mixed():
    """Two long sequences and many short ones, of as many tokens: one long sequence a row, since attention over it
    costs more."""
    long, short = [sequence([40], 1)] * 2, [sequence([4], 1)] * 18
    first, second = pack([*long, *short], 90, MERGE, cost=COST)
    assert sorted([*first.members, *second.members]) == list(range(20))
    assert {0, 1} & set(first.members) == {0} and {0, 1} & set(second.members) == {1}
    costs = [COST.row([*long, *short][m] for m in row.members) for row in (first, second)]
    assert max(costs) < 1.05 * min(costs)


def test_sequences_with_the_same_media_stay_together():
    """A picture is in one row only, where it fits; shorter text fills the gap."""
    group, text = [sequence([ITEMS[2], 3], 2)] * 4, [sequence([5], 1)] * 4
    packed = pack([*group, *text], 36, MERGE, cost=COST)
    holders = [row for row in packed if row.items]
    assert len(holders) == 1 and set(range(4)) <= set(holders[0].members)


def test_cost_of_shared_items():
    """An item counts once a row; attention grows with the square of a segment and not of the row."""
    one, other = sequence([ITEMS[2], 3], 2), sequence([ITEMS[1], 3], 2)
    assert COST.row([one, one]) == 2 * COST.sequence(one) + COST.item(ITEMS[2])
    assert COST.row([one, other]) == COST.row([one]) + COST.row([other])
    stack = StackCost(matrices=10, attention=3)
    assert stack.operations(5, 2) == 5 * (2 * 10 + 4 * 3 * 2)
    assert CostModel(stack, stack).item(ITEMS[1]) == 8 * (20 + 12 * 8)


def test_split():
    """`split` gives each member's part of what the row's completion tokens have."""
    (row,) = pack([sequence([3], 2), sequence([1], 4), sequence([2], 1)], 100, MERGE)
    assert [part.tolist() for part in row.split(torch.arange(7))] == [[0, 1], [2, 3, 4, 5], [6]]


def test_items_are_shared():
    """A group's picture is in the row once, and its features' rows are the same for all members."""
    (row,) = pack([sequence([2, ITEMS[1], 1, ITEMS[0]], 2)] * 3, 100, MERGE)
    assert row.items == (ITEMS[1], ITEMS[0])
    per_member = row.feature_rows.view(3, -1)
    assert torch.equal(per_member[0], per_member[2])
    assert per_member[0][per_member[0] >= 0].tolist() == [0, 1, 2]


def test_padding_is_a_segment():
    """Text at positions from 0, so that its attention and angles are ordinary ones."""
    (row,) = pack([sequence([3], 2)], 16, MERGE, Alignment(8))
    assert row.bounds == (0, 5, 8)
    assert row.ids[5:].tolist() == [0, 0, 0]
    assert row.positions[:, 5:].tolist() == [[0, 1, 2]] * 3
    assert row.predictors.tolist() == [2, 3]


def test_routing_indices():
    """At the tokens that they were recorded for; none at the last token of a sequence, in padding, and for a sequence
    without a record."""
    first, without, last = sequence([3], 2), sequence([2], 1), sequence([1], 1)
    recorded = torch.arange(4 * 3 * 2).view(4, 3, 2).to(torch.uint8), torch.full((1, 3, 2), 255, dtype=torch.uint8)
    first, last = (replace(s, routing_indices=r) for s, r in zip((first, last), recorded, strict=True))
    (row,) = pack([first, without, last], 16, MERGE, Alignment(8))
    assert row.bounds == (0, 5, 8, 10, 16) and row.routing_indices.dtype is torch.int16
    assert torch.equal(row.routing_indices[:4], recorded[0].to(torch.int16))
    assert (row.routing_indices[4:8] == NOT_RECORDED).all()
    assert (row.routing_indices[8] == 255).all() and (row.routing_indices[9:] == NOT_RECORDED).all()
    (row,) = pack([without], 8, MERGE)
    assert row.routing_indices is None


def test_too_long():
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit into a row of 8"):
        pack([sequence([3], 2), sequence([5], 4)], 8, MERGE)


def test_nothing():
    assert pack([], 8, MERGE) == []
