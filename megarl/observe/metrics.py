"""The numbers of a run: one JSON line a step, and the same scalars for TensorBoard."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from megarl.errors import UserError
from megarl.observe.files import replacing

Value = float | int | str | None

_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends to `run_dir/metrics.jsonl` and to the event files in `run_dir/tensorboard`.

    Opening it at `resume_step`, the step of the checkpoint that the run goes on from (0 for a new run),
    forgets every later step, and a last line that a killed run left half written: the resumed log has
    neither gaps nor doubles.  `run_dir` is made if needed.
    """

    def __init__(self, run_dir: Path, resume_step: int):
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._open_after(resume_step)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Append one step; it is in both files when the call returns.

        Floats are kept to 6 significant digits; NaN and infinities become null.  TensorBoard gets the
        numbers only.  Names nest with `/` (`time/rollout`); a value named `step` is a TypeError.
        Writing a step that is already in the log goes back to it, as resuming does: it and all later ones
        are forgotten.
        """
        line = dict(step=step, **{name: _plain(value) for name, value in values.items()})
        if step <= self._last_step:
            self.close()
            self._open_after(step - 1)
        self._file.write(_dump(line))
        self._file.flush()
        os.fsync(self._file.fileno())  # no checkpoint may outlive the lines before it
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._tensorboard.add_scalar(name, value, global_step=step)
        self._tensorboard.flush()
        self._last_step = step

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and readers do without it

        path = self._run_dir / _NAME
        kept = [line for line in read_metrics(self._run_dir) if line["step"] <= step] if path.exists() else []
        with replacing(path) as file:
            file.writelines(_dump(line) for line in kept)
        self._last_step = kept[-1]["step"] if kept else -1
        self._file = path.open("ab")
        # TensorBoard hides steps >= purge_step that were written before.
        self._tensorboard = SummaryWriter(str(self._run_dir / "tensorboard"), purge_step=step + 1)


def read_metrics(run_dir: Path) -> list[dict[str, Value]]:
    """The lines of `run_dir/metrics.jsonl` in order, each with its `step`.

    Safe beside a running writer: a half-written last line is left out.  Raises UserError when there is
    no such file, or when another line than the last is damaged.
    """
    path = run_dir / _NAME
    try:
        rows = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{run_dir} is not the folder of a run: it has no {_NAME}") from None
    if rows[-1] == b"":
        rows.pop()
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            lines.append(json.loads(row))
        except ValueError:  # not JSON, or not UTF-8
            if number < len(rows):
                raise UserError(f"{path} line {number} is damaged: expected one JSON object a line") from None
    return lines


def _plain(value: Value) -> Value:
    if value is None or isinstance(value, int | str):
        return value
    number = float(value)  # NumPy's float32 and the like are no `float`
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _dump(line: Mapping[str, Value]) -> bytes:
    return (json.dumps(line, allow_nan=False) + "\n").encode()
