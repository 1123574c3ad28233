"""Corrections of the mismatch: numbers by hand, and plain Python for any."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.corrections import CorrectionBound, CorrectionLevel, CorrectionOptions, correct
from megarl.recipe import CorrectionSection

LENGTHS = (2, 3)
ENGINE = torch.full((5,), -3.0)
# Weights 2, 2 | 4, 1/2, 1/2: of the sequences 4 and 1, their geometric means 2 and 1.
TRAINER = ENGINE + torch.log(torch.tensor([2.0, 2.0, 4.0, 0.5, 0.5]))


@pytest.mark.parametrize(
    ("level", "bound", "low", "high", "expected"),
    [
        ("none", "truncate", 0.0, 2.0, [1, 1, 1, 1, 1]),
        ("token", "truncate", 0.0, 3.0, [2, 2, 3, 0.5, 0.5]),
        ("token", "truncate", 0.75, 3.0, [2, 2, 3, 0.75, 0.75]),
        ("token", "mask", 0.0, 3.0, [2, 2, 0, 0.5, 0.5]),
        ("token", "mask", 0.75, 5.0, [2, 2, 4, 0, 0]),
        ("sequence", "truncate", 0.0, 3.0, [3, 3, 1, 1, 1]),
        ("sequence", "mask", 0.0, 3.0, [0, 0, 1, 1, 1]),
        ("geometric", "truncate", 0.0, 1.5, [1.5, 1.5, 1, 1, 1]),
        ("geometric", "mask", 0.0, 1.5, [0, 0, 1, 1, 1]),
        ("geometric", "mask", 1.25, 3.0, [2, 2, 0, 0, 0]),
    ],
)
def test_weights_by_hand(level, bound, low, high, expected):
    found = correct(TRAINER, ENGINE, LENGTHS, CorrectionOptions(level, bound, low, high))
    torch.testing.assert_close(found.weights, torch.tensor(expected, dtype=torch.float32))
    free = correct(TRAINER, ENGINE, LENGTHS, CorrectionOptions(level, bound, 0.0, 1e9))
    assert found.bounded.tolist() == (found.weights != free.weights).tolist()
    assert not found.dropped.any()


def test_drops_by_hand():
    """|d| of the first: ln 2 twice.  Of the second: ln 4, ln 2, ln 2, mean 4/3 ln 2."""
    for mean, largest, expected in (
        (None, None, [False, False]),
        (1.2 * math.log(2), None, [False, True]),
        (0.9 * math.log(2), None, [True, True]),
        (None, 1.5 * math.log(2), [False, True]),
        (1.4 * math.log(2), 1.9 * math.log(2), [False, True]),
        (1.4 * math.log(2), 2.1 * math.log(2), [False, False]),
    ):
        options = CorrectionOptions(drop_mean=mean, drop_max=largest)
        found = correct(TRAINER, ENGINE, LENGTHS, options)
        assert found.dropped.tolist() == expected
        assert (found.weights == 1).all()


def test_a_token_that_cannot_be():
    """The trainer gives far more than the engine, or nothing: weights stay finite, the mask is 0 and no NaN."""
    trainer, engine = torch.tensor([-1.0, -torch.inf]), torch.tensor([-200.0, -1.0])
    for bound, expected in (("truncate", [2.0, 0.0]), ("mask", [0.0, 0.0])):
        found = correct(trainer, engine, [1, 1], CorrectionOptions("token", bound, drop_max=5.0))
        assert found.weights.tolist() == expected
        assert found.dropped.tolist() == [True, True]


def test_names_of_recipes():
    for key, names in (("level", CorrectionLevel), ("bound", CorrectionBound)):
        assert get_args(CorrectionSection.model_fields[key].annotation) == get_args(names)
    assert CorrectionSection().model_dump() == vars(CorrectionOptions())  # one default, twice


@given(
    st.lists(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from(["truncate", "mask"]),
)
def test_against_plain_python(sequences, level, bound):
    lengths = [len(one) for one in sequences]
    difference = torch.tensor([d for one in sequences for d in one])
    found = correct(
        difference - 3, torch.full_like(difference, -3.0), lengths, CorrectionOptions(level, bound, 0.5, 1.7)
    )
    for one, weights in zip(sequences, found.weights.split(lengths), strict=True):
        exponents = {"token": one, "sequence": [sum(one)] * len(one), "geometric": [sum(one) / len(one)] * len(one)}
        for exponent, weight in zip(exponents[level], weights.tolist(), strict=True):
            w = math.exp(exponent)
            if min(abs(w - 0.5), abs(w - 1.7)) < 1e-4:
                continue
            limited = min(max(w, 0.5), 1.7) if bound == "truncate" else w * (0.5 <= w <= 1.7)
            assert weight == pytest.approx(limited, rel=1e-4, abs=1e-6)
