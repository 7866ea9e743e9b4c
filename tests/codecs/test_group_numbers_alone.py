"""Numbers of groups and codes: how they are spread, rounded, filled in, and what is refused."""

import re
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs import awq, codec, compressed_tensors, lattice, repack_sources, write_gptq_awq
from aprfmt.codecs.base import check_out
from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.grids import Groups
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.errors import CodecError, UnsupportedError

SETTINGS: Any = None  # what a layout may hold has no part in it


def part(values: Any, encoding: str) -> StoredPart:
    """Return a stored part of an array's bytes."""
    held = np.ascontiguousarray(values)
    return StoredPart(held.tobytes(), encoding, held.shape)


def section(**more: Any) -> Any:
    """Return a section of compressed-tensors whose weights have these arguments."""
    weights = {"num_bits": 4, "type": "int", "symmetric": False} | more
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


# --- numbers of groups ----------------------------------------------------------------------------

SHAPE = (3, 24)  # outputs, inputs


def numbers(
    scale: Any, zero: Any = None, index: Any = None, shape: Any = SHAPE, **more: Any
) -> Any:
    held = {".weight_scale": part(np.asarray(scale, np.float32), "F32")}
    if zero is not None:
        held[".weight_zero_point"] = part(np.asarray(zero, np.int8), "I8")
    if index is not None:
        held[".weight_g_idx"] = part(np.asarray(index, np.int32), "I32")
    return compressed_tensors.group_numbers(held, section(**more), shape)


def test_scales_and_zero_points_are_given_for_every_group_of_every_row() -> None:
    """A number for a row, or for the whole, is that of each of its groups."""
    scale = np.arange(1.0, 13).reshape(3, 4)
    found, none = numbers(scale)
    assert none is None and np.array_equal(found, scale)
    zero = np.arange(-6, 6).reshape(3, 4)
    found, zeros = numbers(scale, zero)
    assert np.array_equal(found, scale) and np.array_equal(zeros, zero)
    # Zero points of two groups beside scales of four: each is that of two.
    pairs = np.array([[1, 2], [3, 4], [5, 6]])
    _, zeros = numbers(scale, pairs)
    assert zeros.tolist() == [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]]
    _, zeros = numbers(scale, [7, 8, 9])
    assert zeros.tolist() == [[7] * 4, [8] * 4, [9] * 4]
    _, zeros = numbers(scale, [5])
    assert zeros.tolist() == [[5] * 4] * 3
    found, zeros = numbers([2.0, 3.0, 4.0], [[1], [2], [3]])
    assert found.tolist() == [[2], [3], [4]] and zeros.tolist() == [[1], [2], [3]]
    each = np.arange(6.0).reshape(2, 3)  # of two experts
    assert np.array_equal(numbers(each, shape=(2, 3, 24))[0], each[..., None])
    found, _ = numbers([2.5])
    assert found.tolist() == [[2.5]] * 3
    with pytest.raises(CodecError, match="weight_zero_point"):
        numbers(scale[:, :2], np.ones((3, 3)))
    with pytest.raises(CodecError, match="those of tiles"):
        numbers(scale, strategy="block", block_structure=[1, 6])
    with pytest.raises(
        CodecError, match=r"weight_scale.* is no row, channel or group of \[3, 24\]"
    ):
        numbers(np.ones((3, 5)))


def test_inputs_in_another_order_are_refused() -> None:
    """The order of groups is none, and neither is an index that says nothing."""
    scale = np.ones((3, 4))
    right = np.repeat(np.arange(4), 6)
    for index in (right, np.full(24, -1)):
        assert np.array_equal(numbers(scale, index=index)[0], scale)
    for wrong in (right[::-1], np.roll(right, 1), np.repeat(np.arange(8), 3)):
        with pytest.raises(CodecError, match=r"grouped in another order \(weight_g_idx\)"):
            numbers(scale, index=wrong)
    assert numbers([1.0, 2.0, 3.0], index=np.zeros(24))[0].shape == (3, 1)


# --- scales that another layout holds -------------------------------------------------------------


def test_scales_are_rounded_and_zero_points_are_moved_by_the_rounded_ones() -> None:
    """0.1 is 0.0999755859375 in float16; a value of code 0 is minus the zero point times it."""
    scale = np.array([[0.1, 2.0]], np.float32)
    zeros = np.array([[3, 8]], np.float32)
    held = write_gptq_awq._round_scales(Groups(8, scale, zeros=zeros, why="w"), SETTINGS)
    rounded = np.float32(0.0999755859375)
    assert held.scale.tolist() == [[rounded, 2.0]] and held.size == 8 and held.why == "w"
    assert held.offset is not None and held.offset.tolist() == [[-3 * rounded, -16.0]]
    assert held.zeros is not None and np.array_equal(held.zeros, zeros)
    plain = write_gptq_awq._round_scales(Groups(8, scale), SETTINGS)
    assert plain.offset is plain.zeros is None and plain.scale.tolist() == [[rounded, 2.0]]
    with pytest.raises(CodecError, match="it has minimums, which are no zero points"):
        write_gptq_awq._round_scales(Groups(8, scale, offset=scale), SETTINGS)
    with pytest.raises(CodecError, match="its mins, which are no zero points"):
        write_gptq_awq._round_scales(Groups(8, scale, offset=scale, why="its mins"), SETTINGS)
    for odd in (Groups(8, scale, codes="e2m1"), Groups(32, scale.astype(np.uint8))):
        with pytest.raises(CodecError, match="its codes are no integers"):
            write_gptq_awq._round_scales(odd, SETTINGS)
    with pytest.raises(CodecError, match=r"scale 70000.0 at \[0, 1\] is beyond F16"):
        write_gptq_awq._round_scales(Groups(8, np.array([[1, 70000]], np.float32)), SETTINGS)


def test_a_scale_that_is_no_number_is_named_with_its_dialect_and_place() -> None:
    scales = np.ones((2, 8), np.float16)
    scales[1, 3] = np.inf
    parts = {
        ".qweight": part(np.zeros((16, 1), np.int32), "I32"),
        ".qzeros": part(np.zeros((2, 1), np.int32), "I32"),
        ".scales": part(scales, "F16"),
    }
    config = {"quant_method": "awq", "bits": 4, "w_bit": 4, "group_size": 8, "q_group_size": 8}
    packed = PackedWeight(awq.DIALECT, parts, config)
    with pytest.raises(CodecError) as error:
        repack_sources.read_awq(packed, "Q4_0")
    assert str(error.value).startswith(f"{awq.NAME}: part '.scales' holds inf at [1, 3]")


# --- codes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [1, 6, 7, 10, 40])
def test_every_code_is_filled_in_up_to_the_last_byte(bits: int, size: int) -> None:
    """Low bits first, and no byte more than there were."""
    code = (1 << bits) - 2 if bits > 1 else 1
    other = part(np.arange(3, dtype=np.uint8), "U8")
    parts = {".w": part(np.full(size, 0xA5, np.uint8), "U8"), ".s": other}
    dialect: Any = type("Dialect", (), {"main": ".w"})
    made = lattice.fill_codes(dialect, parts, code, bits)
    assert made[".s"] is other and made[".w"].shape == parts[".w"].shape
    stream = np.unpackbits(np.frombuffer(made[".w"].raw, np.uint8), bitorder="little")
    assert len(stream) == 8 * size
    wanted = [code >> place % bits & 1 for place in range(8 * size)]
    assert stream.tolist() == wanted


def test_an_output_is_one_row_of_the_right_type_that_can_be_written() -> None:
    right = np.zeros(8, np.float32)
    check_out("Q8_0", right, "float32")
    with pytest.raises(CodecError, match="Q8_0: decodes to float64, the output is float32"):
        check_out("Q8_0", right, "float64")
    fixed = np.zeros(8, np.float32)
    fixed.flags.writeable = False
    for wrong in (right.reshape(2, 4), right[::2], fixed):
        said = re.escape(f"contiguous 1-D array, found shape {list(wrong.shape)}")
        with pytest.raises(CodecError, match=said):
            check_out("Q8_0", wrong, "float32")


def test_an_encoding_without_a_codec_says_why() -> None:
    assert codec("Q8_0").name == "Q8_0"
    with pytest.raises(UnsupportedError, match=r"^Q4_2: "):
        codec("Q4_2")
    with pytest.raises(CodecError):
        codec("Q4_17")
