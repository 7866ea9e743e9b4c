"""Packed weights that B's config.json does not declare, read by A's declaration."""

from dataclasses import replace

from aprfmt.diagnosis.records import Evidence
from aprfmt.errors import AprfmtError
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model
from aprfmt.model.packing import packing_config
from aprfmt.tensors.companions import SECTIONS, quantization_section

# Relative L2 below which a weight that is read by the other side's claim is that weight: codes that
# are read as something else are as far away as unrelated values, which is sqrt(2).
_NEAR = 0.5
_TRIED = 12  # weights that are read by the claim, of however many there are


def read_with_claim_of(
    good: Model, bad: Model, label: str
) -> tuple[Model, Finding, Evidence] | None:
    """Return (`bad` read with the packing that `good` declares, finding, evidence), or None.

    None where `bad` declares how its weights are packed, holds other tensors than `good`'s packed
    weights, or does not decode by that declaration. `label` is the side of `bad`.
    """
    # `bad` must declare no packing, and `good` must.
    config = None if bad.folder is None else bad.folder.config
    section, own = (quantization_section(packing_config(side) or {}) for side in (good, bad))
    lacks = "config.json says nothing of packing"
    if own is not None:
        lacks = "" if bad.unread is None else bad.unread.claim
    if section is None or config is None or bad.folder is None or not lacks:
        return None
    # No weight of `bad` may be read as packed yet.
    names = _packed_names(good)
    if not names or _packed_names(bad):
        return None
    # Read `bad` by the other side's claim: its weights must come near.
    folder = replace(bad.folder, config={**config, SECTIONS[0]: section})
    try:
        made = Model(bad.source, folder, allow_missing=bad.allow_missing)
        if not names <= _packed_names(made):
            return None
        tried = sorted(names)[:_TRIED]
        away = max(rel_l2(made[name].numpy(), good[name].numpy()) for name in tried)
    except AprfmtError:
        return None
    # The missing claim is the finding.
    other = "A" if label == "B" else "B"
    where = tuple(sorted(names))
    method = section.get("quant_method", "unnamed")
    share = len(tried) / len(where)
    finding = Finding(
        "packing_claim", f"{label}: {lacks}; {len(where)} of its weights are packed as {other}'s "
        f"are, whose method is {method!r}: {label} needs what {other} says of them",
        "tensor", "bug", where, away < _NEAR, "", 1.0, away,
        f"the furthest of {len(tried)} weights from {other}'s; before: none is read, counted as 1; "
        f"after: by {other}'s claim", {SECTIONS[0]: {other.lower(): dict(section)}}, label,
        counted=True, proof=unfitted_proof(len(where), share) if away < _NEAR else None,
    )  # fmt: skip
    codes = bad.source.tensors[_codes_name(good, where[0])].info
    said = (
        f"{label}: {codes.name} is {codes.encoding} {list(codes.shape)}, and nothing says of what"
    )
    return made, finding, Evidence("tensor", said, where[:_TRIED])


def _packed_names(model: Model) -> set[str]:
    """Return the names of weights that are read from several stored tensors by a declaration."""
    return {name for name, view in model.items() if view.stored[0].packed is not None}


def _codes_name(model: Model, name: str) -> str:
    """Return the name of the stored tensor that holds a weight's codes: its largest part."""
    parts = model[name].stored[0].parts
    return max(parts.values(), key=lambda part: part.info.nbytes).info.name
