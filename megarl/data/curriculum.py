"""Prompts drawn by how often they are solved: those that are solved now and then teach the most."""

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.data.prompt import Prompt
from megarl.data.sampler import PromptSampler


class SolveRates:
    """The running solve rate of each prompt of a data set: state of a run, the same on all ranks.

    p = (solved + 1) / (tried + 2), the mean of a Beta distribution that begins as the uniform one; each time that a
    prompt is tried again its counts are multiplied by the discount first, since the policy has changed (Qu et al. 2025,
    MoPPS, arXiv 2507.04632).
    """

    def __init__(self, prompts: int, discount: float):
        """
        Args:
            prompts: of the data set.
            discount: 0 .. 1: 1 forgets nothing, 0 keeps the last try alone.
        """
        self._discount = discount
        self.counts = np.zeros((2, prompts))
        """float64 `[2, prompts]`: completions that were right, and all, discounted."""
        self.step = 0
        """RL steps whose outcomes are in."""

    def update(self, step: int, outcomes: Mapping[int, tuple[int, int]]) -> None:
        """Takes in a step, from 1.

        Args:
            outcomes: right completions, and all, of the prompts that were tried, by their places in the data set.
        """
        for index, outcome in outcomes.items():
            self.counts[:, index] = self._discount * self.counts[:, index] + outcome
        self.step = step

    def restore(self, step: int, counts: np.ndarray) -> None:
        """Goes on after a step with the counts that there were."""
        self.counts[:] = counts
        self.step = step

    @property
    def weights(self) -> np.ndarray:
        """float64 `[prompts]`: p (1 - p), the variance of a completion's success; 1/4 of a prompt never tried."""
        rate = (self.counts[0] + 1) / (self.counts[1] + 2)
        return rate * (1 - rate)

    def metrics(self) -> dict[str, float]:
        """Mean of solved / tried over the prompts that were tried, and the share of the others."""
        solved, tried = self.counts[:, self.counts[1] > 0]
        rate = float((solved / tried).mean()) if tried.size else 0.0
        return {"prompts/solve_rate": rate, "prompts/never_tried": 1 - tried.size / self.counts.shape[1]}


class CurriculumSampler:
    """Draws a share of each step's prompts by the weights of their solve rates; the others come in shuffled epochs, so
    that each prompt is tried in every epoch, whatever its rate.

    Foster et al. 2025, "Learning to Reason at the Frontier of Learnability" (arXiv 2502.12272), weigh by p (1 - p);
    Leng et al. 2025, MMR1 (arXiv 2509.21268), mix a share of prompts that are drawn by weights with uniform ones.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, rates: SolveRates, share: float):
        """`seed` as `PromptSampler` takes it; `share`, above 0 and up to 1, is rounded to whole prompts of a step."""
        self._epochs = PromptSampler(prompts, seed)
        self._seed, self._rates, self._share = seed, rates, share

    def knows(self, step: int) -> bool:
        """Whether the outcomes of all steps before this one, from 0, are in, and of no more."""
        return step == self._rates.step

    def indices(self, step: int, count: int) -> list[int]:
        """Places in the data set of the prompts of one step, from 0, in an order of chance; all that are drawn by
        weights are distinct and none of the others'.  A function of the seed, the step and the solve rates.

        Args:
            count: at most the size of the data set.

        Raises:
            ValueError: the solve rates are not those that the step is drawn by.
        """
        if not self.knows(step):
            raise ValueError(f"step {step} is drawn by the outcomes of {step} steps, and {self._rates.step} are in")
        drawn = weighted(self._share, count)
        others = self._epochs.indices(step, count - drawn)
        weights = self._rates.weights
        weights[others] = 0
        random = np.random.RandomState([self._seed, step, 1])
        both = np.array([*others, *draw_distinct(weights, drawn, random)])
        return both[random.permutation(count)].tolist()


def weighted(share: float, count: int) -> int:
    """How many of a step's prompts are drawn by their weights."""
    return round(share * count)


def draw_distinct(weights: np.ndarray, count: int, random: np.random.RandomState) -> list[int]:
    """Places one after another, each by its part of the weights of those that are not drawn yet.

    Only sums, products and comparisons of doubles decide, which every machine computes alike: so all ranks draw the
    same.

    Args:
        weights: float64 `[n]`, at least `count` of them above 0.
    """
    weights, drawn = weights.copy(), []
    while len(drawn) < count:
        bounds = weights.cumsum()
        targets = random.random_sample(count - len(drawn)) * bounds[-1]
        targets = np.minimum(targets, np.nextafter(bounds[-1], 0))
        # A place that comes again is passed over, as in a draw that is repeated until it gives another one.
        fresh = list(dict.fromkeys(np.searchsorted(bounds, targets, side="right").tolist()))
        weights[fresh] = 0
        drawn += fresh
    return drawn
