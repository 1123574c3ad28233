"""Short runs on two GPUs, bf16, NCCL: conversations, and rollouts that go on in the next step."""

import pytest
import torch

from tests import commands
from tests.distributed import TP2_SP, Layout
from tests.test_conversation_runs import talking
from tests.test_train import digits, metrics, recipe  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

in_layouts = pytest.mark.parametrize("layout", [Layout(2, 1), TP2_SP, Layout(2, 1, context_parallel=2)], ids=str)


@in_layouts
def test_conversations(tmp_path, recipe, monkeypatch, layout):  # noqa: F811
    lines = _run(tmp_path, talking(tmp_path, recipe, monkeypatch), layout.arguments)
    assert all(1 < line["rollout/turns"] <= 2 for line in lines)


@in_layouts
def test_partial_rollouts(tmp_path, recipe, layout):  # noqa: F811
    partial = ["rollout.partial={extra_prompts: 8, tokens_per_round: 1}", "steps=3", "evaluation.every=3"]
    _run(tmp_path, recipe, [*partial, *layout.arguments])


def _run(folder, path, overrides) -> list[dict]:
    """The lines of its steps, in which engine and trainer agree as well as bf16 does on a model so small."""
    result = commands.run("megarl.train", path, f"run_dir={folder / 'run'}", *overrides, processes=2, timeout=400)
    assert result.code == 0, result.err
    lines = [line for line in metrics(folder / "run") if line["step"]]
    # Tokens that older weights sampled are not compared: a step of a partial rollout may have no others.
    seen = [{key: line[key] for key in ("mismatch/mean", "mismatch/max")} for line in lines if "mismatch/mean" in line]
    print(len(lines), seen)
    assert len(lines) == 3 and seen and all(one["mismatch/mean"] < 1e-2 for one in seen), lines
    return lines
