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
errors = lazy("megarl.errors")
reference = lazy("megarl.training.reference")
engine_groups = lazy("megarl.parallel.engines")


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


# Syncs that are broken


def _refusals(checkpoint, layout, engines, breakage):
    """What `verify_sync` says on this rank after a whole sync and after a broken one."""
    parts = policies.parts(checkpoint, layout, engines)
    model, answers = parts.engine.model, []
    parts.sync()
    parts.trainer.model.requires_grad_(False)
    for tensor in parts.trainer.model.parameters():
        tensor.mul_(1.5)
    globals()[breakage](parts.sync, dict(model.named_parameters()))
    for _ in range(2):
        try:
            parts.sync()
        except errors.CheckFailed as error:
            answers.append(str(error))
    return answers


def _skipped(sync, _):
    """One tensor of rank 1's module is left out of the plan."""
    name = "vision_model.merger.linear_fc1.weight"
    plan = sync._plan
    left_out = {op.task_id for op in plan.recv_ops if op.param_name == name} if torch.distributed.get_rank() else set()
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, left_out)
    left_out = set().union(*everyone)
    for operations in (plan.recv_ops, plan.send_ops):
        operations[:] = [op for op in operations if op.task_id not in left_out]
    assert left_out


def _spoiled(sync, parameters):
    """The last bit of one number on rank 1."""
    transfer = sync._transfer

    def spoil():
        transfer()
        if torch.distributed.get_rank() == 1:
            bits = parameters["language_model.decoder.layers.2.mlp.linear_fc2.weight"].data.view(torch.int32)
            bits[-1, -1] ^= 1

    sync._transfer = spoil


def _halves_exchanged(sync, parameters):
    """The two matrices of a gated MLP, of the same shape and type, in the wrong order, on both ranks."""
    transfer = sync._transfer

    def exchange():
        transfer()
        weight = parameters["language_model.decoder.layers.1.mlp.linear_fc1.weight"].data
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))

    sync._transfer = exchange


def _experts_exchanged(sync, parameters):
    transfer = sync._transfer

    def exchange():
        transfer()
        if torch.distributed.get_rank() == 1:
            one, other = (
                parameters[f"language_model.decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc2.weight"].data
                for i in (1, 2)
            )
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)

    sync._transfer = exchange


BROKEN = {
    "_skipped": (TP2_SP, Engines(), "vision_model.merger.linear_fc1.weight on rank 1"),
    "_spoiled": (TP2_SP, Engines(), "language_model.decoder.layers.2.mlp.linear_fc2.weight on rank 1"),
    "_halves_exchanged": (
        Layout(2, 1),
        Engines(2),
        "language_model.decoder.layers.1.mlp.linear_fc1.weight on ranks 0, 1",
    ),
    "_experts_exchanged": (
        Layout(2, 1, expert_parallel=2),
        Engines(),
        "language_model.decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight on rank 1",
    ),
}


@pytest.mark.parametrize("breakage", BROKEN)
def test_what_differs_is_named(ranks, checkpoint, mixture_checkpoint, breakage):
    layout, engines, named = BROKEN[breakage]
    folder = mixture_checkpoint if "experts" in breakage else checkpoint
    expected = f"rollout.verify_sync: the engine has other weights than the trainer: {named}"
    for answers in ranks.run(_refusals, folder, layout, engines, breakage, **layout.job):
        assert answers == [expected] * 2


def _plan_of(checkpoint, layout, engines):
    """A sync of a plan that takes a gated matrix for one: the marks of Megatron's layers are wrong."""
    from megatron.core.transformer.mlp import MLP

    stock = MLP.__init__

    def unmarked(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.linear_fc1.weight.partition_stride = 1

    MLP.__init__ = unmarked
    try:
        policies.parts(checkpoint, layout, engines)
    except errors.CheckFailed as error:
        return str(error)
    finally:
        MLP.__init__ = stock


def test_a_wrong_plan_is_seen(ranks, checkpoint):
    for answer in ranks.run(_plan_of, checkpoint, TP2, Engines(), **TP2.job):
        assert answer.endswith("language_model.decoder.layers.0.mlp.linear_fc1.weight on ranks 0, 1")


def _another_module(checkpoint):
    """Trainer and engine are said to share a module and do not."""
    trained, other = (policies.policy(checkpoint).model for _ in range(2))
    whole = sync.SharedWeights(policies.engine(trained), trained, True)
    whole()
    assert whole.bytes == 0
    with pytest.raises(errors.CheckFailed, match=r"vision_model\.patch_embed\.proj\.weight on rank 0"):
        sync.SharedWeights(policies.engine(other), trained, True)()


def test_shared_weights_are_the_same_memory(ranks, checkpoint):
    ranks.run(_another_module, checkpoint)


# What else touches weights


def _around(checkpoint, layout, engines):
    """The engine's weights while the reference policy is swapped in, and the bytes of a sync over all ranks."""
    parts = policies.parts(checkpoint, layout, engines)
    weights = {name: p.clone() for name, p in parts.engine.model.named_parameters()}
    kept = reference.ReferencePolicy(parts.policy.model)
    parts.trainer.model.requires_grad_(False)
    places = {name: p.data_ptr() for name, p in parts.engine.model.named_parameters()}
    for tensor in parts.policy.model.parameters():
        tensor.mul_(2)
    parts.sync()
    with kept.swapped_in():
        for name, tensor in parts.engine.model.named_parameters():
            assert torch.equal(tensor, 2 * weights[name]), name
    assert places == {name: p.data_ptr() for name, p in parts.engine.model.named_parameters()}  # CUDA graphs know them
    return parts.sync.bytes, sum(p.nbytes for p in parts.engine.model.parameters())


def test_engine_keeps_its_weights_while_the_reference_scores(ranks, checkpoint):
    answers = ranks.run(_around, checkpoint, TP2_SP, Engines(), **TP2_SP.job)
    total = sum(held for _, held in answers)
    assert [moved for moved, _ in answers] == [total] * 2


def _groups(engines):
    groups = engine_groups.resharded_groups(engines.tensor_parallel, 1, 1)
    return torch.distributed.get_process_group_ranks(groups.peers), list(groups.data_parallel_ranks)


@pytest.mark.parametrize(
    "layout, tensor_parallel, peers, data_parallel_ranks",
    [
        (Layout(4, 2), 1, [[0, 1], [0, 1], [2, 3], [2, 3]], [[0], [0], [1], [1]]),
        (Layout(4, 1, context_parallel=4), 2, [[0, 2], [1, 3], [0, 2], [1, 3]], [[0]] * 4),
        (Layout(4, 1), 2, [[0], [1], [2], [3]], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (Layout(4, 1, context_parallel=2), 4, [[0], [1], [2], [3]], [[0, 1]] * 4),
    ],
    ids=str,
)
def test_who_samples_whose_prompts(ranks, layout, tensor_parallel, peers, data_parallel_ranks):
    answers = ranks.run(_groups, Engines(tensor_parallel), **layout.job)
    assert [list(a) for a, _ in answers] == peers
    assert [b for _, b in answers] == data_parallel_ranks
