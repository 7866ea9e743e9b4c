"""Attention that reads the cached rows of other tokens: whole blocks, runs that end, single rows.

Seen red: "no cause of the table fits" for blocks of 4 in another order, since rows of later tokens
were not tried, and a run of wrong rows or positions never came back to the tokens' own.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.kv_cache import cache_change
from aprfmt.diagnosis import diagnose
from tests.diagnosis.engine_changes import stale
from tests.diagnosis.engines import tiny_folder, trace

KEPT = frozenset({"attn_norm", "q", "k", "v", "attn_out", "ffn_norm", "out", "logits"})


def exchanged(size: int, order: tuple[int, ...]) -> Callable[[int], list[int]]:
    """Return cached rows whose first blocks of `size` stand in `order`, later rows their own."""

    def rows(n: int) -> list[int]:
        own = np.arange(n)
        count = len(order) * size
        if n >= count:
            own[:count] = own[:count].reshape(-1, size)[[*order]].reshape(-1)
        return [int(row) for row in own]

    return rows


def moved(n: int) -> list[int]:
    """Return cached rows of which those of tokens 5 to 8 are the rows of 13 to 16."""
    return [row + 8 if 5 <= row < 9 and n > 16 else row for row in range(n)]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (exchanged(4, (2, 0, 1)), "tokens 8 to 11 for tokens 0 to 3, the rows of tokens 0 to 7"),
        (exchanged(8, (1, 0)), "the rows of tokens 8 to 15 for tokens 0 to 7"),
        (moved, "the rows of tokens 13 to 16 for tokens 5 to 8"),
    ],
)
def test_rows_of_other_blocks_are_named(rows: Callable[[int], list[int]], says: str) -> None:
    folder = tiny_folder("llama")
    made = trace(folder, f"blocks-{says[:20]}", points=KEPT, cache=stale(rows, 0))
    lead = diagnose(str(folder), str(made)).lead
    assert lead is not None and (lead.cause, lead.certainty) == ("kv_cache", "confirmed")
    assert says in lead.says and lead.where == ("L0.kv_cache",)


def twice(n: int) -> list[int]:
    """Return cached rows of which the first eight are read for the next eight, by a later pass."""
    return [row - 8 if 8 <= row < 16 and n > 20 else row for row in range(n)]


def turned(n: int) -> list[int]:
    """Return cached rows in another order, by a later pass that reads all of them."""
    return exchanged(8, (1, 0))(n) if n > 20 else list(range(n))


def test_a_block_that_a_later_pass_reads_for_another_is_named() -> None:
    """The pass that filled the cache read its own rows: a block table that is wrong later."""
    folder = tiny_folder("llama")
    made = trace(folder, "blocks-later", points=KEPT, cached=20, cache=stale(twice, 1))
    found = {row.cause: row for row in diagnose(str(folder), str(made)).findings}
    assert found["kv_cache"].where == ("L1.kv_cache",)
    assert "from token 20 on attention reads the rows of tokens 0 to 7" in found["kv_cache"].says


def test_an_order_of_rows_that_a_later_pass_cannot_tell_is_no_cause() -> None:
    """A later query reads every row with its own rotation: their order changes nothing."""
    folder = tiny_folder("llama")
    made = trace(folder, "blocks-turned", points=KEPT, cached=20, cache=stale(turned, 1))
    assert {row.cause for row in diagnose(str(folder), str(made)).findings} == {"capture_rows"}


def test_positions_that_come_back_to_their_own_are_named() -> None:
    """Tokens 6 to 9 are four positions late, and those after them right."""
    folder, at = tiny_folder("llama"), np.arange(29)
    at[6:10] += 4
    made = trace(folder, "late-run", points=KEPT - {"q", "k"}, positions=at.tolist())
    lead = diagnose(str(folder), str(made)).lead
    assert lead is not None and (lead.cause, lead.certainty) == ("positions", "confirmed")


@pytest.mark.parametrize("cached", [0, 20])
def test_rows_that_are_the_tokens_own_are_no_cause(cached: int) -> None:
    folder = tiny_folder("llama")
    own = stale(lambda n: list(range(n)), 0)
    found = diagnose(
        str(folder), str(trace(folder, f"own{cached}", points=KEPT, cached=cached, cache=own))
    )
    assert found.verdict in ("same", "precision")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([0, 0, 1, 2], "the rows of tokens 0 to 2 for tokens 1 to 3"),
        ([0, 1, 1, 3], "the row of token 1 for token 2"),
        ([-1, -1, 2, 3], "zeros for tokens 0 to 1"),
        ([1, 0, 3, 2, 5, 4], "the row of token 1 for token 0, and other rows for 5 more tokens"),
    ],
)
def test_runs_of_rows_are_said_together(rows: list[int], says: str) -> None:
    at: Any = np.array(rows)
    assert cache_change(at, at).says.endswith(f"attention reads {says}")
