"""Runs whose rollouts are in eight bits: mismatch, resuming, evaluation and verification."""

import json

import pytest
import torch

from megarl.data.generators.digits import write_digits
from megarl.recipe import load_recipe
from tests import commands, tiny
from tests.test_train import DIGITS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "data"
    write_digits(folder, scans=200)
    return folder


def _settings(folder, data, *more) -> list[str]:
    sizes = [
        "warmup.steps=2",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "algorithm.prompts_per_step=4",
        "evaluation.every=0",
    ]
    quantized = ["rollout.quantization.calibration_prompts=5", "rollout.verify_sync=true"]
    return [f"run_dir={folder / 'run'}", f"data.path={data}", "evaluation.max_prompts=4", *sizes, *quantized, *more]


def _weights(folder):
    return tiny.Reference(folder / "run" / "checkpoint").model.state_dict()


@pytest.mark.parametrize(
    "aware", [pytest.param(False, id="rollouts"), pytest.param(True, id="training-too", marks=pytest.mark.slow)]
)
def test_resumed(tmp_path, data, aware):
    """A run that stops after a step ends as one that does not: the scales are the checkpoint's.  The mismatch is
    rounding's, where the trainer does not round."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 2), (parts, 1), (parts, 2)):
        folder.mkdir(exist_ok=True)
        result = commands.fork(
            folder, DIGITS, *_settings(folder, data, f"steps={steps}", f"rollout.quantization.training={aware}")
        )
        assert result.code == 0, result.err
    assert "resumed after rl step 1" in result.out
    ours, theirs = _weights(whole), _weights(parts)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = [json.loads(line) for line in (whole / "run" / "metrics.jsonl").read_text().splitlines()]
    mismatch = [row["mismatch/mean"] for row in rows if "mismatch/mean" in row]
    assert len(mismatch) == 2 and all(value < 1e-5 if aware else 1e-3 < value < 0.1 for value in mismatch)


def test_evaluation_is_of_the_trained_weights(tmp_path, data):
    """`eval_only` needs no scales, and evaluates what is trained."""
    result = commands.fork(tmp_path, DIGITS, *_settings(tmp_path, data, "steps=1"))
    assert result.code == 0, result.err
    result = commands.fork(tmp_path, DIGITS, *_settings(tmp_path, data, "steps=1", "eval_only=true"))
    assert result.code == 0, result.err
    assert (tmp_path / "run" / "evaluations" / "rl_000001.json").exists()


def test_unquantized():
    recipe = load_recipe(DIGITS, ["rollout.quantization.format=int8"])
    assert recipe.own_engine and not recipe.unquantized.own_engine
    assert recipe.unquantized == load_recipe(DIGITS)
