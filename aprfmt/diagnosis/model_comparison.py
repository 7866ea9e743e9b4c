"""Compares two models without a pass: identity, hyperparameters, then tensors.

A and B are the two models, runs or traces that are compared; a *side* is one of them.

Where B's configuration lost a key, or does not declare how its weights are packed, what that does
is measured here too.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aprfmt.base.budget import Budget
from aprfmt.base.metadata_values import short_value
from aprfmt.causes import CAUSES
from aprfmt.causes.contradicted_flags import has_own_head, held_conflicts
from aprfmt.causes.hyperparameters import (
    difference_sentence,
    differing_sub_keys,
    hyper_causes,
    lost_tensors,
    tensors_of_hyperparameter,
)
from aprfmt.causes.restored_keys import find_restored_key, misleading_findings
from aprfmt.compare import diff_models
from aprfmt.compare.diffs import DiffReport
from aprfmt.compare.other_models import explains_vocabulary_size
from aprfmt.diagnosis.flag_findings import add_flag_findings
from aprfmt.diagnosis.records import ALL_ZERO, KINDS, Evidence, Touched
from aprfmt.diagnosis.renumbered_tokens import settle_numbering
from aprfmt.diagnosis.static_findings import Levels, join_counted_copies
from aprfmt.diagnosis.tensors import compare_tensors
from aprfmt.diagnosis.tokenizer_findings import add_tokenizer_findings
from aprfmt.diagnosis.zero_values import zero_tensors_of_model
from aprfmt.errors import AprfmtError
from aprfmt.measure.container_rows import read_by_names_alone
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import EQUAL, FieldDiff, TensorDiff
from aprfmt.model import Model
from aprfmt.model.completeness import list_keys
from aprfmt.model.ledger import LATE
from aprfmt.model.own_keys import is_of_own_keys
from aprfmt.model.packing import packing_config
from aprfmt.model.resolve import ARCH_KEYS, ARCHITECTURE, stated_architecture
from aprfmt.tensors.companions import SECTIONS, quantization_section

_NO_PASS = "forward pass: not needed, all it reads is equal"
_SIZES = ("n_heads", "n_kv_heads", "head_dim")
_FOLLOW = ("value_head_dim", "attn_scale", "rope_dim")  # derived from head_dim if no key gives them


def compare_models(a: Model, b: Model, budget: Budget | None = None) -> Levels:
    """Return the findings on identity, hyperparameters, tensors and tokenizer of two open models.

    `reason` is set where the comparison ended early: other checkpoints or sizes. Zeros on one
    side are a finding; zeros on both sides are compared as any other values, and mentioned.
    Tensors that `budget` has no time for are in the report as not compared.
    """
    found = Levels()
    # A side whose names alone are of another container is read without that container's layout.
    for label, model, made in zip("AB", (a, b), read_by_names_alone(a, b), strict=True):
        if made is not model:
            pair = (made, b) if label == "A" else (a, made)
            found = compare_models(*pair, budget)
            found.models.setdefault(label, made)
            return found
    # A side that cannot be read is read with one key of the other's.
    for good, bad, label in ((a, b, "B"), (b, a, "A")):
        repaired = read_with_restored_key(good, bad, label) or read_with_claim_of(good, bad, label)
        if repaired is not None:
            return _compare_with_repaired(good, repaired, label, budget)
    # Where one side is all zeros, that is the cause, and the same file needs no comparison.
    sides = (("A", a), ("B", b))
    zeros = {label: zero_tensors_of_model(model, budget) for label, model in sides}
    empty = [label for label, count in zeros.items() if count]
    if len(empty) > 1:
        found.evidence.append(Evidence("tensor", ALL_ZERO))
    elif empty:
        says = f"all values of {empty[0]} are zero, in {zeros[empty[0]]} tensors: nothing was "
        says += "written there"
        found.ended = True
        keys = tuple(a if empty == ["A"] else b)
        found.stated.append(
            Finding("stale_tensor", says, "tensor", "bug", keys, False, side=empty[0])
        )
        return found
    for label, model in sides:
        found.evidence += _missing_required(label, model)
    if _is_same_file(a, b):
        found.evidence.append(Evidence("identity", f"A and B are the same file, {a.path.name}"))
        found.checked.append("identity: the same file")
        found.checked += ["hyperparameters: of the same file", "tensors: of the same file"]
        return found
    # Compare the files; each level may end the comparison with a reason.
    report = found.report = diff_models(a, b, only=("tensors", "hyperparameters"), budget=budget)
    found.stated += relation_findings(report)
    found.stated += (one for one in report.contradicted if one.cause == "torch_layout")
    _compare_identity(a, b, report, found)
    if found.reason:
        if found.reason.startswith(KINDS["derived"]):
            add_flag_findings(a, b, found, measured=False)
            add_tokenizer_findings(a, b, found)
        return found
    tensors = {row.key: row for row in report.tensors}
    explained = _compare_hyperparameters(a, b, report, tensors, found)
    if not found.reason:
        compare_tensors(a, b, report, explained, found)
        join_counted_copies(found)
    if found.reason.startswith(KINDS["derived"]):
        add_flag_findings(a, b, found, measured=False)
        add_tokenizer_findings(a, b, found)  # a training explains no other tokenizer or stop
    if not found.reason:
        add_flag_findings(a, b, found)
        add_tokenizer_findings(a, b, found)
        settle_numbering(a, b, found)
        equal = all(row.verdict in EQUAL for row in report.tensors)
        equal = equal and not any(row.state == LATE for row in report.not_compared)
        moved = any(row.name != ARCHITECTURE for row in report.hyperparameters)
        found.unmoved = equal and not found.findings and not moved and a.spec.name == b.spec.name
        if found.unmoved and found.stated:
            found.checked.append(_NO_PASS)
    return found


def relation_findings(report: DiffReport) -> Iterator[Finding]:
    """Yield a finding for each Relation, a renaming without which one side cannot be read.

    Confirmed where with the relation fewer than half of the tensors are on one side only.
    """
    lacking = sum(row.verdict in ("ONLY_IN_A", "ONLY_IN_B") for row in report.tensors)
    after = lacking / max(1, len(report.tensors))
    for one in report.relations:
        side = one.side.upper()
        yield Finding(
            one.cause,
            f"{side}: {one.relation.says}{one.relation.examples_text}",
            "tensor",
            CAUSES[one.cause].verdict,
            one.relation.where,
            after < 0.5,
            "",
            1.0,
            after,
            "share of the tensors that only one side has; before: readers find none of what the "
            "change maps, counted as 1",
            side=side,
            next=one.relation.remedy,
            counted=True,
            proof=unfitted_proof(len(report.tensors), 1.0 - after),
        )


def _architecture_findings(a: Model, b: Model) -> Iterator[Finding]:
    """Yield a finding for each side whose key states another architecture than its tensors have."""
    for label, model, other in (("A", a, b), ("B", b, a)):
        stated = stated_architecture(model)
        if stated == model.spec.name:
            continue
        key, style = ARCH_KEYS[model.key_style][0][1], model.key_style
        right = model.spec.called[style][0]
        if other.spec.name == model.spec.name and stated_architecture(other) == other.spec.name:
            right = str(other.metadata.get(key, right)) if other.key_style == style else right
        says = f"says {short_value(stated)}" if stated else "is not there"
        yield Finding(
            "architecture_key",
            f"{label}: {key} {says}, and the carried config.json and the tensors are those of "
            f"{model.spec.name}: other programs read that key alone",
            "config",
            CAUSES["architecture_key"].verdict,
            (key,),
            True,
            side=label,
            values={key: {"a": a.metadata.get(key), "b": b.metadata.get(key)}},
            next=set_command(model.path, [f"{key}={right}"]),
            proof=unfitted_proof(),
        )


def _is_same_file(a: Model, b: Model) -> bool:
    """Return whether both are the same file in the same folder.

    Snapshots of a hub's cache share weights by links but differ in their config.json, which says
    what the bytes mean.
    """
    folders = {None if each.folder is None else each.folder.path.resolve() for each in (a, b)}
    return a.path.resolve() == b.path.resolve() and len(folders) == 1


def _compare_with_repaired(
    good: Model, repaired: tuple[Model, Finding, Evidence], label: str, budget: Budget | None
) -> Levels:
    """Return the findings on a pair of models of which one is read with a corrected key.

    `repaired` is (that model, the finding on the key, evidence of the error without it), `label`
    its side.
    """
    model, finding, error = repaired
    pair = (good, model) if label == "B" else (model, good)
    found = compare_models(*pair, budget)
    found.stated.insert(0, finding)
    found.evidence.insert(0, error)
    found.models[label] = model
    found.checked = [row for row in found.checked if row != _NO_PASS]
    found.checked.append(f"forward pass: {label} with the key that lets it be read")
    return found


def _missing_required(label: str, model: Model) -> Iterator[Evidence]:
    """Yield evidence of required tensors that a model lacks; `label` is its side."""
    lacking = model.resolution.coverage
    if lacking.accepted:
        yield Evidence(
            "tensor",
            f"{label} lacks {len(lacking.accepted)} of {lacking.expected} tensors that its "
            f"configuration demands: {list_keys(lacking.accepted)}",
            lacking.accepted[:12],
        )


# --- identity ------------------------------------------------------------------------------------


def _compare_identity(a: Model, b: Model, report: DiffReport, found: Levels) -> None:
    """Add evidence on which checkpoint each side is; set `reason` if these are different ones."""
    # What each file is, as evidence.
    for label, model in (("A", a), ("B", b)):
        size = sum(tensor.nbytes for tensor in model.values())
        found.evidence.append(
            Evidence(
                "identity",
                f"{label}: {model.path.name}, {model.format}, {model.spec.name}, {len(model)} "
                f"tensors, {size} bytes{_named_source(model)}",
            )
        )
    found.checked.append("identity: architecture, tensor count")
    if report.taken:
        found.reason = f"{KINDS['derived']}: {report.taken}"
        found.add(report.findings[0], Touched((), ()))
    elif report.other_model:
        found.end_with_other_model(report.other_model)


def _named_source(model: Model) -> str:
    """Return ", made from FILE" if the metadata name the source file, else ""."""
    name, digest = (model.metadata.get(f"aprfmt.source.{key}") for key in ("file", "sha256"))
    if not isinstance(name, str):
        return ""
    return f", made from {name}" + (
        f" (SHA-256 {digest[:12]}...)" if isinstance(digest, str) else ""
    )


# --- hyperparameters -----------------------------------------------------------------------------


def _compare_hyperparameters(
    a: Model, b: Model, report: DiffReport, tensors: Mapping[str, TensorDiff], found: Levels
) -> set[str]:
    """Add findings on differing hyperparameters; return the keys of tensors they explain."""
    # Remove what is no difference of the pass: padding, names, unused lengths.
    found.checked.append("hyperparameters: every one that changes the forward pass, with origin")
    for label, model in (("A", a), ("B", b)):
        for conflict in held_conflicts(model.resolution):
            found.evidence.append(Evidence("config", f"{label}: {conflict}"))
    rows = {row.name: row for row in report.hyperparameters}
    if explains_vocabulary_size(report.tensors):
        rows.pop("vocab_size", None)
    if rows.pop(ARCHITECTURE, None) is not None:
        if a.spec.name != b.spec.name:
            text = f"A is read as {a.spec.name}, B as {b.spec.name}"
            found.evidence.append(Evidence("config", text, (ARCHITECTURE,)))
        found.stated += _architecture_findings(a, b)
    of_keys = [row for row in rows.values() if is_of_own_keys(row)]
    for row in of_keys:
        del rows[row.name]
    found.stated += misleading_findings(a, b, [row for row in of_keys if row.decisive])
    if not any(
        hyper_causes().get(name) == "rope_scaling" and name != "context_length" for name in rows
    ) and not _differs_by_length(a, b):
        rows.pop("context_length", None)
    # One finding per cause, with the tensors whose shapes follow from it.
    explained: set[str] = set()
    for cause, names in _group_by_cause(rows).items():
        chosen = [rows[name] for name in names]
        keys = tuple(key for name in names for key in tensors_of_hyperparameter(name, tensors))
        if cause == "tied_embedding" and (
            _output_heads_agree(tensors) or not any(map(has_own_head, (a, b)))
        ):
            for row in chosen:
                text = difference_sentence(row) + "; the stored head is a copy of the embedding"
                found.evidence.append(Evidence("config", text, (row.name,)))
            continue
        if cause == "tied_embedding" and "output.weight" in tensors:
            keys = (*keys, "output.weight")
        explained |= set(keys)
        sentences = [difference_sentence(row, a, b) for row in chosen]
        for row, text in zip(chosen, sentences, strict=True):
            found.evidence.append(Evidence("config", text, (row.name, *keys[:6])))
        if not cause:
            found.end_with_other_model("other sizes or kinds of block: " + "; ".join(sentences))
            return explained
        parts = tuple(key for row in chosen for key in differing_sub_keys(row))
        lost = tuple(key for row in chosen for key in lost_tensors(row.name, a, b))
        found.add(
            Finding(
                cause,
                "; ".join(sentences),
                "config",
                CAUSES[cause].verdict,
                (*lost, *parts, *names, *keys),
                False,
                values={row.name: {"a": row.a, "b": row.b} for row in chosen},
                side=_side_with_default(chosen),
            ),
            Touched(tuple(names), tuple(dict.fromkeys(keys))),
        )
    return explained


def _differs_by_length(a: Model, b: Model) -> bool:
    """Return whether a model has dynamic rope scaling, whose frequencies depend on the length."""
    scalings = [model.hyper["rope_scaling"] for model in (a, b)]
    return any(row is not None and row["type"] == "dynamic" for row in scalings)


def _output_heads_agree(tensors: Mapping[str, TensorDiff]) -> bool:
    """Return whether both sides store an output head, and these are equal or within rounding."""
    head = tensors.get("output.weight")
    return head is not None and head.verdict in (*EQUAL, "WITHIN")


def _side_with_default(rows: Sequence[FieldDiff]) -> str:
    """Return the side ("A" or "B") that uses a default where the other states a value, or "".

    "" where both do so, each for some hyperparameter, or neither does.
    """
    sides = {
        "B" if row.origin_b.startswith("default") else "A"
        for row in rows
        if row.origin_a.startswith("default") != row.origin_b.startswith("default")
    }
    return sides.pop() if len(sides) == 1 else ""


def _group_by_cause(rows: Mapping[str, FieldDiff]) -> dict[str, list[str]]:
    """Return {cause: names of differing hyperparameters}; "" has those of no known cause.

    A default derived from the head counts is grouped with them where they differ too.
    """
    found: dict[str, list[str]] = {}
    heads = any(name in rows for name in _SIZES)
    for name, row in rows.items():
        cause = hyper_causes().get(name, "")
        if heads and name in _FOLLOW and "default" in (row.origin_a + row.origin_b):
            cause = "gqa_mapping"
        found.setdefault(cause, []).append(name)
    return found


def read_with_restored_key(
    good: Model, bad: Model, label: str
) -> tuple[Model, Finding, Evidence] | None:
    """Return (`bad` read with one key of `good`'s config.json, finding, evidence), or None.

    None where there is no such key (`find_restored_key`); confirmed if the
    logits agree. `label` is the side of `bad`.
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

    Both passes use `good`'s weights; the distance is infinite if they do not fit the sizes of
    `made`.
    """
    from aprfmt.diagnosis.finding_effects import make_run_pair
    from aprfmt.diagnosis.flag_effects import compute_logits
    from aprfmt.inference.probe_ids import choose_ids
    from aprfmt.inference.replay.patched_model import PatchedModel
    from aprfmt.measure.distances import rel_l2

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


# Relative L2 below which a weight that is read by the other side's claim is that weight: codes that
# are read as something else are as far away as unrelated values, which is sqrt(2).
_NEAR = 0.5
_TRIED = 12  # weights that are read by the claim, of however many there are


def read_with_claim_of(
    good: Model, bad: Model, label: str
) -> tuple[Model, Finding, Evidence] | None:
    """Return (`bad` read with the packing that `good` declares, finding, evidence), or None.

    None where `bad` declares a packing itself, or not all of `good`'s packed weights decode in it
    by that declaration. `label` is the side of `bad`.
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
    from aprfmt.measure.distances import rel_l2

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
    """Return the name of the stored tensor that has a weight's codes: its largest tensor."""
    parts = model[name].stored[0].parts
    return max(parts.values(), key=lambda part: part.info.nbytes).info.name
