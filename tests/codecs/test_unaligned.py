"""safetensors aligns no tensor: parts of a packed weight may begin at any byte."""

import numpy as np
import pytest

from aprfmt.codecs import decode, encode


@pytest.mark.parametrize("encoding", ["NF4", "FP4"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_parts_are_read_at_any_address(encoding: str, nested: bool, shift: int) -> None:
    values = np.random.default_rng(shift).standard_normal((24, 96)).astype(np.float32)
    parts = encode(encoding, values, options={"double_quantization": nested})
    moved = {}
    for suffix, raw in parts.items():
        room = np.zeros(len(raw) + 8, np.uint8)
        at = shift - room.ctypes.data % 4 + 4
        room[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
        assert room[at:].ctypes.data % 4 == shift
        moved[suffix] = room[at : at + len(raw)].data
    expected = decode(encoding, parts, values.shape)
    assert decode(encoding, moved, values.shape).tobytes() == expected.tobytes()
