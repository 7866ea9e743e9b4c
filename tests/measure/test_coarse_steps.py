"""Blocks whose scale is many times too large: every error is within their own, wrong steps.

Seen red: "precision, confirmed" and exit 0, `--accept within` equal, `validate --against` PASS.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import find_encoding
from aprfmt.codecs import CODECS, encode
from aprfmt.codecs.lattice import Lattice
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.bounds import fit_errors
from aprfmt.measure.coarse_steps import (
    BlockSpans,
    WideStepsOfBlocks,
    block_spans,
    too_wide,
    wide_steps_of_lattice,
)
from aprfmt.measure.pair_comparison import compare_pair
from tests.checks.gates.faults import copied
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed

UP, BLOCK = "model.layers.1.mlp.up_proj.weight", 32
TIMES = 8.0


def bf16(x: Any) -> Any:
    return np.asarray(x, ml_dtypes.bfloat16)


def q8_0(x: Any, times: float) -> bytes:
    """Return a block of Q8_0 whose scale is `times` the right one, with the nearest codes."""
    scale = np.float16(np.abs(x).max() / 127 * times)
    codes = np.round(x / np.float32(scale)).clip(-127, 127).astype(np.int8)
    return bytes(scale.tobytes() + codes.tobytes())


def q4_0(x: Any, times: float) -> bytes:
    """Return the same as Q4_0."""
    scale = np.float16(np.abs(x).max() / 8 * times)
    codes = (np.round(x / np.float32(scale)).clip(-8, 7) + 8).astype(np.uint8)
    return bytes(scale.tobytes() + (codes[:16] | codes[16:] << 4).tobytes())


def values_of(demo: Path) -> Any:
    with aprfmt.open(demo) as model:
        return np.array(model["blk.1.ffn_up.weight" if demo.suffix == ".gguf" else UP].numpy())


@pytest.mark.parametrize("blocks", [(500,), tuple(range(40, 60))])
@pytest.mark.parametrize(("name", "made"), [("Q8_0", q8_0), ("Q4_0", q4_0)])
def test_a_block_of_a_gguf(
    name: str, made: Callable[[Any, float], bytes], blocks: tuple[int, ...], demo_model: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Against its source, and against a right copy in the same encoding.

    Seen red: the lowest bit of a scale, flipped, "brings its block back within the bound".
    """
    right, wrong = tmp_path / "right.gguf", tmp_path / "wrong.gguf"
    assert command("quantize", demo_model, right, "--type", name).code == 0
    with aprfmt.open(right) as model:
        at = model["blk.1.ffn_up.weight"].stored[0].info.offset
    x, size = values_of(demo_model).reshape(-1, BLOCK), find_encoding(name).type_size
    for times, code in ((TIMES, 1), (1.0, 0)):
        data = bytearray(right.read_bytes())
        for block in blocks:
            data[at + block * size : at + (block + 1) * size] = made(x[block], times)
        wrong.write_bytes(data)
        assert command("diff", demo_model, wrong, "--accept", "within").code == code
        assert command("validate", wrong, "--against", demo_model).code == code
        for a in (demo_model, right):
            done = command("diagnose", a, wrong, "--json")
            found = [one for one in done.json["causes"] if one["cause"] == "quant_scale"]
            assert [one["level"] for one in found] == ["explained"] * code, done.json["sentence"]
            if code:
                assert done.code == 1
                row, column = divmod(blocks[0] * BLOCK, 256)
                assert f"at [{row}, {column}], about 8 times too large" in found[0]["says"]


@pytest.mark.parametrize("groups", [[(100, 3)], [(7, at) for at in range(8)]])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cast", [np.float32, bf16])
def test_a_group_of_values_decoded_again(
    cast: Any, bits: int, groups: list[tuple[int, int]], demo_model: Path, tmp_path: Path
) -> None:
    x, most = values_of(demo_model).reshape(512, 8, BLOCK), 2 ** (bits - 1) - 1
    for times, code in ((TIMES, 1), (1.0, 0)):
        scale = np.abs(x).max(2, keepdims=True) / most
        for at in groups:
            scale[at] *= times
        made = (np.round(x / scale).clip(-most, most) * scale).reshape(512, 256)
        b = copied(demo_model, tmp_path / f"b{code}")
        rows = dict(tensors_of(b))
        kind = "BF16" if cast is bf16 else "F32"
        rows[UP] = (kind, made.shape, np.asarray(cast(made.astype(np.float32))).tobytes())
        write_mixed(b / "model.safetensors", rows)
        done = command("diagnose", demo_model, b, "--json")
        (found,) = done.json["causes"]
        assert (done.code, found["cause"]) == (code, "quant_scale" if code else "quantisation")
        assert not code or f"at [{groups[0][0]}, {groups[0][1] * BLOCK}]" in found["says"]


def test_a_group_of_a_packed_weight() -> None:
    """Codes of 4 bits with a scale for 32 columns, laid out as a lattice."""
    rng = np.random.default_rng(3)
    x = rng.standard_t(4, (64, 8, BLOCK))
    for times, count in ((TIMES, 1), (1.0, 0)):
        scale = np.abs(x).max(2, keepdims=True) / 7
        scale[9, 2] *= times
        step = np.broadcast_to(scale, x.shape).reshape(64, -1)
        y = (np.round(x / scale) * scale).reshape(64, -1)
        lattice = Lattice(step, -8 * step, 7 * step)
        assert fit_errors(x.reshape(64, -1), y, lattice).how == "rounded to the nearest"
        found = wide_steps_of_lattice(x.reshape(64, -1), lattice)
        assert (0 if found is None else found.count) == count
        assert found is None or found.places == ((9, 64),)


RNG = np.random.default_rng(1)
SHAPE = (64, 1024)
WEIGHTS = {
    "heavy tails": RNG.standard_t(2, SHAPE),
    "rows of all sizes": RNG.normal(size=SHAPE) * 10.0 ** RNG.uniform(-7, 0, (64, 1)),
    "blocks of all sizes": (
        RNG.normal(size=(64, 32, 32)) * 10.0 ** RNG.uniform(-7, 0, (64, 32, 1))
    ).reshape(SHAPE),
    "around a constant": 1 + 0.01 * RNG.normal(size=SHAPE),
    "constant with zeros": np.where(RNG.random(SHAPE) < 0.003, 0, 1 + RNG.normal(size=SHAPE) / 99),
    "mostly zero": np.where(RNG.random(SHAPE) < 0.97, 0, RNG.normal(size=SHAPE)),
    "outliers": np.where(RNG.random(SHAPE) < 0.0005, 30, RNG.normal(size=SHAPE)),
}
ENCODERS = sorted(
    name for name, one in CODECS.items() if WideStepsOfBlocks.is_for(name, 1024) and one.has_encoder
)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_honest_copy_has_no_step_too_wide(name: str, weights: str) -> None:
    x = WEIGHTS[weights].astype(np.float32)
    steps = CODECS[name].largest_steps(encode(name, x), x.size)
    if steps is None:
        return  # no step is known, and none is judged
    found = WideStepsOfBlocks(name, SHAPE[1])
    found.add(x, steps)
    assert found.total and found.found() is None


@pytest.mark.parametrize("name", ENCODERS)
def test_a_block_has_the_largest_of_its_elements_steps(name: str) -> None:
    """Some encodings store a step for parts of a block, others one for all of it."""
    raw = encode(name, WEIGHTS["heavy tails"].astype(np.float32))
    codec, count = CODECS[name], int(np.prod(SHAPE))
    each, largest = codec.steps(raw, count), codec.largest_steps(raw, count)
    assert (each is None) == (largest is None)
    if each is not None and largest is not None:
        assert np.array_equal(largest, each.reshape(-1, codec.block_size).max(axis=1))


def test_a_block_spans_what_is_a_number() -> None:
    """NaN is left out; a block of NaN alone, or with an infinite value, is never judged."""
    values = np.tile(np.linspace(-2, 1, BLOCK, dtype=np.float32), (5, 1))
    values[1, ::2], values[2], values[3, 4] = np.nan, np.nan, np.inf
    spans = block_spans(values, np.full(5, 0.1, np.float32))
    assert spans.largest[[0, 4]].tolist() == [2, 2] and spans.span[[0, 4]].tolist() == [3, 3]
    assert spans.largest[1] == np.nanmax(np.abs(values[1])) and np.isnan(spans.largest[2])
    steps = np.array([0.1, 1e6, 1e6, 1e6, 1.0])
    assert too_wide(block_spans(values, steps)).tolist() == [False, True, False, False, True]
    assert not too_wide(block_spans(values[[0, 4]], np.array([0.1, 0.4]))).any()


def test_rows_that_are_the_same_are_counted_with_the_others(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy decoded to floats again has its values exactly; one block of it was coded anew."""
    monkeypatch.setattr("aprfmt.measure.tensors.CHUNK", 64 * 256)
    right, floats, wrong = tmp_path / "right.gguf", tmp_path / "floats", tmp_path / "wrong.gguf"
    assert command("quantize", demo_model, right, "--type", "Q4_0").code == 0
    assert command("convert", right, floats, "--to", "safetensors", "--encoding", "F32").code == 0
    with aprfmt.open(right) as model:
        at = model["blk.1.ffn_up.weight"].stored[0].info.offset
    data, block, size = bytearray(right.read_bytes()), 3001, find_encoding("Q4_0").type_size
    row, column = divmod(block * BLOCK, 256)
    made = q4_0(values_of(floats).reshape(-1, BLOCK)[block], TIMES)
    data[at + block * size : at + (block + 1) * size] = made
    wrong.write_bytes(data)
    told: list[WideStepsOfBlocks] = []

    class Kept(WideStepsOfBlocks):
        def __init__(self, encoding: str, columns: int) -> None:
            super().__init__(encoding, columns)
            told.append(self)

    monkeypatch.setattr("aprfmt.measure.tensors.WideStepsOfBlocks", Kept)
    asked: list[int] = []

    def spans(values: Any, steps: Any) -> BlockSpans:
        asked.append(values.size)
        return block_spans(values, steps)

    monkeypatch.setattr("aprfmt.measure.coarse_steps.block_spans", spans)
    with aprfmt.open(floats) as a, aprfmt.open(wrong) as b:
        found = compare_pair(TensorPair("up", a[UP], b["blk.1.ffn_up.weight"]))
    assert (found.verdict, found.cause) == ("DIFFERENT", "")
    (blocks,) = told
    wide = blocks.found()
    assert wide is not None and wide.places == ((row, column),)
    assert blocks.total == 512 * 256 // BLOCK and asked == [64 * 256]
