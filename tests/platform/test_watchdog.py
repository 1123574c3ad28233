"""A job that stands still is ended, and told where it stood."""

import pytest

from tests.platform.test_launch import exit_codes, job, ours

START = """\
from megarl.platform.watchdog import Watchdog
dog = Watchdog(2.0)
dog.start()
dog.enter('rollout', 3)
"""


@pytest.mark.parametrize("culprit", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_stands_still(tmp_path, culprit):
    """Its peer waits in a collective; the line names the rank that is behind, and both show their stacks."""
    result, seconds = job(
        tmp_path,
        START
        + "def forget_to_return():\n    time.sleep(600)\n"
        + f"if rank == {culprit}:\n    forget_to_return()\ndog.enter('train')\ndist.barrier()",
    )
    where = f"rank {culprit} in rollout of step 3; ahead of it rank {1 - culprit} in train of step 3"
    assert ours(result) == [f"megarl: no progress for 2 s: {where}"]
    assert seconds < 20 and "1" in exit_codes(result)
    behind, ahead = (result.err.index(f"--- rank {r}, in") for r in (culprit, 1 - culprit))
    assert "in forget_to_return" in result.err[behind:] and "dist.barrier()" in result.err[ahead:]


@pytest.mark.slow
def test_signs_of_life(tmp_path):
    """Long phases, each of which shows that it goes on."""
    result, seconds = job(
        tmp_path, START + "for _ in range(5):\n    time.sleep(0.8)\n    dog.alive()\ndog.stop()\ntime.sleep(3)"
    )
    assert result.code == 0, result.err
    assert seconds > 6 and ours(result) == []


@pytest.mark.slow
def test_alone(tmp_path):
    """One process, without torchrun's store."""
    result, seconds = job(tmp_path, START + "time.sleep(600)", processes=1)
    assert ours(result) == ["megarl: no progress for 2 s: rank 0 in rollout of step 3"]
    assert seconds < 20


@pytest.mark.slow
def test_interpreter_stands_still(tmp_path):
    """A call that keeps the interpreter's lock: no thread runs, and the timer in C ends the rank."""
    result, seconds = job(
        tmp_path,
        START.replace("dog =", "import ctypes, megarl.platform.watchdog as w\nw._LAST_RESORT_SECONDS = 2.0\ndog =")
        + "if rank == 1:\n    ctypes.PyDLL(None).sleep(600)\ndist.barrier()",
    )
    assert result.code != 0 and seconds < 40
    assert "Timeout (0:00:04)!" in result.err or "rank 1 in nowhere: it does not answer" in result.err
