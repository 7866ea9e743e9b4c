"""Addresses of all other schemes, read through fsspec: `sftp://`, `hdfs://`, `memory://`, ...

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


def _parse_address(text: str) -> Sequence[str]:
    """Return an address as [scheme and colon, components], once its file system can be opened.

    Raises UsageError for an address without a file, or with a password in it.
    """
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
    _open_filesystem(f"{scheme}://{parts[0]}")
    return [f"{scheme}:", *parts]


def _open_filesystem(root: str) -> Any:
    """Return fsspec's file system of an address; it may connect.

    `root` is scheme and first component. Raises BackendUnavailableError without fsspec, UsageError
    for an unknown scheme, RemoteError where the file system cannot be opened.
    """
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
    except Exception as error:  # each file system has its own class of errors
        raise RemoteError(f"{root}: {scheme}:// cannot be read: {_error_line(error)}") from None


def _error_line(error: Exception) -> str:
    """Return an error of a file system as one line."""
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    return shorten(text, 200)


class FsspecSite:
    """One file system of fsspec as a site."""

    def __init__(self, root: Sequence[str]) -> None:
        """Open the file system; `root` is [scheme and colon, first component]."""
        self._root = f"{root[0]}//{root[1]}"
        self._files = _open_filesystem(self._root)

    def _address(self, path: str) -> str:
        """Return the address of a file."""
        return f"{self._root}/{path}" if path else self._root

    def _request_info(self, path: str) -> Any:
        """Return fsspec's dict of facts on a file or folder, requested anew; None if it is absent.

        Raises RemoteError for every other failure.
        """
        try:
            with TRAFFIC.request():
                self._files.invalidate_cache()  # what it knows may be of an earlier version
                return self._files.info(self._address(path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise RemoteError(
                f"{self._address(path)}: cannot be read: {_error_line(error)}"
            ) from None

    def facts(self, path: str) -> FileFacts | None:
        """Return the size and version tag of a file, None where it does not exist."""
        info = self._request_info(path)
        if info is None or info.get("type") != "file" or type(info.get("size")) is not int:
            return None
        tags = [str(info[key]) for key in _VERSIONS if info.get(key)]
        return FileFacts(info["size"], tags[0] if tags else "")

    def is_folder(self, path: str) -> bool:
        """Return whether there is a directory at a path."""
        info = self._request_info(path)
        return info is not None and info.get("type") == "directory"

    def names(self, path: str) -> list[str]:
        """Return the names of the files in a folder; RemoteError where it cannot be read."""
        try:
            with TRAFFIC.request():
                rows = self._files.ls(self._address(path), detail=True)
        except Exception as error:
            raise RemoteError(
                f"{self._address(path)}: cannot be read: {_error_line(error)}"
            ) from None
        return [str(row["name"]).rpartition("/")[2] for row in rows if row["type"] == "file"]

    def lists(self, path: str) -> bool:
        """Return True: the files of any folder of these file systems can be listed."""
        return True

    def first(self, path: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of a file; RemoteError where it does not exist."""
        facts = self.facts(path)
        if facts is None:
            raise not_found_error(self._address(path))
        return facts, bytes(self.fetch(path, facts, 0, min(FIRST, facts.size)))

    def fetch(self, path: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file; RemoteError where fewer come.

        `facts` are not used: fsspec gives no version with an answer.
        """
        where = self._address(path)
        try:
            with TRAFFIC.request():
                (data,) = (
                    self._files.cat_ranges([where], [start], [stop]) if stop > start else [b""]
                )
                if isinstance(data, Exception):
                    raise data  # the default of cat_ranges is to return errors as answers
        except Exception as error:
            raise RemoteError(f"{where}: cannot be read: {_error_line(error)}") from None
        TRAFFIC.count(received=len(data))
        if len(data) != stop - start:
            raise RemoteError(f"{where}: {len(data)} bytes came of {start}..{stop}; try again")
        return memoryview(data)

    def one_pass(self, path: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the file, read from its beginning to its end once more.

        `facts` are not used. Raises RemoteError where the file cannot be read.
        """
        where, digest = self._address(path), hashlib.sha256()
        try:
            with TRAFFIC.request(), self._files.open(where, "rb") as file:
                while piece := file.read(_PIECE):
                    TRAFFIC.count(received=len(piece))
                    digest.update(piece)
        except Exception as error:
            raise RemoteError(f"{where}: cannot be read: {_error_line(error)}") from None
        return digest.hexdigest()


SITE = SiteSpec(1, FsspecSite, _parse_address)
