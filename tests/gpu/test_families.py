"""Every family on two GPUs, bf16, NCCL: each layout proved by `megarl.verify`, the ring of text models among them."""

import random

import pytest
import torch
import yaml

from megarl.data.generators.mixed import write_mixed
from megarl.data.generators.rows import row, write_rows
from megarl.models.families import FAMILIES
from tests import commands, tiny
from tests.distributed import TP2_SP, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CP2 = Layout(2, 1, context_parallel=2).arguments
LAYOUTS = {"tp2-sp": TP2_SP.arguments, "cp2": CP2, "ring2": [*CP2, "parallel.cp_comm_type=p2p"]}
CASES = [(name, layout) for name in FAMILIES for layout in LAYOUTS if layout != "ring2" or not FAMILIES[name].media]


def write_text(folder) -> None:
    """Prompts of 1 to 60 tokens, so that few segments of a ring need no padding."""
    draws = random.Random(3)
    folder.mkdir(parents=True)
    rows = [row(["".join(draws.choices("abc 123", k=n)) + ">"], "1", "letters") for n in range(1, 61)]
    write_rows(folder, draws.sample(rows, len(rows)), rows[:5])


def write_recipe(folder, model_type: str):
    """Of a tiny checkpoint of the family, with prompts that it can read."""
    media = FAMILIES[model_type].media
    tiny.write_family_checkpoint(folder / "checkpoint", model_type)
    (write_mixed if media else write_text)(folder / "data")
    values = {
        "extends": str(commands.ROOT / "recipes/mixed.yaml"),
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "checkpoint"), "config": None, "tiny_processor": None, "init_std": None},
        "data": {"path": str(folder / "data"), "generator": None},
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    return recipe


@pytest.mark.parametrize("model_type, layout", CASES)
def test_verify(model_type, layout, tmp_path):
    recipe = write_recipe(tmp_path, model_type)
    result = commands.run("megarl.verify", recipe, *LAYOUTS[layout], "--prompts", "4", processes=2, timeout=400)
    print(result.out)
    assert result.code == 0, (result.out, result.err)
