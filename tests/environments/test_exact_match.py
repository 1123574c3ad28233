from megarl.environments.exact_match import ExactMatch
from megarl.environments.score import Grade


def test_blanks_around_say_nothing():
    assert ExactMatch().grade("48", "48\n") == Grade(1, True)
    assert ExactMatch().grade(" 48\t", "48") == Grade(1, True)
    assert ExactMatch().grade("4 8", "48") == Grade(0, False)


def test_nothing_else_is_normalised():
    assert not ExactMatch().grade("Left.", "left").correct
