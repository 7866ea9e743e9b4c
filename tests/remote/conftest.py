"""A server for each test, an own cache, and nothing remembered of earlier ones."""

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from aprfmt.remote import client, http, remote_file, sites
from aprfmt.remote.address_policy import POLICY
from aprfmt.remote.traffic import TRAFFIC
from tests.cli.run import aprfmt as command
from tests.patience import PATIENCE
from tests.remote.server import RangeServer, serving


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Files of every format: safetensors with a small and with a long header, GGUF, APR."""
    folder = tmp_path_factory.mktemp("remote")
    rng = np.random.default_rng(1)
    small = {f"t{i}": rng.standard_normal((64, 96 + i)).astype("<f4") for i in range(5)}
    save_file(small, folder / "small.safetensors")
    many = {f"{'long.name.' * 12}{i}": np.full(1, i, "<f4") for i in range(1500)}
    save_file(many, folder / "many.safetensors")
    for to in ("apr", "gguf"):
        args = ("convert", folder / "small.safetensors", folder / f"small.{to}", "--arch", "none")
        assert command(*args).code == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("APRFMT_CACHE", str(tmp_path / "ranges"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in (
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HF_ENDPOINT",
        "HF_TOKEN_PATH",
        "HF_HUB_OFFLINE",
        "HUGGING_FACE_HUB_TOKEN",
        "APRFMT_CACHE_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    # The library reads the environment when it is imported, which a process does once.
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    forget()
    yield
    forget()


def forget() -> None:
    """Make the process as a new one is."""
    client.CLIENT.close()
    for kept in (remote_file._objects, sites._open, http._FOLDERS, http._QUERIES, http._PASSWORDS):
        kept.clear()
    TRAFFIC.reset()
    POLICY.plain_http = False


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits; how long they would have is listed."""
    asked: list[float] = []
    monkeypatch.setattr(client, "CLIENT", client.Client(wait=asked.append))
    return asked


@contextmanager
def emulator(words: Callable[[int], Sequence[str | Path]], ready: bytes) -> Iterator[int]:
    """Run a store's emulator on a port of its own, which is yielded when it has said `ready`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = subprocess.Popen(words(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started, said = threading.Event(), list[bytes]()

    def listen() -> None:
        for line in running.stdout or ():
            said.append(line)
            if ready in line:
                started.set()
        started.set()  # it ended, by itself or killed

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        assert started.wait(PATIENCE) and running.poll() is None, said
        yield port
    finally:
        running.kill()
        running.wait()
        thread.join(PATIENCE)
        assert running.stdout is not None
        running.stdout.close()


def check_folder(address: str, folder: Path, tmp_path: Path) -> None:
    """Assert that commands find at an address of a bucket what lies in a folder."""
    done = command("inspect", address, "--json")
    assert done.code == 0, done.err
    assert done.json["encodings"] == command("inspect", folder, "--json").json["encodings"]
    assert done.json["remote"]["bytes"] < 300_000
    for words in (("diff", folder, address), ("convert", address, tmp_path / "x.gguf"),
                  ("cat", f"{address}/model.safetensors", "model.norm.weight")):  # fmt: skip
        done = command(*words)
        assert done.code == 0, done.err
    done = command("inspect", f"{address}/none.gguf")
    assert done.code == 2 and "no such file" in done.err
