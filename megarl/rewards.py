"""From sampled groups to samples with rewards, and what there is to say about them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.advantages import constant_groups
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
    metrics: dict[str, float]
    """Means over all ranks."""


def judge(groups: list[list[Rollout]], environment: Environment, decode) -> Batch:
    """Scores every rollout.

    Args:
        decode: `(ids) -> text`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    texts = [decode(rollout.ids) for rollout in rollouts]
    scores = [
        environment.score(text, r.finished, r.prompt.prompt.answer) for text, r in zip(texts, rollouts, strict=True)
    ]
    samples = [
        Sample(TokenSequence(r.prompt, r.ids), r.log_probs, score.components)
        for r, score in zip(rollouts, scores, strict=True)
    ]
    rewards = torch.tensor([score.reward for score in scores]).view(len(groups), -1)
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
