"""What every environment is given, and what it gives."""

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

LARGEST = 3.4028234663852886e38
"""Of float32, which rewards become."""


@dataclass(frozen=True)
class Attempt:
    """A completion that is to be judged, and what is known of its row."""

    text: str
    """The completion without its stop token."""
    finished: bool
    """A stop token ended it: what was cut off is no answer, right or well-formed."""
    answer: str
    """Ground truth of the row."""
    source: str = ""
    """Name of the data set or task that the row comes from."""
    row: int = 0
    """Place of the row in its file or files, from 1."""
    question: str = ""
    """Text of the last message of the prompt, media left out; empty where the row has token ids."""


@dataclass(frozen=True)
class Grade:
    credit: float
    """In 0 .. 1."""
    correct: bool
    answer: str | None = field(default=None, compare=False)
    """As it was compared with the ground truth, where that is not as it was given."""


@dataclass(frozen=True)
class Score:
    components: tuple[float, ...]
    """What the reward is the sum of; as many from every answer that an environment judges."""
    correct: bool
    well_formed: bool
    error: str | None = None
    """Why the completion could not be judged, in one line; its components are 0 then."""
    answer: str | None = field(default=None, compare=False)
    """As it was compared with the ground truth, so that equal answers are right or wrong alike: what votes count.
    None: the completion's text, without blanks around it."""

    @property
    def reward(self) -> float:
        return sum(self.components)


class Grader(Protocol):
    """Compares an answer with the truth.  Pure, of bounded time and without state."""

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        """
        Args:
            given: what was extracted from the completion.
            answer: ground truth of the row.
            question: text of the prompt.

        Raises:
            ValueError: the ground truth is none that it can compare with.
        """
        ...


class Environment(Protocol):
    components: int
    """Of each `Score`."""
    concurrency: int
    """Completions that one process judges at a time; more than 1 only where it waits for something."""

    def score(self, attempt: Attempt) -> Score | Awaitable[Score]:
        """May raise anything: such a completion is not judged (`failed`)."""
        ...


def checked(given: Score, components: int) -> Score:
    """A score that a user's code has made.

    Raises:
        ValueError: it does not fit.
    """
    if given.error is not None:
        return failed(components, str(given.error))
    several = isinstance(given.components, Sequence) and not isinstance(given.components, str | bytes)
    numbers = finite(given.components if several else (given.components,), components)
    if not isinstance(given.answer, str | None):
        raise ValueError(f"the answer of a Score is {shown(given.answer)}: should be a text or None")
    return Score(numbers, bool(given.correct), bool(given.well_formed), answer=given.answer)


def finite(given: Sequence[Any], components: int) -> tuple[float, ...]:
    """So many numbers.

    Raises:
        ValueError: they are not.
    """
    for value in given:
        if not isinstance(value, Real):
            raise ValueError(f"score gave {shown(value)}: should be a number")
        if not math.isfinite(value) or abs(value) > LARGEST:
            raise ValueError(f"score gave {float(value)!r}: should be finite in float32")
    if len(given) != components:
        raise ValueError(f"score gave {len(given)} components: should be {components}")
    return tuple(map(float, given))


def shown(value: Any) -> str:
    """Type and value, in a bounded length."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def failed(components: int, reason: str) -> Score:
    """Of a completion that could not be judged."""
    return Score((0.0,) * components, False, False, reason)


def reason_of(error: BaseException) -> str:
    """A line of bounded length for what was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return text if len(text) <= 300 else f"{text[:297]}..."
