"""Our golden files: bytes pinned, made again from their script, read by independent code."""

import importlib.util
import json
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors import safe_open

from aprfmt.codecs import decode
from aprfmt.conversion import convert
from aprfmt.formats import open_source
from aprfmt.formats.apr.parse import parse
from tests.conftest import ROOT
from tests.formats.apr_files import AprFile, Tensor
from tests.formats.safetensors_cases import reference

GOLDEN = ROOT / "fixtures" / "golden"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", ROOT / "fixtures/make_golden.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_gives_the_pinned_bytes(script: ModuleType, tmp_path: Path) -> None:
    fresh = {path.name: path.read_bytes() for path in script.write(tmp_path)}
    pinned = {path.name: path.read_bytes() for path in GOLDEN.iterdir()}
    assert fresh.keys() == pinned.keys()
    for name, data in fresh.items():
        assert data == pinned[name], name
        assert len(data) < 16_000, name


@pytest.mark.parametrize("name", ["every.apr", "carried.apr"])
def test_an_independent_writer_gives_the_same_apr_file(name: str) -> None:
    """Same header, index, padding and checksums from plain struct calls."""
    data = (GOLDEN / name).read_bytes()
    parsed = parse(memoryview(data), name)
    tensors = [
        Tensor(
            entry.info.name.encode(),
            entry.info.shape,
            entry.code,
            data[entry.info.offset : entry.info.offset + entry.info.nbytes],
        )
        for entry in parsed.entries
    ]
    metadata = bytes(parsed.metadata_raw)
    assert json.loads(metadata)["model_type"] == "golden"
    again = AprFile(tensors=tensors, metadata=metadata, flags=parsed.header.flags).build()
    assert again == data


@pytest.mark.parametrize("name", ["every.apr", "carried.apr", "every.safetensors"])
def test_golden_values_are_finite(name: str) -> None:
    with open_source(GOLDEN / name) as source:
        assert not source.notes
        for tensor in source.tensors.values():
            info = tensor.info
            if info.encoding in ("NF4", "FP4"):
                continue  # their values need companion tensors
            raw = {"": tensor.raw()}
            values = decode(info.encoding, raw, info.shape, row_bytes=info.row_bytes)
            assert values.shape == info.shape
            assert np.isfinite(values.astype(np.complex128)).all(), info


def test_sets_open_by_every_member() -> None:
    for pattern in ("set-*-of-*.apr", "set-manifest.json", "set.safetensors.index.json"):
        found = sorted(GOLDEN.glob(pattern))
        assert found
        for path in found:
            with open_source(path) as source:
                assert sorted(source.tensors) == [f"model.layers.{at}.weight" for at in range(4)]
                assert len(source.files) == 2
                assert not source.notes


def test_the_reference_library_reads_the_safetensors_files() -> None:
    data = (GOLDEN / "every.safetensors").read_bytes()
    theirs = reference(data)
    with open_source(GOLDEN / "every.safetensors") as source:
        assert theirs.keys() == source.tensors.keys()
        for name, tensor in source.tensors.items():
            assert tuple(theirs[name]["shape"]) == tensor.info.shape
            assert bytes(theirs[name]["data"]) == tensor.raw()
    with safe_open(GOLDEN / "every.safetensors", "numpy") as handle:
        assert handle.metadata() == {"format": "pt"}
        values = handle.get_tensor("all.f32")
    first = struct.unpack("<8f", bytes(theirs["all.f32"]["data"])[:32])
    assert values[0].tolist() == list(first)


@pytest.mark.parametrize("name", ["every.apr", "carried.apr", "every.safetensors"])
def test_converting_to_the_same_format_gives_the_whole_file_again(
    name: str, tmp_path: Path
) -> None:
    report = convert(GOLDEN / name, tmp_path / name, arch="none")
    assert report.verified is not None
    assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()
