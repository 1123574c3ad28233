"""Where the time of one call goes: a trace for chrome://tracing or Perfetto, and its summary."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megarl.bench.report import console
from megarl.platform.kernels import kernels


@dataclass(frozen=True)
class Profile:
    name: str
    trace: Path
    seconds: float
    """Of the whole call, under the profiler, which slows the host down."""
    busy: float
    """Share of them in which the device computed or copied; on a CPU, in which it was inside torch's operators."""
    kernels: tuple[tuple[str, int, float], ...]
    """Name, calls and seconds of those that took longest, longest first; on a CPU operators without those that they
    call."""

    def print(self) -> None:
        """To the standard error, beside what the bench says in JSON."""
        title = f"{self.name}: {1e3 * self.seconds:,.1f} ms, device busy {self.busy:.1%}; {self.trace}"
        table = Table("kernel", "calls", "ms", "share", title=title)
        for name, calls, seconds in self.kernels:
            table.add_row(name[:80], f"{calls:,}", f"{1e3 * seconds:,.2f}", f"{seconds / self.seconds:.1%}")
        console(sys.stderr).print(table)


def profile(name: str, call: Callable, folder: Path, top: int = 12) -> Profile:
    """Profiles the second of two calls.

    Args:
        folder: made where it is not there; the trace is its `NAME.json`.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    gpu, trace = kernels().gpu, folder / f"{name.replace(' ', '_')}.json"
    folder.mkdir(parents=True, exist_ok=True)
    call()
    torch.cuda.synchronize() if gpu else None
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]) as found:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize() if gpu else None
        seconds = time.perf_counter() - start
    found.export_chrome_trace(str(trace))
    where = DeviceType.CUDA if gpu else DeviceType.CPU
    events = [event for event in found.events() if event.device_type == where and not event.is_user_annotation]
    calls, took = Counter(), Counter()
    for event in events:
        calls[event.name] += 1
        # A kernel calls no other.
        took[event.name] += (event.time_range.elapsed_us() if gpu else event.self_cpu_time_total) / 1e6
    return Profile(
        name,
        trace,
        seconds,
        covered((event.time_range.start, event.time_range.end) for event in events) / 1e6 / seconds,
        tuple((kernel, calls[kernel], spent) for kernel, spent in took.most_common(top)),
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
