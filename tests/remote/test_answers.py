"""What a server must answer, and where it may lead: everything else is an error of one line."""

import random
import time
from collections.abc import Mapping

import pytest

import aprfmt
from aprfmt.errors import RemoteError, UnsupportedError
from aprfmt.remote import client
from aprfmt.remote.paths import RemotePath, parse_location
from aprfmt.remote.remote_file import RemoteFile
from aprfmt.remote.traffic import TRAFFIC
from tests.cli.run import aprfmt as command
from tests.remote.server import RangeServer

# --- what an answer must say --------------------------------------------------------------------


def fetched(server: RangeServer, *faults: str, later: bool = True) -> bytes:
    """Return 1 MiB read from a file after faults; `later`: they come after the first answer."""
    data = random.Random(0).randbytes(3 << 20)
    server.files["/x.gguf"] = data
    if not later:
        server.faults["/x.gguf"] = list(faults)
    source = RemoteFile(RemotePath("http:", f"127.0.0.1:{server.server_address[1]}", "x.gguf"))
    server.faults["/x.gguf"] = server.faults.get("/x.gguf", []) or list(faults if later else ())
    found = bytes(source.view[1 << 20 : 2 << 20])
    assert found == data[1 << 20 : 2 << 20]
    return found


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fault", ["500", "cut", "reset"])
def test_what_may_pass_is_asked_for_again(
    server: RangeServer, waits: list[float], fault: str, later: bool
) -> None:
    fetched(server, fault, fault, later=later)
    assert len(server.log) == 4
    assert len(waits) == 2 or fault == "reset"  # a kept connection may be closed at any time


def test_retry_after_is_honoured(server: RangeServer, waits: list[float]) -> None:
    fetched(server, "429")
    assert waits == [7.0]


def test_a_wait_without_end_is_an_error(server: RangeServer, waits: list[float]) -> None:
    server.files["/x.gguf"] = b"GGUF"
    server.denied["/x.gguf"] = 503, {"Retry-After": "86400"}, b""
    with pytest.raises(RemoteError, match="asks to wait 86400 s"):
        aprfmt.open(f"{server.url}/x.gguf")
    assert not waits


def test_attempts_end(server: RangeServer, waits: list[float]) -> None:
    with pytest.raises(RemoteError, match="the server answers 500"):
        fetched(server, *["500"] * 9, later=False)
    assert len(waits) == client.ATTEMPTS - 1 == len(server.log) - 1
    assert all(0.2 * 2**i <= wait < 0.3 * 2**i for i, wait in enumerate(waits))


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("fault", "said"), [
    ("whole", "whole files only"), ("shifted", "Content-Range"), ("short", "Content-Range"),
    ("gzip", "sent as gzip"),
])  # fmt: skip
def test_an_answer_to_another_question_is_refused(
    server: RangeServer, waits: list[float], fault: str, said: str, later: bool
) -> None:
    with pytest.raises(RemoteError, match=said):
        fetched(server, fault, later=later)
    assert not waits and len(server.log) == 1 + later


def test_what_a_server_says_is_shown_short_and_escaped(server: RangeServer) -> None:
    server.files["/x.gguf"] = bytes(100)
    server.faults["/x.gguf"] = ["long"]
    done = command("inspect", f"{server.url}/x.gguf")
    assert done.code == 2 and "Content-Range is" in done.err
    assert len(done.err) < 400 and "\x1b" not in done.err


def test_a_whole_file_is_refused_before_it_streams(server: RangeServer) -> None:
    server.files["/x.gguf"] = bytes(64 << 20)
    server.faults["/x.gguf"] = ["whole"]
    with pytest.raises(RemoteError, match="whole files only"):
        aprfmt.open(f"{server.url}/x.gguf")
    assert TRAFFIC.received == 0


@pytest.mark.parametrize(
    ("fault", "said"), [("tag", "its ETag"), ("untagged", "its ETag"), ("grown", "its size")]
)
def test_a_file_that_changes_is_an_error(
    server: RangeServer, waits: list[float], fault: str, said: str
) -> None:
    with pytest.raises(RemoteError, match=rf"changed while it was read \({said}"):
        fetched(server, fault)


def test_a_missing_file_and_an_empty_one_are_told_apart(server: RangeServer) -> None:
    server.files["/empty.gguf"] = b""
    done = command("inspect", f"{server.url}/none.gguf")
    assert done.code == 2 and "no such file" in done.err and len(server.log) == 1
    done = command("inspect", f"{server.url}/empty.gguf")
    assert done.code == 2 and "is an empty file" in done.err


def test_a_local_file_is_asked_for_where_only_that_will_do(server: RangeServer) -> None:
    server.files["/x.gguf"] = b"GGUF"
    with pytest.raises(UnsupportedError, match="needs a file on this machine"):
        parse_location(f"{server.url}/x.gguf").read_bytes()


# --- redirects and schemes ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_ranges_go_to_the_last_address_of_a_redirect(
    status: int, server: RangeServer, made: Mapping[str, bytes]
) -> None:
    server.redirect = status
    server.files["/cdn/abc"] = made["many.safetensors"]
    server.moved["/m.safetensors"] = "/cdn/abc?Signature=sigsecret"
    done = command("inspect", f"{server.url}/m.safetensors", "--json")
    assert done.code == 0
    assert len(server.asked("/m.safetensors")) == 1 and len(server.asked("/cdn/abc")) == 2
    assert "sigsecret" not in done.out + done.err


def test_endless_redirects_end(server: RangeServer) -> None:
    server.moved["/a"], server.moved["/b"] = "/b", "/a"
    with pytest.raises(RemoteError, match="redirected more than 10 times"):
        aprfmt.open(f"{server.url}/a")
    assert len(server.log) == 11


def connecting(server: RangeServer, hosts: Mapping[str, str]) -> client.Client:
    """Return a client for which hosts have these addresses, and which asks our server always."""
    return client.Client(
        resolver=lambda host, port: [hosts.get(host, host)],
        dialer=lambda address, port: client.dial("127.0.0.1", server.server_address[1]),
    )


PUBLIC = {"public.example": "93.184.216.34", "other.example": "93.184.216.35",
          "inside.example": "10.0.0.7", "meta.example": "169.254.169.254"}  # fmt: skip


@pytest.mark.parametrize(("to", "said"), [
    ("http://inside.example/y", "from a public address to a private one"),
    ("http://meta.example/y", "from a public address to one of a metadata service"),
    ("http://127.0.0.1/y", "from a public address to one of this machine"),
    ("http://[::1", "leads to no whole address"), ("http://[zz]/y", "leads to no whole address"),
    (f"http://{'a' * 64}/y", "is no name of a host"),
    (f"http://{'a.' * 127}/y", "is no name of a host"),
    ("http://a..b/y", "is no name of a host"), ("http://[fe80::1%25lo]/y", "is no name of a host"),
    ("https://other.example/y", "redirected from http to https"),
    ("ftp://other.example/y", "a ftp address"), ("file:///etc/passwd", "a file address"),
])  # fmt: skip
def test_a_redirect_that_must_not_be_followed(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, to: str, said: str
) -> None:
    monkeypatch.setattr(client, "CLIENT", connecting(server, PUBLIC))
    monkeypatch.setattr("aprfmt.remote.address_policy.POLICY.plain_http", True)
    server.moved["/x"] = to
    server.files["/y"] = b"GGUF" + bytes(64)
    with pytest.raises(RemoteError, match=said):
        aprfmt.open("http://public.example/x")
    assert [path for path, _, _ in server.log] == ["/x"]


def test_a_redirect_between_public_addresses_is_followed_without_the_password(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, made: Mapping[str, bytes]
) -> None:
    monkeypatch.setattr(client, "CLIENT", connecting(server, PUBLIC))
    server.moved["/x"] = "http://other.example/y"
    server.files["/y"] = made["small.gguf"]
    done = command(
        "inspect", "http://me:secret@public.example/x?key=private", "--json", "--allow-http"
    )
    assert done.code == 0, done.err
    (first, _, told), (_, _, silent) = server.log
    assert first == "/x?key=private" and told["authorization"].startswith("Basic ")
    assert "authorization" not in silent
    assert not {"secret", "private"} & set(str(done.json).replace("=", " ").split())
    assert "secret" not in done.out + done.err and "private" not in done.out + done.err


def test_plain_http_needs_a_loopback_address_or_the_option(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CLIENT", connecting(server, PUBLIC))
    done = command("inspect", "http://public.example/x")
    assert done.code == 2 and "--allow-http" in done.err and not server.log


@pytest.mark.parametrize("address", ["https://", "http:///x", "https://host/../x"])
def test_an_address_that_is_none(address: str) -> None:
    done = command("inspect", address)
    assert done.code == 2 and "Traceback" not in done.err and "bug" not in done.err


def test_an_unreachable_host_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: int) -> list[str]:
        import socket

        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(client, "CLIENT", client.Client(resolver=unknown))
    done = command("inspect", "https://nowhere.invalid/x.gguf")
    assert done.code == 2
    assert done.err.strip() == (
        "aprfmt: https://nowhere.invalid/x.gguf: cannot be read: Name or service not known; "
        "try again later, or check the address"
    )


@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%c"])
def test_a_wait_until_a_date_is_honoured(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three forms of a date that RFC 9110 has; each says UTC."""
    now = 1_700_000_000.0
    monkeypatch.setattr("aprfmt.remote.client.time.time", lambda: now)

    def wait(ahead: float) -> float:
        text = time.strftime(form, time.gmtime(now + ahead))
        return client._retry_after({"retry-after": text}, 3.0, "http://h/x")

    assert [wait(ahead) for ahead in (20, 1, 0, -500)] == [20.0, 1.0, 0.05, 0.05]
    assert wait(client.LONGEST) == client.LONGEST
    with pytest.raises(RemoteError, match=f"asks to wait {client.LONGEST + 1:.0f} s"):
        wait(client.LONGEST + 1)


@pytest.mark.parametrize("text", ["", "soon", "-7", "1e3", "Sun, 99 Abc 2023 00:00:00 GMT"])
def test_a_wait_that_is_none_is_our_own(text: str) -> None:
    assert client._retry_after({"retry-after": text}, 3.0, "http://h/x") == 3.0
    assert client._retry_after({}, 3.0, "http://h/x") == 3.0
