"""The gate on statistics of weights, on small tensors whose statistics numpy gives."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates import weights
from aprfmt.checks.gates.weights import check_init_statistics, logical_stats

RNG = np.random.default_rng(7)


class Tensor:
    """A weight of numbers at hand, decoded two rows at a time."""

    moves, roles = None, ()

    def __init__(self, values: Any, encoding: str = "F32") -> None:
        self.values, self.encoding = np.asarray(values), encoding
        self.shape = self.values.shape

    def chunks(self, elements: int) -> Any:
        assert elements == 1 << 22
        rows = np.atleast_1d(self.values)
        for start in range(0, len(rows), 2):
            yield start, start + 2, rows[start : start + 2]


def result(roles: dict[str, Any], *, arch: str = "llama", offset: int = 0) -> Any:
    block = SimpleNamespace(norm_offset=offset)
    spec = SimpleNamespace(name=arch, block=block)
    made: Any = SimpleNamespace(model=SimpleNamespace(spec=spec, roles=roles))
    return check_init_statistics(made)


def checks(roles: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {row.name: row for row in result(roles, **more).checks}


def usual(shape: tuple[int, ...] = (32, 16), std: float = 0.05) -> Any:
    return Tensor(RNG.normal(size=shape).astype(np.float32) * std)


def test_usual_weights_pass_with_their_ranges() -> None:
    roles = {"L0.attn_q.weight": usual(), "L1.attn_q.weight": usual(std=0.5)}
    (row,) = checks(roles).values()
    assert (row.name, row.outcome, row.where) == ("weights-attn_q.weight", "PASS", "2 tensors")
    low, high = (roles[key].values.std() for key in roles)
    assert f"std {low:.4g} to {high:.4g}" in row.found and "absmax" in row.found
    assert row.expected == "mean -0.1 to 0.1; std 0.001 to 1; zeros 0 to 0.8"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.zeros((32, 16), np.float32), "L1.attn_q.weight std 0"),
        (np.full((32, 16), 7, np.float32), "L1.attn_q.weight mean 7"),
        (np.where(np.arange(512) % 16 == 0, 0.1, 0).reshape(32, 16), "zeros 0.9375"),
    ],
)
def test_an_unusual_weight_fails_by_its_name_and_number(values: Any, says: str) -> None:
    roles = {"L0.attn_q.weight": usual(), "L1.attn_q.weight": Tensor(values)}
    (row,) = checks(roles).values()
    assert row.outcome == "FAIL" and says in row.found
    assert "were these weights filled" in row.todo and "L0" not in row.found


def test_numbers_that_are_not_finite_are_counted_and_nothing_else() -> None:
    values = usual().values
    values[0, :3], values[5, :2] = np.nan, np.inf
    (row,) = checks({"L3.ffn_up.weight": Tensor(values)}).values()
    assert row.outcome == "FAIL" and row.found == "1: L3.ffn_up.weight has 3 NaN and 2 infinities"
    values = usual().values
    values[0, 0] = -np.inf
    (row,) = checks({"L3.ffn_up.weight": Tensor(values)}).values()
    assert row.found == "1: L3.ffn_up.weight has 0 NaN and 1 infinities"


@pytest.mark.parametrize(("encoding", "judged"), [("I32", 0), ("U8", 0), ("BOOL", 0), ("F32", 1)])
def test_integers_are_no_weights(encoding: str, judged: int) -> None:
    assert len(checks({"L0.attn_q.weight": Tensor(usual().values, encoding)})) == judged


def test_a_norm_is_measured_with_its_offset() -> None:
    """gemma's files hold a norm's weight less one; of other roles nothing is added."""
    roles = {"L0.attn_norm.weight": Tensor(np.zeros(16, np.float32)), "L0.attn_q.weight": usual()}
    assert checks(roles)["weights-attn_norm.weight"].outcome == "FAIL"
    found = result(roles, offset=1)
    assert {row.name: row.outcome for row in found.checks} == {
        "weights-attn_norm.weight": "PASS", "weights-attn_q.weight": "PASS"
    }  # fmt: skip
    ranges = found.details["roles"]["attn_norm.weight"]["range"]
    assert ranges == {"mean": [1, 1], "std": [0, 0], "rms": [1, 1], "absmax": [0, 0]}
    mean = found.details["roles"]["attn_q.weight"]["range"]["mean"][0]
    assert mean == pytest.approx(roles["L0.attn_q.weight"].values.mean(dtype=np.float64))


def test_measures_are_those_of_all_tensors_of_a_role() -> None:
    roles = {"L0.attn_q.weight": usual(), "L1.attn_q.weight": usual((16, 16), 0.2)}
    found = result(roles)
    both = np.concatenate([one.values.reshape(-1) for one in roles.values()]).astype(np.float64)
    assert set(found.measures) == {"attn_q.weight mean", "attn_q.weight std"}
    assert found.measures["attn_q.weight mean"].value == pytest.approx(both.mean())
    assert found.measures["attn_q.weight std"].value == pytest.approx(both.std())
    assert found.details["roles"]["attn_q.weight"]["tensors"] == 2
    assert found.details["roles"]["attn_q.weight"]["stats"]["count"] == both.size
    empty = result({"L0.attn_q.weight": Tensor(np.full((32, 16), np.nan, np.float32))})
    assert not empty.measures and empty.checks[0].outcome == "FAIL"


@pytest.mark.parametrize(
    ("dead", "length", "outcome"),
    [(0, 0.0, "PASS"), (8, 0.0, "PASS"), (9, 0.0, "FAIL"), (9, 1.1e-6, "PASS"), (9, 9e-7, "FAIL")],
)
def test_a_quarter_of_the_embeddings_rows_may_be_zeros(
    dead: int, length: float, outcome: str
) -> None:
    table = usual().values
    table[:dead] = 0
    table[:dead, 3] = length
    row = checks({"token_embd.weight": Tensor(table)})["embedding-rows"]
    counted = dead if length < 1e-6 else 0
    assert (row.outcome, row.found) == (outcome, f"{counted} of 32 are zeros")
    assert "embedding-rows" not in checks({"L0.attn_q.weight": usual()})


def test_what_was_only_moved_is_measured_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = [usual(), usual(std=0.3)]
    monkeypatch.setattr(weights, "tensor_stats", logical_stats)
    made: Any = Tensor(np.zeros((2, 2), np.float32))
    made.stored = stored
    assert logical_stats(made).zeros == 4
    made.moves, made.roles = (), ("a", "b")
    assert logical_stats(made).zeros == 4
    made.roles = ("a",)
    found = logical_stats(made)
    assert found.count == 1024 and found.zeros == 0
