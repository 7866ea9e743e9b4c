"""Sentences about parts of a model or an adapter, and names of keys, at each count."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.arch.rope_gguf import FREQS, LONG, SHORT, lost_divisors_text, stored_scaling_name
from aprfmt.arch.spec import Facts
from aprfmt.cli.eval.batch import mistake_sentence
from aprfmt.inference.reported_loss import MISTAKES, LossGuess, LossVerdict, guessing_text
from aprfmt.model import renames
from aprfmt.model.zero_pairs import _SHOWN, ZeroPairs

# --- pairs that change nothing ------------------------------------------------------------------

B_ZERO, A_ZERO = "lora_B is zero", "lora_A is zero"


def pairs(
    zero: dict[str, str],
    count: int = 3,
    whole: int = 0,
    lengths: tuple[str, ...] = (),
    emptied: tuple[str, ...] = (),
    noun: str = "pairs",
) -> ZeroPairs:
    return ZeroPairs(zero, lengths, emptied, count, whole, noun)


ALL = {"p": B_ZERO, "q": B_ZERO, "r": B_ZERO}
CASES = {
    "none": (pairs({}), ""),
    "all": (pairs(ALL), f"the adapter changes nothing: every {B_ZERO}"),
    "all but other tensors": (
        pairs(ALL, whole=1), f"its pairs change nothing: every {B_ZERO}"),
    "all, two reasons": (
        pairs({**ALL, "r": A_ZERO}), f"the adapter changes nothing: {B_ZERO} or {A_ZERO}"),
    "some": (
        pairs({"q": B_ZERO, "p": A_ZERO}),
        f"2 of 3 pairs change nothing: {B_ZERO} or {A_ZERO} (q, p)"),
    "vectors": (
        pairs({"q": "is one"}, noun="vectors"), "1 of 3 vectors change nothing: is one (q)"),
    "lengths": (
        pairs({}, lengths=("p", "q")),
        "2 of 3 pairs change nothing but the rows' lengths, by DoRA's magnitudes: the product is "
        "zero (p, q)"),
    "emptied": (
        pairs({}, emptied=("r",)),
        "1 of 3 pairs make their weight zero: DoRA's magnitudes are zero (r)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pairs_that_change_nothing_are_counted(case: str) -> None:
    found, says = CASES[case]
    assert found.text == says
    wanted = "vectors that are not one" if case == "vectors" else "pairs whose product is not zero"
    assert found.expected == wanted


def test_reasons_and_lengths_are_said_together() -> None:
    found = pairs({"p": B_ZERO}, lengths=("q",), emptied=("r",)).text
    assert [part.partition(" ")[0] for part in found.split("; ")] == ["1", "1", "1"]


@pytest.mark.parametrize("more", [0, 1, 2])
def test_of_many_modules_the_first_are_named(more: int) -> None:
    names = [f"m{i}" for i in range(_SHOWN + more)]
    found = pairs(dict.fromkeys(names, B_ZERO), count=99).text
    shown = ", ".join(names[:_SHOWN]) + (f", ... {more} more" if more else "")
    assert found == f"{len(names)} of 99 pairs change nothing: {B_ZERO} ({shown})"


# --- scalings of rope ---------------------------------------------------------------------------

KEYS = {
    ("llama3", "factor"): FREQS, ("proportional", "factor"): FREQS,
    ("yarn", "factor"): "a.rope.scaling.factor", ("yarn", "truncate"): "",
    ("yarn", "attention_factor"): "a.rope.scaling.attn_factor",
    ("yarn", "mscale"): "a.rope.scaling.yarn_log_multiplier",
    ("longrope", "attention_factor"): "a.rope.scaling.attn_factor",
    ("longrope", "long_factor"): LONG, ("longrope", "short_factor"): SHORT,
    ("linear", "factors"): FREQS, ("linear", "attention_factor"): "a.rope.scaling.attention_factor",
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_a_value_of_a_scaling_has_its_place_in_a_gguf(case: tuple[str, str]) -> None:
    assert stored_scaling_name(*case, "a") == KEYS[case]


TYPE, FACTOR = "a.rope.scaling.type", "a.rope.scaling.attn_factor"
ENDS = ", which longrope needs: nothing is scaled without"
LOST: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({}, (), ""),
    ({}, (LONG, SHORT), ""),
    ({TYPE: "longrope"}, (LONG, SHORT), ""),
    ({TYPE: "yarn"}, (), ""),
    ({TYPE: "longrope"}, (), f"{TYPE} is longrope, and there is no {LONG} and no {SHORT}{ENDS}"),
    ({TYPE: "longrope"}, (LONG,), f"{TYPE} is longrope, and there is no {SHORT}{ENDS}"),
    ({FACTOR: 1.2}, (), f"{FACTOR} is 1.2, and there is no {LONG} and no {SHORT}{ENDS}"),
    ({TYPE: "yarn", FACTOR: 1.2}, (), ""),
    ({TYPE: "yarn", FACTOR: 1.2}, (SHORT,), f"there is a {SHORT}, and there is no {LONG}{ENDS}"),
    ({TYPE: "linear", FACTOR: 1.2}, (SHORT,), f"{FACTOR} is 1.2, and there is no {LONG}{ENDS}"),
    ({}, (LONG,), f"there is a {LONG}, and there is no {SHORT}{ENDS}"),
    ({}, (SHORT,), f"there is a {SHORT}, and there is no {LONG}{ENDS}"),
]


@pytest.mark.parametrize(("values", "tensors", "says"), LOST)
def test_lost_divisors_are_said(values: Any, tensors: tuple[str, ...], says: str) -> None:
    held = dict.fromkeys(tensors, SimpleNamespace())
    assert lost_divisors_text(Facts("gguf", values, {}, "a", held)) == says
    assert lost_divisors_text(Facts("hf", values, {}, "a", held)) == ""


# --- mistakes of a reported loss ----------------------------------------------------------------

ONE, TWO, *_ = MISTAKES


def verdict(says: Any, *guesses: LossGuess) -> str:
    return mistake_sentence(LossVerdict(says, 2.0, 1.0, 1e-3, guesses), 256)


@pytest.mark.parametrize(
    ("reported", "right", "says"),
    [
        (5.5564, 6.1411, "within 1 % of ln(256) = 5.545, the loss of guessing"),
        (5.52, 2.0, "within 1 % of ln(256) = 5.545, the loss of guessing"),
        (6.4, 2.0, "above ln(256) = 5.545, the loss of guessing, as of weights at random"),
        (6.4, 7.0, ""),  # the right one is above it as well
        (9.0, 2.0, ""),  # above what random weights give
        (5.56, 5.5, ""),  # near the right one
        (3.0, 2.0, ""),
    ],
)
def test_a_loss_that_is_that_of_guessing_is_said_so(
    reported: float, right: float, says: str
) -> None:
    """Seen red: "no mistake of the table gives this number", and no more."""
    told = guessing_text(LossVerdict("unexplained", reported, right, 1e-3, ()), 256)
    assert says in told and bool(says) == bool(told)
    sentence = mistake_sentence(LossVerdict("unexplained", reported, right, 1e-3, ()), 256)
    assert sentence.startswith("no mistake of the table gives this number")
    assert sentence.endswith(told)


def test_mistakes_of_a_loss_are_told_as_sure_as_they_are() -> None:
    one, two = MISTAKES[ONE].says, MISTAKES[TWO].says
    guess = LossGuess((ONE,), 1.5, "by half")
    assert verdict("unmeasured") == "there is no label to recompute it from"
    assert verdict("unnamed") == "no mistake of the table gives this number"
    assert verdict("named", guess) == f"{one} (by half), which gives 1.5"
    both = LossGuess((ONE, TWO), 1.23456789)
    assert verdict("likely", both) == (
        f"likely, and not certain: {one}, and {two}, which gives 1.23457"
    )
    unknown = LossGuess((TWO,), float("nan"))
    assert verdict("ambiguous", guess, unknown, LossGuess((ONE,), 9.0)) == (
        f"it may be that {one} (by half), which gives 1.5, or that {two}"
    )


@pytest.mark.parametrize("count", [4, 5])
def test_four_mistakes_are_named_at_most(count: int) -> None:
    guesses = [LossGuess((name,), 1.0) for name in list(MISTAKES)[:count]]
    assert verdict("ambiguous", *guesses).count(", or that ") == 3


# --- rules by votes -----------------------------------------------------------------------------

VOTES: list[tuple[dict[str, dict[str, int]], dict[tuple[str, str], int], list[tuple[str, str]]]] = [
    ({"att": {"attn": 1}}, {}, [("att", "attn")]),
    ({"att": {"attn": 1, "mlp": 3}}, {}, [("att", "mlp")]),
    ({"att": {"attn": 1, "mlp": 3}}, {("att", "attn"): 1}, [("att", "attn")]),
    ({"att": {"zzz": 2, "attn": 2}}, {}, [("att", "attn")]),  # of as many the likest
    ({"att": {"x": 3}, "b": {"x": 2, "y": 1}}, {}, [("att", "x"), ("b", "y")]),
    ({"att": {"x": 3}, "b": {"x": 2}}, {}, [("att", "x")]),
]


@pytest.mark.parametrize(("votes", "alike", "wanted"), VOTES)
def test_each_component_gets_the_name_with_most_votes(
    votes: dict[str, dict[str, int]],
    alike: dict[tuple[str, str], int],
    wanted: list[tuple[str, str]],
) -> None:
    counted = {old: Counter(found) for old, found in votes.items()}
    rules = renames._choose_by_votes(counted, Counter(alike))
    assert [(rule.old, rule.new) for rule in rules] == wanted
