"""The life of a rank: process group, threads, seeds, signals, and how a failure ends all ranks.

`command` wraps the body of a `python -m megarl.*` command.  A user's mistake is one line on rank 0 and exit
code 2, a check that failed one line and exit code 1; a bug is its traceback on the rank it happened on and
exit code 1.  The first rank that fails says so in torchrun's store, where a thread of every other rank sees
it within a second, so that none of them waits in a collective for a peer that is gone.  For a rank that is
killed its siblings on the machine say so.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import CheckFailed, UserError
from megarl.platform.graphs import drop_graphs
from megarl.platform.kernels import kernels

USER_ERROR, BUG = 2, 1
_FAILED = f"megarl/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_SAID = f"{_FAILED}/said"
_RANKS = f"megarl/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{os.environ.get('GROUP_RANK')}"
_POLL_SECONDS = 0.5
_LAST_WORDS_SECONDS = 10.0
_JOIN_SECONDS = 600.0
"""For which processes wait for those that were not started yet, as on other nodes."""
_SAME_SIGNAL_SECONDS = 5.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""The last is what Slurm is asked to send ahead of the end of a job's time."""


def rank() -> int:
    """This process's rank, before and after the process group exists."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes of the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def command(body: Callable[[list[str]], None], arguments: list[str]) -> int:
    """Runs `body(arguments)` on this rank and returns the exit code."""
    watch = _FailureWatch()
    try:
        body(arguments)
    except (UserError, CheckFailed) as error:
        code = USER_ERROR if isinstance(error, UserError) else BUG
        if isinstance(error, _NotJoined):
            watch.store_is_gone()
        watch.announce(code, str(error))
        if rank() == 0:
            print(f"megarl: error: {error}", file=sys.stderr, flush=True)
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        traceback.print_exc()
        watch.announce(BUG, f"rank {rank()} failed: {type(error).__name__}: {error}")
        return BUG
    finally:
        watch.close()
    if dist.is_initialized():
        drop_graphs()
        dist.destroy_process_group()
    return 0


def connect(seconds: float = 60.0) -> dist.TCPStore:
    """A connection to torchrun's store of its own: the process group's is busy while a collective starts.

    Args:
        seconds: after which it is given up, and what is asked of the store then.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def announce(code: int, message: str) -> bool:
    """Tells all other ranks that this one has failed: they end, and rank 0 prints the message of the first.

    Waits until rank 0 has, if that is another: once this rank is gone, torchrun ends rank 0 too.

    Returns:
        Whether rank 0 has printed it, as another rank.
    """
    if world_size() == 1:
        return False
    try:
        store = connect(_LAST_WORDS_SECONDS)
        store.compare_set(_FAILED, "", f"{code} {rank()} {message}")
        if rank() != 0:
            store.wait([_SAID])
    except RuntimeError:  # the store went with the job, or rank 0 is gone
        return False
    return rank() != 0


class _NotJoined(UserError):
    """There is no store over which others could be told."""


class _FailureWatch:
    """Ends this rank when another one has announced its failure."""

    def __init__(self):
        self._closed = threading.Event()
        self._told = world_size() > 1
        """Whether there are others, and a way to tell them."""
        if self._told:
            threading.Thread(target=self._watch, daemon=True).start()

    def announce(self, code: int, message: str) -> None:
        self._closed.set()
        if self._told:
            announce(code, message)

    def store_is_gone(self) -> None:
        self._told = False

    def _watch(self) -> None:
        try:
            store = connect()
            siblings = _Siblings(store)
            while not self._closed.wait(_POLL_SECONDS):
                if lost := siblings.lost():
                    store.compare_set(_FAILED, "", f"{BUG} {lost}")
                if store.check([_FAILED]):
                    break
            else:
                return
            code, failed, message = store.get(_FAILED).decode().split(" ", 2)
        except RuntimeError:
            return  # no store any more: torchrun is ending the job
        if self._closed.is_set() or int(failed) == rank():
            return  # this rank ends by itself
        if rank() == 0:
            prefix = "megarl: error: " if int(code) == USER_ERROR else "megarl: "
            print(f"{prefix}{message}", file=sys.stderr, flush=True)
            store.set(_SAID, "")
        else:
            with contextlib.suppress(RuntimeError):  # as in `announce`: rank 0 first
                store.wait([_SAID], timedelta(seconds=_LAST_WORDS_SECONDS))
        sys.stdout.flush()
        # The main thread may sit in a collective that nothing but the end of the process leaves.
        os._exit(int(code))

    def close(self) -> None:
        """This rank's end is no loss."""
        self._closed.set()
        said = [_SAID] if rank() == 0 and self._told else []
        left = [f"{_RANKS}/{os.environ['LOCAL_RANK']}/left"] if self._told and _siblings() else []
        try:
            if said or left:
                store = connect(_LAST_WORDS_SECONDS)
                for key in (*left, *said):
                    store.set(key, "")
        except RuntimeError:  # as above
            pass


class _Siblings:
    """Ranks that the same torchrun has started, seen when they end without a word: killed by the kernel for want of
    memory, or by a fault in native code.

    torchrun sees it too, but then asks the others to end and waits for 30 seconds before it kills them; they may sit
    in a collective, or take the request for one to save and stop.
    """

    def __init__(self, store: dist.Store):
        self._store = store
        self._pids: dict[str, str] = {}
        self._unknown = [f"{_RANKS}/{number}" for number in _siblings()]
        if self._unknown:
            store.set(f"{_RANKS}/{os.environ['LOCAL_RANK']}", f"{rank()} {os.getpid()}")

    def lost(self) -> str | None:
        """Rank that is lost and what is to be said about it."""
        for key in [key for key in self._unknown if self._store.check([key])]:
            self._unknown.remove(key)
            self._pids[key] = self._store.get(key).decode()
        for key, (number, pid) in [(key, value.split()) for key, value in self._pids.items()]:
            if _runs(int(pid)):
                continue
            del self._pids[key]
            if not self._store.check([f"{key}/left"]):
                return f"{number} rank {number} (process {pid}) ended without a word: killed, or crashed"
        return None


def _siblings() -> list[int]:
    """Local ranks of the others that the same torchrun has started: all of them see the same process ids."""
    if "GROUP_RANK" not in os.environ:
        return []
    return [n for n in range(int(os.environ["LOCAL_WORLD_SIZE"])) if n != int(os.environ["LOCAL_RANK"])]


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(sizes: Mapping[str, int], seed: int, cuda_graphs: bool) -> None:
    """Joins the process group and builds Megatron's groups and random states.

    Without torchrun's environment the job is this one process.

    Args:
        sizes: of the parallel groups, by Megatron's names (`tensor_model_parallel_size`, ...).
    """
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    local = int(os.environ["LOCAL_RANK"])
    if kernels().gpu:
        torch.cuda.set_device(local)
    else:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    device = torch.device("cuda", local) if kernels().gpu else None
    store = dist.HashStore() if world_size() == 1 else _join()
    dist.init_process_group(kernels().collectives, device_id=device, store=store, rank=rank(), world_size=world_size())

    from megarl.platform import prepare  # noqa: F401  (before Megatron)

    from megatron.core import parallel_state, tensor_parallel  # isort: skip

    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(seed)
    tensor_parallel.random.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=cuda_graphs)


def _join() -> dist.Store:
    """The store over which this job's processes find each other; collective.

    Raises:
        UserError: its port is taken, or the processes were not all started, or not as one job.
    """
    where = f"MASTER_ADDR = {os.environ.get('MASTER_ADDR')!r}, MASTER_PORT = {os.environ.get('MASTER_PORT')!r}"
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))
        if rank() == 0:
            store.set("megarl/world_size", str(world_size()))
        of_first = int(store.get("megarl/world_size"))
    except dist.DistNetworkError as error:
        taken = "EADDRINUSE" in str(error)
        reason = "the port is taken by another program" if taken else f"rank 0 was not reached in {_JOIN_SECONDS:g} s"
        raise _NotJoined(f"{where}: {reason}") from None
    except dist.DistStoreError:
        raise _NotJoined(f"{where}: not all {world_size()} processes have come within {_JOIN_SECONDS:g} s") from None
    if world_size() != of_first:
        raise UserError(
            f"WORLD_SIZE = {world_size()} on rank {rank()}, {of_first} on rank 0: they should be started as one job, "
            "with the same numbers of nodes and of processes"
        )
    return store


class StopSignal:
    """Remembers that SIGTERM, SIGINT or SIGUSR1 came or that the time is over, so that the loop can stop at a safe
    point."""

    def __init__(self, after_seconds: float | None = None):
        """
        Args:
            after_seconds: of its life, by a clock that nobody sets; None: the time is never over.
        """
        self._came: float | None = None
        """When the first one came, on the monotonic clock."""
        self._end = None if after_seconds is None else time.monotonic() + after_seconds

    @contextmanager
    def caught(self):
        """Inside, the first signal is remembered; one that comes seconds later ends the process at once.
        Schedulers signal every process and torchrun passes its own on, so two at once are one request."""
        previous = {s: signal.signal(s, self._handle) for s in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        now = time.monotonic()
        if self._came is not None and now > self._came + _SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._came = self._came or now

    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._came is not None or (self._end is not None and time.monotonic() > self._end)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop.  Collective."""
        flag = torch.tensor(float(self.asked()))
        if kernels().gpu:
            flag = flag.cuda()
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
