"""mean@k, pass@k and maj@k, by hand and by counting all choices."""

from itertools import combinations

import pytest
import torch

from megarl.observe.accuracy import Tally, ks, majority, pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_answer(samples):
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            chosen = list(combinations([True] * right + [False] * (samples - right), k))
            assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))
    with pytest.raises(ValueError, match=f"k = {samples + 1}"):
        pass_at_k(samples, 0, samples + 1)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)
    assert pass_at_k(1000, 0, 512) == 0 and pass_at_k(1000, 600, 512) == 1  # no factorial overflows


def test_ks():
    assert {samples: ks(samples) for samples in (1, 2, 3, 6, 8)} == {
        1: [],
        2: [2],
        3: [2, 3],
        6: [2, 4, 6],
        8: [2, 4, 8],
    }


@pytest.mark.parametrize(
    "answers, place",
    [
        (["a", "b", "b"], 1),
        (["b", "a", "a", "b"], 0),  # a tie: the answer that came first, though "a" is smaller and had two first
        ([None, "a", None, None], 1),  # what is no answer has no vote
        ([None, "x", "y", "y", "x"], 1),
        ([None, None], None),
        ([""], 0),
    ],
)
def test_majority(answers, place):
    assert majority(answers) == place


def test_tally_by_hand():
    tally = Tally(["a", "b"], 4)
    tally.add(["a"], [True, False, False, False], ["7", "1", "1", "7"])  # a tie, which the first answer wins
    tally.add(["a"], [False, True, True, False], ["1", "7", "7", None])
    tally.add(["b", "a"], [False] * 4, [None] * 4)
    assert tally.counts.tolist() == [[1, 1, 1, 0, 0, 2], [1, 0, 0, 0, 0, 0]]
    found = tally.accuracy(tally.counts[0])
    assert found == pytest.approx({"accuracy": 3 / 12, "pass@2": (1 / 2 + 5 / 6) / 3, "pass@4": 2 / 3, "maj@4": 2 / 3})
    assert tally.accuracy(tally.counts[1]) == {"accuracy": 0, "pass@2": 0, "pass@4": 0, "maj@4": 0}


def test_one_sample_has_an_accuracy_alone():
    tally = Tally(["all"], 1)
    for right in (True, False, True):
        tally.add(["all"], [right], ["x"])
    assert tally.accuracy(tally.counts[0].to(torch.float64)) == {"accuracy": 2 / 3}
