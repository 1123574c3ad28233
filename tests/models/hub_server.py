"""A hub on this machine that speaks as much of the Hugging Face hub's API as fetching a model takes."""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = hashlib.sha1(b"the only one").hexdigest()


class Hub:
    """Serves folders as models, each with one commit, which `main` and `v1` name."""

    def __init__(self, models: dict[str, Path], gated: set[str] = frozenset()):
        self.models, self.gated = models, gated
        self.sent: Counter[str] = Counter()
        """Files whose content was asked for."""

    @contextmanager
    def serving(self):
        """Yields the address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        api = path.startswith("api/models/")
        if path.count("/") < 3:
            return self._refuse(404, "EntryNotFound")  # what the library asks beside
        owner, model, what, revision, *file = path.removeprefix("api/models/").split("/")
        name = f"{owner}/{model}"
        if name in self.hub.gated and (what != "revision" or not api):
            return self._refuse(403, "GatedRepo")
        if name not in self.hub.models:
            return self._refuse(404, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        folder = self.hub.models[name]
        files = {one.name: one.read_bytes() for one in folder.iterdir()}
        if api and what == "revision":
            return self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": one} for one in files]})
        if api and what == "tree":
            return self._json([{"type": "file", "path": n, "size": len(c), "oid": _id(c)} for n, c in files.items()])
        content = files["/".join(file)]
        if self.command == "GET":
            self.hub.sent[f"{name}/{'/'.join(file)}"] += 1
        self._answer(200, content, {"ETag": f'"{_id(content)}"', "X-Repo-Commit": COMMIT})

    def _json(self, value) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for header, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def _id(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
