"""How the verdict on one parameter of a step is made of what is known, each rule by itself."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.optimizers import Recipe
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.training import explained_step, optimizer_inputs, parameter_verdicts, update_check
from aprfmt.training.judgement import Judgement
from aprfmt.training.update_check import StepInputs
from tests.training.replaced import replaced

AGREES, DIFFERS, OPEN = (Judgement(each) for each in ("agrees", "differs", "not compared"))
ADAMW = Recipe("adamw", lr=0.1, step=3)
PARAMETER: Any = SimpleNamespace(key="L0.q", names=("q",))


def guess(cause: str = "frozen") -> Any:
    return StepGuess(cause, "says", ADAMW)


class Rows:
    """Stands for a reader of a gradient or a moment."""

    noise = 0.25


HERE: Any = Rows()


def state(**more: Any) -> Any:
    facts = {
        "steps": 3,
        "indexed": False,
        "recognized": False,
        "left": (),
        "unused": {},
        "first": SimpleNamespace(placed={"other": 1}),
        "coded": (),
        "names": {},
        "fewer": {},
    }
    return SimpleNamespace(**facts | more)


def stage(**more: Any) -> Any:
    return SimpleNamespace(
        **{"state": None, "given": None, "optimizer": None, "used": set(), "gradients": {}} | more
    )


# --- where nothing is known of a parameter ------------------------------------------------------


def test_a_step_by_its_sizes_alone_is_open_where_others_have_moments() -> None:
    """Not where nothing was given, where it had no gradient, or where its signs were known."""
    signs = replace(AGREES, signs=True)
    moments = "the optimizer's state has no moments of it"
    number = "no number of the optimizer's state is known to be its own"

    def why(found: Judgement, held: StepInputs, **of: Any) -> str | None:
        own = stage(names_in_8_bits=lambda: of.pop("coded", ()), **of)
        told = parameter_verdicts._leave_open_if_signs_unknown(own, PARAMETER, held, found)
        assert told is found or (told.verdict, told.signs) == ("not compared", True)
        return None if told is found else told.why

    given: Any = object()
    none = StepInputs()
    for untouched in (AGREES, replace(DIFFERS, signs=True), replace(OPEN, signs=True)):
        assert why(untouched, none, state=state(), given=given) is None
    assert why(signs, StepInputs(idle=True), state=state(), given=given) is None
    assert why(signs, none) is None
    assert why(signs, none, given=given) == "no gradient of it was given"
    assert why(signs, none, state=state(steps=0)) is None
    assert why(signs, none, state=state(steps=0), given=given) == "no gradient of it was given"
    for steps in (None, 1, 3):
        assert why(signs, none, state=state(steps=steps), given=given) == moments
    for indexed in (False, True):
        for recognized in (False, True):
            for left in ((), ("5",)):
                held = state(indexed=indexed, recognized=recognized, left=left)
                told = why(signs, none, state=held)
                assert told == (number if indexed and not recognized and left else moments)
    assert (why(signs, none, state=state(), coded=("q",)) or "").startswith("its moments were")
    assert why(signs, none, state=state(), coded=("k",)) == moments


def test_a_parameter_that_the_optimizer_never_saw_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with a gradient, that did not move, beside others that have moments."""
    asked: list[Any] = []
    first: dict[str, Any] = {"guesses": (guess("other"), guess("frozen"))}

    def judged(parameter: Any, recipe: Recipe, held: Any) -> Judgement:
        asked.append(recipe.step)
        return Judgement("differs", **first)

    monkeypatch.setattr(parameter_verdicts, "judge_update", judged)
    largest = SimpleNamespace(largest=1.0)

    def told(
        found: Judgement = OPEN, held: Any = None, recipe: Recipe = ADAMW, **of: Any
    ) -> Judgement:
        parts = {"state": state(), "given": object(), "gradients": {"L0.q": largest}}
        coded = of.pop("coded", ())
        own = stage(names_in_8_bits=lambda: coded, **parts | of)
        return parameter_verdicts._judge_never_seen(
            own, PARAMETER, recipe, held or StepInputs(gradient=HERE), found
        )

    seen = told()
    assert seen.why.startswith("did not move") and asked == [1] and seen.verdict == "differs"
    (one,) = seen.guesses
    assert (one.cause, one.says) == ("frozen", seen.why)
    asked.clear()
    gradient = StepInputs(gradient=HERE)
    changed: Any
    for changed in (
        {"found": AGREES},
        {"found": DIFFERS},
        {"state": None},
        {"given": None},
        {"state": state(indexed=True, left=("5",))},
        {"coded": ("q",)},
        {"held": replace(gradient, first=HERE)},
        {"held": replace(gradient, second=HERE)},
        {"held": StepInputs()},
        {"recipe": Recipe("sgd", lr=0.1)},
        {"state": state(first=SimpleNamespace(placed={}))},
        {"gradients": {}},
        {"gradients": {"L0.q": SimpleNamespace(largest=0.0)}},
    ):
        assert told(**changed) is changed.get("found", OPEN), changed
    assert not asked
    for still in (state(indexed=True), state(left=("5",))):
        assert told(state=still).verdict == "differs"
    assert told(coded=("k",)).verdict == "differs"
    first["guesses"] = (guess("other"),)
    assert told() is OPEN


def test_a_state_with_more_than_the_rule_uses_leaves_a_wrong_step_open() -> None:
    def told(found: Judgement, **unused: str) -> Judgement:
        own = stage(state=state(unused=unused) if unused else None)
        return parameter_verdicts._leave_open_if_state_unused(own, PARAMETER, found)

    wrong = replace(DIFFERS, guesses=(guess(),))
    for name in ("q", "L0.q"):
        found = told(wrong, **{name: "rest"})
        assert (found.verdict, found.guesses) == ("not compared", ())
        assert found.why.startswith("the state has rest, which no rule here uses")
        assert told(AGREES, **{name: "rest"}) is AGREES
    assert told(wrong, k="rest") is wrong and told(wrong) is wrong


# --- states of before the step ------------------------------------------------------------------


def test_a_state_may_be_of_before_the_step_where_nothing_says_its_number() -> None:
    both = StepInputs(gradient=HERE, first=HERE)

    def may(held: StepInputs = both, **of: Any) -> bool:
        return parameter_verdicts._may_be_state_before(
            stage(**{"state": state(steps=None)} | of), held
        )

    assert may() and may(optimizer="adamw:lr=0.1,step=2") and may(state=state(steps=3))
    assert may(state=state(steps=3), optimizer="adamw:lr=0.1")
    assert not may(state=state(steps=3), optimizer="adamw:lr=0.1,step=2")
    assert not may(state=None) and not may(replace(both, gradient=None))
    assert not may(replace(both, first=None)) and not may(replace(both, after=False))


def judge_it(
    monkeypatch: pytest.MonkeyPatch, held: StepInputs, verdicts: Any, **of: Any
) -> tuple[Judgement, list[Any], set[str]]:
    """The verdict, of which recipes' steps and inputs it was asked, and what was used."""
    asked: list[Any] = []
    recipe = of.pop("recipe", ADAMW)
    alone = of.pop("alone", None)

    def judged(parameter: Any, recipe: Recipe, held: StepInputs) -> Judgement:
        asked.append((recipe.name, recipe.step, held.step, held.after))
        return verdicts[len([one for one in asked if one[0] != "alone"]) - 1]  # type: ignore[no-any-return]

    def moved(parameter: Any, recipe: Recipe, held: StepInputs) -> Any:
        asked.append(("alone", recipe.step, held.step, held.after))
        return alone

    monkeypatch.setattr(parameter_verdicts, "judge_update", judged)
    monkeypatch.setattr(parameter_verdicts, "moved_without_gradient", moved)
    before = of.pop("before", False)
    own = stage(has_codes=lambda parameter: True, **of)
    with replaced(
        parameter_verdicts,
        adafactor_recipe=lambda step, parameter, recipe, held: replace(recipe, step=77),
        _check_moments=lambda step, parameter, recipe, held, found: replace(found, why="moments"),
        _may_be_state_before=lambda step, held: before,
        _judge_never_seen=lambda step, parameter, recipe, held, found: found,
        _leave_open_if_state_unused=lambda step, parameter, found: found,
        _leave_open_if_signs_unknown=lambda step, parameter, held, found: found,
    ):
        return parameter_verdicts.judge_change(own, PARAMETER, recipe, held), asked, own.used


def test_what_is_tried_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    held = StepInputs(gradient=HERE, first=HERE, step=3)
    once = [("adamw", 3, 3, True)]
    found, asked, used = judge_it(monkeypatch, held, [AGREES])
    assert (found.verdict, found.why, asked, used) == ("agrees", "moments", once, set())
    assert judge_it(monkeypatch, held, [DIFFERS])[:2] == (DIFFERS, once)
    assert judge_it(monkeypatch, held, [OPEN], before=True)[:2] == (OPEN, once)
    named = replace(ADAMW, name="adafactor")
    assert judge_it(monkeypatch, held, [DIFFERS], recipe=named)[1] == [("adafactor", 77, 3, True)]
    # What moved without a gradient, by a state of no count: of the step before.
    wrong = replace(DIFFERS, why="moved")
    for ungiven in (False, True):
        for own in (None, state(), state(steps=None)):
            for step, before in ((3, 2), (2, 1), (1, 1), (0, 1)):
                now = replace(held, ungiven=ungiven, step=step)
                found, asked, _ = judge_it(monkeypatch, now, [DIFFERS], state=own, alone=wrong)
                tried = ungiven and own is not None and own.steps is None
                assert asked == [("adamw", 3, step, True)] + [("alone", 3, before, False)] * tried
                assert found is (wrong if tried else DIFFERS)
    now = replace(held, ungiven=True)
    assert judge_it(monkeypatch, now, [DIFFERS], state=state(steps=None))[0] is DIFFERS


def test_a_state_of_before_the_step_counts_where_it_gives_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = StepInputs(gradient=HERE, first=HERE, step=3)
    told = replace(DIFFERS, guesses=(guess(),))
    for second, first, better in (
        (AGREES, DIFFERS, True),
        (AGREES, told, True),
        (told, DIFFERS, True),
        (told, told, False),
        (DIFFERS, DIFFERS, False),
        (OPEN, DIFFERS, False),
    ):
        found, asked, used = judge_it(
            monkeypatch, held, [first, second], before=True, state=state()
        )
        assert found is (second if better else first) and used == ({"L0.q"} if better else set())
        assert asked == [("adamw", 3, 3, True), ("adamw", 4, 3, False)]
    # Without a count it is the state of the step before, or of the first.
    for own, inputs, recipe_step, step in (
        (state(steps=None), held, 3, 2),
        (None, held, 3, 2),
        (state(steps=None), replace(held, first=None), 1, 0),
        (state(steps=3), replace(held, first=None), 4, 3),
    ):
        _, asked, _ = judge_it(monkeypatch, inputs, [DIFFERS, OPEN], before=True, state=own)
        assert asked[1] == ("adamw", recipe_step, step, False), own


def test_a_right_step_is_judged_by_its_gradient_in_the_moments_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = StepInputs(gradient=HERE, first=HERE)
    answer: list[Any] = [None]
    monkeypatch.setattr(parameter_verdicts, "judge_moments", lambda *given: answer[0])
    right = replace(AGREES, clipped=("norm", 1.0))

    def told(held: StepInputs = held, recipe: Recipe = ADAMW, given: Any = 1) -> Any:
        own = stage(given=given)
        return parameter_verdicts._check_moments(own, PARAMETER, recipe, held, right), bool(
            own.used
        )

    assert told() == (right, False)
    assert told(given=None) == told(replace(held, gradient=None)) == (right, False)
    for made in (
        told(replace(held, first=None)),
        told(replace(held, after=False)),
        told(recipe=replace(ADAMW, nesterov=True)),
        told(recipe=Recipe("lion", lr=0.1)),
    ):
        assert made == (right, True)
    answer[0] = AGREES
    assert told() == (right, True)
    answer[0] = replace(AGREES, clipped=("value", 2.0))
    assert told() == (replace(right, clipped=("value", 2.0)), True)
    answer[0] = replace(DIFFERS, why="another", guesses=(guess(),))
    found, used = told()
    assert (found.verdict, found.why, found.whole, used) == ("differs", "another", True, True)
    assert found.guesses == answer[0].guesses and found.clipped == right.clipped


# --- sizes --------------------------------------------------------------------------------------


def test_the_noise_of_a_step_is_that_of_its_least_exact_input() -> None:
    def rows(noise: float) -> Any:
        return SimpleNamespace(noise=noise, rows=lambda start, stop: np.full((2, 3), noise))

    assert StepInputs().noise == 0.0 and StepInputs().moments(0, 2) is None
    for parts in ((0.5, 0.25, 0.125), (0.25, 0.5, 0.125), (0.125, 0.25, 0.5)):
        gradient, first, second = map(rows, parts)
        assert StepInputs(gradient=gradient, first=first, second=second).noise == 0.5
    held = update_check.StepInputs(first=rows(0.5), second=None, step=4, after=False)
    moments: Any = held.moments(0, 2)
    assert moments.first.tolist() == [0.5] * 6 and moments.second is None
    assert (moments.step, moments.after) == (4, False)
    other: Any = update_check.StepInputs(second=rows(0.25)).moments(0, 2)
    assert other.first is None and other.second.tolist() == [0.25] * 6


def test_norms_of_matrices_and_vectors_are_apart_where_both_are_there() -> None:
    def norms(*kinds: tuple[str, bool]) -> dict[bool, float]:
        own = stage(
            parameters=[SimpleNamespace(key=key, vector=vector) for key, vector in kinds],
            gradients={
                key: SimpleNamespace(norm=float(at + 3))
                for at, (key, _) in enumerate(kinds)
                if key != "none"
            },
        )
        return explained_step.ExplainedStep.kind_norms.func(own)  # type: ignore[attr-defined, no-any-return]

    assert norms(("a", False), ("b", False)) == norms(("a", True)) == norms() == {}
    assert norms(("a", False), ("none", True)) == {}
    assert norms(("a", False), ("b", False), ("c", True)) == {False: 5.0, True: 5.0}


def test_what_a_trainers_rounding_may_leave_of_a_computed_gradient() -> None:
    values = np.array([[3.0, 0.0, 0.0, -4.0]] * 4, np.float32)
    parameter: Any = SimpleNamespace(key="q", before=SimpleNamespace(shape=(2, 2, 4)))

    def reader(rounding: float | None, held: Any = values) -> Any:
        computed = SimpleNamespace(
            keys=("q",), gradient=lambda key: held, rounding=lambda key: rounding
        )
        return optimizer_inputs._computed_reader(stage(computed=computed), parameter)

    unit = UNIT["F32"]
    exact = reader(None)
    assert (exact.noise, exact.blur) == (unit, unit * 4)
    rough = reader(0.5)
    assert rough.noise == pytest.approx(optimizer_inputs.BLUR * 0.5 / 10)
    assert rough.blur == pytest.approx(optimizer_inputs.BLUR * 0.5 / 4)
    assert rough.rows(1, 3).tolist() == values[1:3].tolist() and rough.rows(1, 3).dtype == float
    assert reader(0.5, values * 0).noise == unit
    other: Any = SimpleNamespace(key="k", before=None)
    assert optimizer_inputs._computed_reader(stage(computed=None), parameter) is None
    of_others = SimpleNamespace(keys=("q",))
    assert optimizer_inputs._computed_reader(stage(computed=of_others), other) is None


ALL, HALF = np.ones(4, bool), np.array([True, False, True, False])


@pytest.mark.parametrize(
    ("fits", "verdict", "says"),
    [
        ([(ALL, False)], "agrees", ""),
        ([(ALL, True), (ALL, True)], "agrees", ""),
        ([(ALL, False), (HALF, False)], "differs", "2 elements, in rows 11, 13"),
        ([(HALF, False), (~HALF, False)], "differs", "4 elements, in rows 11, 13, 10, 12"),
        ([(HALF, True)], "agrees", ""),  # each is the step's own number, to the bit
    ],
)  # fmt: skip
def test_elements_outside_of_a_right_sample_may_still_differ(
    fits: list[Any], verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        SimpleNamespace(
            after=np.ones(4), rows=np.arange(10, 14), moments=None,
            fit=lambda recipe, near=near, exact=exact: SimpleNamespace(
                share=near.mean(), near=near, exact=exact),
        )
        for near, exact in fits
    ]  # fmt: skip
    monkeypatch.setattr(update_check, "_all_cases", lambda *given: iter(cases))
    monkeypatch.setattr(update_check, "_measure_step_and_decay", lambda *given: (None, None))
    monkeypatch.setattr(update_check, "decay_evidence", lambda *given: None)
    sample: Any = SimpleNamespace(
        case=SimpleNamespace(shape=None), shows=True, exact=True, held_counts=None
    )
    inputs: Any = None
    found = update_check._judge_all(PARAMETER, ADAMW, inputs, True, sample)
    assert found.verdict == verdict
    assert (found.why or "").replace(" are not what the step gives", "") == says
    assert found.exact == all(exact for _, exact in fits)
