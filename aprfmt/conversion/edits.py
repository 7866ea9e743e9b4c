"""Parse single metadata values: KEY=VALUE, KEY:TYPE=VALUE, KEY:TYPE[]=A,B,C.

A key keeps the type it has in the file; a new key gets the type that is known for it, else the type
of its text read as JSON. `FormatSpec.values` has each format's types and keys.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, UsageError
from aprfmt.formats import FORMATS, FormatSpec
from aprfmt.formats.bounded_json import loads
from aprfmt.model import Model
from aprfmt.model.hf_folder import read_text
from aprfmt.model.patterns import close_names

MAX_VALUE = 64 << 20  # bytes of a value; large enough for a carried tokenizer.json
ARRAY = "array:"
_NUMBER = re.compile(r"(u?)int(\d+)")
_LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class KeyChange:
    """The value of one key before and after a change, for a report.

    A long array is replaced by a text with its length.
    """

    key: str
    how: Literal["set", "added", "removed"]
    old: Value
    new: Value
    old_type: str  # "" if the format has no types, or the key does not exist
    new_type: str


def short_name(name: str) -> str:
    """Return the short spelling of a value type: `u32`, `f64`, `str`; other names unchanged."""
    if name == "string":
        return "str"
    return re.sub(r"^(u|i|f)[a-z]*(\d+)$", r"\1\2", name)


def split_type(key_text: str, model: Model) -> tuple[str, str]:
    """Return (KEY, type name) of `KEY:TYPE` or `KEY:TYPE[]`; the type is "" if none is given.

    An existing key with a colon in its name is not split. Raises UsageError for a type that the
    format does not have.
    """
    # Take the text after the last colon, and count the brackets of arrays.
    key, colon, word = key_text.rpartition(":")
    depth = 0
    while word.endswith("[]"):
        word, depth = word[:-2], depth + 1
    # All type names of all formats, long and short.
    every = {
        spelled: name
        for format in FORMATS.own
        for name in FORMATS[format].values.types
        for spelled in (name, short_name(name))
    }
    if key_text in model.metadata or not colon or not key:
        return key_text, ""
    types = FORMATS[model.format].values.types
    if every.get(word) in types:
        return key, ARRAY * depth + every[word]
    # No type of this format: an error where it looks like one.
    if types:
        names = ", ".join(map(short_name, types))
        raise UsageError(
            f"{key_text}: there is no type {word!r}; {model.format} has {names}, and arrays of "
            "them: "
            f"{key}:{short_name(types[0])}[]=1,2,3"
        )
    if word in every:
        raise UsageError(
            f"{key_text}: values of {model.format} are JSON and have no types; give JSON: "
            f"{key}=[1,2,3]"
        )
    return key_text, ""


def parse_value(model: Model, key: str, type_name: str, text: str) -> Value | TypedValue:
    """Return `text` as the value of a model's key, with its type where the format has types.

    `type_name` is the type to give it, or "". `@FILE` means the content of the file. Raises
    UsageError if the text does not fit the type.
    """
    rules = FORMATS[model.format]
    if any(key.startswith(prefix) for prefix in rules.values.writer_keys):
        raise UsageError(f"{key}: is written by aprfmt split and aprfmt merge; use those")
    whole = text.startswith("@")
    if whole:
        text = read_text(Path(text[1:]))
    if type_name:
        return TypedValue(parse_typed(text, type_name, key, whole), type_name)
    if key in model.metadata:
        return _like_present(model, key, text, whole)
    return _parse_new(model, rules, key, text, whole)


def _like_present(model: Model, key: str, text: str, from_file: bool) -> Value | TypedValue:
    """Return `text` as a value of the type that the key has in the file.

    `from_file` is True where the text is a file's content. Raises UsageError if it does not fit.
    """
    kind = model.source.types.get(key, "")
    if kind and kind.removeprefix(ARRAY) != "array":  # arrays of mixed arrays are given as JSON
        try:
            return TypedValue(parse_typed(text, kind, key, from_file), kind)
        except UsageError as error:
            raise UsageError(f"{error}; for another type give {key}:TYPE=VALUE") from None
    return parse_json_value(key, model.metadata[key], text, from_file)


def parse_json_value(key: str, present: Value, text: str, from_file: bool = False) -> Value:
    """Return `text` as a JSON value of the same kind as `present`; of any kind if that is None.

    `from_file` is True where the text is a file's content. Raises UsageError for a value of another
    kind.
    """
    if isinstance(present, str):
        return text if from_file else _unquote(text)
    value = _json_or_text(text, key)
    if present is not None and _kind_text(present) != _kind_text(value):
        raise UsageError(
            f"{key}: is {_kind_text(present)} in the file, {_quote_short(text)} is "
            f"{_kind_text(value)}; give a "
            "value of that kind"
        )
    return _as_written_before(present, value)


def _as_written_before(present: Value, value: Value) -> Value:
    """Return a number as a float if `present` is one, as an integer if `present` is one.

    A value that would change, or that is no number, is returned as it is.
    """
    if type(present) is float and type(value) is int and float(value) == value:
        return float(value)
    if type(present) is int and type(value) is float and value.is_integer():
        return int(value)
    return value


def _parse_new(
    model: Model, spec: FormatSpec, key: str, text: str, from_file: bool
) -> Value | TypedValue:
    """Return the value of a key that is not in the file: of its known type, else read as JSON.

    `from_file` is True where the text is a file's content. Raises UsageError for a value that the
    format cannot hold.
    """
    known = spec.values.keys(_architectures(model))
    kinds = next((known[each] for each in known if fnmatchcase(key, each)), ())
    listed = not from_file and text.lstrip().startswith("[")
    for kind in kinds:
        if kind.startswith(ARRAY) is listed:
            return TypedValue(parse_typed(text, kind, key, from_file), kind)
    if from_file or (spec.takes("") and not spec.takes(0)):  # a format of texts only
        return text if from_file else _unquote(text)
    value = _json_or_text(text, key)
    if not spec.values.types:
        return value
    if isinstance(value, list) and {type(item) for item in value} == {int, float}:
        value = [float(item) for item in value]
    if not spec.takes(value):
        _refuse(spec, key, text, value)
    return value


def _refuse(spec: FormatSpec, key: str, text: str, value: Value) -> None:
    """Raise UsageError for a JSON value that a typed format cannot hold."""
    if value == []:
        raise UsageError(f"{key}: an empty array has no type; give it: {key}:TYPE[]=[]")
    if isinstance(value, list):
        raise UsageError(f"{key}: {_quote_short(text)}; the elements of an array have one type")
    what = "null" if value is None else "a JSON object"
    raise UsageError(
        f"{key}: {what} is not a value of {spec.name}; expected {', '.join(spec.values.types)}, or "
        "an array of one of them"
    )


def parse_typed(text: str, kind: str, key: str, from_file: bool) -> Value:
    """Return `text` as a value of type `kind`, a list for "array:..."; else UsageError.

    `from_file` is True where the text is a file's content.
    """
    if not kind.startswith(ARRAY):
        if kind == "string":
            return text if from_file else _unquote(text)
        return _convert_scalar(_json_or_text(text, key), kind, key, _quote_short(text))
    element = kind.removeprefix(ARRAY)
    if text.lstrip().startswith("["):
        return _convert_elements(_json_or_text(text, key), kind, key)
    if element.startswith(ARRAY):
        raise UsageError(
            f"{key}: {_quote_short(text)} is not of type {kind}; write nested arrays as JSON"
        )
    pieces = text.split(",")
    if element == "string":
        return pieces
    return [
        _convert_scalar(_json_or_text(each, key), element, key, _quote_short(each))
        for each in pieces
    ]


def _convert_elements(value: Value, kind: str, key: str) -> Value:
    """Return a JSON value, or nested arrays of values, as type `kind`; UsageError if it is none."""
    if not kind.startswith(ARRAY):
        return _convert_scalar(value, kind, key, _quote_short(str(value)))
    if not isinstance(value, list):
        raise UsageError(
            f"{key}: {_quote_short(str(value))} is not of type {kind}; expected a JSON array"
        )
    return [_convert_elements(item, kind.removeprefix(ARRAY), key) for item in value]


def _convert_scalar(value: Value, kind: str, key: str, user_text: str) -> Value:
    """Return one value as type `kind`; UsageError if it does not fit.

    `user_text` is the user's text, for the message.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    found = _NUMBER.fullmatch(kind)
    if found is not None:
        bits = int(found[2]) - (not found[1])
        low, high = (0 if found[1] else -(1 << bits)), (1 << bits) - 1
        fits = number and type(value) is int and low <= value <= high
        expected = f"a whole number from {low} to {high}"
    elif kind == "bool":
        fits, expected = isinstance(value, bool), "true or false"
    elif kind == "string":
        fits, expected = isinstance(value, str), "text"
    else:
        fits, expected = number and _fits_float(value, kind), f"a number that {kind} holds"
    if not fits:
        raise UsageError(f"{key}: {user_text} is not of type {kind}; expected {expected}")
    return float(value) if kind.startswith("float") else value


def _fits_float(value: float, kind: str) -> bool:
    """Return whether a float type can hold a number: it does not overflow to infinity.

    Infinities and NaN fit. `kind` is float32 or float64.
    """
    try:
        rounded = float(value)
        if kind == "float32":
            (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except (OverflowError, struct.error):
        return False
    return math.isfinite(rounded) or not math.isfinite(value)


def _json_or_text(text: str, key: str) -> Any:
    """Return the text's JSON value, NaN and infinities included; the text if it is no JSON."""
    try:
        return loads(text, key, max_bytes=MAX_VALUE, nonfinite=True)
    except FormatError:
        return text


def _unquote(text: str) -> str:
    """Return quoted text as the string it stands for in JSON; other text unchanged.

    Quoted text that is no JSON loses its quotes.
    """
    if len(text) < 2 or not text[0] == text[-1] == '"':
        return text
    found = _json_or_text(text, "")
    return found if isinstance(found, str) and found != text else text[1:-1]


def _quote_short(text: str) -> str:
    """Return a text quoted and shortened for a message."""
    return repr(shorten(text, _LONGEST))


def _kind_text(value: Value) -> str:
    """Return what kind of JSON value it is, in words with an article ("a number")."""
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, (int, float)):
        return "a number"
    return "text" if isinstance(value, str) else "an array or object"


def _architectures(model: Model) -> list[str]:
    """Return the architecture's name as a list, the prefix of its keys; [] without one."""
    name = model.metadata.get("general.architecture")
    return [name] if isinstance(name, str) else []


def unknown_keys(
    model: Model, keys: Sequence[str], also: Sequence[str] = ()
) -> dict[str, list[str]]:
    """Return {key: similar names} of the keys that are neither in the file nor known to readers.

    `also` are architectures that the same request names.
    """
    known = FORMATS[model.format].values.keys([*_architectures(model), *also])
    every = [*model.metadata, *(key for key in known if "*" not in key)]
    return {
        key: close_names(key, every)
        for key in keys
        if key not in model.metadata and not any(fnmatchcase(key, each) for each in known)
    }


def check_present(model: Model, keys: Sequence[str]) -> None:
    """Raise UsageError for the first key that is not in the file."""
    for key in keys:
        if key not in model.metadata:
            raise UsageError(
                f"{model.path}: has no key {key!r} to remove; near names: "
                f"{', '.join(close_names(key, list(model.metadata))) or 'none'}"
            )


def read_values(model: Model, keys: Sequence[str]) -> Mapping[str, tuple[Value, str]]:
    """Return {key: (value, type)} of the keys that exist; valid also after the file is closed."""
    types = model.source.types
    return {
        key: (_copy_value(model.metadata[key]), types.get(key, ""))
        for key in keys
        if key in model.metadata
    }


def _copy_value(value: Value) -> Value:
    """Return a value that can be used after the file is closed.

    Arrays are copied; one of more than 16 elements becomes the text "array of N".
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            f"array of {len(value)}" if len(value) > 16 else [_copy_value(item) for item in value]
        )
    return value


def key_changes(
    keys: Sequence[str],
    before: Mapping[str, tuple[Value, str]],
    after: Mapping[str, tuple[Value, str]],
) -> list[KeyChange]:
    """Return the change of every key, in the given order.

    `before` and `after` are {key: (value, type)}. A key that is missing from one of them did not
    exist then.
    """
    found = []
    for key in keys:
        old, old_type = before.get(key, (None, ""))
        new, new_type = after.get(key, (None, ""))
        how: Literal["set", "added", "removed"] = "set" if key in before else "added"
        found.append(
            KeyChange(key, how if key in after else "removed", old, new, old_type, new_type)
        )
    return found
