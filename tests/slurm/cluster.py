"""A real Slurm on this machine: munge, a controller, and two nodes that are this machine by two names."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.distributed import free_port

PYTHON = f"--python={sys.executable}"
"""The option of the scripts."""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_START_SECONDS = 60


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} here: make slurm-packages, as root on Debian"
    if os.geteuid() != 0:
        return "slurmd needs root"
    return None


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


class Cluster:
    """Runs inside `with`; everything that it writes is in `folder`, and nothing outside it is changed.

    Its partitions are `main` and `urgent`.  A job of `urgent` takes the nodes of one of `main`, which has 300 seconds
    to end and is requeued.  There is no accounting: states are those of squeue and scontrol.
    Slurm takes two of each node's device files for GPUs.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._daemons: list[subprocess.Popen] = []
        self.nodes = sorted({"localhost", socket.gethostname().partition(".")[0]})
        """Names that this machine can be reached by."""

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        # Jobs of a test that failed do not end with the daemons; those that ignore TERM end after KillWait, 30 seconds.
        end = time.monotonic() + 45
        while jobs := self.run("squeue", "--noheader", "--format=%A", check=False).split():
            self.run("scancel", *jobs, check=False)
            if time.monotonic() > end:
                break
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self) -> None:
        folder = self._folder
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        self._daemon(
            "munged",
            "--foreground",
            "--force",  # for a socket in a folder that is root's alone
            f"--key-file={key}",
            f"--socket={folder / 'munge.socket'}",
            f"--pid-file={folder / 'munge.pid'}",
            f"--seed-file={folder / 'munge.seed'}",
        )
        (folder / "slurm.conf").write_text(self._configuration())
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        self._daemon("slurmctld", "-D")
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node)
        end = time.monotonic() + _START_SECONDS
        while self.run("sinfo", "--noheader", "--partition=main", "--format=%T %D", check=False) != (
            f"idle {len(self.nodes)}"
        ):
            ended = [daemon.args[0] for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                said = "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in folder.glob("*.log"))
                raise AssertionError(f"Slurm does not start; ended: {ended}\n{said}")
            time.sleep(0.2)

    def _daemon(self, name: str, *arguments: str) -> None:
        with (self._folder / f"{name}-{len(self._daemons)}.log").open("w") as log:
            self._daemons.append(
                subprocess.Popen(
                    [shutil.which(name, path=_path()), *arguments], stdout=log, stderr=log, env=self.environment
                )
            )

    def _configuration(self) -> str:
        folder, host = self._folder, socket.gethostname().partition(".")[0]
        return "\n".join(
            [
                "ClusterName=megarl",
                f"SlurmctldHost={host}(127.0.0.1)",
                f"SlurmctldPort={free_port()}",
                "SlurmUser=root",
                "SlurmdUser=root",
                "AuthType=auth/munge",
                f"AuthInfo=socket={folder / 'munge.socket'}",
                "ProctrackType=proctrack/linuxproc",
                "TaskPlugin=task/none",
                "ReturnToService=2",
                f"StateSaveLocation={folder / 'state'}",
                f"SlurmdSpoolDir={folder / 'spool-%n'}",
                f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
                f"SlurmdPidFile={folder / 'slurmd-%n.pid'}",
                "SelectType=select/cons_tres",
                "SelectTypeParameters=CR_Core",
                "JobRequeue=1",
                "SchedulerParameters=sched_interval=1",  # else a job whose time has come waits for a minute
                "PreemptType=preempt/partition_prio",
                "PreemptMode=REQUEUE",
                "GresTypes=gpu",
                *(self._node(name, host) for name in sorted(self.nodes, key=lambda name: name != host)),
                "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=300",
                "PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2",
                "",
            ]
        )

    def _node(self, name: str, host: str) -> str:
        # One node may be called as the host is, if it comes first; two are refused as one host given twice.
        other = "" if name == host else f" NodeHostname={host}"
        return f"NodeName={name}{other} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 Gres=gpu:2"

    @property
    def environment(self) -> dict[str, str]:
        """For Slurm's commands, and for the scripts that call them."""
        outer = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SALLOC_", "SRUN_"))}
        return {**outer, "PATH": _path(), "SLURM_CONF": str(self._folder / "slurm.conf")}

    def run(self, *command: str | Path, check: bool = True, **options) -> str:
        """What a command of Slurm prints."""
        options = {"env": self.environment} | options
        result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, **options)
        assert result.returncode == 0 or not check, (command, result.stdout, result.stderr)
        return result.stdout.strip()


class Job:
    """A batch job, by `scontrol show job`; what it prints goes to `log`."""

    def __init__(self, cluster: Cluster, *arguments: str | Path, log: Path, **options):
        self._cluster, self._log = cluster, log
        self.id = cluster.run("sbatch", "--parsable", f"--output={log}", *arguments, **options)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def field(self, name: str) -> str:
        """As `JobState`, `Restarts` or `ExitCode`."""
        fields = self._cluster.run("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(field.partition("=")[::2] for field in fields)[name]

    @property
    def state(self) -> str:
        return self.field("JobState")

    def wait(self, condition: Callable[[], object], timeout: float = 400) -> None:
        """Until the condition holds."""
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"{self.state}, not within {timeout} s:\n{self.log}"
            time.sleep(0.1)

    def wait_for(self, *states: str, timeout: float = 400) -> None:
        """Until the job is in one of the states and has left its nodes."""
        self.wait(lambda: self.state in states and not self._on_nodes(), timeout)

    def _on_nodes(self) -> bool:
        running = self._cluster.run(
            "squeue", "--noheader", f"--jobs={self.id}", "--states=CG", "--format=%T", check=False
        )
        return bool(running) and self.state != "RUNNING"

    def start_soon(self) -> None:
        """A requeued job waits two minutes.  What it is started with must be seconds younger than what was revoked."""
        self._cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+3")

    def signal(self, *arguments: str) -> None:
        self._cluster.run("scancel", *arguments, self.id)


def steps(folder: Path) -> list[int]:
    """Those in the metrics of the run in `folder/run`."""
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []
