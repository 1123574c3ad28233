"""megarl's commands as a user starts them: `python -m`, torchrun, and a cheap stand-in for many short runs."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed import PRELOADED, free_port, rank_variables

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line of a user's mistake, without its prefix."""
        assert self.code == 2, (self.code, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("megarl: error: "), lines[0]
        return lines[0].removeprefix("megarl: error: ")


def start(*arguments, processes: int | None = None, cwd: Path | None = None) -> subprocess.Popen:
    """`python -m ARGUMENTS`, or torchrun's with `processes` of them; the pipes are text."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    module = [*torchrun, "-m", *arguments] if processes else list(arguments)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    found = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, module)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=cwd,
        start_new_session=True,  # so that a test can signal all that belongs to it, as torchrun and schedulers do
    )


def finish(process: subprocess.Popen, timeout: float) -> Result:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"not done after {timeout} s:\n{out}\n{err}") from None
    return Result(process.returncode, out, err)


def run(*arguments, timeout: float = 240, **options) -> Result:
    return finish(start(*arguments, **options), timeout)


def _train(arguments: list[str]) -> int:
    from megarl.platform import launch
    from megarl.train import train

    return launch.command(train, arguments)


def fork(
    folder: Path,
    *arguments,
    main: Callable[[list[str]], int] = _train,
    processes: int = 1,
    timeout: float = 300,
) -> Result:
    """`python -m megarl.train ARGUMENTS`, or the command whose module-level function `main` gives the exit code, in
    processes that have imported Megatron already: what they print while they import is not seen, and they start at
    once.  The result is rank 0's; the others' output lies beside it, in `folder`."""
    ranks = start_forked(folder, *arguments, main=main, processes=processes)
    end = time.monotonic() + timeout
    for rank, _ in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    if any(rank.is_alive() for rank, _ in ranks):
        for rank, _ in ranks:
            rank.kill()
        said = "\n".join(file.read_text() for _, files in ranks for file in files)
        raise AssertionError(f"not done after {timeout} s:\n{said}")
    out, err = ranks[0][1]
    return Result(max((rank.exitcode for rank, _ in ranks), key=abs), out.read_text(), err.read_text())


def start_forked(folder: Path, *arguments, main: Callable[[list[str]], int] = _train, processes: int = 1) -> list:
    """What `fork` waits for: each rank's process, and the files of its two outputs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    ranks = []
    for rank in range(processes):
        files = [folder / f"{name}.{rank}" for name in ("stdout", "stderr")]
        variables = {} if processes == 1 else rank_variables(rank, processes, port)
        rank = context.Process(target=_forked, args=(main, list(map(str, arguments)), variables, files))
        rank.start()
        ranks.append((rank, files))
    return ranks


def _forked(main: Callable[[list[str]], int], arguments: list[str], variables: dict[str, str], files: list[Path]):
    os.environ.update(variables)
    for number, path in enumerate(files, 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    code = main(arguments)
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def wait_for(condition, process: subprocess.Popen, timeout: float):
    """What `condition()` returns once it is true; the process must still run until then."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if value := condition():
            return value
        if process.poll() is not None:
            raise AssertionError(f"ended early: {process.communicate()}")
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"not within {timeout} s: {process.communicate()}")
