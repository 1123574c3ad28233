"""Held-out accuracy through the same engine that samples the rollouts."""

import torch

from megarl.data.sampler import shard
from megarl.options import evaluation_options
from megarl.run import Run, draw_key
from megarl.training.reduce import over_data_parallel


def evaluate(run: Run) -> float:
    """Share of the held-out prompts answered right.  Collective."""
    mine = shard(list(enumerate(run.test_prompts)), run.dp_rank, run.dp_size)
    sampling = evaluation_options(run.recipe, run.stop_ids)
    keys = [draw_key(run.recipe.seed, "test", 0, place) for place, _ in mine]
    batch = run.recipe.rollout.max_requests  # bounds the pictures whose features exist at a time
    correct = 0
    for start in range(0, len(mine), batch):
        prompts = [run.encoder.encode(prompt) for _, prompt in mine[start : start + batch]]
        for (rollout,) in run.engine.generate(prompts, sampling, keys=keys[start : start + batch]):
            score = run.environment.score(run.text(rollout.ids), rollout.finished, rollout.prompt.prompt.answer)
            correct += score.correct
        run.engine.features.clear()
    right, count = over_data_parallel(torch.tensor([correct, len(mine)])).tolist()
    return right / count
