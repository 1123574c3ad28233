"""Rollouts of a policy with adapters, merged and as a pair: engine = trainer, whose weights stay its own."""

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.rollout.test_engine import TOLERANCE, _scored, largest
from tests.rollout.test_sync import Engines

policies = lazy("tests.policies")
lora = lazy("megarl.models.lora")
spread = lazy("megarl.rollout.spread")

MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def _sampled(checkpoint, prompts, layout, engines, merge):
    """How far engine and trainer are apart before and after two updates, how far these moved the policy, and whether
    sampling left all weights as they were."""
    options = lora.LoraOptions(4, 8.0, MODULES, merge=merge)
    parts = policies.parts(checkpoint, layout, engines, lora=options)
    batch = [prompts[place] for place in range(len(prompts))]
    apart, samples = [], []
    for _ in range(3):
        before = {name: p.clone() for name, p in parts.policy.model.named_parameters()}
        groups = spread.generate_spread(parts.engine, batch, policies.sampling(), 1, list(range(len(batch))))
        same = all(torch.equal(p, before[name]) for name, p in parts.policy.model.named_parameters())
        scored = _scored(parts.trainer, groups)
        apart.append(max(largest(engine - trainer) for group in scored for _, engine, trainer in group))
        samples.append([rollout.ids for group in groups for rollout in group])
        policies.one_update(parts.trainer, tiny.make_sequences(dict(enumerate(prompts))))
        parts.sync()
    moved = not all(torch.equal(a, b) for a, b in zip(samples[0], samples[2], strict=True))
    return max(apart), moved, same


CASES = {
    "tp1": (TP1, None),
    "tp2-sp": (TP2_SP, None),
    "tp2 to tp1": (TP2, Engines()),
    "dp2 to tp2": (Layout(2, 1), Engines(2)),
}
SLOW = {("tp1", False), ("tp2-sp", True), ("dp2 to tp2", True)}


@pytest.mark.parametrize(
    "layout, engines, merge",
    [
        pytest.param(
            *layouts,
            merge,
            id=f"{name}, {'merged' if merge else 'pair'}",
            marks=[pytest.mark.slow] * ((name, merge) in SLOW),
        )
        for name, layouts in CASES.items()
        for merge in (True, False)
    ],
)
def test_engine_is_trainer(ranks, checkpoint, prompts, layout, engines, merge):
    batch = list(prompts.values())
    for apart, moved, same in ranks.run(_sampled, checkpoint, batch, layout, engines, merge, **layout.job):
        assert apart < TOLERANCE
        assert moved and same
