"""`slurm/interactive.sh`: in a terminal, with an allocation of its own or in one that is there."""

import os
import signal
import subprocess
import time

import pytest

from tests.commands import ROOT
from tests.slurm.cluster import PYTHON, steps

SCRIPT = ROOT / "slurm" / "interactive.sh"


def test_dry_run_without_a_job():
    command = ["bash", SCRIPT, "--nodes=2", "--", "--dry-run", "no.yaml", "steps=3"]
    outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    result = subprocess.run(command, capture_output=True, text=True, env=outer, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].rstrip().endswith("-m megarl.train no.yaml steps=3")


def test_an_allocation_inside_an_allocation_is_refused():
    command = ["bash", SCRIPT, "--nodes=2", "--", "no.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SLURM_JOB_ID": "7"}, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "megarl: error: options of salloc (--nodes=2 --) inside the allocation 7\n"


@pytest.mark.slow
def test_ctrl_c_saves_and_gives_the_nodes_back(cluster, work):
    folder, options = work
    command = [SCRIPT, "--nodes=1", "--time=30", "--", PYTHON, "short.yaml"]
    with (folder / "terminal.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
    try:
        end = time.monotonic() + 400
        while 2 not in steps(folder):
            assert process.poll() is None and time.monotonic() < end, (folder / "terminal.log").read_text()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all that runs in it
        code = process.wait(120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = (folder / "terminal.log").read_text()
    assert code == 75, said
    assert (folder / "run" / "continue").exists() and "the same command goes on" in said
    assert len(steps(folder)) < 80
    assert cluster.run("squeue", "--noheader", "--states=RUNNING") == ""
