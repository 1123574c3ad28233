import inspect
import io
from pathlib import Path

import pytest
from rich.console import Console

from megarl.observe.progress import NullProgress, Progress

VALUES = {
    "reward/mean": 0.5125,
    "reward/accuracy": 0.4375,
    "throughput/generated_tokens_per_s": 12345.6,
    "throughput/trained_tokens_per_s": 8123,
    "time/rollout": 3.125,
    "time/score": 0.4,
    "time/train": 22.0,
    "mismatch/max": 3.1e-4,
    "mismatch/mean": 2e-6,
    "loss/total": 0.1,
}
LAST = "held-out accuracy 0.871 (chance 0.100), 60 steps, 412 s, run in /runs/a [b] :smile:"


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("megarl.observe.progress.monotonic", clock)
    return clock


def plain(total_steps: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(total_steps, Console(file=out, width=40)), out


def terminal(total_steps: int) -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, _environ={"TERM": "xterm-256color"})
    return Progress(total_steps, console), out


def finish(progress: Progress) -> None:
    progress.finish(0.8714, 0.1, 60, 412.3, Path("/runs/a [b] :smile:"))


@pytest.mark.parametrize("make", [plain, terminal])
def test_the_last_line_is_the_outcome(make):
    progress, out = make(60)
    with progress:
        progress.step(60, VALUES)
        finish(progress)
    assert out.getvalue().endswith("\n")
    # A terminal gets the cursor back in front of it.
    assert out.getvalue().splitlines()[-1].removeprefix("\x1b[?25h") == LAST


def test_a_step_is_one_plain_line(clock):
    progress, out = plain(60)
    with progress:
        progress.step(1, VALUES)
    assert out.getvalue() == (
        "step 1/60  reward 0.512  accuracy 0.438  mismatch max 3.1e-04  mismatch mean 2.0e-06  "
        "generated 12,346 tokens/s  trained 8,123 tokens/s  rollout 3.12 s  score 0.40 s  train 22.00 s\n"
    )


def test_missing_metrics_are_left_out():
    progress, out = plain(60)
    progress.step(1, {"reward/mean": 0.25, "reward/accuracy": None})
    assert out.getvalue() == "step 1/60  reward 0.250\n"


def test_what_is_not_finite_is_shown():
    progress, out = plain(60)
    progress.step(1, {"mismatch/max": float("nan")})
    assert out.getvalue() == "step 1/60  mismatch max nan\n"


def test_warm_up():
    progress, out = plain(60)
    progress.phase("warm-up", 12, 30, loss=1.2345)
    assert out.getvalue() == "warm-up 12/30  loss 1.23\n"


def test_remaining_time_is_that_of_the_steps_after_the_first(clock):
    progress, out = plain(12)
    for step, seconds in ((10, 500), (11, 65)):  # resumed at 9; step 10 compiled
        clock.now += seconds
        progress.step(step, {})
    progress.step(12, {})
    assert out.getvalue().splitlines() == ["step 10/12", "step 11/12  0:01:05 left", "step 12/12"]


def test_a_long_run_prints_at_most_a_line_in_five_seconds(clock):
    progress, out = plain(1000)
    for step in range(1, 1001):
        clock.now += 1.0
        progress.step(step, {})
        if step == 502:
            progress.evaluation(step, 0.5, 0.1)
    lines = out.getvalue().splitlines()
    printed = [int(line.split()[1].split("/")[0]) for line in lines if "/" in line]
    assert printed == [*range(1, 1000, 5), 1000]
    assert "step 502: held-out accuracy 0.500 (chance 0.100)" in lines


def test_an_evaluation_of_several_answers():
    progress, out = plain(10)
    progress.evaluation(4, 0.5, 0.1, {"a": 0.25}, {"pass@2": 0.75, "maj@2": 0.5})
    line = "step 4: held-out accuracy 0.500 (chance 0.100), pass@2 0.750, maj@2 0.500, a 0.250\n"
    assert out.getvalue() == line


def test_a_run_of_ordinary_length_prints_every_step(clock):
    progress, out = plain(500)
    for step in range(1, 501):
        progress.step(step, {})
    assert len(out.getvalue().splitlines()) == 500


def test_plain_output_has_no_control_codes_and_wraps_nothing():
    progress, out = plain(60)
    with progress:
        progress.message("a [red]long[/red] message " + "word " * 30)
        progress.phase("warm-up", 1, 1, loss=1.0)
        progress.step(1, VALUES)
        finish(progress)
    assert "\x1b" not in out.getvalue()
    assert len(out.getvalue().splitlines()) == 4
    assert out.getvalue().startswith("a [red]long[/red] message word")


def test_a_dumb_terminal_gets_plain_lines():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, _environ={"TERM": "dumb"})
    with Progress(60, console) as progress:
        progress.step(1, {"reward/mean": 0.5})
    assert out.getvalue() == "step 1/60  reward 0.500\n"


def test_a_terminal_shows_a_bar_and_the_numbers(clock):
    progress, out = terminal(60)
    with progress:
        clock.now += 3723
        progress.step(30, VALUES)
    for text in (
        "step 30/60",
        "━",
        "1:02:03 elapsed",
        "reward 0.512",
        "trained 8,123 tokens/s",
        "train 22.00 s",
    ):
        assert text in out.getvalue()


def test_a_terminal_shows_the_phase():
    progress, out = terminal(60)
    with progress:
        progress.phase("warm-up", 12, 30, loss=1.2345)
        progress.evaluation(0, 0.1, 0.1)
    for text in ("warm-up 12/30", "loss 1.23", "step 0: held-out accuracy 0.100 (chance 0.100)"):
        assert text in out.getvalue()


def test_a_terminal_shows_a_run_without_steps():
    progress, out = terminal(0)
    with progress:
        pass
    assert "step 0/0" in out.getvalue()


@pytest.mark.parametrize("make", [plain, terminal])
def test_an_exception_passes_and_the_terminal_is_restored(make):
    progress, out = make(60)
    with pytest.raises(RuntimeError, match="engine"), progress:
        progress.step(1, VALUES)
        raise RuntimeError("engine")
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")  # cursor off, on


def test_null_progress_is_silent_and_has_the_same_methods(capfd):
    def methods(kind):
        public = inspect.getmembers(kind, inspect.isfunction)
        return {
            name: inspect.signature(f)
            for name, f in public
            if not name.startswith("_") or name in ("__enter__", "__exit__")
        }

    assert methods(NullProgress) == methods(Progress)
    with NullProgress() as progress:
        progress.step(1, VALUES)
        finish(progress)
    assert capfd.readouterr() == ("", "")
