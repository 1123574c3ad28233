"""Media values of a row (paths, URLs, data URIs, bytes) to sources of bytes.  Nothing is decoded here."""

import base64
import binascii
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.data.download import DownloadError, Downloads
from megarl.data.prompt import Kind, MediaSource
from megarl.data.rejection import BadRow, describe

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_DATA_URI = re.compile(r"data:", re.IGNORECASE)
_SHOWN = 200
"""Characters of a path or URL in a message."""


class MediaReader:
    """Finds what a row means by a medium, and refuses what it must not mean."""

    def __init__(self, folder: Path, more: Sequence[Path] = (), downloads: Downloads | None = None):
        """
        Args:
            folder: the data folder (`data.path`), to which paths are relative.
            more: other folders in which media may lie (`data.media_folders`); a relative path is looked for
                there, in order, where the data folder does not have it.
            downloads: fetches URLs; None where they are refused (`data.allow_remote`).
        """
        # Strings and not paths, whose methods would take most of the time of reading a row.
        self._folders = tuple(os.path.join(os.path.realpath(allowed), "") for allowed in (folder, *more))
        self._downloads = downloads

    @property
    def remote(self) -> bool:
        """Whether URLs are fetched."""
        return self._downloads is not None

    def read(self, kind: Kind, value: Any, item: str, row_name: str) -> MediaSource:
        """The source of one medium.

        Args:
            value: a path, an `http(s)` URL or a `data:` URI; bytes; or `{"bytes", "path"}` as the Image and
                Video columns of `datasets` are stored, of which the bytes go first.
            item: its place in the row, such as `images[0]`.
            row_name: its row, such as `train.parquet row 7`; with `item` the name of bytes in the row.

        Raises:
            BadRow: it is none of these, is not allowed, or is not there.
        """
        name = f"{row_name} {item}"
        if isinstance(value, dict):
            if unknown := value.keys() - {"bytes", "path"}:
                raise BadRow(item, f"unknown key {min(unknown)!r}; accepted: bytes, path")
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
            if value is None:
                raise BadRow(item, "has neither bytes nor a path")
        if isinstance(value, bytes):
            return self._in_row(kind, value, item, name)
        if not isinstance(value, str):
            raise BadRow(item, f"{describe(value)}, not a path or bytes")
        if _DATA_URI.match(value):
            return self._in_row(kind, _from_data_uri(value, item), item, name)
        if scheme := _SCHEME.match(value):
            return MediaSource(kind, value, self._fetch(value, scheme[1].lower(), item))
        # A name is part of messages of one line; a path may hold anything.
        return MediaSource(kind, value if value.isprintable() else repr(value), self._resolve(value, item))

    def read_base64(self, kind: Kind, value: str, item: str, row_name: str) -> MediaSource:
        """The source of a medium that is spelled in base64, with or without `data:...;base64,` before it.

        Raises:
            BadRow: it is not base64.
        """
        data = _from_data_uri(value, item) if _DATA_URI.match(value) else _from_base64(value, item)
        return self._in_row(kind, data, item, f"{row_name} {item}")

    def _in_row(self, kind: Kind, data: bytes, item: str, name: str) -> MediaSource:
        if not data:
            raise BadRow(item, "has no bytes")
        return MediaSource(kind, name, data=data)

    def _fetch(self, url: str, scheme: str, item: str) -> Path:
        shown = url[:_SHOWN]
        if scheme not in ("http", "https"):
            raise BadRow(item, f"{shown!r}: {scheme}:// is not supported; accepted: paths, data:, http://, https://")
        if self._downloads is None:
            raise BadRow(item, f"{shown!r} is on the network: download it, or set data.allow_remote = true")
        try:
            return self._downloads.fetch(url)
        except DownloadError as error:
            raise BadRow(item, f"{shown!r}: {error}") from error

    def _resolve(self, path: str, item: str) -> Path:
        main = self._folders[0].rstrip("/")
        inside = False
        try:
            for folder in self._folders:
                resolved = os.path.realpath(os.path.join(folder, path))
                if f"{resolved}/".startswith(self._folders):
                    inside = True
                    if os.path.isfile(resolved):
                        return Path(resolved)
        except ValueError as error:  # a NUL byte, a lone surrogate
            raise BadRow(item, f"{path[:_SHOWN]!r} is not a path: {error.__class__.__name__}") from error
        if inside:
            more = " or in data.media_folders" if len(self._folders) > 1 else ""
            raise BadRow(item, f"{path[:_SHOWN]!r}: no such file in {main}{more}")
        raise BadRow(item, f"{path[:_SHOWN]!r} leaves the data folder {main}: name its folder in data.media_folders")


def _from_data_uri(uri: str, item: str) -> bytes:
    head, comma, body = uri.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise BadRow(item, f"{uri[:40]!r} is not a data URI in base64: data:<type>;base64,<bytes>")
    return _from_base64(body, item)


def _from_base64(text: str, item: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRow(item, f"{text[:40]!r} is not base64: {error}") from error
