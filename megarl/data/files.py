"""Which files of a data folder hold a split: one file or numbered shards, of one kind, in one place."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UserError

SPLITS = ("train", "test")
SUFFIXES = (".jsonl", ".parquet")
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)(?:-[0-9a-f]{16})?$")
"""Hugging Face adds 16 digits of a hash to the shards that it writes on its hub."""


def find_split(folder: Path, split: str) -> list[Path]:
    """The files of a split (`train`, `test`), shards in the order of their names.

    A split is `<split>.jsonl`, `<split>.parquet`, or shards `<split>-*.jsonl` or `<split>-*.parquet`, in the
    folder itself or below its `data/`, where Hugging Face data sets have them.  It must be one of these:
    which of two was meant would be a guess, and to read both might count every row twice.

    Raises:
        UserError: no such folder, no such file, more than one of the above, or numbered shards
            (`-00000-of-00002`) of which one is missing or there are two sets.
    """
    if not folder.is_dir():
        raise UserError(f"data.path = '{folder}': no such folder")
    found = [files for place in (folder, folder / "data") for files in _candidates(place, split)]
    if not found:
        wanted = ", ".join([f"{split}{suffix}" for suffix in SUFFIXES] + [f"{split}-*{suffix}" for suffix in SUFFIXES])
        raise UserError(f"data.path = '{folder}': lacks a file for the split {split!r}: {wanted}, also below data/")
    if len(found) > 1:
        names = ", ".join(str(files[0].relative_to(folder)) for files in found)
        raise UserError(f"data.path = '{folder}': several files for the split {split!r}: {names}; keep one of them")
    _refuse_gaps(folder, found[0])
    return found[0]


def _candidates(place: Path, split: str) -> list[list[Path]]:
    single = [[place / f"{split}{suffix}"] for suffix in SUFFIXES]
    shards = [sorted(path for path in place.glob(f"{split}-*{suffix}") if path.is_file()) for suffix in SUFFIXES]
    return [files for files in single + shards if files and files[0].is_file()]


def _refuse_gaps(folder: Path, files: Sequence[Path]) -> None:
    """A download that stopped half-way must not become a smaller data set."""
    numbers = [_NUMBERED.search(path.stem) for path in files]
    if not any(numbers):
        return
    counts = {int(match[2]) if match else None for match in numbers}
    places = [int(match[1]) for match in numbers if match]
    if len(counts) > 1 or len(set(places)) < len(places):
        names = ", ".join(path.name for path in (files[0], files[-1]))
        raise UserError(f"data.path = '{folder}': shards of several sets: {names}; keep those of one")
    (count,) = counts
    lacking = sorted(set(range(count)) - set(places))
    if lacking:
        raise UserError(
            f"data.path = '{folder}': of the {count} shards like {files[0].name}, {len(lacking)} are missing; "
            f"the first has number {lacking[0]}"
        )


def files_name(files: Sequence[Path]) -> str:
    """What messages call the files: the path of one, or a pattern for shards."""
    if len(files) == 1:
        return str(files[0])
    return str(files[0].with_name(f"{split_name(files)}-*{files[0].suffix}"))


def split_name(files: Sequence[Path]) -> str:
    """The files' stem without what numbers a shard: `train` for `train-00000-of-00002.parquet`."""
    return _NUMBERED.sub("", files[0].stem) if len(files) == 1 else files[0].stem.partition("-")[0]


def dataset_hash(files: Sequence[Path]) -> str:
    """SHA-256, in hexadecimal, of the files' bytes one after the other: what `cat FILES | sha256sum` prints.

    It covers the rows and their order, not the media files that they name.

    Raises:
        UserError: a file does not exist or cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    for path in files:
        try:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
        except FileNotFoundError as error:
            raise UserError(f"data file {path} does not exist") from error
        except OSError as error:
            raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
