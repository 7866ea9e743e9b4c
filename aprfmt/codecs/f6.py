"""The 6-bit floats of safetensors: four elements in three bytes, no infinity and no NaN.

F6_E2M3  sign, 2, 3; bias 1
F6_E3M2  sign, 3, 2; bias 3

safetensors does not say how the bits lie; here the first element takes the lowest six bits of the
three bytes read as a little-endian number.
"""

from aprfmt.codecs.minifloat import Minifloat, MinifloatCodec

E2M3 = MinifloatCodec("F6_E2M3", Minifloat(2, 3, 1))
E3M2 = MinifloatCodec("F6_E3M2", Minifloat(3, 2, 3))
