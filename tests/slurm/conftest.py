"""A Slurm for the tests of the scripts, and a recipe for its jobs."""

import pytest
import yaml

from tests.commands import ROOT
from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Skipped by name where Slurm is not installed; where it is and does not start, that is an error."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture
def work(cluster, tmp_path):
    """The folder that jobs are submitted from, with `short.yaml`, and what their commands take: options of
    `Cluster.run`."""
    recipe = {
        "extends": str(ROOT / "recipes" / "digits.yaml"),
        "run_dir": "run",
        "steps": 80,
        "data": {"path": "digits"},
        "warmup": {"steps": 8, "batch_size": 16},
        "algorithm": {"prompts_per_step": 8, "group_size": 4},
        "evaluation": {"every": 0, "max_prompts": 16},
    }
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(recipe))
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return tmp_path, {"cwd": tmp_path, "env": environment}
