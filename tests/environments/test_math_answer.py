"""What math-verify is asked, and that its alarm signal is not used."""

import logging
import signal
import threading

import pytest

from megarl.environments.math_answer import MathAnswer


@pytest.mark.parametrize(
    "given, answer",
    [
        ("1/2", r"\frac{1}{2}"),
        (r"\frac12", "0.5"),
        (r"$\frac{1}{2}$", "1/2"),
        (r"First $x=3$. So the answer is $\boxed{\frac{1}{2}}$.", "1/2"),
        ("So the answer is 42.", "42"),
        ("2x+1", "1+2x"),
        (r"(x+1)^2", r"x^2+2x+1"),
        (r"\{1, 2\}", r"\{2, 1\}"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("[0, 1)", "[0,1)"),
    ],
)
def test_right(given, answer):
    assert MathAnswer().grade(given, answer).correct


@pytest.mark.parametrize(
    "given, answer", [("1/3", "1/2"), ("", "1/2"), ("x", "y"), ("[0, 1]", "[0,1)"), ("no idea", "3")]
)
def test_wrong(given, answer):
    grade = MathAnswer().grade(given, answer)
    assert (grade.credit, grade.correct) == (0, False)


def test_a_truth_that_is_no_expression():
    with pytest.raises(ValueError, match="the ground truth '' is no mathematical expression"):
        MathAnswer().grade("1", "")


def test_alarms_are_left_alone_and_nothing_is_logged(caplog):
    """math-verify refuses to work in a thread where its own time limit is on."""
    handler, grades = signal.getsignal(signal.SIGALRM), []
    with caplog.at_level(logging.DEBUG):
        thread = threading.Thread(target=lambda: grades.append(MathAnswer().grade("1/2", "0.5")))
        thread.start()
        thread.join()
    assert [grade.correct for grade in grades] == [True]
    assert signal.getsignal(signal.SIGALRM) is handler
    assert [record for record in caplog.records if record.name.startswith("math_verify")] == []
