"""An HTTP/1.1 client with the checks that reading a model by range needs.

Connections are reused. Redirects are followed here, one checked step at a time, and the connection
goes to the very address that was checked. A refused answer is never read: its connection is closed.
How long an answer may take is in `timed_socket`, how its body is read in `response_body`.
"""

import atexit
import hashlib
import http.client
import os
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from functools import cache
from typing import cast
from urllib.parse import urljoin

from aprfmt.base.text_escape import shorten
from aprfmt.base.version import __version__
from aprfmt.errors import AprfmtError, RemoteError
from aprfmt.remote import address_policy, proxies
from aprfmt.remote.address_policy import RequestTarget
from aprfmt.remote.proxies import Proxy
from aprfmt.remote.response_body import ResponseBody, content_length
from aprfmt.remote.timed_socket import LIMITS, BadAnswer, ResponseLimits, TimedSocket
from aprfmt.remote.traffic import TRAFFIC

ATTEMPTS = 5
MAX_STEPS = 10  # redirects
MAX_ADDRESSES = 8  # of one host, that are tried
LONGEST = 60.0  # seconds a server may ask to wait
_MOVED = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429, 500, 502, 503, 504)
_DRAINED = 64 << 10  # bytes of an answer without interest that are read to keep its connection
_PIECE = 1 << 20  # bytes of a body at a time, where only its digest is wanted
_SINGLE = ("content-length", "content-range", "etag", "location", "transfer-encoding")

Headers = Mapping[str, str]


_BUNDLE = "REQUESTS_CA_BUNDLE"  # as the requests library and curl's users name a file
_FINAL = (socket.gaierror, ConnectionRefusedError, ssl.SSLError)  # nothing that passes
_HUNG_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # but for a connection that was lost


class ConnectionCut(Exception):
    """Raised where an answer or its connection ends early; worth another attempt."""


@dataclass
class Response:
    """A status, headers by lower-case name, the body, and the address after all redirects.

    Where only the digest was asked for, `body` is empty, and `sha256` is that of the whole body.
    """

    status: int
    headers: Headers
    body: memoryview
    url: str
    sha256: str = ""


# How many bytes of an answer to read, by (status, headers); raises to refuse it unread. -N: all of
# them, where the answer does not say how many, and at most N.
Wanted = Callable[[int, Headers], int]


@dataclass
class _Reply:
    """An answer whose body has not been read yet, with its connection."""

    to: RequestTarget
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse
    headers: Headers
    body: ResponseBody
    addresses: Sequence[str]
    proxy: Proxy | None
    closed: int  # how often the client had been closed when it was sent


def dial(address: str, port: int) -> socket.socket:
    """Return a socket connected to an IP address."""
    sock = socket.create_connection((address, port), LIMITS.silence)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context with trusted certificates, made once.

    They are those of the system, of SSL_CERT_FILE and of REQUESTS_CA_BUNDLE. Raises RemoteError
    where the last cannot be read.
    """
    context, bundle = ssl.create_default_context(), os.environ.get(_BUNDLE, "")
    try:
        if bundle:
            folder = os.path.isdir(bundle)
            context.load_verify_locations(*((None, bundle) if folder else (bundle, None)))
    except OSError as error:
        raise RemoteError(
            f"{_BUNDLE}: {bundle}: cannot be read as certificates: {_error_text(error, LIMITS)}"
        ) from None
    return context


@dataclass
class Client:
    """An HTTP client that reuses connections, follows redirects and tries again.

    `resolver`, `dialer`, `wait`, `clock` and `limits` are what tests replace.
    """

    resolver: address_policy.Resolver = address_policy.resolve_host
    dialer: Callable[[str, int], socket.socket] = dial
    wait: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    limits: ResponseLimits = LIMITS
    _idle: dict[tuple[tuple[str, str, int], Proxy | None], list[http.client.HTTPConnection]] = (
        field(default_factory=dict)
    )
    _known: dict[tuple[str, int], Sequence[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: int = 0  # how often

    def get(
        self, url: str, where: str, headers: Headers, wanted: Wanted, hashed: bool = False
    ) -> Response:
        """Return the answer to a GET request; `where` begins messages.

        `wanted(status, headers)` returns how many bytes of the body to read; -N is for a body of
        unknown length, of which at most N are read. Answers that may change (429, 500, a cut body)
        are asked for again, after as long as the server says. `hashed` returns the digest of the
        body instead of its bytes. Raises RemoteError.
        """
        why = ""
        # Errors that another attempt would not change are raised; others are tried again.
        for attempt in range(ATTEMPTS):
            try:
                answer = self._follow_redirects(url, where, headers, wanted, hashed)
            except AprfmtError:
                raise
            except BadAnswer as error:
                raise RemoteError(f"{where}: cannot be read: {error}; check the address") from None
            except (ConnectionCut, OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise RemoteError(
                        f"{where}: the server's certificate is refused: {error.verify_message}; "
                        f"name the file of an authority of your own by SSL_CERT_FILE or {_BUNDLE}"
                    ) from None
                why = _error_text(error, self.limits)
                if isinstance(error, _FINAL) and not isinstance(error, _HUNG_UP):
                    break
                pause = _backoff(attempt)
            else:
                if answer.status not in _LATER:
                    return answer
                why = f"the server answers {answer.status}"
                pause = _retry_after(answer.headers, _backoff(attempt), where)
            if attempt + 1 < ATTEMPTS:
                self.wait(pause)
        through = self._proxy_text(address_policy.parse_target(url, where))
        raise RemoteError(
            f"{where}: cannot be read: {why}; {through}try again later, or check the address"
        )

    def close(self) -> None:
        """Close the idle connections; those in use are closed when their answer is read."""
        with self._lock:
            self._closed += 1
            idle = [one for row in self._idle.values() for one in row]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _follow_redirects(
        self, url: str, where: str, headers: Headers, wanted: Wanted, hashed: bool
    ) -> Response:
        """Return the answer to one request after all redirects; RemoteError for too many of them.

        A token is not sent to another server. `wanted(status, headers)` returns how many bytes of
        the body to read, -N for at most N of a body of unknown length. With `hashed` the answer has
        the digest of the body instead of its bytes. `where` begins messages.
        """
        before: tuple[RequestTarget, Sequence[str]] | None = None
        sent = dict(headers)
        for _ in range(MAX_STEPS + 1):
            to = address_policy.parse_target(url, where)
            if before is not None and before[0].server != to.server:
                sent.pop("Authorization", None)  # a token is for the host it was given for
            with TRAFFIC.request():
                reply = self._send_request(to, before, where, sent)
                try:
                    if reply.response.status not in _MOVED:
                        return self._read_response(reply, url, wanted, hashed)
                    location = reply.headers.get("location", "")
                    if not location:
                        raise RemoteError(f"{where}: is redirected without saying where to")
                    _read_exactly(reply, _drain_size(reply))
                    self._release(reply)
                except BaseException:
                    reply.connection.close()
                    raise
            before = to, reply.addresses
            url = _redirect_url(url, location)
        raise RemoteError(f"{where}: is redirected more than {MAX_STEPS} times; check the address")

    def _read_response(self, reply: _Reply, url: str, wanted: Wanted, hashed: bool) -> Response:
        """Return the answer with its body or digest, and release the connection.

        `wanted(status, headers)` returns how many bytes of the body to read, -N for at most N of a
        body of unknown length. With `hashed` the answer has the digest of the body instead of its
        bytes.
        """
        status = reply.response.status
        size = _drain_size(reply)
        if status not in _LATER:
            size = wanted(status, reply.headers)
            if hashed:
                digest = _hash_body(reply, size)
                self._release(reply)
                return Response(status, reply.headers, memoryview(b""), url, digest)
        body: bytes | bytearray = (
            _read_exactly(reply, size) if size >= 0 else _read_unsized(reply, -size)
        )
        self._release(reply)
        return Response(status, reply.headers, memoryview(body).toreadonly(), url)

    def _send_request(
        self,
        to: RequestTarget,
        before: tuple[RequestTarget, Sequence[str]] | None,
        where: str,
        sent: Headers,
    ) -> _Reply:
        """Return the answer to a request whose body is unread, on an idle or a new connection.

        `before` is the target that redirected here, and `sent` are the headers. An idle connection
        that the server has closed meanwhile is replaced once. Raises RemoteError where the
        connection is not allowed, ConnectionCut where it was closed twice. `where` begins messages.
        """
        proxy, addresses = self._find_route(to)
        line, sent = to.line, {"Accept-Encoding": "identity", **_OURS, **sent}
        if proxy is not None and to.scheme == "http":  # RFC 9112, 3.2.2: the proxy takes it apart
            line = f"http://{to.authority}{to.line}"
            sent |= {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        address_policy.check_connection(to, addresses, before, where)
        closed = self._closed
        for _ in range(2):
            idle = self._take_idle(to, proxy)
            connection = idle or self._connect(to, addresses, proxy, where)
            timed = cast(TimedSocket, connection.sock)
            try:
                timed.begin()
                connection.putrequest("GET", line, skip_accept_encoding=True)
                for name, value in sent.items():
                    connection.putheader(name, value)
                connection.endheaders()
                response = connection.getresponse()
                timed.begin_body()
                found = _unique_headers(response)
                body = ResponseBody(response, found)
            except (ConnectionError, http.client.RemoteDisconnected, BrokenPipeError):
                connection.close()
                if idle is None:
                    raise
                continue  # it had been closed meanwhile: once more, on a new one
            except BaseException:
                connection.close()
                raise
            return _Reply(to, connection, response, found, body, addresses, proxy, closed)
        raise ConnectionCut("kept connections were closed")

    def _resolve_once(self, to: RequestTarget) -> Sequence[str]:
        """Return the IP addresses of a target's host, resolved once by this client.

        A name that changes its address could otherwise pass the checks and then lead elsewhere.
        """
        key = to.host, to.port
        with self._lock:
            if key in self._known:
                return self._known[key]
        found = self.resolver(*key)
        with self._lock:
            return self._known.setdefault(key, found)

    def _find_route(self, to: RequestTarget) -> tuple[Proxy | None, Sequence[str]]:
        """Return (the proxy for a target or None, the IP addresses of its host).

        This machine is reached directly. The addresses of a host that only the proxy can resolve
        are empty.
        """
        proxy = proxies.find_proxy(to.scheme, to.host, to.port)
        try:
            addresses = self._resolve_once(to)
        except OSError:
            if proxy is None:
                raise
            with self._lock:
                return proxy, self._known.setdefault((to.host, to.port), ())
        here = bool(addresses) and all(map(address_policy.is_loopback, addresses))
        return (None if here else proxy), addresses

    def _proxy_text(self, to: RequestTarget) -> str:
        """Return which proxy a request went through, for a message; "" for none."""
        try:
            proxy = self._find_route(to)[0]
        except OSError:
            return ""
        return f"it was asked through the proxy of {proxy.variable}; " if proxy else ""

    def _take_idle(
        self, to: RequestTarget, proxy: Proxy | None
    ) -> http.client.HTTPConnection | None:
        """Return an idle connection to a server, taken out of the pool; None without one."""
        with self._lock:
            idle = self._idle.get((to.server, proxy))
            return idle.pop() if idle else None

    def _connect(
        self, to: RequestTarget, addresses: Sequence[str], proxy: Proxy | None, where: str
    ) -> http.client.HTTPConnection:
        """Return a new connection to a target, with TLS and through the proxy where needed.

        `where` begins messages.
        """
        context = _tls_context() if to.scheme == "https" else None
        if proxy is None:
            sock = self._dial_first(addresses, to.port)
        else:
            sock = self._dial_first(self.resolver(proxy.host, proxy.port), proxy.port)
            if context is not None:
                self._open_tunnel(sock, to, proxy, where)
        if context is not None:
            sock = _wrap_tls(sock, context, to.host)
        connection = http.client.HTTPConnection(to.host, to.port)
        if to.port == address_policy.PORTS[to.scheme]:
            connection.default_port = to.port
        connection.sock = TimedSocket(sock, self.limits, self.clock)
        return connection

    def _dial_first(self, addresses: Sequence[str], port: int) -> socket.socket:
        """Return a socket to the first of the addresses that answers; raises OSError for none."""
        error: OSError | None = None
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return self.dialer(address, port)
            except OSError as failed:
                error = failed
        raise error or OSError("the host has no address")

    def _open_tunnel(
        self, sock: socket.socket, to: RequestTarget, proxy: Proxy, where: str
    ) -> None:
        """Have a proxy connect `sock` to a host by CONNECT (RFC 9110, 9.3.6).

        What is received afterwards comes from that host. Raises RemoteError where the proxy
        refuses, BadAnswer or ConnectionCut for its answer. `where` begins messages.
        """
        sent = {"Host": to.authority, **_OURS}
        sent |= {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        try:
            timed = TimedSocket(sock, self.limits, self.clock)
            timed.sendall(f"CONNECT {to.authority} HTTP/1.1\r\n{head}\r\n".encode("ascii"))
            status = _read_tunnel_status(timed)
            reply = f"the proxy of {proxy.variable} answers {status}"
            if status == 407:
                raise RemoteError(
                    f"{where}: cannot be read: {reply}: it wants to know who asks; set "
                    f"{proxy.variable} to http://NAME:PASSWORD@HOST:PORT"
                )
            if status in _LATER:
                raise ConnectionCut(reply)
            if not 200 <= status < 300:
                raise RemoteError(
                    f"{where}: cannot be read: {reply} when it is to connect to {to.authority}; "
                    "ask who runs it, or except the host by NO_PROXY"
                )
            sock.settimeout(self.limits.silence)
        except BaseException:
            sock.close()
            raise

    def _release(self, reply: _Reply) -> None:
        """Return a connection to the pool if its answer was read to the end, else close it."""
        if reply.body.ended() and not reply.response.will_close:
            reply.response.close()  # the answer, not the connection
            with self._lock:
                if reply.closed == self._closed:
                    self._idle.setdefault((reply.to.server, reply.proxy), []).append(
                        reply.connection
                    )
                    return
        reply.connection.close()


_SECONDS = re.compile(r"[0-9]+")
_YEAR = 365 * 86400  # seconds: the longest wait that a message names
_OURS = {"User-Agent": f"aprfmt/{__version__}", "Connection": "keep-alive"}
CLIENT = Client()
atexit.register(CLIENT.close)


def _wrap_tls(sock: socket.socket, context: ssl.SSLContext, host: str) -> socket.socket:
    """Return the socket with TLS on it; it is closed if the certificate is refused."""
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except BaseException:
        sock.close()
        raise


_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?\r\n")


def _read_tunnel_status(timed: TimedSocket) -> int:
    """Return the status of a proxy's answer to CONNECT; only the head of the answer is read.

    Raises BadAnswer for what is no answer of HTTP, ConnectionCut for one that ends early.
    """
    head, one = bytearray(), bytearray(1)  # a byte at a time: what follows is for TLS
    while not head.endswith(b"\r\n\r\n"):
        if not timed.receive(one):
            raise ConnectionCut("the proxy closed the connection")
        head += one
    found = _STATUS.match(head)
    if found is None:
        raise BadAnswer("the proxy's answer is none of HTTP")
    return int(found[1])


def _redirect_url(url: str, location: str) -> str:
    """Return the URL that a redirect leads to; text that is no URL is returned unchanged.

    `address_policy.parse_target` refuses it then.
    """
    try:
        return urljoin(url, location)
    except ValueError:
        return location


def _unique_headers(response: http.client.HTTPResponse) -> dict[str, str]:
    """Return {lower-case name: value} of an answer; BadAnswer for two that contradict."""
    found: dict[str, str] = {}
    for name, value in response.getheaders():
        name = name.lower()
        if name in _SINGLE and found.get(name, value) != value:
            raise BadAnswer(f"the answer has two headers {name} that differ")
        found[name] = value
    return found


def _drain_size(reply: _Reply) -> int:
    """Return how many bytes to read of a body that is not needed, to reuse its connection."""
    return min(content_length(reply.headers) or 0, _DRAINED)


def _read_exactly(reply: _Reply, size: int) -> bytes:
    """Return exactly `size` bytes of a body; ConnectionCut where it ends before."""
    data = reply.body.read(size)
    TRAFFIC.count(received=len(data))
    if len(data) < size:
        raise ConnectionCut(f"the answer ends after {len(data)} of {size} bytes")
    return data


def _read_unsized(reply: _Reply, most: int) -> bytearray:
    """Return a whole body of unknown length; ConnectionCut where it has more than `most` bytes."""
    data = bytearray()
    while piece := reply.body.read(64 << 10):
        TRAFFIC.count(received=len(piece))
        data += piece
        if len(data) > most:
            raise ConnectionCut(f"the answer goes on after {most} bytes")
    return data


def _hash_body(reply: _Reply, size: int) -> str:
    """Return the SHA-256 of a body of exactly `size` bytes; ConnectionCut where it ends before."""
    digest, left = hashlib.sha256(), size
    while left:
        piece = _read_exactly(reply, min(left, _PIECE))
        digest.update(piece)
        left -= len(piece)
    return digest.hexdigest()


def _error_text(error: Exception, limits: ResponseLimits) -> str:
    """Return an error of a connection as a short text."""
    if isinstance(error, TimeoutError):
        return f"no byte for {limits.silence:.0f} seconds"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shorten(str(text).partition("\n")[0], 160)


def _backoff(attempt: int) -> float:
    """Return the seconds to wait after a failed attempt: 0.2, then twice as long each time.

    Up to a quarter is added at random.
    """
    return float(0.2 * 2**attempt * (1 + random.random() / 4))


def _retry_after(headers: Headers, otherwise: float, where: str) -> float:
    """Return the seconds that Retry-After asks to wait, `otherwise` without one.

    Raises RemoteError where that is longer than LONGEST.
    """
    text = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(text):
        seconds = float(min(int(text[:12]), _YEAR))
    else:
        moment = _parse_http_date(text)
        if moment is None:
            return otherwise
        seconds = min(max(0.0, moment - time.time()), _YEAR)
    if seconds > LONGEST:
        raise RemoteError(
            f"{where}: the server asks to wait {seconds:.0f} s before the next request; "
            "try again after that"
        )
    return max(seconds, 0.05)


def _parse_http_date(text: str) -> float | None:
    """Return a date of HTTP in seconds since 1970, None for text that is none."""
    try:
        found = parsedate_tz(text)
        return None if found is None else float(mktime_tz(found))
    except (ValueError, OverflowError, TypeError, IndexError):  # a month of 99, a year of 99999
        return None
