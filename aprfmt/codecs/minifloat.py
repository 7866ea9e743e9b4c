"""Floating point of 8 bits and less: the table of all values, and the codec that looks them up.

Sources: OCP 8-bit Floating Point (E4M3, E5M2), OCP Microscaling (E8M0, E2M3, E3M2, E2M1), and the
`fnuz` variants of Noune et al. (arXiv 2206.02915): no infinity, no negative zero, one NaN.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aprfmt.codecs.base import CHUNK, F32, U8, Array, Bytes, Codec, Codes


@dataclass(frozen=True)
class Minifloat:
    """A layout of bits, highest first: sign, exponent, fraction.

    `infinity` is the fraction-0 pattern of the last exponent (IEEE); `nan` says which patterns of
    that exponent are NaN: "ieee" all with a fraction, "last" only the highest, "zero" the pattern
    of negative zero, "none" nothing.
    """

    exponent: int
    fraction: int
    bias: int
    sign: bool = True
    infinity: bool = False
    nan: str = "none"

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return self.sign + self.exponent + self.fraction

    def values(self) -> F32:
        """Return float32 [2**bits], every pattern's value; each is exact."""
        code = np.arange(1 << self.bits, dtype=np.int32)
        fraction = (code & (1 << self.fraction) - 1).astype(np.float64)
        exponent = code >> self.fraction & (1 << self.exponent) - 1
        negative = (code >> self.exponent + self.fraction & 1) * self.sign
        normal = np.ldexp(1 + np.ldexp(fraction, -self.fraction), exponent - self.bias)
        small = np.ldexp(fraction, 1 - self.bias - self.fraction)
        has_subnormals = self.fraction > 0
        magnitude = np.where((exponent == 0) & has_subnormals, small, normal)
        last = exponent == (1 << self.exponent) - 1
        if self.infinity:
            magnitude[last & (fraction == 0)] = np.inf
        nan = {
            "ieee": last & (fraction > 0),
            "last": last & (fraction == (1 << self.fraction) - 1),
            "zero": code == 1 << self.bits - 1,
            "none": np.zeros(code.shape, bool),
        }[self.nan]
        magnitude[nan] = np.nan
        return np.where(negative, -magnitude, magnitude).astype(np.float32)


def byte_pairs(values: Array) -> F32:
    """Return float32 [256, 2]: the two numbers of every byte of two 4-bit codes, low first."""
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=1).astype(np.float32)


class MinifloatCodec(Codec):
    """Elements of 4, 6 or 8 bits in a row, lowest bits first; float32 when decoded."""

    def __init__(self, name: str, kind: Minifloat) -> None:
        """Set the encoding's name and the read-only table of its values, float32 [2**bits]."""
        self.name, self.kind = name, kind
        self.values: F32 = kind.values()
        self.values.flags.writeable = False

    def _codes(self, data: U8) -> Codes:
        """Return the codes of whole blocks, [elements]; 8-bit data is returned unchanged."""
        if self.kind.bits == 8:
            return data
        words = data.reshape(-1, self.type_size).astype(np.uint32)
        word: Codes = words[:, 0]
        for index in range(1, self.type_size):
            word = word | words[:, index] << 8 * index
        shifts = np.arange(0, 8 * self.type_size, self.kind.bits, dtype=np.uint32)
        codes: Codes = word[:, None] >> shifts & (1 << self.kind.bits) - 1
        return codes.reshape(-1)

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` with the values; CodecError when byte and element counts disagree."""
        data = self.main(raw, out)
        if self.kind.bits == 4 and not out.size % 2:
            np.take(byte_pairs(self.values), data, axis=0, out=out.reshape(-1, 2), mode="clip")
            return
        blocks = -(-out.size // self.block_size)
        step = CHUNK // self.block_size
        for start in range(0, blocks, step):
            piece = data[start * self.type_size : (start + step) * self.type_size]
            target = out[start * self.block_size : (start + step) * self.block_size]
            target[:] = self.values[self._codes(piece)[: target.size]]
