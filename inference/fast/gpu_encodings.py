"""Which weights stay encoded on a CUDA device, and the buffer they are decoded into."""

from aprfmt.base.encodings import ENCODINGS

# 4-bit encodings in several parts, decoded by decode_coded.
CODED = ("NF4", "FP4")
# Types that are not smaller than the decoded numbers: placed decoded.
WIDE = ("float32", "float64")
# Share of a GPU's free memory that weights may take by default; the rest is for activations.
MEMORY_SHARE = 0.8
# Decoded bytes per piece: a whole weight, except for big vocabularies.
SCRATCH = 256 << 20


def stays_encoded(encoding: str, dtype: str) -> bool:
    """Return whether a weight stays encoded on the device, for arithmetic in `dtype`.

    It does if a kernel decodes it, unless it is stored in the dtype or in 32 or more bits.
    """
    from aprfmt.inference.fast import cuda

    return encoding in CODED or (
        encoding in cuda.DECODED and ENCODINGS[encoding].numpy not in (dtype, *WIDE)
    )
