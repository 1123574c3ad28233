"""A mixture of experts in the engine: engine = trainer = transformers, and ranks that share experts but not work."""

import pytest
import torch

from tests.distributed import TP1, TP2_SP, Layout, lazy
from tests.rollout.test_engine import BOTH, TOLERANCE, _scored, largest

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")
spread = lazy("megarl.rollout.spread")

EP2 = Layout(2, 1, expert_parallel=2)
EP4 = Layout(4, 1, expert_parallel=4)
MODES = {"plain": {}, "both": BOTH}
CASES = [
    (TP1, "both"),
    (EP2, "both"),
    (TP2_SP, "plain"),
    (Layout(2, 2, sequence_parallel=True, expert_tensor_parallel=2), "both"),
    (Layout(2, 2, sequence_parallel=True, expert_parallel=2), "plain"),
    (Layout(4, 2, sequence_parallel=True, expert_parallel=4), "both"),
    (Layout(4, 2, sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=2), "plain"),
]
"""What a mode does is the same in every layout."""
QUICK = CASES[:2]


@pytest.mark.parametrize(
    "layout, mode",
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_log_probs(ranks, mixture_checkpoint, prompts, mixture_reference, layout, mode):
    """Sampled tokens of a mixed batch, groups of 2, spread over the data-parallel ranks: the same log-probability
    everywhere, and the tokens that one rank alone samples."""
    batch = list(prompts.values())
    ((alone, _),) = ranks.run(_sample_and_score, mixture_checkpoint, batch, TP1, MODES[mode], **TP1.job)
    seen = set()
    for groups, moved in ranks.run(_sample_and_score, mixture_checkpoint, batch, layout, MODES[mode], **layout.job):
        for place, group in groups.items():
            for (ids, engine, trainer), (same, _, _) in zip(group, alone[place], strict=True):
                assert torch.equal(ids, same)
                expected = mixture_reference.log_probs(batch[place], ids)[0]
                assert largest(engine - expected) < TOLERANCE
                assert largest(trainer - expected) < TOLERANCE
        assert moved < TOLERANCE
        seen |= groups.keys()
    assert seen == set(range(len(batch)))


def _sample_and_score(checkpoint, prompts, layout, mode):
    """By the place of the prompt: (ids, engine's log-probabilities, trainer's) of each rollout; and how far the engine
    is from the trainer after an update."""
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, **mode)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(range(len(prompts)))[rank::size]
    batch = [prompts[place] for place in mine]
    groups = engine.generate(batch, policies.sampling(), 2, keys=[7 * place for place in mine])
    scored = _scored(trainer, groups)
    policies.one_update(trainer, [packed(r) for group in groups for r in group])
    engine.weights_changed()
    again = _scored(trainer, engine.generate(batch, policies.sampling(), 2))
    moved = max(largest(e - t) for group in again for _, e, t in group)
    return dict(zip(mine, scored, strict=True)), moved


def packed(rollout):
    from megarl.packing.rows import TokenSequence

    return TokenSequence(rollout.prompt, rollout.ids)


@pytest.mark.parametrize(
    "layout, shares",
    [
        pytest.param(EP2, (1, 7), marks=pytest.mark.slow),
        (EP2, (9, 0)),
        (EP2, (0, 0)),
        pytest.param(EP4, (0, 3, 0, 5), marks=pytest.mark.slow),
        pytest.param(EP4, (9, 0, 0, 0), marks=pytest.mark.slow),
        pytest.param(Layout(4, 1, expert_parallel=2), (1, 7, 2, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_unequal_work(ranks, mixture_checkpoint, prompts, layout, shares):
    """Ranks that share experts have different numbers of requests, of different lengths, or none: all end, each with
    what it samples alone; a second call and a training step follow at once."""
    batch = [*prompts.values()][: max(shares)]
    ((alone, *_),) = ranks.run(_share, mixture_checkpoint, batch, (max(shares),), **TP1.job)
    for rank, (rollouts, steps, idle) in enumerate(ranks.run(_share, mixture_checkpoint, batch, shares, **layout.job)):
        count = shares[rank]
        assert [ids for ids, _ in rollouts] == [ids for ids, _ in alone[: 2 * count]]
        for (_, found), (_, expected) in zip(rollouts, alone, strict=False):
            assert found == pytest.approx(expected, abs=TOLERANCE)
        first = rank // layout.expert_parallel * layout.expert_parallel
        together = shares[first : first + layout.expert_parallel]
        assert (steps > 0) == (max(together) > 0)
        assert idle == (steps if count == 0 else idle)


def _share(checkpoint, prompts, shares):
    """Rollouts of this rank's first prompts, twice, the second time in pieces of 3 steps with the weights declared
    changed in between; and the forward passes of the first time, all and idle ones."""
    policy = policies.policy(checkpoint)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, max_requests=4, **BOTH)
    rank = torch.distributed.get_rank()
    batch = prompts[: shares[rank]]
    counts = {"_forward": 0, "dummy_forward": 0}
    wrapper = engine._engine.controller.inference_wrapped_model
    for owner, name in ((wrapper, "_forward"), (engine._engine.controller, "dummy_forward")):
        _count(owner, name, counts)
    sampling = policies.sampling(max_new_tokens=12)
    groups = engine.generate(batch, sampling, 2)
    steps, idle = counts["_forward"], counts["dummy_forward"]
    engine.weights_changed()
    engine.start(batch, sampling, 2)
    while not engine.advance(max_steps=3):
        engine.weights_changed()
    again = engine.collect()
    if max(shares):
        policies.one_update(trainer, [packed(r) for group in groups for r in group] or [_nothing(prompts)])
    rollouts = [(r.ids.tolist(), r.log_probs.tolist()) for group in groups for r in group]
    assert [r.ids.tolist() for group in again for r in group] == [ids for ids, _ in rollouts]
    return rollouts, steps, idle


def _nothing(prompts):
    from megarl.packing.rows import TokenSequence

    return TokenSequence(prompts[0], torch.tensor([20]))


def _count(owner, name, counts):
    stock = getattr(owner, name)

    def counted(*args, **kwargs):
        counts[name] += 1
        return stock(*args, **kwargs)

    setattr(owner, name, counted)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 1, context_parallel=2, expert_parallel=2),
        pytest.param(Layout(4, 1, context_parallel=2, expert_parallel=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_context_parallel_ranks_share_experts(ranks, mixture_checkpoint, prompts, layout):
    """One prompt for two engines, then three: each rank has all rollouts of its context-parallel group."""
    batch = list(prompts.values())[:3]
    ((alone, _),) = ranks.run(_spread, mixture_checkpoint, batch, **TP1.job)
    for rollouts, done in ranks.run(_spread, mixture_checkpoint, batch, **layout.job):
        assert rollouts == alone
        assert sum(done) < len(alone)


def _spread(checkpoint, prompts):
    policy = policies.policy(checkpoint)
    engine, found, done = policies.engine(policy.model), [], []
    for batch in (prompts[:1], prompts):
        groups = spread.generate_spread(engine, batch, policies.sampling(6), 2, list(range(len(batch))))
        found += [r.ids.tolist() for group in groups for r in group]
        done.append(engine._engine.completions.count.numel())
    return found, done
