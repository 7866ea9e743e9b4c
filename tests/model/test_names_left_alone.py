"""What is missing, other or over in a model's names, ids, ranks and children, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.arch import draft_head, required_roles
from aprfmt.causes.tensor import adapter_deltas
from aprfmt.checks.file import vocabulary
from aprfmt.errors import ArchError, FormatError
from aprfmt.model import engine_state, relation_search
from aprfmt.tokenizer import isolated
from aprfmt.tokenizer.limits import WALL_SECONDS


def test_the_shape_of_a_missing_name_is_known_where_it_holds_one_role(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups: dict[str, Any] = {
        "one": [(("one.weight",), 1)],
        "joined": [(("qkv.weight",), 3)],
        "split": [(("up.0", "up.1"), 1)],
        "both": [(("a.0", "a.1"), 2), (("b",), 1)],
    }

    def stored(spec: Any, style: str, keys: list[str], hyper: Any) -> Any:
        (key,) = keys
        if key == "unknown":
            raise ArchError("no such role")
        return [
            SimpleNamespace(stored=names, roles=tuple(range(count)))
            for names, count in groups.get(key, ())
        ]

    monkeypatch.setattr(relation_search, "_missing_roles", lambda found: ["unknown", *groups])
    monkeypatch.setattr(draft_head, "stored_groups", stored)
    monkeypatch.setattr(required_roles, "logical_shape", lambda spec, key, hyper: [len(key), 2])
    found: Any = SimpleNamespace(hyper={})
    spec: Any = None
    assert relation_search._missing_names(found, spec, "hf") == {
        "one.weight": (3, 2),
        "qkv.weight": None,
        "up.0": None,
        "up.1": None,
        "a.0": None,
        "a.1": None,
        "b": (4, 2),
    }


def test_ranks_are_missing_where_most_misfits_are_shares_of_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        engine_state, "find_layout", lambda parameter, shape, ranks: ranks in parameter.fits
    )

    def refused(*fits: tuple[int, ...], held: int = 1) -> str:
        misfits: Any = {
            f"name {at}": (
                SimpleNamespace(fits=each, shape=(8, 4)),
                SimpleNamespace(name=f"w{at}", shape=(2, 4)),
            )
            for at, each in enumerate(fits)
        }
        reader: Any = SimpleNamespace(
            _misfits=misfits,
            _held={"x": SimpleNamespace(parts=[1] * held), "y": SimpleNamespace(parts=[1])},
            _path="state",
        )
        try:
            engine_state._StateReader.refuse_missing_ranks(reader)
        except FormatError as error:
            return str(error)
        return ""

    assert refused((4,), (4,), (4,)) == (
        "state: holds 1 of 4 ranks: 3 tensors are a rank's share of it, such as w0 [2, 4] of "
        "[8, 4]; give the folder with the files of all ranks"
    )
    assert not refused((4,), (4,)) and not refused((4,), (4,), ()) and not refused(*[()] * 5)
    assert refused((), (4,), (4,), (4,), ()).endswith("of all ranks") and "as w1 [2" in refused(
        (), (4,), (4,), (4,), ()
    )
    assert not refused((4,), (4,), (4,), (), (), ())  # half of them
    assert "of 2 ranks: 4 t" in refused((2, 4), (2, 4), (2,), (2, 4))
    assert "holds 2 of 4 ranks: 3 t" in refused((2, 4), (2, 4), (2,), (2, 4), held=2)
    assert not refused((2,), (2,), (2,), held=2)


def test_adapters_of_two_spellings_have_no_changes_to_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_deltas, "adapter_of_model", lambda model, compare: model.adapter)
    monkeypatch.setattr(adapter_deltas, "_delta_rows", lambda a, b: ())
    monkeypatch.setattr(adapter_deltas, "diffusion_names", lambda model: {})

    def compared(first: str, second: str, *kinds: Any) -> Any:
        a, b = (
            SimpleNamespace(
                kind=kind if kind is None else SimpleNamespace(name=kind),
                adapter=SimpleNamespace(spelling=spelling, pairs={}, config={}, alpha=None),
                path=spelling,
            )
            for spelling, kind in zip((first, second), kinds or ("adapter", "adapter"), strict=True)
        )
        models: tuple[Any, Any] = (a, b)
        return adapter_deltas.compare_deltas(*models)

    assert compared("peft", "peft") is not None and compared("gguf", "gguf") is not None
    assert compared("peft", "gguf") is None and compared("gguf", "peft") is None
    for kinds in ((None, "adapter"), ("adapter", None), ("adapter", "model"), (None, None)):
        assert compared("peft", "peft", *kinds) is None


def test_ids_are_numbers_unless_reading_them_says_otherwise() -> None:
    def refuse() -> Any:
        raise FormatError("expected a token id")

    for read, numbers in ((dict, True), (refuse, False)):
        carried: Any = SimpleNamespace(token_ids=read)
        assert vocabulary._ids_are_numbers(carried) is numbers


def test_a_child_that_answered_or_ended_is_not_killed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, kill: Any) -> None:
            self.steps = [seconds, kill]
            timers.append(self)

        def start(self) -> None:
            self.steps.append("started")

        def cancel(self) -> None:
            self.steps.append("cancelled")

    monkeypatch.setattr(isolated, "Timer", Timer)
    engine = isolated.IsolatedEngine(
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "t", "why"
    )
    assert engine.encode("a", False, False) is not None
    engine._child.stdin.close()  # type: ignore[union-attr]
    with pytest.raises(FormatError, match="the tokenizer needs more than"):
        engine.encode("text", False, False)
    assert len(timers) == 3
    for timer in timers:
        assert timer.steps == [WALL_SECONDS, engine._child.kill, "started", "cancelled"]
