"""Proxies that the environment names: through them what belongs through them, and nothing else.

Seen red: a proxy for this machine, a tunnel that is taken for the host's own answer, the token in a
request to the proxy, a redirect from a public name to one of the proxy's own network, a password in
a message, a connection kept for a host with and without proxy, an answer without an end.
"""

import itertools
import socket
import ssl
import threading
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from aprfmt.errors import RemoteError
from aprfmt.remote import client, proxies
from aprfmt.remote.address_policy import (
    POLICY,
    Reach,
    RequestTarget,
    check_connection,
    name_reach,
    parse_target,
)
from aprfmt.remote.timed_socket import ResponseLimits
from tests.cli.run import aprfmt as command
from tests.patience import PATIENCE
from tests.remote.server import RangeServer, serving

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
HOST = "elsewhere.example"
CERTIFICATE = Path(__file__).with_name("certificates") / f"{HOST}.pem"
FILE = "/many.safetensors"  # which takes several requests


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class ProxyServer:
    """Connects everybody who asks to one server; `answer` in its place is sent and closed."""

    def __init__(self, to: tuple[str, int]) -> None:
        self.to, self.heads, self.answer = to, list[bytes](), b""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                sock.settimeout(PATIENCE)
                self._open.append(sock)
                threading.Thread(target=self._one, args=(sock,), daemon=True).start()

    def _one(self, sock: socket.socket) -> None:
        head = b""
        with suppress(OSError):
            while not head.endswith(b"\r\n\r\n"):
                head += sock.recv(1)
            self.heads.append(head)
            if self.answer:
                sock.sendall(self.answer)
                sock.close()
                return
            there = socket.create_connection(self.to, PATIENCE)
            self._open.append(there)
            if head.startswith(b"CONNECT "):
                sock.sendall(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
            else:  # the absolute form, for the server as it has it (RFC 9112, 3.2.2)
                there.sendall(head.replace(b"http://" + HOST.encode() + b":80/", b"/", 1))
            threading.Thread(target=pipe, args=(there, sock), daemon=True).start()
            pipe(sock, there)

    def close(self) -> None:
        self._listening.close()
        for sock in self._open:
            sock.close()


def pipe(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


@pytest.fixture
def secure(made: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """A server of the name elsewhere.example, which only the proxy can find."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    client._tls_context.cache_clear()
    with serving() as found:
        found.socket = context.wrap_socket(found.socket, server_side=True)
        found.files[FILE] = made[FILE[1:]]
        yield found
    client._tls_context.cache_clear()


def nowhere(host: str, port: int) -> list[str]:
    """Resolve what lies here, and nothing else."""
    if host in ("127.0.0.1", "localhost"):
        return ["127.0.0.1"]
    raise socket.gaierror(-2, "Name or service not known")


@pytest.fixture
def proxy(secure: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyServer]:
    found = ProxyServer(("127.0.0.1", secure.server_address[1]))
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:s3cret@127.0.0.1:{found.port}")
    asked = client.Client(resolver=nowhere, wait=lambda seconds: None)
    monkeypatch.setattr(client, "CLIENT", asked)
    yield found
    asked.close()
    found.close()


ADDRESS = f"https://token:hf_secret@{HOST}{FILE}"
LOGIN = b"Proxy-Authorization: Basic " + b64encode(b"me:s3cret")


def test_https_goes_through_a_tunnel(
    proxy: ProxyServer, secure: RangeServer, made: Mapping[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "here.safetensors").write_bytes(made[FILE[1:]])
    done = command("diff", tmp_path / "here.safetensors", ADDRESS)
    assert done.code == 0, done.err
    assert "PROXY" not in done.err.upper() and "s3cret" not in done.out + done.err
    assert proxy.heads and all(head.startswith(b"CONNECT ") for head in proxy.heads)
    (head, *_) = proxy.heads
    assert head.startswith(f"CONNECT {HOST}:443 HTTP/1.1\r\n".encode()) and LOGIN in head
    assert b"\r\nAuthorization:" not in head  # which is the host's, within the tunnel
    for _, _, headers in secure.log:
        assert "proxy-authorization" not in headers and headers["host"] == HOST
        assert headers["authorization"].startswith("Basic ")
    assert len(proxy.heads) < len(secure.log), "a tunnel is kept as any connection is"


def test_http_is_asked_for_whole(
    server: RangeServer, made: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ProxyServer(("127.0.0.1", server.server_address[1]))
    server.files[FILE] = made[FILE[1:]]
    monkeypatch.setenv("http_proxy", f"me:s3cret@127.0.0.1:{found.port}")
    asked = client.Client(resolver=nowhere, wait=lambda seconds: None)
    monkeypatch.setattr(client, "CLIENT", asked)
    refused = command("inspect", f"http://{HOST}{FILE}")
    assert refused.code == 2 and "plain http" in refused.err and not found.heads
    done = command("inspect", f"http://{HOST}{FILE}", "--allow-http")
    assert done.code == 0, done.err
    assert found.heads[0].startswith(f"GET http://{HOST}:80{FILE} HTTP/1.1\r\n".encode())
    assert LOGIN in found.heads[0]
    asked.close()
    found.close()


def test_this_machine_is_asked_directly(
    server: RangeServer, made: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/x.gguf"] = made["small.gguf"]
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    done = command("inspect", f"{server.url}/x.gguf")
    assert done.code == 0, done.err


def test_a_host_that_is_excepted_is_asked_directly(
    secure: RangeServer, proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", f"other.example, .{HOST}")
    done = command("inspect", ADDRESS)
    assert done.code == 2 and "Name or service not known" in done.err and not proxy.heads


ANSWERS: Mapping[str, tuple[bytes, str, int]] = {
    "login": (b"HTTP/1.1 407 No\r\nProxy-Authenticate: Basic\r\n\r\n",
              "the proxy of HTTPS_PROXY answers 407: it wants to know who asks", 1),
    "denied": (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 4\r\n\r\nevil",
               "the proxy of HTTPS_PROXY answers 403 when it is to connect", 1),
    "redirect": (b"HTTP/1.1 302 x\r\nLocation: https://127.0.0.1/\r\n\r\n", "answers 302", 1),
    "later": (b"HTTP/1.1 503 x\r\n\r\n", "answers 503; it was asked through the proxy of", 5),
    "nothing": (b"HTTP/1.1 200", "the proxy closed the connection", 5),
    "not http": (b"220 mail.example ESMTP\r\n\r\n", "the proxy's answer is none of HTTP", 1),
    "not tls": (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
                "it was asked through the proxy of HTTPS_PROXY", 1),
    "endless": (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 300_000, "longer than 1048576 bytes", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_a_proxy_that_answers_otherwise_is_one_line(proxy: ProxyServer, name: str) -> None:
    proxy.answer, said, tries = ANSWERS[name]
    done = command("inspect", ADDRESS)
    assert done.code == 2 and said in done.err, done.err
    assert done.err.count("\n") == 1 and "bug" not in done.err and "s3cret" not in done.err
    assert len(proxy.heads) == tries


def test_a_proxy_that_says_nothing_has_a_deadline(
    proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = ResponseLimits(silence=0.05)
    asked = client.Client(resolver=nowhere, wait=lambda seconds: None, limits=limits)
    monkeypatch.setattr(client, "CLIENT", asked)
    monkeypatch.setattr(ProxyServer, "_one", lambda self, sock: None)
    done = command("inspect", ADDRESS)
    assert done.code == 2 and "no byte for 0 seconds; it was asked through" in done.err


@pytest.mark.parametrize(("text", "said"), [
    ("socks5://u:s3cret@p:1080", "names a proxy of the kind socks5, which is not read"),
    ("https://u:s3cret@p:1", "names a proxy of the kind https"),
    ("http://", "is no address of a proxy"), ("http://[::1", "is no address of a proxy"),
    ("http://p:x", "is no address of a proxy"),
])  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_named(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", text)
    done = command("inspect", ADDRESS)
    assert done.code == 2 and f"all_proxy: {said}" in done.err, done.err
    assert done.err.count("\n") == 1 and "s3cret" not in done.err


def test_the_proxy_itself_may_be_gone(proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    done = command("inspect", ADDRESS)
    assert done.code == 2 and "Connection refused; it was asked through the proxy of HT" in done.err


# --- who is asked -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_which_variable_counts_is_what_pythons_library_says(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: urllib.request, for every set of variables and some hosts."""
    values = {"https_proxy": "http://p:1", "HTTP_PROXY": "http://p:2", "all_proxy": "http://p:3",
              "NO_PROXY": ".b.example,c.example,d.example:443"}  # fmt: skip
    hosts = ("a.example", "b.example", "x.b.example", "xb.example", "c.example", "d.example", "::1")
    for count in range(len(values) + 1):
        for names in itertools.combinations(values, count):
            for name in values:
                monkeypatch.delenv(name, raising=False)
            for name in names:
                monkeypatch.setenv(name, values[name])
            known = urllib.request.getproxies_environment()
            for host, port in itertools.product(hosts, (443, 80)):
                spelled = host if ":" in host else f"{host}:{port}"
                bypass: Callable[[str], bool] = urllib.request.proxy_bypass_environment  # type: ignore[attr-defined]
                named = known.get(scheme) or known.get("all")
                expected = None if named is None or bypass(spelled) else named
                found = proxies.find_proxy(scheme, host, port)
                assert (f"http://p:{found.port}" if found else None) == expected
    monkeypatch.setenv("NO_PROXY", "*")
    assert proxies.find_proxy(scheme, "a.example", 443) is None


@pytest.mark.parametrize(("host", "direct"), [
    ("10.1.2.3", True), ("11.1.2.3", False), ("fd00::7", True), ("a.example", False),
])  # fmt: skip
def test_networks_are_excepted(host: str, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "p:1")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8,fd00::/8,a/b,300.0.0.0/8")
    assert (proxies.find_proxy("https", host, 443) is None) == direct


@pytest.mark.parametrize(("host", "reach"), [
    ("huggingface.co", Reach.PUBLIC), ("a.b.example", Reach.PUBLIC), ("printer", Reach.PRIVATE),
    ("x.local", Reach.PRIVATE), ("X.LOCALHOST.", Reach.PRIVATE), ("h.home.arpa", Reach.PRIVATE),
    ("vault.internal", Reach.PRIVATE), ("notlocal", Reach.PRIVATE), ("a.xlocal", Reach.PUBLIC),
    ("metadata.google.internal", Reach.METADATA), ("metadata", Reach.METADATA),
])  # fmt: skip
def test_a_name_that_only_the_proxy_knows_is_judged_by_itself(host: str, reach: Reach) -> None:
    assert name_reach(host) == reach


def target(url: str) -> RequestTarget:
    return parse_target(url, "x")


def test_a_redirect_leads_no_nearer_through_a_proxy_either() -> None:
    public = target("https://a.example/"), ()
    check_connection(target("https://b.example/"), (), public, "x")
    check_connection(target("https://box.corp/"), (), None, "x")  # the user's own wish
    check_connection(target("https://box.corp/"), (), (target("https://a.corp/"), ()), "x")
    for host in ("box.corp", "printer", "metadata.google.internal"):
        with pytest.raises(RemoteError, match="redirected from a public address"):
            check_connection(target(f"https://{host}/"), (), public, "x")
    with pytest.raises(RemoteError, match="metadata service"):
        check_connection(target("https://metadata.google.internal/"), (), None, "x")
    with pytest.raises(RemoteError, match="redirected from a public address"):
        check_connection(target("https://b.example/"), ("10.0.0.1",), public, "x")
    with pytest.raises(RemoteError, match="plain http"):
        check_connection(target("http://b.example/"), (), None, "x")
    assert not POLICY.plain_http
