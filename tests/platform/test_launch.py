"""How a job ends, with real torchrun and two processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from megarl.platform.launch import StopSignal
from tests import commands
from tests.distributed import free_port, rank_variables

HEAD = """\
import sys, time
import torch, torch.distributed as dist
from megarl.errors import UserError
from megarl.platform import launch

def body(arguments):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"started {rank}\\n", end="", flush=True)  # in one piece: ranks share the pipe
"""
TAIL = """
sys.exit(launch.command(body, sys.argv[1:]))
"""


def job(tmp_path, body: str, processes: int = 2, timeout: float = 90) -> tuple[commands.Result, float]:
    """Output of the script under torchrun, and the seconds from the first rank's start to the end."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + TAIL)
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=commands.ROOT,
    )
    first = process.stdout.readline()
    begin = time.monotonic()
    result = commands.finish(process, timeout)
    return commands.Result(result.code, first + result.out, result.err), time.monotonic() - begin


def ours(result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("megarl: ")]


def exit_codes(result) -> set[str]:
    """Of the workers, in torchrun's summary."""
    return set(re.findall(r"exitcode *: *(-?\d+)", result.err))


def test_success(tmp_path):
    result, _ = job(tmp_path, "dist.barrier()\nprint(f'done {rank}\\n', end='', flush=True)")
    assert result.code == 0
    assert sorted(line for line in result.out.splitlines() if line.startswith("done")) == ["done 0", "done 1"]
    assert ours(result) == []


def test_mistake_on_all_ranks(tmp_path):
    """One line, once; no traceback of ours."""
    result, _ = job(tmp_path, "raise UserError('steps = x: should be an integer')")
    assert ours(result) == ["megarl: error: steps = x: should be an integer"]
    assert "2" in exit_codes(result) <= {"2", "-15"}  # torchrun ends with SIGTERM who is not done yet
    assert "script.py" not in re.sub(r"\S*script\.py FAILED", "", result.err)  # no line of a traceback


def test_mistake_on_one_rank(tmp_path):
    """Rank 0 says it, although it waits in a collective for the rank that failed."""
    result, seconds = job(tmp_path, "if rank == 1:\n    raise UserError('only here')\ndist.barrier()")
    assert ours(result) == ["megarl: error: only here"]
    assert "2" in exit_codes(result) <= {"2", "-15"}  # torchrun ends with SIGTERM who is not done yet
    assert seconds < 15


@pytest.mark.parametrize(
    "culprit, wait",
    [(0, "dist.barrier()"), (0, "time.sleep(600)"), (1, "dist.all_reduce(torch.ones(3))"), (1, "time.sleep(600)")],
)
def test_bug_on_one_rank(tmp_path, culprit, wait):
    """Both ranks end within seconds; the traceback and its message are on the screen."""
    result, seconds = job(tmp_path, f"if rank == {culprit}:\n    raise ValueError('the culprit')\n{wait}")
    assert seconds < 15
    assert result.code != 0
    assert "ValueError: the culprit" in result.err and "Traceback" in result.err
    assert ours(result) == (["megarl: rank 1 failed: ValueError: the culprit"] if culprit == 1 else [])
    assert "1" in exit_codes(result)


@pytest.mark.parametrize("wait", ["dist.barrier()", "time.sleep(600)"])
def test_end_of_a_rank_without_a_word(tmp_path, wait):
    """A rank that is killed, as by the kernel for memory, ends the job, and the screen says which: also where the
    other takes torchrun's SIGTERM for a request to save and stop, and sits where no exception reaches it."""
    body = f"""\
import os, signal
with launch.StopSignal().caught():
    if rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
    {wait}"""
    result, seconds = job(tmp_path, body)
    assert result.code != 0
    assert seconds < 15
    assert re.search(r"rank +: 1 .*\n *exitcode +: -9", result.err)  # torchrun's summary
    if "sleep" in wait:  # elsewhere gloo itself may be the first to tell rank 0
        (line,) = ours(result)
        assert re.fullmatch(r"megarl: rank 1 \(process \d+\) ended without a word: killed, or crashed", line)


def test_one_process_without_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom megarl.errors import UserError\nfrom megarl.platform import launch\n"
        "def body(arguments):\n    raise UserError(f'got {arguments}')\n"
        "sys.exit(launch.command(body, sys.argv[1:]))\n"
    )
    result = subprocess.run([sys.executable, script, "a", "b=1"], capture_output=True, text=True, cwd=commands.ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "megarl: error: got ['a', 'b=1']\n")


def test_stop_signal_is_remembered():
    """The first signal does not interrupt; the handlers are as before afterwards."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal().caught() as stop:
        assert stop._came is None
        signal.raise_signal(signal.SIGTERM)
        assert stop._came is not None
        signal.raise_signal(signal.SIGINT)  # at once: the same request from another sender
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_time_is_over():
    """By a clock that nobody sets; who has no such limit is never asked."""
    stop, patient = StopSignal(after_seconds=0.2), StopSignal()
    assert not stop.asked()
    time.sleep(0.3)
    assert stop.asked() and not patient.asked()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_each_signal_asks(number):
    with StopSignal().caught() as stop:
        signal.raise_signal(number)
        assert stop.asked()


def test_a_later_signal_ends_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\nfrom megarl.platform import launch\nlaunch._SAME_SIGNAL_SECONDS = 0.1\n"
        "with launch.StopSignal().caught():\n"
        "    signal.raise_signal(signal.SIGTERM)\n    print('goes on', flush=True)\n    time.sleep(0.3)\n"
        "    signal.raise_signal(signal.SIGTERM)\n    print('never')\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=commands.ROOT)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "goes on\n")


def test_stop_is_agreed_by_all_ranks(tmp_path):
    body = """\
import os, signal
with launch.StopSignal().caught() as stop:
    print(f'before {stop.agreed()}\\n', end='', flush=True)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    print(f'after {stop.agreed()}\\n', end='', flush=True)"""
    result, _ = job(tmp_path, body)
    assert result.code == 0, result.err
    assert [line for line in result.out.splitlines() if line.startswith("before")] == ["before False"] * 2
    assert [line for line in result.out.splitlines() if line.startswith("after")] == ["after True"] * 2


# Without torchrun, as a scheduler starts ranks itself


def started_alone(tmp_path, *worlds, port=None, seconds=600.0):
    """`launch.start` in processes whose schedulers told them these numbers of processes."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom megarl.platform import launch\nlaunch._JOIN_SECONDS = {seconds}\n"
        "def body(arguments):\n    launch.start({}, 1, False)\n    print('joined')\n"
        "sys.exit(launch.command(body, sys.argv[1:]))\n"
    )
    port = port or free_port()
    started = []
    for rank, world in enumerate(worlds):
        variables = rank_variables(rank, world, port) | {"OMP_NUM_THREADS": "1"}
        arguments = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=commands.ROOT)
        started.append(subprocess.Popen([sys.executable, script], env=os.environ | variables, **arguments))
    return [commands.finish(process, 90) for process in started]


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        (first,) = started_alone(tmp_path, 2, port=port, seconds=5.0)
    (line,) = ours(first)
    assert first.code == 2
    assert line.endswith(f"MASTER_ADDR = '127.0.0.1', MASTER_PORT = '{port}': the port is taken by another program")


def test_a_process_that_does_not_come(tmp_path):
    (first,) = started_alone(tmp_path, 2, seconds=5.0)
    (line,) = ours(first)
    assert first.code == 2 and "not all 2 processes have come within 5 s" in line


def test_processes_of_different_jobs(tmp_path):
    first, second = started_alone(tmp_path, 2, 3)
    (line,) = ours(first)
    assert "WORLD_SIZE = 3 on rank 1, 2 on rank 0: they should be started as one job" in line
    assert (first.code, second.code, ours(second)) == (2, 2, [])
