"""The hash manifest of a model: digests of all files and tensors, so that damage is found.

GGUF and safetensors carry no checksum. The manifest is written next to the model as
`MODEL.aprfmt-hash.json` and has, for every tensor, SHA-256 of its stored bytes and of its
decoded values; for every file its size, SHA-256 of all bytes, and of the bytes outside the
tensors (header, metadata, tokenizer, padding); and SHA-256 of the text files of a model's
folder.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.budget import Budget
from aprfmt.base.protocols import ByteSource
from aprfmt.errors import AprfmtError, ArchError, FormatError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps, load_file
from aprfmt.formats.mapped_file import Shard, open_bytes
from aprfmt.formats.shard_set import MAX_INDEX
from aprfmt.model import Model
from aprfmt.model.patterns import matching_indices
from aprfmt.model.resolve import spellings_by_role
from aprfmt.tensors.digest import file_sha256, raw_sha256, sha256_of_pieces, view_sha256
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.model.verdict import Pronounced

SCHEMA = "aprfmt.hash-manifest/1"
BLOCK = 1 << 20  # bytes of a block that has a digest
MAX_MANIFEST = 256 << 20  # half a million tensors, 400 bytes each
_CANNOT = "cannot be read: "
_OUTSIDE = "bytes outside the tensors differ (header, metadata, tokenizer or padding)"

TensorRow = dict[str, Any]  # key, names, encoding, shape, raw, decoded
FileRow = dict[str, Any]  # name, size, sha256, and of weights `outside`
Failure = dict[str, str]  # key, what

MANIFEST_END = ".aprfmt-hash.json"  # after the model's name


def manifest_path(model: Path) -> Path:
    """Return the path of a model's manifest, `MODEL.aprfmt-hash.json` in the same folder."""
    return model.with_name(model.name + MANIFEST_END)


def tensor_rows(
    model: Model,
    patterns: Sequence[str] = (),
    *,
    raw_only: bool = False,
    budget: Budget | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[TensorRow]:
    """Return {key, names, encoding, shape, raw, decoded} of every tensor, by role where known.

    `raw` are SHA-256 of the stored bytes, `decoded` of the values; there is no `decoded` with
    `raw_only`. A tensor that cannot be read has no hashes, and `damage` says why. One that `budget`
    leaves out has none either, and `not_reached` says why. Raises UsageError for a pattern without
    a match.
    """
    # Tensors by role, then stored tensors that no role covers.
    sides: list[View] = []
    with suppress(ArchError):
        sides += model.roles.values()
    claimed = {name for side in sides for name in side.names}
    sides += [model[name] for name in model if name not in claimed]
    # Only those that a pattern names.
    if patterns:
        every = spellings_by_role(model)
        names_of = [every.get(side.name, (side.name, *side.names)) for side in sides]
        sides = [sides[i] for i in matching_indices(names_of, patterns, str(model.path))]
    model.cache_remote_reads()  # bytes are read for both digests, and for those of whole files
    # Digests of stored bytes, and of decoded values unless `raw_only`.
    rows = []
    for i, side in enumerate(sides):
        late = "" if budget is None or _has_room(budget, side.nbytes) else budget.reason
        for tensor in (tensor for soon in sides[i : i + 5] for tensor in soon.stored):
            if budget is None:
                tensor.expect()
        row: TensorRow = {
            "key": side.name,
            "names": list(side.names),
            "encoding": side.encoding,
            "shape": list(side.shape),
            "raw": [],
        }
        if late:
            row["not_reached"] = late
        elif side.damage:
            row["damage"] = side.damage
        else:
            limit = budget or Budget()
            with limit.in_force() as reading:
                row |= _tensor_digests(side, raw_only=raw_only)
            if reading.over:
                row["not_reached"] = limit.reason
        rows.append(row)
        if progress is not None:
            progress(i + 1, len(sides))
    return rows


def _tensor_digests(side: View, *, raw_only: bool) -> TensorRow:
    """Return {raw, decoded} of a tensor; TimeOver where a budget ends.

    `raw` are SHA-256 of the stored bytes, `decoded` that of the values; there is no `decoded` with
    `raw_only`.
    """
    row: TensorRow = {"raw": [raw_sha256(tensor) for tensor in side.stored]}
    if not raw_only:
        try:
            row["decoded"] = view_sha256(side)
        except AprfmtError as error:
            row |= {"decoded": None, "undecodable": str(error)}
    return row


def _has_room(budget: Budget | None, nbytes: int) -> bool:
    """Return whether a budget has time left and allows reading so many bytes; True without one."""
    return budget is None or (budget.has_time() and budget.has_room(nbytes))


def unread_files_reason(model: Model, budget: Budget | None) -> str:
    """Return why a budget does not allow digests of whole files; "" if it does."""
    nbytes = sum(path.stat().st_size for path in model.source.files)
    return "" if budget is None or _has_room(budget, nbytes) else budget.reason


def file_rows(model: Model, blocks: bool = False) -> list[FileRow]:
    """Return {name, size, sha256, outside} of every file of weights, and of texts next to them.

    `outside` is SHA-256 of the bytes outside the tensors; with `blocks` the digests of each MiB are
    in the row too. The rows of the index and the text files of the model come last, without
    `outside` and digests of each MiB. Raises FormatError for one of those that is too large.
    """
    source: Any = model.source
    rows: list[FileRow] = []
    for path, shard in zip(source.files, source.shards, strict=True):
        row = _file_row(path)
        row["outside"] = _digest_outside_tensors(path, shard)
        if blocks:
            row["blocks"] = {"size": BLOCK, "sha256": _block_digests(path)}
        rows.append(row)
    others = [] if source.path in source.files else [source.path]
    if model.folder is not None:
        others += [model.folder.path / name for name in model.folder.texts]
    for path in others:
        if path.stat().st_size > MAX_INDEX:
            raise FormatError(f"{path}: {path.stat().st_size} bytes; expected at most {MAX_INDEX}")
    return rows + [_file_row(path) for path in others]


def _file_row(path: Path) -> FileRow:
    """Return {name, size, sha256} of a file."""
    return {"name": path.name, "size": path.stat().st_size, "sha256": file_sha256(path)}


def _block_digests(path: Path) -> list[str]:
    """Return SHA-256 in hex of every 1 MiB block of a file, the last one shorter."""
    with closing(open_bytes(path)) as file:
        return [sha256_of_pieces([window]) for window in file.windows(0, file.size, BLOCK)]


def _digest_outside_tensors(path: Path, shard: Shard[Any]) -> str:
    """Return SHA-256 in hex of the bytes of a file that belong to no tensor."""

    def gaps(file: ByteSource) -> Iterator[memoryview]:
        """Yield the bytes of an opened file before, between and after its tensors."""
        plain = shard.data is shard.file  # tensors of a compressed file lie nowhere
        infos = shard.parsed.infos.values() if plain else ()
        tensors = sorted((info.offset, info.offset + info.nbytes) for info in infos)
        for _, piece in bytes_between(file, [*tensors, (file.size, file.size)]):
            yield piece

    with closing(open_bytes(path)) as file:
        return sha256_of_pieces(gaps(file))


def bytes_between(
    file: ByteSource, parts: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) of what lies before and between ranges of a file, in windows.

    `parts` are the ranges (first, end), sorted. Bytes after the last range are not yielded.
    """
    at = 0
    for start, stop in parts:
        for piece in file.windows(at, start):
            yield at, piece
            at += len(piece)
        at = max(at, stop)


def check_manifest_writable(model: Path, *, force: bool = False) -> None:
    """Raise the OutputError that `write_manifest` would raise, before anything is hashed."""
    files = FileSet(force=force)
    try:
        files.create(manifest_path(model))
    finally:
        files.discard()


def write_manifest(
    model: Model, tensors: Sequence[TensorRow], *, force: bool = False, blocks: bool = False
) -> Path:
    """Write the manifest into the model's folder and return its path.

    Raises OutputError where one exists and not `force`. `blocks` adds a digest per MiB.
    """
    path = manifest_path(model.path)
    body = {
        "schema": SCHEMA,
        "format": model.format,
        "files": file_rows(model, blocks),
        "tensors": list(tensors),
    }
    with FileSet(force=force) as files:
        files.create(path).write(dumps(body).encode() + b"\n")
    return path


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest in a file. FormatError for a file that is none, or is damaged."""
    try:
        found = load_file(path, max_bytes=MAX_MANIFEST)
    except FormatError as error:
        raise FormatError(f"{error}; expected what `aprfmt hash --write` wrote") from None
    return check_manifest(found, path)


def check_manifest(manifest: Any, path: Path) -> dict[str, Any]:
    """Return `manifest`, a parsed JSON value, if it has a manifest's form; else FormatError."""
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise FormatError(f"{path}: is no hash manifest; expected schema {SCHEMA}")
    wanted: tuple[tuple[str, Mapping[str, type]], ...] = (
        ("tensors", {"key": str, "names": list, "encoding": str, "raw": list}),
        ("files", {"name": str, "size": int, "sha256": str}),
    )
    for part, fields in wanted:
        rows = manifest.get(part)
        whole = isinstance(rows, list) and all(
            isinstance(row, dict) and all(isinstance(row.get(k), t) for k, t in fields.items())
            for row in rows
        )
        if not whole:
            raise FormatError(f"{path}: its list of {part} is damaged; write it again")
    if not all(_has_valid_blocks(row) for row in manifest["files"]):
        raise FormatError(f"{path}: its digests of blocks are damaged; write it again")
    return manifest


def _has_valid_blocks(row: FileRow) -> bool:
    """Return whether a file's row has no block digests, or exactly one per block."""
    if "blocks" not in row:
        return True
    found = row["blocks"]
    if not isinstance(found, dict) or type(step := found.get("size")) is not int or step < 1:
        return False
    digests = found.get("sha256")
    return (
        isinstance(digests, list)
        and all(isinstance(digest, str) for digest in digests)
        and len(digests) == -(-row["size"] // step)
    )


def compare_manifest(
    manifest: Mapping[str, Any],
    model: Model,
    tensors: Sequence[TensorRow],
    *,
    selected: bool = False,
    files: bool = True,
) -> list[Failure]:
    """Return what differs from a manifest, as [{key, what}]; [] if nothing does.

    `key` is a tensor's key or a file's name, `what` a phrase. A manifest of the same model in
    another format is compared by decoded values alone. With `selected`, `tensors` are only some of
    the model's, and nothing else is compared; without `files` no digest of a whole file is made.
    """
    expected = {row["key"]: row for row in manifest["tensors"]}
    found = {row["key"]: row for row in tensors}
    keys = found if selected else dict.fromkeys((*expected, *found))
    failures = [
        {"key": key, "what": what}
        for key in keys
        if (what := _tensor_difference(expected.get(key), found.get(key)))
    ]
    if selected or not files or manifest.get("format") != model.format:
        return failures
    return [*failures, *_file_differences(manifest["files"], file_rows(model), bool(failures))]


def pronounce_manifest(
    manifest: Mapping[str, Any],
    failures: Sequence[Failure],
    tensors: Sequence[TensorRow],
    model: Model,
    *,
    selected: bool = False,
    late: str = "",
    accept: Collection[str] = (),
) -> "Pronounced":
    """Return the verdict on a model that was compared with a manifest.

    `failures` are {key, what} of what differs, `tensors` the model's rows. Unless `selected`, files
    of the folder that nothing reads are among what was not compared. `late` says why whole files
    were not compared, where a budget left them. `accept` are patterns (`unread:PATTERN`) of what
    was not compared and the user accepts.
    """
    from aprfmt.model.ledger import LATE, Kind, NotCompared, damaged_files, make_ledger
    from aprfmt.model.verdict import Compared, VerdictWords, pronounce

    files: tuple[Kind, ...] = ("file",)
    apart = {row["key"] for row in failures}
    done = sum(row["key"] not in apart and "not_reached" not in row for row in tensors)
    left: tuple[NotCompared, ...] = () if selected else make_ledger(model, files).not_compared
    if manifest.get("format") != model.format and not selected:
        why = f"the manifest is of {manifest.get('format')}"
        left = (*left, NotCompared("section", "keys and texts", "no counterpart", why))
    if late:
        left = (*left, *(NotCompared("file", row["name"], LATE, late) for row in manifest["files"]))
    left = (
        *left,
        *(
            NotCompared("tensor", row["key"], LATE, row["not_reached"])
            for row in tensors
            if "not_reached" in row
        ),
    )
    broken = [row for row in failures if row["what"].startswith(_CANNOT)]
    unread = (NotCompared("tensor", row["key"], "unreadable", row["what"]) for row in broken)
    words = VerdictWords("equal to the manifest", "not what the manifest says")
    counts = {"tensors": (done, len(tensors))}
    left = (*left, *unread, *damaged_files(model.damage))
    return pronounce(words, Compared(len(failures) > len(broken), counts, left), accept)


def _tensor_difference(expected: TensorRow | None, found: TensorRow | None) -> str:
    """Return how a tensor differs from its manifest row, as a phrase; "" if it does not.

    Different stored bytes are no difference if the decoded values are equal and the tensor has
    another encoding or other names.
    """
    if found is None:
        return "missing in the model"
    if expected is None:
        return "not in the manifest"
    if "not_reached" in found:
        return ""
    if "damage" in found:
        return f"{_CANNOT}{found['damage']}"
    raw = found["raw"] == expected["raw"]
    if found.get("decoded") and expected.get("decoded"):
        if found["decoded"] != expected["decoded"]:
            return "decoded values differ"
        same_kind = all(found[key] == expected[key] for key in ("encoding", "names"))
        return "stored bytes differ, values are equal" if same_kind and not raw else ""
    return "" if raw else "stored bytes differ"


def _file_differences(
    expected: Sequence[FileRow], found: Sequence[FileRow], tensors_differ: bool
) -> Iterator[Failure]:
    """Yield a failure {key, what} for each file that differs from the manifest.

    `expected` are the manifest's rows, `found` the model's; files of weights are paired by order.
    With `tensors_differ` a failure of a tensor is listed already, so that a changed digest of a
    whole file is not reported.
    """
    weights = [[row for row in rows if "outside" in row] for rows in (expected, found)]
    if len(weights[0]) != len(weights[1]):
        what = f"the manifest has {len(weights[0])} files of weights, the model {len(weights[1])}"
        yield {"key": found[0]["name"] if found else "", "what": what}
        return
    for before, now in zip(*weights, strict=True):
        if before["size"] != now["size"]:
            what = f"has {now['size']} bytes, the manifest says {before['size']}"
            yield {"key": now["name"], "what": what}
        elif before["outside"] != now["outside"]:
            yield {"key": now["name"], "what": _OUTSIDE}
        elif before["sha256"] != now["sha256"] and not tensors_differ:
            yield {"key": now["name"], "what": "the file's bytes differ"}
    texts = [
        {row["name"]: row for row in rows if "outside" not in row} for rows in (expected, found)
    ]
    for name in dict.fromkeys((*texts[0], *texts[1])):
        if name not in texts[1]:
            yield {"key": name, "what": "missing next to the model"}
        elif name not in texts[0]:
            yield {"key": name, "what": "not in the manifest"}
        elif texts[0][name]["sha256"] != texts[1][name]["sha256"]:
            yield {"key": name, "what": "its text differs"}
