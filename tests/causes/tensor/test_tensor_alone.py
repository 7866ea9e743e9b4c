"""Rules by which differing tensors are explained, each by itself, at both sides of its bounds."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.causes import hyperparameters
from aprfmt.causes.tensor import (
    block_order,
    byte_shifts,
    coarse_damage,
    derived_weights,
    differing_pair,
    flat_order,
    lattices,
    other_tensors,
    packed_copies,
    packed_scales,
    permutation,
    transposition,
)
from aprfmt.causes.training import step_case
from aprfmt.compare import diff

# --- one type read as another -------------------------------------------------------------------


@pytest.mark.parametrize("label", ["A", "B"])
@pytest.mark.parametrize("first", ["F16", "BF16"])
def test_values_that_were_read_as_another_type_are_told_of_their_side(
    first: str, label: str, tmp_path: Path
) -> None:
    """Each holds the other's bits, both in float32: A is the reference, so that B is told."""
    types = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    second = next(name for name in types if name != first)
    rng = np.random.default_rng(3)
    right = rng.normal(0, 0.5, (32, 32)).astype(types[first])
    wrong = right.view(types[second])
    assert np.isfinite(wrong.astype(np.float32)).all()
    for name, values in (("AB".replace(label, ""), right), (label, wrong)):
        save_file({"t": values.astype(np.float32)}, tmp_path / f"{name}.safetensors")
    (row,) = diff(tmp_path / "A.safetensors", tmp_path / "B.safetensors").tensors
    assert row.explanation is not None and row.cause == "dtype_mislabel"
    kinds = (first, second) if label == "B" else (second, first)
    assert row.explanation.evidence[0] == "B's values are A's {} bits read as {}".format(*kinds)


# --- orders -------------------------------------------------------------------------------------


def vector(a: Any, b: Any, slack: float = 0.0) -> Any:
    def side(values: Any) -> Any:
        held = np.asarray(values, np.float64)
        return SimpleNamespace(size=held.size, rows=held.size, take=lambda rows: held[rows])

    return SimpleNamespace(a=side(a), b=side(b), slack=lambda: slack)


def test_values_of_a_vector_are_found_by_sorting() -> None:
    """Within rounding only where most have no neighbour as near; equal values keep their place."""
    a = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    order = [3, 1, 0, 4, 2]
    found = permutation._match_by_sorting(vector(a[order], a))
    assert found is not None and found.at.tolist() == order
    near = a * (1 + 1e-4)
    found = permutation._match_by_sorting(vector(a[order], near, 1e-3))
    assert found is not None and found.at.tolist() == order
    assert permutation._match_by_sorting(vector(a[order], near)) is None
    assert permutation._match_by_sorting(vector(a[order], a * 1.01, 1e-3)) is None
    crowd = 1 + 1e-4 * a
    assert permutation._match_by_sorting(vector(crowd[order], crowd, 1e-3)) is None
    exact = 1 + 1e-14 * a  # of equal bits, however near they are
    assert permutation._match_by_sorting(vector(exact[order], exact)) is not None
    twice = np.array([7.0, 7.0, 1.0, 2.0])
    found = permutation._match_by_sorting(vector(twice[[0, 1, 3, 2]], twice))
    assert found is not None and found.at.tolist() == [0, 1, 3, 2]
    for odd in (np.nan, np.inf):
        assert permutation._match_by_sorting(vector([odd, 1.0], [1.0, odd])) is None
    assert permutation._match_by_sorting(vector([1.0], [1.0, 2.0])) is None


def test_blocks_begin_late_or_early_in_every_row_but_the_outer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nearest shift is tried first; a row's bytes may reach into the next one."""
    tried: list[tuple[str, list[int]]] = []

    def agree(
        case: Any, reader: Any, other: Any, read: Any, cause: str, says: Any, rows: Any
    ) -> Any:
        tried.append((says[0], rows.tolist()))
        assert cause == "byte_offset" and says[1] == "Q4_0"

    monkeypatch.setattr(block_order, "_guess_if_rows_agree", agree)
    for rows, inner in ((1, []), (2, []), (3, [1]), (5, [1, 2, 3])):
        reader = SimpleNamespace(encoding="Q4_0", rows=rows)
        sides = [(reader, None, "B's")]
        monkeypatch.setattr(block_order, "_block_sides", lambda case, sides=sides: iter(sides))
        tried.clear()
        case: Any = None
        assert not list(block_order.guess_late_blocks(case))
        assert all(held == inner for _, held in tried)
        assert len(tried) == (34 if inner else 0)  # a block has 18 bytes
        assert [says for says, _ in tried[:3:2]] == (
            []
            if not inner
            else ["B's blocks begin 1 bytes too early", "B's blocks begin 2 bytes too early"]
        )


def test_the_runs_of_a_flat_buffer_are_what_was_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each run its place and its start: the values judge the rest."""
    held = {key: np.random.default_rng(i).normal(size=99) for i, key in enumerate("xyzw")}
    runs = {"w": [flat_order.Run(0, "w", 0, 99)]} | {
        key: [flat_order.Run(0, "x", 0, 60), flat_order.Run(60, "y", 0, 38)] for key in "xyz"
    }
    pool = SimpleNamespace(a=held, b=held)
    monkeypatch.setattr(flat_order, "_pool_of", lambda pairs, keys: pool)
    monkeypatch.setattr(flat_order, "_places_of_starts", lambda a, b: {})
    monkeypatch.setattr(flat_order, "_runs_of", lambda key, *given: runs[key])
    rows: Any = {key: SimpleNamespace(stats=None) for key in held}
    context: Any = None
    found = flat_order._explain_flat(context, {}, rows, list(held))
    known = 3 * 98 + 99
    assert {key: one.proof.free for key, one in found.items() if one.proof} == {
        "x": 4,
        "y": 4,
        "z": 4,
        "w": 2,
    }
    for key, own in runs.items():
        proof = found[key].proof
        assert proof is not None and proof.count == sum(run.count for run in own)
        assert proof.share == pytest.approx(known / (4 * 99))


# --- copies, merges, lost parts -----------------------------------------------------------------


def test_a_copy_is_looked_for_in_rows_of_sixteen_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def asked(side: Any) -> None:
        raise AskedError

    monkeypatch.setattr(packed_copies, "_sampled_rows", asked)
    for columns, numbers, looked in ((15, None, False), (16, None, True), (16, object(), False)):
        side = SimpleNamespace(columns=columns)
        case: Any = SimpleNamespace(a=side, b=side, numbers=numbers)
        for swapped in (False, True):
            if looked:
                with pytest.raises(AskedError):
                    packed_copies._find_copy(case, swapped=swapped)
            else:
                assert packed_copies._find_copy(case, swapped=swapped) is None
    assert lattices.NARROWEST == 16


def test_differences_of_low_rank_in_all_matrices_are_a_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged: list[int] = []

    def merge(pairs: Any, matrices: Any, low: Any) -> dict[str, Any]:
        merged.append(len(low))
        return {"found": None}

    monkeypatch.setattr(derived_weights, "_merge_explanations", merge)
    monkeypatch.setattr(derived_weights, "_removal_explanations", lambda changes: {})
    change = derived_weights.MatrixChange
    for ranks, expected in (((4,), [1]), ((4, 4), [2]), ((4, 0), []), ((4, 2, 8), [3])):
        merged.clear()
        changes = [change(f"L{i}.q", rank, 0.1, 0.9, False) for i, rank in enumerate(ranks)]
        found: Mapping[str, Any] = derived_weights._derived_explanations({}, [], changes)
        assert merged == expected and (found == {"found": None}) is bool(expected)


@pytest.mark.parametrize("label", ["A", "B", "", "AB"])
def test_a_bias_of_zeros_is_one_that_is_not_added(label: str) -> None:
    def bias(name: str) -> Any:
        return np.zeros(6) if name in label else np.ones(6)

    asked: list[tuple[Any, ...]] = []
    side = SimpleNamespace(columns=6)
    case: Any = SimpleNamespace(
        role="attn_q.bias",
        numbers=None,
        a=side,
        b=side,
        sample_a=bias("A"),
        sample_b=bias("B"),
        guess=lambda *given, **more: asked.append((*given, more)),
    )
    list(other_tensors.guess_zero_bias(case))
    zero = "B" if "B" in label else label
    assert [(cause, says, where) for cause, says, where, *_ in asked] == [
        (
            "missing_bias",
            (f"{one}'s bias is zero everywhere: it is not added",),
            "AB".replace(one, ""),
        )
        for one in zero
    ]
    for _, _, _, zeros, before, more in asked:
        assert zeros(range(3)).shape == (3, 6) and not zeros([0]).any()
        assert (before, more) == (0.0, {"constant": True})
    case.role = "attn_q.weight"
    assert not list(other_tensors.guess_zero_bias(case))


ORIGIN = "config.json rope_scaling.factor"
FULL = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_key_of_a_scaling_that_b_alone_lacks_is_said_to_be_missing() -> None:
    def model(config: Any) -> Any:
        return SimpleNamespace(config=config, key_style="hf", metadata={})

    def without(key: str, **beside: Any) -> dict[str, Any]:
        return {"rope_scaling": {k: v for k, v in FULL.items() if k != key}, **beside}

    whole = {"rope_scaling": FULL}
    a, b = (
        {"type": "yarn", "factor": x, "original_context_length": y}
        for x, y in ((4.0, 64), (1.0, 32))
    )
    row: Any = SimpleNamespace(name="rope_scaling", a=a, b=b, origin_a=ORIGIN, origin_b=ORIGIN)
    factor = "factor: A has 4, B 1"
    length = "original_max_position_embeddings: A has 64, B 32"
    lost = " ({} is missing from B; a default stands in)"
    for mine, theirs, said in (
        (whole, whole, (factor, length)),
        (whole, without("factor"), (factor + lost.format("factor"), length)),
        (
            whole,
            without("original_max_position_embeddings"),
            (factor, length + lost.format("original_max_position_embeddings")),
        ),
        (without("factor"), without("factor"), (factor, length)),
        (without("factor"), whole, (factor, length)),
        (whole, without("factor", factor=2), (factor, length)),  # beside the scaling
        (whole, {"rope_scaling": {}}, (factor, length)),
        (whole, {"rope_scaling": None}, (factor, length)),
    ):
        text = hyperparameters.difference_sentence(row, model(mine), model(theirs))
        assert text == f"rope_scaling: {', '.join(said)}", theirs
    assert hyperparameters.difference_sentence(row) == f"rope_scaling: {factor}, {length}"


def test_of_large_tensors_runs_of_rows_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first row to the last, and no row twice."""
    monkeypatch.setattr(packed_copies, "MOST", 4096)
    tile = packed_copies.TILE

    def sampled(rows: int, columns: int) -> Any:
        reader: Any = SimpleNamespace(size=rows * columns, rows=rows, columns=columns)
        return packed_copies._sampled_rows(reader)

    assert sampled(4096 // 16, 16) is None and sampled(tile, 4096) is None
    for rows, columns, runs in ((257, 16, 2), (1024, 16, 2), (1024, 8, 4), (129, 4096, 1)):
        found = sampled(rows, columns)
        assert len(found) == runs * tile == len(set(found.tolist())) and found[0] == 0
        assert (np.diff(found) >= 1).all() and found[-1] < rows
        assert runs == 1 or found[-1] == rows // tile * tile - 1


def test_what_weights_were_stepped_in_is_told_by_sums() -> None:
    """Exactly at the shares; a step that is too small to tell leaves it open."""
    cases = [
        ((10000, 0.0, 0, 11), "finer"),
        ((10000, 0.0, 0, 9), ""),
        ((10, 0.0, 0, 8), "finer"),
        ((10, 0.0, 0, 7), ""),
        ((10000, 10.0, 1, 0), "finer"),
        ((10000, 9.99, 0, 0), ""),
        ((10000, 16.0, 2, 0), "finer"),
        ((10000, 16.0, 3, 0), "stored"),
    ]
    for sums, said in cases:
        assert step_case.held_in(*sums) == said, sums


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_a_fit_is_worth_as_many_bits_less_as_scales_were_tried(bits: int) -> None:
    """Of more than four bits the smallest value is tried first, as each of sixteen entries."""
    code = next(code for code in lattices.code_books() if code.name == f"codes of {bits} bits")
    top = int(code.entries.max())
    cells = 0.375 * np.array([[1.0, -top] * 8, [1.0, top] * 8])
    unit = lattices.StorageUnit.of_encoding("F32")
    scales, told = lattices._fit_cell_scales(cells, code, unit)
    assert scales == pytest.approx([0.375, 0.375])
    whole = lattices._measure_improbability(cells, scales, code, unit, np.zeros(2))
    assert told == pytest.approx(whole - np.log2(16 if bits > 4 else top))


def test_rows_are_looked_for_by_their_bytes_where_half_of_the_first_are_found() -> None:
    """The first row counts as any other."""
    b = np.arange(32, dtype=np.uint8).reshape(8, 4)

    def pair(a: Any, windows: int = 1) -> Any:
        def side(held: Any) -> Any:
            return SimpleNamespace(rows=len(held), row_bytes=4, raw=lambda rows: held[rows])

        pieces = np.array_split(np.arange(len(a)), windows)
        return SimpleNamespace(a=side(a), b=side(b), windows=lambda size: iter(pieces))

    for known, found in ((8, True), (4, True), (3, False)):
        a = b[::-1].copy()
        a[:0] = 0
        a[: 8 - known] += 100
        lines = permutation._match_by_hash(pair(a))
        assert (lines is not None) is found
        if lines is not None:
            assert lines.index.tolist() == list(range(8 - known, 8))
            assert lines.at.tolist() == list(range(known))[::-1]
    a = b + np.uint8(100)
    a[:4] = b[:4]  # the first of them is row 0
    assert permutation._match_by_hash(pair(a)) is not None
    lines = permutation._match_by_hash(pair(a, 2))  # only the first window decides
    assert lines is not None and lines.at.tolist() == [0, 1, 2, 3]
    twice = b.copy()
    twice[3] = twice[1]
    lines = permutation._match_by_hash(pair(twice[[0, 3, 2, 1, 4, 5, 6, 7]]))
    assert lines is not None and lines.at.tolist() == [0, 1, 2, 1, 4, 5, 6, 7]
    none: Any = SimpleNamespace(a=SimpleNamespace(row_bytes=None))
    assert permutation._match_by_hash(none) is None


def test_cells_of_a_wrong_scale_are_no_larger_than_the_copys() -> None:
    def copy(own: lattices.Grouping, encoding: str = "F32") -> Any:
        return SimpleNamespace(
            grouping=own, y=np.zeros((64, 256)), reader=SimpleNamespace(encoding=encoding)
        )

    for own, rows, columns in (
        ((1, 64), 1, 64),
        ((16, 32), 16, 32),
        ((0, 0), 64, 256),
        ((1, 0), 1, 256),
    ):
        held = copy(lattices.Grouping(*own))
        for tall in (rows - 1, rows, rows + 1):
            for wide in (columns - 1, columns, columns + 1):
                fits = packed_scales._cells_fit_inside(lattices.Grouping(tall, wide), held)
                whole = (tall or 64) <= rows
                assert fits is (whole and wide <= columns), (own, tall, wide)
    blocks = copy(lattices.Grouping(1, 256), "Q4_0")
    sizes = {wide: lattices.Grouping(1, wide) for wide in (16, 31, 32, 64)}
    found = {wide: packed_scales._cells_fit_inside(one, blocks) for wide, one in sizes.items()}
    assert found == {16: False, 31: False, 32: True, 64: True}


def test_four_runs_of_wrong_values_are_put_right_by_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every one of them, of either side; a side that was rounded coarsely tells nothing."""
    bits: dict[tuple[str, int], str] = {}

    def bit(side: Any, other: Any, where: list[int]) -> str | None:
        assert side is not other and where[1] == where[0] + 1
        return bits.get((side.name, where[0]))

    monkeypatch.setattr(coarse_damage, "flipped_bit_text", bit)
    for a, b in (("F32", "F32"), ("Q4_0", "F32"), ("F32", "Q4_0")):
        case: Any = SimpleNamespace(
            a=SimpleNamespace(name="A", encoding=a), b=SimpleNamespace(name="B", encoding=b)
        )
        for count in (1, coarse_damage.SHOWN, coarse_damage.SHOWN + 1):
            runs = [[10 * at, 10 * at + 2] for at in range(count)]
            for label, told in (("B", a), ("A", b)):
                bits.clear()
                bits.update({(label, start): f"bit {start}" for start, _ in runs})
                flips = coarse_damage._repairing_flips(case, runs)
                seen = told == "F32" and count <= coarse_damage.SHOWN
                said = [f"bit {start} of {label}" for start, _ in runs]
                assert flips == (said if seen else []), (a, b, count, label)
                bits.popitem()
                assert not coarse_damage._repairing_flips(case, runs)


def test_data_at_a_multiple_of_four_gibibytes_stand_at_the_files_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the first byte on that 31 or 32 bits cannot count; in another tensor of the file."""
    begin, held = 4096, bytes(range(1, 65))

    class Read(bytes):
        def window(self, start: int, stop: int) -> bytes:
            return self[start:stop]

    def said(offset: int, place: int = 0, path: str = "b", data: bytes = bytes(64)) -> list[str]:
        def stored(name: str, offset: int, path: str, values: bytes) -> Any:
            return SimpleNamespace(
                info=SimpleNamespace(name=name, offset=begin + offset, nbytes=len(values)),
                path=path,
                raw=lambda start, stop: values[start:stop],
            )

        own = stored("own", offset, "b", data)
        first = stored("first", 0, path, bytes(place) + held)
        read = Read(data)
        read.locate = lambda at: (own, at)  # type: ignore[attr-defined]
        case: Any = SimpleNamespace(
            a=SimpleNamespace(bytes=Read(held), encoding="F32"),
            b=SimpleNamespace(bytes=read, encoding="F32"),
            context=SimpleNamespace(stored=lambda side: [first, own]),
            key="k",
            before=SimpleNamespace(relative=1.0),
        )
        return [text for one in byte_shifts.explain_wrapped_offset(case) for text in one.evidence]

    monkeypatch.setattr(byte_shifts, "prove_bytes", lambda *given: None)
    monkeypatch.setattr(
        byte_shifts, "make_finding", lambda *given: SimpleNamespace(evidence=given[2])
    )
    for power in (31, 32):
        wrap = 1 << power
        for place in (0, 1, 64):
            text = " ".join(said(wrap + place, place))
            assert f"kept in {power} bits" in text and f"+{place:#x}" in text
        assert not said(wrap - 1) and not said(wrap + 1) and not said(wrap, path="other")
        assert not said(wrap, data=held) and not said(wrap, 1)


@pytest.mark.parametrize(
    ("left", "right", "apart"),
    [
        ([0, 0], [0, 0], 0.0),  # nothing over nothing is no difference
        ([0, 0], [0, 1], np.inf),
        ([2, 4], [2, 4], 0.0),
        ([2, 4], [2, 5], 0.25),
        ([np.nan, 4], [np.nan, 4], 0.0),
        ([np.nan, 4], [2, 4], np.inf),
    ],
)
def test_a_block_is_as_far_apart_as_its_largest_value_says(
    left: list[float], right: list[float], apart: float
) -> None:
    """Beside another block, of 32 equal values, which is no distance of its own."""

    def side(values: list[float]) -> Any:
        row = np.ones(64)
        row[:32] = np.resize(values, 32)
        return SimpleNamespace(take=lambda rows: np.tile(row, (len(rows), 1)))

    case: Any = SimpleNamespace(a=side(left), b=side(right))
    assert differing_pair._block_distances(case, np.arange(2)).tolist() == [apart, apart]


@pytest.mark.parametrize("numbers", [None, np.arange(3)])
def test_some_rows_of_a_matrix_are_no_transposed_matrix(numbers: Any) -> None:
    """Where only some rows are looked at, one key head is no reason to try all of them."""
    values = np.arange(6.0).reshape(3, 2)

    def side(held: Any) -> Any:
        return SimpleNamespace(
            shape=(3, 2), take=lambda rows: held[rows], side=SimpleNamespace(drop=lambda: None)
        )

    case: Any = SimpleNamespace(
        a=side(values), b=side(values.T.reshape(3, 2)), numbers=numbers, role="attn_k",
        sizes=lambda *names: [1], slack=lambda: 0.0, guess=lambda *given: given[0],
    )  # fmt: skip
    found: list[Any] = list(transposition.guess_transposed_inside(case))
    assert found == ["transpose"] * (numbers is None)
