from megarl.environments.environment import Graded
from megarl.environments.extraction import Format
from megarl.environments.in_process import InProcess
from megarl.environments.numeric import Numeric
from megarl.environments.score import Attempt, failed


def test_a_grader_that_raises_fails_its_completion_only():
    attempts = [Attempt("7", True, "7"), Attempt("7", True, "seven"), Attempt("8", True, "7")]
    scores = InProcess(Graded(Numeric())).score(attempts)
    assert scores[1] == failed(2, "ValueError: the ground truth 'seven' is no number")
    assert [score.correct for score in scores] == [True, False, False]
    assert [score.error is None for score in scores] == [True, False, True]


def test_an_expression_that_takes_for_ever_fails_its_completion_only():
    attempts = [Attempt("a" * 60 + "cb", True, "7"), Attempt("7", True, "7")]
    first, second = InProcess(Graded(Numeric(), format=Format("(a|aa)+(b)|[0-9]"))).score(attempts)
    assert first.error.startswith("TimeoutError")
    assert second.correct and second.well_formed
