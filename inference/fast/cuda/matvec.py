"""Vectors times encoded weights, without decoding the weight to memory first.

Sums are float32 of exact inputs: the result differs from float64 as float32 arithmetic does
(relative L2 some 1e-7). Q4_K runs on tensor cores, as matvec_q4_k.cu says; it is no coarser.
"""

from functools import lru_cache
from typing import Any

from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda.arrays import ITEM, flat, stream_of
from aprfmt.inference.fast.cuda.decode import DECODED
from aprfmt.inference.fast.cuda.loader import function, processors

# Encodings with a kernel, and how many vectors one call takes at most.
MATVEC = tuple(name for name in DECODED if name != "F32")
MATVEC_TOKENS = 4
_DTYPES = ("float32", "bfloat16", "float16")
_FILES = ("prelude.cuh", "blocks.cuh", "matvec.cu")
_TENSOR_FILES = ("prelude.cuh", "matvec_q4_k.cu")
_WARPS, _LANE = 4, 8  # matvec.cu: warps of a block, neighbouring columns of a lane
_TENSOR_WARPS, _TENSOR_BLOCK, _TENSOR_REDUCE = 16, 2116, 2 * 16 * 16 * 4  # matvec_q4_k.cu
# Dynamic shared memory a block may ask for (sm_90: 227 KiB); more columns take the plain kernel.
SHARED_LIMIT = 227 * 1024


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
    """Fill `out` [tokens, rows] with x [tokens, columns] times the encoded [rows, columns], turned.

    x and out are float32, bfloat16 or float16 alike (`dtype` where they are kept as uint16) and
    hold 1 to MATVEC_TOKENS vectors; the sizes say how many: `raw` holds all rows. A row has any
    number of whole blocks, so of BF16 and F16 any number of columns. Raises CodecError where sizes
    do not fit.
    """
    row = ENCODINGS[encoding]
    data, inputs, to = flat(raw), flat(x, dtype), flat(out, dtype)
    tokens, rows, columns = _sizes(encoding, data.count, inputs.count, to.count)
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
        grid = min(processors(), -(-tiles // (_TENSOR_WARPS // along)))
        kernel = function(_TENSOR_FILES, f"matvec_{to.dtype}", shared=SHARED_LIMIT)
        kernel(
            (grid,), (_TENSOR_WARPS * 32,), (data.ptr, inputs.ptr, to.ptr, rows, columns, along),
            shared_mem=shared, stream=strm,
        )  # fmt: skip
        return
    group = 4 if rows >= 8192 else 1  # fewer rows keep more warps busy one by one
    width = tokens if tokens != 3 else 2
    size = ITEM[to.dtype]
    defines: tuple[str, ...] = (f"ENCODING {encoding}",)
    if columns % _LANE or inputs.ptr % 16:
        defines += ("ANY 1",)
    for first in range(0, tokens, width):
        several = width if first + width <= tokens else 1
        kernel = function(_FILES, f"matvec_{to.dtype}_{group}_{several}", defines)
        kernel(
            (-(-rows // (group * _WARPS)),), (_WARPS * 32,),
            (data.ptr, inputs.ptr + first * columns * size, to.ptr + first * rows * size,
             rows, columns),
            stream=strm,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _sizes(encoding: str, nbytes: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Return tokens, rows and columns from the three sizes."""
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
