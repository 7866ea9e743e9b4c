"""Stores tensors of encodings that a container has no code for, losslessly under another name.

Such a tensor is stored as U8 `[..., row_bytes]` (flat encodings: `[nbytes]`) under `NAME@Q5_0`,
and the metadata key `aprfmt.tensors` (in safetensors its JSON) maps NAME to its encoding and
shape. A reader that does not know this does not find NAME and stops, instead of reading packed
bytes as weights. In this package NAME is the *logical* tensor, and the entry in the index is the
*stored* one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from aprfmt.base.encodings import Encoding, find_encoding
from aprfmt.base.protocols import Note, TensorInfo, Value
from aprfmt.formats.cursor import MAX_DIMS

KEY = "aprfmt.tensors"

Holds = Callable[[Encoding], bool]  # has the container a code for an encoding?


def stored_info(info: TensorInfo, holds: Holds) -> TensorInfo:
    """Return a tensor's index entry: itself, or its bytes as U8 under `NAME@ENCODING`.

    `holds(encoding)` says whether the container has a code for it.
    """
    row = find_encoding(info.encoding)
    if holds(row):
        return info
    by_rows = info.row_bytes is not None and info.nbytes == row.nbytes(info.shape)
    shape = (*info.shape[:-1], info.row_bytes or 0) if by_rows else (info.nbytes,)
    return replace(
        info, name=f"{info.name}@{info.encoding}", shape=shape, encoding="U8", row_bytes=shape[-1]
    )


def unsupported_record(infos: Iterable[TensorInfo], holds: Holds) -> dict[str, Value]:
    """Return {KEY: {name: encoding and shape}} of tensors stored as plain bytes, for metadata.

    `holds` says whether the format has a code for an encoding. {} if all have one.
    """
    table = {
        info.name: {"encoding": info.encoding, "shape": list(info.shape)}
        for info in infos
        if not holds(find_encoding(info.encoding))
    }
    return {KEY: table} if table else {}


def restore_encodings(
    metadata: Mapping[str, Value], stored: Mapping[str, TensorInfo], where: str
) -> tuple[dict[str, Value], dict[str, TensorInfo], list[Note]]:
    """Return (metadata without `aprfmt.tensors`, {name: logical tensor}, warnings).

    The tensors are in index order. If an entry does not fit its stored tensor, the tensor stays
    under its stored name, and a warning says why.
    """
    plain = {name: value for name, value in metadata.items() if name != KEY}
    table = metadata.get(KEY)
    if table is None:
        return plain, dict(stored), []
    if not isinstance(table, Mapping):
        text = f"{KEY} is {type(table).__name__}, not an object; carried tensors stay unjoined"
        return plain, dict(stored), [Note("warning", where, text, "carried_tensors")]
    notes: list[Note] = []
    logical: dict[str, TensorInfo] = {}  # by stored name
    for name, entry in table.items():
        found = _logical_info(name, entry, stored)
        if isinstance(found, str):
            notes.append(
                Note("warning", where, f"{KEY} entry {name!r}: {found}", "carried_tensors")
            )
        else:
            logical[f"{name}@{found.encoding}"] = found
    joined = [logical.get(name, info) for name, info in stored.items()]
    return plain, {info.name: info for info in joined}, notes


def _logical_info(name: str, entry: Value, stored: Mapping[str, TensorInfo]) -> TensorInfo | str:
    """Return the logical tensor of a table entry, or a text saying what is wrong with the entry."""
    if not isinstance(entry, Mapping):
        return f"is {type(entry).__name__}, not an object"
    encoding_name, dims = entry.get("encoding"), entry.get("shape")
    if not isinstance(encoding_name, str) or not isinstance(dims, list):
        return "lacks encoding (string) or shape (array)"
    if len(dims) > MAX_DIMS or not all(type(dim) is int and 0 <= dim < 1 << 64 for dim in dims):
        return f"its shape is not made of up to {MAX_DIMS} non-negative integers"
    carrier = stored.get(f"{name}@{encoding_name}")
    if carrier is None:
        return f"the file has no tensor {name + '@' + encoding_name!r}"
    if name in stored:
        return f"the file holds {name!r} as well, so its carried bytes stay unjoined"
    if carrier.encoding != "U8":
        return f"its bytes are stored as {carrier.encoding}, not U8"
    shape = tuple(dims)
    try:
        row = find_encoding(encoding_name)
        expected = row.nbytes(shape) if row.known else carrier.nbytes
    except ValueError as error:  # a CodecError, or digits int() refuses
        return str(error)
    if expected != carrier.nbytes:
        return f"{encoding_name} {list(shape)} takes {expected} bytes, {carrier.nbytes} are stored"
    return replace(
        carrier, name=name, shape=shape, encoding=encoding_name, row_bytes=row.row_bytes(shape)
    )
