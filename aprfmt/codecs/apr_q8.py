"""APR_Q8: one float32 scale for the whole tensor, then a signed byte an element.

0  4  scale  float32 (absent from an empty tensor)
4  N  qs     int8; value = q * scale

Source: the APR v2 format; not GGML's Q8_0.
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.codecs.arithmetic import round_half_away
from aprfmt.codecs.base import (
    CHUNK,
    F32,
    Array,
    Bytes,
    Codec,
    Fma,
    as_rows,
    check_finite,
    check_length,
    is_fused,
    part_bytes,
)


class AprQ8(Codec):
    """APR's own eight bits."""

    name = "APR_Q8"

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill `out` with q * scale; CodecError unless there are 4 + N bytes (0 for no element)."""
        data = self.main(raw, out)
        if out.size == 0:
            return
        scale, q = data[:4].view("<f4")[0], data[4:].view(np.int8)
        with np.errstate(all="ignore"):
            for start in range(0, out.size, CHUNK):
                np.multiply(q[start : start + CHUNK], scale, out=out[start : start + CHUNK])

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Return 1: `cut` can start at any element.

        Raises CodecError unless there are 4 + `count` bytes (0 for no element).
        """
        found, expected = part_bytes(self.name, raw).size, count + 4 * (count > 0)
        check_length(self.name, found, expected, f"{count} elements and their scale")
        return 1

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32:
        """Return float32 [count]: the tensor's scale, repeated for every element."""
        scale: F32 = np.abs(part_bytes(self.name, raw)[:4].view("<f4"))
        return scale.repeat(count)

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return the bytes of elements [start, stop) as a tensor with the same scale."""
        data = memoryview(raw[""])
        return {"": bytes(data[:4]) + bytes(data[4 + start : 4 + stop])}

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {"": bytes} of `x`; `importance` is not used.

        The scale is the largest magnitude / 127 (1 for all zeros); ties are rounded away from zero.
        Raises CodecError for a NaN or an infinity.
        """
        is_fused(fma)
        values: F32 = as_rows(self.name, x).reshape(-1)
        check_finite(self.name, values)
        if values.size == 0:
            return {"": b""}
        with np.errstate(all="ignore"):
            largest = np.abs(values).max(keepdims=True)
            scale: F32 = np.where(largest > 0, largest / np.float32(127), np.float32(1))
            # A scale can round to 0.
            ratio = np.divide(values, scale, out=np.zeros_like(values), where=values != 0)
            q = np.clip(round_half_away(ratio), -127, 127).astype(np.int8)
        return {"": scale.astype("<f4").tobytes() + q.tobytes()}


CODEC = AprQ8()
