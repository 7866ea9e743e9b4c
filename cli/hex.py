"""`aprfmt hex`: header fields or decoded blocks beside their bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import complete, options, render
from aprfmt.cli.damage import told

if TYPE_CHECKING:
    from aprfmt.base.protocols import Damage


@click.command("hex")
@options.model()
@click.argument("name", required=False, shell_complete=complete.tensors)
@click.option("--tensor", "named", metavar="NAME", help="The same as NAME.",
              shell_complete=complete.tensors)  # fmt: skip
@click.option("--block", type=click.IntRange(min=0), default=0, help="First block to show.")
@click.option("--blocks", type=click.IntRange(min=1), default=2, show_default=True,
              help="How many blocks to show.")  # fmt: skip
@click.option("--offset", type=click.IntRange(min=0), help="Dump plain bytes from here instead.")
@click.option("--length", type=click.IntRange(min=1), default=256, show_default=True,
              help="Bytes to dump with --offset.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), default=64, show_default=True,
              help="Header fields to show.")  # fmt: skip
@options.common
def command(
    model: Path,
    name: str | None,
    named: str | None,
    block: int,
    blocks: int,
    offset: int | None,
    length: int,
    limit: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Show header fields, or the blocks of tensor NAME, or plain bytes, each beside its bytes.

    NAME is as `aprfmt cat` takes it: a stored name, a role, or a pattern of one tensor.
    """
    from aprfmt.errors import UsageError

    if name is not None and named is not None:
        raise UsageError(f"two tensors, {name!r} and --tensor {named!r}; give one of them")
    name = named if name is None else name
    if name is not None and offset is not None:
        raise UsageError(f"tensor {name!r} and --offset; give one of them")
    if name is not None:
        body = tensor_blocks(model, name, block, blocks)
    elif offset is not None:
        body = plain_bytes(model, offset, length)
    else:
        body = header(model, limit)
    if not as_json:
        show(body)
    body["damage"], code = told(body.get("damage", ()))
    return render.emit("hex", code, body, as_json)


def header(model: Path, limit: int) -> dict[str, Any]:
    """Return the header's fields with their bytes."""
    from aprfmt.formats import detect
    from aprfmt.formats.mapped import MappedFile
    from aprfmt.model import open_model

    path, damage = model, None
    if model.is_dir() or model.suffix == ".json":  # a folder, an index, a manifest: its first file
        with open_model(model, partial=True, damaged=True) as opened:
            path, damage = opened.source.files[0], opened.damage
    spec = detect(path)
    file = MappedFile(path)
    try:
        rows: list[dict[str, Any]] = []
        total = 0
        for field in spec.header_fields(file.view, str(path)):
            total += 1
            if len(rows) < limit:
                raw = bytes(file.view[field.offset : field.offset + min(field.nbytes, 16)])
                rows.append(
                    {"offset": field.offset, "nbytes": field.nbytes, "bytes": raw.hex(),
                     "name": field.name, "value": field.value}
                )  # fmt: skip
        return {"path": str(path), "format": spec.name, "fields": rows, "count": total,
                "damage": damage_of_file(path) if damage is None else damage}  # fmt: skip
    finally:
        file.close()


def damage_of_file(path: Path) -> "list[Damage]":
    """Return what is wrong with one file, whatever set it belongs to."""
    from aprfmt.errors import FormatError
    from aprfmt.formats import open_source

    try:
        with open_source(path, partial=True, damaged=True) as source:
            return [one for one in source.damage if one.where == str(path)]
    except FormatError:  # of the set: its header has just been read
        return []


def plain_bytes(model: Path, offset: int, length: int) -> dict[str, Any]:
    """Return bytes of the file as they stand."""
    from aprfmt.errors import UsageError
    from aprfmt.formats.mapped import MappedFile

    file = MappedFile(model)
    try:
        if offset >= file.size:
            raise UsageError(f"{model}: --offset {offset}, the file has {file.size} bytes")
        raw = bytes(file.view[offset : offset + length])
        return {"path": str(model), "offset": offset, "bytes": raw.hex()}
    finally:
        file.close()


def tensor_blocks(model: Path, name: str, first: int, count: int) -> dict[str, Any]:
    """Return blocks of a tensor: byte fields as the codec maps them, and decoded values."""
    from aprfmt.base.encodings import encoding
    from aprfmt.errors import UsageError
    from aprfmt.model import open_model
    from aprfmt.model.patterns import select_one
    from aprfmt.model.resolve import spellings_by_name

    with open_model(model, damaged=True) as opened:
        stored = opened.source.tensors
        every = spellings_by_name(opened)
        names = list(stored)
        at = select_one([every.get(each, (each,)) for each in names], name, str(model))
        tensor = stored[names[at]]
        tensor.raw(0, 0)  # a damaged one says so
        info = tensor.info
        row = encoding(info.encoding)
        if not row.known or not info.nbytes:
            raise UsageError(f"{info.name}: {info.encoding} has no blocks to show; use --offset")
        size = row.type_size if row.block_size > 1 else 16 // row.type_size * row.type_size
        total = -(-(info.nbytes - row.header) // size)
        if first >= total:
            raise UsageError(f"{info.name}: --block {first}, the tensor has {total} blocks")
        rows = []
        for i in range(first, min(total, first + count)):
            start = row.header + i * size
            raw = bytes(tensor.raw(start, min(start + size, info.nbytes)))
            rows.append(
                {"block": i, "offset": info.offset + start, **block_row(info.encoding, raw)}
            )
        return {
            "path": str(opened.path), "tensor": info.name, "encoding": info.encoding,
            "shape": list(info.shape), "count": total, "blocks": rows,
            "damage": opened.damage,
        }  # fmt: skip


def block_row(encoding: str, raw: bytes) -> dict[str, Any]:
    """Return one block's fields (name, bytes, values) and its decoded values."""
    import numpy as np

    from aprfmt.codecs import codec, decode

    reference = codec(encoding)
    layout = reference.layout
    fields = []
    if layout is not None and layout.names and layout.fields:
        record = np.frombuffer(raw[: layout.itemsize], layout)[0]
        for field in layout.names:
            kind, at = layout.fields[field][:2]
            fields.append(
                {"name": field, "bytes": raw[at : at + kind.itemsize].hex(),
                 "value": np.asarray(record[field]).reshape(-1)[:8].tolist()}
            )  # fmt: skip
    values: list[Any] | None = None
    if reference.parts == ("",):
        count = len(raw) // reference.type_size * reference.block_size
        values = decode(encoding, {"": raw}, (count,)).tolist()
    return {"bytes": raw.hex(), "fields": fields, "values": values}


def hex_lines(raw: bytes, offset: int) -> Iterator[str]:
    """Yield classic dump lines: offset, sixteen bytes, ASCII."""
    for start in range(0, len(raw), 16):
        piece = raw[start : start + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
        yield f"{offset + start:08x}  {piece.hex(' '):47}  {text}"


def show(body: dict[str, Any]) -> None:
    """Print fields, blocks or plain bytes."""
    if "fields" in body:
        for row in body["fields"]:
            raw = bytes.fromhex(row["bytes"])
            dots = " .." if row["nbytes"] > len(raw) else ""
            render.line(
                render.escape(
                    f"{row['offset']:08x}  {raw.hex(' ') + dots:50}  {row['name']} = {row['value']}"
                )
            )
        if len(body["fields"]) < body["count"]:
            render.line(f"... {body['count'] - len(body['fields'])} more (--limit)", style="dim")
        return
    if "blocks" not in body:
        for text in hex_lines(bytes.fromhex(body["bytes"]), body["offset"]):
            render.line(text)
        return
    render.line(
        render.escape(f"{body['tensor']} {render.shape_text(body['shape'])} {body['encoding']}, "
                      f"{body['count']} blocks"),
        style="head",
    )  # fmt: skip
    for row in body["blocks"]:
        render.line(f"block {row['block']} at offset {row['offset']}", style="head")
        for field in row["fields"]:
            raw = bytes.fromhex(field["bytes"])
            shown = raw[:16].hex(" ") + (" .." if len(raw) > 16 else "")
            render.line(f"  {field['name']:8} {shown:50}  {field['value']}")
        if not row["fields"]:
            for text in hex_lines(bytes.fromhex(row["bytes"]), row["offset"]):
                render.line(f"  {text}")
        if row["values"] is not None:
            render.line(
                "  values   "
                + " ".join(
                    f"{v:.6g}" if isinstance(v, float) else str(v) for v in row["values"][:16]
                )
                + (" .." if len(row["values"]) > 16 else "")
            )
