"""The directory of a zip archive of torch.save: where every record's bytes are, checked.

torch stores records uncompressed and aligned, so that they can be mapped. A record that is
compressed or encrypted is refused, as are two that share bytes. Layout source: PKWARE's
APPNOTE.TXT, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (its end).
"""

import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from aprfmt.base.protocols import ByteSource, Region
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.cursor import MAX_COUNT
from aprfmt.formats.mapped_file import open_bytes, read_head

LOCAL, ENTRY, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64, _LOCATOR = b"PK\x06\x06", b"PK\x06\x07"
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LONG_END = struct.Struct("<4sQ2H2I4Q")
_LONG_LOCATOR = struct.Struct("<4sIQI")
_COMMENT = 65535  # bytes of the longest comment after the end
_NARROW, _WIDE = 0xFFFF, 0xFFFFFFFF  # in a field whose value is in a zip64 field
_MAX_DIRECTORY = 256 << 20
_DESCRIPTOR = 8  # the flag of a local header whose sizes follow the data
CUT = "no zip directory at its end; the archive is cut: get it again whole"


class ZipRecord(NamedTuple):
    """One file of the archive: its bytes are [start, start + size) of the archive.

    `header` is the offset of its local header.
    """

    name: str
    header: int
    start: int
    size: int
    crc: int


def read_directory(file: ByteSource, where: str) -> dict[str, ZipRecord]:
    """Return {name: record}, in the order of the directory.

    Reads the end of the file, the directory and every local header. Raises FormatError for what
    does not fit together, UnsupportedError for compressed and encrypted records.
    """
    entries = list(_read_entries(file.view, file.size, where))
    heads = file.read([(entry.header, _name_end(entry)) for entry in entries])
    records: dict[str, ZipRecord] = {}
    for entry, head in zip(entries, heads, strict=True):
        if entry.name in records:
            raise FormatError(f"{where}: its directory has {entry.name!r} twice; it is damaged")
        records[entry.name] = _locate_bytes(entry, bytes(head), file.size, where)
    _refuse_overlap(records, where)
    return records


def script_text(where: str) -> str:
    """Return the sentence that refuses a TorchScript archive."""
    return (
        f"{where}: is a TorchScript archive, a program with its weights, not a file of torch.save; "
        f"save these: torch.save(torch.jit.load({where!r}).state_dict(), 'weights.pt')"
    )


def _name_end(entry: ZipRecord) -> int:
    """Return the offset at which the name in a record's local header ends."""
    return entry.header + _LOCAL.size + len(entry.name.encode("utf-8", "surrogateescape"))


def is_cut_archive(path: Path) -> bool:
    """Return whether a file begins as a zip archive but has no directory at its end: cut short.

    Raises FormatError if the path is not a regular file.
    """
    if read_head(path, len(LOCAL))[0] != LOCAL:
        return False
    with closing(open_bytes(path)) as file:
        return _find_end(file.view, file.size)[2] < 0


def _find_end(view: Region, size: int) -> tuple[int, bytes, int]:
    """Return (offset of the tail, the tail's bytes, index in it of the zip end record or -1).

    The tail is the last bytes of the file, which has `size` bytes and is read through `view`. It is
    long enough for the record, and for an archive's comment if that follows the record.
    """
    # torch writes no comment: only another archive's end is looked for.
    base = max(0, size - _END.size - _LONG_LOCATOR.size)
    tail = bytes(view[base:size])
    at = tail.rfind(END)
    if at != len(tail) - _END.size:
        base = max(0, base - _COMMENT)
        tail = bytes(view[base:size])
        at = tail.rfind(END)
    return base, tail, at if len(tail) - at >= _END.size else -1


def _find_directory(view: Region, size: int, where: str) -> tuple[int, int, int, int]:
    """Return (number of entries, start, size, end) of a zip archive's directory, in bytes.

    It is found from the end of the file, of `size` bytes. Raises TruncatedError without a
    directory, FormatError for an impossible one, UnsupportedError for one of several zip files.
    """
    base, tail, at = _find_end(view, size)
    if at < 0:
        raise TruncatedError(f"{where}: {CUT}")
    _, disk, first, here, count, length, start, comment = _END.unpack_from(tail, at)
    if at + _END.size + comment != len(tail):
        raise FormatError(
            f"{where}: {len(tail) - at - _END.size - comment} bytes stand after its directory; it "
            "is damaged, or something was appended"
        )
    stop = base + at
    place = at - _LONG_LOCATOR.size
    long_form = place >= 0 and tail[place : place + 4] == _LOCATOR  # torch always writes it
    if not long_form and (_NARROW in (disk, first, here, count) or _WIDE in (length, start)):
        raise FormatError(f"{where}: its zip directory has no zip64 locator; it is damaged")
    if long_form:
        _, disk, stop, _ = _LONG_LOCATOR.unpack_from(tail, place)
        if stop + _LONG_END.size != base + place:
            raise FormatError(
                f"{where}: its zip64 locator names byte {stop}, and the directory's end is at "
                f"{base + place - _LONG_END.size}; something was put before it, or it is damaged"
            )
        long = bytes(view[stop : stop + _LONG_END.size])
        kind, _, _, _, disk, first, here, count, length, start = _LONG_END.unpack(long)
        if kind != _END64:
            raise FormatError(f"{where}: no zip64 directory end at byte {stop}; it is damaged")
    if disk or first or here != count:
        raise UnsupportedError(f"{where}: is one of several zip files; join them first")
    if start + length != stop:
        raise FormatError(
            f"{where}: its zip directory is said to take bytes {start}..{start + length}, and has "
            f"to end at {stop}; something was put before it, or it is damaged"
        )
    if length > _MAX_DIRECTORY or count > MAX_COUNT or count * _ENTRY.size > length:
        raise FormatError(
            f"{where}: its zip directory claims {count} records in {length} bytes; it is damaged"
        )
    return count, start, length, stop


def _read_entries(view: Region, size: int, where: str) -> Iterator[ZipRecord]:
    """Yield the record of every directory entry; its `start` is 0, not known yet.

    Raises FormatError for a damaged entry, TruncatedError for bytes past the records' end,
    UnsupportedError for a record that is encrypted or compressed, and for TorchScript.
    """
    count, begin, length, _ = _find_directory(view, size, where)
    data = bytes(view[begin : begin + length])
    at = 0
    for _ in range(count):
        if length - at < _ENTRY.size or data[at : at + 4] != ENTRY:
            raise FormatError(
                f"{where}: no record of the zip directory at byte {begin + at}; it is damaged"
            )
        # Fixed fields, then name, extra fields and comment of the lengths they give.
        row = _ENTRY.unpack_from(data, at)
        flags, method, crc, packed, plain = row[3], row[4], row[7], row[8], row[9]
        name_size, extra_size, comment_size, disk, header = *row[10:14], row[16]
        stop = at + _ENTRY.size + name_size + extra_size + comment_size
        if stop > length:
            raise FormatError(f"{where}: its zip directory ends inside a record; it is damaged")
        name = data[at + _ENTRY.size : at + _ENTRY.size + name_size]
        text = name.decode("utf-8", "surrogateescape")
        extra = data[at + _ENTRY.size + name_size : stop - comment_size]
        plain, packed, header = _apply_zip64(extra, (plain, packed, header), where)
        # The bytes must be stored plainly, so that they can be mapped.
        if flags & 1:
            what = _record_text(where, text)
            raise UnsupportedError(f"{what} is encrypted; decrypt the file first")
        if method and "/code/" in text:  # which torch.jit.save compresses
            raise UnsupportedError(script_text(where))
        if method:
            what = _record_text(where, text)
            raise UnsupportedError(
                f"{what} is compressed (method {method}, {packed} bytes to {plain}); "
                "torch.save stores records as they are: save it again with torch, or zip it with -0"
            )
        # Sizes must agree, and the record must end before the directory.
        if packed != plain or disk not in (0, _NARROW):
            what = _record_text(where, text)
            raise FormatError(
                f"{what} is stored in {packed} bytes and said to have {plain}; it is damaged"
            )
        if header + _LOCAL.size + name_size + plain > begin:
            what = _record_text(where, text)
            raise TruncatedError(
                f"{what} is said to take {plain} bytes from byte {header}, the records end at "
                f"{begin}; it is damaged"
            )
        yield ZipRecord(text, header, 0, plain, crc)
        at = stop
    if at != length:
        raise FormatError(f"{where}: its zip directory has {length - at} bytes too many")


def _apply_zip64(extra: bytes, values: tuple[int, ...], where: str) -> list[int]:
    """Return `values` (two sizes and an offset), with those beyond 32 bits read from `extra`.

    `extra` are the extra fields of a record, of which the zip64 field has these values. Raises
    FormatError where the zip64 field lacks one of them.
    """
    if _WIDE not in values:
        return list(values)
    # Extra fields are (kind, size, bytes); kind 1 has the 64-bit values, in order.
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, at)
        if kind == 1 and at + 4 + size <= len(extra):
            rest = extra[at + 4 : at + 4 + size]
            found = []
            for value in values:
                if value == _WIDE:
                    if len(rest) < 8:
                        break
                    value, rest = int.from_bytes(rest[:8], "little"), rest[8:]
                found.append(value)
            if len(found) == len(values):
                return found
            break
        at += 4 + size
    raise FormatError(
        f"{where}: a record of its zip directory lacks its zip64 field; it is damaged"
    )


def _record_text(where: str, name: str) -> str:
    """Return how messages name a record of an archive: its name is as long as a file says."""
    return f"{where}: {shorten(name, 100)!r}"


def _locate_bytes(entry: ZipRecord, head: bytes, size: int, where: str) -> ZipRecord:
    """Return the record with the start of its bytes.

    `head` is its local header and as many bytes after it as its name has in the directory. `size`
    is the file's. FormatError if the header or the name contradicts the directory, TruncatedError
    if the record's bytes go past the file's end.
    """
    if len(head) < _LOCAL.size or head[:4] != LOCAL:
        what = _record_text(where, entry.name)
        raise FormatError(f"{what}: no local zip header at byte {entry.header}; it is damaged")
    _, _, flags, method, _, _, _, _, plain, name_size, extra_size = _LOCAL.unpack_from(head)
    name = head[_LOCAL.size :]
    later = flags & _DESCRIPTOR and plain == 0
    if (
        method
        or flags & 1
        or name_size != len(name)
        or (plain not in (entry.size, _WIDE) and not later)
    ):
        what = _record_text(where, entry.name)
        raise FormatError(
            f"{what}: its local zip header at byte {entry.header} does not say what the directory "
            "says; it is damaged, or made to be read in two ways"
        )
    if name != entry.name.encode("utf-8", "surrogateescape"):
        raise FormatError(
            f"{where}: the record at byte {entry.header} is {shorten(repr(name), 80)}, its "
            f"directory says {entry.name!r}; it is damaged"
        )
    start = entry.header + _LOCAL.size + name_size + extra_size
    if start + entry.size > size:
        what = _record_text(where, entry.name)
        raise TruncatedError(
            f"{what} needs bytes {start}..{start + entry.size}, the file has {size}; get it again"
        )
    return ZipRecord(entry.name, entry.header, start, entry.size, entry.crc)


def _refuse_overlap(records: Mapping[str, ZipRecord], where: str) -> None:
    """Raise FormatError if two records share bytes, which would make a small file a large one."""
    for before, after in pairwise(sorted(records.values(), key=lambda row: row.header)):
        if before.start + before.size > after.header:
            raise FormatError(
                f"{where}: {shorten(before.name, 100)!r} ({before.header}.."
                f"{before.start + before.size}) overlaps {shorten(after.name, 100)!r}, which "
                f"begins at {after.header}; it is damaged, or made to be large"
            )
