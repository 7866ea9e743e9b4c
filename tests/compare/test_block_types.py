"""Every block type of the codec table: honest copies, wrong labels, lost bits, one bad sub-block.

The source is a matrix in BF16, the copy is one weight of a GGUF in the type. What is wrong is done
to the stored bytes.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import ENCODINGS, member_offsets
from aprfmt.codecs import CODECS, encode
from aprfmt.compare import diff
from aprfmt.compare.diffs import DiffReport
from tests.compare.damage import patched
from tests.conversion.folders import float_bytes, llama_folder

KEY, STORED = "L0.ffn_up.weight", "blk.0.ffn_up.weight"
ROWS, COLUMNS = 128, 256
TERNARY = ("TQ1_0", "TQ2_0")  # for weights of three values, and no others
Edit = Callable[[bytearray], None]


def _values(ternary: bool = False) -> Any:
    random = np.random.default_rng(3)
    made: Any = random.standard_t(6, (ROWS, COLUMNS)) / 20
    if ternary:
        made = random.integers(-1, 2, (ROWS, COLUMNS)) * 0.0625
    return made.astype(ml_dtypes.bfloat16).astype(np.float32)


def _encodes(name: str) -> bool:
    row = ENCODINGS[name]
    if row.ggml is None or row.block_size == 1 or not row.layout or name not in CODECS:
        return False
    return CODECS[name].has_encoder


BLOCKS = [name for name in ENCODINGS if _encodes(name)]
TYPES = [name for name in BLOCKS if name not in TERNARY]
LABELS = [*TYPES, "F16", "BF16"]


def _bits(name: str) -> float:
    return ENCODINGS[name].type_size / ENCODINGS[name].block_size


SIBLINGS = [(a, b) for a in LABELS for b in LABELS if a != b and _bits(a) == _bits(b)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


def source(folder: Path, ternary: bool = False) -> Path:
    made = folder / f"source-{ternary}"
    if not made.exists():
        name = "model.layers.0.mlp.up_proj.weight"
        llama_folder(
            made, "BF16", hidden=COLUMNS, layers=1, ffn=ROWS, heads=4, kv_heads=2,
            replaced={name: float_bytes(_values(ternary), "BF16")},
        )  # fmt: skip
    return made


def copied(folder: Path, name: str, ternary: bool = False) -> Path:
    made = folder / f"{name}-{ternary}.gguf"
    if not made.exists():
        aprfmt.convert(source(folder, ternary), made, tensor_encodings=[(KEY, name)])
    return made


def edited(folder: Path, name: str, edit: Edit) -> Path:
    def change(tensors: dict[str, bytes]) -> None:
        raw = bytearray(tensors[STORED])
        edit(raw)
        tensors[STORED] = bytes(raw)

    made = folder / "edited.gguf"
    made.unlink(missing_ok=True)
    return patched(copied(folder, name), made, change)


def judged(a: Path, b: Path) -> DiffReport:
    return diff(a, b, tensors=[KEY])


def confirmed(report: DiffReport) -> list[str]:
    return [row.cause for row in report.findings if row.confirmed]


def places(name: str) -> dict[str, tuple[int, int]]:
    """Return the bytes of a block that each member takes."""
    return member_offsets(ENCODINGS[name].layout)


def test_the_table_is_tried_whole() -> None:
    assert len(TYPES) >= 14 and len(SIBLINGS) >= 18, (TYPES, SIBLINGS)


@pytest.mark.parametrize("name", TYPES)
def test_an_honest_copy_is_within_its_rounding(name: str, folder: Path) -> None:
    report = judged(source(folder), copied(folder, name))
    assert report.tensors[0].verdict == "WITHIN" and not report.findings


@pytest.mark.parametrize("name", TERNARY)
def test_three_values_of_weights_that_had_more_are_a_quantisation(name: str, folder: Path) -> None:
    """Most small values are rounded to zero there, in long runs: no damage."""
    report = judged(source(folder), copied(folder, name))
    assert confirmed(report) == ["quantisation"]


@pytest.mark.parametrize("name", TYPES)
def test_zeros_where_values_should_stand_are_damage_all_the_same(name: str, folder: Path) -> None:
    def edit(raw: bytearray) -> None:
        row = len(raw) // ROWS
        raw[5 * row : 7 * row] = bytes(2 * row)

    report = judged(source(folder), edited(folder, name, edit))
    assert not {"quantisation", "rounding"} & set(confirmed(report)), report.findings
    assert report.tensors[0].verdict == "DIFFERENT"


@pytest.mark.parametrize("name", TERNARY)
def test_an_honest_copy_of_three_values_is_equal(name: str, folder: Path) -> None:
    report = judged(source(folder, True), copied(folder, name, True))
    assert report.tensors[0].verdict in ("WITHIN", "SAME_VALUES") and not report.findings


@pytest.mark.parametrize(("name", "label"), SIBLINGS)
def test_a_siblings_label_is_named(name: str, label: str, folder: Path) -> None:
    """Against the weights it was made of: never a scale, nor values that are not finite."""
    data = bytearray(copied(folder, name).read_bytes())
    mark = struct.pack("<Q", len(STORED)) + STORED.encode()
    at = data.index(mark) + len(mark)
    at += 4 + 8 * struct.unpack_from("<I", data, at)[0]
    assert struct.unpack_from("<I", data, at)[0] == ENCODINGS[name].ggml
    struct.pack_into("<I", data, at, ENCODINGS[label].ggml)
    wrong = folder / "label.gguf"
    wrong.write_bytes(data)
    for right in (source(folder), copied(folder, name)):
        report = judged(right, wrong)
        if name == label:
            continue
        assert confirmed(report) == ["dtype_mislabel"], (right, report.findings)
        (row,) = report.tensors
        assert row.explanation is not None and any(
            name in line and label in line for line in row.explanation.evidence
        )


PARTS = [
    (name, member)
    for name in TYPES
    for member in places(name)
    if member in ("qs", "ql", "qh", "hmask")
]


@pytest.mark.parametrize(("name", "member"), PARTS)
def test_lost_bits_are_damage_and_no_quantizers_work(name: str, member: str, folder: Path) -> None:
    start, stop = places(name)[member]

    def lose(raw: bytearray) -> None:
        blocks = np.frombuffer(raw, np.uint8).reshape(-1, ENCODINGS[name].type_size).copy()
        blocks[:, start:stop] = 0
        raw[:] = blocks.tobytes()

    report = judged(source(folder), edited(folder, name, lose))
    assert report.tensors[0].verdict == "DIFFERENT"
    assert confirmed(report) in ([], ["bit_rot"]), report.findings
    others = [one for one in places(name) if (name, one) in PARTS and one != member]
    (row,) = report.tensors
    assert row.explanation is not None
    if others:
        assert confirmed(report) == ["bit_rot"], report.findings
        assert f"member {member} of all {name} blocks" in row.explanation.evidence[0]


@pytest.mark.parametrize(("name", "member"), PARTS)
def test_one_bad_sub_block_is_found(name: str, member: str, folder: Path) -> None:
    """Half of a member's bytes of one block: never within the rounding of the type."""
    start, stop = places(name)[member]

    def spoil(raw: bytearray) -> None:
        at = 5 * ENCODINGS[name].type_size
        for i in range(at + start, at + start + max(1, (stop - start) // 2)):
            raw[i] ^= 0xA7

    report = judged(source(folder), edited(folder, name, spoil))
    assert report.tensors[0].verdict == "DIFFERENT"
    assert confirmed(report) in ([], ["bit_rot"]), report.findings


def test_minima_of_one_block_are_not_exchanged_in_all(folder: Path) -> None:
    start = places("Q2_K")["d"][0]

    def spoil(raw: bytearray) -> None:
        raw[5 * ENCODINGS["Q2_K"].type_size + start + 1] ^= 0x5B

    report = judged(source(folder), edited(folder, "Q2_K", spoil))
    assert "quant_min" not in confirmed(report), report.findings


def test_steps_bound_what_the_encoders_are_off_by() -> None:
    """Of heavy tails: a step is wide enough for every honest value, and no wider than the range."""
    values = np.random.default_rng(9).standard_t(3, (256, 1024)).astype(np.float32)
    for name in TYPES:
        raw = encode(name, values)
        step = CODECS[name].steps(raw, values.size)
        assert step is not None, name
        out = np.empty(values.size, np.float32)
        CODECS[name].decode(raw, out)
        off = np.abs(out - values.reshape(-1))
        largest = np.abs(values).reshape(-1, ENCODINGS[name].block_size).max(1)
        assert (off <= step * 1.001).mean() > 0.9999, name
        assert (step.reshape(len(largest), -1).max(1) <= largest * 1.5).all(), name


# Members of a block that scale its codes, and the bit of their last byte that is flipped: a scale
# stored as a float is doubled or halved, another one changed by much.
SCALES = [
    (name, member)
    for name in (*TYPES, *TERNARY)
    for member in places(name)
    if member in ("d", "dmin", "m", "scales", "scales_l", "scales_h")
]


@pytest.mark.parametrize(("name", "member"), SCALES)
def test_a_wrong_scale_of_one_block_is_found(name: str, member: str, folder: Path) -> None:
    """Errors may all be within the steps that this very scale makes.

    Seen red: Q2_K and NVFP4 were within one step, TQ1_0 and TQ2_0 quantized as they should be.
    """
    start, stop = places(name)[member]

    def spoil(raw: bytearray) -> None:
        at = 5 * ENCODINGS[name].type_size
        if member in ("d", "dmin", "m") and stop - start == 2:
            number = np.frombuffer(raw, "<f2", 1, at + start)[0]
            raw[at + start : at + stop] = np.float16(number * 4).tobytes()
        else:
            for i in range(at + start, at + stop):
                raw[i] ^= 0x2D

    report = judged(source(folder), edited(folder, name, spoil))
    assert report.tensors[0].verdict == "DIFFERENT"
    assert not {"quantisation", "rounding"} & {row.cause for row in report.findings}
    assert report.findings or member == "scales", report.tensors


@pytest.mark.parametrize("name", [*TYPES, *TERNARY])
def test_a_few_wrong_codes_are_no_encoders_work(name: str, folder: Path) -> None:
    """Seen red: four codes of Q4_1, all other values being reproduced, were a quantisation."""
    member = max(places(name), key=lambda one: int(np.diff(places(name)[one])[0]))
    start = places(name)[member][0]

    def spoil(raw: bytearray) -> None:
        at = 5 * ENCODINGS[name].type_size
        for i in range(at + start, at + start + 4):
            raw[i] ^= 0xC5

    report = judged(source(folder), edited(folder, name, spoil))
    assert not {"quantisation", "rounding"} & {row.cause for row in report.findings}
    assert report.findings and report.tensors[0].verdict == "DIFFERENT"
