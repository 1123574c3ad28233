"""What disks do to files."""

from pathlib import Path


def flip(path: Path, place: int) -> None:
    """The lowest bit of a byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
