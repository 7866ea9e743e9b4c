"""https with certificates of our own making: read where they are trusted, one line where not.

certificates/NAME.pem: a key and a certificate that it signs itself, made by
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500
-subj /CN=NAME -addext subjectAltName=DNS:NAME.
"""

import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aprfmt.remote import client
from tests.cli.run import aprfmt
from tests.remote.server import RangeServer, serving

KNOWN = Path(__file__).with_name("certificates")
FILE = "/small.safetensors"


@pytest.fixture(params=["localhost"])
def secure(
    request: pytest.FixtureRequest, made: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RangeServer]:
    """A server with the certificate of the name in `param`; nothing of ours is trusted yet."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(KNOWN / f"{request.param}.pem")
    client._tls_context.cache_clear()
    with serving() as found:
        found.socket = context.wrap_socket(found.socket, server_side=True)
        found.files[FILE] = made[FILE[1:]]
        yield found
    client._tls_context.cache_clear()


def address(server: RangeServer) -> str:
    """Return the file's address by the name that the certificate is for."""
    return f"https://localhost:{server.server_address[1]}{FILE}"


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_a_certificate_that_the_user_trusts(
    secure: RangeServer, variable: str, made: Mapping[str, bytes], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv(variable, str(KNOWN / "localhost.pem"))
    (tmp_path / "here.safetensors").write_bytes(made[FILE[1:]])
    done = aprfmt("diff", tmp_path / "here.safetensors", address(secure))
    assert done.code == 0, done.err


def test_a_certificate_of_nobody_known_is_refused_at_once(secure: RangeServer) -> None:
    done = aprfmt("inspect", address(secure).replace("https://", "https://me:s3cret@"))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert "certificate is refused: self-signed certificate; name the file" in done.err
    assert "SSL_CERT_FILE" in done.err and "s3cret" not in done.err
    assert not secure.log


@pytest.mark.parametrize("secure", ["elsewhere.example"], indirect=True)
def test_a_certificate_of_another_name_is_refused(
    secure: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(KNOWN / "elsewhere.example.pem"))
    done = aprfmt("inspect", address(secure))
    assert done.code == 2 and "not valid for 'localhost'" in done.err and not secure.log


def test_a_bundle_that_is_none_is_named(
    secure: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundle.pem").write_text("no certificate")
    for path in (tmp_path / "bundle.pem", tmp_path / "none.pem"):
        client._tls_context.cache_clear()
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(path))
        done = aprfmt("inspect", address(secure))
        assert done.code == 2 and done.err.count("\n") == 1, done.err
        assert f"REQUESTS_CA_BUNDLE: {path}: cannot be read as certificates" in done.err


def hang_up(server: RangeServer, times: int) -> list[int]:
    """Let the server end the first connections while they are being made; return which it did."""
    real, ended = server.get_request, list[int]()

    def accept() -> Any:
        if len(ended) == times:
            return real()
        connection, (_, port) = socket.socket.accept(server.socket)
        ended.append(port)
        connection.recv(1 << 16)  # what the client says first
        connection.close()
        raise OSError("hung up")

    server.get_request = accept  # type: ignore[method-assign]
    return ended


def test_a_connection_lost_while_it_is_made_is_made_again(
    secure: RangeServer, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(KNOWN / "localhost.pem"))
    ended = hang_up(secure, 2)
    done = aprfmt("hash", address(secure), "--json")
    assert done.code == 0, done.err
    assert len(ended) == len(waits) == 2 and waits[1] > waits[0]


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_an_answer_that_is_lost_is_asked_for_again(
    secure: RangeServer, monkeypatch: pytest.MonkeyPatch, waits: list[float], fault: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(KNOWN / "localhost.pem"))
    secure.faults[FILE] = [fault]
    done = aprfmt("inspect", address(secure))
    assert done.code == 0, done.err
    assert len(secure.asked(FILE)) == 2 and len(waits) == 1


def test_a_server_that_always_hangs_up_is_one_line(
    secure: RangeServer, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(KNOWN / "localhost.pem"))
    ended = hang_up(secure, 99)
    done = aprfmt("inspect", address(secure))
    assert done.code == 2 and done.err.count("\n") == 1, done.err
    assert "cannot be read" in done.err and len(ended) == client.ATTEMPTS
    assert len(waits) == client.ATTEMPTS - 1
