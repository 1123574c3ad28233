"""Answers that are right or wrong to the letter."""

from dataclasses import dataclass

from megarl.environments.score import Grade


@dataclass(frozen=True)
class ExactMatch:
    """1 for the very text of the ground truth; blanks around both say nothing."""

    def grade(self, given: str, answer: str, question: str = "") -> Grade:
        correct = given.strip() == answer.strip()
        return Grade(float(correct), correct)
