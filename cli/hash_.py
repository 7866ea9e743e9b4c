"""`aprfmt hash`: ordered SHA-256 of every tensor; a manifest to find damage by."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options, render

SCHEMA = "aprfmt.hash-manifest/1"


@click.command("hash")
@options.model()
@options.tensor
@click.option("--raw-only", is_flag=True, help="Stored bytes only; nothing is decoded.")
@click.option("--write", is_flag=True, help="Write MODEL.aprfmt-hash.json beside the model.")
@click.option("--check", type=click.Path(path_type=Path), metavar="MANIFEST",
              help="Compare with a manifest; exit 1 names every tensor that differs.")  # fmt: skip
@options.arch
@options.force
@options.common
def command(
    model: Path,
    patterns: tuple[str, ...],
    raw_only: bool,
    write: bool,
    check: Path | None,
    arch: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """SHA-256 per tensor: of the stored bytes, and of the decoded logical values.

    The decoded hash is equal across formats: over `shape` and little-endian float32 values
    (float64 for F64, int64 for integers) with all layout steps undone.
    """
    from aprfmt.model import open_model

    with open_model(model, arch=arch) as opened:
        with render.Progress("hash", quiet) as progress:
            rows = hashes(opened, patterns, raw_only, progress)
        body: dict[str, Any] = {"model": str(opened.path), "tensors": rows}
        code = 0
        if write:
            body["written"] = str(write_manifest(opened, rows, force))
        if check is not None:
            failures = compare(check, rows)
            body["failures"] = failures
            code = 1 if failures else 0
    if not as_json:
        show(body)
    return render.emit("hash", code, body, as_json)


def hashes(
    opened: Any, patterns: tuple[str, ...], raw_only: bool, progress: Any
) -> list[dict[str, Any]]:
    """Return {key, name, encoding, shape, raw, decoded} of every tensor, by role where known."""
    from aprfmt.digest import decoded_sha256, raw_sha256
    from aprfmt.errors import AprfmtError, ArchError
    from aprfmt.names import select
    from aprfmt.resolve import spellings

    sides: list[tuple[str, tuple[str, ...], Any]] = []
    claimed: set[str] = set()
    try:
        for key, logical in opened.roles.items():
            sides.append((key, logical.group.stored, logical))
            claimed.update(logical.group.stored)
    except ArchError:
        pass
    sides += [(name, (name,), opened[name]) for name in opened if name not in claimed]
    if patterns:
        every = spellings(opened)
        names_of = [every.get(key, (key, *names)) for key, names, _ in sides]
        sides = [sides[i] for i in select(names_of, patterns, str(opened.path))]
    rows = []
    for i, (key, names, side) in enumerate(sides):
        stored = [opened[name] for name in names]
        row: dict[str, Any] = {
            "key": key,
            "names": list(names),
            "encoding": side.encoding,
            "shape": list(side.shape),
            "raw": [raw_sha256(tensor.lazy) for tensor in stored],
        }
        if not raw_only:
            try:
                row["decoded"] = decoded_sha256(side.numpy())
            except AprfmtError as error:
                row["decoded"] = None
                row["undecodable"] = str(error)
        rows.append(row)
        progress(i + 1, len(sides))
    return rows


def manifest_path(model: Path) -> Path:
    """Return where a model's manifest stands."""
    return model.with_name(model.name + ".aprfmt-hash.json")


def write_manifest(opened: Any, rows: list[dict[str, Any]], force: bool) -> Path:
    """Publish the manifest beside the model."""
    from aprfmt.formats.atomic import FileSet
    from aprfmt.formats.jsonio import dumps

    path = manifest_path(opened.path)
    with FileSet(force=force) as files:
        files.create(path).write(dumps({"schema": SCHEMA, "tensors": rows}).encode() + b"\n")
    return path


def compare(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return what differs from a manifest: {key, what}; FormatError for a file that is none."""
    from aprfmt.errors import FormatError
    from aprfmt.formats.jsonio import load_file

    manifest = load_file(path, max_bytes=256 << 20)
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise FormatError(f"{path}: is no hash manifest; expected schema {SCHEMA}")
    try:
        expected = {row["key"]: row for row in manifest["tensors"]}
    except (KeyError, TypeError):
        raise FormatError(f"{path}: its list of tensors is damaged") from None
    found = {row["key"]: row for row in rows}
    failures = []
    for key in dict.fromkeys((*expected, *found)):
        if key not in found:
            failures.append({"key": key, "what": "missing in the model"})
        elif key not in expected:
            failures.append({"key": key, "what": "not in the manifest"})
        elif found[key].get("decoded") and expected[key].get("decoded"):
            if found[key]["decoded"] != expected[key]["decoded"]:
                failures.append({"key": key, "what": "decoded values differ"})
            elif found[key]["raw"] != expected[key]["raw"] and (
                found[key]["encoding"] == expected[key]["encoding"]
                and found[key]["names"] == expected[key]["names"]
            ):
                failures.append({"key": key, "what": "stored bytes differ, values are equal"})
        elif found[key]["raw"] != expected[key]["raw"]:
            failures.append({"key": key, "what": "stored bytes differ"})
    return failures


def show(body: dict[str, Any]) -> None:
    """Print the hashes, or the verdict of a check."""
    if "failures" in body:
        for row in body["failures"]:
            render.line(render.escape(f"FAIL {row['key']}: {row['what']}"), style="bad")
        if not body["failures"]:
            render.line(f"all {len(body['tensors'])} tensors match", style="good")
        return
    for row in body["tensors"]:
        render.line(
            render.escape(
                f"{row.get('decoded') or '-':64}  {row['raw'][0][:16]}  {row['encoding']:8} "
                f"{row['key']}"
            )
        )
    if "written" in body:
        render.line(f"wrote {render.escape(body['written'])}")
