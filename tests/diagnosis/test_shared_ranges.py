"""Tensors that share bytes of a GGUF are the cause; what the shared bytes hold is its consequence.

Seen red: "nonfinite, unknown cause" of a file whose writer left too little room.
"""

import shlex
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import aprfmt
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

FIRST, SECOND = "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of one layer as GGUF in F32."""
    folder = tmp_path_factory.mktemp("ranges")
    source = llama_folder(folder / "m", "F32", hidden=96, layers=1, ffn=160, heads=3, kv_heads=1)
    aprfmt.convert(source, folder / "a.gguf")
    return folder / "a.gguf"


def offset_places(raw: bytes, *names: str) -> Iterator[int]:
    """Yield where in the header the offset of each tensor stands, by the GGUF specification."""
    for name in names:
        text = name.encode()
        at = raw.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)
        (axes,) = struct.unpack_from("<I", raw, at)
        yield at + 4 + 8 * axes + 4


def moved(path: Path, right: Path, by: int, *, overwritten: bool) -> Path:
    """Write the file with SECOND's offset `by` bytes from its own, and its bytes there or not."""
    raw = bytearray(right.read_bytes())
    (place,) = offset_places(bytes(raw), SECOND)
    (offset,) = struct.unpack_from("<Q", raw, place)
    with aprfmt.open(right) as model:
        info = model[SECOND].stored[0].info
        start, size = info.offset, info.nbytes
    if overwritten:
        raw[start + by : start + by + size] = bytes(raw[start : start + size])
    struct.pack_into("<Q", raw, place, offset + by)
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("by", [-32, -1024])
def test_a_tensor_written_over_the_end_of_another(by: int, right: Path, tmp_path: Path) -> None:
    there = moved(tmp_path / "b.gguf", right, by, overwritten=True)
    said = command("diagnose", right, there, "--json").json
    (cause,) = said["causes"]
    assert (said["verdict"], said["exit"], cause["cause"]) == ("bug", 1, "overlapping_ranges")
    assert FIRST in cause["says"] and SECOND in cause["says"] and f"{-by} bytes" in cause["says"]
    assert cause["level"] == "confirmed" and cause["remedy"]["command"].startswith("aprfmt convert")
    back = command("diagnose", there, right, "--json").json
    assert back["causes"][0]["cause"] == "overlapping_ranges"


def test_bytes_that_differ_outside_the_shared_range(right: Path, tmp_path: Path) -> None:
    """The overlap is the cause of some of the differing bytes, and not of all."""
    there = moved(tmp_path / "b.gguf", right, -32, overwritten=True)
    raw = bytearray(there.read_bytes())
    with aprfmt.open(right) as model:
        start = model[FIRST].stored[0].info.offset
    raw[start : start + 64] = raw[start + 64 : start + 128]
    there.write_bytes(raw)
    (cause, *_) = command("diagnose", right, there, "--json").json["causes"]
    assert cause["cause"] == "overlapping_ranges" and cause["level"] != "confirmed", cause


def test_two_names_with_one_offset(right: Path, tmp_path: Path) -> None:
    with aprfmt.open(right) as model:
        by = model[FIRST].stored[0].info.offset - model[SECOND].stored[0].info.offset
    there = moved(tmp_path / "b.gguf", right, by, overwritten=False)
    (cause, *_) = command("diagnose", right, there, "--json").json["causes"]
    assert cause["cause"] == "overlapping_ranges"
    assert FIRST in cause["says"] and SECOND in cause["says"]


@pytest.mark.parametrize("cut", [0, 64])
def test_files_whose_ranges_are_apart(cut: int, right: Path, tmp_path: Path) -> None:
    """A whole file, and one that ends too early, share nothing."""
    raw = right.read_bytes()
    (tmp_path / "b.gguf").write_bytes(raw[: len(raw) - cut])
    said = command("diagnose", right, tmp_path / "b.gguf", "--json").json
    assert "overlapping_ranges" not in {one["cause"] for one in said["causes"]}
    assert (said["exit"] == 0) == (not cut)


@pytest.mark.parametrize("by", [-32, -1024])
def test_no_command_is_offered_where_both_files_have_the_fault(
    by: int, right: Path, tmp_path: Path
) -> None:
    """Neither is a source that `convert` takes, also where both are one file."""
    a = moved(tmp_path / "a.gguf", right, -32, overwritten=True)
    b = a if by == -32 else moved(tmp_path / "b.gguf", right, by, overwritten=True)
    told = command("diagnose", a, b, "--json").json
    assert {(row["cause"], row["remedy"]) for row in told["causes"]} == {
        ("overlapping_ranges", None)
    }
    assert told["unmended"].startswith("no command mends B")
    for line in told["next"]:
        words = shlex.split(line)
        assert words[1] == "validate"
        assert "error" not in command(*words[1:], "--json").json
