"""Runs that are stopped, killed, moved and hurt: what goes on, from where, and what is refused."""

import json
import math
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from megarl.platform import launch
from tests import commands, tiny
from tests.damage import flip
from tests.test_train import LAST_LINE, RESHARDED, digits, metrics, recipe, results  # noqa: F401

STEPS = 5


@pytest.fixture(scope="session")
def short(tmp_path_factory, recipe):  # noqa: F811
    """A few steps, each of which is saved."""
    path = tmp_path_factory.mktemp("survive") / "recipe.yaml"
    values = {
        "extends": str(recipe),
        "steps": STEPS,
        "warmup": {"steps": 2, "batch_size": 16},
        "evaluation": {"every": 2},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
        "checkpoint": {"every": 1},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, short):
    """The folder of a run of so many processes, made once."""
    made = {}

    def run(processes: int) -> Path:
        if processes not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            result = commands.fork(folder, short, f"run_dir={folder / 'run'}", processes=processes)
            assert result.code == 0, result.err
            made[processes] = folder / "run"
        return made[processes]

    return run


def assert_same_run(folder: Path, other: Path) -> None:
    """Metrics but for times, rollouts, and every bit of the weights."""
    assert results(folder) == results(other)
    ours, theirs = (sorted((f / "rollouts").iterdir()) for f in (folder, other))
    assert [path.name for path in ours] == [path.name for path in theirs]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(ours, theirs, strict=True))
    ours, theirs = (tiny.Reference(f / "checkpoint").model.state_dict() for f in (folder, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _disturbed(arguments: list[str]) -> int:
    """`megarl.train`, and at one place a signal: `SIGNAL:RANK:PHASE:STEP[:SECONDS LATER]`, the rank `*` for all."""
    from megarl.platform.watchdog import Watchdog
    from megarl.train import train

    (number, rank, phase, step, *later), arguments = arguments[0].split(":"), arguments[1:]
    enter = Watchdog.enter

    def disturbed(self, entered: str, of_step: int | None = None) -> None:
        enter(self, entered, of_step)
        if rank in ("*", str(launch.rank())) and (entered, str(self.step)) == (phase, step):
            send = (os.getpid(), getattr(signal, number))
            if later:
                threading.Timer(float(later[0]), os.kill, send).start()
            else:
                os.kill(*send)

    Watchdog.enter = disturbed
    return launch.command(train, arguments)


# Stopped


@pytest.mark.parametrize("processes, rank", [pytest.param(1, 0, marks=pytest.mark.slow), (2, 1)])
def test_stopped_in_a_rollout(short, undisturbed, tmp_path, processes, rank):
    """The step is thrown away and drawn again alike, whichever rank heard the signal."""
    folder = tmp_path / "run"
    at = f"SIGUSR1:{rank}:rollout:3"
    stopped = commands.fork(tmp_path, at, short, f"run_dir={folder}", main=_disturbed, processes=processes)
    assert stopped.code == 0, stopped.err
    assert "stopped after rl step 2: the same command continues from there" in stopped.out
    assert (folder / "continue").read_text() == "stopped after rl step 2\n"
    assert [line["step"] for line in metrics(folder)] == [0, 1, 2]
    again = commands.fork(tmp_path, short, f"run_dir={folder}", processes=processes)
    assert again.code == 0, again.err
    assert "resumed after rl step 2" in again.out
    assert not (folder / "continue").exists()
    assert_same_run(folder, undisturbed(processes))


def test_stopped_with_rollouts_in_flight(short, tmp_path):
    """What a step left in flight is in the checkpoint, and goes on as if nothing had been."""
    partial = "rollout.partial={extra_prompts: 4, tokens_per_round: 1}"
    whole, folder = tmp_path / "whole", tmp_path / "run"
    result = commands.fork(tmp_path, short, partial, f"run_dir={whole}", processes=2)
    assert result.code == 0, result.err
    lines = [line for line in metrics(whole) if line["step"]]
    assert all(line["rollout/carried_groups"] == 4 for line in lines)
    assert max(line["rollout/weight_age"] for line in lines) > 0 == lines[0]["rollout/weight_age"]
    assert max(line["mismatch/max"] for line in lines) < 1e-4  # of the tokens that the weights of the step sampled
    stopped = commands.fork(
        tmp_path, "SIGUSR1:1:rollout:3", short, partial, f"run_dir={folder}", main=_disturbed, processes=2
    )
    assert stopped.code == 0 and "stopped after rl step 2" in stopped.out, stopped.err
    again = commands.fork(tmp_path, short, partial, f"run_dir={folder}", processes=2)
    assert again.code == 0, again.err
    assert_same_run(folder, whole)


def _stopped_in_a_resampling(arguments: list[str]) -> int:
    """`megarl.train`, and SIGUSR1 to rank 1 when it draws other prompts at step 2."""
    from megarl.run import Run
    from megarl.train import train

    other_prompts = Run.other_prompts

    def disturbed(self, step, *place):
        if (step, launch.rank()) == (2, 1):
            os.kill(os.getpid(), signal.SIGUSR1)
        return other_prompts(self, step, *place)

    Run.other_prompts = disturbed
    return launch.command(train, arguments)


@pytest.mark.slow
def test_stopped_in_a_resampling(short, tmp_path):
    """What the step had drawn before goes too; it goes on with the reference that moved after step 1."""
    terms = ["steps=3", "algorithm.resample_rounds=2", "algorithm.reference_every=1", "evaluation.every=0"]
    whole, folder = tmp_path / "whole", tmp_path / "run"
    result = commands.fork(tmp_path, short, f"run_dir={whole}", *terms, processes=2)
    assert result.code == 0, result.err
    assert metrics(whole)[2]["rollout/resampled"] > 0
    arguments = [short, f"run_dir={folder}", *terms]
    stopped = commands.fork(tmp_path, *arguments, main=_stopped_in_a_resampling, processes=2)
    assert stopped.code == 0, stopped.err
    assert (folder / "continue").read_text() == "stopped after rl step 1\n"
    result = commands.fork(tmp_path, *arguments, processes=2)
    assert result.code == 0, result.err
    assert_same_run(folder, whole)


@pytest.mark.slow
def test_wall_clock(short, tmp_path):
    """The time is over at the first safe point, which is within the first rollout."""
    arguments = [short, f"run_dir={tmp_path / 'run'}", "warmup=null", "limits.wall_clock_hours=1e-9"]
    for begun in (False, True):
        result = commands.fork(tmp_path, *arguments)
        assert (result.code, result.err) == (0, "")
        assert ("resumed after rl step 0" in result.out) == begun
        assert "stopped after rl step 0" in result.out
        assert (tmp_path / "run" / "continue").exists()


# Damaged


def test_damaged_checkpoint(short, undisturbed, tmp_path):
    """The one before is gone on from, with a word, and the run ends as if nothing had been."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed(1), folder)
    flip(folder / "checkpoints" / f"rl_{STEPS:06d}" / "__0_0.distcp", 5000)
    result = commands.fork(tmp_path, short, f"run_dir={folder}")
    assert result.code == 0, result.err
    assert f"checkpoint rl_{STEPS:06d} is damaged and was set aside" in result.out
    assert f"resumed after rl step {STEPS - 1}" in result.out
    assert_same_run(folder, undisturbed(1))


# On other terms


TWO = {"tensor parallel": RESHARDED["tp2 to tp1"], "data parallel": []}


@pytest.mark.slow
@pytest.mark.parametrize("layout", TWO)
def test_more_steps_on_another_layout(short, undisturbed, tmp_path, layout):
    """One process, two that share the weights and are an engine each, or that share nothing, and one again: the steps
    and rewards of an undisturbed run, to rounding."""
    folder = tmp_path / "run"
    for processes, steps in ((1, 2), (2, 4), (1, STEPS)):
        arguments = [short, f"run_dir={folder}", f"steps={steps}", *(TWO[layout] if processes == 2 else [])]
        result = commands.fork(tmp_path, *arguments, processes=processes)
        assert result.code == 0, result.err
    found, expected = results(folder), results(undisturbed(1))
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, other in zip(found, expected, strict=True):
        for key in ("reward/mean", "rollout/tokens", "optimizer/learning_rate"):
            assert line.get(key) == pytest.approx(other.get(key), abs=1e-4), line["step"]
    ours, theirs = (tiny.Reference(f / "checkpoint").model.state_dict() for f in (folder, undisturbed(1)))
    distances = [float((ours[name] - theirs[name]).abs().max()) for name in theirs]
    print(f"largest distance of a weight {max(distances):.1e}")
    assert 0 < max(distances) < 1e-5


def test_refused(short, undisturbed, tmp_path):
    """What matters is refused with its key, its old and its new value, and the folder stays as it is."""
    folder = undisturbed(1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for override, words in (
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate: 0.0015 -> 0.5"),
        ("seed=9", "seed: 1 -> 9"),
        ("algorithm.resample_rounds=1", "algorithm.resample_rounds: 0 -> 1"),
        ("model.config.text_config.num_hidden_layers=1", "model.config.text_config.num_hidden_layers: 2 -> 1"),
        (f"steps={STEPS - 2}", f"steps = {STEPS - 2}: the run has made {STEPS}"),
    ):
        line = commands.fork(tmp_path, short, f"run_dir={folder}", override).refusal()
        assert words in line, line
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_other_data(short, undisturbed, digits, tmp_path):  # noqa: F811
    """Moved data is the same data; a changed row is not, unless that is allowed."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(undisturbed(1), folder)
    shutil.copytree(digits, moved)
    arguments = [short, f"run_dir={folder}", f"data.path={moved}"]
    result = commands.fork(tmp_path, *arguments)
    assert result.code == 0, result.err
    rows = (moved / "train.jsonl").read_text().splitlines(keepends=True)
    (moved / "train.jsonl").write_text("".join(rows[1:]))
    line = commands.fork(tmp_path, *arguments).refusal()
    assert "the data of the split 'train' is not what the run in" in line and "allow_dataset_change = true" in line
    result = commands.fork(tmp_path, *arguments, "allow_dataset_change=true", f"steps={STEPS + 1}")
    assert result.code == 0, result.err
    assert json.loads((folder / "data_train.json").read_text())["rows"] == len(rows) - 1


@pytest.mark.slow
def test_other_data_with_rollouts_in_flight(short, digits, tmp_path):  # noqa: F811
    """What was in flight is of prompts that are gone: it begins anew, and the run goes on."""
    folder, changed = tmp_path / "run", tmp_path / "changed"
    shutil.copytree(digits, changed)
    arguments = [
        short,
        f"run_dir={folder}",
        f"data.path={changed}",
        "rollout.partial={extra_prompts: 4, tokens_per_round: 1}",
        "optimizer.schedule=constant",
    ]
    result = commands.fork(tmp_path, *arguments, "steps=2")
    assert result.code == 0, result.err
    rows = (changed / "train.jsonl").read_text().splitlines(keepends=True)
    (changed / "train.jsonl").write_text("".join(rows[1:]))
    result = commands.fork(tmp_path, *arguments, "allow_dataset_change=true", "steps=4")
    assert result.code == 0, result.err
    assert "rollouts in flight begin anew" in result.out
    lines = [line for line in metrics(folder) if line["step"]]
    assert [line["rollout/carried_groups"] for line in lines] == [4] * 4
    assert lines[2]["rollout/weight_age"] == 0 and lines[2]["mismatch/max"] < 1e-4


# Not finite


def _without_finite_gradients(arguments: list[str]) -> int:
    from megarl.train import train
    from megarl.training.trainer import Trainer

    begin = Trainer.begin

    def begin_badly(self, options) -> None:
        begin(self, options)
        next(self.model.language_model.parameters()).register_hook(lambda gradient: gradient * math.nan)

    Trainer.begin = begin_badly
    return launch.command(train, arguments)


def test_gradients_are_never_finite(short, tmp_path):
    """Skipped and counted, and after so many in a row the end, with the rollouts of the last step."""
    folder = tmp_path / "run"
    arguments = [short, f"run_dir={folder}", "limits.max_skipped_steps=2", "warmup=null"]
    line = commands.fork(tmp_path, *arguments, main=_without_finite_gradients, processes=2).refusal()
    assert "step 3: loss or gradients were not finite in 3 steps in a row" in line and "max_skipped_steps = 2" in line
    assert [step["optimizer/skipped_updates"] for step in metrics(folder)[1:]] == [2, 2, 2]
    for rank in (0, 1):
        rows = [json.loads(row) for row in (folder / "not_finite" / f"step_3.rank_{rank}.jsonl").open()]
        assert len(rows) == 16 and all(row["ids"] and row["media"] for row in rows)
    # The count goes on where the last checkpoint has it.
    line = commands.fork(tmp_path, *arguments, main=_without_finite_gradients, processes=2).refusal()
    assert "not finite in 3 steps in a row" in line
    assert not (folder / "continue").exists()


# Killed


@pytest.mark.slow
def test_killed_in_each_phase(short, undisturbed, tmp_path):
    """SIGKILL to one rank, or to all, again and again; what is left at the end is an undisturbed run."""
    folder = tmp_path / "run"
    for place in ("*:warm-up:2", "1:rollout:1", "0:reward:2", "0:train:2", "1:save:3", f"0:export:{STEPS}"):
        arguments = [f"SIGKILL:{place}", short, f"run_dir={folder}"]
        ranks = commands.start_forked(tmp_path, *arguments, main=_disturbed, processes=2)
        _end(ranks, f"SIGKILL at {place}")
    result = commands.fork(tmp_path, short, f"run_dir={folder}", processes=2)
    assert result.code == 0, result.err
    assert_same_run(folder, undisturbed(2))


KILLS = int(os.environ.get("MEGARL_KILLS", "2"))
"""Random moments at which a run is killed."""


@pytest.mark.slow
def test_killed_at_random(short, undisturbed, tmp_path):
    """Any moment after the start, also in mid-save."""
    folder, moment = tmp_path / "run", random.Random(11)
    for kill in range(KILLS):
        ranks = commands.start_forked(tmp_path, short, f"run_dir={folder}", processes=2)
        begun = len(metrics(folder))
        while not any(rank.exitcode is not None for rank, _ in ranks) and len(metrics(folder)) <= begun % STEPS:
            time.sleep(0.05)
        time.sleep(moment.uniform(0, 1))
        for rank, _ in ranks[moment.randrange(2) :]:
            rank.kill()
        _end(ranks, f"kill {kill}")
    result = commands.fork(tmp_path, short, f"run_dir={folder}", processes=2)
    assert result.code == 0, result.err
    assert_same_run(folder, undisturbed(2))


def _end(ranks, what: str) -> None:
    """All of them end: the killed one by the kill, its peer of the loss or, as torchrun does it, by another kill."""
    end = time.monotonic() + 90
    while not any(rank.exitcode is not None for rank, _ in ranks):
        assert time.monotonic() < end, f"{what}: no rank has ended"
        time.sleep(0.1)
    for rank, _ in ranks:
        rank.join(10)
        rank.kill()
        rank.join()
    assert any(rank.exitcode == -signal.SIGKILL for rank, _ in ranks) or all(rank.exitcode == 0 for rank, _ in ranks)
