"""Signs of the IQ2 and IQ3 encodings: eight a byte, or seven bits and their parity.

A set bit negates. In the XXS and XS types only 7 of 8 signs are stored, and the eighth makes the
number of negative elements even.
"""

import numpy as np

from aprfmt.codecs.base import F32, U8

_BYTES: U8 = np.arange(256, dtype=np.uint8)
_BITS: U8 = np.unpackbits(_BYTES[:, None], axis=1, bitorder="little")

OF_BYTE: F32 = 1 - 2 * _BITS.astype(np.float32)  # (byte, element)
_PARITY: U8 = _BITS[:128].sum(axis=1, dtype=np.uint8) & 1
OF_SEVEN_BITS: F32 = OF_BYTE[_BYTES[:128] | _PARITY << 7]
