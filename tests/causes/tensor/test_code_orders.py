"""Codes in an order that no writer is known for are named with the order that puts them right.

Seen red: bytes of words in the other order, and halves of the stored codes exchanged, called a
tensor of another checkpoint; halves of a block called damage.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import code_orders
from aprfmt.codecs import CODECS
from tests.compare.damage import patched
from tests.conversion import dialect_folders
from tests.diagnosis import files
from tests.diagnosis.engines import place

KEY = "L1.ffn_up.weight"
MIXED = [3, 1, 4, 0, 5, 7, 2, 6]
CODES = {"gptq": "qweight", "awq": "qweight", "compressed_plain": "weight_packed", "mlx": "weight"}

Change = Callable[[Any, tuple[int, ...]], Any]  # of words (uint8 [words, 4]) and their shape


def in_order(order: list[int]) -> Change:
    """Return the change that puts the eight nibbles of every word into another order."""

    def change(words: Any, shape: tuple[int, ...]) -> Any:
        nibbles = np.stack([words & 15, words >> 4], -1).reshape(-1, 8)[:, order]
        return nibbles[:, 0::2] | nibbles[:, 1::2] << 4

    return change


def halved(axis: int) -> Change:
    """Return the change that exchanges the halves of the stored codes along an axis."""

    def change(words: Any, shape: tuple[int, ...]) -> Any:
        parts = np.split(words.reshape(*shape, 4), 2, axis)
        return np.concatenate(parts[::-1], axis)

    return change


@pytest.mark.parametrize("dialect", ["gptq", "awq", "mlx"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (in_order([6, 7, 4, 5, 2, 3, 0, 1]), "the bytes of each word stand in reverse"),
        (in_order(MIXED), f"at {[MIXED.index(at) for at in range(8)]} of every 8"),
        (halved(0), "rows in another order, in 2 equal parts: the right order of them is [1, 0]"),
        (halved(1), "columns in another order, in 2 equal parts: the right order of them is [1, "),
    ],
    ids=["bytes", "mixed", "rows", "columns"],
)  # fmt: skip
def test_codes_of_words_in_any_order(dialect: str, change: Change, says: str) -> None:
    good = place(f"orders-{dialect}")
    dialect_folders.write_folder(good, dialect)

    def tensors(rows: files.Rows) -> None:
        (name,) = (n for n in rows if "layers.1.mlp.up_proj" in n and n.endswith(CODES[dialect]))
        kind, shape, raw = rows[name]
        words = np.frombuffer(raw, np.uint8).reshape(-1, 4)
        rows[name] = kind, shape, np.ascontiguousarray(change(words, shape)).tobytes()

    bad = files.copy(good, f"orders-{dialect}-bad", tensors=tensors)
    (finding,) = aprfmt.diff(good, bad).findings
    assert (finding.cause, finding.certainty) == ("packing_order", "confirmed"), finding.says
    assert says in finding.says, finding.says


def shuffled(name: str, field: str, bits: int) -> Callable[[bytes], bytes]:
    """Return an edit that puts the codes of a field of every block into one random order."""

    def edit(raw: bytes) -> bytes:
        blocks = np.frombuffer(raw, CODECS[name].layout).copy()
        held = blocks[field].copy().view(np.uint8).reshape(len(blocks), -1)
        codes = code_orders.unpack_whole(held, bits)
        order = np.random.default_rng(4).permutation(codes.shape[1])
        blocks[field] = code_orders.pack_codes(codes[:, order], bits).view(blocks[field].dtype)
        return blocks.tobytes()

    return edit


@pytest.mark.parametrize(
    ("name", "field", "bits"),
    [
        ("Q4_0", "qs", 4), ("Q5_1", "qh", 1), ("Q8_0", "qs", 8), ("IQ4_NL", "qs", 4),
        ("Q2_K", "qs", 2), ("Q3_K", "hmask", 1), ("Q4_K", "qs", 4), ("Q6_K", "qh", 2),
    ],
)  # fmt: skip
def test_codes_of_blocks_in_any_order(
    name: str, field: str, bits: int, demo_model: Path, tmp_path: Path
) -> None:
    good = tmp_path / "good.gguf"
    aprfmt.convert(demo_model, good, tensor_encodings=[("L1.ffn_up", name)], source_hash=False)
    edit = shuffled(name, field, bits)

    def change(data: dict[str, bytes]) -> None:
        data["blk.1.ffn_up.weight"] = edit(data["blk.1.ffn_up.weight"])

    bad = patched(good, tmp_path / "bad.gguf", change)
    for source in (good, demo_model):
        (row,) = aprfmt.diff(source, bad, tensors=[KEY]).tensors
        found = row.explanation
        assert found is not None and (found.cause, found.certainty) == (
            "packing_order",
            "confirmed",
        )
        assert f"blocks have their codes ({field}) in another order" in found.says
        # Of the same codes the files do not say which order is right; a float original does, if
        # it is not within 16-bit rounding of the codes, as that of Q8_0.
        assert found.leaves_side_open is ("do not say whose order is right" in found.says)
        assert found.leaves_side_open is (source == good or name == "Q8_0")


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_are_packed_as_they_are_read(bits: int) -> None:
    raw = np.random.default_rng(bits).integers(0, 256, (5, 12), np.uint8)
    codes = code_orders.unpack_whole(raw, bits)
    assert codes.shape == (5, 96 // bits) and codes.max() < 1 << bits
    assert np.array_equal(code_orders.pack_codes(codes, bits), raw)


def test_random_codes_are_in_no_order(demo_model: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    aprfmt.convert(demo_model, good, tensor_encodings=[("L1.ffn_up", "Q4_0")], source_hash=False)

    def change(data: dict[str, bytes]) -> None:
        blocks = np.frombuffer(data["blk.1.ffn_up.weight"], CODECS["Q4_0"].layout).copy()
        blocks["qs"] = np.random.default_rng(0).integers(0, 256, blocks["qs"].shape, np.uint8)
        data["blk.1.ffn_up.weight"] = blocks.tobytes()

    bad = patched(good, tmp_path / "bad.gguf", change)
    assert "packing_order" not in {one.cause for one in aprfmt.diff(good, bad).findings}
