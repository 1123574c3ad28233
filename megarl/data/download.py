"""Media files from the network, each once, into a folder."""

import contextlib
import hashlib
import os
import socket
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from megarl.errors import of_this_machine, one_line


class DownloadError(Exception):
    """Why a URL gave no file, in one line without the URL."""

    def __init__(self, reason: object):
        super().__init__(one_line(reason)[:200])


class Downloads:
    """A folder of downloaded files, named by the hash of their URLs.  For several threads and processes."""

    def __init__(self, folder: Path, max_bytes: int = 2**30, timeout: float = 30.0, deadline: float = 600.0):
        """
        Args:
            folder: made when the first file comes.
            max_bytes: of one file; a larger one is refused without being read in full.
            timeout: seconds to connect, and to wait for the next bytes.
            deadline: seconds for one file with its headers and redirects, however the bytes drip.
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
            _HTTPHandler,
            _HTTPSHandler,
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
            OSError: this machine cannot fetch or keep anything now: a full disk, no descriptors left.
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
        watch = _Watch(self._deadline)
        try:
            with watch:
                self._copy(url, partial)
        except (OSError, HTTPException, ValueError, DownloadError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            cause = error.reason if type(error) is urllib.error.URLError else error
            if of_this_machine(cause):
                raise cause from None
            if not watch.expired:
                raise _explained(error) from error
        if watch.expired:  # even where nothing was raised: a socket that is shut down looks like the end of a file
            raise DownloadError(f"not complete after {self._deadline:g} seconds")

    def _copy(self, url: str, partial: Path) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "megarl"})
        with self._opener.open(request, timeout=self._timeout) as answer, partial.open("wb") as file:
            size = 0
            while chunk := answer.read1(1 << 16):
                size += len(chunk)
                if size > self._max_bytes:
                    raise DownloadError(f"more than {self._max_bytes} bytes")
                file.write(chunk)
            expected = answer.headers.get("Content-Length")
            if expected is not None and expected.isdigit() and int(expected) != size:
                raise DownloadError(f"ended after {size} of {expected} bytes")


def _explained(error: Exception) -> DownloadError:
    if isinstance(error, DownloadError):
        return error
    if isinstance(error, urllib.error.HTTPError):
        return DownloadError(f"HTTP status {error.code}")
    if isinstance(error, urllib.error.URLError):
        return DownloadError(error.reason)
    return DownloadError(f"{type(error).__name__}: {error}")  # ValueError: no URL that http.client can send


class _Watch:
    """Shuts down what is connected in its block when the time is over: a timeout of a socket is for its next bytes
    alone, and headers may drip for ever."""

    def __init__(self, seconds: float):
        self.expired = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._token = _watch.set(self)
        self._timer.start()

    def __exit__(self, *exception: object) -> None:
        _watch.reset(self._token)
        self._timer.cancel()
        with self._lock:
            for connected in self._sockets:
                connected.close()
            self._sockets.clear()

    def add(self, connected: socket.socket) -> None:
        with self._lock:
            if self.expired:
                raise TimeoutError("timed out")
            # A descriptor of its own: TLS takes away the first one, and closing it gives its number to others.
            self._sockets.append(connected.dup())

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            for connected in self._sockets:
                with contextlib.suppress(OSError):  # closed by the other side
                    connected.shutdown(socket.SHUT_RDWR)


_watch: ContextVar[_Watch] = ContextVar("_watch")
"""Of the download that this thread is at."""


class _Watched:
    """A handler of urllib whose connections, those of redirects too, are known to the watch before TLS begins."""

    def do_open(self, http_class: Callable[..., HTTPConnection], request: Any, **options: Any) -> Any:
        def connection(host: str, **more: Any) -> HTTPConnection:
            made = http_class(host, **more)
            create = made._create_connection

            def connect(*where: Any) -> socket.socket:
                connected = create(*where)
                try:
                    _watch.get().add(connected)
                except OSError:
                    connected.close()
                    raise
                return connected

            made._create_connection = connect
            return made

        return super().do_open(connection, request, **options)


class _HTTPHandler(_Watched, urllib.request.HTTPHandler):
    pass


class _HTTPSHandler(_Watched, urllib.request.HTTPSHandler):
    pass
