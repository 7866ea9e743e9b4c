"""What an address may be: one line for each that is none.

Seen red: an address whose host is empty, read as if its folder were the host; `ftp://` and other
schemes of fsspec that need a host, brackets without their pair, labels of hosts that IDNA refuses,
a token with characters that no header holds.
"""

from pathlib import Path

import pytest
from huggingface_hub import constants

from aprfmt.errors import RemoteError, UsageError
from aprfmt.remote import client, fsspec_sites
from tests.cli.run import aprfmt as command
from tests.remote.server import RangeServer

LABEL = "a" * 64


@pytest.mark.parametrize(("address", "said"), [
    ("http://[::1", "is no address; expected https://HOST/FILE"),
    ("https://[::1/x", "is no address"), ("http://[zz]/x", "is no address"),
    ("http://]/x", "is no address"), ("https://h:99999/x", "is no address"),
    ("https://h:abc/x", "is no address"), (f"https://{LABEL}/x", "is no name of a host"),
    (f"https://{'a.' * 150}com/x", "is no name of a host"), ("https://a..b/x", "no name of a host"),
    ("http://[fe80::1%25eth0]/x", "is no name of a host"), ("http://a%b/x", "no name of a host"),
    ("https://\u00fc.example/x", "characters beyond ASCII"), ("http://u:s3cret@[::1", "no address"),
    ("https://u:s3cret@h:x/y?sig=s3cret", "is no address"), ("https://:80/x", "leads to no whole"),
    ("https://h:0/x", "is no address"), ("http://[::1]h/x", "is no address"),
    ("file://h/x.gguf", "names the machine 'h'; expected file:///PATH"),
    ("foo://h/x", "no file system of fsspec has that name; expected https://"),
    ("magnet://x/y", "no file system of fsspec has that name"),
    ("memory://a::file:///etc/passwd", "names no file"), ("ftp://u:s3cret@h/x", "are not taken"),
    ("ftp://127.0.0.1:1/x.gguf", "ftp:// cannot be read: "),
    ("reference://a/b", "reference:// cannot be read: "),
    ("simplecache://a/b", "simplecache:// cannot be read: "),
    ("github://a/b", "github:// cannot be read: "), ("jupyter://a/b", "jupyter:// cannot be read"),
    ("memory://nothing/here.gguf", "no such file"),
    ("s3:///x", "names no bucket between"), ("gs:///a/b.gguf", "names no bucket between"),
    ("az:////a/b", "names no bucket between"), ("hf:///owner/name", "names no owner between"),
    ("https:///host/x.gguf", "names no host between"), ("HTTP:///x", "names no host between"),
])  # fmt: skip
def test_an_address_that_cannot_be_read_is_one_line(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")

    def nobody(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    monkeypatch.setattr(client, "CLIENT", client.Client(resolver=nobody))
    done = command("inspect", address)
    assert done.code == 2 and said in done.err, done.err
    assert done.err.count("\n") == 1 and "bug" not in done.err and "s3cret" not in done.err
    assert len(done.err) < 600


def test_every_file_system_of_fsspec_is_read_or_refused_in_one_line() -> None:
    """At a host that refuses connections; those that would ask for a file here are left out."""
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    asked = {"ftp", "sftp", "ssh", "webhdfs", "dask", "git", "github", "zip", "tar", "dir",
             "cached", "blockcache", "filecache", "reference", "generic", "abfs"}  # fmt: skip
    for scheme in sorted(asked & set(fsspec.available_protocols())):
        done = command("inspect", f"{scheme}://127.0.0.1:1/x.gguf")
        assert done.code == 2 and done.err.count("\n") == 1 and "bug" not in done.err, done.err


@pytest.mark.parametrize("token", ["hf_\u00fc", "hf_a\nX-Evil: b", "hf_\x00"])
def test_a_token_that_is_none_is_named_by_its_place(
    token: str, server: RangeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    if "\x00" not in token:
        monkeypatch.setenv("HF_TOKEN", token)
        place = "HF_TOKEN"
    else:
        path = tmp_path / "token"
        path.write_text(token)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
        place = str(path)
    done = command("inspect", "hf://someone/m")
    assert done.code == 2 and f"the token of {place} holds characters" in done.err
    assert done.err.count("\n") == 1 and "hf_" not in done.err.replace(place, "")
    assert not server.log


def test_an_address_of_a_host_that_is_none_never_reaches_a_resolver() -> None:
    with pytest.raises(RemoteError, match="is no name of a host"):
        client.CLIENT.get(f"https://{LABEL}/x", "W", {}, lambda status, headers: 0)


@pytest.mark.parametrize("address", ["nowhere://a/b", "nowhere://a/b/c.gguf"])
def test_an_unknown_file_system_is_refused_with_its_address(address: str) -> None:
    """Already where the address is taken apart: no site is made of it."""
    pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    with pytest.raises(
        UsageError, match=r"^nowhere://a: nowhere:// cannot be read: no file system"
    ):
        fsspec_sites._parse_address(address)
    assert fsspec_sites._parse_address("memory://a/b//c") == ["memory:", "a", "b", "c"]
