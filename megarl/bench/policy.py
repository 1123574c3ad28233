"""Engine, trainer and vision tower against transformers, and what it takes to start and to hand over the weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

import torch

from megarl.bench.ceilings import Ceilings
from megarl.bench.floors import Floors
from megarl.bench.lines import Line, median_seconds, timed, turns
from megarl.bench.peer import Peer
from megarl.bench.profile import profile
from megarl.bench.prompts import media_prompt, noise_item, text_prompt
from megarl.errors import UserError
from megarl.media.item import EncodedPrompt, MediaItem
from megarl.models.build import load_policy
from megarl.options import engine_options, model_options, rl_optimizer
from megarl.packing.rows import TokenSequence, pack
from megarl.platform.kernels import kernels
from megarl.rollout.engine import EngineOptions, RolloutEngine
from megarl.rollout.sampling import SamplingOptions
from megarl.run import start_ranks
from megarl.startup import fetch_models, prepare_checkpoint
from megarl.training.trainer import Trainer

_GROUP = 16
_PICTURES, _PICTURE_SIDE = 8, 16
"""How many, and how many media tokens wide and high."""
_COPIED = 2**30
"""Bytes of a copy to measure the bus by."""
_PROFILED_TOKENS = 32
"""New tokens of a generation that is profiled: a step is like the next, and traces are large."""


def measure(recipe, options, ceilings: Ceilings) -> list[Line]:
    """All lines, for the recipe's model; prints the profiles, where they are asked for."""
    sides = Sides(recipe, options, ceilings)
    lines = [Line("engine, start and the first steps of each size", "s", sides.start_seconds)]
    lines += [sides.decode(count) for count in sides.requests]
    lines += [sides.decode_groups(count) for count in sides.requests if count % _GROUP == 0]
    lines += [sides.prefill(), sides.shared_prefill()]
    if sides.model.tower_config is not None:
        lines += [sides.decode_pictures(count) for count in sides.requests if count % _GROUP == 0]
        lines += [sides.encoding(), sides.encodes()]
    lines += [sides.training_step(), sides.offload()]
    lines.append(Line("weights change hands", "ms", 1e3 * median_seconds(sides.engine.weights_changed, 20), floor=0.0))
    if options.profile is not None:
        sides.print_profiles(options.profile)
    return lines


class Sides:
    """megarl's engine and trainer, and the peer, over the same checkpoint."""

    def __init__(self, recipe, options, ceilings: Ceilings):
        if recipe.rollout.kv_cache_gb is None:
            raise UserError("rollout.kv_cache_gb = null: the bench's peer needs room too; set a number")
        recipe = fetch_models(recipe, start_ranks())
        folder = prepare_checkpoint(recipe, Path(recipe.run_dir))
        settings = model_options(recipe)
        policy = load_policy(folder, settings)
        self.recipe, self.options, self.policy, self.model = recipe, options, policy, policy.model
        self.device = next(policy.model.parameters()).device
        self.floors = Floors(ceilings, policy.model)
        self.peer = Peer(folder, settings.dtype, self.device)
        self.requests = [int(n) for n in options.requests.split(",")]
        self.temperature = recipe.rollout.scoring_temperature
        self._trainer = Trainer(policy.model, self.temperature, recipe.training.log_prob_chunk)
        self._trainer.begin(rl_optimizer(recipe))
        picture = 0 if policy.model.tower_config is None else _PICTURE_SIDE**2
        longest = max(picture + options.prompt_tokens + options.new_tokens, recipe.data.max_prompt_tokens + 1)
        sizes = replace(
            engine_options(recipe),
            max_requests=max(*self.requests, _GROUP),
            max_tokens_per_step=max(recipe.rollout.max_tokens_per_step, *self.requests),
            max_sequence_length=longest,
        )
        self.start_seconds = timed(lambda: self._start(sizes))
        """Of the engine, the capture of CUDA graphs and the compilation of kernels included."""

    def _start(self, sizes: EngineOptions) -> None:
        self.engine = RolloutEngine(self.model, sizes, as_sampled=self.policy.as_sampled)
        for count in self.requests:
            self.generate(self.prompts(count, self.options.prompt_tokens), 2)

    def prompts(self, count: int, tokens: int) -> list[EncodedPrompt]:
        """Distinct ones."""
        return [text_prompt(tokens, self.model.language_model.vocab_size) for _ in range(count)]

    def ids(self, prompts: list[EncodedPrompt]) -> torch.Tensor:
        """`[prompts, tokens]` for the peer."""
        return torch.stack([prompt.ids for prompt in prompts]).to(self.device)

    def generate(self, prompts: list[EncodedPrompt], new_tokens: int, group_size: int = 1) -> None:
        """As if it had never seen these prompts: what it kept of them in an earlier round is dropped."""
        self.engine.weights_changed()
        self.engine.generate(prompts, SamplingOptions(new_tokens, (), self.temperature), group_size)

    def decode(self, count: int) -> Line:
        length, new = self.options.prompt_tokens, self.options.new_tokens
        prompts = self.prompts(count, length)
        ids = self.ids(prompts)
        seconds = turns(
            lambda: self.generate(prompts, new),
            lambda: self.peer.generate(ids, new, self.temperature),
            self.options.rounds,
        )
        ours, theirs, floor = (count * new / s for s in (*seconds, self.floors.generation(count, length, new)))
        return Line(f"decode, {count} request(s)", "tokens/s", ours, theirs, floor)

    def decode_groups(self, count: int) -> Line:
        """As GRPO asks for them: the rollouts of a group share their prompt."""
        length, new = self.options.prompt_tokens, self.options.new_tokens
        prompts = self.prompts(count // _GROUP, length)
        seconds = self._alone(lambda: self.generate(prompts, new, _GROUP))
        floor = self.floors.generation(count, length, new, of_a_prompt=_GROUP)
        name = f"decode, {count} request(s) in groups of {_GROUP}"
        return Line(name, "tokens/s", count * new / seconds, floor=count * new / floor)

    def decode_pictures(self, count: int) -> Line:
        """Likewise, and each group sees a picture of its own before the prompt."""
        length, new = self.options.prompt_tokens, self.options.new_tokens
        items = self._pictures(count // _GROUP)
        prompts = [media_prompt(item, length, self.model) for item in items]
        seconds = self._alone(lambda: self.generate(prompts, new, _GROUP))
        whole = prompts[0].ids.numel()
        floor = self.floors.generation(count, whole, new, of_a_prompt=_GROUP) + self.floors.encoding(items)
        name = f"decode, {count} request(s) in groups of {_GROUP}, a picture of {whole - length} tokens each"
        return Line(name, "tokens/s", count * new / seconds, floor=count * new / floor)

    def _alone(self, call: Callable) -> float:
        """Median seconds, after one round to warm up."""
        call()
        return median_seconds(call, self.options.rounds)

    def _pictures(self, count: int) -> list[MediaItem]:
        """Of noise, prepared."""
        side = _PICTURE_SIDE * self.model.merge_size
        vision = self.policy.bridge.hf_pretrained.config.vision_config
        return [noise_item(f"picture {number}", (1, side, side), vision) for number in range(count)]

    def prefill(self) -> Line:
        """Prompts of the recipe's longest, and one new token of each."""
        wanted = self.options.prefill_tokens or self.recipe.rollout.max_tokens_per_step
        length = min(wanted, self.recipe.data.max_prompt_tokens)
        prompts = self.prompts(wanted // length, length)
        ids, tokens = self.ids(prompts), len(prompts) * length
        seconds = turns(
            lambda: self.generate(prompts, 1),
            lambda: self.peer.generate(ids, 1, self.temperature),
            self.options.rounds,
        )
        ours, theirs, floor = (tokens / s for s in (*seconds, self.floors.prefill([length] * len(prompts))))
        return Line(f"prefill, {len(prompts)} prompt(s) of {length} tokens", "tokens/s", ours, theirs, floor)

    def shared_prefill(self) -> Line:
        """The prompt of a group, read once for all its rollouts; the peer is the same engine on as many prompts of that
        length, of which none has a prefix in common, as if there were no prefix cache."""
        length = self.recipe.data.max_prompt_tokens
        (prompt,), distinct = self.prompts(1, length), self.prompts(_GROUP, length)
        seconds = turns(
            lambda: self.generate([prompt], 1, _GROUP), lambda: self.generate(distinct, 1), self.options.rounds
        )
        times = (*seconds, self.floors.prefill([length], _GROUP))
        name = f"prefill, a group of {_GROUP} on a prompt of {length} tokens; without prefix cache"
        return Line(name, "ms", *(1e3 * s for s in times))

    @torch.no_grad()
    def encoding(self) -> Line:
        """Pictures through the vision tower, from prepared pixels in main memory to features."""
        items = self._pictures(_PICTURES)
        pixels = torch.cat([item.pixels for item in items])
        grids = torch.tensor([item.grid for item in items])
        seconds = turns(
            lambda: self.model.encode(pixels, grids), lambda: self.peer.encode(pixels, grids), self.options.rounds
        )
        ours, theirs, floor = (len(pixels) / s for s in (*seconds, self.floors.encoding(items)))
        return Line(
            f"vision tower, {_PICTURES} pictures of {len(pixels) // _PICTURES} patches",
            "patches/s",
            ours,
            theirs,
            floor,
        )

    def encodes(self) -> Line:
        """16 rollouts of each of 8 prompts, every two of which show the same picture; two calls, as a step and an
        evaluation make them.  The peer encodes for each rollout, the floor each picture once."""
        side = 2 * self.model.merge_size
        prompts = []
        for picture in range(4):
            vision = self.policy.bridge.hf_pretrained.config.vision_config
            item = noise_item(f"small picture {picture}", (1, side, side), vision)
            prompts += [media_prompt(item, self.options.prompt_tokens, self.model) for _ in range(2)]
        encoded, asked = self.engine.features.encoded, self.engine.asked
        for _ in range(2):
            self.engine.generate(prompts, SamplingOptions(1, ()), group_size=16)
        saved = self.engine.features.encoded - encoded, self.engine.asked - asked
        return Line("vision encodes, 2 x 8 prompts x 16 rollouts, 4 pictures", "items", *map(float, saved), 4.0)

    def training_step(self) -> Line:
        sequences, update = self._update()
        length, tokens = self.options.prompt_tokens, sum(map(len, sequences))
        ids = torch.stack([torch.cat([s.prompt.ids, s.completion]) for s in sequences]).to(self.device)
        seconds = turns(update, lambda: self.peer.update(ids, length), self.options.rounds)
        least = self.floors.training_step(len(sequences), length, self.options.new_tokens)
        ours, theirs, floor = (tokens / s for s in (*seconds, least))
        return Line(f"training step, {tokens} tokens (MFU: 1 / gap)", "tokens/s", ours, theirs, floor)

    def offload(self) -> Line:
        """Of the state that the first training step has made, both ways; the peer is a plain copy of as many bytes
        between the GPU and pinned memory."""
        trainer = self._trainer

        def both_ways():
            trainer.offload()
            trainer.bring_back()

        both_ways()
        chunk = min(trainer.offloaded_bytes, _COPIED)
        here = torch.empty(chunk, dtype=torch.uint8, device=self.device)
        there = torch.empty(chunk, dtype=torch.uint8, pin_memory=kernels().gpu)
        copies = -(-trainer.offloaded_bytes // chunk)

        def copy():
            for _ in range(copies):
                there.copy_(here, non_blocking=True)
            for _ in range(copies):
                here.copy_(there, non_blocking=True)

        ours, theirs = turns(both_ways, copy, self.options.rounds)
        name = f"optimizer state to the host and back, {trainer.offloaded_bytes / 2**20:.0f} MiB"
        return Line(name, "GB/s", 2 * trainer.offloaded_bytes / ours / 1e9, 2 * copies * chunk / theirs / 1e9)

    def _update(self) -> tuple[list[TokenSequence], Callable]:
        """A step on completions of `new_tokens` after prompts of `prompt_tokens`, all of one length."""
        length, new = self.options.prompt_tokens, self.options.new_tokens
        vocabulary = self.model.language_model.vocab_size
        sequences = [
            TokenSequence(prompt, torch.randint(vocabulary, (new,)))
            for prompt in self.prompts(max(1, self.options.train_tokens // (length + new)), length)
        ]
        rows = pack(sequences, self.recipe.training.tokens_per_row, self.model.merge_size)

        def update():
            self._trainer.update(rows, lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.detach().sum()))

        return sequences, update

    def print_profiles(self, folder: Path) -> None:
        """Of one generation by the most requests, and of one training step."""
        prompts, new = self.prompts(max(self.requests), self.options.prompt_tokens), self.options.new_tokens
        profile("decode", lambda: self.generate(prompts, min(new, _PROFILED_TOKENS)), folder).print()
        profile("training step", self._update()[1], folder).print()
