"""The two passes over logits: one reads what log-probabilities and entropies need, one writes their gradient.

In torch, which defines them, and for a GPU in Triton, where each reads the logits once.
"""

from types import ModuleType

import torch
from torch import Tensor


def passes(logits: Tensor) -> ModuleType | type["Torch"]:
    """What passes over these logits."""
    if logits.is_cuda:
        from megarl.training import softmax_triton

        return softmax_triton
    return Torch


class Torch:
    @staticmethod
    def statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """float32 `[4, n]` of z = logits / temperature: the maximum m, sum exp(z - m), sum exp(z - m) (z - m), and z of
        the target.

        Args:
            logits: `[n, v]`, of a part of the vocabulary.
            targets: int64 `[n]`, counted from its first entry; one outside of it has z = 0.
            temperature: > 0.
        """
        z = logits.float() / temperature
        maximum = z.max(-1).values
        shifted = z - maximum[:, None]
        exponential = shifted.exp()
        here = (targets >= 0) & (targets < z.shape[1])
        chosen = z.gather(1, targets.clamp(0, z.shape[1] - 1)[:, None])[:, 0].where(here, 0)
        return torch.stack([maximum, exponential.sum(-1), (exponential * shifted).sum(-1), chosen])

    @staticmethod
    def gradient_(
        logits: Tensor,
        targets: Tensor,
        maximum: Tensor,
        log_total: Tensor,
        mean: Tensor,
        gradient: Tensor,
        temperature: float,
    ) -> None:
        """Writes over the logits the gradient of what depends on log-probabilities and entropies.

        Args:
            logits, targets, temperature: as for `statistics`.
            maximum, log_total, mean: float32 `[n]`, over the whole vocabulary: m, log sum exp(z - m), mean of z - m.
            gradient: float32 `[n, 2]`, with respect to log-probability and entropy.
        """
        shifted = logits.float() / temperature - maximum[:, None]
        p = (shifted - log_total[:, None]).exp()
        of_log_prob, of_entropy = gradient[:, :1], gradient[:, 1:]
        out = p * (of_entropy * (mean[:, None] - shifted) - of_log_prob)
        here = (targets >= 0) & (targets < out.shape[1])
        out.scatter_add_(1, targets.clamp(0, out.shape[1] - 1)[:, None], of_log_prob.where(here[:, None], 0))
        logits.copy_(out / temperature)
