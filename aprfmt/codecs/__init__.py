"""Every encoding's codec, and the verbs over them: `decode`, `decode_chunked`, `encode`.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

Importing this imports no numpy. The table's rows are the readable numpy references; the verbs use
the native kernel of the same name where the extension is built, has passed its golden block and
`APRFMT_NATIVE=0` is not set.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.registry import Registry
from aprfmt.base.text_escape import shorten
from aprfmt.errors import CodecError, UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType

    from aprfmt.codecs.base import Array, Bytes, Codec, Fma

_PLAIN = ("F32", "F64", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "C64")
_ONE_A_FILE = (
    "F16", "BF16",
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "Q1_0", "Q2_0",
    "APR_Q4", "APR_Q8", "NF4", "FP4", "F4",
)  # fmt: skip
# ik_llama.cpp's, a file a family
_FORKED = {
    "iqk": ("IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "Q6_0"),
    "iqk_rows": ("IQ2_KS", "IQ3_KS", "IQ4_KS", "IQ5_KS", "IQ4_KSS", "IQ2_KL", "IQ1_BN", "IQ2_BN",
                 "Q8_KV"),
    "iqk_trellis": ("IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"),
}  # fmt: skip
_F8 = ("E4M3", "E5M2", "E4M3FNUZ", "E5M2FNUZ", "E8M0")
_F6 = ("E2M3", "E3M2")

CODECS: "Registry[Codec]" = Registry(
    "codecs",
    {name: f"aprfmt.codecs.plain:{name}" for name in _PLAIN}
    | {name: f"aprfmt.codecs.{name.lower()}:CODEC" for name in _ONE_A_FILE}
    | {n: f"aprfmt.codecs.{file}:{n}" for file, names in _FORKED.items() for n in names}
    | {f"F8_{kind}": f"aprfmt.codecs.fp8:{kind}" for kind in _F8}
    | {f"F6_{kind}": f"aprfmt.codecs.f6:{kind}" for kind in _F6},
    CodecError,
)


@cache
def native_kernels() -> "ModuleType | None":
    """Return the native extension; None where it is not built or APRFMT_NATIVE is 0."""
    if os.environ.get("APRFMT_NATIVE") == "0":
        return None
    try:
        from aprfmt.codecs import native
    except ImportError:
        return None
    module: ModuleType = native
    return module


def codec(encoding: str) -> "Codec":
    """Return the reference codec of an encoding.

    Raises UnsupportedError for a type that ggml removed or whose layout is not known, with what to
    do about it, and CodecError for an unknown name.
    """
    if encoding in CODECS:
        return CODECS[encoding]
    row = encoding_row(encoding)
    if row.measure is not None:
        raise UnsupportedError(f"{encoding} ({row.measure}): copied, not decoded: {row.removed}")
    why = row.removed or (
        "" if row.known else "its layout is not known to us; bytes can be copied, not decoded"
    )
    raise UnsupportedError(f"{encoding}: {why or 'there is no codec for it'}")


def encodable_names() -> list[str]:
    """Return the names of the float encodings that have an encoder.

    Integers, booleans and complex numbers are left out: no weight is converted to them.
    """
    whole = ("int", "uint", "bool", "complex")
    return [
        name
        for name in CODECS
        if CODECS[name].has_encoder and not encoding_row(name).numpy.startswith(whole)
    ]


def decode_into(
    encoding: str,
    raw: "Bytes | Mapping[str, Bytes]",
    out: "Array",
    *,
    threads: int = 1,
    fresh: bool = False,
) -> None:
    """Fill `out` (1-D, contiguous, of the codec's dtype) from consecutive encoded blocks.

    `raw` is the bytes of the main part, or {suffix: bytes} of all parts. `threads` and `fresh` are
    for native kernels: `fresh` says that nothing was stored in `out` yet (see
    `parallel.STORE_FRESH`). Raises CodecError when lengths do not fit.
    """
    parts = raw if isinstance(raw, Mapping) else {"": raw}
    _decode_into(codec(encoding), parts, out, threads, fresh)


def _decode_into(
    reference: "Codec", parts: "Mapping[str, Bytes]", out: "Array", threads: int, fresh: bool
) -> None:
    """Fill `out` with the decoded parts, by the native kernel where there is one.

    `parts` are a tensor's bytes by suffix. `fresh` says that nothing was stored in `out` yet.
    Raises CodecError for an `out` of another dtype or layout, or lengths that do not fit.
    """
    from aprfmt.codecs.base import check_out
    from aprfmt.codecs.parallel import STORE_BY_SIZE, STORE_FRESH

    store = STORE_FRESH if fresh else STORE_BY_SIZE
    native = native_kernels() if out.size else None
    check_out(reference.name, out, reference.dtype)
    if native is None:
        reference.decode(parts, out)
    else:
        reference.decode_native(native, parts, out, threads, store)


def decode(
    encoding: str,
    raw: "Bytes | Mapping[str, Bytes]",
    shape: Sequence[int],
    *,
    row_bytes: int | None = None,
    threads: int = 1,
) -> "Array":
    """Return a tensor's elements as a new array of `shape` (row-major) and the codec's dtype.

    `raw` is the bytes of the main part, or {suffix: bytes} of all parts. `row_bytes` is given where
    every row starts a new block and its last block is padded (APR's K-quants): the padding of each
    row is dropped. Raises CodecError when lengths do not fit.
    """
    import numpy as np

    from aprfmt.codecs.base import check_length, is_padded, part_bytes

    # Rows without padding are decoded in one go.
    count, columns = math.prod(shape), shape[-1] if shape else 1
    reference = codec(encoding).of_rows(columns)
    if row_bytes is None or not is_padded(reference.row, columns, row_bytes):
        flat = np.empty(count, reference.dtype)
        parts = raw if isinstance(raw, Mapping) else {"": raw}
        _decode_into(reference, parts, flat, threads, True)
        try:
            return flat.reshape(shape)
        except ValueError:  # without elements, but with axes whose product numpy cannot count
            raise CodecError(
                f"{encoding}: found shape {shorten(str(list(shape)), 200)}; expected one that an "
                "array can have"
            ) from None
    parts = raw if isinstance(raw, Mapping) else {"": raw}
    # Padded rows are decoded whole, then cut.
    rows = count // columns if columns else 0
    expected = -(-columns // reference.block_size) * reference.type_size
    check_length(encoding, row_bytes, expected, f"one row of {columns} elements")
    found = part_bytes(encoding, parts).size
    check_length(encoding, found, rows * row_bytes, f"{rows} rows of {row_bytes} bytes")
    width = row_bytes // reference.type_size * reference.block_size
    padded = np.empty(rows * width, reference.dtype)
    decode_into(encoding, parts, padded, threads=threads, fresh=True)
    return np.ascontiguousarray(padded.reshape(rows, width)[:, :columns]).reshape(shape)


def decode_chunked(
    encoding: str,
    raw: "Bytes | Mapping[str, Bytes]",
    shape: Sequence[int],
    out: "Array",
    *,
    row_bytes: int | None = None,
) -> "Iterator[Array]":
    """Yield a tensor's elements in order, in views of `out`, each overwritten by the next.

    `out` is 1-D and of the codec's dtype. Its length is the number of elements decoded at a time,
    at least one block (one row where `row_bytes` is given). Raises CodecError when lengths do not
    fit.
    """
    from aprfmt.codecs.base import check_out, split_parts

    reference = codec(encoding).of_rows(shape[-1] if shape else 1)
    check_out(encoding, out, reference.dtype)
    parts = raw if isinstance(raw, Mapping) else {"": raw}
    for piece, stored, kept in split_parts(reference, parts, shape, out.size, row_bytes):
        count = stored[0] * stored[1]
        if count > out.size:
            raise CodecError(
                f"{encoding}: the output holds {out.size} elements, expected {count} or more"
            )
        _decode_into(reference, piece, out[:count], 1, False)
        rows = out[:count].reshape(stored)
        if kept == stored[1]:
            yield out[:count]
        else:
            out[: stored[0] * kept] = rows[:, :kept].copy().reshape(-1)
            yield out[: stored[0] * kept]


def encode(
    encoding: str,
    x: "Array",
    *,
    fma: "Fma" = "fused",
    importance: "Array | None" = None,
    options: Mapping[str, Any] | None = None,
) -> "Mapping[str, bytes]":
    """Return {suffix: bytes} of `x` ([..., columns]) in an encoding; the main part has suffix "".

    `fma` is "fused" or "strict" (see `arithmetic`), `importance` a float32 for each column.
    `options` are those of the codec's `with_options` (NF4 and FP4: blocksize, double_quantization,
    dtype). Raises CodecError where `x` does not fit the codec or there is no encoder.
    """
    from aprfmt.codecs.base import is_fused

    is_fused(fma)
    reference, native = codec(encoding), native_kernels()
    if options:
        reference = reference.with_options(**options)
    if native is None:
        return reference.encode(x, fma=fma, importance=importance)
    return reference.encode_native(native, x, fma=fma, importance=importance)
