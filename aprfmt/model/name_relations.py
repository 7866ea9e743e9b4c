"""Relations of names: a file's tensors stand under other names than readers or another file have.

A *rule* is a rename OLD=NEW (`aprfmt.model.renames`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from aprfmt.errors import ArchError
from aprfmt.model.relations import SHOWN, Relation, opening_path
from aprfmt.model.renames import ASIDE, Rename, command_line

if TYPE_CHECKING:
    from pathlib import Path

    from aprfmt.model import Model


def rename_relation(
    path: "Path", rules: Sequence[Rename], pairs: Iterable[tuple[str, str]], total: int
) -> Relation:
    """Return the Relation of renamed tensors; `pairs` are (stored name, name read as).

    `total` is the number of tensors in the file.
    """
    aside = [rule for rule in rules if rule.sets_aside]
    every, rules = rules, [rule for rule in rules if not rule.sets_aside]
    changed = [
        (stored, read)
        for stored, read in pairs
        if stored != read and not any(stored.startswith(rule.old) for rule in aside)
    ]
    known = [why for rule in rules if (why := rule.origin)]
    of = f" ({', '.join(dict.fromkeys(known))})" if known else ""
    many = "all" if len(changed) == total else f"{len(changed)} of"
    says = (
        f"{many} {total} tensors stand under other names than readers look for: "
        f"{' and '.join(dict.fromkeys(rule.text for rule in rules))}{of}"
    )
    options = [part for rule in every for part in ("--rename", str(rule))]
    if aside:
        options += ["--drop", f"{ASIDE}*"]
        says += _other_sets_text("the file", path, rules[-1].old, [rule.old for rule in aside])
    remedy = command_line("convert", opening_path(path), "OUT", *options)
    where = tuple(stored for stored, _ in changed)
    return Relation("names", says, where, tuple(changed[:SHOWN]), remedy, tuple(every))


def _other_sets_text(what: str, path: "Path", taken: str, others: Sequence[str]) -> str:
    """Return a clause that a file has the names below `taken` also below other prefixes.

    `what` names the file `path`, `others` are these prefixes. The clause ends with the command that
    keeps only one set.
    """
    alone = command_line(
        "convert",
        opening_path(path),
        "OTHERS.safetensors",
        "--generic",
        "--drop",
        f"re:^{re.escape(taken)}",
    )
    return (
        f"; {what} has these names under {' and '.join(others)} too, which are left aside: "
        f"to compare them alone, {alone}"
    )


def side_of_other_names(a: "Model", b: "Model") -> Literal["a", "b"]:
    """Return which model ("a" or "b") has unusual names: "a" if only B's names have known roles."""
    return "a" if not _has_roles(a) and _has_roles(b) else "b"


def _has_roles(model: "Model") -> bool:
    """Return whether a model's architecture is known and its tensors have roles of it."""
    try:
        return bool(model.roles)
    except ArchError:
        return False


def relation_between_names(
    a: "Model",
    b: "Model",
    rule: Rename,
    names: Mapping[str, str],
    left: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Relation:
    """Return the Relation that a rule maps B's names to A's; neither model has to be wrong.

    `names` are {B's name: A's} of the tensors that are mapped. `left` are prefixes under which B
    has the same names again, `more` those of A: sets that are not compared. Where only B has the
    names that readers look for, the unusual names are A's, and no remedy for B is given.
    """
    side = side_of_other_names(a, b)
    what = (
        f"{rule.old} in B stands for {rule.new} in A"
        if rule.old and rule.new
        else f"B has the prefix {rule.old}, A has not"
        if rule.old
        else f"A has the prefix {rule.new}, B has not"
    )
    whole = len(b if side == "b" else a)
    says = f"{len(names)} of {whole} tensors have other names in {side.upper()}: {what}"
    for label, model, taken, again in (("B", b, rule.old, left), ("A", a, rule.new, more)):
        if again and taken:
            says += _other_sets_text(label, model.path, taken, again)
    if side == "a":
        where = tuple(names.values())
        examples = tuple((name, other) for other, name in names.items())[:SHOWN]
        return Relation("names", says, where, examples, "", (Rename(rule.new, rule.old),))
    options = ["--rename", str(rule)]
    if rule.old and left:
        options += [part for old in left for part in ("--drop", f"re:^{re.escape(old)}")]
        if any(name.startswith(old) for name in names.values() for old in left):
            # What is left out is looked for under the new names.
            aside = [part for old in left for part in ("--rename", f"{old}={ASIDE}{old}")]
            options = [*aside, "--rename", str(rule), "--drop", f"{ASIDE}*"]
    target = "OUT"
    if not _has_roles(b):
        target, options = "OUT.safetensors", ["--generic", *options]
    remedy = command_line("convert", opening_path(b.path), target, *options)
    return Relation("names", says, tuple(names), tuple(names.items())[:SHOWN], remedy, (rule,))
