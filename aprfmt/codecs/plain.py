"""Encodings that are arrays already: F32, F64, the integers, BOOL and C64.

Decoding gives the encoding's own dtype, so nothing is lost; who needs float32 casts afterwards.
"""

from collections.abc import Mapping

import numpy as np

from aprfmt.codecs.base import Array, Bytes, Codec, Fma, as_rows, is_fused


class PlainCodec(Codec):
    """One little-endian value an element."""

    def __init__(self, name: str) -> None:
        """Set the encoding's name and its numpy dtype, in memory and little-endian as stored."""
        self.name = name
        self.dtype = self.row.numpy
        self._stored = np.dtype(self.dtype).newbyteorder("<")

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill `out` with the stored values; CodecError when byte and element counts disagree."""
        data = self.main(raw, out)
        if self.dtype == "bool":  # a byte other than 0 and 1 is no bool until it is compared
            np.not_equal(data, 0, out=out)
        else:
            out[:] = data.view(self._stored)

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {"": bytes} of the array; CodecError for another dtype (no silent cast)."""
        is_fused(fma)
        return {"": as_rows(self.name, x, self.dtype).astype(self._stored, copy=False).tobytes()}


F32 = PlainCodec("F32")
F64 = PlainCodec("F64")
I8 = PlainCodec("I8")
I16 = PlainCodec("I16")
I32 = PlainCodec("I32")
I64 = PlainCodec("I64")
U8 = PlainCodec("U8")
U16 = PlainCodec("U16")
U32 = PlainCodec("U32")
U64 = PlainCodec("U64")
BOOL = PlainCodec("BOOL")
C64 = PlainCodec("C64")
