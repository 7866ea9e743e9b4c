"""Seeded faults of `aprfmt/causes/tensor/stored_bytes.py`."""

from typing import Any

import numpy as np

from aprfmt.causes.tensor import stored_bytes
from tests.causes.faults import UP, Fault, computed, flipped, raw
from tests.diagnosis import files
from tests.diagnosis.engine_changes import changed
from tests.diagnosis.engines import COARSE, trace
from tests.diagnosis.fault import Fault as PairFault
from tests.diagnosis.fault import Pair
from tests.diagnosis.making import DEMO as DEMO
from tests.diagnosis.making import engine

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


def one_bit(x: Any) -> Any:
    """Flip the highest exponent bit of one value."""
    x = x.copy()
    x.view(np.uint32)[5, 7] ^= np.uint32(1 << 26)
    return x


def read_as_f16() -> Pair:
    """Return the demo model, and the trace of an engine that reads its BF16 bytes as F16."""
    wrong = files.copy(DEMO, "read-as-f16", tensors=files.relabel("F16"))
    return DEMO, trace(wrong, "engine-read-as-f16", points=COARSE)


ENGINE_FAULTS = (
    PairFault("read-as-f16", "demo", "BF16 bytes read as F16", read_as_f16, ("dtype_mislabel",),
          ("token_embd.weight", "L0.attn_norm.weight", "L1.attn_q.bias", "L2.ffn_up.weight"),
          upstream=(8,)),
    engine("one-bit", "llama", "one exponent bit of one weight", "bit_rot", "L1.ffn_down.weight",
           weights=changed("L1.ffn_down.weight", one_bit)),
)  # fmt: skip
