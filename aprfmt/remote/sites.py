"""The table of sites by scheme, and the open site of each address."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.base.registry import Registry, load_attribute
from aprfmt.errors import UsageError
from aprfmt.remote.site import Site


@dataclass(frozen=True)
class SiteSpec:
    """How the addresses of one scheme are read.

    An address begins with `depth` components that name the site: a host, an owner and a name.
    `settle(text)` returns the components of an address, or the path of a copy on this machine; it
    stores what is secret in the text. `endpoint()` is the server that the environment names for the
    scheme: another endpoint is another site. `first` is what its first component names, "" where
    that may be empty.
    """

    depth: int
    open: Callable[[Sequence[str]], Site]
    settle: Callable[[str], Sequence[str] | Path]
    endpoint: Callable[[], str] = str
    first: str = ""


SITES: Registry[SiteSpec] = Registry(
    "sites",
    {
        "https": "aprfmt.remote.http:SITE",
        "http": "aprfmt.remote.http:SITE",
        "hf": "aprfmt.remote.hub:SITE",
        "s3": "aprfmt.remote.buckets:SITE",
        "gs": "aprfmt.remote.buckets:SITE",
        "az": "aprfmt.remote.buckets:SITE",
        "file": "aprfmt.remote.file_urls:SITE",
    },
    UsageError,
)
OTHER = "aprfmt.remote.fsspec_sites:SITE"  # every scheme that the table has not

_open: dict[tuple[str, ...], Site] = {}
_lock = threading.Lock()


def site_spec(scheme: str) -> SiteSpec:
    """Return the table's row of a scheme; that of fsspec for a scheme without one."""
    if scheme in SITES:
        return SITES[scheme]
    found: SiteSpec = load_attribute(OTHER)
    return found


def resolve_address(text: str) -> Sequence[str] | Path:
    """Return the components of an address, or the local path of its file.

    Raises UsageError for an address without a name within its site.
    """
    scheme, _, rest = text.partition(":")
    spec = site_spec(scheme.lower())
    if spec.first and rest.startswith("///"):
        raise UsageError(
            f"{text}: names no {spec.first} between the second and the third slash; expected "
            f"{scheme.lower()}://{spec.first.upper()}/..."
        )
    whole = f"//{rest.lstrip('/')}" if spec.depth else rest  # a path's slashes have a meaning
    found = spec.settle(f"{scheme.lower()}:{whole}")
    if not isinstance(found, Path) and len(found) <= spec.depth:
        raise UsageError(
            f"{text}: is not a whole address; docs/reference/addresses.md has the forms"
        )
    return found


def site_at(parts: Sequence[str]) -> tuple[Site, str]:
    """Return (the open site of an address's components, the name within it)."""
    spec = site_spec(parts[0][:-1])
    root, inner = tuple(parts[: spec.depth + 1]), "/".join(parts[spec.depth + 1 :])
    key = spec.endpoint(), *root
    with _lock:
        if key not in _open:
            _open[key] = spec.open(root)
        return _open[key], inner
