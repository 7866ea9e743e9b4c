"""F16: IEEE binary16, decoded to float32 bit by bit.

Widening keeps every pattern: a NaN keeps sign and payload (shifted left by 13) and a signalling
NaN stays signalling, whatever the processor's own conversion would do. Encoding rounds to nearest
even; a NaN stays a NaN, made quiet, with the high bits of its payload.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from aprfmt.codecs.base import CHUNK, Array, Bytes, Codec, Fma, as_rows, is_fused


def _float32_bits() -> npt.NDArray[np.uint32]:
    """Return uint32 [65536]: the float32 bits of every float16 pattern."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    sign, exponent, fraction = bits >> 15 << 31, bits >> 10 & 31, bits & 0x3FF
    normal = sign | (exponent + (127 - 15)) << 23 | fraction << 13
    special = sign | np.uint32(0x7F800000) | fraction << 13
    subnormal = sign | (fraction.astype(np.float32) * np.float32(2.0**-24)).view(np.uint32)
    return np.select([exponent == 31, exponent == 0], [special, subnormal], normal)


_FLOAT32_BITS = _float32_bits()


class F16Codec(Codec):
    """Two bytes an element: sign, 5 bits of exponent (bias 15), 10 of fraction."""

    name = "F16"

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` with the values; CodecError when byte and element counts disagree."""
        halves, bits = self.main(raw, out).view("<u2"), out.view(np.uint32)
        for start in range(0, out.size, CHUNK):
            at = slice(start, start + CHUNK)
            np.take(_FLOAT32_BITS, halves[at], out=bits[at], mode="wrap")

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {"": bytes} of float32 `x` rounded to nearest even; `importance` is not used.

        What is beyond 65519.99 becomes infinity, as IEEE 754 says.
        """
        is_fused(fma)
        values = as_rows(self.name, x).reshape(-1)
        with np.errstate(all="ignore"):
            halves = values.astype("<f2").view("<u2")
        nan = np.isnan(values)
        if nan.any():
            bits = values[nan].view(np.uint32)
            halves[nan] = bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x1FF
        return {"": halves.tobytes()}


CODEC = F16Codec()
