"""Decodes bytes in GPU memory to numbers in GPU memory, with the same bits as the codecs.

A *block* is a quantization block of the encoding; in Launch it is a block of GPU threads. A *tile*
is the elements that one block of threads decodes.

The payload of a NaN that results from arithmetic (a block with a NaN or infinite scale) may differ.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda.arrays import ITEM, Flat, flat, stream_of
from aprfmt.inference.fast.cuda.loader import load_function

# Encodings with a kernel -> the alignment in bytes that it needs (structs in blocks.cuh).
DECODED: Mapping[str, int] = {
    "F32": 4, "F16": 2, "BF16": 2,
    "Q4_0": 2, "Q4_1": 4, "Q5_0": 2, "Q5_1": 4, "Q8_0": 2,
    "Q2_K": 4, "Q3_K": 2, "Q4_K": 16, "Q5_K": 16, "Q6_K": 2,
}  # fmt: skip
# The dtypes that bitsandbytes' weights can be saved from: `to` of coded.cu.
_SAVED = {"float32": 0, "bfloat16": 1, "float16": 2}
FILES = ("prelude.cuh", "blocks.cuh", "decode.cu")
CODED_FILES = ("prelude.cuh", "coded.cu")
CODED_LAUNCH = {2: (2048, 128), 4: (1024, 128), 8: (1024, 128)}  # by output bytes


class Launch(NamedTuple):
    """How decode.cu is compiled: elements and threads per block, blocks per multiprocessor.

    `direct`: threads read their bytes where they are, instead of staging them in shared memory.
    `bulk`: a tile is written by one copy, from shared memory.
    """

    tile: int
    threads: int
    blocks: int
    direct: bool
    bulk: bool = False


# The fastest settings on an H200, by bytes per output element.
_STAGED = {2: Launch(4096, 64, 16, False), 4: Launch(1024, 64, 16, False)}
_DIRECT_4 = Launch(1024, 128, 8, True)
_LAUNCHES: Mapping[tuple[str, int], Launch] = {
    ("Q4_K", 2): Launch(2048, 128, 8, True),
    ("Q5_K", 2): Launch(2048, 128, 8, True),
    ("Q6_K", 2): Launch(1024, 128, 8, True),
    ("Q4_K", 4): Launch(1024, 128, 16, True, bulk=True),
    ("Q5_K", 4): Launch(1024, 128, 16, True, bulk=True),
} | {(name, 4): _DIRECT_4 for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")}


def launch_settings(encoding: str, itemsize: int) -> Launch:
    """Return the launch settings of the kernel that decodes an encoding.

    `itemsize` is the bytes of an output element; float64 uses the settings of float32.
    """
    size = min(itemsize, 4)
    return _LAUNCHES.get((encoding, size), _STAGED[size])


_OUTPUTS = ("float32", "float64", "bfloat16", "float16")


def decode(
    encoding: str, raw: Any, out: Any, *, dtype: str | None = None, stream: int | None = None
) -> None:
    """Fill `out` (float32, float64, bfloat16, float16; any shape) from encoded bytes.

    Every number is the codec's float32, rounded once to the type of `out`. `out` may end inside
    the last block. `dtype` is the element type of an `out` that is stored as uint16. Raises
    CodecError for an encoding that is not in DECODED, a length that does not fit, or misaligned
    bytes.
    """
    data, to = flat(raw), flat(out, dtype)
    if encoding not in DECODED:
        raise CodecError(f"{encoding}: no GPU kernel decodes it; those that have one: {[*DECODED]}")
    row = ENCODINGS[encoding]
    found = data.count * ITEM.get(data.dtype, 1)
    expected = -(-to.count // row.block_size) * row.type_size
    if found != expected:
        raise CodecError(
            f"{encoding}: found {found} bytes, expected {expected} for {to.count} elements"
        )
    if data.ptr % DECODED[encoding]:
        raise CodecError(
            f"{encoding}: the bytes begin at {data.ptr:#x}; expected a multiple of "
            f"{DECODED[encoding]}"
        )
    if not to.count:
        return
    _check_output(encoding, to)
    launch = launch_settings(encoding, ITEM[to.dtype])
    kernel = load_function(FILES, f"decode_{to.dtype}", _kernel_defines(encoding, launch))
    stage = 0 if launch.direct else launch.tile // row.block_size * row.type_size + 16
    kernel(
        (-(-to.count // launch.tile),),
        (launch.threads,),
        (data.ptr, to.ptr, to.count),
        shared_mem=stage,
        stream=stream_of(stream),
    )


@cache
def _kernel_defines(encoding: str, launch: Launch) -> tuple[str, ...]:
    """Return the texts for `#define` that compile decode.cu for an encoding and settings."""
    sizes = {"TILE": launch.tile, "DECODE_THREADS": launch.threads, "DECODE_BLOCKS": launch.blocks}
    defines = [f"{name} {size}" for name, size in sizes.items()]
    defines += ["DIRECT 1"] * launch.direct + ["BULK 1"] * launch.bulk
    return (f"ENCODING {encoding}", *defines)


def decode_coded(
    packed: Any,
    absmax: Any,
    code: Any,
    out: Any,
    *,
    blocksize: int,
    saved: str = "float32",
    dtype: str | None = None,
    stream: int | None = None,
) -> None:
    """Fill `out` from bitsandbytes' packed nibbles, float32 absmax per block and 16 float32 codes.

    `saved` is the dtype the weight was saved from, to which products are rounded first. Raises
    CodecError if lengths do not fit.
    """
    data, scales, table, to = flat(packed), flat(absmax), flat(code), flat(out, dtype)
    if data.count != -(-to.count // 2) or scales.count != -(-to.count // blocksize):
        raise CodecError(
            f"{to.count} 4-bit elements: found {data.count} bytes and {scales.count} scales, "
            f"expected {-(-to.count // 2)} and {-(-to.count // blocksize)}"
        )
    if table.count != 16 or blocksize & (blocksize - 1) or blocksize < 32:
        raise CodecError(
            f"a code of {table.count} values and blocks of {blocksize}; expected 16 values and "
            "a power of two from 32"
        )
    if not to.count:
        return
    _check_output("4-bit", to)
    # Blocks are a power of two, so the kernel shifts by its logarithm.
    tile, threads = CODED_LAUNCH[ITEM[to.dtype]]
    defines = (f"TILE {tile}", f"CODED_THREADS {threads}")
    kernel = load_function(CODED_FILES, f"decode_{to.dtype}", defines)
    kernel(
        (-(-to.count // tile),),
        (threads,),
        (
            data.ptr,
            scales.ptr,
            table.ptr,
            blocksize.bit_length() - 1,
            _SAVED[saved],
            to.ptr,
            to.count,
        ),
        stream=stream_of(stream),
    )


def _check_output(what: str, out: Flat) -> None:
    """Raise CodecError if `out` is not of a type that kernels write; `what` begins the message."""
    if out.dtype not in _OUTPUTS:
        raise CodecError(f"{what}: decodes to one of {', '.join(_OUTPUTS)}, found {out.dtype}")
