"""`torchrun ... -m megarl.bench.scaling_job ANSWERS ROUNDS RECIPE [key=value ...]`: one layout.

Started by `megarl.bench.scaling`.
"""

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.bench.lines import median_seconds, turns
from megarl.bench.prompts import media_prompt, noise_item, text_prompt
from megarl.data.sampler import shard
from megarl.media.item import EncodedPrompt
from megarl.models.build import Policy, load_policy
from megarl.options import model_options, rl_optimizer
from megarl.packing.cost import CostModel
from megarl.packing.rows import PackedRow, TokenSequence, pack
from megarl.parallel import context
from megarl.platform import launch
from megarl.recipe import check_world, load_recipe
from megarl.rollout.engine import Rollout
from megarl.rollout.exchange import balance
from megarl.startup import prepare_checkpoint
from megarl.training.reduce import over_data_parallel
from megarl.training.trainer import Trainer

GROUPS, GROUP_SIZE, PROMPT_TOKENS = 16, 4, 16
_LONGEST = 256
"""Tokens of a completion."""


@dataclass(frozen=True)
class Measured:
    """Of one layout; the same on all ranks."""

    tokens: int
    """Of the batch, which is the same in every layout."""
    step_seconds: float
    """Of a training step on it, with groups exchanged."""
    imbalance: tuple[float, float]
    """Largest over mean estimated operations of a data-parallel rank, before and after the exchange."""
    padding: tuple[float, float]
    """Share of places that no sample fills: in packed rows, and in one batch padded to its longest sample."""
    vision_seconds: tuple[float, float] | None
    """Of a step on `media_batch` with the tower's work spread over context-parallel ranks, and without."""


def measure(policy: Policy, trainer: Trainer, tokens_per_row: int, rounds: int) -> Measured:
    """Collective.

    Args:
        trainer: begun.
        rounds: each figure is the median of so many.
    """
    model = policy.model
    cost = CostModel.of(model.language_model.config, model.tower_config)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batch = skewed_batch(policy, tokens_per_row)
    places = shard(range(len(batch)), rank, ranks)
    before = [batch[place] for place in places]
    after, _ = balance(
        before, places, places, len(batch), 1, cost, lambda place: batch[place][0].prompt, _no_conversation
    )
    sequences = [rollout.sequence for group in after for rollout in group]
    rows = pack(sequences, tokens_per_row, model.merge_size, trainer.alignment, cost)
    used, held = sum(map(len, sequences)), sum(row.ids.numel() for row in rows)
    used, held = over_data_parallel(torch.tensor([used, held])).tolist()
    lengths = [r.prompt.ids.numel() + r.ids.numel() for group in batch for r in group]
    vision = None
    if model.tower is not None and context.group().size() > 1:
        media_rows = pack(media_batch(policy), tokens_per_row, model.merge_size, trainer.alignment, cost)
        vision = turns(*(_step(trainer, media_rows, spread) for spread in (True, False)), rounds)
    trainer.update(rows, _loss)  # warms up
    return Measured(
        tokens=sum(lengths),
        step_seconds=median_seconds(_step(trainer, rows, True), rounds),
        imbalance=(_imbalance(before, cost), _imbalance(after, cost)),
        padding=(1 - used / held, 1 - sum(lengths) / (len(lengths) * max(lengths))),
        vision_seconds=vision,
    )


def skewed_batch(policy: Policy, tokens_per_row: int) -> list[list[Rollout]]:
    """Groups of rollouts, the same on every rank.  A group's usual length is 4 to 256 tokens, every power of two as
    likely as the next; every fourth prompt has a picture or a video, where the model sees them."""
    model, vision = policy.model, getattr(policy.bridge.hf_pretrained.config, "vision_config", None)
    draws = random.Random(1)
    torch.manual_seed(1)
    side, vocabulary = 4 * model.merge_size, model.language_model.vocab_size
    groups = []
    for number in range(GROUPS):
        prompt = text_prompt(PROMPT_TOKENS, vocabulary)
        if vision is not None and number % 4 == 0:
            grid = (8 if number % 8 else 1, side, side * (1 + number // 8))
            prompt = media_prompt(noise_item(f"item {number}", grid, vision), PROMPT_TOKENS, model)
        most = min(_LONGEST, tokens_per_row - prompt.ids.numel())
        usual = 2 ** draws.uniform(2, 8)
        groups.append(
            [_rollout(prompt, int(usual * draws.uniform(0.5, 1.5)), most, vocabulary) for _ in range(GROUP_SIZE)]
        )
    return groups


def media_batch(policy: Policy) -> list[TokenSequence]:
    """Four pictures of 32 x 32 patches and a video of eight frames of that size, the same on every rank."""
    model, side = policy.model, 16 * policy.model.merge_size
    torch.manual_seed(2)
    items = [
        noise_item(f"large item {number}", (frames, side, side), policy.bridge.hf_pretrained.config.vision_config)
        for number, frames in enumerate([1, 1, 1, 1, 4])
    ]
    prompts = [media_prompt(item, PROMPT_TOKENS, model) for item in items]
    return [TokenSequence(prompt, torch.randint(model.language_model.vocab_size, (32,))) for prompt in prompts]


def _rollout(prompt: EncodedPrompt, length: int, most: int, vocabulary: int) -> Rollout:
    length = max(1, min(length, most))
    return Rollout(prompt, torch.randint(vocabulary, (length,)), torch.zeros(length), True)


def _imbalance(groups: list[list[Rollout]], cost: CostModel) -> float:
    """Largest cost of a data-parallel rank over the ranks' mean."""
    mine = torch.tensor(sum(cost.row(r.sequence for r in group) for group in groups))
    ranks = parallel_state.get_data_parallel_world_size()
    return float(over_data_parallel(mine, dist.ReduceOp.MAX) * ranks / over_data_parallel(mine))


def _step(trainer: Trainer, rows: list[PackedRow], spread: bool) -> Callable[[], None]:
    """A training step of all ranks, from the first that begins to the last that ends."""

    def step():
        trainer.model.config.vision_dp_when_cp = spread
        dist.barrier()
        trainer.update(rows, _loss)
        dist.barrier()

    return step


def _loss(row: PackedRow, log_probs, entropy):
    return -log_probs.sum(), log_probs.detach().sum()


def _no_conversation(*_) -> EncodedPrompt:
    raise AssertionError("a rollout of this batch has one turn")


def main(arguments: list[str]) -> None:
    answers, rounds, path, *overrides = arguments
    recipe = load_recipe(path, overrides)
    check_world(recipe, launch.world_size())
    launch.start(recipe.parallel.sizes, recipe.seed, cuda_graphs=False)
    torch.set_num_threads(1)  # what is compared is the number of processes
    policy = load_policy(prepare_checkpoint(recipe, Path(recipe.run_dir)), model_options(recipe))
    trainer = Trainer(policy.model, recipe.rollout.scoring_temperature, recipe.training.log_prob_chunk)
    trainer.begin(rl_optimizer(recipe))
    measured = measure(policy, trainer, recipe.training.tokens_per_row, int(rounds))
    if launch.rank() == 0:
        Path(answers).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    sys.exit(launch.command(main, sys.argv[1:]))
