"""FP4: bitsandbytes' 4-bit float (sign, 2 exponent bits, 1 fraction bit), blocks of 64.

Layout and arithmetic: bnb4.py. Bit 3 is the sign; the magnitudes are twelfths of 0, 1/16, 8, 12,
4, 6, 2, 3 in order of bits 0-2, and negative zero reads as zero. The table is for encoding only.
Source: bitsandbytes' functional.get_4bit_type. Not the E2M1 of MXFP4 (f4.py).
"""

import numpy as np

from aprfmt.codecs.bnb4 import Bnb4Codec

_MAGNITUDES = tuple(np.float32(x) / np.float32(12) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3))

CODEC = Bnb4Codec("FP4", (*map(float, _MAGNITUDES), *(0.0 - float(x) for x in _MAGNITUDES)))
