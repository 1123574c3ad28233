"""`python -m megarl.verify.one_rank_peer FOLDER`: the same rollouts scored and differentiated by one rank alone."""

import sys
from pathlib import Path

import torch

from megarl.platform import launch
from megarl.platform.kernels import kernels
from megarl.recipe import ParallelSection, Recipe, load_recipe
from megarl.verify.peers import CASES, Answers, Asked, answered

RECIPE = "recipe.yaml"
"""File name of the job's recipe in the working folder."""


def answer(folder: Path) -> None:
    """Reads recipe and question, writes the answers under the name of the job's type."""
    recipe = load_recipe(folder / RECIPE)
    launch.start({}, recipe.seed, recipe.rollout.cuda_graphs and kernels().gpu)
    asked: Asked = torch.load(folder / CASES, weights_only=False)
    torch.save({str(asked.dtype).removeprefix("torch."): _answers(recipe, asked)}, folder / answered("one_rank"))


def _answers(recipe: Recipe, asked: Asked) -> Answers:
    from megarl.models.build import load_policy
    from megarl.options import model_options
    from megarl.training.trainer import Trainer
    from megarl.verify.job import Training

    alone = recipe.model_copy(update={"parallel": ParallelSection()})
    policy = load_policy(asked.checkpoint, model_options(alone))
    trainer = Trainer(policy.model, asked.temperature, recipe.training.log_prob_chunk)
    training = Training(policy, trainer, asked.objective, recipe.training.tokens_per_row)
    rows = training.rows(dict(enumerate(asked.cases)))
    scores = training.score(rows)
    gradients, loss = training.gradients(asked.cases, rows)
    return Answers([scores[index] for index in range(len(asked.cases))], gradients, loss)


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
