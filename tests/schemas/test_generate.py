"""The schemas' records are those of the product: the files are what `generate` makes of them.

Seen red: a field added to Finding, one taken out of the file, a literal with a value more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from aprfmt.schemas import COMMON
from tests.schemas.generate import (
    NUMBER,
    Record,
    admits_no_more,
    at,
    descriptions_of,
    fields_of,
    file_of,
    generated,
    is_record,
    object_of,
    read_of,
    schema_of,
)
from tests.schemas.records import RECORDS


def test_the_files_are_current() -> None:
    other = [name for name, (now, made) in generated(RECORDS).items() if now != made]
    assert not other, "run python -m tests.schemas.generate --write"


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: f"{row.file}:{row.place}")
def test_an_object_has_the_records_keys_and_no_others(row: Record) -> None:
    assert is_record(row.record)
    found = at(read_of(file_of(row)), row.place)
    kinds, required = fields_of(row.record)
    names = {*kinds, *row.extra} - set(row.without)
    assert set(found["properties"]) == names
    assert set(found["required"]) >= ({*required, *row.extra} - set(row.without))
    assert found["additionalProperties"] is False


def test_no_place_has_two_records() -> None:
    places = [(row.file, row.place) for row in RECORDS]
    assert len(set(places)) == len(places) > 50


@dataclass
class Inner:
    far: float
    word: str | None


@dataclass
class Outer:
    count: int
    kind: Literal["a", "b"]
    inner: Inner | None
    many: tuple[Inner, ...]
    by_name: Mapping[str, int]


class Asked(TypedDict):
    there: bool
    rest: NotRequired[list[str]]


@dataclass
class Told:
    """A row. `size` is in bytes; `share` is of `size`. Nothing says what `other` means here."""

    size: int
    share: float
    last: int  # of all rows
    bare: str


def made(now: Mapping[str, Any], record: Any = Outer) -> dict[str, Any]:
    return object_of(*fields_of(record), now, descriptions_of(record))


def test_a_record_becomes_an_object() -> None:
    found = made({})
    assert found["required"] == list(found["properties"]) == [
        "count", "kind", "inner", "many", "by_name"]  # fmt: skip
    assert found["properties"]["kind"] == {"enum": ["a", "b"]}
    inner = found["properties"]["many"]["items"]
    assert inner["properties"] == {
        "far": NUMBER, "word": {"anyOf": [{"type": "string"}, {"type": "null"}]}
    }  # fmt: skip
    assert inner["additionalProperties"] is False
    assert found["properties"]["inner"] == {"anyOf": [inner, {"type": "null"}]}
    asked = made({}, Asked)
    assert asked["required"] == ["there"] and set(asked["properties"]) == {"there", "rest"}
    assert made(found) == found and made(asked, Asked) == asked


def test_a_key_is_described_by_its_record_and_by_hand_where_it_is() -> None:
    """Seen red: a sentence written over words by hand."""
    said = {name: row.get("description") for name, row in made({}, Told)["properties"].items()}
    assert said == {
        "size": "`size` is in bytes", "share": "`share` is of `size`",
        "last": "`last`: of all rows", "bare": None,
    }  # fmt: skip
    hand = {"properties": {"size": {"type": "integer", "description": "How large it is."}}}
    assert made(hand, Told)["properties"]["size"]["description"] == "How large it is."
    old = {"properties": {"size": {"type": "integer", "description": "`size` is in pages"}}}
    assert made(old, Told)["properties"]["size"]["description"] == "`size` is in bytes"


def test_what_a_file_says_more_stays_and_what_it_says_wrong_goes() -> None:
    now = made({})
    now["description"] = "An object."
    now["properties"]["count"] = {"type": "integer", "minimum": 0, "description": "How many."}
    now["properties"]["kind"] = {"enum": ["a"]}
    now["properties"]["many"]["items"]["properties"]["word"] = {
        "type": ["string", "null"], "pattern": "^x"
    }  # fmt: skip
    assert made(now) == now
    changes: list[Callable[[Any], Any]] = [
        lambda x: x["properties"].pop("count"),
        lambda x: x["required"].remove("count"),
        lambda x: x["properties"].update(extra={"type": "string"}),
        lambda x: x.update(additionalProperties=True),
        lambda x: x["properties"].update(count={"type": "string"}),
        lambda x: x["properties"].update(count={}),
        lambda x: x["properties"].update(count={"type": ["integer", "null"]}),
        lambda x: x["properties"].update(kind={"enum": ["a", "b", "c"]}),
        lambda x: x["properties"].update(kind={"type": "string"}),
        lambda x: x["properties"]["many"]["items"]["properties"].pop("far"),
        lambda x: x["properties"]["many"]["items"]["properties"].update(far={"type": "string"}),
        lambda x: x["properties"].update(by_name={"type": "array", "items": {}}),
    ]
    for change in changes:
        other = made({})
        change(other)
        found = made(other)
        assert found != other, other
        assert found == made({}) or set(found["properties"]) == set(made({})["properties"])


@pytest.mark.parametrize(
    ("now", "kind", "fits"),
    [
        ({"type": "number"}, float, True),
        ({"$ref": f"{COMMON}#/$defs/number"}, float, True),
        ({"type": ["number", "null"]}, float | None, True),
        ({"type": ["number", "null"]}, float, False),
        ({"type": "string"}, float, False),
        ({"$ref": f"{COMMON}#/$defs/shape"}, tuple[int, ...], True),
        ({"$ref": f"{COMMON}#/$defs/shape"}, tuple[str, ...], False),
        ({"$ref": f"{COMMON}#/$defs/sha256"}, str, True),
        ({"$ref": f"{COMMON}#/$defs/outcome"}, Literal["PASS", "FAIL", "NOT_RUN"], True),
        ({"$ref": f"{COMMON}#/$defs/outcome"}, Literal["PASS"], False),
        ({"type": "object"}, Any, True),
        ({"const": "n"}, Literal["n", "n-1"], True),
    ],
)
def test_what_admits_no_more_than_a_type(now: dict[str, Any], kind: Any, fits: bool) -> None:
    assert admits_no_more(now, schema_of(kind)) == fits
