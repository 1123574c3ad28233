"""From sampled groups to samples with rewards, and what there is to say about them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import constant_groups
from megarl.algorithms.overlong import overlong_penalty
from megarl.environments.score import Environment, Score
from megarl.packing.rows import TokenSequence
from megarl.rollout.engine import Rollout
from megarl.training.credit import Sample
from megarl.training.reduce import over_data_parallel


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
    def rewards(self) -> Tensor:
        """float32 `[rollouts]`: what is trained on, all components summed."""
        return torch.tensor([sum(sample.rewards) for sample in self.samples])

    @property
    def constant(self) -> Tensor:
        """bool `[groups]`: those whose rollouts all earned the same, in each component where these count apart."""
        if not self.groups:
            return torch.zeros(0, dtype=torch.bool)
        rewards = (
            torch.tensor([sample.rewards for sample in self.samples]) if self.by_component else self.rewards[:, None]
        )
        return torch.stack([constant_groups(part.view(self.groups, -1)) for part in rewards.T]).all(0)

    def metrics(self) -> dict[str, float]:
        """Means over all ranks.  Collective."""
        per_rollout = torch.tensor(
            [
                [s.correct, s.well_formed, r.finished, r.ids.numel()]
                for s, r in zip(self.scores, self.rollouts, strict=True)
            ]
        ).double()
        constant = self.constant
        counts = torch.tensor([self.rewards.double().sum(), len(self.rollouts), self.groups, int(constant.sum())])
        total = over_data_parallel(torch.cat([per_rollout.sum(0), counts.double()]))
        correct, well_formed, finished, tokens, reward, n, groups, constant_count = total.tolist()
        return {
            "reward/mean": reward / n,
            "reward/accuracy": correct / n,
            "reward/well_formed": well_formed / n,
            "reward/constant_groups": constant_count / groups,
            "rollout/finished": finished / n,
            "rollout/mean_length": tokens / n,
            "rollout/tokens": tokens,
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
    by_component: bool = False
    """The advantage weighs the components of the reward one by one."""


class Judge:
    """Scores rollouts.

    Args:
        decode: `(ids) -> text`.
    """

    def __init__(self, environment: Environment, decode: Callable[[Tensor], str], options: RewardOptions):
        self._environment, self._decode, self._options = environment, decode, options

    def __call__(self, groups: list[list[Rollout]]) -> Batch:
        rollouts = [rollout for group in groups for rollout in group]
        texts = [self._decode(rollout.ids) for rollout in rollouts]
        scores = [
            self._environment.score(text, r.finished, r.prompt.prompt.answer)
            for text, r in zip(texts, rollouts, strict=True)
        ]
        o = self._options
        added: list[tuple[float, ...]] = [()] * len(rollouts)
        if o.overlong_buffer:
            lengths = torch.tensor([rollout.ids.numel() for rollout in rollouts])
            penalties = o.overlong_penalty * overlong_penalty(lengths, o.max_new_tokens, o.overlong_buffer)
            added = [(penalty,) for penalty in penalties.tolist()]
        samples = [
            Sample(
                TokenSequence(r.prompt, r.ids, r.routing_indices),
                r.log_probs,
                (*score.components, *more),
                trainable=r.finished or not o.filter_overlong,
            )
            for r, score, more in zip(rollouts, scores, added, strict=True)
        ]
        return Batch(rollouts, texts, scores, samples, len(groups), o.by_component)

    def constant(self, groups: list[list[Rollout]]) -> Tensor:
        """`Batch.constant` of these groups."""
        return self(groups).constant
