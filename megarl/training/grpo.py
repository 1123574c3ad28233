"""One GRPO step on a batch of rollouts: frozen log-probabilities first, then the updates."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.algorithms.normalization import Normalization, batch_totals, sequence_weights
from megarl.algorithms.objective import METRICS, ObjectiveInputs, ObjectiveOptions, cross_entropy, objective
from megarl.algorithms.perception import PerceptionInputs
from megarl.algorithms.sequences import spread
from megarl.media.mask import mask_patches
from megarl.packing.cost import CostModel
from megarl.packing.rows import PackedRow, TokenSequence, by_member, pack
from megarl.training.credit import Credit, CreditOptions, Sample, Scored, assign_credit
from megarl.training.reduce import over_data_parallel
from megarl.training.reference import ReferencePolicy
from megarl.training.trainer import Trainer


@dataclass(frozen=True)
class StepOptions:
    objective: ObjectiveOptions
    credit: CreditOptions
    epochs: int
    minibatches: int
    old_log_probs: str
    """`trainer` or `rollout`: the denominator of the ratio."""
    tokens_per_row: int
    normalization: Normalization = "token"
    max_new_tokens: int = 1
    """The divisor of `constant` normalization."""
    seed: int = 1
    """Of the patches that are hidden where the objective's perception term is on."""


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

    def credit(self, samples: list[Sample], scored: Scored) -> Credit:
        """What each sample counts for in the updates.  Collective."""
        return assign_credit(samples, scored, self._options.credit)

    def update(self, samples: list[Sample], scored: Scored, credit: Credit, step: int = 1) -> dict[str, float]:
        """All epochs and minibatches; samples of a group stay in one minibatch.

        Args:
            step: decides which patches are hidden from the twin of a row.

        Returns:
            Means over the batch's tokens and updates, equal on all ranks.
        """
        size = len(samples) // self._options.minibatches
        sums, tokens, results = torch.zeros(len(METRICS)), 0, []
        for _ in range(self._options.epochs):
            for start in range(0, len(samples), size):
                chosen = range(start, start + size)
                rows = self._pack([samples[i] for i in chosen])
                weights = self._weights([samples[i] for i in chosen], credit.kept[start : start + size])

                def loss(row: PackedRow, *outputs: Tensor, chosen=chosen, weights=weights):
                    members = [chosen[m] for m in row.members]
                    inputs = self._inputs(samples, scored, credit, members, weights[list(row.members)], *outputs)
                    return objective(inputs, self._options.objective)

                result, added = self._trainer.update(rows, loss, self._twin(step))
                results.append(result)
                sums += added.cpu()
                tokens += sum(row.targets.numel() for row in rows)
        total = over_data_parallel(torch.cat([sums, torch.tensor([float(tokens)])]))
        means = dict(zip(METRICS, (total[:-1] / total[-1].clamp(min=1)).tolist(), strict=True))
        return {
            **credit.metrics,
            **means,
            "policy/ratio_deviation": means["policy/ratio_deviation"] ** 0.5,
            "optimizer/grad_norm": sum(r.grad_norm for r in results) / len(results),
            "optimizer/learning_rate": results[-1].learning_rate,
            "optimizer/skipped_updates": sum(not r.applied for r in results),
        }

    def _weights(self, samples: list[Sample], kept: Tensor) -> Tensor:
        """float32 `[samples]`: of each one's tokens in the loss of the minibatch that all ranks share."""
        lengths = torch.tensor([sample.sequence.targets.numel() for sample in samples])
        totals = over_data_parallel(batch_totals(lengths, kept))
        return sequence_weights(lengths, kept, totals, self._options.normalization, self._options.max_new_tokens)

    def _twin(self, step: int) -> Callable[[PackedRow], PackedRow] | None:
        """Gives a row in which a part of the media is hidden, where the objective compares the two."""
        perception = self._options.objective.perception
        if not perception.coefficient:
            return None
        key = f"{self._options.seed}/{step}/"
        return lambda row: replace(
            row, items=tuple(mask_patches(item, perception.mask_ratio, key) for item in row.items)
        )

    def _inputs(
        self,
        samples: list[Sample],
        scored: Scored,
        credit: Credit,
        members: list[int],
        weights: Tensor,
        log_probs: Tensor,
        entropy: Tensor,
        *masked: Tensor,
    ) -> ObjectiveInputs:
        """Of a row that holds `members` of the samples, each of whose tokens has its weight in `weights`; `masked` are
        log-probabilities and entropies of the row's twin, where it has one."""
        device = log_probs.device
        lengths = [samples[m].sequence.targets.numel() for m in members]

        def tokens(values: list[Tensor]) -> Tensor:
            return torch.cat([values[m] for m in members]).to(device)

        old = scored.trainer
        if self._options.old_log_probs == "rollout":
            old = [sample.rollout_log_probs for sample in samples]
        perception = None
        if masked:
            sees = torch.tensor([bool(samples[m].sequence.prompt.items) for m in members])
            perception = PerceptionInputs(*masked, spread(sees, lengths).to(device))
        return ObjectiveInputs(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=tokens(old),
            advantages=spread(credit.advantages[members], lengths).to(device),
            lengths=lengths,
            reference_log_probs=tokens(scored.reference) if scored.reference is not None else None,
            corrections=tokens(credit.corrections),
            weights=spread(weights, lengths).to(device),
            perception=perception,
        )

    def _pack(self, samples: list[Sample]) -> list[PackedRow]:
        sequences = [sample.sequence for sample in samples]
        return pack(sequences, self._options.tokens_per_row, self._merge_size, self._trainer.alignment, self._cost)


def supervised_update(
    trainer: Trainer,
    sequences: list[TokenSequence],
    tokens_per_row: int,
    merge_size: int,
    cost: CostModel | None = None,
) -> float:
    """One update towards the given completions; returns the mean loss per token over all ranks, in nats."""
    rows = pack(sequences, tokens_per_row, merge_size, trainer.alignment, cost)

    def loss(row: PackedRow, log_probs: Tensor, entropy: Tensor):
        total = cross_entropy(log_probs)
        return total, total.detach()

    _, added = trainer.update(rows, loss)
    tokens = sum(row.targets.numel() for row in rows)
    total = over_data_parallel(torch.tensor([float(added), float(tokens)]))
    return float(total[0] / total[1])
