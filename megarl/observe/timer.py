"""Wall time of the phases of a step."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class PhaseTimer:
    """Adds up wall seconds per phase: `with timer("rollout"): ...`, then `timer.pop()` once a step.

    `synchronize` is called at both ends of a block, so that work that a GPU still has queued is charged to
    the phase that queued it: give `torch.cuda.synchronize` there, and leave it out on the CPU.  `entered` is
    told each phase as it begins.
    """

    def __init__(self, synchronize: Callable[[], object] | None = None, entered: Callable[[str], object] | None = None):
        self._synchronize = synchronize or (lambda: None)
        self._entered = entered or (lambda phase: None)
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Charge the block to `phase`; a phase entered again in the same step adds to it.

        An exception passes through and its time counts.  The GPU is not waited for on that way out: a rank
        that fails may have queued a collective that its peers never join, and would hang instead of failing.
        """
        self._entered(phase)
        self._synchronize()
        start = perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[phase] += perf_counter() - start

    def pop(self) -> dict[str, float]:
        """`time/<phase>` in seconds for every phase that ended since the last call; starts the next step."""
        seconds = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return seconds
