"""What a JSON text may cost: hostile ones are refused before they are parsed, real ones pass."""

import json
import struct
import tracemalloc

import pytest

from aprfmt.errors import FormatError
from aprfmt.formats import bounded_json
from aprfmt.formats.bounded_json import BUDGETS, Budget
from aprfmt.formats.safetensors.parse import parse

SMALL = tuple(budget._replace(free=100) for budget in BUDGETS)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_json, "BUDGETS", SMALL)


def loads(text: str) -> object:
    return bounded_json.loads(text.encode(), "x.json", max_bytes=1 << 30)


# kind of limit, one element of a text that costs much more memory or time than it has bytes
HOSTILE = (
    ("values", "0"), ("values", "1.5"), ("values", '""'), ("values", "[]"),
    ("objects", '{"a":"' + "x" * 12 + '"}'), ("arrays and objects", '["xxxx"]'),
)  # fmt: skip


@pytest.mark.parametrize(("kind", "element"), HOSTILE)
def test_too_many_for_the_length_are_refused(kind: str, element: str, small: None) -> None:
    text = "[" + ",".join([element] * 5000) + "]"
    with pytest.raises(FormatError, match=rf"x\.json: \d+ {kind} in {len(text)} bytes") as caught:
        loads(text)
    assert "\n" not in str(caught.value)


def test_too_many_keys_are_refused(small: None) -> None:
    text = "{" + ",".join(f'"{n:x}":0,"x{n:x}":"yyyyyyyyyy"' for n in range(900)) + "}"
    with pytest.raises(FormatError, match=r"\d+ keys in"):
        loads(text)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: budget.what)
def test_the_limit_itself_passes(budget: Budget) -> None:
    size = 1 << 24
    allowed = budget.free + size // budget.bytes_per_mark
    text = budget.marks[:1] * allowed
    assert not bounded_json._exceeds_budget(budget, text.ljust(size))
    assert bounded_json._exceeds_budget(budget, (text + budget.marks[:1]).ljust(size))


def test_marks_in_strings_do_not_count(small: None) -> None:
    value = ["[{,:" * 5000, "\\" * 300 + '"[[[,,,', {",": ":" * 900}]
    assert loads(json.dumps(value)) == value


def test_real_shapes_pass() -> None:
    """The densest real files: a header of many tensors, the merges of a large vocabulary."""
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    header = {f"t{n}": entry for n in range(60_000)}
    assert len(loads(json.dumps(header, separators=(",", ":")))) == 60_000  # type: ignore[arg-type]
    merges = [["a", "b"]] * 300_000
    assert loads(json.dumps(merges, separators=(",", ":"))) == merges
    assert loads(json.dumps(list(range(500_000)))) == list(range(500_000))


def test_a_safetensors_header_of_ten_thousand_tensors_is_far_from_the_limit() -> None:
    for budget in BUDGETS:
        assert budget.free > 10_000 * 8


ENTRY = b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
MIB = 1 << 20
LONG = {
    "one string": (b'{"__metadata__":{"a":"%b"},%b}', b"x", True),
    "escapes": (b'{"__metadata__":{"a":"%b"},%b}', b'\\"', True),
    "blanks": (b"{%b%b}", b" ", True),
    "digits": (b'{"a":%b,%b}', b"1", False),
    "arrays": (b'{"a":%b,%b}', b"[", False),
    "objects": (b'{"a":%b,%b}', b'{"a":', False),
    "values": (b'{"a":[0%b],%b}', b",0", False),
    "empty objects": (b'{"a":[0%b],%b}', b",{}", False),
}


@pytest.mark.parametrize("kind", LONG)
def test_memory_for_a_long_header_is_bounded(kind: str) -> None:
    """A text and one string of it are held at once. Seen red: five times what a header takes."""
    form, unit, valid = LONG[kind]
    header = form % (unit * (32 * MIB // len(unit)), ENTRY)
    file = memoryview(struct.pack("<Q", len(header)) + header + bytes(4))
    tracemalloc.start()
    try:
        if valid:
            assert list(parse(file, "x.safetensors").infos) == ["w"]
        else:
            with pytest.raises(FormatError):
                parse(file, "x.safetensors")
        assert tracemalloc.get_traced_memory()[1] < (2 * len(header) + 24 * MIB)
    finally:
        tracemalloc.stop()
