"""Completions judged by the process that has them, one after another."""

from collections.abc import Sequence

from megarl.environments.score import Attempt, Environment, Score, failed, reason_of


class InProcess:
    """For environments of bounded time that wait for nothing."""

    def __init__(self, environment: Environment):
        self._environment, self.components = environment, environment.components

    def score(self, attempts: Sequence[Attempt]) -> list[Score]:
        """A score for each, in order."""
        return [self._score(attempt) for attempt in attempts]

    def _score(self, attempt: Attempt) -> Score:
        try:
            return self._environment.score(attempt)
        except Exception as error:
            return failed(self._environment.components, reason_of(error))

    def close(self) -> None:
        """There is nothing to end."""
