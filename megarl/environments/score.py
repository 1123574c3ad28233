"""What every environment gives, and what it is given."""

import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Score:
    components: tuple[float, ...]
    """What the reward is the sum of; as many from every answer that an environment judges."""
    correct: bool
    well_formed: bool
    answer: str | None = None
    """As it was compared with the ground truth, so that equal answers are right or wrong alike: what votes count.
    None: the completion's text, without blanks around it."""

    @property
    def reward(self) -> float:
        return sum(self.components)


class Environment(Protocol):
    def score(self, completion: str, finished: bool, answer: str) -> Score:
        """Judges a completion's text, without its stop token, against the ground truth.

        `finished` says that a stop token ended it: what was cut off is no answer, right or well-formed.
        """
        ...


def matches(format: str | None, text: str) -> bool:
    """Whether the text is well-formed: the regular expression matches all of it; None accepts all."""
    return format is None or re.fullmatch(format, text) is not None
