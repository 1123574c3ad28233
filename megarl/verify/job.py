"""The recipe's policy, engine and trainer as its run would build them, and what is asked of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.algorithms.objective import ObjectiveOptions
from megarl.media.encoder import Encoder
from megarl.media.item import EncodedPrompt
from megarl.models.build import Policy
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from megarl.options import model_options, rl_optimizer, step_options
from megarl.packing.rows import PackedRow, TokenSequence, by_member, pack
from megarl.parallel.agreement import gathered
from megarl.recipe import Recipe
from megarl.rollout.engine import Rollout
from megarl.rollout.sampling import SamplingOptions
from megarl.rollout.spread import generate_spread
from megarl.run import build_parts, draw_key, start_ranks
from megarl.startup import fetch_models, load_processor, media_options, prepare_checkpoint, prepare_data, stop_tokens
from megarl.training.reduce import over_data_parallel
from megarl.training.trainer import Trainer
from megarl.verify.cases import Case, advantages, first_prompts, loss
from megarl.verify.gradients import named_gradients


@dataclass(frozen=True, eq=False)
class Training:
    """Scores and differentiates cases, each known by its place in the list of all; a rank has a share of them."""

    policy: Policy
    trainer: Trainer
    objective: ObjectiveOptions
    tokens_per_row: int

    def rows(self, cases: Mapping[int, Case], packed: bool = True) -> list[PackedRow]:
        """Rows as the run packs them, or one case a row; `members` are places in the list of all cases."""
        places = list(cases)
        sequences = [TokenSequence(case.prompt, case.completion, case.routing_indices) for case in cases.values()]
        shape = self.tokens_per_row, self.policy.model.merge_size, self.trainer.alignment
        parts = [sequences] if packed else [[sequence] for sequence in sequences]
        rows = [row for part in parts for row in pack(part, *shape)]
        if not packed:
            return [replace(row, members=(place,)) for place, row in zip(places, rows, strict=True)]
        return [replace(row, members=tuple(places[member] for member in row.members)) for row in rows]

    def score(self, rows: Sequence[PackedRow]) -> dict[int, Tensor]:
        """The trainer's log-probabilities by case, float32 `[n]` each."""
        return by_member(rows, self.trainer.score(rows))

    def gradients(self, cases: Sequence[Case], rows: Sequence[PackedRow]) -> tuple[dict[str, Tensor], float]:
        """Of the loss per token over all ranks' rows, by Hugging Face name, on rank 0 and nothing elsewhere; and that
        loss, on all ranks.  Collective."""
        losses = []

        def of_row(row: PackedRow, log_probs: Tensor, entropy: Tensor):
            result = loss([cases[member] for member in row.members], log_probs, entropy, self.objective)
            losses.append(result[0].detach())
            return result

        found = {}
        for name, gradient in named_gradients(self.policy, self.trainer, rows, of_row):
            if dist.get_rank() == 0:
                found[name] = gradient.clone()
        tokens = sum(row.targets.numel() for row in rows)
        total = over_data_parallel(torch.stack([torch.stack(losses).sum().cpu(), torch.tensor(float(tokens))]))
        return found, float(total[0] / total[1])

    def step(self, cases: Sequence[Case], rows: Sequence[PackedRow]) -> None:
        """One optimizer step on the same loss."""
        self.trainer.update(
            rows, lambda row, *output: loss([cases[member] for member in row.members], *output, self.objective)
        )


class Job:
    """What this rank holds.  Collective.

    Args:
        recipe: of the run that is to be verified.
        folder: empty, seen by all ranks; takes what the run folder would.
        prompts: of each modality.
        rollouts: of each prompt.
        new_tokens: bound of a completion's length, beside the recipe's.
    """

    def __init__(self, recipe: Recipe, folder: Path, prompts: int, rollouts: int, new_tokens: int):
        self.recipe = recipe = fetch_models(recipe, start_ranks())
        self._rollouts = rollouts
        if dist.get_rank() == 0:
            prepare_data(recipe)
        dist.barrier()
        self.checkpoint = prepare_checkpoint(recipe, folder)
        config, longest = hf_config(str(self.checkpoint), None), recipe.data.max_prompt_tokens
        family = FAMILIES[config.model_type]
        folder_of_processor = Path(recipe.model.processor) if recipe.model.processor else self.checkpoint
        processor = load_processor(folder_of_processor, family)
        # Without top-p and top-k: what these cut off is missing in the engine's distribution only.
        self._sampling = SamplingOptions(
            min(new_tokens, recipe.rollout.max_new_tokens),
            stop_tokens(processor.tokenizer, recipe.rollout.stop),
            recipe.rollout.scoring_temperature,
        )
        with Encoder(processor, family.load("positions")(config), longest, media_options(recipe)) as encoder:
            self._prompts: list[EncodedPrompt] = first_prompts(recipe.data, encoder, folder / "downloads", prompts)
        self.dtype = model_options(recipe).dtype
        self._parts = parts = build_parts(recipe, self.checkpoint)
        self.sync = parts.sync
        objective, tokens_per_row = step_options(recipe).objective, recipe.training.tokens_per_row
        self.training = Training(parts.policy, parts.trainer, objective, tokens_per_row)
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()

    def sample(self, time: int) -> list[Case]:
        """Rollouts of all prompts, the same list on all ranks; at least one for each data-parallel rank."""
        ranks = self._parts.data_parallel_ranks
        mine = [place for rank in ranks for place in range(rank, len(self._prompts), self.dp_size)]
        keys = [draw_key(self.recipe.seed, "verify", time, place) for place in mine]
        prompts = [self._prompts[place] for place in mine]
        groups = generate_spread(self._parts.engine, prompts, self._sampling, self._rollouts, keys)
        sampled = {place: [rollout.sampled() for rollout in group] for place, group in zip(mine, groups, strict=True)}
        everyone: dict[int, Any] = {}
        for part in gathered(sampled, parallel_state.get_data_parallel_group()):
            everyone |= part
        count = len(self._prompts) * self._rollouts
        weights = iter(advantages(count))
        rollouts = [Rollout(prompt, **one) for place, prompt in enumerate(self._prompts) for one in everyone[place]]
        cases = [Case(r.prompt, r.ids, r.log_probs, next(weights), r.routing_indices) for r in rollouts]
        return cases * -(-self.dp_size // count)

    def share(self, cases: Sequence[Case]) -> dict[int, Case]:
        """This rank's cases by their places."""
        return {place: cases[place] for place in range(self.dp_rank, len(cases), self.dp_size)}

    def begin(self, learning_rate: float) -> None:
        """A fresh optimizer at a constant rate; everything else as in the recipe."""
        options = replace(rl_optimizer(self.recipe), learning_rate=learning_rate, schedule="constant", warmup_steps=0)
        self.training.trainer.begin(options)
