"""The two reference processes: transformers, and Megatron on one rank.  Rank 0 starts them and waits.

Each is a process of its own because Megatron's patches, and its process-global groups, are there for good once the
job has begun.  It is handed a file and hands one back.  Imports no Megatron.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.algorithms.objective import ObjectiveOptions
from megarl.errors import UserError
from megarl.verify.cases import Case

CASES = "cases.pt"
"""File name of the question in the working folder."""
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
"""What torchrun's environment begins with: a reference process is no rank of the job."""


def answered(peer: str) -> str:
    """File name of a process's answers."""
    return f"{peer}.pt"


@dataclass(frozen=True, eq=False)
class Asked:
    """What both reference processes are given."""

    cases: list[Case]
    checkpoint: Path
    dtype: torch.dtype
    """Of the job's weights and sums."""
    temperature: float
    objective: ObjectiveOptions
    freeze: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Answers:
    log_probs: list[Tensor]
    """float32 `[n]` per case."""
    gradients: dict[str, Tensor]
    """float32, of the loss per token, by Hugging Face name."""
    loss: float
    """Per token."""


class Peer:
    """A running reference process.

    Args:
        name: `transformers` or `one_rank`.
        folder: holds the question.
    """

    def __init__(self, name: str, folder: Path):
        self._name, self._folder = name, folder
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHER)}
        with (folder / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"megarl.verify.{name}_peer", str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def answers(self) -> dict[str, Answers]:
        """By the type that was computed in.  Waits for the process.

        Raises:
            UserError: the device has no room for it.
            RuntimeError: it failed, with the end of what it printed.
        """
        code = self._process.wait()
        if code == 0:
            return torch.load(self._folder / answered(self._name), weights_only=False, mmap=True)
        log = (self._folder / f"{self._name}.log").read_text()
        if "OutOfMemoryError" in log:
            raise UserError(
                f"--only: the whole model has no room for the {self._name} process beside the job on one GPU: "
                "lower rollout.kv_cache_gb, or name the other checks"
            )
        raise RuntimeError(f"the {self._name} process ended with code {code}:\n{log[-4000:]}")

    def end(self) -> None:
        """Ends the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
