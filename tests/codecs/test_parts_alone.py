"""Parts of codecs and readers, each by itself."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import (
    CODECS,
    bnb4,
    encodable_names,
    encode,
    modelopt_scope,
    native_kernels,
    repack_targets,
    write_fp4,
    write_gptq_awq,
)
from aprfmt.codecs.compressed_tensors import _numbers_by_group, weight_arguments
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.repack_blocks import _block_scales
from aprfmt.codecs.weight_layout import PackedCodes, WeightLayout
from aprfmt.codecs.writer import Settings
from aprfmt.errors import AprfmtError, CodecError, UnsupportedError
from aprfmt.formats.pytorch.pickle_calls import _describe_sparse


def test_what_is_writable_encodes_weights_and_nothing_else_does() -> None:
    """Integers are copied and never made of weights; others encode a row or have no encoder."""
    found = encodable_names()
    assert len(set(found)) == len(found) > 20
    for name in CODECS:
        whole = ENCODINGS[name].numpy.startswith(("int", "uint", "bool", "complex"))
        try:
            x = np.random.default_rng(0).normal(size=(2, 512))
            encode(name, x if name == "F64" else x.astype(np.float32))
            encodes = True
        except (AprfmtError, NotImplementedError):
            encodes = False
        assert (name in found) == (encodes and not whole), name


@pytest.mark.parametrize("bad", [(0, 2), (1, 0), (2, 1)])
def test_the_first_block_whose_scale_is_no_number_is_named(bad: tuple[int, int]) -> None:
    held = np.ones((3, 3), np.float16)
    assert _block_scales(held).shape == (3, 3)
    held[bad], held[2, 2] = np.inf, np.nan
    with pytest.raises(CodecError, match=rf"its block \[{bad[0]}, {bad[1]}\] holds inf"):
        _block_scales(held)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_has_its_parts_and_then_its_size(layout: str) -> None:
    parts = ["p0", "p1"] if layout == "coo" else ["p0", "p1", "p2"]
    found = _describe_sparse(f"torch.sparse_{layout}", (*parts, (3, 4)))
    assert list(found.parts.values()) == parts and found.facts["shape"] == [3, 4]
    with pytest.raises(ValueError, match=r"has [23] values|its layout is"):
        _describe_sparse(f"torch.sparse_{layout}", tuple(parts))
    if layout != "coo":
        with pytest.raises(ValueError, match="has 3 values"):
            _describe_sparse(f"torch.sparse_{layout}", tuple(parts))


@pytest.mark.parametrize("shape", [(6, 8), (2, 6, 8)])
def test_a_number_a_row_is_a_column_of_them(shape: tuple[int, ...]) -> None:
    """Scales of compressed-tensors as [out] or [out, 1], of groups, or one for all."""
    rows = np.arange(np.prod(shape[:-1]), dtype=np.float32).reshape(shape[:-1])
    assert (_numbers_by_group(rows, shape, "scale") == rows[..., None]).all()
    assert (_numbers_by_group(rows[..., None], shape, "scale") == rows[..., None]).all()
    groups = np.repeat(rows[..., None], 4, -1)
    assert _numbers_by_group(groups, shape, "scale").shape == (*shape[:-1], 4)
    assert _numbers_by_group(rows.reshape(-1)[:1], shape, "scale").shape == (1,) * len(shape)
    for wrong in (rows[..., :-1], groups[..., :3]):
        with pytest.raises(CodecError, match="scale"):
            _numbers_by_group(wrong, shape, "scale")


@pytest.mark.parametrize("said", [None, 4, ["FP8"], {"FP8": 1}, True])
def test_an_algorithm_that_is_no_name_is_refused(said: object) -> None:
    with pytest.raises(CodecError, match="quant_algo"):
        modelopt_scope._default_section({"quant_algo": said})
    assert modelopt_scope._default_section({"quant_algo": "fp8"})["quant_algo"] == "FP8"
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}
    found = modelopt_scope._default_section({"config_groups": {"g": group}})
    assert (found["quant_algo"], found["group_size"]) == ("NVFP4", 16)


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("factor", [False, True])
def test_codes_are_recoded_by_kernels_where_they_lie_in_rows_and_have_no_factor(
    order: str, factor: bool
) -> None:
    """The kernels know of no factor a column: what they made with one would be other weights."""
    held = np.zeros((1, 32, 128), np.uint8) if order == "rows" else np.zeros((1, 32, 32), np.uint32)
    made = WeightLayout(
        (1, 32, 256), PackedCodes(4, order, held), np.arange(16, dtype=np.float32), (1, 32)
    )
    if factor:
        made = replace(made, factor=np.ones(256, np.float32))
    native = native_kernels()
    if native is None:
        pytest.skip("NOT-RUN: no C kernels here")
    known = [name for name in CODECS if native.recodes(name)]
    assert known and len(known) < len(CODECS)
    for name in CODECS:
        assert made.recodes(name) is (order == "rows" and not factor and name in known), name


@pytest.mark.parametrize("chunk", [1, 64, 100, 128])
def test_coded_weights_are_decoded_in_pieces_of_whole_blocks(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None larger than a chunk or one block: what they take in memory does not grow."""
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, 320, dtype=np.uint8)
    absmax, code = rng.random(10).astype(np.float32), rng.normal(size=16).astype(np.float32)
    whole, found = np.empty(630, np.float32), np.empty(630, np.float32)
    bnb4.decode_coded(packed, absmax, code, 64, whole, 0, 0)
    sizes = []

    def noted(dtype: str, values: np.ndarray) -> None:
        sizes.append(values.size)

    monkeypatch.setattr(bnb4, "CHUNK", chunk)
    monkeypatch.setattr(bnb4, "round_in_place", noted)
    bnb4.decode_coded(packed, absmax, code, 64, found, 0, 0)
    step = max(64, chunk // 64 * 64)
    assert sizes == [step] * (630 // step) + [630 % step] * (630 % step > 0)
    assert np.array_equal(found, whole)


@pytest.mark.parametrize("rows", [None, (0, 3), (2, 5)])
def test_a_packed_weight_is_recoded_whole_and_a_band_by_its_rows(
    rows: tuple[int, int] | None,
) -> None:
    asked = []

    def recode_into(encoding: str, out: memoryview, start: int, stop: int, *, threads: int) -> Any:
        asked.append((encoding, start, stop, threads))
        return [(0, 0, 0)]

    laid: Any = SimpleNamespace(recode_into=recode_into, rows=5)
    weight: Any = SimpleNamespace(laid_out=lambda: laid, rows=rows)
    assert PackedWeight.recode_into(weight, "Q4_0", memoryview(b""), 3) == [(0, 0, 0)]
    assert asked == [("Q4_0", *(rows or (0, 5)), 3)]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"scale": np.array([[1, 2], [255, 5]], np.uint8)}, False),
        ({"tensor_scale": np.array([3.0], np.float32)}, False),
        ({"tensor_scale": None}, False),
        ({"divisor": np.array([2.0], np.float32), "tensor_scale": None}, False),
        ({"size": 16}, False),
    ],
)
def test_scales_of_equal_bytes_are_the_same_whatever_they_stand_for(
    change: dict[str, Any], same: bool
) -> None:
    """E8M0 has a byte that is NaN, which no number equals."""
    scale = np.array([[1, 2], [255, 4]], np.uint8)
    mine = Groups(32, scale, tensor_scale=np.array([2.0], np.float32), codes="e2m1")
    copies = {"scale": scale.copy(), "tensor_scale": np.array([2.0], np.float32)}
    other = replace(mine, **{**copies, **change})
    assert mine.same(other) is same and other.same(mine) is same


FOUR, EIGHT = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ({"a": {"weights": FOUR}}, FOUR),
        ({"a": {"weights": FOUR}, "b": {"weights": dict(FOUR)}}, FOUR),
        ({"a": {"weights": None}, "b": {"weights": FOUR}}, FOUR),
        ({"a": {"input_activations": EIGHT}, "b": {"weights": FOUR}}, FOUR),
        ({"a": "text", "b": {"weights": FOUR}, "c": None}, FOUR),
        ({"a": {"weights": FOUR}, "b": {"weights": EIGHT}}, "2 groups of weights with different"),
        ({"a": {"weights": [4]}, "b": {}}, "config has no config_groups with weights"),
        ({"a": ["weights"]}, "config has no config_groups with weights"),
        ([{"weights": FOUR}], "config has no config_groups with weights"),
        (None, "config has no config_groups with weights"), ({}, "config has no config_groups"),
    ],
    ids=repr,
)  # fmt: skip
def test_the_arguments_of_weights_are_those_of_the_groups_that_have_some(
    groups: object, found: object
) -> None:
    config = {"config_groups": groups}
    if not isinstance(found, str):
        assert weight_arguments(config) == found
        return
    with pytest.raises(AprfmtError, match=found) as raised:
        weight_arguments(config)
    assert isinstance(raised.value, UnsupportedError if "different" in found else CodecError)


@pytest.mark.parametrize("outputs", [8, write_gptq_awq._ROWS, write_gptq_awq._ROWS + 8, 1032])
@pytest.mark.parametrize("native", [True, False])
def test_words_along_inputs_hold_every_output(native: bool, outputs: int) -> None:
    """Rows are turned some at a time: with the kernels and without them, to the last one.

    Held to the layout as GPTQ's library unpacks it: input 8 i + j of an output is nibble j.
    """
    codes = np.random.default_rng(0).integers(0, 16, (outputs, 16), np.uint8)
    pairs = codes[:, 0::2] | codes[:, 1::2] << 4
    groups = Groups(16, np.ones((outputs, 1), np.float32))
    grid = GridWeight(codes.shape, groups, lambda a, b: np.ascontiguousarray(pairs[a:b]))
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(write_gptq_awq, "native_kernels", lambda: None)
        found = write_gptq_awq._gptq_qweight(grid, Settings(16, "F16"))
    assert found.shape == (2, outputs)
    unpacked = (found[:, None, :].view(np.uint32) >> np.arange(0, 32, 4)[:, None]) & 15
    assert np.array_equal(unpacked.reshape(16, outputs), codes.T)


def micro(scale: float | None, divisor: float | None = None) -> Groups:
    """Groups of E2M1 with a scale of scales."""
    outer, divides = (
        None if one is None else np.array([one], np.float32) for one in (scale, divisor)
    )
    return Groups(16, np.zeros((1, 1), np.uint8), tensor_scale=outer, divisor=divides, codes="e2m1")


def test_a_scale_of_scales_that_multiplies_is_divided_by_where_it_has_a_reciprocal() -> None:
    settings: Any = None
    for scale, divisor in ((None, 1.0), (4.0, 0.25), (-0.5, -2.0)):
        (found,) = cast(Any, write_fp4._hold_divided(micro(scale), settings).divisor)
        assert found == divisor
    kept = micro(4.0, 3.0)
    assert write_fp4._hold_divided(kept, settings) is kept
    for scale in (0.0, 1e-40, np.inf, -np.inf, np.nan):
        with pytest.raises(CodecError, match="which has no reciprocal"):
            write_fp4._hold_divided(micro(scale), settings)


def test_scales_of_scales_are_as_many_as_divide_the_blocks() -> None:
    codec: Any = CODECS["NVFP4"]  # blocks of 64
    for scales, blocks in ((1, 1), (1, 3), (3, 3), (3, 6), (2, 4)):
        raw = {"scale": np.arange(scales, dtype="<f4").tobytes()}
        assert codec._tensor_scales(raw, 64 * blocks).tolist() == list(range(scales))
    for length, count in ((0, 128), (3, 128), (5, 128), (8, 192), (12, 128), (4, 65)):
        with pytest.raises(CodecError, match=f"has {length} bytes for {count} elements"):
            codec._tensor_scales({"scale": bytes(length)}, count)


def test_a_number_that_float16_cannot_hold_is_named() -> None:
    for dtype in (np.float32, np.float64):
        for bad in (65520.0, -65520.0, np.inf, -np.inf, np.nan, 1e30):
            numbers = np.ones((2, 3), dtype)
            numbers[1, 2] = bad
            with pytest.raises(CodecError, match=r"minimum .* at \[1, 2\] is beyond float16"):
                repack_targets._to_float16("minimum", numbers)
        numbers = np.array([[65504.0, -65504.0, 0.0, 6e-8]], dtype)
        found = repack_targets._to_float16("scale", numbers)
        assert found.dtype == np.float16 and found.tolist() == numbers.astype("<f2").tolist()
        assert not repack_targets._to_float16("scale", np.ones((0, 3), dtype)).size
    odd = np.array([[1.0, 2.0]], np.float32)
    odd.view(np.uint32)[0, 1] = 0x7FC0_2000  # not a number whose last bit of float16 is set
    for numbers in (odd, odd.astype(np.float64)):
        with pytest.raises(CodecError, match="beyond float16"):
            repack_targets._to_float16("scale", numbers)


def test_modules_that_gptq_leaves_out_are_patterns_of_their_whole_names() -> None:
    settings: Any = SimpleNamespace(size=32, version=1)
    left = ["model.layers.0.mlp.up_proj", "lm_head", "model.layers.10"]
    section = write_gptq_awq._gptq_section(settings, left)["quantization_config"]
    patterns = [key.removeprefix("-:") for key in section["dynamic"]]
    assert len(patterns) == 2 and re.fullmatch(patterns[0], left[0])
    assert re.fullmatch(patterns[1], left[2]) and not re.match(patterns[1], "modelxlayers.10")
    assert not re.match(patterns[1], "model.layers.101")
    assert section["checkpoint_format"] == "gptq" and section["group_size"] == 32
    settings.version = 2
    section = write_gptq_awq._gptq_section(settings, ["lm_head"])["quantization_config"]
    assert section["checkpoint_format"] == "gptq_v2" and "dynamic" not in section
