"""Rows of Parquet files through `datasets`, as an Arrow file on disk that is mapped into memory."""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.data.files import files_name
from megarl.data.rejection import BadRow
from megarl.errors import UserError, one_line

_SHOWN = 300
"""Characters of a list of columns, or of a reason, in a message."""


class ParquetRows:
    """Rows by their place, from 0; see `megarl.data.rows.Rows`.

    Nothing is decoded: an `Image` or `Video` column gives `{"bytes", "path"}`, as it is stored.  A `ClassLabel`
    gives the name of the label.
    """

    def __init__(self, files: Sequence[Path], columns: Sequence[str], sha256: str, cache: Path | None):
        """See `megarl.data.rows.open_rows`."""
        found = {}
        for path in files:  # one by one, since what `datasets` raises does not say which file it was
            features = _features(path, columns)
            if features is not None:
                found[path] = features
        for path, features in found.items():
            _refuse_difference(next(iter(found)), next(iter(found.values())), path, features)
        self._table = _copy(list(found), features, sha256, cache) if found else []
        features = self._table.features if found else {}
        schema = self._table[0].schema if found else ()
        self._convert = {f.name: convert for f in schema if (convert := _converter(f.type, features[f.name]))}

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, place: int) -> dict[str, Any]:
        (row,) = self._table[place].to_pylist()
        for column, convert in self._convert.items():
            try:
                row[column] = convert(row[column])
            except ValueError as error:
                raise BadRow(column, str(error)) from error
        return row


def _features(path: Path, columns: Sequence[str]) -> Any:
    """Types of those of the columns that a file has, as `datasets` sees them; None for a file without rows.

    Raises:
        UserError: it cannot be read, or has none of the columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Features

    try:
        if not pq.read_metadata(path).num_rows:
            return None
        schema = pq.read_schema(path)
        known = [name for name in schema.names if name in columns]
        if known:
            fields = pa.schema([schema.field(name) for name in known], schema.metadata)
            return Features.from_arrow_schema(fields)
    except Exception as error:  # the description of features in a file's metadata is anyone's, and fails in any way
        raise UserError(f"data file {path} cannot be read: {_one_line(error)}") from error
    names = ", ".join(schema.names)[:_SHOWN]
    raise UserError(
        f"data file {path} has none of the columns that are read, but {names}; accepted: {', '.join(columns)}"
    )


def _refuse_difference(first: Path, expected: Any, path: Path, features: Any) -> None:
    """`datasets` takes types, and the names of labels, from the first file alone."""
    if lacking := expected.keys() ^ features.keys():
        has, lacks = (first, path) if min(lacking) in expected else (path, first)
        raise UserError(f"data file {lacks} lacks the column {min(lacking)!r}, which {has.name} has")
    for name, feature in features.items():
        if _labels(feature) != _labels(expected[name]):
            raise UserError(f"data file {path}, column {name!r}: other labels than in {first.name}")


def _labels(feature: Any) -> Any:
    from datasets import ClassLabel

    if isinstance(feature, dict):
        return {name: _labels(inner) for name, inner in feature.items()}
    return feature.names if isinstance(feature, ClassLabel) else None


def _copy(files: Sequence[Path], features: Any, sha256: str, cache: Path | None) -> Any:
    """The copy in Arrow's format.  `datasets` finds one again by path and time of change: a folder for each content,
    since a file may be replaced with its time kept."""
    import pyarrow as pa
    from datasets import Dataset, config
    from datasets.exceptions import DatasetGenerationError

    folder = Path(cache or config.HF_DATASETS_CACHE) / f"megarl-{sha256[:32]}"
    try:
        with _quiet_datasets():
            # Ranks that come here at once wait for one of them: `datasets` locks its cache.
            whole = Dataset.from_parquet(
                [str(path) for path in files], cache_dir=str(folder), features=features, columns=list(features)
            )
    except (pa.ArrowException, DatasetGenerationError, OSError, TypeError, ValueError) as error:
        reason = _one_line(error.__cause__ or error)
        raise UserError(f"data file {files_name(files)} cannot be read: {reason}") from error
    return whole.with_format("arrow")


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


def _converter(kind: Any, feature: Any) -> Callable[[Any], Any] | None:
    """What turns Arrow's values into those that JSON would have given; None where they are so already.  It raises
    ValueError for those that are no such values.

    `datasets` keeps objects of mixed types as text of the type `arrow.json`, and labels as their numbers, of which
    -1 is none; a float32 becomes the shortest number that is that float32, 0.1 and not 0.10000000149011612.
    """
    import pyarrow as pa
    from datasets import ClassLabel

    if isinstance(feature, ClassLabel):
        return _unless_null(lambda number: _label(number, feature.names))
    if isinstance(kind, pa.JsonType):
        return _unless_null(_json)
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        return _unless_null(lambda value: float(str(kind.to_pandas_dtype()(value))))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _converter(kind.value_type, getattr(feature, "feature", None))
        return inner and _unless_null(lambda values: [inner(value) for value in values])
    if pa.types.is_struct(kind):
        inside = feature if isinstance(feature, dict) else {}
        fields = {field.name: made for field in kind if (made := _converter(field.type, inside.get(field.name)))}
        return fields and _unless_null(
            lambda struct: struct | {name: convert(struct[name]) for name, convert in fields.items()}
        )
    return None


def _unless_null(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error


def _label(number: int, names: Sequence[str]) -> str | None:
    if number >= len(names) or number < -1:
        raise ValueError(f"{number} is none of the {len(names)} labels of the column")
    return None if number == -1 else names[number]


def _one_line(error: BaseException) -> str:
    return one_line(error)[:_SHOWN]
