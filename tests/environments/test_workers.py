"""Processes that judge: each way in which one can go wrong costs the completion that did it, and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from megarl.environments.registry import GRADERS, EnvironmentSpec, EnvironmentSpecs
from megarl.environments.score import Attempt
from megarl.environments.workers import Workers
from megarl.errors import UserError

ROOT = Path(__file__).parent.parent.parent
HERE = "tests.environments.own_rewards"
SECONDS = 2.0


def specs(name: str, **options) -> EnvironmentSpecs:
    """One of `own_rewards`, or of the built-in ones."""
    name = f"{HERE}:{name}" if name not in GRADERS and ":" not in name else name
    return EnvironmentSpecs(EnvironmentSpec("environment", name, options))


def attempts(*texts: str) -> list[Attempt]:
    return [Attempt(text, True, "1/2", "s", row) for row, text in enumerate(texts, 1)]


def gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def pool():
    """Makes workers, and ends them."""
    made = []

    def pool(name: str, count: int = 1, seconds: float = SECONDS, **options) -> Workers:
        made.append(Workers(specs(name, **options), count, seconds))
        return made[-1]

    yield pool
    for workers in made:
        workers.close()


BAD = {
    "crash": "the process that judges ended with exit code 3",
    "killed": "the process that judges was killed by SIGKILL",
    "hang": "took longer than environment.timeout_seconds = 2",
    "raise": "KeyError: 'no such key'",
    "exit": "SystemExit: 1",
    "float('nan')": "ValueError: score gave nan: should be finite in float32",
    "'a'": "ValueError: score gave str 'a': should be a number",
    "(1, 2)": "ValueError: score gave 2 components: should be 1",
}


@pytest.mark.parametrize("name", ["Told", "Waits"])
def test_what_goes_wrong_costs_one_completion(pool, name):
    texts = [text for bad in BAD for text in (bad, "0.5")]
    scores = pool(name, 2).score(attempts(*texts))
    assert {text: score.error for text, score in zip(texts, scores, strict=True) if text in BAD} == BAD
    assert [score.components for score in scores] == [(0.0,), (0.5,)] * len(BAD)
    assert not any(score.correct or score.well_formed for score in scores[::2])


def test_results_are_in_order_whoever_is_done_first(pool):
    for name in ("Told", "Waits"):
        scores = pool(name, 2).score(attempts("sleep 0.4", "sleep 0.1", "3", "sleep 0.2", "5"))
        assert [score.reward for score in scores] == [0.4, 0.1, 3, 0.2, 5]


def test_coroutines_wait_together_and_are_given_up_one_by_one(pool):
    workers, begun = pool("Waits"), time.monotonic()
    scores = workers.score(attempts(*["sleep 1"] * 30, "sleep 100", *["sleep 1"] * 30))
    assert time.monotonic() - begun < 15
    assert [place for place, score in enumerate(scores) if score.error] == [30]
    assert scores[30].error == BAD["hang"]


def test_nothing_to_judge(pool):
    assert pool("Told").score([]) == []


def test_the_rank_is_told_that_it_is_alive():
    signs = []
    workers = Workers(specs("Told"), 1, SECONDS, lambda: signs.append(1))
    workers.score(attempts("1"))
    workers.close()
    assert signs


def test_math_that_does_not_end(pool):
    scores = pool("math", seconds=5.0).score(attempts("0.5", "9" * 5 + "^{9^{9^{9}}} + \\sqrt{2}", "\\frac12"))
    assert [score.correct for score in scores] == [True, False, True]


@pytest.mark.parametrize(
    "name, message",
    [
        ("NoScore", "what it makes has no method score"),
        ("no.such:Thing", "no.such cannot be imported"),
        ("crashes", "environment: the process that judges ended with exit code 4, before the environment was made"),
    ],
)
def test_refused_at_the_start(name, message):
    before = psutil.Process().children()
    with pytest.raises(UserError) as caught:
        Workers(specs(name), 2, SECONDS)
    assert message in str(caught.value)
    assert psutil.Process().children() == before


def test_one_that_cannot_be_made_again_fails_completions_and_not_the_job(pool, tmp_path):
    workers = pool("Once", path=str(tmp_path / "made"))
    scores = workers.score(attempts("1", "crash", "1"))
    assert [score.error is None for score in scores] == [True, False, False]
    assert "could not be started again" in scores[2].error and "FileExistsError" in scores[2].error
    (tmp_path / "made").unlink()
    assert workers.score(attempts("1"))[0].error is None


def test_what_is_left_after_the_end(pool):
    """Neither the process nor what it started."""
    workers = pool("Told")
    pid, child = (int(score.reward) for score in workers.score(attempts("pid", "child")))
    workers.close()
    assert gone(pid) and gone(child)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_the_rank(how):
    """Also one that is in the middle of something."""
    program = """
        from megarl.environments.workers import Workers
        from tests.environments.test_workers import attempts, specs
        workers = Workers(specs("Told"), 2, 1000.0)
        pids = {int(score.reward) for score in workers.score(attempts(*["pid"] * 50))}
        print(*pids, flush=True)
        workers.score(attempts("hang", "hang"))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    pids = list(map(int, rank.stdout.readline().split()))
    assert pids and all(map(psutil.pid_exists, pids))
    time.sleep(0.5)
    rank.send_signal(how)
    rank.wait(10)
    assert all(map(gone, pids))


def test_they_are_no_ranks(pool, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "1")
    told = "len([k for k in __import__('os').environ if k in ('RANK', 'MASTER_PORT')])"
    light = "len({'torch', 'megatron', 'pydantic'} & set(__import__('sys').modules))"
    assert [score.reward for score in pool("Told").score(attempts(told, light))] == [0, 0]


def test_a_long_completion_for_one_that_is_stuck(pool):
    """More than a socket takes."""
    scores = pool("Waits", seconds=1.0).score(attempts("hang", *[f"1 # {'a' * 300_000}"] * 3))
    assert [score.error is None for score in scores] == [False, True, True, True]
