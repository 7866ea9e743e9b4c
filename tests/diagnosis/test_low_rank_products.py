"""A product that differs by a matrix of low rank, as an adapter with another factor makes it.

Seen red: "L0.q is not what linear makes of this run's own L0.attn_norm", and no word of the rank,
which rows of input and output show.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.probe_ids import choose_ids
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder, trace

POINTS = frozenset({"attn_norm", "q", "k", "v", "attn", "attn_out", "ffn_norm", "ffn_out", "out"})
RNG = np.random.default_rng(5)


def low(rank: int) -> Callable[[Any], Any]:
    """Return a change of a weight by a product of two factors of this rank."""

    def change(w: Any) -> Any:
        b, a = RNG.standard_normal((len(w), rank)), RNG.standard_normal((rank, w.shape[1]))
        return w + 0.02 * (b @ a).astype(np.float32)

    return change


def some_rows(w: Any) -> Any:
    made = w.copy()
    made[3:6] += 0.1 * RNG.standard_normal((3, w.shape[1])).astype(np.float32)
    return made


def every(w: Any) -> Any:
    return w + 0.05 * RNG.standard_normal(w.shape).astype(np.float32)


CHANGES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "two": (low(2), "rank 2"),
    "four": (low(4), "rank 4"),
    "rows": (some_rows, ""),
    "every": (every, ""),
    "many": (low(11), ""),
}


def sentence(name: str, key: str, many: int = 20) -> str:
    """Return what is said of a run whose weight `key` was changed, of so many tokens."""
    folder = tiny_folder("llama")
    with open_model(folder) as model:
        ids = choose_ids([model.hyper], long=True)[:many]
    change = CHANGES[name][0]
    run = trace(
        folder, f"low-{name}-{key}-{many}", ids=ids, points=POINTS,
        weights=lambda held: {key: change(held[key].numpy())},
    )  # fmt: skip
    return diagnose(str(folder), str(run)).sentence


@pytest.mark.parametrize("key", ["L0.attn_q.weight", "L1.ffn_down.weight"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_rank_of_a_difference_is_said_where_rows_show_it(name: str, key: str) -> None:
    said, wanted = sentence(name, key), CHANGES[name][1]
    assert key in said and "located" in said
    assert f"has {wanted} in 20 rows: an adapter" in said if wanted else "an adapter" not in said


def test_few_rows_show_no_rank() -> None:
    assert "an adapter" not in sentence("four", "L0.attn_q.weight", many=6)
