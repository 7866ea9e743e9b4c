"""What may be connected to: schemes, plain http, and steps of redirects."""

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from aprfmt.base.text import shorten
from aprfmt.errors import RemoteError

Resolver = Callable[[str, int], Sequence[str]]
PORTS = {"http": 80, "https": 443}


@dataclass
class Policy:
    """What the user allowed."""

    plain_http: bool = False  # --allow-http: to other machines too


POLICY = Policy()


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """Where a request goes. `line` is what stands in its first line: path and query."""

    scheme: str
    host: str
    port: int
    line: str

    @property
    def shown(self) -> str:
        """The address without its query, which may be a signature."""
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}{port}{self.line.partition('?')[0]}"

    @property
    def server(self) -> tuple[str, str, int]:
        """What connections are kept by."""
        return self.scheme, self.host, self.port


def target(url: str, where: str) -> RequestTarget:
    """Take a URL apart. Raises RemoteError for text that is not a URL, or not http or https."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in PORTS or not host:
        shown = f"a {shorten(parts.scheme, 40)} address" if parts.scheme else "no whole address"
        raise RemoteError(f"{where}: leads to {shown}; expected https://HOST/...")
    line = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(char) <= 32 or ord(char) >= 127 for char in line + host):
        raise RemoteError(
            f"{where}: its address holds blanks, control characters or characters beyond ASCII; "
            "percent-encode them"
        )
    return RequestTarget(parts.scheme, host, port or PORTS[parts.scheme], line)


def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in found))


def is_public(address: str) -> bool:
    """Say whether an IP address is reachable from anywhere."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return bool((mapped or ip).is_global)


def is_loopback(address: str) -> bool:
    """Say whether an IP address is this machine's own."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def judge(
    to: RequestTarget,
    addresses: Sequence[str],
    before: tuple[RequestTarget, Sequence[str]] | None,
    where: str,
) -> None:
    """Raise RemoteError for a connection that must not be made.

    `before` is the target (with its addresses) that redirected to this one.
    """
    if before is not None:
        came, through = before
        if came.scheme != to.scheme:
            raise RemoteError(
                f"{where}: is redirected from {came.scheme} to {to.scheme}, which is not followed; "
                f"give the {to.scheme} address yourself if you trust it"
            )
        if any(map(is_public, through)) and not all(map(is_public, addresses)):
            raise RemoteError(
                f"{where}: is redirected from a public address to a private one ({to.host}), "
                "which is not followed; give that address yourself if you trust it"
            )
    if to.scheme == "http" and not POLICY.plain_http and not all(map(is_loopback, addresses)):
        raise RemoteError(
            f"{where}: plain http to {to.host}, where anybody on the way can change the bytes; "
            "use https, or accept it with --allow-http"
        )
