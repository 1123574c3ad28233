from collections import Counter

import pytest
import torch

from megarl.data.answers import AnswerPool, best_constants

SOURCES = ["digits", "motion", "digits", "motion", "digits", "motion", "digits"]
ANSWERS = ["3", "left", "3", "right", "7", "left", "1"]


def test_the_best_constant_answer_of_each_source():
    assert best_constants(SOURCES, ANSWERS) == (2 + 2) / 7
    assert best_constants(["one"] * 7, ANSWERS) == 2 / 7
    assert best_constants(list("abcdefg"), ANSWERS) == 1


def test_answers_are_drawn_from_their_source_and_all_of_them():
    pool = AnswerPool(SOURCES, ANSWERS)
    drawn = pool.draw(["motion", "digits"] * 300, torch.Generator().manual_seed(1))
    for begin, expected in ((0, {"left", "right"}), (1, {"1", "3", "7"})):
        counts = Counter(drawn[begin::2])
        assert counts.keys() == expected  # often as the data set has "3", it is one of three
        assert all(abs(count / 300 - 1 / len(expected)) < 0.1 for count in counts.values())


def test_the_same_draws_for_the_same_generator():
    pool = AnswerPool(SOURCES, ANSWERS)
    first, again, other = (pool.draw(SOURCES * 5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_source_without_answers():
    with pytest.raises(KeyError, match="colour"):
        AnswerPool(SOURCES, ANSWERS).draw(["colour"], torch.Generator())
