"""Host memory of loading a checkpoint: a rank's weights and little more, whoever shares them with it."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megarl.bench.host_memory import PeakHostMemory
from megarl.models.families import FAMILIES
from megarl.models.shard_writer import ShardWriter
from megarl.models.weight_files import parameter_shapes
from megarl.recipe import load_recipe
from tests import tiny
from tests.distributed import Layout, lazy

load = lazy("megarl.bench.load")
RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "digits.yaml")
KEPT_BY_MALLOC = 64 << 20
"""What glibc keeps of freed blocks at most: twice the largest size that it still takes from its heap, 32 MiB."""


def test_peak():
    """Memory that is gone when the block ends counts."""
    with PeakHostMemory() as host:
        held = np.ones(200 << 20, np.uint8)
        time.sleep(0.3)
        del held
    assert 180 << 20 < host.bytes < 220 << 20


def test_mapped_files_are_the_systems(tmp_path):
    np.ones(200 << 20, np.uint8).tofile(tmp_path / "file")
    with PeakHostMemory() as host:
        np.memmap(tmp_path / "file", np.uint8, "r").sum()
    assert host.bytes < 20 << 20


DENSE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=8192, head_dim=64)
MIXTURE = dict(hidden_size=512, moe_intermediate_size=512, num_experts=16, num_hidden_layers=10, vocab_size=8192)


@pytest.mark.parametrize(
    "layout, model_type, sizes",
    [(Layout(2, 2), "qwen3", DENSE), (Layout(2, 1, expert_parallel=2), "qwen3_vl_moe", MIXTURE)],
    ids=["tp2", "ep2"],
)
def test_no_rank_holds_the_model(ranks, tmp_path, layout, model_type, sizes):
    """At most 1.3 times its weights, a whole tensor of the checkpoint and what malloc keeps: less than the model."""
    folder = tmp_path / "checkpoint"
    whole, largest = _write(folder, model_type, sizes)
    lines = ranks.run(_lines, tmp_path, folder, layout.arguments, **layout.job)[0]
    assert len(lines) == 3 and lines[-1][1] == largest / 2**20
    for name, peak, held in lines[:-1]:
        bound = 1.3 * held + (largest + KEPT_BY_MALLOC) / 2**20
        assert 0.9 * held < peak < bound < 0.95 * whole / 2**20, name


def _write(folder, model_type, sizes):
    """A checkpoint of ones; gives its bytes, and those of its largest tensor."""
    family = FAMILIES[model_type]
    tiny.write_family_checkpoint(folder, model_type)
    config = tiny.family_config(tiny.load_processor(folder, family), model_type)
    text = config.get_text_config()
    for name, value in sizes.items():
        setattr(text, name, value)
    if model_type == "qwen3":
        text.layer_types = ["full_attention"] * text.num_hidden_layers
    if family.media:
        config.vision_config.out_hidden_size = text.hidden_size
    writer, written = ShardWriter(folder), []
    for name, shape in parameter_shapes(config).items():
        writer.add(name, torch.ones(shape))
        written.append(torch.Size(shape).numel() * 4)
    writer.close()
    config.save_pretrained(folder)
    return sum(written), max(written)


def _lines(run, folder, arguments):
    none = [f"model.{key}=null" for key in ("config", "init_std", "tiny_processor")]
    recipe = load_recipe(RECIPE, [f"run_dir={run / 'run'}", f"model.path={folder}", *none, *arguments])
    return [(line.name, line.megarl, line.peer) for line in load.measure(recipe, SimpleNamespace())]
