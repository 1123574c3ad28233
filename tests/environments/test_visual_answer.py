import pytest

from megarl.environments.score import Grade
from megarl.environments.visual_answer import VisualAnswer, normalised


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Red", "red"),
        (" red .", "red"),
        ("red!?", "red"),
        ("A large  red\tcube.", "large red cube"),
        ("Three", "3"),
        ("the number is twenty", "number is 20"),
        ("1.5", "1.5"),
        ("a", "a"),
        ("The.", "the"),
        ("", ""),
        ("...", "..."),
        ("STRASSE", "strasse"),
    ],
)
def test_normalised(text, expected):
    assert normalised(text) == expected
    assert normalised(expected) == expected


@pytest.mark.parametrize("given", ["3", "three", "Three.", " 3. ", "03"])
def test_right(given):
    assert VisualAnswer().grade(given, "3") == Grade(1, True)


@pytest.mark.parametrize(
    "given, answer",
    [("", "yes"), ("", "?"), ("...", "."), ("the", "a"), ("yes no", "yes"), ("-3", "3"), ("3", "yes")],
)
def test_wrong(given, answer):
    assert VisualAnswer(count_tolerance=9).grade(given, answer) == Grade(0, False)


@pytest.mark.parametrize(
    "given, tolerance, credit",
    [("4", 0, 0), ("4", 1, 1 / 2), ("two", 1, 1 / 2), ("5", 1, 0), ("5", 2, 1 / 3), ("4", 2, 2 / 3), ("3", 2, 1)],
)
def test_counts_that_are_nearly_right(given, tolerance, credit):
    grade = VisualAnswer(count_tolerance=tolerance).grade(given, "3")
    assert grade.credit == pytest.approx(credit)
    assert grade.correct == (given == "3")


def test_votes_of_equal_answers_are_equal():
    votes = [VisualAnswer().grade(text, "red").answer for text in ("Three.", "03", "3", "The red", "red")]
    assert votes == ["3", "3", "3", "red", "red"]


def test_thousands_of_digits_are_no_count():
    """Python refuses to read them as a number."""
    assert VisualAnswer(count_tolerance=1).grade("9" * 10_000, "3") == Grade(0, False)
