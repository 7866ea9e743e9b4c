"""Big-endian tensor data: every block layout, judged by decoders that read it as big-endian."""

import builtins
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import _type_traits
from gguf.scripts import gguf_convert_endian
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.base import fork_types
from aprfmt.base.encodings import BY_GGML, ENCODINGS, block_numbers
from aprfmt.errors import UnsupportedError
from aprfmt.formats.gguf.byteorder import byte_swapper
from aprfmt.formats.gguf.reader import open_source
from tests.formats.gguf_files import File

FORKED = {name for name, *_ in fork_types.DECODED}
KNOWN = [row.name for row in BY_GGML.values() if row.known and not row.row_layout]
DECODED = [t.name for t in _type_traits if t.name in KNOWN]
ELSEWHERE = {"Q8_1": 36, "Q2_0": 18}  # gguf-py takes Q8_1's scales for float32, and has no Q2_0
CONVERTED = [  # what upstream's converter turns
    "F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4",
]  # fmt: skip


class BigEndian(np.ndarray):
    """Bytes that a machine of the other byte order looks at; what it computes is ours again."""

    def view(self, *args: Any, **options: Any) -> Any:
        computed = self.dtype.isnative and self.dtype.itemsize > 1
        if len(args) == 1 and args[0] is not BigEndian and not computed:
            return super().view(np.dtype(args[0]).newbyteorder(">"))
        return super().view(*args, **options)


def blocks(name: str, count: int = 40) -> bytes:
    """Return random blocks whose scales are finite numbers."""
    random = np.random.default_rng(len(name) * 1000 + count)
    return random.integers(1, 60, count * ENCODINGS[name].type_size, np.uint8).tobytes()


def fields(name: str) -> list[tuple[int, int]]:
    """Return (offset, width) of what `byte_swapper` reverses in a block of distinct bytes."""
    size = ENCODINGS[name].type_size
    given = bytes(n % 251 for n in range(size))
    swapped = byte_swapper(name)(memoryview(given))
    found, at = [], 0
    while at < size:
        width = next(n for n in (1, 2, 4, 8) if swapped[at : at + n] == given[at : at + n][::-1])
        found += [(at, width)] * (width > 1)
        at += width
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_layouts_fill_the_block(name: str) -> None:
    row, size = ENCODINGS[name], ELSEWHERE.get(name)
    if name in FORKED:
        size = row.type_size  # gguf-py has none of them; their decoder takes these blocks
    elif size is None:
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    assert (
        row.numpy or sum(width for _, width in block_numbers(row.layout)) == size == row.type_size
    )


@pytest.mark.parametrize("name", DECODED)
def test_a_big_endian_decoder_reads_what_we_swap(name: str) -> None:
    little = blocks(name)
    big = byte_swapper(name)(memoryview(little))
    shape = (4, -1)
    kind = gguf.GGMLQuantizationType[name]
    expected = gguf.dequantize(np.frombuffer(little, np.uint8).reshape(shape), kind)
    swapped = np.frombuffer(big, np.uint8).reshape(shape).view(BigEndian)
    found = _type_traits[kind].dequantize(swapped)
    assert np.array_equal(expected, np.asarray(found))
    assert (big == little) == (not fields(name))


@pytest.mark.parametrize(
    ("name", "swapped"),
    [
        ("Q8_1", [(0, 2), (2, 2)]),
        ("Q8_K", [(0, 4), *((260 + 2 * n, 2) for n in range(16))]),
        ("Q1_0", [(0, 2)]),
        ("Q2_0", [(0, 2)]),
        ("I16", [(0, 2)]),
        ("F64", [(0, 8)]),
        ("I8", []),
    ],
)
def test_layouts_no_library_decodes(name: str, swapped: list[tuple[int, int]]) -> None:
    assert fields(name) == swapped


@pytest.mark.parametrize("name", CONVERTED)
def test_agrees_with_upstreams_converter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ENCODINGS[name]
    data = blocks(name, 32)
    file = File(data=data).key("general.name", 8, "x")
    file.tensor("t", [row.block_size * 8, 4], next(c for c, r in BY_GGML.items() if r is row))
    little, big = tmp_path / "little.gguf", tmp_path / "big.gguf"
    little.write_bytes(file.build())
    shutil.copy(little, big)
    monkeypatch.setattr(builtins, "input", lambda _: "YES")
    reader = gguf.GGUFReader(big, "r+")
    gguf_convert_endian.convert_byteorder(reader, Namespace(order="big", dry_run=False))
    reader.data.flush()
    with open_source(big) as source, open_source(little) as plain:
        assert source.byteorder == "big"
        assert source.tensors["t"].info == plain.tensors["t"].info
        assert bytes(source.tensors["t"].raw()) == data
        assert dict(source.metadata) == dict(plain.metadata)


@given(st.data())
def test_swapping_twice_is_nothing_and_any_range_is_right(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(KNOWN))
    size = ENCODINGS[name].type_size
    raw = data.draw(st.binary(min_size=3 * size, max_size=3 * size))
    swap = byte_swapper(name)
    assert swap(memoryview(swap(memoryview(raw)))) == raw
    assert b"".join(swap(memoryview(raw[n : n + size])) for n in (0, size, 2 * size)) == swap(
        memoryview(raw)
    )


@pytest.mark.parametrize("name", ["F32", "Q4_K", "Q8_K", "IQ2_XXS"])
def test_ranges_need_not_be_whole_blocks(name: str, tmp_path: Path) -> None:
    row = ENCODINGS[name]
    big = blocks(name, 5)
    code = next(c for c, r in BY_GGML.items() if r is row)
    path = tmp_path / "x.gguf"
    file = File(order=">", data=big + bytes(64)).tensor("t", [row.block_size * 5], code)
    path.write_bytes(file.build())
    expected = byte_swapper(name)(memoryview(big))
    with open_source(path) as source:
        tensor = source.tensors["t"]
        for start in range(0, len(big), 7):
            for stop in (start, start + 1, min(start + row.type_size + 3, len(big)), len(big)):
                if stop <= len(big):
                    assert bytes(tensor.raw(start, stop)) == expected[start:stop]
        assert tensor.raw().readonly
        for bad in ((-1, 2), (3, 2), (0, len(big) + 1)):
            with pytest.raises(ValueError, match="bytes"):
                tensor.raw(*bad)


def test_unknown_layout_is_refused_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(File(order=">", data=bytes(32)).tensor("t", [8], 142).build())
    with open_source(path) as source:
        assert source.tensors["t"].info.nbytes == 32
        with pytest.raises(UnsupportedError, match=r"type#142: its block layout is not known"):
            source.tensors["t"].raw()
