"""The hypotheses that need no forward pass, in the order they are tried: one row each.

Cheap and specific ones come first. A row's function reads samples (SAMPLE_ROWS rows, or as its
docstring says) and yields guesses with their values filled in; only a guess that fits the sample
is applied to the whole tensor. `shapes` marks rows for tensors of different shapes, `part` rows
that are also tried on only the differing rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aprfmt.compare.causes.packed import PACKED as PACKED_CAUSES
from aprfmt.compare.explain import (
    arithmetic,
    blocks,
    damage,
    elsewhere,
    misplaced,
    moves,
    outliers,
    packed_damage,
    packed_faults,
    recurrent,
    relations,
    shifts,
    stored,
)
from aprfmt.compare.explain.case import Case
from aprfmt.compare.explain.guesses import Explanation, Guess

PACKED = tuple(cause.name for cause in PACKED_CAUSES)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One row: the causes it can find, its function, and the pairs it is for."""

    causes: tuple[str, ...]
    find: Callable[[Case], Iterator[Guess | Explanation]]
    shapes: bool = False
    part: bool = False


TABLE: tuple[Hypothesis, ...] = (
    Hypothesis(("dtype_mislabel",), stored.dtype_mislabel),
    Hypothesis(("endianness",), stored.endianness),
    Hypothesis(("missing_bias",), elsewhere.zeroed_bias),
    Hypothesis(("bit_rot",), stored.bit_rot),
    Hypothesis(("bit_rot",), packed_damage.damaged_parts),
    Hypothesis(("byte_offset", "row_offset"), shifts.byte_offset),
    Hypothesis(PACKED, packed_faults.faults),
    Hypothesis(("packing_order", "quant_min"), blocks.other_layout),
    Hypothesis(("norm_offset",), arithmetic.norm_offset),
    Hypothesis(("layer_order", "swapped_tensors", "tied_embedding"), elsewhere.other_tensor),
    Hypothesis(("value_heads",), recurrent.value_heads),
    Hypothesis(("tap_order",), recurrent.taps),
    Hypothesis(("transpose",), moves.transpose, shapes=True),
    Hypothesis(("scale",), arithmetic.scale, part=True),
    Hypothesis(("rounding",), arithmetic.rounding),
    Hypothesis(("function_of",), relations.function_of),
    Hypothesis(
        ("rope_pairing", "gqa_mapping", "head_order", "expert_order", "row_offset"),
        moves.rearranged,
        part=True,
    ),
    Hypothesis(("packing_order",), packed_faults.order_of_outputs),
    Hypothesis(("byte_offset",), shifts.flat_offset),
    Hypothesis(("byte_offset",), blocks.late_blocks),
    Hypothesis(("wrong_rows",), misplaced.misplaced),
    Hypothesis(("bit_rot",), damage.ranges),
    Hypothesis(("byte_offset",), moves.value_offset),
    Hypothesis(("quantisation",), arithmetic.quantisation),
    Hypothesis(("quantisation",), packed_faults.quantisation),
    Hypothesis(("bit_rot",), outliers.outliers),
    Hypothesis(("quant_scale",), packed_faults.other_scales),
    Hypothesis(("stale_tensor",), elsewhere.stale_tensor, part=True),
    Hypothesis(("gqa_mapping",), moves.repeated, shapes=True),
    Hypothesis(("row_offset",), moves.window, shapes=True),
    Hypothesis(("row_offset",), relations.prefix, shapes=True),
)
