"""Buckets: S3 by moto's server, other file systems by fsspec's own `memory://`."""

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.errors import RemoteError, UsageError
from aprfmt.remote.buckets import BucketSite
from aprfmt.remote.fsspec_sites import FsspecSite
from aprfmt.remote.paths import parse_location
from tests.cli.run import aprfmt as command
from tests.remote.conftest import forget
from tests.remote.server import RangeServer


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of an S3 server on this machine with one bucket, `models`."""
    pytest.importorskip("obstore", reason="NOT-RUN: obstore is not installed (extra: remote)")
    moto = pytest.importorskip("moto.server", reason="NOT-RUN: moto[server] is not installed")
    boto3 = pytest.importorskip("boto3", reason="NOT-RUN: boto3 is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "sigsecret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="models")
    yield client
    client.close()
    server.stop()
    assert threading.current_thread().is_alive()


def test_a_folder_of_a_bucket_is_the_folder(
    bucket: Any, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in demo_model.iterdir():
        if path.is_file():
            bucket.put_object(Bucket="models", Key=f"a/tiny/{path.name}", Body=path.read_bytes())
    here = command("inspect", demo_model, "--json").json
    for address in ("s3://models/a/tiny", "s3://models/a/tiny/model.safetensors"):
        forget()
        there = command("inspect", address, "--json")
        assert there.code == 0, there.err
        assert there.json["encodings"] == here["encodings"]
        assert there.json["remote"]["requests"] <= 8
    assert there.json["remote"]["bytes"] < 300_000
    forget()
    done = command("diff", demo_model, "s3://models/a/tiny")
    assert done.code == 0, done.err


def test_an_object_that_changes_is_an_error(bucket: Any) -> None:
    bucket.put_object(Bucket="models", Key="x.bin", Body=bytes(1 << 20))
    path = parse_location("s3://models/x.bin")
    from aprfmt.formats.mapped_file import open_bytes

    source = open_bytes(path)
    assert bytes(source.view[1 << 19 : (1 << 19) + 4]) == bytes(4)
    bucket.put_object(Bucket="models", Key="x.bin", Body=b"!" * (1 << 20))
    with pytest.raises(RemoteError, match="changed while it was read"):
        _ = source.view[900_000:900_004]


def test_an_environment_that_says_nonsense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", reason="NOT-RUN: obstore is not installed (extra: remote)")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sigsecret")
    done = command("inspect", "s3://nonsense/x.gguf")
    assert done.code == 2 and done.err.count("\n") == 1 and "bug" not in done.err
    assert "s3://nonsense: the environment does not say how to read it" in done.err
    assert "sigsecret" not in done.err


def test_an_object_or_a_bucket_that_is_not_there(bucket: Any) -> None:
    for address in ("s3://models/none.gguf", "s3://elsewhere/none.gguf"):
        done = command("inspect", address)
        assert "<" not in done.err
        assert done.code == 2 and done.err.count("\n") == 1 and "sigsecret" not in done.err


@pytest.mark.parametrize("address", ["s3://", "gs:///x", "az://../x", "s3://-/x"])
def test_an_address_without_a_bucket(address: str) -> None:
    with pytest.raises(UsageError):
        parse_location(address)


def test_buckets_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for scheme in ("s3", "gs", "az"):
        done = command("inspect", f"{scheme}://models/x.gguf")
        assert done.code == 2 and "pip install obstore" in done.err


def test_any_other_scheme_goes_through_fsspec(demo_model: Path) -> None:
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    files = fsspec.filesystem("memory")
    for path in demo_model.iterdir():
        if path.is_file():
            files.pipe_file(f"/tiny/{path.name}", path.read_bytes())
    with aprfmt.open("memory://tiny") as model, aprfmt.open(demo_model) as here:
        assert model.spec.name == here.spec.name
        assert bytes(model["model.norm.weight"].raw()) == bytes(here["model.norm.weight"].raw())
    done = command("inspect", "memory://none/x.gguf")
    assert done.code == 2 and "no such file" in done.err


def test_a_scheme_that_nobody_knows() -> None:
    pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    done = command("inspect", "gopher2://host/x.gguf")
    assert done.code == 2 and "gopher2" in done.err and "bug" not in done.err


def test_a_file_address_is_a_path(demo_model: Path) -> None:
    assert parse_location(f"file://{demo_model}") == demo_model
    assert parse_location(f"file://localhost{demo_model}") == demo_model
    assert parse_location(Path(f"file://{demo_model}")) == demo_model
    assert parse_location(os.fsencode(demo_model)) == demo_model


def test_a_file_that_no_file_system_has_is_said_whatever_is_asked_first() -> None:
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    files = fsspec.filesystem("memory")
    files.pipe_file("/first/here.bin", b"0123456789")
    site = FsspecSite(["memory:", "first"])
    facts, begin = site.first("here.bin")
    assert facts.size == 10 and begin == b"0123456789"
    assert site.facts("none.bin") is None and site.facts("") is None, "a folder is no file"
    for name in ("none.bin", ""):
        with pytest.raises(RemoteError, match=f"memory://first/?{name}.*no such file"):
            site.first(name)
    with pytest.raises(RemoteError, match=r"memory://first/none\.bin: cannot be read: "):
        site.fetch("none.bin", facts, 0, 4)
    with pytest.raises(RemoteError, match=r"memory://first/none\.bin: cannot be read: "):
        site.names("none.bin")
    with pytest.raises(RemoteError, match=r"here.bin: 10 bytes came of 0\.\.11; try again"):
        site.fetch("here.bin", facts, 0, 11)


def test_what_a_file_system_remembers_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fsspec's FTP does, this one takes facts from the listing it made first."""
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    memory = fsspec.filesystem("memory")

    class Remembering(type(memory)):  # type: ignore[misc]
        protocol = "remembering"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            plain: str = super()._strip_protocol(path.removeprefix("remembering:"))
            return plain

        def info(self, path: str, **options: Any) -> Any:
            if path not in self.dircache:
                self.dircache[path] = super().info(path, **options)
            return self.dircache[path]

        def invalidate_cache(self, path: str | None = None) -> None:
            self.dircache.clear()

    fsspec.register_implementation("remembering", Remembering, clobber=True)
    known = importlib.import_module("fsspec.registry").known_implementations
    monkeypatch.setitem(known, "remembering", {"class": "remembering"})
    site = FsspecSite(["remembering:", "asked"])
    for content in (b"one", b"three"):
        memory.pipe_file("/asked/x.bin", content)
        facts = site.facts("x.bin")
        assert facts is not None and facts.size == len(content)
    assert site.is_folder("") and not site.is_folder("x.bin")
    memory.rm("/asked/x.bin")
    assert site.facts("x.bin") is None and not site.is_folder("")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("gone", "no such|not found|404"), ("denied", "may not be read"), ("other", "changed while")],
)
def test_a_file_of_a_bucket_that_fails_after_its_first_bytes(
    wrong: str, says: str, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="NOT-RUN: obstore is not installed (extra: remote)")
    for name, value in {
        "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true",
        "AWS_SKIP_SIGNATURE": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    server.files["/models/x.bin"] = bytes(range(256)) * 40
    site = BucketSite(["s3:", "models"])
    facts, begin = site.first("x.bin")
    assert facts.size == 10240 and begin[:3] == b"\0\1\2"
    assert bytes(site.fetch("x.bin", facts, 5000, 5004)) == bytes([136, 137, 138, 139])
    if wrong == "gone":
        del server.files["/models/x.bin"]
    elif wrong == "denied":
        server.denied["/models/x.bin"] = 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
    else:
        server.files["/models/x.bin"] = b"!" * 10240
    with pytest.raises(RemoteError, match=f"s3://models/x.bin: .*({says})") as caught:
        site.fetch("x.bin", facts, 5000, 5004)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None


@pytest.mark.parametrize("folder", ["", "deep/er"])
def test_a_folder_of_any_file_system_lists_its_files_alone(folder: str) -> None:
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    files = fsspec.filesystem("memory")
    top = "/".join(["/listed", *folder.split("/")]).rstrip("/")
    names = ["a.gguf", "config.json", "ä b.bin"]
    for name in (*names, "sub/c.gguf", "sub/more/d.gguf"):
        files.pipe_file(f"{top}/{name}", b"x")
    site = FsspecSite(["memory:", "listed"])
    assert sorted(site.names(folder)) == sorted(names)
    inside = f"{folder}/sub".strip("/")
    assert site.names(inside) == ["c.gguf"]
    assert site.is_folder(inside) and not site.is_folder(f"{inside}/c.gguf")
    files.rm(top, recursive=True)
