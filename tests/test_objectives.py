"""Whole runs of the digits task with other objectives than the shipped recipe's: a few steps each."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megarl.data.generators.digits import write_digits
from tests import commands

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "recipes" / "variants"
# Others have the objective of digits.yaml: tests/test_pins.py, tests/test_learning.py.
OF_ANOTHER_KIND = {*FOLDER.glob("pinned_*.yaml"), FOLDER / "lora.yaml", FOLDER / "fp8.yaml"}
VARIANTS = sorted(set(FOLDER.glob("*.yaml")) - OF_ANOTHER_KIND)
SMALL = (
    *("steps=2", "warmup.steps=4", "warmup.batch_size=16", "algorithm.prompts_per_step=16", "algorithm.group_size=2"),
    *("evaluation.max_prompts=8", "evaluation.at_start=false", "evaluation.every=0", "optimizer.warmup_steps=0"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder, scans=400)
    return folder


def train(recipe: Path, folder: Path, data: Path, *overrides: str) -> list[dict]:
    """The steps of a run that has to succeed."""
    folder.parent.mkdir(exist_ok=True)
    result = commands.fork(folder.parent, recipe, f"run_dir={folder}", f"data.path={data}", *SMALL, *overrides)
    assert result.code == 0, result.err
    return steps(folder)


def steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", VARIANTS, ids=lambda path: path.stem)
def test_variant(recipe, data, tmp_path):
    lines = train(recipe, tmp_path / "run", data)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert math.isfinite(line["policy/loss"]) and line["optimizer/grad_norm"] > 0
        assert line["optimizer/skipped_updates"] == 0
        assert line["mismatch/max/image"] == line["mismatch/max"] < 1e-5
        assert (line["policy/perception_kl"] > 0) == (recipe.stem == "papo")
    # Rewards of a pair are often equal.
    assert (sum(line["rollout/resampled"] for line in lines) > 0) == (recipe.stem == "dapo")
    assert (lines[1]["policy/kl"] != 0) == (recipe.stem != "dapo")


@pytest.mark.slow
def test_distillation(data, tmp_path):
    """The divergence to a teacher, which is another run's policy, falls; rewards teach nothing."""
    train(ROOT / "recipes" / "digits.yaml", tmp_path / "teacher" / "run", data, "seed=2")
    teacher = f"algorithm.reference={tmp_path / 'teacher' / 'run' / 'checkpoint'}"
    alone = ("algorithm.surrogate=none", "algorithm.kl_estimator=k2", "algorithm.kl_coefficient=1", "steps=12")
    lines = train(ROOT / "recipes" / "digits.yaml", tmp_path / "student" / "run", data, teacher, *alone)
    first, last = (sum(line["policy/kl"] for line in part) for part in (lines[:3], lines[-3:]))
    assert 0 < last < 0.7 * first
    assert not (tmp_path / "student" / "run" / "reference").exists()


MOVING = ("steps=6", "algorithm.reference_every=2", "checkpoint.every=3")


def _killed_after_a_checkpoint(arguments: list[str]) -> int:
    """Trains, and is killed once the checkpoint of step 3 is there."""
    (folder,) = (Path(a.removeprefix("run_dir=")) for a in arguments if a.startswith("run_dir="))

    def kill():
        latest = folder / "checkpoints" / "latest"
        while not latest.exists() or latest.read_text() != "rl_000003":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return commands._train(arguments)


@pytest.mark.slow
def test_a_moving_reference_survives_a_kill(data, tmp_path):
    """The policy is its own reference after steps 2 and 4: at 3 and 5 the divergence is that of one step.  A run that
    was killed behind the checkpoint of step 3 goes on with the reference of step 2."""
    digits = ROOT / "recipes" / "digits.yaml"
    whole = train(digits, tmp_path / "whole" / "run", data, *MOVING)
    distance = [line["policy/kl"] for line in whole]
    assert distance[2] < distance[1] and distance[4] < distance[3]
    folder = tmp_path / "killed" / "run"
    folder.parent.mkdir()
    arguments = (digits, f"run_dir={folder}", f"data.path={data}", *SMALL, *MOVING)
    assert commands.fork(folder.parent, *arguments, main=_killed_after_a_checkpoint).code == -signal.SIGKILL
    again = train(digits, folder, data, *MOVING)
    assert [line["policy/kl"] for line in again] == pytest.approx(distance, rel=1e-4)
