"""`slurm/interactive.sh`: in a terminal, with an allocation of its own or in one that is there."""

import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.slurm.cluster import PYTHON, steps

SCRIPT = ROOT / "slurm" / "interactive.sh"


def test_dry_run_without_a_job():
    command = ["bash", SCRIPT, "--nodes=2", "--", "--dry-run", "no.yaml", "steps=3"]
    outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    result = subprocess.run(command, capture_output=True, text=True, env=outer, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].rstrip().endswith("-m megarl.train no.yaml steps=3")


def test_an_allocation_inside_an_allocation_is_refused():
    command = ["bash", SCRIPT, "--nodes=2", "--", "no.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SLURM_JOB_ID": "7"}, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "megarl: error: options of salloc (--nodes=2 --) inside the allocation 7\n"


class Terminal:
    """A command that a terminal controls; what it prints goes to a file."""

    def __init__(self, log: Path, command: list[str], cwd: Path, env: dict[str, str]):
        self._log = log
        self._pid, self._keyboard = pty.fork()
        if self._pid == 0:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(cwd)
            os.execve(command[0], command, env)
        self._code: int | None = None

    @property
    def text(self) -> str:
        return self._log.read_text()

    def type(self, characters: bytes) -> None:
        os.write(self._keyboard, characters)

    def code(self) -> int | None:
        """The exit code, once there is one."""
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, condition: Callable[[], object], timeout: float = 400) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"not within {timeout} s:\n{self.text}"
            time.sleep(0.1)

    def close(self) -> None:
        if self.code() is None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._keyboard)


CONTROL_C = b"\x03"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["check", "training"])
def test_ctrl_c_saves_and_gives_the_nodes_back(cluster, work, moment):
    """In a real terminal: salloc takes its own process group out of the foreground, so only the script hears it."""
    folder, options = work
    command = [str(SCRIPT), "--nodes=1", "--time=30", "--", PYTHON, "short.yaml"]
    terminal = Terminal(folder / "terminal.log", command, **options)
    try:
        if moment == "check":
            terminal.wait(lambda: ".0" in cluster.run("squeue", "--noheader", "--steps", "--format=%i"))
            time.sleep(1)  # bash and srun have started
        else:
            terminal.wait(lambda: 2 in steps(folder) or terminal.code() is not None)
        terminal.type(CONTROL_C)
        terminal.wait(lambda: terminal.code() is not None)
        assert terminal.code() == 75, terminal.text
        assert "the same command goes on" in terminal.text
        assert (folder / "run" / "continue").exists() == (moment == "training")
        assert len(steps(folder)) < 80
        assert cluster.run("squeue", "--noheader", "--states=RUNNING") == ""
    finally:
        terminal.close()
