"""Compares one pair of tensors: by its bytes, and only where these differ by its values.

A *side* is the tensor of file A or of file B. A *run* of bytes is a range that a file stores in one
piece.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.errors import AprfmtError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.prefetch import same_length, same_meaning
from aprfmt.measure.records import TensorDiff
from aprfmt.tensors.runs import first_difference
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.measure.prefetch import First


def compare_pair(
    pair: TensorPair, imatrix: bool = False, first: "First" = first_difference
) -> TensorDiff:
    """Return the verdict on one pair of tensors, as a TensorDiff; UNREADABLE if one is unreadable.

    `imatrix` says that either file was quantized with an importance matrix, which makes the bound
    of one quantization step statistical. `first` returns the first byte that differs between the
    stored runs of bytes, None if none does.
    """
    a, b = pair.a, pair.b
    diff = TensorDiff(
        pair.key,
        "DIFFERENT",
        name_a=_side_name(a),
        name_b=_side_name(b),
        encoding_a="" if a is None else a.encoding,
        encoding_b="" if b is None else b.encoding,
        shape_a=None if a is None else a.shape,
        shape_b=None if b is None else b.shape,
        layout=pair.layout,
    )
    damage = next((side.damage for side in (a, b) if side is not None and side.damage), "")
    if damage:
        return replace(diff, verdict="UNREADABLE", cause=damage)
    if a is None or b is None:
        return replace(diff, verdict="ONLY_IN_B" if a is None else "ONLY_IN_A")
    try:
        if a.shape != b.shape:
            for side in (a, b):
                if any(stored.packed is not None for stored in side.stored):
                    from aprfmt.measure.activation_scales import check_packed_parts

                    check_packed_parts(side)  # its shape may be that of a wrong claim
            return replace(diff, verdict="SHAPE_DIFFERS")
        return _compare_readable(diff, a, b, imatrix, first)
    except AprfmtError as error:
        return replace(diff, verdict="UNREADABLE", cause=str(error))


def _side_name(side: View | None) -> str:
    """Return the first two stored names of a tensor joined with a comma; "" for None."""
    return "" if side is None else ", ".join(side.names[:2])


def _layout_steps(a: View, b: View) -> tuple[str, ...]:
    """Return words for the layout steps (such as a transposition) that only one side has.

    () where both have the same.
    """
    if a.steps == b.steps:
        return ()
    return (
        *(f"{step} in A" for step in a.steps if step not in b.steps),
        *(f"{step} in B" for step in b.steps if step not in a.steps),
    )


def _compare_readable(
    diff: TensorDiff, a: View, b: View, imatrix: bool, first: "First"
) -> TensorDiff:
    """Return the verdict on two readable sides of one shape: by bytes, then by values.

    `imatrix` says that either file was quantized with an importance matrix. `first` returns the
    first byte that differs between the stored runs of bytes, None if none does.
    """
    layout = (*diff.layout, *_layout_steps(a, b))
    diff = replace(diff, layout=layout)
    same, stored = same_meaning(a, b), False
    if not layout and same:
        if first(a.stored_runs(), b.stored_runs()) is None:
            return replace(diff, verdict="SAME_BYTES")
        stored = True
    at: int | None = None
    if a.runs is not None and b.runs is not None and same_length(a, b):
        at = (first_difference if stored else first)(a.runs, b.runs)
        if at is None and same:
            return replace(diff, verdict="SAME_VALUES" if layout else "SAME_BYTES")
        if at is None:
            from aprfmt.measure.tensors import judge_mislabelled

            return judge_mislabelled(diff, a, b)
    from aprfmt.measure.tensors import compare_values

    return compare_values(replace(diff, first_byte=at), a, b, imatrix)
