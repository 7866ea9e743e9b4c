"""How the verdicts on all parameters of a step are held against each other, rule by rule."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.clipping import CLIPPED_BY, Clipping
from aprfmt.causes.training.lost_updates import DecayEvidence, lost_decay_guess
from aprfmt.causes.training.optimizers import Recipe
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.causes.training.step_size import SLACK
from aprfmt.errors import UsageError
from aprfmt.inference.gradients.changes import BackwardChange
from aprfmt.training import (
    backward_mistakes,
    clipped_gradients,
    decay_verdicts,
    explained_step,
    revised_verdicts,
    saved_arrays,
    step,
    step_causes,
    step_recipe,
)
from aprfmt.training.judgement import Judgement
from aprfmt.training.points import ComparedPoints
from aprfmt.training.report import TensorStep, UpdateFacts
from aprfmt.training.update_check import StepInputs
from tests.training.replaced import replaced

AGREES, DIFFERS, OPEN = (Judgement(each) for each in ("agrees", "differs", "not compared"))
ADAMW = Recipe("adamw", lr=0.1, wd=0.5, step=3)
HERE: Any = SimpleNamespace(noise=0.25)
WITH = DecayEvidence(coarse=True)
NO = replace(WITH, counts=((0, 99),) * len(WITH.counts))
LOST = replace(WITH, lost=True)


def guess(cause: str, says: str = "says", **more: Any) -> Any:
    return StepGuess(cause, says, **{"recipe": ADAMW} | more)


def row(key: str, verdict: Any = "not compared", moved: int | None = 5, **more: Any) -> TensorStep:
    update = None if moved is None else UpdateFacts(9, moved, 0, 1.0, 1.0)
    facts: dict[str, Any] = {"update": update, "verdict": verdict} | more
    return TensorStep(key, (f"name of {key}",), (3, 3), "BF16", 1.0, **facts)


def parameter(key: str, **more: Any) -> Any:
    facts = {"key": key, "names": (f"name of {key}",), "vector": False, "after": 1}
    return SimpleNamespace(**facts | more, drop=lambda: None)


def stage(**more: Any) -> Any:
    return SimpleNamespace(
        **{
            "state": None,
            "given": None,
            "optimizer": None,
            "recipe": ADAMW,
            "notes": [],
            "left": [],
            "gradients": {},
            "compared": {},
            "parameters": [],
            "trained_in": None,
            "doubted": "",
            "unclipped": False,
            "schedule": None,
        }
        | more
    )


def told(rows: list[TensorStep]) -> dict[str, tuple[str, str]]:
    return {one.key: (one.verdict, one.why) for one in rows}


# --- clipping -----------------------------------------------------------------------------------


def test_factors_of_groups_are_those_of_clipping_them_alone() -> None:
    def clipped(
        factor: float, norms: Any, clip: float | None = None, keys: Any = "a", **more: Any
    ) -> Any:
        recipe = replace(ADAMW, name="sgd", wd=0.0, clip=clip)
        own = guess("step_factor", "times", recipe=replace(recipe, factor=factor))
        facts = {
            "recipe": more.pop("recipe", recipe),
            "gradients": {key: SimpleNamespace(norm=norm) for key, norm in norms.items()},
        }
        statement: Any = SimpleNamespace(cause="step_factor", says="times", keys=tuple(keys))
        judged = {"a": replace(DIFFERS, guesses=(more.pop("guess", own),))}
        found = step_causes._clipped_group(stage(**facts), statement, judged)
        return None if found is None else found

    # Once more, to a usual bound over the group's norm: 4 of 5.
    twice = (
        "clip_twice",
        "the gradients of these were clipped once more, from the norm 4 that "
        "they have together to 1",
    )
    norms = {"a": 4.0, "b": 3.0}
    assert clipped(0.25, norms) == twice and clipped(0.25 * 1.001, norms) == twice
    assert clipped(0.27, norms) is None and clipped(1.25, norms) is None
    assert clipped(0.5, {"a": 2.0}) == ("clip_twice", twice[1].replace("norm 4", "norm 2"))
    together = clipped(0.2, {"a": 3.0, "c": 4.0, "b": 1.0}, keys="ac")
    assert together is not None and "from the norm 5 that they have together to 1" in together[1]
    assert clipped(0.25, {"b": 3.0}) is None  # no gradient of it
    # To the stated bound by the norm that it has alone: all have 5, it has 4 (or 0.5).
    alone = clipped(1.25, norms, clip=1.0)
    assert alone == (
        "clip_by_tensor",
        "the gradients of these were clipped by the norm 4 that "
        "they have together to 1, not by that of all, 5",
    )
    assert clipped(5.0, {"a": 0.5, "b": 4.975}, clip=1.0)[0] == "clip_by_tensor"
    assert clipped(1.25, norms, clip=6.0) is None
    # All of them by the norm of copies.
    every = {"a": 3.0, "b": 4.0}
    copies = clipped(0.5, every, clip=1.0, keys="ab")
    assert (
        copies is not None
        and copies[0] == "step_factor"
        and copies[1].endswith("of 4 copies of all gradients")
    )
    assert clipped(0.52, every, clip=1.0, keys="ab") is None
    most = step_causes.MOST_COPIES
    assert clipped(most**-0.5, every, clip=1.0, keys="ab")[1].endswith(
        f"of {most} copies of all gradients"
    )
    assert clipped((most + 1) ** -0.5, every, clip=1.0, keys="ab") is None
    for more in (
        {"recipe": None},
        {"recipe": ADAMW},
        {"guess": guess("step_factor", "others")},
        {"guess": guess("step_factor", "times", recipe=None)},
    ):
        assert clipped(0.25, norms, **more) is None


def test_clipped_gradients_agree_but_by_another_number_than_is_stated() -> None:
    def accepted(clipping: Clipping, **recipe: Any) -> tuple[list[Any], list[str], Any]:
        made: list[Any] = []
        own = stage(
            recipe=replace(ADAMW, **recipe) if recipe else None,
            compared={
                "a": explained_step.ComparedGradient(found=DIFFERS),
                "b": explained_step.ComparedGradient(),
            },
        )
        with replaced(
            clipped_gradients,
            accept_mistake=lambda step, guess, keys, right: made.append(
                (guess.cause, guess.says, keys, right)
            ),
        ):
            clipped_gradients._accept_clipped(own, clipping, 3.0)
        assert own.compared["b"].found is None
        return made, own.notes, own.compared["a"].found.verdict

    begin = "the gradients are those of after clipping"
    for by, text in (
        ("norm", "to the norm 1; it was 3"),
        ("value", "each element to 1; the largest was 3"),
    ):
        clipping = Clipping(by, 1.0)  # type: ignore[arg-type]
        plain: Any = ([], [f"{begin} {text}"], "agrees")
        assert accepted(clipping) == accepted(clipping, clip_value=1.0) == plain
        assert accepted(clipping, clip=1.0, clip_value=1.0) == plain
        made, notes, verdict = accepted(clipping, clip=1.0)
        if by == "norm":
            assert (made, notes, verdict) == plain
        else:
            ((cause, says, keys, right),) = made
            assert (cause, keys, right, notes, verdict) == (
                "clip_by_value",
                ["a"],
                (),
                [],
                "differs",
            )
            assert says == f"{clipping.says}, from 3, and not the norm of all"
    odd = Clipping("largest", 1.0)
    assert accepted(odd)[1] == [f"{begin} by {CLIPPED_BY['largest']} to 1; it was 3"]
    assert accepted(odd, clip=1.0)[0][0][0] == "clip_other_norm"
    scaled = Clipping("norm", 1.0, 128.0)
    ((cause, says, keys, _),) = accepted(scaled)[0]
    assert (cause, keys) == ("clip_before_unscale", ["a"])
    assert says == f"{scaled.says}: it was 3 without the scale"


def test_clippings_that_give_few_parameters_are_chance() -> None:
    def chance(*clipped: Any, wrong: int = 0) -> bool:
        judged = {f"c{at}": replace(AGREES, clipped=each) for at, each in enumerate(clipped)}
        judged |= {f"w{at}": DIFFERS for at in range(wrong)}
        return revised_verdicts.is_clipped_by_chance(judged)

    one, two = ("norm", 1.0), ("norm", 2.0)
    assert not chance() and not chance(wrong=3) and not chance(None, None, wrong=2)
    assert not chance(one) and chance(one, wrong=1) and not chance(one, one, wrong=1)
    assert chance(one, two) and not chance(one, one, two) and chance(one, one, two, wrong=1)


# --- decay --------------------------------------------------------------------------------------


def test_a_decay_is_as_sure_as_the_bits_show_it() -> None:
    def limited(shown: DecayEvidence | None, *causes: str) -> list[tuple[str, str]]:
        judged = {"a": replace(DIFFERS, guesses=tuple(map(guess, causes)), decay_shown=shown)}
        decay_verdicts.limit_missing_decays(judged)
        return [(one.cause, one.most) for one in judged["a"].guesses]

    sure = guess("x").most
    missing, away = decay_verdicts.NO_DECAY
    assert limited(NO, missing, away, "other") == [(missing, sure), (away, sure), ("other", sure)]
    fine = DecayEvidence(weight=1e6)  # weights that are not counted: their measured factor
    assert limited(fine, missing, away) == [(missing, sure), (away, sure)]
    part = replace(fine, moment=3e5)
    assert limited(part, missing, "other") == [(missing, "explained"), ("other", sure)]
    assert limited(replace(NO, lost=True), missing, away) == [(missing, "explained"), (away, sure)]
    assert limited(WITH, missing, "other", away) == [("other", sure)]
    assert limited(None, missing) == [(missing, sure)] == limited(None, missing)
    assert limited(WITH, "other") == [("other", sure)]
    # Not by the elements, but by the factor that they have together.
    factor = replace(WITH, weight=1e9)
    assert factor.none and not factor.told
    assert limited(factor, missing, "other") == [(missing, "explained"), ("other", sure)]
    judged = {
        key: replace(DIFFERS, guesses=(guess(missing),), decay_shown=one)
        for key, one in (("a", NO), ("b", WITH))
    }
    decay_verdicts.limit_missing_decays(judged)
    assert all(len(one.guesses) == 1 for one in judged.values())  # asked together


def test_a_decay_that_a_type_rounds_away_marks_all_that_agree() -> None:
    recipes: list[str] = []
    lost = (guess("lost", "rounded away"),)

    def marked(**judged: Judgement) -> dict[str, tuple[str, str]]:
        recipes.clear()
        own = stage(parameters=[parameter(key) for key in judged])
        rows = [row(key, one.verdict) for key, one in judged.items()]
        with replaced(
            decay_verdicts,
            recipe_of=lambda step, of: recipes.append(of.key),
            _lost_decay_guesses=lambda step, recipe, row: lost if row.key == recipes[-1] else (),
        ):
            found = told(decay_verdicts.mark_lost_decay(own, rows, judged))
        for key in recipes:
            assert judged[key].guesses == lost and judged[key].whole
        return found

    shown = replace(NO, lost=True)
    agreed = replace(AGREES, decay_shown=shown)
    found = marked(
        a=agreed, b=AGREES, c=replace(DIFFERS, decay_shown=shown), d=replace(AGREES, decay_shown=NO)
    )
    assert found["a"] == ("differs", "rounded away") and recipes == ["a"]
    assert [found[key][0] for key in "bcd"] == ["agrees", "differs", "agrees"]
    marked(a=replace(AGREES, decay_shown=LOST))
    assert not recipes
    marked(a=agreed, b=replace(AGREES, decay_shown=LOST))
    assert recipes == ["a", "b"]


def test_the_decay_of_a_group_says_why_there_was_none() -> None:
    def causes(decay: Any) -> list[str]:
        own = stage(group_of=lambda name: {} if decay is None else {"weight_decay": decay})
        return [one.cause for one in decay_verdicts._lost_decay_guesses(own, ADAMW, row("a"))]

    lost, none = causes(None)
    assert (lost, none) == ("decay_rounded_away", "decay_missing")
    assert causes(0.5) == [lost] and causes(0) == causes(0.0) == [none]
    assert causes(0.25) == [lost, none]
    for decay, stated in ((0.5, True), (0.25, False), (None, False)):
        own = stage(group_of=lambda name, decay=decay: {"weight_decay": decay})
        told = decay_verdicts._lost_decay_guesses(own, ADAMW, row("a"))[0]
        assert told == lost_decay_guess(ADAMW, "BF16", stated=stated)


def test_steps_that_are_rounded_away_agree_where_the_trainer_holds_finer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first step alone; where the other parameters do not tell, it is a doubt."""
    asked: list[Any] = []
    says = ["finer"]

    def held(*counts: Any) -> str:
        asked.append(counts)
        return says[0]

    monkeypatch.setattr(revised_verdicts, "held_in", held)
    gone = replace(
        DIFFERS, guesses=(guess(revised_verdicts.ROUNDED_AWAY),), held_counts=(1, 2.0, 3, 4)
    )
    agreed = replace(AGREES, held_counts=(10, 20.0, 30, 40))
    other = replace(DIFFERS, held_counts=(100, 200.0, 300, 400))

    def accepted(**more: Any) -> tuple[dict[str, Any], str, Any]:
        judged = {"a": gone, "b": agreed, "c": other}
        own = stage(**{"recipe": replace(ADAMW, step=1)} | more)
        rows = [row(key, one.verdict, why="why") for key, one in judged.items()]
        found = told(revised_verdicts.accept_rounded_away_steps(own, rows, judged))
        assert judged["b"] is agreed and judged["c"] is other and found["b"] == ("agrees", "why")
        assert found["c"] == ("differs", "why")
        return found, own.doubted, judged["a"]

    right = ("agrees", "")
    found, doubted, one = accepted()
    assert (found["a"], doubted, one.verdict, one.whole, one.shows) == (
        right,
        "",
        "agrees",
        True,
        False,
    )
    assert asked == [(11, 22.0, 33, 44)]
    assert accepted(recipe=replace(ADAMW, step=None))[0]["a"] == right
    for recipe in (None, ADAMW):
        assert accepted(recipe=recipe)[0]["a"] == ("differs", "why")
    says[0] = "stored"
    found, doubted, one = accepted()
    assert (found["a"], doubted) == (("differs", "why"), "") and one is gone
    assert accepted(trained_in="float32")[0]["a"] == right
    assert accepted(trained_in="bfloat16")[0]["a"] == ("differs", "why")
    says[0] = ""
    found, doubted, _ = accepted()
    assert (found["a"], doubted) == (("differs", "why"), revised_verdicts.ROUNDED_AWAY)


# --- numbers of steps ---------------------------------------------------------------------------


def test_a_step_of_no_stated_number_is_compared_as_the_first_or_left_open() -> None:
    """Left open where most parameters neither agree nor have a mistake that gives their step."""
    unnumbered = replace(ADAMW, step=None)
    wrong = replace(DIFFERS, guesses=(guess("other"),))

    def opened(*kinds: str, **more: Any) -> tuple[list[str], list[str]]:
        verdicts = {
            "right": AGREES,
            "wrong": DIFFERS,
            "known": wrong,
            "gradient": DIFFERS,
            "still": DIFFERS,
        }
        judged = {f"{kind}{at}": verdicts[kind] for at, kind in enumerate(kinds)}
        own = stage(
            **{"recipe": unnumbered} | more,
            has_wrong_gradient=lambda key: key.startswith("gradient"),
        )
        rows = [
            row(key, one.verdict, 0 if key.startswith("still") else 5)
            for key, one in judged.items()
        ]
        found = revised_verdicts.open_unnumbered(own, rows, judged)
        names = [one.key for one in found if one.why == revised_verdicts.UNNUMBERED]
        assert all(judged[name].why == revised_verdicts.UNNUMBERED for name in names)
        return names, own.notes

    assert opened("right", "wrong", "wrong") == (["wrong1", "wrong2"], [])
    assert opened("right", "wrong") == ([], [])
    (note,) = opened("right", "known")[1]
    assert note.startswith("no step=N is stated")
    assert opened("still") == ([], []) and opened() == ([], [])
    assert opened("known", "wrong", "wrong", "gradient", "still") == (
        ["known0", "wrong1", "wrong2"],
        [],
    )
    for more in (
        {"recipe": None},
        {"recipe": ADAMW},
        {"recipe": Recipe("sgd", lr=0.1)},
        {"state": object()},
    ):
        assert opened("wrong", "wrong", **more) == ([], [])


def test_the_number_of_a_step_is_that_of_the_state_or_the_one_behind() -> None:
    def number(steps: Any, step: int | None, name: str = "adamw", state: bool = True) -> Any:
        own = stage(state=SimpleNamespace(steps=steps, path="s") if state else None)
        return step_recipe._with_step_number(own, Recipe(name, lr=0.1, step=step)).step

    assert number(None, 7, state=False) == 7 and number(None, None, state=False) is None
    assert (number(5, None), number(0, None), number(1, None)) == (5, 1, 1)
    assert number(None, 7) == 7 and number(None, None, "sgd") is None
    assert (number(5, 5), number(5, 6)) == (5, 6)
    for stated in (4, 7):
        with pytest.raises(
            UsageError, match=f"s: is of step 5; expected that of step {stated}, or "
        ):
            number(5, stated)
    with pytest.raises(UsageError, match="s: does not say how many steps were made"):
        number(None, None)


def test_the_first_step_of_a_new_optimizer_is_told_where_all_of_no_moments_are_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdicts: dict[str, Judgement] = {}
    asked: list[Any] = []

    def judged(of: Any, recipe: Recipe, held: Any) -> Judgement:
        asked.append((of.key, recipe.step))
        return verdicts.get(of.key, AGREES)

    monkeypatch.setattr(revised_verdicts, "judge_update", judged)
    bare = StepInputs(gradient=HERE)

    def lost(inputs: Any = bare, first: str = "not compared", **more: Any) -> Any:
        asked.clear()
        keys = ["a", "b"]
        held = {"a": inputs, "b": bare}
        own = stage(**{"parameters": [parameter(key) for key in keys]} | more)
        own.left = [SimpleNamespace(kind="moment"), SimpleNamespace(kind="file")]
        made: dict[str, Judgement] = {}
        with replaced(
            revised_verdicts,
            inputs_of=lambda step, of, norm: held[of.key],
            recipe_of=lambda step, of: ADAMW,
        ):
            rows = revised_verdicts.judge_as_first(own, [row("a", first), row("b")], made, 1.0)
        assert sorted(made) == sorted(one.key for one in rows if one.why)
        for one in made.values():
            (only,) = one.guesses
            assert (only.cause, one.verdict) == (
                "moments_lost",
                "differs",
            ) and only.recipe.step == 1  # type: ignore[union-attr]
        assert [one.kind for one in own.left] == (["file"] if made else ["moment", "file"])
        return sorted(made)

    assert lost() == ["a", "b"] and asked == [("a", 1), ("b", 1)]
    assert lost(first="differs") == ["b"] and lost(first="agrees") == []
    assert lost(replace(bare, first=HERE)) == lost(replace(bare, second=HERE)) == ["b"]
    assert lost(StepInputs()) == ["b"]
    assert lost(parameters=[parameter("a", after=None), parameter("b")]) == ["b"]
    for more in (
        {"recipe": None},
        {"recipe": replace(ADAMW, step=1)},
        {"recipe": replace(ADAMW, step=None)},
        {"recipe": Recipe("sgd", lr=0.1, step=3)},
        {"state": SimpleNamespace(indexed=False, left=())},
        {"state": SimpleNamespace(indexed=True, left=())},
    ):
        assert lost(**more) == [] == asked
    assert lost(state=SimpleNamespace(indexed=True, left=("5",))) == ["a", "b"]
    for verdict in (DIFFERS, OPEN):
        verdicts["b"] = verdict
        assert lost() == []


def test_a_schedule_is_told_by_the_rate_that_most_steps_show() -> None:
    def rate(factor: float) -> Judgement:
        return replace(DIFFERS, guesses=(guess("other"), guess("rate", number=("factor", factor))))

    def scheduled(
        *second: Judgement, optimizer: str | None = None, right: int = 1, state: Any = True
    ) -> Any:
        judged = {f"w{at}": DIFFERS for at in range(len(second))}
        judged |= {f"r{at}": AGREES for at in range(right)}
        held: Any = SimpleNamespace(scheduled=state) if state is not None else None
        asked: list[float | None] = []
        own = stage(state=held, optimizer=optimizer, parameters=[parameter(key) for key in judged])

        def judge_it(step: Any, of: Any, recipe: Any, inputs: Any) -> Judgement:
            asked.append(own.schedule)
            return second[int(of.key[1:])]

        rows: list[Any] = []
        with replaced(
            revised_verdicts,
            recipe_of=lambda step, of: ADAMW,
            inputs_of=lambda step, of, norm: None,
            judge_parameters=lambda step, updates, norm: ("again", {"norm": norm}),
            judge_change=judge_it,
        ):
            found: Any = revised_verdicts.judge_by_schedule(own, rows, judged, 2.0)
        assert asked in ([], [1.0] * len(second))
        assert (found[0] == "again") is (own.schedule is not None) is bool(own.left)
        assert found[0] == "again" or found == (rows, judged)
        return own.schedule, bool(asked)

    assert scheduled(rate(0.5), rate(0.5), rate(0.25)) == (0.5, True)
    assert scheduled(AGREES, AGREES, rate(0.25)) == (1.0, True)
    near = 0.5 * (1 + SLACK / 2)
    assert scheduled(rate(0.5), rate(near), rate(0.25))[0] in (0.5, near)
    assert scheduled(rate(0.5), rate(0.25)) == (None, True)
    assert scheduled(rate(0.5), rate(0.5), DIFFERS, DIFFERS) == (None, True)
    assert scheduled(DIFFERS, DIFFERS, rate(0.5)) == (None, True)
    assert scheduled(rate(0.5)) == (0.5, True)
    for more in ({"optimizer": "adamw:lr=0.1"}, {"state": None}, {"state": False}):
        assert scheduled(rate(0.5), **more) == (None, False)
    assert scheduled(rate(0.5), optimizer="adamw:wd=0.1") == (0.5, True)
    assert scheduled(right=2) == (None, False)


# --- what a parameter has -----------------------------------------------------------------------


def test_the_recipe_of_a_parameter_is_that_of_its_group() -> None:
    def recipe(group: Any, optimizer: str | None = None, key: str = "L0.q", **more: Any) -> Recipe:
        rates = more.pop("rates", False)
        held = (
            SimpleNamespace(group_of=lambda name: group, steps=None) if group is not None else None
        )
        own = stage(
            **{"state": held, "optimizer": optimizer} | more, has_rates=lambda stated: rates
        )
        return step_recipe.recipe_of(own, parameter(key))

    assert recipe(None) == recipe({}) == ADAMW
    group = {"lr": 0.25, "weight_decay": 0.0, "betas": [0.5, 0.75], "eps": 0.125, "momentum": 9.0}
    own = recipe(group)
    assert (own.lr, own.wd, own.b1, own.b2, own.eps) == (0.25, 0.0, 0.5, 0.75, 0.125)
    assert (own.decay_on, own.momentum) == ("all", ADAMW.momentum)
    stated = recipe(group, "adamw:b1=0.9,wd=0.3")
    assert (stated.b1, stated.b2, stated.wd, stated.lr) == (ADAMW.b1, 0.75, 0.0, 0.25)
    assert recipe(group, "adamw:decay_on=matrices").decay_on == ""
    assert recipe({"lr": 0.25}).decay_on == ""
    assert recipe(group, "adamw:lr=0.1") == ADAMW
    assert recipe(group, "adamw:lr=0.1", rates=True).lr == 0.25
    first = group | {"initial_lr": 2.0}
    assert recipe(first, schedule=0.25).lr == 0.5 and recipe(first).lr == 0.25
    assert recipe(group, schedule=0.25).lr == 0.25
    sparse = replace(ADAMW, sparse=True)
    assert not recipe(None, recipe=sparse).sparse
    assert recipe(None, recipe=sparse, key="token_embd.weight").sparse


def test_factors_that_stayed_beside_others_that_moved_are_frozen() -> None:
    def frozen(idle: Any = (), known: Any = (), **moved: int | None) -> dict[str, list[str]]:
        keys = [key.replace("_", ".lora_") for key in moved]
        rows = [row(key, "agrees", moves) for key, moves in zip(keys, moved.values(), strict=True)]

        def other(key: str) -> str:
            return key[:-1] + ("b" if key.endswith("a") else "a")

        own = stage(
            pairs={key: SimpleNamespace(key=other(key)) for key in keys if "lora" in key},
            is_idle=lambda key: key in idle,
        )
        judged = {key: replace(DIFFERS, guesses=(guess("x"),)) for key in known}
        stored = {key: (key,) for key in keys}
        causes: Any = list(step_causes.frozen_factor_causes(own, rows, judged, stored))
        found = {one.cause: sorted(one.where) for one in causes}
        wrong = sorted(one.key for one in rows if one.verdict == "differs")
        assert wrong == sorted(key for each in found.values() for key in each)
        return found

    assert frozen(q_a=5, q_b=5) == frozen() == frozen(q_a=0, q_b=0) == {}
    assert frozen(q_a=5, q_b=0) == {"adapter_half_frozen": ["q.lora_b"]}
    assert frozen(q_a=0, q_b=5) == {}  # no A moves: that may be meant so
    assert frozen(q_a=0, q_b=5, k_a=5, k_b=5) == {"adapter_half_frozen": ["q.lora_a"]}
    assert frozen(("q.lora_a",), q_a=0, q_b=5, k_a=5, k_b=5) == {}
    assert frozen(q_a=0, q_b=0, k_a=5, k_b=5) == {"adapter_frozen": ["q.lora_a", "q.lora_b"]}
    assert frozen((), ("q.lora_b",), q_a=5, q_b=0) == {}
    assert frozen(q_a=5, q_b=None) == frozen(q_a=5) == {}
    assert frozen(q_a=5, q_b=0, k_a=0, k_b=0) == {
        "adapter_half_frozen": ["q.lora_b"],
        "adapter_frozen": ["k.lora_a", "k.lora_b"],
    }


def test_settings_of_groups_are_joined_with_the_largest_decay() -> None:
    group = step_recipe._group_settings
    assert group({"betas": [0.5, 0.25], "nesterov": 1, "lr": 2, "eps": True, "step": 3}) == {
        "b1": 0.5,
        "b2": 0.25,
        "nesterov": False,
        "lr": 2.0,
    }
    assert group({"betas": [0.5], "nesterov": True, "momentum": "x"}) == {"nesterov": True}

    def of(*groups: dict[str, Any]) -> dict[str, float]:
        return step_recipe._state_settings(SimpleNamespace(groups=groups))  # type: ignore[arg-type]

    assert of({"lr": 0.0, "weight_decay": 0.0}) == {"lr": 0.0} and of() == {}
    assert of({"lr": 0.5, "weight_decay": 0.25}, {"lr": 0.125, "weight_decay": 0.0}) == {
        "lr": 0.125,
        "wd": 0.25,
    }
    assert of({"weight_decay": 0.0}, {"weight_decay": 0.25}) == {"wd": 0.25}


# --- states of eight bits -----------------------------------------------------------------------


def test_a_state_of_eight_bits_is_decoded_by_its_table_and_blocks() -> None:
    block = min(saved_arrays._BLOCKS)
    codes = np.arange(block + 8).reshape(2, -1) % 256
    table, sizes = np.linspace(-1, 1, 256), np.array([2.0, 3.0])

    def decoded(name: str = "p.state1", count: int = 2, entries: int = 256, **without: Any) -> Any:
        held = {
            "p.state1": codes,
            "p.state2": codes,
            "p.qmap1": table[:entries],
            "p.absmax1": sizes[:count],
            "p.own1": codes,
        }
        for each in without.get("lacks", ()):
            held.pop(each)
        captures: Any = SimpleNamespace(
            path="f",
            shapes={own: values.shape for own, values in held.items()},
            read=held.__getitem__,
        )
        return saved_arrays._coded_state(name, {own: (captures, own) for own in held})

    found = decoded()
    assert found is not None and found.shapes == {"p.state1": codes.shape}
    values = found.read("p.state1")
    flat = table[codes.reshape(-1)] * np.where(np.arange(codes.size) < block, 2.0, 3.0)
    assert values.dtype == np.float32 and np.allclose(values, flat.reshape(codes.shape))
    assert decoded("p.state2") is None and decoded("p.own1") is None
    assert decoded(lacks=("p.qmap1",)) is None and decoded(lacks=("p.absmax1",)) is None
    assert decoded(entries=255) is None
    single = decoded(count=1)
    larger = next((size for size in saved_arrays._BLOCKS if size >= codes.size), None)
    assert (single is None) is (larger is None)


def test_the_group_of_a_parameter_is_that_of_its_first_name() -> None:
    """A parameter that is joined of several stored ones has their names, and one group."""
    groups = {"first": {"lr": 0.25}, "second": {"lr": 0.5}}
    own = stage(state=SimpleNamespace(group_of=lambda name: groups[name], steps=None))
    for names in (("first", "second"), ("second", "first"), ("second",)):
        found = step_recipe.recipe_of(own, parameter("k", names=names))
        assert found.lr == groups[names[0]]["lr"]


# --- mistakes of a whole backward pass ------------------------------------------------------------


@pytest.mark.parametrize("wrong", [(), ("a",)])
@pytest.mark.parametrize("few_bits", [(), ("b",)])
def test_mistakes_of_a_whole_pass_are_looked_for_while_a_gradient_is_not_explained(
    few_bits: tuple[str, ...], wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gradients that differ, or else of those that few bits leave open; one mistake a rule."""
    explained: set[str] = set()
    accepted: list[Any] = []
    looked: list[str] = []

    class Given:
        pass

    def rule(name: str, *guesses: Any) -> Any:
        def find(case: Any) -> Any:
            looked.append(name)
            return guesses

        return SimpleNamespace(find=find)

    def guessed(name: str, *keys: str) -> Any:
        return SimpleNamespace(name=name, keys=keys, most="confirmed", objective=False)

    rules = [
        rule("none", guessed("nothing")),
        rule("first", guessed("empty"), guessed("right", *wrong, *few_bits), guessed("late", "c")),
        rule("second", guessed("more", "c")),
    ]
    monkeypatch.setattr(backward_mistakes, "BACKWARDS", rules)
    monkeypatch.setattr(backward_mistakes, "Computed", Given)

    def accept(step: Any, guess: Any, keys: Any, right: Any, most: Any) -> None:
        accepted.append((guess.name, keys, right, most))
        explained.update(keys)

    case = SimpleNamespace(wrong=wrong, open=few_bits, right=("r",))
    functions: dict[str, Any] = {
        "_backward_case": lambda step, computed: case,
        "_has_untied_guess": lambda step, key: key in explained,
        "_keys_explained_by": lambda step, guess, computed, case: list(guess.keys),
        "accept_mistake": accept,
        "_doubt_tied_tables": lambda step: looked.append("tables"),
    }
    for name, function in functions.items():
        monkeypatch.setattr(backward_mistakes, name, function)
    own = stage(computed=Given())
    backward_mistakes.explain_backward(own)
    unlike = wrong or few_bits
    if not unlike:
        assert looked == ["tables"] and not accepted
    else:
        assert looked == ["none", "first", "tables"]
        assert accepted == [("right", [*wrong, *few_bits], ("r",), "confirmed")]
    looked.clear()
    own.computed = None
    backward_mistakes.explain_backward(own)
    assert looked == []


@pytest.mark.parametrize("change", ["none", "of numbers", "of an operation", "of a base"])
def test_a_mistake_of_an_operation_says_where_it_begins(change: str) -> None:
    changes: dict[str, BackwardChange | None] = {
        "none": None,
        "of numbers": BackwardChange(),
        "of an operation": BackwardChange(operation="rope_cut"),
        "of a base": BackwardChange(misread="one scale for all blocks"),
    }
    cause = "backward_operation"
    guess_of_all: Any = SimpleNamespace(cause=cause, says="it is", change=changes[change])
    old = explained_step.ComparedGradient(why="no gradient")
    own = stage(compared={key: old for key in ("L1.attn_q.weight", "L0.attn_q.weight", "other")})
    wrong, right = ["L1.attn_q.weight", "L0.attn_q.weight"], ["output.weight"]
    backward_mistakes.accept_mistake(own, guess_of_all, wrong, right, "explained")
    where = "; backward from the loss it begins after output, at L1.attn_q"
    says = "it is" + where * (change in ("of an operation", "of a base"))
    for key in wrong:
        found = own.compared[key]
        assert found.why == "" and found.found is not None
        assert (found.found.verdict, found.found.why, found.found.whole) == ("differs", says, True)
        (only,) = found.found.guesses
        assert (only.cause, only.says, only.most) == ("backward_operation", says, "explained")
    assert own.compared["other"] is old


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("first", [(), ("L0.q",)])
def test_points_add_their_rows_and_a_cause_where_one_is_wrong(
    first: tuple[str, ...], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "step_cause", lambda *given: given)
    monkeypatch.setattr(step, "replace", lambda report, **changed: changed)
    points: Any = (SimpleNamespace(key="L0.q", name="n"),)
    left: Any = ("left",)
    compared = ComparedPoints(points, left, first, "it begins", scale)
    report: Any = SimpleNamespace(notes=("a note",), causes=("a cause",))
    found: Any = step._with_points(report, compared)
    assert (found["points"], found["left"]) == (points, left)
    cause = ("backward_operation", "it begins", first, {"L0.q": ("n",)}, None)
    assert found["causes"] == (("a cause", cause) if first else ("a cause",))
    assert found["notes"][0] == "a note" and len(found["notes"]) == 1 + (scale != 1.0)
    assert scale == 1.0 or "128 times the computed ones" in found["notes"][1]
