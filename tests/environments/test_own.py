"""A user's own environment: what it may give, and each way in which it cannot be had."""

import asyncio

import numpy as np
import pytest

from megarl.environments.own import load_own
from megarl.environments.score import Attempt, Score
from megarl.errors import UserError

HERE = "tests.environments.own_rewards"


def own(name: str, **options):
    return load_own(f"{HERE}:{name}", options, "environment")


def scored(name: str, text: str) -> Score:
    return own(name).score(Attempt(text, True, "7"))


def test_options():
    assert own("Length", least=3).score(Attempt("ab", True, "")) == Score((0.0,), False, True)
    assert own("made", least=2).score(Attempt("ab", False, "")) == Score((1.0,), True, False)


@pytest.mark.parametrize("text, value", [("1", 1), ("0.5", 0.5), ("True", 1), ("(0.25,)", 0.25), ("[-1]", -1)])
def test_a_number(text, value):
    assert scored("Told", text) == Score((value,), value >= 1, True)


def test_a_number_of_numpy():
    class Made:
        def score(self, attempt):
            return np.float32(0.5)

    from megarl.environments.own import Own

    assert Own(Made(), 1).score(Attempt("", True, "")).components == (0.5,)


def test_components():
    assert scored("Two", "(1, 0.5)") == Score((1, 0.5), True, True)
    assert scored(
        "Two", "__import__('megarl.environments.score').environments.score.Score((1, 2), False, True)"
    ) == Score((1, 2), False, True)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("Told", "float('nan')", "score gave nan: should be finite"),
        ("Told", "float('inf')", "score gave inf: should be finite"),
        ("Told", "1e39", "score gave 1e+39: should be finite in float32"),
        ("Told", "'1.0'", "score gave str '1.0': should be a number"),
        ("Told", "b'1'", "score gave bytes b'1': should be a number"),
        ("Told", "None", "score gave NoneType None: should be a number"),
        ("Told", "{'a': 1}", "score gave dict {'a': 1}: should be a number"),
        ("Told", "1j", "score gave complex 1j: should be a number"),
        ("Told", "(1, 2)", "score gave 2 components: should be 1"),
        ("Told", "()", "score gave 0 components: should be 1"),
        ("Two", "1", "score gave 1 components: should be 2"),
        ("Two", "(1, float('nan'))", "score gave nan: should be finite"),
        ("Two", "(1, 2, 3)", "score gave 3 components: should be 2"),
    ],
)
def test_what_is_no_reward(name, text, message):
    with pytest.raises(ValueError) as caught:
        scored(name, text)
    assert str(caught.value).startswith(message)


def test_a_coroutine():
    environment = own("Waits")
    assert environment.concurrency > 1 == own("Told").concurrency
    assert asyncio.run(environment.score(Attempt("0.5", True, ""))) == Score((0.5,), False, True)
    with pytest.raises(ValueError, match="should be a number"):
        asyncio.run(environment.score(Attempt("'a'", True, "")))


@pytest.mark.parametrize(
    "path, options, message",
    [
        ("no.such:Thing", {}, "no.such cannot be imported: ModuleNotFoundError: No module named 'no'"),
        (f"{HERE}:Missing", {}, f"{HERE} has no Missing"),
        (f"{HERE}:Told.Missing", {}, f"{HERE} has no Told.Missing"),
        (f"{HERE}:CONSTANT", {}, "should be a class, or a function that makes the environment"),
        (f"{HERE}:made", {}, "environment.options = {}: made(least: int): missing a required argument: 'least'"),
        (
            f"{HERE}:Length",
            {"most": 1},
            "environment.options = {'most': 1}: Length(least: int = 1): got an unexpected keyword argument 'most'",
        ),
        (f"{HERE}:CannotBeMade", {}, "cannot be made: RuntimeError: no licence"),
        (f"{HERE}:NoScore", {}, "what it makes has no method score: NoScore"),
        (f"{HERE}:WrongScore", {}, "should have score(self, attempt), has score(completion, answer)"),
        (f"{HERE}:WrongComponents", {}, "its components = str 'two': should be a whole number from 1"),
    ],
)
def test_refusals(path, options, message):
    with pytest.raises(UserError) as caught:
        load_own(path, options, "environment")
    assert "\n" not in str(caught.value)
    assert f"environment.name = {path!r}" in str(caught.value)
    assert message in str(caught.value)


def test_a_module_with_a_mistake(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("class (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="broken_rewards cannot be imported: SyntaxError: invalid syntax"):
        load_own("broken_rewards:Reward", {}, "environment")
