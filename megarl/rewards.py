"""From sampled groups to samples with rewards, and what there is to say about them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.advantages import constant_groups
from megarl.algorithms.overlong import overlong_penalty
from megarl.data.prompt import Prompt
from megarl.environments.score import Attempt, Score
from megarl.parallel.agreement import gathered
from megarl.rollout.engine import Rollout
from megarl.training.credit import Sample
from megarl.training.reduce import over_data_parallel

MOST_FAILURES = 100


@dataclass(frozen=True)
class Failure:
    """A completion that could not be judged."""

    row: int
    """`Prompt.row`."""
    source: str
    reason: str
    completion: str


class Scorer:
    """Scores rollouts.  Ranks that have the same ones score a part each and learn the others' scores, so that they go
    on with the same rewards also where the time that a reward took decides.

    Args:
        score: of a rank, for each of some attempts in order.
        decode: `(ids) -> text`.
    """

    def __init__(self, score: Callable[[Sequence[Attempt]], list[Score]], decode: Callable[[Tensor], str]):
        self._judge, self._decode = score, decode
        self._failed, self._failures = 0, []

    def __call__(self, rollouts: Sequence[Rollout], same: dist.ProcessGroup) -> tuple[list[str], list[Score]]:
        """Texts and scores of the rollouts, of which the ranks of `same` have the same.  Collective over them."""
        texts = [self._decode(rollout.ids) for rollout in rollouts]
        attempts = [attempt_of(*pair) for pair in zip(rollouts, texts, strict=True)]
        verdicts, ranks = [rollout.verdict for rollout in rollouts], same.size()
        mine = slice(same.rank(), None, ranks)
        scores: list[Score | None] = [None] * len(attempts)
        for rank, part in enumerate(gathered(self._score(attempts[mine], verdicts[mine]), same)):
            scores[rank::ranks] = part
        return texts, scores

    def _score(self, attempts: Sequence[Attempt], verdicts: Sequence[Score | None]) -> list[Score]:
        """Of those that have no verdict yet, the judge's."""
        judged = iter(self._judge([a for a, verdict in zip(attempts, verdicts, strict=True) if verdict is None]))
        scores = [next(judged) if verdict is None else verdict for verdict in verdicts]
        failures = [Failure(a.row, a.source, s.error, a.text) for a, s in zip(attempts, scores, strict=True) if s.error]
        self._failed += len(failures)
        self._failures += failures[: MOST_FAILURES - len(self._failures)]
        return scores

    def take_failures(self) -> tuple[int, list[Failure]]:
        """How many completions this rank could not judge since the last call, and the first `MOST_FAILURES` of them.
        Those that another rank judged for this one are that rank's."""
        taken = self._failed, self._failures
        self._failed, self._failures = 0, []
        return taken


def attempt_of(rollout: Rollout, text: str) -> Attempt:
    """What an environment is given of a rollout with this text."""
    prompt = rollout.prompt.prompt
    return Attempt(text, rollout.finished, prompt.answer, prompt.source, prompt.row, _question(prompt))


def _question(prompt: Prompt) -> str:
    """Text of the last message."""
    parts = prompt.messages[-1]["content"] if prompt.messages else ()
    return "\n".join(part["text"] for part in parts if part["type"] == "text")


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's rollouts of a step, judged; flat, groups one after another."""

    rollouts: list[Rollout]
    texts: list[str]
    scores: list[Score]
    samples: list[Sample]
    groups: int
    by_component: bool = False
    """Components of the reward are weighed one by one."""

    @property
    def judged(self) -> Tensor:
        """bool `[rollouts]`: those whose reward is known, or counts as 0."""
        return torch.tensor([sample.judged for sample in self.samples], dtype=torch.bool)

    @property
    def rewards(self) -> Tensor:
        """float32 `[rollouts]`: what is trained on, all components summed."""
        return torch.tensor([sum(sample.rewards) for sample in self.samples])

    @property
    def constant(self) -> Tensor:
        """bool `[groups]`: those whose rollouts all earned the same, in each component where these count apart; of the
        rollouts that were judged."""
        if not self.groups:
            return torch.zeros(0, dtype=torch.bool)
        rewards = (
            torch.tensor([sample.rewards for sample in self.samples]) if self.by_component else self.rewards[:, None]
        )
        judged = self.judged.view(self.groups, -1)
        return torch.stack([constant_groups(part.view(self.groups, -1), judged) for part in rewards.T]).all(0)

    def metrics(self) -> dict[str, float]:
        """Means over all ranks; of rewards, over those that are known.  Collective."""
        per_rollout = torch.tensor(
            [
                [
                    s.correct,
                    s.well_formed,
                    s.error is not None,
                    r.finished,
                    r.sampled_log_probs.numel(),
                    1 + len(r.turns),
                ]
                for s, r in zip(self.scores, self.rollouts, strict=True)
            ]
        ).double()
        constant, judged = self.constant, self.judged
        rewards = self.rewards[judged].double().sum()
        counts = torch.tensor([rewards, judged.sum(), len(self.rollouts), self.groups, int(constant.sum())])
        total = over_data_parallel(torch.cat([per_rollout.sum(0), counts.double()]))
        correct, well_formed, failures, finished, tokens, turns, reward, known, n, groups, constants = total.tolist()
        known = max(known, 1)
        return {
            "reward/mean": reward / known,
            "reward/accuracy": correct / known,
            "reward/well_formed": well_formed / known,
            "reward/failed": failures / n,
            "reward/constant_groups": constants / groups,
            "rollout/finished": finished / n,
            "rollout/mean_length": tokens / n,
            "rollout/tokens": tokens,
            "rollout/turns": turns / n,
        }


@dataclass(frozen=True)
class RewardOptions:
    """What a reward depends on beside the answer."""

    max_new_tokens: int
    overlong_buffer: int = 0
    """Tokens before `max_new_tokens` over which the penalty rises; 0: none."""
    overlong_penalty: float = 1.0
    filter_overlong: bool = False
    """Leave completions that no stop token ended out of the loss."""
    drop_failed: bool = False
    """Leave completions that could not be judged out of the loss and of their group's statistics; else they earn 0."""
    by_component: bool = False
    """The advantage weighs the components of the reward one by one."""


class Judge:
    """Scores groups of rollouts and makes them samples."""

    def __init__(self, scorer: Scorer, options: RewardOptions):
        self._scorer, self._options = scorer, options

    def __call__(self, groups: list[list[Rollout]], same: dist.ProcessGroup) -> Batch:
        """Collective over the ranks of `same`, which have the same groups."""
        rollouts = [rollout for group in groups for rollout in group]
        texts, scores = self._scorer(rollouts, same)
        o = self._options
        added: list[tuple[float, ...]] = [()] * len(rollouts)
        if o.overlong_buffer:
            lengths = torch.tensor([rollout.ids.numel() for rollout in rollouts])
            penalties = o.overlong_penalty * overlong_penalty(lengths, o.max_new_tokens, o.overlong_buffer)
            added = [(penalty,) for penalty in penalties.tolist()]
        samples = [
            Sample(
                r.sequence,
                r.sampled_log_probs,
                (*score.components, *more),
                trainable=r.finished or not o.filter_overlong,
                judged=score.error is None or not o.drop_failed,
            )
            for r, score, more in zip(rollouts, scores, added, strict=True)
        ]
        return Batch(rollouts, texts, scores, samples, len(groups), o.by_component)
