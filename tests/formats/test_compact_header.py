"""A header as the format's own library writes it is read by one expression, to what JSON gives.

Seen red: text between two entries overlooked, a name that stands twice, a window that ends at any
comma.
"""

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from aprfmt.errors import FormatError
from aprfmt.formats.safetensors.reader import open_source

module: Any = importlib.import_module("aprfmt.formats.safetensors.parse")

SIZES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1, "I64": 8}
names = (
    st.sampled_from("ab")
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.from_regex(r"\A(model\.layers\.[0-9]{1,3}\.[a-z_]{1,8}|[}{,:\[\]]{1,6}|__metadata__)\Z")
)
shapes = st.lists(st.integers(0, 5), max_size=3)
entries = st.lists(st.tuples(names, st.sampled_from(sorted(SIZES)), shapes), max_size=12)
metadata = st.none() | st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3)


def header(
    rows: list[tuple[str, str, list[int]]], said: dict[str, str] | None, ascii_: bool
) -> tuple[bytes, int]:
    parts, at = [], 0
    if said is not None:
        parts.append(
            f'"__metadata__":{json.dumps(said, ensure_ascii=ascii_, separators=(",", ":"))}'
        )
    for name, dtype, shape in rows:
        size = SIZES[dtype] * int(np.prod(shape, dtype=np.int64))
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        text = json.dumps(entry, separators=(",", ":"))
        parts.append(f"{json.dumps(name, ensure_ascii=ascii_)}:{text}")
        at += size
    raw = ("{" + ",".join(parts) + "}").encode("utf-8", "surrogatepass")
    return raw + b" " * (-len(raw) % 8), at


def parsed(raw: bytes, data: int, compact: bool, window: int, damaged: bool) -> Any:
    """What a file of this header and so many bytes of data comes to: all of it, or the error."""
    buffer = memoryview(struct.pack("<Q", len(raw)) + raw + bytes(data))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW", window)
        if not compact:
            patch.setattr(module, "_parse_compact_header", lambda raw, parsed: None)
        try:
            found = module.parse(buffer, "f", damaged=damaged)
        except FormatError as error:
            return type(error), str(error)
    return (list(found.infos.items()), found.metadata, found.end, found.notes, found.faults.damage,
            sorted(found.faults.broken))  # fmt: skip


@given(entries, metadata, st.booleans(), st.sampled_from([40, 90, 300, 1 << 20]), st.booleans())
def test_both_ways_give_the_same(
    rows: list[tuple[str, str, list[int]]], said: Any, ascii_: bool, window: int, damaged: bool
) -> None:
    raw, data = header(rows, said, ascii_)
    ways = [parsed(raw, data, compact, window, damaged) for compact in (True, False)]
    assert ways[0] == ways[1]


@given(
    entries.filter(bool), st.integers(0, 1 << 16), st.sampled_from(list(b'0 9,:{}[]"\\\0\x80e-.a')),
    st.sampled_from(["set", "insert", "delete"]), st.sampled_from([60, 1 << 20]), st.booleans(),
)  # fmt: skip
def test_both_ways_say_the_same_of_a_broken_header(
    rows: Any, at: int, byte: int, how: str, window: int, damaged: bool
) -> None:
    raw, data = header(rows, {"format": "pt"}, True)
    at %= len(raw)
    cut = {"set": raw[at + 1 :], "insert": raw[at:], "delete": raw[at + 1 :]}[how]
    broken = raw[:at] + (b"" if how == "delete" else bytes([byte])) + cut
    ways = [parsed(broken, data, compact, window, damaged) for compact in (True, False)]
    assert ways[0] == ways[1]


@pytest.mark.parametrize("said", [None, {"format": "pt"}, {"a": '{"b": [1]}', "ü": "x},"}])
def test_files_of_the_formats_library_are_read_by_the_expression(
    said: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"model.layers.{i}.w.ü": rng.normal(size=(i % 3, 4)).astype(np.float32) for i in range(40)
    } | {"scalar": np.array(3, np.float32)}
    save_file(arrays, tmp_path / "m.safetensors", said)

    def refuse(raw: bytes, parsed: Any) -> Any:
        raise AssertionError("read as JSON")

    for window in (1 << 20, 200):
        monkeypatch.setattr(module, "WINDOW", window)
        monkeypatch.setattr(module, "_parse_json_header", refuse)
        with open_source(tmp_path / "m.safetensors") as source:
            assert dict(source.metadata) == (said or {})
            assert source.tensors.keys() == arrays.keys()
            for name, tensor in source.tensors.items():
                assert tensor.info.shape == arrays[name].shape
                assert bytes(tensor.raw()) == arrays[name].tobytes()


class CountedReads:
    """The bytes of a header, with a count of how often they are asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, where: Any) -> Any:
        self.reads += 1
        return memoryview(self.data)[where]


@pytest.mark.parametrize("text", [b"", b"{}", b'{"a":1}', b"{} {"])
@pytest.mark.parametrize("blanks", [0, 1, 9, 10, 11, 100_000])
def test_padding_is_not_looked_at_byte_by_byte(
    text: bytes, blanks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 1000)
    raw = CountedReads(text + b" " * blanks)
    assert module._end_of_text(raw) == len(text)
    assert raw.reads <= 1 + (len(text) + blanks) / 1000
    raw.reads = 0
    list(module._entry_windows(raw, 0))
    assert raw.reads <= 5 + (len(text) + blanks) / 1000
