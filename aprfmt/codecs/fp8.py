"""The 8-bit floats of safetensors: one byte an element, looked up.

F8_E4M3      sign, 4, 3; bias 7; no infinity, S.1111.111 is NaN
F8_E5M2      sign, 5, 2; bias 15; infinities and NaNs as IEEE 754
F8_E4M3FNUZ  sign, 4, 3; bias 8; 0x80 is the NaN, no infinity, no negative zero
F8_E5M2FNUZ  sign, 5, 2; bias 16; likewise
F8_E8M0      8 bits of exponent, bias 127, nothing else; 0xFF is NaN; 0x00 is 2**-127
"""

from aprfmt.codecs.minifloat import Minifloat, MinifloatCodec

E4M3 = MinifloatCodec("F8_E4M3", Minifloat(4, 3, 7, nan="last"))
E5M2 = MinifloatCodec("F8_E5M2", Minifloat(5, 2, 15, infinity=True, nan="ieee"))
E4M3FNUZ = MinifloatCodec("F8_E4M3FNUZ", Minifloat(4, 3, 8, nan="zero"))
E5M2FNUZ = MinifloatCodec("F8_E5M2FNUZ", Minifloat(5, 2, 16, nan="zero"))
E8M0 = MinifloatCodec("F8_E8M0", Minifloat(8, 0, 127, sign=False, nan="last"))
OF_TWO_SIGNS = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)  # those that weights are stored in
