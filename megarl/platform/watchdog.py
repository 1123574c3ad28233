"""Ends a job that stands still, and says where."""

import faulthandler
import os
import sys
import threading
import time
import traceback

from megarl.platform import launch

_STALLED = f"megarl/stalled/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_LAST_RESORT_SECONDS = 60.0


class Watchdog:
    """A thread of each rank.  The first that sees no sign of life for too long asks all ranks for their stacks, prints
    them, and ends the job with a line that says which rank got least far.

    Where the interpreter itself stands still, as in a call that keeps its lock, no thread of Python runs: a timer in C
    prints the stacks and ends this rank a minute later.
    """

    def __init__(self, limit: float | None):
        """
        Args:
            limit: seconds without a sign of life; None: nothing is watched.
        """
        self._limit = limit
        self.step: int | None = None
        self._phase, self._entered = "start", 0
        """Where this rank is, and how many phases it has entered: what tells who is behind."""
        self._last = time.monotonic()
        self._running, self._closed = False, threading.Event()

    def start(self) -> None:
        if self._limit is not None:
            self._running = True
            self.alive()
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._running = False
        self._closed.set()
        if self._limit is not None:
            faulthandler.cancel_dump_traceback_later()

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank begins a phase; of `step`, or of the one that `self.step` says."""
        self.step = step or self.step
        self._phase, self._entered = phase, self._entered + 1
        self.alive()

    def alive(self) -> None:
        """A sign of life."""
        self._last = time.monotonic()
        if self._running:
            faulthandler.dump_traceback_later(self._limit + _LAST_RESORT_SECONDS, exit=True)

    def _watch(self) -> None:
        try:
            store = launch.connect() if launch.world_size() > 1 else None
            while not self._closed.wait(_POLL_SECONDS):
                if time.monotonic() - self._last > self._limit:
                    break
                if store and store.check([_STALLED]):
                    break
            else:
                return
            reports = {launch.rank(): self._report()}
            if store:
                mine = str(launch.rank())
                if store.compare_set(_STALLED, "", mine).decode() != mine:
                    store.set(f"{_STALLED}/{mine}", reports[launch.rank()])
                    return  # the one that asked ends the job
                reports |= _answers(store)
        except RuntimeError:
            return  # no store any more: torchrun is ending the job
        _end(self._limit, reports)

    def _report(self) -> str:
        """`phases entered|where|stacks of all threads, that of the main thread last`."""
        where = self._phase if self.step is None else f"{self._phase} of step {self.step}"
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
        stacks = [f"{names.get(i, 'a thread')}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames]
        return f"{self._entered}|{where}|" + "\n".join(stacks)


def _answers(store) -> dict[int, str]:
    """The other ranks' reports, as far as they come."""
    waiting = {rank: f"{_STALLED}/{rank}" for rank in range(launch.world_size()) if rank != launch.rank()}
    found = {}
    end = time.monotonic() + _ANSWER_SECONDS
    while waiting and time.monotonic() < end:
        for rank in [rank for rank, key in waiting.items() if store.check([key])]:
            found[rank] = store.get(waiting.pop(rank)).decode()
        time.sleep(_POLL_SECONDS)
    return found | {rank: "-1|nowhere: it does not answer|" for rank in waiting}


def _end(limit: float, reports: dict[int, str]) -> None:
    places: dict[tuple[int, str], list[int]] = {}
    for rank, report in sorted(reports.items()):
        entered, where, stacks = report.split("|", 2)
        places.setdefault((int(entered), where), []).append(rank)
        print(f"--- rank {rank}, in {where}\n{stacks}", file=sys.stderr)
    behind, *others = [f"rank {', '.join(map(str, ranks))} in {where}" for (_, where), ranks in sorted(places.items())]
    ahead = f"; ahead of it {'; '.join(others)}" if others else ""
    message = f"no progress for {limit:g} s: {behind}{ahead}"
    if not launch.announce(launch.BUG, message):
        print(f"megarl: {message}", file=sys.stderr, flush=True)
    os._exit(launch.BUG)  # the main thread is not coming back
