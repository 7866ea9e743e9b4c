"""What each kernel must make of fixed input, as CRC-32 of the bytes that come out.

The digests were made by the numpy codecs, which tests hold to gguf, libgguf and bitsandbytes;
tests/codecs/test_native_golden.py makes them again. A kernel that a compiler got wrong is found on
its first use, in microseconds, and the numpy codec takes its place.
"""

from array import array
from functools import cache
from zlib import crc32

# The encoders' input: groups of eight blocks are left incomplete, and there are enough numbers of
# few bits, which make ties, to tell the two arithmetics apart.
COLUMNS = 512
ROWS = 21


SEED = 1  # of noise whose golden blocks hold no NaN, whose bits are the processor's own affair


def raw_bytes(count: int) -> bytes:
    """Return bytes that vary in all bits, of which no two make a NaN or an infinite float16."""
    state, made = SEED, bytearray()
    while len(made) < count:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        byte = state >> 16 & 0xFF
        made.append(byte ^ 0x40 if byte & 0x7C == 0x7C else byte)
    return bytes(made)


def blocks_of(block_size: int) -> int:
    """Return how many blocks a check decodes: three, or enough plain elements for a tail."""
    return 3 if block_size > 1 else 67


@cache
def values() -> "array[float]":
    """Return the encoders' input: ROWS x COLUMNS numbers of several magnitudes, one run zero."""
    noise = raw_bytes(2 * ROWS * COLUMNS)
    made = array("f", bytes(4 * ROWS * COLUMNS))
    for i in range(ROWS * COLUMNS):
        word = noise[2 * i] | noise[2 * i + 1] << 8
        made[i] = ((word >> 6) - 500) / 256 * (1 + i // 64 % 5) if i // 64 != 7 else 0.0
    return made


@cache
def importance() -> "array[float]":
    """Return COLUMNS positive weights."""
    return array("f", [1 + byte for byte in raw_bytes(COLUMNS)])


def digest(data: object) -> int:
    """Return the CRC-32 of a buffer's bytes."""
    return crc32(memoryview(data).cast("B"))  # type: ignore[arg-type]


DECODED: dict[str, int] = {
    "F32": 0xaca98466, "F16": 0xcedc0a51, "BF16": 0xda4cf5b1, "F8_E4M3": 0x20633c17,
    "F8_E5M2": 0xe5ce1abe, "F8_E8M0": 0x0599f35f,
    "F8_E4M3FNUZ": 0x57c7950d, "F8_E5M2FNUZ": 0x769f58ff,
    "Q4_0": 0xf85d9db5, "Q4_1": 0x1284416e, "Q5_0": 0x844b5698, "Q5_1": 0x8878e95c,
    "Q8_0": 0xc0b25b1b, "Q8_1": 0xc6c91e41, "Q1_0": 0xa877f030, "Q2_0": 0x00653677,
    "Q2_K": 0xe191b006, "Q3_K": 0x901aeeb6, "Q4_K": 0x56914820, "Q5_K": 0x6f1d89e6,
    "Q6_K": 0x0c45bfac, "Q8_K": 0x084af81b, "IQ2_XXS": 0x376c81fa, "IQ2_XS": 0x322b3984,
    "IQ2_S": 0x3153e3b0, "IQ3_XXS": 0x842fe88c, "IQ3_S": 0x377837ae, "IQ1_S": 0x7de34e3c,
    "IQ1_M": 0x64a2aae4, "IQ4_NL": 0xaacbb60d, "IQ4_XS": 0xe7977f63, "MXFP4": 0x2817fbd9,
    "NVFP4": 0x3e23b96f, "TQ1_0": 0xcf2f4524, "TQ2_0": 0xb3db5f43, "APR_Q4": 0x73d6af5c,
    "APR_Q8": 0x65027d83,
}  # fmt: skip

# (without importance, with it)
ENCODED: dict[tuple[str, str], tuple[int, int]] = {
    ("F16", "fused"): (0xD8F1E1E2, 0xD8F1E1E2),
    ("F16", "strict"): (0xD8F1E1E2, 0xD8F1E1E2),
    ("BF16", "fused"): (0x8A5EE16C, 0x8A5EE16C),
    ("BF16", "strict"): (0x8A5EE16C, 0x8A5EE16C),
    ("Q4_0", "fused"): (0x68907D98, 0x8E8DE43C),
    ("Q4_0", "strict"): (0x68907D98, 0xD803DED9),
    ("Q4_1", "fused"): (0x06DD7F90, 0xBC172467),
    ("Q4_1", "strict"): (0x06DD7F90, 0xB8B40AE8),
    ("Q5_0", "fused"): (0xBFE413CE, 0xC6512139),
    ("Q5_0", "strict"): (0xBFE413CE, 0xC6CB9E6D),
    ("Q5_1", "fused"): (0x88FC8032, 0x72934110),
    ("Q5_1", "strict"): (0x88FC8032, 0xC9507A70),
    ("Q8_0", "fused"): (0x8B599F6E, 0x8B599F6E),
    ("Q8_0", "strict"): (0x8B599F6E, 0x8B599F6E),
    ("Q2_K", "fused"): (0xF8EF2581, 0x16459473),
    ("Q2_K", "strict"): (0x4EC13775, 0xDF2A8990),
    ("Q3_K", "fused"): (0xFCE9510A, 0xC3F97739),
    ("Q3_K", "strict"): (0xFCE9510A, 0xC3F97739),
    ("Q4_K", "fused"): (0xB64E3890, 0xD9C96CC1),
    ("Q4_K", "strict"): (0x79703698, 0x8EE5E208),
    ("Q5_K", "fused"): (0xA609D3DA, 0xCF9E1492),
    ("Q5_K", "strict"): (0xC167ED7F, 0xCF9E1492),
    ("Q6_K", "fused"): (0x4CC4CD4E, 0x55DC1748),
    ("Q6_K", "strict"): (0x4CC4CD4E, 0x55DC1748),
    ("IQ4_NL", "fused"): (0xDC59BA24, 0xE3829EB1),
    ("IQ4_NL", "strict"): (0x9FBA09A1, 0xE3829EB1),
    ("IQ4_XS", "fused"): (0xA756C809, 0xB5CF72B6),
    ("IQ4_XS", "strict"): (0xA756C809, 0xB5CF72B6),
    ("TQ1_0", "fused"): (0x3BF528AF, 0x3BF528AF),
    ("TQ1_0", "strict"): (0x3BF528AF, 0x3BF528AF),
    ("TQ2_0", "fused"): (0x94F6E908, 0x94F6E908),
    ("TQ2_0", "strict"): (0x94F6E908, 0x94F6E908),
    ("MXFP4", "fused"): (0xAF526CA6, 0xAF526CA6),
    ("MXFP4", "strict"): (0xAF526CA6, 0xAF526CA6),
    ("NVFP4", "fused"): (0xCD7F320B, 0xCD7F320B),
    ("NVFP4", "strict"): (0xCD7F320B, 0xCD7F320B),
}
