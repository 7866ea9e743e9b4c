"""Products of a few float32 rows with weights as they are stored, by C kernels.

A product on encoded bytes reads four to eight times less than one on decoded weights. A weight
that is multiplied often is copied to huge pages, under the budget of what is held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.encodings import find_encoding as encoding_row
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
# A weight whose stored bytes were multiplied this often will be used more: it is copied to where
# reading it is faster. A copy takes as long as ten to thirty products.
MOVE_AT = 32
# Where weights stream, so many bytes of a vocabulary are mapped at a time, by row groups.
PIECE_BYTES = 8 << 20
PIECE_ROWS = 64


def kernels_apply(dtype: str, deterministic: bool) -> bool:
    """Return whether C kernels may compute a run: float32, not deterministic, and built.

    They add in another order than numpy does.
    """
    return dtype == "float32" and not deterministic and native_kernels() is not None


@dataclass(slots=True)
class _Stored:
    """A weight's kernel number, and the whole rows of stored bytes it multiplies with."""

    kernel: int
    rows: bytes | memoryview
    piecewise: bool
    uses: int = 0


class EncodedProducts:
    """The encoded products of one backend; `threads` compute each."""

    def __init__(self, threads: int) -> None:
        """Start with no weight used, and no huge pages."""
        self._threads = threads
        self._native: Any = native_kernels()
        self._pages = Pages()

    def multiply(self, x: Array, w: "Weight") -> Array | None:
        """Return float32 x [n, in] times a weight transposed, computed on the encoded bytes.

        None where the extension has no kernel for the encoding, where decoding is free, or for so
        many rows of x that decoding once is faster. A weight that does not fit the memory budget is
        read, and its pages are released, some rows at a time.
        """
        job = self._job(x, w)
        if job is None:
            return None
        if not w.notes[self].piecewise:
            self._native.products((job,), len(x), self._threads)
            return job[3]
        (index, wide, raw, result), size = job, len(job[2]) // w.n_rows
        step = max(PIECE_ROWS, PIECE_BYTES // size // PIECE_ROWS * PIECE_ROWS)
        for start in range(0, w.n_rows, step):
            stop = min(start + step, w.n_rows)
            piece = np.empty((len(wide), stop - start), np.float32)
            rows = memoryview(raw)[start * size : stop * size]
            self._native.products(((index, wide, rows, piece),), len(wide), self._threads)
            result[:, start:stop] = piece
            w.release_pages()
        return result

    def multiply_each(self, x: Array, weights: Sequence["Weight"]) -> list[Array] | None:
        """Return [x times each weight transposed], multiplied in one call of the extension.

        None where one of the weights has no kernel.
        """
        jobs = []
        for w in weights:
            job = self._job(x, w)
            if job is None:
                return None
            jobs.append(job)
        self._native.products(tuple(jobs), len(x), self._threads)
        return [job[3] for job in jobs]

    def _job(self, x: Array, w: "Weight") -> Job | None:
        """Return (kernel number, x, the weight's bytes, empty result) for native.products.

        Counts this use of the weight. None where there is no kernel, or x has too many rows.
        """
        if len(x) > ENCODED_ROWS:
            return None
        if self not in w.notes:
            w.notes[self] = self._find_stored(w)
        stored: _Stored | None = w.notes[self]
        if stored is None:
            return None
        stored.uses += 1
        if stored.uses == MOVE_AT:
            self._copy_to_huge_pages(w, stored)
        result = np.empty((len(x), w.n_rows), np.float32)
        return stored.kernel, np.ascontiguousarray(x), stored.rows, result

    def _find_stored(self, w: "Weight") -> _Stored | None:
        """Return a weight's stored bytes and kernel; None where no kernel multiplies with them."""
        if w.encoding not in self._native.KERNELS or len(w.shape) != 2:
            return None
        raw = None if encoding_row(w.encoding).numpy in FREE else w.stored_bytes()
        return None if raw is None else _Stored(self._native.number(w.encoding), raw, w.piecewise)

    def _copy_to_huge_pages(self, w: "Weight", stored: _Stored) -> None:
        """Copy a weight's bytes to huge pages, if budget and memory have room for them."""
        raw = stored.rows
        try:
            copy = w.place_encoded(
                self, memoryview(raw).nbytes, lambda: self._pages.copy_bytes(raw)
            )
        except MemoryError:
            return
        if copy is not None:
            stored.rows, stored.piecewise = copy, False
            w.release_pages()
