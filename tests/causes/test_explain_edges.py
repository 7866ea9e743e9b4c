"""Edges of `diff`: the first byte of a shift, half of the rows, small numbers, long runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.base.encodings import BY_GGML, ENCODINGS
from aprfmt.causes.tensor import table
from aprfmt.causes.tensor.guess import JointHypothesis, PairHypothesis
from aprfmt.causes.tensor.overwritten_bytes import join_places
from aprfmt.causes.tensor.row_sources import MATCHED
from aprfmt.codecs import encode
from aprfmt.compare import diff
from aprfmt.errors import AprfmtError
from tests.causes import faults
from tests.compare.damage import Change
from tests.compare.test_verdicts import edited
from tests.conversion.folders import float_bytes, llama_folder, write_mixed
from tests.formats.gguf_files import File

# Where a block's members of type ggml_half stand (ggml-common.h).
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0, 2),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("edges") / "source", "BF16", ffn=64)


def explained(source: Path, target: Path, change: Change) -> tuple[str, bool, str]:
    """Return the cause, whether it is confirmed, and the evidence about the up projection."""
    report = diff(source, edited(source, target, change))
    (row,) = [row for row in report.tensors if row.key == faults.ROLES[faults.UP]]
    found = row.explanation
    return (
        ("", False, "")
        if found is None
        else (found.cause, found.confirmed, " / ".join(found.evidence))
    )


@pytest.mark.parametrize("name", HALVES)
def test_blocks_whose_halves_are_swapped_are_named(name: str, tmp_path: Path) -> None:
    row = ENCODINGS[name]
    count = 256 * 64 // row.block_size
    blocks = np.random.default_rng(0).integers(1, 60, (count, row.type_size), np.uint8)
    swapped = blocks.copy()
    for at in HALVES[name]:
        swapped[:, [at, at + 1]] = blocks[:, [at + 1, at]]
    kind = next(number for number, known in BY_GGML.items() if known is row)
    for path, raw in ((tmp_path / "a.gguf", blocks), (tmp_path / "b.gguf", swapped)):
        path.write_bytes(File(data=raw.tobytes()).tensor("t", [256, 64], kind).build())
    (found,) = diff(tmp_path / "a.gguf", tmp_path / "b.gguf").tensors
    assert found.explanation is not None and found.explanation.confirmed
    assert found.cause == "endianness", found.explanation


def test_a_shift_has_to_hold_from_the_first_byte_on(source: Path, tmp_path: Path) -> None:
    late = faults.raw(faults.UP, lambda old: old[5:] + b"12345")
    cause, confirmed, says = explained(source, tmp_path / "late", late)
    assert (cause, confirmed) == ("byte_offset", True) and "5 bytes too late" in says
    first = faults.raw(faults.UP, lambda old: bytes([old[5] ^ 0x10]) + old[6:] + b"12345")
    cause, confirmed, _ = explained(source, tmp_path / "first", first)
    assert cause != "byte_offset" and not confirmed


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K"])
def test_another_quantizer_leaves_no_tensor_alone_but_for_one_row(
    name: str, tmp_path: Path
) -> None:
    """Rows of values a fiftieth of a step away, quantized: of one row alone it is no quantizer."""
    x = np.random.default_rng(0).standard_normal((32, 256), np.float32)
    near = x + np.float32(0.02 * np.abs(x).max() / 8) * np.roll(x, 1)
    a, b = (np.frombuffer(encode(name, each)[""], np.uint8).reshape(32, -1) for each in (x, near))
    kind = next(number for number, known in BY_GGML.items() if known is ENCODINGS[name])
    for count in (1, 2, 32):
        mixed = a.copy()
        mixed[:count] = b[:count]
        for path, raw in ((tmp_path / "a.gguf", a), (tmp_path / "b.gguf", mixed)):
            path.write_bytes(File(data=raw.tobytes()).tensor("t", [256, 32], kind).build())
        (row,) = diff(tmp_path / "a.gguf", tmp_path / "b.gguf").tensors
        assert (row.cause == "quantisation") is (count > 1), count
        if count > 1:
            assert row.explanation is not None and "of one source" in row.explanation.evidence[0]


@pytest.mark.parametrize(("codes", "within"), [(1, True), (2, True), (3, False)])
def test_values_of_one_source_are_a_step_of_each_apart_and_no_further(
    codes: int, within: bool, tmp_path: Path
) -> None:
    """Two codes of one scale are a step of A and a step of B: as far as two roundings go."""
    rng = np.random.default_rng(1)
    a = np.frombuffer(encode("Q8_0", rng.standard_normal((32, 256), np.float32))[""], np.uint8)
    a = a.reshape(32, -1, 34)
    b = a.copy()
    moved = np.clip(a[..., 2:].view(np.int8).astype(int), -120, 120)
    b[..., 2:] = (moved + codes * rng.choice([-1, 1], moved.shape)).astype(np.int8).view(np.uint8)
    a = a.copy()
    a[..., 2:] = moved.astype(np.int8).view(np.uint8)
    kind = next(number for number, known in BY_GGML.items() if known is ENCODINGS["Q8_0"])
    for name, raw in (("a", a), ("b", b)):
        made = File(data=raw.tobytes()).tensor("t", [256, 32], kind)
        (tmp_path / f"{name}.gguf").write_bytes(made.build())
    (row,) = diff(tmp_path / "a.gguf", tmp_path / "b.gguf").tensors
    said = "" if row.explanation is None else " ".join(row.explanation.evidence)
    assert ("of one source" in said) is within, said
    assert not within or f"at most {codes / 2:g} of both steps apart" in said


@pytest.mark.parametrize("moved", [0, 1])
def test_codes_under_twice_the_scale_are_not_of_one_source(moved: int, tmp_path: Path) -> None:
    """Seen red: steps of floats are so wide that a factor of two was within one of each."""
    x = np.random.default_rng(5).standard_normal((32, 256), np.float32)
    a, b = (np.frombuffer(encode("MXFP4", y)[""], np.uint8).copy() for y in (x, x + moved * 0.01))
    b = np.where(np.arange(b.size) % 34 == 0, a + 1, a).astype(np.uint8) if not moved else b
    kind = next(number for number, known in BY_GGML.items() if known is ENCODINGS["MXFP4"])
    for name, raw in (("a", a), ("b", b)):
        made = File(data=raw.tobytes()).tensor("t", [256, 32], kind)
        (tmp_path / f"{name}.gguf").write_bytes(made.build())
    (row,) = diff(tmp_path / "a.gguf", tmp_path / "b.gguf").tensors
    said = "" if row.explanation is None else " ".join(row.explanation.evidence)
    assert ("of one source" in said) is bool(moved), said


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_damaged_bits_are_counted_up_to_sixteen(count: int, tmp_path: Path) -> None:
    """Bits of exponents, one of a value: of more it is other values."""
    x = np.random.default_rng(2).standard_normal((64, 64), np.float32)
    damaged = x.copy().view(np.uint32).reshape(-1)
    damaged[np.arange(count) * 200 + 7] ^= 1 << 27
    for name, values in (("a", x), ("b", damaged.view(np.float32))):
        held = {"w": ("F32", (64, 64), values.tobytes())}
        write_mixed(tmp_path / f"{name}.safetensors", held)
    (row,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    assert row.explanation is not None
    said = row.explanation.evidence[1]
    if count == 1:
        assert said.startswith("one bit differs: bit 27 of the F32 value at [0, 7]: ")
    elif count <= 16:
        many = f"{count} bits in {count} bytes differ, in the values at [0, 7] ("
        assert row.cause == "bit_rot" and said.startswith(many)
        assert len(row.explanation.evidence) == 2 + count
    else:
        assert row.cause != "bit_rot" and "bits in" not in " ".join(row.explanation.evidence)


@pytest.mark.parametrize("kind", ["F32", "BF16"])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_up_to_half_of_a_small_tensors_values_may_be_damaged(
    size: int, kind: str, tmp_path: Path
) -> None:
    """A bit of each: beyond the half it is other values, but the only one of a tensor may be."""
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    raw = float_bytes(x, kind)
    item = len(raw) // size
    for count in range(1, size + 1):
        damaged = bytearray(raw)
        for at in range(count):
            damaged[at * item + item - 1] ^= 1 << at % 6
        for name, data in (("a", raw), ("b", bytes(damaged))):
            write_mixed(tmp_path / f"{name}.safetensors", {"w": (kind, (size,), data)})
        (row,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
        assert (row.cause == "bit_rot") is (2 * count <= size or size == 1), count


NOISE = np.random.default_rng(9).integers(0, 256, 2048, np.uint8).tobytes()


def lost_gate(data: dict[str, bytes]) -> bytes:
    """Take the gate's bytes out of B, and return them."""
    lost = data[faults.GATE]
    data[faults.GATE] = NOISE * 4
    return lost


# What a range of bytes of the up projection holds now -> what is said of it, "" if it is not known.
HELD: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "zeros": (lambda data: bytes(700), "bytes 1000 to 1699 are zero in B"),
    "a byte": (lambda data: b"\xa5" * 700, "all bytes 0xa5"),
    "a pattern": (lambda data: NOISE[:32] * 21 + NOISE[:28], "32 bytes over and over"),
    "another tensor": (lambda data: data[faults.GATE][300:1000],
                       f"bytes of B's {faults.GATE} at +0x12c"),
    "itself": (lambda data: data[faults.UP][4096:4796], f"bytes of B's {faults.UP} at +0x1000"),
    "a tensor's end": (lambda data: data[faults.K][-700:],
                       f"bytes of B's {faults.K} at +{0x1000 - 700:#x}"),
    "what B lost": (lambda data: lost_gate(data)[300:1000],
                    f"bytes of A's {faults.GATE} at +0x12c"),
    "noise": (lambda data: NOISE[:700], ""),
}  # fmt: skip


@pytest.mark.parametrize("what", HELD)
def test_what_a_range_holds_is_looked_for_in_both_files(
    what: str, source: Path, tmp_path: Path
) -> None:
    make, expected = HELD[what]

    def change(data: dict[str, bytes]) -> None:
        data[faults.UP] = data[faults.UP][:1000] + make(data) + data[faults.UP][1700:]

    cause, confirmed, says = explained(source, tmp_path / "b", change)
    assert (cause, confirmed) == ("bit_rot", True) if expected else cause in ("bit_rot", "")
    assert expected in says and ("bytes of " in says) == expected.startswith("bytes of"), says


@pytest.mark.parametrize(("rows", "part"), [(31, True), (32, True), (33, False)])
def test_up_to_half_of_the_rows_are_explained_alone(
    rows: int, part: bool, source: Path, tmp_path: Path
) -> None:
    def change(x: Any) -> Any:
        x[:rows] *= 1 + np.arange(64, dtype=np.float32) / 50
        return x

    cause, confirmed, says = explained(source, tmp_path / "b", faults.computed(faults.UP, change))
    assert (cause == "scale" and confirmed) == part
    assert (f"in {rows} of 64 rows: 0, 1, 2, 3, 4, 5 ..." in says) == part


def test_rows_of_small_numbers_have_their_factors_too(tmp_path: Path) -> None:
    """A weight's numbers are small: the squares of a row of 64 add up to less than one."""
    values = (np.random.default_rng(5).standard_normal((64, 64)) / 50).astype(np.float32)
    small = {faults.UP: float_bytes(values, "BF16")}
    source = llama_folder(tmp_path / "a", "BF16", ffn=64, replaced=small)
    factors = np.linspace(1, 2, 64, dtype=np.float32)[:, None]
    scaled = faults.computed(faults.UP, lambda x: x * factors)
    cause, confirmed, says = explained(source, tmp_path / "b", scaled)
    assert (cause, confirmed) == ("scale", True)
    assert "every row of B is A's times a factor of its own / factors from 1 to 2 in" in says


def test_heads_of_more_bytes_than_a_window_are_equal_to_the_last(tmp_path: Path) -> None:
    """A row of 4224 bytes ends at no edge of 8 MiB; GGUF has a head's rows in another order."""
    source = llama_folder(
        tmp_path / "hf", "BF16", hidden=2112, layers=1, ffn=32, vocab=32, kv_heads=1
    )
    aprfmt.convert(source, tmp_path / "x.gguf")
    report = diff(source, tmp_path / "x.gguf", tensors=["L0.attn_q.weight"])
    (row,) = report.tensors
    assert (row.verdict, row.first_byte) == ("SAME_VALUES", None)


def test_places_are_joined_over_windows() -> None:
    """Seen red: the limit kept inside each window only."""
    windows = [np.array([0, 1, 5]), np.array([], np.int64), np.array([10, 200])]
    assert join_places(windows, gap=10, most=2) == [[0, 11], [200, 201]]
    assert join_places([windows[0], windows[2] + 90], gap=10, most=2) is None
    assert join_places([windows[1]], gap=10, most=2) == []


def test_an_explanation_that_raises_is_said_and_the_others_go_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the error caught around all of them, and one swallowed without a line."""

    def broken(*_: object) -> Any:
        raise AprfmtError("a tensor that it reads is damaged")
        yield

    def late(*_: object) -> Any:
        yield lambda: broken().__next__()

    single = PairHypothesis(("swapped_tensors",), broken)
    monkeypatch.setattr(table, "TABLE", (single, *table.TABLE))
    joint = (
        JointHypothesis(("fused_order",), broken, weak=("scale",)),
        JointHypothesis(("derived",), late, weak=("scale",)),
    )
    monkeypatch.setattr(table, "JOINT", (*joint, *table.JOINT))
    target = edited(source, tmp_path / "b", faults.computed(faults.UP, lambda x: 2 * x))
    report = diff(source, target)
    (row,) = [row for row in report.tensors if row.key == faults.ROLES[faults.UP]]
    assert row.explanation is not None and row.explanation.confirmed and row.cause == "scale"
    said = "a tensor that it reads is damaged"
    lines = [f"not tried: {cause}: {said}" for cause in ("fused_order", "derived")]
    assert report.not_tried == (f"not tried: swapped_tensors of {row.key}: {said}", *lines)
    assert set(report.not_tried) <= set(report.notes)


WORKERS = {  # module -> what looks at one tensor or some, and the causes that it can find
    "shard_copies._find_joined": "shard_order",
    "shard_copies._find_parts": "shard_order",
    "pruned_copies._pruned_copy": "derived",
    "initial_values._find_initial_numbers": "stale_tensor",
    "derived_weights._matrix_change": "lora_merge, partial_merge, derived",
}


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("unlike")
    small: dict[str, Any] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1}
    a, b = (llama_folder(folder / str(i), "BF16", seed=i, **small) for i in range(2))
    assert not diff(a, b).not_tried
    return a, b


@pytest.mark.parametrize("worker", WORKERS)
def test_what_could_not_be_looked_at_is_said_of_every_tensor(
    worker: str, unlike: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def broken(*_: object, **__: object) -> Any:
        nonlocal asked
        asked += 1
        raise AprfmtError("a tensor that it reads is damaged")

    monkeypatch.setattr(f"aprfmt.causes.tensor.{worker}", broken)
    report = diff(*unlike)
    (line,) = report.not_tried
    said = re.fullmatch(
        r"not tried: (.*) of (\S+)(?: and (\d+) more)?: a tensor that it reads is damaged", line
    )
    assert said is not None and said[1] == WORKERS[worker]
    assert any(row.key == said[2] for row in report.tensors)
    assert 1 <= 1 + int(said[3] or 0) <= asked
    assert line in report.notes and report.exit_code() == 1


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("columns", [3, 8])
def test_many_rows_in_another_order_are_found_by_their_bytes(
    columns: int, kind: type, tmp_path: Path
) -> None:
    """More than are looked for one by one, of both float types."""
    rows = MATCHED + 1
    rng = np.random.default_rng(columns)
    values: Any = rng.normal(size=(rows, columns)).astype(kind)
    order = rng.permutation(rows)
    moved = np.empty_like(values)
    moved[order] = values
    for name, held in (("a", values), ("b", moved)):
        save_file({"w": held}, tmp_path / f"{name}.safetensors")
    (row,) = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    found = row.explanation
    assert found is not None and found.confirmed and found.residual_after == 0
    assert row.cause == "row_offset" and found.evidence[0] == "B has A's rows in another order"
    pairs = re.findall(r"(\d+) of A is (\d+) of B", found.evidence[1])
    assert len(pairs) == 4
    for mine, theirs in pairs:
        assert np.array_equal(values[int(mine)], moved[int(theirs)])
