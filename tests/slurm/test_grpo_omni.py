"""`slurm/grpo_omni.sh`: what it refuses and prints anywhere, and what its jobs do in a real Slurm."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import pytest

from tests.commands import ROOT
from tests.slurm.cluster import PYTHON, Job, steps

SCRIPT = ROOT / "slurm" / "grpo_omni.sh"


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script outside Slurm."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    command = ["bash", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=outer | environment, cwd=ROOT, timeout=60)


# Anywhere


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    assert program, "make setup installs shellcheck"
    scripts = [*sorted(ROOT.glob("slurm/*.sh")), ROOT / ".ci" / "run"]
    assert len(scripts) == 3
    result = subprocess.run([program, *scripts], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["usage: sbatch", "RECIPE"]),
        (["--dry-run"], ["usage: sbatch", "RECIPE"]),
        (["steps=3"], ["usage: sbatch", "RECIPE"]),
        (["--gpus=8", "r.yaml"], ["--gpus=8", "--ranks-per-node=N"]),
        (["--ranks-per-node=0", "r.yaml"], ["--ranks-per-node=0", "positive number"]),
        (["--mounts=/a:/a", "r.yaml"], ["--mounts", "--container=IMAGE"]),
        (["r.yaml"], ["no Slurm job", "sbatch", "slurm/interactive.sh", "--dry-run"]),
    ],
    ids=str,
)
def test_refused(arguments, words):
    result = call(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("megarl: error: ")
    assert all(word in result.stderr for word in words), result.stderr


def test_dry_run_without_a_job():
    """What sbatch is asked for, and both commands; nothing is run: there is no such recipe, python or image."""
    options = ["--dry-run", "--ranks-per-node=4", "--python=/no/python", "--container=a.sqsh", "--mounts=/data:/data"]
    result = call(*options, "no.yaml", "steps=3", "data.path=/a b")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    check, train = (shlex.split(line) for line in lines if not line.startswith("#"))
    recipe = ["no.yaml", "steps=3", "data.path=/a b"]
    assert check == ["/no/python", "-m", "megarl.check", "--world-size", "NODES*4", *recipe]
    assert train[0] == "srun" and train[-len(recipe) - 2 :] == ["-m", "megarl.train", *recipe]
    assert {
        "--nproc-per-node=4",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=HEAD:PORT",
        "--container-image=a.sqsh",
        f"--container-mounts={ROOT}:{ROOT},/data:/data",
        f"--container-workdir={ROOT}",
    } <= set(train)


def definitions(*names: str) -> str:
    """Functions of the script, to be called by themselves."""
    text = SCRIPT.read_text()
    return "\n".join(re.search(rf"^{name}\(\) {{\n.*?^}}$", text, re.MULTILINE | re.DOTALL)[0] for name in names)


def bash(program: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", "-c", f"set -euo pipefail\n{program}"]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=60)


def test_a_port_that_is_taken_is_passed_over():
    program = definitions("refuse", "free_port") + "\nfree_port"
    first = int(bash(program, SLURM_JOB_ID="4321").stdout)
    assert 20000 <= first < 30000
    with socket.create_server(("", first)):
        second = int(bash(program, SLURM_JOB_ID="4321").stdout)
    assert 20000 <= second < 30000 and second != first
    assert bash(program, SLURM_JOB_ID="4322").stdout != f"{first}\n"


# In a real Slurm


def submit(cluster, work, *arguments, sbatch=()) -> Job:
    folder, options = work
    return Job(cluster, *sbatch, SCRIPT, PYTHON, *arguments, log=folder / "job.log", **options)


@pytest.mark.slow
def test_dry_run_in_a_job(cluster, work):
    """With the names of the job's nodes; nothing is run."""
    job = submit(cluster, work, "--dry-run", "short.yaml", sbatch=["--nodes=2"])
    job.wait_for("COMPLETED")
    assert f"--rdzv-endpoint={cluster.nodes[0]}:PORT" in job.log
    assert "--nnodes=2" in job.log
    assert not (work[0] / "run").exists()


@pytest.mark.slow
def test_told_to_stop_taken_away_cancelled_and_done(cluster, work):
    """One run on two nodes.  USR1 to the batch script, as `--signal` sends it before the time is up; then a more
    urgent job takes the nodes; then it is cancelled.  It saves each time, twice it is requeued by itself, and goes
    on to its end without a step lost or done twice."""
    folder, options = work
    nodes = [f"--nodes={len(cluster.nodes)}"]
    job = submit(cluster, work, "short.yaml", sbatch=nodes)
    job.wait(lambda: 2 in steps(folder))
    job.signal("--signal=USR1", "--batch")
    job.wait_for("PENDING")
    assert job.field("Restarts") == "1"
    first = stops(folder, job)
    assert 2 <= first[-1] < 79 and steps(folder)[-1] == first[-1]
    assert (folder / "run" / "continue").exists()

    job.start_soon()
    job.wait(lambda: first[-1] + 3 in steps(folder))
    assert not (folder / "run" / "continue").exists()
    urgent = Job(cluster, *nodes, "--partition=urgent", "--wrap=sleep 1", log=folder / "urgent.log", **options)
    urgent.wait_for("COMPLETED")
    job.wait_for("PENDING")
    assert job.field("Restarts") == "2"
    second = stops(folder, job)
    assert len(second) == 2 and first[-1] + 3 <= second[-1] < 80

    job.start_soon()
    job.wait(lambda: f"resumed after rl step {second[-1]}" in job.log)
    job.signal()
    job.wait_for("CANCELLED")
    assert job.field("Restarts") == "2" and len(stops(folder, job)) == 2

    again = submit(cluster, work, "short.yaml", sbatch=nodes)
    again.wait_for("COMPLETED")
    assert again.field("Restarts") == "0" and again.field("ExitCode") == "0:0"
    assert "80 steps" in again.log and "the run has ended" in again.log
    assert steps(folder) == list(range(81))
    assert not (folder / "run" / "continue").exists()


def stops(folder, job: Job) -> list[int]:
    """Steps at which the job stopped and was requeued."""
    path = folder / "run" / "slurm.log"
    found = re.findall(rf"job {job.id}, restart \d+: stopped at rl_(\d+)", path.read_text()) if path.exists() else []
    return list(map(int, found))


@pytest.mark.slow
def test_a_refused_recipe_ends_the_job(cluster, work):
    """Before a rank is started, with the line that names the key; it is not requeued."""
    job = submit(cluster, work, "short.yaml", "optimizer.learning_rat=1", sbatch=["--nodes=2"])
    job.wait_for("FAILED")
    assert job.field("ExitCode") == "2:0" and job.field("Restarts") == "0"
    assert "megarl: error: unknown key 'optimizer.learning_rat'" in job.log and "rendezvous" not in job.log


@pytest.mark.slow
def test_a_failure_of_the_ranks_ends_the_job(cluster, work):
    """One rank a GPU of the node, and data that is of no use: said once, and the job is not requeued."""
    job = submit(cluster, work, "short.yaml", "data.max_prompt_tokens=4", sbatch=["--gpus-per-node=2"])
    job.wait_for("FAILED")
    assert job.field("ExitCode") == "1:0" and job.field("Restarts") == "0"
    assert "2 rank(s) on each" in job.log and "not requeued" in job.log
    assert len(re.findall("^megarl: error: .*max_prompt_tokens = 4", job.log, re.MULTILINE)) == 1


@pytest.mark.slow
def test_a_job_that_gets_nowhere_is_not_requeued_for_ever(cluster, work):
    """Told to stop before the ranks are started, again and again: nothing is saved, and the third time is the last."""
    folder, _ = work
    job = submit(cluster, work, "short.yaml")
    for attempt in (1, 2, 3):
        stop_before_the_ranks_start(cluster, job)
        if attempt < 3:
            job.wait_for("PENDING")
            assert job.field("Restarts") == str(attempt)
            job.start_soon()
    job.wait_for("FAILED")
    assert job.field("Restarts") == "2"
    assert "three times in a row the run has stopped at its beginning: not requeued" in job.log


@pytest.mark.slow
def test_a_job_that_may_not_be_requeued(cluster, work):
    job = submit(cluster, work, "short.yaml", sbatch=["--no-requeue"])
    stop_before_the_ranks_start(cluster, job)
    job.wait_for("FAILED")
    assert job.field("ExitCode") == "75:0" and job.field("Restarts") == "0"
    assert "may not be requeued: the same command goes on" in job.log


def stop_before_the_ranks_start(cluster, job: Job) -> None:
    """While the recipe is checked."""
    job.wait(lambda: f"{job.id}.0" in cluster.run("squeue", "--noheader", "--steps", "--format=%i").split())
    job.signal("--signal=USR1", "--batch")
