"""Which pairs a comparison announces before it reads them, and that no stored name is lost.

Seen red: so many pairs and no more, however small they are, so that requests came in waves.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from aprfmt.measure import alignment
from aprfmt.measure.alignment import AHEAD, AHEAD_BYTES, AHEAD_TENSORS, TensorPair, numbered_pairs


@dataclass
class Pair:
    """What `numbered_pairs` uses of a pair."""

    nbytes: int
    tensor_count: int = 1
    told: int = 0

    def prefetch(self) -> None:
        self.told += 1


def told_at_first(pairs: list[Pair]) -> int:
    turns = numbered_pairs(cast("list[TensorPair]", pairs))
    assert next(turns)[0] == 1
    return sum(bool(pair.told) for pair in pairs)


def test_as_many_bytes_as_are_fetched_ahead() -> None:
    assert told_at_first([Pair(AHEAD_BYTES // 8) for _ in range(30)]) == 8
    assert told_at_first([Pair(AHEAD_BYTES) for _ in range(30)]) == AHEAD
    assert told_at_first([Pair(1) for _ in range(99)]) == AHEAD_TENSORS
    assert told_at_first([Pair(1, tensor_count=128) for _ in range(99)]) == AHEAD


def test_every_pair_is_told_before_its_turn_and_again_when_it_is_next() -> None:
    pairs: list[Any] = [Pair(1 + number % 3) for number in range(50)]
    for number, pair in numbered_pairs(pairs):
        assert pair is pairs[number - 1]
        assert all(one.told for one in pairs[number - 1 : number - 1 + AHEAD])
        assert number == 1 or pair.told > 1


def test_no_stored_name_is_lost_where_two_become_one() -> None:
    rule = SimpleNamespace(function=lambda name: name.removeprefix("base."))
    model: Any = SimpleNamespace(relations=[SimpleNamespace(rules=[rule])], config={}, kind=None)
    for names in (["base.x", "x", "base.y"], ["x", "base.x", "base.y"]):
        found = alignment._names_for_pairing(model, names)
        assert found == {"x": "x", "base.x": "base.x", "y": "base.y"}
