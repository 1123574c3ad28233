"""Dynamic sampling: who is replaced, how often, and that all ranks draw equally often."""

import pytest
import torch

from tests.distributed import Layout, lazy

resampling = lazy("megarl.resample")
parallel_state = lazy("megatron.core.parallel_state")


def _constant(groups):
    return torch.tensor([len(set(rewards)) == 1 for rewards in groups], dtype=torch.bool)


def _resample(groups, rounds, offered):
    """`groups[rank]`: rewards; `offered[rank][round]`: what is drawn then.  With what `draw` was asked for."""
    rank, asked = parallel_state.get_data_parallel_rank(), []

    def draw(number, positions):
        asked.append((number, positions))
        fresh = offered[rank][number]
        return None if fresh is None else fresh[: len(positions)]

    return *resampling.resample(groups[rank], rounds, _constant, draw), asked


MIXED, FRESH, EQUAL, OTHER = [0, 1], [1, 0], [1, 1], [0, 0]


def test_one_rank(ranks):
    """Of three groups that teach nothing one is replaced at once, one in the second round, and one stays as it was."""
    offered = [[[EQUAL, FRESH, EQUAL], [[0, 3], EQUAL], [EQUAL]]]
    ((groups, drawn, dropped, asked),) = ranks.run(_resample, [[EQUAL, OTHER, MIXED, OTHER]], 3, offered)
    assert groups == [[0, 3], FRESH, MIXED, OTHER]
    assert asked == [(0, [0, 1, 3]), (1, [0, 3]), (2, [3])]
    assert drawn == pytest.approx((3 + 2 + 1) / 4)
    # Each that was drawn, or was there, and is no part of the step: six and four, of which four are.
    assert dropped == [(0, EQUAL), (1, OTHER), (3, EQUAL), (0, EQUAL), (3, EQUAL), (3, EQUAL)]


def test_no_rounds_and_nothing_to_do(ranks):
    for start, rounds in (([EQUAL, MIXED], 0), ([MIXED, FRESH], 4)):
        ((groups, drawn, dropped, asked),) = ranks.run(_resample, [start], rounds, [[[]]])
        assert (groups, drawn, dropped, asked) == (start, 0, [], [])


def test_ranks_draw_equally_often(ranks):
    """A rank that is done goes on drawing nothing while the other is not: ranks that share experts sample together."""
    offered = [[[FRESH], [], []], [[EQUAL, FRESH], [EQUAL], [FRESH]]]
    first, second = ranks.run(_resample, [[EQUAL, MIXED], [OTHER, OTHER]], 3, offered, **Layout(2, 1).job)
    assert first == ([FRESH, MIXED], second[1], [(0, EQUAL)], [(0, [0]), (1, []), (2, [])])
    dropped = [(0, EQUAL), (1, OTHER), (0, EQUAL), (0, OTHER)]
    assert second == ([FRESH, FRESH], pytest.approx((3 + 1 + 1) / 4), dropped, [(0, [0, 1]), (1, [0]), (2, [0])])


def test_given_up(ranks):
    """Where a round is not sampled to its end there is no step to train on, on any rank."""
    offered = [[[FRESH], None], [[EQUAL, EQUAL], None]]
    for groups, _, _, asked in ranks.run(_resample, [[EQUAL, MIXED], [OTHER, OTHER]], 3, offered, **Layout(2, 1).job):
        assert groups is None and [number for number, _ in asked] == [0, 1]
