"""From bytes to the structure of one safetensors file, under all rules of the format.

Nothing is lenient here: a file that breaks a rule of the format's text is refused, also where the
reference lets it pass (a space before `{`, unknown fields of an entry).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.dtypes import BY_SAFETENSORS
from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats import jsonio
from aprfmt.formats.cursor import MAX_COUNT, MAX_HEADER
from aprfmt.formats.safetensors.layout import FIELDS, METADATA, PREFIX, U64, bits
from aprfmt.tensor import Note, TensorInfo
from aprfmt.text import shorten


@dataclass(slots=True)
class Parsed:
    """The structure of one file; `infos` in the header's own order, offsets absolute.

    `header_size` counts the JSON with its padding, `end` is where the last tensor ends.
    """

    where: str
    buffer: memoryview
    size: int
    header_size: int
    metadata: dict[str, str]
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    end: int = 0

    @property
    def data_offset(self) -> int:
        """Where the tensors begin."""
        return PREFIX + self.header_size

    @property
    def header_raw(self) -> memoryview:
        """The length, the JSON and its padding, as they stand in the file."""
        return self.buffer[: self.data_offset]


def parse(buffer: memoryview, where: str, *, partial: bool = False) -> Parsed:
    """Return the structure of the safetensors file in `buffer`; `where` begins every message.

    `partial` lists a file whose data is cut, with a warning. Raises FormatError or TruncatedError.
    """
    size = len(buffer)
    if size < PREFIX:
        raise TruncatedError(f"{where}: has {size} bytes, the header's length alone takes {PREFIX}")
    length = int.from_bytes(buffer[:PREFIX], "little")
    if length > MAX_HEADER:
        raise FormatError(
            f"{where}: header length at offset 0 is {length}, the format allows {MAX_HEADER}; "
            "the file is damaged or no safetensors file"
        )
    if length > size - PREFIX:
        raise TruncatedError(
            f"{where}: header length at offset 0 is {length}, {size - PREFIX} bytes follow; "
            "the file is cut or damaged"
        )
    raw = bytes(buffer[PREFIX : PREFIX + length])
    header = _read_header(raw, f"{where}: header at offset {PREFIX}")
    parsed = Parsed(where, buffer, size, length, _metadata(header.pop(METADATA, {}), where))
    if len(header) > MAX_COUNT:
        raise FormatError(f"{where}: {len(header)} tensors, the limit is {MAX_COUNT}")
    for name, entry in header.items():
        parsed.infos[name] = _info(name, entry, parsed)
    _check_contiguous(parsed)
    _check_end(parsed, partial)
    return parsed


def _read_header(raw: bytes, where: str) -> dict[str, Any]:
    first = raw[:1]
    if first != b"{":
        found = f"0x{first.hex()}" if first else "nothing"
        raise FormatError(f"{where}: begins with {found}; the format wants '{{'")
    last = raw.rstrip(b" ")[-1]
    if last != ord("}"):
        raise FormatError(
            f"{where}: ends with 0x{last:02x} before its padding; the format wants '}}' and "
            "then spaces only"
        )
    header = jsonio.loads(raw, where, max_bytes=MAX_HEADER)
    assert isinstance(header, dict)  # it begins with a brace
    return header


def _metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise FormatError(
            f"{where}: {METADATA} is {type(value).__name__}; the format wants an object of strings"
        )
    for key, text in value.items():
        if not isinstance(text, str):
            raise FormatError(
                f"{where}: {METADATA} key {shorten(key, 80)!r} is {type(text).__name__}; "
                "the format allows strings only"
            )
    return value


def _tensor(name: str) -> str:
    return f"tensor {shorten(name, 100)!r}"


def _info(name: str, entry: Any, parsed: Parsed) -> TensorInfo:
    what = f"{parsed.where}: {_tensor(name)}"
    if not isinstance(entry, dict) or entry.keys() != set(FIELDS):
        found = ", ".join(shorten(key, 40) for key in entry) if isinstance(entry, dict) else entry
        raise FormatError(f"{what} has {shorten(str(found), 200)}; expected {', '.join(FIELDS)}")
    dtype, shape, offsets = (entry[key] for key in FIELDS)
    row = BY_SAFETENSORS.get(dtype) if isinstance(dtype, str) else None
    if row is None:
        raise FormatError(
            f"{what}: dtype {shorten(str(dtype), 40)!r} is not one of {', '.join(BY_SAFETENSORS)}"
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(
            f"{what}: shape {shorten(str(shape), 100)} and data_offsets "
            f"{shorten(str(offsets), 100)}; expected arrays of non-negative integers, the second "
            "of two"
        )
    count = 1
    for dim in shape:
        count *= dim
        if count >= U64:
            raise FormatError(
                f"{what}: shape {shorten(str(shape), 200)} has more elements than 64 bits count"
            )
    total = count * bits(row)
    if total >= U64:
        raise FormatError(f"{what}: {count} elements of {dtype} have more bits than 64 bits count")
    if total % 8:
        raise FormatError(
            f"{what}: {count} elements of {dtype} take {total} bits, which is no whole byte"
        )
    begin, end = offsets
    if end - begin != total // 8:
        raise FormatError(
            f"{what}: data_offsets {begin}..{end} hold {end - begin} bytes, shape "
            f"{shorten(str(shape), 200)} of {dtype} takes {total // 8}"
        )
    start = parsed.data_offset + begin
    return TensorInfo(name, tuple(shape), row.name, start, end - begin, row.row_bytes(shape))


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < U64 for item in value)


def _check_contiguous(parsed: Parsed) -> None:
    at, before = parsed.data_offset, "the header"
    for info in sorted(parsed.infos.values(), key=lambda info: (info.offset, info.nbytes)):
        if info.offset != at:
            kind = (
                "overlaps" if info.offset < at else f"leaves {info.offset - at} bytes unused after"
            )
            raise FormatError(
                f"{parsed.where}: {_tensor(info.name)} begins at byte {info.offset} and {kind} "
                f"{before}, which ends at {at}; the format wants no gap and no overlap"
            )
        at, before = info.offset + info.nbytes, _tensor(info.name)
    parsed.end = at


def _check_end(parsed: Parsed, partial: bool) -> None:
    missing = parsed.end - parsed.size
    if missing < 0:
        raise FormatError(
            f"{parsed.where}: {-missing} bytes follow the last tensor, which ends at "
            f"{parsed.end}; the format wants the file to end there"
        )
    if missing:
        text = (
            f"has {parsed.size} bytes, its tensors end at {parsed.end}: {missing} bytes are missing"
        )
        if not partial:
            raise TruncatedError(
                f"{parsed.where}: {text}; get the file again, or list it with --partial"
            )
        parsed.notes.append(Note("warning", parsed.where, text))
        for info in parsed.infos.values():
            stop = info.offset + info.nbytes
            if info.nbytes and stop > parsed.size:
                text = f"lies beyond the end ({info.offset}..{stop})"
                parsed.notes.append(Note("warning", info.name, text))


def merge_metadata(
    shards: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, str], list[Note]]:
    """Return the metadata of all shards together, the first shard's values first, and warnings."""
    merged: dict[str, str] = {}
    notes: list[Note] = []
    for where, metadata in shards.items():
        for key, value in metadata.items():
            if merged.setdefault(key, value) != value:
                text = f"metadata {shorten(key, 80)!r} differs from that of an earlier shard"
                notes.append(Note("warning", where, text))
    return merged, notes
