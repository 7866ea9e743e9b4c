"""`file://` addresses, which are paths on this machine."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from aprfmt.errors import UsageError
from aprfmt.remote.site import Site
from aprfmt.remote.sites import SiteSpec


def _parse_address(text: str) -> Path:
    """Return the local path that a file:// address names; UsageError for another machine's."""
    path = text.removeprefix("file:")
    host = ""
    if path.startswith("//"):
        host, _, path = path[2:].partition("/")
    if host.lower() not in ("", "localhost"):
        raise UsageError(f"{text}: names the machine {host!r}; expected file:///PATH, or the path")
    return Path("/" + unquote(path.lstrip("/")))


def _refuse_site(root: Sequence[str]) -> Site:
    """Raise UsageError: a file:// address is always resolved to a path before."""
    raise UsageError(f"{root[0]}//: is a path on this machine; give the path")


SITE = SiteSpec(0, _refuse_site, _parse_address)
