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
    Fma,
    as_rows,
    check_finite,
    check_length,
    check_out,
    fused,
    part,
)


class AprQ8:
    """APR's own eight bits."""

    name, block_size, type_size = "APR_Q8", 1, 1
    parts: tuple[str, ...] = ("",)
    dtype = "float32"

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Scale; raises CodecError unless there are 4 + N bytes (0 for no element)."""
        data = part(self.name, raw)
        check_out(self.name, out, self.dtype)
        expected = out.size + 4 * (out.size > 0)
        check_length(self.name, data.size, expected, f"{out.size} elements and their scale")
        if out.size == 0:
            return
        scale, q = data[:4].view("<f4")[0], data[4:].view(np.int8)
        with np.errstate(all="ignore"):
            for start in range(0, out.size, CHUNK):
                np.multiply(q[start : start + CHUNK], scale, out=out[start : start + CHUNK])

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return the bytes of elements [start, stop) as of a tensor of their own."""
        data = memoryview(raw[""])
        return {"": bytes(data[:4]) + bytes(data[4 + start : 4 + stop])}

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Scale by the largest magnitude / 127 (1 for all zeros), ties away from zero."""
        fused(fma)
        values: F32 = as_rows(self.name, x).reshape(-1)
        check_finite(self.name, values)
        if values.size == 0:
            return {"": b""}
        with np.errstate(all="ignore"):
            largest = np.abs(values).max(keepdims=True)
            scale: F32 = np.where(largest > 0, largest / np.float32(127), np.float32(1))
            q = np.clip(round_half_away(values / scale), -127, 127).astype(np.int8)
        return {"": scale.astype("<f4").tobytes() + q.tobytes()}


CODEC = AprQ8()
