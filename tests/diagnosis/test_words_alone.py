"""Sentences and findings of a diagnosis, of facts made for them."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.arch.required_roles import collapse_roles
from aprfmt.causes import CAUSES
from aprfmt.causes.tokenizer import comparison
from aprfmt.codecs import compressed_scope
from aprfmt.diagnosis import model_comparison, packing_repairs, recorded_ids, tensors


def test_ids_are_those_that_were_given_and_those_of_the_other_trace() -> None:
    told = recorded_ids.id_mismatch_sentence
    for given in (None, [1, 2, 3]):
        assert told(given, {}) == told(given, {"A": [1, 2, 3]}) == ""
        assert told(given, {"A": [1, 2, 3], "B": (1, 2, 3)}) == ""
    for label in "AB":
        assert told([1, 2, 3], {label: [1, 9, 3]}) == (
            f"{label} was run on other token ids than those given "
            "(3 and 3 ids, the first difference at 1)"
        )
    assert "2 and 3 ids, the first difference at 2" in told([1, 2], {"A": [1, 2, 3]})
    assert told(None, {"A": [1, 2], "B": [7, 2, 3]}) == (
        "the traces are of other token ids: 2 and 3 ids, the first difference at 0"
    )
    assert told([1, 2], {"A": [1, 2], "B": [7, 2]}).startswith("B was run on other")


def test_a_part_is_wrong_by_its_shape_its_type_or_its_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def part(*shape: int, encoding: str = "F16") -> Any:
        return SimpleNamespace(shape=shape, encoding=encoding)

    bad = {"": ""}
    monkeypatch.setattr(packing_repairs, "bad_scale_text", lambda suffix, part, signed: bad[""])
    wrong = packing_repairs.wrong_part
    for one, other in (
        (part(4, 8), part(4, 8)),
        (part(4, 1, 8), part(4, 8)),
        (part(4), part(4, 1)),
    ):
        assert wrong("scales", one, other) is None
    cause, says = wrong("scales", part(8, 4), part(4, 8)) or ("", "")
    assert (cause, says) == ("scales_shape", "scales has shape [8, 4], transposed; expected [4, 8]")
    cause, says = wrong("scales", part(4, 16), part(4, 8)) or ("", "")
    assert (cause, says) == (
        "scales_shape",
        "scales has shape [4, 16], of groups of another size; expected [4, 8]",
    )
    typed = wrong("scales", part(4, 8, encoding="BF16"), part(4, 8))
    assert typed == ("packing_claim", "scales is BF16, expected F16")
    bad[""] = "scales holds NaN"
    assert wrong("scales", part(4, 8), part(4, 8)) == ("scales_invalid", "scales holds NaN")
    assert (wrong("scales", part(8, 4), part(4, 8)) or "")[0] == "scales_shape"


def test_a_relation_is_confirmed_where_most_tensors_are_then_on_both_sides() -> None:
    cause = next(name for name, row in CAUSES.items() if row.verdict == "bug")
    relation = SimpleNamespace(says="says", examples_text=", as x", where=("w",), remedy="mend")

    def found(*verdicts: str) -> Any:
        one = SimpleNamespace(side="b", cause=cause, relation=relation)
        report: Any = SimpleNamespace(
            relations=[one], tensors=[SimpleNamespace(verdict=verdict) for verdict in verdicts]
        )
        (made,) = model_comparison.relation_findings(report)
        return made

    both, a, b = "SAME_BYTES", "ONLY_IN_A", "ONLY_IN_B"
    for verdicts, share, sure in (
        ((both, both), 0.0, True),
        ((both, both, a), 1 / 3, True),
        ((both, a), 0.5, False),
        ((both, a, b), 2 / 3, False),
        ((), 0.0, True),
    ):
        one = found(*verdicts)
        assert one.residual_after == pytest.approx(share) and one.confirmed is sure
        assert (one.side, one.says, one.next) == ("B", "B: says, as x", "mend")
        assert one.where == ("w",) and one.cause == cause


def test_tensors_with_nan_on_one_side_come_first() -> None:
    def row(key: str, alone: bool | None) -> Any:
        odd = None
        if alone is not None:
            odd = SimpleNamespace(alone=alone, text=lambda: "NaN")
        return SimpleNamespace(key=key, stats=SimpleNamespace(nonfinite=odd))

    rows = [row("a", False), row("b", None), row("c", True), row("d", False), row("e", True)]
    told = list(tensors.nonfinite_tensors([*rows, SimpleNamespace(key="f", stats=None)]))  # type: ignore[list-item]
    assert [one.says for one in told] == ["c: NaN", "e: NaN", "a: NaN", "d: NaN"]
    assert [one.where for one in told] == [("c",), ("e",), ("a",), ("d",)]


def test_a_role_that_every_layer_lacks_is_named_once() -> None:
    every = [f"L{layer}.{role}" for layer in range(3) for role in ("q", "k")] + ["head"]
    assert collapse_roles([], every) == ()
    assert collapse_roles(["L0.q", "L1.q", "L2.q"], every) == ("q",)
    assert collapse_roles(["L0.q", "L2.q"], every) == ("L0.q", "L2.q")
    assert collapse_roles(["L0.q", "head", "L1.k", "L2.k", "L0.k"], every) == ("L0.q", "head", "k")
    assert collapse_roles(["L1.q"], ["L1.q", "L0.k"]) == ("q",)  # the layers that require it


def test_the_list_of_tokens_is_lost_on_one_side() -> None:
    def side(lacks: bool, tokens: int) -> Any:
        return SimpleNamespace(
            lacks_list=lacks, vocabulary=SimpleNamespace(tokens=list(range(tokens)))
        )

    for lacks in (False, True):
        assert not list(comparison._lost_lists(side(lacks, 3), side(lacks, 4)))
    (one,) = comparison._lost_lists(side(True, 3), side(False, 4))
    assert one.says.startswith("A has no tokenizer.ggml.tokens") and (one.a, one.b) == (None, 4)
    (one,) = comparison._lost_lists(side(False, 3), side(True, 4))
    assert one.says.startswith("B has no tokenizer.ggml.tokens") and (one.a, one.b) == (3, None)


def test_the_group_of_a_module_is_that_of_its_name_before_a_pattern_before_a_class() -> None:
    groups = {
        "classes": {"targets": ["Linear"]},
        "named": {"targets": ["model.layers.0.q_proj"]},
        "pattern": {"targets": ["re:.*q_proj"]},
    }
    at = compressed_scope._group_at
    assert at(groups, "model.layers.0.q_proj") == "named"
    assert at(groups, "model.layers.1.q_proj") == "pattern"
    assert at(groups, "model.layers.1.k_proj") == "classes"
    del groups["classes"]
    assert at(groups, "model.layers.1.k_proj") is None and at({}, "x") is None
