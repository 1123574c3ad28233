"""On two GPUs, bf16, NCCL: layouts proved by `megarl.verify`, and rollouts without a second copy of the weights."""

import json

import pytest
import torch

from tests import commands
from tests.distributed import TP2_SP, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

LAYOUTS = {
    "tp2-sp": ("mixed", TP2_SP.arguments),
    "cp2": ("mixed", Layout(2, 1, context_parallel=2).arguments),
    "dp2": ("mixed", Layout(2, 1).arguments),
    "ep2": ("mixed_experts", Layout(2, 1, expert_parallel=2).arguments),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_verify(layout):
    recipe, arguments = LAYOUTS[layout]
    result = commands.run("megarl.verify", commands.ROOT / f"recipes/{recipe}.yaml", *arguments, processes=2)
    print(result.out)
    assert result.code == 0, result.err


def test_no_second_copy(tmp_path):
    """Context-parallel ranks sample as engines of their own, on the weights that they train."""
    result = commands.run("tests.gpu.zero_copy", tmp_path, processes=2)
    assert result.code == 0, result.err
    print(result.out)
    for rank in json.loads(result.out.splitlines()[-1]):
        assert rank["weights_stay"] and rank["sampled_tokens"] > 100
        assert max(rank["other_before"], rank["other_after"]) < 0.5 * rank["weights"]
