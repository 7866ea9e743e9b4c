"""Numbers beside codes that no tool stores: refused where a weight is decoded or repacked.

An all-zero weight may have scales of 0, and so may a group of zeros. Scales that are 0 everywhere
beside codes that differ were lost: memory that was never filled, a hole in a download.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import decode
from aprfmt.codecs.base import Bytes
from aprfmt.codecs.dialect import OF_INPUTS, Parts
from aprfmt.codecs.laid_out import GroupNumbers, LaidOut, as_numbers
from aprfmt.errors import CodecError

_ROWS = 1024  # decoded at a time
_SIGNED = "zero_point"  # in the name of a part of activations that may be negative
# part of float32 scales that stand beside blocks or codes -> the part they scale; of two that are
# there the first: an absmax with a nested one is codes
_SCALED: Mapping[str, str] = {"scale": "", "nested_absmax": "absmax", "absmax": ""}


def check_inputs(parts: Mapping[str, LazyTensor]) -> None:
    """Raise CodecError for scales of activations, by suffix, that are NaN, infinite or negative.

    No value of a weight depends on them, so that decoding does not ask; no other part is read.
    """
    for suffix, part in parts.items():
        if OF_INPUTS.search(suffix) and _SIGNED not in suffix:
            as_numbers(
                decode(part.info.encoding, part.raw(), part.info.shape), None, f"part {suffix!r}"
            )


def check_numbers(parts: Mapping[str, Bytes]) -> None:
    """Raise CodecError where the scales beside a codec's blocks cannot be what was stored."""
    for suffix, scaled in _SCALED.items():
        if suffix not in parts or scaled not in parts:
            continue
        raw, codes = (np.frombuffer(parts[one], np.uint8) for one in (suffix, scaled))
        if raw.size % 4 == 0:  # another length is the codec's to refuse
            values = as_numbers(raw.view("<f4"), None, f"part {suffix!r}").held
            if values.size and not values.any() and (codes != codes[:1]).any():
                raise CodecError(_lost_scales_text([suffix], scaled))
        return


def _lost_scales_text(zeros: Sequence[str], codes: str) -> str:
    """Return that scales of 0 stand beside codes that differ."""
    where = f" in {codes!r}" if codes else ""
    return (
        f"part {' and '.join(map(repr, zeros))} is 0 everywhere, and the codes{where} differ; "
        "expected scales that are not all 0: they are lost, take the file from its source "
        "again"
    )


def check_scales(name: str, main: str, parts: Parts, laid: LaidOut) -> None:
    """Raise CodecError where all scales are 0 and the codes in part `main` are not all one."""
    scale, factor = laid.scale, laid.factor
    stored = scale is None or not scale.held.size or _any_scale(scale)
    if (stored and (factor is None or factor.any())) or not _codes_differ(laid):
        return
    beside = [suffix for suffix in parts if "scale" in suffix and not OF_INPUTS.search(suffix)]
    zeros = [suffix for suffix in beside if _is_zero(parts, suffix)] or beside
    raise CodecError(f"{name}: {_lost_scales_text(zeros, main)}")


def _any_scale(numbers: GroupNumbers) -> bool:
    """Say whether any scale is stored; bytes of 0 are none, also as powers of two (2**-127).

    A first row that has one is not read further.
    """
    for matrix, held in enumerate(numbers.held):
        table = numbers.table_of(matrix)
        for some in (held[:1], held):
            if some.any() and (table is None or table[some].any()):
                return True
    return False


def _codes_differ(laid: LaidOut) -> bool:
    """Say whether a weight's codes, less their zero points, are different numbers."""
    bare = replace(laid, scale=None, offset=None, factor=None)
    first = bare.decode(0, 1)[0, 0]
    rows = range(0, bare.rows, _ROWS)
    return any((bare.decode(at, min(at + _ROWS, bare.rows)) != first).any() for at in rows)


def _is_zero(parts: Parts, suffix: str) -> bool:
    return not (np.frombuffer(parts[suffix].raw, np.uint8) & 0x7F).any()
