"""Tiles in which engines store matrices for their kernels, and how they are undone.

For each kind of tiles there are two functions. One returns the shape of a matrix as it was loaded,
from the shape as stored and the bytes of an element; it raises ValueError for sizes that the tiles
do not divide, as such a matrix is not stored in them. The other returns the elements, which are not
decoded, in the order in which they were loaded.
"""

import math
from itertools import pairwise

import numpy as np

from aprfmt.model.rank_tensors import Cells

Shape = tuple[int, ...]
# AITER's shuffle_weight: tiles of 16 rows and 32 columns, in runs of 16 bytes of a row.
_AITER_ROWS, _AITER_COLUMNS, _AITER_RUN = 16, 32, 16
# SGLang's convert_weight_packed for AMX: blocks of 32 rows (a last one of 16), in pairs of columns.
_AMX_BLOCK, _AMX_ROWS, _AMX_COLUMNS, _AMX_PAIR = 32, 16, 32, 2
# FlashInfer's shuffle_matrix_a for tiles of 128 rows, and its blocks of 128 bytes of a row.
_TRTLLM_ROWS, _TRTLLM_LANES, _TRTLLM_BLOCK = 32, 4, 128


def _check(fits: bool) -> None:
    """Raise ValueError unless a matrix has the sizes that its tiles need."""
    if not fits:
        raise ValueError("the tiles do not divide the matrix")


def aiter_shape(shape: Shape, size: int) -> Shape:
    """Return the shape [..., rows, columns], which AITER's tiles keep."""
    _check(shape[-2] % _AITER_ROWS == shape[-1] % _AITER_COLUMNS == 0 and size in (1, 2, 4))
    return shape


def undo_aiter_tiles(array: Cells) -> Cells:
    """Return [..., rows, columns] that AITER stored as tiles of 16 rows and 32 columns."""
    *before, rows, columns = array.shape
    run = _AITER_RUN // array.itemsize
    tiles = (rows // _AITER_ROWS, columns // _AITER_COLUMNS, _AITER_COLUMNS // run)
    stored = array.reshape(math.prod(before), *tiles, _AITER_ROWS, run)
    return stored.transpose(0, 1, 4, 2, 3, 5).reshape(array.shape)


def amx_shape(shape: Shape, size: int) -> Shape:
    """Return the shape [..., rows, columns], which the blocks for AMX keep."""
    _check(shape[-2] % _AMX_ROWS == shape[-1] % _AMX_COLUMNS == 0 and size in (1, 2))
    return shape


def undo_amx_tiles(array: Cells) -> Cells:
    """Return [..., rows, columns] whose blocks of rows stand as [columns / 2, rows, 2].

    They are so for AMX, the matrix instructions of Intel's processors. A block has 32 rows, a last
    one may have 16.
    """
    *before, rows, columns = array.shape
    count = math.prod(before)
    stored = array.reshape(count, rows * columns)
    made = np.empty((count, rows, columns), array.dtype)
    edges = [*range(0, rows, _AMX_BLOCK), rows]
    for first, last in pairwise(edges):
        block = stored[:, first * columns : last * columns]
        pairs = block.reshape(count, columns // _AMX_PAIR, last - first, _AMX_PAIR)
        made[:, first:last] = pairs.transpose(0, 2, 1, 3).reshape(count, last - first, columns)
    return made.reshape(array.shape)


def trtllm_rows_shape(shape: Shape, size: int) -> Shape:
    """Return the shape [experts, rows, columns], which an exchange of rows keeps.

    `size` does not matter.
    """
    _check(shape[1] % _TRTLLM_ROWS == 0)
    return shape


def undo_trtllm_rows(array: Cells) -> Cells:
    """Return [experts, rows, columns] whose rows are exchanged for TensorRT-LLM's kernels.

    Of each 32 rows, row r is stored at place 8 * (r % 4) + r // 4.
    """
    experts, rows, columns = array.shape
    lanes = (_TRTLLM_LANES, _TRTLLM_ROWS // _TRTLLM_LANES)
    stored = array.reshape(experts, rows // _TRTLLM_ROWS, *lanes, columns)
    return stored.transpose(0, 1, 3, 2, 4).reshape(array.shape)


def undo_trtllm_gates(array: Cells) -> Cells:
    """Return [experts, gate then up, columns] that TensorRT-LLM's kernels want up before gate.

    Their rows stand in turn, one of up and one of gate, and are exchanged in 32 at a time.
    """
    rows = undo_trtllm_rows(array)
    return np.concatenate((rows[:, 1::2], rows[:, 0::2]), 1)


def trtllm_blocks_shape(shape: Shape, size: int) -> Shape:
    """Return [experts, rows, columns] of a shape [experts, columns / block, rows, block].

    A block is 128 bytes of a row.
    """
    experts, blocks, rows, block = shape
    _check(block * size == _TRTLLM_BLOCK)
    return trtllm_rows_shape((experts, rows, blocks * block), size)


def join_trtllm_blocks(array: Cells) -> Cells:
    """Return [experts, rows, columns] of an array [experts, columns / block, rows, block]."""
    experts, blocks, rows, block = array.shape
    return array.transpose(0, 2, 1, 3).reshape(experts, rows, blocks * block)
