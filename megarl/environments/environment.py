"""What judges a row: a grader and where its answer is, chosen by the row's source."""

import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace

from megarl.environments.extraction import Extraction, Format
from megarl.environments.score import Attempt, Environment, Grade, Grader, Score


@dataclass(frozen=True)
class Graded:
    """Components are the grader's credit for the extracted answer, and `format_reward` for a well-formed completion.

    Both need a completion that a stop token ended.  Where there is no answer to extract it is neither right nor
    well-formed.
    """

    grader: Grader
    extraction: Extraction = Extraction()
    format: Format = Format()
    format_reward: float = 0.0
    components = 2
    concurrency = 1

    def score(self, attempt: Attempt) -> Score:
        """Judges the completion's text without blanks around it."""
        text = attempt.text.strip()
        given = self.extraction(text) if attempt.finished else None
        if given is None:
            return Score((0.0, 0.0), False, False)
        grade: Grade = self.grader.grade(given, attempt.answer, attempt.question)
        well_formed = self.format(text)
        components = grade.credit, self.format_reward * well_formed
        return Score(
            components, grade.correct, well_formed, answer=given.strip() if grade.answer is None else grade.answer
        )


@dataclass(frozen=True)
class Weighed:
    """An environment whose components are multiplied by a weight."""

    environment: Environment
    weight: float = 1.0


class BySource:
    """Each row by the environment of its source, or by the default.  Has as many components as the one that has most;
    others' missing ones are 0."""

    def __init__(self, default: Weighed | None, sources: Mapping[str, Weighed]):
        self._default, self._sources = default, sources
        environments = [one.environment for one in (default, *sources.values()) if one]
        self.components = max(environment.components for environment in environments)
        # A process that waits for one kind goes on with another.
        self.concurrency = max(environment.concurrency for environment in environments)

    def score(self, attempt: Attempt) -> Score | Awaitable[Score]:
        """
        Raises:
            LookupError: neither the source has an environment nor is there a default.
        """
        chosen = self._sources.get(attempt.source, self._default)
        if chosen is None:
            raise LookupError(f"source {attempt.source!r} has no environment")
        score = chosen.environment.score(attempt)
        if inspect.isawaitable(score):
            return self._later(score, chosen.weight)
        return self._weighed(score, chosen.weight)

    async def _later(self, score: Awaitable[Score], weight: float) -> Score:
        return self._weighed(await score, weight)

    def _weighed(self, score: Score, weight: float) -> Score:
        missing = (0.0,) * (self.components - len(score.components))
        return replace(score, components=(*(weight * part for part in score.components), *missing))
