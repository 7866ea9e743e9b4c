"""Model repositories on the Hugging Face Hub: `hf://owner/name[@revision][/file]`.

One request of the hub's API pins the revision to a commit and lists the files with sizes and, of
large ones, digests; every byte is then read at that commit. A snapshot in the local hub cache is
taken first. The token is what huggingface_hub would send. The list is asked for by our own client:
the library's (2.4) waits for a body that never ends, and follows a redirect to anywhere.
"""

import hashlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aprfmt.base.text_escape import shorten
from aprfmt.errors import RemoteError, UsageError
from aprfmt.remote.client import Headers
from aprfmt.remote.paths import hub_cache
from aprfmt.remote.ranges import AccessDenied, NotFoundError, RangeReader
from aprfmt.remote.site import FIRST, FileFacts, hash_identity, is_strong, not_found_error
from aprfmt.remote.sites import SiteSpec
from aprfmt.remote.traffic import TRAFFIC

MAX_LISTING = 64 << 20
MAX_PLAIN = 64 << 20  # bytes of a file outside of LFS, which is sent whole
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._%-]{0,200}")
_WEIGHTS = (".safetensors", ".gguf", ".apr", ".bin", ".pt", ".pth", ".ckpt")


def hub_endpoint() -> str:
    """Return the URL of the hub: $HF_ENDPOINT or https://huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def hub_token() -> tuple[str, str]:
    """Return (the token that huggingface_hub would send, where it is from); ("", "") without one.

    The library reads the environment and what `hf auth login` left, which it renews where it has
    expired. Raises RemoteError for one that no header can hold, or where it cannot be read.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return "", ""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    named = [name for name in names if os.environ.get(name, "").strip()]
    place = named[0] if named else constants.HF_TOKEN_PATH
    try:
        found = get_token() or ""
    except Exception as error:  # of the network or its own: which classes, its versions decide
        raise RemoteError(
            f"{place}: the token of the hub cannot be read: {_one_line(error)}; set HF_TOKEN"
        ) from None
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise RemoteError(f"the token of {place} holds characters that no token has; set it anew")
    return (found, place) if found else ("", "")


def _one_line(error: Exception) -> str:
    """Return an error as one line of at most 160 characters."""
    return shorten(" ".join(str(error).split()) or type(error).__name__, 160)


def _parse_address(text: str) -> Sequence[str] | Path:
    """Return an address as ["hf:", components], or the path of it in the local hub cache.

    Raises UsageError for an address without a repository, or with an impossible name.
    """
    parts = [part for part in text.removeprefix("hf://").split("/") if part]
    if parts[:1] == ["models"]:
        parts = parts[1:]
    if len(parts) < 2:
        raise UsageError(f"{text}: names no repository; expected hf://OWNER/NAME[@REVISION][/FILE]")
    name, _, revision = parts[1].partition("@")
    if not (_NAME.fullmatch(parts[0]) and _NAME.fullmatch(name)) or ".." in parts:
        raise UsageError(f"{text}: {parts[0]}/{name} is no name of a repository")
    if revision and not _REVISION.fullmatch(revision):
        raise UsageError(f"{text}: {revision!r} is no revision (a `/` in it is written %2F)")
    kept = cached_snapshot(f"{parts[0]}/{name}", revision.replace("%2F", "/") or "main")
    if kept is not None:
        path = kept.joinpath(*parts[2:])
        if path.is_file() if parts[2:] else _has_weights(kept):
            TRAFFIC.tell(f"{text}: read from the local hub cache, commit {kept.name}")
            return path
    return ["hf:", *parts]


def cached_snapshot(repository: str, revision: str) -> Path | None:
    """Return the snapshot of a revision in the local hub cache, None where it has none.

    `repository` is OWNER/NAME, `revision` a branch, tag or commit.
    """
    folder = hub_cache() / ("models--" + repository.replace("/", "--"))
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (folder / "refs" / revision).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
    found = folder / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def _has_weights(folder: Path) -> bool:
    """Return whether a snapshot has its weights: every file of an index, or any weight file."""
    from aprfmt.formats.bounded_json import load_file
    from aprfmt.formats.shard_set import MAX_INDEX

    for path in [*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")]:
        named = load_file(path, MAX_INDEX).get("weight_map", {}).values()
        return all(isinstance(name, str) and (folder / name).is_file() for name in named)
    return any(path.suffix in _WEIGHTS and path.is_file() for path in folder.iterdir())


@dataclass(frozen=True)
class _Row:
    """A file of a repository; `by_range` is True for a file in LFS or Xet, which is sent by range.

    `sha256` is published for such files, `blob` for the others: git's SHA-1 of it, that is of `blob
    SIZE`, a zero byte and the contents. Both are "" where they are not published.
    """

    size: int
    sha256: str
    blob: str
    by_range: bool


class HubSite:
    """One repository at one revision as a site."""

    def __init__(self, root: Sequence[str]) -> None:
        """Set names and endpoint; nothing is requested yet.

        `root` is ["hf:", owner, name[@revision]].
        """
        self._owner = root[1]
        self._name, _, self._revision = root[2].partition("@")
        self._shown = f"hf://{root[1]}/{root[2]}"
        self._endpoint = hub_endpoint()
        self._ranges = RangeReader()
        self._lock = threading.Lock()
        self._listed: tuple[str, Mapping[str, _Row]] | None = None
        self._wholes: dict[str, bytes] = {}

    @property
    def _auth_headers(self) -> dict[str, str]:
        """The header with the hub's token; {} without a token."""
        found, _ = hub_token()
        return {"Authorization": f"Bearer {found}"} if found else {}

    @property
    def commit(self) -> str:
        """The commit that the revision was at when it was first requested."""
        return self._get_listing()[0]

    def _get_listing(self) -> tuple[str, Mapping[str, _Row]]:
        """Return (commit, {file name: row}), requested once."""
        with self._lock:
            if self._listed is None:
                self._listed = self._request_listing()
            return self._listed

    def _request_listing(self) -> tuple[str, Mapping[str, _Row]]:
        """Return (commit, {file name: row}) from the hub's API.

        Raises RemoteError where the repository does not exist, may not be read, or the hub is
        offline.
        """
        from aprfmt.formats.bounded_json import loads

        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise RemoteError(
                f"{self._shown}: is not in the local hub cache, and HF_HUB_OFFLINE is set; unset it"
            )
        revision = quote(self._revision or "main", safe="%")
        url = (
            f"{self._endpoint}/api/models/{self._owner}/{self._name}/revision/{revision}?blobs=true"
        )
        try:
            text = self._ranges.whole(url, self._shown, self._auth_headers, MAX_LISTING)
        except AccessDenied as error:
            raise self._denied_error(error.headers) from None
        except NotFoundError:
            raise RemoteError(
                f"{self._shown}: the hub has no such repository or revision; check the name"
            ) from None
        return self._parse_listing(
            loads(text, f"{self._shown}: the hub's answer", max_bytes=MAX_LISTING)
        )

    def _parse_listing(self, listing: Any) -> tuple[str, Mapping[str, _Row]]:
        """Return (commit, {file name: row}) of the API's JSON; RemoteError without a commit."""
        commit = listing.get("sha") if isinstance(listing, dict) else None
        siblings = listing.get("siblings") if isinstance(listing, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise RemoteError(f"{self._shown}: the hub's answer has no commit in `sha`")
        rows = {}
        for sibling in siblings if isinstance(siblings, list) else ():
            if not isinstance(sibling, dict):
                continue
            name, size = sibling.get("rfilename"), sibling.get("size")
            lfs = sibling.get("lfs")
            if isinstance(name, str) and type(size) is int and size >= 0:
                in_lfs = isinstance(lfs, dict)
                digest = _hex_digest(lfs.get("sha256") if isinstance(lfs, dict) else None, 64)
                blob = "" if in_lfs else _hex_digest(sibling.get("blobId"), 40)
                rows[name] = _Row(size, digest, blob, in_lfs)
        return commit, rows

    def _denied_error(self, headers: Headers) -> RemoteError:
        """Return the error of a repository that may not be read, with what would help."""
        login, (_, place) = "set HF_TOKEN, or run `hf auth login`", hub_token()
        if headers.get("x-error-code") == "GatedRepo":
            todo = f"accept its terms at {self._endpoint}/{self._owner}/{self._name}"
            if place:
                said = f"is gated, and the token of {place} has no access; {todo} with its account"
                return RemoteError(f"{self._shown}: {said}, or use another token")
            return RemoteError(f"{self._shown}: is gated; {todo}, then {login}")
        if place:
            return RemoteError(
                f"{self._shown}: does not exist, or the token of {place} may not read it; check "
                "the name and the token"
            )
        return RemoteError(f"{self._shown}: does not exist, or is private: {login}")

    def _find_row(self, path: str) -> _Row | None:
        """Return the row of a file in the hub's listing, None where it does not exist."""
        return self._get_listing()[1].get(path)

    def facts(self, path: str) -> FileFacts | None:
        """Return a file's size, identity and SHA-256 from the listing; None if it is missing."""
        row = self._find_row(path)
        if row is None:
            return None
        return FileFacts(row.size, "", self._file_identity(path, row), row.sha256)

    def _file_identity(self, path: str, row: _Row, tag: str = "") -> str:
        """Return a digest that identifies a file's bytes at this hub; "" where nothing does.

        It is made of the digest that the hub publishes, or of a strong ETag `tag`. Another hub may
        have other bytes under the same name and commit, so the digest includes the endpoint.
        """
        named = row.sha256 or row.blob or (tag if is_strong(tag) else "")
        place = self._endpoint, self._owner, self._name, self.commit, path
        return hash_identity("hf", *place, named, row.size) if named else ""

    def is_folder(self, path: str) -> bool:
        """Return whether there are files below a path."""
        return not path or any(name.startswith(f"{path}/") for name in self._get_listing()[1])

    def names(self, path: str) -> list[str]:
        """Return the names of the files directly in a folder, without the folder's name."""
        below = f"{path}/" if path else ""
        cut = (
            name.removeprefix(below) for name in self._get_listing()[1] if name.startswith(below)
        )
        return [name for name in cut if "/" not in name]

    def lists(self, path: str) -> bool:
        """Return True: the hub's listing has the files of all folders."""
        return True

    def _address(self, path: str) -> str:
        """Return the address of a file, for messages."""
        return f"{self._shown}/{path}"

    def _url(self, path: str) -> str:
        """Return the URL of a file at the pinned commit."""
        where = f"{self._owner}/{self._name}/resolve/{self.commit}/{quote(path)}"
        return f"{self._endpoint}/{where}"

    def first(self, path: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of a file; RemoteError if it is missing or denied.

        RemoteError too if its size is not that of the hub's listing.
        """
        row, listed = self._find_row(path), self.facts(path)
        if row is None or listed is None:
            raise not_found_error(self._address(path))
        if not row.by_range:
            return listed, self._fetch_whole(path, row)[:FIRST]
        try:
            seen, head = self._ranges.first(
                self._url(path), self._address(path), self._auth_headers
            )
        except AccessDenied as error:
            raise self._denied_error(error.headers) from None
        if seen.size != row.size:
            raise RemoteError(
                f"{self._address(path)}: has {seen.size} bytes, the hub's list says {row.size}; "
                "try again later"
            )
        identity = self._file_identity(path, row, seen.tag)
        return FileFacts(seen.size, seen.tag, identity, listed.sha256), head

    def _fetch_whole(self, path: str, row: _Row) -> bytes:
        """Return a small file whole, checked against its size and git's SHA-1; requested once.

        Raises RemoteError where access is denied, or where size or SHA-1 are others.
        """
        if path not in self._wholes:
            most = min(row.size, MAX_PLAIN)
            try:
                found = self._ranges.whole(
                    self._url(path), self._address(path), self._auth_headers, most
                )
            except AccessDenied as error:
                raise self._denied_error(error.headers) from None
            if len(found) != row.size:
                raise RemoteError(
                    f"{self._address(path)}: has {len(found)} bytes, the hub's list says {row.size}"
                )
            blob = hashlib.sha1(b"blob %d\0" % len(found) + found, usedforsecurity=False)
            if row.blob and blob.hexdigest() != row.blob:
                raise RemoteError(
                    f"{self._address(path)}: its bytes have git's SHA-1 {blob.hexdigest()}, the "
                    f"hub's list says {row.blob}; try again later"
                )
            self._wholes[path] = found
        return self._wholes[path]

    def fetch(self, path: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file; RemoteError if it no longer fits `facts`."""
        row = self._find_row(path)
        if row is not None and not row.by_range:
            return memoryview(self._fetch_whole(path, row))[start:stop]
        try:
            return self._ranges.fetch(
                self._url(path), self._address(path), self._auth_headers, facts, start, stop
            )
        except AccessDenied as error:
            raise self._denied_error(error.headers) from None

    def one_pass(self, path: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the file, read whole by one request."""
        row = self._find_row(path)
        if row is not None and not row.by_range:
            return hashlib.sha256(self._fetch_whole(path, row)).hexdigest()
        try:
            return self._ranges.one_pass(
                self._url(path), self._address(path), self._auth_headers, facts
            )
        except AccessDenied as error:
            raise self._denied_error(error.headers) from None


def _hex_digest(found: object, digits: int) -> str:
    """Return a value that is a digest of so many hexadecimal digits, "" for anything else.

    `found` is any value of JSON, `digits` their number.
    """
    right = isinstance(found, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", found)
    return str(found) if right else ""


SITE = SiteSpec(2, HubSite, _parse_address, hub_endpoint, "owner")
