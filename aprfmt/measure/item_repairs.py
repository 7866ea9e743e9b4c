"""The command that makes one model another where only keys or tensors of no role differ.

An *item* is an entry of a model's ledger, the list of all that it is made of: a tensor, a key, a
text.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aprfmt.arch.other_keys import other_readers_text
from aprfmt.measure.named_causes import fixed_name, set_command, surplus_command
from aprfmt.model.ledger import (
    DIFFERING,
    NO_PART,
    WRONG_CHECKSUM,
    Item,
    Ledger,
    NotCompared,
    Surplus,
    read_value,
)
from aprfmt.model.relations import opening_path
from aprfmt.model.sidecar_files import ADAPTER_CONFIG

# (kind, name) of an item -> the words of `set` that mend it, quoted for a shell; "" where none do.
Arguments = Mapping[tuple[str, str], str]
# Where `set` finds the keys of a kind; items of files are named "FILE: KEY".
_PLACES: dict[str, str] = {
    "config key": "config.json:",
    "metadata key": "",
    "tokenizer part": "",
    "generation setting": "",
}
_WRITABLE = ("config.json:", "tokenizer_config.json:", "generation_config.json:")
_MOST = 8  # tensors of a command
_LONGEST = 400  # characters of all keys and values, or names, in a command


def item_arguments(rows: Iterable[NotCompared], a: Ledger, b: Ledger) -> Arguments:
    """Return {(kind, name): arguments of `set` that give B what A holds} for unequal items.

    `rows` are the items that were not compared. A value is "" where `set` cannot mend the item. `a`
    and `b` are the ledgers of two open files.
    """
    mine, theirs = (_items_by_name(side) for side in (a, b))
    return {
        (row.kind, row.name): _argument(
            row, mine.get((row.kind, row.name)), theirs.get((row.kind, row.name)), a
        )
        for row in rows
        if row.state in DIFFERING and row.kind in _PLACES
    }


def repair_items_command(
    rows: Sequence[NotCompared], arguments: Arguments, a: str, path: str
) -> str:
    """Return the command that makes B, under `path`, agree with A, under `a`; "" without one.

    `rows` are the items that were not compared. Each unequal or one-sided one has to be a key that
    `set` writes by `arguments` in a command of usual length, a tensor of B alone, or B's checksum.
    """
    apart = [row for row in rows if row.state in DIFFERING]
    if apart and all(row.name == WRONG_CHECKSUM and row.state == "only in B" for row in apart):
        return _checksum_command(a, path)
    if apart and all(row.kind == "tensor" and row.state == "only in B" for row in apart):
        place = opening_path(Path(path))
        drops = " ".join(f"--drop {shlex.quote(row.name)}" for row in apart)
        command = f"aprfmt convert {shlex.quote(str(place))} {fixed_name(place)} {drops}"
        return command if len(apart) <= _MOST and len(command) <= _LONGEST else ""
    words = list(dict.fromkeys(arguments.get((row.kind, row.name), "") for row in apart))
    if not words or "" in words or sum(map(len, words)) > _LONGEST:
        return ""
    return set_command(Path(path), words)


def surplus_commands(rows: Sequence[NotCompared], ledger: Ledger, path: str) -> tuple[str, ...]:
    """Return the commands that write B's files without bytes that belong to no tensor, one a file.

    `rows` are the items that were not compared, `ledger` is that of B, under `path`. () if anything
    else is unequal or in one model only, or if there are no such bytes.
    """
    apart = [row for row in rows if row.state in DIFFERING]
    if not all(row.state == "only in B" and row.why == NO_PART for row in apart):
        return ()
    files = ledger.items_of_kind("file")
    held = (files[row.name].holds for row in apart if row.name in files)
    paths = dict.fromkeys(str(each.path) for each in held if isinstance(each, Surplus))
    return tuple(surplus_command(file, path) for file in paths)


def inspect_unreadable_command(rows: Iterable[NotCompared], a: str, b: str) -> str:
    """Return the command that lists the items of A or of B, whichever has some that are unreadable.

    `rows` are the items that were not compared, `a` and `b` the models' paths. It is B where both
    have unreadable items, or neither alone.
    """
    sides = {row.side for row in rows if row.is_open}
    return f"aprfmt inspect {shlex.quote(a if sides == {'A'} else b)} --account"


def _checksum_command(a: str, b: str) -> str:
    """Return the command that writes B, whose checksum is wrong, with A's; "" without one.

    `a` and `b` are paths. Files of one format have the same checksum where they hold the same.
    """
    mine, theirs = Path(a), Path(b)
    if not (mine.is_file() and theirs.is_file()):
        return ""
    if mine.suffix != theirs.suffix or mine.stat().st_size != theirs.stat().st_size:
        return ""
    source = shlex.quote(str(mine))
    return f"aprfmt repair {shlex.quote(str(theirs))} --from {source} -o {fixed_name(theirs)}"


def _argument(row: NotCompared, mine: Item | None, theirs: Item | None, a: Ledger) -> str:
    """Return the arguments of `set` that mend one item of B, quoted for a shell; "" if none do.

    `mine` and `theirs` are the item of A and of B, None where it is absent; `a` is A's ledger.
    """
    if row.name.startswith(f"{ADAPTER_CONFIG}: "):
        return ""  # `set` changes it in place alone
    if row.kind == "config key" and other_readers_text(row.name):
        return ""  # to remove it changes what those compute, to keep it what this one says
    place = _PLACES[row.kind]
    key = row.name if mine is not None else _outermost_of(row, a)
    name = f"{place}{key}".replace(": ", ":", 1)
    if row.kind != "metadata key" and not name.startswith(_WRITABLE):
        return ""
    if mine is None:
        return f"--remove {shlex.quote(name)}" if theirs is not None else ""
    if theirs is None and row.kind == "metadata key":
        return ""  # `set` would have to guess its type
    value = read_value(mine.holds)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        return ""
    return shlex.quote(f"{name}={text}")


def _outermost_of(row: NotCompared, other: Ledger) -> str:
    """Return the outermost object of config.json around a key, of which `other` has no key at all.

    That object is removed as a whole. The key itself is returned where it is in no such object.
    """
    if row.kind != "config key":
        return row.name
    known = [item.name for item in other.items if item.kind == "config key"]
    parts = row.name.split(".")
    for count in range(1, len(parts)):
        above = ".".join(parts[:count])
        if not any(name == above or name.startswith(f"{above}.") for name in known):
            return above
    return row.name


def _items_by_name(side: Ledger) -> dict[tuple[str, str], Item]:
    """Return {(kind, name): item} of the ledger of one model."""
    return {(item.kind, item.name): item for item in side.items}
