"""Held-out accuracy through the same engine that samples the rollouts."""

from collections.abc import Callable

import torch

from megarl.data.sampler import shard
from megarl.options import evaluation_options
from megarl.run import Run, draw_key
from megarl.training.reduce import over

MOST_SOURCES = 32
"""More are not reported one by one: a data set that names each row's origin would fill the log."""


def evaluate(run: Run, alive: Callable[[], None] = lambda: None) -> tuple[float, dict[str, float]]:
    """Share of the held-out prompts answered right, and that of each source where there are 2 to `MOST_SOURCES`
    of them.  `alive` is called now and then.  Collective."""
    engines = run.engine.groups.dp_cp
    sources = sorted(set(run.test_prompts.sources))
    column = {source: number for number, source in enumerate(sources)}
    mine = shard(range(len(run.test_prompts)), engines.rank(), engines.size())
    sampling = evaluation_options(run.recipe, run.stop_ids)
    keys = [draw_key(run.recipe.seed, "test", 0, place) for place in mine]
    batch = run.recipe.rollout.max_requests  # bounds the prompts, and their pixels, that exist at a time
    counts = torch.zeros(2, len(sources), dtype=torch.int64)  # right, asked
    run.encoder.prefetch([run.test_prompts[place] for place in mine[:batch]])
    # As often on each rank: those that share experts generate together, also where one has no prompt left.
    for start in range(0, -(-len(run.test_prompts) // engines.size()), batch):
        alive()
        prompts = [run.encoder.encode(run.test_prompts[place]) for place in mine[start : start + batch]]
        run.encoder.prefetch([run.test_prompts[place] for place in mine[start + batch :][:batch]])
        rollouts = [one for (one,) in run.engine.generate(prompts, sampling, keys=keys[start : start + batch])]
        for rollout, score in zip(rollouts, run.scores(rollouts), strict=True):
            counts[:, column[rollout.prompt.prompt.source]] += torch.tensor([score.correct, True])
    counts = over(engines, counts).double()
    right, asked = counts.sum(1).tolist()
    by_source = dict(zip(sources, (counts[0] / counts[1]).tolist(), strict=True))
    return right / asked, by_source if 1 < len(sources) <= MOST_SOURCES else {}
