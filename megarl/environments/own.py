"""A user's own environment, by its import path."""

import importlib
import inspect
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

from megarl.environments.score import Attempt, Score, checked, finite, reason_of, shown
from megarl.errors import UserError

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
            return checked(given, self.components)
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
        numbers = finite(tuple(given) if several else (given,), self.components)
        return Score(numbers, numbers[0] >= 1, attempt.finished)


def load_own(path: str, options: Mapping[str, Any], key: str) -> Own:
    """Imports and makes it.  Runs the user's code: for a process of its own.

    Args:
        path: `package.module:Name`, a class or a function that makes the environment.
        key: of the recipe, under which `name` and `options` are.

    Raises:
        UserError: there is nothing to import, or it cannot be made or called.
    """
    made = make_own(path, options, key, {"score": 1})
    components = getattr(made, "components", 1)
    if type(components) is not int or components < 1:
        where = f"{key}.name = {path!r}"
        raise UserError(f"{where}: its components = {shown(components)}: should be a whole number from 1")
    return Own(made, components)


def make_own(path: str, options: Mapping[str, Any], key: str, methods: Mapping[str, int]) -> Any:
    """What the user's class or function makes, which has these methods, each with so many arguments.

    Raises:
        UserError: as `load_own`.
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
    for method, count in methods.items():
        found = getattr(made, method, None)
        if not callable(found):
            raise UserError(f"{where}: what it makes has no method {method}: {type(made).__name__}")
        try:
            inspect.signature(found).bind(*[None] * count)
        except TypeError:
            wanted = ", ".join(["self", *_ARGUMENTS[method]])
            raise UserError(f"{where}: should have {method}({wanted}), has {method}{_signature(found)}") from None
    return made


_ARGUMENTS = {"score": ["attempt"], "reset": ["prompt", "seed"], "step": ["state", "completion", "finished"]}


def _signature(function: Any) -> str:
    return " ".join(str(inspect.signature(function)).split())
