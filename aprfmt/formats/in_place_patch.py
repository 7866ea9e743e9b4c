"""Changes bytes of a file in place; after a kill, the next write into its folder completes it.

A *piece* is the new bytes of one range of a file. A *patch* is a file with all pieces of one
change.

The new bytes are first written to `.NAME.aprfmt-patch` in the file's folder: a line of JSON, then
the bytes. Then the file is changed, synced, and the patch removed. While a patch exists the file is
half old and half new, and opening it is refused by name. Writing the same bytes again is harmless.

    {"schema": "aprfmt.patch/1", "file": identity, "pieces": [[offset, bytes], ...],
     "sha256": digest of the bytes, "signature": HMAC}

The identity is the file's inode, size and owner. (The device's number may change when the system
starts again.) A patch of another file is ignored. One of this file is applied only if this user's
key signed it. A planted one, or another user's, is left alone with a warning, and the file is
refused as long as it exists.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Note
from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import bounded_json
from aprfmt.formats.journal import clean_leftovers
from aprfmt.formats.mapped_file import file_identity
from aprfmt.formats.notices import announce
from aprfmt.formats.positional_io import PLAIN_FILE, read_at, write_at
from aprfmt.formats.signature import NO_KEY, is_owned_by_user, is_signed, key_path, sign
from aprfmt.formats.temporary_files import (
    LockedFolder,
    as_output_error,
    delay_signals,
    lock_folder,
    output_error,
    remove,
    temporary_name,
)
from aprfmt.formats.unfinished_writes import PATCH_SUFFIX, patch_path

SCHEMA = "aprfmt.patch/1"
_MAX_LINE = 1 << 20
_MAX_BYTES = 1 << 30

Patch = tuple[int, bytes]  # offset, new bytes


@dataclass(frozen=True)
class PatchRecord:
    """The content of a patch file: the identity of its file, the pieces, whether it is signed."""

    file: str
    pieces: Sequence[Patch]
    signed: bool


def refuse_half_changed(path: Path) -> None:
    """Raise FormatError for a file that an interrupted change left partly old and partly new."""
    real = Path(os.path.realpath(path))
    record = _read_record(real, patch_path(real)) if os.path.lexists(patch_path(real)) else None
    if record is None:
        return
    todo = "give the same aprfmt set --in-place again, or write anything into this folder, which "
    todo += "completes it"
    if not record.signed:
        todo = (
            f"{patch_path(real).name} is not signed by this user's key: who made it completes it, "
        )
        todo += "or remove it, and check the file"
    raise FormatError(
        f"{path}: a change in place was interrupted, so old and new bytes are mixed; {todo}"
    )


def complete_patches(folder: Path) -> None:
    """Complete every change in place that a killed run left unfinished in `folder`."""
    with as_output_error(folder, "cannot be listed"):
        names = [name for name in os.listdir(folder) if _target_name(name)]
    if not names:
        return
    what = "an interrupted change in this folder cannot be completed"
    with as_output_error(folder, what), lock_folder(folder) as lock, delay_signals():
        # Patches of other files are left, those that we did not sign are reported.
        for name in names:
            path = folder / _target_name(name)
            record = _read_record(path, folder / name)
            if record is None:
                continue
            if not record.signed:
                announce(_foreign_patch_note(folder / name))
                continue
            _write_pieces(path, record.pieces)
            _remove_patch(lock, folder / name)
            text = "an earlier change in place was ended before its end; completed"
            announce(Note("warning", str(path), text, "completed_write"))


def patch_file(path: Path, pieces: Sequence[Patch], identity: str) -> None:
    """Write pieces over a file's bytes: all of them or, after a kill, by the next run.

    `identity` is that of the open file that the pieces were made for (`MappedFile.identity`).
    Raises OutputError where the file is another one now, has other bytes, or cannot be
    written; it is then unchanged, unless the message says that a patch was left.
    """
    complete_patches(path.parent)
    clean_leftovers(path.parent)
    payload = b"".join(data for _, data in pieces)
    record = patch_path(path)
    with lock_folder(path.parent) as lock, delay_signals():
        facts = _readable_status(path)
        if facts is None or file_identity(facts) != identity:
            raise OutputError(f"{path}: was changed by somebody else meanwhile; it is left alone")
        if os.path.lexists(record):
            raise OutputError(
                f"{path}: cannot be changed in place: {record.name} lies where the change would be "
                "noted, and is no change that can be completed; check the file and remove it, or "
                "write a copy with -o"
            )
        head = _add_signature({
            "schema": SCHEMA,
            "file": inode_identity(facts),
            "pieces": [[offset, len(data)] for offset, data in pieces],
            "sha256": hashlib.sha256(payload).hexdigest(),
        })  # fmt: skip
        if not head["signature"]:
            raise OutputError(f"{path}: cannot be changed in place: {NO_KEY}; write a copy with -o")
        draft = path.parent / temporary_name(record.name)
        with _remove_on_error(draft), as_output_error(path, "cannot be changed"):
            os.close(_open_for_change(path))  # is it there to be written?
            _write_new_file(draft, bounded_json.dumps(head).encode() + b"\n" + payload)
            os.replace(draft, record)
            lock.sync()
        try:
            _write_pieces(path, pieces)
            _remove_patch(lock, record)
        except OSError as error:
            raise output_error(
                path,
                f"is partly changed, {record.name} has the rest; the next write into this "
                "folder completes it, until then the file is not read",
                error,
            ) from error


def inode_identity(facts: os.stat_result) -> str:
    """Return inode, size and owner of a file, which stay the same while its bytes change."""
    return f"{facts.st_ino}:{facts.st_size}:{facts.st_uid}"


def _readable_status(path: Path) -> os.stat_result | None:
    """Return the status of the file that a path leads to; None if it cannot be had."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _foreign_patch_note(record: Path) -> Note:
    """Return the warning that a patch file is left alone, as this user's key did not sign it."""
    text = (
        f"is left alone: it is not signed by the key of this user ({key_path()}); who made it can "
        "complete it, else check the file it is of and remove it"
    )
    return Note("warning", str(record), text, "foreign_journal")


def _add_signature(head: dict[str, Any]) -> dict[str, Any]:
    """Return a patch's JSON object with its signature added, which is "" if there is no key."""
    return head | {"signature": sign(SCHEMA, bounded_json.dumps(head).encode())}


def parse_patch(data: bytes, where: str) -> PatchRecord:
    """Return the record in `data`, a patch file's bytes; FormatError unless it is complete.

    `where` begins messages.
    """
    line, newline, payload = data.partition(b"\n")
    value: Any = bounded_json.loads(line, where, max_bytes=_MAX_LINE) if newline else None
    head = value if isinstance(value, dict) else {}
    signature = head.pop("signature", "")
    places = head.get("pieces")
    if not (
        head.get("schema") == SCHEMA
        and isinstance(head.get("file"), str)
        and isinstance(places, list)
        and all(_is_range(place) for place in places)
        and sum(size for _, size in places) == len(payload)
        and head.get("sha256") == hashlib.sha256(payload).hexdigest()
    ):
        raise FormatError(
            f"{where}: is no whole patch of {SCHEMA}; check the file it is of, then remove it"
        )
    pieces, at = [], 0
    for offset, size in places:
        pieces.append((offset, payload[at : at + size]))
        at += size
    signed = is_signed(SCHEMA, bounded_json.dumps(head).encode(), signature)
    return PatchRecord(head["file"], pieces, signed)


def _is_range(place: object) -> bool:
    """Return whether a value is [offset, size], two integers from 0 to 2**62."""
    return (
        isinstance(place, list)
        and len(place) == 2
        and all(type(number) is int and 0 <= number < 1 << 62 for number in place)
    )


def _target_name(name: str) -> str:
    """Return the name of the file that a patch file changes, by the patch's name; else ""."""
    return (
        name[1 : -len(PATCH_SUFFIX)] if name.startswith(".") and name.endswith(PATCH_SUFFIX) else ""
    )


def _read_record(path: Path, record: Path) -> PatchRecord | None:
    """Return the change that the patch file `record` notes for `path`; None if it notes none.

    None also for another file's patch or a damaged one. `signed` is True only if the patch can be
    trusted.
    """
    try:
        fd = os.open(record, os.O_RDONLY | PLAIN_FILE | getattr(os, "O_NONBLOCK", 0))
    except OSError:  # removed meanwhile, or a link: ours is a file
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_BYTES:
            return None
        found = parse_patch(read_at(fd, facts.st_size, 0), str(record))
    except FormatError:
        return None  # ours is renamed into place whole
    finally:
        os.close(fd)
    status = _readable_status(path)
    if status is None or found.file != inode_identity(status):
        return None
    if not all(offset + len(data) <= status.st_size for offset, data in found.pieces):
        return None
    trusted = found.signed and is_owned_by_user(facts) and facts.st_dev == status.st_dev
    return replace(found, signed=trusted)


def _open_for_change(path: Path) -> int:
    """Return a descriptor of an existing file, for reading and writing, no link followed."""
    return os.open(path, os.O_RDWR | PLAIN_FILE)


def _write_pieces(path: Path, pieces: Sequence[Patch]) -> None:
    """Write the pieces over a file's bytes and sync it."""
    fd = _open_for_change(path)
    try:
        for offset, data in pieces:
            write_at(fd, memoryview(data), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_patch(lock: LockedFolder, record: Path) -> None:
    """Remove the patch file and sync the folder."""
    os.unlink(record)
    with suppress(OSError):
        lock.sync()  # if a power cut brings the patch back, it is written again without harm


def _write_new_file(path: Path, data: bytes) -> None:
    """Create a file that only this user can read, with these bytes, and sync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PLAIN_FILE, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _remove_on_error(draft: Path) -> Iterator[None]:
    """Remove the file `draft` if an exception leaves the block."""
    try:
        yield
    except BaseException:
        remove(draft)
        raise
