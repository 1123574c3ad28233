"""Runs whose prompts are drawn by their solve rates: what is counted, over layouts, after a resume."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests import commands
from tests.test_train import digits, metrics, recipe  # noqa: F401

STEPS, ROWS = 4, 24
NAMES = ("prompts/solve_rate", "prompts/never_tried")


@pytest.fixture(scope="session")
def curriculum(tmp_path_factory, digits, recipe):  # noqa: F811
    """So few prompts that rates matter soon; nothing is forgotten, so that completions can be counted; groups that
    teach nothing are replaced; and hardly anything is learnt, so that layouts do not part by rounding."""
    folder = tmp_path_factory.mktemp("curriculum")
    shutil.copytree(digits, folder / "digits")
    rows = (folder / "digits" / "train.jsonl").read_text().splitlines(keepends=True)[:ROWS]
    (folder / "digits" / "train.jsonl").write_text("".join(rows))
    values = {
        "extends": str(recipe),
        "steps": STEPS,
        "warmup": {"steps": 2, "batch_size": 16},
        "data": {"path": str(folder / "digits")},
        "algorithm": {"resample_rounds": 1, "curriculum": {"share": 0.75, "discount": 1.0}},
        "evaluation": {"every": 3, "samples": 2, "temperature": 1.0},
        "optimizer": {"schedule": "constant", "warmup_steps": 0, "learning_rate": 1e-6},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, curriculum):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = commands.fork(folder, curriculum, f"run_dir={folder / 'run'}")
    assert (result.code, result.err) == (0, "")
    return folder / "run"


def counts(folder: Path) -> np.ndarray:
    """Right completions, and all, of each prompt at the end."""
    return np.load(folder / "checkpoints" / f"rl_{STEPS:06d}" / "solve_rates.npy")


def test_all_completions_are_counted(undisturbed):
    """Of each step's 8 groups of 4, and of the groups that others replaced."""
    lines = metrics(undisturbed)[1:]
    drawn = [1 + line["rollout/resampled"] for line in lines]
    assert max(drawn) > 1
    right, tried = counts(undisturbed)
    assert tried.sum() == pytest.approx(sum(8 * 4 * share for share in drawn))
    assert 0 < right.sum() < tried.sum() and (right <= tried).all()
    seen = tried > 0
    assert lines[-1]["prompts/solve_rate"] == pytest.approx((right[seen] / tried[seen]).mean(), rel=1e-5)
    assert lines[-1]["prompts/never_tried"] == pytest.approx(1 - seen.mean(), rel=1e-5)
    assert 8 / ROWS <= 1 - lines[0]["prompts/never_tried"] <= 16 / ROWS


def test_evaluations_of_several_answers(undisturbed):
    """In the log of the run, at the steps of evaluations."""
    found = {line["step"]: line for line in metrics(undisturbed) if "eval/accuracy" in line}
    assert list(found) == [0, 3, STEPS]
    for line in found.values():
        assert line["eval/accuracy"] <= line["eval/pass@2"] <= min(1, 2 * line["eval/accuracy"])
        assert line["eval/maj@2"] <= line["eval/pass@2"]


def test_resume(curriculum, undisturbed, tmp_path):
    """A run that stops after two steps draws what it would have drawn."""
    folder = tmp_path / "run"
    for steps in (2, STEPS):
        result = commands.fork(tmp_path, curriculum, f"run_dir={folder}", f"steps={steps}", "evaluation.every=0")
        assert result.code == 0, result.err
    assert np.array_equal(counts(folder), counts(undisturbed))
    assert_same_run_but_for_evaluations(folder, undisturbed)


def assert_same_run_but_for_evaluations(folder: Path, other: Path) -> None:
    kept = ("reward/", "rollout/", "policy/", "prompts/")
    ours, theirs = (
        [{k: v for k, v in line.items() if k.startswith(kept)} for line in metrics(one)[1:]] for one in (folder, other)
    )
    assert ours == theirs
    ours, theirs = (sorted((one / "rollouts").iterdir()) for one in (folder, other))
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]


def test_two_ranks(curriculum, undisturbed, tmp_path):
    """Each has a part of the completions, and both draw by all of them."""
    folder = tmp_path / "run"
    result = commands.fork(tmp_path, curriculum, f"run_dir={folder}", processes=2)
    assert result.code == 0, result.err
    assert np.array_equal(counts(folder), counts(undisturbed))
    for line, other in zip(metrics(folder)[1:], metrics(undisturbed)[1:], strict=True):
        assert [line[name] for name in NAMES] == [other[name] for name in NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [["rollout.parallel.tensor_model_parallel_size=2"], ["parallel.context_parallel_size=2"]],
    ids=["engines-tp2", "cp2"],
)
def test_other_layouts(curriculum, undisturbed, tmp_path, layout):
    """An engine that samples for two data-parallel ranks, and two engines that sample for one."""
    folder = tmp_path / "run"
    result = commands.fork(tmp_path, curriculum, f"run_dir={folder}", *layout, processes=2)
    assert result.code == 0, result.err
    assert np.array_equal(counts(folder), counts(undisturbed))


@pytest.mark.slow
def test_other_prompts(curriculum, undisturbed, tmp_path):
    """Their rates begin anew: a place in the data set is another prompt's now."""
    folder, data = tmp_path / "run", tmp_path / "digits"
    shutil.copytree(undisturbed, folder)
    shutil.copytree(curriculum.parent / "digits", data)
    rows = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(rows[1:]))
    changes = ["allow_dataset_change=true", f"data.path={data}", f"steps={STEPS + 1}"]
    result = commands.fork(tmp_path, curriculum, f"run_dir={folder}", *changes)
    assert result.code == 0, result.err
    assert "their solve rates begin anew" in result.out
    assert metrics(folder)[-1]["prompts/never_tried"] >= 1 - 16 / (ROWS - 1)


def test_too_few_prompts(curriculum, tmp_path):
    arguments = [curriculum, f"run_dir={tmp_path / 'run'}", "algorithm.prompts_per_step=32"]
    line = commands.fork(tmp_path, *arguments).refusal()
    assert "algorithm.prompts_per_step = 32: there are 24 training prompts" in line
