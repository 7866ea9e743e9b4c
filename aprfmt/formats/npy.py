"""Writes one array to NumPy's own file format (.npy)."""

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprfmt.formats.atomic import FileSet


def write_npy(path: Path, values: NDArray[np.generic], force: bool) -> None:
    """Write an array to a .npy file; OutputError if the file exists, unless `force`."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    with FileSet(force=force) as files:
        files.create(path).write(buffer.getbuffer())
