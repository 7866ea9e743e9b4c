"""Seeded faults of `aprfmt/causes/tensor/stored_bytes.py`."""

import numpy as np

from aprfmt.causes.tensor import stored_bytes
from tests.causes.faults import UP, Fault, computed, flipped, raw

FAULTS = (
    Fault(
        "bf16 read as f16",
        "dtype_mislabel",
        UP,
        computed(
            UP,
            lambda x: (
                (x.view(np.uint32) >> 16).astype(np.uint16).view(np.float16).astype(np.float32)
            ),
        ),
        stored_bytes.guess_dtype_mislabel,
        "bits read as",
    ),
    Fault(
        "f16 under the label bf16",
        "dtype_mislabel",
        UP,
        raw(
            UP,
            lambda old: (
                (np.frombuffer(old, np.uint16).astype(np.uint32) << 16)
                .view(np.float32)
                .astype(np.float16)
                .tobytes()
            ),
        ),
        stored_bytes.guess_dtype_mislabel,
        "read as",
    ),
    Fault(
        "bytes of values exchanged",
        "endianness",
        UP,
        raw(UP, lambda old: np.frombuffer(old, np.uint16).byteswap().tobytes()),
        stored_bytes.guess_byte_order,
        "other byte order",
        quantized=False,
    ),
    Fault(
        "one bit",
        "bit_rot",
        UP,
        raw(UP, flipped(777, 3)),
        stored_bytes.explain_bit_rot,
        "bit 11 of the BF16 value at [6, 4]",
        quantized=False,
    ),
    Fault(
        "three bits",
        "bit_rot",
        UP,
        raw(UP, lambda old: flipped(5000, 1)(flipped(900, 6)(flipped(777, 3)(old)))),
        stored_bytes.explain_bit_rot,
        "3 bits in 3 bytes differ",
        quantized=False,
    ),
    Fault(
        "a lost page",
        "bit_rot",
        UP,
        raw(UP, lambda old: old[:1024] + bytes(512) + old[1536:]),
        stored_bytes.explain_bit_rot,
        "bytes 1024 to 1535 are zero in B",
        quantized=False,
    ),
    Fault(
        "an edited value",
        "bit_rot",
        UP,
        raw(UP, lambda old: old[:100] + b"\x55\xaa\x12\x99" * 4 + old[116:]),
        stored_bytes.explain_bit_rot,
        "all other bytes are equal",
        quantized=False,
        confirmed=False,
    ),
)
