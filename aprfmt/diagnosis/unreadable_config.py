"""Measures what the lost or changed key of a configuration does to the logits."""

import math
from dataclasses import replace

from aprfmt.causes.restored_keys import find_restored_key
from aprfmt.diagnosis.finding_effects import make_run_pair
from aprfmt.diagnosis.flags import compute_logits
from aprfmt.diagnosis.records import Evidence
from aprfmt.errors import AprfmtError
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model import Model


def read_with_restored_key(
    good: Model, bad: Model, label: str
) -> tuple[Model, Finding, Evidence] | None:
    """Return (`bad` read with one key of `good`'s config.json, finding, evidence), or None.

    None where there is no such key (`find_restored_key`); confirmed if the logits agree. `label` is
    the side of `bad`.
    """
    found = find_restored_key(good, bad, label)
    if found is None:
        return None
    away, bound = _logit_distance(good, found.model)
    other = "A" if label == "B" else "B"
    finding = replace(
        found.finding(),
        confirmed=away <= bound,
        residual_before=1.0,
        residual_after=away,
        of=f"logits of {other}'s weights under {label}'s configuration; before: there are none, "
        f"counted as 1; after: with {other}'s {'.'.join(found.path)}",
        counted=True,
        proof=unfitted_proof() if away <= bound else None,
    )
    return found.model, finding, Evidence("config", found.error)


def _logit_distance(good: Model, made: Model) -> tuple[float, float]:
    """Return (relative L2 between the logits under both configurations, its tolerance).

    Both passes use `good`'s weights; infinite if the sizes of `made` do not fit these.
    """
    ids = choose_ids([good.hyper, made.hyper], long=False)
    bound = make_run_pair(good, made).threshold_of("logits", ("float32", "float32")).rel_l2
    mine = PatchedModel.unpatched(good, ids, "float32")
    reference = compute_logits(mine)
    try:
        read = compute_logits(
            replace(PatchedModel.unpatched(good, ids, "float32"), spec=made.spec, hp=made.hyper)
        )
    except (AprfmtError, ValueError, IndexError):
        return math.inf, bound  # sizes that do not fit the weights
    return rel_l2(read, reference), bound
