"""Importance matrices: both containers as libgguf reads them, and its bytes given the matrix."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest

import aprfmt
from aprfmt.errors import ConversionError, FormatError, OutputError, UsageError
from aprfmt.quantizing.imatrix import read_imatrix
from aprfmt.quantizing.row_encoding import encode_rows
from tests.codecs.data import libgguf_blocks, libgguf_mode
from tests.conversion.folders import llama_folder

Entries = Mapping[str, np.ndarray[Any, Any]]
COLUMNS = {"ffn_down": 512}
KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def sums(layers: int = 2, seed: int = 1) -> dict[str, np.ndarray[Any, Any]]:
    """Return sums of squares [columns] for every weight of a small llama."""
    rng = np.random.default_rng(seed)
    return {
        f"blk.{layer}.{kind}.weight": rng.lognormal(0, 2, COLUMNS.get(kind, 256)).astype(np.float32)
        for layer in range(layers)
        for kind in KINDS
    }


def write_legacy(path: Path, entries: Entries, calls: int = 7, tail: bool = True) -> Path:
    """Write llama.cpp's old file by hand."""
    raw = struct.pack("<i", len(entries))
    for name, values in entries.items():
        raw += struct.pack("<i", len(name)) + name.encode()
        raw += struct.pack("<ii", calls, values.size) + values.astype("<f4").tobytes()
    if tail:
        raw += struct.pack("<ii", 100, 8) + b"calib.txt"[:8]
    path.write_bytes(raw)
    return path


def write_gguf(path: Path, entries: Entries, counts: float = 7.0) -> Path:
    """Write the GGUF form with the gguf package."""
    writer = gguf.GGUFWriter(str(path), "")
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["calib.txt"])
    writer.add_uint32("imatrix.chunk_count", 100)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in entries.items():
        table = values.reshape(1, -1) if values.ndim == 1 else values
        writer.add_tensor(f"{name}.in_sum2", table)
        writer.add_tensor(f"{name}.counts", np.full((len(table), 1), counts, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WRITERS: dict[str, Callable[[Path, Entries], Path]] = {"legacy": write_legacy, "gguf": write_gguf}


@pytest.mark.parametrize("container", WRITERS)
def test_libgguf_reads_the_same(container: str, tmp_path: Path) -> None:
    path = WRITERS[container](tmp_path / "m.imatrix", sums())
    ours, theirs = read_imatrix(path), libgguf.load_imatrix(path)
    assert set(ours.entries) == set(theirs)
    for name, values in theirs.items():
        assert np.array_equal(ours.entries[name], values), name
    assert ours.chunks == 100
    assert ours.datasets == (("calib.tx",) if container == "legacy" else ("calib.txt",))


@pytest.mark.parametrize("scheme", ["Q4_K_M", "Q2_K", "Q3_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "Q4_0"])
def test_bytes_of_libgguf_given_the_matrix(scheme: str, tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "BF16", hidden=256, layers=2, ffn=512, vocab=32)
    path = write_gguf(tmp_path / "m.gguf", sums())
    target = tmp_path / "q.gguf"
    report = aprfmt.convert(source, target, quantize=scheme, imatrix=path, fma=libgguf_mode())
    assert [note.text for note in report.notes if "says nothing about 2 tensors" in note.text]
    aprfmt.convert(source, tmp_path / "f.gguf", encoding="F32")
    weights = libgguf.load_imatrix(path)
    with aprfmt.open(target) as model, aprfmt.open(tmp_path / "f.gguf") as plain:
        for name, tensor in model.items():
            if tensor.encoding != "F32":
                x = plain[name].numpy()
                blocks = libgguf_blocks(tensor.encoding, x, weights.get(name))
                assert bytes(tensor.raw()) == blocks.tobytes(), name
        said = {k: v for k, v in model.metadata.items() if k.startswith("quantize.imatrix.")}
        assert said == {
            "quantize.imatrix.file": "m.gguf",
            "quantize.imatrix.dataset": "calib.txt",
            "quantize.imatrix.entries_count": 14,
            "quantize.imatrix.chunks_count": 100,
        }
        assert len(model.metadata["aprfmt.quantize.imatrix"]) == 64


def test_the_record_survives_other_containers(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "BF16", hidden=256, layers=2, ffn=512, vocab=32)
    path = write_gguf(tmp_path / "m.gguf", sums())
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q4_K_M", imatrix=path)
    aprfmt.convert(source, tmp_path / "q.apr", quantize="Q4_K_M", imatrix=path)
    aprfmt.convert(tmp_path / "q.gguf", tmp_path / "through.apr")
    aprfmt.convert(tmp_path / "through.apr", tmp_path / "back.gguf")
    aprfmt.convert(tmp_path / "q.apr", tmp_path / "other.gguf")
    found = []
    for name in ("q.gguf", "q.apr", "through.apr", "back.gguf", "other.gguf"):
        with aprfmt.open(tmp_path / name) as model:
            found.append({k: v for k, v in model.metadata.items() if ".imatrix" in k})
    assert found == [found[0]] * 5 and len(found[0]) == 5


@pytest.mark.parametrize("scheme", ["NF4", "F16"])
def test_what_weighs_nothing_takes_no_matrix(scheme: str, tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "BF16", hidden=256, layers=2, ffn=512, vocab=32)
    path = write_legacy(tmp_path / "m.dat", sums())
    with pytest.raises(UsageError, match=f"{scheme} uses no importance matrix"):
        aprfmt.convert(source, tmp_path / "q.apr", quantize=scheme, imatrix=path)


def test_every_expert_of_a_stack_has_its_own() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 5, 256)).astype(np.float32)
    weights = rng.lognormal(0, 2, (3, 256)).astype(np.float32)
    expected = b"".join(
        encode_rows("Q4_K", x[e], importance=weights[e], threads=1) for e in range(3)
    )
    flat = weights.reshape(-1)
    for threads in (1, 4):
        found = encode_rows("Q4_K", x, importance=flat, expert_rows=5, threads=threads)
        assert found == expected
    rows = x.reshape(15, 256)
    halves = [
        encode_rows("Q4_K", rows[at], importance=flat, first=at.start, expert_rows=5)
        for at in (slice(0, 7), slice(7, 15))
    ]
    assert b"".join(halves) == expected


def test_an_expert_that_was_never_called_weighs_evenly(tmp_path: Path) -> None:
    name = "blk.0.ffn_up_exps.weight"
    path = write_gguf(tmp_path / "m.gguf", {name: np.zeros((2, 8), np.float32)}, counts=0)
    assert read_imatrix(path).entries[name].tolist() == [1.0] * 16


def test_a_matrix_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "s", "BF16", hidden=256, layers=2, ffn=512, vocab=32)
    wrong = sums() | {"blk.1.ffn_up.weight": np.ones(128, np.float32)}
    path = write_legacy(tmp_path / "m.dat", wrong)
    with pytest.raises(ConversionError, match=r"blk\.1\.ffn_up\.weight.* 128 columns.* 256"):
        aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q4_K_M", imatrix=path)
    assert not (tmp_path / "q.gguf").exists()


@pytest.mark.parametrize("container", WRITERS)
def test_a_number_that_is_none_is_refused(container: str, tmp_path: Path) -> None:
    values = {"blk.0.attn_q.weight": np.array([1, np.nan, 2], np.float32)}
    path = WRITERS[container](tmp_path / "m", values)
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight: importance 1 is nan"):
        read_imatrix(path)


def test_a_count_so_small_that_sums_overflow_is_refused(tmp_path: Path) -> None:
    """In one line, where numpy warned of it."""
    values = {"blk.0.attn_q.weight": np.full(4, 1e38, np.float32)}
    with pytest.raises(FormatError, match="importance 0 is inf"):
        read_imatrix(write_gguf(tmp_path / "m.gguf", values, counts=1e-30))


def test_the_number_of_calls_is_an_int32(tmp_path: Path) -> None:
    """A negative one, as C reads it, divides nothing: the file is refused."""
    path = write_legacy(tmp_path / "m.dat", {"blk.0.attn_q.weight": np.ones(4, np.float32)})
    good = path.read_bytes()
    at = 8 + len("blk.0.attn_q.weight")  # behind the number of entries and the name
    path.write_bytes(good[:at] + struct.pack("<i", (1 << 31) - 1) + good[at + 4 :])
    assert (read_imatrix(path).entries["blk.0.attn_q.weight"] > 0).all()
    for calls in (-(1 << 31), -1):
        path.write_bytes(good[:at] + struct.pack("<i", calls) + good[at + 4 :])
        with pytest.raises(FormatError, match=f"4 values over {calls % (1 << 32)} calls"):
            read_imatrix(path)


def test_sums_need_their_counts(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "")
    writer.add_type("imatrix")
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.ones((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FormatError, match=r"without blk\.0\.attn_q\.weight\.counts"):
        read_imatrix(tmp_path / "m.gguf")


def test_every_cut_and_every_byte_gives_an_error_of_ours_or_a_matrix(tmp_path: Path) -> None:
    path = write_legacy(tmp_path / "m.dat", {"a.weight": np.ones(4, np.float32)})
    good = path.read_bytes()
    assert _is_read(path, good)
    # Behind the entries stand a count and the data set's name, and old files end before them.
    cut = [at for at in range(len(good)) if _is_read(path, good[:at])]
    assert cut == [len(good) - 16, len(good) - 12]
    changed = [
        _is_read(path, good[:at] + bytes([byte]) + good[at + 1 :])
        for at in range(len(good))
        for byte in (0, 0x7F, 0xFF)
    ]
    assert any(changed) and not all(changed)


def _is_read(path: Path, raw: bytes) -> bool:
    """Say whether bytes are read as a matrix; any other end than an error of ours fails."""
    path.write_bytes(raw)
    try:
        read_imatrix(path)
    except FormatError as error:
        assert str(path) in str(error)
        return False
    return True


def test_a_model_is_no_imatrix(smollm2: Path) -> None:
    with pytest.raises(FormatError, match="expected 'imatrix'"):
        read_imatrix(smollm2)


def test_a_collected_matrix_is_written_over_another_only_by_force(tmp_path: Path) -> None:
    from aprfmt.quantizing.imatrix import CollectedImatrix, InputSums

    sums = InputSums.empty(2, 3)
    sums.add(1, np.ones((4, 3)))
    sums.add(1, 2 * np.ones((2, 1, 3)))
    assert sums.sums.tolist() == [[0, 0, 0], [12, 12, 12]] and sums.counts.tolist() == [0, 6]
    matrix = CollectedImatrix({"blk.0.ffn_up_exps.weight": sums}, "text", 5, 64)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"kept")
    with pytest.raises(OutputError, match="exists"):
        matrix.write(path)
    assert path.read_bytes() == b"kept"
    matrix.write(path, force=True)
    assert path.read_bytes()[:4] == b"GGUF"
