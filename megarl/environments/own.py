"""A user's own environment, by its import path."""

import importlib
import inspect
import math
from collections.abc import Awaitable, Iterable, Mapping
from numbers import Real
from typing import Any

from megarl.environments.score import Attempt, Score, reason_of
from megarl.errors import UserError

LARGEST = 3.4028234663852886e38
"""Of float32, which rewards become."""
AT_A_TIME = 64
"""Completions that an `async def score` is given at a time, in each process."""


class Own:
    """What `module:Name(**options)` made, whose `score(attempt)` gives a number, a sequence of them, or a `Score`.

    A number of 1 or more, or a first one of several, is a right answer.  Several are components of the reward; their
    number is its attribute `components`, 1 where it has none.
    """

    def __init__(self, made: Any, components: int):
        self._made, self.components = made, components
        self.concurrency = AT_A_TIME if inspect.iscoroutinefunction(made.score) else 1

    def score(self, attempt: Attempt) -> Score | Awaitable[Score]:
        given = self._made.score(attempt)
        return self._later(given, attempt) if inspect.isawaitable(given) else self._read(given, attempt)

    async def _later(self, given: Awaitable[Any], attempt: Attempt) -> Score:
        return self._read(await given, attempt)

    def _read(self, given: Any, attempt: Attempt) -> Score:
        """
        Raises:
            ValueError: it is none of what `score` may give.
        """
        if isinstance(given, Score):
            if given.error is not None:
                return Score((0.0,) * self.components, False, False, str(given.error))
            return Score(self._numbers(given.components), bool(given.correct), bool(given.well_formed))
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        numbers = self._numbers(tuple(given) if several else (given,))
        return Score(numbers, numbers[0] >= 1, attempt.finished)

    def _numbers(self, given: tuple[Any, ...]) -> tuple[float, ...]:
        for value in given:
            if not isinstance(value, Real):
                raise ValueError(f"score gave {_shown(value)}: should be a number")
            if not math.isfinite(value) or abs(value) > LARGEST:
                raise ValueError(f"score gave {float(value)!r}: should be finite in float32")
        if len(given) != self.components:
            raise ValueError(f"score gave {len(given)} components: should be {self.components}")
        return tuple(map(float, given))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def load_own(path: str, options: Mapping[str, Any], key: str) -> Own:
    """Imports and makes it.  Runs the user's code: for a process of its own.

    Args:
        path: `package.module:Name`, a class or a function that makes the environment.
        key: of the recipe, under which `name` and `options` are.

    Raises:
        UserError: there is nothing to import, or it cannot be made or called.
    """
    module_name, _, name = path.partition(":")
    where = f"{key}.name = {path!r}"
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {module_name} cannot be imported: {reason_of(error)}") from error
    factory = module
    for part in name.split("."):
        if not hasattr(factory, part):
            raise UserError(f"{where}: {module_name} has no {name}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise UserError(f"{where}: should be a class, or a function that makes the environment")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UserError(f"{where}, {key}.options = {dict(options)}: {name}{_signature(factory)}: {error}") from None
    except ValueError:  # has no signature, as some that are written in C
        pass
    try:
        made = factory(**options)
    except (Exception, SystemExit) as error:
        raise UserError(f"{where} cannot be made: {reason_of(error)}") from error
    score = getattr(made, "score", None)
    if not callable(score):
        raise UserError(f"{where}: what it makes has no method score: {type(made).__name__}")
    try:
        inspect.signature(score).bind(None)
    except TypeError:
        raise UserError(f"{where}: should have score(self, attempt), has score{_signature(score)}") from None
    components = getattr(made, "components", 1)
    if type(components) is not int or components < 1:
        raise UserError(f"{where}: its components = {_shown(components)}: should be a whole number from 1")
    return Own(made, components)


def _signature(function: Any) -> str:
    return " ".join(str(inspect.signature(function)).split())
