"""The distributions that initialisations draw weights from, and whether values have one.

Drawn numbers have one distribution in all rows and columns, and trained ones have not: rows grow
apart, and few values become large.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MOST_SORTED = 1 << 16  # values that are sorted
DISTINCT = 512  # values that a sample of drawn numbers has at least
FAR = 4.0  # standard errors within which a sample has what its distribution has
KOLMOGOROV = 1.5  # times 1/sqrt(n): the largest distance of the distributions; 2 % have more
TAIL = 0.02  # by which the kurtosis may be off whatever the number of values
FEWEST_LINES = 8  # rows and columns that tell whether they are of one distribution
CUT = 0.8796  # deviation of normal numbers that are drawn again beyond 2 deviations

# Kurtosis (4th moment over the square of the 2nd) of each kind, and its standard error * sqrt(n).
KURTOSIS: Mapping[str, tuple[float, float]] = {
    "normal": (3.0, 24**0.5),
    "uniform": (1.8, 1.52),
    "cut": (2.3656, 2.4),
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """The distribution that values were drawn from: "normal", "uniform" or "cut" (truncated).

    `mean` and `deviation` are its mean and standard deviation.
    """

    kind: str
    mean: float
    deviation: float

    @property
    def size(self) -> float:
        """The bound of a uniform distribution; the deviation of a normal one before truncation."""
        return self.deviation * {"uniform": 3**0.5, "cut": 1 / CUT}.get(self.kind, 1.0)

    def text(self, size: float | None = None) -> str:
        """Return the distribution in words; `size` replaces its measured size."""
        told = f"{self.size if size is None else size:.3g}"
        if self.kind == "uniform":
            return f"uniform numbers between -{told} and {told}"
        cut = ", none beyond two of them" if self.kind == "cut" else ""
        return f"normal numbers of mean 0 and deviation {told}{cut}"


def drawn_from(values: "Array", noise: float = 0.0) -> Drawn | None:
    """Return the distribution that values are drawn from, as fresh weights are; None if none fits.

    `noise` is the relative rounding of how the values are stored.
    """
    flat = np.sort(values, axis=None)
    if flat.size > MOST_SORTED:
        flat = flat[:: flat.size // MOST_SORTED]
    size = float(flat.std())
    few = min(flat.size / 2, DISTINCT)  # 16 bits hold some thousand near one size
    if not size or not math.isfinite(size) or len(np.unique(flat)) < few:
        return None
    mean = float(flat.mean())
    if abs(mean) > 5 * size / flat.size**0.5:
        return None
    rank = (np.arange(flat.size) + 0.5) / flat.size
    limit = KOLMOGOROV / flat.size**0.5 + noise / 2
    z = flat / size
    wide = 0.5 * (1 + _erf(z * CUT / 2**0.5))
    low = 0.5 * (1 - math.erf(2**0.5))  # share of normal numbers below two deviations
    shares = {
        "normal": 0.5 * (1 + _erf(z / 2**0.5)),
        "uniform": np.clip(0.5 + z / (2 * 3**0.5), 0, 1),
        "cut": np.clip((wide - low) / (1 - 2 * low), 0, 1),
    }
    apart = {kind: float(np.abs(share - rank).max()) for kind, share in shares.items()}
    kind = min(apart, key=lambda name: apart[name])
    return Drawn(kind, mean, size) if apart[kind] < limit else None


def _erf(x: "Array") -> "Array":
    """Return the error function, to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    terms = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    total = sum(c * t ** (i + 1) for i, c in enumerate(terms))
    found: Array = np.sign(x) * (1 - total * np.exp(-x * x))
    return found


def is_even_throughout(values: "Array", drawn: Drawn) -> bool:
    """Return whether all rows and columns of values [rows, columns] have one distribution.

    Their mean squares vary no more than those of drawn numbers do, and their kurtosis is that of
    `drawn`.
    """
    squares = values**2
    mean = float(squares.mean())
    usual, error = KURTOSIS[drawn.kind]
    tail = float((squares**2).mean()) / mean**2
    if abs(tail - usual) > FAR * error / values.size**0.5 + TAIL:
        return False
    if min(values.shape) < FEWEST_LINES:
        return True
    for axis in (0, 1):
        count, each = values.shape[1 - axis], values.shape[axis]
        spread = float(squares.mean(axis=axis).var()) / mean**2
        chance = (usual - 1) / each
        if spread > chance * (1 + FAR * (2 / count) ** 0.5 + 6 / each):
            return False
    return True
