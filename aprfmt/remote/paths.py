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
    """Return the folder of the hub's own library."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(base) / "huggingface").expanduser()


def hub_cache() -> Path:
    """Return the local hub cache, which is the hub's own library's."""
    chosen = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(chosen).expanduser() if chosen else hub_home() / "hub"


class RemotePath(_Path):
    """A place on a site; `str()` gives its address without anything secret."""

    __slots__ = ()

    @property
    def scheme(self) -> str:
        """What stands before `://`."""
        return self.parts[0][:-1]

    @property
    def site(self) -> "Site":
        """Who answers for it."""
        return self._placed()[0]

    @property
    def inner(self) -> str:
        """Its name within the site, "" for the site itself."""
        return self._placed()[1]

    def _placed(self) -> "tuple[Site, str]":
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
        raise UnsupportedError(
            f"{self}: is an address, and this needs a file on this machine; download it first"
        )

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Say whether a file or folder is there."""
        return self.is_dir() or self.is_file()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Say whether a file is there; RemoteError where the site cannot say."""
        return self.site.facts(self.inner) is not None

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Say whether it is a folder: the site, or what files lie in."""
        return self.site.is_folder(self.inner)

    def is_symlink(self) -> bool:
        """Say no: sites have none."""
        return False

    def iterdir(self) -> Generator["RemotePath", None, None]:
        """Yield the files of a folder; none where the site has no lists."""
        for name in self.site.names(self.inner):
            yield self / name

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return a regular file's size; FileNotFoundError where none is there."""
        facts = self.site.facts(self.inner)
        if facts is None:
            raise FileNotFoundError(2, "No such file", str(self))
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, facts.size, 0, 0, 0))

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return itself: an address is whole."""
        return self

    def absolute(self) -> "RemotePath":
        """Return itself: an address is whole."""
        return self

    def is_absolute(self) -> bool:
        """Say yes."""
        return True

    def expanduser(self) -> "RemotePath":
        """Return itself: `~` means nothing there."""
        return self


def parse_location(given: Any) -> Path:
    """Return a path, or the address that a text names, as a path.

    An address whose file lies in the local hub cache is the path of that. Raises UsageError for an
    address that is not complete.
    """
    if isinstance(given, RemotePath):
        return given
    if not _ADDRESS.match(text := os.fspath(given)) or os.path.exists(text):
        return Path(given)
    from aprfmt.remote.sites import resolve_address

    parts = resolve_address(text)
    return parts if isinstance(parts, Path) else RemotePath(*parts)


def is_address(path: Path) -> bool:
    """Say whether a path is an address, or the text of one for which there is no folder here."""
    text = str(path)
    return is_remote(path) or (bool(_ADDRESS.match(text)) and not os.path.isdir(path.parent))


def is_remote(path: Path) -> bool:
    """Say whether a path is an address."""
    return isinstance(path, RemotePath)


def can_list(path: Path) -> bool:
    """Say whether one can know which files lie in a folder without asking for each."""
    return not isinstance(path, RemotePath) or path.site.lists(path.inner)


def map_paths(paths: Sequence[Path], act: Callable[[Path], T]) -> list[T]:
    """Return `act` of every path, in order; several at a time where the paths are addresses.

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
