"""Short answers in words or numbers, as questions about pictures have them."""

import re
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from megarl.environments.score import Grade

_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
_DIGITS = {word: str(number) for number, word in enumerate(_NUMBERS)}
_ARTICLES = {"a", "an", "the"}
_COUNT = re.compile(r"[0-9]{1,9}")
"""Longer ones are compared as text: nothing has so many parts, and int() refuses thousands of digits."""


def normalised(text: str) -> str:
    """The answer without what says nothing: case, blanks at the ends and more than one between words, punctuation
    at the end, articles; number words up to twenty become digits.

    What consists of nothing else ("A.", "the", "?") stays, so that no answer equals the empty one.
    """
    text = text.casefold().strip()
    words = (text.rstrip(".,;:!?") or text).split()
    kept = [_DIGITS.get(word, word) for word in words if word not in _ARTICLES]
    return " ".join(kept or words)


@dataclass(frozen=True)
class VisualAnswer:
    """1 for the right answer after both sides were `normalised`.

    A count that is off by d, of at most `count_tolerance`, earns 1 - d / (count_tolerance + 1) and is not correct:
    a way towards counting for a policy that is never exact.
    """

    count_tolerance: Annotated[int, Ge(0)] = 0

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        given, true = normalised(given), normalised(answer)
        correct = given == true
        if not _COUNT.fullmatch(given):
            return Grade(float(correct), correct, given)
        vote = str(int(given))  # 07 is 7
        if not _COUNT.fullmatch(true):
            return Grade(float(correct), correct, vote)
        distance = abs(int(given) - int(true))
        return Grade(max(0.0, 1 - distance / (self.count_tolerance + 1)), distance == 0, vote)
