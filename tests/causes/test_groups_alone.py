"""What is said of several tensors together, of facts made for it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes import contradicted_flags
from aprfmt.causes.forward import drafted_rows
from aprfmt.causes.tensor import (
    explanation,
    folded_factors,
    initial_values,
    overwritten_bytes,
    spread_rounding,
    summary,
)
from aprfmt.causes.tensor import table as tensor_table
from aprfmt.causes.tensor.initial_values import InitialNumbers
from aprfmt.causes.training import batch_samples, gradient_scale
from aprfmt.errors import FormatError


def test_fresh_numbers_are_told_by_kind_the_commonest_first() -> None:
    def drawn(key: str, text: str, usual: str = "") -> InitialNumbers:
        of = SimpleNamespace(size=0.02, name=usual) if usual else None
        numbers = SimpleNamespace(text=lambda size: f"{text}{'' if size is None else ' as usual'}")
        return InitialNumbers(key, "B", numbers, None, of, "")  # type: ignore[arg-type]

    def constant(key: str, value: float) -> InitialNumbers:
        return InitialNumbers(key, "B", None, value, None, "")

    def told(*found: InitialNumbers) -> str:
        begin, _, said = initial_values._sentence("B", found).partition(": ")
        assert begin.startswith("B was never trained or loaded here")
        return said

    q, k = (drawn(f"L0.attn_{part}.weight", "normal") for part in "qk")
    even = drawn("L0.up.weight", "even", "Linear's own")
    assert told(q) == told(q, k) == "normal"
    assert told(even) == "even as usual (Linear's own)"
    assert told(even, q, k) == "normal in 2 tensors, even as usual (Linear's own) in 1 tensor"
    kinds = [drawn("x.weight", letter) for letter in "aabbcdde"]
    assert told(*kinds) == "a in 2 tensors, b in 2 tensors, d in 2 tensors, others in 2"
    three = [drawn("x.weight", letter) for letter in "abc"]
    assert told(*three) == "a in 1 tensor, b in 1 tensor, c in 1 tensor"
    assert told(q, constant("a.bias", 0.0)) == "normal, biases of 0"
    assert told(constant("n.weight", 1.0), constant("a.bias", 0.0)) == "biases of 0, norms of 1"
    own = "; transformers' own gives {}"
    assert told(drawn("a.bias", "normal")) == f"normal{own.format('0 to a bias')}"
    assert told(drawn("attn_norm.weight", "normal")) == f"normal{own.format('1 to a norm')}"
    both = told(drawn("a.bias", "normal"), drawn("attn_norm.weight", "normal"))
    assert both == f"normal{own.format('0 to a bias and 1 to a norm')}"
    assert told(drawn("attn_norm.bias", "normal")) == f"normal{own.format('0 to a bias')}"


def test_damage_of_single_values_is_rounding_where_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped: list[str] = []
    left: list[Any] = []
    context: Any = SimpleNamespace(record_not_tried=lambda *given: left.append(given))
    monkeypatch.setattr(spread_rounding, "accused_proof", lambda count: None)
    monkeypatch.setattr(spread_rounding, "make_finding", lambda cause, keys, *more: (cause, keys))

    def pair(context: Any, key: Any) -> Any:
        if key.what == "unread":
            raise FormatError("gone")
        before = SimpleNamespace(relative=1e-9)
        return None if key.what == "packed" else SimpleNamespace(what=key.what, before=before)

    monkeypatch.setattr(spread_rounding, "_pair_of_floats", pair)
    monkeypatch.setattr(
        spread_rounding, "all_within_last_place", lambda case, largest: case.what == "near"
    )

    def told(*rows: tuple[str, str]) -> list[str]:
        dropped.clear()
        left.clear()
        pairs: Any = {
            f"t{at}": SimpleNamespace(what=what, drop=lambda at=at: dropped.append(f"t{at}"))
            for at, (_, what) in enumerate(rows)
        }
        held: Any = {
            f"t{at}": SimpleNamespace(explanation=SimpleNamespace(cause=cause) if cause else None)
            for at, (cause, _) in enumerate(rows)
        }
        found: Any = spread_rounding._explain_rounded(context, pairs, held)
        assert all(one == ("rounding", (key,)) for key, one in found.items())
        return list(found)

    near, rounded = ("bit_rot", "near"), ("rounding", "")
    assert told(near, rounded, rounded, rounded) == ["t0"] and dropped == ["t0"]
    assert told(near, near, near, near) == ["t0", "t1", "t2", "t3"]
    assert told(near, rounded) == ["t0"] and told(near) == [] == dropped
    assert told(near, ("scale", ""), ("", "")) == []
    for other in ("far", "packed", "unread"):
        wrong = ("bit_rot", other)
        assert told(wrong, near, rounded, rounded, rounded) == ["t1"]
        assert dropped == ["t0", "t1"]
        assert [row[:2] for row in left] == [(("rounding",), "t0")] * (other == "unread")
        assert told(wrong, near) == []


def test_a_hypothesis_that_cannot_be_tried_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[Any] = []
    context: Any = SimpleNamespace(record_not_tried=lambda *given: left.append(given[:2]))
    error = FormatError("gone")

    def refused() -> Any:
        raise error

    sure, unsure = (SimpleNamespace(cause=c, confirmed=c == "sure") for c in ("sure", "unsure"))
    joint = [
        SimpleNamespace(causes=("first",), is_for=lambda context, rows: True, groups=[refused]),
        SimpleNamespace(causes=("none",), is_for=lambda context, rows: False, groups=[refused]),
        SimpleNamespace(
            causes=("second",),
            is_for=lambda context, rows: True,
            groups=[lambda: {"a": sure, "b": unsure}, refused],
        ),
    ]
    monkeypatch.setattr(tensor_table, "JOINT", joint)
    monkeypatch.setattr(explanation, "_groups_of_hypothesis", lambda one, *given: one.groups)
    monkeypatch.setattr(
        explanation, "replace", lambda row, **values: SimpleNamespace(**vars(row) | values)
    )
    rows: Any = [SimpleNamespace(key=key, cause="old", explanation=None) for key in "abc"]
    made: Any = explanation._explain_together(context, [], rows)
    assert [(row.key, row.cause) for row in made] == [("a", "sure"), ("b", "old"), ("c", "old")]
    assert [row.explanation for row in made] == [sure, unsure, None]
    assert left == [(("first",), ""), (("second",), "")]


def test_bytes_of_unknown_origin_are_damage_over_pages_or_where_no_weight_is_so_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.linspace(-1, 1, 32).reshape(4, 8)

    def sure(
        even: int, start: int, stop: int, value: float = 0.5, columns: int = 8, row: int | None = 32
    ) -> bool:
        y = x.copy()
        y[1, 3] = value
        monkeypatch.setattr(overwritten_bytes, "range_in_file", lambda *given: (0, 0, 0))
        monkeypatch.setattr(overwritten_bytes, "common_alignment", lambda *given: even)
        raw = object()
        case: Any = SimpleNamespace(
            a=SimpleNamespace(take=lambda rows: x[rows]),
            b=SimpleNamespace(bytes=raw, row_bytes=row, columns=columns, take=lambda rows: y[rows]),
        )
        span: Any = SimpleNamespace(start=start, stop=stop)
        assert not overwritten_bytes._is_surely_damage(case, span, object())  # type: ignore[arg-type]
        found: bool = overwritten_bytes._is_surely_damage(case, span, raw)  # type: ignore[arg-type]
        return found

    for start, stop, pages in ((32, 64, False), (33, 64, True), (32, 63, True), (33, 63, True)):
        assert sure(512, start, stop) is pages and not sure(511, start, stop)
    most = overwritten_bytes.WILD * np.abs(x[1]).max()
    for value, wild in (
        (most * 1.01, True),
        (-most * 1.01, True),
        (most * 0.99, False),
        (np.nan, True),
        (np.inf, True),
    ):
        assert sure(1, 32, 64, value) is wild
        assert not sure(1, 64, 96, value)  # rows beside it
        assert sure(1, 63, 65, value) is wild and sure(1, 32, 33, value) is wild
        assert not sure(1, 32, 64, value, columns=1) and not sure(1, 32, 64, value, row=None)


def test_what_reads_a_norm_follows_from_the_norms_that_there_are() -> None:
    def readers(
        *names: str, start: str = "L0.", placement: str = "pre", tied: bool = False
    ) -> dict[str, tuple[str, ...]]:
        model = SimpleNamespace(
            hyper={"tied_embeddings": tied},
            spec=SimpleNamespace(block=SimpleNamespace(placement=placement)),
        )
        layer: Any = SimpleNamespace(
            start=start, pairs=dict.fromkeys(names, 1), context=SimpleNamespace(models={"a": model})
        )
        return dict(folded_factors._norm_readers(layer))

    usual = dict(folded_factors.READERS)
    assert readers("L0.ffn_norm.weight") == usual
    parallel = usual | {"attn_norm": (*usual["attn_norm"], *folded_factors.MLP)}
    assert readers() == readers("L1.ffn_norm.weight") == parallel
    assert readers("L0.ffn_norm.weight", placement="post") == {}
    head = {"output_norm": usual["output_norm"]}
    assert readers("output.weight", start="") == head
    assert readers("output.weight", start="", placement="post") == head
    assert readers(start="") == readers("output.weight", start="", tied=True) == {}


def test_flags_that_the_other_copy_contradicts_alike_are_none_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(name: str, said: bool) -> Any:
        return SimpleNamespace(name=name, said=said)

    def told(mine: list[Any], theirs: list[Any], own_head: bool = False) -> list[Any]:
        held = {"mine": mine, "theirs": theirs}
        monkeypatch.setattr(contradicted_flags, "contradictions", lambda model: held[model])
        monkeypatch.setattr(contradicted_flags, "has_own_head", lambda model: own_head)
        found = contradicted_flags.unshared_contradictions("mine", "theirs")  # type: ignore[arg-type]
        return [(one.name, one.said) for one in found]

    untied, tied, bias = ("tied_embeddings", False), ("tied_embeddings", True), ("qkv_bias", False)
    every = [row(*each) for each in (untied, tied, bias)]
    assert told(every, []) == [untied, tied, bias] and told(every, every) == []
    assert told(every, [row("qkv_bias", True)]) == [untied, tied, bias]
    assert told(every, [row(*bias)]) == [untied, tied]
    assert told(every, [], own_head=True) == [tied, bias]  # a lost head: the flag is right


def test_factors_of_gradients_that_may_be_one_number_are_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The factor that most gradients have comes first, whatever its own size or place."""
    monkeypatch.setattr(gradient_scale, "factor_guess", lambda mean, room, counts: round(mean, 6))

    def joined(**factors: tuple[float, float]) -> list[tuple[Any, Any]]:
        return gradient_scale.joined_factors(factors, {})

    near = {name: (2.0, 0.01) for name in "bcd"}
    assert joined(a=(0.5, 1e-4), **near) == [(2.0, tuple("bcd")), (0.5, ("a",))]
    assert joined(**near, z=(0.5, 1e-4), y=(0.5, 1e-4)) == [(2.0, tuple("bcd")), (0.5, ("z", "y"))]
    assert joined(a=(1.0, 0.1), b=(1.25, 0.2)) == [(1.0, ("a", "b"))]
    assert joined(a=(1.0, 0.1), b=(1.5, 0.2)) == [(1.0, ("a",)), (1.5, ("b",))]
    three = joined(a=(1.0, 0.1), b=(1.1, 0.2), c=(1.2, 0.2))
    assert three[0][1] == ("a", "c", "b") and three[0][0] == pytest.approx(1.02, abs=1e-3)
    assert joined() == []


def test_the_first_confirmed_hypothesis_is_the_answer_and_else_a_likely_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of likely ones one with a guess goes first; passes over whole tensors are counted."""

    class Told(SimpleNamespace):
        pass

    monkeypatch.setattr(explanation, "Finding", Told)
    passes: list[str] = []
    left: list[Any] = []

    def guess(name: str, outcome: str, on_sample: bool = True) -> Any:
        return SimpleNamespace(name=name, cause=name, outcome=outcome, on_sample=on_sample)

    def confirm(case: Any, one: Any, shapes: bool) -> Any:
        passes.append(one.name)
        if one.outcome == "error":
            raise FormatError("gone")
        return None if one.outcome == "no" else Told(confirmed=one.outcome == "yes", name=one.name)

    monkeypatch.setattr(explanation, "_confirm_guess", confirm)

    def best(*guesses: Any) -> Any:
        passes.clear()
        left.clear()
        context = SimpleNamespace(record_not_tried=lambda causes, key, error: left.append(causes))
        case: Any = SimpleNamespace(
            context=context, key="t", holds_on_sample=lambda one: one.on_sample
        )
        monkeypatch.setattr(explanation, "_guesses_of_table", lambda *given: iter(guesses))
        found: Any = explanation._best_hypothesis(case)
        return found and (found[0].name, found[1] and found[1].name)

    own, likely = Told(confirmed=True, name="own"), Told(confirmed=False, name="likely")
    other = Told(confirmed=False, name="other")
    assert best() is None and best(guess("a", "no"), guess("b", "yes", on_sample=False)) is None
    assert best(guess("a", "yes"), own) == ("a", "a") and best(own, guess("a", "yes")) == (
        "own",
        None,
    )
    assert best(likely, own) == ("own", None) and best(likely, other) == ("likely", None)
    assert best(likely, guess("a", "maybe")) == ("a", "a")
    assert best(likely, guess("a", "no")) == ("likely", None)
    assert best(guess("a", "maybe"), likely) == ("a", "a")
    assert best(guess("a", "maybe"), guess("b", "maybe")) == ("a", "a")
    assert best(guess("a", "maybe"), guess("b", "yes")) == ("b", "b")
    assert best(guess("a", "error"), guess("b", "yes")) == ("b", "b") and left == [("a",)]
    most = explanation.TRIED
    wrong = [guess(f"g{at}", "no") for at in range(most)]
    skipped = [guess(f"s{at}", "yes", on_sample=False) for at in range(3)]
    assert best(*skipped, *wrong[:-1], guess("a", "yes")) == ("a", "a") and len(passes) == most
    assert best(*wrong, guess("a", "yes"), likely) == ("likely", None) and len(passes) == most


def test_a_tensor_agrees_by_its_verdict_or_as_one_that_was_quantized() -> None:
    def agrees(verdict: str, cause: str = "", certainty: str = "confirmed") -> bool:
        told = SimpleNamespace(cause=cause, certainty=certainty) if cause else None
        tensor: Any = SimpleNamespace(verdict=verdict, explanation=told)
        return summary._have_same_values(tensor)

    for verdict, alone in (
        ("SAME_BYTES", True),
        ("SAME_VALUES", True),
        ("WITHIN", True),
        ("DIFFERENT", False),
    ):
        assert agrees(verdict) is alone
        equal = verdict.startswith("SAME")
        for certainty in ("confirmed", "likely", "located"):
            assert agrees(verdict, "quantisation", certainty) is (equal or certainty != "located")
            assert agrees(verdict, "scale", certainty) is equal


def test_dropout_is_guessed_where_hardly_a_gradient_agrees() -> None:
    layers = [f"L{layer}.attn_q.weight" for layer in range(4)]

    def guessed(right: int, dropout: dict[str, float], *, last: bool = True) -> list[str]:
        wrong = {"output.weight", *layers[right:]}
        held = {*layers[:right]}
        if not last:
            wrong, held = wrong - {"output.weight"}, held | {"output.weight"}
        case: Any = SimpleNamespace(
            dropout=dropout, wrong=wrong, open=set(), missing=set(), right=held
        )
        return [one.says for one in batch_samples.guess_dropout(case)]

    both = {"attention_dropout": 0.1, "hidden_dropout": 0.2}
    (says,) = guessed(0, both)
    assert "hidden_dropout is 0.2" in says
    assert len(guessed(0, {"attention_dropout": 0.1})) == 1
    assert guessed(1, both) and not guessed(2, both) and not guessed(0, {})
    assert not guessed(0, both, last=False)  # the first gradient after the loss agrees


def test_rows_of_tokens_that_are_not_there_are_told_with_their_places() -> None:
    def told(slots: dict[int, int], **more: bool) -> Any:
        return drafted_rows.drafted_rows_change(slots, 6, **more)

    one, two = told({4: 17}), told({4: 17, 5: 9}, added=True, rest=True)
    assert "the cached row of a token that is not there: id 17 at position 4, as" in one.says
    assert one.says.endswith("padding") and one.values == {"tokens": {"4": 17}, "since": 6}
    assert "the cached rows of tokens that are not there: id 17 at position 4, 9 at" in two.says
    assert two.says.endswith("in addition to the tokens' own; the rows up to 5 saw it")
    assert two.values == {"tokens": {"4": 17, "5": 9}, "since": 6, "beside": 1}
    assert told({4: 17}, added=True).says.endswith(", in addition to the tokens' own")
    assert told({4: 17}, rest=True).says.endswith("padding; the rows up to 5 saw it")
