"""Whole experts and runs that were lost, ends of vectors, shares of ranks, tensors of one side."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import rank_shares, usual_steps
from aprfmt.causes.forward.shards import ROLES
from aprfmt.causes.tensor import coarse_damage, joined_tensors, value_functions

# --- runs that rounding does not explain ----------------------------------------------------------

EXPERTS, ROWS, COLUMNS = 5, 8, 64  # of a stack, 512 values each


def damaged(holes: dict[tuple[int, int], float], *, stack: bool = True, flips: Any = ()) -> Any:
    """The finding on two copies of which the second has other values in these places."""
    values = np.random.default_rng(4).normal(size=(EXPERTS * ROWS, COLUMNS)).astype(np.float32)
    other = values * np.float32(1 + 1e-4)
    for (start, stop), held in holes.items():
        other.reshape(-1)[start:stop] = held

    def side(x: Any) -> Any:
        return SimpleNamespace(columns=COLUMNS, take=lambda rows: x[rows])

    case: Any = SimpleNamespace(
        a=side(values),
        b=side(other),
        key="k",
        shape=(EXPERTS, ROWS, COLUMNS) if stack else (EXPERTS * ROWS, COLUMNS),
        slack=lambda moved=True: 1e-3,
        windows=lambda rows: iter(np.split(np.arange(EXPERTS * ROWS), 4)),
        before=SimpleNamespace(norms=(1.0, 1.0), count=values.size, relative=0.5),
    )
    found = list(coarse_damage.explain_damaged_runs(case))
    assert len(found) < 2
    return found[0] if found else None


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flipped bit, and all values outside of the runs are equal."""
    monkeypatch.setattr(coarse_damage, "_repairing_flips", lambda case, runs: [])
    monkeypatch.setattr(coarse_damage, "_others_are_equal", lambda case, runs: True)


def test_zeros_in_whole_experts_were_never_filled() -> None:
    size = ROWS * COLUMNS
    found = damaged({(size, 2 * size): 0.0})
    assert (found.cause, found.confirmed) == ("stale_tensor", True)
    assert found.evidence[0] == "expert 1: B holds 0 there, and was never filled"
    assert found.evidence[1] == (
        "512 values in 1 runs are not: values 512 to 1023, all zero: in rows 8-15"
    )
    # Up to a gap of equal values at both ends.
    gap = coarse_damage.GAP
    found = damaged({(size + gap - 1, 2 * size - gap + 1): 0.0})
    assert found.cause == "stale_tensor"
    for at in ((size + gap, 2 * size), (size, 2 * size - gap)):
        found = damaged({at: 0.0})
        assert (found.cause, found.confirmed) == ("bit_rot", True), at
    assert damaged({(size, 2 * size): 0.0}, stack=False).cause == "bit_rot"
    both = damaged({(0, size): 0.0, (2 * size, 3 * size): 0.0})
    assert both.cause == "stale_tensor"
    assert both.evidence[0].startswith("expert 0, expert 2: B holds 0 there")


def test_other_values_in_a_whole_expert_are_no_zeros() -> None:
    size = ROWS * COLUMNS
    found = damaged({(size, 2 * size): 7.0})
    assert (found.cause, found.confirmed, found.proof) == ("bit_rot", False, None)
    assert found.evidence == (
        "all other values are within the rounding of the coarser encoding",
        "512 values in 1 runs are not: values 512 to 1023: in rows 8-15",
    )
    mixed = damaged({(0, size): 0.0, (2 * size, 3 * size): 7.0})
    assert (mixed.cause, mixed.confirmed) == ("bit_rot", False)


def test_a_run_proves_something_from_a_length_on(monkeypatch: pytest.MonkeyPatch) -> None:
    least = coarse_damage.LEAST
    assert damaged({(100, 100 + least): 9.0}) is not None
    assert damaged({(100, 100 + least - 1): 9.0}) is None
    assert damaged({}) is None
    found = damaged({(60, 80): 9.0})
    assert found.evidence[1] == "20 values in 1 runs are not: values 60 to 79: in rows 0-1"
    monkeypatch.setattr(coarse_damage, "_repairing_flips", lambda case, runs: ["bit 3 of B"])
    found = damaged({(60, 80): 9.0})
    assert found.evidence == (
        "all other values are within the rounding of the coarser encoding: one bit is flipped",
        "flipping bit 3 of B brings its block back within the bound",
    )
    assert found.confirmed and found.proof.count == 20


def test_runs_are_listed_up_to_a_number_and_are_too_many_beyond_another() -> None:
    def runs(count: int, length: int = 16) -> Any:
        apart = length + coarse_damage.GAP + 1
        return damaged({(at * apart, at * apart + length): 0.0 for at in range(count)})

    shown = coarse_damage.SHOWN
    assert len(runs(shown).evidence) == 1 + shown and runs(shown).confirmed
    assert len(runs(shown + 1).evidence) == 1 + shown and not runs(shown + 1).confirmed
    assert f"in {shown + 1} runs" in runs(shown + 1).evidence[1]
    gap = coarse_damage.GAP
    for between, count in ((gap, 1), (gap + 1, 2)):
        found = damaged({(0, 16): 0.0, (16 + between, 32 + between): 0.0})
        assert f"values in {count} runs are not" in found.evidence[1]


# --- vectors --------------------------------------------------------------------------------------


def test_a_run_of_a_vector_ends_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning that the rest of the longer vector is too short for is none."""
    least = value_functions.LEAST
    long = np.arange(1.0, least + 5)

    def column(values: Any) -> Any:
        x = np.asarray(values, np.float64).reshape(-1, 1)
        return SimpleNamespace(
            rows=len(x), columns=1, shape=(len(x),), whole=x, take=lambda rows: x[rows]
        )

    monkeypatch.setattr(value_functions, "is_longer_table", lambda *given: False)

    def told(part: Any) -> list[Any]:
        case: Any = SimpleNamespace(
            a=column(part),
            b=column(long),
            key="k",
            context=None,
            slack=lambda: 1e-6,
            guess=lambda cause, says, label, take, rows: (label, take(rows).reshape(-1).tolist()),
        )
        return list(value_functions.guess_prefix(case))

    last = len(long) - least
    for at in (0, 1, last):
        assert told(long[at : at + least]) == [("B", long[at : at + least].tolist())]
    beyond = long[last + 1 :].tolist()
    assert told([*beyond, *[0.0] * (least - len(beyond))]) == []


# --- tensors of one side --------------------------------------------------------------------------


def test_tensors_of_one_side_are_those_without_a_role_that_nothing_explains() -> None:
    def row(verdict: str, explained: bool = False) -> Any:
        return SimpleNamespace(verdict=verdict, is_explained=lambda: explained)

    rows = {
        "a": row("ONLY_IN_A"),
        "b": row("ONLY_IN_B"),
        "known": row("ONLY_IN_A"),
        "said": row("ONLY_IN_A", explained=True),
        "both": row("DIFFERENT"),
    }
    context: Any = SimpleNamespace(has_role=lambda label, key: (label, key) == ("a", "known"))
    assert joined_tensors._one_sided(context, rows, "a") == ["a"]
    assert joined_tensors._one_sided(context, rows, "b") == ["b"]


# --- shares of ranks ------------------------------------------------------------------------------


def test_shares_are_looked_for_in_the_products_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their rows or of their columns, by the role, and of two tokens or more.

    Where the run is not put together from ranks, only columns that two of them have.
    """
    monkeypatch.setattr(rank_shares, "role_of", lambda key: key)
    monkeypatch.setattr(
        rank_shares, "_find_row_share_order", lambda case, name, group, role: [("rows", name, role)]
    )
    monkeypatch.setattr(
        rank_shares,
        "_find_column_share_order",
        lambda case, found, role, *, permuted: [("columns", role, permuted)],
    )

    def tried(role: str | None, *, dump: str = "dump", tokens: int = 2) -> list[Any]:
        product = None if role is None else SimpleNamespace(key=role, x=np.zeros((tokens, 3)))
        monkeypatch.setattr(rank_shares, "product_of", lambda case: product)
        case: Any = SimpleNamespace(
            recorded=SimpleNamespace(trace=SimpleNamespace(run={"dump": dump} if dump else {}))
        )
        return list(rank_shares.find_share_order(case))

    for role in ("attn_q", "attn_k", "attn_v"):
        assert tried(role) == [("rows", "attention", role)]
        assert tried(role, dump="") == tried(role, tokens=1) == []
    for role in ("ffn_gate", "ffn_up"):
        assert tried(role) == [("rows", "the MLP", role)]
    for role in ROLES:
        assert tried(role)[-1] == ("columns", role, True)
        assert tried(role, dump="") == [("columns", role, False)]
    assert tried("output") == tried(None) == []


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["gqa", "mla"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("qk", [False, True])
def test_mistakes_of_norms_are_of_the_norms_that_a_model_has(
    attention: str, kind: str, qk: bool
) -> None:
    patched: Any = SimpleNamespace(
        spec=SimpleNamespace(block=SimpleNamespace(norm=kind, attention=attention)),
        hp={"qk_norm": qk},
    )
    _, *found = (one.change for one in usual_steps._norm_mistakes(patched))
    said = [(one.cause, *one.where) for one in found]
    wanted: list[tuple[str, str]] = [("norm_kind", "norm")] if kind == "rms" else []
    if attention == "mla":
        wanted += [
            ("norm_skipped", "attn_q_a_norm"),
            ("norm_skipped", "attn_kv_a_norm"),
            ("norm_kind", "attn_kv_a_norm"),
        ]
    elif qk:
        wanted += [("qk_norm", "qk_norm"), ("qk_norm", "qk_norm")]
        assert [one.says for one in found[-2:]] == ["q is not normalised", "k is not normalised"]
    assert said == wanted
