"""Rewards for short answers in words or numbers, as questions about pictures have them."""

import re
from dataclasses import dataclass

from megarl.environments.score import Score, matches

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
    """1 for the right answer after both sides were `normalised`, and `format_reward` for one that is well-formed.

    A count that is off by d, of at most `count_tolerance`, earns 1 - d / (count_tolerance + 1) and is not correct:
    a way towards counting for a policy that is never exact.  All of it needs an answer that was ended by a stop
    token.
    """

    format: str | None = None
    """Regular expression that a well-formed answer matches in full, before it is normalised; None accepts all."""
    format_reward: float = 0.0
    count_tolerance: int = 0

    def score(self, completion: str, finished: bool, answer: str) -> Score:
        """Judges the completion's text, without its stop token and surrounding blanks."""
        text = completion.strip()
        well_formed = finished and matches(self.format, text)
        given, true = normalised(text), normalised(answer)
        correct = finished and given == true
        credit = float(correct)
        if finished and _COUNT.fullmatch(given) and _COUNT.fullmatch(true):
            distance = abs(int(given) - int(true))
            correct = distance == 0  # 07 is 7
            credit = max(0.0, 1 - distance / (self.count_tolerance + 1))
        return Score((credit, self.format_reward * well_formed), correct, well_formed, _vote(given))


def _vote(given: str) -> str:
    """Counts that are compared as numbers are one answer however they are written."""
    return str(int(given)) if _COUNT.fullmatch(given) else given
