"""Bounds, sides and keys at which an answer turns, each asked from both sides of the turn."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import aprfmt
from aprfmt.arch.value_checks import same_value
from aprfmt.base.bounded_regex import matches_start
from aprfmt.base.protocols import TypedValue
from aprfmt.causes.tensor.explanation import _with_nonfinite
from aprfmt.causes.tensor.folded_factors import LayerTensors
from aprfmt.causes.tokenizer import special_ids, vocabulary_lists
from aprfmt.compare import _differing_hyperparameters
from aprfmt.tokenizer.hf_engine import HfEngine
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def demo_gguf(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    path = tmp_path_factory.mktemp("ids") / "demo.gguf"
    aprfmt.convert(demo_model, path, verify=False)
    return path


@pytest.mark.parametrize("role", ["bos", "eos", "padding"])
@pytest.mark.parametrize(("beyond", "outcome"), [(-1, "PASS"), (0, "FAIL"), (1, "FAIL")])
def test_a_special_id_is_that_of_a_token(
    role: str, beyond: int, outcome: str, demo_gguf: Path, tmp_path: Path
) -> None:
    with aprfmt.open(demo_gguf) as model:
        count = len(model.metadata["tokenizer.ggml.tokens"])
    key = f"tokenizer.ggml.{role}_token_id"
    metadata = {key: TypedValue(count + beyond, "uint32")}
    aprfmt.convert(demo_gguf, tmp_path / "x.gguf", metadata=metadata, verify=False)
    report = aprfmt.validate(tmp_path / "x.gguf")
    rows = {check.name: check.outcome for check in report.checks}
    assert rows["special_ids"] == outcome


PARTS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "normalizer": ({"type": "Lowercase"}, lambda engine: engine.encode("B", False, True) == [1]),
    "pre_tokenizer": (
        {"type": "Whitespace"}, lambda engine: engine.split_words("a b") == ["a", "b"]
    ),
    "post_processor": (
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
        },
        lambda engine: engine.encode("a", True, True) == [2, 0],
    ),
    "decoder": (
        {"type": "Replace", "pattern": {"String": "a"}, "content": "z"},
        lambda engine: engine.decode([0], True) == "z",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_a_tokenizer_is_taken_over(name: str) -> None:
    """No BOS stood before a text where the post-processor was lost."""
    part, seen = PARTS[name]
    data: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        **dict.fromkeys(PARTS), "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<s>": 2},
                                          "merges": []},
    }  # fmt: skip
    assert not seen(HfEngine.from_data(data, "here"))
    assert seen(HfEngine.from_data(data | {name: part}, "here"))


@pytest.mark.parametrize(
    ("changed", "alone", "rest", "slack", "confirmed"),
    [(3, 3, 0.0, 0.0, True), (9, 3, 0.5, 0.0, False), (9, 3, 0.5, 0.4, False),
     (9, 3, 0.4, 0.4, True), (9, 3, 0.3, 0.4, True)],
)  # fmt: skip
def test_nan_is_confirmed_where_all_other_values_are_equal(
    changed: int, alone: int, rest: float, slack: float, confirmed: bool
) -> None:
    odd = SimpleNamespace(alone=alone, side="B", text=lambda: "B has NaN at 0")
    before = SimpleNamespace(
        nonfinite=odd, changed=changed, rest=rest, relative=1.0, leaves_factor=lambda slack: False
    )
    case: Any = SimpleNamespace(before=before, key="w", slack=lambda: slack)
    found = _with_nonfinite(case, None)
    assert found is not None and (found.cause, found.confirmed) == ("nonfinite", confirmed)
    assert any("all other values are equal" in line for line in found.evidence) == confirmed


KEYS: Mapping[str, object] = {
    "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True,
    "head_dim": 8, "rope_theta": 77.0, "rms_norm_eps": 0.25, "partial_rotary_factor": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("key", ["rope_scaling", "rope_theta", "rms_norm_eps"])
def test_a_key_that_one_side_alone_has_is_compared_whichever_side_that_is(
    key: str, tmp_path: Path
) -> None:
    plain, more = (llama_folder(tmp_path / name, "BF16") for name in ("plain", "more"))
    config = json.loads((more / "config.json").read_text())
    config.pop("rope_parameters", None)
    without = {name: value for name, value in config.items() if name != key}
    plainly = without if key == "rope_scaling" else config
    (plain / "config.json").write_text(json.dumps(plainly))
    (more / "config.json").write_text(json.dumps(config | {key: KEYS[key]}))
    forth = aprfmt.diff(plain, more).hyperparameters
    back = aprfmt.diff(more, plain).hyperparameters
    assert forth and all(row.decisive for row in forth)
    assert {(row.name, str(row.a), str(row.b)) for row in forth} == {
        (row.name, str(row.b), str(row.a)) for row in back
    }


def side(scores: list[float] | None = None, **facts: Any) -> Any:
    tokens = [f"t{i}" for i in range(len(scores or ()))]
    vocabulary = SimpleNamespace(
        scores=scores,
        tokens=tokens,
        kind="spm",
        merges=None,
        ids={"bos": 1, "eos": 2},
        types=None,
        engine_ids={"bos": 1, "eos": 2},
    )
    return SimpleNamespace(vocabulary=vocabulary, uses_lists=True, framed_roles=None, **facts)


@pytest.mark.parametrize("base", [-0.5, -3.0, -2e5])
@pytest.mark.parametrize(("apart", "differs"), [(0.0, False), (5e-7, False), (4e-6, True),
                                                (1e-3, True)])  # fmt: skip
def test_scores_differ_beyond_float32(
    base: float, apart: float, differs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six digits are what a float32 has; ten thousand times that are other scores."""
    other = base + apart * max(1.0, abs(base))
    monkeypatch.setattr(
        vocabulary_lists, "_scores_by_piece",
        lambda one, _: dict(zip(one.vocabulary.tokens, one.vocabulary.scores, strict=True)),
    )  # fmt: skip
    monkeypatch.setattr(vocabulary_lists, "part_place", lambda one, name: ("here",))
    for mine, theirs in ((base, other), (other, base)):
        found = list(vocabulary_lists.score_difference(side([mine, -9.0]), side([theirs, -9.0])))
        assert bool(found) == differs
        if found:
            assert found[0].says.startswith("1 of 2 scores differ")


@pytest.mark.parametrize(("puts", "label"), [((True, False), "A"), ((False, True), "B")])
@pytest.mark.parametrize("writes", ["A", "B", "AB", ""])
def test_bos_twice_is_said_of_the_side_that_has_it_twice(
    puts: tuple[bool, bool], label: str, writes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(special_ids, "_defaults_text", lambda *args: "")
    monkeypatch.setattr(special_ids, "part_place", lambda one, name: ("here",))
    carried = SimpleNamespace(model=SimpleNamespace(key_style="gguf"))
    a, b = (
        side(
            frame=((1,) * begins, ()),
            carried=carried,
            template="{{ bos_token }}" if name in writes else "x",
        )
        for name, begins in zip("AB", puts, strict=True)
    )
    (found,) = special_ids.framing_differences(a, b)
    for name in "AB":
        twice = f"{name}'s chat template writes it too" in found.says
        assert twice == (name == label and name in writes)


@pytest.mark.parametrize(
    "repeats", ["", "(?:y?)*(?:y?)*(?:y?)*(?:y?)*"]
)  # Python's engine, and ours
@pytest.mark.parametrize(
    ("char", "inside"),
    [("`", False), ("a", True), ("b", True), ("c", True), ("d", False), ("1", False)],
)
def test_a_range_has_both_its_ends(repeats: str, char: str, inside: bool) -> None:
    assert matches_start(f"{repeats}[a-c]x", f"{char}x") == inside
    assert matches_start(f"{repeats}[^a-c]x", f"{char}x") != inside


class Hyper(dict[str, Any]):
    """As much of hyperparameters as comparing them asks."""

    def of(self, name: str) -> Any:
        return SimpleNamespace(value=self[name], origin="metadata", key=name)


def test_a_hyperparameter_that_one_side_alone_reads_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aprfmt.compare.misleading_keys", lambda model: {})

    def model(**values: Any) -> Any:
        spec = SimpleNamespace(name="llama", called={})
        return SimpleNamespace(spec=spec, key_style="hf", forced=None, hyper=Hyper(values))

    alignment: Any = SimpleNamespace(by_role=True)
    plain, more = model(n_layers=2), model(n_layers=2, rope_sections=[1, 2])
    (only_b,) = _differing_hyperparameters(plain, more, alignment, ())
    (only_a,) = _differing_hyperparameters(more, plain, alignment, ())
    assert (only_b.name, only_b.a, only_b.b) == ("rope_sections", None, [1, 2])
    assert (only_a.name, only_a.a, only_a.b) == ("rope_sections", [1, 2], None)
    assert only_a.decisive and only_b.decisive
    assert _differing_hyperparameters(more, more, alignment, ()) == ()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"factor": 4.0}, {"factor": 4.0}, True),
        ({"factor": 4.0}, {"factor": 4.0, "low_freq_factor": 1.0}, False),
        ({}, {"factor": 4.0}, False),
        ({"factor": 4.0}, {"factor": 4.0000001}, True),
        ({"factor": 4.0}, {"factor": 4.000002}, False),
        ([1, 2], [1, 2, 3], False),
        (True, 1, False),
    ],
)
def test_values_are_the_same_from_both_sides(a: Any, b: Any, same: bool) -> None:
    assert same_value(a, b) == same_value(b, a) == same


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_weight_with_nan_is_no_part_of_a_fold_however_often_it_is_asked_for(side: str) -> None:
    good, bad = np.ones(4, np.float32), np.array([1, np.nan, 1, 1], np.float32)

    def pair(a: Any, b: Any) -> Any:
        left, right = (SimpleNamespace(shape=x.shape, numpy=lambda x=x: x) for x in (a, b))
        return SimpleNamespace(a=left, b=right)

    odd = pair(bad, good) if side == "a" else pair(good, bad)
    pairs: Any = {"L0.up.weight": odd, "L0.down.weight": pair(good, good)}
    layer = LayerTensors(cast(Any, None), "L0.", pairs)
    assert [layer.has("up.weight") for _ in range(3)] == [False] * 3
    assert [layer.has("down.weight") for _ in range(3)] == [True] * 3
