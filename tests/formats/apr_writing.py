"""Writing tensors to APR files in tests, and reading everything back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.formats.apr.reader import AprSource, open_source
from aprfmt.formats.apr.writer import open_sink


def info(name: str, shape: tuple[int, ...], name_of_encoding: str = "F32") -> TensorInfo:
    """Return the info of a tensor as a plan has it."""
    row = find_encoding(name_of_encoding)
    return TensorInfo(name, shape, row.name, 0, row.nbytes(shape), row.row_bytes(shape))


def pattern(planned: TensorInfo) -> bytes:
    """Return bytes that differ by tensor and position."""
    seed = sum(planned.name.encode()) % 251
    return bytes((seed + 7 * at) % 256 for at in range(planned.nbytes))


def write(
    path: Path, infos: list[TensorInfo], metadata: Mapping[str, Any] | None = None, **options: Any
) -> list[Path]:
    """Write tensors in the order given, each in two chunks; returns the files."""
    sink = open_sink(path, **options)
    with sink:
        sink.plan(metadata or {}, infos)
        for planned in infos:
            data = memoryview(pattern(planned))
            sink.write(planned.name, [data[: len(data) // 2], data[len(data) // 2 :]])
        return list(sink.files)


def check(source: AprSource, infos: list[TensorInfo]) -> None:
    """Assert that a source holds these tensors with their patterns."""
    assert sorted(source.tensors) == sorted(planned.name for planned in infos)
    for planned in infos:
        tensor = source.tensors[planned.name]
        found = tensor.info
        assert (found.shape, found.encoding, found.nbytes, found.row_bytes) == (
            planned.shape,
            planned.encoding,
            planned.nbytes,
            planned.row_bytes,
        )
        assert tensor.raw() == pattern(planned)


def round_trip(
    path: Path, infos: list[TensorInfo], metadata: Mapping[str, Any] | None = None, **options: Any
) -> Mapping[str, Any]:
    """Write, read back, compare the tensors; returns the metadata as read."""
    files = write(path, infos, metadata, **options)
    with open_source(files[0]) as source:
        assert not source.notes
        assert source.footer_matches() is True
        check(source, infos)
        return dict(source.metadata)
