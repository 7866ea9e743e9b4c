"""Equal codes under other scales of a block: what was done to the scales' bits is made again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import aprfmt as package
from aprfmt.codecs import CODECS, k_scales
from tests.cli.run import aprfmt

NAME = "blk.1.ffn_up.weight"
Edit = Callable[[Any], None]  # changes structured blocks in place


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scale-fields")
    aprfmt("demo", "--into", folder / "demo", "--quiet")
    return folder / "demo"


def pair(demo: Path, folder: Path, kind: str, edit: Edit) -> tuple[Path, Path]:
    """Return a GGUF of one encoding, and a copy with the blocks of one tensor edited."""
    a, b = folder / "a.gguf", folder / "b.gguf"
    aprfmt("convert", demo, a, "--encoding", kind, "--quiet")
    raw = bytearray(a.read_bytes())
    (found,) = [one for one in gguf.GGUFReader(a).tensors if one.name == NAME]
    at, size = int(found.data_offset), int(found.n_bytes)
    layout = CODECS[kind].layout
    assert layout is not None
    blocks = np.frombuffer(bytes(raw[at : at + size]), layout).copy()
    edit(blocks)
    raw[at : at + size] = blocks.tobytes()
    b.write_bytes(raw)
    return a, b


def bfloat16(name: str) -> Edit:
    """Write a field's numbers as the bits of BF16 numbers, cut."""

    def edit(blocks: Any) -> None:
        blocks[name] = (blocks[name].astype("<f4").view("<u4") >> 16).astype("<u2").view("<f2")

    return edit


def reciprocal(name: str) -> Edit:
    def edit(blocks: Any) -> None:
        with np.errstate(all="ignore"):
            blocks[name] = (1 / blocks[name].astype("<f4")).astype("<f2")

    return edit


def drawn(name: str) -> Edit:
    def edit(blocks: Any) -> None:
        factor = np.random.default_rng(0).uniform(0.2, 5, len(blocks))
        blocks[name] = (blocks[name] * factor).astype("<f2")

    return edit


@pytest.mark.parametrize(
    ("kind", "edit", "cause", "level", "says"),
    [
        ("Q8_0", bfloat16("d"), "quant_scale", "confirmed", "BF16 numbers that were cut"),
        ("Q4_K", bfloat16("d"), "quant_scale", "confirmed", "BF16 numbers that were cut"),
        ("Q4_K", bfloat16("dmin"), "quant_min", "confirmed", "of blocks (dmin)"),
        ("Q4_0", reciprocal("d"), "quant_scale", "confirmed", "the reciprocals"),
        ("Q6_K", reciprocal("d"), "quant_scale", "confirmed", "the reciprocals"),
        ("Q8_0", drawn("d"), "quant_scale", "located", "B holds other numbers"),
    ],
)
def test_rewritten_scales_of_blocks_are_no_other_checkpoint(
    kind: str, edit: Edit, cause: str, level: str, says: str, demo: Path, tmp_path: Path
) -> None:
    """Seen red: `stale_tensor`, "of another checkpoint, or damaged"."""
    found = aprfmt("diff", *pair(demo, tmp_path, kind, edit), "--json").json["causes"]
    assert [(one["cause"], one["level"]) for one in found] == [(cause, level)]
    assert says in found[0]["says"] and "the codes are equal" in found[0]["says"]


def packed_exchanged(blocks: Any) -> None:
    """Exchange the packed scales and minima of the groups; gguf-py reads the bytes to prove it."""
    packed = blocks["scales"]
    if packed.shape[1] == 16:
        blocks["scales"] = packed >> 4 | packed << 4
        return
    scales, mins = gguf.quants.Q4_K.get_scale_min(packed)
    blocks["scales"] = k_scales.pack_scales_and_mins(mins, scales)
    again = gguf.quants.Q4_K.get_scale_min(blocks["scales"])
    assert np.array_equal(again[0], mins) and np.array_equal(again[1], scales)


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K"])
def test_scales_of_groups_that_stand_for_minima_are_no_exchanged_blocks(
    kind: str, demo: Path, tmp_path: Path
) -> None:
    """Seen red: "d and dmin are exchanged", confirmed, which is another change of the file."""
    made = pair(demo, tmp_path, kind, packed_exchanged)[1]
    found = aprfmt("diff", demo, made, "--json").json["causes"]
    (one,) = [each for each in found if each["cause"] == "quant_min"]
    assert one["level"] == "confirmed" and "d and dmin" not in one["says"]
    assert "packed scales of the groups" in one["says"]
    assert NAME in str(one["where"])


@pytest.mark.parametrize(("kind", "first"), [("Q8_0", 40), ("Q8_0", 9)])
def test_scales_of_a_few_blocks_are_no_damage_of_unknown_kind(
    kind: str, first: int, demo: Path, tmp_path: Path
) -> None:
    """Seen red: "a few blocks are far worse than all others", before other scales were tried."""

    def edit(blocks: Any) -> None:
        blocks["d"][first : first + 4] *= 2

    made = pair(demo, tmp_path, kind, edit)[1]
    found = aprfmt("diff", demo, made, "--json").json["causes"]
    (one,) = [each for each in found if NAME in str(each["where"])]
    assert (one["cause"], one["level"]) == ("quant_scale", "confirmed")


def test_the_side_whose_bits_were_rewritten_is_the_accused(demo: Path, tmp_path: Path) -> None:
    a, b = pair(demo, tmp_path, "Q8_0", bfloat16("d"))
    (found,) = aprfmt("diff", b, a, "--json").json["causes"]
    assert "A holds the bits of BF16" in found["says"] and found["remedy"] is None


def test_of_two_reciprocals_either_may_be_wrong(demo: Path, tmp_path: Path) -> None:
    def powers(blocks: Any) -> None:
        blocks["d"] = np.float16(2.0) ** -(np.arange(len(blocks)) % 7 + 1)

    def inverted(blocks: Any) -> None:
        powers(blocks)
        reciprocal("d")(blocks)

    made = []
    for name, edit in (("one", powers), ("other", inverted)):
        (tmp_path / name).mkdir()
        made.append(pair(demo, tmp_path / name, "Q8_0", edit)[1])
    (found,) = aprfmt("diff", *made, "--json").json["causes"]
    assert found["cause"] == "quant_scale" and "or A's scales are wrong" in found["says"]
    (told,) = package.diff(*made).findings
    assert told.leaves_side_open and not told.side


def doubled(blocks: Any) -> None:
    blocks["d"] = 2 * blocks["d"]


def few(blocks: Any) -> None:
    drawn("d")(blocks[:3])


def codes_too(blocks: Any) -> None:
    bfloat16("d")(blocks)
    blocks["qs"] = np.roll(blocks["qs"], 1, axis=0)


@pytest.mark.parametrize("edit", [doubled, few, codes_too])
def test_what_has_another_explanation_keeps_it(edit: Edit, demo: Path, tmp_path: Path) -> None:
    found = aprfmt("diff", *pair(demo, tmp_path, "Q8_0", edit), "--json").json["causes"]
    assert found and not any("the codes are equal" in one["says"] for one in found)
