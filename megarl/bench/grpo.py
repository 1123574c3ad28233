"""A whole GRPO step beside TRL's: the same checkpoint, prompts, group size, lengths, rewards and optimizer."""

import random
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import megarl.platform.prepare  # noqa: F401

from megarl.bench.ceilings import Ceilings
from megarl.bench.floors import Floors
from megarl.bench.lines import Line, timed
from megarl.data.generators.rows import row, write_rows
from megarl.errors import UserError
from megarl.options import rl_optimizer, step_options
from megarl.recipe import Recipe, load_recipe
from megarl.rollout.sampling import SamplingOptions
from megarl.rollout.spread import generate_spread
from megarl.run import Run, build_run, start_ranks
from megarl.startup import fetch_models, prepare_checkpoint, prepare_data
from megarl.training.grpo import PolicyStep
from megarl.training.reference import ReferencePolicy

PHASES = ("rollout", "scoring", "training")
"""Prompts to completions; rewards and log-probabilities to advantages; all updates."""


def measure(recipe: Recipe, options, ceilings: Ceilings) -> list[Line]:
    """Seconds of a step and of its phases; each side's are those of its median step.

    Every completion has the longest length, so that both do the same work.  The floor reads a group's prompt once, and
    knows nothing of pictures.

    Raises:
        UserError: TRL is not installed, or the prompts have videos, which its trainer does not take.
    """
    if find_spec("trl") is None:
        raise UserError("--only grpo: the peer is TRL, which is not installed; run pip install 'megarl[test]'")
    from megarl.bench.trl_peer import TrlPeer

    if options.prompts is not None:
        recipe = _with_prompts(recipe, options)
    ours = _Step(recipe)
    peer = TrlPeer(ours.checkpoint, ours.run, ours.prompts)
    steps = peer.steps(options.rounds, before_each=ours.step)
    seconds = [sorted(side[1:], key=sum)[options.rounds // 2] for side in (ours.seconds, steps)]  # the first warms up
    return list(_lines(ours, seconds, Floors(ceilings, ours.run.policy.model)))


def _lines(ours: "_Step", seconds: list[tuple[float, ...]], floors: Floors):
    algorithm, new = ours.run.recipe.algorithm, ours.sampling.max_new_tokens
    prompts, group = len(ours.prompts), algorithm.group_size
    length = sum(prompt.ids.numel() for prompt in ours.prompts) / prompts
    training = floors.training_step(prompts * group, length, new)
    floor = (
        floors.generation(prompts * group, length, new, of_a_prompt=group),
        training / 3 * (1 + (algorithm.kl_coefficient > 0)),
        training * algorithm.epochs,
    )
    name = f"GRPO step, {prompts} prompts of {length:.0f} x {group} of {new} tokens"
    yield Line(name, "s", *map(sum, (*seconds, floor)))
    for phase, *costs in zip(PHASES, *seconds, floor, strict=True):
        yield Line(f"{name}: {phase}", "s", *costs)


@dataclass
class _Step:
    """megarl's side: the parts of a run, and its loop without what surrounds it."""

    recipe: Recipe

    def __post_init__(self):
        ranks, folder = start_ranks(), Path(self.recipe.run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        prepare_data(self.recipe)
        recipe = fetch_models(self.recipe, ranks)
        self.run: Run = build_run(recipe, folder, ranks)
        self.checkpoint = prepare_checkpoint(recipe, folder)
        if self.run.parts.quantization is not None:
            self.run.calibrate()
        self.run.trainer.begin(rl_optimizer(recipe))
        reference = None
        if recipe.algorithm.kl_coefficient:
            reference = ReferencePolicy(self.run.policy.model, changed=self.run.trainer.changed)
        self._policy_step = PolicyStep(
            self.run.trainer, reference, step_options(recipe), self.run.merge_size, self.run.cost
        )
        self.sampling = SamplingOptions(recipe.rollout.max_new_tokens, (), recipe.rollout.temperature)
        self.prompts, _ = self.run.step_prompts(1)
        self.seconds: list[tuple[float, ...]] = []
        """Of each step so far, by phase."""

    def step(self) -> None:
        """One step on the prompts of the recipe's first."""
        run, size = self.run, self.run.recipe.algorithm.group_size

        def rollout():
            prompts, keys = run.step_prompts(1)
            groups = generate_spread(run.engine, prompts, self.sampling, size, keys)
            self._groups = run.balance(run.offered(1, groups))

        def scoring():
            self._samples = run.judge(self._groups).samples
            self._scored = self._policy_step.score(self._samples)
            self._credit = self._policy_step.credit(self._samples, self._scored)

        def training():
            self._policy_step.update(self._samples, self._scored, self._credit)
            run.sync()

        self.seconds.append(tuple(map(timed, (rollout, scoring, training))))


def _with_prompts(recipe: Recipe, options) -> Recipe:
    """The recipe with prompts of random letters in place of its data, written into its run folder."""
    folder = Path(recipe.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "algorithm.prompts_per_step": options.prompts,
        "algorithm.group_size": options.group,
        "rollout.max_new_tokens": options.new_tokens,
        "data.path": folder / "letters",
        "data.generator": "null",
        "data.max_prompt_tokens": 2 * options.prompt_tokens + 64,  # with what the chat template adds
        "environment.name": "exact_match",
    }
    draws = random.Random(recipe.seed)
    rows = [
        row(["".join(draws.choice("abcdefghij") for _ in range(options.prompt_tokens))], "a", "letters")
        for _ in range(options.prompts)
    ]
    (folder / "letters").mkdir(exist_ok=True)
    write_rows(folder / "letters", rows, rows[:1])
    return load_recipe(options.recipe, [*options.overrides, *(f"{key}={value}" for key, value in sizes.items())])
