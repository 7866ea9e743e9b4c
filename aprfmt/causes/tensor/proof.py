"""Whether values prove a guess about a pair of tensors, or are so few that any of many would fit.

The numbers of a guess are found on one half of the values and judged on the other. Dozens of
guesses are tried on a pair, and a value says only as much as it has digits: whole numbers, flags
and single numbers are often a factor, an order or a function of each other by chance.
"""

import math

import numpy as np

from aprfmt.causes.tensor.differing_pair import Unequal
from aprfmt.causes.tensor.guess import Guess
from aprfmt.measure.numbers import wide

HALVES = 2  # one half of the values gives the numbers of a guess, the other half judges them
BITS = 32  # that agree; a table of 2**6 guesses then fits by chance once in 2**26 pairs
FEW = 1 << 12  # values from which bits need not be counted: each has one


def proves(case: Unequal, guess: Guess, spoken: int) -> bool:
    """Return whether the `spoken` values that differed as stored are enough to judge a guess."""
    if spoken < HALVES * guess.free:
        return False
    judging = spoken - guess.free
    if judging >= FEW:
        return True
    every = np.arange(case.a.rows) if guess.rows is None else guess.rows
    values = wide(guess.right(every[:FEW])).reshape(-1)
    most = -math.log2(guess.slack) if 0 < guess.slack < 1 else math.inf
    usual = float(np.minimum(significant_bits(values), most).mean()) if values.size else 0.0
    return judging * usual >= BITS


def significant_bits(values: np.ndarray) -> np.ndarray:
    """Return how many binary digits each value has as a float32: 1 for 0 and powers of two."""
    mantissa = np.ascontiguousarray(values, np.float32).view(np.uint32) & 0x7FFFFF | 0x800000
    lowest = mantissa & -mantissa.astype(np.int64)
    found: np.ndarray = 24 - np.log2(lowest.astype(np.float64))
    return found
