"""Rollouts of ranks that share prompts: who samples what, and that all have all of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed import TP1, Layout, lazy
from tests.rollout.test_sync import Engines

policies = lazy("tests.policies")
spread = lazy("megarl.rollout.spread")
parallel_state = lazy("megatron.core.parallel_state")

LAYOUTS = [Layout(2, 1, context_parallel=2), Layout(4, 2, sequence_parallel=True, context_parallel=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_rank_has_all_rollouts_and_sampled_a_part(ranks, checkpoint, prompts, layout):
    """The rollouts of one rank alone, in its order, on every rank; the engines' shares are disjoint and even."""
    batch, keys = list(prompts.values()), [3 * i + 1 for i in range(len(prompts))]
    ((alone, _, _),) = ranks.run(_rollouts, checkpoint, batch, keys, TP1, **TP1.job)
    answers = ranks.run(_rollouts, checkpoint, batch, keys, layout, **layout.job)
    sampled = {}
    for rollouts, context_rank, count in answers:
        for (ids, log_probs), (expected_ids, expected) in zip(rollouts, alone, strict=True):
            assert ids == expected_ids
            assert log_probs == pytest.approx(expected, abs=1e-5)
        sampled[context_rank] = count
    assert sum(sampled.values()) == 2 * len(batch)
    assert max(sampled.values()) - min(sampled.values()) <= 2


def _rollouts(checkpoint, prompts, keys, layout):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    engine = policies.engine(policy.model, enable_prefix_caching=True)
    groups = spread.generate_spread(engine, prompts, policies.sampling(6), 2, keys)
    flat = [(r.ids.tolist(), r.log_probs.tolist()) for group in groups for r in group]
    done = engine._engine.completions.count.numel()
    return flat, parallel_state.get_context_parallel_rank(), done


@pytest.mark.parametrize(
    "layout, engines",
    [
        (Layout(2, 1), None),
        pytest.param(Layout(2, 2, sequence_parallel=True), None, marks=pytest.mark.slow),
        pytest.param(Layout(2, 1, context_parallel=2), None, marks=pytest.mark.slow),
        pytest.param(Layout(2, 1), Engines(2), marks=pytest.mark.slow),
        pytest.param(Layout(4, 1), Engines(2), marks=pytest.mark.slow),
        pytest.param(Layout(2, 2), Engines(), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else str(value),
)
def test_interrupted(ranks, checkpoint, prompts, layout, engines):
    """One rank is asked to stop in mid-rollout, its peer may be done by then: both leave it and draw it again alike;
    also where one engine samples for both, or two engines sample for one."""
    batch = list(prompts.values())
    for before, interrupted, again, asked in ranks.run(_interrupted, checkpoint, batch, layout, engines, **layout.job):
        assert interrupted is None
        assert again == before and len(before) >= 4
        assert asked >= 2


def _interrupted(checkpoint, prompts, layout, engines):
    """Two of many prompts where the first of data-parallel ranks samples for itself, else all of them."""
    rank, parts = torch.distributed.get_rank(), policies.parts(checkpoint, layout, engines)
    engine, alone = parts.engine, len(parts.data_parallel_ranks) == 1 < parallel_state.get_data_parallel_world_size()
    mine = prompts[:2] if alone and rank == 0 else prompts
    asked = []

    def stop():
        asked.append(True)
        return rank == 1 and len(asked) > 1

    def rollouts(interrupted):
        groups = spread.generate_spread(engine, mine, policies.sampling(40, ()), 2, list(range(len(mine))), interrupted)
        return groups and [r.ids.tolist() for group in groups for r in group]

    return rollouts(lambda: False), rollouts(stop), rollouts(lambda: False), len(asked)


@pytest.mark.ranks(1)
@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 6))
def test_shares_are_even(lengths, count):
    owners = spread.spread(lengths, count)
    shares = [[n for n, owner in zip(lengths, owners, strict=True) if owner == rank] for rank in range(count)]
    sizes = [len(share) for share in shares]
    assert sum(sizes) == len(lengths) and max(sizes) - min(sizes) <= 1
    if len(lengths) % (2 * count) == 0 and lengths:
        assert max(map(sum, shares)) - min(map(sum, shares)) <= max(lengths) - min(lengths)
