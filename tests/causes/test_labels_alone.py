"""Ways in which labels of a batch count: the factors of each are those of the loss it names."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from aprfmt.causes.training import batch_labels
from aprfmt.inference.micro_batches import micro_batches

# Labels of four rows of six tokens; row 1 has none.
ROWS = np.array([0, 0, 0, 2, 2, 3])
COLUMNS = np.array([1, 2, 5, 3, 4, 5])
TOKENS = np.array([7, 8, 7, 9, 8, 7])
LOSS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
PARTS: Any = SimpleNamespace(rows=ROWS, columns=COLUMNS, tokens=TOKENS)
CASE: Any = SimpleNamespace(labels=[None] * 4, row_length=6)


def losses(ways: Any) -> dict[str, float]:
    """Return {sentence: loss} of ways of counting, as the mean over all labels gives it."""
    return {one.says: float((one.factors * LOSS).mean()) for one in ways}


def means(groups: Any) -> list[float]:
    return [float(LOSS[group].mean()) for group in groups if group.any()]


def test_labels_that_are_left_out_are_none_of_the_mean() -> None:
    """Divided by their number, or by that of all; where none or all are kept there is no way."""
    for kept in ([1, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 0]):
        mask = np.array(kept, bool)
        first, second = batch_labels._kept_only(PARTS, mask, "so")
        text = f"so: {6 - mask.sum()} of 6 labels are not in the gradient"
        assert (first.says, second.says) == (text, f"{text}, and the sum is divided by all")
        assert losses([first]) == {text: LOSS[mask].mean()}
        assert losses([second])[second.says] == LOSS[mask].sum() / 6
    for same in (True, False):
        assert not list(batch_labels._kept_only(PARTS, np.full(6, same), "so"))


def test_rows_and_tokens_that_are_left_out_are_named() -> None:
    cuts = {
        one.says.partition(":")[0].rpartition("after ")[2]: np.flatnonzero(one.factors).tolist()
        for one in batch_labels._rows_cut_short(PARTS)
    }
    assert cuts == {
        "2 tokens": [0],
        "3 tokens": [0, 1],
        "4 tokens": [0, 1, 3],
        "5 tokens": [0, 1, 3, 4],
    }
    gap: Any = SimpleNamespace(rows=ROWS, columns=np.where(COLUMNS > 3, COLUMNS + 2, COLUMNS))
    texts = [one.says for one in batch_labels._rows_cut_short(gap)]
    assert any(text.startswith("rows are cut after 4 to 6 tokens:") for text in texts)
    ends = {
        one.says.partition(":")[0]: np.flatnonzero(one.factors).tolist()
        for one in batch_labels._first_or_last(PARTS)
    }
    assert ends == {
        "the first label of each row is not scored": [1, 2, 4],
        "the last label of each row is not scored": [0, 1, 3],
        "only the last label of each row is scored": [2, 4, 5],
        "only the first label of each row is scored": [0, 3, 5],
    }
    unscored = {
        one.says.partition(":")[0]: np.flatnonzero(one.factors).tolist()
        for one in batch_labels._guess_unscored_token(PARTS)
    }
    assert unscored == {
        "token 7 is never scored": [1, 3, 4],
        "token 8 is never scored": [0, 2, 3, 5],
        "token 9 is never scored": [0, 1, 2, 4, 5],
    }


def test_means_of_parts_are_joined_by_the_parts_with_labels_or_by_all() -> None:
    found = losses(batch_labels._means_of_parts(CASE, PARTS))
    expected = {}
    for shares, size in ((2, 3), (4, 2)):  # six positions have no eight parts
        for ahead, where in ((1, "rows that predict"), (0, "labels")):
            groups = [(COLUMNS - ahead) // size == at for at in range(shares)]
            held = means(groups)
            says = f"the mean of the means of {shares} parts of the positions, by their {where}"
            expected[says] = sum(held) / len(held)
            if len(held) < shares:
                says += f", {shares - len(held)} of which have none"
                expected[says] = sum(held) / shares
    assert found.keys() == expected.keys()
    assert all(np.isclose(found[says], expected[says]) for says in found)


def test_means_of_samples_are_joined_or_added_or_one_is_there() -> None:
    """By the groups that have labels; where one group has them all, it is the usual mean."""
    found = list(batch_labels._means_of_rows(CASE, PARTS))
    expected: dict[str, float] = {}
    groups: list[tuple[str, Any]] = [
        ("samples, each by itself", [[row] for row in range(4)]),
        *micro_batches(4),
    ]
    for says, rows in groups:
        masks = [np.isin(ROWS, list(group)) for group in rows]
        held = means(masks)
        if len(held) > 1:
            expected[f"the mean of the means of {says}"] = sum(held) / len(held)
            expected[f"the sum of the means of {says}"] = sum(held)
    told = losses(one for one in found if one.cause == "micro_batch_means")
    assert told.keys() == expected.keys() and len(told) >= 6
    assert all(np.isclose(told[says], expected[says]) for says in told)
    ends = {
        one.says.partition(" is there")[0]: set(ROWS[one.factors != 0].tolist())
        for one in found
        if one.cause == "samples_left_out"
    }
    assert ends["only the first of samples, each by itself"] == {0}
    assert ends["only the last of samples, each by itself"] == {3}
    assert ends["only the last of micro-batches of 2 samples"] == {2, 3}
    assert ends["only the first of 2 ranks that get samples in turn"] == {0, 2}
    alone: Any = SimpleNamespace(rows=np.zeros(3, int))
    assert not list(batch_labels._means_of_rows(CASE, alone))


def test_two_weights_are_told_by_what_the_sum_is_divided_by() -> None:
    part = np.array([True, True, False, False, False, False])
    mean = (2 * 0.5 + 4) / 6
    for solved, says, factors in (
        ((2.0, 0.0), "so alone count, 2 times", (2.0, 0.0)),
        (
            (0.5 / mean, 1 / mean),
            "so count 0.5 times as much as the others, divided by the sum of the weights",
            (0.5 / mean, 1 / mean),
        ),
        (
            (0.5, 1.0),
            "so count 0.5 times as much as the others, divided by the number of labels",
            (0.5, 1.0),
        ),
        (
            (0.5 + 1e-6, 1.0),  # as somebody wrote it
            "so count 0.5 times as much as the others, divided by the number of labels",
            (0.5, 1.0),
        ),
        (
            (1.0 / 3, 1.0),  # no number of two digits
            "so count 0.333 times as much as the others, divided by the number of labels",
            (1.0 / 3, 1.0),
        ),
        ((3.0, 2.0), "so count 1.5 times as much as the others, which count 2 times", (3.0, 2.0)),
    ):
        found = batch_labels._two_weights(part, np.array(solved), "so")
        assert found.says == says and found.cause == "labels_weighted"
        assert np.allclose(found.factors, np.where(part, *factors), rtol=1e-12), solved


def test_weights_of_single_labels_are_two_or_their_own() -> None:
    def told(*solved: float) -> str:
        return batch_labels._label_weights(PARTS, np.array(solved)).says

    rest = "count 0 times as much as the others, which count 2 times"
    assert told(0, 2, 2, 0, 2, 2) == f"2 of 6 labels of their rows, the first, {rest}"
    assert told(2, 2, 0, 2, 0, 2) == f"2 of 6 labels of their rows, the last, {rest}"
    assert told(2, 0, 2, 2, 0, 2) == f"2 of 6 labels, {rest}"
    assert told(1, 2, 3, 4, 5, 6) == "labels count 1, 2, 3, 4, 5, 6 times"
