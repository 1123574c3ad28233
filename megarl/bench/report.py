"""How measured lines are shown: a table for people, JSON for comparing versions."""

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from megarl.bench.lines import Line
from megarl.pins import checked_out
from megarl.platform.kernels import kernels

_PACKAGES = (
    *("megarl", "torch", "triton", "megatron-core", "megatron-bridge", "transformer-engine", "flash-attn-4"),
    *("transformers", "trl"),
)


def print_table(lines: Sequence[Line]) -> None:
    table = Table("", "megarl", "floor", "gap", "peer", "ratio", "unit", title=str(kernels()))
    for line in lines:
        numbers = map(_number, (line.megarl, line.floor, line.gap, line.peer, line.ratio))
        table.add_row(line.name, *numbers, line.unit)
    console(sys.stdout).print(table)


def console(stream: TextIO) -> Console:
    """As wide as the terminal; in a file, wide enough for the tables here."""
    return Console(file=stream, width=None if stream.isatty() else 140)


def as_json(lines: Sequence[Line], arguments: Sequence[str]) -> str:
    """One object: machine, command, versions and lines with what is derived from them.

    Args:
        arguments: of the command.
    """
    commit = checked_out(Path(__file__).parent.parent.parent)
    return json.dumps(
        {
            "machine": str(kernels()),
            "command": shlex.join(["python", "-m", "megarl.bench", *arguments]),
            "commit": None if commit == "unknown" else commit,
            "versions": {name: _version(name) for name in _PACKAGES},
            "lines": [asdict(line) | {"gap": line.gap, "ratio": line.ratio} for line in lines],
        }
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.{0 if value > 100 else 2}f}"
