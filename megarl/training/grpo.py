"""One GRPO step on a batch of rollouts: frozen log-probabilities first, then the updates."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.algorithms.advantages import spread
from megarl.algorithms.objective import METRICS, ObjectiveInputs, ObjectiveOptions, cross_entropy, objective
from megarl.packing.cost import CostModel
from megarl.packing.rows import PackedRow, TokenSequence, by_member, pack
from megarl.training.reduce import over_data_parallel
from megarl.training.reference import ReferencePolicy
from megarl.training.trainer import Trainer, row_multiple


@dataclass(frozen=True, eq=False)
class Sample:
    """A rollout as training takes it."""

    sequence: TokenSequence
    rollout_log_probs: Tensor
    """float32 `[completion]`: what the engine sampled with."""
    advantage: float


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probabilities per sample before the first update, float32 `[completion]` each."""

    trainer: list[Tensor]
    reference: list[Tensor] | None
    metrics: dict[str, float] = field(default_factory=dict)
    """What scoring alone can tell, over all ranks."""


@dataclass(frozen=True)
class StepOptions:
    objective: ObjectiveOptions
    epochs: int
    minibatches: int
    old_log_probs: str
    """`trainer` or `rollout`: the denominator of the ratio."""
    tokens_per_row: int


class PolicyStep:
    """Scores and trains on this rank's samples."""

    def __init__(
        self,
        trainer: Trainer,
        reference: ReferencePolicy | None,
        options: StepOptions,
        merge_size: int,
        cost: CostModel | None = None,
    ):
        self._trainer, self._reference, self._options = trainer, reference, options
        self._merge_size, self._cost = merge_size, cost

    def score(self, samples: list[Sample]) -> Scored:
        """Log-probabilities under the weights that sampled, and under the reference policy where its weight
        is not 0.

        The policy's experts are those of the rollouts, where these have them.  The reference policy's own router
        chooses: it is a distribution of its own, and was never sampled from; sent along another policy's way it would
        be one that nobody asked to stay close to, and would change with what the policy's router learns."""
        rows = self._pack(samples)
        trainer, rerouted = self._scored(rows), self._trainer.rerouted()
        metrics = {} if rerouted is None else {"mismatch/routing": rerouted}
        if self._reference is None:
            return Scored(trainer, None, metrics)
        with self._reference.swapped_in():
            return Scored(trainer, self._scored([replace(row, routing_indices=None) for row in rows]), metrics)

    def _scored(self, rows: list[PackedRow]) -> list[Tensor]:
        return list(by_member(rows, self._trainer.score(rows)).values())

    def update(self, samples: list[Sample], scored: Scored) -> dict[str, float]:
        """All epochs and minibatches; samples of a group stay in one minibatch.

        Returns:
            Means over the batch's tokens and updates, equal on all ranks.
        """
        size = len(samples) // self._options.minibatches
        sums, tokens, results = torch.zeros(len(METRICS)), 0, []
        for _ in range(self._options.epochs):
            for start in range(0, len(samples), size):
                chosen = range(start, start + size)
                rows = self._pack([samples[i] for i in chosen])

                def loss(row: PackedRow, log_probs: Tensor, entropy: Tensor, chosen=chosen):
                    members = [chosen[m] for m in row.members]
                    return objective(self._inputs(samples, scored, members, row, log_probs, entropy), self._objective)

                result, added = self._trainer.update(rows, loss)
                results.append(result)
                sums += added.cpu()
                tokens += sum(row.targets.numel() for row in rows)
        total = over_data_parallel(torch.cat([sums, torch.tensor([float(tokens)])]))
        means = dict(zip(METRICS, (total[:-1] / total[-1].clamp(min=1)).tolist(), strict=True))
        return {
            **means,
            "optimizer/grad_norm": sum(r.grad_norm for r in results) / len(results),
            "optimizer/learning_rate": results[-1].learning_rate,
            "optimizer/skipped_updates": sum(not r.applied for r in results),
        }

    @property
    def _objective(self) -> ObjectiveOptions:
        return self._options.objective

    def _inputs(self, samples, scored: Scored, members: list[int], row: PackedRow, log_probs, entropy):
        device = log_probs.device
        if self._options.old_log_probs == "rollout":
            old = [samples[m].rollout_log_probs for m in members]
        else:
            old = [scored.trainer[m] for m in members]
        advantages = torch.tensor([samples[m].advantage for m in members], device=device)
        reference = None
        if scored.reference is not None:
            reference = torch.cat([scored.reference[m] for m in members]).to(device)
        return ObjectiveInputs(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=torch.cat(old).to(device),
            advantages=spread(advantages, row.lengths),
            reference_log_probs=reference,
        )

    def _pack(self, samples: list[Sample]) -> list[PackedRow]:
        sequences = [sample.sequence for sample in samples]
        return pack(sequences, self._options.tokens_per_row, self._merge_size, row_multiple(), self._cost)


def supervised_update(
    trainer: Trainer,
    sequences: list[TokenSequence],
    tokens_per_row: int,
    merge_size: int,
    cost: CostModel | None = None,
) -> float:
    """One update towards the given completions; returns the mean loss per token over all ranks, in nats."""
    rows = pack(sequences, tokens_per_row, merge_size, row_multiple(), cost)

    def loss(row: PackedRow, log_probs: Tensor, entropy: Tensor):
        total = cross_entropy(log_probs)
        return total, total.detach()

    _, added = trainer.update(rows, loss)
    tokens = sum(row.targets.numel() for row in rows)
    total = over_data_parallel(torch.tensor([float(added), float(tokens)]))
    return float(total[0] / total[1])
