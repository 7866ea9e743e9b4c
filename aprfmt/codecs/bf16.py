"""BF16: the upper half of a float32.

Decoding shifts the bits, so every pattern is kept, NaN payloads and signalling NaNs included.
Encoding rounds to nearest even; a NaN keeps its sign and the upper half of its payload and is made
quiet, as ggml_compute_fp32_to_bf16 (ggml-impl.h) does. ml_dtypes and torch give other NaNs.
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.codecs.base import CHUNK, Array, Bytes, Codec, Fma, as_rows, is_fused


class BF16Codec(Codec):
    """Two bytes an element: sign, 8 bits of exponent, 7 of fraction."""

    name = "BF16"

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` with the values; CodecError when byte and element counts disagree."""
        data = self.main(raw, out).view("<u2")
        np.left_shift(data, 16, out=out.view(np.uint32), dtype=np.uint32)

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {"": bytes} of float32 `x` rounded to nearest even; `importance` is not used.

        What is beyond the largest BF16 becomes infinity.
        """
        is_fused(fma)
        values = as_rows(self.name, x).reshape(-1)
        upper = np.empty(values.size, "<u2")
        for start in range(0, values.size, CHUNK):
            at = slice(start, start + CHUNK)
            upper[at] = round_to_bf16(values[at].view(np.uint32)) >> 16
        return {"": upper.tobytes()}


def round_to_bf16(
    bits: np.ndarray[tuple[int, ...], np.dtype[np.uint32]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    """Return float32 bits whose upper 16 bits are rounded to BF16.

    The lower 16 bits mean nothing.
    """
    rounded = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, bits | 0x00400000, rounded)


CODEC = BF16Codec()
