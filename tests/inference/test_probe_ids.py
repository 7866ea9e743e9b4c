"""Token ids that are chosen: long enough for what they are to show, and no longer than is said."""

from typing import Any

import pytest

from aprfmt.inference.probe_ids import LONGEST, MARGIN, SHORT, choose_ids

PLAIN: dict[str, Any] = {
    "vocab_size": 1000, "sliding_window": None, "window_layers": (False,), "rope_scaling": None,
    "context_length": 4096,
}  # fmt: skip


def windowed(reach: int) -> dict[str, Any]:
    return PLAIN | {"sliding_window": reach, "window_layers": (True,)}


def dynamic(reach: int) -> dict[str, Any]:
    scaling = {"type": "dynamic", "original_context_length": None}
    return PLAIN | {"rope_scaling": scaling, "context_length": reach}


def longrope(reach: int) -> dict[str, Any]:
    return PLAIN | {"rope_scaling": {"type": "longrope", "original_context_length": reach}}


LAST = LONGEST + MARGIN - 1  # the longest window that a pass still reaches behind
REACHES = [1, 31, 32, 33, 47, 48, 100, 682, 683, LONGEST - 1, LONGEST, LAST, LAST + 1, 10**6]


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("kind", [windowed, dynamic, longrope])
def test_ids_reach_behind_what_they_are_to_show(kind: Any, reach: int) -> None:
    """Half of it as much again, or 16 tokens, up to the longest; at least one token more."""
    ids = choose_ids([PLAIN, kind(reach)], long=True)
    if reach > LAST:
        assert len(ids) == SHORT
    else:
        usual = max(SHORT, min(max(reach + MARGIN, reach + reach // 2), LONGEST))
        assert len(ids) == max(usual, reach + 1) > reach
    assert len(choose_ids([PLAIN, kind(reach)], long=False)) == SHORT


@pytest.mark.parametrize("vocab", [7, 50, 1000, 262144])
def test_ids_are_of_the_smallest_vocabulary_and_one_stands_twice(vocab: int) -> None:
    ids = choose_ids([PLAIN | {"vocab_size": vocab}, PLAIN | {"vocab_size": 10**6}], long=False)
    assert 0 <= min(ids) and max(ids) < vocab and ids[3] == ids[4]
    assert len(set(ids)) > min(vocab, SHORT) // 2
