"""Object stores, `s3://bucket/file`, `gs://` and `az://`, read through obstore.

Keys, regions and endpoints come from the environment variables that obstore reads (AWS_*, GOOGLE_*,
AZURE_*); without any, buckets are read anonymously. obstore itself repeats requests that may
succeed later.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

from aprfmt.errors import BackendUnavailableError, RemoteError, UsageError
from aprfmt.remote.address_policy import POLICY
from aprfmt.remote.site import (
    FIRST,
    FileFacts,
    changed_error,
    hash_identity,
    is_strong,
    require_answer,
)
from aprfmt.remote.sites import SiteSpec
from aprfmt.remote.traffic import TRAFFIC

_DENIED = re.compile(r"status code: (40[13]\b[ \w]*)")  # as obstore says it of a list
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}")
# What says where a store is, of the variables that obstore reads.
_PLACE = re.compile(
    r"(?i)(AWS|GOOGLE|AZURE)_.*(ENDPOINT|REGION|ACCOUNT_NAME|BASE_URL|EMULATOR|VIRTUAL_HOSTED)\w*"
)
# scheme -> (variables of which one says that there are keys, what asks for reading without them)
_KEYS = {
    "s3": (("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE"), "skip_signature"),
    "gs": (("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SKIP_SIGNATURE"), "skip_signature"),
    "az": (("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_TOKEN",
            "AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID", "AZURE_SKIP_SIGNATURE"),
           "skip_signature"),
}  # fmt: skip


def _parse_address(text: str) -> Sequence[str]:
    """Return an address as [scheme and colon, bucket, components]; UsageError without a bucket."""
    scheme, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if not parts or not _BUCKET.fullmatch(parts[0]) or ".." in parts:
        raise UsageError(f"{text}: names no bucket; expected {scheme}://BUCKET/FILE")
    return [f"{scheme}:", *parts]


def _open_store(root: Sequence[str]) -> Any:
    """Return obstore's store of a bucket, anonymous where the environment has no keys.

    Raises BackendUnavailableError without obstore, RemoteError where the environment is wrong.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise BackendUnavailableError(
            f"{root[0]}//{root[1]}: reading buckets needs obstore, which is not installed: "
            "pip install obstore"
        ) from error
    names, anonymous = _KEYS[root[0][:-1]]
    options: dict[str, Any] = {}
    if not any(os.environ.get(name) for name in names):
        options[anonymous] = True
    if POLICY.plain_http:
        options["client_options"] = {"allow_http": True}
    try:
        return from_url(f"{root[0]}//{root[1]}", **options)
    except Exception as error:  # each store has its own class of errors
        raise RemoteError(
            f"{root[0]}//{root[1]}: the environment does not say how to read it: "
            f"{_error_line(error)}"
        ) from None


def _error_line(error: Exception) -> str:
    """Return obstore's error as one line, without queries of URLs and without markup."""
    text = str(error).partition("\n")[0].partition("<")[0].rstrip(": ")
    return re.sub(r"(?i)(https?://[^\s?\"]*)\?[^\s\"]*", r"\1", text)[:300]


class BucketSite:
    """One bucket of an object store as a site."""

    def __init__(self, root: Sequence[str]) -> None:
        """Open the store of a bucket; `root` is [scheme and colon, bucket]."""
        self._shown = f"{root[0]}//{root[1]}"
        self._store, self._endpoint = _open_store(root), _endpoint_settings()
        self._first: dict[str, tuple[FileFacts, bytes] | None] = {}
        self._folders: dict[str, list[str]] = {}

    def _address(self, path: str) -> str:
        """Return the address of a file, for messages."""
        return f"{self._shown}/{path}"

    def _read_error(self, path: str, error: Exception) -> RemoteError:
        """Return obstore's error as a RemoteError in one line; a denial says what would help."""
        kind, denied = type(error).__name__, _DENIED.search(str(error))
        if denied or kind in ("PermissionDeniedError", "UnauthenticatedError"):
            why = denied[1] if denied else kind
            return RemoteError(
                f"{self._address(path)}: may not be read ({why}); set the keys of the store in "
                "the environment (docs/reference/addresses.md)"
            )
        return RemoteError(f"{self._address(path)}: cannot be read: {_error_line(error)}")

    def _fetch_range(
        self, path: str, start: int, stop: int
    ) -> tuple[FileFacts, tuple[int, int], bytes]:
        """Return (facts, (start, stop) that came, bytes) of one range request."""
        import obstore

        with TRAFFIC.request():
            answer = obstore.get(self._store, path, options={"range": (start, stop)})
            data = bytes(answer.bytes())
        TRAFFIC.count(received=len(data))
        meta = answer.meta
        facts = self._object_facts(path, meta)
        return facts, (int(answer.range[0]), int(answer.range[1])), data

    def _object_facts(self, path: str, meta: Any) -> FileFacts:
        """Return the facts in an answer's metadata: size, tag, and identity if the ETag is strong.

        The identity includes endpoint and account, since others are different stores.
        """
        tag, size = str(meta.get("e_tag") or ""), int(meta["size"])
        if not is_strong(tag):
            return FileFacts(size, f"{tag} {meta['last_modified']}".strip())
        return FileFacts(
            size, tag, hash_identity("bucket", self._endpoint, self._address(path), tag, size)
        )

    def one_pass(self, path: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the object, read whole by one request."""
        import obstore

        digest = hashlib.sha256()
        try:
            with TRAFFIC.request():
                answer = obstore.get(self._store, path)
                now = self._object_facts(path, answer.meta)
                for piece in answer.stream():
                    TRAFFIC.count(received=len(piece))
                    digest.update(piece)
        except Exception as error:
            raise self._read_error(path, error) from None
        self._refuse_changed(path, now, facts)
        return digest.hexdigest()

    def _refuse_changed(self, path: str, now: FileFacts, facts: FileFacts) -> None:
        """Raise RemoteError if the size or tag of an answer is not that of the first answer.

        `now` are the facts of the answer, `facts` those of the first one.
        """
        where = self._address(path)
        if now.size != facts.size:
            raise changed_error(where, "its size", now.size, facts.size)
        if now.tag != facts.tag:
            raise changed_error(where, "its ETag", now.tag, facts.tag)

    def _first_answer(self, path: str) -> tuple[FileFacts, bytes] | None:
        """Return (facts, first bytes) of a file, requested once; None where it does not exist."""
        if path not in self._first:
            try:
                facts, _, head = self._fetch_range(path, 0, FIRST)
            except FileNotFoundError:
                self._first[path] = None
            except Exception as error:
                self._first[path] = self._empty_object(path, error)
            else:
                self._first[path] = facts, head
        return self._first[path]

    def _empty_object(self, path: str, error: Exception) -> tuple[FileFacts, bytes]:
        """Return (facts, b"") of an empty object, whose range request fails with `error`.

        Raises `error` as a RemoteError if the object is not empty or its size cannot be read.
        """
        import obstore

        try:
            size = int(obstore.head(self._store, path)["size"])
        except Exception:
            raise self._read_error(path, error) from None
        if size:
            raise self._read_error(path, error) from None
        return FileFacts(0), b""

    def facts(self, path: str) -> FileFacts | None:
        """Return a file's size, version tag and identity; None where it does not exist.

        They come with its first bytes, which opening it will need anyway.
        """
        if self.lists(_folder(path)) and _name(path) not in self.names(_folder(path)):
            return None
        found = self._first_answer(path)
        return None if found is None else found[0]

    def is_folder(self, path: str) -> bool:
        """Return whether there are files directly in a folder; True for the bucket itself.

        False for a name that has already been read as a file. The listing is requested once.
        """
        return not path or (self._first.get(path) is None and bool(self._list_folder(path)))

    def _list_folder(self, path: str) -> list[str]:
        """Return the file names in a folder, requested once."""
        import obstore

        if path not in self._folders:
            try:
                with TRAFFIC.request():
                    found = obstore.list_with_delimiter(self._store, prefix=path or None)
            except Exception as error:
                raise self._read_error(path, error) from None
            self._folders[path] = [_name(str(row["path"])) for row in found["objects"]]
        return self._folders[path]

    def names(self, path: str) -> list[str]:
        """Return the names of the files directly in a folder, without the folder's name."""
        return self._list_folder(path)

    def lists(self, path: str) -> bool:
        """Return whether the folder has been listed already."""
        return path in self._folders

    def first(self, path: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of a file; RemoteError where it does not exist."""
        return require_answer(self._first_answer(path), self._address(path))

    def fetch(self, path: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file; RemoteError if it no longer fits `facts`."""
        try:
            now, found, data = self._fetch_range(path, start, stop)
        except Exception as error:
            raise self._read_error(path, error) from None
        self._refuse_changed(path, now, facts)
        where = self._address(path)
        if found != (start, stop) or len(data) != stop - start:
            raise RemoteError(f"{where}: bytes {found} came; expected {start}..{stop}")
        return memoryview(data)


def _endpoint_settings() -> str:
    """Return the environment's settings of endpoints, regions and accounts; none is a key."""
    names = filter(_PLACE.fullmatch, sorted(os.environ))
    return "\n".join(f"{name}={os.environ[name]}" for name in names)


def _folder(path: str) -> str:
    """Return the folder of a file's path: all before its last component, "" if that is all."""
    return path.rpartition("/")[0]


def _name(path: str) -> str:
    """Return the last component of a file's path."""
    return path.rpartition("/")[2]


SITE = SiteSpec(1, BucketSite, _parse_address, _endpoint_settings, "bucket")
