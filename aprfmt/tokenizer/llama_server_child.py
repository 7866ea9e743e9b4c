"""The process that has llama.cpp render conversations; started by `llama_server.py`.

Reads one JSON request from stdin, starts a server on this machine's own address, asks it for every
conversation, and writes one JSON line. The server is a program, or a thread of this process.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any

_HOST = "127.0.0.1"
_START_SECONDS = 60.0


def main() -> None:
    """Answer the one request on stdin with a JSON line, then exit.

    The line is {"engine", "texts"}, or {"failed": why} where no server starts.
    """
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    # The library prints what it likes: only the answer may reach the parent.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        engine, port = _start_server(request["program"], request["model"])
        texts = [_render(port, body) for body in request["bodies"]]
        answer: Mapping[str, Any] = {"engine": engine, "texts": texts}
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
    os._exit(0)  # the library's threads do not end by themselves


def _start_server(program: str | None, model: str) -> tuple[str, int]:
    """Start a server for the model; return (name of the engine, port)."""
    if program is not None:
        return _start_program(program, model)
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = params.n_batch = 256
    params.n_parallel = 1
    params.warmup = False
    params.use_jinja = True
    params.prefill_assistant = False  # an assistant's turn that ends a chat is ended
    params.verbosity = -1
    params.port = 0
    server = xllamacpp.Server(params)
    _KEPT.append(server)
    port = int(server.listening_address.rpartition(":")[2])
    return f"llama.cpp of xllamacpp {xllamacpp.__version__}", port


_KEPT: list[Any] = []  # a server that nothing refers to ends


def _start_program(program: str, model: str) -> tuple[str, int]:
    """Start llama-server on a free port, wait until it is ready; return (name, port).

    Raises RuntimeError where it ends before that, or is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = int(probe.getsockname()[1])
    options = ["--host", _HOST, "--port", str(port), "--ctx-size", "256", "--parallel", "1",
               "--no-warmup", "--jinja", "--no-prefill-assistant"]  # fmt: skip
    server = subprocess.Popen(
        [program, "--model", model, *options],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"{program} ended with exit {server.returncode} before it was ready")
        try:
            status, _ = _request(port, "GET", "/health")
        except OSError:
            status = 0
        if status == 200:
            return f"llama.cpp by {os.path.basename(program)}", port
        time.sleep(0.05)
    raise RuntimeError(f"{program} was not ready after {_START_SECONDS:.0f} s")


def _render(port: int, body: Mapping[str, Any]) -> tuple[str, str]:
    """Return ("ok", text) of one conversation, or ("error", the server's message)."""
    status, answer = _request(port, "POST", "/apply-template", json.dumps(body))
    if status == 200:
        return "ok", str(answer["prompt"])
    error = answer.get("error", answer)
    return "error", str(error.get("message", error) if isinstance(error, Mapping) else error)


def _request(port: int, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
    """Return (HTTP status, parsed JSON) of a request to the server."""
    connection = HTTPConnection(_HOST, port, timeout=_START_SECONDS)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
