"""NVFP4: 64 E2M1 elements, a scale every 16; value = UE4M3[d] * E2M1[q].

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

0   4  d   four UE4M3 scales (E4M3 without a sign; 0x7F reads as 0) 4  32  qs  8 bytes for each 16
elements: low nibbles are elements 0-7, high nibbles 8-15

The tensor's own float32 scale stands in a sibling tensor (`NAME.scale` next to `NAME.weight` in
GGUF), one number, or one an expert: with part "scale" the value is E2M1[q] * (UE4M3[d] * scale),
rounded in that order, which is ModelOpt's. (ggml multiplies what comes out of the product.)
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.codecs.base import CHUNK, F32, U8, Array, BlockCodec, Blocks, Bytes, part_bytes
from aprfmt.codecs.bits import pack_halves
from aprfmt.codecs.mxfp4 import GAP, VALUES, nearest_e2m1
from aprfmt.errors import CodecError

SCALE = "scale"


def _half_scales() -> F32:
    """Return float32 [256]: half of the value of each scale byte; bit 7 is not used.

    VALUES holds doubled numbers, so the product of both is right.
    """
    byte = np.arange(256, dtype=np.int32)
    exponent, fraction = byte >> 3 & 15, (byte & 7).astype(np.float32)
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(fraction, -9), normal) * np.float32(0.5)
    values[0x7F] = 0
    return values.astype(np.float32)


HALF_SCALES: F32 = _half_scales()


def scale_byte(x: F32) -> U8:
    """Return non-negative x as UE4M3 bytes, ties away from zero.

    From 248 on the result is 448 (0x7E), as in ggml.
    """
    bits = np.minimum(x, np.float32(448)).view(np.int32)
    exponent = (bits >> 23) - 127 + 7
    normal = (exponent << 3 | bits >> 20 & 7) + (bits >> 19 & 1)
    normal[normal >= 15 << 3] = 0x7E
    small = np.minimum(x, np.float32(1)) * np.float32(512) + np.float32(0.5)
    byte: U8 = np.where(exponent <= 0, np.minimum(small, 7), normal).astype(np.uint8)
    return byte


class NVFP4(BlockCodec):
    """NVIDIA's four bits as GGUF holds them."""

    name = "NVFP4"
    optional_parts = (SCALE,)

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill `out` with the blocks' values, multiplied by part "scale" where there is one.

        Raises CodecError when lengths do not fit.
        """
        super().decode(raw, out)
        self.finish(raw, out)

    def finish(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Multiply the decoded blocks in `out` by part "scale" in place, where there is one.

        A decoded element is code * d without rounding, so that dividing by d gives the code again;
        it is then multiplied by d * scale. Raises CodecError where the part's length does not fit.
        """
        if SCALE not in raw or not out.size:
            return
        whole = self._tensor_scales(raw, out.size)
        records = self.main(raw, out).view(self.layout)
        step = max(1, CHUNK // self.block_size)
        with np.errstate(all="ignore"):
            for start in range(0, len(records), step):
                at = slice(start, start + step)
                d = HALF_SCALES[records["d"][at]] * np.float32(2)
                each = np.arange(start, start + len(d)) * len(whole) // len(records)
                runs = out[start * self.block_size :][: d.size * 16].reshape(*d.shape, 16)
                runs /= np.where(d == 0, np.float32(1), d)[..., None]
                runs *= (d * whole[each, None])[..., None]

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32 | None:
        """Return float32 [count]: each element's scale times the widest gap of the table.

        A part "scale", the scale of the whole tensor, is multiplied in.
        """
        d = part_bytes(self.name, raw).view(self.layout)["d"]
        found: F32 = (HALF_SCALES[d] * GAP).reshape(-1).repeat(16)[:count]
        if SCALE in raw and count:
            whole = np.abs(self._tensor_scales(raw, count))
            found = found * whole[np.arange(count) * len(whole) // count]
        return found

    def _tensor_scales(self, raw: Mapping[str, Bytes], count: int) -> F32:
        """Return part "scale" as float32 [1] or [experts], for a weight of `count` elements.

        Raises CodecError where its length does not fit.
        """
        data = part_bytes(self.name, raw, SCALE)
        experts = data.size // 4
        if data.size % 4 or not experts or count % (experts * self.block_size):
            raise CodecError(
                f"{self.name}: part {SCALE!r} has {data.size} bytes for {count} elements; "
                "expected one float32, or one an expert"
            )
        found: F32 = data.view("<f4")
        return found

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return {suffix: bytes} of elements [start, stop): the blocks and any part "scale".

        With several experts part "scale" then has one number for each block.
        """
        found = dict(super().cut(raw, start, stop))
        if SCALE in raw and len(raw[SCALE]) > 4:
            blocks = part_bytes(self.name, raw).size // self.type_size
            whole = self._tensor_scales(raw, blocks * self.block_size)
            each = np.arange(start // self.block_size, -(-stop // self.block_size))
            found[SCALE] = whole[each * len(whole) // blocks].tobytes()
        elif SCALE in raw:
            found[SCALE] = raw[SCALE]
        return found

    def decode_blocks(self, block: Blocks, out: F32) -> None:
        """Fill `out` [n, 64] with VALUES[q] times half the scale of 16 elements."""
        runs = out.reshape(-1, 4, 2, 8)  # (block, scale, low or high, element)
        packed = block["qs"].reshape(-1, 4, 8)
        runs[:, :, 0] = VALUES[packed & 15]
        runs[:, :, 1] = VALUES[packed >> 4]
        runs *= HALF_SCALES[block["d"]][..., None, None]

    def encode_blocks(
        self, x: F32, block: Blocks, *, fused: bool, weights: F32 | None, sigma2: F32 | None
    ) -> None:
        """Fill `n` blocks from `x` [n, 64]; `fused`, `weights` and `sigma2` are not used.

        The scale maps the largest of 16 elements to 6. The scale of the whole tensor is the
        caller's: divide by it first and store it as another tensor.
        """
        runs = x.reshape(-1, 16)
        d = scale_byte(np.abs(runs).max(axis=1) / np.float32(6))
        block["d"] = d.reshape(-1, 4)
        codes = nearest_e2m1(runs, HALF_SCALES[d][:, None])
        block["qs"] = pack_halves(codes).reshape(-1, 32)


CODEC = NVFP4()
