"""Rows of data files, read where they are asked for: a data set may be larger than memory."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl.data.files import files_name
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


def open_rows(files: Sequence[Path], columns: Sequence[str], cache: Path | None = None) -> Rows:
    """The rows of files of one kind, `.jsonl` or `.parquet`, one file after the other.

    Args:
        columns: what to read of a Parquet file; those that it lacks are left out.
        cache: where `datasets` keeps its copy of Parquet files; None: where it always does (`HF_DATASETS_CACHE`).

    Raises:
        UserError: a file does not exist or cannot be read.
    """
    for path in files:
        if not path.is_file():
            raise UserError(f"data file {path} does not exist")
    try:
        return _Parquet(files, columns, cache) if files[0].suffix == ".parquet" else _JsonLines(files)
    except OSError as error:
        raise UserError(f"data file {files_name(files)} cannot be read: {_one_line(error)}") from error


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


class _Parquet:
    """Rows of Parquet files through `datasets`, as an Arrow file on disk that is mapped into memory.

    Nothing is decoded: an `Image` or `Video` column gives `{"bytes", "path"}`, as it is stored.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str], cache: Path | None):
        import pyarrow as pa
        import pyarrow.parquet as pq

        filled = []
        for path in files:
            try:  # one by one, since what `datasets` raises does not say which file it was
                if pq.read_metadata(path).num_rows:
                    filled.append(path)
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"data file {path} cannot be read: {_one_line(error)}") from error
        self._table = _from_parquet(filled, columns, cache) if filled else []
        schema = self._table[0].schema if filled else ()
        self._convert = {field.name: convert for field in schema if (convert := _converter(field.type))}

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, place: int) -> dict[str, Any]:
        (row,) = self._table[place].to_pylist()
        for column, convert in self._convert.items():
            try:
                row[column] = convert(row[column])
            except (ValueError, RecursionError) as error:
                raise BadRow(column, f"not JSON: {error}") from error
        return row


def _from_parquet(files: Sequence[Path], columns: Sequence[str], cache: Path | None) -> Any:
    import pyarrow as pa
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        with _quiet_datasets():
            # Ranks that come here at once wait for one of them: `datasets` locks its cache.
            whole = Dataset.from_parquet([str(path) for path in files], cache_dir=cache and str(cache))
    except (pa.ArrowException, DatasetGenerationError, OSError, TypeError, ValueError) as error:
        reason = _one_line(error.__cause__ or error)
        raise UserError(f"data file {files_name(files)} cannot be read: {reason}") from error
    known = [column for column in whole.column_names if column in columns]
    return whole.select_columns(known).with_format("arrow")


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bars, and errors as exceptions alone; as it was before when the block ends."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils import logging as datasets_logging

    bars, level = not are_progress_bars_disabled(), datasets_logging.get_verbosity()
    disable_progress_bars()
    datasets_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(level)
        if bars:
            enable_progress_bars()


def _converter(kind: Any) -> Callable[[Any], Any] | None:
    """What turns Arrow's values into those that JSON would have given; None where they are so already.

    `datasets` keeps objects of mixed types as text of the type `arrow.json`; a float32 becomes the shortest
    number that is that float32, 0.1 and not 0.10000000149011612.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return _unless_null(json.loads)
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return _unless_null(lambda value: float(str(kind.to_pandas_dtype()(value))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _converter(kind.value_type)
        return inner and _unless_null(lambda values: [inner(value) for value in values])
    if pa.types.is_struct(kind):
        fields = {field.name: convert for field in kind if (convert := _converter(field.type))}
        return fields and _unless_null(
            lambda struct: struct | {name: convert(struct[name]) for name, convert in fields.items()}
        )
    return None


def _unless_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
