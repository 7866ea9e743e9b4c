"""The command that makes one model another where only keys or tensors of no role differ."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aprfmt.measure.named_causes import fixed_name, set_command, surplus_command
from aprfmt.model.ledger import (
    APART,
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
    """Return the words of `set` that give B what A holds, for each item that is not alike in both.

    `rows` are the items that were not compared. Both files have to be open.
    """
    mine, theirs = (_items_by_name(side) for side in (a, b))
    return {
        (row.kind, row.name): _argument(
            row, mine.get((row.kind, row.name)), theirs.get((row.kind, row.name)), a
        )
        for row in rows
        if row.state in APART and row.kind in _PLACES
    }


def repair_items_command(
    rows: Sequence[NotCompared], arguments: Arguments, a: str, path: str
) -> str:
    """Return the command that makes B, under `path`, agree with A, under `a`; "" without one.

    `rows` are the items that were not compared. All that are unequal or on one side only have to be
    keys that `set` writes by `arguments`, short enough for a command, tensors of B alone, or B's
    checksum.
    """
    apart = [row for row in rows if row.state in APART]
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
    """Return the commands that write files of B without bytes of no tensor, one per file.

    `rows` are the items that were not compared, `ledger` is that of B, under `path`. () if
    something else than such bytes of B is unequal or on one side only, or nothing is.
    """
    apart = [row for row in rows if row.state in APART]
    if not all(row.state == "only in B" and row.why == NO_PART for row in apart):
        return ()
    files = ledger.items_of_kind("file")
    held = (files[row.name].holds for row in apart if row.name in files)
    paths = dict.fromkeys(str(each.path) for each in held if isinstance(each, Surplus))
    return tuple(surplus_command(file, path) for file in paths)


def inspect_unreadable_command(rows: Iterable[NotCompared], a: str, b: str) -> str:
    """Return the command that lists the items of the model of which something cannot be read.

    `rows` are the items that were not compared, `a` and `b` the models' paths. It is B where
    something of both, or of neither side alone, cannot be read.
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
    """Return the words of `set` that mend one item, quoted for a shell; "" if none do.

    `mine` and `theirs` are the item of A and of B, None where it has none.
    """
    if row.name.startswith(f"{ADAPTER_CONFIG}: "):
        return ""  # `set` changes it in place alone
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
    """Return the key of a config.json's outermost object around a key that `other` has nothing of.

    The key itself where it is in no such object.
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
    """Return {(kind, name): item} of a ledger."""
    return {(item.kind, item.name): item for item in side.items}
