"""Held-out accuracy through the same engine that samples the rollouts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megarl.data.sampler import shard
from megarl.media.item import MODALITIES, EncodedPrompt
from megarl.observe.accuracy import Tally
from megarl.options import evaluation_options
from megarl.rollout.engine import Rollout, RolloutEngine
from megarl.rollout.sampling import SamplingOptions
from megarl.run import HeldOut, draw_key
from megarl.training.reduce import over

MOST_SOURCES = 32
"""More are not reported one by one: a data set that names each row's origin would fill the log."""

Accuracy = dict[str, float]
"""By name, see `megarl.observe.accuracy.Tally.accuracy`."""


@dataclass(frozen=True)
class Evaluation:
    prompts: int
    overall: Accuracy
    by_source: dict[str, Accuracy]
    """Where there are 2 to `MOST_SOURCES` of them."""
    by_modality: dict[str, Accuracy]
    """Where there are several, in the order of `megarl.media.item.MODALITIES`."""

    @property
    def accuracy(self) -> float:
        """Share of right answers over all samples of all prompts."""
        return self.overall["accuracy"]

    def metrics(self) -> dict[str, float]:
        """By their names in the log."""
        values = {f"eval/{name}": value for name, value in self.overall.items()}
        for source, accuracy in self.by_source.items():
            values |= {f"eval/{name}/{source}": value for name, value in accuracy.items()}
        if len(self.overall) > 1:  # several samples
            for modality, accuracy in self.by_modality.items():
                values |= {f"eval/{name}/modality/{modality}": value for name, value in accuracy.items()}
        return values


def evaluate(run: HeldOut, alive: Callable[[], None] = lambda: None) -> Evaluation:
    """Answers each held-out prompt `evaluation.samples` times.  A draw is a function of the seed and of the places of
    the prompt, of the sample and of the token.  `alive` is called now and then.  Collective."""
    engines, samples = run.engine.groups.dp_cp, run.recipe.evaluation.samples
    sources = sorted(set(run.test_prompts.sources))
    tally = Tally([*(("source", s) for s in sources), *(("modality", m) for m in MODALITIES)], samples)
    mine = shard(range(len(run.test_prompts)), engines.rank(), engines.size())
    sampling = evaluation_options(run.recipe, run.stop_ids)
    keys = [draw_key(run.recipe.seed, "test", 0, place) for place in mine]
    # Bounds the prompts, and their pixels, that exist at a time.
    batch = run.recipe.rollout.max_requests // samples
    run.encoder.prefetch([run.test_prompts[place] for place in mine[:batch]])
    # As often on each rank: those that share experts generate together, also where one has no prompt left.
    for start in range(0, -(-len(run.test_prompts) // engines.size()), batch):
        alive()
        prompts = [run.encoder.encode(run.test_prompts[place]) for place in mine[start : start + batch]]
        run.encoder.prefetch([run.test_prompts[place] for place in mine[start + batch :][:batch]])
        some = keys[start : start + batch]
        groups = run.engine.generate(prompts, sampling, samples, some)
        groups = run.conversed(groups, some, partial(_generate, run.engine, sampling), run.engine.groups.tp)
        judged = iter(run.scores([rollout for rollouts in groups for rollout in rollouts]))
        for encoded, rollouts in zip(prompts, groups, strict=True):
            scores = [next(judged) for _ in rollouts]
            answers = [
                (run.text(rollout.ids).strip() if score.answer is None else score.answer) if rollout.finished else None
                for score, rollout in zip(scores, rollouts, strict=True)
            ]
            kinds = ("source", encoded.prompt.source), ("modality", encoded.modality)
            tally.add(kinds, [score.correct for score in scores], answers)
    counts = over(engines, tally.counts)
    by_source = dict(zip(sources, counts, strict=False))
    by_modality = {m: row for m, row in zip(MODALITIES, counts[len(sources) :], strict=True) if row.any()}

    def each(rows: dict, most: int) -> dict[str, Accuracy]:
        return {name: tally.accuracy(row) for name, row in rows.items()} if 1 < len(rows) <= most else {}

    return Evaluation(
        len(run.test_prompts),
        tally.accuracy(counts[: len(sources)].sum(0)),
        each(by_source, MOST_SOURCES),
        each(by_modality, len(MODALITIES)),
    )


def _generate(
    engine: RolloutEngine, sampling: SamplingOptions, prompts: list[EncodedPrompt], keys: list[int]
) -> list[list[Rollout]]:
    return engine.generate(prompts, sampling, keys=keys)
