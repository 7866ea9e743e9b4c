"""Parts of explanations, each by itself: which side, which one of several, and where nothing fits.

Seen red: the other table measured, a bias taken away where it was added, rows called moved that are
at their place, the sentence of one movement given for another.
"""

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.causes.forward import linear, moe, residual_stream
from aprfmt.causes.tensor import rank_parameters, vocabulary_padding
from aprfmt.causes.tensor.rank_parameters import Piece
from aprfmt.causes.training import batch_samples, step_case
from aprfmt.diagnosis import accumulated_rounding
from aprfmt.inference.replay.patched_model import MOVES, OPS, PassLocation
from tests.causes.test_usual_mistakes import patched_model

TABLE = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
BEHIND = {
    "zeros": np.zeros((2, 4), np.float32),
    "one row again and again": np.tile(TABLE[:1] + 1, (2, 1)),
    "of their own values": TABLE[2:4] * 3,
}


class Rows:
    """Rows of a table, as a reader of a stored tensor gives them."""

    encoding = "F32"

    def __init__(self, values: Any) -> None:
        self.values = values
        self.rows, self.columns = values.shape

    def take(self, rows: Any) -> Any:
        return self.values[rows]


@pytest.mark.parametrize("longer", ["A", "B"])
@pytest.mark.parametrize("content", BEHIND)
@pytest.mark.parametrize("known", [(), (6,), (6, 5), (7,), (6, 8)])
def test_rows_behind_a_vocabulary_are_those_of_the_longer_table(
    longer: str, content: str, known: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the ids of either tokenizer reach them, they are no padding."""
    sizes = dict(zip("ab", (*known, None, None), strict=False))
    monkeypatch.setattr(vocabulary_padding, "RowReader", Rows)
    monkeypatch.setattr(vocabulary_padding, "vocabulary_size", sizes.get)
    monkeypatch.setattr(vocabulary_padding, "claims_more_rows", lambda model: False)
    long: Any = np.concatenate([TABLE, BEHIND[content]])
    sides = (long, TABLE) if longer == "A" else (TABLE, long)
    context: Any = SimpleNamespace(models={"a": "a", "b": "b"})
    explain: Any = partial(vocabulary_padding._explain_padding, context, "token_embd.weight")
    found = explain(*sides)
    if max(known, default=0) > 6:
        assert found is None
        return
    assert found is not None and found.cause == "padded_vocabulary"
    says, line = found.evidence
    assert says == f"{longer} has 2 more rows after the 6 that both have and that are equal"
    ids = f"the tokenizer has {max(known)} ids" if known else "neither side has a tokenizer"
    assert line.startswith(f"{ids}; the rows after them are {content}")
    assert explain(TABLE, TABLE) is None and explain(long, TABLE[:, :3]) is None
    changed = TABLE.copy()
    changed[5, 3] += 1e-3  # in the last row that both have
    assert explain(long, changed) is None


@pytest.mark.parametrize("added", ["own bias", "no bias", "the other's bias"])
@pytest.mark.parametrize("there", [True, False])
def test_another_weight_is_found_with_its_bias_ours_or_none(
    added: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    weights: Any = {name: rng.normal(size=(5, 4)) for name in ("a.weight", "b.weight", "c.weight")}
    own, others = rng.normal(size=5), {"c.bias": rng.normal(size=5)}
    x = rng.normal(size=(7, 4))
    bias: Any = {"own bias": own, "no bias": 0.0, "the other's bias": others["c.bias"]}[added]
    theirs = x @ (weights["c.weight"] if there else rng.normal(size=(5, 4))).T + bias
    stored = {
        name: SimpleNamespace(numpy=lambda value=value: value) for name, value in others.items()
    }
    case: Any = SimpleNamespace(
        patched=SimpleNamespace(stored=stored), view=SimpleNamespace(tolerance=1e-6)
    )
    product = SimpleNamespace(key="a.weight", x=x, bias=own, theirs=theirs)
    monkeypatch.setattr(linear, "product_of", lambda case: product)
    monkeypatch.setattr(
        linear, "weights_of_same_shape", lambda patched, key: ["b.weight", "c.weight"]
    )
    monkeypatch.setattr(linear, "weight_values", lambda patched, key: weights[key])
    monkeypatch.setattr(linear, "other_weight_changes", lambda case, key, other: [(key, other)])
    found: list[Any] = list(linear.try_other_weights(case))
    assert found == ([("a.weight", "c.weight")] if there else [])


@pytest.mark.parametrize(
    ("read", "move"),
    [
        ([0, 1, 2, 3, 4, 5], None),
        ([1, 2, 3, 4, 5, 0], 1),
        ([3, 4, 5, 0, 1, 2], 3),
        ([4, 5, 0, 1, 2, 3], -2),
        ([5, 0, 1, 2, 3, 4], -1),
        ([1, 0, 3, 2, 5, 4], None),
    ],
)
def test_a_table_is_read_with_an_offset_where_all_rows_are_moved_alike(
    read: list[int], move: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`read` are the rows that ids 0 to 5 read. In this order no row is that of a token near it."""
    ids = [0, 2, 4, 1, 3, 5]
    rows = TABLE[[read[i] for i in ids]]
    call = SimpleNamespace(args=[SimpleNamespace(key="token_embd.weight")])
    view = SimpleNamespace(point="embd", calls=[call], theirs=rows, tolerance=1e-6)
    patched = SimpleNamespace(ids=ids, hp={"embedding_scale": 1.0})
    case: Any = SimpleNamespace(
        call=lambda name: call, view=view, patched=patched, rows=np.arange(6)
    )
    monkeypatch.setattr(residual_stream, "weight_values", lambda patched, key: TABLE)
    found = list(residual_stream.find_embedding_rows(case))
    assert [change.cause for change in found] == ([] if move is None else [found[0].cause])
    for change in found:
        assert f"{abs(move or 0)}" in change.says and list(change.values.values()) == [move]


@pytest.mark.parametrize("votes", [None, [0, 1, 2], [1, 0, 2], [2, 0, 1]])
def test_an_order_of_experts_is_told_where_it_is_another_one(
    votes: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"L1.{role}.weight" for role in moe.STACKS]
    stacks = {
        key: SimpleNamespace(numpy=lambda n=n: np.arange(3) + 10 * n) for n, key in enumerate(keys)
    }
    patched = SimpleNamespace(
        hp={"n_experts": 3}, weights=stacks,
        spec=SimpleNamespace(block=SimpleNamespace(expert_weights="output")),
    )  # fmt: skip
    case: Any = SimpleNamespace(
        view=SimpleNamespace(point="moe_out"), layer=1, patched=patched, calls=lambda name: [name]
    )
    monkeypatch.setattr(moe, "_is_routed_layer", lambda case: True)
    monkeypatch.setattr(moe, "_vote_expert_order", lambda case, calls, count: votes)
    taken: list[Mapping[str, Any]] = []
    monkeypatch.setattr(moe, "replace_weights", taken.append)
    found = list(moe.find_expert_order(case))
    if votes in (None, [0, 1, 2]):
        assert not found
        return
    assert [change.values for change in found] == [{"order": votes}]
    ring = ": each number runs the expert of that number - 1, counted in a ring"
    turned = ring if votes == [2, 0, 1] else ""
    assert found[0].says == f"experts of layer 1 stand in the order {votes}{turned}"
    assert {key: each.tolist() for key, each in taken[0].items()} == {
        key: [one + 10 * n for one in votes or ()] for n, key in enumerate(keys)
    }


def pieces(*places: tuple[int, int | None]) -> list[Piece]:
    """Return parts of one matrix by (rank, expert)."""
    return [Piece(rank, 0, expert) for rank, expert in places]


@pytest.mark.parametrize(
    ("own", "held", "cause", "says"),
    [
        ([(0, 0)], [(0, 1)], "expert_order",
         "experts hold other ones' weights: expert 0 is expert 1; expert 0 is nowhere"),
        ([(0, 0), (0, 1)], [(0, 1), (0, 0)], "expert_order",
         "experts hold other ones' weights: expert 0 is expert 1, expert 1 is expert 0"),
        ([(0, 0), (1, 0)], [(1, 0), (0, 0)], "expert_order",  # one of each rank says no rank
         "experts hold other ones' weights: expert 0 is expert 2, expert 2 is expert 0"),
        ([(0, 0), (0, 1), (1, 0), (1, 1)], [(1, 0), (1, 1), (0, 0), (0, 1)], "expert_order",
         "experts stand on other ranks: those of ranks 0 and 1 are exchanged"),
        ([(0, None), (1, None)], [(1, None), (0, None)], "shard_order",
         "ranks hold other ranks' shares: those of ranks 0 and 1 are exchanged"),
        ([(0, None)], [(1, None)], "shard_order",
         "ranks hold other ranks' shares: rank 0 has that of rank 1; that of rank 0 is nowhere"),
    ],
)  # fmt: skip
def test_pieces_of_other_places_are_told_by_rank_or_by_expert(
    own: list[Any], held: list[Any], cause: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_parameters, "_matrix_names", lambda reading: ["w"])
    reading: Any = SimpleNamespace(
        layout=SimpleNamespace(axis=0, sections=(), ranks=2),
        tensor=SimpleNamespace(shape=(2, 8, 8)),
    )
    moved = dict(zip(pieces(*own), pieces(*held), strict=True))
    assert rank_parameters._movement_text(reading, moved) == (cause, says)


KINDS = {
    "biases": ["L0.attn_q.bias", "L1.ffn_norm.bias"],
    "norms": ["L0.attn_norm.weight", "output_norm.weight"],
    "routers": ["L0.ffn_gate_inp.weight"],
    "experts": ["L0.ffn_up_exps.weight", "L3.ffn_down_exps.weight"],
    "tables": ["token_embd.weight", "position_embd.weight"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_wrong_where_all_of_it_and_nothing_else_is(kind: str) -> None:
    other = ["L0.attn_q.weight", "L0.ffn_up.weight"]

    def named(wrong: list[str], right: list[str]) -> str:
        case: Any = SimpleNamespace(wrong=wrong, right=right)
        return batch_samples._kind_of_wrong(case)

    assert named(KINDS[kind], other) == kind and named(KINDS[kind], []) == kind
    assert named([*KINDS[kind], *other], []) == "" and named([], KINDS[kind]) == ""
    assert named(KINDS[kind][:1], [*other, KINDS[kind][-1]]) == ""


@pytest.mark.parametrize("lost", ["", "step", "decay", "both", "change alike"])
def test_two_factors_are_those_of_least_squares(lost: str) -> None:
    """With their deviations; one that cannot be told is 1, and its deviation infinite."""
    rng = np.random.default_rng(9)
    step, decay, noise = rng.standard_normal((3, 40))
    weight = rng.uniform(0.5, 2.0, 40)
    step, decay = (
        x * (lost not in (name, "both")) for x, name in ((step, "step"), (decay, "decay"))
    )
    if lost == "change alike":
        decay = 3 * step
    change = 1.5 * step - 0.25 * decay + 0.1 * noise
    found = step_case.solve_factors(step, decay, change, weight)
    root = np.sqrt(weight)
    told = [x for x in (step, decay) if x.any()]
    if lost in ("both", "change alike"):
        assert found == (1.0, np.inf, 1.0, np.inf)
        return
    design = np.stack(told, 1) * root[:, None]
    solved = np.linalg.lstsq(design, change * root, rcond=None)[0]
    deviations = np.sqrt(np.diag(np.linalg.inv(design.T @ design)))
    wanted = [row for pair in zip(solved, deviations, strict=True) for row in pair]
    for name, at in (("step", 0), ("decay", 2)):
        if lost == name:
            wanted[at:at] = [1.0, np.inf]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


COUNTS = [4, 1, 3, 2, 6, 8]  # scored labels of each sample


def by_parts(size: int, summed: bool) -> list[float]:
    """Return how often each sample counts in a mean, or the sum, of the means of `size` samples."""
    parts = [COUNTS[at : at + size] for at in range(0, len(COUNTS), size)]
    share = 1 if summed else 1 / len(parts)
    return [share * sum(COUNTS) / sum(parts[at // size]) for at in range(len(COUNTS))]


FACTORS: dict[str, tuple[list[float], str, list[float] | None]] = {
    "of 6 samples number 12 is not in it": ([1, 0, 1, 1, 1, 1], "samples_left_out", None),
    "of 6 samples number 12, 16 are not in it": (
        [1.5, 0, 1.5, 1.5, 1.5, 0], "samples_left_out", [1.6, 0, 1.6, 1.6, 1.6, 0]),
    "of 6 samples number 11 is not in it": ([0, 1, 2, 3, 4, 5], "samples_left_out", None),
    **{
        f"the {'sum' if summed else 'mean'} of the means of {6 // size} micro-batches or ranks of "
        f"{size} sample{'s' * (size > 1)}": (by_parts(size, summed), "micro_batch_means", None)
        for size in (1, 2, 3) for summed in (True, False)
    },
    "samples count 1, 2, 3, 4, 5, 6 times": ([1, 2, 3, 4, 5, 6], "samples_weighted", None),
}  # fmt: skip


@pytest.mark.parametrize("says", FACTORS)
def test_how_samples_count_is_named(says: str) -> None:
    solved, cause, meant = FACTORS[says]
    if meant is not None:  # those that are in it share the labels of all
        solved = meant = [24 / 15 * bool(value) for value in meant]
    found = batch_samples._named_factors(solved, COUNTS, range(11, 17))
    assert found[:2] == (cause, says)
    np.testing.assert_allclose(found[2], solved if meant is None else meant)
    many = batch_samples._named_factors([1, 2, 3, 4, 5, 6, 7], [1] * 7, range(7))
    assert many[1] == "samples count 1, 2, 3, 4, 5, 6, ... times"


def test_results_are_rounded_but_of_what_moves_values_or_is_wide() -> None:
    with patched_model("llama") as patched:
        rounded = accumulated_rounding._round_results(patched, "bfloat16")
        kept = {*MOVES, *accumulated_rounding.WIDE}
        assert {op for op in OPS if op in rounded.overrides} >= {*OPS} - kept
        assert not {*rounded.overrides} & {op for op in MOVES}
        value = np.float32(1 + 2.0**-7 + 2.0**-12)
        (override, *_) = rounded.overrides["linear"]
        made = override(lambda: np.array([value]), PassLocation("q", 0))
        assert made.tolist() == [1 + 2.0**-7] and made.dtype == np.float32
        first, state = override(lambda: (np.array([value]), 3), PassLocation("q", 0))
        assert first.tolist() == [1 + 2.0**-7] and state == 3


@pytest.mark.parametrize("columns", [(0, 3), (2, 5), (5, 7), (0, 8)])
def test_columns_that_norms_were_summed_over_are_told_beside_padding(
    columns: tuple[int, int],
) -> None:
    """Where the rows end in padding, its columns count neither way."""
    size, padding = 64, 7  # the last column of eight has no label
    rng = np.random.default_rng(12)
    alone = [rng.standard_normal(size) * (part < padding) for part in range(batch_samples.PARTS)]
    given = np.sum(alone[slice(*columns)], axis=0)
    key = "L0.attn_norm.weight"

    def recompute(change: Any, name: str) -> Any:
        part = change.norm_tokens[0] // 2
        return SimpleNamespace(keys=[key] if part < padding else [], gradient=lambda _: alone[part])

    case: Any = SimpleNamespace(
        wrong=[key],
        right=["L0.attn_q.weight"],
        missing=[],
        row_length=16,
        names={key: key},
        recompute=recompute,
        case=lambda _: SimpleNamespace(given=given),
    )
    (found,) = list(batch_samples.guess_norm_columns(case))
    stop = 2 * min(columns[1], padding)
    assert found.change is not None and found.change.norm_tokens == (2 * columns[0], stop)


def test_a_parameter_is_asked_once_about_all_tensors_that_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those an engine's reading says what they are parts of."""

    class Tensor:
        def __init__(self, parameter: str | None) -> None:
            held = SimpleNamespace(tensor=SimpleNamespace(name=parameter))
            self.reading = None if parameter is None else held

    monkeypatch.setattr(rank_parameters, "EngineTensor", Tensor)
    asked: list[Any] = []

    def explain(context: Any, reading: Any, keys: list[str], rows: Any) -> dict[str, Any]:
        asked.append((reading.tensor.name, keys))
        return {}

    monkeypatch.setattr(rank_parameters, "_explain_parameter", explain)

    def pair(*parameters: str | None) -> Any:
        return SimpleNamespace(b=SimpleNamespace(stored=[Tensor(each) for each in parameters]))

    pairs: Any = {
        "q": pair("qkv"),
        "k": pair("qkv", "qkv"),
        "v": pair("qkv"),
        "up": pair("mlp", "gate"),
        "o": pair(None),
        "n": SimpleNamespace(b=None),
        "plain": SimpleNamespace(b=SimpleNamespace(stored=[SimpleNamespace(reading=None)])),
    }
    rows: Any = {key: SimpleNamespace(verdict="DIFFERENT") for key in (*pairs, "alone")}
    rows["v"].verdict = "SAME_BYTES"
    for group in rank_parameters.rank_parameters(cast(Any, None), pairs, rows):
        group()
    assert asked == [("qkv", ["q", "k"]), ("mlp", ["up"]), ("gate", ["up"])]
