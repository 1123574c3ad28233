"""The checkpoints of a run, side by side in one folder: which is the newest whole one, and which are kept.

A checkpoint is written as `NAME.partial`, becomes `NAME` when all of it is on disk with its manifest, and only then
`latest` names it.  One that is found damaged is set aside as `NAME.damaged`.
"""

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megarl.errors import UserError
from megarl.observe.files import replacing, sync_file, sync_folder
from megarl.parallel.agreement import from_first, gathered
from megarl.training import manifest
from megarl.training.manifest import Damaged, Entry, Manifest

_LATEST = "latest"
PARTIAL, _DAMAGED = ".partial", ".damaged"


@dataclass(frozen=True)
class Retention:
    last: int = 2
    """Newest checkpoints that are kept, at least 1."""
    best: int = 0
    """Checkpoints of the highest scores that are kept beside them."""

    def keeps(self, found: dict[Path, Manifest]) -> set[Path]:
        """Of what is there."""
        newest = sorted(found, key=lambda path: -found[path].number)
        scored = [path for path in newest if found[path].score is not None]
        best = sorted(scored, key=lambda path: -found[path].score)  # stable: of equal ones the newest
        return {*newest[: self.last], *best[: self.best]}


def name_of(phase: str, step: int) -> str:
    """Of the checkpoint after a step of a phase."""
    return f"{phase}_{step:06d}"


def latest(folder: Path) -> Path | None:
    """The newest checkpoint, its manifest read and its files not; None where there is none."""
    found, _ = _look(folder)
    return max(found, key=lambda path: found[path].number, default=None)


def names(folder: Path) -> list[str]:
    """Of the checkpoints, from the oldest."""
    found, _ = _look(folder)
    return [path.name for path in sorted(found, key=lambda path: found[path].number)]


def newest_whole(folder: Path, set_aside: bool = True) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every file is what was written.  Collective: the ranks share the reading.

    Args:
        set_aside: rename newer ones, which are damaged.

    Returns:
        (the checkpoint, or None where none was ever saved; a line about each that is damaged)

    Raises:
        UserError: checkpoints were saved and none is whole, or one cannot be read.
    """
    # Ranks may see a shared folder at different times.
    found, faults, began = from_first(lambda: (*_look(folder), (folder / _LATEST).exists()))
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = None
    for path in sorted(found, key=lambda path: -found[path].number):
        fault = next(filter(None, gathered(_fault(found[path], path, rank, size))), None)
        if fault is None:
            whole = path
            break
        faults[path] = fault
    if whole is None and (faults or began):
        what = next(iter(faults.values()), f"{folder / _LATEST} is all that is left")
        raise UserError(f"no checkpoint in {folder} is whole: {what}; restore one, or remove the folder to begin anew")
    if rank == 0 and set_aside:
        for path in faults:
            aside = path.with_name(path.name + _DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    dist.barrier()
    what = "is damaged and was set aside" if set_aside else "is damaged"
    return whole, [f"checkpoint {path.name} {what}: {fault}" for path, fault in faults.items()]


def publish(folder: Path, name: str, score: float | None, files: dict[str, Entry], keep: Retention) -> None:
    """`NAME.partial`, whose data is on disk, becomes the newest checkpoint; who is not kept goes.  On one rank.

    Args:
        files: those that need not be read again to know what was written.
    """
    partial = folder / f"{name}{PARTIAL}"
    found, _ = _look(folder)
    number = 1 + max((other.number for other in found.values()), default=0)
    written = seal(partial, files, number, score)
    shutil.rmtree(folder / name, ignore_errors=True)
    partial.rename(folder / name)
    sync_folder(folder)
    with replacing(folder / _LATEST) as file:
        file.write(name.encode())
    sync_folder(folder)
    found[folder / name] = written
    for path in [path for path in folder.iterdir() if path.is_dir()]:
        if path not in keep.keeps(found):
            (path / manifest.NAME).unlink(missing_ok=True)  # first: half of a checkpoint is none
            shutil.rmtree(path)


def seal(folder: Path, files: dict[str, Entry], number: int = 1, score: float | None = None) -> Manifest:
    """Writes the manifest; everything in the folder is on disk then.  On one rank.

    Args:
        files: those that are on disk and need not be read again to know what was written.
    """
    others = [path for path in folder.iterdir() if path.name not in files]
    for path in others:
        sync_file(path)
    written = Manifest(number, score, {**files, **{path.name: Entry.of(path) for path in others}})
    written.write(folder)
    return written


def refuse_damaged(checkpoint: Path) -> None:
    """Reads all of it.  Collective: the ranks share the reading.

    Raises:
        UserError: its files are not what was written.
    """
    try:
        fault = _fault(Manifest.read(checkpoint), checkpoint, dist.get_rank(), dist.get_world_size())
    except Damaged as damaged:
        fault = str(damaged)
    if fault := next(filter(None, gathered(fault)), None):
        raise UserError(f"{checkpoint} is damaged: {fault}")


def _look(folder: Path) -> tuple[dict[Path, Manifest], dict[Path, str]]:
    """Checkpoints, and what is wrong with those whose manifests are."""
    found, faults = {}, {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.is_dir() and path.suffix not in (PARTIAL, _DAMAGED):
            try:
                found[path] = Manifest.read(path)
            except Damaged as fault:
                faults[path] = str(fault)
    return found, faults


def _fault(expected: Manifest, path: Path, part: int, parts: int) -> str | None:
    try:
        return expected.fault(path, part, parts)
    except OSError as error:
        if error.errno == errno.EIO:  # the disk itself says that it is damaged
            return f"{error.filename or path} cannot be read: {error.strerror}"
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}") from None
