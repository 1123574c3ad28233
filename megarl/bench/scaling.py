"""One training batch under several layouts, each in a torchrun job of its own: speed, balance, padding."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from megarl.bench.lines import Line
from megarl.errors import UserError
from megarl.platform.kernels import kernels

LAYOUTS = [
    (1, "alone", []),
    (2, "data parallel", []),
    (2, "tensor parallel", ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]),
    (2, "context parallel", ["parallel.context_parallel_size=2"]),
    (4, "data parallel", []),
]
"""Processes, what they are, and the overrides that make them so."""


def measure(options, layouts=LAYOUTS) -> list[Line]:
    """On a CPU every process has one thread, so that a line says what processes give; beyond the number of cores, which
    stands in the lines' names, they give nothing.  On GPUs, layouts that need more than there are, are left out."""
    room, place = len(os.sched_getaffinity(0)), "core(s)"
    if kernels().gpu:
        import torch

        room, place = torch.cuda.device_count(), "GPU(s)"
        layouts = [layout for layout in layouts if layout[0] <= room]
    found = {(processes, name): _job(options, processes, overrides) for processes, name, overrides in layouts}
    alone = found[1, "alone"]
    lines = []
    for (processes, name), measured in found.items():
        speed = measured.tokens / measured.step_seconds
        title = f"{processes} process(es), {name}"
        lines.append(
            Line(f"training step, {title}, on {room} {place}", "tokens/s", speed, alone.tokens / alone.step_seconds)
        )
        if name == "data parallel":
            before, after = measured.imbalance
            lines.append(Line(f"largest over mean cost, {title}: exchanged, as drawn", "ratio", after, before))
        if measured.vision_seconds is not None:
            spread, replicated = measured.vision_seconds
            lines.append(
                Line(
                    f"step on pictures and video, {title}: tower spread, replicated",
                    "ms",
                    1e3 * spread,
                    1e3 * replicated,
                )
            )
        if name == "context parallel":
            packed, padded = measured.padding
            lines.append(Line(f"padding, {title}: packed rows, one padded batch", "%", 100 * packed, 100 * padded))
    return lines


def _job(options, processes: int, overrides: list[str]) -> SimpleNamespace:
    """What `megarl.bench.scaling_job` measures in a job of its own."""
    with TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.json"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        job = [
            "-m",
            "megarl.bench.scaling_job",
            answers,
            options.rounds,
            options.recipe,
            *options.overrides,
            *overrides,
        ]
        result = subprocess.run(
            [sys.executable, "-m", *launcher, *map(str, job)],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if result.returncode:
            mistakes = [line for line in result.stderr.splitlines() if line.startswith("megarl: error: ")]
            if mistakes:
                raise UserError(mistakes[0].removeprefix("megarl: error: "))
            raise RuntimeError(f"{processes} process(es), {' '.join(overrides)}:\n{result.stderr[-4000:]}")
        return SimpleNamespace(**json.loads(answers.read_text()))
