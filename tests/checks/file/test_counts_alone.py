"""Counts, frames and bytes that a file states, against those that stand in it."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from aprfmt.checks.file import second_reader_child, stated_facts, vocabulary
from aprfmt.checks.records import NotRun
from aprfmt.errors import FormatError


def counted(**metadata: Any) -> Any:
    """What is said of a model of two tensors whose metadata state this."""

    class Held(dict[str, Any]):
        pass

    model: Any = Held(a=SimpleNamespace(shape=(2, 3)), b=SimpleNamespace(shape=(4,)))
    info = [SimpleNamespace(info=SimpleNamespace(shape=shape)) for shape in ((2, 3), (4,))]
    model.source = SimpleNamespace(tensors=dict(enumerate(info)))
    model.metadata = metadata
    context: Any = SimpleNamespace(model=model, where="m.apr")
    return stated_facts.check_counts(context)


def test_counts_in_the_metadata_are_those_of_the_tensors() -> None:
    shapes = {"a": [2, 3], "b": [4]}
    for stated, statements in (
        ({"param_count": 10}, 1),
        ({"tensor_shapes": shapes}, 1),
        ({"tensor_shapes": {}}, 1),
        ({"param_count": 10, "tensor_shapes": shapes}, 2),
        ({"param_count": 0, "tensor_shapes": shapes}, 1),  # of an importer that streams
    ):
        found = counted(**stated)
        assert found.found == f"{statements} statements" and not found.findings
    for none in ({}, {"param_count": 0}, {"param_count": None, "tensor_shapes": None}):
        with pytest.raises(NotRun, match="states no counts"):
            counted(**none)
    (one,) = counted(param_count=11, tensor_shapes=shapes).findings
    assert (one.where, one.found, one.level) == ("m.apr: param_count", "11", "warning")
    assert one.expected == "10 elements"
    wrong, none = counted(tensor_shapes={"a": [3, 2], "b": [4], "c": [1]}).findings
    assert (wrong.where, wrong.found, wrong.expected) == (
        "m.apr: tensor_shapes 'a'",
        "[3, 2]",
        "[2, 3]",
    )
    assert (none.where, none.expected, none.level) == (
        "m.apr: tensor_shapes 'c'",
        "no such tensor",
        "warning",
    )


def test_an_id_that_is_put_twice_is_named_by_its_token_if_it_has_one() -> None:
    def said(before: Any, behind: Any) -> list[str]:
        side = SimpleNamespace(
            frame=(before, behind),
            vocabulary=SimpleNamespace(tokens=["<a>", "<b>"]),
            carried=SimpleNamespace(origin="t.json", where="m"),
        )
        return [
            one.found
            for one in vocabulary._find_repeated_frame(_Context(side))  # type: ignore[arg-type]
        ]

    assert said((0, 1), (1,)) == said((), ()) == said((0, 1, 0), (0,)) == []
    assert said((1, 1), ()) == ["1 '<b>' is put twice before every text"]
    assert said((0, 1), (0, 0)) == ["0 '<a>' is put twice behind every text"]
    assert said((2, 2), (3, 1, 1)) == [
        "2 is put twice before every text",
        "1 '<b>' is put twice behind every text",
    ]
    for none in (None, FormatError("damaged")):
        assert vocabulary._find_repeated_frame(_Context(none)) == []  # type: ignore[arg-type]


class _Context:
    """A check's context whose tokenizer is this, or cannot be read."""

    def __init__(self, side: Any) -> None:
        self.side = side

    @property
    def stated(self) -> Any:
        if isinstance(self.side, Exception):
            raise self.side
        return self.side


def test_a_second_reader_hashes_every_row_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "matrix": rng.normal(size=(7, 5)).astype(np.float32),
        "scalar": np.array(3.5),
        "vector": np.arange(9, dtype=np.int16),
        "empty": np.zeros((0, 4), np.float32),
        "deep": rng.normal(size=(3, 2, 2)).astype(np.float16),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    for window in (1, 80, 1 << 20):  # bytes of a band: one row, two rows, all
        monkeypatch.setattr(second_reader_child, "WINDOW", window)
        with safe_open(tmp_path / "m.safetensors", "np") as file:
            for name, values in tensors.items():
                found = second_reader_child._hash_tensor(file, name, file.get_slice(name))
                assert found == {
                    "nbytes": values.nbytes,
                    "offset": None,
                    "sha256": hashlib.sha256(values.tobytes()).hexdigest(),
                }, name
