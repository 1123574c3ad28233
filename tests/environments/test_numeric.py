import time
from fractions import Fraction

import pytest

from megarl.environments.numeric import Numeric, number
from megarl.environments.score import Grade


@pytest.mark.parametrize(
    "text, expected",
    [
        ("7", 7),
        (" 7.\n", 7),
        ("-3", -3),
        ("\u22123", -3),
        ("+3", 3),
        ("- 3", -3),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("1,234,567.8", Fraction(12345678, 10)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        ("1 3/4", Fraction(7, 4)),
        ("-1 3/4", Fraction(-7, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"$1\frac{3}{4}$", Fraction(7, 4)),
        ("45%", Fraction(45, 100)),
        (r"45\%", Fraction(45, 100)),
        ("$12.50", Fraction(25, 2)),
        ("-€3", -3),
        ("007", 7),
    ],
)
def test_numbers(text, expected):
    assert number(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-",
        "seven",
        "1,23",
        "1,2345",
        "12,34,567",
        "1.2.3",
        "3/0",
        "1/2/3",
        "nan",
        "inf",
        "1e",
        "1e9999",
        "٣",
        "7 apples",
        "%",
        "0x10",
        "1_000",
        "9" * 101,
    ],
)
def test_no_numbers(text):
    assert number(text) is None


def test_exact_without_a_tolerance():
    assert Numeric().grade("0.50", "1/2") == Grade(1, True)
    assert Numeric().grade("50%", "0.5") == Grade(1, True)
    assert Numeric().grade("50", "50%") == Grade(0, False)
    assert Numeric().grade("0.5000001", "0.5") == Grade(0, False)
    assert Numeric().grade("none", "0.5") == Grade(0, False)


@pytest.mark.parametrize(
    "options, given, answer, right",
    [
        ({"absolute_tolerance": 0.1}, "1.1", "1", True),
        ({"absolute_tolerance": 0.1}, "1.1000001", "1", False),
        ({"absolute_tolerance": 0.1}, "0.9", "1", True),
        ({"relative_tolerance": 0.05}, "105", "100", True),
        ({"relative_tolerance": 0.05}, "-95", "-100", True),
        ({"relative_tolerance": 0.05}, "94.9", "100", False),
        ({"relative_tolerance": 0.05}, "0.01", "0", False),
        ({"relative_tolerance": 0.05, "absolute_tolerance": 0.01}, "0.01", "0", True),
        ({"relative_tolerance": 1e-05}, "100001", "100000", True),
    ],
)
def test_tolerances(options, given, answer, right):
    assert Numeric(**options).grade(given, answer).correct is right


def test_a_truth_that_is_no_number():
    with pytest.raises(ValueError, match="the ground truth 'seven' is no number"):
        Numeric().grade("7", "seven")


@pytest.mark.parametrize("text", ["9" * 100_000, "1," * 50_000, "1e999", " " * 100_000 + "x", "1 " * 50_000])
def test_time_is_bounded(text):
    begun = time.process_time()
    Numeric(absolute_tolerance=1.0).grade(text, "1e-999")
    assert time.process_time() - begun < 1
