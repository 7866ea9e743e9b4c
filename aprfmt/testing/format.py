"""Check a container format: it keeps tensors, metadata and order, and refuses damaged input."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import TensorInfo
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats import FORMATS, FormatSpec, detect_format, open_sink, open_source

_METADATA = {"general.architecture": "toy", "general.name": "na\u00efve \u6a21"}
_FLIPS = 200


def check_format(name: str, folder: Path, seed: int = 0) -> tuple[str, ...]:
    """Check that the format `name` does what its FormatSpec says; return the names of the checks.

    Files are made in `folder`, with random values from `seed`. Checked are writing and reading
    back, equal bytes for equal input, existing files, interrupted writing, cut and damaged files.
    Raises AssertionError for the first that fails.
    """
    spec = FORMATS[name]
    data = _sample_tensors(spec, seed)
    path = folder / f"whole{spec.extensions[0]}"
    write_file(spec, path, data)
    _check_content(spec, path, data)
    other = folder / f"again{spec.extensions[0]}"
    write_file(spec, other, data)
    assert other.read_bytes() == path.read_bytes(), f"{name}: equal input gave other bytes"
    _check_refusals(spec, path, data, folder)
    _check_damage(spec, path, folder, seed)
    return ("content", "deterministic", "existing", "interrupted", "cut", "damaged")


def write_file(
    spec: FormatSpec, path: Path, data: Mapping[str, tuple[TensorInfo, bytes]], force: bool = False
) -> None:
    """Write tensors to a file in the format's own order; `data` is {name: (info, bytes)}."""
    infos = spec.order([info for info, _ in data.values()])
    with open_sink(path, spec.name, force=force) as sink:
        sink.plan(_METADATA, infos)
        for info in infos:
            sink.write(info.name, iter([memoryview(data[info.name][1])]))


def _sample_tensors(spec: FormatSpec, seed: int) -> dict[str, tuple[TensorInfo, bytes]]:
    """Return {name: (info, bytes)}: a matrix in every encoding the format has, unusual shapes."""
    rng = np.random.default_rng(seed)
    shapes: list[tuple[str, tuple[int, ...], str]] = [
        (f"t.{row.name.lower()}.weight", (3, 2 * row.block_size), row.name)
        for row in list(ENCODINGS.values())
        if row.known and spec.holds(row)
    ]
    most = spec.max_dims or 5
    shapes += [
        ("vector", (5,), "F32"),
        ("scalar", (), "F32"),
        ("nothing", (0, 4), "F32"),
        ("na\u00efve.\u6a21", (2, 3), "F32"),
        ("deep", (1, 2, 1, 3, 1)[:most], "F32"),
    ]
    found = {}
    for name, shape, encoding in shapes:
        row = ENCODINGS[encoding]
        raw = rng.integers(0, 256, row.nbytes(shape), np.uint8)
        raw = raw & 1 if encoding == "BOOL" else raw
        info = TensorInfo(name, shape, encoding, 0, len(raw), row.row_bytes(shape))
        found[name] = info, raw.tobytes()
    return found


def _check_content(
    spec: FormatSpec, path: Path, data: Mapping[str, tuple[TensorInfo, bytes]]
) -> None:
    """Raise AssertionError unless a file reads back as the tensors and metadata written."""
    found = detect_format(path).name
    assert found == spec.name, f"{spec.name}: its own file is recognised as {found}"
    with open_source(path) as source:
        missing = sorted(set(data) ^ set(source.tensors))
        assert not missing, f"{spec.name}: tensors that came or went: {missing}"
        for name, (info, raw) in data.items():
            tensor = source.tensors[name]
            facts = (tensor.info.shape, tensor.info.encoding, tensor.info.nbytes)
            expected = (info.shape, info.encoding, info.nbytes)
            assert facts == expected, f"{spec.name}: {name} is {facts}; written as {expected}"
            assert bytes(tensor.raw()) == raw, f"{spec.name}: {name} has other bytes"
            start, stop = len(raw) // 3, len(raw) // 2
            part = bytes(tensor.raw(start, stop))
            assert part == raw[start:stop], f"{spec.name}: {name}[{start}:{stop}] differs"
        for key, value in _METADATA.items():
            assert source.metadata.get(key) == value, f"{spec.name}: metadata {key!r} is lost"


def _check_refusals(
    spec: FormatSpec, path: Path, data: Mapping[str, tuple[TensorInfo, bytes]], folder: Path
) -> None:
    """Raise AssertionError unless writing spares existing files and leaves no unfinished one.

    The unfinished one is of a write that a KeyboardInterrupt stops.
    """
    before = path.read_bytes()
    try:
        write_file(spec, path, data)
    except AprfmtError:
        assert path.read_bytes() == before, f"{spec.name}: a refused write changed the file"
    else:
        raise AssertionError(f"{spec.name}: wrote over {path} without force")
    write_file(spec, path, data, force=True)
    unfinished = folder / f"unfinished{spec.extensions[0]}"
    listing = sorted(folder.iterdir())
    try:
        with open_sink(unfinished, spec.name) as sink:
            sink.plan(_METADATA, spec.order([info for info, _ in data.values()]))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    left = sorted(set(folder.iterdir()) - set(listing))
    assert not left, f"{spec.name}: an interrupted write left {left}"


def _check_damage(spec: FormatSpec, path: Path, folder: Path, seed: int) -> None:
    """Raise AssertionError unless cut files are refused and files with flipped bits do no harm.

    A file with a flipped bit is refused, or its tensors' bytes can be read.
    """
    whole = path.read_bytes()
    damaged = folder / f"damaged{spec.extensions[0]}"
    # Cut files must be refused.
    for sixteenth in range(16):
        damaged.write_bytes(whole[: len(whole) * sixteenth // 16])
        try:
            with open_source(damaged) as source:
                for tensor in source.tensors.values():
                    tensor.raw()
        except FormatError:
            continue
        raise AssertionError(f"{spec.name}: {sixteenth}/16 of a file open as if it were whole")
    # Flip bits in the header and just after it.
    rng = np.random.default_rng(seed)
    for _ in range(_FLIPS):
        data = bytearray(whole)
        at = int(rng.integers(min(len(data), 4096)))
        data[at] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(data)
        try:
            with open_source(damaged) as source:
                for tensor in source.tensors.values():
                    size = len(tensor.raw())
                    assert size == tensor.info.nbytes, f"{spec.name}: byte {at}: {size} bytes"
        except AprfmtError:
            pass
    damaged.unlink()
