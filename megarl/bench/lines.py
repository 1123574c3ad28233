"""One measured line, and how two sides are timed."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megarl.platform.kernels import kernels


@dataclass(frozen=True)
class Line:
    name: str
    unit: str
    megarl: float
    peer: float | None = None
    """The same work by the peer, in the same unit; None where there is none."""

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.megarl / self.peer


def turns(ours: Callable, theirs: Callable, rounds: int) -> tuple[float, float]:
    """Median seconds of both, run alternately after one round to warm up."""
    seconds = [(_seconds(ours), _seconds(theirs)) for _ in range(rounds + 1)][1:]
    return statistics.median(s for s, _ in seconds), statistics.median(s for _, s in seconds)


def median_seconds(call: Callable, rounds: int) -> float:
    return statistics.median(_seconds(call) for _ in range(rounds))


def _seconds(call: Callable) -> float:
    import torch

    torch.cuda.synchronize() if kernels().gpu else None
    start = time.perf_counter()
    call()
    torch.cuda.synchronize() if kernels().gpu else None
    return time.perf_counter() - start


def print_lines(lines: Sequence[Line]) -> None:
    table = Table("", "megarl", "peer", "ratio", "unit", title=str(kernels()))
    for line in lines:
        peer = "" if line.peer is None else _number(line.peer)
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        table.add_row(line.name, _number(line.megarl), peer, ratio, line.unit)
    Console().print(table)


def _number(value: float) -> str:
    return f"{value:,.{0 if value > 100 else 2}f}"
