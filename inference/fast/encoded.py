"""Products of a few float32 rows with weights as they are stored, by C kernels.

A product on encoded bytes reads four to eight times less than one on decoded weights. A weight
that is multiplied often is copied to huge pages, under the budget of what is held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.codecs import native_kernels
from aprfmt.inference.fast.pages import Pages
from aprfmt.inference.rows import FREE

if TYPE_CHECKING:
    from aprfmt.inference.weights import Weight

Array = NDArray[Any]
Job = tuple[int, Array, Any, Array]  # of native.products: kernel, x, stored rows, result
# Up to so many rows of x the product on encoded bytes takes no longer than that on decoded weights,
# which have to be decoded first, at four to eight times the memory.
ENCODED_ROWS = 16
# A weight multiplied as it is stored for this many times will be for more: it is copied to where
# reading it is faster. A copy takes as long as ten to thirty products.
MOVE_AT = 32
# Where weights stream, so many bytes of a vocabulary are mapped at a time, by row groups.
PIECE_BYTES = 8 << 20
PIECE_ROWS = 64


def applies(dtype: str, deterministic: bool) -> bool:
    """Say whether C kernels may compute: they have float32, in an order of their own."""
    return dtype == "float32" and not deterministic and native_kernels() is not None


@dataclass(eq=False)
class _Stored:
    """A weight's kernel, and whole rows of stored bytes that it multiplies with."""

    kernel: int
    rows: bytes | memoryview
    piecewise: bool
    uses: int = 0


class EncodedProducts:
    """The products of one backend; `threads` compute each."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._native: Any = native_kernels()
        self._pages = Pages()
        self._stored: WeakKeyDictionary[Weight, _Stored | None] = WeakKeyDictionary()

    def product(self, x: Array, w: "Weight") -> Array | None:
        """Return float32 x [n, in] times a weight transposed, on the encoded bytes.

        None where the extension has no kernel for the encoding, where decoding is free, or for so
        many rows of x that decoding once is the better way.
        """
        stored = self._find(x, w)
        if stored is None:
            return None
        job = _job(x, w, stored)
        if not stored.piecewise:
            self._native.products((job,), len(x), self._threads)
            return job[3]
        (index, wide, raw, result), size = job, len(stored.rows) // w.n_rows
        step = max(PIECE_ROWS, PIECE_BYTES // size // PIECE_ROWS * PIECE_ROWS)
        for start in range(0, w.n_rows, step):
            stop = min(start + step, w.n_rows)
            piece = np.empty((len(wide), stop - start), np.float32)
            rows = memoryview(raw)[start * size : stop * size]
            self._native.products(((index, wide, rows, piece),), len(wide), self._threads)
            result[:, start:stop] = piece
            w.drop()
        return result

    def products(self, x: Array, weights: Sequence["Weight"]) -> list[Array] | None:
        """Return x times each weight as one piece of work; None where one has no `product`."""
        jobs = []
        for w in weights:
            stored = self._find(x, w)
            if stored is None:
                return None
            jobs.append(_job(x, w, stored))
        self._native.products(tuple(jobs), len(x), self._threads)
        return [job[3] for job in jobs]

    def _find(self, x: Array, w: "Weight") -> _Stored | None:
        """Return what a weight is multiplied by, counting this use."""
        if len(x) > ENCODED_ROWS:
            return None
        try:
            stored = self._stored[w]
        except KeyError:
            stored = self._stored[w] = self._look(w)
        if stored is not None:
            stored.uses += 1
            if stored.uses == MOVE_AT:
                self._move(w, stored)
        return stored

    def _look(self, w: "Weight") -> _Stored | None:
        if w.encoding not in self._native.KERNELS or len(w.shape) != 2:
            return None
        raw = None if encoding_row(w.encoding).numpy in FREE else w.stored()
        return None if raw is None else _Stored(self._native.number(w.encoding), raw, w.piecewise)

    def _move(self, w: "Weight", stored: _Stored) -> None:
        """Copy a weight's bytes to huge pages, where budget and memory have room for them."""
        raw = stored.rows
        try:
            copy = w.kept(self, memoryview(raw).nbytes, lambda: self._pages.put(raw))
        except MemoryError:
            return
        if copy is not None:
            stored.rows, stored.piecewise = copy, False
            w.drop()


def _job(x: Array, w: "Weight", stored: _Stored) -> Job:
    """Return what native.products multiplies x by; the result is filled by it."""
    result = np.empty((len(x), w.n_rows), np.float32)
    return stored.kernel, np.ascontiguousarray(x), stored.rows, result
