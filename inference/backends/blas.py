"""Reads and sets the threads of numpy's BLAS, if that is OpenBLAS, as in numpy's wheels.

A run says how many there were, and a deterministic run has the number that was asked for. The
number changes the bits, so the readable backend sets it, as torch's does.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.errors import BackendUnavailableError

# The function names in numpy's own builds of OpenBLAS, and in those of Linux distributions.
_SUFFIXES = ("64_", "")
_PREFIXES = ("scipy_openblas", "openblas")


@cache
def _openblas_functions() -> tuple[Any, Any] | None:
    """Return OpenBLAS's functions (get threads, set threads); None if numpy uses another BLAS."""
    package = Path(np.__file__).parent
    folders = (package.parent / "numpy.libs", package / ".dylibs", package.parent / "numpy.dylibs")
    for library in sorted(path for folder in folders for path in folder.glob("*openblas*")):
        try:
            loaded = ctypes.CDLL(str(library))
        except OSError:
            continue
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                get = getattr(loaded, f"{prefix}_get_num_threads{suffix}", None)
                put = getattr(loaded, f"{prefix}_set_num_threads{suffix}", None)
                if get is not None and put is not None:
                    return get, put
    return None


def blas_threads() -> int | None:
    """Return the number of threads of numpy's products; None if not known."""
    found = _openblas_functions()
    return None if found is None else int(found[0]())


def set_blas_threads(count: int) -> None:
    """Set the number of threads of numpy's products, for the whole process.

    Raises BackendUnavailableError if numpy's BLAS is not OpenBLAS.
    """
    found = _openblas_functions()
    if found is None:
        raise BackendUnavailableError(
            "numpy's BLAS is not the OpenBLAS of its own wheel, so its threads cannot be set while "
            "it runs; set OMP_NUM_THREADS before the start instead"
        )
    found[1](ctypes.c_int(count))


@contextmanager
def limit_blas_threads(count: int) -> Iterator[None]:
    """Inside the `with`, limit numpy's products to `count` threads, if they can be set.

    Threads of OpenBLAS wait for each other busily: on processors that others use too, small
    products on all of them took fifteen times as long as on one.
    """
    found = _openblas_functions()
    before = blas_threads()
    if found is not None:
        found[1](ctypes.c_int(count))
    try:
        yield
    finally:
        if found is not None and before is not None:
            found[1](ctypes.c_int(before))
