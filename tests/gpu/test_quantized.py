"""Rollouts in eight bits on a GPU: FP8 products against the same numbers multiplied in float32, with captured steps."""

import pytest
import torch
import torch.nn.functional as F

from tests.tiny import make_prompts, make_sequences, write_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(one_rank, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tied=False)


def _engine(checkpoint, format, graphs):
    from megarl.models.build import ModelOptions, empty_copy, load_policy
    from megarl.parallel.engines import resharded_groups
    from megarl.rollout.engine import EngineOptions, RolloutEngine
    from megarl.rollout.quantized import Quantization
    from megarl.rollout.sync import ReshardedWeights

    policy = load_policy(checkpoint, ModelOptions(torch.bfloat16))
    groups = resharded_groups(1, 1, 1)
    copy = empty_copy(policy, checkpoint, ModelOptions(torch.bfloat16), groups.model)
    quantization = Quantization(copy, format)
    sizes = EngineOptions(32, 2048, 512, kv_cache_gb=0.5, block_size_tokens=64, cuda_graphs=graphs)
    engine = RolloutEngine(copy, sizes, groups.peers)
    sync = ReshardedWeights(engine, policy.model, True, arrived=quantization.quantize_weights)
    return policy, engine, quantization, sync


def _calibrate(engine, quantization, prompts):
    from megarl.rollout.sampling import SamplingOptions

    quantization.calibrate(lambda: engine.generate(prompts, SamplingOptions(1, ())))
    engine.weights_changed()


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_engine(checkpoint, tmp_path, format):
    """Captured or not, before and after an update: the mismatch is as small as on a CPU, and there is one."""
    from megarl.packing.rows import TokenSequence, pack
    from megarl.rollout.sampling import SamplingOptions
    from megarl.training.trainer import OptimizerOptions, Trainer

    prompts = make_prompts(tmp_path, checkpoint)
    for graphs in (False, True):
        policy, engine, quantization, sync = _engine(checkpoint, format, graphs)
        trainer = Trainer(policy.model, 1.0, 512)
        trainer.begin(OptimizerOptions(1e-2, total_updates=10))
        _calibrate(engine, quantization, list(prompts.values()))
        for _ in range(2):
            groups = engine.generate(list(prompts.values()), SamplingOptions(16, (), 1.0), group_size=2)
            rollouts = [rollout for group in groups for rollout in group]
            rows = pack([TokenSequence(r.prompt, r.ids) for r in rollouts], 4096, policy.model.merge_size)
            apart = (torch.cat(trainer.score(rows)) - torch.cat([r.log_probs for r in rollouts])).abs()
            print(f"\n{format}, graphs {graphs}: mismatch max {apart.max():.2e} mean {apart.mean():.2e}")
            assert 5e-3 < apart.mean() < 0.15
            rows = pack(make_sequences(prompts), 4096, policy.model.merge_size)
            trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.sum().detach()))
            sync()


def test_products(checkpoint, tmp_path):
    """Each layer's product is that of the rounded numbers, to bf16's rounding of the result."""
    from megarl.rollout.fp8 import LARGEST
    from megarl.rollout.sampling import SamplingOptions

    prompts = make_prompts(tmp_path, checkpoint)
    policy, engine, quantization, _ = _engine(checkpoint, "fp8", False)
    _calibrate(engine, quantization, list(prompts.values()))
    trained, seen = dict(policy.model.language_model.named_modules()), []

    def rounded(values, amax):
        scale = amax / LARGEST
        return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale

    for name, product in quantization._fp8.items():
        multiply = product._multiply

        def compare(x, quantizer, name=name, multiply=multiply):
            out, weight = multiply(x, quantizer), trained[name].weight.float()
            expected = F.linear(rounded(x.float(), quantizer.amax.float()), rounded(weight, weight.abs().max()))
            seen.append(((out - expected).abs().max() / expected.abs().max()).item())
            return out

        product._multiply = compare
    engine.generate(list(prompts.values())[:3], SamplingOptions(4, ()))
    assert len(seen) >= 4 * 12
    assert max(seen) < 2**-7
