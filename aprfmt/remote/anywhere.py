"""Every other scheme that fsspec knows (`sftp://`, `hdfs://`, `memory://`, ...), where it is there.

Ranges are read by `cat_ranges`. fsspec says nothing of a file's version between two answers: its
size, and its checksum where the file system has one, are asked for again whenever a file is opened.
"""

from collections.abc import Sequence
from typing import Any

from aprfmt.errors import BackendUnavailableError, RemoteError, UsageError
from aprfmt.remote.site import FIRST, FileFacts, missing
from aprfmt.remote.sites import SiteSpec
from aprfmt.remote.traffic import TRAFFIC


def _settle(text: str) -> Sequence[str]:
    scheme, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if not parts or ".." in parts:
        raise UsageError(f"{text}: names no file; expected {scheme}://PLACE/FILE")
    _system(scheme, text)
    return [f"{scheme}:", *parts]


def _system(scheme: str, text: str) -> Any:
    try:
        import fsspec
    except ImportError as error:
        raise BackendUnavailableError(
            f"{text}: {scheme}:// addresses are read through fsspec, which is not installed: "
            "pip install fsspec"
        ) from error
    try:
        return fsspec.filesystem(scheme)
    except (ValueError, ImportError) as error:
        raise UsageError(f"{text}: {scheme}:// cannot be read: {error}") from error


class AnySite:
    """One file system."""

    def __init__(self, root: Sequence[str]) -> None:
        self._scheme = root[0][:-1]
        self._files = _system(self._scheme, f"{root[0]}//")

    def _where(self, inner: str) -> str:
        return f"{self._scheme}://{inner}"

    def _info(self, inner: str) -> Any:
        try:
            with TRAFFIC.request():
                return self._files.info(self._where(inner))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise RemoteError(f"{self._where(inner)}: cannot be read: {error}") from None

    def facts(self, inner: str) -> FileFacts | None:
        """Ask the file system about a file."""
        info = self._info(inner)
        if info is None or info.get("type") != "file" or type(info.get("size")) is not int:
            return None
        tags = [str(info[key]) for key in ("ETag", "etag", "checksum", "mtime") if info.get(key)]
        return FileFacts(info["size"], tags[0] if tags else "")

    def is_folder(self, inner: str) -> bool:
        """Say whether files lie below that name."""
        info = self._info(inner)
        return info is not None and info.get("type") == "directory"

    def names(self, inner: str) -> list[str]:
        """Return the names of the files in a folder."""
        rows = self._files.ls(self._where(inner), detail=True)
        return [str(row["name"]).rpartition("/")[2] for row in rows if row["type"] == "file"]

    def lists(self, inner: str) -> bool:
        """Say yes."""
        return True

    def first(self, inner: str) -> tuple[FileFacts, bytes]:
        """Return what is known of a file, and its first bytes."""
        facts = self.facts(inner)
        if facts is None:
            raise missing(self._where(inner))
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
            raise RemoteError(f"{where}: cannot be read: {error}") from None
        TRAFFIC.count(received=len(data))
        if len(data) != stop - start:
            raise RemoteError(f"{where}: {len(data)} bytes came of {start}..{stop}; try again")
        return memoryview(data)


SITE = SiteSpec(0, AnySite, _settle)
