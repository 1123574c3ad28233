"""The shipped recipes learn what they are for, each unchanged, on 2 processes."""

import json
import re
from pathlib import Path

import pytest

from tests import commands

RECIPES = Path(__file__).parent.parent / "recipes"
LAST_LINE = re.compile(r"held-out accuracy (\d\.\d{3}) \(chance (\d\.\d{3})\), .*")


@pytest.mark.learning
@pytest.mark.parametrize("name, chance, least", [("color_codeword", 0.125, 0.9), ("motion_video", 0.25, 0.9)])
def test_learnt(tmp_path, name, chance, least):
    """From random weights and the reward alone; the data set is made on the way."""
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]
    result = commands.run("megarl.train", RECIPES / f"{name}.yaml", *overrides, processes=2, timeout=900)
    assert result.code == 0, result.err
    accuracy, guessed = map(float, LAST_LINE.fullmatch(result.out.splitlines()[-1]).group(1, 2))
    assert guessed == chance
    assert accuracy >= least


@pytest.mark.learning
def test_adapters_learn(tmp_path):
    """With the language model frozen, from one that knows the format alone."""
    data = f"data.path={tmp_path / 'data'}"
    base = commands.run("megarl.train", RECIPES / "digits.yaml", f"run_dir={tmp_path / 'base'}", data, "steps=0")
    assert base.code == 0, base.err
    overrides = [f"run_dir={tmp_path / 'run'}", data, f"model.path={tmp_path / 'base' / 'checkpoint'}"]
    result = commands.run("megarl.train", RECIPES / "variants" / "lora.yaml", *overrides, processes=2, timeout=900)
    assert result.code == 0, result.err
    assert float(LAST_LINE.fullmatch(result.out.splitlines()[-1])[1]) >= 0.85


@pytest.mark.learning
def test_quantised_rollouts_teach(tmp_path):
    overrides = [f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"]
    result = commands.run("megarl.train", RECIPES / "variants" / "fp8.yaml", *overrides, processes=2, timeout=900)
    assert result.code == 0, result.err
    assert float(LAST_LINE.fullmatch(result.out.splitlines()[-1])[1]) >= 0.85


@pytest.mark.slow
def test_three_kinds_in_one_batch(tmp_path):
    """A few steps of the mixed recipe: every source is sampled, trained on and reported."""
    overrides = [
        f"run_dir={tmp_path / 'run'}",
        f"data.path={tmp_path / 'data'}",
        "data.generator_options.clips=400",
        "steps=2",
        "warmup.steps=30",
        "optimizer.warmup_steps=0",
        "algorithm.prompts_per_step=16",
        "algorithm.group_size=4",
        "evaluation.max_prompts=48",
    ]
    result = commands.run("megarl.train", RECIPES / "mixed.yaml", *overrides, processes=2, timeout=900)
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    sources = {"digits", "motion", "successor"}
    for line in (lines[0], lines[-1]):
        found = {name.removeprefix("eval/accuracy/") for name in line if name.startswith("eval/accuracy/")}
        assert found == sources
    saved = [json.loads(row) for row in (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    kinds = {row["source"]: len(row["media"]) for row in saved}
    assert kinds.items() <= {"digits": 1, "motion": 1, "successor": 0}.items() and len(kinds) > 1
    digits, words = set("0123456789"), {"left", "right", "up", "down"}
    answers = {"digits": digits, "successor": digits, "motion": words}
    asked_for = [row["completion"] in answers[row["source"]] for row in saved]
    assert sum(asked_for) > len(asked_for) / 2  # the warm-up has taught which kind of answer a prompt wants
