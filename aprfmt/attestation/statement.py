"""Writes an attestation as an in-toto statement, and compares it with an earlier statement.

A statement has `_type`, `subject` (the files, by SHA-256), `predicateType` and `predicate`. Source:
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md. The predicate is ours: the
base, the recipe, and by role the digests of the file's and of the made bytes with the state of each
weight.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aprfmt.base.version import __version__
from aprfmt.errors import FormatError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import dumps, load_file
from aprfmt.model import Model
from aprfmt.model.manifest import MAX_MANIFEST, tensor_rows
from aprfmt.quantizing.mixture import QUANTIZER_VERSION
from aprfmt.tensors.digest import file_sha256

TYPE = "https://in-toto.io/Statement/v1"
# Parts of a tensor's row that a check compares; how it was made may depend on the base's format.
_COMPARED: Mapping[str, str] = {
    "sha256": "stored bytes",
    "state": "state",
    "encoding": "encoding",
    "names": "stored names",
}
PREDICATE = "tag:aprfmt,2026:attest/v1"  # RFC 4151: a name, not a place


def make_statement(base: Model, quantized: Model, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the in-toto statement of an attestation; `found` is its `to_json`.

    The base's digests are of decoded values, so that a copy of it in another format has the same.
    `quantized` is the quantized model.
    """
    return {
        "_type": TYPE,
        "subject": _file_digests(quantized),
        "predicateType": PREDICATE,
        "predicate": {
            "tool": {"name": "aprfmt", "version": __version__, "quantizer": QUANTIZER_VERSION},
            "verdict": found["verdict"],
            "recipe": found["recipe"],
            "base": {
                "files": _file_digests(base),
                "tensors": {row["key"]: row.get("decoded") for row in tensor_rows(base)},
            },
            "tensors": {
                row["key"]: {key: row[key] for key in ("encoding", "state", "how")}
                | {key: list(row[key]) for key in ("names", "sha256")}
                for row in found["tensors"]
            },
        },
    }


def _file_digests(model: Model) -> list[dict[str, Any]]:
    """Return [{name, digest: {sha256}}] of every file of a model."""
    return [
        {"name": path.name, "digest": {"sha256": file_sha256(path)}} for path in model.source.files
    ]


def write_statement(statement: Mapping[str, Any], path: Path, *, force: bool = False) -> None:
    """Write a statement as JSON; OutputError where the file exists, unless `force`."""
    with FileSet(force=force) as files:
        files.create(path).write(dumps(statement).encode() + b"\n")


def read_statement(path: Path) -> dict[str, Any]:
    """Return the statement that a file holds; FormatError where it holds anything else."""
    found = load_file(path, max_bytes=MAX_MANIFEST)
    wanted = {"_type": TYPE, "predicateType": PREDICATE}
    for key, value in wanted.items():
        said = found.get(key) if isinstance(found, dict) else None
        if said != value:
            raise FormatError(
                f"{path}: {key} is {said!r}; expected {value!r}: a statement of aprfmt attest"
            )
    body = found.get("predicate")
    base = body.get("base") if isinstance(body, dict) else None
    shaped = (
        isinstance(found.get("subject"), list)
        and isinstance(base, dict)
        and isinstance(base.get("tensors"), dict)
        and isinstance(body.get("tensors"), dict)
        and isinstance(body.get("recipe"), dict)
    )
    if not shaped:
        raise FormatError(
            f"{path}: lacks subject, or base, recipe or tensors of its predicate; it is cut or "
            "was edited"
        )
    return dict(found)


def statement_faults(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each fact of the statement `earlier` that is different in `now`."""
    old, new = earlier["predicate"], now["predicate"]
    if old.get("verdict") != "derived":
        yield f"the statement itself says {old.get('verdict')}"
    if _count_digests(earlier["subject"]) != _count_digests(now["subject"]):
        yield "the files are not those of the statement, by SHA-256"
    if _imatrix_digest(old["recipe"]) != _imatrix_digest(new["recipe"]):
        yield (
            f"importance matrix {_imatrix_digest(new['recipe']) or 'none'}; the statement says "
            f"{_imatrix_digest(old['recipe']) or 'none'}"
        )
    for key in ("type", "drop"):
        if old["recipe"].get(key) != new["recipe"].get(key):
            yield (
                f"recipe {key} {new['recipe'].get(key)!r}; the statement says "
                f"{old['recipe'].get(key)!r}"
            )
    yield from _changed_keys("the base's values of", old["base"]["tensors"], new["base"]["tensors"])
    for part, word in _COMPARED.items():
        yield from _changed_keys(
            f"the {word} of", _part_column(old["tensors"], part), _part_column(new["tensors"], part)
        )


def _count_digests(subjects: Any) -> Counter[str]:
    """Return {SHA-256: how often it is among the subjects}."""
    rows = [one.get("digest") for one in subjects if isinstance(one, Mapping)]
    return Counter(str(one.get("sha256")) for one in rows if isinstance(one, Mapping))


def _imatrix_digest(recipe: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a recipe's importance matrix; "" without one."""
    matrix = recipe.get("imatrix")
    return str(matrix.get("sha256")) if isinstance(matrix, Mapping) else ""


def _part_column(rows: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return {name: row[part]} over all rows of a statement; None where a row has no such key."""
    return {key: row.get(part) if isinstance(row, Mapping) else None for key, row in rows.items()}


def _changed_keys(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that has another value, is new, or is missing now.

    `what` begins the sentence. `old` are the earlier statement's values by key, `new` those of now.
    """
    for key in dict.fromkeys((*old, *new)):
        if key not in new:
            yield f"{what} {key}: the statement has it, and here is none"
        elif key not in old:
            yield f"{what} {key}: not in the statement"
        elif old[key] != new[key]:
            yield f"{what} {key}: not those of the statement"
