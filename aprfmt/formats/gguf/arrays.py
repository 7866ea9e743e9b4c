"""Lazy sequences over a GGUF file's metadata arrays: numbers, strings and arrays of arrays.

Opening a file has to find where an array ends, so strings are stepped over once. The offset of
every 64th is stored, and nothing is decoded before it is asked for. All of them are sequences
that are valid until the source is closed, and their bytes can be copied into another file
without decoding (`stored`).
"""

import operator
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

from aprfmt.errors import FormatError
from aprfmt.formats.cursor import (
    MAX_ARRAY,
    MAX_COUNT,
    MAX_METADATA,
    MAX_NESTING,
    MAX_STRING,
    Cursor,
)
from aprfmt.formats.damage import Faults
from aprfmt.formats.gguf.layout import ARRAY, BOOL, STRING, TYPE_BY_ID, TYPE_BY_NAME, ValueType

STRIDE = 64  # the offset of every 64th element is stored; a look-up skips at most 63
_WINDOW = 1 << 20  # bools checked at a time
_CHUNK = 4096  # numbers decoded at a time
_NATIVE = "<" if sys.byteorder == "little" else ">"


class StoredArray(Sequence[Any]):
    """An array value of the metadata whose elements are decoded from the file when asked for.

    `type` is its full name (`array:float32`), `order` the byte order ("<" or ">"), `stored` the
    value's bytes in the file (element type, count, elements), `raw` those of the elements.
    Comparing two of the same type and order compares bytes, anything else compares elements.
    """

    __slots__ = ("_buffer", "_count", "_end", "_start", "element", "order", "type", "where")

    def __init__(self, cursor: Cursor, start: int, element: ValueType, count: int) -> None:
        """Take the array whose elements begin at `start` and end at the cursor."""
        self._buffer = cursor.buffer
        self._start = start
        self._end = cursor.offset
        self._count = count
        self.element = element
        self.order = cursor.order
        self.where = cursor.where
        self.type = f"array:{element.name}"

    @property
    def stored(self) -> memoryview:
        """The bytes of the whole value: element type, count, elements; not the value's own type."""
        return self._buffer[self._start - ARRAY.size : self._end]

    @property
    def raw(self) -> memoryview:
        """The bytes of the elements, in the file's byte order."""
        return self._buffer[self._start : self._end]

    def tolist(self) -> list[Any]:
        """Return all elements decoded, in a list; elements that are arrays become lists too."""
        return list(self)

    def _decode_element(self, index: int) -> Any:
        """Return element `index`, decoded; NotImplementedError unless a subclass says how."""
        raise NotImplementedError

    def _cursor_at(self, offset: int) -> Cursor:
        """Return a cursor at a file offset inside the array that reports no faults again."""
        cursor = Cursor(self._buffer, self.where, offset, self._end)
        cursor.order = self.order
        cursor.faults = Faults(self.where, True)  # opening has judged the values
        return cursor

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one element, or a tuple for a slice; IndexError beyond the ends."""
        if isinstance(index, slice):
            return tuple(self._decode_element(at) for at in range(*index.indices(self._count)))
        at = operator.index(index)
        at += self._count if at < 0 else 0
        if not 0 <= at < self._count:
            raise IndexError(f"element {index} of {self._count}")
        return self._decode_element(at)

    def __eq__(self, other: object) -> bool:
        """Return whether another sequence has equal elements.

        Two stored arrays of one type and byte order are compared by their bytes.
        """
        if isinstance(other, StoredArray) and (other.type, other.order) == (self.type, self.order):
            return self.stored == other.stored
        if isinstance(other, Sequence) and not isinstance(other, str | bytes | bytearray):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.type} of {self._count}>"


class NumberArray(StoredArray):
    """A lazy array of numbers or bools."""

    __slots__ = ()

    def _decode_element(self, index: int) -> Any:
        """Return number `index`, decoded."""
        at = self._start + index * self.element.size
        return struct.unpack_from(self.order + self.element.letter, self._buffer, at)[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield all numbers, decoded _CHUNK at a time."""
        step = _CHUNK * self.element.size
        for at in range(self._start, self._end, step):
            yield from self._decode_numbers(self._buffer[at : min(at + step, self._end)])

    def tolist(self) -> list[Any]:
        """Return all numbers in a list."""
        return self._decode_numbers(self.raw)

    def _decode_numbers(self, raw: memoryview) -> list[Any]:
        """Return the numbers in a run of the elements' bytes."""
        if self.order == _NATIVE or self.element.size == 1:
            return raw.cast(self.element.letter).tolist()  # type: ignore[call-overload, no-any-return]
        swapped = array(self.element.letter, raw.tobytes())
        swapped.byteswap()
        return swapped.tolist()


class StringArray(StoredArray):
    """A lazy array of strings; bytes that are not UTF-8 become surrogate escapes."""

    __slots__ = ("_marks",)

    def __init__(self, cursor: Cursor, start: int, count: int, marks: "array[int]") -> None:
        """Take an array that ends at the cursor; `marks` are the offsets of every 64th string."""
        super().__init__(cursor, start, STRING, count)
        self._marks = marks

    def _decode_element(self, index: int) -> str:
        """Return string `index`: steps from the stored offset before it, at most 63 strings."""
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        at = self._marks[index // STRIDE]
        for _ in range(index % STRIDE):
            at += 8 + length_at(self._buffer, at)[0]
        length = length_at(self._buffer, at)[0]
        return str(self._buffer[at + 8 : at + 8 + length], "utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        """Yield all strings in order."""
        length_at = struct.Struct(f"{self.order}Q").unpack_from
        buffer, at = self._buffer, self._start
        for _ in range(self._count):
            start = at + 8
            at = start + length_at(buffer, at)[0]
            yield str(buffer[start:at], "utf-8", "surrogateescape")


class NestedArray(StoredArray):
    """Arrays, each with an element type of its own; elements are StoredArrays.

    `type` names as many levels as all elements agree on: `array:array:int32`, or `array:array`.
    """

    __slots__ = ("_marks",)

    def __init__(
        self, cursor: Cursor, start: int, count: int, marks: "array[int]", inner: str
    ) -> None:
        """Take an array that ends at the cursor; `marks` are the offsets of every 64th element.

        `inner` is the end of the type's name, as far as all elements share it.
        """
        super().__init__(cursor, start, ARRAY, count)
        self._marks = marks
        self.type += inner

    def _decode_element(self, index: int) -> StoredArray:
        """Return array `index`: steps from the stored offset before it, at most 63 arrays."""
        cursor = self._cursor_at(self._marks[index // STRIDE])
        _skip_arrays(cursor, index % STRIDE, "array")
        return read_array(cursor, "array")

    def tolist(self) -> list[Any]:
        """Return lists in lists; opening has checked the depth."""
        return [item.tolist() for item in self]

    def __iter__(self) -> Iterator[StoredArray]:
        """Yield the inner arrays in order."""
        cursor = self._cursor_at(self._start)
        for _ in range(self._count):
            yield read_array(cursor, "array")


def read_type(cursor: Cursor, what: str) -> ValueType:
    """Return the value type of the next u32 id; FormatError for an id that GGUF does not have.

    `what` names what is read, for messages.
    """
    at = cursor.offset
    found = cursor.uint(4, what)
    if found not in TYPE_BY_ID:
        raise FormatError(
            f"{cursor.where}: {what} at offset {at} has value type {found}; "
            f"GGUF has 0 to {max(TYPE_BY_ID)}; the file is damaged"
        )
    return TYPE_BY_ID[found]


def read_array(cursor: Cursor, what: str) -> StoredArray:
    """Return an array value at the cursor and move past it; nothing but bools is decoded.

    `what` names it in messages. Raises FormatError or TruncatedError.
    """
    element, count = _read_array_header(cursor, what)
    start = cursor.offset
    if element is STRING:
        marks = _skip_strings(cursor, count, what)
        return StringArray(cursor, start, count, marks)
    if element is ARRAY:
        marks, inner = _skip_arrays(cursor, count, what)
        return NestedArray(cursor, start, count, marks, inner)
    _skip_numbers(cursor, element, count, what)
    return NumberArray(cursor, start, element, count)


def _read_array_header(cursor: Cursor, what: str) -> tuple[ValueType, int]:
    """Return (element type, element count) of an array; FormatError for an unlikely count."""
    element = read_type(cursor, f"the element type of {what}")
    limit = min(MAX_ARRAY, MAX_METADATA // element.size)
    return element, cursor.count(8, element.size, f"the element count of {what}", limit)


def _skip_numbers(cursor: Cursor, element: ValueType, count: int, what: str) -> None:
    """Move the cursor past `count` numbers; bools other than 0 and 1 are reported as faults."""
    start = cursor.offset
    cursor.skip(count * element.size, what)
    if element is BOOL:
        for at in range(start, cursor.offset, _WINDOW):
            window = bytes(cursor.buffer[at : min(at + _WINDOW, cursor.offset)])
            if bad := window.translate(None, b"\0\1"):
                report_bool(cursor, what, at + window.index(bad[:1]), bad[0])
                return


def report_bool(cursor: Cursor, what: str, offset: int, found: int) -> None:
    """Add a fault to the cursor's for a bool whose byte `found` is not 0 or 1.

    `offset` is its offset, `what` names the key.
    """
    error = FormatError(
        f"{cursor.where}: {what} has a bool of {found} at offset {offset}; GGUF has 0 and 1; "
        "the file is damaged"
    )
    cursor.faults.add(error)


def _skip_strings(cursor: Cursor, count: int, what: str) -> "array[int]":
    """Move past `count` strings; return the offset of every 64th."""
    marks = array("Q")
    length_at = struct.Struct(f"{cursor.order}Q").unpack_from
    for done in range(0, count, STRIDE):
        buffer, end = cursor.buffer, min(cursor.end, len(cursor.buffer))
        steps = min(STRIDE, count - done)
        first = at = cursor.offset
        try:
            for _ in range(steps):
                at += 8 + length_at(buffer, at)[0]
        except (struct.error, OverflowError):  # beyond the buffer, or beyond what Python can index
            at = end + 1
        marks.append(first)
        if at > end or at - first > MAX_STRING:
            _skip_strings_singly(cursor, steps, done, what)
        else:
            cursor.offset = at
    return marks


def _skip_strings_singly(cursor: Cursor, steps: int, done: int, what: str) -> None:
    """Move past `steps` strings one by one, so that an error names the one that is too long.

    `done` is the index of the first of them.
    """
    for number in range(done, done + steps):
        cursor.skip(read_length(cursor, f"{what}[{number}]"), f"{what}[{number}]")


def read_length(cursor: Cursor, what: str) -> int:
    """Return the length in bytes of the string at the cursor; FormatError beyond MAX_STRING.

    `what` names the string, for messages.
    """
    at = cursor.offset
    length = cursor.uint(8, f"the length of {what}")
    if length > MAX_STRING:
        raise FormatError(
            f"{cursor.where}: {what} at offset {at} is a string of {length} bytes, "
            f"the limit is {MAX_STRING}; the file is damaged"
        )
    return length


def _skip_arrays(cursor: Cursor, count: int, what: str) -> tuple["array[int]", str]:
    """Move past `count` arrays, which may hold arrays, without recursion.

    Returns (offset of every 64th, the end of the type's name as far as all share it). Raises
    FormatError for more than MAX_COUNT arrays and for nesting from MAX_NESTING levels on.
    """
    marks = array("Q")
    levels: list[set[str]] = []  # element types met at each level
    open_counts = [count]  # arrays left at each open level
    met = 0
    while open_counts:
        depth = len(open_counts)
        if not open_counts[-1]:
            open_counts.pop()
            continue
        if depth == 1 and (count - open_counts[0]) % STRIDE == 0:
            marks.append(cursor.offset)
        open_counts[-1] -= 1
        met += 1
        if met > MAX_COUNT:
            raise FormatError(f"{cursor.where}: {what} holds more than {MAX_COUNT} arrays")
        element, inner = _read_array_header(cursor, what)
        if depth > len(levels):
            levels.append(set())
        levels[depth - 1].add(element.name)
        if element is ARRAY:
            if depth + 1 >= MAX_NESTING:
                raise FormatError(
                    f"{cursor.where}: {what} at offset {cursor.offset} nests arrays deeper than "
                    f"the limit of {MAX_NESTING} levels"
                )
            open_counts.append(inner)
        elif element is STRING:
            _skip_strings(cursor, inner, what)
        else:
            _skip_numbers(cursor, element, inner, what)
    return marks, _shared_type_name(levels)


def _shared_type_name(levels: Sequence[set[str]]) -> str:
    """Return the type name ":T1:T2..." of the levels down to which all elements have one type.

    `levels` has the types of each level, outermost first. "" where the first already differ.
    """
    name = ""
    for found in levels:
        if len(found) > 1:
            break
        (only,) = found
        name += f":{only}"
        if TYPE_BY_NAME[only] is not ARRAY:
            break
    return name
