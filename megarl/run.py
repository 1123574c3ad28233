"""Everything that a run holds, built from its recipe."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.training.packing import TokenSequence
from megarl.data.prompt import Prompt
from megarl.data.prompts import check_rejected, load_prompts, write_rejections
from megarl.data.sampler import PromptSampler, shard
from megarl.environments.exact_match import ExactMatch
from megarl.errors import UserError
from megarl.media.encoder import Encoder
from megarl.media.item import EncodedPrompt
from megarl.models.build import Policy, load_policy
from megarl.models.hf_config import family_of
from megarl.options import engine_options, model_options
from megarl.recipe import Recipe
from megarl.rollout.engine import RolloutEngine
from megarl.startup import load_processor, prepare_checkpoint, stop_tokens
from megarl.training.trainer import Trainer


@dataclass(eq=False)
class Run:
    recipe: Recipe
    folder: Path
    processor: Any
    policy: Policy
    trainer: Trainer
    engine: RolloutEngine
    encoder: Encoder
    environment: ExactMatch
    train_prompts: list[Prompt]
    test_prompts: list[Prompt]
    stop_ids: tuple[int, ...]

    def __post_init__(self):
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self._sampler = PromptSampler(self.train_prompts, self.recipe.seed)
        self._answers = sorted({prompt.answer for prompt in self.train_prompts})

    @cached_property
    def chance(self) -> float:
        """Held-out accuracy of the best constant answer, the most frequent one."""
        ((_, count),) = Counter(prompt.answer for prompt in self.test_prompts).most_common(1)
        return count / len(self.test_prompts)

    @property
    def merge_size(self) -> int:
        return self.policy.model.merge_size

    def step_prompts(self, step: int) -> tuple[list[EncodedPrompt], list[int]]:
        """This rank's prompts of an RL step, from 1, and the keys of their draws."""
        count = self.recipe.algorithm.prompts_per_step
        batch = list(enumerate(self._sampler.batch(step - 1, count)))
        mine = shard(batch, self.dp_rank, self.dp_size)
        keys = [draw_key(self.recipe.seed, "train", step, place) for place, _ in mine]
        return [self.encoder.encode(prompt) for _, prompt in mine], keys

    def warmup_sequences(self, step: int) -> list[TokenSequence]:
        """This rank's supervised targets of a warm-up step, from 1."""
        warmup = self.recipe.warmup
        batch = PromptSampler(self.train_prompts, self.recipe.seed + 1).batch(step - 1, warmup.batch_size)
        answers = [prompt.answer for prompt in batch]
        if warmup.answers == "random":
            generator = torch.Generator().manual_seed(draw_key(self.recipe.seed, "warmup", step, 0) >> 1)
            chosen = torch.randint(len(self._answers), (len(batch),), generator=generator)
            answers = [self._answers[i] for i in chosen.tolist()]
        pairs = shard(list(zip(batch, answers, strict=True)), self.dp_rank, self.dp_size)
        return [self._target(prompt, answer) for prompt, answer in pairs]

    def _target(self, prompt: Prompt, answer: str) -> TokenSequence:
        ids = [*_answer_ids(self.processor.tokenizer, answer), self.stop_ids[0]]
        return TokenSequence(self.encoder.encode(prompt), torch.tensor(ids))

    def text(self, ids: torch.Tensor) -> str:
        """A completion's text without its stop token."""
        return self.processor.tokenizer.decode([i for i in ids.tolist() if i not in self.stop_ids])


def build_run(recipe: Recipe, folder: Path) -> Run:
    """Data, model, engine and trainer of this rank.  Collective; the run folder is there.

    Raises:
        UserError: something in the recipe, the data or the checkpoint does not fit.
    """
    initial = prepare_checkpoint(recipe, folder)
    processor = load_processor(Path(recipe.model.processor) if recipe.model.processor else initial)
    stop_ids = stop_tokens(processor.tokenizer, recipe.rollout.stop)
    encoder = Encoder(processor, family_of(initial).load("positions"), recipe.data.max_prompt_tokens)
    train_prompts = _load_prompts(recipe, folder, "train", encoder)
    if recipe.warmup:
        _refuse_long_answers(recipe, processor.tokenizer, train_prompts)
    test_prompts = _load_prompts(recipe, folder, "test", encoder)[: recipe.evaluation.max_prompts]
    policy = load_policy(initial, model_options(recipe))
    # One module for both.  The trainer first: its DDP moves the weights into its buffers, and what the engine
    # captures in CUDA graphs are addresses.
    trainer = Trainer(policy.model, recipe.rollout.scoring_temperature, recipe.training.log_prob_chunk)
    engine = RolloutEngine(policy.model, engine_options(recipe))
    environment = ExactMatch(recipe.environment.format, recipe.environment.format_reward)
    return Run(
        recipe,
        folder,
        processor,
        policy,
        trainer,
        engine,
        encoder,
        environment,
        train_prompts,
        test_prompts,
        stop_ids,
    )


def _load_prompts(recipe: Recipe, folder: Path, split: str, encoder: Encoder) -> list[Prompt]:
    file = Path(recipe.data.path) / f"{split}.jsonl"
    prompts, rejections = load_prompts(file, check_prompt=encoder.encode)
    if rejections and dist.get_rank() == 0:
        write_rejections(rejections, folder / f"rejected_{split}.jsonl")
    check_rejected(file, prompts, rejections, recipe.data.max_rejected_fraction)
    return prompts


def _answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """A supervised target without its stop token; special tokens that it spells out are ordinary text."""
    return tokenizer.encode(answer, add_special_tokens=False, split_special_tokens=True)


def _refuse_long_answers(recipe: Recipe, tokenizer: Any, prompts: list[Prompt]) -> None:
    """A supervised target must fit where a sampled one does, so that it fits into a row."""
    most = recipe.rollout.max_new_tokens
    for answer in sorted({prompt.answer for prompt in prompts}):
        tokens = len(_answer_ids(tokenizer, answer)) + 1
        if tokens > most:
            raise UserError(
                f"warmup: the answer {answer[:40]!r} has {tokens} tokens with its end token, "
                f"rollout.max_new_tokens = {most}: raise it, or set warmup = null"
            )


def draw_key(seed: int, purpose: str, step: int, place: int) -> int:
    """63 bits that decide the draws of one prompt's rollouts: the same under every layout and after a resume."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{step}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
