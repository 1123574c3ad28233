import time

import pytest

from megarl.environments.extraction import SECONDS, Extraction, Format


@pytest.mark.parametrize(
    "extract, text, expected",
    [
        (None, "all of it", "all of it"),
        ("answer", "<think>7?</think><answer>8</answer>", "8"),
        ("answer", "<answer>7</answer> no, <answer>\n8</answer>", "\n8"),
        ("answer", "<answer>8", None),
        ("answer", "8</answer>", None),
        ("answer", "</answer><answer>", None),
        ("answer", "", None),
        ("boxed", r"so \boxed{8}", "8"),
        ("boxed", r"\boxed{7} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{}", ""),
        ("boxed", r"\boxed{\frac{1}{2}", None),
        ("boxed", "8", None),
        (r"Answer: (\w+)", "Answer: a\nAnswer: b", "b"),
        (r"Answer: (\w+)", "no", None),
        (r"x(y)?", "x", None),
    ],
)
def test_extraction(extract, text, expected):
    assert Extraction(extract)(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("<think>so</think><answer>7</answer>", True),
        ("<think>\nso\n</think>\n\n<answer>\n7</answer>", True),
        ("<think></think><answer></answer>", True),
        ("so <think>so</think><answer>7</answer>", False),
        ("<think>so</think><answer>7</answer>.", False),
        ("<think>so</think> well <answer>7</answer>", False),
        ("<think>so</think><answer>7</answer><answer>8</answer>", False),
        ("<think><think>so</think></think><answer>7</answer>", False),
        ("<answer>7</answer>", False),
        ("<think>so</think>", False),
        ("", False),
    ],
)
def test_think_answer(text, expected):
    assert Format("think_answer")(text) is expected


def test_a_format_of_ones_own():
    assert Format()("anything")
    assert Format("[0-9]")("7")
    assert not Format("[0-9]")("77")


@pytest.mark.parametrize("rule", [Extraction("(a|aa)+(b)"), Format("(a|aa)+(b)")])
def test_an_expression_that_takes_for_ever_is_given_up(rule):
    begun = time.process_time()
    with pytest.raises(TimeoutError):
        rule("a" * 60 + "cb")
    assert time.process_time() - begun < 3 * SECONDS


@pytest.mark.parametrize("text", ["<answer>" * 50_000, "\\boxed{" * 50_000, "<think>" * 50_000, "{" * 200_000])
@pytest.mark.parametrize("rule", [Extraction("answer"), Extraction("boxed"), Format("think_answer")])
def test_time_is_bounded(rule, text):
    begun = time.process_time()
    assert not rule(text)
    assert time.process_time() - begun < 1
