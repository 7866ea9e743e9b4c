"""Ways to misread the byte that is a group's scale, and the byte that a factor identifies.

A and B are the two files that are compared; a *side* is one of them, or its tensor.

The byte is an exponent (OCP Microscaling: F8_E8M0) or a small float. A reader that takes it for
another number multiplies each group by a factor that only the byte and the misreading decide.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.codecs import fp8

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.minifloat import MinifloatCodec

BIAS = 127  # of F8_E8M0
USUAL = slice(64, 160)  # bytes that exponents of weights have
TWO = 2  # bytes: of a single one every reading is one factor on all
LOOSE = 0.04  # relative: how well the factor of a group is known by rounded values
NEARLY_ALL = 0.9  # share of the groups that a reading explains


def byte_readings(kind: "MinifloatCodec") -> Iterator[tuple[str, "Array", bool]]:
    """Yield (words, number of each of the 256 bytes, whether either side may be wrong).

    Each is a way to misread scale bytes; `kind` is their right type. Numbers are float64 [256].
    """
    plain = np.arange(256, dtype=np.float64)
    exponent = kind is fp8.E8M0
    meant = "each is the exponent of a power of two" if exponent else f"each is of {kind.name}"

    def read_as(how: str) -> str:
        """Return the sentence that scale bytes were read as `how`, with their right type."""
        return f"their scale bytes read as {how}, where {meant}"

    yield read_as("whole numbers"), plain, False
    yield read_as("signed whole numbers"), np.where(plain < 128, plain, plain - 256), False
    yield read_as("whole numbers over 255"), plain / 255, False
    for float8 in (*fp8.OF_TWO_SIGNS, fp8.E8M0):
        if float8 is not kind:
            yield read_as(f"{float8.name} numbers"), float8.values.astype(np.float64), False
    if exponent:
        yield read_as("exponents without their bias of 127"), 2.0**plain, False
        for bias in (BIAS - 1, BIAS + 1):
            yield read_as(f"exponents with a bias of {bias}, not 127"), 2.0 ** (plain - bias), True


def describe_misread_exponents(stored: "Array", factor: "Array") -> str:
    """Return in words how exponents were misread, if `stored` scales times `factor` are right.

    Both are [groups]. A stored scale may be the misread number times a power of two, as the
    values of a float code do not tell these apart. "" where no reading explains most of the
    scales.
    """
    with np.errstate(all="ignore"):
        steps = np.log2(np.abs(factor))
    if (np.abs(steps - np.rint(steps)) < LOOSE).mean() >= NEARLY_ALL:
        return ""  # other exponents make such factors too
    for says, numbers, either in byte_readings(fp8.E8M0):
        if either or not tells_bytes_apart(numbers):
            continue
        held, near = bytes_of_factors(factor, np.ones_like(factor), numbers, LOOSE)
        with np.errstate(all="ignore"):
            power = np.log2(np.abs(stored / numbers[held]))
        near &= np.abs(power - np.rint(power)) < LOOSE
        if near.mean() >= NEARLY_ALL and len(np.unique(held[near])) >= TWO:
            return says
    return ""


def misread_factors(numbers: "Array") -> "Array":
    """Return, for each byte, the number it was misread as over the right one, float64 [256].

    NaN for byte 255.
    """
    return numbers / fp8.E8M0.values.astype(np.float64)


def tells_bytes_apart(numbers: "Array") -> bool:
    """Return whether a misreading has different factors for most bytes that scales usually have."""
    usual = misread_factors(numbers)[USUAL]
    usual = usual[np.isfinite(usual) & (usual != 0)]
    return len(usual) > TWO and len(np.unique(usual)) > len(usual) // 2


def bytes_of_factors(
    x: "Array", y: "Array", numbers: "Array", slack: float
) -> "tuple[Array, Array]":
    """Return (byte, whether it fits) for each factor y / x of a misreading, both [n].

    `numbers` [256] is what bytes were misread as; a byte fits within `slack`, relative.
    """
    factors = misread_factors(numbers)
    usable = np.flatnonzero(np.isfinite(factors) & (factors != 0))
    usable = usable[np.argsort(factors[usable], kind="stable")]
    with np.errstate(all="ignore"):
        found = np.where(x != 0, y / x, 0.0)
    after = np.clip(np.searchsorted(factors[usable], found), 1, len(usable) - 1)
    low, high = usable[after - 1], usable[after]
    nearer = np.abs(factors[low] - found) <= np.abs(factors[high] - found)
    held = np.where(nearer, low, high)
    return held, np.abs(factors[held] - found) <= slack * np.abs(found)
