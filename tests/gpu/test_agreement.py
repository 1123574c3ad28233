"""On a GPU, bf16: engine, trainer and transformers agree as well as transformers agrees with itself in fp32."""

import pytest
import torch

from tests.tiny import make_prompts, make_sequences, media, media_kinds, write_checkpoint

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(one_rank, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), tied=False)


@pytest.fixture
def policy(checkpoint):
    """A model of its own for each test: captured graphs belong to one engine."""
    from megarl.models.build import ModelOptions, load_policy

    return checkpoint, load_policy(checkpoint, ModelOptions(torch.bfloat16))


def _transformers(folder, sequences, dtype, weights_dtype=torch.bfloat16):
    """Log-probabilities of the completions; weights rounded to bf16 in both precisions, as the policy's are."""
    from transformers import Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=weights_dtype).to(dtype).cuda().eval()
    out = []
    for prompt, completion in sequences:
        ids = torch.cat([prompt.ids, completion])[None].cuda()
        kinds = torch.zeros_like(ids)
        kinds[:, : prompt.ids.numel()] = media_kinds(prompt)
        arguments = {name: value.cuda() for name, value in media(prompt).items()}
        for name in arguments.keys() & {"pixel_values", "pixel_values_videos"}:
            arguments[name] = arguments[name].to(dtype)
        with torch.no_grad():
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=kinds,
                use_cache=False,
                **arguments,
            ).logits
        log_probs = logits[0, prompt.ids.numel() - 1 : -1].float().log_softmax(-1)
        out.append(log_probs.gather(1, completion.cuda()[:, None])[:, 0].cpu())
    return torch.cat(out)


def _engine(model, chunked: bool, **options):
    from megarl.rollout.engine import EngineOptions, RolloutEngine

    return RolloutEngine(
        model,
        EngineOptions(
            max_requests=32,
            max_tokens_per_step=128 if chunked else 2048,
            max_sequence_length=512,
            kv_cache_gb=0.5,
            block_size_tokens=64,
            enable_prefix_caching=chunked,
            enable_chunked_prefill=chunked,
            cuda_graphs=True,
            **options,
        ),
    )


@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "prefix-cache-and-chunks"])
def test_engine_trainer_and_transformers_agree(policy, tmp_path, chunked):
    from megarl.packing.rows import TokenSequence, pack
    from megarl.rollout.sampling import SamplingOptions
    from megarl.training.trainer import Trainer

    folder, loaded = policy
    prompts = list(make_prompts(tmp_path, folder).values())
    engine = _engine(loaded.model, chunked)
    groups = engine.generate(prompts, SamplingOptions(NEW_TOKENS, (), 1.0), group_size=2)
    # transformers looks for media by id and refuses a sampled media token.
    tokens = {i for prompt in prompts for i in prompt.ids[prompt.media_mask].tolist()}
    rollouts = [r for group in groups for r in group if not tokens & set(r.ids.tolist())]
    assert {item.kind for r in rollouts for item in r.prompt.items} == {"image", "video"}
    assert len(rollouts) > len(prompts) / 2
    sampled = torch.cat([r.log_probs for r in rollouts])
    rows = pack([TokenSequence(r.prompt, r.ids) for r in rollouts], 4096, loaded.model.merge_size)
    trained = torch.cat(Trainer(loaded.model, 1.0, 512).score(rows))
    pairs = [(r.prompt, r.ids) for r in rollouts]
    exact, half = _transformers(folder, pairs, torch.float32), _transformers(folder, pairs, torch.bfloat16)
    own = (half - exact).abs()
    print()
    for name, difference in {
        "engine - trainer": sampled - trained,
        "engine - transformers fp32": sampled - exact,
        "trainer - transformers fp32": trained - exact,
        "transformers bf16 - fp32": half - exact,
    }.items():
        print(f"{name:30} max {difference.abs().max():.2e} mean {difference.abs().mean():.2e}")
    assert (sampled - trained).abs().mean() < own.mean()
    assert (sampled - exact).abs().mean() < 1.5 * own.mean()
    assert (trained - exact).abs().mean() < 1.5 * own.mean()


@pytest.mark.parametrize("chunked", [False, True], ids=["plain", "prefix-cache-and-chunks"])
def test_suspended_in_mid_generation(policy, tmp_path, chunked):
    """The engine sleeps between steps while the trainer runs on the same module, with room for few features: the
    tokens are those of an undisturbed run."""
    from megarl.packing.rows import pack
    from megarl.rollout.sampling import SamplingOptions
    from megarl.training.trainer import OptimizerOptions, Trainer

    folder, loaded = policy
    prompts = make_prompts(tmp_path, folder)
    trainer = Trainer(loaded.model, 1.0, 512)
    trainer.begin(OptimizerOptions(1e-3, total_updates=10))
    engine = _engine(loaded.model, chunked, vision_cache_bytes=16 * loaded.model.feature_row_bytes)
    sampling = SamplingOptions(NEW_TOKENS, (), 1.0)
    whole = engine.generate(list(prompts.values()), sampling, group_size=2)
    engine.weights_changed()
    engine.start(list(prompts.values()), sampling, group_size=2)
    rows, rounds = pack(make_sequences(prompts), 4096, loaded.model.merge_size), 0
    while not engine.advance(max_steps=5):
        trainer.score(rows)
        rounds += 1
    assert rounds >= 4
    for a, b in zip([r for g in engine.collect() for r in g], [r for g in whole for r in g], strict=True):
        assert torch.equal(a.ids, b.ids) and torch.equal(a.log_probs, b.log_probs)
