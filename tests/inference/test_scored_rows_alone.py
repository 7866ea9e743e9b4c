"""Which rows are scored, which number a trainer may have reported, and the room of a cache."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference import evaluation, reported_loss
from aprfmt.inference.batch import Batch
from aprfmt.inference.gradients.changes import BackwardChange, Padding
from aprfmt.inference.gradients.documents import documents
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.reported_loss import LossGuess, explain_loss

# --- rows of a pass -------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [1, 4, 6, 7])
def test_rows_are_held_against_the_tokens_beside_theirs(start: int) -> None:
    """No row without a token after the next one; logits that give every token another loss."""
    ids = [3, 1, 4, 0, 2, 5, 6, 7]
    loss = np.arange(8.0) * 0.25
    nats = loss + np.log(np.sum(np.exp(-loss)))  # minus the logarithm of a softmax
    mine = np.tile(-loss, (len(ids) - start, 1))
    rows = evaluation._PassRows(mine, None, ids, start)
    shifted: list[list[Any]] = [[] for _ in range(evaluation.SHIFTS)]
    evaluation._score_shifted(rows, shifted)
    count = len(ids) - 1 - start
    for by, kept in enumerate(shifted, -1):
        wanted = ids[start + by : start + by + count]
        assert len(kept) == (1 if count else 0)
        for found in kept:
            assert np.allclose(found, nats[wanted], rtol=1e-12)


def test_rows_before_the_end_of_a_text_are_all_scored() -> None:
    ids = [1, 2, 3, 0, 1, 2]
    rows = evaluation._PassRows(np.zeros((2, 4)), None, ids, 1)
    shifted: list[list[Any]] = [[], [], []]
    evaluation._score_shifted(rows, shifted)
    assert [kept[0].tolist() for kept in shifted] == [[math.log(4)] * 2] * 3
    assert rows.labels() == [2, 3] and rows.labels(1) == [3, 0] and rows.labels(-1, 3) == [1, 2, 3]


# --- room of a cache ------------------------------------------------------------------------------


def test_a_cache_has_room_for_as_many_rows_as_its_smallest_buffer_has() -> None:
    cache = KVCache(None, 3)  # type: ignore[arg-type]
    assert not cache.fits(1)
    cache._keys = [np.zeros((8, 1)), None, np.zeros((6, 1))]
    cache._values = [np.zeros((8, 1)), None, np.zeros((6, 1))]
    cache._single = [None, np.zeros((5, 1)), None]
    cache.generation, cache.length, cache._was_used = 1, 3, True
    assert cache.fits(1) and cache.fits(2) and not cache.fits(3)
    cache._single[1] = np.zeros((9, 1))
    cache.generation = 2
    assert cache.fits(3) and not cache.fits(4)
    cache.length = 6
    assert cache.fits(0) and not cache.fits(1)


def test_a_cache_of_states_alone_has_room_once_a_pass_was_made() -> None:
    cache = KVCache(None, 1)  # type: ignore[arg-type]
    assert not cache.fits(1)
    cache._was_used, cache.length = True, 100
    assert cache.fits(1) and cache.fits(10_000)


# --- a reported loss ------------------------------------------------------------------------------

RIGHT = 2.0


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[LossGuess]]:
    """What each kind of mistake would give; the batch's own loss is RIGHT."""
    made: dict[str, list[LossGuess]] = {}

    def kept(name: str) -> Any:
        return lambda *given: iter(made.get(name, []))

    monkeypatch.setattr(reported_loss, "label_losses", lambda batch, scored: scored)
    for name in (
        "_guess_reductions", "_guess_packings", "_guess_empty_windows", "_guess_added_terms",
        "_guess_chunks", "score_elsewhere",
    ):  # fmt: skip
        monkeypatch.setattr(reported_loss, name, kept(name))
    monkeypatch.setattr(
        reported_loss,
        "_all_guesses",
        lambda batch, scored, right, pairs: kept("two" if pairs else "one")(),
    )
    return made


def told(
    reported: float, *, session: Any = None, right: float = RIGHT, **more: Any
) -> tuple[str, list[str]]:
    losses: Any = [np.array([right, right])] if math.isfinite(right) else [np.array([])]
    found = explain_loss(SimpleNamespace(), losses, reported, session=session, **more)  # type: ignore[arg-type]
    assert found.reported is reported
    return found.says, ["+".join(one.mistakes) + one.detail for one in found.guesses]


def test_a_loss_is_the_batchs_within_its_tolerance_and_half_a_digit(guesses: Any) -> None:
    assert told(RIGHT) == ("agrees", [""])
    assert told(2.019, within=0.01)[0] == told(1.981, within=0.01)[0] == "agrees"
    assert told(2.021, within=0.01)[0] == told(1.979, within=0.01)[0] == "unexplained"
    assert told(2.05, within=0.0, digit=0.06)[0] == "agrees"
    assert told(2.05, within=0.0, digit=0.04) == ("unexplained", [])
    assert told(math.inf) == ("unexplained", [])
    assert told(3.0, right=math.nan) == ("unmeasured", [])


def test_a_loss_of_nothing_is_that_of_windows_without_labels(guesses: Any) -> None:
    for nothing in (math.nan, 0.0):
        guesses["_guess_empty_windows"] = []
        guesses["one"] = [LossGuess(("sum",), 0.0)]
        assert told(nothing) == ("unexplained", [])
        guesses["_guess_empty_windows"] = [LossGuess(("empty",), nothing)]
        assert told(nothing) == ("named", ["empty"])


def test_one_mistake_comes_before_two_and_the_nearest_first(guesses: Any) -> None:
    guesses["two"] = [LossGuess(("bits", "shift"), 3.0)]
    assert told(3.0) == ("named", ["bits+shift"])
    guesses["one"] = [
        LossGuess(("sum",), 3.0 * (1 + 4e-6), "a"),
        LossGuess(("bits",), 5.0),
        LossGuess(("sum",), 3.0, "b"),
    ]
    assert told(3.0) == ("named", ["sumb", "suma"])
    guesses["one"].append(LossGuess(("shift",), 3.0))
    assert told(3.0)[0] == "ambiguous"
    guesses["one"] = [LossGuess(("sum",), math.inf), LossGuess(("shift",), 3.5)]
    assert told(math.inf) == ("named", ["sum"])


def test_a_number_of_few_bits_is_likely_where_little_is_left_of_what_the_mistake_changes(
    guesses: Any,
) -> None:
    near = 3.0 * (1 + 1e-3)  # the mistake changes 1 of 2, and 0.003 is left
    guesses["_guess_reductions"] = [LossGuess(("bits",), 3.0)]
    assert told(near, within=0.01) == ("likely", ["bits"])
    assert told(near, within=1e-5) == ("unexplained", [])
    guesses["_guess_reductions"].append(LossGuess(("bits",), 3.001))
    assert told(near, within=0.01)[0] == "likely"
    guesses["_guess_reductions"].append(LossGuess(("sum",), 3.001))
    assert told(near, within=0.01) == ("unexplained", [])
    small = RIGHT * 1.02  # 0.02 is left of the 0.04 that it changes
    guesses["_guess_reductions"] = [LossGuess(("bits",), RIGHT * 1.04)]
    assert told(small, within=0.019 + 0.0006) == ("unexplained", [])


def test_samples_are_packed_by_a_session_where_nothing_else_gives_the_number(guesses: Any) -> None:
    guesses["_guess_packings"] = [LossGuess(("packed",), 3.0, "x"), LossGuess(("packed",), 3.0)]
    assert told(3.0) == ("unexplained", [])
    assert told(3.0, session=1) == ("named", ["packedx", "packed"])
    assert told(3.1, session=1) == ("unexplained", [])
    assert told(3.0, session=1, right=math.nan) == ("unmeasured", [])
    guesses["_guess_packings"].append(LossGuess(("edges",), 3.0))
    assert told(3.0, session=1)[0] == "ambiguous"
    guesses["two"] = [LossGuess(("bits",), 3.0)]
    assert told(3.0, session=1) == ("named", ["bits"])


def test_one_sample_may_stand_for_the_batch_the_first_or_the_last() -> None:
    picked = [np.array([1.0, 3.0]), np.array([7.0]), np.array([10.0, 20.0])]

    def alone(losses: Any) -> list[tuple[float, str]]:
        found = reported_loss._guess_group_reductions(losses)
        return [
            (one.value, one.detail)
            for one in found
            if one.mistakes == ("one_group",) and "of" not in one.detail
        ]

    assert alone(picked) == [(2.0, "the first sample"), (15.0, "the last sample")]
    assert alone([np.array([]), *picked]) == [(15.0, "the last sample")]
    assert alone([*picked, np.array([])]) == [(2.0, "the first sample")]
    assert alone(picked[:1]) == []


@pytest.mark.parametrize(
    ("labels", "first"), [([300], 300), ([0, 300], 300), ([300, 310], 300), ([1], 0), ([0, 1], 0)]
)
def test_windows_before_the_first_label_that_is_predicted_have_none(
    labels: list[int], first: int
) -> None:
    """No row predicts the first token, so that a label there is in no window's loss."""
    label = np.zeros((1, 512), bool)
    label[0, labels] = True
    batch: Any = SimpleNamespace(label=label, row_length=512)
    found = list(reported_loss._guess_empty_windows(batch, [np.ones(1)]))
    if not first:
        assert not found
        return
    (one,) = found
    assert math.isnan(one.value) and one.mistakes == ("no_labels",)
    assert one.detail == f"the first label is token {first}; a window of 300 or less has none"


# --- the sequences of a batch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padding", "start", "positions"),
    [(None, 2, None), ("attended", 0, None), ("counted", 2, [2, 3, 4])],
)
def test_padding_before_a_text_is_run_only_where_tokens_attend_to_it(
    padding: Padding | None, start: int, positions: list[int] | None
) -> None:
    """In both rows, of which the second is packed: its documents hold none of the padding."""
    ids = np.array([[9, 9, 1, 2, 3, -1], [9, 4, 5, 6, 7, -1]])
    label = np.zeros((2, 6), bool)
    label[0, 3:5] = label[1, 2] = label[1, 4] = True
    document = np.array([[0] * 5, [0, 0, 0, 1, 1]])
    batch = Batch(Path("b"), ids, label, ids[:, :5] != 9, 1, document=document)
    first, *packed = documents(batch, change=BackwardChange(padding=padding))
    labels = [-100] * (2 - start) + [2, 3, -100]
    assert (first.row, first.start, first.weight) == (0, start, 0.25)
    assert first.ids.tolist() == ids[0, start:5].tolist() and first.labels.tolist() == labels
    assert (None if first.positions is None else first.positions.tolist()) == positions
    told = [(one.start, one.ids.tolist(), one.labels.tolist()) for one in packed]
    assert told == [(1, [4, 5], [5, -100]), (3, [6, 7], [7, -100])]
