"""`aprfmt inspect`: what a file is, without reading its tensors."""

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage import told
from aprfmt.cli.inspect_html import Paged, write

if TYPE_CHECKING:
    from aprfmt.base.protocols import Source
    from aprfmt.model import Model
    from aprfmt.model.resolve import Resolution


@click.command("inspect")
@options.gathered(paged=Paged)
@options.model()
@click.option("--partial", is_flag=True, help="A cut file, or a missing one of a set, is no error.")
@click.option("--verify", is_flag=True, help="Read every byte and check the file's own checksum.")
@click.option("--metadata", "all_metadata", is_flag=True, help="Print every metadata key.")
@options.html("Write a page: where the bytes are, tensors, metadata, tokenizer, checks.")
@click.option("--stats", is_flag=True, help="With --html: read all; statistics, histograms.")
@click.option("--vocabulary", is_flag=True, help="With --html: every token, not some of them.")
@options.arch
@options.force
@options.common
def command(
    model: Path,
    partial: bool,
    verify: bool,
    all_metadata: bool,
    arch: str | None,
    as_json: bool,
    quiet: bool,
    paged: Paged,
) -> int:
    """Show format, sizes, architecture, hyperparameters with origin, tokenizer, encodings.

    Reads no tensor. A damaged file is shown as far as it can be read: exit 2. With --verify a
    wrong checksum is exit 1, a file that carries none exit 2.
    """
    from aprfmt.model import open_model

    paged.check()
    if arch is not None:
        from aprfmt.arch import ARCHS

        _ = ARCHS[arch]  # a name nobody knows is an error, not a file without architecture
    with open_model(model, arch=arch, partial=partial, damaged=True) as opened:
        body = facts(opened)
        if not as_json:
            show(opened, body, all_metadata)
        body["damage"], code = told(opened.damage, partial=partial)
        if paged.html is not None:
            write(opened, body, paged, quiet)
            body["html"] = str(paged.html)
        if verify:
            from aprfmt.base.outcome import exit_code

            body["checksum"] = verified(opened.source)
            code = code or exit_code(body["checksum"])
    return render.emit("inspect", code, body, as_json)


def verified(source: "Source") -> str:
    """Read every byte of a file that carries a checksum of them; say PASS, FAIL or NOT_RUN."""
    from aprfmt.formats import checksum_matches, checksum_notes

    matches = checksum_matches(source)
    if matches is None:
        render.warn(f"{source.path}: carries no checksum of its bytes, so nothing was verified; "
                    "aprfmt hash --write makes a manifest beside it")  # fmt: skip
        return "NOT_RUN"
    for note in checksum_notes(source, matches):
        render.warn(f"{note.where}: {note.text}")
    return "PASS" if matches else "FAIL"


def facts(opened: "Model") -> dict[str, Any]:
    """Return everything `inspect` says, as plain data."""
    from aprfmt.compare import shown
    from aprfmt.errors import AprfmtError

    census: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    for tensor in opened.values():
        count = math.prod(tensor.shape)
        census[tensor.encoding] += 1
        weights[tensor.encoding] += count
        stored[tensor.encoding] += tensor.nbytes
    source = opened.source
    body: dict[str, Any] = {
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
        "metadata": {key: shown(value) for key, value in opened.metadata.items()},
        "config": str(opened.folder.path / "config.json")
        if opened.folder is not None and opened.folder.config is not None
        else None,
    }
    notes = [asdict(note) for note in opened.notes]
    body["architecture"] = None
    try:
        resolution = opened.resolution
    except AprfmtError as error:
        body["architecture_error"] = str(error)
    else:
        body.update(resolved(resolution))
        notes += [asdict(note) for note in resolution.notes]
        where = str(opened.path)
        notes += [
            {"level": "warning", "where": where, "text": text}
            for text in resolution.report.warnings
        ]
    from aprfmt.tokenizer import facts as tokenizer_facts

    try:
        body["tokenizer"] = dict(tokenizer_facts(opened, quick=True))
    except AprfmtError as error:
        body["tokenizer"] = {"error": str(error)}
    body["notes"] = notes
    return body


def resolved(resolution: "Resolution") -> dict[str, Any]:
    """Return what the architecture's tables made of the file."""
    report, hyper = resolution.report, resolution.hyper
    return {
        "architecture": resolution.spec.name,
        "level": resolution.spec.level,
        "hyperparameters": {
            name: {
                "value": hyper.of(name).value,
                "origin": hyper.of(name).origin,
                "key": hyper.of(name).key,
            }
            for name in hyper
        },
        "keys": {
            "read": dict(report.read),
            "defaulted": list(report.defaulted),
            "ignored": list(report.ignored),
            "unknown": list(report.unknown),
        },
        "conflicts": [str(row) for row in report.conflicts],
        "roles": {
            "found": len(resolution.roles),
            "required": resolution.coverage.expected,
            "missing": list(resolution.missing),
            "accepted": list(resolution.coverage.accepted),
        },
        "unclaimed": list(resolution.unbound),
    }


def show(opened: "Model", body: dict[str, Any], all_metadata: bool) -> None:
    """Print the facts for people."""
    files = f" in {len(body['files'])} files" if len(body["files"]) > 1 else ""
    render.line(render.escape(body["path"]), style="head")
    rows: list[tuple[str, object]] = [
        ("format", f"{body['format']} {body['version']}".strip()),
        ("size", f"{render.size_text(body['file_bytes'])}{files}"),
        ("tensors", body["tensor_count"]),
        ("parameters", f"{body['parameters']:,}"),
        ("architecture", body["architecture"] or "unknown"),
        *([("level", _LEVELS[body["level"]])] if body["architecture"] else ()),
    ]
    if body["config"]:
        rows.append(("config", body["config"]))
    render.pairs(rows)
    if body["architecture"] is None:
        render.warn(body["architecture_error"])
    else:
        _show_resolved(body)
    render.line("encodings", style="head")
    render.table(
        [
            (name, row["tensors"], f"{row['parameters']:,}", render.size_text(row["bytes"]))
            for name, row in body["encodings"].items()
        ],
        ("encoding", "tensors", "parameters", "bytes"),
        "lrrr",
    )
    render.line("tokenizer", style="head")
    render.pairs(sorted(body["tokenizer"].items()) or [("none", "the file carries no tokenizer")])
    if all_metadata:
        render.line("metadata", style="head")
        render.pairs((key, value) for key, value in body["metadata"].items())
    for note in body["notes"]:
        render.warn(f"{note['where']}: {note['text']}")


def _show_resolved(body: dict[str, Any]) -> None:
    render.line("hyperparameters", style="head")
    render.table(
        [
            (name, _short(row["value"]), row["origin"], row["key"])
            for name, row in body["hyperparameters"].items()
        ],
        ("name", "value", "origin", "key"),
    )
    keys = body["keys"]
    for kind in ("ignored", "unknown"):
        if keys[kind]:
            render.line(f"config keys {kind}: {render.escape(', '.join(keys[kind]))}")
    for conflict in body["conflicts"]:
        render.warn(conflict)
    roles = body["roles"]
    for kind, said in (("missing", "missing"), ("accepted", "missing and accepted as such")):
        if roles[kind]:
            render.warn(
                f"{len(roles[kind])} of {roles['required']} tensors the configuration demands are "
                f"{said}: {', '.join(roles[kind][:4])}{', ...' if len(roles[kind]) > 4 else ''}"
            )
    if body["unclaimed"]:
        render.line(f"tensors of no role: {render.escape(', '.join(body['unclaimed'][:6]))}")


_LEVELS = {"full": "full", "names": "names (no forward pass)"}


def _short(value: object) -> str:
    """Return a hyperparameter value in one cell; a layer list that is all one value as `all x`."""
    if isinstance(value, (list, tuple)) and len(value) > 4:
        if len(set(map(str, value))) == 1:
            return f"{value[0]} in all {len(value)} layers"
        if all(isinstance(item, bool) for item in value):
            return "".join("1" if item else "0" for item in value)
    return str(value)
