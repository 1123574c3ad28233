"""Rewards for answers that are right or wrong."""

from dataclasses import dataclass

from megarl.environments.score import Score, matches


@dataclass(frozen=True)
class ExactMatch:
    """1 for the right answer, and `format_reward` for one that is well-formed.

    Both need an answer that was ended by a stop token: what was cut off is no answer.
    """

    format: str | None = None
    """Regular expression that a well-formed answer matches in full; None accepts all."""
    format_reward: float = 0.0

    def score(self, completion: str, finished: bool, answer: str) -> Score:
        """Judges the completion's text, without its stop token; blanks around it and the answer say nothing."""
        text = completion.strip()
        well_formed = finished and matches(self.format, text)
        correct = finished and text == answer.strip()
        return Score((float(correct), self.format_reward * well_formed), correct, well_formed)
