"""The process that asks a llama.cpp server, in this one: its library, its program, its answers."""

import io
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aprfmt.tokenizer import llama_server_child as child

PROMPT = {"prompt": "rendered"}


class Library:
    """What of xllamacpp is used: parameters, and a server that ends where nothing refers to it."""

    __version__ = "7"

    class CommonParams:
        def __init__(self) -> None:
            self.model = SimpleNamespace(path="")

    class Server:
        def __init__(self, params: Any) -> None:
            self.params, self.listening_address = params, "http://127.0.0.1:4711"


@pytest.fixture
def served() -> Any:
    """Yield (port, what was asked); bodies with "fail" are refused by its text or object."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            asked.append(("GET", self.path, None))
            self.answer(200, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(("POST", self.path, body))
            fails = "fail" in body
            self.answer(
                500 if fails else 200, json.dumps(body["fail"] if fails else PROMPT).encode()
            )

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port, asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_library_s_server_is_quiet_small_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setitem(sys.modules, "xllamacpp", cast("Any", Library))
    monkeypatch.setattr(child, "_KEPT", kept)
    assert child._start_server(None, "m.gguf") == ("llama.cpp of xllamacpp 7", 4711)
    (server,) = kept
    given = vars(server.params)
    assert given.pop("model").path == "m.gguf"
    assert given == {
        "n_ctx": 256,
        "n_batch": 256,
        "n_parallel": 1,
        "warmup": False,
        "use_jinja": True,
        "prefill_assistant": False,
        "verbosity": -1,
        "port": 0,
    }


def test_conversations_are_rendered_or_refused_in_the_server_s_words(served: Any) -> None:
    port, asked = served
    for said, text in (
        ({"error": {"message": "no tool"}}, "no tool"),
        ({"error": {"code": 3}}, "{'code': 3}"),
        ({"error": "plain"}, "plain"),
        ({"why": "other"}, "{'why': 'other'}"),
    ):
        assert child._render(port, {"fail": said}) == ("error", text)
    assert child._render(port, {"messages": []}) == ("ok", "rendered")
    assert asked[-1] == ("POST", "/apply-template", {"messages": []})
    assert child._request(port, "GET", "/health") == (200, {})
    assert asked[-1] == ("GET", "/health", None)


def started(
    statuses: list[Any], ends: list[int | None], patch: pytest.MonkeyPatch
) -> tuple[list[str], list[float]]:
    """Start a program that answers by these statuses; return its arguments and the waits."""
    given: list[str] = []
    waits: list[float] = []

    def begin(arguments: list[str], **pipes: Any) -> Any:
        given.extend(arguments)
        assert set(pipes) == {"stdin", "stdout", "stderr"}
        polls = iter(ends)
        return SimpleNamespace(poll=lambda: next(polls), returncode=3)

    def request(port: int, method: str, path: str) -> Any:
        assert (method, path) == ("GET", "/health")
        status = statuses.pop(0)
        if isinstance(status, OSError):
            raise status
        return status, {}

    clock = [0.0]

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += 25

    patch.setattr(subprocess, "Popen", begin)
    patch.setattr(child, "_request", request)
    patch.setattr(time, "monotonic", lambda: clock[0])
    patch.setattr(time, "sleep", sleep)
    name, port = child._start_program("/opt/llama-server", "m.gguf")
    assert name == "llama.cpp by llama-server" and given[given.index("--port") + 1] == str(port)
    return given, waits


def test_a_program_is_ready_once_it_says_so_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    given, waits = started([ConnectionRefusedError(), 503, 200], [None] * 3, monkeypatch)
    assert given[:3] == ["/opt/llama-server", "--model", "m.gguf"] and len(waits) == 2
    assert {"--jinja", "--no-prefill-assistant", "--no-warmup"} < set(given)
    assert given[given.index("--ctx-size") + 1] == "256"
    assert given[given.index("--parallel") + 1] == "1"
    with pytest.raises(RuntimeError, match="ended with exit 3 before it was ready"):
        started([503], [None, 3], monkeypatch)
    with pytest.raises(RuntimeError, match="was not ready after 60 s"):
        started([503] * 4, [None] * 4, monkeypatch)


def answered(starts: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the process writes where the server starts, and where it does not."""
    request = {"path": ["only here"], "program": None, "model": "m", "bodies": [{"a": 1}, {"b": 2}]}
    quiet: list[tuple[int, int]] = []
    ended: list[int] = []

    def start(program: Any, model: str) -> tuple[str, int]:
        if not starts:
            raise RuntimeError("no server")
        return f"{program} {model}", 5

    asked = io.BytesIO(json.dumps(request).encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=asked))
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr(child, "_start_server", start)
    monkeypatch.setattr(child, "_render", lambda port, body: (str(port), *body))
    answers = os.open(path, os.O_CREAT | os.O_WRONLY)
    real, made = os.open, os.fdopen
    written: list[Any] = []

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if path != os.devnull:
            return real(path, flags, *rest)
        assert flags == os.O_WRONLY
        return 99

    def fdopen(*every: Any, **more: Any) -> Any:
        written.append(made(*every, **more))
        return written[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", lambda fd: answers if fd == 1 else -1)
        patch.setattr(os, "open", opened)
        patch.setattr(os, "dup2", lambda one, two: quiet.append((one, two)))
        patch.setattr(os, "fdopen", fdopen)
        patch.setattr(os, "_exit", ended.append)
        child.main()
        assert sys.path == ["only here"]
    written[0].close()
    assert ended == [0] and quiet == [(99, 1)]
    return path.read_text()


def test_one_line_is_the_answer_and_the_library_s_output_is_not(tmp_path: Path) -> None:
    given = {"engine": "None m", "texts": [["5", "a"], ["5", "b"]]}
    for starts, expected in ((True, given), (False, {"failed": "RuntimeError: no server"})):
        with pytest.MonkeyPatch.context() as patch:
            (line,) = answered(starts, tmp_path / str(starts), patch).splitlines()
        assert json.loads(line) == expected
