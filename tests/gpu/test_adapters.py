"""Adapters on a GPU, bf16, over transformer-engine's layers: engine = trainer, and exact merging."""

import pytest
import torch

from tests.tiny import make_prompts, make_sequences, write_family_checkpoint

pytestmark = pytest.mark.gpu

MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "llama"])
def checkpoint(one_rank, request, tmp_path_factory):
    return write_family_checkpoint(tmp_path_factory.mktemp(request.param) / "tiny", request.param)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pair"])
def test_adapters(checkpoint, tmp_path, merge):
    """After steps that moved the policy: engine and trainer agree to bf16's rounding, with captured steps; base weights
    are bit for bit the checkpoint's."""
    from megarl.models.build import ModelOptions, load_policy
    from megarl.models.lora import LoraOptions
    from megarl.packing.rows import TokenSequence, pack
    from megarl.rollout.engine import EngineOptions, RolloutEngine
    from megarl.rollout.sampling import SamplingOptions
    from megarl.training.trainer import OptimizerOptions, Trainer

    lora = LoraOptions(4, 8.0, MODULES, merge=merge)
    policy = load_policy(checkpoint, ModelOptions(torch.bfloat16, lora=lora))
    model = policy.model
    base = {name: p.clone() for name, p in model.named_parameters() if ".to_wrap." in name}
    assert len(base) >= 3 * 4
    trainer = Trainer(model, 1.0, 512)
    trainer.begin(OptimizerOptions(1e-2, total_updates=10))
    sizes = EngineOptions(32, 2048, 512, kv_cache_gb=0.5, block_size_tokens=64, cuda_graphs=True)
    engine = RolloutEngine(model, sizes, as_sampled=policy.as_sampled)
    prompts = make_prompts(tmp_path, checkpoint)
    rows = pack(make_sequences(prompts), 4096, model.merge_size)
    before = torch.cat(trainer.score(rows))
    for _ in range(3):
        trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.sum().detach()))
    moved = (torch.cat(trainer.score(rows)) - before).abs().mean()
    engine.weights_changed()
    groups = engine.generate(list(prompts.values()), SamplingOptions(16, (), 1.0), group_size=2)
    rollouts = [rollout for group in groups for rollout in group]
    scored = trainer.score(pack([TokenSequence(r.prompt, r.ids) for r in rollouts], 4096, model.merge_size))
    apart = (torch.cat(scored) - torch.cat([r.log_probs for r in rollouts])).abs()
    print(
        f"\n{checkpoint.parent.name}: engine - trainer max {apart.max():.2e} mean {apart.mean():.2e}, moved {moved:.2f}"
    )
    assert moved > 0.1 and apart.mean() < 1.5e-2
    for _ in range(100):
        with policy.merged():
            pass
    assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
