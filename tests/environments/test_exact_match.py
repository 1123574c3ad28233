import pytest

from megarl.environments.exact_match import ExactMatch


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
    score = ExactMatch("[0-9]", 0.1).score(completion, finished, "7")
    assert score.reward == pytest.approx(reward)
    assert (score.correct, score.well_formed) == (correct, well_formed)


def test_blanks_around_the_ground_truth_say_nothing():
    assert ExactMatch().score("48", True, "48\n").correct
    assert not ExactMatch().score("4 8", True, "48").correct


def test_nothing_else_is_normalised():
    assert not ExactMatch().score("Left.", True, "left").correct


def test_without_a_format_all_that_ended_is_well_formed():
    assert ExactMatch().score("anything", True, "7").well_formed
    assert not ExactMatch().score("anything", False, "7").well_formed
