"""Proxies that the environment names, as curl, Python and requests read it: here none is used."""

import os
from collections.abc import Iterator

_ALL = "all_proxy"


def unused_proxies(scheme: str, host: str) -> Iterator[str]:
    """Yield the variable that names a proxy for a host, nothing where none does.

    The lower-case spelling comes first, and NO_PROXY excepts hosts, as urllib.request has it.
    """
    for name in (f"{scheme}_proxy", _ALL):
        spelled = next((each for each in (name, name.upper()) if each in os.environ), "")
        if os.environ.get(spelled, "").strip():
            if not _excepted(host):
                yield spelled
            return


def _excepted(host: str) -> bool:
    """Return whether NO_PROXY names a host, a domain that it is in, or `*`."""
    text = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    names = [name.strip().lstrip(".").lower() for name in text.split(",") if name.strip()]
    host = host.lower()
    return text.strip() == "*" or any(host == n or host.endswith(f".{n}") for n in names)
