"""Counts, frames and bytes that a file states, against those that stand in it."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from aprfmt.checks.context import CheckContext
from aprfmt.checks.file import second_reader_child, stated_facts, vocabulary
from aprfmt.checks.records import CheckFinding, NotRun
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
    assert said((0, 1), (0, 0)) == ["0 '<a>' is put twice after every text"]
    assert said((2, 2), (3, 1, 1)) == [
        "2 is put twice before every text",
        "1 '<b>' is put twice after every text",
    ]
    for none in (None, FormatError("damaged")):
        assert vocabulary._find_repeated_frame(_Context(none)) == []  # type: ignore[arg-type]


def test_every_rule_of_special_ids_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that nothing stops only where nothing fails; no rule without ids or findings."""

    def asked(ids: Any, **found: Any) -> tuple[str, list[tuple[str, str, str]]]:
        def rule(name: str) -> Any:
            return found.get(name, [])

        config = found.get("config", {})
        carried = SimpleNamespace(
            where="m", token_ids=lambda: ids, parse_file=lambda name: found.get("generation", {})
        )
        for name in (
            "_find_stale_ids",
            "_find_empty_tokens",
            "_find_repeated_frame",
            "_find_wrong_ends",
            "_find_misnamed_roles",
            "_find_unstopped_turn",
        ):
            monkeypatch.setattr(vocabulary, name, lambda *_, name=name: rule(name))
        monkeypatch.setattr(vocabulary, "absent_ids", lambda of: rule("absent_ids"))
        monkeypatch.setattr(vocabulary, "_ids_are_numbers", lambda of: found.get("numbers", True))
        context: Any = SimpleNamespace(
            words=SimpleNamespace(tokens=["a", None, "c"]),
            carried=carried,
            model=SimpleNamespace(config=config),
        )
        result = vocabulary.check_ids(context)
        return result.found, [(one.where, one.found, one.level) for one in result.findings]

    absent = SimpleNamespace(says="no eos", todo="set it", level="fail")
    warned = CheckFinding("m", "x", "y", "z", "warning")
    failed = CheckFinding("m", "f", "y", "z", "fail")
    turn = CheckFinding("m", "turn", "y", "z", "warning")
    assert asked({"eos": 2}) == ("1 ids", [])
    for wrong in (1, 3):
        said = [("m: eos", f"id {wrong}", "fail")]
        assert asked({"eos": wrong, "bos": 0}) == ("2 ids", said)
    assert asked({"eos": 0}, absent_ids=[absent])[1] == [("m", "no eos", "fail")]
    assert asked({"eos": 0}, absent_ids=[absent], numbers=False)[1] == []
    assert asked({}, absent_ids=[absent]) == ("0 ids", [("m", "no eos", "fail")])
    for name in (
        "_find_stale_ids",
        "_find_empty_tokens",
        "_find_repeated_frame",
        "_find_wrong_ends",
        "_find_misnamed_roles",
    ):
        for one, more in ((warned, [turn]), (failed, [])):
            found = asked({"eos": 0}, _find_unstopped_turn=[turn], **{name: [one]})[1]
            assert found == [(each.where, each.found, each.level) for each in (one, *more)], name
    with pytest.raises(NotRun, match="state a special id"):
        asked({}, _find_unstopped_turn=[turn])
    here, there = "config.json: ", "generation_config.json: "
    for value, findings in (
        (2, []),
        ([0, 2], []),
        (None, []),
        (-1, [("eos_token_id", "-1", "warning")]),
        (-2, [("eos_token_id", "-2", "fail")]),
        ("2", [("eos_token_id", "'2'", "fail")]),
        (True, [("eos_token_id", "True", "fail")]),
        ([0, 3], [("eos_token_id", "id 3", "fail")]),
    ):
        for place, key in ((here, "config"), (there, "generation")):
            found = asked({"bos": 0}, **{key: {"eos_token_id": value}})[1]
            assert found == [(place + name, *rest) for name, *rest in findings], value
    assert asked({"bos": 0}, config={"pad_token_id": -1})[1] == []
    assert asked({}, config={"bos_token_id": 0, "pad_token_id": 2}) == ("2 ids", [])


class _Context:
    """A check's context whose tokenizer is this, or cannot be read."""

    def __init__(self, side: Any) -> None:
        self.side = side

    @property
    def stated(self) -> Any:
        if isinstance(self.side, Exception):
            raise self.side
        return self.side

    readable = CheckContext.readable


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
