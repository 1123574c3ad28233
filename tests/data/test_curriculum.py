"""Solve rates and draws by them: by hand, by statistics and by what a resumed run needs."""

import numpy as np
import pytest

from megarl.data.curriculum import CurriculumSampler, SolveRates, draw_distinct, weighted
from megarl.data.prompt import Prompt
from megarl.data.sampler import PromptSampler


def prompts(count):
    return [Prompt(index, index + 1, (), "", "test") for index in range(count)]


def test_solve_rates_by_hand():
    rates = SolveRates(4, 0.5)
    assert rates.weights.tolist() == [0.25] * 4
    assert rates.metrics() == {"prompts/solve_rate": 0, "prompts/never_tried": 1}
    rates.update(1, {0: (4, 4), 1: (1, 4)})
    rates.update(2, {0: (2, 4)})
    assert rates.counts.tolist() == [[4, 1, 0, 0], [6, 4, 0, 0]]
    assert rates.weights == pytest.approx([5 / 8 * 3 / 8, 2 / 6 * 4 / 6, 1 / 4, 1 / 4])
    assert rates.metrics() == pytest.approx({"prompts/solve_rate": (4 / 6 + 1 / 4) / 2, "prompts/never_tried": 1 / 2})


def test_middling_rates_weigh_most():
    rates = SolveRates(5, 1.0)
    rates.update(1, {index: (right, 8) for index, right in enumerate((0, 2, 4, 6, 8))})
    weights = rates.weights
    assert weights == pytest.approx([0.09, 0.21, 0.25, 0.21, 0.09])


@pytest.mark.parametrize("discount, weight", [(0.0, 1 / 6 * 5 / 6), (1.0, 5 / 10 * 5 / 10)])
def test_what_was_before_counts_by_the_discount(discount, weight):
    rates = SolveRates(1, discount)
    rates.update(1, {0: (4, 4)})
    rates.update(2, {0: (0, 4)})
    assert rates.weights == pytest.approx([weight])


def test_draws_follow_the_weights():
    """Chi-squared of the first draw, and that of the second under what is left."""
    weights = np.array([0.25, 0.09, 0.0, 0.16, 0.5])
    random = np.random.RandomState(0)
    pairs = np.array([draw_distinct(weights, 2, random) for _ in range(20000)])
    assert (pairs[:, 0] != pairs[:, 1]).all()
    first = weights / weights.sum()
    left = [first / (1 - first[i]) * (np.arange(5) != i) for i in range(5)]
    second = sum(first[i] * left[i] for i in range(5))
    for places, expected in zip(pairs.T, (first, second), strict=True):
        found, wanted = np.bincount(places, minlength=5), 20000 * expected
        assert found[2] == 0
        some = wanted > 0
        assert ((found - wanted)[some] ** 2 / wanted[some]).sum() < 11.3  # 3 degrees of freedom: 1 in 100


def test_draws_without_a_choice():
    assert sorted(draw_distinct(np.array([1e-300, 1.0, 0.0, 5e-324]), 3, np.random.RandomState(0))) == [0, 1, 3]


class Draws:
    """Steps of a run over 40 prompts, of which the even ones are always solved and the odd ones half of the time."""

    def __init__(self, share=0.5):
        self.rates = SolveRates(40, 0.5)
        self.sampler = CurriculumSampler(prompts(40), 7, self.rates, share)

    def step(self, step):
        indices = self.sampler.indices(step, 8)
        self.rates.update(step + 1, {index: (8 if index % 2 == 0 else 4, 8) for index in indices})
        return indices


def test_a_step_mixes_epochs_and_draws():
    draws = Draws()
    epochs = PromptSampler(prompts(40), 7)
    walk = [draws.step(step) for step in range(100)]
    for step, indices in enumerate(walk):
        assert len(set(indices)) == 8
        assert set(epochs.indices(step, 4)) <= set(indices)
    first = sum(set(indices[:4]) == set(epochs.indices(step, 4)) for step, indices in enumerate(walk))
    assert first < 10  # else a minibatch would be all of one kind
    odd = np.mean([index % 2 for indices in walk[20:] for index in indices])
    # Of those drawn 0.25 / (0.25 + w), w below 1/10 * 9/10, but for draws without return; of the others a half.
    assert 0.6 < odd < 0.72


def test_all_by_weights_and_hardly_any():
    assert len(set(Draws(1.0).step(0))) == 8
    assert [weighted(share, 8) for share in (1.0, 0.5, 0.1, 0.05)] == [8, 4, 1, 0]


def test_the_draws_are_pinned():
    """A resumed run counts on it: this must not change with numpy or with megarl."""
    draws = Draws()
    assert [draws.step(step) for step in range(3)] == PINNED


PINNED = [[38, 28, 18, 26, 36, 30, 11, 16], [33, 1, 23, 27, 22, 34, 25, 32], [32, 3, 2, 33, 10, 5, 37, 39]]


def test_a_resumed_run_draws_what_the_undisturbed_one_draws():
    undisturbed = Draws()
    expected = [undisturbed.step(step) for step in range(9)]
    before, after = Draws(), Draws()
    found = [before.step(step) for step in range(4)]
    after.rates.restore(4, before.rates.counts.copy())
    assert found + [after.step(step) for step in range(4, 9)] == expected


def test_a_step_is_not_drawn_before_its_time():
    draws = Draws()
    assert draws.sampler.knows(0) and not draws.sampler.knows(1)
    with pytest.raises(ValueError, match="step 1 is drawn by"):
        draws.sampler.indices(1, 8)
    draws.step(0)
    with pytest.raises(ValueError, match="step 0 is drawn by"):
        draws.sampler.indices(0, 8)
