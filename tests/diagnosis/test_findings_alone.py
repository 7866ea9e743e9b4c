"""Findings of a diagnosis and what a pass costs, each by itself."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt import diagnosis
from aprfmt.diagnosis import batch_sequences, model_comparison, paired_pass
from aprfmt.diagnosis.sides import Side
from aprfmt.model.resolve import ARCH_KEYS


def test_a_pass_from_a_stage_on_costs_its_layers_and_the_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paired_pass, "count_stages", lambda a, b: 6)
    monkeypatch.setattr(paired_pass, "multiplications_per_token", lambda a: 400.0)
    monkeypatch.setattr(paired_pass.PairedPass, "_make_blend", lambda self, parts: None)
    made: Any = SimpleNamespace(hyper={"n_layers": 4, "vocab_size": 10, "hidden_size": 3})
    pair: Any = None
    passes = paired_pass.PairedPass(made, made, frozenset(), pair, "float32", 1000)
    for start, layers in ((0, 4), (1, 4), (2, 3), (4, 1), (5, 0), (6, 0)):
        for rows, count in ((None, 5), ((4,), 1)):
            probe = paired_pass.Probe((1, 2, 3, 4, 5), rows)
            assert passes.pass_flops(probe, start) == 2.0 * (5 * 100 * layers + count * 30)
    assert passes.flops == 0 and passes.stages == 6


class Batch:
    """Dumps of several sequences; `sources` says whose rows each side has for its own."""

    def __init__(self, ids: Any, **sources: dict[Any, Any]) -> None:
        self.ids, self.sources = ids, sources
        self.traces = {"A": "trace A", "B": "trace B"}

    def others(self, label: str) -> list[Any]:
        held = self.sources.get(label, {})
        return [ids for ids in held if ids != self.ids]

    def source_of(self, given: str, ids: Any) -> Any:
        source = self.sources.get(given, {}).get(ids)
        return None if source is None else (source, [f"L0.q of {ids[0]}", "L0.k"])

    def trace(self, label: str, ids: Any) -> str:
        return f"{label}'s of {ids[0]}"


ONE, TWO, THREE, FOUR = ((each, 7) for each in range(1, 5))


@pytest.mark.parametrize("wrong", ["A", "B", ""])
def test_rows_of_another_sequence_are_said_with_where_their_own_are(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_sequences, "_departing_side", lambda batch, ids, dtype: wrong)
    monkeypatch.setattr(
        batch_sequences, "_with_values", lambda trace, source, keys: (trace, source, tuple(keys))
    )
    monkeypatch.setattr(batch_sequences, "sequence_name", lambda ids: f"<{ids[0]}>")

    def found(given: str, sources: dict[Any, Any], ids: Any = ONE) -> Any:
        batch: Any = Batch(ids, **{given: sources})
        return batch_sequences.rows_of_another_sequence(batch, "float32")

    for given, owner in (("B", "A"), ("A", "B")):
        assert found(given, {}) is None
        one = found(given, {ONE: TWO})
        says = one.finding.says
        assert says.startswith(
            f"{given}'s rows of the sequence <1> are those that {owner} has of the sequence <2>, "
            f"at all 2 points that differ; its own rows are not in {given}; "
        )
        assert says.endswith(
            f"; {wrong} is not what the model makes of these ids, the other side is"
            if wrong
            else "; which side is right is not known: no model that runs was given"
        )
        assert one.unfit and one.explained == {ONE} and one.finding.side == (wrong or given)
        assert one.traces == {"A": "trace A", "B": "trace B"}
        assert one.finding.values == {"ids": list(ONE), "rows_of": list(TWO)}
        swapped = found(given, {ONE: TWO, TWO: ONE})
        assert "; the two are exchanged; " in swapped.finding.says and not swapped.unfit
        side = wrong or given
        source = f"{given}'s of 2" if side == given else f"{owner}'s of 2"
        assert swapped.traces[side] == (f"trace {side}", source, ("L0.q of 1", "L0.k"))
        around = found(given, {ONE: TWO, TWO: THREE, THREE: ONE})
        assert "; its own are those of the sequence <3>, and 1 more sequences have another's" in (
            around.finding.says
        )
        side_source = f"{given}'s of 3" if side == given else f"{owner}'s of 2"
        assert around.traces[side][1] == side_source
        more = found(given, {ONE: TWO, THREE: FOUR, FOUR: THREE})
        assert "and 2 more sequences have another's rows" in more.finding.says and more.unfit
        other = found(given, {TWO: ONE, THREE: TWO}, FOUR)
        assert "the sequence <2>" in other.finding.says and not other.unfit


@pytest.mark.parametrize("style", ["gguf", "apr"])
def test_an_architecture_of_another_name_is_told_of_each_side(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name that the other side's own key has is the right one, where it is of one style."""
    key = ARCH_KEYS[style][0][1]
    monkeypatch.setattr(model_comparison, "stated_architecture", lambda model: model.stated)
    monkeypatch.setattr(model_comparison, "set_command", lambda path, words: f"set {path} {words}")

    def model(stated: str, name: str = "qwen2", called: str = "own", **more: Any) -> Any:
        held = {key: called if stated == name else stated}
        spec = SimpleNamespace(name=name, called={style: ("usual", "other"), "hf": ("Usual",)})
        made = SimpleNamespace(
            stated=stated, spec=spec, key_style=style, metadata=held, path=Path("m.gguf")
        )
        return SimpleNamespace(**vars(made) | more)

    def told(a: Any, b: Any) -> list[tuple[str, str, str]]:
        found = list(model_comparison._architecture_findings(a, b))
        for one in found:
            assert one.cause == "architecture_key" and one.where == (key,) and one.confirmed
            assert "are those of qwen2: other programs" in one.says
            assert one.values == {key: {"a": a.metadata.get(key), "b": b.metadata.get(key)}}
        return [(one.side, one.says.partition(", and")[0], one.next) for one in found]

    right, wrong, none = model("qwen2"), model("llama"), model("")
    assert told(right, right) == []
    said, bare = f"{key} says llama", f"{key} is not there"
    mended, usual = f"set m.gguf ['{key}=own']", f"set m.gguf ['{key}=usual']"
    assert told(right, wrong) == [("B", f"B: {said}", mended)]
    assert told(wrong, right) == [("A", f"A: {said}", mended)]
    assert told(right, none) == [("B", f"B: {bare}", mended)]
    assert told(wrong, none) == [("A", f"A: {said}", usual), ("B", f"B: {bare}", usual)]
    assert told(model("qwen3", "qwen3"), wrong) == [("B", f"B: {said}", usual)]
    assert told(model("qwen2", key_style="hf"), wrong) == [("B", f"B: {said}", usual)]


def test_b_is_walked_as_it_is_read_with_renamed_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[Any] = []

    class DiagnosisRun:
        def __init__(self, first: Any, second: Any, *more: Any) -> None:
            walked[:] = [first, second]

        def run(self) -> str:
            return f"relation {getattr(self, 'relation', None)}"

    models_of: dict[str, Any] = {text: SimpleNamespace(name=text) for text in "ab"}
    monkeypatch.setattr(
        diagnosis,
        "open_side",
        lambda label, text, stack, arch: Side(label, text, "model", Path(text), models_of[text]),
    )
    monkeypatch.setattr(diagnosis, "_open_state", lambda side, model: None)
    monkeypatch.setattr(diagnosis, "reopen_as_tower", lambda a, b, *more: (a, b))
    monkeypatch.setattr(diagnosis, "damage_texts", lambda model: [])
    monkeypatch.setattr(diagnosis, "DiagnosisRun", DiagnosisRun)
    read: Any = SimpleNamespace(name="b renamed")
    for renamed, model, relation in ((None, models_of["b"], None), ((read, "why"), read, "why")):
        monkeypatch.setattr(diagnosis, "_read_renamed", lambda *sides, found=renamed: found)
        result: Any = diagnosis.diagnose("a", "b")
        first, second = walked
        assert result == f"relation {relation}"
        assert first == Side("A", "a", "model", Path("a"), models_of["a"])
        assert second == replace(first, label="B", text="b", path=Path("b"), model=model)
