"""Shards inside fused matrices: one twice, or in another rank's place, is one cause.

Seen red: rows of other tensors and two offsets confirmed for one shard that was joined twice; heads
in another order and an offset of the MLP's rows for two shards exchanged.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.files import Rows

QKV, GATE_UP = (64, 32, 32), (72, 72)  # rows of the parts of tiny Phi-3's fused matrices


def joined(x: Any, sizes: Sequence[int], order: tuple[int, ...], together: bool) -> Any:
    """Return fused rows joined of the shards `order`: each rank's together, or part by part."""
    parts = np.split(x, np.cumsum(sizes)[:-1])
    shards = [[part[at] for part in [np.split(p, len(order)) for p in parts]] for at in order]
    if not together:
        shards = [list(rows) for rows in zip(*shards, strict=True)]
    return np.concatenate([np.concatenate(rows) for rows in shards])


def answer(order: tuple[int, ...], together: bool, words: tuple[str, ...]) -> Diagnosis:
    """Return what is said of a model whose fused matrices were joined so."""
    good = tiny_folder("phi3")

    def edit(rows: Rows) -> None:
        for name in list(rows):
            for word, sizes in (("qkv_proj", QKV), ("gate_up", GATE_UP)):
                if word in name and word in words:
                    change = partial(joined, sizes=sizes, order=order, together=together)
                    files.edit(name, change)(rows)

    name = f"fused-{''.join(map(str, order))}-{together}-{'-'.join(words)}"
    return diagnose(str(good), str(files.copy(good, name, tensors=edit)))


BOTH = ("qkv_proj", "gate_up")


@pytest.mark.parametrize(
    ("order", "together", "words", "says"),
    [
        ((0, 0), True, BOTH, "nothing of rank 1 is there; of a fused matrix, each rank's rows tog"),
        ((1, 1), True, ("gate_up",), "nothing of rank 0 is there; of a fused matrix"),
        ((0, 0), True, ("qkv_proj",), "nothing of rank 1 is there; of a fused matrix"),
        ((1, 0), True, BOTH, "the 2 shards were joined in another order"),
        ((0, 0), False, BOTH, "one shard of 2 was joined twice"),
        ((1, 0), False, BOTH, "the 2 shards were joined in another order"),
        ((2, 3, 0, 1), True, ("gate_up",), "the 4 shards were joined in another order"),
    ],
)
def test_shards_of_fused_matrices_are_one_cause(
    order: tuple[int, ...], together: bool, words: tuple[str, ...], says: str
) -> None:
    found = answer(order, together, words)
    seen = {(one.cause, one.certainty) for one in found.findings}
    assert seen == {("shard_order", "confirmed")}, found.sentence
    assert len(found.findings) == 1 and says in found.sentence


@pytest.mark.parametrize("words", [BOTH, ("gate_up",), ("qkv_proj",)], ids="-".join)
def test_shards_in_order_are_another_order_of_the_rows(words: tuple[str, ...]) -> None:
    found = answer((0, 1), True, words)
    assert {one.cause for one in found.findings} == {"fused_order"}, found.sentence


def test_an_order_of_the_neurons_alone_is_not_called_one_of_shards() -> None:
    found = answer((1, 0), False, ("gate_up",))
    assert "shard_order" not in {one.cause for one in found.findings}, found.sentence
