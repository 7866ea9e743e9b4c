"""Targets for files beside or inside the containers: config, tokenizer, imatrix, traces."""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from aprfmt.arch import find_arch
from aprfmt.arch.hyperparameters import read_hyper, write_hyper
from aprfmt.arch.spec import Facts
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError, FormatError
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.cursor import Cursor
from aprfmt.formats.gguf.reader import open_buffer as open_gguf
from aprfmt.formats.safetensors.reader import open_buffer as open_safetensors
from aprfmt.inference.aprt import parse_aprt
from aprfmt.inference.engines.npz import NpzFile, load_npz
from aprfmt.inference.record import record_from_json, record_to_json
from aprfmt.inference.trace_file import read_trace
from aprfmt.model import Model
from aprfmt.model.hf_folder import parse_config
from aprfmt.quantizing.imatrix import (
    _MAGIC,
    ImportanceMatrix,
    _make_matrix,
    _read_gguf,
    _read_legacy,
)
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.keys import HF_JSON
from aprfmt.tokenizer.loading import load_tokenizer
from tests.fuzz.containers import plain, worth_copying
from tests.fuzz.contract import BrokenPromiseError, same
from tests.tokenizer.fake import fake

TEXT = "ab <s>a b\u00e9\n"


def config(data: bytes) -> None:
    """Read a config.json as the hyperparameters of the architecture it names; write, read again."""
    values = parse_config(data, Path("config.json"))
    name = values.get("model_type")
    if not isinstance(name, str):
        raise FormatError("config.json: no model_type")
    spec = find_arch("hf", name, values=values)
    found, _ = read_hyper(spec, Facts("hf", values, {}), "config.json", complete=False)
    if not worth_copying(data):
        return
    style = ("hf", "gguf", "apr")[zlib.crc32(data) % 3]
    written = write_hyper(spec, found, style)
    try:
        again, _ = read_hyper(spec, Facts(style, written, {}), "again", complete=False)
    except ArchError as error:
        raise BrokenPromiseError(f"{style}: {written!r:.300} is not read: {error}") from error
    for key in found:
        if style == "hf" and not _same_value(found[key], again.get(key)):
            raise BrokenPromiseError(f"{key}: {found[key]!r}, then {again.get(key)!r}")


def _same_value(a: Value, b: Value) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def tokenizer(data: bytes) -> None:
    """Use a tokenizer.json as GGUF metadata carry it."""
    _tokenize("gguf", {HF_JSON: str(data, "utf-8", "surrogateescape")})


def vocabulary(data: bytes) -> None:
    """Use the vocabulary in the keys of a GGUF file."""
    with open_gguf(data, Path("fuzz.gguf")) as source:
        _tokenize("gguf", source.metadata)


def _tokenize(form: str, metadata: Mapping[str, Any]) -> None:
    model = fake(form, metadata)
    tokenizer_facts(model, quick=True)
    made = load_tokenizer(model)
    ids = made.encode(TEXT)
    made.decode(ids)
    made.token(0)
    same(ids, load_tokenizer(model).encode(TEXT), "the ids of a text")
    tokenizer_facts(model)
    for carry in (to_gguf, to_apr, to_hf):
        carry(model)


def parse_imatrix(data: bytes, path: Path) -> ImportanceMatrix:
    """Return the importance matrix in `data`, which `read_imatrix` reads from a file."""
    if data[:4] == _MAGIC:
        with open_gguf(data, path) as source:
            read = _read_gguf(source)
    else:
        read = _read_legacy(Cursor(memoryview(data), str(path)))
    return _make_matrix(path, hashlib.sha256(data).hexdigest(), read)


def imatrix(data: bytes) -> None:
    path = Path("imatrix.dat")
    before = parse_imatrix(data, path)
    for name, values in before.entries.items():
        if values.dtype.name != "float32" or values.ndim != 1:
            raise BrokenPromiseError(f"{name}: {values.dtype} {values.shape}")
    before.records()
    after = parse_imatrix(data, path)
    for name, values in before.entries.items():
        same(values.tobytes(), after.entries[name].tobytes(), name)


def trace(data: bytes) -> None:
    with open_safetensors(data, Path("trace.safetensors")) as source:
        found = read_trace(source)
        rows = []
        for key, record in found.records.items():
            values = found.fetch(key)
            if values is not None and values.shape != record.shape:
                raise BrokenPromiseError(f"{key}: {values.shape} for {record.shape}")
            rows.append(record_to_json(record))
            same(record_from_json(json.loads(json.dumps(rows[-1])), key), record, "a record")


def aprt(data: bytes) -> None:
    values = parse_aprt(memoryview(data), Path("layer-3/attn_out.bin"), 3)
    same(values.tobytes(), data[12:], "the values of an APRT file")


def npz(data: bytes) -> None:
    """Read every array of an .npz that lies in memory."""
    with ExitStack() as stack:
        opened = NpzFile(Path("fuzz.npz"), stack, BytesIO(data))
        for key, (shape, dtype) in opened.arrays.items():
            values = opened.read(key)
            plain_dtype = dtype.newbyteorder("=")
            if values.shape != shape or values.dtype != plain_dtype:
                raise BrokenPromiseError(
                    f"{key}: {values.dtype} {values.shape} for {dtype} {shape}"
                )
            same(values.tobytes(), opened.read(key).tobytes(), key)
    if worth_copying(data):
        with load_npz(Path("fuzz.npz"), file=BytesIO(data)) as found:
            for key, record in found.records.items():
                values_of_key = found.fetch(key)
                if values_of_key is not None and values_of_key.shape != record.shape:
                    raise BrokenPromiseError(f"{key}: {values_of_key.shape} for {record.shape}")


def mend_npz(data: bytes) -> bytes:
    """Return the bytes with every stored member's checksum true, where its place can be told."""
    raw = bytearray(data)
    try:
        with ZipFile(BytesIO(data)) as archive:
            members = archive.infolist()
    except Exception:  # whatever a damaged archive raises: there is nothing to mend
        return data
    at = 0
    for member in members:
        central = data.find(b"PK\1\2", at)
        place = member.header_offset
        if central < 0 or member.compress_type or not 0 <= place <= len(data) - 30:
            break
        at = central + 4
        names = sum(struct.unpack_from("<HH", data, place + 26))
        start = place + 30 + names
        crc = struct.pack("<I", zlib.crc32(data[start : start + member.compress_size]))
        raw[place + 14 : place + 18] = crc
        raw[central + 16 : central + 20] = crc
    return bytes(raw) if len(raw) == len(data) else data


def model(data: bytes) -> None:
    """Resolve what a GGUF file says as a whole model: architecture, hyperparameters, roles."""
    with open_gguf(data, Path("fuzz.gguf")) as source:
        opened = Model(source, None)
        resolution = opened.resolution
        for role in resolution.roles.values() if worth_copying(data) else ():
            role.numpy()
        plain(list(source.metadata.values()))


def resume(data: bytes) -> None:
    from aprfmt.formats.resumable_output import parse_earlier_run

    found = parse_earlier_run(data, "folder/x.jsonl")
    for temporary, final, _ in found.moves if found is not None else ():
        if "/" in temporary + final or final in ("", ".", ".."):
            raise BrokenPromiseError(f"{temporary!r}, {final!r} lead out of the folder")
    if found is not None and found.signed:
        raise BrokenPromiseError("a journal that nobody signed is believed")
    for kept in found.tensors.values() if found is not None else ():
        plain([kept.crc, list(kept.counts)])


def patch(data: bytes) -> None:
    from aprfmt.formats.in_place_patch import parse_patch

    found = parse_patch(data, "folder/.x.aprfmt-patch")
    if not isinstance(found.file, str) or any(offset < 0 for offset, _ in found.pieces):
        raise BrokenPromiseError("a patch before the file")
    if found.signed:
        raise BrokenPromiseError("a patch that nobody signed is believed")


def journal(data: bytes) -> None:
    from aprfmt.formats.journal import parse_journal

    value = loads(data, "journal", max_bytes=1 << 20, surrogates=True)
    found = parse_journal(value, Path("folder/journal.json"))
    if found.is_signed():
        raise BrokenPromiseError("a journal that nobody signed is believed")
    for name in (*found.removes, *(name for move in found.moves for name in move)):
        if "/" in name or name in ("", ".", ".."):
            raise BrokenPromiseError(f"{name!r} leads out of the folder")
    same(
        loads(found.dumps(), "again", max_bytes=1 << 22, surrogates=True)["removes"],
        list(found.removes),
        "a journal",
    )
