import time

import pytest

from megarl.environments.multiple_choice import MultipleChoice, letter, options
from megarl.environments.score import Grade

QUESTION = "What is in the picture?\nA. a cat\n(B) A dog.\n C) three birds \nD: B"


def test_options():
    assert options(QUESTION) == {"A": "a cat", "B": "A dog.", "C": "three birds", "D": "B"}
    assert options("Which letter comes after A. or B.?") == {}


@pytest.mark.parametrize(
    "text",
    [
        "C",
        " c\n",
        "(C)",
        "(c)",
        "C.",
        "c.",
        "C)",
        "C:",
        "C. three birds",
        "(C) three birds",
        "C three birds",
        "three birds",
        "Three birds.",
        "3 birds",
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        r"So it is \boxed{C}.",
        r"\boxed{(C)}",
        "**C**",
        "**C. three birds**",
        "$C$",
        "Answer: C",
        "The answer is (C).",
        "the answer is C because there are three of them",
        "It flies, so answer: **A** is wrong.\nAnswer: C",
    ],
)
def test_the_third(text):
    assert letter(text, options(QUESTION)) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A cat is what I see",
        "The answer is a cat, or so it seems",
        "The answer is A cat on a mat",
        "A or B",
        "(A) (B) (C)",
        "A. a cat B. a dog",
        "ABC",
        "Cats",
        "7",
        "É",
        r"\boxed{A, B}",
    ],
)
def test_none_or_several(text):
    assert letter(text, options(QUESTION)) is None


def test_the_article_is_an_option_where_it_stands_alone():
    assert letter("The answer is A.", {}) == "A"
    assert letter("The answer is A", {}) == "A"


@pytest.mark.parametrize("answer", ["C", "(C)", "three birds", "C. three birds"])
def test_truth_by_letter_or_by_text(answer):
    assert MultipleChoice().grade("C.", answer, QUESTION) == Grade(1, True)
    assert MultipleChoice().grade("three birds", answer, QUESTION) == Grade(1, True)
    assert MultipleChoice().grade("B", answer, QUESTION) == Grade(0, False)
    assert MultipleChoice().grade("", answer, QUESTION) == Grade(0, False)


def test_two_options_of_one_text_are_told_apart_by_letter_only():
    question = "?\nA. red\nB. red"
    assert MultipleChoice().grade("A", "A", question).correct
    assert not MultipleChoice().grade("red", "A", question).correct


def test_a_truth_that_names_no_option_is_compared_as_text():
    assert MultipleChoice().grade("a mouse", "mouse", QUESTION).correct
    assert not MultipleChoice().grade("cat", "mouse", QUESTION).correct


@pytest.mark.parametrize(
    "text", ["answer is " * 20_000, "(A) " * 50_000, "**" * 50_000, r"\boxed{" * 20_000, " " * 200_000]
)
def test_time_is_bounded(text):
    begun = time.process_time()
    MultipleChoice().grade(text, "A", text)
    assert time.process_time() - begun < 1
