"""megarl.verify and megarl.train for a mixture of experts whose rollouts bring their experts along."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megarl.data.generators.mixed import write_mixed
from tests import commands
from tests.distributed import lazy
from tests.verify import broken

job = lazy("megarl.verify.job")

ROOT = Path(__file__).parent.parent.parent
_SECONDS = 400


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, mixture_checkpoint):
    """The mixed recipe with the tiny mixture of experts in place of its model."""
    folder = tmp_path_factory.mktemp("replay")
    write_mixed(folder / "data", text=40, clips=20)
    values = {
        "extends": str(ROOT / "recipes" / "mixed.yaml"),
        "run_dir": str(folder / "run"),
        "steps": 2,
        "warmup": None,
        "model": {"path": str(mixture_checkpoint), "config": None, "tiny_processor": None, "init_std": None},
        "data": {"path": str(folder / "data")},
        "rollout": {"block_size_tokens": 16},
        "algorithm": {"prompts_per_step": 4, "group_size": 2, "router_replay": True, "kl_coefficient": 0.1},
        "optimizer": {"warmup_steps": 0},
        "evaluation": {"every": 0, "max_prompts": 4},
    }
    path = folder / "replay.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _prove(arguments: list[str], shifted: bool) -> list:
    """`shifted`: every token is replayed with the experts of the token before it."""
    whole = job.Case
    if shifted:

        def case(*fields):
            return replace(whole(*fields), routing_indices=fields[-1].roll(1, 0))

        job_module().Case = case
    try:
        return broken.prove(arguments)
    finally:
        job_module().Case = whole


def job_module():
    from megarl.verify import job

    return job


@pytest.mark.parametrize("shifted", [False, True], ids=["whole", "shifted"])
def test_experts_are_verified(ranks, recipe, shifted):
    """Engine = trainer along the same way; and not along another one."""
    arguments = [str(recipe), "--only", "engine", "--prompts", "1", "parallel.expert_model_parallel_size=2"]
    checks = ranks.run(_prove, arguments, shifted, world_size=2, expert_parallel=2, timeout=_SECONDS)[0]
    assert {check.verdict for check in checks} == ({"failed"} if shifted else {"passed"}), checks


@pytest.mark.slow
def test_verify(recipe):
    """All checks, transformers and one rank among them, under expert and context parallelism."""
    layout = ["parallel.expert_model_parallel_size=2", "parallel.context_parallel_size=2"]
    result = commands.run("megarl.verify", recipe, *layout, "--json", processes=2, timeout=_SECONDS)
    assert result.code == 0, (result.out, result.err)
    checks = json.loads(result.out)["checks"]
    assert {check["verdict"] for check in checks} == {"passed"} and len({check["name"] for check in checks}) == 5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [["expert_model_parallel_size=2"], ["context_parallel_size=2"]], ids=str)
def test_train(recipe, tmp_path, sizes):
    """A run logs how many tokens the trainer's routers would have sent elsewhere: none, before the first update."""
    layout = [f"parallel.{size}" for size in sizes]
    result = commands.run("megarl.train", recipe, *layout, f"run_dir={tmp_path / 'run'}", processes=2, timeout=_SECONDS)
    assert result.code == 0, (result.out, result.err)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert len(steps) == 2 and all(line["mismatch/routing"] == 0 for line in steps)
    assert all(line["mismatch/max"] < 1e-5 for line in steps)
