"""The hypotheses that need no forward pass, in the order they are tried: one row each.

Cheap and specific ones come first. A row's function reads samples (SAMPLE_ROWS rows, or as its
docstring says) and yields guesses with their values filled in; only a guess that fits the sample
is applied to the whole tensor. `shapes` marks rows for tensors of different shapes, `part` rows
that are also tried on only the differing rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from aprfmt.causes.tensor import (
    arithmetic,
    block_order,
    byte_shifts,
    lost_bits,
    misplaced_rows,
    other_tensors,
    outliers,
    overwritten_bytes,
    packed_damage,
    packed_faults,
    rearrangements,
    recurrent_layers,
    stored_bytes,
    value_functions,
)
from aprfmt.causes.tensor.differing_pair import Unequal
from aprfmt.causes.tensor.guess import Guess
from aprfmt.causes.words.packed import PACKED as PACKED_CAUSES
from aprfmt.measure.records import Explanation

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
    PairHypothesis(("dtype_mislabel",), stored_bytes.dtype_mislabel),
    PairHypothesis(("endianness",), stored_bytes.endianness),
    PairHypothesis(("byte_offset",), byte_shifts.wrapped_offset, stored=True),
    PairHypothesis(("missing_bias",), other_tensors.zeroed_bias),
    PairHypothesis(("stale_tensor",), other_tensors.one_value, part=True),
    PairHypothesis(("stale_tensor",), recurrent_layers.initial),
    PairHypothesis(("bit_rot",), stored_bytes.bit_rot, stored=True),
    PairHypothesis(("bit_rot",), packed_damage.damaged_parts),
    PairHypothesis(("bit_rot",), lost_bits.lost_bits),
    PairHypothesis(("byte_offset", "row_offset"), byte_shifts.byte_offset, stored=True),
    PairHypothesis(PACKED, packed_faults.faults),
    PairHypothesis(("packing_order", "quant_min"), block_order.other_layout),
    PairHypothesis(("norm_offset",), arithmetic.norm_offset),
    PairHypothesis(
        ("layer_order", "swapped_tensors", "tied_embedding"), other_tensors.other_tensor
    ),
    PairHypothesis(("value_heads",), recurrent_layers.value_heads),
    PairHypothesis(("tap_order",), recurrent_layers.taps),
    PairHypothesis(("transpose",), rearrangements.transpose, shapes=True),
    PairHypothesis(("scale",), arithmetic.scale, part=True),
    PairHypothesis(("rounding",), arithmetic.rounding),
    PairHypothesis(("function_of",), value_functions.function_of),
    PairHypothesis(
        ("rope_pairing", "gqa_mapping", "head_order", "expert_order", "row_offset"),
        rearrangements.rearranged,
        part=True,
    ),
    PairHypothesis(("packing_order",), packed_faults.order_of_outputs),
    PairHypothesis(("byte_offset",), byte_shifts.flat_offset),
    PairHypothesis(("byte_offset",), block_order.late_blocks),
    PairHypothesis(("wrong_rows",), misplaced_rows.misplaced),
    PairHypothesis(("bit_rot",), overwritten_bytes.ranges, stored=True),
    PairHypothesis(("byte_offset",), rearrangements.value_offset),
    PairHypothesis(("quantisation",), arithmetic.quantisation),
    PairHypothesis(("quantisation",), packed_faults.quantisation),
    PairHypothesis(("rounding",), arithmetic.summed_rounding),
    PairHypothesis(("bit_rot",), outliers.outliers),
    PairHypothesis(("quant_scale",), packed_faults.other_scales),
    PairHypothesis(("stale_tensor",), other_tensors.stale_tensor, part=True),
    PairHypothesis(("gqa_mapping",), rearrangements.repeated, shapes=True),
    PairHypothesis(("row_offset",), rearrangements.window, shapes=True),
    PairHypothesis(("row_offset",), value_functions.prefix, shapes=True),
)
