"""`eval_only=true`: what a folder holds is evaluated, under any layout alike, and left as it was."""

import json
from pathlib import Path

import pytest
import yaml

from tests import commands
from tests.damage import flip
from tests.distributed import TP2, Layout
from tests.test_train import digits, metrics, recipe  # noqa: F401

SAMPLED = ["evaluation.samples=4", "evaluation.temperature=1", "evaluation.max_prompts=40"]


@pytest.fixture(scope="session")
def short(tmp_path_factory, recipe):  # noqa: F811
    """Two steps, each of which is saved."""
    path = tmp_path_factory.mktemp("eval_only") / "recipe.yaml"
    values = {
        "extends": str(recipe),
        "steps": 2,
        "warmup": {"steps": 2, "batch_size": 16},
        "optimizer": {"warmup_steps": 0},
        "checkpoint": {"every": 1},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="session")
def trained(tmp_path_factory, short):
    """The folder of its run."""
    folder = tmp_path_factory.mktemp("trained")
    result = commands.fork(folder, short, f"run_dir={folder / 'run'}")
    assert result.code == 0, result.err
    return folder / "run"


def files(folder: Path) -> dict[Path, bytes]:
    """But for those of evaluations."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name.parts[0] != "evaluations"}


def evaluated(folder: Path, name: str) -> dict:
    return json.loads((folder / "evaluations" / f"{name}.json").read_text())


def test_the_newest_checkpoint(short, trained, tmp_path):
    """The accuracy that the run itself found at its last step; no other file is made or changed."""
    before = files(trained)
    result = commands.fork(tmp_path, short, f"run_dir={trained}", "eval_only=true")
    assert (result.code, result.err) == (0, "")
    assert files(trained) == before
    found, last = evaluated(trained, "rl_000002"), metrics(trained)[-1]
    assert found["overall"] == {"accuracy": pytest.approx(last["eval/accuracy"], rel=1e-5)}
    assert found["chance"] == pytest.approx(last["eval/chance"], rel=1e-5)
    assert (found["prompts"], found["samples"], found["temperature"]) == (16, 1, 0)
    assert "rl_000002: 16 held-out prompts" in result.out and f"{last['eval/accuracy']:.3f}" in result.out


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory, short, trained):
    """Several answers to each prompt, by one process."""
    result = commands.fork(tmp_path_factory.mktemp("one"), short, f"run_dir={trained}", "eval_only=true", *SAMPLED)
    assert result.code == 0, result.err
    return evaluated(trained, "rl_000002"), result.out


def test_several_answers(one_rank):
    found, out = one_rank
    values = found["overall"]
    assert list(values) == ["accuracy", "pass@2", "pass@4", "maj@4"]
    assert 0 < values["accuracy"] < values["pass@2"] < values["pass@4"] <= 1
    assert all(name in out for name in values)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(2, 1).arguments, id="dp2"),
        pytest.param(TP2.arguments, id="tp2"),
        pytest.param(["rollout.parallel.tensor_model_parallel_size=2"], id="engines-tp2", marks=pytest.mark.slow),
        pytest.param(Layout(2, 1, context_parallel=2).arguments, id="cp2", marks=pytest.mark.slow),
    ],
)
def test_layouts(short, trained, one_rank, tmp_path, layout):
    arguments = [short, f"run_dir={trained}", "eval_only=true", *SAMPLED, *layout]
    result = commands.fork(tmp_path, *arguments, processes=2)
    assert result.code == 0, result.err
    assert evaluated(trained, "rl_000002") == one_rank[0]


def test_the_initial_model(short, tmp_path):
    """Nothing but the answer is left in a folder where no run has begun; the accuracy is that of a run before its
    first step."""
    folder, run = tmp_path / "nothing", tmp_path / "run"
    result = commands.fork(tmp_path, short, f"run_dir={folder}", "eval_only=true", processes=2)
    assert result.code == 0, result.err
    assert files(folder) == {} and [path.name for path in folder.iterdir()] == ["evaluations"]
    begun = commands.fork(tmp_path, short, f"run_dir={run}", "steps=0", "warmup=null")
    assert begun.code == 0, begun.err
    accuracy = evaluated(folder, "initial")["overall"]["accuracy"]
    assert accuracy == pytest.approx(metrics(run)[0]["eval/accuracy"], rel=1e-5)


def test_a_damaged_checkpoint_stays_where_it_is(short, trained, tmp_path):
    """The one before is evaluated, and a line says why."""
    newest = trained / "checkpoints" / "rl_000002"
    damaged = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    flip(damaged, len(whole) // 2)
    before = files(trained)
    try:
        result = commands.fork(tmp_path, short, f"run_dir={trained}", "eval_only=true")
    finally:
        damaged.write_bytes(whole)
    assert result.code == 0, result.err
    assert "checkpoint rl_000002 is damaged: " in result.out and "rl_000001: 16 held-out prompts" in result.out
    assert before == {**files(trained), damaged.relative_to(trained): before[damaged.relative_to(trained)]}
    assert evaluated(trained, "rl_000001")["checkpoint"] == "rl_000001"


def test_another_recipe_is_refused(short, trained, tmp_path):
    arguments = [short, f"run_dir={trained}", "eval_only=true", "optimizer.learning_rate=0.5"]
    assert "optimizer.learning_rate: 0.0015 -> 0.5" in commands.fork(tmp_path, *arguments).refusal()
