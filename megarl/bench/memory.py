"""What the GPU's memory holds at its fullest in each phase, beside what `megarl.check` says of the recipe."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

import torch

from megarl.bench.lines import Line
from megarl.bench.prompts import media_prompt, noise_item, text_prompt
from megarl.errors import UserError
from megarl.media.item import EncodedPrompt
from megarl.memory import GIB, adapter_parameters, count_parameters, estimate_memory
from megarl.options import rl_optimizer
from megarl.packing.rows import PackedRow, TokenSequence, pack
from megarl.platform.kernels import kernels
from megarl.recipe import Recipe
from megarl.rollout.sampling import SamplingOptions
from megarl.run import Parts, build_parts, start_ranks
from megarl.startup import fetch_models, prepare_checkpoint

_SEQUENCES, _TEXT, _COMPLETION = 8, 8, 16
"""In a row with media: how many, and the tokens of each that are not media."""
_PROMPT, _NEW = 64, 4
"""Tokens of a rollout."""
_PICTURE_SIDE = 16
"""Media tokens of a rollout's picture, wide and high."""


def measure(recipe: Recipe, options) -> list[Line]:
    """The peer is the prediction.  Of steps as full as the recipe lets them be, which is what is predicted.

    Raises:
        UserError: there is no GPU.
    """
    if not kernels().gpu:
        raise UserError("--only memory: torch counts what is allocated on a GPU alone, and there is none here")
    recipe = fetch_models(recipe, start_ranks())
    parts = build_parts(recipe, prepare_checkpoint(recipe, Path(recipe.run_dir)))
    parts.trainer.begin(rl_optimizer(recipe))
    config, dtype = parts.policy.bridge.hf_pretrained.config, parts.policy.model.config.params_dtype
    counted = replace(count_parameters(config), adapters=adapter_parameters(config, recipe.model.lora))
    predicted = estimate_memory(recipe, config, counted, str(dtype).removeprefix("torch."), 1)
    rows, prompts = [full_row(recipe, parts)], full_step(recipe, parts)

    def train():
        parts.trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.detach().sum()))
        parts.sync()

    def sample():
        parts.engine.generate(prompts, SamplingOptions(_NEW, (), recipe.rollout.temperature))

    train()  # the first step makes the optimizer's state
    return [
        Line(f"memory, {phase}: at its peak, beside its prediction", "GiB", _peak(call) / GIB, bytes / GIB)
        for phase, call, bytes in (
            ("training", train, predicted.training_peak),
            ("rollout", sample, predicted.rollout_peak),
        )
    ]


def full_row(recipe: Recipe, parts: Parts) -> PackedRow:
    """One row: with media, nearly all of it media; else nearly all of it completions."""
    model, vision = parts.policy.model, _vision(parts)
    vocabulary, length = model.language_model.vocab_size, recipe.training.tokens_per_row // _SEQUENCES
    sequences = []
    for number in range(_SEQUENCES):
        prompt, new = text_prompt(_TEXT, vocabulary), length - _TEXT
        if vision is not None:
            tokens = length - _TEXT - _COMPLETION
            height = math.isqrt(tokens)
            grid = (1, height * model.merge_size, tokens // height * model.merge_size)
            prompt, new = media_prompt(noise_item(f"picture {number}", grid, vision), _TEXT, model), _COMPLETION
        sequences.append(TokenSequence(prompt, torch.randint(vocabulary, (new,))))
    (row,) = pack(sequences, recipe.training.tokens_per_row, model.merge_size, parts.trainer.alignment)
    return row


def full_step(recipe: Recipe, parts: Parts) -> list[EncodedPrompt]:
    """As many as decode at a time; with media, pictures that fill a pass of the tower."""
    model, vision, count = parts.policy.model, _vision(parts), recipe.rollout.max_requests
    prompts, side = [text_prompt(_PROMPT, model.language_model.vocab_size) for _ in range(count)], _PICTURE_SIDE
    if vision is None or recipe.longest_sequence < side**2 + _TEXT + _NEW:
        return prompts
    grid = (1, side * model.merge_size, side * model.merge_size)
    pictures = min(count, recipe.rollout.patches_per_pass // math.prod(grid))
    items = [noise_item(f"picture {number}", grid, vision) for number in range(pictures)]
    return [*(media_prompt(item, _TEXT, model) for item in items), *prompts[pictures:]]


def _vision(parts: Parts):
    """The config of the tower, as transformers has it; None without one."""
    return getattr(parts.policy.bridge.hf_pretrained.config, "vision_config", None)


def _peak(call: Callable) -> int:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()
