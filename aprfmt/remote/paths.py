"""Addresses as paths: `hf://owner/name@revision/file`, `https://`, `s3://`, `gs://`, `az://`, ...

A RemotePath goes wherever a Path goes. What pathlib computes from names (`parent`, `with_name`,
`suffix`, `/`) works as it does on disk; what asks the file system asks the site instead. A function
that needs a file on this machine gets one line that says so.
"""

import os
import re
import stat
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from aprfmt.errors import UnsupportedError

if TYPE_CHECKING:
    from aprfmt.remote.site import Site

    _Path = Path
else:
    _Path = type(Path())

T = TypeVar("T")

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+")  # one slash where a Path went before
_OPENERS = 16  # files opened at a time


def hub_home() -> Path:
    """Return the data folder of huggingface_hub: $HF_HOME, or in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").expanduser()


def hub_cache() -> Path:
    """Return the folder of the local hub cache, which is huggingface_hub's."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(chosen).expanduser() if chosen else hub_home() / "hub"


class RemotePath(_Path):
    """The path of a file or folder at an address; `str()` is the address without secrets."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        """The scheme of the address, such as "hf" or "https"."""
        return self.parts[0][:-1]

    @property
    def site(self) -> "Site":
        """The site that answers for this path."""
        return self._find_site()[0]

    @property
    def inner(self) -> str:
        """The name within the site, "" for the site itself."""
        return self._find_site()[1]

    def _find_site(self) -> "tuple[Site, str]":
        """Return (site, name within it)."""
        from aprfmt.remote.sites import site_at

        return site_at(self.parts)

    def __str__(self) -> str:
        return f"{self.parts[0]}//{'/'.join(self.parts[1:])}"

    def as_posix(self) -> str:
        """Return the address."""
        return str(self)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        """Raise UnsupportedError, as an address is no file on this machine."""
        raise UnsupportedError(
            f"{self}: is an address, and this needs a file on this machine; download it first"
        )

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is a file or folder; `follow_symlinks` is not used."""
        return self.is_dir() or self.is_file()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether there is a file at the address; RemoteError where the site cannot say.

        `follow_symlinks` is not used.
        """
        return self.site.facts(self.inner) is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder: the site itself, or a name with files below it."""
        return self.site.is_folder(self.inner)

    def is_symlink(self) -> bool:
        """Return False: sites have no links."""
        return False

    def iterdir(self) -> Generator["RemotePath", None, None]:
        """Yield the files of a folder; none where the site cannot list."""
        for name in self.site.names(self.inner):
            yield self / name

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the stat of a regular file with its size; FileNotFoundError without one."""
        facts = self.site.facts(self.inner)
        if facts is None:
            raise FileNotFoundError(2, "No such file", str(self))
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, facts.size, 0, 0, 0))

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return the path itself: an address is always absolute."""
        return self

    def absolute(self) -> "RemotePath":
        """Return the path itself: an address is always absolute."""
        return self

    def is_absolute(self) -> bool:
        """Return True: an address is always absolute."""
        return True

    def expanduser(self) -> "RemotePath":
        """Return the path itself: `~` has no meaning in an address."""
        return self


def parse_location(location: Any) -> Path:
    """Return what a user gave as a path; an address becomes a RemotePath.

    An address whose file lies in the local hub cache is the path there. Raises UsageError for an
    address that is not complete. `location` is a text, bytes of a path's name or a path.
    """
    if isinstance(location, RemotePath):
        return location
    if not _ADDRESS.match(text := os.fsdecode(location)) or os.path.exists(text):
        return location if isinstance(location, Path) else Path(text)
    from aprfmt.remote.sites import resolve_address

    parts = resolve_address(text)
    return parts if isinstance(parts, Path) else RemotePath(*parts)


def is_address(path: Path) -> bool:
    """Return whether a path is an address, or text like one whose folder does not exist here."""
    text = str(path)
    return is_remote(path) or (bool(_ADDRESS.match(text)) and not os.path.isdir(path.parent))


def is_remote(path: Path) -> bool:
    """Return whether a path is a RemotePath."""
    return isinstance(path, RemotePath)


def can_list(path: Path) -> bool:
    """Return whether the names of a folder's files are known without a request for each.

    True for every folder on this machine.
    """
    return not isinstance(path, RemotePath) or path.site.lists(path.inner)


def map_paths(paths: Sequence[Path], act: Callable[[Path], T]) -> list[T]:
    """Return [act(path), ...] in order; addresses are handled several at a time.

    The first error in that order is raised.
    """
    if len(paths) < 2 or not any(is_remote(path) for path in paths):
        return [act(path) for path in paths]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(_OPENERS, len(paths)), "aprfmt-opening") as pool:
        futures = [pool.submit(act, path) for path in paths]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
