"""A process that judges completions for a rank, and talks to it through a socket (`megarl.environments.workers`).

It is a fresh interpreter, neither forked from the rank nor a copy of its command: it has none of the rank's CUDA,
process groups and threads, whenever it is started.
"""

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megarl.environments.registry import EnvironmentSpecs
from megarl.environments.score import Attempt, Environment, Score, failed, reason_of
from megarl.errors import UserError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ready:
    """The environment is made."""

    components: int
    concurrency: int


@dataclass(frozen=True)
class Refused:
    """It cannot be made."""

    message: str


def end_with(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def ended_first() -> None:
    """Where the machine runs out of memory, the kernel takes this process rather than the rank."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


async def judged(environment: Environment, attempt: Attempt, seconds: float) -> Score:
    """The score, or why there is none; `seconds` bound what is awaited, and the rank bounds the rest."""
    limit = asyncio.timeout(seconds)
    try:
        score = environment.score(attempt)
        if inspect.isawaitable(score):
            async with limit:
                score = await score
        return score
    except BaseException as error:  # SystemExit too, and what libraries derive from neither
        if asyncio.current_task().cancelling():
            raise
        return failed(environment.components, late(seconds) if limit.expired() else reason_of(error))


def late(seconds: float) -> str:
    return f"took longer than environment.timeout_seconds = {seconds:g}"


async def serve(connection: Connection, environment: Environment) -> None:
    """Answers `(place, attempt, seconds)` with `(place, score)`, until the rank closes the socket."""
    loop, tasks, closed = asyncio.get_running_loop(), set(), asyncio.Event()

    async def answer(place: int, attempt: Attempt, seconds: float) -> None:
        score = await judged(environment, attempt, seconds)
        try:
            connection.send((place, score))
        except OSError:
            closed.set()

    def receive() -> None:
        try:
            task = loop.create_task(answer(*connection.recv()))
        except (EOFError, OSError):
            closed.set()
            return
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), receive)
    await closed.wait()


def main(descriptor: int, parent: int) -> None:
    """
    Args:
        descriptor: of the socket.
        parent: process id of the rank.
    """
    end_with(parent)
    ended_first()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    specs: EnvironmentSpecs = connection.recv()

    async def life() -> None:  # a user's own is made where it is called: a client may belong to the loop
        try:
            environment = specs.build()
        except UserError as error:
            connection.send(Refused(str(error)))
            return
        connection.send(Ready(environment.components, environment.concurrency))
        await serve(connection, environment)

    with contextlib.suppress(EOFError, OSError):
        asyncio.run(life())
    os._exit(0)  # whatever threads the user's code has left
