"""Checks of scales that no tool stores: refused where a weight is decoded or repacked.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

An all-zero weight may have scales of 0, and so may a group of zeros. Scales that are 0 everywhere
while the codes differ were lost: memory that was never filled, a hole in a download.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import decode
from aprfmt.codecs.base import Bytes
from aprfmt.codecs.dialect import OF_INPUTS, Parts
from aprfmt.codecs.weight_layout import GroupNumbers, WeightLayout, as_group_numbers
from aprfmt.errors import CodecError

_ROWS = 1024  # decoded at a time
_SIGNED = "zero_point"  # in the name of a part of activations that may be negative
# part of float32 scales that stand next to blocks or codes -> the part they scale; of two that are
# there the first: an absmax with a nested one is codes
_SCALED: Mapping[str, str] = {"scale": "", "nested_absmax": "absmax", "absmax": ""}


def check_input_scale_tensors(parts: Mapping[str, LazyTensor]) -> None:
    """Raise CodecError for activation scales that are NaN, infinite or negative.

    `parts` are the stored tensors by suffix; other parts are not read. Decoding does not check
    these scales, because no value of the weight depends on them.
    """
    for suffix, part in parts.items():
        if OF_INPUTS.search(suffix) and _SIGNED not in suffix:
            as_group_numbers(
                decode(part.info.encoding, part.raw(), part.info.shape), None, f"part {suffix!r}"
            )


def check_block_scales(parts: Mapping[str, Bytes]) -> None:
    """Raise CodecError where a part of float32 scales is invalid, or all 0 for unequal codes.

    `parts` are a weight's bytes by suffix.
    """
    for suffix, scaled in _SCALED.items():
        if suffix not in parts or scaled not in parts:
            continue
        raw, codes = (np.frombuffer(parts[one], np.uint8) for one in (suffix, scaled))
        if raw.size % 4 == 0:  # another length is the codec's to refuse
            values = as_group_numbers(raw.view("<f4"), None, f"part {suffix!r}").array
            if values.size and not values.any() and (codes != codes[:1]).any():
                raise CodecError(_lost_scales_text([suffix], scaled))
        return


def _lost_scales_text(zeros: Sequence[str], codes: str) -> str:
    """Return the sentence for scales that are all 0 while the codes differ.

    `zeros` are the suffixes of the scales, `codes` that of the codes ("" for the main part).
    """
    where = f" in {codes!r}" if codes else ""
    return (
        f"part {' and '.join(map(repr, zeros))} is 0 everywhere, and the codes{where} differ; "
        "expected scales that are not all 0: they are lost, take the file from its source "
        "again"
    )


def check_scales(name: str, main: str, parts: Parts, laid: WeightLayout) -> None:
    """Raise CodecError where all scales are 0 while the codes of part `main` differ.

    `laid` is the weight's layout, `parts` its stored tensors by suffix. `name` is the dialect,
    named in the error.
    """
    scale, factor = laid.scale, laid.factor
    stored = scale is None or not scale.array.size or _any_scale(scale)
    if (stored and (factor is None or factor.any())) or not _codes_differ(laid):
        return
    scales = [suffix for suffix in parts if "scale" in suffix and not OF_INPUTS.search(suffix)]
    zeros = [suffix for suffix in scales if _is_zero(parts, suffix)] or scales
    raise CodecError(f"{name}: {_lost_scales_text(zeros, main)}")


def _any_scale(numbers: GroupNumbers) -> bool:
    """Return whether any scale is not 0.

    A stored byte 0 counts as 0, although as E8M0 it is 2**-127. The first row of a matrix is
    checked before all of its rows are read.
    """
    for matrix, scales in enumerate(numbers.array):
        table = numbers.table_of(matrix)
        for some in (scales[:1], scales):
            if some.any() and (table is None or table[some].any()):
                return True
    return False


def _codes_differ(laid: WeightLayout) -> bool:
    """Return whether a weight's codes, less their zero points, are not all the same number."""
    bare = replace(laid, scale=None, offset=None, factor=None)
    first = bare.decode(0, 1)[0, 0]
    rows = range(0, bare.rows, _ROWS)
    return any((bare.decode(at, min(at + _ROWS, bare.rows)) != first).any() for at in rows)


def _is_zero(parts: Parts, suffix: str) -> bool:
    """Return whether all bytes of a part are 0, not counting the sign bit of each."""
    return not (np.frombuffer(parts[suffix].raw, np.uint8) & 0x7F).any()
