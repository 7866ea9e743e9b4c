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
from tests.diagnosis.test_remedies import written

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


def xor(mask: int, field: str) -> Edit:
    def edit(held: Any) -> None:
        held[field] ^= held[field].dtype.type(mask)

    return edit


def ternary(change: Callable[[Any], Any], blocks: slice = slice(None)) -> Edit:
    """Change the codes 0, 1, 2 (for -1, 0, 1) of TQ1_0 [blocks, 256], and pack them again."""

    def edit(held: Any) -> None:
        codes = np.empty((len(held), 256), np.float32)
        CODECS["TQ1_0"].decode({"": one_scale(held).tobytes()}, codes.reshape(-1))
        codes = codes.astype(int) + 1
        codes[blocks] = change(codes[blocks])
        held["qs"], held["qh"] = pack_ternary(codes)

    return edit


def one_scale(held: Any) -> Any:
    found = held.copy()
    found["d"] = 1
    return found


def pack_ternary(codes: Any) -> tuple[Any, Any]:
    """Pack as GGUF's reference says: five digits of base 3 a byte, scaled to 256 and rounded up."""
    packed = []
    for start, width, digits in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        part = codes[:, start : start + width * digits].reshape(len(codes), digits, width)
        weights = np.array([81, 27, 9, 3, 1])[:digits, None]
        packed.append((((part * weights).sum(1) * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate(packed[:2], axis=1), packed[2]


def scaled(factor: float, blocks: slice = slice(None)) -> Edit:
    def edit(held: Any) -> None:
        held["d"][blocks] = held["d"][blocks] * np.float16(factor)

    return edit


def turned(places: slice) -> Edit:
    def change(codes: Any) -> Any:
        codes[:, places] = 2 - codes[:, places]
        return codes

    return ternary(change)


def moved(codes: Any) -> Any:
    return codes[np.r_[1, 0, 2 : len(codes)]]


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
    "scale-turned": ("TQ1_0", scaled(-1), "all signs of B are turned"),
    "first-half": ("TQ1_0", turned(slice(128)), "turned at places 0-127 of every 256"),
    "first-digits": ("TQ1_0", turned(slice(160)), "turned at places 0-159 of every 256"),
    "last-field": ("TQ1_0", turned(slice(240, 256)), "turned at places 240-255 of every 256"),
    "even-places": ("TQ1_0", turned(slice(0, None, 2)), "turned at places 0, 2, 4, 6 and 124 more"),
    "half-of-a-byte": ("IQ3_S", xor(0x0F, "signs"), "turned at places 0-3, 8-11, 16-19, 24-27"),
    "half-of-two-bits": ("IQ2_S", xor(0xF0, "signs"), "turned at places 4-7, 12-15, 20-23, 28-31"),
    "a-ternary-block": ("TQ2_0", turned_ternary(ONE), "the signs of whole blocks of B are turned"),
}


def pair(name: str, edit: Edit, folder: Path, share: float = 0.4) -> tuple[Path, Path]:
    """Return a source, and its copy in a type with the blocks of its matrix edited."""

    def change(raw: Any) -> None:
        edit(raw.reshape(-1).view(CODECS[name].layout))

    return honest._pair(name, folder, share, change)


@pytest.fixture(autouse=True)
def _ternary_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let random blocks of TQ2_0 have no code 3, and TQ1_0 what a quantizer writes."""
    made = honest._codes

    def codes(name: str) -> Any:
        raw = made(name)
        if name == "TQ2_0":
            held = raw.reshape(-1).view(CODECS[name].layout)["qs"]
            held &= ~((held >> 1 & held & 0x55) << 1)
        if name == "TQ1_0":
            ternary(lambda codes: codes)(raw.reshape(-1).view(CODECS[name].layout))
        return raw

    monkeypatch.setattr(honest, "_codes", codes)


@pytest.mark.parametrize("case", CASES)
def test_signs_are_named_with_a_command_that_mends_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: all of A in the encoding of the one tensor that was compared, which is refused."""
    name, edit, says = CASES[case]
    a, b = pair(name, edit, tmp_path)
    report = diff(a, b, tensors=[honest.KEY])
    (finding,), (cause,) = report.findings, report.causes
    assert (finding.cause, finding.certainty) == ("quant_signs", "confirmed"), finding.says
    assert says in finding.says
    assert cause.remedy is not None
    mended = written(cause.remedy.command, b, tmp_path / "mended", monkeypatch)
    assert diff(a, mended).exit_code(["within"]) == 0, cause.remedy


OTHERS: dict[str, tuple[str, Edit]] = {
    "scales-of-double-size": ("TQ1_0", scaled(2)),
    "scales-of-half-size": ("TQ1_0", scaled(0.5)),
    "a-scale-of-double-size": ("TQ1_0", scaled(2, ONE)),
    "a-scale-100-times": ("TQ2_0", scaled(100, ONE)),
    "negative-values-lost": ("TQ1_0", ternary(lambda codes: np.maximum(codes, 1))),
    "rows-exchanged": ("TQ1_0", ternary(moved)),
    "codes-turned-round": ("TQ1_0", ternary(lambda codes: (codes + 1) % 3)),
}


@pytest.mark.parametrize("share", [0.1, 0.4])
@pytest.mark.parametrize("case", OTHERS)
def test_wrong_codes_and_scales_of_ternary_weights_are_no_rounding(
    case: str, share: float, tmp_path: Path
) -> None:
    """Values of three levels are never far from others: no such bound confirms a cause."""
    name, edit = OTHERS[case]
    confirmed = {one.cause for one in diff(*pair(name, edit, tmp_path, share)).findings}
    assert confirmed <= ({"quant_scale"} if "scale" in case else set())


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_S", "TQ2_0", "TQ1_0"])
def test_signs_of_honest_copies_are_right(name: str, tmp_path: Path) -> None:
    report = diff(*pair(name, lambda blocks: None, tmp_path), tensors=[honest.KEY])
    assert "quant_signs" not in {one.cause for one in report.findings}
