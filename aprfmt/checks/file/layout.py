"""Checks of the container: header and tensors, bytes between, checksums, sets of files."""

import re
import shlex
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import Damage, Note, Source
from aprfmt.base.sequences import join_first
from aprfmt.base.text_escape import escape, shorten
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, NotRun, Result
from aprfmt.errors import AprfmtError
from aprfmt.formats import open_source
from aprfmt.formats.apr.layout import ALIGNMENT
from aprfmt.formats.mapped_file import Shard
from aprfmt.formats.safetensors.index_check import index_repair_text
from aprfmt.model import manifest
from aprfmt.model.hf_folder import rival_weights
from aprfmt.model.manifest import bytes_between
from aprfmt.model.relations import file_relations
from aprfmt.tensors.runs import hold_same_bytes


def _parsed_files(source: Any) -> list[Any]:
    """Return the parsed header of every file of a model."""
    return [shard.parsed for shard in source.shards]


def check_layout(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each damage, and a warning for each other oddity.

    Damage are tensors that overlap, offsets and sizes outside the file, duplicates, headers and
    metadata that cannot be read. An extension of another format fails too.
    """
    notes = [note for parsed in _parsed_files(ctx.model.source) for note in parsed.notes]
    lost = ctx.reported_weights | ctx.reported_parts
    findings = [_damage_finding(one, lost) for one in ctx.model.damage]
    todo = ctx.sizes_command if findings and not ctx.model.source.damage else ""
    if todo:
        findings = [replace(one, todo=todo) for one in findings]
    findings += [
        CheckFinding(note.where, note.text, "a file as its own writer makes it", level="warning")
        for note in notes
        if note.level == "warning"
    ]
    findings += [
        CheckFinding(
            ctx.where, relation.says, "a name that says what the content is", relation.remedy
        )
        for relation in file_relations(ctx.model)
        if relation.kind == "extension"
    ]
    count = len(ctx.model.source.tensors)
    return Result(f"{count} tensors in {len(ctx.model.source.files)} files", findings)


def _damage_finding(damage: Damage, lost: Collection[str]) -> CheckFinding:
    """Return a damage of a file as a CheckFinding that names the tensors it makes unreadable.

    `lost` are packed weights of which a stored tensor is missing, and their other tensors.
    """
    names = damage.tensors
    unreadable = ""
    if names:
        shown = join_first([shorten(name, 100) for name in names], 4)
        unreadable = f"; {len(names)} tensors cannot be read: {shown}"
    wanted, todo = "a file that keeps its format's rules", "the file is damaged: get it again"
    if damage.kind == "truncated" and Path(damage.where).is_file():
        file = shlex.quote(damage.where)
        todo += f", or only what is missing: aprfmt repair {file} --from A_WHOLE_COPY -o NEW"
    if any(damage.text.startswith(f"{name}: ") for name in lost):
        wanted = "every part of a packed weight"
        todo = "convert again from the source, with all parts"
    return CheckFinding(damage.where, damage.text + unreadable, wanted, todo)


def check_checksum(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each file whose bytes do not match its checksum.

    Raises NotRun where a file has none.
    """
    source: Any = ctx.model.source
    matches = source.footer_matches()
    if matches is False:
        damaged = [s.file.path for s in source.shards if s.footer_matches() is False]
        findings = [
            CheckFinding(
                str(path),
                "a footer checksum that is not that of the bytes before it",
                "CRC-32 of every byte",
                "the file is damaged: get it again",
            )
            for path in damaged
        ]
        return Result("", findings)
    if matches is None:
        raise NotRun("the file ends without a checksum, so damage to its data cannot be noticed")
    return Result("CRC-32 of every byte matches")


def check_imports(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each imported name that no stored value needs.

    The file is a pickle: loading it runs the code of each module that it imports, even where the
    name is not called.
    """
    source: Any = ctx.model.source
    findings = [
        CheckFinding(
            str(shard.file.path),
            text,
            "names of what torch.save stores, each of which makes a value",
            "do not load it with pickle: convert it with aprfmt, or ask for safetensors",
        )
        for shard in source.shards
        for text in shard.unfit_imports()
    ]
    count = len(source.imports)
    return Result(f"{count} names", findings)


def check_side_manifest(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each difference from the manifest next to the file.

    `aprfmt hash --write` makes that manifest. Raises NotRun where there is none.
    """
    path = manifest.manifest_path(ctx.model.path)
    if not path.is_file():
        raise NotRun(f"there is no {path.name}; `aprfmt hash --write` makes one")
    rows = manifest.tensor_rows(ctx.model, raw_only=True)
    failures = manifest.compare_manifest(manifest.read_manifest(path), ctx.model, rows)
    findings = [
        CheckFinding(
            failure["key"],
            failure["what"],
            f"what {path.name} says",
            "get the file again, or write the manifest again if the change was meant",
        )
        for failure in failures
    ]
    return Result(f"{len(rows)} tensors match {path.name}", findings)


def check_padding(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each file with nonzero bytes between header and tensors.

    Raises NotRun for a damaged file.
    """
    if ctx.model.damage:
        raise NotRun("the file is damaged, so which bytes belong to nothing is not known")
    findings = []
    source: Any = ctx.model.source
    for path, shard in zip(source.files, source.shards, strict=True):
        text = _first_nonzero_gap(shard)
        if text:
            expected = "zeros between the parts of a file"
            findings.append(CheckFinding(str(path), text, expected, level="warning"))
    return Result("zeros", findings)


def _first_nonzero_gap(shard: Shard[Any]) -> str:
    """Return in words the first nonzero byte that is of no tensor or header; "" without one."""
    for first, piece in bytes_between(shard.data, sorted(shard.parsed.regions())):
        rest = bytes(piece).lstrip(b"\0")
        if rest:
            return f"byte 0x{rest[0]:02x} at offset {first + len(piece) - len(rest)}"
    return ""


def check_alignment(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each file whose tensors are not aligned to 64 bytes.

    Most writers of APR begin them at multiples of 64.
    """
    findings = []
    for path, parsed in zip(ctx.model.source.files, _parsed_files(ctx.model.source), strict=True):
        infos = [entry.info for entry in parsed.entries if entry.info.nbytes]
        off = [info for info in infos if info.offset % ALIGNMENT]
        if off:
            text = f"{len(off)} of {len(infos)} tensors, the first at offset {off[0].offset}"
            expected = f"multiples of {ALIGNMENT}"
            where = f"{path}: {off[0].name}"
            findings.append(CheckFinding(where, text, expected, level="warning"))
    return Result(f"multiples of {ALIGNMENT}", findings)


_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.[^.]+)")


def check_shards(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each disagreement of a set's index, names and files.

    A folder that has weights in one file and an index of other files fails too, unless both hold
    the same. A file that is named like the set and does not belong to it is a warning, and so is an
    index whose sum of bytes is wrong: loaders read it. Raises NotRun for a model in one file.
    """
    source: Any = ctx.model.source
    own = {id(note) for parsed in _parsed_files(source) for note in parsed.notes}
    of_set: list[Note] = [note for note in source.notes if id(note) not in own]
    members = {path.name for path in source.files}
    alone = len(members) == 1 and _SHARD.fullmatch(next(iter(members))) is None
    rivals = list(_rival_findings(ctx))
    if alone and not of_set and source.path.name in members:
        if rivals:
            return Result("", rivals)
        raise NotRun("the model is one file")
    todo, anew = "get all files of one set", index_repair_text(ctx.model.path)
    total = next((note for note in of_set if note.key == "index_size"), None)
    findings = [
        CheckFinding(
            note.where,
            note.text,
            "files of one set that agree",
            anew if anew and (note is total or note.text.endswith("is missing")) else todo,
            level="warning" if note is total else "fail",
        )
        for note in of_set
        if note.level == "warning"
    ]
    findings += rivals
    findings += [
        CheckFinding(
            str(ctx.model.path.with_name(name)),
            "a file of the set's naming that no index or count of the set includes",
            f"the {len(members)} files of the set",
            "remove it, or get all files of one set",
            level="warning",
        )
        for name in _unlisted_shards(members, ctx.model.path.parent)
    ]
    # An index is made from the headers of the shards, so that these are mended before it.
    of_index = [one for one in file_relations(ctx.model) if one.kind == "index"]
    damaged = of_index and any(shard.parsed.faults.damage for shard in source.shards)
    first = "mend the damaged shards first (see layout), then: " if damaged else ""
    findings += [
        CheckFinding(
            ctx.where,
            relation.says + relation.examples_text,
            "an index of what the shards hold",
            f"{first}{relation.remedy}" if relation.remedy else "",
        )
        for relation in of_index
    ]
    return Result(f"{len(members)} files", findings)


class RivalWeights(CheckFinding):
    """A finding that a folder has weights in one file and an index of other files."""

    __slots__ = ()


def _rival_findings(ctx: CheckContext) -> Iterator[CheckFinding]:
    """Yield a failure where a folder has weights in one file and an index of other files.

    Which of them is loaded depends on the program. It is a warning where both hold the same bytes.
    """
    path, source = ctx.model.path, ctx.model.source
    rival = rival_weights(path, source.files)
    if rival is None:
        return
    single, index = sorted((rival, path), key=lambda one: one.suffix == ".json")
    same = _holds_same_bytes(source, rival)
    held = "the same tensors a second time" if same else "other weights than this model's"
    yield RivalWeights(
        str(rival),
        f"holds {held}: transformers loads {single.name} and no shard, vLLM what {index.name} "
        f"names, llama.cpp's converter every {single.stem}*{single.suffix}",
        "the weights of one model",
        f"compare them (aprfmt diff {shlex.quote(str(path))} {shlex.quote(str(rival))}), then "
        "remove the file or the index with its shards",
        "warning" if same else "fail",
    )


def _holds_same_bytes(source: Source, rival: Path) -> bool:
    """Return whether a file, or an index with its files, holds exactly the tensors of a source.

    Names, types, shapes and bytes have to be equal. False too for one that cannot be read.
    """
    try:
        with open_source(rival) as other:
            mine, theirs = source.tensors, other.tensors
            shapes = [
                {name: one.info.shape for name, one in each.items()} for each in (mine, theirs)
            ]
            return shapes[0] == shapes[1] and all(
                hold_same_bytes(one, theirs[name]) for name, one in mine.items()
            )
    except (AprfmtError, OSError):
        return False


def _unlisted_shards(members: set[str], folder: Path) -> list[str]:
    """Return the names in `folder` that have a set's stem and suffix but are not its members."""
    patterns = {(m["stem"], m["suffix"]) for name in members if (m := _SHARD.fullmatch(name))}
    found = []
    for path in sorted(folder.iterdir()):
        match = _SHARD.fullmatch(path.name)
        if match and (match["stem"], match["suffix"]) in patterns and path.name not in members:
            found.append(path.name)
    return found


def check_names(ctx: CheckContext) -> Result:
    """Return a Result with a warning for each name with unusual characters.

    These are control, invisible and direction-reversing ones. The names are those of tensors and
    of metadata keys.
    """
    findings = []
    every = [("tensor", name) for name in ctx.model.source.tensors]
    every += [("metadata key", key) for key in ctx.model.metadata]
    for kind, name in every:
        plain = name.replace("\\", "/")  # a backslash shows as it is, if at times doubled
        if escape(plain) != plain:
            text = f"{kind} '{escape(name, 200)}'"
            findings.append(
                CheckFinding(ctx.where, text, "names of visible characters", level="warning")
            )
    return Result(f"{len(every)} names", findings)
