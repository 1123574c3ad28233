"""Weights that are resharded into another rollout layout: engine = trainer = transformers, before and after a step."""

from dataclasses import dataclass

import pytest
import torch

from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.rollout.test_engine import TOLERANCE, _scored, largest
from tests.rollout.test_moe import packed

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")
spread = lazy("megarl.rollout.spread")
sync = lazy("megarl.rollout.sync")


@dataclass(frozen=True)
class Engines:
    """The layout of the engines."""

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1

    def __str__(self) -> str:
        return str(Layout(0, **vars(self)))


DENSE = [
    (TP2, Engines()),
    (TP2_SP, Engines()),
    (Layout(2, 1), Engines(2)),
    (Layout(2, 1, context_parallel=2), Engines(2)),
    (Layout(4, 2), Engines()),
    (Layout(4, 1), Engines(2, True)),
    (Layout(4, 1, context_parallel=4), Engines(2)),
    (Layout(4, 2, True, context_parallel=2), Engines()),
]
MIXTURE = [
    (Layout(2, 1, expert_parallel=2), Engines()),
    (Layout(2, 1), Engines(expert_parallel=2)),
    (TP2_SP, Engines()),
    (Layout(2, 1), Engines(2, True, expert_tensor_parallel=2)),
    (Layout(4, 2, True, expert_parallel=4), Engines(expert_parallel=2)),
    (Layout(4, 2, True, expert_tensor_parallel=2, expert_parallel=2), Engines(expert_parallel=4)),
]


def _cases(layouts, *quick):
    for layout, engines in layouts:
        name = f"{layout} to {engines}"
        yield pytest.param(
            layout,
            engines,
            id=f"{name} on {layout.world_size}",
            marks=[] if (layout, engines) in quick else pytest.mark.slow,
        )


@pytest.mark.parametrize("layout, engines", _cases(DENSE, *DENSE[1:3]))
def test_log_probs(ranks, checkpoint, prompts, reference, layout, engines):
    _compare(ranks, checkpoint, prompts, reference, layout, engines)


@pytest.mark.parametrize("layout, engines", _cases(MIXTURE, MIXTURE[0]))
def test_log_probs_of_a_mixture(ranks, mixture_checkpoint, prompts, mixture_reference, layout, engines):
    _compare(ranks, mixture_checkpoint, prompts, mixture_reference, layout, engines)


def _compare(ranks, checkpoint, prompts, reference, layout, engines):
    """A mixed batch, groups of 2: what one rank alone samples, and its log-probabilities everywhere."""
    batch = list(prompts.values())
    ((alone, _, _),) = ranks.run(_sample_and_score, checkpoint, batch, TP1, None, **TP1.job)
    seen = set()
    for groups, moved, steps in ranks.run(_sample_and_score, checkpoint, batch, layout, engines, **layout.job):
        for place, group in groups.items():
            for (ids, engine, trainer), (same, _, _) in zip(group, alone[place], strict=True):
                assert torch.equal(ids, same)
                expected = reference.log_probs(batch[place], ids)[0]
                assert largest(engine - expected) < TOLERANCE
                assert largest(trainer - expected) < TOLERANCE
        assert moved < TOLERANCE
        assert steps > 0.01  # the step was seen: stale weights would be too
        seen |= groups.keys()
    assert seen == set(range(len(batch)))


def _sample_and_score(checkpoint, prompts, layout, engines):
    """By the place of the prompt: (ids, engine's log-probabilities, trainer's) of each rollout that this rank trains
    on; how far the engine is from the trainer after an update, and how far that moved the trainer."""
    parts = policies.parts(checkpoint, layout, engines)
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    places = [place for r in parts.data_parallel_ranks for place in range(len(prompts))[r::size]]
    mine = range(len(prompts))[rank::size]

    def sample():
        batch, keys = [prompts[place] for place in places], [7 * place for place in places]
        groups = spread.generate_spread(parts.engine, batch, policies.sampling(), 2, keys)
        groups = [group for place, group in zip(places, groups, strict=True) if place in mine]
        return _scored(parts.trainer, groups), groups

    scored, groups = sample()
    sequences = [packed(r) for group in groups for r in group]
    before = policies.score(parts.trainer, sequences)
    policies.one_update(parts.trainer, sequences)
    steps = max(largest(a - b) for a, b in zip(policies.score(parts.trainer, sequences), before, strict=True))
    parts.sync()
    moved = max(largest(e - t) for group in sample()[0] for _, e, t in group)
    return dict(zip(mine, scored, strict=True)), moved, steps
