"""What a video's bytes are in, and whether they are all there, before ffmpeg sees them.

ffmpeg plays what it has: of a download that broke off it reads the first part of a WebM or a GIF and reports the
end of the file.  The sizes that these containers write down tell it exactly.
"""

import os
from typing import BinaryIO

from megarl.errors import MediaError

CONTAINERS = ("AVI", "GIF", "Matroska", "MOV", "MP4", "WebM")

_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
_STILL_BRANDS = (b"avif", b"heic", b"heix", b"mif1")


def sniff_container(stream: BinaryIO, name: str) -> str:
    """ffmpeg's name of the demuxer, by the first bytes, whatever the file is called.

    ffmpeg itself would try three hundred formats, playlists that name other files among them.

    Raises:
        MediaError: none of `CONTAINERS`, or bytes are missing at the end.
    """
    stream.seek(0)
    head = stream.read(12)
    if not head:
        raise MediaError(name, "has no bytes")
    if head[:4] == b"\x1a\x45\xdf\xa3":
        demuxer, end = "matroska", _matroska_end
    elif head[:6] in (b"GIF87a", b"GIF89a"):
        demuxer, end = "gif", _gif_end
    elif head[:4] == b"RIFF" and head[8:] == b"AVI ":
        demuxer, end = "avi", _riff_end
    elif head[4:8] in _BOXES and head[8:] not in _STILL_BRANDS:
        demuxer, end = "mov", _boxes_end
    else:
        raise MediaError(name, f"not a video in any of the formats {', '.join(CONTAINERS)}")
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if (declared := end(stream, size)) > size:
        raise MediaError(name, f"cut off: {size} bytes, of at least {declared}")
    return demuxer


def _boxes_end(stream: BinaryIO, size: int) -> int:
    """Where the last box of an MP4 or MOV ends that frames need: bytes 0-3 size, 4-7 type."""
    place, end = 0, 0
    while place + 8 <= size:
        stream.seek(place)
        head = stream.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length < 8:  # 0: to the end of the file; else no box
            break
        place += length
        if head[4:8] in (b"moov", b"moof", b"mdat"):
            end = place
    return end


def _riff_end(stream: BinaryIO, size: int) -> int:
    """Where the last RIFF chunk of an AVI ends: bytes 0-3 `RIFF`, 4-7 size of the rest."""
    place = 0
    while place + 12 <= size:
        stream.seek(place)
        head = stream.read(8)
        if head[:4] != b"RIFF":
            break
        place += 8 + int.from_bytes(head[4:], "little")
    return place


def _matroska_end(stream: BinaryIO, size: int) -> int:
    """Where the Segment ends, the element that holds all frames; 0 if it does not say, as live recordings do not."""
    for element in (0x1A45DFA3, 0x18538067):
        if int.from_bytes(stream.read(4), "big") != element:
            return 0
        first = stream.read(1)
        if not first or not first[0]:
            return 0
        width = 9 - first[0].bit_length()
        length = int.from_bytes(bytes([first[0] & (0xFF >> width)]) + stream.read(width - 1), "big")
        if length == (1 << 7 * width) - 1:
            return 0
        end = stream.seek(length, os.SEEK_CUR)
    return end


def _gif_end(stream: BinaryIO, size: int) -> int:
    """Where the trailer of a GIF ends, or one byte more than there are if no chain of blocks leads to it."""

    def skip_colors(packed: int) -> None:
        if packed & 0x80:
            stream.seek(3 << (packed & 7) + 1, os.SEEK_CUR)

    screen = stream.read(13)
    skip_colors(screen[10] if len(screen) == 13 else 0)
    while kind := stream.read(1):
        if kind == b";":
            return stream.tell()
        if kind == b"!":  # an extension: its label
            stream.seek(1, os.SEEK_CUR)
        elif kind == b"," and len(frame := stream.read(9)) == 9:  # a frame: place and size, palette, width of a code
            skip_colors(frame[8])
            stream.seek(1, os.SEEK_CUR)
        else:
            break
        while (length := stream.read(1)) and length[0]:
            stream.seek(length[0], os.SEEK_CUR)
    return size + 1
