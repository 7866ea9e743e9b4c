"""Signatures of files that a run leaves for the next one, by a key that only this user has.

A journal, a patch or a list of written tensors that came with a downloaded folder looks like
ours and is not signed. The key is 32 random bytes in `aprfmt/key` of the user's state folder
(XDG_STATE_HOME, else ~/.local/state), of mode 0600, made when it is first needed. The signature
is HMAC-SHA256.
"""

import hashlib
import hmac
import os
import stat
from contextlib import suppress
from pathlib import Path

from aprfmt.formats.positional_io import PLAIN_FILE, write_at
from aprfmt.formats.temporary_files import temporary_name

_BYTES = 32
_keys: dict[Path, bytes] = {}  # by the file that holds it

NO_KEY = (
    "the user's state folder (XDG_STATE_HOME, else ~/.local/state) cannot be used, and without it "
    "the next run could not tell what this one left from what somebody planted"
)


def key_path() -> Path | None:
    """Return the path of the key file; None where there is no state folder."""
    chosen = os.environ.get("XDG_STATE_HOME", "")
    home = chosen if os.path.isabs(chosen) else os.path.expanduser("~/.local/state")
    return Path(home, "aprfmt", "key") if os.path.isabs(home) else None


def sign(kind: str, data: bytes) -> str:
    """Return the signature of `data` as 64 hex digits; "" without a key.

    `kind` is the schema of the record, which is signed with it.
    """
    key = _load_key(make=True)
    return "" if key is None else _signature(key, kind, data)


def is_signed(kind: str, data: bytes, signature: object) -> bool:
    """Return whether a record's signature was made by `sign` with this user's key.

    `kind` names the kind of record and `data` are its bytes, as `sign` got them. False without a
    key.
    """
    key = _load_key(make=False)
    return (
        key is not None
        and isinstance(signature, str)
        and signature.isascii()
        and hmac.compare_digest(signature, _signature(key, kind, data))
    )


def is_owned_by_user(facts: os.stat_result) -> bool:
    """Return whether a file is this user's; True where the system has no owners."""
    return not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()


def _signature(key: bytes, kind: str, data: bytes) -> str:
    """Return the HMAC-SHA256 of kind and data as 64 hex digits."""
    return hmac.new(key, kind.encode() + b"\0" + data, hashlib.sha256).hexdigest()


def _load_key(*, make: bool) -> bytes | None:
    """Return the user's key; with `make` it is created if there is none.

    None where there is none, or one that others could have read or made.
    """
    path = key_path()
    if path is None:
        return None
    if path not in _keys:
        with suppress(OSError, ValueError):
            key = _read_key_file(path)
            if key is None and make and _is_ours(path.parent):
                _make_key_file(path)
                key = _read_key_file(path)
            if key is not None:
                _keys[path] = key
    return _keys.get(path)


def _read_key_file(path: Path) -> bytes | None:
    """Return the bytes of a key file that only this user may read; None for any other."""
    flags = os.O_RDONLY | PLAIN_FILE | getattr(os, "O_NONBLOCK", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(fd)
        private = os.name == "nt" or not stat.S_IMODE(facts.st_mode) & 0o077
        if not (stat.S_ISREG(facts.st_mode) and is_owned_by_user(facts) and private):
            return None
        key = os.read(fd, _BYTES + 1)
    finally:
        os.close(fd)
    return key if len(key) == _BYTES else None


def _is_ours(folder: Path) -> bool:
    """Return whether the first existing folder of a path belongs to this user.

    `sudo` may leave HOME unchanged: a key that root makes there could not be read by its owner.
    """
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return is_owned_by_user(os.stat(folder))


def _make_key_file(path: Path) -> None:
    """Create the key file in one step; one that another run made meanwhile is kept."""
    os.makedirs(path.parent, mode=0o700, exist_ok=True)
    draft = path.parent / temporary_name(path.name)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN_FILE, 0o600)
    try:
        try:
            write_at(fd, memoryview(os.urandom(_BYTES)), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without hard links
            if not os.path.lexists(path):
                os.rename(draft, path)
    finally:
        with suppress(OSError):
            os.unlink(draft)
