"""Encodes Python values as GGUF metadata values.

A value is `TypedValue`, or its type comes from the table of known keys, or from Python's own:
bool, str, int (uint32, else uint64; negative int32, else int64; in lists int32 first, as in
gguf-py), float (float32, as in gguf-py), bytes (array:uint8), and lists of these. An array that
a reader returned is copied without decoding.
"""

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import ConversionError
from aprfmt.formats.cursor import MAX_ARRAY, MAX_NESTING, MAX_STRING
from aprfmt.formats.gguf import layout
from aprfmt.formats.gguf.arrays import NumberArray, StoredArray
from aprfmt.formats.gguf.known_keys import known_type
from aprfmt.formats.gguf.metadata import StoredNaN

Piece = bytes | memoryview

_CHUNK = 4096
_SWAP: Mapping[int, str] = {2: "H", 4: "I", 8: "Q"}
_SCALARS = ("uint32", "uint64", "int32", "int64")  # for a plain int, the first that holds it
_ELEMENTS = ("int32", "uint32", "int64", "uint64")  # for a list of ints
_BOUNDS: Mapping[str, tuple[int, int]] = {
    name: (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    for name, bits, signed in (
        ("uint32", 32, False),
        ("uint64", 64, False),
        ("int32", 32, True),
        ("int64", 64, True),
    )
}


def encode_key(key: str) -> bytes:
    """Return a key's stored bytes, length first; ConversionError if GGUF cannot store it."""
    try:
        raw = key.encode()
    except UnicodeEncodeError:
        raise ConversionError(f"key {key!r} holds lone surrogates, which UTF-8 has not") from None
    if not 0 < len(raw) <= layout.MAX_KEY_BYTES:
        raise ConversionError(
            f"key '{shorten(key, 100)}' has {len(raw)} bytes; GGUF keys have 1 to "
            f"{layout.MAX_KEY_BYTES}"
        )
    return layout.pack_string(raw)


def encode_value(key: str, value: Value | TypedValue) -> list[Piece]:
    """Return the stored bytes of a value, its type first, as a list to write one by one.

    Raises ConversionError for a value that its type cannot store.
    """
    name = value.type if isinstance(value, TypedValue) else type_of(key, value)
    plain = value.value if isinstance(value, TypedValue) else value
    what = f"key '{shorten(key, 100)}'"
    head, _, rest = name.partition(":")
    if head not in layout.TYPE_BY_NAME or (rest and head != layout.ARRAY.name):
        raise ConversionError(f"{what}: there is no type {name!r}; GGUF has {_type_names()}")
    kind = layout.TYPE_BY_NAME[head]
    return [struct.pack("<I", kind.id), *_pack(kind, rest, plain, what, 1)]


def type_of(key: str, value: Value) -> str:
    """Return the name of the GGUF type a plain value is written as; ConversionError if none."""
    if isinstance(value, StoredArray):
        return value.type
    known = known_type(key, is_list(value))
    return known or _infer_type(value, f"key '{shorten(key, 100)}'", _SCALARS, 1)


def _type_names() -> str:
    """Return the names of GGUF's types, for a message."""
    return ", ".join(layout.TYPE_BY_NAME) + " (array:uint8 and so on)"


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a metadata value is a list rather than a text or a single value."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _infer_type(value: Value, what: str, ints: Sequence[str], depth: int) -> str:
    """Return the GGUF type of a Python value by its class.

    `ints` are the integer types to try in order, `depth` how many lists the value is inside of.
    Raises ConversionError for a class that has no type in GGUF.
    """
    if isinstance(value, StoredArray):
        return value.type
    if isinstance(value, bool):
        return layout.BOOL.name
    if isinstance(value, int):
        return _infer_int_type(value, value, what, ints)
    if isinstance(value, float):
        return "float32"
    if isinstance(value, str):
        return layout.STRING.name
    if isinstance(value, bytes | bytearray):
        return "array:uint8"
    # Lists get the type of their elements.
    if not is_list(value):
        raise ConversionError(
            f"{what}: GGUF has no type for {type(value).__name__}; it has {_type_names()}"
        )
    if depth > MAX_NESTING:
        _refuse_depth(what)
    return f"array:{_infer_element_type(value, what, depth)}"


def _infer_element_type(values: Sequence[Value], what: str, depth: int) -> str:
    """Return the GGUF type of a list's elements; ConversionError if they have no common type."""
    kinds = {type(value) for value in values}
    if not kinds:
        raise ConversionError(
            f"{what}: an empty list does not say what it is a list of; give Typed([], 'array:...')"
        )
    if kinds == {int}:
        return _infer_int_type(min(values), max(values), what, _ELEMENTS)
    if kinds == {int, float}:
        return "float32"
    if kinds <= {str, bytes}:
        return layout.STRING.name
    found = {_infer_type(value, what, _ELEMENTS, depth + 1) for value in values}
    if len(found) == 1:
        return found.pop()
    if all(name.startswith(f"{layout.ARRAY.name}:") for name in found):
        return layout.ARRAY.name  # each says its own element type
    raise ConversionError(
        f"{what}: a GGUF array has elements of one type, found {', '.join(sorted(found))}"
    )


def _infer_int_type(low: int, high: int, what: str, names: Sequence[str]) -> str:
    """Return the first integer type that stores `low` to `high`; ConversionError if none."""
    for name in names:
        if _BOUNDS[name][0] <= low and high <= _BOUNDS[name][1]:
            return name
    raise ConversionError(f"{what}: {low} to {high} fits none of {', '.join(names)}")


def _pack(kind: layout.ValueType, inner: str, value: Value, what: str, depth: int) -> list[Piece]:
    """Return the stored bytes of a value of type `kind`, without the type, as a list.

    `inner` is the element type of an array, `depth` how many arrays the value is inside of.
    """
    if kind is layout.ARRAY:
        return _pack_array(inner, value, what, depth)
    if kind is layout.STRING:
        return [_pack_text(value, what)]
    if kind is layout.FLOAT32 and isinstance(value, StoredNaN):
        return [value.raw]
    return [_pack_numbers(kind, (value,), what)]


def _pack_array(inner: str, value: Value, what: str, depth: int) -> list[Piece]:
    """Return the bytes of element type, count and elements as a list, for elements of type `inner`.

    Raises ConversionError for a value that is no list, an element type that GGUF lacks, and for too
    many elements or levels.
    """
    if depth > MAX_NESTING:
        _refuse_depth(what)
    if isinstance(value, bytes | bytearray):
        value = memoryview(value)
    if not isinstance(value, Sequence | memoryview) or isinstance(value, str):
        raise ConversionError(f"{what}: is {type(value).__name__}, its type array:{inner}")
    # An array of a file in the same order is copied without decoding.
    if isinstance(value, StoredArray) and value.type == f"array:{inner}" and value.order == "<":
        return [value.stored]
    head, _, rest = inner.partition(":")
    if head not in layout.TYPE_BY_NAME or (rest and head != layout.ARRAY.name):
        raise ConversionError(
            f"{what}: there is no element type {inner!r}; GGUF has {_type_names()}"
        )
    if len(value) > MAX_ARRAY:
        raise ConversionError(f"{what}: {len(value)} elements, the limit is {MAX_ARRAY}")
    # Numbers and strings are packed together, arrays one by one with their own type.
    element = layout.TYPE_BY_NAME[head]
    pieces: list[Piece] = [struct.pack("<IQ", element.id, len(value))]
    if isinstance(value, NumberArray) and value.element is element:
        pieces.append(_swap_bytes(value))
    elif element.fixed:
        pieces += [_pack_numbers(element, chunk, what) for chunk in _chunks(value)]
    elif element is layout.STRING:
        pieces.append(b"".join([_pack_text(text, what) for text in value]))
    else:
        for item in value:
            own = rest or _infer_type(item, what, _ELEMENTS, depth + 1).partition(":")[2]
            pieces += _pack_array(own, item, what, depth + 1)
    return pieces


def _swap_bytes(value: NumberArray) -> bytes:
    """Return a big-endian array's numbers in little-endian order; every bit is kept."""
    raw = value.raw.tobytes()
    if value.element.size == 1:
        return raw
    words = array(_SWAP[value.element.size], raw)
    words.byteswap()
    return words.tobytes()


def _chunks(values: Sequence[Value] | memoryview) -> Iterator[Sequence[Value]]:
    """Yield runs of at most _CHUNK values."""
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _pack_numbers(kind: layout.ValueType, values: Sequence[Value], what: str) -> bytes:
    """Return numbers as little-endian bytes; ConversionError for one that the type cannot store."""
    for value in values:
        # Python's True is 1 to struct, and any object is a bool to it.
        if isinstance(value, bool) is not (kind is layout.BOOL):
            raise ConversionError(
                f"{what}: is {shorten(repr(value), 40)} ({type(value).__name__}), "
                f"its type is {kind.name}"
            )
    try:
        return struct.pack(f"<{len(values)}{kind.letter}", *values)
    except (struct.error, OverflowError, TypeError) as error:
        shown = values[0] if len(values) == 1 else "a value of the list"
        raise ConversionError(
            f"{what}: {shorten(str(shown), 40)} is not a {kind.name}: {error}; "
            "give a Typed value of a type that holds it"
        ) from None


def _pack_text(value: Value, what: str) -> bytes:
    """Return a string's stored bytes, length first; ConversionError if it is none or too long."""
    if not isinstance(value, str | bytes):
        raise ConversionError(f"{what}: is {type(value).__name__}, its type is string")
    try:
        raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise ConversionError(
            f"{what}: character {error.start} is a lone surrogate, which UTF-8 has not"
        ) from None
    if len(raw) > MAX_STRING:
        raise ConversionError(f"{what}: {len(raw)} bytes, readers accept up to {MAX_STRING}")
    return layout.pack_string(raw)


def _refuse_depth(what: str) -> NoReturn:
    """Raise ConversionError: lists are nested too deep."""
    raise ConversionError(f"{what}: lists are nested deeper than {MAX_NESTING} levels")
