"""Accuracy where each prompt is answered several times: mean@k, pass@k and maj@k, overall and by kinds of prompts."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import comb

import torch
from torch import Tensor


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right, from `samples` of which `right` are.

    1 - C(samples - right, k) / C(samples, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code"
    (arXiv 2107.03374), equation 1.

    Raises:
        ValueError: k is not in 1 .. samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k = {k} is not in 1 .. {samples}")
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(answers: Sequence[str | None]) -> int | None:
    """Place of the answer that most samples agree on; of several such answers the one that came first, at its first
    place.  None does not vote; None where nothing does (Wang et al. 2023, self-consistency, arXiv 2203.11171)."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return None
    return answers.index(max(votes, key=votes.__getitem__))  # max and Counter keep the order of first votes


def ks(samples: int) -> list[int]:
    """For which k `pass@k` is told beside pass@1, the accuracy: powers of two, and all samples."""
    return sorted({2**power for power in range(1, samples.bit_length())} | {samples} - {1})


class Tally:
    """Prompts counted by their kinds and by how many of their samples were right.

    Numbers are whole, so that what is computed from their sum over ranks does not depend on which rank counted what.
    """

    def __init__(self, kinds: Sequence[Hashable], samples: int):
        self._row = {kind: number for number, kind in enumerate(kinds)}
        self._samples = samples
        self.counts = torch.zeros(len(kinds), samples + 2, dtype=torch.int64)
        """int64 `[kinds, samples + 2]`: prompts of which 0 .. samples answers were right; and those of which the
        majority was."""

    def add(self, kinds: Iterable[Hashable], right: Sequence[bool], answers: Sequence[str | None]) -> None:
        """One prompt, which is of these kinds.

        Args:
            right: of each sample.
            answers: as they are compared with each other, equal ones right or wrong alike; None: no answer.
        """
        chosen = majority(answers)
        for kind in kinds:
            row = self.counts[self._row[kind]]
            row[sum(right)] += 1
            row[-1] += chosen is not None and right[chosen]

    def accuracy(self, counts: Tensor) -> dict[str, float]:
        """`accuracy`, which is mean@k; of several samples also `pass@2` and so on, and `maj@k`.

        Args:
            counts: `[samples + 2]`, a row of `counts` or a sum of rows, at least one prompt.
        """
        n = self._samples
        *by_right, voted = (int(count) for count in counts.tolist())
        prompts = sum(by_right)
        found = {"accuracy": sum(c * count for c, count in enumerate(by_right)) / (n * prompts)}
        if n == 1:
            return found
        for k in ks(n):
            found[f"pass@{k}"] = sum(pass_at_k(n, c, k) * count for c, count in enumerate(by_right)) / prompts
        return {**found, f"maj@{n}": voted / prompts}
