"""Blocks decoded by another layout of their fields: what was read from where is executed.

Seen red: "this tensor holds other values: of another checkpoint, or damaged".
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from aprfmt.causes.tensor.block_fields import field_readings
from aprfmt.codecs import CODECS
from tests.cli.run import aprfmt
from tests.conversion.folders import write_mixed

NAME = "blk.1.ffn_up.weight"
BIAS = "blk.1.attn_v.bias"
SIZE = {"Q4_1": 20, "Q8_0": 34, "Q5_1": 24, "Q4_0": 18, "Q4_K": 144}
Reader = Callable[[Any], Any]  # of uint8 [blocks, size] and what follows each, to [blocks, size]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("block-fields")
    aprfmt("demo", "--into", folder / "demo", "--quiet")
    return folder / "demo"


def field(at: int, begin: int, size: int) -> Reader:
    """Return a reader that takes the bytes from `begin` on from byte `at` of the block."""

    def read(flat: Any) -> Any:
        made = flat[:, : flat.shape[1] // 2].copy()
        made[:, begin : begin + size] = flat[:, at : at + size]
        return made

    return read


def exchanged(first: int, second: int) -> Reader:
    """Return a reader that takes two numbers of 2 bytes for one another."""

    def read(flat: Any) -> Any:
        made = flat[:, : flat.shape[1] // 2].copy()
        made[:, first : first + 2] = flat[:, second : second + 2]
        made[:, second : second + 2] = flat[:, first : first + 2]
        return made

    return read


def turned(*begins: int) -> Reader:
    """Return a reader that takes the bytes of numbers in the other order."""

    def read(flat: Any) -> Any:
        made = flat[:, : flat.shape[1] // 2].copy()
        for at in begins:
            made[:, at : at + 2] = made[:, at : at + 2][:, ::-1]
        return made

    return read


def folder_of(demo: Path, folder: Path, kind: str, read: Reader | None, dtype: str) -> Path:
    """Return a folder with the values of a GGUF of one encoding, tensors of it read by `read`."""
    a = folder / "a.gguf"
    aprfmt("quantize", demo, a, "--type", "Q8_0", "--tensor", f"ffn_up={kind}", "--tensor",
           f"attn_v={kind}", "--quiet")  # fmt: skip
    aprfmt("convert", a, folder / "b", "--to", "safetensors", "--encoding", dtype, "--quiet")
    if read is None:
        return folder / "b"
    path = folder / "b" / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    held = {
        name: [row["dtype"], row["shape"],
               raw[8 + length + row["data_offsets"][0] : 8 + length + row["data_offsets"][1]]]
        for name, row in header.items() if name != "__metadata__"
    }  # fmt: skip
    for one in gguf.GGUFReader(a).tensors:
        if one.tensor_type.name != kind or ("ffn_up" not in one.name and "attn_v" not in one.name):
            continue
        blocks = np.asarray(one.data).reshape(-1, SIZE[kind])
        behind = np.concatenate([blocks[1:], np.zeros_like(blocks[:1])])
        made = read(np.concatenate([blocks, behind], axis=1))
        with np.errstate(all="ignore"):
            values = gguf.dequantize(made.reshape(-1), one.tensor_type).astype(np.float32)
        name = {"ffn_up": "mlp.up_proj", "attn_v": "self_attn.v_proj"}[one.name.split(".")[2]]
        held[f"model.layers.{one.name.split('.')[1]}.{name}.{one.name.split('.')[3]}"][2] = (
            values.tobytes()
            if dtype == "F32"
            else (values.view("<u4") >> 16).astype("<u2").tobytes()
        )
    write_mixed(path, {name: tuple(row) for name, row in held.items()})
    return folder / "b"


# Which encoding, how it is read, the sentence, and the cause.
MISREAD: dict[str, tuple[str, Reader, str, str]] = {
    "codes too early": (
        "Q4_1",
        field(2, 4, 16),
        "qs is read from byte 2 of a block on, and not",
        "block_fields",
    ),
    "codes too late": (
        "Q4_0",
        field(4, 2, 16),
        "qs is read from byte 4 of a block on, and not",
        "block_fields",
    ),
    "a header of 4 bytes": (
        "Q8_0",
        field(4, 2, 32),
        "qs is read from byte 4 of a block on",
        "block_fields",
    ),
    "scale for minimum": ("Q4_1", exchanged(0, 2), "d and m are read for one another", "quant_min"),
    "big endian": ("Q5_1", turned(0, 2), "the two bytes of d and m are exchanged", "endianness"),
    "high bits behind": (
        "Q5_1",
        field(20, 4, 4),
        "qh is read from byte 20 of a block on",
        "block_fields",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_field_read_elsewhere_is_named_in_all_its_tensors(
    name: str, demo: Path, tmp_path: Path
) -> None:
    kind, read, says, cause = MISREAD[name]
    folder_of(demo, tmp_path, kind, read, "F32")
    run = aprfmt("diff", tmp_path / "a.gguf", tmp_path / "b", "--json")
    found = json.loads(run.out)
    causes = found["causes"]
    assert {one["cause"] for one in causes} == {cause}, run.out[:3000]
    assert all(one["level"] == "confirmed" for one in causes)
    assert sum(len(one["where"]) for one in causes) == 12  # weights and biases
    assert any(says in one["says"] for one in causes)


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_1", "F32"), ("Q5_1", "BF16"), ("Q4_K", "F32")])
def test_right_values_are_equal(kind: str, dtype: str, demo: Path, tmp_path: Path) -> None:
    folder_of(demo, tmp_path, kind, None, dtype)
    run = aprfmt("diff", tmp_path / "a.gguf", tmp_path / "b", "--accept", "within")
    assert "block_fields" not in run.out


def noise(flat: Any) -> Any:
    rng = np.random.default_rng(3)
    made = flat[:, : flat.shape[1] // 2].copy()
    made[:, 4:] = rng.integers(0, 256, made[:, 4:].shape)
    return made


def each_otherwise(flat: Any) -> Any:
    made = flat[:, : flat.shape[1] // 2].copy()
    made[::2, 4:20] = flat[::2, 2:18]
    made[1::2, 4:20] = flat[1::2, 6:22]
    return made


@pytest.mark.parametrize("read", [noise, each_otherwise])
def test_other_codes_are_no_field_read_elsewhere(read: Reader, demo: Path, tmp_path: Path) -> None:
    folder_of(demo, tmp_path, "Q4_1", read, "F32")
    run = aprfmt("diff", tmp_path / "a.gguf", tmp_path / "b", "--json")
    assert "block_fields" not in run.out


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4"])
def test_no_reading_is_the_right_one_and_none_is_tried_twice(kind: str) -> None:
    layout = CODECS[kind].layout
    assert layout is not None
    made = list(field_readings(layout))
    places = {tuple(one.places.tolist()) for one in made}
    assert tuple(range(layout.itemsize)) not in places
    assert len({one.says for one in made}) == len(made) > 20
    assert all(-8 <= min(one) and max(one) < layout.itemsize + 8 for one in places)


WIDE = {"U8": np.uint8, "I8": np.int8, "U16": np.uint16, "F32": np.float32}


@pytest.mark.parametrize("dtype", WIDE)
def test_bytes_of_blocks_that_were_never_decoded_are_named(
    dtype: str, demo: Path, tmp_path: Path
) -> None:
    """As a loader held them: as bytes, words, or their numbers. Seen red: "shape differs"."""
    folder_of(demo, tmp_path, "Q5_1", None, "F32")
    path, held = tmp_path / "b" / "model.safetensors", {}
    for name, x in load_file(path).items():
        held[name] = ("F32", x.shape, x.tobytes())
    (one,) = [x for x in gguf.GGUFReader(tmp_path / "a.gguf").tensors if x.name == NAME]
    raw = np.ascontiguousarray(one.data)
    made = raw.astype(np.float32) if dtype == "F32" else raw.view(WIDE[dtype])
    held["model.layers.1.mlp.up_proj.weight"] = (dtype, made.shape, made.tobytes())
    write_mixed(path, held)
    found = json.loads(aprfmt("diff", tmp_path / "a.gguf", tmp_path / "b", "--json").out)
    (cause,) = found["causes"]
    assert (cause["cause"], cause["level"]) == ("code_type", "confirmed")
    assert "of A's Q5_1 blocks, read as " in cause["says"] and "never decoded" in cause["says"]
    assert cause["where"] == ["model.layers.1.mlp.up_proj.weight"]
    assert all("=U8" not in command and "=I8" not in command for command in found["next"])


def test_other_bytes_are_not_those_of_blocks(demo: Path, tmp_path: Path) -> None:
    folder_of(demo, tmp_path, "Q5_1", None, "F32")
    path = tmp_path / "b" / "model.safetensors"
    held = {name: ("F32", x.shape, x.tobytes()) for name, x in load_file(path).items()}
    (one,) = [x for x in gguf.GGUFReader(tmp_path / "a.gguf").tensors if x.name == NAME]
    made = np.array(one.data)
    made.reshape(-1)[5] ^= 1
    held["model.layers.1.mlp.up_proj.weight"] = ("U8", made.shape, made.tobytes())
    write_mixed(path, held)
    assert "never decoded" not in aprfmt("diff", tmp_path / "a.gguf", tmp_path / "b").out
