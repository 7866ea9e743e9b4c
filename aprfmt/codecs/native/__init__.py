"""The C kernels: the numpy codecs' numbers, faster. ImportError where they are not built.

Importing this imports no numpy. A kernel decodes golden blocks when it is first asked for; one
that gets them wrong is absent from its table and named in DISABLED. Kernels fill buffers of the
caller, release the GIL and run on one thread: `aprfmt.codecs.parallel` splits work.

The processor decides at import between two builds of the same source, `avx2` and `generic`;
`avx512` is `avx2` with wider products of single rows, to the same bits.
"""

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any

import aprfmt.codecs.native._kernels as _kernels  # says which module is missing where it is
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs.native.table import DISABLED, CheckedTable

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.native.encoders import Encoder
    from aprfmt.codecs.native.moments import Moments

__all__ = [
    "CPU", "DISABLED", "ENCODERS", "KERNELS", "LEVELS", "NumberedPieces", "apart", "apart_rows",
    "changes", "changes_of", "check",
    "decode_across",
    "decode_coded",
    "decode_packed", "decode_rows", "distances", "encode_coded", "first_not_finite", "force",
    "halves", "matmul",
    "matmuls", "moments_of_rows",
    "number", "number_pieces", "products", "recode_packed", "recodes", "regroup", "stats",
    "stats_of", "stats_of_parts", "stats_of_rows", "stream_fill", "turn", "walk_strings",
]  # fmt: skip

walk_strings = _kernels.walk_strings
changes = _kernels.changes
first_not_finite = _kernels.first_not_finite
decode_coded = _kernels.decode_coded
decode_across = _kernels.decode_across
decode_packed = _kernels.decode_packed
halves = _kernels.halves
regroup = _kernels.regroup
turn = _kernels.turn
encode_coded = _kernels.encode_coded
stream_fill = _kernels.stream_fill
distances: Callable[..., Any] | None = getattr(_kernels, "distances", None)
"""None in a build from before it was there: then numpy measures, to the same numbers."""

apart: Callable[..., Any] | None = getattr(_kernels, "apart", None)
"""None in a build from before it was there, as `distances`."""

apart_rows: Callable[..., Any] | None = getattr(_kernels, "apart_rows", None)
"""None in a build from before it was there, as `distances`."""

NumberedPieces = tuple[tuple[int, Any, int, int, int], ...]
"""Buffers whose columns stand side by side: (decoder, raw, columns, first, wide) of each."""

CPU: str = _kernels.level()
LEVELS: tuple[str, ...] = tuple(_kernels.levels())
"""The levels this processor can run, the best last."""

_DECODERS = {name: (i, *sizes) for i, (name, *sizes) in enumerate(_kernels.decoders())}

# Lattices of iq_grids.py that a kernel needs; they are handed over when one is asked for.
_GRID_OF = {
    "IQ2_XXS": "IQ2_XXS", "IQ2_XS": "IQ2_XS", "IQ2_S": "IQ2_S",
    "IQ3_XXS": "IQ3_XXS", "IQ3_S": "IQ3_S", "IQ1_S": "IQ1", "IQ1_M": "IQ1",
}  # fmt: skip


@cache
def _hand_over_grids() -> None:
    """Give the C extension the lattices of the IQ encodings, once."""
    from aprfmt.codecs import iq_grids

    for name in set(_GRID_OF.values()):
        _kernels.set_grid(name, getattr(iq_grids, name).astype("int8").tobytes())


def _decoders() -> Mapping[str, Callable[..., None]]:
    """Return {encoding: kernel(raw, out, stream)} of all decoders in the extension."""
    rows = {name: partial(_kernels.decode, row[0]) for name, row in _DECODERS.items()}
    return rows | {"APR_Q8": _kernels.decode_apr_q8}


def _check_decoder(name: str, kernel: Callable[..., None]) -> str:
    """Return "" if a kernel decodes the golden blocks as expected, else what is wrong."""
    from aprfmt.codecs.native import golden

    row = ENCODINGS[name]
    sizes = (row.block_size, row.type_size)
    if name in _DECODERS and _DECODERS[name][1:] != sizes:
        return f"the kernel has blocks of {_DECODERS[name][1:]}, the encoding of {sizes}"
    if name in _GRID_OF:
        _hand_over_grids()
    blocks = golden.block_count(row.block_size)
    raw = golden.raw_bytes(row.header + blocks * row.type_size)
    for stream in (0, 1) if name in _DECODERS else (-1,):
        out = array("f", bytes(4 * blocks * row.block_size))
        kernel(raw, out, stream)
        if golden.digest(out) != golden.DECODED[name]:
            return "the golden blocks come out wrong"
    return ""


def _encoders() -> "Mapping[tuple[str, str], Encoder]":
    """Return {(encoding, "fused" or "strict"): encoder} of all encoders in the extension."""
    from aprfmt.codecs.native.encoders import Encoder

    return {
        (name, fma): Encoder(i, name, block_size, type_size, fma)
        for i, (name, block_size, type_size) in enumerate(_kernels.encoders())
        for fma in ("fused", "strict")
    }


def _check_encoder(key: tuple[str, str], encoder: "Encoder") -> str:
    """Return "" if an encoder makes the golden blocks, else what is wrong with it."""
    from aprfmt.codecs.native import golden

    row = ENCODINGS[key[0]]
    if (encoder.block_size, encoder.type_size) != (row.block_size, row.type_size):
        return f"the encoder makes blocks of {encoder.block_size}, {encoder.type_size} bytes"
    x, blocks = golden.sample_values(), golden.ROWS * golden.COLUMNS // row.block_size
    for weights, expected in zip(
        (None, golden.sample_importance()), golden.ENCODED[key], strict=True
    ):
        out = bytearray(blocks * row.type_size)
        encoder.into(x, out, golden.COLUMNS, weights)
        if golden.digest(out) != expected:
            return "the golden blocks come out wrong"
    return ""


KERNELS: Mapping[str, Callable[..., None]] = CheckedTable(_decoders, _check_decoder, "{}")
"""Encoding -> `kernel(raw, out, stream=-1)`: fills float32 `out` (any buffer of 4 bytes an element)
from whole blocks, of which the last may be used in part. `stream` stores past the cache: 1 always,
0 never, -1 when `out` is large (APR_Q8 has no such choice). Raises CodecError where lengths do not
fit; NF4 and FP4, which have companions, go through `decode_coded`."""

ENCODERS: "Mapping[tuple[str, str], Encoder]" = CheckedTable(
    _encoders, _check_encoder, "encode {0[0]} {0[1]}"
)
"""(encoding, fma) -> encoder."""


def check() -> Mapping[str, str]:
    """Check every kernel and return DISABLED: {name: reason} of those that failed."""
    len(KERNELS), len(ENCODERS)  # counting the rows that pass checks each
    return DISABLED


def force(level: str) -> None:
    """Switch all kernels to one of LEVELS, or to the best of them ("best"); meant for tests.

    Kernels are checked again. Raises CodecError where the processor cannot run them.
    """
    global CPU
    _kernels.force(level)
    CPU = _kernels.level()
    DISABLED.clear()
    for table in (KERNELS, ENCODERS):
        assert isinstance(table, CheckedTable)
        table.forget()


def matmul(encoding: str, x: "Array", raw: Any, out: "Array", threads: int = 1) -> None:
    """Fill `out` [tokens, rows] with x [tokens, columns] times encoded `raw` [rows, columns].

    All arithmetic is float32 on the decoded weights, which are not stored. `x` and `out` are
    contiguous float32, `raw` holds whole rows of blocks. A result depends on its row and its
    token alone, not on the other tokens or on `threads`: elements 32k + 8j + i of the row are
    added to lane i of sum j in order of k by fused multiply-adds (on the generic level product and
    sum are rounded separately), the sums as (0 + 1) + (2 + 3), their lanes as
    ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7)).

    Raises CodecError where lengths do not fit, KeyError for an encoding without a kernel.
    """
    matmuls([(encoding, x, raw, out)], threads)


def matmuls(jobs: "Sequence[tuple[str, Array, Any, Array]]", threads: int = 1) -> None:
    """Fill the outputs of several products (encoding, x, raw, out): x times the encoded weight.

    Each has the bits that `matmul` gives. They share `threads` threads. All have the same number of
    tokens.
    """
    numbered = tuple((number(encoding), x, raw, out) for encoding, x, raw, out in jobs)
    if numbered and (tokens := math.prod(numbered[0][1].shape[:-1])):
        products(numbered, tokens, threads)


def number(encoding: str) -> int:
    """Return the number of an encoding's kernel, which `products` takes.

    Raises KeyError for an encoding without one.
    """
    KERNELS[encoding]
    return _DECODERS[encoding][0]


def products(jobs: "tuple[tuple[int, Array, Any, Array], ...]", tokens: int, threads: int) -> None:
    """Fill the outputs of at most eight products (kernel number, x, raw, out) in one call.

    Each output is x times the encoded weight `raw`, with the bits that `matmul` gives. The work is
    shared between threads that wait actively for a moment before they sleep, so a decoding step's
    products of some ten microseconds gain from them too.
    """
    _kernels.matmuls(jobs, tokens, threads)


def stats(x: Any, threads: int = 1) -> "Moments":
    """Return the moments of a contiguous float32 array, in one pass over it."""
    view = memoryview(x).cast("B")
    return stats_of("F32", view, len(view) // 4, threads)


def changes_of(encoding: str, before: Any, raw: Any) -> tuple[int, int, int]:
    """Return (changed, overflowed, underflowed) values of float32 `before` in encoded bytes `raw`.

    Raises CodecError where lengths do not fit, KeyError for an encoding without such a kernel.
    """
    KERNELS[encoding]
    return _kernels.changes(before, raw, _DECODERS[encoding][0])


def recodes(encoding: str) -> bool:
    """Return whether `recode_packed` can make an encoding.

    It must store single elements and have both a decoder and an encoder.
    """
    row = ENCODINGS[encoding]
    return row.block_size == 1 and encoding in KERNELS and (encoding, "fused") in ENCODERS


def decode_rows(encoding: str, raw: Any, columns: int, first: int, out: "Array") -> bool:
    """Fill `out` [rows, n] with n elements, from `first` on, of each row of `columns` in `raw`.

    `out` is float32; its rows need not be contiguous with each other. Returns False, and fills
    nothing, for an encoding that does not store single elements or has no kernel, and in a build
    without this function. Raises CodecError where lengths do not fit.
    """
    kernel = getattr(_kernels, "decode_rows", None)
    if kernel is None or ENCODINGS[encoding].block_size != 1 or encoding not in KERNELS:
        return False
    if encoding not in _DECODERS:
        return False
    kernel(_DECODERS[encoding][0], raw, columns, first, out)
    return True


def recode_packed(encoding: str, out: Any, *weight: Any) -> tuple[int, int, int]:
    """Encode a packed weight's rows into the bytes `out`, and return how many values it changed.

    The counts are (changed by the encoding, overflowed, underflowed). `weight` are the arguments of
    `decode_packed` before its output. `recodes` says which encodings can be given. Raises
    CodecError where lengths do not fit.
    """
    to = ENCODERS[encoding, "fused"].index
    return _kernels.recode_packed(to, _DECODERS[encoding][0], out, *weight)


def stats_of(encoding: str, raw: Any, count: int, threads: int = 1) -> "Moments":
    """Return the moments of `count` elements of encoded bytes; the decoded values are not kept.

    The result does not depend on `threads`. Raises CodecError where lengths do not fit, KeyError
    for an encoding without a kernel.
    """
    from aprfmt.codecs.native.moments import Moments

    return reduce(Moments.joined, stats_of_parts(encoding, raw, count, threads) or [Moments()])


def stats_of_parts(encoding: str, raw: Any, count: int, threads: int = 1) -> "list[Moments]":
    """Return the moments of each run of PART elements, in order, among `count` encoded elements.

    `raw` are their bytes. All of them joined are what `stats_of` returns; it raises the same
    errors.
    """
    from aprfmt.codecs.native.moments import PART, Moments

    KERNELS[encoding]
    rows = _kernels.moments(_DECODERS[encoding][0], raw, count, PART, threads)
    return [Moments(*row) for row in rows]


def stats_of_rows(
    pieces: Sequence[tuple[str, Any, int, int, int]], width: int, skip: int, count: int
) -> "list[Moments] | None":
    """Return the moments of each run of PART elements of rows whose columns are in several buffers.

    `pieces` are (encoding, raw, columns, first, wide): of each row of `columns` elements in `raw`,
    the `wide` elements from `first` on are put next to those of the next entry, `width` in all. Of
    these rows one after another, `count` elements are read after the first `skip`. Decoded values
    are not kept. None where `number_pieces` returns None. Raises CodecError where lengths do not
    fit.
    """
    rows = number_pieces(pieces)
    return None if rows is None else moments_of_rows((rows, width, skip), count)


def number_pieces(pieces: Sequence[tuple[str, Any, int, int, int]]) -> NumberedPieces | None:
    """Return pieces of rows with the number of its decoder in place of each encoding's name.

    A piece is (encoding, raw, columns, first, wide): of each row of `columns` elements in `raw`,
    the `wide` elements from `first` on. None for an encoding that does not store single elements or
    has no kernel, and in a build without kernels of rows.
    """
    names = {piece[0] for piece in pieces}
    if apart_rows is None or any(
        name not in _DECODERS or name not in KERNELS or ENCODINGS[name].block_size != 1
        for name in names
    ):
        return None
    return tuple((_DECODERS[name][0], *rest) for name, *rest in pieces)


def moments_of_rows(rows: tuple[NumberedPieces, int, int], count: int) -> "list[Moments]":
    """Return the moments of each run of PART elements of numbered pieces of rows.

    `rows` is (pieces as `number_pieces` returns them, their `width` together, how many elements to
    `skip`), and `count` is how many elements are read after these; see `stats_of_rows`. Raises
    CodecError where lengths do not fit.
    """
    from aprfmt.codecs.native.moments import PART, Moments

    return [Moments(*row) for row in _kernels.moments_rows(*rows, count, PART, 1)]
