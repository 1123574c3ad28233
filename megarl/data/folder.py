"""Folders that are either whole or absent."""

import errno
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import UserError


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


def _rename(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:  # another writer was faster
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _occupied(folder) from error
        raise


def _occupied(folder: Path) -> UserError:
    return UserError(f"{folder} is there already: remove it, or name a folder that is absent or empty")
