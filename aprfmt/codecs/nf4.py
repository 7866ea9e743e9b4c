"""NF4: bitsandbytes' 16 quantiles of the normal distribution, blocks of 64 under one absmax.

Layout and arithmetic: bnb4.py. The table below is only for encoding; decoding uses the file's.
Source of the values: QLoRA (arXiv 2305.14314), as bitsandbytes' functional.get_4bit_type has them.
"""

from aprfmt.codecs.bnb4 import Bnb4Codec

CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

CODEC = Bnb4Codec("NF4", CODE)
