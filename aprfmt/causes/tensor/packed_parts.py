"""Faults of a packed copy that are repaired by reading its stored parts in another way.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. Its *suffix*
is its name after the weight's. A and B are the two files that are compared; a *side* is one of
them, or its tensor.

Every row of READINGS is a way; the parts are changed, decoded by the same codec and compared with
the source. So what the values have lost, as the place of a code in its word, is still there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import neg
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.arch.binding import groups_for
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor import lattices
from aprfmt.causes.tensor.packed_copies import PackedCopy, explain_copy, is_own_decoding
from aprfmt.causes.tensor.proof import either_side_text, make_finding
from aprfmt.codecs import CODECS, decode, k_scales, q2_k
from aprfmt.codecs.compressed_scope import weight_groups
from aprfmt.codecs.dialect import OF_INPUTS, Parts, StoredPart
from aprfmt.codecs.lattice import PackedWeight, join_lattices
from aprfmt.codecs.weight_layout import AWQ_BACK, AWQ_ORDER
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.bounds import fit_errors
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.model import Model
from aprfmt.model.promised_parts import REORDERED

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CAUSE_ROWS = (
    Cause(
        "scales_missing", "tensor", "bug",
        "A packed weight lacks one of its parts: its scales, zero points or index.",
        "The weight cannot be decoded; the file has no tensor of that name.",
        "With the other side's part it decodes to the other side's values.",
    ),
    Cause(
        "scales_shape", "tensor", "bug",
        "The scales of a packed weight are transposed, or of groups of another size than is "
        "claimed.",
        "The weight cannot be decoded; its scales have another shape than its codes ask for.",
        "Turned back, or as the other side has them, it decodes to the other side's values.",
    ),
    Cause(
        "scales_invalid", "tensor", "bug",
        "Scales of a packed weight are NaN, infinite, negative or all zero.",
        "The weight cannot be decoded; its scales hold values that no quantizer writes.",
        "With these scales replaced it decodes to the other side's values, or does so everywhere "
        "else.",
    ),
    Cause(
        "packing_claim", "tensor", "bug",
        "config.json claims another packing than the bytes have: another method, group size or "
        "format, or none at all.",
        "The weights cannot be decoded as config.json says.",
        "Read by the named packing, they decode to the other side's values.",
    ),
)  # fmt: skip

FEW_GROUPS = 1 << 25  # products tried to find the group of every input
INDICES = (".g_idx", ".weight_g_idx")  # suffixes of the part with the group of every input


# (order in words, the nibbles that put it right, whether it is said of AWQ's weights; None: of all)
_ORDERS: tuple[tuple[str, tuple[int, ...], bool | None], ...] = (
    ("plain order (0 to 7), where AWQ's (0, 2, 4, 6, 1, 3, 5, 7) is read", AWQ_ORDER, True),
    ("AWQ's order (0, 2, 4, 6, 1, 3, 5, 7), where plain order is read", AWQ_BACK, False),
    ("AWQ's order, applied twice", AWQ_BACK, True),
    (
        "the inverse of AWQ's order (0, 4, 1, 5, 2, 6, 3, 7), where plain order is read",
        AWQ_ORDER,
        False,
    ),
    ("reverse order", tuple(range(7, -1, -1)), None),
)


class PartReading(NamedTuple):
    """Another way to read a packed weight; `change` returns None where it does not apply."""

    cause: str
    says: str
    change: Callable[[PackedWeight], PackedWeight | None]


# --- changes of a dialect's parts -----------------------------------------------------------------


def _change_part(parts: Parts, suffix: str, change: "Callable[[Array], Array]") -> Parts:
    """Return {suffix: part} with one part of a weight replaced: its bytes are change(bytes)."""
    part = parts[suffix]
    raw = np.frombuffer(part.raw, np.uint8)
    return {suffix: part._replace(raw=np.ascontiguousarray(change(raw)).tobytes())}


def _reorder_nibbles(
    order: tuple[int, ...], *suffixes: str, codes: bool = True, awq: bool | None = None
) -> Callable[[PackedWeight], PackedWeight | None]:
    """Return a function that gives a packed weight with the nibbles of every word reordered.

    It gives None for a weight without 4-bit codes or without these parts. `suffixes` are the
    parts besides the codes. `codes`: reorder the codes as well; without it a weight must have one
    of the parts. `awq`: only for weights of AWQ, or (False) for all others.
    """

    def reordered(raw: "Array") -> "Array":
        """Return the bytes of one stored part with the 4-bit codes of every word in `order`."""
        both = np.stack([raw & 15, raw >> 4], -1).reshape(-1, len(order))[:, list(order)]
        pairs = both.reshape(-1, 2)
        joined: Array = pairs[:, 0] | pairs[:, 1] << 4
        return joined

    def change(weight: PackedWeight) -> PackedWeight | None:
        """Return the packed weight with the 4-bit codes of every word in `order`, in each part.

        None for a weight without such parts or without 4-bit codes.
        """
        table = weight.codes()
        if table is None or table.bits != 4 or awq not in (None, weight.dialect.name == "awq"):
            return None
        chosen = [weight.dialect.main] * codes + [s for s in suffixes if s in weight.parts]
        if not chosen:
            return None
        parts: dict[str, object] = {}
        for suffix in chosen:
            if len(memoryview(weight.parts[suffix].raw).cast("B")) * 2 % len(order):
                return None
            parts |= _change_part(weight.parts, suffix, reordered)
        return weight.replace_parts(parts)  # type: ignore[arg-type]

    return change


def _relabel_floats(name: str) -> Callable[[PackedWeight], PackedWeight | None]:
    """Return a function that gives a packed weight with its 8-bit floats read as encoding `name`.

    It gives None for a weight without 8-bit floats, or with those already.
    """

    def change(weight: PackedWeight) -> PackedWeight | None:
        """Return the packed weight with its 8-bit floats read as encoding `name`.

        None if its codes are no 8-bit floats, or already of that encoding.
        """
        main = weight.parts[weight.dialect.main]
        if not main.encoding.startswith("F8_E") or main.encoding == name:
            return None
        return weight.replace_parts({weight.dialect.main: main._replace(encoding=name)})

    return change


def _other_gptq_format(weight: PackedWeight) -> PackedWeight | None:
    """Return a GPTQ weight read by the other format's zero points (v1, v2); None for others."""
    if weight.dialect.name != "gptq":
        return None
    now = weight.config.get("checkpoint_format", "gptq")
    return weight.replace_parts(checkpoint_format="gptq" if now == "gptq_v2" else "gptq_v2")


def _ignore_activation_order(weight: PackedWeight) -> PackedWeight | None:
    """Return a weight without its g_idx (activation order); None if it has none."""
    for suffix in INDICES:
        if suffix in weight.parts:
            return weight._replace(parts={k: v for k, v in weight.parts.items() if k != suffix})
    return None


def _tensor_scale(weight: PackedWeight) -> tuple[str, float] | None:
    """Return (suffix, value) of the one scale of a whole tensor; None without a usable one.

    Examples are ModelOpt's `weight_scale_2`, which multiplies, and `weight_global_scale` of
    compressed-tensors, which divides.
    """
    for suffix, part in weight.parts.items():
        if part.encoding not in UNIT or "scale" not in suffix or OF_INPUTS.search(suffix):
            continue
        if math.prod(part.shape) == 1:
            value = float(decode(part.encoding, part.raw, part.shape).reshape(-1)[0])
            if math.isfinite(value) and value > 0 and value != 1:
                return suffix, value
    return None


def _invert_tensor_scale(weight: PackedWeight, suffix: str, value: float) -> PackedWeight:
    """Return a weight whose part `suffix`, the number `value`, is replaced by 1 / `value`."""
    part = weight.parts[suffix]
    raw = np.float32(1 / value).tobytes()
    return weight.replace_parts({suffix: part._replace(raw=raw, encoding="F32")})


READINGS: tuple[PartReading, ...] = (
    PartReading(
        "zero_point",
        "zero points follow the other rule of GPTQ (v1 stores them less one)",
        _other_gptq_format,
    ),
    *(
        PartReading("fp8_variant", f"bytes are {name} under another label", _relabel_floats(name))
        for name in ("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ")
    ),
    PartReading("packing_order", "bytes have the high nibble first", _reorder_nibbles((1, 0))),
    *(
        PartReading(
            "packing_order",
            f"words hold their eight codes in {what}",
            _reorder_nibbles(order, *more, awq=awq),
        )
        for more in ((), (".qzeros",))
        for what, order, awq in _ORDERS
    ),
    *(
        PartReading(
            "packing_order",
            f"words hold their eight zero points in {what}, their codes not",
            _reorder_nibbles(order, ".qzeros", codes=False, awq=awq),
        )
        for what, order, awq in _ORDERS
    ),
    PartReading("group_index", "g_idx belongs to no order of its inputs", _ignore_activation_order),
)


def explain_lost_parts(
    a: Model, b: Model, pairs: Sequence[TensorPair], rows: Sequence[TensorDiff]
) -> dict[str, Finding]:
    """Return {key of a differing pair: the finding that a side lacks parts of a packed weight}.

    Its codes then have no known values, so that nothing says that the other side is wrong. `rows`
    are the comparisons of `pairs`, in their order.
    """
    found: dict[str, Finding] = {}
    for side, model in (("A", a), ("B", b)):
        lost = model.lost_parts
        names = {name: parts for name, (stored, parts) in lost.items() for name in (name, *stored)}
        for pair, row in zip(pairs, rows, strict=True) if lost else ():
            if row.verdict in EQUAL or row.key in found:
                continue
            held = {name for view in (pair.a, pair.b) if view is not None for name in view.names}
            held.update(_expected_names(model, row.key))
            name = next((name for name in names if name in held), "")
            if name:
                says = f"{side} has codes without {', '.join(names[name])}: "
                says += _loss_text(model, name)
                one = make_finding(
                    "scales_missing", (row.key,), (says,), None, None, None, confirmed=False
                )
                found[row.key] = replace(one, side=side)
    return found


def _loss_text(model: Model, name: str) -> str:
    """Return what is known of a part that packed codes lack, as a clause.

    `name` is one of the stored tensors of the weight. A tensor of no role in the same module may be
    the part under another name.
    """
    module = name.rpartition(".")[0]
    held = {one for lost in model.lost_parts.values() for one in (*lost.stored, f"{module}.bias")}
    odd = [
        one
        for one in model.source.tensors
        if one.startswith(f"{module}.")
        and one not in held
        and one not in model.roles_of
        and not OF_INPUTS.search(one)
    ]
    if not odd:
        return "what they count for is lost"
    return f"{odd[0].removeprefix(module)} may be it, under another name"


def _expected_names(model: Model, key: str) -> tuple[str, ...]:
    """Return the names that a role's tensors have in the model's naming; () where not known."""
    try:
        style = model.style
        groups = [] if style is None else groups_for(model.spec, style, [key], model.hyper)
    except ArchError:
        return ()
    return tuple(name for group in groups for name in group.stored)


def explain_part_reading(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that the stored parts, read in another way, give the source's values."""
    view = copy.reader.side
    if view.lattice is not None:
        weights = _packed_weights(copy)
        inverted = _explain_inverted_scale(copy, weights)
        if inverted is not None:
            yield inverted
            return
        for reading in READINGS:
            changed = [reading.change(weight) for weight in weights]
            if any(one is None for one in changed):
                continue
            found = confirm_reading(
                copy, reading.cause, reading.says, [one for one in changed if one is not None]
            )
            if found is not None:
                yield found
                return
        yield from _explain_groups(copy, weights)
        yield from _explain_word_order(copy, weights)
        return
    yield from _explain_block_fields(copy)


def confirm_reading(
    copy: PackedCopy, cause: str, says: str, weights: list[PackedWeight], free: int = 0
) -> Finding | None:
    """Return the finding of a reading that gives the source's values; None if it does not.

    `weights` are the weights read in the way that `says` names; `free` is how many numbers were
    fitted to the values.
    """
    view = copy.reader.side
    try:
        values = [weight.decode() for weight in weights]
        y = view.undo_layout(list(values))
        parts = [weight.lattice(v) for weight, v in zip(weights, values, strict=True)]
    except AprfmtError:
        return None
    if not np.isfinite(y).all() or any(part is None for part in parts):
        return None
    # Judge the errors in the steps of the weights as read now.
    index = np.arange(copy.reader.rows) if copy.rows is None else copy.rows
    wide = join_lattices([part for part in parts if part], view.undo_layout)
    lattice = wide.map_parts(lambda part: np.asarray(part).reshape(-1, y.shape[-1])[index])
    after = fit_errors(copy.x, np.asarray(y, np.float64).reshape(-1, y.shape[-1])[index], lattice)
    if not copy.is_repaired(after):
        return None
    says = f"{copy.whose} {says}"
    either = False
    if cause == "packing_order":
        from aprfmt.causes.tensor.code_orders import is_decoded_copy

        either = is_decoded_copy(y.reshape(-1, y.shape[-1])[index], copy.x)
        if either:
            says += either_side_text(copy.whose, "order is")
    elif not free and is_own_decoding(copy, after):
        # The source was made of these codes: it does not show that their parts are wrong.
        if cause == "group_index" and all(map(_states_its_order, _packed_weights(copy))):
            says = f"{copy.other} values are {copy.whose} codes decoded with the groups of inputs "
            says += f"in order: {copy.whose} g_idx was ignored"
            found = explain_copy(copy, cause, (says,), after)
            return replace(found, side=copy.other[0] if found.side else "")
        either = True
        says += f"; or {copy.whose} parts are right, and {copy.other} values were decoded so by "
        says += "mistake: both have the same codes"
    return explain_copy(copy, cause, (says,), after, free, either=either)


def _packed_weights(copy: PackedCopy) -> list[PackedWeight]:
    """Return the packed weights that make the copy's tensor."""
    return [one.packed() for one in copy.reader.side.stored if one.packed is not None]


def _states_act_order(weight: PackedWeight) -> bool:
    """Return whether the configuration says that inputs have the groups of an activation order."""
    groups = weight_groups(weight.config).values()
    orders = [group["weights"].get("actorder") for group in groups]
    return weight.config.get("desc_act") is True or any(one in REORDERED for one in orders)


def _states_its_order(weight: PackedWeight) -> bool:
    """Return whether a weight's g_idx is the order of activation that its configuration states.

    Then every group has as many inputs as any other, and they are not in order.
    """
    part = next((weight.parts[one] for one in INDICES if one in weight.parts), None)
    if part is None or not _states_act_order(weight):
        return False
    index = np.asarray(decode(part.encoding, part.raw, part.shape)).reshape(-1)
    counts = np.unique(index, return_counts=True)[1]
    return bool((counts == counts[0]).all() and (np.diff(index) < 0).any())


def _explain_inverted_scale(copy: PackedCopy, weights: list[PackedWeight]) -> Finding | None:
    """Return the finding that the scale of a whole tensor is stored as 1/s; None if it is not.

    Of several tensors that make a weight (experts, q, k and v of a fused one) it may be all, or
    those whose scale is above 1, or below: right scales of a weight have one magnitude.
    """
    known = [_tensor_scale(weight) for weight in weights]
    scales = [one for one in known if one is not None]
    if not scales or len(scales) < len(known):
        return None
    large = tuple(value > 1 for _, value in scales)
    every = (True,) * len(scales)
    for chosen in dict.fromkeys((every, large, tuple(not one for one in large))):
        if not any(chosen):
            continue
        changed = [
            _invert_tensor_scale(weight, *scale) if turned else weight
            for weight, scale, turned in zip(weights, scales, chosen, strict=True)
        ]
        few = "" if all(chosen) else f" in {sum(chosen)} of {len(chosen)} tensors"
        names = dict.fromkeys(suffix.lstrip("._") for suffix, _ in scales)
        says = (
            f"{' and '.join(names)}, the scale of the whole tensor, is inverted{few}: 1/s stands "
            "for s"
        )
        found = confirm_reading(copy, "quant_scale", says, changed)
        if found is not None:
            return found
    return None


def _explain_groups(copy: PackedCopy, weights: list[PackedWeight]) -> Iterator[Finding]:
    """Yield the finding that a GPTQ weight's inputs belong to other groups than g_idx says."""
    if len(weights) != 1 or weights[0].dialect.name != "gptq" or copy.rows is not None:
        return
    weight = weights[0]
    groups, inputs = weight.parts[".scales"].shape[0], copy.x.shape[-1]
    if groups < 2 or groups * copy.x.size > FEW_GROUPS:
        return

    def read(index: "Array") -> PackedWeight:
        """Return the GPTQ weight with `index`, the group of each input, in place of its g_idx."""
        raw = np.ascontiguousarray(index, np.int32).tobytes()
        return weight.replace_parts({".g_idx": StoredPart(raw, "I32", (inputs,))})

    # Decode with every input in each group, and take the nearest for each input.
    best, least = np.zeros(inputs, np.int32), np.full(inputs, np.inf)
    for group in range(groups):
        y = copy.reader.side.undo_layout([read(np.full(inputs, group)).decode()])
        error = ((np.asarray(y, np.float64).reshape(copy.x.shape) - copy.x) ** 2).sum(0)
        better = error < least
        best[better], least[better] = group, error[better]
    # Ascending groups mean another group size; others a wrong index.
    counts = np.bincount(best, minlength=groups)
    runs = bool((np.diff(best) >= 0).all())
    says = (
        f"inputs stand in groups of {int(np.median(counts))}, not of the size that is said"
        if runs
        else "inputs have the scales of other groups: their g_idx is missing or another's"
    )
    found = confirm_reading(copy, "group_index", says, [read(best)], inputs)
    if found is not None:
        yield found


def _explain_word_order(copy: PackedCopy, weights: list[PackedWeight]) -> Iterator[Finding]:
    """Yield the finding that codes are stored in an order that no row of READINGS has.

    The order is solved from the values.
    """
    from aprfmt.causes.tensor.code_orders import FAILED, reorder_codes

    schemes, view = copy.case.context.schemes, copy.reader.side
    if copy.rows is not None or len(weights) != 1 or schemes.failed_orders >= FAILED:
        return
    made = reorder_codes(weights[0], lambda one: view.undo_layout([one]), copy.x)
    schemes.failed_orders += made is None
    if made is None:
        return
    found = confirm_reading(copy, "packing_order", made.says, [made.weight], made.free)
    if found is not None:
        yield found


# --- blocks of GGUF -------------------------------------------------------------------------------


def _explain_block_fields(copy: PackedCopy) -> Iterator[Finding]:
    """Yield the finding that fields of GGUF blocks are exchanged or negated."""
    view = copy.reader.side
    codec = CODECS[view.encoding] if view.encoding in CODECS else None
    if codec is None or codec.layout is None or view.data is None or copy.rows is not None:
        return
    if codec.row.row_header:
        return  # blocks do not follow one another
    blocks = np.frombuffer(view.data.window(0, len(view.data)), codec.layout)
    for cause, says, change in _FIELDS:
        made = change(blocks)
        if made is None:
            continue
        y = np.asarray(decode(view.encoding, made.tobytes(), view.shape), np.float64)
        y = y.reshape(copy.x.shape)
        if not np.isfinite(y).all():
            continue
        scheme = lattices.find_scheme(y, "F32", tuple(copy.case.context.schemes.found), True)
        after = None if scheme is None else fit_errors(copy.x, y, scheme.lattice)
        if after is not None and copy.is_repaired(after):
            yield explain_copy(copy, cause, (f"{copy.whose} {says}", copy.reader.encoding), after)
            return


def _exchange_members(*pair: str) -> "Callable[[Array], Array | None]":
    """Return a function that exchanges two fields of GGUF blocks; None for blocks without them."""

    def change(blocks: "Array") -> "Array | None":
        """Return a copy of GGUF blocks with two fields exchanged; None if they lack one of them."""
        if not set(pair) <= set(blocks.dtype.names or ()):
            return None
        made = blocks.copy()
        for one, other in (pair, pair[::-1]):
            made[one] = blocks[other]
        return made

    return change


def _change_members(
    change: "Callable[[Array], Array]", *names: str
) -> "Callable[[Array], Array | None]":
    """Return a function that applies `change` to the fields `names` of GGUF blocks.

    It gives None for blocks without any of them.
    """

    def made(blocks: "Array") -> "Array | None":
        """Return a copy of GGUF blocks with `change` applied to the fields `names`.

        None if the blocks have none of these fields.
        """
        chosen = [name for name in names if name in (blocks.dtype.names or ())]
        if not chosen:
            return None
        other = blocks.copy()
        for name in chosen:
            other[name] = change(blocks[name])
        return other

    return made


def _swap_nibbles(values: "Array") -> "Array":
    """Return bytes with their nibbles exchanged."""
    return values >> 4 | values << 4


def _unmix_nibbles(blocks: "Array") -> "Array | None":
    """Return GGUF blocks whose bytes hold codes of the two halves, not of two neighbours.

    The codes are repacked. None for blocks without `qs`.
    """
    if "qs" not in (blocks.dtype.names or ()) or blocks["qs"].ndim != 2:
        return None
    made, qs = blocks.copy(), blocks["qs"]
    one = np.stack([qs & 15, qs >> 4], -1).reshape(len(qs), -1)
    half = one.shape[1] // 2
    made["qs"] = one[:, :half] | one[:, half:] << 4
    return made


def _exchange_packed(blocks: "Array") -> "Array | None":
    """Return GGUF blocks with the packed scales and minima of their groups exchanged.

    None for blocks that pack no minima: those without `dmin`.
    """
    if not {"scales", "dmin"} <= set(blocks.dtype.names or ()):
        return None
    made, packed = blocks.copy(), blocks["scales"]
    table = k_scales if packed.shape[1] == 12 else q2_k
    scales, mins = table.unpack_scales_and_mins(packed)
    made["scales"] = table.pack_scales_and_mins(mins, scales)
    return made


_FIELDS: "tuple[tuple[str, str, Callable[[Array], Array | None]], ...]" = (
    ("quant_min", "d and dmin are exchanged", _exchange_members("d", "dmin")),
    (
        "quant_min",
        "packed scales of the groups are read for their packed minima, and these for the scales",
        _exchange_packed,
    ),
    ("quant_min", "d and m are exchanged", _exchange_members("d", "m")),
    ("quant_min", "minima have the other sign", _change_members(neg, "dmin", "m")),
    (
        "packing_order",
        "bytes have the high nibble first",
        _change_members(_swap_nibbles, "qs", "ql"),
    ),
    (
        "packing_order",
        "nibbles of a byte are neighbours, where they are two halves",
        _unmix_nibbles,
    ),
)
