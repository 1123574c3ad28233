"""Rollouts of ranks that share prompts: who samples what, and that all have all of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed import TP1, Layout, lazy

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
    "layout",
    [
        Layout(2, 1),
        pytest.param(Layout(2, 2, sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(Layout(2, 1, context_parallel=2), marks=pytest.mark.slow),
    ],
    ids=lambda layout: layout.name,
)
def test_interrupted(ranks, checkpoint, prompts, layout):
    """One rank is asked to stop in mid-rollout, its peer may be done by then: both leave it and draw it again alike."""
    for before, interrupted, again, asked in ranks.run(_interrupted, checkpoint, list(prompts.values()), **layout.job):
        assert interrupted is None
        assert again == before and len(before) >= 4
        assert asked >= 2


def _interrupted(checkpoint, prompts):
    """Two of many prompts on the first of data-parallel ranks, all of them on the second."""
    rank, shared = torch.distributed.get_rank(), parallel_state.get_data_parallel_world_size() == 1
    sequence_parallel = parallel_state.get_tensor_model_parallel_world_size() > 1
    engine = policies.engine(policies.policy(checkpoint, sequence_parallel=sequence_parallel).model)
    mine = prompts if shared or rank == 1 else prompts[:2]
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
