"""Stored bytes decoded as another type of the encoding table, whatever sizes the two have.

Seen red: "nonfinite", "this tensor holds other values: of another checkpoint, or damaged".
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS, decode
from aprfmt.compare import diff
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.formats.gguf.test_gguf_forks import stored

Array = Any
SHAPE = (16, 256)
COUNT = 16 * 256
GGUF = [
    name
    for name in CODECS
    if ENCODINGS[name].ggml is not None and ENCODINGS[name].known and not ENCODINGS[name].row_header
]


def blocks(name: str, seed: int = 3) -> bytes:
    """Return random blocks of SHAPE whose scales are finite numbers."""
    size = ENCODINGS[name].nbytes(SHAPE)
    return np.random.default_rng(seed).integers(1, 60, size, np.uint8).tobytes()


def read_as(raw: bytes, name: str) -> Array:
    """Return SHAPE values of bytes read as a type from the first on; 0 behind their end.

    By llama.cpp's own reader where it decodes the type.
    """
    row = ENCODINGS[name]
    many = min(len(raw) // row.type_size, COUNT // row.block_size)
    held = np.frombuffer(raw[: many * row.type_size], np.uint8)
    kind = gguf.GGMLQuantizationType.__members__.get(name)
    with np.errstate(all="ignore"):
        try:
            values = gguf.dequantize(held, kind) if kind is not None else None
        except (NotImplementedError, KeyError):
            values = None
        if values is None or row.numpy:
            values = decode(name, held.tobytes(), (many * row.block_size,))
        made = np.zeros(COUNT, np.float32)
        made[: many * row.block_size] = values.reshape(-1).astype(np.float32)
    return made.reshape(SHAPE)


def save(path: Path, tensors: dict[str, Array], dtype: str = "F32") -> Path:
    """Write float32 values in a plain type."""
    kind = {"F32": "<f4", "F16": "<f2"}[dtype]
    with np.errstate(all="ignore"):
        write_mixed(
            path, {n: (dtype, x.shape, x.astype(kind).tobytes()) for n, x in tensors.items()}
        )
    return path


def explained(a: Path, b: Path) -> dict[str, Any]:
    """Return {tensor: its explanation} of those that differ."""
    return {row.key: row.explanation for row in diff(a, b).tensors if row.verdict == "DIFFERENT"}


@pytest.mark.parametrize("kind", GGUF)
def test_every_type_read_as_every_other_is_named(kind: str, tmp_path: Path) -> None:
    """`kind` is the right type; a tensor for each type as which its bytes are read."""
    raw = blocks(kind)
    others = [name for name in GGUF if name != kind]
    number = ENCODINGS[kind].ggml
    assert number is not None
    a = stored(tmp_path / "a.gguf", *((f"as.{n}", SHAPE, number, raw) for n in others))
    b = save(tmp_path / "b.safetensors", {f"as.{n}": read_as(raw, n) for n in others})
    found = explained(a, b)
    assert set(found) == {f"as.{name}" for name in others}
    for name in others:
        one = found[f"as.{name}"]
        assert one is not None and one.confirmed, (kind, name, one)
        assert one.cause in ("code_type", "dtype_mislabel"), (kind, name, one)
        assert name in one.evidence[0] and kind in one.evidence[0], (kind, name, one)
        assert one.proof is not None and one.proof.share == 1.0


@pytest.mark.parametrize(("kind", "taken"), [("Q8_0", "Q5_0"), ("Q6_K", "Q3_K"), ("F32", "BF16")])
def test_each_row_read_from_its_own_beginning(kind: str, taken: str, tmp_path: Path) -> None:
    raw, size = blocks(kind), ENCODINGS[kind].row_bytes(SHAPE)
    rows = [raw[at : at + (size or 0)] for at in range(0, len(raw), size or 1)]
    made = np.concatenate([read_as(row, taken)[:1] for row in rows])
    one = explained(
        stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS[kind].ggml or 0, raw)),
        save(tmp_path / "b.safetensors", {"x": made}),
    )["x"]
    assert (one.cause, one.confirmed, one.side) == ("code_type", True, "B")
    assert one.evidence[1] == "each row is read from its first byte on"


@pytest.mark.parametrize(("kind", "taken"), [("Q4_0", "Q8_0"), ("Q5_K", "F32"), ("F16", "F32")])
def test_reading_on_behind_the_tensor(kind: str, taken: str, tmp_path: Path) -> None:
    raw, behind = blocks(kind), np.random.default_rng(5).integers(1, 60, 1 << 15, np.uint8)
    number = ENCODINGS[kind].ggml or 0
    padded = raw + bytes(-len(raw) % 32)
    a = stored(tmp_path / "a.gguf", ("x", SHAPE, number, raw), ("y", (1 << 15,), 24, bytes(behind)))
    made = read_as(padded + bytes(behind), taken)
    one = explained(a, save(tmp_path / "b.safetensors", {"x": made}))["x"]
    assert (one.cause, one.confirmed, one.side) == ("code_type", True, "B"), one
    assert one.evidence[1] == "the last values are what the file holds after the tensor"
    # Other values there are not explained by the bytes.
    made[-1, -1] += 1
    one = explained(a, save(tmp_path / "b.safetensors", {"x": made}))["x"]
    assert one.cause != "code_type" or not one.confirmed, one


def test_other_values_behind_the_bytes_leave_them_open(tmp_path: Path) -> None:
    raw = blocks("Q5_K")
    a = stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS["Q5_K"].ggml or 0, raw))
    made = read_as(raw, "F32")
    many = len(raw) // 4
    made.reshape(-1)[many:] = np.random.default_rng(4).normal(size=COUNT - many)
    one = explained(a, save(tmp_path / "b.safetensors", {"x": made}))["x"]
    assert (one.cause, one.confirmed, one.side) == ("code_type", False, "B"), one
    assert one.evidence[1] == f"the bytes end after {many} of {COUNT} values; the rest are others"
    assert one.proof is not None and one.proof.share == many / COUNT


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_numbers_that_are_not_finite_may_have_become_0(dtype: str, tmp_path: Path) -> None:
    """In F16 numbers beyond its range are infinite, too."""
    raw = np.random.default_rng(8).integers(0, 256, ENCODINGS["Q8_0"].nbytes(SHAPE), np.uint8)
    raw.reshape(-1, 34)[:, 1] &= 0x3B  # scales are finite numbers
    a = stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS["Q8_0"].ggml or 0, raw.tobytes()))
    for lost in (False, True):
        with np.errstate(all="ignore"):
            made = read_as(raw.tobytes(), "Q5_0").astype(dtype.replace("F", "float"))
        if lost:
            made[~np.isfinite(made)] = 0
        one = explained(a, save(tmp_path / "b.safetensors", {"x": made}, dtype))["x"]
        assert (one.cause, one.confirmed) == ("code_type", True), one
        assert any("not finite then are 0" in said for said in one.evidence) == lost


@pytest.mark.parametrize(("kind", "taken"), [("Q5_K", "F32"), ("Q8_0", "F16"), ("Q4_0", "BF16")])
def test_numbers_of_the_bytes_in_their_own_shape(kind: str, taken: str, tmp_path: Path) -> None:
    raw = blocks(kind)
    held = decode(taken, raw, (len(raw) // ENCODINGS[taken].type_size,))
    made = held.astype(np.float32).reshape(SHAPE[0], -1)
    one = explained_shapes(
        stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS[kind].ggml or 0, raw)),
        save(tmp_path / "b.safetensors", {"x": made}),
    )
    assert (one.cause, one.confirmed) == ("code_type", True), one


def explained_shapes(a: Path, b: Path) -> Any:
    """Return the explanation of the one tensor, which has two shapes."""
    (row,) = diff(a, b).tensors
    assert row.verdict == "SHAPE_DIFFERS"
    return row.explanation


@pytest.mark.parametrize(("kind", "taken"), [("Q8_0", "Q5_0"), ("Q4_0", "F16")])
def test_rows_that_a_file_stores_in_another_order(kind: str, taken: str, tmp_path: Path) -> None:
    """GGUF's rows of a llama's queries are in another order than those of safetensors."""
    source = llama_folder(tmp_path / "s", "F32", hidden=256, layers=1, ffn=256, heads=4, kv_heads=2)
    aprfmt.convert(source, tmp_path / "a.gguf", encoding=kind)
    name, stored_name = "model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"
    (one,) = [x for x in gguf.GGUFReader(tmp_path / "a.gguf").tensors if x.name == stored_name]
    raw = np.ascontiguousarray(one.data).tobytes()
    wide = np.zeros(256 * 256, np.float32)
    row = ENCODINGS[taken]
    many = min(len(raw) // row.type_size, wide.size // row.block_size)
    with np.errstate(all="ignore"):
        values = decode(taken, raw[: many * row.type_size], (many * row.block_size,))
    wide[: values.size] = np.where(np.isfinite(values), values, 0)
    made = wide.reshape(4, 32, 2, 256).swapaxes(1, 2).reshape(256, 256)
    rows = tensors_of(source)
    write_mixed(source / "model.safetensors", rows | {name: ("F32", (256, 256), made.tobytes())})
    found = explained(tmp_path / "a.gguf", source)["L0.attn_q.weight"]
    assert (found.cause, found.confirmed, found.side) == ("code_type", True, "B"), found
    assert f"read as {taken}" in found.evidence[0]


def test_blocks_of_another_type_that_are_the_first_bytes(tmp_path: Path) -> None:
    """Both sides are packed: B's bytes are the first ones of A's."""
    raw, size = blocks("Q8_0"), ENCODINGS["Q5_0"].nbytes(SHAPE)
    one = explained(
        stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS["Q8_0"].ggml or 0, raw)),
        stored(tmp_path / "b.gguf", ("x", SHAPE, ENCODINGS["Q5_0"].ggml or 0, raw[:size])),
    )["x"]
    assert (one.cause, one.confirmed, one.side) == ("code_type", True, "B")


@pytest.mark.parametrize(("kind", "taken"), [("Q4_0", "IQ4_NL"), ("IQ4_NL", "Q4_0")])
def test_types_of_one_size_leave_open_whose_label_is_wrong(
    kind: str, taken: str, tmp_path: Path
) -> None:
    raw = blocks(kind)
    one = explained(
        stored(tmp_path / "a.gguf", ("x", SHAPE, ENCODINGS[kind].ggml or 0, raw)),
        save(tmp_path / "b.safetensors", {"x": read_as(raw, taken)}),
    )["x"]
    assert one.leaves_side_open and not one.side
    assert f"; or B's values are A's {kind} bytes read as {taken}" in one.evidence[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q5_K", "F16", "Q4_0"])
def test_other_values_are_no_bytes_of_another_type(kind: str, tmp_path: Path) -> None:
    """Nor are honest copies, nor bytes of which one is another in each tenth block."""
    raw = blocks(kind)
    a = stored(tmp_path / "a.gguf", *((n, SHAPE, ENCODINGS[kind].ggml or 0, raw) for n in "xyz"))
    held = np.frombuffer(raw, np.uint8).copy()
    held[5::340] ^= 3
    others = {
        "x": np.random.default_rng(1).normal(size=SHAPE).astype(np.float32),
        "y": read_as(raw, kind),
        "z": read_as(held.tobytes(), "Q2_K"),
    }
    found = explained(a, save(tmp_path / "b.safetensors", others))
    assert "y" not in found
    for name, one in found.items():
        assert one is None or one.cause not in ("code_type", "dtype_mislabel"), (name, one)
