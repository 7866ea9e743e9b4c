"""Proxies that the environment names, read as curl, Python and requests read it."""

import ipaddress
import os
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote

from aprfmt.errors import RemoteError
from aprfmt.remote.address_policy import split_url

_ALL = "all_proxy"
_PORT = 80  # of an http:// proxy that names none


@dataclass(frozen=True, slots=True)
class Proxy:
    """An http:// proxy: its address, and the environment variable that named it.

    `authorization` is the value of Proxy-Authorization, "" where the address has no login.
    """

    variable: str
    host: str
    port: int
    authorization: str = field(default="", repr=False)


def find_proxy(scheme: str, host: str, port: int) -> Proxy | None:
    """Return the proxy that the environment names for a host, None where it names none.

    `scheme` and `port` are those of the address asked for: http or https. The lower-case spelling
    comes first, and NO_PROXY excepts hosts, as urllib.request has it. Raises RemoteError for a
    proxy of another kind, or text that is no address of one.
    """
    for name in (f"{scheme}_proxy", _ALL):
        spelled = next((each for each in (name, name.upper()) if each in os.environ), "")
        text = os.environ.get(spelled, "").strip()
        if text:
            return None if _is_excepted(host, port) else _parse_proxy(spelled, text)
    return None


def _parse_proxy(variable: str, text: str) -> Proxy:
    """Return the proxy that a variable's text names; RemoteError for another kind or no address.

    The text may hold a password, which no message shows.
    """
    parts = split_url(text if "://" in text else f"http://{text}")
    if parts is None or not parts.hostname:
        raise RemoteError(f"{variable}: is no address of a proxy; expected http://HOST:PORT")
    if parts.scheme != "http":
        raise RemoteError(
            f"{variable}: names a proxy of the kind {parts.scheme}, which is not read; set an "
            "http:// one (it carries https too), or except the host by NO_PROXY"
        )
    login = ""
    if parts.username:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        login = f"Basic {b64encode(pair.encode()).decode('ascii')}"
    return Proxy(variable, parts.hostname, parts.port or _PORT, login)


def _is_excepted(host: str, port: int) -> bool:
    """Return whether NO_PROXY is `*`, or names the host or a domain or network it is in.

    A name may have a port, which must be `port` then.
    """
    text = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    names = [name.strip().lstrip(".").lower() for name in text.split(",") if name.strip()]
    spelled = (host.lower(), f"{host.lower()}:{port}")
    named = any(each == n or each.endswith(f".{n}") for n in names for each in spelled)
    return text.strip() == "*" or named or any(_in_network(host, name) for name in names)


def _in_network(host: str, name: str) -> bool:
    """Return whether an IP address is in a network such as `10.0.0.0/8`; False for other text."""
    try:
        return "/" in name and ipaddress.ip_address(host) in ipaddress.ip_network(name, False)
    except ValueError:
        return False
