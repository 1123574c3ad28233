"""Rows judged by a grader, after their source."""

import asyncio

import pytest

from megarl.environments.environment import BySource, Graded, Weighed
from megarl.environments.exact_match import ExactMatch
from megarl.environments.extraction import Extraction, Format
from megarl.environments.score import Attempt, Score


@pytest.mark.parametrize(
    "completion, finished, reward, correct, well_formed",
    [
        ("7", True, 1.1, True, True),
        (" 7\n", True, 1.1, True, True),
        ("3", True, 0.1, False, True),
        ("77", True, 0.0, False, False),
        ("", True, 0.0, False, False),
        ("7", False, 0.0, False, False),
    ],
)
def test_reward_and_format(completion, finished, reward, correct, well_formed):
    score = Graded(ExactMatch(), format=Format("[0-9]"), format_reward=0.1).score(Attempt(completion, finished, "7"))
    assert score.reward == pytest.approx(reward)
    assert (score.correct, score.well_formed) == (correct, well_formed)


def test_without_a_format_all_that_ended_is_well_formed():
    assert Graded(ExactMatch()).score(Attempt("anything", True, "7")).well_formed
    assert not Graded(ExactMatch()).score(Attempt("anything", False, "7")).well_formed


def test_the_format_is_that_of_the_whole_completion_and_the_answer_that_of_the_tags():
    environment = Graded(ExactMatch(), Extraction("answer"), Format("think_answer"), 0.5)
    assert environment.score(Attempt("<think>6+1</think><answer> 7</answer>", True, "7")) == Score((1, 0.5), True, True)
    assert environment.score(Attempt("<answer>7</answer>", True, "7")) == Score((1, 0), True, False)
    assert environment.score(Attempt("7", True, "7")) == Score((0, 0), False, False)


def test_no_answer_to_extract_is_not_well_formed():
    assert not Graded(ExactMatch(), Extraction("boxed")).score(Attempt("7", True, "7")).well_formed


class Three:
    components, concurrency = 3, 5

    def score(self, attempt):
        return Score((1.0, 2.0, 3.0), True, True)


class Later(Three):
    async def score(self, attempt):
        return Score((1.0, 2.0, 3.0), True, True)


def test_by_source():
    """Weights multiply, missing components are 0."""
    environment = BySource(Weighed(Graded(ExactMatch())), {"a": Weighed(Three(), 0.5), "b": Weighed(Later(), 2.0)})
    assert (environment.components, environment.concurrency) == (3, 5)
    assert environment.score(Attempt("7", True, "7", "other")).components == (1, 0, 0)
    assert environment.score(Attempt("7", True, "7", "a")).components == (0.5, 1, 1.5)
    assert asyncio.run(environment.score(Attempt("7", True, "7", "b"))).components == (2, 4, 6)


def test_a_source_without_one():
    environment = BySource(None, {"a": Weighed(Three())})
    with pytest.raises(LookupError, match="source 'b' has no environment"):
        environment.score(Attempt("7", True, "7", "b"))
