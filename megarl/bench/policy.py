"""`python -m megarl.bench RECIPE [key=value ...]`: speed as ratios to a peer, both measured in this run.

Peers: transformers' `generate` for the engine, a plain PyTorch step (the same Hugging Face model, padded batch,
torch's AdamW) for training.  Same weights, prompts, lengths and threads; each figure is the median of several
rounds in which the two take turns.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.errors import UserError
from megarl.platform import launch
from megarl.platform.kernels import kernels
from megarl.recipe import load_recipe


@dataclass(frozen=True)
class Line:
    name: str
    unit: str
    megarl: float
    peer: float | None = None
    """The same work by the peer, in the same unit; None where there is none."""

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.megarl / self.peer


def bench(arguments: list[str]) -> None:
    """Prints the table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="megarl.bench", description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--requests", default="1,16,64,512", help="concurrent requests, comma separated")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--train-tokens", type=int, default=4096, help="tokens of a training step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args(arguments)
    recipe = load_recipe(options.recipe, options.overrides)
    if launch.world_size() > 1:
        raise UserError("megarl.bench measures one rank: start it without torchrun")
    launch.start(1, recipe.seed, recipe.rollout.cuda_graphs and kernels().gpu)
    lines = measure(recipe, options)
    if options.json:
        print(json.dumps({"machine": str(kernels()), "lines": [asdict(x) | {"ratio": x.ratio} for x in lines]}))
    else:
        _print(lines)


def measure(recipe, options) -> list[Line]:
    """All lines, for the recipe's model."""
    import torch

    from megarl.models.build import load_policy
    from megarl.options import model_options, rl_optimizer
    from megarl.rollout.engine import EngineOptions, RolloutEngine
    from megarl.rollout.sampling import SamplingOptions
    from megarl.startup import prepare_checkpoint
    from megarl.training.trainer import Trainer

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
    )
    sampling = SamplingOptions(options.new_tokens, (), recipe.rollout.scoring_temperature)
    lines = []
    for count in requests:
        prompts = [_prompt(options.prompt_tokens, policy.model.language_model.vocab_size) for _ in range(count)]
        ids = torch.stack([p.ids for p in prompts]).to(device)
        ours, theirs = _turns(
            lambda prompts=prompts: engine.generate(prompts, sampling),
            lambda ids=ids: peer.generate(ids, options.new_tokens, sampling.temperature),
            options.rounds,
        )
        tokens = count * options.new_tokens
        lines.append(Line(f"decode, {count} request(s)", "tokens/s", tokens / ours, tokens / theirs))
    lines.append(_train_line(trainer, policy, peer, recipe, options, device))
    lines.append(Line("weights change hands", "ms", 1e3 * _median(engine.weights_changed, 20)))
    return lines


def _train_line(trainer, policy, peer: "_Peer", recipe, options, device) -> Line:
    """A step on completions of `new_tokens` after prompts of `prompt_tokens`, all of one length."""
    import torch

    from megarl.training.packing import TokenSequence, pack

    count = max(1, options.train_tokens // (options.prompt_tokens + options.new_tokens))
    vocabulary = policy.model.language_model.vocab_size
    sequences = [
        TokenSequence(_prompt(options.prompt_tokens, vocabulary), torch.randint(vocabulary, (options.new_tokens,)))
        for _ in range(count)
    ]
    rows = pack(sequences, recipe.training.tokens_per_row, policy.model.merge_size)
    ids = torch.stack([torch.cat([s.prompt.ids, s.completion]) for s in sequences]).to(device)
    ours, theirs = _turns(
        lambda: trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.detach().sum())),
        lambda: peer.update(ids, options.prompt_tokens),
        options.rounds,
    )
    return Line(f"training step, {ids.numel()} tokens", "tokens/s", ids.numel() / ours, ids.numel() / theirs)


class _Peer:
    """The same checkpoint as users run it without Megatron."""

    def __init__(self, folder: Path, dtype, device):
        import torch
        from transformers import AutoModelForImageTextToText

        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).to(device)
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


def _prompt(tokens: int, vocabulary: int):
    import torch

    from megarl.media.item import EncodedPrompt

    mask = torch.zeros(tokens, dtype=torch.bool)
    places = torch.arange(tokens)
    # Ids past the special tokens, so that transformers takes them for text as well.
    return EncodedPrompt(None, torch.randint(16, vocabulary, (tokens,)), mask, places.expand(3, -1), tokens, ())


def _turns(ours: Callable, theirs: Callable, rounds: int) -> tuple[float, float]:
    """Median seconds of both, run alternately after one round to warm up."""
    seconds = [(_seconds(ours), _seconds(theirs)) for _ in range(rounds + 1)][1:]
    return statistics.median(s for s, _ in seconds), statistics.median(s for _, s in seconds)


def _median(call: Callable, rounds: int) -> float:
    return statistics.median(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable) -> float:
    import torch

    torch.cuda.synchronize() if kernels().gpu else None
    start = time.perf_counter()
    call()
    torch.cuda.synchronize() if kernels().gpu else None
    return time.perf_counter() - start


def _print(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "megarl", "peer", "ratio", "unit", title=str(kernels()))
    for line in lines:
        peer = "" if line.peer is None else f"{line.peer:,.0f}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.name, f"{line.megarl:,.{0 if line.megarl > 100 else 2}f}", peer, ratio, line.unit)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(launch.command(bench, sys.argv[1:]))
