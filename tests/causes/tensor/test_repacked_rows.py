"""Blocks of several rows interleaved, as an engine has them in memory, are named as that.

Seen red: other layouts not tried, which left a tensor "of another checkpoint"; the codes' own order
and their signs left out; rows read in the file's order where the architecture has another.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.compare.damage import patched
from tests.conversion.folders import llama_folder

Repack = Callable[[Any], Any]  # of blocks [groups, rows of a group, blocks of a row, bytes]


def whole(blocks: Any) -> Any:
    """Return block j of every row of a group, then block j + 1."""
    return blocks.swapaxes(1, 2)


def scales_first(blocks: Any, first: int, turn: int, mask: int = 0) -> Any:
    """Return block j of a group as one: all scales, then `turn` bytes of each row's codes."""
    groups, rows, count, size = blocks.shape
    made = np.empty((groups, count, rows * size), np.uint8)
    for j in range(count):
        made[:, j, : rows * first] = blocks[:, :, j, :first].reshape(groups, -1)
        at = rows * first
        for start in range(first, size, turn):
            for row in range(rows):
                made[:, j, at : at + turn] = blocks[:, row, j, start : start + turn] ^ mask
                at += turn
    return made


def repacked(raw: bytes, rows: int, together: int, size: int, repack: Repack) -> bytes:
    blocks = np.frombuffer(raw, np.uint8).reshape(rows // together, together, -1, size)
    return bytes(np.ascontiguousarray(repack(blocks)).tobytes())


CASES: dict[str, tuple[str, str, int, int, Repack, str]] = {
    "fours": ("Q8_0", "ffn_up", 4, 34, whole, "the blocks of 4 rows stand in turn"),
    "eights": ("Q5_1", "ffn_down", 8, 24, whole, "the blocks of 8 rows stand in turn"),
    "columns": ("Q4_0", "ffn_up", 0, 18, whole, "the blocks of 512 rows stand in turn"),
    "q8_0x4": ("Q8_0", "ffn_up", 4, 34, partial(scales_first, first=2, turn=8),
               "of the blocks of 4 rows the scales come first, then 8 bytes"),
    "q4_0x8": ("Q4_0", "ffn_up", 8, 18, partial(scales_first, first=2, turn=8, mask=0x88),
               "of the blocks of 8 rows the scales come first, then 8 bytes of each row's codes "
               "in turn, as signed numbers"),
    "iq4_nlx4": ("IQ4_NL", "ffn_up", 4, 18, partial(scales_first, first=2, turn=4),
                 "of the blocks of 4 rows the scales come first, then 4 bytes"),
    "q rows": ("Q8_0", "attn_q", 4, 34, whole, "the blocks of 4 rows stand in turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_of_blocks_in_an_engine_s_layout(name: str, demo_model: Path, tmp_path: Path) -> None:
    encoding, role, together, size, repack, says = CASES[name]
    good, key, source = tmp_path / "good.gguf", f"L1.{role}.weight", demo_model
    if role == "attn_q":  # whose rows a GGUF of llama has in another order than its folder
        source = llama_folder(
            tmp_path / "llama", "BF16", hidden=64, layers=2, vocab=96, heads=4, kv_heads=2
        )
    aprfmt.convert(source, good, tensor_encodings=[(f"L1.{role}", encoding)], source_hash=False)
    with aprfmt.open(good) as model:
        rows = model[f"blk.1.{role}.weight"].shape[0]

    def change(data: dict[str, bytes]) -> None:
        stored = f"blk.1.{role}.weight"
        data[stored] = repacked(data[stored], rows, together or rows, size, repack)

    bad = patched(good, tmp_path / "bad.gguf", change)
    for a, b, side in ((good, bad, "B"), (source, bad, "B"), (bad, good, "A")):
        (row,) = aprfmt.diff(a, b, tensors=[key]).tensors
        found = row.explanation
        assert found is not None, (a, b)
        assert (found.cause, found.certainty) == ("repacked_rows", "confirmed"), found
        assert f"{side}'s rows are repacked: " in found.says and says in found.says, found.says
        assert not found.leaves_side_open


def test_a_layout_that_undoes_itself_leaves_the_side_open(demo_model: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    aprfmt.convert(demo_model, good, tensor_encodings=[("L1.ffn_up", "Q8_0")], source_hash=False)
    with aprfmt.open(good) as model:
        rows, columns = model["blk.1.ffn_up.weight"].shape
    together = columns // 32  # as many rows as a row has blocks

    def change(data: dict[str, bytes]) -> None:
        name = "blk.1.ffn_up.weight"
        data[name] = repacked(data[name], rows, together, 34, whole)

    bad = patched(good, tmp_path / "bad.gguf", change)
    for a, is_open in ((good, True), (demo_model, False)):
        (row,) = aprfmt.diff(a, bad, tensors=["L1.ffn_up.weight"]).tensors
        assert row.explanation is not None
        assert row.explanation.cause == "repacked_rows", row.explanation
        assert row.explanation.leaves_side_open is is_open


def test_blocks_in_no_such_order_are_not_repacked(demo_model: Path, tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    aprfmt.convert(demo_model, good, tensor_encodings=[("L1.ffn_up", "Q8_0")], source_hash=False)

    def change(data: dict[str, bytes]) -> None:
        blocks = np.frombuffer(data["blk.1.ffn_up.weight"], np.uint8).reshape(-1, 34)
        order = np.random.default_rng(1).permutation(len(blocks))
        data["blk.1.ffn_up.weight"] = blocks[order].tobytes()

    bad = patched(good, tmp_path / "bad.gguf", change)
    (row,) = aprfmt.diff(good, bad, tensors=["L1.ffn_up.weight"]).tensors
    assert row.explanation is None or row.explanation.cause != "repacked_rows"
