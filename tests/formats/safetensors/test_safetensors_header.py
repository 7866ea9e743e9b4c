"""The header of a large safetensors file: what is quick gives what is thorough; limits are named.

Seen red: an entry with a fault taken for sound (sizes not compared, `2.0` or `true` for a size),
a header of zeros parsed, a header beyond the limit called damage.
"""

import json
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aprfmt.errors import FormatError
from aprfmt.formats.cursor import MAX_HEADER
from aprfmt.formats.safetensors.layout import PREFIX

parsing = import_module("aprfmt.formats.safetensors.parse")  # the package has a function `parse`

SIZES = st.one_of(st.integers(-1, 9), st.sampled_from([2.0, True, None, "2", 1 << 64, 1 << 62]))
DTYPES = st.sampled_from(["F32", "BF16", "F4", "BOOL", "C64", "none", 4, ["F32"]])
ENTRIES = st.fixed_dictionaries(
    {"dtype": DTYPES, "shape": st.one_of(st.lists(SIZES, max_size=3), st.just("2"))},
    optional={"data_offsets": st.lists(SIZES, max_size=3), "more": st.just(1)},
)


def spelled(entries: dict[str, Any], room: int) -> memoryview:
    """Return a file with this header and `room` bytes of data."""
    text = json.dumps(entries).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + bytes(room))


@given(st.lists(ENTRIES, max_size=5))
@example([{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}] * 2)
@example(
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [8, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8.0, 16]},
        {"dtype": "F32", "shape": [2], "data_offsets": [16, 20]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
    ]
)
def test_entries_read_quickly_are_as_those_read_one_rule_after_another(
    entries: list[dict[str, Any]],
) -> None:
    file = spelled({f"t{i}": entry for i, entry in enumerate(entries)}, 64)
    quick = parsing.parse(file, "x", damaged=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing._Entries, "read_entry", lambda *_: None)
        patch.setattr(parsing, "_contiguous_end", lambda _: None)
        thorough = parsing.parse(file, "x", damaged=True)
    assert quick.infos == thorough.infos and quick.end == thorough.end
    assert quick.faults.damage == thorough.faults.damage


def test_a_sound_file_is_read_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an entry without a fault was judged again")

    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    monkeypatch.setattr(parsing, "_read_any_entry", refuse)
    monkeypatch.setattr(parsing, "report_overlap", refuse)
    assert [*parsing.parse(spelled({"w": entry}, 8), "x").infos] == ["w"]


@pytest.mark.parametrize("at", [1, 70_000, 3_000_000])
def test_a_header_with_zeros_is_refused_before_it_is_parsed(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the header was parsed")

    monkeypatch.setattr(parsing.bounded_json, "loads", refuse)
    size = at + 2_000_000
    file = memoryview(struct.pack("<Q", size) + b"{".ljust(at) + bytes(size - at))
    for damaged in (False, True):
        with pytest.raises(FormatError, match=rf"byte 0x00 at byte {at}; .* has no zero bytes"):
            parsing.parse(file, "x", damaged=damaged)


def test_a_header_beyond_the_limit_is_a_limit_and_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 8) + b'{"w":{')
        file.truncate(PREFIX + MAX_HEADER + 8)
    from aprfmt.model import open_model

    with pytest.raises(FormatError, match=r"a limit of the format and no damage.* several files"):
        open_model(path)
    path.write_bytes(struct.pack("<Q", MAX_HEADER + 8) + b'{"w":{')
    with pytest.raises(FormatError, match="damaged or not a safetensors file"):
        open_model(path)
