"""Folders that are either whole or absent."""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import UserError
from megarl.observe.files import sync_file, sync_folder


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`; rename it to `folder` when the block ends.

    The rename is atomic: a killed run, or a second writer, never leaves a half-made `folder`.  After an
    exception the temporary folder is removed.

    Raises:
        UserError: `folder` is there already and is not empty; nothing is overwritten.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise _occupied(folder)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`; when the block ends its files are on the disk, and it takes the place of
    `folder`, of which nothing stays.  After an exception `folder` is as it was."""
    partial, old = (folder.with_name(f"{folder.name}.{word}") for word in ("partial", "old"))
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        sync_file(file)
    sync_folder(partial)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:  # another writer was faster
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _occupied(folder) from error
        raise


def _occupied(folder: Path) -> UserError:
    return UserError(f"{folder} is there already: remove it, or name a folder that is absent or empty")
