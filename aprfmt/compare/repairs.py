"""What repairs B, by what `diff` found: the causes with their remedies, and the next commands."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.causes import CAUSES
from aprfmt.causes.general import missing_tensors_finding
from aprfmt.causes.remedies import has_weights, is_repaired_by_rewriting
from aprfmt.measure.findings import Finding
from aprfmt.measure.item_repairs import (
    inspect_unreadable_command,
    repair_items_command,
    surplus_commands,
)
from aprfmt.measure.named_causes import (
    REWRITES,
    NamedCause,
    completed_command,
    overflows_encoding,
    rewrite_command,
    set_command,
)
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import ONE_SIDED
from aprfmt.model.ledger import LATE

if TYPE_CHECKING:
    from aprfmt.compare.diffs import DiffReport


def named_causes(report: "DiffReport") -> tuple[NamedCause, ...]:
    """Return all causes that were found, as NamedCause, in the order in which a report names them.

    The order: lost tensors that a relation of names leaves, relations of B's names,
    contradicted statements, causes seen in tensors, relations of A's names. Relations that only
    say that both sides name tensors differently come after the faults of values.
    """
    related = [
        Finding(
            one.cause,
            f"{one.side.upper()}: {one.relation.says}{one.relation.examples_text}",
            "tensor",
            "bug",
            one.relation.where,
            True,
            next=one.relation.remedy,
            proof=unfitted_proof(len(report.tensors), 1.0 - _one_sided_share(report)),
        ).to_named_cause({})
        for one in report.relations
    ]
    of_a = [cause for cause, one in zip(related, report.relations, strict=True) if one.side == "a"]
    no_fault = [
        cause
        for cause, one in zip(related, report.relations, strict=True)
        if one.between and one.side == "b"
    ]
    rows = [one.to_named_cause({}) for one in report.lost_after_relations]
    rows += [one for one in related if one not in of_a and one not in no_fault]
    rows += [one.to_named_cause(report.stored) for one in report.contradicted]
    before = len(rows)
    for one in report.findings:
        mends = is_repaired_by_rewriting(one.cause, one.confirmed, one.values)
        mends = mends and CAUSES[one.cause].verdict == "bug"
        mends = mends and one.cause not in report.own_parts and one.side != "A"
        mends = mends and not one.leaves_side_open
        command = (
            one.next
            or _own_key_command(report, one.cause)
            or (report.rewriting_command if mends else "")
        )
        rows.append(replace(one, next=command).to_named_cause(report.stored))
        if CAUSES[one.cause].verdict == "bug":
            before = len(rows)
    rows[before:before] = no_fault
    return tuple(
        one
        if one.remedy is None or _can_run(report, one.remedy.command)
        else replace(one, remedy=None)
        for one in (*rows, *of_a)
    )


def lost_tensors(report: "DiffReport") -> tuple[Finding, ...]:
    """Return the tensors that B lacks with all relations applied, as a finding.

    () without a relation of names. One that maps all other names would hide them.
    """
    lost = tuple(row.key for row in report.tensors if row.verdict == "ONLY_IN_A")
    if not (lost and report.relations):
        return ()
    return (missing_tensors_finding(lost),)


def _one_sided_share(report: "DiffReport") -> float:
    """Return the fraction of tensors, 0 to 1, that only one side has with all relations applied."""
    alone = sum(tensor.verdict in ONE_SIDED for tensor in report.tensors)
    return alone / max(1, len(report.tensors))


def _can_run(report: "DiffReport", command: str) -> bool:
    """Return whether a command runs on these files.

    No command changes a state dict, and none writes a damaged side anew. A command that writes
    the model next to a state dict runs.
    """
    words = shlex.split(command)
    changed = Path(words[2])
    if words[1] in REWRITES and not _is_whole(report, words[2]):
        return False
    return not report.is_state or Path(report.b) not in (changed, *changed.parents)


def _is_whole(report: "DiffReport", path: str) -> bool:
    """Return whether the side at a path, or in a folder, has nothing damaged or missing."""
    return all(Path(path) not in (Path(side), *Path(side).parents) for side in report.unwhole)


def _own_key_command(report: "DiffReport", cause: str) -> str:
    """Return the command that sets a key of B to what B's tensors show; "" if none is wrong."""
    value = report.own_values.get(CAUSES[cause].own_key)
    return set_command(report.b, [value]) if value else ""


def rewriting_command(report: "DiffReport") -> str:
    """Return the command that writes B again from A in B's encodings; "" if none does.

    "" too if A is damaged, incomplete or B's tower alone, if B was trained further, and if B is
    the state of an engine, which loads A.
    """
    if (
        not _is_whole(report, report.a)
        or (report.outside_tower and not report.copy_options)
        or report.of_engine
        or any(has_weights(one.cause, "trained") for one in report.findings)
    ):
        return ""
    wrong = {
        key for one in report.findings if has_weights(one.cause, "mislabelled") for key in one.keys
    }
    rows = [
        row
        for row in report.tensors
        if row.shape_b is not None and len(row.shape_b) > 1 and row.key not in wrong
    ]
    mine = {row.key: row.encoding_a for row in rows if row.encoding_a}
    theirs = {row.key: row.encoding_b for row in rows if row.encoding_b}
    # What was not compared is as mislabelled as what was, in the same two encodings.
    mislabelled = {(row.encoding_a, row.encoding_b) for row in report.tensors if row.key in wrong}
    left = {key: pair for key, pair in report.left_encodings.items() if pair not in mislabelled}
    mine |= {key: of_a for key, (of_a, _) in left.items() if of_a}
    theirs |= {key: of_b for key, (_, of_b) in left.items()}
    if any(overflows_encoding(one.values, theirs) for one in report.findings):
        theirs = {}
    return rewrite_command(
        report.a, report.b, mine, theirs, report.file_type, report.input_scales, report.copy_options
    )


def next_commands(report: "DiffReport") -> tuple[str, ...]:
    """Return the next commands for two models that are not equal and whose causes none repairs.

    They repair B where only items of the ledgers differ, else one shows more.
    """
    surplus, items = _surplus_commands(report), _items_command(report)
    if surplus and all(_can_run(report, command) for command in surplus):
        return surplus
    if items and _can_run(report, items):
        return (items,)
    # A file that cannot be read whole cannot be diagnosed.
    if any(one.kind != "codec" for one in report.damage):
        return _damage_commands(report)
    if report.exit_code() == 2 and any(row.state == LATE for row in report.not_compared):
        return (f"aprfmt diff {shlex.quote(report.a)} {shlex.quote(report.b)}",)
    unreadable = any(row.verdict == "UNREADABLE" for row in report.tensors)
    if report.exit_code() == 2 and not unreadable:  # `diagnose` finds why they do not decode
        return (inspect_unreadable_command(report.not_compared, report.a, report.b),)
    if report.asked and "tensors" not in report.asked:  # `diagnose` sends to these sections
        only = " ".join(f"--only {name}" for name in report.asked)
        return (f"aprfmt diff {shlex.quote(report.a)} {shlex.quote(report.b)} {only} -v",)
    if report.of_engine:
        return (_worst_command(report),)
    return (f"aprfmt diagnose {shlex.quote(report.a)} {shlex.quote(report.b)}",)


def _worst_command(report: "DiffReport") -> str:
    """Return the command that shows where the tensor differs that differs most, or all of them."""
    rows = [row for row in report.tensors if row.verdict == "DIFFERENT"]
    worst = max(rows, key=lambda row: row.stats.rel_l2 if row.stats else 0.0, default=None)
    picked = "" if worst is None else f" --tensor {shlex.quote(worst.key)}"
    return f"aprfmt diff {shlex.quote(report.a)} {shlex.quote(report.b)}{picked} -v"


def _damage_commands(report: "DiffReport") -> tuple[str, ...]:
    """Return the command for a damaged file, as a tuple of one.

    Where B's readable tensors have A's bytes, it completes B's file from A's; else it is
    `aprfmt validate`.
    """
    rows = [row for row in report.tensors if row.verdict != "UNREADABLE"]
    if rows and all(row.verdict == "SAME_BYTES" for row in rows):
        places = {one.where for one in report.damage}
        made = completed_command(places, report.a, report.b)
        if made:
            return (made,)
    return (f"aprfmt validate {shlex.quote(report.damage[0].where)}",)


def _items_command(report: "DiffReport") -> str:
    """Return the command that makes B agree if only items of `not_compared` differ; else ""."""
    if report.ledgers is None or replace(report, not_compared=()).exit_code() == 1:
        return ""
    return repair_items_command(report.not_compared, report.item_arguments, report.a, report.b)


def _surplus_commands(report: "DiffReport") -> tuple[str, ...]:
    """Return the commands that cut bytes of no tensor from B if only these differ; else ()."""
    if report.ledgers is None or replace(report, not_compared=()).exit_code() == 1:
        return ()
    return surplus_commands(report.not_compared, report.ledgers[1], report.b)
