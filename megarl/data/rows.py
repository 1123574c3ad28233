"""Rows of data files, read where they are asked for: a data set may be larger than memory."""

import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.data.files import files_name
from megarl.data.parquet import ParquetRows
from megarl.data.rejection import BadRow, describe
from megarl.errors import UserError


class Rows(Protocol):
    """Rows by their place, from 0.  Safe to read from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int) -> dict[str, Any] | None:
        """The row; None for an empty line.

        Raises:
            BadRow: it cannot be read.
        """
        ...


def open_rows(files: Sequence[Path], columns: Sequence[str], sha256: str, cache: Path | None = None) -> Rows:
    """The rows of files of one kind, `.jsonl` or `.parquet`, one file after the other.

    Args:
        columns: what to read of a Parquet file; those that it lacks are left out.
        sha256: `dataset_hash(files)`, by which a copy of Parquet files is found again.
        cache: where `datasets` keeps its copy of Parquet files; None: where it always does (`HF_DATASETS_CACHE`).

    Raises:
        UserError: a file does not exist or cannot be read, has none of the columns, or has others than the rest.
    """
    for path in files:
        if not path.is_file():
            raise UserError(f"data file {path} does not exist")
    try:
        return ParquetRows(files, columns, sha256, cache) if files[0].suffix == ".parquet" else _JsonLines(files)
    except OSError as error:
        raise UserError(f"data file {files_name(files)} cannot be read: {' '.join(str(error).split())}") from error


class _JsonLines:
    """JSON objects, one a line, in UTF-8.

    Read by megarl itself, because Arrow's reader, which `datasets` uses, wants one type a column and refuses
    a whole file for one line that is broken or differs; here such a line is one rejection with its number.
    Only the offsets of the lines are kept.  A line is read with seek and read and not through a memory map:
    a map holds a descriptor a shard, and ends the process where somebody truncates the file.
    """

    def __init__(self, files: Sequence[Path]):
        self._files = list(files)
        self._offsets = [_line_offsets(path) for path in files]
        self._first = np.cumsum([0, *(len(offsets) - 1 for offsets in self._offsets)])

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, place: int) -> dict[str, Any] | None:
        number = int(np.searchsorted(self._first, place, side="right")) - 1
        start, end = self._offsets[number][place - self._first[number] :][:2].tolist()
        with self._files[number].open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        if not line.strip():
            return None
        try:
            row = json.loads(line.decode("utf-8-sig"), parse_float=_exact, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise BadRow("row", f"not JSON in UTF-8: {error}") from error
        if not isinstance(row, dict):
            raise BadRow("row", f"{describe(row)}, not an object")
        return row


def _line_offsets(path: Path) -> np.ndarray:
    """int64 `[lines + 1]`: where each line begins, and the end of the file."""
    ends = []
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
    starts = np.concatenate([[0], *ends]).astype(np.int64)
    return starts if starts[-1] == size else np.append(starts, size)


def _exact(text: str) -> float | str:
    """A number of JSON: as a float where that is the same number, else as its text."""
    try:
        return float(text) if Decimal(repr(float(text))) == Decimal(text) else text
    except InvalidOperation:  # an exponent of 20 digits
        return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
