"""GGUF files of forks: named types, rows with headers, and ids that mean two things."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from aprfmt import diff
from aprfmt import open as open_model
from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.fork_types import CONTESTED
from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats.gguf.reader import open_source
from aprfmt.tensors.stats import tensor_stats
from tests.cli.run import aprfmt
from tests.formats.gguf_files import U32, File, plain

ROOT = Path(__file__).resolve().parents[3]
JUDGED: Mapping[str, Any] = load_file(ROOT / "fixtures" / "forks" / "ik_llama.safetensors")


def stored(path: Path, *tensors: tuple[str, tuple[int, ...], int, bytes], **keys: int) -> Path:
    """Write tensors (name, row-major shape, type id, bytes), each padded to 32."""
    file, data = plain(), b""
    for key, value in keys.items():
        file.key(key.replace("__", "."), U32, value)
    for name, shape, number, raw in tensors:
        file.tensor(name, shape[::-1], number, len(data))
        data += raw + bytes(-len(raw) % 32)
    file.data = data
    path.write_bytes(file.build())
    return path


def every(path: Path) -> Path:
    """Write a tensor of each decoded type, and behind each one of F32."""
    rows = []
    for name in (key for key in JUDGED if "|" not in key):
        shape, number = JUDGED[f"{name}|="].shape, ENCODINGS[name].ggml
        assert number is not None
        rows.append((name, shape, number, JUDGED[name].tobytes()))
        rows.append((f"after.{name}", (8,), 0, bytes(32)))
    return stored(path, *rows)


def warnings(path: Path) -> dict[str, str]:
    with open_source(path) as source:
        return {note.key: note.text for note in source.notes if note.level == "warning"}


def test_every_type_is_named_sized_and_decoded(tmp_path: Path) -> None:
    path = every(tmp_path / "a.gguf")
    assert warnings(path) == {}
    with open_model(path) as model:
        for name in (key for key in JUDGED if "|" not in key):
            assert model[name].encoding == name
            assert model[name].nbytes == JUDGED[name].size
            expected = JUDGED[f"{name}|="]
            assert model[name].numpy().tobytes() == expected.tobytes()
            assert model[name].rows(1, 2).tobytes() == expected[1:2].tobytes()
            assert tensor_stats(model[name].stored[0]).max == float(expected.max())


def test_a_copy_keeps_every_bit_and_a_decoded_one_every_value(tmp_path: Path) -> None:
    path = every(tmp_path / "a.gguf")
    assert aprfmt("set", path, "general.name=x", "-o", tmp_path / "b.gguf").code == 0
    done = aprfmt("diff", path, tmp_path / "b.gguf")
    assert done.code == 0 and "SAME_BYTES" in done.out
    done = aprfmt("convert", path, tmp_path / "b.apr", "--generic")
    assert done.code == 0, done.err
    assert aprfmt("diff", path, tmp_path / "b.apr").code == 0
    said = aprfmt("validate", path, "-v").out
    assert re.search(r"PASS +values +38 tensors", said)
    assert re.search(r"PASS +block_scales +19 tensors", said)


def test_hex_shows_blocks_behind_the_header(tmp_path: Path) -> None:
    path = every(tmp_path / "a.gguf")
    done = aprfmt("hex", path, "--tensor", "IQ4_KS", "--block", "2", "--json")
    row, raw = ENCODINGS["IQ4_KS"], JUDGED["IQ4_KS"]
    block = raw[1, row.row_header : row.row_header + row.type_size]  # block 2 begins row 1
    assert done.json["blocks"][0]["bytes"] == block.tobytes().hex()
    assert done.json["count"] == 4


@pytest.mark.parametrize("place", ["header", "block"])
def test_a_damaged_byte_is_found_where_it_is(tmp_path: Path, place: str) -> None:
    """In the scale of a row it spoils that row, in a block that block."""
    path = every(tmp_path / "a.gguf")
    with open_model(path) as model:
        info = model["IQ5_KS"].stored[0].info
    at = info.offset + (info.row_bytes or 0) + (1 if place == "header" else 40)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    (tmp_path / "b.gguf").write_bytes(raw)
    done = aprfmt("diff", path, tmp_path / "b.gguf", "--json")
    assert done.code == 1
    assert [row["cause"] for row in done.json["findings"]] == ["bit_rot"]
    said = json.dumps(done.json)
    assert f"byte {at} of the file, in IQ5_KS" in said
    assert ("row's header at [1, 0]" in said) == (place == "header")


@pytest.mark.parametrize("name", [key for key in JUDGED if "|" not in key])
def test_a_row_of_other_bytes_is_damage_and_nothing_else(tmp_path: Path, name: str) -> None:
    row, shape = ENCODINGS[name], (16, 512)
    line, rng = row.row_bytes(shape) or 0, np.random.default_rng(row.ggml)
    raw = rng.integers(0, 256, row.nbytes(shape), np.uint8)
    cells = raw.reshape(-1, line if row.row_layout else row.type_size)
    kind = np.dtype("<f4" if row.row_layout.startswith("d:f4") else "<f2")
    cells[:, : kind.itemsize] = np.full((len(cells), 1), 0.001, kind).view(np.uint8)
    number = row.ggml
    assert number is not None
    whole = stored(tmp_path / "a.gguf", ("t", shape, number, raw.tobytes()))
    at = 5 * line
    raw[at : at + line] = rng.integers(0, 256, line, np.uint8)
    broken = stored(tmp_path / "b.gguf", ("t", shape, number, raw.tobytes()))
    report = diff(whole, broken)
    assert [(one.cause, one.confirmed) for one in report.findings if one.confirmed] in (
        [],
        [("bit_rot", True)],
        [("stale_tensor", True)],
    )
    assert report.counts["DIFFERENT"] == 1


def test_a_scale_of_a_row_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = every(tmp_path / "a.gguf")
    with open_model(path) as model:
        info = model["IQ3_KT"].stored[0].info
    raw = bytearray(path.read_bytes())
    at = info.offset + (info.row_bytes or 0)
    raw[at : at + 4] = np.float32("nan").tobytes()
    path.write_bytes(raw)
    done = aprfmt("validate", path)
    assert done.code == 1
    assert "IQ3_KT: row 1 has a scale d that is NaN or infinite" in done.out


def test_a_file_short_by_its_row_headers_says_so(tmp_path: Path) -> None:
    """What gguf-py made of such a file: bytes of whole blocks, the headers forgotten."""
    raw, shape = JUDGED["IQ4_KSS"], JUDGED["IQ4_KSS|="].shape
    wide = np.tile(raw, (16, 1))
    bare = wide.tobytes()[: -4 * len(wide)]
    path = stored(
        tmp_path / "a.gguf", ("t", (len(wide), shape[1]), 146, bare), ("u", (8,), 0, bytes(32))
    )
    with pytest.raises(
        FormatError,
        match=r"short by exactly the 4 bytes in front of each of its "
        r"32 rows.*get the original file",
    ):
        open_source(path)
    done = aprfmt("inspect", path)
    assert done.code == 2 and "short by exactly" in done.out + done.err


def test_an_interleaved_type_is_named_measured_and_copied(tmp_path: Path) -> None:
    data = bytes(range(256)) * 3
    path = stored(
        tmp_path / "a.gguf", ("t", (4, 256), 339, data[: 4 * 144]), ("u", (8,), 0, bytes(32))
    )
    text = warnings(path)["unknown_type"]
    assert "IQ4_K_R4" in text and "144 bytes for 256 elements; copied" in text
    assert aprfmt("set", path, "general.name=x", "-o", tmp_path / "b.gguf").code == 0
    with open_source(tmp_path / "b.gguf") as source:
        assert source.tensors["t"].info.encoding == "IQ4_K_R4"
        assert bytes(source.tensors["t"].raw()) == data[: 4 * 144]
    assert aprfmt("convert", path, tmp_path / "c.safetensors", "--generic").code == 0
    assert aprfmt("convert", tmp_path / "c.safetensors", tmp_path / "d.gguf", "--generic").code == 0
    with open_source(tmp_path / "d.gguf") as source:
        assert bytes(source.tensors["t"].raw()) == data[: 4 * 144]
    short = stored(tmp_path / "s.gguf", ("t", (4, 256), 339, data[:64]), ("u", (8,), 0, bytes(32)))
    assert "which the file does not have" in warnings(short)["unknown_type"]


CLAIMS = [(number, claim) for number, claims in CONTESTED.items() for claim in claims]


@pytest.mark.parametrize(("number", "claim"), CLAIMS, ids=lambda value: getattr(value, "name", ""))
def test_the_bytes_of_its_rows_say_whose_an_id_is(tmp_path: Path, number: int, claim: Any) -> None:
    shape = (64, 1024)
    size = claim.measure.nbytes(shape)
    path = stored(tmp_path / "a.gguf", ("t", shape, number, bytes(size)), ("u", (8,), 0, bytes(32)))
    found = warnings(path)
    assert set(found) == {"contested_type"}
    said = found["contested_type"]
    assert claim.name in said and "copied, not decoded" in said
    with open_source(path) as source:
        info = source.tensors["t"].info
        assert (info.encoding, info.nbytes) == (f"type#{number}", size + -size % 32)
    assert aprfmt("set", path, "general.name=x", "-o", tmp_path / "b.gguf").code == 0
    assert claim.name in warnings(tmp_path / "b.gguf")["contested_type"]
    done = aprfmt("inspect", path)
    assert done.code == 0 and claim.name in done.out + done.err
    assert claim.name in aprfmt("validate", path).out
    refused = aprfmt("cat", path, "t")
    assert refused.code == 2 and str(claim) in refused.err


def test_upstreams_meaning_needs_no_word_where_its_bytes_are_there(tmp_path: Path) -> None:
    data = bytes(64 * 4 * 18)
    path = stored(tmp_path / "a.gguf", ("t", (64, 256), 42, data), ("u", (8,), 0, bytes(32)))
    assert warnings(path) == {}
    with open_source(path) as source:
        assert source.tensors["t"].info.encoding == "Q2_0"


def test_bytes_of_no_known_meaning_are_not_decoded_as_upstreams(tmp_path: Path) -> None:
    """100 bytes for 256 elements are no Q2_0 with a hole behind it: some other fork's type."""
    path = stored(tmp_path / "a.gguf", ("t", (64, 256), 42, bytes(6400)), ("u", (8,), 0, bytes(32)))
    text = warnings(path)["contested_type"]
    assert "6400 bytes stand there, which is neither Q2_0 nor STQ1_0" in text
    with open_source(path) as source:
        info = source.tensors["t"].info
        assert (info.encoding, info.nbytes) == ("type#42", 6400)
    done = aprfmt("cat", path, "t")
    assert done.code == 2 and done.err.startswith("aprfmt: t: type#42: ")


def test_what_padding_leaves_in_doubt_is_said_unless_a_key_settles_it(tmp_path: Path) -> None:
    """One row of 128: 36 bytes of Q2_0, or 34 of Q2_0_G128, both padded to 64."""
    rows = (("t", (1, 128), 42, bytes(36)), ("u", (8,), 0, bytes(32)))
    text = warnings(stored(tmp_path / "a.gguf", *rows))["contested_type"]
    assert "read as Q2_0; as many bytes would be Q2_0_G128" in text
    text = warnings(stored(tmp_path / "b.gguf", *rows, GGML_Q2_0_G128=1))["contested_type"]
    assert "by the key GGML_Q2_0_G128 Q2_0_G128" in text


def test_big_endian_rows_with_headers_are_refused_when_read(tmp_path: Path) -> None:
    raw, shape = JUDGED["IQ4_KS"], JUDGED["IQ4_KS|="].shape
    file = File(order=">", data=raw.tobytes() + bytes(-raw.size % 32))
    path = tmp_path / "a.gguf"
    path.write_bytes(file.tensor("t", shape[::-1], 144).build())
    with (
        open_model(path) as model,
        pytest.raises(UnsupportedError, match="big-endian data of it cannot be read"),
    ):
        model["t"].numpy()
