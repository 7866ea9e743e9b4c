"""Bytes of a file changed where they lie; after a kill, the next write there completes it.

What will be written is first written beside the file, as `.NAME.aprfmt-patch`: a line of JSON, then
the new bytes. Then the file is changed, synced, and the patch removed. While a patch lies there the
file is half old and half new, and opening it is refused by name; writing the same bytes again is
harmless.

    {"schema": "aprfmt.patch/1", "file": identity, "pieces": [[offset, bytes], ...], "sha256": ...}

The identity is the file's device, inode and size, which nobody else can know: a patch that came
with a downloaded folder is not one of this file, and is never applied.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import jsonio
from aprfmt.formats.positioned import read_at, write_at
from aprfmt.formats.temporary import (
    LockedFolder,
    as_output_error,
    clean,
    locked,
    output_error,
    remove,
    temporary_name,
    uninterrupted,
)
from aprfmt.remote.paths import RemotePath

SCHEMA = "aprfmt.patch/1"
SUFFIX = ".aprfmt-patch"
_MAX_LINE = 1 << 20
_MAX_BYTES = 1 << 30
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

Patch = tuple[int, bytes]  # offset, new bytes


def patch_of(path: Path) -> Path:
    """Return where the patch of a file lies."""
    return path.parent / f".{path.name}{SUFFIX}"


def refuse_half_changed(path: Path) -> None:
    """Raise FormatError for a file that an interrupted change left half old and half new."""
    if isinstance(path, RemotePath):
        return
    real = Path(os.path.realpath(path))
    if os.path.lexists(patch_of(real)) and _pieces(real, patch_of(real)) is not None:
        raise FormatError(
            f"{path}: a change in place was interrupted, so old and new bytes are mixed; give the "
            "same aprfmt set --in-place again, or write anything into this folder, which "
            "completes it"
        )


def complete(folder: Path) -> None:
    """Complete every change in place that a killed run left unfinished in `folder`."""
    with as_output_error(folder, "cannot be listed"):
        names = [name for name in os.listdir(folder) if _target(name)]
    if not names:
        return
    what = "an interrupted change in this folder cannot be completed"
    with as_output_error(folder, what), locked(folder) as lock, uninterrupted():
        for name in names:
            path = folder / _target(name)
            pieces = _pieces(path, folder / name)
            if pieces is not None:
                _write(path, pieces)
                _finish(lock, folder / name)


def patch(path: Path, pieces: Sequence[Patch], identity: str) -> None:
    """Write pieces over what a file has, all of them or, after a kill, by the next run.

    Raises OutputError where the file is not the one of `identity`, or cannot be written; it is
    then as it was, unless the message says that a patch was left.
    """
    complete(path.parent)
    clean(path.parent)
    payload = b"".join(data for _, data in pieces)
    head = {"schema": SCHEMA, "file": identity,
            "pieces": [[offset, len(data)] for offset, data in pieces],
            "sha256": hashlib.sha256(payload).hexdigest()}  # fmt: skip
    record = patch_of(path)
    with locked(path.parent) as lock, uninterrupted():
        if identity_of(path) != identity:
            raise OutputError(f"{path}: was changed by somebody else meanwhile; it is left alone")
        draft = path.parent / temporary_name(record.name)
        with _removed(draft), as_output_error(path, "cannot be changed"):
            os.close(_open(path))  # is it there to be written?
            _send(draft, jsonio.dumps(head).encode() + b"\n" + payload)
            os.replace(draft, record)
            lock.sync()
        try:
            _write(path, pieces)
            _finish(lock, record)
        except OSError as error:
            raise output_error(
                path,
                f"is partly changed, {record.name} has the rest; the next write into this "
                "folder completes it, until then the file is not read",
                error,
            ) from error


def identity_of(path: Path) -> str:
    """Return what tells a file from every other one, whatever its bytes; "" if it is not there."""
    try:
        facts = os.stat(path)
    except OSError:
        return ""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}"


def parse_patch(data: bytes, where: str) -> tuple[str, list[Patch]]:
    """Return (identity, pieces) of a patch. Raises FormatError."""
    line, newline, payload = data.partition(b"\n")
    value: Any = jsonio.loads(line, where, max_bytes=_MAX_LINE) if newline else None
    places = value.get("pieces") if isinstance(value, dict) else None
    if not (
        isinstance(value, dict)
        and value.get("schema") == SCHEMA
        and isinstance(value.get("file"), str)
        and isinstance(places, list)
        and all(_is_place(place) for place in places)
        and sum(size for _, size in places) == len(payload)
        and value.get("sha256") == hashlib.sha256(payload).hexdigest()
    ):
        raise FormatError(
            f"{where}: is no whole patch of {SCHEMA}; check the file it is of, then remove it"
        )
    pieces, at = [], 0
    for offset, size in places:
        pieces.append((offset, payload[at : at + size]))
        at += size
    return value["file"], pieces


def _is_place(place: object) -> bool:
    return (
        isinstance(place, list)
        and len(place) == 2
        and all(type(number) is int and 0 <= number < 1 << 62 for number in place)
    )


def _target(name: str) -> str:
    """Return the name of the file that a patch changes, by the patch's name; "" for others."""
    return name[1 : -len(SUFFIX)] if name.startswith(".") and name.endswith(SUFFIX) else ""


def _pieces(path: Path, record: Path) -> list[Patch] | None:
    """Return what a patch still has to write into a file; None if it is another file's."""
    try:
        fd = os.open(record, os.O_RDONLY | _FLAGS | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
            return None
        identity, pieces = parse_patch(read_at(fd, facts.st_size, 0), str(record))
    except FormatError:
        return None  # ours is renamed into place whole
    finally:
        os.close(fd)
    size = os.stat(path).st_size if path.exists() else 0
    inside = all(offset + len(data) <= size for offset, data in pieces)
    return pieces if identity == identity_of(path) and inside else None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | _FLAGS)


def _write(path: Path, pieces: Sequence[Patch]) -> None:
    fd = _open(path)
    try:
        for offset, data in pieces:
            write_at(fd, memoryview(data), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _finish(lock: LockedFolder, record: Path) -> None:
    os.unlink(record)
    with suppress(OSError):
        lock.sync()  # if a power cut brings the patch back, it is written again without harm


def _send(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _removed(draft: Path) -> Iterator[None]:
    """Remove a draft where its block is not left cleanly."""
    try:
        yield
    except BaseException:
        remove(draft)
        raise
