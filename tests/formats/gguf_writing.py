"""Files written by the code under test, for tests of what comes out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.formats.gguf.reader import GGUFSource, open_source
from aprfmt.formats.gguf.writer import open_sink

Stored = tuple[str, tuple[int, ...], bytes]  # encoding, shape, bytes


def info_of(name: str, stored: Stored) -> TensorInfo:
    """Return what a sink's plan says of a tensor."""
    kind, shape, data = stored
    return TensorInfo(name, shape, kind, 0, len(data), find_encoding(kind).row_bytes(shape))


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], **options: Any
) -> list[Path]:
    """Write a file or a split; returns its files."""
    with open_sink(path, **options) as sink:
        sink.plan(metadata, [info_of(name, stored) for name, stored in tensors.items()])
        for name, (_, _, data) in tensors.items():
            sink.write(name, [memoryview(data)])
    return list(sink.files)


def rewrite(source: GGUFSource, path: Path, **options: Any) -> list[Path]:
    """Copy a source as it is."""
    metadata = {key: TypedValue(value, source.types[key]) for key, value in source.metadata.items()}
    with open_sink(path, **options) as sink:
        sink.plan(metadata, [tensor.info for tensor in source.tensors.values()])
        for name, tensor in source.tensors.items():
            sink.write(name, [tensor.raw()])
    return list(sink.files)


def read(path: Path) -> tuple[dict[str, Any], dict[str, str], dict[str, Stored]]:
    """Return metadata, their types and tensors, all decoded and copied."""
    with open_source(path) as source:
        metadata = {key: plain(value) for key, value in source.metadata.items()}
        tensors = {
            name: (tensor.info.encoding, tensor.info.shape, bytes(tensor.raw()))
            for name, tensor in source.tensors.items()
        }
        return metadata, dict(source.types), tensors


def plain(value: Any) -> Any:
    """Return a value with its arrays as lists."""
    if isinstance(value, str) or not hasattr(value, "__len__"):
        return value
    return [plain(item) for item in value]
