"""What a run tells the person who watches it: a live display on a terminal, plain lines elsewhere."""

import math
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.observe.metrics import Value

_SHOWN = {
    "reward/mean": "reward {:.3f}",
    "reward/accuracy": "accuracy {:.3f}",
    "mismatch/max": "mismatch max {:.1e}",
    "mismatch/mean": "mismatch mean {:.1e}",
    "throughput/generated_tokens_per_s": "generated {:,.0f} tokens/s",
    "throughput/trained_tokens_per_s": "trained {:,.0f} tokens/s",
    "time/rollout": "rollout {:.2f} s",
    "time/score": "score {:.2f} s",
    "time/train": "train {:.2f} s",
}
"""The metrics worth a glance at every step, by their names in the log."""
_LONG_RUN = 500
"""Steps up to which every one gets a plain line."""
_LONG_RUN_INTERVAL = 5.0
"""Seconds between the plain lines of a longer run."""


class Progress:
    """Shows a run of `total_steps` steps on `console` (standard output unless given); rank 0's.

    On a terminal a bar with step, elapsed and remaining time, and below it the last step's numbers, stay at
    the bottom.  Elsewhere (a pipe, a log file, a dumb terminal) each step is one plain line, in runs of
    more than 500 steps at most one in 5 s; evaluations and messages are always printed.
    """

    def __init__(self, total_steps: int, console: Console | None = None):
        self._console = console or Console()
        self._total_steps = total_steps
        self._clock = _Clock(total_steps)
        self._stage = ("step", 0, total_steps)
        self._cells: list[str] = []
        self._last_line = -math.inf
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str, step: int, total: int, **values: float) -> None:
        """A step of something that precedes training: `phase("warm-up", 12, 30, loss=1.23)`."""
        self._show(name, step, total, [f"{key} {value:.3g}" for key, value in values.items()])

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        """Training step `step` (1 is the first) is done.

        Of `values`, by their names in the log, reward, accuracy, mismatch, tokens per second and phase times
        are shown; those that are missing or None are left out.
        """
        self._clock.tick(step)
        cells = [text.format(values[name]) for name, text in _SHOWN.items() if values.get(name) is not None]
        self._show("step", step, self._total_steps, cells)

    def evaluation(
        self,
        step: int,
        accuracy: float,
        chance: float,
        by_source: Mapping[str, float] = {},
        of_several: Mapping[str, float] = {},
    ) -> None:
        """Held-out accuracy after `step`, that of guessing, that on each source, and what several answers to each
        prompt say (`pass@4`, `maj@4`); all in [0, 1]."""
        parts = "".join(f", {name} {share:.3f}" for name, share in [*of_several.items(), *by_source.items()])
        self.message(f"step {step}: held-out accuracy {accuracy:.3f} (chance {chance:.3f}){parts}")

    def message(self, text: str) -> None:
        """Print `text` as it is, on lines of its own."""
        self._console.print(Text(text), soft_wrap=True)

    def finish(self, accuracy: float, chance: float, steps: int, seconds: float, run_dir: Path) -> None:
        """End the display and print the outcome of the run as the last line."""
        if self._live:
            self._live.stop()
        self.message(
            f"held-out accuracy {accuracy:.3f} (chance {chance:.3f}), {steps} steps, {seconds:.0f} s, run in {run_dir}"
        )

    def _show(self, name: str, step: int, total: int, cells: list[str]) -> None:
        self._stage, self._cells = (name, step, total), cells
        if self._live:
            return  # it refreshes itself
        now = monotonic()
        if total <= _LONG_RUN or step == total or now - self._last_line >= _LONG_RUN_INTERVAL:
            self._last_line = now
            self.message("  ".join(filter(None, [f"{name} {step}/{total}", *cells, self._clock.remaining])))

    def _render(self) -> RenderableType:
        name, step, total = self._stage
        times = ", ".join(filter(None, [self._clock.elapsed, self._clock.remaining]))
        header = Table.grid(padding=(0, 2), expand=True)
        header.add_column(no_wrap=True)
        header.add_column(ratio=1)
        header.add_column(no_wrap=True)
        header.add_row(
            Text(f"{name} {step}/{total}", "bold"),
            ProgressBar(total, step, finished_style="green"),
            Text(times, "dim"),
        )
        return Group(header, Columns([Text(cell, no_wrap=True) for cell in self._cells], padding=(0, 3)))


class NullProgress:
    """`Progress` for every rank but 0: the same methods, silent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def phase(self, name: str, step: int, total: int, **values: float) -> None:
        pass

    def step(self, step: int, values: Mapping[str, Value]) -> None:
        pass

    def evaluation(
        self,
        step: int,
        accuracy: float,
        chance: float,
        by_source: Mapping[str, float] = {},
        of_several: Mapping[str, float] = {},
    ) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self, accuracy: float, chance: float, steps: int, seconds: float, run_dir: Path) -> None:
        pass


class _Clock:
    """Elapsed and remaining time of a run, as `h:mm:ss`."""

    def __init__(self, total_steps: int):
        self._total_steps = total_steps
        self._start = monotonic()
        self._first: tuple[int, float] | None = None
        self._end: float | None = None

    def tick(self, step: int) -> None:
        """`step` has just ended.  The first one sets the mark only: it compiles and warms caches."""
        now = monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return
        first_step, first_time = self._first
        seconds_per_step = (now - first_time) / (step - first_step)
        steps_left = self._total_steps - step
        self._end = now + seconds_per_step * steps_left if steps_left > 0 else None

    @property
    def elapsed(self) -> str:
        return f"{_duration(monotonic() - self._start)} elapsed"

    @property
    def remaining(self) -> str | None:
        """None until two steps have ended, and after the last."""
        end = self._end  # read once: the display asks from a thread of its own
        return f"{_duration(max(end - monotonic(), 0))} left" if end is not None else None


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
