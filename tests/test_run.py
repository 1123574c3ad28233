"""What a run is built with.  Whole runs are in tests/test_train.py."""

from datetime import timedelta
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.recipe import load_recipe
from tests.distributed import lazy

dist = lazy("torch.distributed")
run = lazy("megarl.run")
startup = lazy("megarl.startup")
DIGITS = str(Path(__file__).parent.parent / "recipes" / "digits.yaml")


def _share() -> tuple:
    ranks = run.start_ranks()
    group = list(dist.distributed_c10d._world.pg_map)[-1]
    backend = group._get_backend(run.torch.device("cpu"))
    values = [f"of rank {ranks.rank}" * (1 + 1000 * ranks.rank), None]
    return ranks.gather(values), ranks.broadcast(values), backend.name(), backend.options._timeout


def test_ranks_share_the_start_over_a_patient_group_on_the_cpu(ranks):
    """Rank 0 copies and hashes files alone, for longer than other collectives wait."""
    values = [["of rank 0", None], ["of rank 1" * 1001, None]]
    for gathered, first, backend, timeout in ranks.run(_share, world_size=2):
        assert gathered == values and first == values[0]
        assert backend == "gloo" and timeout >= timedelta(hours=12)


def test_a_cpu_leaves_no_kv_cache(ranks, tmp_path):
    """Its memory is everybody's."""
    (refusal,) = ranks.run(_without_a_size, tmp_path)
    line = "rollout.kv_cache_gb = null: there is no GPU of which it could take what is left; set a number"
    assert refusal == line


def _without_a_size(folder):
    recipe = load_recipe(DIGITS, [f"run_dir={folder}", "rollout.kv_cache_gb=null"])
    with pytest.raises(UserError) as refused:
        run.build_parts(recipe, startup.prepare_checkpoint(recipe, folder))
    return str(refused.value)
