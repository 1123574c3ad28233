"""Real torch.distributed jobs (gloo) for tests: pools of rank processes that stay up for the session.

Importing Megatron takes 20 s, so one server process does it and forks the ranks.  A test reaches them in one
of two ways:

- `@pytest.mark.ranks(world_size, tensor_parallel=1)`: the test's body runs on every rank, with the fixture
  values of the test's own process.  Modules that import Megatron are named by `lazy` at the top of the file,
  so that collecting the tests stays cheap.
- `ranks.run(function, ...)` from a test's body: runs a module-level function on every rank and returns
  what each of them returned.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

SEED = 7
PRELOADED = ["megarl.session", "megarl.rollout.engine", "megarl.training.checkpoint", "megarl.models.build"]
_START_SECONDS = 180
_on_rank = False
_sizes: dict[str, int] = {}
"""Of the parallel groups that this rank has now."""
_groups: list = []
"""These, and the world."""
_MOST_THREADS = 200
"""Of a rank; a layout has up to 100.  What a job leaves alive keeps its groups' threads, which wake up a hundred times
a second: such a pool is started anew."""
_GRACE_SECONDS = 3
"""After one rank has failed, how long its peers may take to fail too."""


@dataclass(frozen=True)
class Layout:
    world_size: int
    tensor_parallel: int
    sequence_parallel: bool = False
    context_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1

    def __str__(self) -> str:
        parts = [f"tp{self.tensor_parallel}", *["sp"] * self.sequence_parallel]
        for name, size in (
            ("cp", self.context_parallel),
            ("ep", self.expert_parallel),
            ("etp", self.expert_tensor_parallel),
        ):
            parts += [f"{name}{size}"] if size > 1 else []
        return "-".join(parts)

    @property
    def name(self) -> str:
        """Data parallelism included."""
        ranks = self.world_size // (self.tensor_parallel * self.context_parallel)
        return f"{self}-dp{ranks}" if ranks > 1 else str(self)

    @property
    def arguments(self) -> list[str]:
        """Of a recipe's command line."""
        sizes = {f"parallel.{name}": size for name, size in self.sizes.items() if size > 1}
        if self.sequence_parallel:
            sizes["parallel.sequence_parallel"] = "true"
        return [f"{key}={value}" for key, value in sizes.items()]

    @property
    def sizes(self) -> dict[str, int]:
        """Of the parallel groups, by Megatron's names."""
        return {
            "tensor_model_parallel_size": self.tensor_parallel,
            "context_parallel_size": self.context_parallel,
            "expert_model_parallel_size": self.expert_parallel,
            "expert_tensor_parallel_size": self.expert_tensor_parallel,
        }

    @property
    def job(self) -> dict[str, int]:
        """Arguments of `Ranks.run`."""
        return {
            "world_size": self.world_size,
            "tensor_parallel": self.tensor_parallel,
            "context_parallel": self.context_parallel,
            "expert_parallel": self.expert_parallel,
            "expert_tensor_parallel": self.expert_tensor_parallel,
        }


TP1, TP2, TP2_SP = LAYOUTS = [Layout(1, 1), Layout(2, 2), Layout(2, 2, sequence_parallel=True)]


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


class lazy:
    """A module that is imported when first used, on a rank only: `engine = lazy("megarl.rollout.engine")`.

    In the test's own process, where Megatron's patches would change what transformers computes, it is empty.
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if not _on_rank:
            raise AttributeError(f"{self._name}.{attribute} is for ranks only")
        return getattr(importlib.import_module(self._name), attribute)


class Ranks:
    """The pools, one per world size, each started when it is first asked for and again after a failure."""

    def __init__(self):
        self._pools: dict[int, _Pool] = {}

    def run(
        self,
        function: Callable,
        *args,
        world_size: int = 1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        expert_tensor_parallel: int = 1,
        timeout: float = 300,
        **kwargs,
    ) -> list[Any]:
        """What `function(*args, **kwargs)` returns on each rank.

        Raises:
            RankFailed: with the traceback of the first rank that raised, or the ranks that did not answer
                within `timeout` seconds.  The pool is started anew next time.
        """
        return self.run_named(
            function.__module__,
            function.__qualname__,
            args,
            kwargs,
            world_size,
            tensor_parallel,
            context_parallel,
            expert_parallel,
            expert_tensor_parallel,
            timeout,
        )

    def run_named(
        self,
        module: str,
        name: str,
        args: tuple,
        kwargs: dict,
        world_size: int = 1,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        expert_parallel: int = 1,
        expert_tensor_parallel: int = 1,
        timeout: float = 300,
    ) -> list[Any]:
        """`run` for a function that is called something else than where it is found, as hypothesis' are."""
        pool = self._pools.get(world_size)
        if pool is None:
            pool = self._pools[world_size] = _Pool(world_size)
        try:
            sizes = {
                "tensor_model_parallel_size": tensor_parallel,
                "context_parallel_size": context_parallel,
                "expert_model_parallel_size": expert_parallel,
                "expert_tensor_parallel_size": expert_tensor_parallel,
            }
            answers = pool.run(_Job(module, name, args, kwargs, sizes), timeout)
        except BaseException:
            self._pools.pop(world_size).end()
            raise
        if pool.threads() > _MOST_THREADS:
            self._pools.pop(world_size).end()
        return answers

    def end(self) -> None:
        for pool in self._pools.values():
            pool.end()
        self._pools.clear()


class _Job:
    def __init__(self, module: str, name: str, args: tuple, kwargs: dict, sizes: dict[str, int]):
        self.module, self.name, self.args, self.kwargs = module, name, args, kwargs
        self.sizes = sizes
        """Of the parallel groups, by Megatron's names."""

    def call(self) -> Any:
        function = importlib.import_module(self.module)
        for part in self.name.split("."):
            function = getattr(function, part)
        return function(*self.args, **self.kwargs)


class _Pool:
    def __init__(self, world_size: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = free_port()
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world_size, port), name=f"rank {rank}")
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            self._answers(_START_SECONDS)
        except BaseException:
            self.end()
            raise

    def run(self, job: _Job, timeout: float) -> list[Any]:
        message = pickle.dumps(job)
        for connection in self._connections:
            try:
                connection.send_bytes(message)
            except OSError:
                raise RankFailed("a rank has ended since its last test") from None
        return self._answers(timeout)

    def _answers(self, timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        answers, failures = {}, {}
        pending = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while pending and (ready := wait(list(pending), max(0.0, end - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    good, value = False, "the process ended"
                (answers if good else failures)[rank] = value
                if not good:
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
        if failures:
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        if pending:
            for rank in pending.values():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)  # its stacks, see _serve
            time.sleep(1)
            raise RankFailed(f"rank(s) {sorted(pending.values())} did not answer within {timeout:g} s")
        return [answers[rank] for rank in sorted(answers)]

    def threads(self) -> int:
        """Of the rank that has most of them."""
        return max(len(os.listdir(f"/proc/{process.pid}/task")) for process in self._processes)

    def end(self) -> None:
        for connection in self._connections:
            connection.close()  # a rank that waits for a job ends by itself
        for process in self._processes:
            process.join(0.5)
            process.kill()
            process.join()


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process of a job on this machine, in its environment."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _serve(connection: Connection, rank: int, world_size: int, port: int) -> None:
    """The life of a rank process."""
    global _on_rank
    _on_rank = True
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(rank_variables(rank, world_size, port))
    answer = _answer(_start)
    gc.collect()
    gc.freeze()  # what was imported: looking through all of that takes longer than most jobs
    connection.send_bytes(answer)
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        connection.send_bytes(_answer(_run, job))
        gc.collect()


def _answer(function, *args) -> bytes:
    try:
        return pickle.dumps((True, function(*args)))
    except BaseException:  # pytest's own outcomes are no Exception
        return pickle.dumps((False, traceback.format_exc()))


def _start() -> None:
    import torch

    from megarl.platform import launch

    _explain_asserts()
    launch.start({}, SEED, cuda_graphs=False)
    torch.set_num_threads(1)


def _explain_asserts() -> None:
    """pytest's messages for failed asserts, in the test modules that a rank imports."""
    from _pytest.assertion import install_importhook
    from _pytest.config import _prepareconfig

    config = _prepareconfig(["--noconftest", "-p", "no:cacheprovider", "-q", os.path.dirname(__file__)])
    install_importhook(config)
    sys.modules.pop("tests.tiny", None)


def _run(job: _Job) -> Any:
    """One job from a clean slate: groups of the layout that it asks for, and nothing left by the one before."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.inference.utils import InferenceMode

    InferenceMode.unset_active()
    if _sizes != job.sizes:
        parallel_state.destroy_model_parallel()
        _destroy_groups(kept=())
        parallel_state.initialize_model_parallel(**job.sizes)
        _groups[:] = _process_groups()
        _sizes.clear()
        _sizes.update(job.sizes)
    _destroy_groups(kept=_groups)
    parallel_state.get_global_memory_buffer().buffer.clear()
    torch.manual_seed(SEED)
    tensor_parallel.random.model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    return job.call()


def _process_groups() -> list:
    import torch.distributed as dist

    return list(dist.distributed_c10d._world.pg_map)


def _destroy_groups(kept) -> None:
    """Each gloo group has threads that wake up a hundred times a second, so those of earlier jobs would slow down
    whatever follows.  No rank is inside a job now."""
    import torch.distributed as dist

    for group in _process_groups():
        if group is not dist.group.WORLD and all(group is not other for other in kept):
            dist.destroy_process_group(group)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
