"""Rules on what a batch was: its samples, labels, padding and losses, each by itself."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training import (
    batch_labels,
    batch_samples,
    clipping,
    frozen_parameters,
    lost_updates,
    optimizers,
    router_losses,
    weight_decay,
)
from aprfmt.causes.training.backward_case import BackwardCase, all_differ
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.inference.gradients.changes import BackwardChange, RouterFactors

RNG = np.random.default_rng(11)
NORM, WEIGHT, HEAD = "output_norm.weight", "L1.ffn_up.weight", "output.weight"
SIZES = {NORM: (1, 64), WEIGHT: (8, 16), HEAD: (16, 16)}
PLAIN = {key: RNG.standard_normal(shape) for key, shape in SIZES.items()}
Made = Callable[[BackwardChange], dict[str, Any]]


class Gradients:
    """A batch's gradients by role key, of the mean loss of `scored` labels."""

    def __init__(self, held: dict[str, Any], scored: int = 26) -> None:
        self.held = held
        self.keys = held.keys()
        self.scored = scored

    def gradient(self, key: str) -> Any:
        return self.held[key]

    def gradient_near(self, key: str, given: Any) -> Any:
        return self.held[key]


def case_of(
    given: dict[str, Any],
    made: Made = lambda change: PLAIN,
    *,
    right: Iterable[str] = (),
    opened: Iterable[str] = (),
    computed: dict[str, Any] | None = None,
    **more: Any,
) -> BackwardCase:
    """Return what is known of gradients, `right` ones and `opened` ones named, all others wrong."""
    held = PLAIN if computed is None else computed
    cases = {key: GradientCase(key, given[key], held[key]) for key in given}
    right, opened = frozenset(right), frozenset(opened)
    return BackwardCase(
        cases.__getitem__,
        {key: (key,) for key in given},
        right,
        frozenset(given) - right - opened,
        frozenset(),
        {},
        lambda change, names: Gradients(made(change)),
        open=opened,
        **more,
    )


def says(guesses: Iterable[Any]) -> list[str]:
    return [guess.says for guess in guesses]


OTHER = {key: RNG.standard_normal(shape) for key, shape in SIZES.items()}


# --- all gradients differ -----------------------------------------------------------------------


def test_all_gradients_differ_where_hardly_one_agrees_and_none_after_the_layers() -> None:
    many = {f"L0.{name}.weight": PLAIN[NORM] for name in "abcdefgh"}
    every = OTHER | many
    for right, differ, loss in (
        ((), True, True),
        (("L0.a.weight", "L0.b.weight"), True, True),
        (("L0.a.weight", "L0.b.weight", "L0.c.weight"), False, False),
        ((HEAD,), True, True),
        ((HEAD, NORM), False, False),
    ):
        case = case_of(every, right=right, computed=PLAIN | many)
        assert all_differ(case) is differ, right
        assert batch_samples.loss_differs(case) is loss, right
        opened = case_of(every, right=right, opened=set(every) - set(right), computed=PLAIN | many)
        assert all_differ(opened) is differ
    inside = case_of({WEIGHT: OTHER[WEIGHT]})  # of an adapter, which has no weights after them
    assert all_differ(inside) and not batch_samples.loss_differs(inside)


def test_padding_and_documents_are_asked_of_where_there_are_some() -> None:
    for find, name in (
        (batch_samples.guess_padding, "padded_first"),
        (batch_samples.guess_documents, "packed"),
    ):
        there: Any = {name: True}
        assert len(list(find(case_of(OTHER, **there)))) == 2
        assert not list(find(case_of(OTHER)))
        assert not list(find(case_of(OTHER, right=(HEAD, NORM), **there)))
    ways = [one.change for one in batch_samples.guess_padding(case_of(OTHER, padded_first=True))]
    assert [change.padding for change in ways if change] == ["attended", "counted"]
    for rates, text in (({"a": 0.1, "b": 0.2}, "(b is 0.2)"), ({}, "")):
        found = says(batch_samples.guess_dropout(case_of(OTHER, dropout=rates)))
        assert len(found) == bool(text) and all(text in one for one in found)
    assert not list(
        batch_samples.guess_dropout(case_of(OTHER, right=(HEAD, NORM), dropout={"a": 1}))
    )


LABELS: Sequence[tuple[dict[str, Any], str]] = (
    ({"edges": True}, "the first token of each document"),
    ({"edges": True, "joined": "positions count on"}, "the first token of each document"),
    ({"padding": "scored"}, "the padding at the end of rows is scored"),
    ({"padding": "scored", "unmasked": True}, "the padding at the end of rows is scored, and so"),
    ({"padding": "scored and seen"}, "the padding at the end of rows is scored; padding"),
    ({"shift": 2}, "the labels are shifted twice"),
    ({"shift": 0}, "the labels are not shifted"),
    ({"shift": -1}, "the labels are shifted the other way: "),
    ({"shift": 3}, "the labels are shifted 3 times: each row is scored against the token 3"),
    ({"shift": 4}, "the labels are shifted 4 times: each row is scored against the token 4"),
    ({"shift": -2}, "the labels are shifted the other way, twice"),
    ({"rolled": (0, -1)}, "the labels are rolled by one to the left"),
    ({"rolled": (0, 1)}, "the labels are rolled by one to the right"),
    ({"rolled": (1, 0)}, "the labels are those of the row before"),
    ({"rolled": (-1, 0)}, "the labels are those of the row after"),
    ({"unmasked": True}, "tokens that are no labels are scored too"),
)


def test_other_labels_are_those_whose_gradients_are_given() -> None:
    for given, text in LABELS:
        wanted = BackwardChange(**given)

        def made(change: BackwardChange, wanted: BackwardChange = wanted) -> dict[str, Any]:
            return OTHER if change == wanted else PLAIN

        for packed in (False, True):
            for padded in (False, True):
                case = case_of(OTHER, made, packed=packed, padded_last=padded)
                found = list(batch_samples.guess_other_labels(case))
                there = ("edges" not in given or packed) and ("padding" not in given or padded)
                assert [one.change for one in found] == [wanted] * there, (given, packed, padded)
                assert all(one.says.startswith(text) for one in found)
        assert not list(batch_samples.guess_other_labels(case_of(OTHER, made, right=(HEAD, NORM))))
    small = {HEAD: RNG.standard_normal((1, 31))}
    assert not list(batch_samples.guess_other_labels(case_of(small, computed=small)))


DIVIDED: Sequence[tuple[float, str]] = (
    (1.0, ""),
    (26 / 20, "; the sum is divided by the 20 labels of the batch, not by these 26"),
    (26 / 28, "; the sum is divided by all 28 tokens of the batch, not by these 26"),
    (26.0, "; the sum of these 26 is not divided"),
)


@pytest.mark.parametrize(("factor", "clause"), DIVIDED)
@pytest.mark.parametrize(
    "change",
    [{"unmasked": True}, {"inverted": True}, {"padding": "scored"}, {"edges": True}, {"shift": 2}],
)
def test_the_sum_over_other_labels_may_have_another_divisor(
    change: dict[str, Any], factor: float, clause: str
) -> None:
    """Seen red: "unknown cause", of a mask that was lost after its labels were counted."""
    wanted = BackwardChange(**change)
    given = {key: factor * values for key, values in OTHER.items()}
    case = case_of(
        given, lambda made: OTHER if made == wanted else PLAIN, labels=(13, 7), row_length=14,
        packed=True, padded_last=True, partly_labelled=True,
    )  # fmt: skip
    (found,) = batch_samples.guess_other_labels(case)
    assert found.change == replace(wanted, rows=None if factor == 1 else (factor, factor))
    assert found.says.endswith(clause) if clause else ";" not in found.says, found.says


def test_a_factor_that_no_divisor_gives_is_none_of_other_labels() -> None:
    wanted = BackwardChange(unmasked=True)
    for factor in (1.2, 1.35, 0.5, -1.0):
        given = {key: factor * values for key, values in OTHER.items()}
        case = case_of(
            given,
            lambda change: OTHER if change == wanted else PLAIN,
            labels=(13, 7),
            row_length=14,
        )
        assert not list(batch_samples.guess_other_labels(case))


def test_a_loss_has_a_share_of_another_term_in_it() -> None:
    for kind, name in (("smoothing", "smoothed by "), ("z_loss", "the loss has ")):
        for share, shown in (
            (0.1, "0.1"),
            (0.137, "0.137"),
            (0.1004, "0.1"),
            (1.0, ""),
            (-0.1, ""),
        ):
            given = {key: PLAIN[key] + share * (OTHER[key] - PLAIN[key]) for key in PLAIN}

            def made(change: BackwardChange, kind: str = kind) -> dict[str, Any]:
                return OTHER if getattr(change, kind) else {key: 3 * PLAIN[key] for key in PLAIN}

            found = list(batch_samples.guess_loss_terms(case_of(given, made)))
            assert [name in one.says and shown in one.says for one in found] == [True] * bool(shown)
            values = [getattr(one.change, kind) for one in found]
            assert values == [pytest.approx(float(shown or 0), rel=1e-9)] * bool(shown)


# --- samples and their factors ------------------------------------------------------------------


def test_factors_of_samples_are_named_by_what_gives_them() -> None:
    def named(*solved: float, counts: Sequence[int] = (2, 4, 6)) -> Any:
        return batch_samples._named_factors(solved, counts, [1, 2, 3, 4, 5, 6, 7][: len(counts)])

    cause, text, values = named(1.0, 0.0, 1.0)
    assert (cause, values) == ("samples_left_out", [1.0, 0.0, 1.0])
    assert text == "of 3 samples number 2 is not in it"
    cause, text, values = named(0.005, 2.0, -0.005)
    assert (cause, values) == ("samples_left_out", [0.0, 2.0, 0.0])
    assert text == "of 3 samples number 1, 3 are not in it"
    _, _, values = named(1.497, 0.0, 1.503)  # divided by the labels that are there: 12 of 8
    assert values == [1.5, 0.0, 1.5]
    assert named(1.004, 0.0, 0.996)[2] == [1.0, 0.0, 1.0]
    assert named(0.0, 0.5, 3.0)[2] == [0.0, 0.5, 3.0]
    cause, text, values = named(2.0, 1.0, 2 / 3)  # 12 / 3 / the labels of each
    assert cause == "micro_batch_means" and values == [2.0, 1.0, pytest.approx(2 / 3)]
    assert text == "the mean of the means of 3 micro-batches or ranks of 1 sample"
    assert named(6.0, 3.0, 2.0)[1] == text.replace("the mean of", "the sum of", 1)
    four = (1, 2, 3, 6)
    cause, text, values = named(2.0, 2.0, 2 / 3, 2 / 3, counts=four)  # 12 / 2 / 3 and 12 / 2 / 9
    assert text == "the mean of the means of 2 micro-batches or ranks of 2 samples"
    assert values == [2.0, 2.0, pytest.approx(2 / 3), pytest.approx(2 / 3)]
    assert named(1.0, 1.2, 1.0) == (
        "samples_weighted",
        "samples count 1, 1.2, 1 times",
        [1, 1.2, 1],
    )
    seven = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert named(*seven, counts=(1,) * 7)[1] == "samples count 1, 2, 3, 4, 5, 6, ... times"
    near = batch_samples._are_near
    for value in (4.0, 0.25):
        assert near([value * 1.0099, 9.0], [True, False], value)
        assert not near([value * 1.0101], [True], value) and not near([0.98 * value], [True], value)


def by_rows(change: BackwardChange) -> dict[str, Any]:
    """Return the gradients of four samples by their factors; the third has no labels."""
    rows = [f for i, f in enumerate(change.rows or ()) if i != 2]
    return {
        key: sum(factor * np.roll(OTHER[key], at, -1) for at, factor in enumerate(rows))
        for key in PLAIN
    }


def test_samples_are_solved_on_a_small_gradient_of_all_or_of_one_kind() -> None:
    def guesses(*factors: float, labels: Any = (3, 5, 0, 4), **more: Any) -> list[Any]:
        given = by_rows(BackwardChange(rows=factors))
        return list(batch_samples.guess_samples(case_of(given, by_rows, labels=labels, **more)))

    (one,) = guesses(1.0, 0.0, 1.0, 1.0)
    assert one.cause == "samples_left_out" and one.says == "of 3 samples number 2 is not in it"
    assert one.change.rows == (1.0, 0.0, 1.0, 1.0) and not one.alone
    (one,) = guesses(1.0, 2.0, 1.0, 1.0, right=(WEIGHT, HEAD))
    assert one.alone and one.says.startswith("of norms alone, samples count 1, 2, 1 times: all")
    (one,) = guesses(1.0, 2.0, 1.0, 1.0, right=(HEAD,), labels=(3, 5, 0, 4))
    assert one.alone and one.says.startswith("of these alone, samples count 1, 2, 1 times: all")
    assert not guesses(1.0, 0.0, 1.0, 1.0, labels=(3, 0, 0, 0))
    assert not guesses(1.0, 0.0, 1.0, 1.0, labels=(1,) * 17)
    turned = {key: each[..., ::-1] for key, each in OTHER.items()}
    nothing = case_of(turned, by_rows, labels=(3, 5, 0, 4))
    assert not list(batch_samples.guess_samples(nothing))


def test_factors_of_both_signs_are_of_another_objective() -> None:
    """Seen red: as a mistake; of small negative factors too; of biases alone too."""
    for factors, other in (
        ((1.61, -1.61), True),
        ((0.1, -1.0, 0.0), True),
        ((1.0, -0.04), False),  # what rounding leaves of 0
        ((-1.0, -2.0), False),  # the sign of all is a mistake
        ((0.0, 0.0), False),
        ((), False),
    ):
        assert batch_samples.has_both_signs(factors) is other, factors
    for right, objective in (((), True), ((WEIGHT, HEAD), False)):
        given = by_rows(BackwardChange(rows=(1.0, -1.0, 1.0, 1.0)))
        case = case_of(given, by_rows, labels=(3, 5, 0, 4), right=right)
        (one,) = batch_samples.guess_samples(case)
        assert one.objective is objective and one.says.startswith("not judged: ") is objective
    (one,) = weighted([2, 2, -1, -1, -1, -1])
    assert one.objective and "raises some labels and lowers others" in one.says
    assert not weighted([2, 2, 1, 1, 1, 1])[0].objective


def test_wrong_parameters_are_of_one_kind_where_no_right_one_is() -> None:
    for wrong, right, kind in (
        (["a.bias"], ["a.weight"], "biases"),
        (["a.bias"], ["b.bias"], ""),
        (["L0.attn_norm.weight", NORM], [HEAD], "norms"),
        ([NORM, HEAD], [WEIGHT], ""),
        (["L0.ffn_gate_inp.weight"], [HEAD], "routers"),
        (["L0.ffn_up_exps.weight"], [], "experts"),
        (["token_embd.weight"], [HEAD], "tables"),
        ([], [HEAD], ""),
    ):
        case: Any = SimpleNamespace(wrong=frozenset(wrong), right=frozenset(right))
        assert batch_samples._kind_of_wrong(case) == kind, wrong


def test_norms_have_the_gradient_of_some_columns() -> None:
    parts = RNG.standard_normal((8, 64))
    parts[7] = 0  # padding

    def made(change: BackwardChange) -> dict[str, Any]:
        start, stop = change.norm_tokens or (0, 0)
        return PLAIN | {NORM: parts[start // 2 : stop // 2].sum(0)[None]}

    def guesses(part: Any, length: int = 16, **more: Any) -> list[Any]:
        right = more.pop("right", (WEIGHT, HEAD))
        given = PLAIN | {NORM: part[None]}
        case = case_of(given, made, right=right, row_length=length, **more)
        return list(batch_samples.guess_norm_columns(case))

    (one,) = guesses(parts[2:5].sum(0))
    assert one.change.norm_tokens == (4, 10) and "columns 4-9 of 16 alone" in one.says
    (one,) = guesses(parts[4:].sum(0))
    assert one.change.norm_tokens == (8, 14)
    for part in (parts[0] + parts[2], parts[0] * 0.7, parts[0] + 0.02 * parts[1], parts[0] * 0):
        assert not guesses(part), part[:2]
    assert not guesses(parts[:3].sum(0), length=7) and not guesses(parts[0], right=())
    assert not guesses(parts[0], right=(HEAD,))  # a weight is wrong, too


def test_an_adapter_s_other_factors_are_told_once_each() -> None:
    def factors(scale: float, rank: int) -> dict[float, str]:
        found = batch_samples.guess_adapter_scale(case_of(OTHER, adapter=(scale, rank)))
        return {
            float(one.change.adapter_scale or 0) * scale: one.says for one in found if one.change
        }

    found = factors(3.0, 16)
    assert sorted(found) == pytest.approx([3 / 16, 0.75, 1.0, 9.0, 12.0, 48.0])
    assert "applied twice" in found[9.0] and "left out" in found[1.0]
    same = factors(4.0, 16)  # of which two are one: the root of r is the scale
    assert sorted(same) == pytest.approx([0.25, 1.0, 16.0, 64.0])
    assert ", or applied twice" in same[16.0] and ", or left out" in same[1.0]
    assert sorted(factors(1.0, 4)) == pytest.approx([0.25, 0.5, 2.0, 4.0])  # as it is, not told
    assert not list(batch_samples.guess_adapter_scale(case_of(OTHER)))


@pytest.mark.parametrize(
    ("scale", "size", "factor", "reasons"),
    [
        (2.0, 2.0, 4.0, "applied twice, or with 2 times the alpha"),
        (2.0, 1.0, 4.0, "applied twice, or with 2 times the alpha"),
        (1.0, 2.1, 2.0, "with 2 times the alpha"),  # nothing else makes it
        (1.0, 0.3, 1 / 3, "with 1/3 of the alpha"),
        (2.0, 0.5, 1.0, "left out, or with 1/2 of the alpha"),
        (5.0, 1.0, 25.0, "applied twice"),  # as no usual change of alpha does
        (1.0, 1.0, 2.0, ""),  # no gradient is of that size: it is not computed
    ],
)
def test_a_factor_has_every_reason_that_makes_it(
    scale: float, size: float, factor: float, reasons: str
) -> None:
    """Another alpha is as good a reason as any. Seen red: without it."""
    case = replace(case_of(OTHER, adapter=(scale, 8)), norms={"a": (size, 1.0)})
    found = {
        round(float(one.change.adapter_scale) * scale, 6): one.says
        for one in batch_samples.guess_adapter_scale(case)
        if one.change
    }
    wanted = f"the adapter has the factor {factor:.4g}: the stated {scale:g} {reasons}"
    assert found.get(round(factor, 6), "") == (wanted if reasons else "")


# --- labels with weights ------------------------------------------------------------------------

COLUMNS = np.array([1, 2, 3, 4, 5, 6])
TOKENS = np.array([7, 8, 9, 7, 10, 11])
EACH = RNG.standard_normal((6, 64))


class Parts:
    """What six labels add to the last norm's gradient."""

    key, rows, columns, tokens = NORM, np.array([0, 0, 0, 1, 1, 1]), COLUMNS, TOKENS
    head: Any = None

    def mean(self, factors: Any) -> Any:
        return (np.asarray(factors)[:, None] * EACH).mean(0)


def weighted(factors: Any, *, known: bool = True, **more: Any) -> list[Any]:
    parts = Parts()
    given = OTHER | {NORM: parts.mean(factors)[None]}
    case = case_of(given, by_label=lambda: parts if known else None, **more)
    return list(batch_labels.guess_label_weights(case))


def test_weights_of_labels_are_solved_by_columns_tokens_or_slope() -> None:
    (one,) = weighted([2, 2, 1, 1, 1, 1])
    assert one.says.startswith("labels up to column 2 count 2 times as much as the others")
    assert one.change.labels == pytest.approx((2, 2, 1, 1, 1, 1))
    (one,) = weighted([3, 1, 1, 3, 1, 1])
    assert one.says.startswith("labels of token 7 count 3 times")
    (one,) = weighted(0.5 + 0.25 * COLUMNS)
    assert one.says == "a label in column n counts 0.5 + 0.25 n times"
    assert not weighted([1] * 6) and not weighted([5, 1, 2, 7, 3, 1])
    assert not weighted([2, 2, 1, 1, 1, 1], known=False)
    assert not weighted([2, 2, 1, 1, 1, 1], right=(NORM,))
    assert weighted([2, 2, 1, 1, 1, 1], opened=(NORM,))


# --- routers, clipping, cutting -----------------------------------------------------------------


def test_auxiliary_losses_of_routers_are_solved_on_the_router() -> None:
    router = "L0.ffn_gate_inp.weight"
    plain = RNG.standard_normal((8, 8))
    units = {name: RNG.standard_normal((8, 8)) for name in ("balance", "by_layer", "z")}

    def with_losses(factors: RouterFactors) -> Any:
        return plain + sum(getattr(factors, name) * each for name, each in units.items())

    def made(change: BackwardChange) -> dict[str, Any]:
        return {router: with_losses(change.router or RouterFactors())}

    def guesses(given: Any, stated: Any = None, experts: bool = True) -> list[Any]:
        routers = RouterFactors(**(stated or {}))
        held = {router: given, HEAD: PLAIN[HEAD]}
        computed = {router: with_losses(routers), HEAD: PLAIN[HEAD]}
        known: Any = {"routers": routers, "experts": experts}
        case = case_of(held, made, right=(HEAD,), computed=computed, **known)
        return list(router_losses.guess_router_losses(case))

    for factors in (
        {"balance": 0.01},
        {"z": 0.001},
        {"by_layer": 0.02},
        {"balance": 0.01, "z": 0.001},
    ):
        own = RouterFactors(**factors)
        found = guesses(with_losses(own))
        assert found[0].change.router == own, factors
        assert "an auxiliary loss, is in the gradient" in found[0].says
        assert not guesses(with_losses(own), experts=False)
        stated = guesses(plain, factors)
        assert stated[0].change.router == RouterFactors()
        assert "is not in the gradient, and is stated" in stated[0].says
    assert not guesses(with_losses(RouterFactors(balance=-0.01)))
    assert not guesses(RNG.standard_normal((8, 8)))


def test_other_clippings_follow_from_the_norms_that_are_known() -> None:
    recipe = replace(optimizers.Recipe(), clip=1.0)

    def ways(vector: bool = False, **norms: float) -> list[tuple[str, float]]:
        found = list(clipping.other_factors(recipe, norms, vector))
        kinds = [text for _, text, _ in found if "that they have together" in text]
        assert all((("vectors" if vector else "matrices") in text) for text in kinds)
        return [(cause, factor) for cause, _, factor in found]

    assert ways(norm=4.0) == ways(own_norm=4.0) == []
    found = ways(norm=4.0, own_norm=2.0, kind_norm=3.0)
    assert [cause for cause, _ in found[:4]] == [
        "clip_missing",
        "clip_twice",
        "clip_by_tensor",
        "clip_by_tensor",
    ]
    assert [factor for _, factor in found[:4]] == pytest.approx([1, 1 / 16, 1 / 2, 1 / 3], rel=1e-4)
    assert ways(True, norm=4.0, own_norm=2.0)[3][1] == pytest.approx(1 / 4, rel=1e-4)
    below = ways(norm=0.5, own_norm=0.2)  # nothing was to be clipped
    assert [cause for cause, _ in below] == ["clip_by_tensor"] * 2
    for name in clipping.OTHER_NORMS:
        beyond: Any = {"norm": 4.0, "own_norm": 2.0, name: 8.0}
        cause, factor = ways(**beyond)[-1]
        assert cause == "clip_other_norm" and factor == pytest.approx(1 / 8, rel=1e-4)
        assert len(ways(**beyond | {name: 1.0})) == 4
    assert not list(clipping.other_factors(replace(recipe, clip=None), {"norm": 4.0}, False))


def test_what_is_cut_is_no_further_from_zero_and_what_fits_stays() -> None:
    for encoding, ulp in (("BF16", 2.0**-7), ("F16", 2.0**-10)):
        for factor, cut in ((0.25, 0), (0.5, 0), (0.75, 0), (1.0, 1), (1.75, 1)):
            values = np.array([1 + factor * ulp, -1 - factor * ulp, 4 * (1 + factor * ulp), 0.0])
            found = optimizers.cut_to(values, encoding)
            near = 1 + cut * ulp
            assert found.tolist() == [near, -near, 4 * near, 0.0]
            rounded = 1 + (round(factor) if factor != 0.5 else 0) * ulp
            assert optimizers.round_to(values[:1], encoding).tolist() == [rounded]
    values = np.array([1 + 2.0**-30])
    assert optimizers.round_to(values, "F64") is values
    assert optimizers.round_to(values, "F32").tolist() == [1.0]


def test_a_norm_is_clipped_to_a_usual_bound_or_a_number_of_one_digit() -> None:
    clipped = clipping.other_norm_clipping
    for size, factor, found in (
        (1.0, 1.0, 1.0),
        (1.0 + 2e-6, 2.0, 1.0),
        (0.3, 1.0, 0.3),
        (0.31, 1.0, None),
        (0.0, 1.0, None),
        (2.5, 1.0, 2.5),
        (2.6, 1.0, None),
    ):
        one = clipped({"largest": size}, factor, (1.0, 2.5))
        assert (None if one is None else (one.by, one.bound)) == (
            None if found is None else ("largest", found)
        ), size
    both = clipped({"largest": 0.31, "sum": 2.5}, 1.0, (2.5,))
    assert both is not None and both.by == "sum"


# --- what did not move --------------------------------------------------------------------------


def test_rows_of_one_shard_stood_still() -> None:
    rows = np.arange(16)

    def shard(still: Iterable[int], due: Iterable[int]) -> Any:
        moves, lost = np.ones(16, bool), np.zeros(16, bool)
        moves[list(still)] = False
        lost[list(due)] = True
        return frozen_parameters._still_shard(rows, moves, lost)

    assert shard(range(8), range(8)) == (1, 2) and shard(range(8, 16), range(9, 16)) == (2, 2)
    assert shard(range(4, 8), range(4, 8)) == (2, 4)
    assert shard(range(8), range(4)) == (1, 2)  # half of its rows had to move
    assert shard(range(8), [0, 2, 6]) is None and shard(range(4), range(3)) == (1, 4)
    assert shard(range(8), [1, 9]) is None and shard(range(3), range(4)) is None
    assert (
        frozen_parameters._still_shard(np.arange(15), np.zeros(15, bool), np.ones(15, bool)) is None
    )


def test_a_decay_that_is_in_the_state_may_be_rounded_away() -> None:
    recipe = replace(optimizers.Recipe(), lr=0.01, wd=0.1)

    def better(**more: Any) -> bool:
        given: dict[str, Any] = {
            "signs": False,
            "others": {"decay": 0.1},
            "encodings": ("BF16", "BF16"),
            "before": np.array([1.0, -2.0]),
            "fit": lambda recipe: SimpleNamespace(direct=True),
        }
        case: Any = SimpleNamespace(**given | more)
        return weight_decay._has_better_guess(case, recipe)

    assert better()  # a thousandth is less than half of a spacing
    assert not better(encodings=("F32", "F32")) and not better(others={"decay": 0.2})
    assert not better(others={}) and not better(fit=lambda recipe: None)
    assert not better(fit=lambda recipe: SimpleNamespace(direct=False))
    seen: list[Any] = []
    better(fit=lambda plain: seen.append(plain))
    assert seen[0].wd == 0.0 and seen[0].lr == 0.01
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_decay, "_steps_towards_zero", lambda case, size: size == 0.005)
        assert better(signs=True)


def test_a_step_is_rounded_away_where_spacings_are_far_above_the_rate() -> None:
    """Weights of a spacing above the rate did not move, and those below it did."""
    recipe = replace(optimizers.Recipe(), lr=2.0**-8)
    small, large = np.full(2000, 4.0), np.full(200, 0.01)  # spacings 2^-5 and 2^-14
    before = np.concatenate([small, large])
    rows = np.arange(2200) // 22

    def guess(move_small: int = 0, move_large: int = 200, weights: Any = before) -> Any:
        moved = np.zeros(2200)
        moved[:move_small] = 1e-3
        moved[2000 : 2000 + move_large] = 1e-3
        order = np.random.default_rng(1).permutation(2200)
        case: Any = SimpleNamespace(rows=rows, change=moved[order], before=weights[order])
        found = list(lost_updates._guess_by_sizes(case, recipe, "BF16"))
        return [one.holds(case) for one in found if one.holds is not None]

    assert guess() == [True]
    assert guess(1) == [False]  # one that could not move did
    assert guess(0, 170) == [False]  # and many that had to did not
    assert guess(weights=np.full(2200, 0.01)) == []
    few = np.full(2200, 0.01)
    few[:500] = 4.0
    assert guess(weights=few) == []  # a fourth of the weights at least
