"""The renames that mend a B whose tensors stand under each other's names.

For each tensor it is known whose values it has, so that A is not needed to rename it.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from aprfmt.causes import CAUSES
from aprfmt.causes.remedies import has_weights
from aprfmt.errors import UsageError
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name
from aprfmt.measure.records import EQUAL, TensorDiff
from aprfmt.model import Model
from aprfmt.model.relations import opening_path
from aprfmt.model.renames import Rename, command_line, rename_names
from aprfmt.tensors.view import stored_by_name

MOST = 8  # runs of components that one command renames
DEPTH = 8  # components before the part that differs, at most


def with_renames(
    findings: Sequence[Finding], rows: Sequence[TensorDiff], a: Model, b: Model
) -> tuple[Finding, ...]:
    """Return the findings, with a command that renames B's tensors where renaming mends all of B.

    The command is not added where anything else is wrong with B's tensors, nor for an engine's
    state or an adapter, of which no copy is written.
    """
    faults = [one for one in findings if one.verdict == "bug" or one.cause not in CAUSES]
    known = {key for one in faults for key in one.keys}
    apart = {row.key for row in rows if row.verdict not in (*EQUAL, "WITHIN")}
    kept = getattr(b.source, "of_engine", False) or b.kind is not None
    sure = all(has_weights(one.cause, "exchanged") and one.confirmed for one in faults)
    if not faults or not sure or kept or not apart <= known:
        return tuple(findings)
    wanted = _right_names([row for row in rows if row.key in known], a, b)
    rules = _find_rules(list(b.source.tensors), wanted)
    if not rules:
        return tuple(findings)
    path = opening_path(b.path)
    options = " ".join(f"--rename {shlex.quote(str(rule))}" for rule in rules)
    command = f"{command_line('convert', path)} {fixed_name(path)} {options}"
    return tuple(replace(one, next=command) if one in faults else one for one in findings)


def _right_names(rows: Sequence[TensorDiff], a: Model, b: Model) -> dict[str, str]:
    """Return {B's stored name: the name its values should have}; {} where it is not known.

    The explanation of each row names two tensors, the row's own first, or has the `renames` of
    B's stored tensors among its values. A tensor that only B has gets the name in A's file, if
    both files have the same naming.
    """
    wanted: dict[str, str] = {}
    for row in rows:
        found = row.explanation
        for name, right in ({} if found is None else found.values.get("renames", {})).items():
            if wanted.setdefault(name, right) != right:
                return {}
        if found is not None and "renames" in found.values:
            continue
        if found is None or len(found.where) != 2:
            return {}
        here, there = found.where
        if row.verdict == "DIFFERENT":
            moved, place, holder = (
                (here, there, b) if _identifies_tensor_of_b(found) else (there, here, b)
            )
        elif a.style == b.style:
            moved, place, holder = there, here, a
        else:
            return {}
        mine, held = b.find(moved), holder.find(place)
        if mine is None or held is None or mine.steps != held.steps:
            return {}  # stored in other layouts: another name alone makes it no other weight
        old, new = stored_by_name([mine]), stored_by_name([held])
        if len(old) != len(new):
            return {}
        for name, right in zip(old, new, strict=True):
            if wanted.setdefault(name, right) != right:
                return {}
    return wanted


def _identifies_tensor_of_b(found: Finding) -> bool:
    """Return whether an explanation identifies B's tensor among A's tensors, not the reverse."""
    return found.evidence[0].startswith("B")


def _find_rules(names: Sequence[str], wanted: Mapping[str, str]) -> tuple[Rename, ...]:
    """Return the `--rename` rules that give each name in `wanted` its new name; () for none.

    `names` are all names of the file: names that `wanted` lacks must stay. Rules with the fewest
    name components are tried first.
    """
    if not wanted or len({*wanted.values()}) < len(wanted):
        return ()
    for whole in (False, True):
        for depth in range(DEPTH):
            runs = _differing_runs(wanted, depth, whole)
            if not runs or len(runs) > MOST or any(run.isdigit() for run in runs):
                continue
            rules = _rules_in_order(runs)
            try:
                made = rename_names(names, rules, "", strict=False)
            except UsageError:
                continue
            if all(made.get(wanted.get(name, name)) == name for name in names):
                return rules
    return ()


def _differing_runs(wanted: Mapping[str, str], depth: int, whole: bool) -> dict[str, str]:
    """Return {components of a name to be replaced: components to replace them by}.

    A run has the components that differ, `depth` before them and, if `whole`, all after them. {}
    if one run would need two replacements, or the names have different numbers of components.
    """
    runs: dict[str, str] = {}
    for name, right in wanted.items():
        old, new = name.split("."), right.split(".")
        if len(old) != len(new):
            return {}
        places = [i for i, (x, y) in enumerate(zip(old, new, strict=True)) if x != y]
        if not places:
            continue
        part = slice(max(0, places[0] - depth), len(old) if whole else places[-1] + 1)
        run, there = ".".join(old[part]), ".".join(new[part])
        if runs.setdefault(run, there) != there:
            return {}
    return runs


def _rules_in_order(runs: Mapping[str, str]) -> tuple[Rename, ...]:
    """Return rules that rename all runs in an order in which no new name is still in use.

    A cycle of names is opened by renaming one to a temporary name.
    """
    left, rules = dict(runs), []
    while left:
        free = next((old for old, new in left.items() if new not in left), None)
        if free is None:  # they go round: one of them steps aside
            free = next(iter(left))
            aside = f"{free}_moved"
            rules.append(Rename(free, aside))
            left[aside] = left.pop(free)
            continue
        rules.append(Rename(free, left.pop(free)))
    return tuple(rules)
