"""Whole runs whose rollouts are conversations, with the dialogue that docs/conversations.md shows."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from tests import commands
from tests.test_train import digits, metrics, recipe, results  # noqa: F401

ROOT = Path(__file__).parent.parent
BLOCKS = dict(re.findall(r"```(python|yaml)\n(.*?)```", (ROOT / "docs" / "conversations.md").read_text(), re.DOTALL))


def talking(tmp_path, recipe, monkeypatch, code=BLOCKS["python"]) -> Path:  # noqa: F811
    """A recipe of a few steps with the documented example."""
    (tmp_path / "second_look.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    example = yaml.safe_load(BLOCKS["yaml"])
    base = yaml.safe_load(recipe.read_text())
    values = {
        "extends": str(recipe),
        "steps": 3,
        "seed": 2,  # one whose steps have groups of unequal rewards: else the updates are of rounding alone
        "environment": example["environment"],
        "rollout": {**example["rollout"]},
        "data": {**base["data"], "max_prompt_tokens": 64},
        "evaluation": {"every": 3, "max_prompts": 8},
        "optimizer": {"schedule": "constant", "warmup_steps": 0},
    }
    path = tmp_path / "talk.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_second_look(tmp_path, recipe, monkeypatch):  # noqa: F811
    """Who is wrong looks again: the trainer agrees with the engine about every token of both turns, and two ranks that
    share the model go the same way as one."""
    talk = talking(tmp_path, recipe, monkeypatch)
    found = {}
    for processes, more in ((1, []), (2, ["parallel.tensor_model_parallel_size=2"])):
        folder = tmp_path / f"run{processes}"
        result = commands.fork(tmp_path, talk, f"run_dir={folder}", *more, processes=processes)
        assert result.code == 0, result.err
        found[processes] = results(folder)
    lines = [line for line in metrics(tmp_path / "run1") if line["step"]]
    assert all(1 < line["rollout/turns"] <= 2 and line["mismatch/max"] < 1e-4 for line in lines)
    for one, two in zip(found[1], found[2], strict=True):
        assert one.keys() == two.keys()
        for key in ("reward/mean", "rollout/tokens", "rollout/turns") if one["step"] else ():
            assert one[key] == pytest.approx(two[key], abs=1e-4), one["step"]
    assert found[1][:2] == [pytest.approx(line, rel=1e-2, abs=1e-4) for line in found[2][:2]]  # then rounding grows
    rows = [json.loads(line) for line in (tmp_path / "run1" / "rollouts" / "step_1.jsonl").open()]
    assert {row["turns"] for row in rows} == {1, 2}
    for row in rows:
        assert len(row["ids"]) == len(row["engine_logprobs"]) == len(row["trainer_logprobs"])
        assert ("No. Look again: " in row["prompt"]) == (row["turns"] == 2)


def test_a_dialogue_that_fails(tmp_path, recipe, monkeypatch):  # noqa: F811
    """Counted and written down with its row; the run ends as any other."""
    fails = "        if completion.strip() != '7':\n            raise KeyError('of mine')\n"
    code = BLOCKS["python"].replace("        prompt, turn =", f"{fails}        prompt, turn =")
    talk = talking(tmp_path, recipe, monkeypatch, code)
    result = commands.fork(tmp_path, talk, f"run_dir={tmp_path / 'run'}", "evaluation.at_start=false")
    assert result.code == 0, result.err
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert all(line["reward/failed"] > 0 for line in lines)
    failures = [json.loads(line) for line in (tmp_path / "run" / "reward_failures.jsonl").open()]
    assert all(failure["reason"] == "KeyError: 'of mine'" and failure["row"] for failure in failures)


@pytest.mark.parametrize(
    "code, refusal",
    [
        ("x = 1", "environment.dialogue.name = 'second_look:SecondLook': second_look has no SecondLook"),
        (
            "class SecondLook: pass",
            "environment.dialogue.name = 'second_look:SecondLook': what it makes has no method reset: SecondLook",
        ),
        (
            "class SecondLook:\n def reset(self, prompt): pass\n def step(self, a, b, c): pass",
            "environment.dialogue.name = 'second_look:SecondLook': should have reset(self, prompt, seed), "
            "has reset(prompt)",
        ),
    ],
)
def test_refused(tmp_path, recipe, monkeypatch, code, refusal):  # noqa: F811
    talk = talking(tmp_path, recipe, monkeypatch, code)
    result = commands.fork(tmp_path, talk, f"run_dir={tmp_path / 'run'}")
    assert result.refusal() == refusal
