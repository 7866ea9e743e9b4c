"""Finds which part, or which key of the configuration, makes a packed weight wrong.

A *part* is one of the stored tensors of a packed weight: codes, scales, zero points. A and B are
the two models, runs or traces that are compared; a *side* is one of them.

Each possible repair is applied alone: a part as the reference has it, scales transposed back,
another claim of config.json. What makes the weight decode to the reference's values is the cause.
Where the reference is not packed, the errors must be those of a correct quantization.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.arch.binding import bind_names
from aprfmt.base.protocols import Value
from aprfmt.codecs.dialect import Dialect, StoredPart
from aprfmt.codecs.dialects import DIALECTS, dialects_at
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.diagnosis.block_scales import find_wrong_scales
from aprfmt.diagnosis.packing_repairs import (
    Repair,
    StoredWeight,
    bad_scale_text,
    bad_scales,
    possible_repairs,
)
from aprfmt.diagnosis.records import Evidence
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.bounds import fit_errors
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model
from aprfmt.model.packing import packing_config
from aprfmt.tensors.companions import quantization_section, stored_part

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

MOST = 8  # weights that are put right; what is wrong with one is wrong with all of its kind


@dataclass
class PackingFault:
    """Findings and evidence on faulty packed weights; `left` are those that no repair mends."""

    findings: list[Finding] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def examine_packed(
    good: Model, bad: Model, label: str, names: Iterable[str] | None = None
) -> PackingFault | None:
    """Return what is wrong with the packed weights of `bad`, judged by `good`; None for nothing.

    `label` is the side of `bad`. `names` are the weights that cannot be read; None for all packed
    weights that do not decode.
    """
    wanted = None if names is None else set(names)
    broken = list(_undecodable_weights(good, bad, wanted))
    fault = PackingFault()
    causes: dict[str, list[tuple[str, str, bool]]] = {}
    for name, cause, says, sure in find_wrong_scales(good, bad, wanted):
        causes.setdefault(cause, []).append((name, says, sure))
    for weight in broken[:MOST]:
        found = list(_working_repairs(weight, partial(_reference_values, good, weight)))
        for cause, says, sure in found:
            causes.setdefault(cause, []).append((weight.name, says, sure))
        if not found:
            fault.left.append(weight.name)
    # That a part is not there is seen of all, and with the reference's it is the same bytes.
    alike = {weight.missing for weight in broken[:MOST] if weight.missing}
    same = [weight for weight in broken[MOST:] if weight.missing in alike]
    for weight in same if "scales_missing" in causes else ():
        says = f"{weight.missing[0]} is not in the file"
        causes["scales_missing"].append((weight.name, says, _has_reference_parts(weight)))
    fault.findings = [_packing_finding(cause, rows, label) for cause, rows in causes.items()]
    if fault.findings and len(broken) > MOST:
        fault.evidence.append(
            Evidence(
                "tensor",
                f"{len(broken)} packed weights of {label} do not decode; {MOST} of "
                "them were put right",
            )
        )
    return fault if fault.findings else None


def _has_reference_parts(weight: StoredWeight) -> bool:
    """Return whether all parts of a weight that are there are the reference's, byte for byte."""
    right = weight.right
    return (
        right is not None
        and weight.config == right.config
        and all(
            suffix in right.parts
            and memoryview(right.parts[suffix].raw).cast("B") == memoryview(part.raw).cast("B")
            for suffix, part in weight.parts.items()
        )
    )


def _packing_finding(cause: str, rows: Sequence[tuple[str, str, bool]], label: str) -> Finding:
    """Return the finding of a cause; `rows` are (weight, sentence, confirmed) each."""
    sure = all(row[2] for row in rows)
    more = f", and so in {len(rows) - 1} more" if len(rows) > 1 else ""
    return Finding(
        cause,
        f"{label}: {rows[0][0]}: {rows[0][1]}{more}",
        "tensor",
        "bug",
        tuple(row[0] for row in rows),
        sure,
        residual_before=1.0 if sure else None,
        residual_after=0.0 if sure else None,
        of="these weights, the share that does not decode",
        side=label,
        counted=True,
        proof=unfitted_proof(len(rows)) if sure else None,
    )


# --- which weights -------------------------------------------------------------------------------


def _undecodable_weights(good: Model, bad: Model, names: set[str] | None) -> Iterator[StoredWeight]:
    """Yield a StoredWeight for each packed weight of `bad` that does not decode.

    `names` are the weights that were seen not to decode, None for all whose parts were not
    joined. First come weights that `good` has packed and of which `bad` has the codes. Others are
    recognised as packed by their tensor names.
    """
    section = quantization_section(packing_config(bad) or {})
    seen: set[str] = set()
    for name, view in good.items():
        tensor = view.stored[0]
        if tensor.packed is None:
            continue
        if _is_joined(bad, name) if names is None else name not in names:
            continue
        right = tensor.packed()
        stored = {s or right.dialect.main: p.info.name for s, p in tensor.parts.items()}
        parts = {s: _stored_part(bad, n) for s, n in stored.items() if n in bad.source.tensors}
        if right.dialect.main not in parts:
            continue
        missing = tuple(s for s in stored if s not in parts)
        said = _section_of_weight(section, name, right.dialect)
        if said is None and not right.dialect.packs(parts[right.dialect.main].encoding):
            continue  # nothing says that it is packed, and it is stored as it is
        seen.add(name)
        both = quantization_section(packing_config(good) or {}) or {}, section or {}
        yield StoredWeight(name, right.dialect, parts, missing, said, right, both)
    if section is not None:
        rest = _weights_by_name(bad, section, names)
        yield from (weight for weight in rest if weight.name not in seen)


def _weights_by_name(
    bad: Model, section: Mapping[str, Value], names: set[str] | None
) -> Iterator[StoredWeight]:
    """Yield a StoredWeight for each weight of `bad` that tensor names show to be packed.

    Only weights that do not decode, or those of `names`, where the config.json's `section` has
    their packing or a part of theirs is stored. Weights of a method that is not decoded here are
    left out: nothing shows what its own tool makes of them.
    """
    stored, unread = bad.source.tensors, bad.unread
    foreign: frozenset[str] = frozenset()
    if unread is not None and unread.method and not (unread.why or unread.lacks):
        foreign = unread.weights
    for name, tensor in stored.items():
        for key in DIALECTS:
            dialect = DIALECTS[key]
            prefix = dialect.prefix_of(name)
            if prefix is None or not dialect.main or not dialect.packs(tensor.info.encoding):
                continue
            weight = prefix + dialect.weight
            if _is_joined(bad, weight) if names is None else weight not in names:
                continue
            parts_by_suffix = {
                s: dialect.stored(prefix, s, stored) for s in (*dialect.parts, *dialect.optional)
            }
            parts = {s: _stored_part(bad, n) for s, n in parts_by_suffix.items() if n is not None}
            said = _section_of_weight(section, weight, dialect)
            if said is None and not any(s in parts for s in dialect.parts):
                continue
            if said is None and weight in foreign:
                continue
            lost = bad.lost_parts.get(weight)
            if said is None and lost is not None:
                continue  # it lacks parts as the dialect that is said for it
            missing = tuple(s for s in dialect.parts if s not in parts)
            missing = missing if lost is None else lost.parts
            yield StoredWeight(
                weight,
                dialect,
                {dialect.main: _stored_part(bad, name), **parts},
                missing,
                said if said is not None else section,
            )
            break


def _is_joined(model: Model, name: str) -> bool:
    """Return whether the stored parts of a weight were joined into one tensor."""
    return name in model and bool(model[name].parts)


def _stored_part(model: Model, name: str) -> StoredPart:
    """Return the stored tensor of this name as a StoredPart: bytes, encoding and shape."""
    return stored_part(model.source.tensors[name])


def _section_of_weight(
    section: Mapping[str, Value] | None, name: str, dialect: Dialect
) -> Mapping[str, Value] | None:
    """Return the quantization section's keys for a weight; None if not packed as `dialect`."""
    if section is None:
        return None
    try:
        found = dialects_at(section, name.removesuffix(dialect.weight).removesuffix("."))
    except AprfmtError:
        return None
    return None if found is None or dialect not in found[0] else found[1]


# --- what puts one right -------------------------------------------------------------------------


def _working_repairs(weight: StoredWeight, reference: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield (cause, sentence, whether the repair was seen to work) for one weight.

    `reference` returns the reference's values. At most one unconfirmed cause is yielded, and only
    where no repair works.
    """
    tried, main = list(possible_repairs(weight)), weight.dialect.main
    for repair in tried:
        if _has_reference_values(repair.packed, weight, reference):
            yield repair.cause, repair.says, True
            return
    if weight.right is not None and len({repair.cause for repair in tried}) > 1:
        # With all of it as the reference has it, what cannot be left as it is was wrong.
        whole = weight.right.replace_parts({main: weight.parts[main]})
        if _has_reference_values(whole, weight, reference):
            for repair in tried:
                if not _has_reference_values(
                    _with_fault_of_repair(repair, whole, weight), weight, reference
                ):
                    yield repair.cause, repair.says, True
            return
    for repair in tried:
        if repair.cause in ("scales_missing", "scales_invalid"):
            yield repair.cause, repair.says, False
            return
    if weight.right is not None:
        mine, theirs = weight.parts[main].encoding, weight.right.parts[main].encoding
        if mine != theirs:
            claimed = f"{main} is {mine}; what config.json says has {theirs}"
            yield "packing_claim", claimed, False


def _with_fault_of_repair(
    repair: Repair, whole: PackedWeight, weight: StoredWeight
) -> PackedWeight:
    """Return the sound weight `whole` with one fault put back, the one that `repair` removes."""
    if repair.part is None:
        return whole._replace(config=weight.config or {})
    kept = {suffix: part for suffix, part in whole.parts.items() if suffix != repair.part}
    own = weight.parts.get(repair.part)
    return whole._replace(parts=kept if own is None else {**kept, repair.part: own})


def _has_reference_values(packed: PackedWeight, weight: StoredWeight, reference: Any) -> bool:
    """Return whether a repaired weight decodes to the reference's values.

    Exactly if the reference is packed too, else within the error of quantizing it.
    """
    try:
        values = packed.decode()
        if weight.right is not None:
            theirs = weight.right.decode()
            return theirs.shape == values.shape and theirs.tobytes() == values.tobytes()
        expected = reference()
        if expected is None or expected.shape != values.shape:
            return False
        lattice = packed.lattice(values)
        if lattice is None or not np.isfinite(values).all():
            return False
        return bool(fit_errors(*_known_values(packed, weight, expected, values), lattice).how)
    except AprfmtError:
        return False


def _known_values(
    packed: PackedWeight, weight: StoredWeight, expected: "Array", values: "Array"
) -> tuple["Array", "Array"]:
    """Return (expected, decoded) values, made equal wherever the file's own scale is unusable.

    `packed` has a substitute scale wherever that of `weight` is negative or not finite. Elements
    under such a scale are found by decoding again with it set to zero; their expected values are
    replaced by the decoded ones, so that a comparison ignores them.
    """
    doubled = {}
    for suffix, part in packed.parts.items():
        own, signed = weight.parts.get(suffix), weight.dialect.signed
        if own is None or own.raw is part.raw or not bad_scale_text(suffix, own, signed=signed):
            continue
        bad = bad_scales(own, signed=signed)
        width = len(memoryview(part.raw).cast("B")) // max(bad.size, 1)
        cells = np.frombuffer(part.raw, np.uint8).reshape(-1, width).copy()
        cells[bad] = 0
        doubled[suffix] = part._replace(raw=cells.tobytes())
    if not doubled:
        return expected, values
    without = packed.replace_parts(doubled).decode()
    return np.where(without == values, expected, values), values


def _reference_values(good: Model, weight: StoredWeight) -> "Array | None":
    """Return the reference's values of a weight, float32, by its name or role; None without."""
    view = good.get(weight.name)
    if view is None:
        try:
            bound = bind_names(good.spec, "hf", (weight.name,))
        except ArchError:
            return None
        roles = [g.roles[0] for g in bound.groups if len(g.roles) == 1 and not g.binding.steps]
        view = good.find(roles[0]) if roles else None
    return None if view is None else np.asarray(view.numpy(), np.float32)
