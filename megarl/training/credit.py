"""What each rollout of a step counts for: its advantage, how far its tokens are trusted, whether it is trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageOptions, advantages
from megarl.algorithms.corrections import CorrectionOptions, correct
from megarl.algorithms.kl import ESTIMATORS, Estimator
from megarl.algorithms.sequences import sequence_sums
from megarl.packing.rows import TokenSequence
from megarl.training.reduce import over_data_parallel


@dataclass(frozen=True, eq=False)
class Sample:
    """A rollout as training takes it."""

    sequence: TokenSequence
    rollout_log_probs: Tensor
    """float32 `[completion]`: what the engine sampled with."""
    rewards: tuple[float, ...]
    """Components of its reward, as many for every sample."""
    trainable: bool = True
    """False: counts in its group's baseline and is left out of the loss."""
    judged: bool = True
    """False: no reward is known.  Left out of the loss, and of what its group's rewards are compared with."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities per sample before the first update, float32 `[completion]` each."""

    trainer: list[Tensor]
    reference: list[Tensor] | None
    metrics: dict[str, float] = field(default_factory=dict)
    """What scoring alone can tell, over all ranks."""


@dataclass(frozen=True)
class CreditOptions:
    group_size: int
    advantage: AdvantageOptions = AdvantageOptions()
    correction: CorrectionOptions = CorrectionOptions()
    reward_kl_coefficient: float = 0.0
    """Weight of the KL divergence to the reference policy, summed over the completion, in the reward."""
    kl_estimator: Estimator = "k1"


@dataclass(frozen=True, eq=False)
class Credit:
    advantages: Tensor
    """float32 `[samples]`."""
    corrections: list[Tensor]
    """float32 `[completion]` per sample: factors of the policy-gradient term."""
    kept: Tensor
    """bool `[samples]`: False for those that are left out of the loss."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over all ranks."""


def assign_credit(samples: Sequence[Sample], scored: Scored, options: CreditOptions) -> Credit:
    """Collective over the data-parallel ranks.

    Args:
        samples: of this rank, groups of `group_size` one after another.
    """
    lengths = [sample.sequence.targets.numel() for sample in samples]
    engine = torch.cat([sample.rollout_log_probs for sample in samples])
    trainer = torch.cat(scored.trainer)
    rewards = torch.tensor([sample.rewards for sample in samples])
    penalty = torch.zeros(len(samples))
    if options.reward_kl_coefficient:
        kl = ESTIMATORS[options.kl_estimator](trainer, torch.cat(scored.reference))
        penalty = options.reward_kl_coefficient * sequence_sums(kl, lengths)
        rewards = torch.cat([rewards, -penalty[:, None]], 1)
    groups = rewards.view(-1, options.group_size, rewards.shape[1])
    correction = correct(trainer, engine, lengths, options.correction)
    judged = torch.tensor([sample.judged for sample in samples])
    kept = torch.tensor([sample.trainable for sample in samples]) & judged & ~correction.dropped
    sums = [
        penalty.sum(),
        correction.dropped.sum(),
        (~kept).sum(),
        torch.tensor(len(samples)),
        correction.bounded.sum(),
    ]
    total = over_data_parallel(torch.stack([x.double() for x in [*sums, torch.tensor(len(engine))]])).tolist()
    penalties, dropped, left_out, count, bounded, tokens = total
    return Credit(
        advantages(groups, options.advantage, over_data_parallel, judged.view(groups.shape[:2])).flatten(),
        list(correction.weights.split(lengths)),
        kept,
        {
            "reward/kl_penalty": penalties / count,
            "policy/left_out": left_out / count,
            "mismatch/dropped": dropped / count,
            "mismatch/bounded": bounded / tokens,
        },
    )
