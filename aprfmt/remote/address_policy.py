"""Decides which connections may be made: schemes, hosts, plain http, and redirects."""

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import SplitResult, urlsplit

from aprfmt.base.text_escape import shorten
from aprfmt.errors import RemoteError

Resolver = Callable[[str, int], Sequence[str]]
IP = ipaddress.IPv4Address | ipaddress.IPv6Address
PORTS = {"http": 80, "https": 443}

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
MAX_HOST = 253  # characters of a host's name (RFC 1035, 2.3.4, as text)

# What ipaddress takes for global, or did in some Python version, and nobody reaches from anywhere.
# Sources: the IANA special-purpose registries, IPv6 unicast allocations, and the RFCs named.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, (
    "192.0.0.0/24",  # IETF protocol assignments, RFC 6890
    "192.88.99.0/24",  # relays of 6to4, RFC 7526
    "224.0.0.0/4", "240.0.0.0/4",  # multicast, reserved
    "::/96",  # IPv4-compatible, RFC 4291 2.5.5.1
    "64:ff9b:1::/48",  # NAT64 of one's own network, RFC 8215
    "100::/16",  # discarded, RFC 6666 and RFC 9780
    "2001::/23",  # IETF protocol assignments, with Teredo 2001::/32, RFC 4380
    "2001:db8::/32", "3fff::/20",  # documentation
    "2002::/16",  # 6to4, RFC 3056: leads to the IPv4 address it holds
    "5f00::/16",  # segment routing, RFC 9602
    "fec0::/10",  # site-local, RFC 3879
)))  # fmt: skip
_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is assigned as global unicast
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
# Where the last 32 bits are an IPv4 address too, or may be: IPv4-compatible addresses, those of
# RFC 2765, and NAT64 of one's own network.
_LAST_32_BITS = (_NAT64, *map(ipaddress.ip_network, (
    "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48",
)))  # fmt: skip

# Where clouds tell a machine its secrets. Sources: the providers' own pages.
_METADATA = tuple(map(ipaddress.ip_address, (
    "169.254.169.254",  # AWS, Google, Azure, OpenStack, Oracle, DigitalOcean
    "169.254.170.2", "169.254.170.23",  # AWS containers
    "169.254.169.253", "169.254.169.123",  # AWS name server and clock
    "100.100.100.200",  # Alibaba
    "168.63.129.16",  # Azure's host
    "192.0.0.192",  # Oracle's older machines
    "fd00:ec2::254", "fd00:ec2::23",  # AWS by IPv6
    "fd20:ce::254",  # Google by IPv6
)))  # fmt: skip


class Reach(IntEnum):
    """From where an IP address can be reached; a lower value is more private."""

    METADATA = 0  # of a cloud's own machines, or of one link
    HERE = 1
    PRIVATE = 2
    PUBLIC = 3


@dataclass
class AddressPolicy:
    """What the user has allowed by options."""

    plain_http: bool = False  # --allow-http: to other machines too


POLICY = AddressPolicy()


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The server and path of a request; `line` is path and query, as its first line has them."""

    scheme: str
    host: str
    port: int
    line: str

    @property
    def shown(self) -> str:
        """The URL without its query, for messages; a query may be a signature."""
        port = "" if self.port == PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self._bracketed_host}{port}{self.line.partition('?')[0]}"

    @property
    def authority(self) -> str:
        """HOST:PORT, as a request to a proxy has it."""
        return f"{self._bracketed_host}:{self.port}"

    @property
    def _bracketed_host(self) -> str:
        """The host, an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def server(self) -> tuple[str, str, int]:
        """(scheme, host, port): requests of the same server may share a connection."""
        return self.scheme, self.host, self.port


def split_url(url: str) -> SplitResult | None:
    """Return scheme, host, path and query of a URL, None for text that cannot be split.

    That is a bracket without its pair, a bracket around no IPv6 address, anything but a port after
    one, or a port that is not from 1 to 65,535.
    """
    try:
        parts = urlsplit(url)
        port, _ = parts.port, parts.hostname  # they raise what urlsplit leaves for later
    except ValueError:
        return None
    port_text = parts.netloc.rpartition("]")[2] if "]" in parts.netloc else ""
    return None if port == 0 or port_text[:1] not in ("", ":") else parts


def parse_target(url: str, where: str) -> RequestTarget:
    """Return the target of a URL; RemoteError for text that is no http or https URL.

    `where` begins the message.
    """
    parts = split_url(url)
    host = parts.hostname if parts is not None else None
    if parts is None or parts.scheme not in PORTS or not host:
        other = parts is not None and parts.scheme and parts.scheme not in PORTS
        shown = f"a {shorten(parts.scheme, 40)} address" if parts and other else "no whole address"
        raise RemoteError(f"{where}: leads to {shown}; expected https://HOST/...")
    line = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(char) <= 32 or ord(char) >= 127 for char in line + host):
        raise RemoteError(
            f"{where}: its address holds blanks, control characters or characters beyond ASCII; "
            "percent-encode them"
        )
    if not is_host(host):
        raise RemoteError(
            f"{where}: {shorten(host, 60)!r} is no name of a host; expected labels of 1 to 63 "
            f"letters, digits and hyphens, {MAX_HOST} characters in all, or an IP address"
        )
    return RequestTarget(parts.scheme, host, parts.port or PORTS[parts.scheme], line)


def is_host(text: str) -> bool:
    """Return whether text is an IP address or a host name that name servers accept (RFC 1123)."""
    if ":" in text:
        try:
            return ipaddress.IPv6Address(text).scope_id is None
        except ValueError:
            return False
    labels = text.removesuffix(".").split(".")
    return len(text) <= MAX_HOST and all(map(_LABEL.fullmatch, labels))


def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host, each once; raises OSError.

    `port` is passed to the resolver only.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in found))


def _parse_ip(address: str) -> IP:
    """Return an IP address; an IPv4 address spelled as IPv6 (::ffff:0:0/96) as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def _embedded_ipv4(ip: IP) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a router may send packets for an IPv6 address to.

    They are embedded in it by 6to4, Teredo, NAT64 and the like. [] for an IPv4 address.
    """
    if isinstance(ip, ipaddress.IPv4Address):
        return []
    found = [each for each in (ip.sixtofour, *(ip.teredo or ())) if each is not None]
    if any(ip in network for network in _LAST_32_BITS):
        found.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
    return found


def is_public(address: str) -> bool:
    """Return whether an IP address can be reached from anywhere.

    An address of NAT64 (64:ff9b::/96) counts as the IPv4 address in it, since networks without IPv4
    reach all IPv4 addresses that way.
    """
    ip = _parse_ip(address)
    if ip in _NAT64:
        return is_public(str(_embedded_ipv4(ip)[-1]))
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _UNICAST:
        return False
    return ip.is_global and not any(ip in network for network in _NOT_PUBLIC)


def is_loopback(address: str) -> bool:
    """Return whether an IP address is this machine's own."""
    return _parse_ip(address).is_loopback


def is_metadata(address: str) -> bool:
    """Return whether an IP address is link-local or a cloud's metadata service.

    Metadata services give a machine its secrets.
    """
    ip = _parse_ip(address)
    reached = [ip, *_embedded_ipv4(ip)]
    return any(each.is_link_local or each in _METADATA for each in reached)


def address_reach(address: str) -> Reach:
    """Return METADATA, HERE, PRIVATE or PUBLIC: from where an IP address can be reached."""
    if is_metadata(address):
        return Reach.METADATA
    if is_loopback(address) or _parse_ip(address).is_unspecified:
        return Reach.HERE
    return Reach.PUBLIC if is_public(address) else Reach.PRIVATE


# Names that mean something in one network only: RFC 6761, 6762 and 8375, and what ICANN reserves.
_LOCAL_NAMES = ("localhost", "local", "internal", "intranet", "lan", "home", "corp", "private",
                "home.arpa", "test", "invalid", "onion")  # fmt: skip
_METADATA_NAMES = ("metadata", "metadata.google.internal")  # Google's page on its metadata server


def name_reach(host: str) -> Reach:
    """Return METADATA, PRIVATE or PUBLIC: from where a host can be reached, by its name.

    It is for hosts whose address only a proxy resolves.
    """
    name = host.lower().removesuffix(".")
    if name in _METADATA_NAMES:
        return Reach.METADATA
    local = "." not in name or any(name == n or name.endswith(f".{n}") for n in _LOCAL_NAMES)
    return Reach.PRIVATE if local else Reach.PUBLIC


_ONE = {Reach.METADATA: "one of a metadata service or a single link",
        Reach.HERE: "one of this machine", Reach.PRIVATE: "a private one"}  # fmt: skip


def check_connection(
    to: RequestTarget,
    addresses: Sequence[str],
    before: tuple[RequestTarget, Sequence[str]] | None,
    where: str,
) -> None:
    """Raise RemoteError if a connection to `to` must not be made.

    `before` is the target (with its addresses) that redirected to this one. A redirect may not lead
    to an address that is more private: from public to private, from private to this machine, from
    anywhere to a metadata service. Without `addresses`, which only a proxy knows, the name is
    judged. `where` begins the message.
    """
    nearest = min(map(address_reach, addresses), default=name_reach(to.host))
    if before is not None:
        origin, origin_addresses = before
        if origin.scheme != to.scheme:
            raise RemoteError(
                f"{where}: is redirected from {origin.scheme} to {to.scheme}, which is not "
                f"followed; give the {to.scheme} address yourself if you trust it"
            )
        start = max(map(address_reach, origin_addresses), default=name_reach(origin.host))
        if nearest < start or (nearest == Reach.METADATA and origin.server != to.server):
            kind = "public" if start == Reach.PUBLIC else "private"
            raise RemoteError(
                f"{where}: is redirected from a {kind} address to {_ONE[nearest]} ({to.host}), "
                "which is not followed; give that address yourself if you trust it"
            )
    if nearest == Reach.METADATA and to.host not in addresses:
        raise RemoteError(
            f"{where}: the name {to.host} leads to an address of a metadata service or of a single "
            "link, which is not followed; give that address itself if you trust it"
        )
    here = bool(addresses) and all(map(is_loopback, addresses))
    if to.scheme == "http" and not POLICY.plain_http and not here:
        raise RemoteError(
            f"{where}: plain http to {to.host}, where anybody on the way can change the bytes; "
            "use https, or accept it with --allow-http"
        )
