"""Media files from the network, each once, into a folder."""

import hashlib
import os
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.client import HTTPException
from pathlib import Path


class DownloadError(Exception):
    """Why a URL gave no file, in one line without the URL."""

    def __init__(self, reason: object):
        super().__init__(" ".join(str(reason).split())[:200])


class Downloads:
    """A folder of downloaded files, named by the hash of their URLs.  For several threads and processes."""

    def __init__(self, folder: Path, max_bytes: int = 2**30, timeout: float = 30.0, deadline: float = 600.0):
        """
        Args:
            folder: made when the first file comes.
            max_bytes: of one file; a larger one is refused without being read in full.
            timeout: seconds to connect, and to wait for the next bytes.
            deadline: seconds for one file, however its bytes drip.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._deadline = deadline
        self._locks = [threading.Lock() for _ in range(64)]
        # urllib's own opener reads file:// and ftp:// as well; a redirect must not lead there.
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler,
            urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler,
            urllib.request.HTTPDefaultErrorHandler,
            urllib.request.HTTPRedirectHandler,
            urllib.request.HTTPErrorProcessor,
            urllib.request.UnknownHandler,
        ):
            self._opener.add_handler(handler())

    def fetch(self, url: str) -> Path:
        """The file of an `http(s)` URL, from the folder or from the network.

        Raises:
            DownloadError: no answer, not a success, too large or too slow.
        """
        name = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()
        path = self._folder / name
        with self._locks[int(name[:8], 16) % len(self._locks)]:
            if not path.is_file():
                self._folder.mkdir(parents=True, exist_ok=True)
                partial = self._folder / f".{name}.{uuid.uuid4().hex}"
                try:
                    self._download(url, partial)
                    os.replace(partial, path)
                finally:
                    partial.unlink(missing_ok=True)
        return path.resolve()

    def _download(self, url: str, partial: Path) -> None:
        started = time.monotonic()
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "megarl"})
            with self._opener.open(request, timeout=self._timeout) as answer, partial.open("wb") as file:
                size = 0
                while chunk := answer.read1(1 << 16):
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise DownloadError(f"more than {self._max_bytes} bytes")
                    if time.monotonic() - started > self._deadline:
                        raise DownloadError(f"not complete after {self._deadline:g} seconds")
                    file.write(chunk)
                expected = answer.headers.get("Content-Length")
                if expected is not None and expected.isdigit() and int(expected) != size:
                    raise DownloadError(f"ended after {size} of {expected} bytes")
        except urllib.error.HTTPError as error:
            with error:
                raise DownloadError(f"HTTP status {error.code}") from error
        except urllib.error.URLError as error:
            raise DownloadError(error.reason) from error
        except (OSError, HTTPException, ValueError) as error:  # ValueError: no URL that http.client can send
            raise DownloadError(f"{type(error).__name__}: {error}") from error
