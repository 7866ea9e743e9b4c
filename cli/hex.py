"""`aprfmt hex`: header fields or decoded blocks, each next to its bytes.

A *block* is a quantization block: elements that are encoded together.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict, final

import click
import numpy as np

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import Damage
from aprfmt.cli import options, render, shell_completion
from aprfmt.cli.damage_report import report_damage
from aprfmt.codecs import codec, decode
from aprfmt.errors import FormatError, UsageError
from aprfmt.formats import detect_format, open_source
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.model import open_model
from aprfmt.model.patterns import one_matching_index
from aprfmt.model.resolve import spellings_by_name


class FieldRow(TypedDict):
    """A field of a header: its first 16 bytes in hex, and what they say."""

    offset: int
    nbytes: int
    bytes: str
    name: str
    value: str


@final
class HeaderRows(TypedDict):
    """The fields of a file's header; `count` is the number of all, also of those not shown."""

    path: str
    format: str
    fields: list[FieldRow]
    count: int
    damage: list[dict[str, object]]


class BlockField(TypedDict):
    """A field of a block: its name, its bytes in hex, and at most eight of its values."""

    name: str
    bytes: str
    value: list[object]


class BlockRow(TypedDict):
    """A block: its bytes in hex, its fields, and its decoded values if it can be decoded alone."""

    block: int
    offset: int
    bytes: str
    fields: list[BlockField]
    values: list[float] | None


@final
class TensorBlocks(TypedDict):
    """Some blocks of a tensor; `count` is the number of all that it has."""

    path: str
    tensor: str
    encoding: str
    shape: list[int]
    count: int
    blocks: list[BlockRow]
    damage: list[dict[str, object]]


@final
class PlainBytes(TypedDict):
    """Undecoded bytes of a file, in hex."""

    path: str
    offset: int
    bytes: str
    damage: list[dict[str, object]]


def header_rows(model: Path, limit: int) -> tuple[HeaderRows, Sequence[Damage]]:
    """Return (at most `limit` header fields with their bytes, the file's damage).

    Of a folder, an index or a manifest it is the header of the first file.
    """
    path, damage = model, None
    if model.is_dir() or model.suffix == ".json":  # a folder, an index, a manifest: its first file
        with open_model(model, partial=True, damaged=True) as opened:
            path, damage = opened.source.files[0], opened.damage
    spec = detect_format(path)
    with closing(open_bytes(path)) as file:
        rows: list[FieldRow] = []
        total = 0
        for field in spec.header_fields(file.view, str(path)):
            total += 1
            if len(rows) < limit:
                raw = bytes(file.view[field.offset : field.offset + min(field.nbytes, 16)])
                rows.append(
                    {
                        "offset": field.offset,
                        "nbytes": field.nbytes,
                        "bytes": raw.hex(),
                        "name": field.name,
                        "value": field.value,
                    }
                )
        body: HeaderRows = {
            "path": str(path), "format": spec.name, "fields": rows, "count": total, "damage": [],
        }  # fmt: skip
        return body, damage_of_file(path) if damage is None else damage


def damage_of_file(path: Path) -> list[Damage]:
    """Return the damage of one file, without its set's; [] where the set cannot be opened."""
    try:
        with open_source(path, partial=True, damaged=True) as source:
            return [one for one in source.damage if one.where == str(path)]
    except FormatError:  # of the set: its header has just been read
        return []


def plain_bytes(model: Path, offset: int, length: int) -> PlainBytes:
    """Return `length` bytes of the file from `offset`; UsageError for an offset past its end."""
    with closing(open_bytes(model)) as file:
        if offset >= file.size:
            raise UsageError(f"{model}: --offset {offset}, the file has {file.size} bytes")
        raw = bytes(file.view[offset : offset + length])
        return {"path": str(model), "offset": offset, "bytes": raw.hex(), "damage": []}


def tensor_blocks(
    model: Path, name: str, first: int, count: int
) -> tuple[TensorBlocks, Sequence[Damage]]:
    """Return (`count` blocks of a tensor from number `first`, the damage of the model's files).

    `name` is a stored name, a role, or a pattern of one tensor. Raises UsageError for an encoding
    without blocks, and for a first block past the end.
    """
    with open_model(model, damaged=True) as opened:
        stored = opened.source.tensors
        every = spellings_by_name(opened)
        names = list(stored)
        at = one_matching_index([every.get(each, (each,)) for each in names], name, str(model))
        tensor = stored[names[at]]
        tensor.raw(0, 0)  # a damaged one says so
        info = tensor.info
        row = find_encoding(info.encoding)
        if not row.known or not info.nbytes:
            raise UsageError(f"{info.name}: {info.encoding} has no blocks to show; use --offset")
        size = row.type_size if row.block_size > 1 else 16 // row.type_size * row.type_size
        line = info.row_bytes if row.row_header else None
        total = -(-(info.nbytes - row.header) // size)
        if line:
            each = (line - row.row_header) // size  # blocks of a row
            total = info.nbytes // line * each
        if first >= total:
            raise UsageError(f"{info.name}: --block {first}, the tensor has {total} blocks")
        rows = []
        for i in range(first, min(total, first + count)):
            start = row.header + i * size
            if line:
                start = i // each * line + row.row_header + i % each * size
            raw = bytes(tensor.raw(start, min(start + size, info.nbytes)))
            rows.append(block_row(info.encoding, raw, i, info.offset + start))
        body: TensorBlocks = {
            "path": str(opened.path), "tensor": info.name, "encoding": info.encoding,
            "shape": list(info.shape), "count": total, "blocks": rows, "damage": [],
        }  # fmt: skip
        return body, opened.damage


def block_row(encoding: str, raw: bytes, block: int, offset: int) -> BlockRow:
    """Return one block's bytes, its fields as the encoding lays them out, and its decoded values.

    `block` is the block's number, `offset` where it begins in the file. Values are None for an
    encoding whose blocks cannot be decoded alone. `raw` are the bytes.
    """
    reference = codec(encoding)
    layout = reference.layout
    fields: list[BlockField] = []
    if layout is not None and layout.names and layout.fields:
        record = np.frombuffer(raw[: layout.itemsize], layout)[0]
        for field in layout.names:
            kind, at = layout.fields[field][:2]
            fields.append(
                {
                    "name": field,
                    "bytes": raw[at : at + kind.itemsize].hex(),
                    "value": np.asarray(record[field]).reshape(-1)[:8].tolist(),
                }
            )
    values: list[Any] | None = None
    if reference.parts == ("",) and not reference.row.row_header:
        count = len(raw) // reference.type_size * reference.block_size
        values = decode(encoding, {"": raw}, (count,)).tolist()
    return {
        "block": block,
        "offset": offset,
        "bytes": raw.hex(),
        "fields": fields,
        "values": values,
    }


def hex_lines(raw: bytes, offset: int) -> Iterator[str]:
    """Yield the lines of a hex dump: offset (counted from `offset`), sixteen bytes, ASCII.

    `raw` are the bytes.
    """
    for start in range(0, len(raw), 16):
        piece = raw[start : start + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
        yield f"{offset + start:08x}  {piece.hex(' '):47}  {text}"


def show(body: "HeaderRows | TensorBlocks | PlainBytes") -> None:
    """Print header fields, blocks or plain bytes, by the keys that `body` has."""
    if "bytes" in body:
        for text in hex_lines(bytes.fromhex(body["bytes"]), body["offset"]):
            render.line(text)
    elif "blocks" in body:
        _print_blocks(body)
    else:
        _print_fields(body)


def _print_fields(body: "HeaderRows") -> None:
    """Print a line for each header field: offset, bytes, name, value.

    `body` is the JSON of `hex`.
    """
    for row in body["fields"]:
        raw = bytes.fromhex(row["bytes"])
        dots = " .." if row["nbytes"] > len(raw) else ""
        begin = f"{row['offset']:08x}  {raw.hex(' ') + dots:50}"
        render.say(f"{begin}  {row['name']} = {row['value']}")
    if len(body["fields"]) < body["count"]:
        render.line(f"... {body['count'] - len(body['fields'])} more (--limit)", style="dim")


def _print_blocks(body: "TensorBlocks") -> None:
    """Print each block: its offset, its fields with their bytes, its decoded values.

    `body` is the JSON of `hex`.
    """
    what = f"{body['tensor']} {render.shape_text(body['shape'])} {body['encoding']}"
    render.say(f"{what}, {body['count']} blocks", style="head")
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
            render.line(f"  values   {_values_text(row['values'])}")


def _values_text(values: list[float]) -> str:
    """Return the first 16 values as text."""
    some = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:16])
    return " ".join(some) + (" .." if len(values) > 16 else "")


@click.command("hex")
@options.model()
@click.argument("name", required=False, shell_complete=shell_completion.complete_tensors)
@click.option(
    "--tensor",
    "named",
    metavar="NAME",
    help="The same as NAME.",
    shell_complete=shell_completion.complete_tensors,
)
@click.option("--block", type=options.WholeNumber(0), default=0, help="First block to show.")
@click.option(
    "--blocks",
    type=options.WholeNumber(1),
    default=2,
    show_default=True,
    help="How many blocks to show.",
)
@click.option("--offset", type=options.WholeNumber(0), help="Dump plain bytes from here instead.")
@click.option(
    "--length",
    type=options.WholeNumber(1),
    default=256,
    show_default=True,
    help="Bytes to dump with --offset.",
)
@click.option(
    "--limit",
    type=options.WholeNumber(1),
    default=64,
    show_default=True,
    help="Header fields to show.",
)
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
) -> int:
    """Show header fields, or the blocks of tensor NAME, or plain bytes, each next to its bytes.

    NAME is as `aprfmt cat` takes it: a stored name, a role, or a pattern of one tensor.
    """
    if name is not None and named is not None:
        raise UsageError(f"two tensors, {name!r} and --tensor {named!r}; give one of them")
    name = named if name is None else name
    if name is not None and offset is not None:
        raise UsageError(f"tensor {name!r} and --offset; give one of them")
    body: TensorBlocks | PlainBytes | HeaderRows
    damage: Sequence[Damage] = ()
    if name is not None:
        body, damage = tensor_blocks(model, name, block, blocks)
    elif offset is not None:
        body = plain_bytes(model, offset, length)
    else:
        body, damage = header_rows(model, limit)
    body["damage"], code = report_damage(damage)
    return render.emit(body, code, lambda: show(body))
