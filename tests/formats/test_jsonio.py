"""Bounded JSON: what it refuses, what it accepts, and that Python's parser agrees on the rest."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import ConversionError, FormatError
from aprfmt.formats import bounded_json

LIMIT = 1 << 20
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


def loads(text: str | bytes | bytearray | memoryview, **options: Any) -> Any:
    data = text.encode() if isinstance(text, str) else text
    return bounded_json.loads(data, "x.json", **{"max_bytes": LIMIT, **options})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ('{"a":1}'.encode("utf-16"), "byte 0xff at byte 0 is not UTF-8"),
        (b'{"ab\xff":1}', "byte 0xff at byte 4 is not UTF-8"),
        (b'["\xed\xa0\x80"]', "at byte 2 is not UTF-8"),
        ('{"é":1} x'.encode(), "byte 9: Extra data"),
        (b"{} {}", "byte 3: Extra data"),
        (b'{"a":1,}', "not JSON at byte 7"),
        (b"{'a':1}", "not JSON at byte 1"),
        (b'{"a":1', "not JSON at byte 6"),
        (b"[1 2]", "not JSON at byte 3"),
        (b"[01]", "not JSON at byte 2"),
        (b'["a\nb"]', "not JSON at byte 3: Invalid control character"),
        (b'["\\x41"]', "not JSON at byte 2"),
        (b'{"a":1,"b":2,"a":3}', "key 'a' stands twice"),
        (b'{"a":1,"\\u0061":3}', "key 'a' stands twice"),
        (b'[{"x":{"a":1,"a":1}}]', "key 'a' stands twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "1e999 is beyond float64"),
        (b"[-1e999]", "-1e999 is beyond float64"),
        (b"[" + b"9" * 401 + b"]", "401 digits, the limit is 400"),
        (b"[" + b"9" * 200_000 + b"]", "200000 digits"),
        (b'["\\ud800"]', r"\\ud800 at byte 2 is half"),
        (b'["\\\\\\udc00"]', r"\\udc00 at byte 4 is half"),
        (b'["\\ud83d\\ud83d\\ude00"]', r"\\ud83d at byte 2 is half"),
        (b" " * (LIMIT + 1), f"{LIMIT + 1} bytes of JSON, the limit is {LIMIT}"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else "",
)
def test_refuses(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        loads(data)
    assert str(error.value).startswith("x.json: ")
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b" \t\r\n{}\n", {}),
        (b'{"a":1,"A":2,"":3}', {"a": 1, "A": 2, "": 3}),
        (b'[{"a":1},{"a":1}]', [{"a": 1}, {"a": 1}]),
        (b"[" + b"9" * 400 + b"]", [int("9" * 400)]),
        (b'["' + b"7" * 401 + b'",' + b"9" * 400 + b"]", ["7" * 401, int("9" * 400)]),
        (b"[1e308,-0.0,5e-324]", [1e308, -0.0, 5e-324]),
        (b'["\\ud83d\\ude00"]', ["😀"]),
        (b'["\\\\ud800"]', ["\\ud800"]),
        (b"7", 7),
    ],
    ids=repr,
)
def test_accepts(data: bytes, value: object) -> None:
    assert loads(data) == value
    assert loads(memoryview(data)) == value
    assert loads(bytearray(data)) == value


def test_options() -> None:
    assert loads('{"a":1,"a":2}', duplicates="last") == {"a": 2}
    assert loads("[Infinity,1e999]", nonfinite=True) == [math.inf, math.inf]
    assert math.isnan(loads("[NaN]", nonfinite=True)[0])
    assert loads('["\\udc80"]', surrogates=True) == ["\udc80"]


@pytest.mark.parametrize("depth", [1, 63, 64, 65, 100_000])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"a":', "}"), ('["\\\\",', "]"), ('["\\"[",', "]"), ('["]",{"[":', "}]")],
    ids=["list", "dict", "backslash", "quote", "both"],
)
def test_depth(opening: str, closing: str, depth: int) -> None:
    each = len(closing)  # levels one repetition opens
    text = opening * (depth // each) + "[" * (depth % each)
    text += "0" + "]" * (depth % each) + closing * (depth // each)
    if depth <= bounded_json.MAX_DEPTH:
        assert loads(text) == json.loads(text)
    else:
        with pytest.raises(FormatError, match="deeper than the limit of 64"):
            loads(text)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[[]," * 1000, '"' + "[" * 1000, "]" * 1000 + "[" * 1000],
    ids=["lists", "dicts", "pairs", "string", "closed"],
)
def test_depth_of_what_never_closes(text: str) -> None:
    with pytest.raises(FormatError):
        loads(text)


def test_brackets_in_strings_are_no_depth() -> None:
    value = ["[" * 1000, "\\", '"[[[' * 300, ["\\\\[", {"{" * 200: "]"}]]
    assert loads(json.dumps(value)) == value


@given(VALUES)
def test_depth_is_that_of_the_value(value: Any) -> None:
    def depth(item: Any) -> int:
        children = item.values() if isinstance(item, dict) else item
        return 1 + max(map(depth, children), default=0) if isinstance(item, list | dict) else 0

    text = json.dumps(value)
    limit = depth(value)
    assert loads(text, max_depth=limit) == value
    if limit:
        with pytest.raises(FormatError, match="deeper"):
            loads(text, max_depth=limit - 1)


def test_windows_of_the_string_scan_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_json, "_WINDOW", 7)
    value = [["[" * n, "\\" * n + '"{' * (n % 3), [n]] for n in range(40)]
    assert loads(json.dumps(value), max_depth=3) == value
    with pytest.raises(FormatError, match="deeper"):
        loads(json.dumps(value), max_depth=2)


@given(st.binary(max_size=40))
def test_garbage_gives_one_kind_of_error(data: bytes) -> None:
    try:
        value = loads(data)
    except FormatError:
        return
    assert json.loads(data) == value


@given(VALUES)
def test_dumps_round_trip(value: Any) -> None:
    text = bounded_json.dumps(value)
    assert loads(text) == value
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_dumps_spelling() -> None:
    assert (
        bounded_json.dumps({"b": 'é中\x01"', "a": [1, 2.5]}) == '{"b":"é中\\u0001\\"","a":[1,2.5]}'
    )
    assert bounded_json.dumps("\udc80x").encode() == b'"\\udc80x"'
    assert loads(bounded_json.dumps("\udc80x"), surrogates=True) == "\udc80x"


def test_dumps_names_what_json_cannot_hold() -> None:
    with pytest.raises(ConversionError, match=r"m: \$\.a\[1\] is -Infinity"):
        bounded_json.dumps({"a": [0.0, -math.inf], "b": math.nan}, "m")


def test_load_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'{"a":[1]}')
    assert bounded_json.load_file(path, LIMIT) == {"a": [1]}
    with pytest.raises(FormatError, match=r"c\.json: 9 bytes of JSON, the limit is 8"):
        bounded_json.load_file(path, 8)
    for wrong in (tmp_path, tmp_path / "absent.json", Path("/dev/zero")):
        with pytest.raises(FormatError, match=str(wrong)):
            bounded_json.load_file(wrong, LIMIT)


def test_the_collector_is_left_as_it_was() -> None:
    import gc

    for state in (gc.disable, gc.enable):
        state()
        before = gc.isenabled()
        with pytest.raises(FormatError):
            loads("[")
        assert gc.isenabled() is before
