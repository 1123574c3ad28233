"""Engine and trainer against transformers: decode, training step, hand-over of the weights, vision encodes."""

from pathlib import Path

from megarl.bench.lines import Line, median_seconds, turns
from megarl.bench.prompts import media_prompt, noise_item, text_prompt
from megarl.models.hf_config import family_of


def measure(recipe, options) -> list[Line]:
    """All lines, for the recipe's model."""
    import torch

    from megarl.models.build import load_policy
    from megarl.options import model_options, rl_optimizer
    from megarl.rollout.engine import EngineOptions, RolloutEngine
    from megarl.rollout.sampling import SamplingOptions
    from megarl.run import start_ranks
    from megarl.startup import fetch_models, prepare_checkpoint
    from megarl.training.trainer import Trainer

    recipe = fetch_models(recipe, start_ranks())
    folder = prepare_checkpoint(recipe, Path(recipe.run_dir))
    settings = model_options(recipe)
    policy = load_policy(folder, settings)
    device = next(policy.model.parameters()).device
    peer = _Peer(folder, settings.dtype, device)
    requests = [int(n) for n in options.requests.split(",")]
    length = options.prompt_tokens + options.new_tokens
    trainer = Trainer(policy.model, recipe.rollout.scoring_temperature, recipe.training.log_prob_chunk)
    trainer.begin(rl_optimizer(recipe))
    engine = RolloutEngine(
        policy.model,
        EngineOptions(
            max_requests=max(requests),
            max_tokens_per_step=max(recipe.rollout.max_tokens_per_step, max(requests)),
            max_sequence_length=length,
            kv_cache_gb=recipe.rollout.kv_cache_gb,
            block_size_tokens=recipe.rollout.block_size_tokens,
            cuda_graphs=settings.cuda_graphs,
        ),
        as_sampled=policy.as_sampled,
    )
    sampling = SamplingOptions(options.new_tokens, (), recipe.rollout.scoring_temperature)
    lines = []
    for count in requests:
        prompts = [text_prompt(options.prompt_tokens, policy.model.language_model.vocab_size) for _ in range(count)]
        ids = torch.stack([p.ids for p in prompts]).to(device)
        ours, theirs = turns(
            lambda prompts=prompts: engine.generate(prompts, sampling),
            lambda ids=ids: peer.generate(ids, options.new_tokens, sampling.temperature),
            options.rounds,
        )
        tokens = count * options.new_tokens
        lines.append(Line(f"decode, {count} request(s)", "tokens/s", tokens / ours, tokens / theirs))
    if policy.model.tower_config is not None:
        lines.append(_encodes_line(engine, policy, options))
    lines.append(_train_line(trainer, policy, peer, recipe, options, device))
    lines.append(Line("weights change hands", "ms", 1e3 * median_seconds(engine.weights_changed, 20)))
    return lines


def _encodes_line(engine, policy, options) -> Line:
    """16 rollouts of each of 8 prompts, every two of which show the same picture; two calls, as a step and an
    evaluation make them.  The peer encodes for each rollout."""
    from megarl.rollout.sampling import SamplingOptions

    side = 2 * policy.model.merge_size
    prompts = []
    for picture in range(4):
        item = noise_item(f"picture {picture}", (1, side, side), policy.bridge.hf_pretrained.config.vision_config)
        prompts += [media_prompt(item, options.prompt_tokens, policy.model) for _ in range(2)]
    encoded, asked = engine.features.encoded, engine.asked
    for _ in range(2):
        engine.generate(prompts, SamplingOptions(1, ()), group_size=16)
    saved = engine.features.encoded - encoded, engine.asked - asked
    return Line("vision encodes, 2 x 8 prompts x 16 rollouts, 4 pictures", "items", *map(float, saved))


def _train_line(trainer, policy, peer: "_Peer", recipe, options, device) -> Line:
    """A step on completions of `new_tokens` after prompts of `prompt_tokens`, all of one length."""
    import torch

    from megarl.packing.rows import TokenSequence, pack

    count = max(1, options.train_tokens // (options.prompt_tokens + options.new_tokens))
    vocabulary = policy.model.language_model.vocab_size
    sequences = [
        TokenSequence(text_prompt(options.prompt_tokens, vocabulary), torch.randint(vocabulary, (options.new_tokens,)))
        for _ in range(count)
    ]
    rows = pack(sequences, recipe.training.tokens_per_row, policy.model.merge_size)
    ids = torch.stack([torch.cat([s.prompt.ids, s.completion]) for s in sequences]).to(device)
    ours, theirs = turns(
        lambda: trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.detach().sum())),
        lambda: peer.update(ids, options.prompt_tokens),
        options.rounds,
    )
    return Line(f"training step, {ids.numel()} tokens", "tokens/s", ids.numel() / ours, ids.numel() / theirs)


class _Peer:
    """The same checkpoint as users run it without Megatron."""

    def __init__(self, folder: Path, dtype, device):
        import torch

        self.model = family_of(folder).hf_class.from_pretrained(folder, dtype=dtype).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def generate(self, ids, new_tokens: int, temperature: float):
        import torch

        return self.model.eval().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )

    def update(self, ids, prompt_tokens: int) -> None:
        import torch
        import torch.nn.functional as F

        logits = self.model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        loss = F.cross_entropy(
            logits[:, prompt_tokens - 1 : -1].flatten(0, 1).float(), ids[:, prompt_tokens:].flatten()
        )
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
