"""Small rules of measuring at their bounds: pieces, decimals, rows, arithmetics, commands."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.codecs import native_kernels
from aprfmt.measure import difference_image, distances, logprob_tables
from aprfmt.measure.byte_ranges import units_text
from aprfmt.measure.distances import measure_blocks, measure_values
from aprfmt.measure.logprob_tables import printed_resolution
from aprfmt.measure.named_causes import (
    completed_command,
    insert_stored_names,
    name_cause,
    rewrite_command,
    share_text,
    surplus_command,
)
from aprfmt.measure.sampling import RANGE, DifferingRange, SampleReport, Unsampled, sample_files
from aprfmt.measure.tolerances import (
    ALIKE_PRODUCTS,
    LEAST_ROUNDED,
    ONE_OPERATION,
    ROUNDOFF,
    arithmetic_of_errors,
)
from aprfmt.model import open_model
from tests.conftest import not_run


class Blocks:
    """Values that are read piece by piece, each valid until the next."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.size = values.size

    def stored_reader(self) -> None:
        """They are in no file."""

    def pieces(self, counts: Sequence[int]) -> Iterator[np.ndarray]:
        assert sum(counts) == self.size
        start = 0
        for count in counts:
            held = self.values[start : start + count].copy()
            yield held
            held[:] = np.nan
            start += count


PIECE = distances._PIECE
COUNTS = [1, 7, PIECE, PIECE + 1, 2 * PIECE, 2 * PIECE + 17, 5 * PIECE + 3]


@pytest.mark.parametrize("count", COUNTS)
def test_pieces_are_measured_as_the_whole_to_the_bit(count: int) -> None:
    native = native_kernels()
    if native is None or native.apart is None:
        not_run("no native kernel")
    rng = np.random.default_rng(count)
    y = rng.standard_normal(count).astype(np.float32)
    x = y + (rng.standard_normal(count) * 1e-3).astype(np.float32)
    x[count * 2 // 3] += 5
    shape = (count,)
    assert measure_blocks(Blocks(x), Blocks(y), shape) == measure_values(x, y, None, shape)
    twice = y.copy()
    y[[count // 3, -1]] = 0  # the first of two largest differences is named, in whatever piece
    twice[[count // 3, -1]] = 9
    assert measure_blocks(Blocks(twice), Blocks(y), shape) == measure_values(twice, y, None, shape)
    same = measure_blocks(Blocks(y), Blocks(y), shape)
    assert same is not None and same.bits and same.rel == 0 and same.largest == 0
    for odd in (np.nan, np.inf):
        bad = x.copy()
        bad[-1] = odd
        assert measure_blocks(Blocks(bad), Blocks(y), shape) is None
        assert measure_blocks(Blocks(x), Blocks(bad), shape) is None
    assert measure_blocks(Blocks(x[:-1]), Blocks(y), shape) is None
    assert measure_blocks(Blocks(x[:0]), Blocks(y[:0]), (0,)) is None


# --- decimals that were printed -----------------------------------------------------------------

ENOUGH = logprob_tables._ENOUGH


def side(values: Sequence[float]) -> Any:
    return SimpleNamespace(rows={0: dict(enumerate(values[:5])), 1: dict(enumerate(values[5:]))})


@pytest.mark.parametrize("decimals", range(1, 8))
def test_the_last_decimal_of_printed_numbers_is_seen(decimals: int) -> None:
    steps = np.random.default_rng(decimals).integers(1, 10, ENOUGH) * 2 + 1
    values = [-round(0.5 + step * 10.0**-decimals, decimals) for step in steps]
    wanted = 0.5 * 10.0**-decimals if decimals <= 6 else 0.0
    assert printed_resolution(side(values)) == pytest.approx(wanted, rel=1e-12)
    assert printed_resolution(side(values[:-1])) == 0.0, "too few"
    for nothing in (0.0, -math.inf, -9999.0, math.nan):  # show no decimals
        assert printed_resolution(side([*values[:-1], nothing])) == 0.0
        assert printed_resolution(side([*values, nothing])) == pytest.approx(wanted, rel=1e-12)


# --- rows of a range ----------------------------------------------------------------------------

RANGES = [
    ((4, 8), 16, 0, 16, ": row 0"), ((4, 8), 16, 16, 64, ": rows 1-3"),
    ((4, 8), 16, 1, 16, ": in row 0"), ((4, 8), 16, 15, 17, ": in rows 0-1"),
    ((4, 8), 16, 16, 63, ": in rows 1-3"), ((4, 8), None, 0, 16, ""), ((4, 1), 2, 0, 2, ""),
    ((3, 2, 8), 16, 0, 32, ": expert 0"), ((3, 2, 8), 16, 32, 96, ": experts 1-2"),
    ((3, 2, 8), 16, 16, 32, ": row 1"), ((3, 2, 8), 16, 0, 48, ": rows 0-2"),
    ((3, 2, 8), 16, 0, 40, ": in rows 0-2"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "row_bytes", "start", "stop", "says"), RANGES)
def test_a_range_of_bytes_is_told_by_rows_or_experts(
    shape: tuple[int, ...], row_bytes: int | None, start: int, stop: int, says: str
) -> None:
    reader: Any = SimpleNamespace(shape=shape, columns=shape[-1], row_bytes=row_bytes)
    assert units_text(reader, start, stop) == says


# --- the arithmetic of all products -------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["tf32", "float16", "bfloat16"])
def test_an_arithmetic_is_told_by_the_size_of_its_errors(dtype: str) -> None:
    """The first that fits: TF32 and float16 have one roundoff, and other bounds."""
    largest = ONE_OPERATION[dtype].rel_l2
    assert arithmetic_of_errors(largest, largest / 2, largest / 4) == dtype
    before = {"tf32": "float16", "float16": "bfloat16", "bfloat16": ""}[dtype]
    above = largest * 1.0001
    assert arithmetic_of_errors(above, above / 2, above / 4) == before


def test_errors_of_one_arithmetic_are_alike_and_not_too_small() -> None:
    middle = ROUNDOFF["tf32"]
    assert arithmetic_of_errors(middle, middle, middle / ALIKE_PRODUCTS) == "tf32"
    assert arithmetic_of_errors(middle, middle, middle / ALIKE_PRODUCTS * 0.999) == ""
    small = middle / 4
    assert arithmetic_of_errors(small * ALIKE_PRODUCTS, small, small) == "tf32"
    assert arithmetic_of_errors(small * ALIKE_PRODUCTS * 1.001, small, small) == ""
    least = LEAST_ROUNDED * ROUNDOFF["tf32"]
    assert arithmetic_of_errors(least, least, least) == "tf32"
    assert arithmetic_of_errors(least * 0.999, least * 0.999, least * 0.999) == ""
    assert arithmetic_of_errors(math.nan, middle, middle) == ""
    assert arithmetic_of_errors(middle, math.nan, middle) == ""


@pytest.mark.parametrize(
    ("most", "others", "file_type", "options"),
    [
        (
            "MXFP4",
            {"token_embd.weight": "BF16"},
            32,
            "convert {} --encoding MXFP4 --tensor token_embd.weight=BF16",
        ),
        ("BF16", {"L0.ffn_gate_inp.weight": "F32"}, 32, "quantize {} --type BF16"),
        ("Q4_K", {"output.weight": "Q6_K"}, 15, "quantize {} --type Q4_K_M"),
        ("GPTQ", {"token_embd.weight": "BF16"}, 32, ""),
        ("IQ2_S", {}, 28, ""),  # which is read, and not written
        ("BF16", {"output.weight": "IQ3_S"}, 25, ""),
        ("IQ4_NL", {}, 25, "convert {} --encoding IQ4_NL"),
        ("MXFP4", {f"L{layer}.ffn_down.weight": "Q6_K" for layer in range(9)}, 32, ""),
    ],
)
def test_a_copy_is_in_the_encodings_of_the_tensors_and_not_of_a_wrong_file_type(
    most: str, others: dict[str, str], file_type: int, options: str
) -> None:
    """Seen red: 28 tensors of MXFP4 written again as BF16, because the file type said so."""
    theirs = {f"L{layer}.attn_q.weight": most for layer in range(12)} | others
    command = rewrite_command("a", "b.gguf", dict.fromkeys(theirs, "F32"), theirs, file_type)
    head, _, rest = options.partition(" {}")
    assert command == (f"aprfmt {head} a b-fixed.gguf{rest}" if options else "")


@pytest.mark.parametrize(("theirs", "verb"), [("F32", "convert"), ("F16", "quantize")])
def test_what_the_encodings_hold_is_written_again_without_rounding(theirs: str, verb: str) -> None:
    """Seen red: tensors that stay F32 were written as BF16, because the file type said so."""
    mine = {f"L{layer}.attn_q.weight": "BF16" for layer in range(4)}
    held = {**mine, "L0.ssm_a.weight": theirs}
    command = rewrite_command("a", "b.gguf", {**mine, "L0.ssm_a.weight": "BF16"}, held, 32)
    assert command.split()[:4] == ["aprfmt", verb, "a", "b-fixed.gguf"]


# --- commands that mend one file ----------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name, size in (("a", 8), ("b", 4)):
        (tmp_path / name).mkdir()
        for file in ("model.safetensors", "other.safetensors", "x.gguf"):
            (tmp_path / name / file).write_bytes(b"x" * size)
    return tmp_path


def test_a_damaged_file_is_completed_from_the_same_file_of_the_other_side(folders: Path) -> None:
    a, b = folders / "a", folders / "b"
    file = b / "other.safetensors"
    kept = f"aprfmt repair {file} --from {a / file.name} -o {file} --force"
    assert completed_command({str(file)}, a, b) == kept
    alone = completed_command({str(file)}, a / file.name, file)
    assert alone.startswith(f"aprfmt repair {file} --from {a / file.name} -o ")
    assert "--force" not in alone and str(file) not in alone.rpartition(" -o ")[2]
    weights = b / "model.safetensors"  # belongs to a folder even if it is named
    assert completed_command({str(weights)}, a, weights).endswith(f"-o {weights} --force")
    assert completed_command({str(file)}, a / "model.safetensors", b) == ""
    assert completed_command({str(file)}, a / "x.gguf", file) == ""
    assert completed_command({str(file), str(weights)}, a, b) == ""
    assert completed_command({str(file)}, folders / "none", b) == ""
    assert completed_command({str(a / file.name)}, a, b) == ""
    for size, mends in ((5, True), (4, False), (3, False)):
        (a / file.name).write_bytes(b"x" * size)
        assert bool(completed_command({str(file)}, a, b)) == mends
    moved = a / "renamed.safetensors"
    moved.write_bytes(b"x" * 9)
    assert completed_command({str(file)}, moved, file) and not completed_command(
        {str(file)}, moved, b
    )


def test_bytes_of_no_tensor_are_taken_out_of_a_copy_or_in_the_folder(folders: Path) -> None:
    b = folders / "b"
    file = b / "other.safetensors"
    assert surplus_command(file, b) == f"aprfmt repair {file} --partial -o {file} --force"
    alone = surplus_command(file, file)
    assert alone.startswith(f"aprfmt repair {file} --partial -o ") and "--force" not in alone
    weights = b / "model.safetensors"
    assert surplus_command(weights, weights).endswith(f"-o {weights} --force")


# --- names of the file in a sentence ------------------------------------------------------------

STORED = {"L0.q": ["h.0.q"], "L0.q.b": ["h.0.bias"], "same": ["same"], "two": ["x", "y"]}
SENTENCES = [
    ("L0.q is off", ["L0.q"], "h.0.q (L0.q) is off"),
    ("L0.q is L0.q", ["L0.q"], "h.0.q (L0.q) is L0.q"),
    ("xL0.q and L0.q.b", ["L0.q"], "xL0.q and L0.q.b"),
    ("L0.q, L0.q.b", ["L0.q", "L0.q.b"], "h.0.q (L0.q), h.0.bias (L0.q.b)"),
    ("L0.q. Then", ["L0.q"], "h.0.q (L0.q). Then"),
    ("h.0.q is off: L0.q", ["L0.q"], "h.0.q is off: L0.q"),
    ("same and two", ["same", "two"], "same and two"), ("none", ["none"], "none"),
]  # fmt: skip


@pytest.mark.parametrize(("says", "keys", "wanted"), SENTENCES)
def test_a_role_in_a_sentence_gets_the_file_s_name(says: str, keys: list[str], wanted: str) -> None:
    assert insert_stored_names(says, keys, STORED) == wanted


def test_an_image_of_each_explanation_comes_before_a_second_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The furthest apart first; what differs before what is within its rounding."""
    monkeypatch.setattr(difference_image, "make_image", lambda a, b, key: key)

    def row(key: str, verdict: str, rel_l2: float, what: str) -> Any:
        explanation = SimpleNamespace(evidence=(what,)) if what else None
        stats = SimpleNamespace(rel_l2=rel_l2)
        return SimpleNamespace(key=key, verdict=verdict, explanation=explanation, stats=stats)

    rows: list[Any] = [
        row("w", "WITHIN", 9.0, ""),
        row("a3", "DIFFERENT", 0.5, "a"),
        row("b", "DIFFERENT", 0.1, "b"),
        row("a1", "DIFFERENT", 3.0, "a"),
        row("same", "SAME_BYTES", 0.0, ""),
        row("a2", "DIFFERENT", 2.0, "a"),
        row("n", "DIFFERENT", 0.2, ""),
    ]
    pairs: Any = [SimpleNamespace(key=one.key, a=1, b=1) for one in rows]
    wanted = ("a1", "n", "b", "w", "a2", "a3")
    for count in (2, 6, 9):
        found: Any = difference_image.difference_images(pairs, rows, count)
        assert found == wanted[:count]


# --- ranges of a sample -------------------------------------------------------------------------


def test_a_sample_counts_the_ranges_and_bytes_that_it_read(tmp_path: Path) -> None:
    """Every range differs in its last byte, so that the report has the place of each drawn one."""
    sizes = {"x": 2 * RANGE + 7, "y": RANGE, "z": 3, "same": RANGE + 1}
    held = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
    save_file(held, tmp_path / "a.safetensors")
    for name in "xyz":
        held[name][RANGE - 1 :: RANGE] = held[name][-1] = 1
    save_file(held, tmp_path / "b.safetensors")
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for wanted, ranges in ((1, 1), (RANGE, 1), (3 * RANGE - 1, 2), (99 * RANGE, 7)):
        found = sample_files(a, b, wanted, seed=2)
        assert (found.ranges, found.of_ranges) == (ranges, 7)
        assert found.of_bytes == sum(sizes.values())
        assert all(one.byte == one.stop - 1 for one in found.differing)
        seen = sum(one.stop - one.start for one in found.differing)
        assert 0 <= found.bytes - seen <= sizes["same"]
        assert found.exit_code == (1 if found.differing else 2)
    assert found.bytes == found.of_bytes and len(found.differing) == 5
    for name, count in (("x", 3), ("y", 1), ("z", 1)):
        found = sample_files(a, b, 99 * RANGE, tensors=[name])
        assert (
            (found.ranges, found.bytes) == (count, sizes[name]) == (found.of_ranges, found.of_bytes)
        )
        assert [one.start for one in found.differing] == [i * RANGE for i in range(count)]
    alone = sample_files(a, b, 99 * RANGE, tensors=["same"])
    assert alone.exit_code == 2 and alone.share == pytest.approx(1 - 0.05**0.5)


def test_a_sample_says_its_sides_and_all_that_it_counted() -> None:
    rows = (DifferingRange("x", 0, 8, 3),), (Unsampled("y", "other"),), (Unsampled("z", "why"),)
    report = SampleReport("a.bin", "b.bin", 7, 3, 9, 30, 90, 2, *rows)
    said: Any = report.to_json()
    assert (said["a"], said["b"]) == ("a.bin", "b.bin")
    assert said["sample"] == {
        "different": True,
        "seed": 7,
        "range_bytes": RANGE,
        "ranges": 3,
        "of_ranges": 9,
        "bytes": 30,
        "of_bytes": 90,
        "settled": 2,
        "share_below": None,
        "confidence": 0.95,
        "differing": [{"tensor": "x", "start": 0, "stop": 8, "byte": 3}],
        "unlike": [{"tensor": "y", "why": "other"}],
        "unsampled": [{"tensor": "z", "why": "why"}],
    }
    cases: Any = (
        ({"differing": ()}, True, 1),
        ({"unlike": ()}, True, 1),
        ({"differing": (), "unlike": ()}, False, 2),
        ({"differing": (), "unlike": (), "unsampled": ()}, False, 2),
    )
    for changed, different, code in cases:
        other = replace(report, **changed)
        assert (other.different, other.exit_code) == (different, code)
        assert (other.share is None) is different
    settled = SampleReport("a", "b", 7, 0, 0, 0, 0, 2, (), (), ())
    assert settled.all_settled and settled.exit_code == 2 and settled.share is None
    assert "equal by the digests of their files" in settled.pronounced.says
    assert not replace(settled, settled=0).all_settled
    assert not replace(settled, unsampled=rows[2]).all_settled
    assert not replace(settled, of_ranges=1).all_settled


# --- an image of where two tensors differ -------------------------------------------------------


def image_of(a: Any, b: Any, folder: Path) -> Any:
    save_file({"w": a}, folder / "a.safetensors")
    save_file({"w": b}, folder / "b.safetensors")
    with open_model(folder / "a.safetensors") as one, open_model(folder / "b.safetensors") as two:
        return difference_image.make_image(one["w"], two["w"], "w")


def test_a_cell_of_an_image_is_the_difference_in_it_and_infinite_where_one_side_is(
    tmp_path: Path,
) -> None:
    """Relative to the root mean square of all of A; numbers that neither side has are equal."""
    a = np.ones((130, 200), np.float32)
    b = a.copy()
    b[0, :3] += 2.0
    a[1, 0] = b[1, 0] = np.nan  # in the cell of the first difference, and equal
    a[4, 0], b[7, 0] = np.nan, np.inf
    a[10, 0] = b[10, 0] = -np.inf
    b[129, 199] = 4.0
    found = image_of(a, b, tmp_path)
    assert (found.height, found.width, found.rows, found.columns) == (3, 3, 130, 200)
    cells, own, others = (np.array(grid) for grid in (found.cells, found.a, found.b))
    size = math.sqrt((130 * 200 - 4) / (130 * 200))
    expected = np.zeros((44, 67))
    expected[0, 0] = math.sqrt(12 / 9) / size
    expected[1, 0] = expected[2, 0] = np.inf
    expected[43, 66] = math.sqrt(9 / 9) / size
    assert np.allclose(cells, expected, rtol=1e-12)
    assert own[0, 0] == pytest.approx(math.sqrt(8 / 9)) and own[5, 5] == 1.0
    assert others[0, 0] == pytest.approx(math.sqrt((3 * 9 + 5) / 9))
    assert own[43, 66] == pytest.approx(math.sqrt(2 / 9))  # two values of the last row and columns


def test_an_image_of_a_vector_is_wrapped_and_of_other_shapes_there_is_none(tmp_path: Path) -> None:
    a = np.zeros(1000, np.float32)
    b = a.copy()
    b[96 * 3] = 1.0
    found = image_of(a, b, tmp_path)
    assert (found.columns, found.rows, found.height, found.width) == (96, 11, 1, 1)
    cells = np.array(found.cells)
    assert cells.shape == (11, 96) and cells[3, 0] == 1.0 == cells.sum()  # of a size of nought
    assert image_of(a, a[:-1], tmp_path) is None
    assert image_of(a[:0], a[:0], tmp_path) is None
    short = image_of(a[:9], a[:9], tmp_path)
    assert (short.columns, short.rows) == (2, 5)


@pytest.mark.parametrize(
    ("width", "block", "fitting"),
    [(1, 32, 1), (2, 32, 2), (3, 32, 4), (17, 32, 32), (32, 32, 32), (33, 32, 64), (5, 1, 5)],
)
def test_cells_hold_whole_blocks_or_equal_shares(width: int, block: int, fitting: int) -> None:
    assert difference_image._fitting_width(width, block) == fitting


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (None, ""),
        (1.0, ""),
        (0.9999, ", 99.9 % of the values come out"),
        (0.95, ", 95 % of the values come out"),
        (10 / 12, ", 83.3 % of the values come out"),
        (0.5, ", 50 % of the values come out"),
    ],
)
def test_only_all_of_the_values_are_printed_as_all(share: float | None, said: str) -> None:
    """Seen red: a share of 95 % printed as if it were whole."""
    assert share_text(share) == said


def test_the_places_of_a_cause_are_complete_in_json_and_counted_in_a_line() -> None:
    """Seen red: eight places of forty, one of the two tensors that a weight is made of."""
    roles = [f"L{layer}.ffn_gate.weight" for layer in range(40)]
    stored = {role: (f"a.{role}", f"b.{role}") for role in roles}
    cause = name_cause("scale", "x", roles, stored, level="located")
    assert cause.where == tuple(name for role in roles for name in stored[role])
    assert cause.to_json()["roles"] == tuple(roles)
    assert cause.places_text() == f"a.{roles[0]} ({roles[0]}), b.{roles[0]}, ... 78 more"
    assert name_cause("scale", "x", roles[:1], {}, level="located").places_text() == roles[0]
