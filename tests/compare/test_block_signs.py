"""Signs of types that store them apart: turned, lost or in another order, and named as that.

Seen red: damage in thousands of values, rows of other places, scales in the other byte order.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import CODECS
from aprfmt.compare import diff
from tests.compare import test_types_without_encoder as honest

Edit = Callable[[Any], None]  # of blocks in their layout, in place


def complement(field: str, blocks: slice = slice(None)) -> Edit:
    def edit(held: Any) -> None:
        held[field][blocks] = ~held[field][blocks]

    return edit


def reversed_bits(field: str) -> Edit:
    def edit(held: Any) -> None:
        bits = np.unpackbits(np.ascontiguousarray(held[field]), axis=-1, bitorder="little")
        held[field] = np.packbits(bits, axis=-1, bitorder="big").reshape(held[field].shape)

    return edit


def masked(mask: int, *fields: str) -> Edit:
    """Clear the bits of the signs in the words of a field."""

    def edit(held: Any) -> None:
        for field in fields[:-1]:
            held = held[field]
        held[fields[-1]] &= held[fields[-1]].dtype.type(mask)

    return edit


def turned_ternary(blocks: slice = slice(None)) -> Edit:
    """Turn the signs of codes 0, 1, 2 for -1, 0, 1."""

    def edit(held: Any) -> None:
        codes = held["qs"][blocks, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
        codes = np.where(codes < 3, 2 - codes.astype(int), 3).astype(np.uint8)
        held["qs"][blocks] = (codes << np.array([0, 2, 4, 6], np.uint8)).sum(-1, dtype=np.uint8)

    return edit


ONE = slice(37, 38)
CASES: dict[str, tuple[str, Edit, str]] = {
    "all-turned": ("IQ2_S", complement("signs"), "all signs of B are turned"),
    "all-turned-3": ("IQ3_S", complement("signs"), "all signs of B are turned"),
    "a-block": ("IQ3_S", complement("signs", ONE), "the signs of whole blocks of B are turned"),
    "bits-reversed": ("IQ2_S", reversed_bits("signs"), "at [7, 6, 5, 4, 3, 2, 1, 0]"),
    "bits-reversed-3": ("IQ3_S", reversed_bits("signs"), "at [7, 6, 5, 4, 3, 2, 1, 0]"),
    "lost": ("IQ2_XXS", masked(0xF0000000, "group", "word"), "the signs of B are lost"),
    "lost-of-two-bits": ("IQ2_XS", masked(511, "qs"), "the signs of B are lost"),
    "lost-of-three-bits": ("IQ3_XXS", masked(0xF0000000, "word"), "the signs of B are lost"),
    "ternary": ("TQ2_0", turned_ternary(), "all signs of B are turned"),
    "a-ternary-block": ("TQ2_0", turned_ternary(ONE), "the signs of whole blocks of B are turned"),
}


def pair(name: str, edit: Edit, folder: Path) -> tuple[Path, Path]:
    """Return a source, and its copy in a type with the blocks of its matrix edited."""

    def change(raw: Any) -> None:
        edit(raw.reshape(-1).view(CODECS[name].layout))

    return honest._pair(name, folder, 0.4, change)


@pytest.fixture(autouse=True)
def _ternary_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let random blocks of TQ2_0 have no code 3, which no quantizer writes."""
    made = honest._codes

    def codes(name: str) -> Any:
        raw = made(name)
        if name == "TQ2_0":
            held = raw.reshape(-1).view(CODECS[name].layout)["qs"]
            held &= ~((held >> 1 & held & 0x55) << 1)
        return raw

    monkeypatch.setattr(honest, "_codes", codes)


@pytest.mark.parametrize("case", CASES)
def test_signs_are_named(case: str, tmp_path: Path) -> None:
    name, edit, says = CASES[case]
    (finding,) = diff(*pair(name, edit, tmp_path), tensors=[honest.KEY]).findings
    assert (finding.cause, finding.certainty) == ("quant_signs", "confirmed"), finding.says
    assert says in finding.says


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_S", "TQ2_0", "TQ1_0"])
def test_signs_of_honest_copies_are_right(name: str, tmp_path: Path) -> None:
    report = diff(*pair(name, lambda blocks: None, tmp_path), tensors=[honest.KEY])
    assert "quant_signs" not in {one.cause for one in report.findings}
