"""F4: the E2M1 floats of safetensors, two elements a byte, the low nibble first.

sign, 2, 1; bias 1; no infinity and no NaN: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
That is the order of torch's float4_e2m1fn_x2. bitsandbytes' FP4 is another thing (fp4.py).
"""

from aprfmt.codecs.minifloat import Minifloat, MinifloatCodec

CODEC = MinifloatCodec("F4", Minifloat(2, 1, 1))
