"""The parts of the JSON schemas that are records of the product, generated from their types.

python -m tests.schemas.generate           say what differs; exit 1 if anything does
python -m tests.schemas.generate --write   write aprfmt/schemas/*.json anew

RECORDS names a dataclass or TypedDict for each place of a schema. Its fields are the keys, each
with the JSON type of its annotation. All are required but those that a TypedDict may leave out and
the file does not require, and no other key is allowed. Where the file describes a key by no words
of its own, the description is what the record's docstring says of it, or the comment on its line.
What the file says more of a key (a description, a least value, a pattern, a $ref) stays while it
admits nothing that the annotation does not. Envelopes, and what commands put together by hand, are
still written by hand.
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import aprfmt.schemas
from aprfmt.schemas import COMMON, schema_number

FOLDER = Path(aprfmt.schemas.__file__).parent
NUMBER = {"$ref": f"{COMMON}#/$defs/number"}
PLAIN: Mapping[Any, str] = {str: "string", bool: "boolean", int: "integer", type(None): "null"}
_COMMENTED = re.compile(r"^    (\w+): [^#\n]*  # (.+)$", re.M)
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Z`])|; ")
ALL = frozenset({"string", "boolean", "integer", "number", "null", "array", "object"})


@dataclass(frozen=True)
class Record:
    """The type of the object at a place: `file` is a command, `place` a path of schema keys.

    `extra` are keys that its to_json adds, with their types; `without` are fields it leaves out.
    """

    file: str
    place: str
    type: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def record(self) -> Any:
        """The dataclass or TypedDict itself."""
        module, _, name = self.type.partition(":")
        return getattr(import_module(f"aprfmt.{module}"), name)


def is_record(kind: Any) -> bool:
    """Return whether a type is written as an object with known keys."""
    return dataclasses.is_dataclass(kind) or typing.is_typeddict(kind)


@cache
def names_for_types(module: str) -> dict[str, Any]:
    """Return {name: object} of what a module imports for its annotations alone."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    rows = [row for node in blocks for row in node.body if isinstance(row, ast.ImportFrom)]
    return {
        name.asname or name.name: getattr(import_module(row.module or ""), name.name)
        for row in rows
        for name in row.names
    }


def fields_of(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of a record's fields by name, in order, and those that are always there."""
    hints = typing.get_type_hints(kind, localns=names_for_types(kind.__module__))
    if typing.is_typeddict(kind):
        return hints, [name for name in hints if name in kind.__required_keys__]
    names = [row.name for row in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}, names


def descriptions_of(kind: Any) -> dict[str, str]:
    """Return {field: what its record says of it}, the field in backticks; others are absent.

    It is the comment on the field's line, or the first part of a docstring's sentence, up to a
    semicolon, that has the field in backticks.
    """
    try:
        lines = dict(_COMMENTED.findall(inspect.getsource(kind)))
    except OSError:  # TypedDict("Name", {...}) has no lines of its own
        lines = {}
    text = " ".join((inspect.getdoc(kind) or "").split())
    parts = [each.rstrip(".") for each in _SENTENCE.split(text)]
    found = {}
    for name in fields_of(kind)[0]:
        named = [each for each in parts if f"`{name}`" in each]
        if name in lines or named:
            found[name] = f"`{name}`: {lines[name]}" if name in lines else named[0]
    return found


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of the JSON that a value of this type becomes."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind is float:
        return dict(NUMBER)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in args]}
    if is_record(kind):
        return object_of(*fields_of(kind), {}, descriptions_of(kind))
    if origin is tuple and args[-1:] != (...,):
        return {"type": "array", "prefixItems": [schema_of(each) for each in args],
                "items": False, "minItems": len(args)}  # fmt: skip
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(args[1])}
    if isinstance(origin, type) and issubclass(origin, Sequence | set | frozenset):
        return {"type": "array", "items": schema_of(args[0])}
    return {}  # any value


def object_of(
    kinds: Mapping[str, Any],
    required: Sequence[str],
    now: Mapping[str, Any],
    said_of: Mapping[str, str],
) -> dict[str, Any]:
    """Return the schema of an object with these keys; `now` is what a file has for it.

    `said_of` are descriptions of keys, for those that the file does not describe by hand.
    """
    had = now.get("properties", {})
    names = [*(name for name in had if name in kinds), *(name for name in kinds if name not in had)]
    old = [name for name in now.get("required", ()) if name in kinds]
    made = {
        "type": "object",
        "properties": {
            name: described(name, kept(kinds[name], had.get(name)), said_of.get(name))
            for name in names
        },
        "required": [*old, *(name for name in required if name not in old)],
        "additionalProperties": False,
    }
    if not made["required"]:
        del made["required"]
    said = {key: value for key, value in now.items() if key not in made}
    order = [key for key in now if key in made or key in said]
    return {key: made.get(key, said.get(key)) for key in dict.fromkeys([*order, *made])}


def described(name: str, row: Mapping[str, Any], said: str | None) -> dict[str, Any]:
    """Return a key's schema with what its record says of it, unless the file says it by hand.

    What was taken of a record names the key in backticks; by hand nothing does.
    """
    by_hand = f"`{name}`" not in row.get("description", f"`{name}`")
    return dict(row) if said is None or by_hand else {**row, "description": said}


def kept(kind: Any, now: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what a file says of a key where it admits no more than the type, else the type's.

    Records inside are merged key by key; those that a $ref names are rows of their own.
    """
    if now is not None and now.get("$ref", "").startswith("#"):
        return dict(now)  # of the file itself: a row of its own
    if now is not None and "$ref" in now and is_record(kind):
        name, _, place = now["$ref"].partition("#/")
        if {*fields_of(kind)[0]} <= {*at(read_of(name), place).get("properties", ())}:
            return dict(now)  # of the same record, which is a row there
    if now is None or "$ref" in now:
        made = schema_of(kind)
        return dict(now) if now is not None and admits_no_more(now, made) else made
    args = [each for each in get_args(kind) if each not in (type(None), ...)]
    if is_record(kind) and "properties" in now:
        return object_of(*fields_of(kind), now, descriptions_of(kind))
    if get_origin(kind) in (typing.Union, types.UnionType) and len(args) == 1 and "anyOf" in now:
        return {**now, "anyOf": [
            each if each == {"type": "null"} else kept(args[0], each) for each in now["anyOf"]
        ]}  # fmt: skip
    held = {"items": args[:1], "additionalProperties": args[1:]}
    for key, inner in held.items():
        if len(inner) == 1 and is_record(inner[0]) and isinstance(now.get(key), dict):
            return {**now, key: kept(inner[0], now[key])}
    made = schema_of(kind)
    return dict(now) if admits_no_more(now, made) else made


def admits_no_more(now: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    """Return whether each kind of value that `now` admits is one that `made` admits, and back.

    A number that is not finite is a string in JSON, so that `now` may leave that out.
    """
    mine, theirs = variants(now), variants(made)
    if {name for name, _ in theirs} == ALL:
        return True
    if not same_kinds({name for name, _ in mine}, {name for name, _ in theirs}):
        return False
    for name, part in mine:
        others = [other for kind, other in theirs if kind == name]
        if not any(_part_fits(name, part, other) for other in others or [{}]):
            return False
    return True


def same_kinds(mine: set[str], theirs: set[str]) -> bool:
    """Return whether two sets of JSON types are one, strings of numbers aside."""
    if "number" in theirs and "number" in mine:
        return mine | {"string"} == theirs | {"string"}
    return mine == theirs


def _part_fits(name: str, now: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    if name == "array":
        if "items" not in made or made["items"] is False or not isinstance(now.get("items"), dict):
            return made.get("items") in (None, False, {}) or now.get("items") == made.get("items")
        return admits_no_more(now["items"], made["items"])
    if name == "object":
        if made.get("additionalProperties") is False:
            return (
                now.get("additionalProperties") is False
                and set(now.get("properties", ())) == set(made["properties"])
                and set(now.get("required", ())) == set(made.get("required", ()))
                and all(
                    admits_no_more(now["properties"][key], value)
                    for key, value in made["properties"].items()
                )
            )
        return True
    if "enum" in made:
        return set(now.get("enum", ())) <= {x for x in made["enum"]} and "enum" in now
    return True


def variants(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the JSON types that a schema admits, each with the part that says so."""
    if "$ref" in schema:
        name, _, place = schema["$ref"].partition("#/")
        return variants(at(read_of(name or COMMON), place))
    if "anyOf" in schema:
        return [found for each in schema["anyOf"] for found in variants(each)]
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        named = dict.fromkeys(PLAIN.get(type(value), "number") for value in values)
        return [(name, {**schema, "enum": values}) for name in named]
    if "type" not in schema:
        return [(name, {}) for name in sorted(ALL)]
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return [(kind, schema) for kind in kinds]


def read_of(name: str) -> dict[str, Any]:
    """Return a schema file as it is."""
    found: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return found


def at(schema: Any, place: str) -> Any:
    """Return the part of a schema at a path of keys and indices."""
    for part in filter(None, place.split("/")):
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


def file_of(row: Record) -> str:
    """Return the name of a row's file."""
    return COMMON if row.file == "common" else f"aprfmt.{row.file}.{schema_number(row.file)}.json"


def generated(rows: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Return the text of each file as it is and as the records make it, by name."""
    found = {}
    for name in dict.fromkeys(file_of(row) for row in rows):
        whole = read_of(name)
        for row in (row for row in rows if file_of(row) == name):
            kinds, required = fields_of(row.record)
            kinds = {key: kind for key, kind in kinds.items() if key not in row.without}
            kinds |= row.extra
            required = [key for key in required if key in kinds] + list(row.extra)
            parent, _, last = row.place.rpartition("/")
            holder = at(whole, parent)
            key: Any = int(last) if isinstance(holder, list) else last
            holder[key] = object_of(kinds, required, holder[key], descriptions_of(row.record))
        text = json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
        found[name] = (FOLDER / name).read_text(encoding="utf-8"), text
    return found


def main(arguments: Sequence[str]) -> int:
    """Say what differs, or write it; return 1 if something differed and was not written."""
    from tests.schemas.records import RECORDS

    made = argparse.ArgumentParser(prog="python -m tests.schemas.generate", description=__doc__)
    made.add_argument("--write", action="store_true", help="write the files anew")
    options = made.parse_args(arguments)
    other = {name: pair for name, pair in generated(RECORDS).items() if pair[0] != pair[1]}
    for name, (_, text) in other.items():
        print(name)
        if options.write:
            (FOLDER / name).write_text(text, encoding="utf-8")
    return 1 if other and not options.write else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
