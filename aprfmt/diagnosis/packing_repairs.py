"""The possible repairs of a packed weight that does not decode: other parts or other keys.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. The *faulty
side* is the model whose weight does not decode.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.codecs.dialect import SMALL, Dialect, Parts, StoredPart, part_array
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.errors import AprfmtError
from aprfmt.model.packing_sizes import BITS, GROUPS, mode_changes

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

CLAIMS: Mapping[str, Sequence[str]] = {  # what else config.json may say of the same bytes
    "quant_algo": ("NVFP4", "FP8", "MXFP8", "W4A16_AWQ", "W8A16"),
    "format": ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
               "float-quantized", "int-quantized"),
}  # fmt: skip
SCALES = ("scale", "zero", "absmax", "bias")  # in the names of parts that are no codes


class Repair(NamedTuple):
    """A possible repair: its cause, what is wrong in words, and the weight with it applied."""

    cause: str
    says: str
    packed: PackedWeight
    part: str | None = None  # the one that is changed, None for the claim


@dataclass(frozen=True)
class StoredWeight:
    """A packed weight of the faulty side as stored; `right` is the reference's, if it is packed."""

    name: str
    dialect: Dialect
    parts: Parts
    missing: tuple[str, ...]
    config: Mapping[str, Value] | None  # what config.json says of it, None if it is left as it is
    right: PackedWeight | None = None
    sections: tuple[Mapping[str, Value], ...] = ({}, {})  # of config.json: the reference's, its own


def possible_repairs(weight: StoredWeight) -> Iterator[Repair]:
    """Yield each possible repair of a packed weight, likely ones first; none is tried here."""
    # Missing parts can be taken from a packed reference.
    config = weight.config or {}
    now = PackedWeight(weight.dialect, weight.parts, config)
    right = weight.right
    for suffix in weight.missing:
        parts = {} if right is None else {suffix: right.parts[suffix]}
        yield Repair(
            "scales_missing", f"{suffix} is not in the file", now.replace_parts(parts), suffix
        )
    if right is not None:
        yield from _repairs_by_part(weight, now, right)
        if weight.config != right.config:
            yield Repair(
                "packing_claim",
                f"config.json says {_differing_keys_text(*weight.sections)}",
                PackedWeight(right.dialect, weight.parts, right.config),
            )
        return
    # Without one: transposed scales, and scales that are no numbers.
    for suffix, part in weight.parts.items():
        if suffix == weight.dialect.main or not any(word in suffix for word in SCALES):
            continue
        if len(part.shape) == 2 and part.shape[0] != part.shape[1]:
            turned = f"{suffix} has shape {list(part.shape)}, transposed"
            yield Repair(
                "scales_shape", turned, now.replace_parts({suffix: _transposed_part(part)})
            )
            same = part._replace(shape=part.shape[::-1])
            yield Repair("scales_shape", turned, now.replace_parts({suffix: same}))
        signed = weight.dialect.signed
        wrong = bad_scale_text(suffix, part, signed=signed)
        if wrong:
            good = _with_first_good(part, signed=signed)
            yield Repair("scales_invalid", wrong, now.replace_parts({suffix: good}))
    yield from _repairs_by_claim(weight, now)


def _repairs_by_part(
    weight: StoredWeight, now: PackedWeight, right: PackedWeight
) -> Iterator[Repair]:
    """Yield a Repair for each part that is wrong by the reference's, with that part replaced.

    `now` is the weight as it is stored, `right` the reference's.
    """
    for suffix, part in weight.parts.items():
        theirs = right.parts.get(suffix)
        if suffix == weight.dialect.main or theirs is None:
            continue
        found = wrong_part(suffix, part, theirs, signed=right.dialect.signed)
        if found is not None:
            yield Repair(*found, now.replace_parts({suffix: theirs}), suffix)


def wrong_part(
    suffix: str, part: StoredPart, theirs: StoredPart, *, signed: bool = False
) -> tuple[str, str] | None:
    """Return (cause, sentence) on what is wrong with a part of a weight; None if nothing is.

    `theirs` is the reference's part; `signed` scales may be negative.
    """
    if _squeezed_shape(part.shape) != _squeezed_shape(theirs.shape):
        turned = part.shape == theirs.shape[::-1]
        how = "transposed" if turned else "of groups of another size"
        says = f"{suffix} has shape {list(part.shape)}, {how}; expected {list(theirs.shape)}"
        return "scales_shape", says
    if part.encoding != theirs.encoding:
        return "packing_claim", f"{suffix} is {part.encoding}, expected {theirs.encoding}"
    wrong = bad_scale_text(suffix, part, signed=signed)
    return ("scales_invalid", wrong) if wrong else None


def _squeezed_shape(shape: Sequence[int]) -> list[int]:
    """Return a shape without axes of size one."""
    return [n for n in shape if n != 1]


def _repairs_by_claim(weight: StoredWeight, now: PackedWeight) -> Iterator[Repair]:
    """Yield a Repair for each other group size, algorithm or format than config.json states.

    `now` is the weight as the file and its config.json give it.
    """
    config = weight.config or {}
    for told, held, altered in _other_sizes(config):
        says = (
            f"config.json says {_sizes_text(told)}; the weight is stored with {_sizes_text(held)}"
        )
        yield Repair("packing_claim", says, now.replace_parts(**altered))
    for changes in mode_changes(config, [("bits",)]):
        made = {key: value for (key,), value in changes.items()}
        told_now = ", ".join(f"{key} {_literal_or_nothing(config.get(key))}" for key in made)
        stored = ", ".join(f"{key} {_literal_or_nothing(value)}" for key, value in made.items())
        says = f"config.json says {told_now}; the bytes have {stored}"
        yield Repair("packing_claim", says, now.replace_parts(**made))
    for key, values in CLAIMS.items():
        for value in values if key in config else ():
            if value == config[key]:
                continue
            for name in DIALECTS:
                altered = {**config, key: value}
                if weight.dialect.main == DIALECTS[name].main and DIALECTS[name].recognises(
                    altered
                ):
                    says = f"config.json says {key} {config[key]!r}; the bytes are {value!r}"
                    packed = PackedWeight(DIALECTS[name], weight.parts, altered)
                    yield Repair("packing_claim", says, packed)


class Sizes(NamedTuple):
    """Bits of a code (None: not stated) and elements of a group, as a section states them."""

    bits: Any
    group: Any


def _sizes_text(sizes: Sizes) -> str:
    """Return the bits of a code and the group size in words, such as "4 bits in groups of 128"."""
    bits = "" if sizes.bits is None else f"{sizes.bits} bits in "
    return f"{bits}groups of {sizes.group}"


def _other_sizes(config: Mapping[str, Any]) -> Iterator[tuple[Sizes, Sizes, dict[str, Any]]]:
    """Yield (sizes that a section states, other sizes, keys to change for them).

    Sizes that change only one number come first.
    """
    groups = config.get("config_groups")
    rows = dict(groups) if isinstance(groups, Mapping) else {}
    weights = [row.get("weights") for row in rows.values() if isinstance(row, Mapping)]
    inner = next((one for one in weights if isinstance(one, Mapping)), {}) if rows else config
    key = "num_bits" if rows else "bits"
    said = Sizes(inner.get(key), inner.get("group_size"))
    every = [Sizes(n, group) for n in ((None,) if said.bits is None else BITS) for group in GROUPS]
    every.sort(key=lambda one: (one.bits != said.bits) + (one.group != said.group))
    for held in every:
        if held == said:
            continue
        changed = {"group_size": held.group} | ({} if held.bits is None else {key: held.bits})
        if not rows:
            yield said, held, changed
            continue
        made = {
            name: {**row, "weights": {**(row.get("weights") or {}), **changed}}
            for name, row in rows.items()
            if isinstance(row, Mapping)
        }
        yield said, held, {"config_groups": made}


def _differing_keys_text(right: Mapping[str, Any], said: Mapping[str, Any]) -> str:
    """Return in words how a quantization section differs from the reference's; "" if equal."""
    if not said:
        return "nothing of quantization, and the weights are packed"
    shown = [
        f"{key} {_literal_or_nothing(mine)}, expected {_literal_or_nothing(theirs)}"
        for key, mine, theirs in _differing_keys(right, said)
    ]
    return "; ".join(shown[:3])


def _differing_keys(
    right: Mapping[str, Any], said: Mapping[str, Any], above: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value in `said`, value in `right`) of the innermost keys that differ."""
    for key in {**right, **said}:
        theirs, mine = right.get(key), said.get(key)
        if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
            yield from _differing_keys(theirs, mine, f"{above}{key}.")
        elif theirs != mine:
            yield f"{above}{key}", mine, theirs


def _literal_or_nothing(value: Any) -> str:
    """Return a value as text for a message; "nothing" for None."""
    return "nothing" if value is None else shorten(repr(value), 80)


def _transposed_part(part: StoredPart) -> StoredPart:
    """Return a part with rows and columns of its bytes exchanged."""
    rows, columns = part.shape
    width = len(memoryview(part.raw).cast("B")) // max(rows * columns, 1)
    cells = np.frombuffer(part.raw, np.uint8).reshape(rows, columns, width)
    raw = np.ascontiguousarray(cells.transpose(1, 0, 2)).tobytes()
    return StoredPart(raw, part.encoding, (columns, rows))


def part_numbers(part: StoredPart) -> "Array | None":
    """Return a part's numbers as an array; None for integers that are no one-byte floats.

    Bytes of type U8 are read as powers of two (E8M0), as scales are stored.
    """
    try:
        if part.encoding in SMALL:
            return SMALL[part.encoding].values[
                np.frombuffer(part.raw, np.uint8).reshape(part.shape)
            ]
        values = part_array("", {"": part}, "")
    except AprfmtError:
        return None
    return values if values.dtype.kind == "f" else None


def bad_scale_text(suffix: str, part: StoredPart, *, signed: bool = False) -> str:
    """Return what is wrong with a part's scales: zero, negative or not finite; "" if nothing is.

    "" too for a part that has no scales. `signed` scales may be negative.
    """
    floats = "absmax" in suffix and part.encoding not in SMALL  # with a nested one, it is codes
    values = part_numbers(part) if floats or "scale" in suffix else None
    if values is None:
        return ""
    if values.size and not np.frombuffer(part.raw, np.uint8).any():
        return f"{suffix} is 0 everywhere"
    wrong = bad_scales(part, signed=signed).reshape(values.shape)
    if not wrong.any():
        return ""
    at = [int(i) for i in np.argwhere(wrong)[0]]
    return (
        f"{suffix} holds {values[tuple(at)]} at {at}; {int(wrong.sum())} of {wrong.size} scales "
        f"are {'' if signed else 'negative or '}no numbers"
    )


def bad_scales(part: StoredPart, *, signed: bool) -> "Array":
    """Return which scales of a part are no numbers, or negative unless `signed`: bool [scales]."""
    values = part_numbers(part)
    assert values is not None
    wrong = ~np.isfinite(values) if signed else ~np.isfinite(values) | (values < 0)
    return np.asarray(wrong.reshape(-1))


def _with_first_good(part: StoredPart, *, signed: bool) -> StoredPart:
    """Return a part with its first usable scale in place of each unusable one (`bad_scales`)."""
    bad = bad_scales(part, signed=signed)
    width = len(memoryview(part.raw).cast("B")) // max(bad.size, 1)
    cells = np.frombuffer(part.raw, np.uint8).reshape(-1, width).copy()
    if not bad.all():
        cells[bad] = cells[int(np.argmin(bad))]
    return part._replace(raw=cells.tobytes())
