"""Every other scheme that fsspec knows (`sftp://`, `hdfs://`, `memory://`, ...), where it is there.

Ranges are read by `cat_ranges`. fsspec says nothing of a file's version with an answer, so none is
proven to be of the same version as another, and no range is kept on disk. Its size, and its date or
checksum where the file system has one, are asked for again when the file has been read.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.errors import BackendUnavailableError, RemoteError, UsageError
from aprfmt.remote.site import FIRST, FileFacts, not_found_error
from aprfmt.remote.sites import SITES, SiteSpec
from aprfmt.remote.traffic import TRAFFIC

_PIECE = 8 << 20  # bytes read at a time
_VERSIONS = ("ETag", "etag", "checksum", "mtime", "modify", "LastModified", "created")


def _settle(text: str) -> Sequence[str]:
    scheme, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    shown = f"{scheme}://{'/'.join(parts).rpartition('@')[2]}"
    if not parts or ".." in parts or "::" in rest:
        raise UsageError(f"{shown}: names no file; expected {scheme}://PLACE/FILE")
    if "@" in rest:
        raise UsageError(
            f"{shown}: a name and a password in it are not taken; set them as fsspec does, in its "
            "configuration"
        )
    _system(f"{scheme}://{parts[0]}")
    return [f"{scheme}:", *parts]


def _system(root: str) -> Any:
    """Return the file system of an address's first two parts; connects where that needs it."""
    scheme = root.partition(":")[0]
    try:
        import fsspec
    except ImportError as error:
        raise BackendUnavailableError(
            f"{root}: {scheme}:// addresses are read through fsspec, which is not installed: "
            "pip install fsspec"
        ) from error
    if scheme not in fsspec.available_protocols():
        raise UsageError(
            f"{root}: {scheme}:// cannot be read: no file system of fsspec has that name; expected "
            f"{', '.join(f'{each}://' for each in SITES)} or one of these"
        )
    try:
        return fsspec.core.url_to_fs(root)[0]
    except Exception as error:  # of a class of its own for each file system
        raise RemoteError(f"{root}: {scheme}:// cannot be read: {_line(error)}") from None


def _line(error: Exception) -> str:
    """Return what a file system says as one line."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return shorten(text, 200)


class FsspecSite:
    """One file system."""

    def __init__(self, root: Sequence[str]) -> None:
        self._root = f"{root[0]}//{root[1]}"
        self._files = _system(self._root)

    def _where(self, inner: str) -> str:
        return f"{self._root}/{inner}" if inner else self._root

    def _info(self, inner: str) -> Any:
        try:
            with TRAFFIC.request():
                self._files.invalidate_cache()  # what it knows may be of an earlier version
                return self._files.info(self._where(inner))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise RemoteError(f"{self._where(inner)}: cannot be read: {_line(error)}") from None

    def facts(self, inner: str) -> FileFacts | None:
        """Ask the file system about a file."""
        info = self._info(inner)
        if info is None or info.get("type") != "file" or type(info.get("size")) is not int:
            return None
        tags = [str(info[key]) for key in _VERSIONS if info.get(key)]
        return FileFacts(info["size"], tags[0] if tags else "")

    def is_folder(self, inner: str) -> bool:
        """Say whether files lie below that name."""
        info = self._info(inner)
        return info is not None and info.get("type") == "directory"

    def names(self, inner: str) -> list[str]:
        """Return the names of the files in a folder."""
        try:
            with TRAFFIC.request():
                rows = self._files.ls(self._where(inner), detail=True)
        except Exception as error:
            raise RemoteError(f"{self._where(inner)}: cannot be read: {_line(error)}") from None
        return [str(row["name"]).rpartition("/")[2] for row in rows if row["type"] == "file"]

    def lists(self, inner: str) -> bool:
        """Say yes."""
        return True

    def first(self, inner: str) -> tuple[FileFacts, bytes]:
        """Return what is known of a file, and its first bytes."""
        facts = self.facts(inner)
        if facts is None:
            raise not_found_error(self._where(inner))
        return facts, bytes(self.fetch(inner, facts, 0, min(FIRST, facts.size)))

    def fetch(self, inner: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        where = self._where(inner)
        try:
            with TRAFFIC.request():
                (data,) = (
                    self._files.cat_ranges([where], [start], [stop]) if stop > start else [b""]
                )
        except Exception as error:
            raise RemoteError(f"{where}: cannot be read: {_line(error)}") from None
        TRAFFIC.count(received=len(data))
        if len(data) != stop - start:
            raise RemoteError(f"{where}: {len(data)} bytes came of {start}..{stop}; try again")
        return memoryview(data)

    def one_pass(self, inner: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the file, read from its beginning to its end once more."""
        where, digest = self._where(inner), hashlib.sha256()
        try:
            with TRAFFIC.request(), self._files.open(where, "rb") as file:
                while piece := file.read(_PIECE):
                    TRAFFIC.count(received=len(piece))
                    digest.update(piece)
        except Exception as error:
            raise RemoteError(f"{where}: cannot be read: {_line(error)}") from None
        return digest.hexdigest()


SITE = SiteSpec(1, FsspecSite, _settle)
