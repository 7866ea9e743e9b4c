"""Read blocks of GGUF as codes and scales, which a writer can lay out in other ways.

A *group* is the elements that share one scale.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from aprfmt.codecs import codec, decode, native_kernels
from aprfmt.codecs.base import F32, U8, Array, Blocks
from aprfmt.codecs.bits import halves_to_pairs
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.errors import CodecError

_CHUNK = 1 << 19  # codes taken out of blocks at a time

ReadRows = Callable[[int, int], memoryview | bytes]  # the stored bytes of rows [start, stop)


@dataclass(frozen=True)
class BlockSource:
    """How the codes and the scales of groups are read from an encoding's blocks.

    `half` is a number of bytes: the low nibbles of so many bytes come before their high nibbles.
    `groups(blocks, scale of the scales or None)` returns the numbers of blocks [rows, blocks].
    """

    half: int
    groups: Callable[[Blocks, F32 | None], Groups]


def _block_scales(stored: Array) -> F32:
    """Return float16 scales of blocks as float32 of the same shape.

    Raises CodecError for a NaN or infinity.
    """
    raw = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    found: F32 = decode("F16", raw.data, stored.shape)
    wrong = ~np.isfinite(found)
    if wrong.any():
        index = [int(i) for i in np.argwhere(wrong)[0]]
        raise CodecError(f"its block {index} holds {found[tuple(index)]}, expected finite numbers")
    return found


def _small_float_groups(blocks: Blocks, tensor_scale: F32 | None) -> Groups:
    """Return the scales of NVFP4 blocks as `Groups`: E2M1 codes, an E4M3 scale for 16 elements.

    `tensor_scale` is the float32 scale of the scales, or None.
    """
    # Bit 7 is none that ggml reads, and 0x7F it reads as 0.
    four = np.ascontiguousarray(blocks["d"].view("<u4")) & np.uint32(0x7F7F7F7F)
    d = four.view(np.uint8).reshape(len(blocks), -1)
    wrong = d == 0x7F
    if wrong.any():
        d[wrong] = 0
    return Groups(16, d, tensor_scale=tensor_scale, codes="e2m1")


def _power_groups(blocks: Blocks, tensor_scale: F32 | None) -> Groups:
    """Return the scales of MXFP4 blocks as `Groups`: E2M1 codes, a power of two for 32 elements.

    `tensor_scale` is not used. Raises CodecError for the exponent 255, which is no number.
    """
    e = np.ascontiguousarray(blocks["e"])
    if (e == 255).any():
        index = [int(i) for i in np.argwhere(e == 255)[0]]
        raise CodecError(f"its block {index} has the exponent 255, expected one of a number")
    return Groups(32, e, codes="e2m1")


BLOCKS: Mapping[str, BlockSource] = {
    "Q4_0": BlockSource(16, lambda held, whole: Groups(32, _block_scales(held["d"]))),
    "Q4_1": BlockSource(16, lambda held, whole: Groups(
        32, _block_scales(held["d"]), _block_scales(held["m"]), "its blocks have minimums")),
    "NVFP4": BlockSource(8, _small_float_groups),
    "MXFP4": BlockSource(16, _power_groups),
}  # fmt: skip


def grid_of_blocks(
    encoding: str, shape: tuple[int, ...], rows: ReadRows, tensor_scale: F32 | None
) -> GridWeight:
    """Return a weight [out, in] stored in GGUF blocks as its codes and the scales of its groups.

    `rows(start, stop)` reads the stored bytes of rows, `tensor_scale` is the scale of the scales or
    None. Raises CodecError for a scale that is not finite.
    """
    kind, row = codec(encoding), BLOCKS[encoding]
    assert kind.layout is not None
    outputs, inputs = shape
    step = max(1, _CHUNK // max(inputs, 1))

    def read_blocks(start: int, stop: int) -> Blocks:
        """Return the GGUF blocks of rows [start, stop) as records [rows, blocks]."""
        return np.frombuffer(rows(start, stop), kind.layout).reshape(stop - start, -1)

    def read_codes(start: int, stop: int) -> U8:
        """Return the 4-bit codes of rows [start, stop), uint8 [rows, in/2], low nibble first."""
        made, native = np.empty((stop - start, inputs // 2), np.uint8), native_kernels()
        if native is not None:
            qs = read_blocks(start, stop)["qs"]
            qs = qs.reshape(-1, qs.shape[-1])
            native.halves(qs, row.half, made.reshape(qs.shape), True)
            return made
        for at in range(start, stop, step):
            end = min(at + step, stop)
            qs = np.ascontiguousarray(read_blocks(at, end)["qs"]).reshape(-1, row.half)
            made[at - start : end - start] = halves_to_pairs(qs).reshape(end - at, -1)
        return made

    return GridWeight(shape, row.groups(read_blocks(0, outputs), tensor_scale), read_codes)
