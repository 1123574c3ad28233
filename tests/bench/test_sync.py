"""The bench's lines about the weights' way to the engine, on two ranks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.recipe import load_recipe
from tests import commands
from tests.distributed import lazy

ceilings = lazy("megarl.bench.ceilings")
sync = lazy("megarl.bench.sync")
RECIPE = str(Path(__file__).parent.parent.parent / "recipes" / "digits.yaml")


def _lines(folder, overrides):
    recipe = load_recipe(RECIPE, [f"run_dir={folder}", *overrides])
    lines = sync.measure(recipe, SimpleNamespace(rounds=1), ceilings.Ceilings(bandwidth=2.0**30, peak=1.0))
    return [(line.name, line.unit, line.megarl, line.peer, line.floor) for line in lines]


def test_shared_weights_move_no_byte(ranks, tmp_path):
    for lines in ranks.run(_lines, tmp_path, [], world_size=2):
        (_, unit, amount, *_), (_, milliseconds, took, _, floor) = lines
        assert (unit, amount, milliseconds, floor) == ("MiB", 0, "ms", 0) and took > 0


def test_resharded_weights_beside_a_copy(ranks, tmp_path):
    """370,176 parameters in float32, some of them (norms, positions, row biases) whole on both ranks."""
    overrides = ["rollout.parallel.tensor_model_parallel_size=2"]
    for lines in ranks.run(_lines, tmp_path, overrides, world_size=2):
        (_, unit, amount, *_), times, speeds = lines
        assert unit == "MiB" and 1 <= amount * 2**20 / (4 * 370_176) < 1.1
        assert times[1] == "ms" and speeds[1] == "GiB/s"
        assert times[2] / times[3] == pytest.approx(speeds[3] / speeds[2])
        assert speeds[4] == 1.0  # each of two ranks reads and writes half at 1 GiB/s
        assert speeds[2] * times[2] == pytest.approx(amount / 2**10 * 1e3)


def test_layout_is_checked_first(tmp_path):
    result = commands.run("megarl.bench", RECIPE, "--only", "sync", "rollout.parallel={}")
    assert result.code == 2 and "the trainer's layout already" in result.err
