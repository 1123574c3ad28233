"""What the files of a checkpoint must be: their sizes and SHA-256, in a file of its own that is written last.

Megatron can write the like (`dist_checkpointing.save(verify_integrity=True)`), but there one rank reads every file of
the checkpoint, files beside Megatron's are not covered, and sizes are not told.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.observe.files import replacing, sync_folder

NAME = "manifest.json"


class Damaged(Exception):
    """A checkpoint is not what was written.  One line that names the file."""


@dataclass(frozen=True)
class Entry:
    """One file, as it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Entry":
        """Reads the whole file."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        return cls(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Manifest:
    number: int
    """Counts the checkpoints of a run, by which they are ordered: names and clocks may lie."""
    score: float | None
    """What the best checkpoints are kept by; None where nothing was measured."""
    files: Mapping[str, Entry]

    def write(self, folder: Path) -> None:
        """The file is on disk, under its name, when the call returns."""
        values = {
            "number": self.number,
            "score": self.score,
            "files": {name: [entry.bytes, entry.sha256] for name, entry in sorted(self.files.items())},
        }
        with replacing(folder / NAME) as file:
            file.write(_sealed(json.dumps(values, indent=1)))
        sync_folder(folder)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """
        Raises:
            Damaged: there is none, or not as it was written.
        """
        path = folder / NAME
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            raise Damaged(f"{path} is missing") from None
        body = written.rpartition(b"\n")[0]
        if written != _sealed(body.decode(errors="replace")):
            raise Damaged(f"{path} is truncated or changed")
        values = json.loads(body)
        files = {name: Entry(*entry) for name, entry in values["files"].items()}
        return cls(values["number"], values["score"], files)

    def fault(self, folder: Path, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with the files, in one line that names the first such; None where nothing is.

        Args:
            part, parts: look at this part of so many, each of about as many bytes, so that ranks share the reading.
        """
        large_first = sorted(self.files, key=lambda name: (-self.files[name].bytes, name))
        for name in large_first[part::parts]:
            path, expected = folder / name, self.files[name]
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return f"{path} is missing"
            if size != expected.bytes:
                return f"{path} has {size} bytes and should have {expected.bytes}"
            if Entry.of(path) != expected:
                return f"{path} is not what was written: its SHA-256 differs"
        return None


def _sealed(body: str) -> bytes:
    """The body, and a last line that tells whether it is whole."""
    return f"{body}\n{hashlib.sha256(body.encode()).hexdigest()}".encode()
