"""`python -m tests.parity.job FOLDER`: megarl's answers, on one rank."""

import sys
from pathlib import Path

import torch
from torch import Tensor

from megarl.platform import launch
from tests.parity.exchange import ASKED, FOUND, SAMPLED, Asked, Found, negative_log_likelihood

SEED = 7
_CHUNK = 512
"""Completion tokens whose logits exist at a time in training."""


def answer(folder: Path) -> None:
    """Reads `ASKED`, writes `FOUND`, then `SAMPLED`; in a job that has started."""
    from megarl.models.build import ModelOptions, load_policy
    from megarl.packing.rows import TokenSequence, by_member, pack
    from megarl.training.trainer import Trainer
    from megarl.verify.gradients import named_gradients

    asked: Asked = torch.load(folder / ASKED, weights_only=False)
    policy = load_policy(asked.checkpoint, ModelOptions(asked.dtype))
    trainer = Trainer(policy.model, 1.0, _CHUNK)
    sequences = [TokenSequence(case.prompt, case.completion) for case in asked.cases]
    rows = pack(sequences, sum(map(len, sequences)), policy.model.merge_size, trainer.alignment)
    scored = by_member(rows, trainer.score(rows))
    logits, experts = _logits(policy.model, rows)

    def loss(row, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
        total = negative_log_likelihood(log_probs)
        return total, total.detach()

    # Cloned: on a CPU they are views of what the export goes on with.
    gradients = {name: gradient.clone() for name, gradient in named_gradients(policy, trainer, rows, loss)}
    places = range(len(sequences))
    found = Found([logits[i] for i in places], [scored[i] for i in places], gradients, [experts[i] for i in places])
    _write(found, folder / FOUND)
    del found, gradients, logits
    _write(_sampled(policy.model, asked), folder / SAMPLED)


@torch.no_grad()
def _logits(model, rows) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Logits and experts of each sequence, by its place, on the CPU."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megarl.training.trainer import row_arguments

    chosen: list[Tensor] = []

    def record(module, arguments, output):
        _, routed = output  # bool [tokens, experts]
        chosen.append(routed.nonzero()[:, 1].view(routed.shape[0], -1).cpu())

    hooks = [module.register_forward_hook(record) for module in model.modules() if isinstance(module, TopKRouter)]
    logits, experts = {}, {}
    device = next(model.parameters()).device
    model.eval()
    try:
        for row in rows:
            chosen.clear()
            out = model(**row_arguments(row, device))[0].cpu()
            routed = torch.stack(chosen, 1) if chosen else torch.empty(len(out), 0, 0)
            for place, first, last in zip(row.members, row.bounds, row.bounds[1:], strict=False):
                logits[place], experts[place] = out[first:last], routed[first:last]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, experts


def _sampled(model, asked: Asked) -> list:
    """Cases whose completions the engine has sampled."""
    from megarl.rollout.engine import EngineOptions, RolloutEngine
    from megarl.rollout.sampling import SamplingOptions
    from megarl.verify.cases import Case

    prompts = [case.prompt for case in asked.cases]
    longest = max(prompt.ids.numel() for prompt in prompts) + asked.new_tokens
    engine = RolloutEngine(
        model,
        EngineOptions(
            max_requests=asked.rollouts * len(prompts),
            max_tokens_per_step=2048,
            max_sequence_length=longest,
            kv_cache_gb=4.0 if torch.cuda.is_available() else 0.05,
            block_size_tokens=64,
        ),
    )
    groups = engine.generate(prompts, SamplingOptions(asked.new_tokens, ()), asked.rollouts)
    return [Case(r.prompt, r.ids, r.log_probs, 1.0) for group in groups for r in group]


def _write(values, file: Path) -> None:
    """The file is whole as soon as it is there."""
    partial = file.with_suffix(".partial")
    torch.save(values, partial)
    partial.rename(file)


if __name__ == "__main__":
    launch.start({}, SEED, cuda_graphs=False)
    answer(Path(sys.argv[1]))
