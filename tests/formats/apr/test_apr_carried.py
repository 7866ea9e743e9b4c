"""Encodings APR has no code for: carried under another name, joined back, never misread."""

from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.protocols import TensorInfo
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.reader import open_source
from tests.formats.apr_files import METADATA, AprFile, Tensor
from tests.formats.apr_writing import check, info, round_trip, write

FOREIGN = [row.name for row in ENCODINGS.values() if row.apr is None and row.known]


@pytest.mark.parametrize("name", FOREIGN)
def test_every_foreign_encoding_round_trips(name: str, tmp_path: Path) -> None:
    infos = [info("w", (2, 3, 512), name), info("v", (512,), name), info("z", (0, 512), name)]
    metadata = {**METADATA, "note": "kept"}
    assert round_trip(tmp_path / "x.apr", infos, metadata) == metadata
    # What another reader sees: names it does not look for, bytes it can copy.
    parsed = parse(memoryview((tmp_path / "x.apr").read_bytes()), "x")
    stored = {entry.info.name: entry.info for entry in parsed.entries}
    assert set(stored) == {f"w@{name}", f"v@{name}", f"z@{name}"}
    row = ENCODINGS[name]
    for one in infos:
        place = stored[f"{one.name}@{name}"]
        row_bytes = row.row_bytes(one.shape)
        shape = (one.nbytes,) if row_bytes is None else (*one.shape[:-1], row_bytes)
        assert (place.encoding, place.shape) == ("U8", shape)


def test_ids_without_a_layout_are_carried_as_bytes(tmp_path: Path) -> None:
    strange = TensorInfo("w", (3, 32), "type#142", 0, 77, None)
    round_trip(tmp_path / "x.apr", [strange, info("a", (4,))])


def test_a_scalar_and_a_rewrite(tmp_path: Path) -> None:
    infos = [info("s", (), "U64"), info("w", (4, 64), "Q5_0"), info("a", (4,))]
    round_trip(tmp_path / "x.apr", infos)
    with open_source(tmp_path / "x.apr") as source:
        order = sorted((t.info for t in source.tensors.values()), key=lambda one: one.offset)
        write(tmp_path / "y.apr", order, source.metadata, like=source)
    assert (tmp_path / "x.apr").read_bytes() == (tmp_path / "y.apr").read_bytes()


ENTRY: dict[str, Any] = {"encoding": "Q5_0", "shape": [64]}


@pytest.mark.parametrize(
    ("table", "stored", "says"),
    [
        ({"w": ENTRY}, Tensor(b"w@Q5_0", (44,), 0, bytes(176)), "stored as F32"),
        ({"w": ENTRY}, Tensor(b"w@Q5_0", (43,), 7, bytes(43)), "takes 44 bytes, 43 are stored"),
        ({"w": {**ENTRY, "shape": [63]}}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "multiple of 32"),
        ({"w": {**ENTRY, "shape": [-64]}}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "non-negative"),
        ({"w": {**ENTRY, "shape": [64.0]}}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "non-negative"),
        ({"w": {**ENTRY, "shape": 64}}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "lacks encoding"),
        ({"w": "Q5_0"}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "is str, not an object"),
        ({"w": {"encoding": "Q9_Z", "shape": [4]}}, Tensor(b"w@Q9_Z", (4,), 7, bytes(4)), "Q9_Z"),
        ({"w": {"encoding": "type#²", "shape": [4]}},
         Tensor("w@type#²".encode(), (4,), 7, bytes(4)), "²"),
        ({"x": ENTRY}, Tensor(b"w@Q5_0", (44,), 7, bytes(44)), "no tensor 'x@Q5_0'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_table_that_does_not_fit_joins_nothing(
    table: dict[str, Any], stored: Tensor, says: str
) -> None:
    file = AprFile(tensors=(stored,), metadata={"aprfmt.tensors": table})
    parsed = parse(memoryview(file.build()), "t.apr")
    assert list(parsed.infos) == [stored.name.decode()]
    assert any(says in note.text and note.level == "warning" for note in parsed.notes)
    assert "aprfmt.tensors" not in parsed.metadata


def test_a_name_that_is_taken_stays_its_own() -> None:
    tensors = (Tensor(b"w"), Tensor(b"w@Q5_0", (44,), 7, bytes(44)))
    file = AprFile(tensors=tensors, metadata={"aprfmt.tensors": {"w": ENTRY}})
    parsed = parse(memoryview(file.build()), "t.apr")
    assert parsed.infos["w"].encoding == "F32"
    assert parsed.infos["w@Q5_0"].encoding == "U8"


def test_shards_describe_their_own_tensors(tmp_path: Path) -> None:
    infos = [info(f"t{at}", (4, 32), "Q8_0") for at in range(5)] + [info("x", (4,))]
    files = write(tmp_path / "m.apr", infos, max_shard_size=280)
    assert len(files) == 4
    for path in files[:-1]:
        with open_source(path) as source:
            check(source, infos)
