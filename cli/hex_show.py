"""What `aprfmt hex` prints."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.cli.hex_read import HeaderRows, PlainBytes, TensorBlocks


def hex_lines(raw: bytes, offset: int) -> Iterator[str]:
    """Yield classic dump lines: offset, sixteen bytes, ASCII."""
    for start in range(0, len(raw), 16):
        piece = raw[start : start + 16]
        text = "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
        yield f"{offset + start:08x}  {piece.hex(' '):47}  {text}"


def show(body: "HeaderRows | TensorBlocks | PlainBytes") -> None:
    """Print fields, blocks or plain bytes."""
    if "bytes" in body:
        for text in hex_lines(bytes.fromhex(body["bytes"]), body["offset"]):
            render.line(text)
    elif "blocks" in body:
        _blocks(body)
    else:
        _fields(body)


def _fields(body: "HeaderRows") -> None:
    for row in body["fields"]:
        raw = bytes.fromhex(row["bytes"])
        dots = " .." if row["nbytes"] > len(raw) else ""
        begin = f"{row['offset']:08x}  {raw.hex(' ') + dots:50}"
        render.say(f"{begin}  {row['name']} = {row['value']}")
    if len(body["fields"]) < body["count"]:
        render.line(f"... {body['count'] - len(body['fields'])} more (--limit)", style="dim")


def _blocks(body: "TensorBlocks") -> None:
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
            render.line(f"  values   {_values(row['values'])}")


def _values(values: list[float]) -> str:
    some = (f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:16])
    return " ".join(some) + (" .." if len(values) > 16 else "")
