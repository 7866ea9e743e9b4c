"""The facts of `aprfmt inspect`, as plain data; no tensor is read.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Overlay
from aprfmt.base.text_escape import shorten
from aprfmt.cli.inspect.summary import summarize
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.remote.paths import is_remote

if TYPE_CHECKING:
    from aprfmt.cli.inspect.records import ArchFacts, InspectBody
    from aprfmt.model.ledger import Kind
    from aprfmt.model.resolve import Resolution

MAX_TOKENIZER = 1 << 21  # characters of a tokenizer.json that are parsed for this: 0.1 s


def inspect_facts(opened: Model, full: bool = False) -> "InspectBody":
    """Return everything that `inspect` says of an open model, as JSON.

    `full` gives metadata arrays and long texts whole.
    """
    body: InspectBody = {**_file_facts(opened, full), **_model_facts(opened)}
    imported = pickle_imports(opened)
    if imported:
        body["imports"] = imported
    body["relations"] = [relation.to_json() for relation in opened.relations]
    body["notes"] += [asdict(relation.as_note(opened.path)) for relation in opened.relations]
    body["tokenizer"] = _tokenizer_row(opened)
    body["unread"], body["unreadable"] = _unread_items(opened)
    body["summary"] = summarize(opened, body)
    return body


def _file_facts(opened: Model, full: bool) -> "InspectBody":
    """Return what the container itself says: sizes, encodings, metadata, its version.

    `full` gives metadata whole.
    """
    from aprfmt.base.metadata_values import number_name, short_value

    census: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    # Counted by kind first: a file may hold a million tensors, of few kinds.
    kinds = Counter(map(attrgetter("encoding", "shape", "nbytes"), opened.infos))
    for (name, shape, nbytes), count in kinds.items():
        census[name] += count
        weights[name] += math.prod(shape) * count
        stored[name] += nbytes * count
    source = opened.source
    return {
        "path": str(opened.path),
        "format": source.format,
        "version": source.version,
        "files": [str(path) for path in source.files],
        "file_bytes": sum(path.stat().st_size for path in source.files),
        "tensor_count": len(opened),
        "parameters": sum(weights.values()),
        "encodings": {
            name: {"tensors": census[name], "parameters": weights[name], "bytes": stored[name]}
            for name in sorted(census)
        },
        "metadata": {
            key: _listed_value(value) if full else short_value(value)
            for key, value in opened.metadata.items()
        },
        "metadata_names": {
            key: name for key, value in opened.metadata.items() if (name := number_name(key, value))
        },
        "config": str(opened.folder.path / "config.json")
        if opened.folder is not None and opened.folder.config is not None
        else None,
    }


def _unread_items(opened: Model) -> tuple[list[str], list[str]]:
    """Return (unread items as "KIND NAME", unreadable files or keys as "NAME (why)").

    The first are files, index entries and metadata keys that no table lists. Other kinds of items,
    and those of a tokenizer of more than MAX_TOKENIZER characters, are only listed by --account.
    """
    from aprfmt.model.ledger import make_ledger

    found = make_ledger(opened, ("file", "index entry", "metadata key"))
    small: tuple[Kind, ...] = () if _is_long(opened) else ("tokenizer part",)
    parts = make_ledger(opened, ("generation setting", *small))
    return (
        [f"{item.kind} {item.name}" + f" ({item.of})" * bool(item.of) for item in found.unread],
        [
            f"{row.name} ({row.why})"
            for row in dict.fromkeys((*found.unreadable, *parts.unreadable))
        ],
    )


def _is_long(opened: Model) -> bool:
    """Return whether the model's tokenizer.json is too long to be parsed for `inspect`."""
    try:
        return len(opened.carried.tokenizer_json() or "") > MAX_TOKENIZER
    except AprfmtError:
        return False  # which is said where it is read


def pickle_imports(opened: Model) -> list[str]:
    """Return the names that loading the file with pickle would import; [] for other formats."""
    source = opened.source
    while isinstance(source, Overlay):
        source = source.wrapped_source
    return [shorten(name, 200) for name in getattr(source, "imports", ())]


def _listed_value(value: object) -> object:
    """Return a metadata value for JSON: an array as a list, anything else unchanged."""
    return value if isinstance(value, str) or not isinstance(value, Sequence) else list(value)


def _model_facts(opened: Model) -> "ArchFacts":
    """Return the hyperparameters, roles and notes that the architecture's tables give.

    Where the architecture cannot be resolved, `architecture` is None and `architecture_error` says
    why.
    """
    notes = [asdict(note) for note in opened.notes]
    try:
        resolution = opened.resolution
    except AprfmtError as error:
        return {
            "architecture": None,
            "architecture_error": str(error),
            "architecture_named": _named_architecture(opened),
            "notes": notes,
        }
    where = str(opened.path)
    notes += [asdict(note) for note in resolution.notes]
    notes += [
        {"level": "note", "where": where, "text": text, "key": "assumed"}
        for text in resolution.report.assumed
    ]
    from aprfmt.model.ledger import multimodal_towers

    found = {spec.name: names for spec, names in multimodal_towers(opened)}
    facts: ArchFacts = {
        **architecture_facts(resolution, is_local=not is_remote(opened.path)),
        "notes": notes,
    }
    claimed = {name for names in found.values() for name in names}
    facts["stored_again"] = [*resolution.stored_again, *opened.plain_duplicates]
    facts["unclaimed"] = [name for name in facts["unclaimed"] if name not in claimed]
    facts["towers"] = {name: len(names) for name, names in found.items()}
    if others := [name for name in resolution.towers if name not in claimed]:
        facts["towers"]["not read here"] = len(others)
    return facts


def _named_architecture(opened: Model) -> str:
    """Return the known architecture that a file names though its tensors do not fit it, or ""."""
    from aprfmt.model.resolve import find_spec

    try:
        return find_spec(opened, opened.forced).name
    except AprfmtError:
        return ""


def _tokenizer_row(opened: Model) -> dict[str, object]:
    """Return the tokenizer's facts, with `doubts` about it if any; {} without a tokenizer.

    {"error": text} if it cannot be read.
    """
    from aprfmt.tokenizer.identity import tokenizer_facts
    from aprfmt.tokenizer.quick_checks import quick_warnings

    try:
        found = dict(tokenizer_facts(opened, quick=True))
        doubts = list(quick_warnings(opened.carried)) if found else []
        if found and _is_long(opened):
            found["read"] = "in part"
        return {**found, "doubts": "; ".join(doubts)} if doubts else found
    except AprfmtError as error:
        return {"error": str(error)}


def architecture_facts(resolution: "Resolution", *, is_local: bool) -> "ArchFacts":
    """Return the JSON of a resolved architecture: hyperparameters, keys, roles, conflicts.

    `is_local`: the tensors may be read, to see whether a stored head is a copy of the embedding.
    """
    from aprfmt.arch.used_hyperparameters import used_names

    report, hyper, unread = resolution.report, resolution.hyper, resolution.unread
    conflicts = list(report.conflicts)
    if is_local and any(row.name == "tied_embeddings" for row in conflicts):
        from aprfmt.causes.contradicted_flags import held_conflicts

        conflicts = held_conflicts(resolution)
    codes = set() if unread is None else {tensor.name for tensor in unread.tensors}
    # Keys that are not there, or say another size than the tensors have.
    solved = {key for relation in resolution.relations for key, _ in relation.values}
    return {
        "architecture": resolution.spec.name,
        "level": resolution.spec.level,
        "hyperparameters": {
            name: {
                "value": hyper.of(name).value,
                "origin": "shape" if hyper.of(name).key in solved else hyper.of(name).origin,
                "key": hyper.of(name).key,
            }
            for name in hyper
        },
        "used": used_names({name: hyper.of(name).value for name in hyper}),
        "keys": {
            "read": dict(report.read),
            "defaulted": list(report.defaulted),
            "ignored": list(report.ignored),
            "unknown": list(report.unknown),
        },
        "conflicts": [str(row) for row in conflicts],
        "roles": {
            "found": len(resolution.roles),
            "required": resolution.coverage.expected,
            "missing": list(resolution.missing),
            "packed": [key for key in resolution.missing if key in resolution.unread_roles],
            "misshapen": [
                {"role": key, "shape": list(has), "expected": list(due)}
                for key, has, due in resolution.coverage.misshapen
            ],
            "accepted": list(resolution.coverage.accepted),
        },
        "unclaimed": [name for name in resolution.unclaimed if name not in codes],
        "draft": list(resolution.draft),
    }
