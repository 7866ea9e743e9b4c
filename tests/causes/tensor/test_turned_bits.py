"""The same bits of all blocks turned, or constant on one side, are damage with its place.

Seen red: "holds other values: of another checkpoint, or damaged", and `precision` for a lowest bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from aprfmt.compare import diff

RNG = np.random.default_rng(5)
VALUES = RNG.normal(size=(48, 256)).astype(np.float32)
TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
Edit = Callable[[Any], None]  # of the bytes of all blocks, uint8 [blocks, bytes of a block]


def blocks_of(name: str, values: Any = VALUES) -> Any:
    """Return the values quantized, uint8 [blocks, bytes of a block]."""
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return gguf.quants.quantize(values, kind).reshape(-1, size)


def write(path: Path, name: str, blocks: Any) -> Path:
    """Return the path of a GGUF with one tensor of these blocks."""
    made = gguf.GGUFWriter(path, "llama")
    rows = np.ascontiguousarray(blocks).reshape(len(VALUES), -1)
    made.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=gguf.GGMLQuantizationType[name])
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path


def told(folder: Path, name: str, one: Any, other: Any) -> list[tuple[str, str, bool]]:
    """Return (cause, sentence, whether confirmed) of what `diff` finds in the tensor."""
    report = diff(write(folder / "a.gguf", name, one), write(folder / "b.gguf", name, other))
    found = [row.explanation for row in report.tensors if row.explanation is not None]
    return [(one.cause, one.says, one.confirmed) for one in found]


def _turn(blocks: Any) -> None:
    blocks[:, -3] ^= 0x10


def _turn_two(blocks: Any) -> None:
    blocks[:, -3] ^= 0x11


def _clear(blocks: Any) -> None:
    blocks[:, -2] &= 0xFB


def _set(blocks: Any) -> None:
    blocks[:, -2] |= 0x04


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_turn, "bit 4 of byte {at} (qs) of all {name} blocks is turned: every block"),
        (_turn_two, "bits 0, 4 of byte {at} (qs) of all {name} blocks are turned: every block"),
        (_clear, "bit 2 of byte {next} (qs) of all {name} blocks is zero in every block of B"),
        (_set, "bit 2 of byte {next} (qs) of all {name} blocks is one in every block of B"),
    ],
)
def test_bits_of_all_blocks_are_named(name: str, edit: Edit, says: str, tmp_path: Path) -> None:
    right = blocks_of(name)
    wrong = right.copy()
    edit(wrong)
    size = right.shape[1]
    wanted = says.format(name=name, at=size - 3, next=size - 2)
    [(cause, said, confirmed)] = told(tmp_path, name, right, wrong)
    assert cause == "bit_rot" and confirmed and wanted in said, said


def test_bits_that_are_lost_in_the_first_file_are_its_own(tmp_path: Path) -> None:
    right = blocks_of("Q8_0")
    wrong = right.copy()
    _clear(wrong)
    [(_, said, _)] = told(tmp_path, "Q8_0", wrong, right)
    assert "is zero in every block of A" in said


@pytest.mark.parametrize("name", TYPES)
def test_another_quantization_and_scattered_damage_are_not_that(name: str, tmp_path: Path) -> None:
    right = blocks_of(name)
    near = blocks_of(name, VALUES + RNG.normal(size=VALUES.shape).astype(np.float32) * 1e-3)
    scattered = right.copy()
    scattered[::3, -3] ^= 0x10
    few = right.copy()
    few[:7, -3] ^= 0x10
    for other in (near, scattered, few):
        for _, said, _ in told(tmp_path, name, right, other):
            assert "blocks is" not in said and "blocks are" not in said, said
