"""The experts that a rollout brings along, against those that transformers' routers choose for its tokens."""

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, Layout, lazy
from tests.rollout.test_engine import BOTH

policies = lazy("tests.policies")
router_replay = lazy("megarl.models.router_replay")
parallel_state = lazy("megatron.core.parallel_state")
spread = lazy("megarl.rollout.spread")

EP2 = Layout(2, 1, expert_parallel=2)
TP2_EP2 = Layout(2, 2, sequence_parallel=True, expert_parallel=2)
MODES = {"plain": {}, "both": BOTH}
CASES = [
    (TP1, "both"),
    (EP2, "both"),
    (TP2_EP2, "plain"),
    (Layout(2, 2, sequence_parallel=True, expert_tensor_parallel=2), "both"),
    (Layout(4, 2, sequence_parallel=True, expert_parallel=2, expert_tensor_parallel=2), "plain"),
]
QUICK = CASES[:3]
LAYERS, TOP_K = 3, 2
CLOSE = 1e-4
"""Logits of a router that are this close to each other may be in either order."""


def chosen_by_transformers(reference, prompt, completion):
    """Of each token: its experts in ascending order `[tokens, layers, 2]`; and how far, in logits, the last chosen one
    is ahead of the first that was not, `[tokens, layers]`."""
    logits = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: logits.append(output[0].detach()))
        for layer in reference.model.get_decoder().layers
    ]
    with torch.no_grad():
        reference.logits(prompt, completion)
    for hook in hooks:
        hook.remove()
    ordered, experts = torch.stack(logits, 1).sort(-1, descending=True)
    return experts[..., :TOP_K].sort(-1).values, ordered[..., TOP_K - 1] - ordered[..., TOP_K]


def assert_chosen(found, reference, prompt, ids):
    expected, ahead = chosen_by_transformers(reference, prompt, ids)
    assert found.dtype is torch.uint8 and found.shape == (prompt.ids.numel() + ids.numel() - 1, LAYERS, TOP_K)
    clear = ahead[:-1] > CLOSE
    assert clear.float().mean() > 0.99
    assert torch.equal(found.long().sort(-1).values[clear], expected[:-1][clear])


@pytest.mark.parametrize(
    "layout, mode",
    [pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_recorded(ranks, mixture_checkpoint, prompts, mixture_reference, layout, mode):
    """Of every token but the last, of prompts that were computed, shared or cut in chunks; a second generation finds
    the prompts in the prefix cache."""
    batch = list(prompts.values())
    seen = {}
    for found, again, _ in ranks.run(_recorded, mixture_checkpoint, batch, layout, MODES[mode], **layout.job):
        for place, group in found.items():
            for (ids, routing), (same, from_cache) in zip(group, again[place], strict=True):
                assert_chosen(routing, mixture_reference, batch[place], ids)
                assert torch.equal(same, ids) and torch.equal(from_cache.sort(-1).values, routing.sort(-1).values)
        seen |= found
    assert seen.keys() == set(range(len(batch)))


def test_evicted(ranks, mixture_checkpoint, prompts, mixture_reference):
    """What is computed again is recorded again, into other blocks."""
    batch = list(prompts.values())
    mode = {"kv_cache_gb": 0.0006, **BOTH}
    ((found, _, evicted),) = ranks.run(_recorded, mixture_checkpoint, batch, TP1, mode, 40)
    assert evicted > 0
    for place, group in found.items():
        for ids, routing in group:
            assert_chosen(routing, mixture_reference, batch[place], ids)


def _recorded(checkpoint, prompts, layout, mode, new_tokens=10):
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel, router_replay=True)
    engine = policies.engine(policy.model, **mode)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = list(range(len(prompts)))[rank::size]

    def sample():
        sampling = policies.sampling(new_tokens)
        groups = engine.generate([prompts[i] for i in mine], sampling, 2, keys=[7 * i for i in mine])
        return {i: [(r.ids, r.routing_indices) for r in group] for i, group in zip(mine, groups, strict=True)}

    found = sample()
    for layer in router_replay.layer_replays(policy.model):
        assert layer.router_replay_action is None  # a training forward begins as one without replay
    return found, sample(), engine._engine.evicted_request_count


def test_new_weights_in_mid_generation(ranks, mixture_checkpoint, prompts):
    """A request that began under old weights begins again under the new ones, and has their routing, all of it: the
    trainer's routers, asked afterwards, would choose nothing else.  They would have chosen otherwise before."""
    batch = [prompts[name] for name in ("text", "image", "long_text")]
    ((before, after),) = ranks.run(_updated_in_mid_generation, mixture_checkpoint, batch)
    assert before > 0.01 and after == 0


def _updated_in_mid_generation(checkpoint, prompts):
    policy = policies.policy(checkpoint, router_replay=True)
    trainer, engine = policies.trainer(policy.model, learning_rate=3e-2), policies.engine(policy.model, **BOTH)
    sequences = tiny.make_sequences(dict(enumerate(prompts)))
    old = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    engine.start(prompts, policies.sampling(stop_ids=()), 2)
    assert not engine.advance(max_steps=9)
    policies.one_update(trainer, sequences)
    engine.weights_changed()
    engine.advance()
    rollouts = [rollout for group in engine.collect() for rollout in group]
    replayed = [type(sequences[0])(r.prompt, r.ids, r.routing_indices) for r in rollouts]
    policies.score(trainer, replayed)
    after = trainer.rerouted()
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            p.copy_(old[name])
    policies.score(trainer, replayed)
    return trainer.rerouted(), after


def test_nothing_is_recorded_unasked(ranks, mixture_checkpoint, checkpoint, prompts):
    assert ranks.run(_unasked, mixture_checkpoint, prompts["image"]) == [None]
    assert ranks.run(_unasked, checkpoint, prompts["image"]) == [None]


def _unasked(checkpoint, prompt):
    engine = policies.engine(policies.policy(checkpoint).model)
    ((rollout,),) = engine.generate([prompt], policies.sampling())
    return rollout.routing_indices


def test_context_parallel_ranks_have_all_of_it(ranks, mixture_checkpoint, prompts, mixture_reference):
    """Each samples a part of the prompts, and gets the others' experts with the others' tokens."""
    batch = [prompts[name] for name in ("text", "image", "video")]
    layout = Layout(2, 1, context_parallel=2, expert_parallel=2)
    for rollouts in ranks.run(_spread, mixture_checkpoint, batch, **layout.job):
        assert len(rollouts) == 3
        for prompt, (ids, routing) in zip(batch, rollouts, strict=True):
            assert_chosen(routing, mixture_reference, prompt, ids)


def _spread(checkpoint, prompts):
    policy = policies.policy(checkpoint, router_replay=True)
    engine = policies.engine(policy.model)
    groups = spread.generate_spread(engine, prompts, policies.sampling(6), 1, list(range(len(prompts))))
    return [(rollout.ids, rollout.routing_indices) for (rollout,) in groups]
