"""Compares the stored tensors of two models and makes findings of their differences.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

import math
import shlex
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.sequences import join_first
from aprfmt.causes import CAUSES
from aprfmt.causes.tensor.token_tables import common_rows
from aprfmt.causes.tensor.unwritten_tail import unwritten_tails
from aprfmt.compare.diffs import DiffReport
from aprfmt.diagnosis.records import KINDS, Evidence, Touched
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import Proof, unfitted_proof
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model
from aprfmt.model.completeness import roles_without_place
from aprfmt.model.ledger import (
    OF_TENSORS,
    SIDES,
    NotCompared,
    make_ledger,
    one_sided_tensors,
    tensor_outside_tower,
)
from aprfmt.model.towers import names_outside_tower

if TYPE_CHECKING:
    from aprfmt.model.unsupported_packing import UndecodedPacking

SECOND_LAYOUTS = ("stored_twice", "stale_layout")  # findings of `diff` on tensors of one side
SHOWN = 4  # errors of tensors that cannot be read


def compare_tensors(
    a: Model, b: Model, report: DiffReport, explained: set[str], found: Levels
) -> None:
    """Add findings on differing tensors to `found`; set `found.reason` if the comparison ends.

    `explained` are keys of tensors that differing hyperparameters explain.
    """
    # Evidence: how many tensors have which verdict.
    counts = {name: count for name, count in report.counts.items() if count}
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    found.evidence.append(Evidence("tensor", f"{len(report.tensors)} tensors: {listed}"))
    found.checked.append(f"tensors: bytes, then values of all {len(report.tensors)}")
    # Unreadable tensors end the comparison, unless the fault is found.
    misread = _add_packing_faults(a, b, report.tensors, found)
    misread |= _leave_undecoded(a, b, report.tensors, found)
    unreadable = [row.key for row in report.tensors if row.verdict == "UNREADABLE"]
    if not misread.issuperset(unreadable):
        found.reason = f"{len(unreadable)} tensors cannot be read: {', '.join(unreadable[:3])}"
        return
    found.not_checked += report.not_tried
    found.evidence += nonfinite_tensors(report.tensors)
    # Findings: missing roles, explained tensors, coarser copies, then the rest.
    explained = explained | misread
    rows = [row for row in report.tensors if row.key not in explained]
    missing = [row for row in rows if row.verdict in ("ONLY_IN_A", "ONLY_IN_B")]
    _add_missing_tensors(a, b, missing, found)
    done = _add_lost_companions(a, b, rows, found)
    named: set[str] = set()
    for finding in report.findings:
        if finding.cause in SECOND_LAYOUTS:
            found.add(finding, Touched())
            named.update(finding.keys)
    done |= named
    derived: list[tuple[Finding, Touched]] = []
    for finding in unwritten_tails(a, b, rows):
        found.add(finding, Touched((), finding.where))
        done |= set(finding.where)
    for finding, part in explained_findings(report, explained | done):
        done |= set(part.keys)
        if finding.verdict == "not_comparable":
            derived.append((finding, part))
        else:
            found.add(_check_stale(a, b, finding, part, found), part)
    for finding, part in coarser_copies(rows):
        found.add(finding, part)
    left = [
        row for row in rows if row.verdict in ("DIFFERENT", "SHAPE_DIFFERS") and row.key not in done
    ]
    if left:
        finding, part = _unexplained_finding(left)
        found.add(_check_stale(a, b, finding, part, found), part)
    # A pass shows a fault though tables have rows of more tokens, but not after a training.
    grown = all(finding.residual_before == 0 for finding, _ in derived)
    has_fault = grown and any(finding.verdict == "bug" for finding in found.findings)
    for finding, part in derived:
        found.add(replace(finding, verdict="same") if has_fault else finding, part)
    if derived and not has_fault:
        found.reason = f"{KINDS['derived']}: {'; '.join(finding.says for finding, _ in derived)}"
    _add_extra_tensors(a, b, missing, found, named)


def _leave_undecoded(a: Model, b: Model, rows: Sequence[TensorDiff], found: Levels) -> set[str]:
    """Record tensors that no codec decodes as not compared; return their keys."""
    reasons = {one.unread.why_not_compared for one in (a, b) if one.unread is not None}
    held = [row for row in rows if row.verdict == "UNREADABLE" and row.cause in reasons]
    if held:
        found.ended = True
        found.not_checked.append(f"forward pass: {held[0].cause}")
        found.left += tuple(NotCompared("tensor", row.key, "unreadable", row.cause) for row in held)
    return {row.key for row in held}


def _add_packing_faults(a: Model, b: Model, rows: Sequence[TensorDiff], found: Levels) -> set[str]:
    """Add findings on packed weights that do not decode, or decode to another shape.

    Returns the keys of the weights that they explain, all of one model: the other is the reference.
    """
    for good, bad, label in ((a, b, "B"), (b, a, "A")):
        broken = [
            row
            for row in rows
            if row.verdict == "UNREADABLE" or _is_packed_of_other_shape(bad, row)
        ]
        names = [row.name_b if label == "B" else row.name_a for row in broken]
        if not broken:
            continue
        from aprfmt.diagnosis.packing import examine_packed

        fault = examine_packed(good, bad, label, names)
        if fault is None:
            continue
        found.evidence += [Evidence("tensor", row.cause, (row.key,)) for row in broken[:SHOWN]]
        found.evidence += fault.evidence
        for finding in fault.findings:
            found.add(finding, Touched((), finding.where))
        found.ended = not fault.left
        found.not_checked.append(f"forward pass: packed weights of {label} do not decode")
        return {row.key for row, name in zip(broken, names, strict=True) if name not in fault.left}
    return set()


def _is_packed_of_other_shape(model: Model, row: TensorDiff) -> bool:
    """Return whether a weight has another shape in each model and is stored packed in `model`.

    A packed weight's shape is computed from its codes by the configuration, which may be wrong.
    """
    view = model.find(row.key) if row.verdict == "SHAPE_DIFFERS" else None
    return view is not None and any(one.packed is not None for one in view.stored)


def nonfinite_tensors(rows: Sequence[TensorDiff]) -> Iterator[Evidence]:
    """Yield evidence of tensors with NaN or infinities; those on one side only come first."""
    odd = [
        (row.key, row.stats.nonfinite)
        for row in rows
        if row.stats is not None and row.stats.nonfinite is not None
    ]
    for key, found in sorted(odd, key=lambda one: not one[1].alone):
        yield Evidence("tensor", f"{key}: {found.text()}", (key,), float(found.alone))


def _check_stale(a: Model, b: Model, finding: Finding, part: Touched, found: Levels) -> Finding:
    """Return the finding; one of stale tensors is confirmed if each looks trained, not damaged.

    Findings of other causes and confirmed ones are returned as they are. Evidence on each tensor
    is added to `found`.
    """
    if finding.cause != "stale_tensor" or finding.confirmed:
        return finding
    from aprfmt.causes.tensor.foreign_values import judge_foreign

    sure = True
    for key in part.keys:
        x, y = a.find(key), b.find(key)
        if x is None or y is None:
            return finding
        sides = RowReader(x), RowReader(y)
        judged = judge_foreign(*(common_rows(key, *sides) or sides))
        found.evidence.append(Evidence("tensor", f"{key}: {judged.says}", (key,)))
        sure = sure and judged.sure
    if not sure:
        found.evidence.append(
            Evidence(
                "tensor",
                "the other side's tensor removes the difference, but this is true of any damage: "
                "stale_tensor is not confirmed",
                part.keys,
            )
        )
    # A's tensor removes any damage: it shows where, never what.
    return replace(finding, confirmed=sure, proof=None)


def _add_missing_tensors(a: Model, b: Model, rows: Sequence[TensorDiff], found: Levels) -> None:
    """Add findings on tensors that a forward pass reads and one side lacks.

    A pass can be run without missing biases, not without other tensors.
    """
    for label in ("ONLY_IN_A", "ONLY_IN_B"):
        side = "B" if label == "ONLY_IN_A" else "A"
        keys = [row.key for row in rows if row.verdict == label and _is_role_of_pass(a, b, row.key)]
        has, lacks = (a, b) if side == "B" else (b, a)
        stored = has.roles
        placeless = roles_without_place(has, lacks).intersection(keys) if keys else ()
        if placeless:
            why = f"{lacks.format} has no name for it, and no pass reads it"
            found.left += tuple(
                NotCompared("tensor", key, "no counterpart", why, "A" if side == "B" else "B")
                for key in keys
                if key in placeless
            )
            keys = [key for key in keys if key not in placeless]
        # A bias that went with weights is lost with them: that is one loss, not two.
        biases = tuple(
            key for key in keys if key.endswith(".bias") and not _is_lost_with(key, keys, stored)
        )
        if biases:
            found.add(
                Finding(
                    "missing_bias",
                    f"{side} lacks {len(biases)} biases of the other's: {', '.join(biases[:4])}",
                    "tensor",
                    "bug",
                    biases,
                    False,
                    side=side,
                ),
                Touched((), biases),
            )
        # Without other tensors no pass can be run, and what was compared is the answer.
        others = [key for key in keys if key not in biases]
        others.sort(key=lambda key: split_key(key)[0] is not None)  # those of no layer come first
        model = b if side == "B" else a
        if others and not (model.unread is not None and model.unread.lacks):
            found.evidence.append(
                Evidence("tensor", f"{side} lacks {len(others)} tensors", tuple(others[:12]))
            )
            found.ended = True
            found.not_checked.append(f"forward pass: {side} lacks tensors that it reads")
            places = _tensors_large_enough(a, b, rows, side, others)
            known = not places
            shown = join_first(places, 2)
            maybe = "" if known else f"; their values may be in tensors of no role: {shown}"
            found.stated.append(
                Finding(
                    "missing_tensors",
                    f"{side} lacks {len(others)} of the tensors: {', '.join(others[:4])}"
                    + (", ..." if len(others) > 4 else "")
                    + maybe,
                    "tensor",
                    CAUSES["missing_tensors"].verdict,
                    tuple(others),
                    known,
                    "",
                    1.0,
                    0.0,
                    "share of these that miss; after: with the other side's in their place",
                    side=side,
                    proof=unfitted_proof(len(others)) if known else None,
                    counted=True,
                )
            )


def _is_lost_with(bias: str, lost: Sequence[str], stored: Collection[str]) -> bool:
    """Return whether a bias is lost with its weight, with its part of a layer, or with its layer.

    `lost` are the keys that a side lacks, `stored` all of the other side. A part are the weights
    whose roles begin with the same word, as `ssm_` does.
    """
    if f"{bias.removesuffix('.bias')}.weight" in lost:
        return True
    layer, role = split_key(bias)
    part = f"{role.partition('_')[0]}_"
    own = [key for key in stored if split_key(key)[0] == layer and not key.endswith(".bias")]
    alike = [key for key in own if split_key(key)[1].startswith(part)]
    return layer is not None and any(
        bool(keys) and all(key in lost for key in keys) for keys in (own, alike)
    )


def _tensors_large_enough(
    a: Model, b: Model, rows: Sequence[TensorDiff], side: str, missing: Sequence[str]
) -> list[str]:
    """Return the tensors that only `side` has and no pass reads, as large as a missing one.

    The missing ones may be among them, under another name, joined, or in another layout.
    """
    model, other = (b, a) if side == "B" else (a, b)
    views = [view for key in missing if (view := other.find(key)) is not None]
    least = min((math.prod(view.shape) for view in views), default=0)
    alone = [
        row.key
        for row in rows
        if row.verdict == f"ONLY_IN_{side}" and not _is_role_of_pass(a, b, row.key)
    ]
    found = [(key, model.find(key)) for key in alone]
    return [key for key, view in found if view is not None and math.prod(view.shape) >= least > 0]


def lost_companions_finding(model: Model, side: str) -> Finding:
    """Return the finding that a model stores codes without their scales or zero points.

    `model.unread` names them; `side` is "A" or "B".
    """
    assert model.unread is not None
    where = tuple(sorted(model.unread.weights))
    says = f"{side}: {model.unread.text}"
    return Finding("scales_missing", says, "tensor", "bug", where, False, side=side)


def _add_lost_companions(a: Model, b: Model, rows: Sequence[TensorDiff], found: Levels) -> set[str]:
    """Add findings that a side stores codes without their scales, so that no pass can run.

    Returns the keys of the tensors that they explain.
    """
    for side, model in zip(SIDES, (a, b), strict=True):
        if model.unread is not None and model.unread.lacks:
            finding = lost_companions_finding(model, side)
            found.add(finding, Touched((), finding.where))
            found.ended = True
            found.not_checked.append(f"forward pass: the codes of {side} do not decode")
    return {
        row.key
        for row in rows
        if row.explanation is not None and row.explanation.cause == "scales_missing"
    }


def _is_role_of_pass(a: Model, b: Model, key: str) -> bool:
    """Return whether a forward pass of either model reads this role; a draft head's are not."""
    from aprfmt.model.draft import is_draft_head

    return any(key in model.roles and not is_draft_head(model, [key]) for model in (a, b))


def _add_lost_codes(
    side: str, keys: Sequence[str], packing: "UndecodedPacking", found: Levels
) -> None:
    """Add to `found` that one side lacks tensors of weights that both store as undecoded codes.

    `side` ("A" or "B") is the one that has them. `keys` are the tensors that only this side has,
    `packing` its undecoded weights.
    """
    held = {tensor.name for tensor in packing.tensors}
    lost = tuple(key for key in keys if key in held)
    if not lost:
        return
    other = "B" if side == "A" else "A"
    many = "1 tensor" if len(lost) == 1 else f"{len(lost)} tensors"
    of = f"packed by {packing.method!r}" if packing.method else "in codes"
    says = f"{other} lacks {many} of the weights {of}: {join_first(lost, 4)}"
    verdict = CAUSES["missing_tensors"].verdict
    proof = unfitted_proof(len(lost))
    found.add(
        Finding(
            "missing_tensors", says, "tensor", verdict, lost, True, side=other, proof=proof,
        ),
        Touched(),
    )  # fmt: skip


def _add_extra_tensors(
    a: Model, b: Model, rows: Sequence[TensorDiff], found: Levels, named: AbstractSet[str]
) -> None:
    """Add to `found` the findings on tensors that one side has and the architecture does not read.

    Left out are codes of undecoded packed weights, and the keys in `named`, which have a finding.
    """
    name = a.spec.name
    others = {*names_outside_tower(a, b), *names_outside_tower(b, a)}
    for side in SIDES:
        label = f"ONLY_IN_{side}"
        unread, other = (a.unread, b.unread) if side == "A" else (b.unread, a.unread)
        codes = {tensor.name for tensor in unread.tensors} if unread else set()
        if unread and other:
            _add_lost_codes(side, [row.key for row in rows if row.verdict == label], unread, found)
        # Roles of a pass are judged elsewhere, and codes of undecoded weights too.
        keys = [
            row.key
            for row in rows
            if row.verdict == label and row.key not in codes and not _is_role_of_pass(a, b, row.key)
        ]
        if not keys:
            continue
        ledger = make_ledger(a if side == "A" else b, OF_TENSORS)
        outside = one_sided_tensors([key for key in keys if key in others], side, ledger)
        found.left += tuple(map(tensor_outside_tower, outside))
        keys = [key for key in keys if key not in others]
        if not keys:
            continue
        # They are a difference of the files, though not of the pass.
        unnamed = tuple(key for key in keys if key not in named)
        many = f"{len(unnamed)} tensor{'s' if len(unnamed) > 1 else ''}"
        shown = join_first(unnamed, 4)
        if unnamed:
            found.add(
                Finding(
                    "extra_tensor",
                    f"{side} has {many} that the other has not and {name} does not read: {shown}",
                    "tensor",
                    CAUSES["extra_tensor"].verdict,
                    unnamed,
                    True,
                    side=side,
                ),
                Touched(),
            )
        _add_lost_draft(a, b, side, keys, found)
        # What no table lists may carry meaning: the verdict names it, unless it is accepted.
        found.left += one_sided_tensors(keys, side, ledger, f"{name} does not read it")
        if unnamed:
            found.not_checked.append(
                f"{shown}: only in {side}, and no part of {name}; what another engine makes of it "
                "is not known"
            )


def _add_lost_draft(a: Model, b: Model, side: str, keys: Sequence[str], found: Levels) -> None:
    """Add the finding that the other side's key states a draft head whose tensors it lost.

    `keys` are the tensors that only `side` has.
    """
    from aprfmt.model.draft import contradicted_draft, is_draft_head

    model, other = (a, b) if side == "A" else (b, a)
    lost = [key for key in keys if is_draft_head(model, [key])]
    claim = contradicted_draft(other) if lost else None
    if claim is None or claim.stored:
        return
    label = "B" if side == "A" else "A"
    many = f"{len(lost)} tensor{'s' if len(lost) > 1 else ''}"
    command = set_command(other.path, [shlex.quote(one) for one in claim.setting])
    found.add(
        Finding(
            "config_sizes",
            f"{label}'s {claim.says}; {side} has the {many} of it, such as {lost[0]}",
            "config",
            CAUSES["config_sizes"].verdict,
            (claim.key,),
            True,
            side=label,
            proof=unfitted_proof(),
            next=command if label == "B" else "",
        ),
        Touched(),
    )


def explained_findings(
    report: DiffReport, explained: set[str]
) -> Iterator[tuple[Finding, Touched]]:
    """Yield (finding, hyperparameters and keys it is about) of a report's explained tensors.

    Left out are findings whose tensors are all in `explained`, or whose cause is not in CAUSES.
    """
    if not report.findings:
        return
    from aprfmt.causes.tensor.summary import add_measurements

    by_key = {row.key: row for row in report.tensors}
    for finding in report.findings:
        rows = [by_key[key] for key in finding.keys if key not in explained]
        if rows and finding.cause in CAUSES:
            alone = all(row.explanation is None for row in rows)  # found of several tensors at once
            found = finding if alone else add_measurements(finding, rows)
            yield found, Touched(CAUSES[found.cause].explains, found.keys)


def coarser_copies(rows: Sequence[TensorDiff]) -> Iterator[tuple[Finding, Touched]]:
    """Yield (finding, keys it is about) for tensors that A or B has in a coarser encoding.

    They agree within that encoding's rounding. One finding per cause and encoding.
    """
    # Group by cause and coarser encoding.
    groups: dict[tuple[str, str], list[TensorDiff]] = {}
    for row in rows:
        if row.verdict == "WITHIN":
            coarser = min((row.encoding_a, row.encoding_b), key=_bits_per_weight)
            cause = "quantisation" if _has_blocks(coarser) else "rounding"
            groups.setdefault((cause, coarser), []).append(row)
    # One finding each, with the largest distance and the most steps.
    for (cause, coarser), chosen in groups.items():
        keys = tuple(row.key for row in chosen)
        worst = max((row.stats.rel_l2 for row in chosen if row.stats is not None), default=None)
        off = max((row.steps_off for row in chosen if row.steps_off is not None), default=None)
        steps = "" if off is None else f", at most {off:.3g} steps apart"
        yield (
            Finding(
                cause,
                f"{len(chosen)} tensors are {coarser} on one side, within its rounding{steps}",
                "tensor",
                "precision",
                keys,
                True,
                residual_before=worst,
                residual_after=0.0,
                of="stored values beyond one step",
                values={"encoding": coarser, "steps": off},
                # The steps of blocks are those of the copy; a float type's unit is its own.
                proof=Proof(len(keys), 1.0, 0, math.inf, accused=cause == "quantisation"),
            ),
            Touched((), keys),
        )


def _bits_per_weight(name: str) -> float:
    """Return the bits a weight takes in an encoding."""
    return encoding_row(name.split("+")[0]).bits_per_weight


def _has_blocks(name: str) -> bool:
    """Return whether an encoding stores values in blocks with scales."""
    return encoding_row(name.split("+")[0]).block_size != 1


def _unexplained_finding(rows: Sequence[TensorDiff]) -> tuple[Finding, Touched]:
    """Return (finding, keys it is about) of all tensors that differ without an explanation."""
    keys = tuple(row.key for row in rows)
    worst = max((row.stats.rel_l2 for row in rows if row.stats is not None), default=None)
    return (
        Finding(
            "stale_tensor",
            f"{len(rows)} tensors have other values, {_relation_words(rows)}: "
            f"{', '.join(keys[:3])}",
            "tensor",
            "bug",
            keys,
            False,
            residual_before=worst,
            of="stored values",
        ),
        Touched((), keys),
    )


def _relation_words(rows: Sequence[TensorDiff]) -> str:
    """Return in words how far unexplained tensors correlate with the other side's.

    Vectors are left out, as those of norms are all near one.
    """
    from aprfmt.causes.tensor.derived_weights import RELATED, floor_text

    related = [
        row.stats.cosine
        for row in rows
        if row.stats is not None
        and row.shape_a is not None
        and len(row.shape_a) > 1
        and row.stats.cosine > RELATED
    ]
    if not related:
        return "which nothing relates to the other side's"
    many = f"of which {len(related)} belong" if len(related) < len(rows) else "which belong"
    return f"{many} to the other side's (correlation {floor_text(min(related))})"
