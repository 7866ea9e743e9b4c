"""Blocks of GGUF inside safetensors: bytes under another name, which only this package joins.

Seen red: an index that names tensors as they are joined, a table of one shard read for another,
blocks that a change of metadata leaves as bytes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import aprfmt
from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import ConversionError
from aprfmt.formats import open_source
from aprfmt.formats.safetensors.parse import parse
from tests.cli.run import aprfmt as command
from tests.formats.apr_writing import info, pattern
from tests.formats.gguf_writing import write as write_gguf
from tests.formats.safetensors.test_safetensors_write import patterns, write
from tests.formats.safetensors_cases import entry, file

GGML = [row.name for row in ENCODINGS.values() if row.ggml is not None and row.known]
BLOCKS = [name for name in GGML if not ENCODINGS[name].safetensors]


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_source(path) as source:
        return {
            name: (tensor.info.encoding, tensor.info.shape, bytes(tensor.raw()))
            for name, tensor in source.tensors.items()
        }


@pytest.mark.parametrize("name", BLOCKS)
def test_every_encoding_comes_back(name: str, tmp_path: Path) -> None:
    infos = [info("w", (2, 3, 512), name), info("v", (512,), name), info("z", (0, 512), name)]
    infos.append(info("a", (4,)))
    write(tmp_path / "x.safetensors", infos, patterns(infos), carry=True)
    found = stored(tmp_path / "x.safetensors")
    assert found == {one.name: (one.encoding, one.shape, pattern(one)) for one in infos}
    with safe_open(tmp_path / "x.safetensors", "np") as handle:  # what another reader sees
        assert set(handle.keys()) == {f"w@{name}", f"v@{name}", f"z@{name}", "a"}
        held = handle.get_tensor(f"w@{name}")
        assert (held.dtype, held.tobytes()) == (np.uint8, pattern(infos[0]))
        assert held.shape == (2, 3, ENCODINGS[name].row_bytes((512,)))
        assert handle.metadata()["format"] == "aprfmt"
    with open_source(tmp_path / "x.safetensors") as source:
        assert source.metadata == {"format": "aprfmt"}


def test_without_being_asked_it_is_refused(tmp_path: Path) -> None:
    infos = [info("w", (4, 256), "Q4_K")]
    with pytest.raises(ConversionError, match="safetensors has no dtype for Q4_K"):
        write(tmp_path / "x.safetensors", infos, patterns(infos))


def test_shards_have_tables_of_their_own(tmp_path: Path) -> None:
    infos = [info(f"t{at}", (4, 32), "Q8_0") for at in range(5)] + [info("x", (4,))]
    files = write(
        tmp_path / "m.safetensors", infos, patterns(infos), carry=True, max_shard_size=280
    )
    index = next(path for path in files if path.name.endswith(".json"))
    names = set(json.loads(index.read_text())["weight_map"])
    assert names == {"x", *(f"t{at}@Q8_0" for at in range(5))}
    with open_source(index) as source:
        assert not source.notes and "aprfmt.tensors" not in source.metadata
        assert {name: t.info.encoding for name, t in source.tensors.items()} == {
            one.name: one.encoding for one in infos
        }


ENTRY: dict[str, Any] = {"encoding": "Q5_0", "shape": [64]}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"w": {**ENTRY, "shape": [63]}}, "multiple of 32"),
        ({"w": {**ENTRY, "shape": [96]}}, "takes 66 bytes, 44 are stored"),
        ({"w": "Q5_0"}, "is str, not an object"),
        ({"x": ENTRY}, "no tensor 'x@Q5_0'"),
        ([1], "is list, not an object"),
        ("{", "cannot be read"),
        ("[" * 4000, "cannot be read"),
    ],
)
def test_a_table_that_does_not_fit_joins_nothing(table: Any, says: str) -> None:
    text = table if isinstance(table, str) else json.dumps(table)
    header = {"__metadata__": {"aprfmt.tensors": text}, "w@Q5_0": entry("U8", [44], [0, 44])}
    parsed = parse(memoryview(file(header, bytes(44))), "t.safetensors")
    assert list(parsed.infos) == ["w@Q5_0"] and parsed.infos["w@Q5_0"].encoding == "U8"
    assert any(says in note.text and note.level == "warning" for note in parsed.notes), parsed.notes
    assert "aprfmt.tensors" not in parsed.metadata


def test_a_gguf_goes_there_and_back(demo_model: Path, tmp_path: Path) -> None:
    """With --generic alone; what edits the copy keeps the blocks."""
    aprfmt.convert(demo_model, tmp_path / "q.gguf", quantize="Q4_K_M")
    expected = stored(tmp_path / "q.gguf")
    refused = command("convert", tmp_path / "q.gguf", tmp_path / "q.safetensors")
    assert refused.code == 2 and "safetensors has no code" in refused.err
    assert (
        command("convert", tmp_path / "q.gguf", tmp_path / "q.safetensors", "--generic").code == 0
    )
    assert not (tmp_path / "config.json").exists()
    assert stored(tmp_path / "q.safetensors") == expected
    for name in ("back.gguf", "back.apr"):
        aprfmt.convert(tmp_path / "q.safetensors", tmp_path / name, generic=True)
        assert stored(tmp_path / name) == expected
    report = aprfmt.diff(tmp_path / "q.gguf", tmp_path / "back.gguf")
    assert {row.verdict for row in report.tensors} == {"SAME_BYTES"}
    assert [row.name for row in report.hyperparameters] == ["architecture"]  # of no other program
    done = command(
        "set",
        tmp_path / "q.safetensors",
        "__metadata__:note=kept",
        "-o",
        tmp_path / "s.safetensors",
    )
    assert done.code == 0 and stored(tmp_path / "s.safetensors") == expected
    done = command("set", tmp_path / "s.safetensors", "note=mine", "--in-place")
    assert done.code == 0 and stored(tmp_path / "s.safetensors") == expected
    (tmp_path / "p").mkdir()
    done = command(
        "split",
        tmp_path / "q.safetensors",
        tmp_path / "p" / "q.safetensors",
        "--max-shard-size",
        "400K",
    )
    assert done.code == 0
    index = tmp_path / "p" / "q.safetensors.index.json"
    assert stored(index) == expected
    assert command("merge", index, tmp_path / "m.safetensors").code == 0
    assert stored(tmp_path / "m.safetensors") == expected
    assert command("validate", tmp_path / "m.safetensors").code == 0


def test_every_type_of_a_gguf_in_one_copy(tmp_path: Path) -> None:
    infos = [info(f"t.{name}", (2, 512), name) for name in GGML]
    held = {one.name: (one.encoding, one.shape, pattern(one)) for one in infos}
    write_gguf(tmp_path / "a.gguf", {"general.architecture": "none"}, held)
    first = stored(tmp_path / "a.gguf")
    aprfmt.convert(tmp_path / "a.gguf", tmp_path / "b.safetensors", generic=True)
    aprfmt.convert(tmp_path / "b.safetensors", tmp_path / "c.gguf", generic=True)
    assert stored(tmp_path / "b.safetensors") == stored(tmp_path / "c.gguf") == first
