"""Mathematical answers, compared by math-verify (github.com/huggingface/Math-Verify) over SymPy."""

import logging
from dataclasses import dataclass

from megarl.environments.score import Grade

_LONGEST_BARE = 300
_SET_OFF = ("\\boxed", "$", "\\(", "\\[")


@dataclass(frozen=True)
class MathAnswer:
    """1 for what is mathematically equal to the ground truth: LaTeX, expressions, sets, intervals, equations.

    SymPy has no bound of time or memory.  math-verify's own limit is an alarm signal, which only a main thread may set
    and native code does not notice; it is off, and the process that judges is ended from outside when the time is over.
    """

    def __post_init__(self):
        self.grade("1", "1")  # what is imported and compiled once is no completion's time

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        from math_verify import parse, verify  # SymPy takes a second to import

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
        truth = parse(_marked(answer), parsing_timeout=None)
        if not truth:
            raise ValueError(f"the ground truth {answer[:60]!r} is no mathematical expression")
        correct = any(
            verify(truth, parse(text, parsing_timeout=None), timeout_seconds=None)
            for text in dict.fromkeys((_marked(given), given))
        )
        return Grade(float(correct), correct)


def _marked(text: str) -> str:
    """A bare expression, such as an extracted `\\frac12`, as the LaTeX that the parser looks for."""
    text = text.strip()
    bare = len(text) <= _LONGEST_BARE and not any(mark in text for mark in _SET_OFF)
    return f"\\boxed{{{text}}}" if bare else text
