"""The key-value part of a GGUF file: structure read at once, strings and arrays when needed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats.cursor import MAX_METADATA, Cursor
from aprfmt.formats.gguf import arrays
from aprfmt.formats.gguf.layout import ARRAY, BOOL, FLOAT32, MAX_KEY_BYTES, STRING, ValueType

Drop = Callable[[int, int], None]  # tells the system that bytes [start, stop) are not needed now

_LARGE = 1 << 20  # values whose pages are given back once they have been stepped over


class StoredNaN(float):
    """A float32 NaN with its bits: a Python float is a float64, which loses some of them."""

    raw: bytes  # little-endian


@dataclass(frozen=True, slots=True)
class MetadataField:
    """One value of the metadata: its type's full name, and where its bytes are.

    The value itself is there unless it is a string, which is decoded on request.
    """

    type: str
    start: int
    end: int
    value: Value


class Metadata(Mapping[str, Value]):
    """Values by key in file order; strings are decoded on every look-up, arrays are lazy.

    Values are int, float, bool, str (surrogate escapes for bytes that are not UTF-8) and
    StoredArray. Valid until the source is closed.
    """

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.fields: dict[str, MetadataField] = {}

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, f"{len(self)} keys")

    def __getitem__(self, key: str) -> Value:
        """Return the value of a key; a string is decoded from the file."""
        field = self.fields[key]
        if field.type == STRING.name:
            return str(self.buffer[field.start + 8 : field.end], "utf-8", "surrogateescape")
        return field.value

    def __contains__(self, key: object) -> bool:
        return key in self.fields  # Mapping's own would decode the value to find out

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    @property
    def types(self) -> dict[str, str]:
        """{key: value type}: `uint32`, `string`, `array:string`, `array:array:int32`."""
        return {key: field.type for key, field in self.fields.items()}


def read_metadata(cursor: Cursor, count: int, drop: Drop | None) -> Metadata:
    """Return the next `count` keys, with their values skipped; the first of equal keys counts.

    `drop` is called with (start, stop) of large values. Raises FormatError or TruncatedError.
    """
    metadata = Metadata(cursor.buffer)
    begin = cursor.offset
    for number in range(count):
        at = cursor.offset
        key = _read_key(cursor, number)
        what = f"key '{shorten(key, 100)}'"
        if key in metadata.fields:
            error = f"{cursor.where}: {what} at offset {at} stands twice; keys must be unique"
            cursor.faults.add(FormatError(error))
        # Values are skipped, not decoded; the first of equal keys counts.
        field = _read_value(cursor, arrays.read_type(cursor, what), what)
        metadata.fields.setdefault(key, field)
        if cursor.offset - begin > MAX_METADATA:
            raise FormatError(
                f"{cursor.where}: the metadata up to {what} takes {cursor.offset - begin} bytes, "
                f"the limit is {MAX_METADATA}"
            )
        if drop is not None and field.end - field.start > _LARGE:
            drop(field.start, field.end)
    metadata.buffer = cursor.buffer
    return metadata


def _read_key(cursor: Cursor, number: int) -> str:
    """Return key number `number` and move past it; FormatError for an impossible length."""
    at = cursor.offset
    length = cursor.uint(8, f"the length of key {number}")
    if not 0 < length <= MAX_KEY_BYTES:
        error = FormatError(
            f"{cursor.where}: key {number} at offset {at} has {length} bytes; "
            f"GGUF keys have 1 to {MAX_KEY_BYTES}"
        )
        if length:
            raise error
        cursor.faults.add(error)
    return cursor.name(length, f"key {number}")[0]


def _read_value(cursor: Cursor, kind: ValueType, what: str) -> MetadataField:
    """Return the field of the next value, of type `kind`, and move past it.

    Strings and arrays are not decoded. `what` names the key in messages.
    """
    start = cursor.offset
    value: Value = None
    if kind is ARRAY:
        value = arrays.read_array(cursor, what)
    elif kind is STRING:
        cursor.skip(arrays.read_length(cursor, what), what)
    else:
        # A bool is read as a number first: C's 2 is not Python's True.
        (value,) = cursor.unpack("B" if kind is BOOL else kind.letter, what)
        if kind is BOOL:
            if value > 1:
                arrays.report_bool(cursor, what, start, value)
            value = bool(value)
        elif kind is FLOAT32 and value != value:
            value = StoredNaN(value)
            stored = cursor.buffer[start : cursor.offset].tobytes()
            value.raw = stored if cursor.order == "<" else stored[::-1]
    name = value.type if isinstance(value, arrays.StoredArray) else kind.name
    return MetadataField(name, start, cursor.offset, value)
