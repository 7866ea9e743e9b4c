"""Fixed inputs of the native kernels, and the CRC-32 of what each must make of them.

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


SEED = 3  # of noise whose golden blocks hold no NaN, whose bits are the processor's own affair


def raw_bytes(count: int) -> bytes:
    """Return bytes that vary in all bits, of which no two make a NaN or an infinite float16."""
    state, made = SEED, bytearray()
    while len(made) < count:
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        byte = state >> 16 & 0xFF
        made.append(byte ^ 0x40 if byte & 0x7C == 0x7C else byte)
    return bytes(made)


def block_count(block_size: int) -> int:
    """Return how many blocks a check decodes: three, or 67 where a block is one element."""
    return 3 if block_size > 1 else 67


@cache
def sample_values() -> "array[float]":
    """Return the encoders' input: ROWS x COLUMNS numbers of several magnitudes, one run zero."""
    noise = raw_bytes(2 * ROWS * COLUMNS)
    made = array("f", bytes(4 * ROWS * COLUMNS))
    for i in range(ROWS * COLUMNS):
        word = noise[2 * i] | noise[2 * i + 1] << 8
        made[i] = ((word >> 6) - 500) / 256 * (1 + i // 64 % 5) if i // 64 != 7 else 0.0
    return made


@cache
def sample_importance() -> "array[float]":
    """Return COLUMNS positive importances, the encoders' other input."""
    return array("f", [1 + byte for byte in raw_bytes(COLUMNS)])


def digest(data: object) -> int:
    """Return the CRC-32 of a buffer's bytes."""
    return crc32(memoryview(data).cast("B"))  # type: ignore[arg-type]


DECODED: dict[str, int] = {
    "F32": 0xd81b9296, "F16": 0x3ca271e4, "BF16": 0x9eb5cb89, "F8_E4M3": 0x14e88d57,
    "F8_E5M2": 0xc4c1fdd5, "F8_E8M0": 0xe3a50532,
    "F8_E4M3FNUZ": 0x908d33c8, "F8_E5M2FNUZ": 0x5152a995,
    "Q4_0": 0x8c5a94f6, "Q4_1": 0x947c73a0, "Q5_0": 0xe1fcaf98, "Q5_1": 0x650ef86c,
    "Q8_0": 0x49722f06, "Q8_1": 0xd6e0aadd, "Q1_0": 0xf1326b78, "Q2_0": 0xb1e3ae93,
    "Q2_K": 0xf1da931c, "Q3_K": 0xbc3bb2f8, "Q4_K": 0xb08d23fc, "Q5_K": 0xed95eb59,
    "Q6_K": 0xe073c509, "Q8_K": 0x7046116e, "IQ2_XXS": 0x2babbb03, "IQ2_XS": 0xea03fba4,
    "IQ2_S": 0x4241e6d1, "IQ3_XXS": 0xff702d2c, "IQ3_S": 0x592e9a41, "IQ1_S": 0xa32a42e2,
    "IQ1_M": 0x6b9acd6d, "IQ4_NL": 0xbb94ab5c, "IQ4_XS": 0xde2849df, "MXFP4": 0xfe6f8800,
    "NVFP4": 0x7dca0a8f, "TQ1_0": 0x347c3586, "TQ2_0": 0x78fd61ca, "APR_Q4": 0xd98f2d29,
    "APR_Q8": 0x04c51cbb,
}  # fmt: skip

# (without importance, with it)
ENCODED: dict[tuple[str, str], tuple[int, int]] = {
    ("F16", "fused"): (0x1B7F6477, 0x1B7F6477),
    ("F16", "strict"): (0x1B7F6477, 0x1B7F6477),
    ("BF16", "fused"): (0xB6333648, 0xB6333648),
    ("BF16", "strict"): (0xB6333648, 0xB6333648),
    ("Q4_0", "fused"): (0xA79997F7, 0x9EBD4782),
    ("Q4_0", "strict"): (0xA79997F7, 0x4E08BD10),
    ("Q4_1", "fused"): (0x8D8E00F1, 0x2D5309D7),
    ("Q4_1", "strict"): (0x8D8E00F1, 0xB7E3DF13),
    ("Q5_0", "fused"): (0x64CD7B3F, 0xE88AEFEF),
    ("Q5_0", "strict"): (0x78934134, 0xB854F7CB),
    ("Q5_1", "fused"): (0x80722980, 0x933B4CF8),
    ("Q5_1", "strict"): (0x80722980, 0x2CBF336A),
    ("Q8_0", "fused"): (0xFB1D0BD3, 0xFB1D0BD3),
    ("Q8_0", "strict"): (0xFB1D0BD3, 0xFB1D0BD3),
    ("Q2_K", "fused"): (0x14A84F0B, 0x70B4466E),
    ("Q2_K", "strict"): (0xA16AA024, 0x5B17AFB5),
    ("Q3_K", "fused"): (0xDBAE9840, 0x6B3CB628),
    ("Q3_K", "strict"): (0x12A4885E, 0x6B3CB628),
    ("Q4_K", "fused"): (0x262DA474, 0x399B759B),
    ("Q4_K", "strict"): (0x9B150472, 0xE8DF69BA),
    ("Q5_K", "fused"): (0xD04B791B, 0xFD3C14EA),
    ("Q5_K", "strict"): (0x19E370E3, 0xFD3C14EA),
    ("Q6_K", "fused"): (0x9CE1753A, 0xBE4D092D),
    ("Q6_K", "strict"): (0x235CB0DB, 0xBE4D092D),
    ("IQ4_NL", "fused"): (0x52109371, 0x3ABB8429),
    ("IQ4_NL", "strict"): (0x52109371, 0x3ABB8429),
    ("IQ4_XS", "fused"): (0xC3DA8FD0, 0x8D4B6D32),
    ("IQ4_XS", "strict"): (0xC3DA8FD0, 0x8D4B6D32),
    ("TQ1_0", "fused"): (0xBE0A660C, 0xBE0A660C),
    ("TQ1_0", "strict"): (0xBE0A660C, 0xBE0A660C),
    ("TQ2_0", "fused"): (0x12A013AA, 0x12A013AA),
    ("TQ2_0", "strict"): (0x12A013AA, 0x12A013AA),
    ("MXFP4", "fused"): (0xC6C0F9CB, 0xC6C0F9CB),
    ("MXFP4", "strict"): (0xC6C0F9CB, 0xC6C0F9CB),
    ("NVFP4", "fused"): (0x8E80BF83, 0x8E80BF83),
    ("NVFP4", "strict"): (0x8E80BF83, 0x8E80BF83),
}
