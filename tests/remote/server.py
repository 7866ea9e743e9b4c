"""A server of byte ranges with faults, on this machine: what a test lets it do wrong, it does once.

`log` has every request as (path, Range header, headers). A path in `faults` has a list of names of
FAULTS; each request to it takes the first one. `versions` is how answers say which version of a
file they are of: by a "strong" or a "weak" ETag, by a "date", or by "none" of these. A path in
`swaps` has another file after that many answers.
"""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.patience import PATIENCE

FAULTS = ("500", "429", "cut", "whole", "shifted", "short", "tag", "grown", "gzip", "untagged",
          "reset", "long")  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "RangeServer"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        server = self.server
        with server.lock:
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.log.append((self.path, headers.get("range", ""), headers))
            faults = server.faults.get(path, [])
            fault = faults.pop(0) if faults else ""
            if path in server.swaps:
                left, data = server.swaps.pop(path)
                if left:
                    server.swaps[path] = left - 1, data
                else:
                    server.files[path] = data
        server.arrived.release()
        if server.stuck is not None and not headers.get("range", "").startswith("bytes=0-"):
            server.stuck.wait(PATIENCE)
        if server.together is not None and path in server.files:
            server.together.wait(PATIENCE)
        if path in server.denied:
            self._plain(*server.denied[path])
        elif path in server.moved:
            self._answer(
                server.redirect, {"Location": server.moved[path], "Content-Length": "0"}, b""
            )
        elif path in server.answers:
            self._plain(200, {"Content-Type": "application/json"}, server.answers[path])
        elif path not in server.files:
            self._plain(404, {}, b"no such file")
        else:
            self._file(server.files[path], fault)

    def _plain(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._answer(status, {"Content-Length": str(len(body)), **headers}, body)

    def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _file(self, data: bytes, fault: str) -> None:
        stated = self.headers.get("Range")
        tag = f'"{sha256(data).hexdigest()[:16]}"'
        said = {
            "strong": {"ETag": tag},
            "weak": {"ETag": f'W/"{len(data)}"'},
            "date": {"Last-Modified": "Sat, 01 Jan 2000 00:00:00 GMT"},
            "none": {},
        }[self.server.versions]
        if fault == "500":
            return self._plain(500, {}, b"broken")
        if fault == "429":
            return self._plain(429, {"Retry-After": "7"}, b"slower")
        if fault == "reset":
            self.close_connection = True
            self.connection.close()
            return None
        if stated is None or fault == "whole":
            return self._plain(200, said, data)
        first, _, last = stated.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        if start >= len(data):
            return self._plain(416, {"Content-Range": f"bytes */{len(data)}"}, b"")
        if fault == "shifted":
            start, stop = start + 1, min(stop + 1, len(data))
        if fault == "short":
            stop -= 1
        body = data[start:stop]
        size = len(data) + (fault == "grown")
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{size}",
            "Content-Length": str(len(body)),
            **said,
        }
        if fault == "tag":
            headers["ETag"] = '"other"'
        if fault == "long":
            headers["Content-Range"] = "bytes \x1b[2J" + "9" * 5000
        if fault == "gzip":
            headers["Content-Encoding"] = "gzip"
        if fault == "untagged":
            del headers["ETag"]
        if fault == "cut":
            self.close_connection = True
            body = body[: len(body) // 2]
        return self._answer(206, headers, body)


class RangeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.files: dict[str, bytes] = {}
        self.answers: dict[str, bytes] = {}
        self.moved: dict[str, str] = {}
        self.redirect = 302
        self.denied: dict[str, tuple[int, Mapping[str, str], bytes]] = {}
        self.faults: dict[str, list[str]] = {}
        self.versions = "strong"
        self.swaps: dict[str, tuple[int, bytes]] = {}
        self.arrived = threading.Semaphore(0)  # released by every request
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.together: threading.Barrier | None = None
        self.stuck: threading.Event | None = None  # what is not a file's beginning waits for it

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that refuses an answer hangs up."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked(self, path: str) -> list[str]:
        """Return the ranges asked for of one path."""
        return [stated for asked, stated, _ in self.log if urlsplit(asked).path == path]

    def sent(self) -> int:
        """Return how many bytes of files the ranges of all requests are, at most."""
        total = 0
        for path, stated, _ in self.log:
            data = self.files.get(unquote(urlsplit(path).path))
            if data is not None and stated:
                first, _, last = stated.removeprefix("bytes=").partition("-")
                total += min(int(last) + 1, len(data)) - int(first)
        return total

    def add_repository(
        self,
        name: str,
        commit: str,
        files: Mapping[str, bytes],
        lfs: tuple[str, ...] = (),
        revision: str = "main",
    ) -> None:
        """Serve a hub repository, at one revision and at its commit."""
        siblings: list[dict[str, Any]] = []
        for path, data in files.items():
            row: dict[str, Any] = {"rfilename": path, "size": len(data)}
            row["blobId"] = sha1(b"blob %d\0" % len(data) + data).hexdigest()
            if path in lfs:
                row["lfs"] = {
                    "sha256": sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 130,
                }
                moved = f"/cdn/{sha256(data).hexdigest()}"
                self.moved[f"/{name}/resolve/{commit}/{path}"] = (
                    f"{moved}?Signature=sigsecret-{path}"
                )
                self.files[moved] = data
            else:
                self.files[f"/{name}/resolve/{commit}/{path}"] = data
            siblings.append(row)
        told = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        for at in (revision, commit):
            self.answers[f"/api/models/{name}/revision/{at}"] = told


@contextmanager
def serving() -> Iterator[RangeServer]:
    server = RangeServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)
