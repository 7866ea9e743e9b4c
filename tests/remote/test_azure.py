"""az:// by Azurite, Microsoft's emulator of its store, where it is installed (npm).

Seen red: a container that is listed without its folder, a key that is not signed with.
"""

import base64
import hmac
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from hashlib import sha256
from pathlib import Path

import pytest

from tests.cli.run import aprfmt
from tests.conftest import not_run
from tests.remote.conftest import check_folder, emulator, forget

# The account and key that every Azurite has, as its documentation gives them.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run the emulator; yield its address."""
    program = shutil.which("azurite-blob")
    if program is None:
        not_run("azurite-blob is not installed (npm install -g azurite)")

    def words(port: int) -> Sequence[str | Path]:
        return (program or "", "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location",
                folder, "--skipApiVersionCheck", "--disableTelemetry")  # fmt: skip

    with emulator(words, b"successfully listen") as port:
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"


def put(server: str, path: str, data: bytes = b"", query: str = "") -> None:
    """Create a container or a blob, signed as the store asks it (Shared Key)."""
    kind = "application/octet-stream"
    stated = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": VERSION}
    if not query:
        stated["x-ms-blob-type"] = "BlockBlob"
    size = str(len(data)) if data else ""
    lines = ["PUT", "", "", size, "", kind, "", "", "", "", "", ""]
    lines += [f"{name}:{value}" for name, value in sorted(stated.items())]
    lines.append(f"/{ACCOUNT}/{ACCOUNT}/{path}")
    lines += [part.replace("=", ":") for part in query.split("&") if part]
    signed = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), sha256)
    stated["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signed).decode()}"
    asked = urllib.request.Request(
        f"{server}/{path}{'?' if query else ''}{query}", data,
        {**stated, "Content-Type": kind}, method="PUT",
    )  # fmt: skip
    urllib.request.urlopen(asked).close()


@pytest.fixture
def container(monkeypatch: pytest.MonkeyPatch, demo_model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of the demo model in a container of a server on this machine."""
    pytest.importorskip("obstore", reason="NOT-RUN: obstore is not installed (extra: remote)")
    with serving(tmp_path) as server:
        put(server, "models", query="restype=container")
        for path in demo_model.iterdir():
            if path.is_file():
                put(server, f"models/a/tiny/{path.name}", path.read_bytes())
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server)
        monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
        yield "az://models/a/tiny"


def test_a_folder_of_a_container_is_the_folder(
    container: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_folder(container, demo_model, tmp_path)
    forget()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"x" * 64).decode())
    done = aprfmt("inspect", container)
    assert done.code == 2 and "set the keys" in done.err
    assert "eHh4" not in done.err
