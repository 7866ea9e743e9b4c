"""The few directions that span all rows of a low-rank matrix, found from pieces of its rows.

Each function takes a function that yields the matrix's rows anew, in pieces [n, columns] of
float32, so that no more than a piece is held.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.tensors import norms

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

    Pieces = Callable[[], Iterator[Array]]

PROBES = 16  # columns more than the rank that a sketch has


def row_basis(pieces: "Pieces", columns: int, rank: int) -> "Array":
    """Return orthonormal columns [columns, rank + PROBES] that span the rows of a matrix.

    For a matrix of a higher rank than `rank` they do not span its rows wholly. They are made of
    random sums of the rows.
    """
    rng = np.random.default_rng(12)
    sums = np.zeros((rank + PROBES, columns))
    for rows in pieces():
        sums += rng.standard_normal((len(sums), len(rows)), np.float32) @ rows
    basis: Array = np.linalg.qr(sums.T)[0].astype(np.float32)
    return basis


def squares_inside(
    pieces: "Pieces", basis: "Array", allowed: float
) -> "tuple[Array, float] | None":
    """Return (X^T X of the rows X in a basis [columns, count], norm of what is outside the basis).

    The first is [count, count]; its eigenvalues are the squares of the matrix's singular values.
    None where the norm outside the basis, over all rows, is above `allowed`.
    """
    outside = 0.0
    found = np.zeros((basis.shape[1],) * 2)
    for rows in pieces():
        inside = rows @ basis
        outside += norms.exact_norm(rows - inside @ basis.T) ** 2
        if not outside <= allowed**2:
            return None
        wide = inside.astype(np.float64)
        found += wide.T @ wide
    return found, outside**0.5


def tail_norms(squares: "Array") -> "Array":
    """Return the norm of each singular value with all later ones, from their squares in order."""
    found: Array = np.sqrt(np.cumsum(squares[::-1])[::-1])
    return found
