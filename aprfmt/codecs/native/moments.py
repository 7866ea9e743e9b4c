"""Statistics of float32 values in one pass, exact to the bit whatever the threads.

The moments of each PART elements are computed by themselves and joined in order, so neither the
number of threads nor the processor changes a result.
"""

import math
from typing import NamedTuple

PART = 1 << 17


class Moments(NamedTuple):
    """Counts, sum, squared deviations and extremes of values; NaN and infinities are only counted.

    `least` and `most` are infinity and -infinity if no value is finite; `zeros` counts +0 and -0.
    `about` is the sum of squared deviations from the mean.
    """

    elements: int = 0
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    total: float = 0.0
    about: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @property
    def mean(self) -> float:
        """The mean of the finite values; NaN if there are none."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the finite values, divisor n; NaN if there are none."""
        return math.sqrt(self.about / self.finite) if self.finite else math.nan

    @property
    def absmax(self) -> float:
        """The largest finite magnitude; -infinity if there is none."""
        return max(-self.least, self.most)

    @property
    def l2(self) -> float:
        """The root of the sum of squares of the finite values."""
        return math.sqrt(self.about + self.total * self.mean) if self.finite else 0.0

    def joined(self, other: "Moments") -> "Moments":
        """Return the moments of this object's and `other`'s values together (Chan et al., 1983)."""
        n, m = self.finite, other.finite
        apart = other.mean - self.mean if n and m else 0.0
        between = apart * apart * n * m / (n + m) if n and m else 0.0
        return Moments(
            self.elements + other.elements,
            n + m,
            self.zeros + other.zeros,
            self.nan + other.nan,
            self.inf + other.inf,
            self.total + other.total,
            self.about + other.about + between,
            min(self.least, other.least),
            max(self.most, other.most),
        )
