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

    def _address(self, inner: str) -> str:
        """Return the address of a file, for messages.

        `inner` is the key of the object in the bucket.
        """
        return f"{self._shown}/{inner}"

    def _read_error(self, inner: str, error: Exception) -> RemoteError:
        """Return obstore's error as a RemoteError in one line; a denial says what would help.

        `inner` is the key of the object in the bucket.
        """
        kind, denied = type(error).__name__, _DENIED.search(str(error))
        if denied or kind in ("PermissionDeniedError", "UnauthenticatedError"):
            why = denied[1] if denied else kind
            return RemoteError(
                f"{self._address(inner)}: may not be read ({why}); set the keys of the store in "
                "the environment (docs/reference/addresses.md)"
            )
        return RemoteError(f"{self._address(inner)}: cannot be read: {_error_line(error)}")

    def _fetch_range(
        self, inner: str, start: int, stop: int
    ) -> tuple[FileFacts, tuple[int, int], bytes]:
        """Return (facts, (start, stop) that came, bytes) of one range request.

        `inner` is the key of the object in the bucket.
        """
        import obstore

        with TRAFFIC.request():
            answer = obstore.get(self._store, inner, options={"range": (start, stop)})
            data = bytes(answer.bytes())
        TRAFFIC.count(received=len(data))
        meta = answer.meta
        facts = self._object_facts(inner, meta)
        return facts, (int(answer.range[0]), int(answer.range[1])), data

    def _object_facts(self, inner: str, meta: Any) -> FileFacts:
        """Return the facts in an answer's metadata: size, tag, and identity if the ETag is strong.

        The identity includes endpoint and account, since other ones are other stores. `inner` is
        the key of the object in the bucket.
        """
        tag, size = str(meta.get("e_tag") or ""), int(meta["size"])
        if not is_strong(tag):
            return FileFacts(size, f"{tag} {meta['last_modified']}".strip())
        return FileFacts(
            size, tag, hash_identity("bucket", self._endpoint, self._address(inner), tag, size)
        )

    def one_pass(self, inner: str, facts: FileFacts) -> str:
        """Return the SHA-256 of the object, read whole by one request.

        `inner` is the key of the object in the bucket.
        """
        import obstore

        digest = hashlib.sha256()
        try:
            with TRAFFIC.request():
                answer = obstore.get(self._store, inner)
                now = self._object_facts(inner, answer.meta)
                for piece in answer.stream():
                    TRAFFIC.count(received=len(piece))
                    digest.update(piece)
        except Exception as error:
            raise self._read_error(inner, error) from None
        self._refuse_changed(inner, now, facts)
        return digest.hexdigest()

    def _refuse_changed(self, inner: str, now: FileFacts, facts: FileFacts) -> None:
        """Raise RemoteError if the size or tag of an answer is not that of the first answer.

        `now` are the facts of the answer, `facts` those of the first one. `inner` is the key of the
        object in the bucket.
        """
        where = self._address(inner)
        if now.size != facts.size:
            raise changed_error(where, "its size", now.size, facts.size)
        if now.tag != facts.tag:
            raise changed_error(where, "its ETag", now.tag, facts.tag)

    def _first_answer(self, inner: str) -> tuple[FileFacts, bytes] | None:
        """Return (facts, first bytes) of a file, requested once; None where it does not exist.

        `inner` is the key of the object in the bucket.
        """
        if inner not in self._first:
            try:
                facts, _, head = self._fetch_range(inner, 0, FIRST)
            except FileNotFoundError:
                self._first[inner] = None
            except Exception as error:
                self._first[inner] = self._empty_object(inner, error)
            else:
                self._first[inner] = facts, head
        return self._first[inner]

    def _empty_object(self, inner: str, error: Exception) -> tuple[FileFacts, bytes]:
        """Return (facts, b"") of an empty object, whose range request fails with `error`.

        Raises `error` as a RemoteError if the object is not empty or its size cannot be read.
        `inner` is the key of the object in the bucket.
        """
        import obstore

        try:
            size = int(obstore.head(self._store, inner)["size"])
        except Exception:
            raise self._read_error(inner, error) from None
        if size:
            raise self._read_error(inner, error) from None
        return FileFacts(0), b""

    def facts(self, inner: str) -> FileFacts | None:
        """Return a file's size, version tag and identity; None where it does not exist.

        They come with its first bytes, which opening it will need anyway. `inner` is the key of the
        object in the bucket.
        """
        if self.lists(_folder(inner)) and _name(inner) not in self.names(_folder(inner)):
            return None
        found = self._first_answer(inner)
        return None if found is None else found[0]

    def is_folder(self, inner: str) -> bool:
        """Return whether there are files directly in a folder; True for the bucket itself.

        False for a name that has already been read as a file. The listing is requested once.
        `inner` is the name of the folder in the bucket.
        """
        return not inner or (self._first.get(inner) is None and bool(self._list_folder(inner)))

    def _list_folder(self, inner: str) -> list[str]:
        """Return the file names in a folder, requested once.

        `inner` is the name of the folder in the bucket.
        """
        import obstore

        if inner not in self._folders:
            try:
                with TRAFFIC.request():
                    found = obstore.list_with_delimiter(self._store, prefix=inner or None)
            except Exception as error:
                raise self._read_error(inner, error) from None
            self._folders[inner] = [_name(str(row["path"])) for row in found["objects"]]
        return self._folders[inner]

    def names(self, inner: str) -> list[str]:
        """Return the names of the files directly in a folder, without the folder's name.

        `inner` is the name of the folder in the bucket.
        """
        return self._list_folder(inner)

    def lists(self, inner: str) -> bool:
        """Return whether the folder has been listed already.

        `inner` is the name of the folder in the bucket.
        """
        return inner in self._folders

    def first(self, inner: str) -> tuple[FileFacts, bytes]:
        """Return (facts, first bytes) of a file; RemoteError where it does not exist.

        `inner` is the key of the object in the bucket.
        """
        return require_answer(self._first_answer(inner), self._address(inner))

    def fetch(self, inner: str, facts: FileFacts, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) of a file; RemoteError if it no longer fits `facts`.

        `inner` is the key of the object in the bucket.
        """
        try:
            now, found, data = self._fetch_range(inner, start, stop)
        except Exception as error:
            raise self._read_error(inner, error) from None
        self._refuse_changed(inner, now, facts)
        where = self._address(inner)
        if found != (start, stop) or len(data) != stop - start:
            raise RemoteError(f"{where}: bytes {found} came; expected {start}..{stop}")
        return memoryview(data)


def _endpoint_settings() -> str:
    """Return the environment's settings of endpoints, regions and accounts; none is a key."""
    names = filter(_PLACE.fullmatch, sorted(os.environ))
    return "\n".join(f"{name}={os.environ[name]}" for name in names)


def _folder(inner: str) -> str:
    """Return the folder of a file's name: all before its last component, "" where that is all.

    `inner` is the key of the object in the bucket.
    """
    return inner.rpartition("/")[0]


def _name(inner: str) -> str:
    """Return the last component of a file's name.

    `inner` is the key of the object in the bucket.
    """
    return inner.rpartition("/")[2]


SITE = SiteSpec(1, BucketSite, _parse_address, _endpoint_settings, "bucket")
