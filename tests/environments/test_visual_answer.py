import pytest

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


@pytest.mark.parametrize("completion", ["3", "three", "Three.", " 3. ", "03"])
def test_right(completion):
    assert VisualAnswer().score(completion, True, "3").correct
    assert VisualAnswer().score(completion, True, "3").reward == 1
    assert VisualAnswer().score(completion, False, "3").reward == 0  # cut off


@pytest.mark.parametrize(
    "completion, answer",
    [("", "yes"), ("", "?"), ("...", "."), ("the", "a"), ("yes no", "yes"), ("-3", "3"), ("3", "yes")],
)
def test_wrong(completion, answer):
    score = VisualAnswer(count_tolerance=9).score(completion, True, answer)
    assert (score.reward, score.correct) == (0, False)


@pytest.mark.parametrize(
    "completion, tolerance, reward",
    [("4", 0, 0), ("4", 1, 1 / 2), ("two", 1, 1 / 2), ("5", 1, 0), ("5", 2, 1 / 3), ("4", 2, 2 / 3), ("3", 2, 1)],
)
def test_counts_that_are_nearly_right(completion, tolerance, reward):
    score = VisualAnswer(count_tolerance=tolerance).score(completion, True, "3")
    assert score.reward == pytest.approx(reward)
    assert score.correct == (completion == "3")


def test_votes_of_equal_answers_are_equal():
    votes = [VisualAnswer().score(text, True, "red").answer for text in ("Three.", "03", "3", "The red", "red")]
    assert votes == ["3", "3", "3", "red", "red"]


def test_format_is_that_of_the_text_as_it_is():
    environment = VisualAnswer("[a-z]+", 0.1)
    assert environment.score("red", True, "red").reward == pytest.approx(1.1)
    assert environment.score("Red.", True, "red").reward == 1
    assert environment.score("blue", True, "red").reward == pytest.approx(0.1)
    assert not environment.score("red", False, "red").well_formed


def test_thousands_of_digits_are_no_count():
    """Python refuses to read them as a number."""
    score = VisualAnswer(count_tolerance=1).score("9" * 10_000, True, "3")
    assert (score.reward, score.correct) == (0, False)
