"""One measured line, and how two sides are timed."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from megarl.platform.kernels import kernels


@dataclass(frozen=True)
class Line:
    name: str
    unit: str
    """A rate, of which more is better, ends in `/s`; of everything else less is better."""
    megarl: float
    peer: float | None = None
    """The same work by the peer, in the same unit; None where there is none."""
    floor: float | None = None
    """What the machine's ceilings allow at best, in the same unit (`megarl.bench.floors`); None: no bound is known."""

    @property
    def ratio(self) -> float | None:
        """megarl over the peer."""
        return None if self.peer is None else self.megarl / self.peer

    @property
    def gap(self) -> float | None:
        """How many times the floor's cost megarl's is: 1 would be the machine's limit.  None without a floor, and
        where nothing at all would have to be done."""
        if not self.floor:
            return None
        return self.floor / self.megarl if self.unit.endswith("/s") else self.megarl / self.floor


def turns(ours: Callable, theirs: Callable, rounds: int) -> tuple[float, float]:
    """Median seconds of both, run alternately after one round to warm up."""
    seconds = [(timed(ours), timed(theirs)) for _ in range(rounds + 1)][1:]
    return statistics.median(s for s, _ in seconds), statistics.median(s for _, s in seconds)


def median_seconds(call: Callable, rounds: int) -> float:
    return statistics.median(timed(call) for _ in range(rounds))


def timed(call: Callable) -> float:
    """Seconds of one call, to the end of what it has given to the GPU."""
    import torch

    torch.cuda.synchronize() if kernels().gpu else None
    start = time.perf_counter()
    call()
    torch.cuda.synchronize() if kernels().gpu else None
    return time.perf_counter() - start
