"""Shards of a tensor-parallel checkpoint joined with one of them twice are one cause.

Seen red: rows named as wrong rows and as an offset, columns as a training.
"""

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


def answer(name: str, order: tuple[int, ...], words: tuple[str, ...]) -> Diagnosis:
    """Return what is said of the demo model whose parts are those of `order`."""

    def edit(rows: Rows) -> None:
        for key in [key for key in rows if any(word in key for word in words)]:
            dtype, shape, data = rows[key]
            values = np.frombuffer(data, np.uint16).reshape(shape)
            axis = 1 if any(word in key for word in COLUMNS) else 0
            parts = np.split(values, len(order), axis)
            joined = np.concatenate([parts[source] for source in order], axis)
            rows[key] = (dtype, shape, joined.tobytes())

    return diagnose(str(DEMO), str(files.copy(DEMO, f"shards-{name}", tensors=edit)))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 0), COLUMNS),
        ((0, 0), ("q_proj", "gate_proj", "up_proj")),
        ((0, 0), ROWS + COLUMNS),
        ((1, 1), ROWS + COLUMNS),
        ((0, 1, 1, 3), ("gate_proj", "up_proj", "o_proj", "down_proj")),
        ((0, 0), ("layers.1.self_attn.o_proj",)),
    ],
    ids=["columns", "rows", "all", "the-last", "of-four", "one"],
)
def test_a_shard_that_stands_twice_is_one_cause(
    order: tuple[int, ...], words: tuple[str, ...]
) -> None:
    found = answer(f"{''.join(map(str, order))}-{'-'.join(words)}", order, words)
    assert (found.kind, found.cause) == ("bug", "shard_order")
    seen = {(one.cause, one.certainty) for one in found.findings}
    assert seen == {("shard_order", "confirmed")}
    lost = next(iter(set(range(len(order))) - set(order)))
    assert f"nothing of rank {lost} is there" in found.sentence


@pytest.mark.parametrize(
    ("order", "words"),
    [((0, 0), ("k_proj",)), ((1, 0), ROWS + COLUMNS)],
    ids=["heads-of-one-kind", "exchanged"],
)
def test_what_no_shard_shows_is_not_called_one(
    order: tuple[int, ...], words: tuple[str, ...]
) -> None:
    found = answer(f"no-{''.join(map(str, order))}-{'-'.join(words)}", order, words)
    assert "joined twice" not in found.sentence
