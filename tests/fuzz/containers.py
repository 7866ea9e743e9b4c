"""Targets for the three containers: read all there is, copy it, read the copy, compare."""

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import OrderedSink, Source, TypedValue
from aprfmt.base.text_escape import escape
from aprfmt.errors import (
    AprfmtError,
    ConversionError,
    FormatError,
    TruncatedError,
    UnsupportedError,
)
from aprfmt.formats import shard_index
from aprfmt.formats.apr import reader as apr_reader
from aprfmt.formats.apr import writer as apr_writer
from aprfmt.formats.apr.fields import header_fields as apr_fields
from aprfmt.formats.apr.shards import make_manifest, parse_manifest
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.gguf import reader as gguf_reader
from aprfmt.formats.gguf import writer as gguf_writer
from aprfmt.formats.gguf.fields import header_fields as gguf_fields
from aprfmt.formats.pytorch import reader as pytorch_reader
from aprfmt.formats.safetensors import reader as safetensors_reader
from aprfmt.formats.safetensors import writer as safetensors_writer
from aprfmt.formats.safetensors.fields import header_fields as safetensors_fields
from aprfmt.formats.shard_set import MAX_INDEX
from tests.fuzz.contract import BrokenPromiseError, check_shown, same
from tests.fuzz.memory import MemoryFiles

_NAMES = {kind: Path(f"fuzz.{kind}") for kind in ("gguf", "apr", "safetensors", "json", "pt")}


def content(source: Source) -> tuple[dict[str, str], dict[str, tuple[Any, ...]]]:
    """Return everything a source gives: metadata as text (NaN is not equal to itself), tensors."""
    metadata = {
        key: f"{source.types.get(key, '')} {plain(value)!r}"
        for key, value in source.metadata.items()
    }
    tensors = {}
    for name, tensor in source.tensors.items():
        info = tensor.info
        raw = bytes(tensor.raw())
        if len(raw) != info.nbytes or any(size < 0 for size in info.shape):
            raise BrokenPromiseError(f"{name!r}: {len(raw)} bytes for {info}")
        tensors[name] = (info.encoding, info.shape, raw)
    for note in source.notes:
        check_shown(escape(f"{note.where} {note.text}"))
    return metadata, tensors


def plain(value: Any) -> Any:
    """Return a value with all of its lazy arrays read."""
    if isinstance(value, str) or not hasattr(value, "__len__") or isinstance(value, Mapping):
        return value
    return [plain(item) for item in value]


def worth_copying(data: bytes) -> bool:
    """Pick every fourth input: a copy takes longer than all of the reading."""
    return zlib.crc32(data) % 4 == 0


def _copy(sink: Any, metadata: Mapping[str, Any], source: Source) -> None:
    infos = [tensor.info for tensor in source.tensors.values()]
    infos = sink.order(infos) if isinstance(sink, OrderedSink) else infos
    with sink:
        sink.plan(metadata, infos)
        for info in infos:
            sink.write(info.name, [source.tensors[info.name].raw()])


def _partial(open_buffer: Any, data: bytes, path: Path) -> None:
    """List a cut file's structure; what is cut must refuse to give bytes."""
    with open_buffer(data, path, partial=True) as source:
        for tensor in source.tensors.values():
            try:
                tensor.raw()
            except TruncatedError:
                continue


def _opened(open_buffer: Any, data: bytes, path: Path) -> Any:
    """Open a file; one that is refused is read past its damage before the refusal goes on."""
    try:
        source = open_buffer(data, path)
    except FormatError as error:
        if isinstance(error, TruncatedError):
            _partial(open_buffer, data, path)
        _past_damage(open_buffer, data, path)
        raise
    return source


def _past_damage(open_buffer: Any, data: bytes, path: Path) -> None:
    """Read what can be read of a refused file: all of it, or an error that says why not."""
    try:
        source = open_buffer(data, path, damaged=True)
    except FormatError:
        return
    with source:
        if not source.damage:
            raise BrokenPromiseError(f"{path}: refused, and yet nothing is wrong with it")
        lost = {name for one in source.damage for name in one.tensors}
        for one in source.damage:
            check_shown(escape(f"{one.where}: {one.text}"))
        for name, tensor in source.tensors.items():
            try:
                whole = len(tensor.raw()) == tensor.info.nbytes
            except FormatError as error:
                whole = False
                if isinstance(error, UnsupportedError) and name not in lost:
                    continue  # big-endian data whose layout is not known
            if whole == (name in lost):
                raise BrokenPromiseError(f"{name!r}: readable is {whole}, against the damage told")
        for key in source.metadata:
            plain(source.metadata[key])


def gguf(data: bytes) -> None:
    path = _NAMES["gguf"]
    with _opened(gguf_reader.open_buffer, data, path) as source:
        before = content(source)
        if not worth_copying(data):
            return
        for _ in gguf_fields(memoryview(data), str(path)):
            pass
        files = MemoryFiles()
        metadata = {
            key: TypedValue(value, source.types[key]) for key, value in source.metadata.items()
        }
        _copy(gguf_writer.open_sink(path, files=files.as_set), metadata, source)
    with gguf_reader.open_buffer(files.only, path) as copy:
        after = content(copy)
    for key in ("split.no", "split.count", "split.tensors.count"):  # become the copy's own
        before[0].pop(key, None)
    for name, (kind, shape, raw) in before[1].items():
        if (
            not find_encoding(kind).known and name in after[1]
        ):  # its length is a guess: all up to the
            grown = after[1][name][2]  # next tensor, so padding counts as its own
            before[1][name] = (kind, shape, raw.ljust(len(grown), b"\0"))
    same(before, after, "a GGUF and its copy")


def safetensors(data: bytes) -> None:
    path = _NAMES["safetensors"]
    with _opened(safetensors_reader.open_buffer, data, path) as source:
        before = content(source)
        if not worth_copying(data):
            return
        for _ in safetensors_fields(memoryview(data), str(path)):
            pass
        for like in (source, None):
            files = MemoryFiles()
            sink = safetensors_writer.open_sink(path, files=files.as_set, like=like)
            _copy(sink, source.metadata, source)
            if like is not None:
                same(data, files.only, "a safetensors file and its verbatim copy")
                continue
            with safetensors_reader.open_buffer(files.only, path) as copy:
                after = content(copy)
            before[0].setdefault("format", " 'pt'")
            same(before, after, "a safetensors file and its copy")


def pytorch(data: bytes) -> None:
    """Read a file of torch.save: the values of its pickle, its tensors' bytes, its imports."""
    with pytorch_reader.open_buffer(data, _NAMES["pt"]) as source:
        before = content(source)
        for note in source.imports:
            check_shown(escape(note))
        source.footer_matches()
    if worth_copying(data):
        with pytorch_reader.open_buffer(data, _NAMES["pt"]) as again:
            same(before, content(again), "a file of torch.save read twice")


def mend_safetensors(data: bytes) -> bytes:
    """Return the bytes with a header length that ends at the last brace."""
    end = data.rfind(b"}") + 1
    return max(0, end - 8).to_bytes(8, "little") + data[8:]


def apr(data: bytes) -> None:
    path = _NAMES["apr"]
    with _opened(apr_reader.open_buffer, data, path) as source:
        before = content(source)
        source.footer_matches()
        if not worth_copying(data):
            return
        for _ in apr_fields(memoryview(data), str(path)):
            pass
        for like in (source, None):
            files = MemoryFiles()
            sink = apr_writer.open_sink(path, files=files.as_set, like=like)
            try:
                _copy(sink, source.metadata, source)
            except ConversionError:  # a foreign file may hold what APR's own writer does not
                if like is not None and not source.shards[0].parsed.expanded:
                    raise
                continue
            with apr_reader.open_buffer(files.only, path) as copy:
                after = content(copy)
            same(before[1], after[1], "the tensors of an APR and its copy")
            if like is not None:
                same(before[0], after[0], "the metadata of an APR and its copy")


def mend_apr(data: bytes) -> bytes:
    """Return the bytes with header and footer checksums that fit."""
    if len(data) < 68:
        return data
    crc = zlib.crc32(data[:40] + data[44:64])
    body = data[:40] + struct.pack("<I", crc) + data[44:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def index(data: bytes) -> None:
    """Read an index of safetensors shards and an APR manifest: both are JSON with file names."""
    path = _NAMES["json"]
    folder = Path("folder")
    problems = []
    for read in (_safetensors_index, _apr_manifest):
        try:
            homes = read(data, folder / path)
        except AprfmtError as error:
            problems.append(error)
            continue
        for home in homes:
            inside = home.relative_to(folder)
            if ".." in inside.parts or inside.is_absolute() or len(inside.parts) > 2:
                raise BrokenPromiseError(f"{home} is outside of the model's folder")
    if len(problems) == 2:
        raise problems[0]


def _safetensors_index(data: bytes, path: Path) -> list[Path]:
    weight_map, _ = shard_index.parse_index(data, path)
    homes = shard_index.shard_paths(path, weight_map)
    again = shard_index.parse_index(data, path)[0]
    same(weight_map, again, "an index read twice")
    return list(homes.values())


def _apr_manifest(data: bytes, path: Path) -> list[Path]:
    members = parse_manifest(loads(data, str(path), max_bytes=MAX_INDEX), path)
    written = make_manifest([(one.path.name, one.size, sorted(one.tensors)) for one in members])
    if all(one.path.parent == path.parent for one in members):  # ours names no subfolder
        same(parse_manifest(written, path), members, "a manifest and its copy")
    return [one.path for one in members]
