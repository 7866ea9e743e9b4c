"""Structural damage to valid inputs, for hypothesis: cut, splice, repeat, flip, change a number.

Works with any bytes; `fields` (offset, bytes) tell where numbers and texts of a format stand, so
that lengths and counts are hit far more often than by chance.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

Field = tuple[int, int]
MOST = 3  # changes in one input
_ODD = (0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 128, 255, 256, 65_535, 1 << 31, (1 << 32) - 1,
        1 << 32, 1 << 61, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
_TEXTS = (b'"', b"\\", b"{", b"[" * 70, b"]", b"0", b"-1", b"1e999", b"NaN", b"null", b"\\ud800",
          b"\xff", b"\0", b"\x1b[2J", "\u202e".encode(), b"9" * 450, b"../", b"true")  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes], fields: Sequence[Sequence[Field]]) -> bytes:
    """Return one of the seeds with one to `MOST` changes; `fields` go with the seeds."""
    which = draw(st.integers(0, len(seeds) - 1))
    data = bytearray(seeds[which])
    spots = list(fields[which])
    for _ in range(draw(st.integers(1, MOST))):
        start, size = draw(_region(data, spots))
        change = draw(
            st.sampled_from(("flip", "number", "cut", "splice", "repeat", "drop", "text"))
        )
        if change == "flip" and size:
            at = start + draw(st.integers(0, size - 1))
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "number":
            data[start : start + size] = _number(draw, bytes(data[start : start + size]))
        elif change == "cut":
            del data[start:]
        elif change == "splice":
            other = draw(st.sampled_from(seeds))
            begin = draw(st.integers(0, len(other)))
            data[start : start + size] = other[begin : begin + draw(st.integers(0, 40))]
        elif change == "repeat":
            data[start:start] = bytes(data[start : start + size]) * draw(st.integers(1, 3))
        elif change == "drop":
            del data[start : start + size]
        elif change == "text":
            data[start:start] = draw(st.sampled_from(_TEXTS))
    return bytes(data)


@st.composite
def _region(draw: st.DrawFn, data: bytearray, spots: Sequence[Field]) -> Field:
    inside = [(at, size) for at, size in spots if at + size <= len(data)]
    of_field: bool = draw(st.booleans())
    if inside and of_field:
        return inside[draw(st.integers(0, len(inside) - 1))]
    start = draw(st.integers(0, len(data)))
    return start, draw(st.integers(0, min(16, len(data) - start)))


def _number(draw: st.DrawFn, old: bytes) -> bytes:
    """Return another number of the same width: an odd one, or the old one a little off."""
    width = len(old)
    before = int.from_bytes(old, "little")
    value = draw(st.sampled_from(_ODD) | st.sampled_from((before + 1, before - 1, before * 2)))
    return (value % (1 << 8 * width)).to_bytes(width, "little")
