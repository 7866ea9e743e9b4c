"""Parts of `diff`'s explanations, each by itself, on values that tell the answer.

Seen red: each of the mistakes that its test's name tells the opposite of.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.tensor import coarse_damage, derived_weights
from aprfmt.causes.tensor.arithmetic import _has_encoder
from aprfmt.causes.tensor.context import SchemeCache
from aprfmt.causes.tensor.differing_pair import WINDOW, DifferingPair
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.causes.tensor.row_sources import _nearest_values
from aprfmt.causes.tensor.summary import _first_detail, _joint_proof, _layers_sentence
from aprfmt.causes.tensor.transposition import samples_agree
from aprfmt.causes.tokenizer.probe_texts import _differing_piece_texts
from aprfmt.measure.alignment import TensorPair, _pair_tied_head
from aprfmt.measure.bounds import Fit
from aprfmt.measure.proofs import Proof, certainty_of, unfitted_proof
from aprfmt.measure.records import TensorDiff, ValueStats
from aprfmt.tokenizer.vocabulary import Vocabulary


def test_the_errors_of_a_copy_are_said_in_numbers() -> None:
    found = Fit(9, 0.5, 0.125, 7.25, -0.5, 0.375, 0.1, 0.2, 0.0, 0.1, 0.3)
    assert found.text() == (
        "errors in its own steps: root mean square 0.38, mean -0.5, largest 7.25, 12 % beyond one"
    )


@pytest.mark.parametrize("slack", [0.0, 0.01])
def test_two_samples_of_zeros_are_near(slack: float) -> None:
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert samples_agree(zeros, zeros, slack) and not samples_agree(zeros, ones, slack)


def test_the_share_of_several_tensors_is_that_of_all_their_values() -> None:
    def row(count: int, proof: Proof | None) -> Any:
        one = make_finding("scale", ("k",), ("e",), 1.0, 0.0, proof)
        return SimpleNamespace(explanation=one, stats=SimpleNamespace(count=count))

    whole, weak = unfitted_proof(10), Proof(10, 1.0, 10, 0.0)
    rows = [row(30, unfitted_proof(30, 0.5)), row(10, whole)]
    said = [([rows[1]], "confirmed", 1.0), (rows, "explained", (15 + 10) / 40),
            ([rows[1], row(10, weak)], "explained", 1.0),
            ([rows[1], row(10, replace(whole, accused=True))], "explained", 1.0)]  # fmt: skip
    for group, certainty, share in said:
        found = _joint_proof(group)
        assert found is not None and (certainty_of(found), found.share) == (certainty, share)
    assert _joint_proof([*rows, row(10, None)]) is None
    assert _joint_proof([*rows, row(10, unfitted_proof(10, 0.25))]) is None


def test_only_blocks_in_one_part_encode_by_themselves() -> None:
    found = {
        name: _has_encoder(name) for name in ("Q4_K", "Q8_0", "F32", "BF16", "NF4", "I8", "none")
    }
    assert found == {name: name in ("Q4_K", "Q8_0") for name in found}


@pytest.mark.parametrize("chosen", [False, True])
def test_windows_hold_every_row_once(chosen: bool) -> None:
    dropped: list[str] = []
    sides = [
        SimpleNamespace(columns=WINDOW // 3, rows=10, side=SimpleNamespace(drop=drop))
        for drop in (lambda: dropped.append("a"), lambda: dropped.append("b"))
    ]
    case: Any = SimpleNamespace(a=sides[0], b=sides[1])
    rows = np.array([1, 4, 5, 9, 2, 7, 8]) if chosen else None
    windows = list(DifferingPair.windows(case, rows))
    assert [len(one) for one in windows] == ([3, 3, 1] if chosen else [3, 3, 3, 1])
    expected = np.arange(10) if rows is None else rows
    np.testing.assert_array_equal(np.concatenate(windows), expected)
    assert dropped == ["a", "b"] * len(windows)


@pytest.mark.parametrize("count", [1, 3])
def test_flipped_bits_are_counted(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.zeros((4, 32), np.float32), np.zeros((4, 32), np.float32)
    y[1] = 9.0
    flips = [f"bit {i}" for i in range(count)]
    monkeypatch.setattr(coarse_damage, "_repairing_flips", lambda case, found: flips)
    monkeypatch.setattr(coarse_damage, "_others_are_equal", lambda case, found: True)
    case: Any = SimpleNamespace(
        key="k", slack=lambda: 0.01, windows=lambda rows: iter([np.arange(4)]),
        before=SimpleNamespace(norms=(1.0, 1.0), count=x.size, relative=0.5),
        a=SimpleNamespace(columns=32, take=lambda rows: x[rows]),
        b=SimpleNamespace(columns=32, take=lambda rows: y[rows]),
    )  # fmt: skip
    (found,) = coarse_damage.explain_damaged_runs(case)
    said = "one bit is flipped" if count == 1 else f"{count} bits are flipped"
    assert found.evidence[0].endswith(said) and len(found.evidence) == 1 + count


@pytest.mark.parametrize("changed", [1, 2, 4])
def test_a_change_of_half_of_the_rows_is_one_of_the_matrix(changed: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    y = x.copy()
    y[:changed] += 1.0
    pair: Any = SimpleNamespace(key="k", **{
        side: SimpleNamespace(shape=v.shape, encoding="F32", numpy=lambda v=v: v)
        for side, v in (("a", x), ("b", y))
    })  # fmt: skip
    assert (derived_weights._matrix_change(pair) is not None) == (
        changed / 4 >= derived_weights.EVERY_ROW
    )


# Matrices stored as floats, how far matrices and vectors were moved, whether it is a training.
TABLES = ("token_embd.weight", "output.weight")
TRAINED: dict[str, tuple[tuple[str, ...], float, float, bool]] = {
    "all": ((), 0.4, 0.2, True),
    "all, coarse, lightly": ((), 0.02, 0.02, True),
    "norms frozen, tables of floats": (TABLES, 0.4, 0.0, True),
    "packed matrices alone": ((), 0.4, 0.0, False),
    "norms frozen, one table of floats": (TABLES[:1], 0.4, 0.0, False),
    "of another model": ((), 40.0, 40.0, False),
}


@pytest.mark.parametrize("packed", ["Q8_0", "Q4_K", "NF4"])
@pytest.mark.parametrize("case", TRAINED)
def test_a_quantized_training_is_told_by_the_floats_beside(case: str, packed: str) -> None:
    """Seen red: "which nothing relates to the other side's" of every quantized training."""
    plain, step, vector_step, derived = TRAINED[case]
    rng = np.random.default_rng(0)
    pairs: dict[str, Any] = {}
    rows = {}
    vectors = ("L0.attn_norm.weight", "L0.ffn_norm.weight", "output_norm.weight")
    for key in (*TABLES, "L0.attn_q.weight", "L0.ffn_up.weight", *vectors):
        x = rng.normal(size=64 if key in vectors else (48, 64)).astype(np.float32)
        by = vector_step if key in vectors else step
        y = x + by * rng.normal(size=x.shape).astype(np.float32)
        y = np.where(rng.random(x.shape) < 0.6, x, y) if "lightly" in case and x.ndim == 1 else y
        stored = "F32" if key in (*vectors, *plain) else packed
        pairs[key] = SimpleNamespace(
            key=key,
            drop=lambda: None,
            **{
                side: SimpleNamespace(shape=v.shape, encoding=kind, numpy=lambda v=v: v, stored=())
                for side, v, kind in (("a", x, "F32"), ("b", y, stored))
            },
        )
        apart = float(np.linalg.norm(y - x) / np.linalg.norm(x))
        cosine = float(np.vdot(x, y) / np.linalg.norm(x) / np.linalg.norm(y))
        rows[key] = TensorDiff(
            key,
            "DIFFERENT" if by else "SAME_BYTES",
            key,
            key,
            "F32",
            stored,
            x.shape,
            y.shape,
            stats=ValueStats(x.size, x.size, 1.0, (0,), apart, cosine, 1),
        )
    context: Any = SimpleNamespace(models={}, schemes=SchemeCache())
    (group,) = derived_weights.whole_model(context, pairs, rows)
    found = group()
    differ = {key for key, row in rows.items() if row.verdict == "DIFFERENT"}
    assert set(found) == (differ if derived else set())
    assert {one.cause for one in found.values()} <= {"derived"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["a", "b", "both", "neither"])
def test_a_head_on_one_side_alone_is_held_to_the_tied_embedding(stored: str, tied: bool) -> None:
    model: Any = SimpleNamespace(
        roles={"token_embd.weight": "E"},
        hyper={"tied_embeddings": tied},
        resolution=SimpleNamespace(report=SimpleNamespace(overruled={})),
    )
    a, b = ("H" if stored in (side, "both") else None for side in "ab")
    pair = TensorPair("output.weight", a, b)  # type: ignore[arg-type]
    found: Any = _pair_tied_head(pair, model, model)
    if not tied or stored in ("both", "neither"):
        assert found == pair
    elif stored == "a":
        says = "head stored in A alone, and the embedding in B"
        assert (found.a, found.b, found.layout) == ("H", "E", (says,))
    else:
        says = "head stored in B alone, and the embedding in A"
        assert (found.a, found.b, found.layout) == ("E", "H", (says,))
    other = TensorPair("blk.0.attn_q.weight", a, b)  # type: ignore[arg-type]
    assert _pair_tied_head(other, model, model) == other


def test_pieces_that_one_side_lacks_are_probed() -> None:
    def side(tokens: list[str], scores: list[float]) -> Any:
        return SimpleNamespace(
            vocabulary=Vocabulary("spm", tokens, [1] * len(tokens), scores=scores)
        )

    a = side(["a", "b", "old"], [0.0, 1.0, 2.0])
    assert set(_differing_piece_texts(a, side(["a", "b", "new"], [0.0, 1.0, 2.0]))) == {
        "old",
        "new",
    }
    assert set(
        _differing_piece_texts(a, side(["a", "b", "old", "more"], [0.0, 5.0, 2.0, 3.0]))
    ) == {"b", "more"}
    assert _differing_piece_texts(a, a) == []


def test_a_zero_is_found_at_its_own_place_alone() -> None:
    """Values are found by the nearest; where a place is expected and near enough, it is taken."""
    y = np.array([0.0, 2.0, 0.0, 4.0, 2.0])
    x = np.array([0.0, 0.0, 2.0, 2.0, 4.0, 9.0, 0.0])
    expected = np.array([0, 1, 1, 4, 4, 3, 5])
    for slack in (0.0, 1e-6):
        found = _nearest_values(x, y, expected, slack)
        assert found.tolist() == [0, -1, 1, 4, 3, -1, -1]


@pytest.mark.parametrize("count", [1, 2, 11, 12, 13])
def test_layers_that_stand_elsewhere_are_named_up_to_twelve(count: int) -> None:
    """Each moves on by one: no two are exchanged, none is a copy of one that is equal."""

    def row(layer: int) -> Any:
        return SimpleNamespace(
            explanation=SimpleNamespace(where=(f"L{layer}.q", f"L{layer + 1}.q"), evidence=())
        )

    said = _layers_sentence([row(layer) for layer in range(count)], frozenset())
    rest = "".join(f", {layer} is {layer + 1}" for layer in range(1, min(count, 12)))
    assert said == (
        "layers stand elsewhere: layer 0 of one file is layer 1 of the other"
        f"{rest}{' ...' * (count > 12)}"
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([("a", "equal within the rounding")] * 3, "equal within the rounding"),
        ([("a", "row 1"), ("a", "row 2")], "L0.q.weight: row 1"),
        ([("a", "row 1"), ("a",)], "L0.q.weight: row 1"),
        ([("a", "row 1")], "row 1"), ([("a",)], ""), ([("a",), ("a", "row 1")], ""),
    ],
)  # fmt: skip
def test_a_second_line_names_a_tensor_only_where_it_is_its_own(
    lines: list[tuple[str, ...]], says: str
) -> None:
    """Seen red: what holds for all tensors read like an exception of the first one."""
    rows: Any = [
        SimpleNamespace(key=f"L{at}.q.weight", explanation=SimpleNamespace(evidence=evidence))
        for at, evidence in enumerate(lines)
    ]
    assert _first_detail(rows) == says
