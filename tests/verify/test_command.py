"""megarl.verify as a user starts it: what it proves, that every check can fail, and how it ends."""

import json
from pathlib import Path

import pytest
import yaml

from megarl.data.generators.mixed import write_mixed
from megarl.verify.__main__ import main
from megarl.verify.compare import CHECKS
from tests import commands
from tests.verify import broken

ROOT = Path(__file__).parent.parent.parent
MODALITIES = {"text", "image", "video"}
TP2_SP = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
LAYOUTS = {
    "tp2-sp": (TP2_SP, {"tensor_parallel": 2}),
    "cp2": (["parallel.context_parallel_size=2"], {"context_parallel": 2}),
    "dp2": ([], {}),
    "dp2 to tp2": (["rollout.parallel.tensor_model_parallel_size=2"], {}),
    "tp2-sp to tp1": ([*TP2_SP, "rollout.parallel.tensor_model_parallel_size=1"], {"tensor_parallel": 2}),
}
_SECONDS = 400


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The mixed recipe, whose prompts are shorter than a KV block, with blocks small enough for the prefix cache."""
    folder = tmp_path_factory.mktemp("verify")
    write_mixed(folder / "data", text=40, clips=20)
    values = {
        "extends": str(ROOT / "recipes" / "mixed.yaml"),
        "run_dir": str(folder / "run"),
        "data": {"path": str(folder / "data")},
        "rollout": {"block_size_tokens": 16},
    }
    path = folder / "verify.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def failures(lines: list[dict]) -> set[str]:
    return {line["name"] for line in lines if line["verdict"] == "failed"}


def test_one_rank_as_json(recipe):
    result = commands.run("megarl.verify", recipe, "--json", timeout=_SECONDS)
    assert result.code == 0, (result.out, result.err)
    found = json.loads(result.out)  # nothing else is printed
    assert (found["passed"], found["ranks"], found["dtype"]) == (True, 1, "float32")
    assert list(dict.fromkeys(line["name"] for line in found["checks"])) == list(CHECKS.values())
    for name in ("engine = trainer", "trainer = transformers", "packed = unpacked", "before and after a sync"):
        lines = [line for line in found["checks"] if line["name"] == name]
        assert {line["verdict"] for line in lines} == {"passed"}
        subjects = [line["subject"].split(", ") for line in lines if "tokens" in line["subject"]]
        assert {subject[1] for subject in subjects} == MODALITIES
        assert all(line["at_most"] or line["at_least"] for line in lines)
    for line in found["checks"]:
        if "log-probabilities," in line["subject"]:
            assert line["measured"].keys() == {"max", "mean", "tmpe"} or line["verdict"] == "skipped"
    # Two computations, and not one compared with itself.
    assert all(line["measured"]["max"] > 0 for line in found["checks"] if line["name"] == "engine = trainer")
    (layout,) = (line for line in found["checks"] if line["name"] == "this layout = one rank")
    assert (layout["verdict"], layout["note"]) == ("skipped", "one rank already")
    assert not (recipe.parent / "run").exists()


@pytest.mark.slow
def test_two_ranks_as_a_table(recipe):
    only = ["--only", "engine,layout", "--prompts", "1"]
    result = commands.run("megarl.verify", recipe, *TP2_SP, *only, processes=2, timeout=_SECONDS)
    assert result.code == 0, (result.out, result.err)
    assert "2 rank(s), tensor_model_parallel_size = 2" in result.out
    lines = [line for line in result.out.splitlines() if line.startswith("│ ")]
    assert sum("this layout = one rank" in line and "passed" in line for line in lines) == 5
    assert "failed" not in result.out and result.out.splitlines()[-1] == "8 passed"


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("cp2", "dp2", "dp2 to tp2", "tp2-sp to tp1")]
)
def test_layouts(ranks, recipe, layout):
    overrides, sizes = LAYOUTS[layout]
    only = ["--only", "engine,layout,packing,sync"]
    answers = ranks.run(broken.prove, [str(recipe), *overrides, *only], world_size=2, timeout=_SECONDS, **sizes)
    assert answers[0] == answers[1]  # all ranks exit alike
    verdicts = {(check.name, check.subject): check.verdict for check in answers[0]}
    assert set(verdicts.values()) == {"passed"}, answers[0]
    assert ("this layout = one rank", "loss and gradient norm") in verdicts


def test_layout_can_fail(ranks, recipe):
    """A gradient that is not summed over the ranks: all log-probabilities are right."""
    overrides, sizes = LAYOUTS["tp2-sp"]
    arguments = [str(recipe), *overrides, "--only", "engine,layout", "--prompts", "1"]
    checks = ranks.run(broken.prove, arguments, False, world_size=2, timeout=_SECONDS, **sizes)[0]
    bad = [check for check in checks if check.verdict == "failed"]
    assert {check.name for check in bad} == {"this layout = one rank"}
    assert all("gradient" in check.subject for check in bad)
    (gradients,) = (check for check in bad if check.subject.startswith("gradients of"))
    assert gradients.note.startswith("model.visual.") and gradients.measured["worst"] > 0.01


@pytest.mark.parametrize(
    "breakage, only, expected",
    [
        ("media_blind_prefixes", "engine", "engine = trainer"),
        pytest.param("louder_features", "engine,transformers", "trainer = transformers", marks=pytest.mark.slow),
        pytest.param("one_segment", "packing", "packed = unpacked", marks=pytest.mark.slow),
        ("no_hook", "sync", "before and after a sync"),
        pytest.param("no_step", "sync", "before and after a sync", marks=pytest.mark.slow),
    ],
)
def test_every_check_can_fail(recipe, tmp_path, breakage, only, expected):
    arguments = [recipe, "--json", "--only", only]
    result = commands.fork(tmp_path, *arguments, main=broken.main(breakage), timeout=_SECONDS)
    assert result.code == 1, (result.out, result.err)
    found = json.loads(result.out)
    assert failures(found["checks"]) == {expected} and not found["passed"]
    bad = [line["subject"] for line in found["checks"] if line["verdict"] == "failed"]
    if breakage == "no_step":
        assert bad == ["the step moved log-probabilities"]
    if breakage in ("media_blind_prefixes", "louder_features"):
        assert not any("text" in subject for subject in bad)


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "the following arguments are required: recipe"),
        (["no.yaml"], "recipe no.yaml does not exist"),
        (
            ["{recipe}", "--only", "engine,gpu"],
            "--only = 'gpu': should be some of engine,transformers,layout,packing,sync",
        ),
        (["{recipe}", "--prompts", "0"], "--prompts = 0: should be at least 1"),
        (["{recipe}", "steps=two"], "steps = 'two' in override 'steps=two': should be a valid integer"),
    ],
)
def test_mistakes(recipe, capsys, arguments, line):
    """Refused before Megatron is imported."""
    assert main([argument.format(recipe=recipe) for argument in arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megarl: error: {line}")
