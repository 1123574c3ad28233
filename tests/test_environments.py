"""Runs with a user's own rewards, and data that the recipe's environments cannot judge."""

import json
import re
from pathlib import Path

import psutil
import pytest
import yaml

from megarl.data.generators.digits import write_digits
from tests import commands

ROOT = Path(__file__).parent.parent
EXAMPLE = re.findall(r"```(python|yaml)\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)
FAILS = '''
import os

class Fails:
    """For odd digits: in turn by an exception, by what is no number, by the end of the process."""

    def score(self, attempt):
        match int(attempt.answer):
            case 1 | 5:
                raise KeyError("odd")
            case 3 | 7:
                return "1.0"
            case 9:
                os._exit(1)
        return float(attempt.text == attempt.answer) + len(attempt.text) / 10
'''


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Two steps of the digits recipe, without its environment."""
    folder = tmp_path_factory.mktemp("environments")
    write_digits(folder / "digits", scans=200)
    values = yaml.safe_load((ROOT / "recipes" / "digits.yaml").read_text())
    del values["environment"], values["warmup"]
    values |= {"steps": 2, "data": values["data"] | {"path": str(folder / "digits")}}
    values["algorithm"] |= {"prompts_per_step": 8, "group_size": 4, "minibatches": 1}
    values["optimizer"] |= {"warmup_steps": 0}
    values["evaluation"] = {"max_prompts": 8, "at_start": False}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def child(folder: Path, recipe: Path, values: dict) -> Path:
    path = folder / "child.yaml"
    path.write_text(yaml.safe_dump({"extends": str(recipe), "run_dir": str(folder / "run"), **values}))
    return path


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def left_in(folder: Path) -> list[str]:
    """Processes that still run in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_the_example_of_the_docs(recipe, tmp_path):
    (_, program), (_, section) = EXAMPLE
    (tmp_path / "my_rewards.py").write_text(program)
    path = child(tmp_path, recipe, yaml.safe_load(section))
    result = commands.run("megarl.train", path, cwd=tmp_path)
    assert result.code == 0, result.err
    steps = metrics(tmp_path)
    assert [step["reward/failed"] for step in steps] == [0, 0]
    # Two tokens are brief.
    for step in steps:
        assert step["reward/mean"] == pytest.approx(step["reward/accuracy"] + 0.2 * step["rollout/finished"])
    assert any(step["rollout/finished"] for step in steps)
    assert not (tmp_path / "run" / "reward_failures.jsonl").exists()
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("on_error, processes", [("drop", 2), pytest.param("zero", 1, marks=pytest.mark.slow)])
def test_rewards_that_fail(recipe, tmp_path, on_error, processes):
    """The tensor-parallel ranks go on alike, and the run ends well."""
    (tmp_path / "my_rewards.py").write_text(FAILS)
    environment = {"name": "my_rewards:Fails", "on_error": on_error}
    path = child(tmp_path, recipe, {"environment": environment, "parallel": {"tensor_model_parallel_size": processes}})
    result = commands.run("megarl.train", path, cwd=tmp_path, processes=processes if processes > 1 else None)
    assert result.code == 0, result.err
    steps = metrics(tmp_path)
    for step in steps:
        assert 0 < step["reward/failed"] < 1
        assert step["policy/left_out"] == (step["reward/failed"] if on_error == "drop" else 0)
        assert step["optimizer/skipped_updates"] == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "reward_failures.jsonl").read_text().splitlines()]
    # 8 groups of 4 in a step, and the evaluation.
    failed = sum(round(32 * step["reward/failed"]) + step.get("eval/failed", 0) for step in steps)
    assert len(rows) == failed
    assert {row["source"] for row in rows} == {"digits"}
    reasons = {"KeyError: 'odd'", "ValueError: score gave str '1.0': should be a number"}
    reasons |= {"the process that judges ended with exit code 1"}
    assert {row["reason"] for row in rows} <= reasons
    assert "a reward failed, of row" in result.out
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            {"sources": {"letters": {"name": "math"}}},
            "environment.sources has none for 'digits', sources of rows in train: ",
        ),
        ({"name": "box_iou"}, "train, row 1: the ground truth "),
        ({"name": "my_rewards:Missing"}, "environment.name = 'my_rewards:Missing': my_rewards has no Missing"),
    ],
)
def test_refusals(recipe, tmp_path, monkeypatch, environment, message):
    (tmp_path / "my_rewards.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    path = child(tmp_path, recipe, {"environment": environment})
    result = commands.run("megarl.train", path, cwd=tmp_path)
    assert result.refusal().startswith(message)
