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
    lost_bits,
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
from aprfmt.compare.explain.guesses import Explanation, Guess
from aprfmt.compare.explain.unequal import Unequal

PACKED = tuple(cause.name for cause in PACKED_CAUSES)


@dataclass(frozen=True, slots=True)
class PairHypothesis:
    """One row: the causes it can find, its function, and the pairs it is for.

    `stored` rows compare bytes in pieces, and are all that is tried on a vector of gigabytes.
    """

    causes: tuple[str, ...]
    find: Callable[[Unequal], Iterator[Guess | Explanation]]
    shapes: bool = False
    part: bool = False
    stored: bool = False


TABLE: tuple[PairHypothesis, ...] = (
    PairHypothesis(("dtype_mislabel",), stored.dtype_mislabel),
    PairHypothesis(("endianness",), stored.endianness),
    PairHypothesis(("byte_offset",), shifts.wrapped_offset, stored=True),
    PairHypothesis(("missing_bias",), elsewhere.zeroed_bias),
    PairHypothesis(("stale_tensor",), elsewhere.one_value, part=True),
    PairHypothesis(("bit_rot",), stored.bit_rot, stored=True),
    PairHypothesis(("bit_rot",), packed_damage.damaged_parts),
    PairHypothesis(("bit_rot",), lost_bits.lost_bits),
    PairHypothesis(("byte_offset", "row_offset"), shifts.byte_offset, stored=True),
    PairHypothesis(PACKED, packed_faults.faults),
    PairHypothesis(("packing_order", "quant_min"), blocks.other_layout),
    PairHypothesis(("norm_offset",), arithmetic.norm_offset),
    PairHypothesis(("layer_order", "swapped_tensors", "tied_embedding"), elsewhere.other_tensor),
    PairHypothesis(("value_heads",), recurrent.value_heads),
    PairHypothesis(("tap_order",), recurrent.taps),
    PairHypothesis(("transpose",), moves.transpose, shapes=True),
    PairHypothesis(("scale",), arithmetic.scale, part=True),
    PairHypothesis(("rounding",), arithmetic.rounding),
    PairHypothesis(("function_of",), relations.function_of),
    PairHypothesis(
        ("rope_pairing", "gqa_mapping", "head_order", "expert_order", "row_offset"),
        moves.rearranged,
        part=True,
    ),
    PairHypothesis(("packing_order",), packed_faults.order_of_outputs),
    PairHypothesis(("byte_offset",), shifts.flat_offset),
    PairHypothesis(("byte_offset",), blocks.late_blocks),
    PairHypothesis(("wrong_rows",), misplaced.misplaced),
    PairHypothesis(("bit_rot",), damage.ranges, stored=True),
    PairHypothesis(("byte_offset",), moves.value_offset),
    PairHypothesis(("quantisation",), arithmetic.quantisation),
    PairHypothesis(("quantisation",), packed_faults.quantisation),
    PairHypothesis(("rounding",), arithmetic.summed_rounding),
    PairHypothesis(("bit_rot",), outliers.outliers),
    PairHypothesis(("quant_scale",), packed_faults.other_scales),
    PairHypothesis(("stale_tensor",), elsewhere.stale_tensor, part=True),
    PairHypothesis(("gqa_mapping",), moves.repeated, shapes=True),
    PairHypothesis(("row_offset",), moves.window, shapes=True),
    PairHypothesis(("row_offset",), relations.prefix, shapes=True),
)
