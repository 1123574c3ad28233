"""From sampled groups to samples with advantages, and what there is to say about them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, constant_groups
from megarl.environments.score import Environment, Score
from megarl.packing.rows import TokenSequence
from megarl.rollout.engine import Rollout
from megarl.training.grpo import Sample
from megarl.training.reduce import over_data_parallel


@dataclass(frozen=True, eq=False)
class Batch:
    """This rank's rollouts of a step, judged; flat, groups one after another."""

    rollouts: list[Rollout]
    texts: list[str]
    scores: list[Score]
    samples: list[Sample]
    metrics: dict[str, float]
    """Means over all ranks."""


def judge(groups: list[list[Rollout]], environment: Environment, decode, advantage: str) -> Batch:
    """Scores every rollout and weighs it against its group.

    Args:
        decode: `(ids) -> text`.
        advantage: a name in `ADVANTAGES`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    texts = [decode(rollout.ids) for rollout in rollouts]
    scores = [
        environment.score(text, r.finished, r.prompt.prompt.answer) for text, r in zip(texts, rollouts, strict=True)
    ]
    rewards = torch.tensor([s.reward for s in scores]).view(len(groups), -1)
    advantages = ADVANTAGES[advantage](rewards).flatten().tolist()
    samples = [
        Sample(TokenSequence(r.prompt, r.ids, r.routing_indices), r.log_probs, a)
        for r, a in zip(rollouts, advantages, strict=True)
    ]
    return Batch(rollouts, texts, scores, samples, _metrics(rollouts, scores, constant_groups(rewards)))


def _metrics(rollouts: list[Rollout], scores: list[Score], constant: Tensor) -> dict[str, float]:
    per_rollout = torch.tensor(
        [[s.reward, s.correct, s.well_formed, r.finished, r.ids.numel()] for s, r in zip(scores, rollouts, strict=True)]
    ).double()
    counts = torch.tensor([len(rollouts), constant.numel(), int(constant.sum())]).double()
    total = over_data_parallel(torch.cat([per_rollout.sum(0), counts]))
    reward, correct, well_formed, finished, tokens, n, groups, constant_count = total.tolist()
    return {
        "reward/mean": reward / n,
        "reward/accuracy": correct / n,
        "reward/well_formed": well_formed / n,
        "reward/constant_groups": constant_count / groups,
        "rollout/finished": finished / n,
        "rollout/mean_length": tokens / n,
        "rollout/tokens": tokens,
    }
