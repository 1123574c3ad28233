import errno
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megarl.data.download import DownloadError, Downloads
from megarl.data.media_values import MediaReader
from megarl.data.prompts import load_prompts
from tests.data.rows import image, row, write

BODY = b"a picture" * 1000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802 (http.server's name)
        self.server.asked.append(self.path)
        if self.path == "/missing.png":
            return self.send_error(404)
        if self.path.startswith("/to?"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to?"))
            return self.end_headers()
        if self.path == "/loop":
            self.send_response(302)
            self.send_header("Location", "/loop")
            return self.end_headers()
        if self.path == "/headers.png":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not self.server.closing.wait(0.1):  # each in time, and never all
                self.wfile.write(b"X-More: 1\r\n")
            return
        self.send_response(200)
        length = {"/short.png": len(BODY) + 1, "/unknown.png": None, "/unknown-slow.png": None}.get(
            self.path, len(BODY)
        )
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        for start in range(0, len(BODY), 3000):
            self.wfile.write(BODY[start : start + 3000])
            self.wfile.flush()
            if self.path in ("/slow.png", "/unknown-slow.png"):
                self.server.closing.wait(1.0)
            if self.path == "/stalled.png":
                self.server.closing.wait(20)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.closing, server.daemon_threads = [], threading.Event(), True
    server.handle_error = lambda *_: None  # a client that hangs up is what some tests do
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()


def test_a_file_is_fetched_once(server, tmp_path):
    downloads = Downloads(tmp_path / "downloads")
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(downloads.fetch, [f"{server.url}/a.png"] * 20))
    (path,) = paths
    assert path.read_bytes() == BODY and path.is_absolute()
    assert Downloads(tmp_path / "downloads").fetch(f"{server.url}/a.png") == path
    assert server.asked == ["/a.png"]
    assert downloads.fetch(f"{server.url}/b.png") != path
    assert downloads.fetch(f"{server.url}/unknown.png").read_bytes() == BODY
    assert downloads.fetch(f"{server.url}/to?/a.png").read_bytes() == BODY
    assert len(list((tmp_path / "downloads").iterdir())) == 4


@pytest.mark.parametrize(
    ("path", "options", "reason"),
    [
        ("/missing.png", {}, "HTTP status 404"),
        ("/short.png", {}, "ended after 9000 of 9001 bytes"),
        ("/a.png", {"max_bytes": 8999}, "more than 8999 bytes"),
        ("/stalled.png", {"timeout": 0.2}, "TimeoutError: timed out"),
        ("/slow.png", {"deadline": 0.5}, "not complete after 0.5 seconds"),
        ("/headers.png", {"deadline": 0.5}, "not complete after 0.5 seconds"),
        ("/to?/headers.png", {"deadline": 0.5}, "not complete after 0.5 seconds"),
        ("/unknown-slow.png", {"deadline": 0.5}, "not complete after 0.5 seconds"),
        ("/loop", {}, "HTTP status 302"),
        ("/to?file:///etc/passwd", {}, "HTTP status 302"),
        ("/to?ftp://127.0.0.1/x", {}, "unknown url type: ftp"),
        ("/a b.png", {}, "InvalidURL"),
        ("/\ud800.png", {}, "UnicodeEncodeError"),
    ],
)
def test_what_gives_no_file(server, tmp_path, path, options, reason):
    started = time.monotonic()
    with pytest.raises(DownloadError, match=reason) as error:
        Downloads(tmp_path / "d", **options).fetch(server.url + path)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "d").iterdir()) == []
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "url", ["http://", "http://127.0.0.1:1/a.png", "http://[::1/a.png", "http://a:b/c", "http://.."]
)
def test_no_server_at_all(server, tmp_path, url):
    with pytest.raises(DownloadError):
        Downloads(tmp_path / "d", timeout=5).fetch(url)
    assert list((tmp_path / "d").iterdir()) == []


def test_the_deadline_covers_tls(tmp_path):
    """A server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(DownloadError, match="not complete after 0.3 seconds"):
            Downloads(tmp_path / "d", deadline=0.3).fetch(f"https://127.0.0.1:{silent.getsockname()[1]}/a.png")
    assert time.monotonic() - started < 5


def test_no_descriptor_is_left_open(server, tmp_path, monkeypatch):
    copies = []
    dup = socket.socket.dup
    monkeypatch.setattr(socket.socket, "dup", lambda self: copies.append(dup(self)) or copies[-1])
    Downloads(tmp_path / "d").fetch(f"{server.url}/to?/a.png")
    assert [copy.fileno() for copy in copies] == [-1, -1]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EIO, errno.ENOMEM])
@pytest.mark.parametrize("where", ["connect", "write"])
def test_trouble_of_this_machine_rejects_no_row(server, folder, tmp_path, monkeypatch, number, where):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    file = write(folder, row(image(f"{server.url}/a.png")))
    reader = MediaReader(folder, downloads=Downloads(tmp_path / "d"))
    with monkeypatch.context() as patch:
        if where == "connect":
            patch.setattr(socket, "create_connection", fail)
        else:
            opened = Path.open
            patch.setattr(
                Path, "open", lambda path, *a, **k: (fail if "d" == path.parent.name else opened)(path, *a, **k)
            )
        with pytest.raises(OSError) as error:
            load_prompts(file, reader)
        assert error.value.errno == number
    assert len(load_prompts(file, reader)[0]) == 1


def test_rows_that_name_urls(server, folder, tmp_path):
    rows = [
        row(image(f"{server.url}/a.png")),
        row({"type": "video", "url": f"{server.url}/b.mp4"}),
        {"prompt": "?", "images": [f"{server.url}/missing.png"], "answer": "7"},
        {"prompt": "?", "images": [{"path": f"{server.url}/a.png"}], "answer": "7"},
    ]
    file = write(folder, *rows)
    reader = MediaReader(folder, downloads=Downloads(tmp_path / "run" / "downloads"))
    prompts, [rejection] = load_prompts(file, reader)
    assert [prompt.row for prompt in prompts] == [1, 2, 4]
    assert [prompt.media[0].path.read_bytes() for prompt in prompts] == [BODY] * 3
    assert prompts[0].media[0].name == f"{server.url}/a.png" and prompts[0].media[0].key == prompts[2].media[0].key
    assert (rejection.row, rejection.item) == (3, "images[0]")
    assert rejection.reason == f"'{server.url}/missing.png': HTTP status 404"
    assert sorted(server.asked) == ["/a.png", "/b.mp4", "/missing.png"]

    prompts, rejections = load_prompts(file, MediaReader(folder))
    assert len(prompts) == 0 and len(rejections) == 4
    assert all("set data.allow_remote = true" in rejection.reason for rejection in rejections)
