"""The writer: bytes equal to the reference library's, both ways, and what it refuses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save as save_numpy
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save as save_torch

from aprfmt.base.encodings import BY_SAFETENSORS
from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.errors import ConversionError, OutputError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.formats.safetensors.layout import DTYPE_ORDER
from aprfmt.formats.safetensors.reader import SafetensorsSource, open_source
from aprfmt.formats.safetensors.writer import open_sink
from tests.formats.apr_writing import info, pattern
from tests.formats.safetensors_cases import entry, file

PT = {"format": "pt"}

TORCH = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32, "C64": torch.complex64,
    "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


def write(
    path: Path, infos: list[TensorInfo], data: Mapping[str, bytes], **options: Any
) -> list[Path]:
    """Write tensors in the format's order; returns the files."""
    metadata = options.pop("metadata", {})
    with open_sink(path, **options) as sink:
        infos = sink.order(infos)
        sink.plan(metadata, infos)
        for planned in infos:
            sink.write(planned.name, [memoryview(data[planned.name])])
        return list(sink.files)


def patterns(infos: list[TensorInfo]) -> dict[str, bytes]:
    return {planned.name: pattern(planned) for planned in infos}


def as_torch(planned: TensorInfo, raw: bytes) -> torch.Tensor:
    """Return the tensor torch holds for these bytes; FP4 pairs count as one element there."""
    dtype = TORCH[BY_SAFETENSORS[planned.encoding].safetensors]
    shape = list(planned.shape)
    if planned.encoding == "F4":
        shape[-1] //= 2
    if planned.encoding == "BOOL":
        return torch.tensor([byte % 2 for byte in raw], dtype=torch.bool).reshape(shape)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def test_every_torch_dtype_gives_the_librarys_bytes(tmp_path: Path) -> None:
    infos = [info(f"{9 - at % 3}.{name}", (2, 4), name) for at, name in enumerate(TORCH)]
    infos += [info("empty", (0, 3), "BF16"), info("scalar", (), "F64"), info("é\n\x7f", (2,))]
    data = patterns(infos)
    for planned in infos:
        if planned.encoding == "BOOL":
            data[planned.name] = bytes(byte % 2 for byte in data[planned.name])
    write(tmp_path / "x.safetensors", infos, data)
    ours = (tmp_path / "x.safetensors").read_bytes()
    assert ours == save_torch({i.name: as_torch(i, data[i.name]) for i in infos}, PT)
    read = load_torch(tmp_path / "x.safetensors")
    for planned in infos:
        again = read[planned.name].view(torch.uint8) if planned.nbytes > 8 else read[planned.name]
        expected = as_torch(planned, data[planned.name])
        assert again.dtype == expected.dtype or planned.nbytes > 8
        assert read[planned.name].shape == expected.shape


NUMPY = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I8": "i1", "U8": "u1", "I16": "<i2",
         "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8"}  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8"), max_size=12).filter(
                lambda name: name != "__metadata__"
            ),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.sampled_from(sorted(NUMPY)),
        ),
        max_size=8,
        unique_by=lambda row: row[0],
    ),
    st.text(max_size=5).filter(lambda text: text.isascii()),
)
@settings(max_examples=100, deadline=None)
def test_any_arrays_give_the_librarys_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, tuple[int, ...], str]],
    value: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    infos = [info(*row) for row in rows]
    data = patterns(infos)
    write(path, infos, data, metadata={"format": value}, force=True)
    arrays = {
        i.name: np.frombuffer(data[i.name], NUMPY[i.encoding]).reshape(i.shape) for i in infos
    }
    assert path.read_bytes() == save_numpy(arrays, {"format": value})


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    arrays = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.array([True, False])}
    save_file(arrays, tmp_path / "x.safetensors", {"k": "é"})
    with open_source(tmp_path / "x.safetensors") as source:
        assert source.metadata == {"k": "é"}
        assert list(source.tensors) == ["b", "a"]
        for name, array in arrays.items():
            assert source.tensors[name].raw() == array.tobytes()


@pytest.mark.parametrize("dtype", DTYPE_ORDER)
def test_every_dtype_round_trips(dtype: str, tmp_path: Path) -> None:
    row = BY_SAFETENSORS[dtype]
    infos = [info("w", (3, 8), row.name), info("v", (16,), row.name), info("z", (0,), row.name)]
    write(tmp_path / "x.safetensors", infos, patterns(infos))
    with open_source(tmp_path / "x.safetensors") as source:
        assert source.metadata == PT
        for planned in infos:
            found = source.tensors[planned.name]
            assert (found.info.shape, found.info.encoding) == (planned.shape, planned.encoding)
            assert found.raw() == pattern(planned)
    with safe_open(tmp_path / "x.safetensors", "numpy") as handle:
        assert sorted(handle.keys()) == ["v", "w", "z"]


def test_the_order_is_the_librarys_for_all_dtypes() -> None:
    names = [BY_SAFETENSORS[dtype].name for dtype in DTYPE_ORDER]
    infos = [info(name, (8,), name) for name in names] + [info("Q4", (256,), "Q4_K")]
    found = [planned.encoding for planned in FORMATS["safetensors"].order(infos)]
    found.remove("Q4_K")  # stands where its bytes do
    assert found == [*reversed(names)]


def test_the_header_is_padded_with_spaces(tmp_path: Path) -> None:
    for length in range(1, 10):
        planned = info("n" * length, (1,))
        write(tmp_path / "x.safetensors", [planned], patterns([planned]), force=True)
        data = (tmp_path / "x.safetensors").read_bytes()
        size = int.from_bytes(data[:8], "little")
        assert size % 8 == 0 and data[8 : 8 + size].rstrip(b" ").endswith(b"}}")


@pytest.mark.parametrize(
    ("planned", "says"),
    [
        (info("w", (256,), "Q4_K"), "no dtype for Q4_K"),
        (info("w", (32,), "Q8_0"), "no dtype for Q8_0"),
        (info("w", (64,), "NF4"), "no dtype for NF4"),
        (info("__metadata__", (1,)), "no room for that name"),
        (info("\ud800", (1,)), "not UTF-8"),
        (TensorInfo("w", (3,), "F4", 0, 2, None), "end inside a byte"),
        (TensorInfo("w", (3,), "F32", 0, 13, None), "13 bytes are planned"),
        (TensorInfo("w", (1 << 62, 4), "F32", 0, 1 << 66, None), "64 bits"),
        (TensorInfo("w", (-1,), "F32", 0, -4, None), "64 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_format_cannot_hold_is_refused(
    planned: TensorInfo, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=says), open_sink(tmp_path / "x") as sink:
        sink.plan({}, [planned])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [1, None, 1.5, ["a"], {"a": "b"}, True, "\ud800"], ids=repr)
def test_metadata_holds_strings_only(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="strings only"), open_sink(tmp_path / "x") as sink:
        sink.plan({"k": value}, [])


def test_typed_strings_and_amending(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    planned = info("w", (4,))
    with open_sink(path) as sink:
        sink.plan({"digest": TypedValue("0" * 64, "string")}, [planned])
        sink.write("w", [memoryview(pattern(planned))])
        sink.amend("0" * 64, "a" * 64)
    with open_source(path) as source:
        assert source.metadata == {"digest": "a" * 64, "format": "pt"}


def test_the_plan_is_checked(tmp_path: Path) -> None:
    infos = [info("b", (1,)), info("a", (1,))]
    with pytest.raises(ConversionError, match="another order"), open_sink(tmp_path / "x") as sink:
        sink.plan({}, infos)
    with pytest.raises(ConversionError, match="planned twice"), open_sink(tmp_path / "x") as sink:
        sink.plan({}, [infos[0], infos[0]])
    with pytest.raises(UsageError, match="alignment"):
        open_sink(tmp_path / "x", alignment=32)
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists"):
        write(tmp_path / "x", infos, patterns(infos))


def rewrite(source: SafetensorsSource, path: Path, **changes: str) -> bytes:
    infos = [tensor.info for tensor in source.tensors.values()]
    data = {name: bytes(tensor.raw()) for name, tensor in source.tensors.items()}
    write(path, infos, data, metadata={**source.metadata, **changes}, like=source, force=True)
    return path.read_bytes()


ODD: dict[str, Any] = {
    "__metadata__": {"b": "1", "a": "2"},
    "a": entry("U8", [3], [0, 3]), "z": entry(offsets=[3, 19]), "e": entry("F32", [0], [19, 19]),
}  # fmt: skip


def test_an_unchanged_rewrite_gives_the_whole_file_again(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    for data in (
        file(json.dumps(ODD, indent=1) + "   ", bytes(range(19))),
        file({"w": entry()}, bytes(16)),  # no metadata: `format: pt` is not added to a copy
        save_numpy({"x": np.arange(3.0)}),
    ):
        path.write_bytes(data)
        with open_source(path) as source:
            assert rewrite(source, tmp_path / "y.safetensors") == data
            changed = rewrite(source, tmp_path / "y.safetensors", note="new")
        assert changed != data
        with open_source(tmp_path / "y.safetensors") as again:
            assert again.metadata["note"] == "new" and again.metadata["format"] == "pt"
