"""Completions judged by processes of their own, so that nothing which a reward does can hang or end the rank."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from megarl.environments.registry import EnvironmentSpecs
from megarl.environments.score import Attempt, Score, failed
from megarl.environments.worker import Ready, Refused, late
from megarl.errors import UserError

_PROGRAM = "import sys; from megarl.environments.worker import main; main(*map(int, sys.argv[1:]))"
_LAUNCHER = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|LOCAL_RANK|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_ASYNC.*)"
)
"""torchrun's environment: such a process is no rank of the job."""
START_SECONDS = 300.0
"""In which a process must have imported and made its environment."""
_STARTS = 3
"""In a row that may fail before what is left to judge is given up."""
_GRACE_SECONDS = 0.5
"""Beside a completion's time: what the process itself stops is answered until then."""
_ALIVE_SECONDS = 1.0


class Workers:
    """Processes that judge what they are handed, a completion or, where `score` is a coroutine, several at a time.

    A process that ends, or that does not answer in time and is ended, is replaced.  If it had one completion, that is
    the one which could not be judged; if it had several, each of them is tried again alone.
    """

    def __init__(
        self,
        specs: EnvironmentSpecs,
        count: int,
        seconds: float,
        alive: Callable[[], None] = lambda: None,
    ):
        """Starts them, from the rank's main thread, with which they end.

        Args:
            count: processes.
            seconds: for a completion.
            alive: called now and then while they work.

        Raises:
            UserError: a user's own environment cannot be made.
        """
        self._specs, self._seconds, self._alive = specs, seconds, alive
        self._workers = [_Worker(specs) for _ in range(count)]
        try:
            self.components, *others = [worker.started(alive) for worker in self._workers]
            if others and set(others) != {self.components}:
                raise UserError(f"environment: has {self.components} components in one process, {others[0]} in another")
        except BaseException:
            self.close()
            raise

    def score(self, attempts: Sequence[Attempt]) -> list[Score]:
        """A score for each, in order."""
        return _Batch(self._specs, self._workers, attempts, self._seconds, self.components, self._alive).scores()

    def close(self) -> None:
        """Ends the processes and what they have started in their sessions."""
        for worker in self._workers:
            worker.end()


class _Batch:
    """Completions on their way through the workers."""

    def __init__(
        self,
        specs: EnvironmentSpecs,
        workers: list["_Worker"],
        attempts: Sequence[Attempt],
        seconds: float,
        components: int,
        alive: Callable[[], None],
    ):
        self._specs, self._workers, self._attempts = specs, workers, attempts
        self._seconds, self._components, self._alive = seconds, components, alive
        self._scores: dict[int, Score] = {}
        self._waiting = deque(range(len(attempts)))
        self._alone: deque[int] = deque()
        """Had by a process that ended, among others: one of them has ended it."""
        self._failed_starts = 0

    def scores(self) -> list[Score]:
        while len(self._scores) < len(self._attempts):
            for number in range(len(self._workers)):
                self._feed(number)
            busy = {w.connection: n for n, w in enumerate(self._workers) if w.ready is None or w.sent}
            now = time.monotonic()
            until = min((self._workers[n].deadline(self._seconds) for n in busy.values()), default=now)
            for connection in wait(list(busy), min(max(0.0, until - now), _ALIVE_SECONDS)):
                self._hear(busy[connection])
            for number, worker in enumerate(self._workers):
                if (worker.ready is None or worker.sent) and time.monotonic() > worker.deadline(self._seconds):
                    self._replace(number, late(self._seconds) if worker.sent else "does not start")
            self._alive()
            if self._failed_starts >= _STARTS:
                self._give_up()
        return [self._scores[place] for place in range(len(self._attempts))]

    def _feed(self, number: int) -> None:
        worker = self._workers[number]
        if worker.ready is None:
            return
        while self._waiting and len(worker.sent) < worker.ready.concurrency and not worker.alone:
            self._send(number, self._waiting.popleft())
            if worker is not self._workers[number]:
                return
        if self._alone and not worker.sent:
            worker.alone = True
            self._send(number, self._alone.popleft())

    def _send(self, number: int, place: int) -> None:
        worker = self._workers[number]
        worker.sent[place] = time.monotonic()
        try:
            worker.connection.send((place, self._attempts[place], self._seconds))
        except OSError:
            self._replace(number, worker.how_it_ended())

    def _hear(self, number: int) -> None:
        worker = self._workers[number]
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(number, worker.how_it_ended())
            return
        if isinstance(message, Ready) and message.components != self._components:
            self._replace(number, f"it has {message.components} components, and had {self._components}")
        elif isinstance(message, Ready):
            worker.ready, self._failed_starts = message, 0
        elif isinstance(message, Refused):
            self._replace(number, message.message)
        else:
            place, self._scores[place] = message
            del worker.sent[place]
            worker.alone = False

    def _replace(self, number: int, reason: str) -> None:
        worker = self._workers[number]
        worker.end()
        if worker.ready is None:
            self._failed_starts, self._reason = self._failed_starts + 1, reason
        if len(worker.sent) == 1:
            self._scores[next(iter(worker.sent))] = failed(self._components, reason)
        else:
            self._alone.extend(worker.sent)
        self._workers[number] = _Worker(self._specs)

    def _give_up(self) -> None:
        """The next batch tries again."""
        reason = f"the process that judges could not be started again: {self._reason}"
        for place in range(len(self._attempts)):
            self._scores.setdefault(place, failed(self._components, reason))
        for number, worker in enumerate(self._workers):
            if worker.sent:
                worker.end()
                self._workers[number] = _Worker(self._specs)


class _Worker:
    """One process, and what it has been handed."""

    def __init__(self, specs: EnvironmentSpecs):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # One that is stuck reads nothing, and one that is killed may have said half of something.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 10, 0))
            environment = {k: v for k, v in os.environ.items() if not _LAUNCHER.fullmatch(k)}
            environment["PYTHONPATH"] = os.pathsep.join(sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals to the rank are not for it, and what it starts can be ended with it
            )
            self.connection = Connection(ours.detach())
        self._begun = time.monotonic()
        self.ready: Ready | None = None
        """None: it is not ready yet."""
        self.sent: dict[int, float] = {}
        """Places of the completions that it has, and when they were sent."""
        self.alone = False
        """What it has shall stay the only one."""
        with contextlib.suppress(OSError):  # it has ended: the first answer will tell
            self.connection.send(specs)

    def started(self, alive: Callable[[], None]) -> int:
        """Waits until it is ready; returns its environment's number of components.

        Raises:
            UserError: it has refused, has ended or takes too long.
        """
        while not self.connection.poll(_ALIVE_SECONDS):
            alive()
            if time.monotonic() > self._begun + START_SECONDS:
                raise UserError(f"environment: the process that judges was not ready after {START_SECONDS:g} s")
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise UserError(f"environment: {self.how_it_ended()}, before the environment was made") from None
        if isinstance(message, Refused):
            raise UserError(message.message)
        self.ready = message
        return message.components

    def deadline(self, seconds: float) -> float:
        """On the monotonic clock, for the first of what it has, or for its start."""
        if self.ready is None:
            return self._begun + START_SECONDS
        return min(self.sent.values()) + seconds + _GRACE_SECONDS

    def how_it_ended(self) -> str:
        """Once the connection has."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the process that judges hung up"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that judges {how}"

    def end(self) -> None:
        """Kills it and all of its session.  More than once does nothing."""
        if self.connection.closed:
            return
        self.connection.close()
        # Before it is waited for: until then its number is no other's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
