"""Vectors times encoded weights, without decoding the weight to memory first.

Sums are float32 of exact inputs: the result differs from float64 as float32 arithmetic does
(relative L2 about 1e-7). Q4_K runs on tensor cores (see matvec_q4_k.cu) and is equally exact.
"""

from functools import lru_cache
from typing import Any

from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda.arrays import ITEM, flat, stream_of
from aprfmt.inference.fast.cuda.decode import DECODED
from aprfmt.inference.fast.cuda.loader import load_function, processor_count
from aprfmt.inference.fast.cuda.ops import SHARED_LIMIT

# Encodings with a kernel, and the largest number of vectors in one call.
MATVEC = tuple(name for name in DECODED if name != "F32")
MATVEC_TOKENS = 4
_DTYPES = ("float32", "bfloat16", "float16")
_FILES = ("prelude.cuh", "blocks.cuh", "matvec.cu")
_TENSOR_FILES = ("prelude.cuh", "matvec_q4_k.cu")
_WARPS, _LANE = 4, 8  # matvec.cu: warps per block, adjacent columns per lane
_TENSOR_WARPS, _TENSOR_BLOCK, _TENSOR_REDUCE = 16, 2116, 2 * 16 * 16 * 4  # matvec_q4_k.cu
# Largest dynamic shared memory of a block (sm_90: 227 KiB); more columns use the plain kernel.


def matvec(
    encoding: str,
    raw: Any,
    x: Any,
    out: Any,
    *,
    dtype: str | None = None,
    stream: int | None = None,
    tensor_cores: bool = True,
) -> None:
    """Fill `out` [tokens, rows] with x [tokens, columns] times the transposed encoded weight.

    `raw` holds the encoded weight [rows, columns]. x and out have the same dtype, float32,
    bfloat16 or float16 (`dtype` if they are stored as uint16), and 1 to MATVEC_TOKENS vectors;
    their number follows from the sizes. A row is any number of whole blocks (BF16 and F16: any
    number of columns). Raises CodecError if sizes do not fit.
    """
    row = ENCODINGS[encoding]
    data, inputs, to = flat(raw), flat(x, dtype), flat(out, dtype)
    tokens, rows, columns = _matvec_sizes(encoding, data.count, inputs.count, to.count)
    if inputs.dtype != to.dtype or to.dtype not in _DTYPES:
        raise CodecError(
            f"{encoding}: x is {inputs.dtype}, the result {to.dtype}; expected one of "
            f"{', '.join(_DTYPES)} for both"
        )
    if data.ptr % DECODED[encoding]:
        raise CodecError(
            f"{encoding}: the bytes begin at {data.ptr:#x}, not a multiple of {DECODED[encoding]}"
        )
    strm = stream_of(stream)
    blocks = columns // row.block_size
    shared = blocks * _TENSOR_BLOCK + _TENSOR_REDUCE
    if encoding == "Q4_K" and tokens == 1 and tensor_cores and shared <= SHARED_LIMIT:
        along = min(_TENSOR_WARPS, 1 << (blocks.bit_length() - 1))
        tiles = -(-rows // 16)
        grid = min(processor_count(), -(-tiles // (_TENSOR_WARPS // along)))
        kernel = load_function(_TENSOR_FILES, f"matvec_{to.dtype}", shared=SHARED_LIMIT)
        kernel(
            (grid,),
            (_TENSOR_WARPS * 32,),
            (data.ptr, inputs.ptr, to.ptr, rows, columns, along),
            shared_mem=shared,
            stream=strm,
        )
        return
    group = 4 if rows >= 8192 else 1  # with few rows, one row per warp keeps more warps busy
    width = tokens if tokens != 3 else 2
    size = ITEM[to.dtype]
    defines: tuple[str, ...] = (f"ENCODING {encoding}",)
    if columns % _LANE or inputs.ptr % 16:
        defines += ("ANY 1",)
    for first in range(0, tokens, width):
        several = width if first + width <= tokens else 1
        kernel = load_function(_FILES, f"matvec_{to.dtype}_{group}_{several}", defines)
        kernel(
            (-(-rows // (group * _WARPS)),),
            (_WARPS * 32,),
            (
                data.ptr,
                inputs.ptr + first * columns * size,
                to.ptr + first * rows * size,
                rows,
                columns,
            ),
            stream=strm,
        )


@lru_cache(maxsize=4096)
def _matvec_sizes(encoding: str, nbytes: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return (tokens, rows, columns) from the bytes of the weight and the counts of x and out.

    Raises CodecError if no number of vectors from 1 to MATVEC_TOKENS fits.
    """
    row = ENCODINGS[encoding]
    elements, left = divmod(nbytes * row.block_size, row.type_size)
    for tokens in range(1, MATVEC_TOKENS + 1):
        if encoding not in MATVEC or left or inputs % tokens or outputs % tokens:
            continue
        columns, rows = inputs // tokens, outputs // tokens
        if rows * columns == elements and columns and columns % row.block_size == 0:
            return tokens, rows, columns
    raise CodecError(
        f"{encoding}: {inputs} inputs and {outputs} outputs do not fit {nbytes} bytes of weights "
        f"for 1 to {MATVEC_TOKENS} vectors"
    )
