"""Guesses of another rule than the stated one, and of an epsilon, correction or scale of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training import bias_correction, epsilon, scaled_gradients
from aprfmt.causes.training.optimizers import Moments, Recipe
from aprfmt.causes.training.other_optimizer import (
    directions,
    factored,
    guess_other_optimizer,
    is_step_along,
    orthogonal,
)
from aprfmt.causes.training.step_case import StepCase

RNG = np.random.default_rng(4)
ADAM = Recipe("adamw", lr=1e-2, step=1)


def step_of(change: Any, gradient: Any = None, **more: Any) -> StepCase:
    """Return the case of a matrix that changed so from numbers near 1, in float64."""
    change = np.asarray(change, np.float64)
    before = 1 + 0.1 * np.random.default_rng(1).normal(size=change.size)
    settings: dict[str, Any] = {
        "shape": change.shape if change.ndim == 2 else None, "encodings": ("F64", "F64"), **more
    }  # fmt: skip
    flat = None if gradient is None else np.asarray(gradient, np.float64).reshape(-1)
    return StepCase(
        "k", settings.pop("vector", False), before, before + change.reshape(-1),
        settings.pop("encodings"), np.arange(change.size), gradient=flat, **settings,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_an_orthogonal_gradient_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    """Muon's five steps leave them between 0.7 and 1.2, along the singular vectors."""
    u, _, vt = np.linalg.svd(RNG.normal(size=shape), full_matrices=False)
    gradient = (u * np.linspace(1, 3, len(vt))) @ vt
    made = orthogonal(gradient)
    inner = u.T @ made @ vt.T
    sizes = np.diag(inner)
    assert made.shape == shape and np.abs(inner - np.diag(sizes)).max() < 1e-9
    assert (sizes > 0.65).all() and (sizes < 1.25).all()
    assert np.allclose(orthogonal(1e6 * gradient), made)
    assert not orthogonal(np.zeros(shape)).any()


def test_one_singular_value_goes_through_the_stated_polynomial() -> None:
    """The coefficients of torch.optim.Muon, five times, on a number that begins at 1."""
    x = 1.0
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert orthogonal(np.array([[-7.0]])) == pytest.approx(-x)
    assert orthogonal(np.array([[0.0, 3.0, 4.0]])) == pytest.approx(np.array([[0, 0.6, 0.8]]) * x)


def test_of_squares_of_rank_one_only_the_signs_are_left() -> None:
    sizes = np.array([1.0, 2.0, 3.0])[:, None] * np.array([5.0, 7.0])
    signs = np.array([[1, -1], [-1, 1], [1, 1]])
    assert np.allclose(factored(sizes * signs), signs)
    other = np.array([[3.0, 0.0], [4.0, 1.0]])
    # rows 4.5, 8.5; columns 12.5, 0.5; mean 6.5
    expected = other / np.sqrt(np.array([[4.5 * 12.5, 4.5 * 0.5], [8.5 * 12.5, 8.5 * 0.5]]) / 6.5)
    assert np.allclose(factored(other), expected)
    assert factored(np.array([[0.0, 0.0], [0.0, 2.0]])).tolist() == [[0, 0], [0, 1]]
    assert not factored(np.zeros((2, 3))).any()


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("adamw", ["SGD", "Adafactor's", "Muon's"]),
        ("sgd", ["Lion's", "Adafactor's", "Muon's"]),
        ("adafactor", ["SGD", "Lion's", "Muon's"]),
    ],
)
def test_the_stated_rules_own_direction_is_left_out(stated: str, words: list[str]) -> None:
    gradient = RNG.normal(size=(8, 6))
    case = step_of(-gradient, gradient)
    found = list(directions(case, stated))
    assert len(found) == len(words)
    made = {
        "SGD": (gradient, 2e-3), "Lion's": (np.sign(gradient), 2e-3),
        "Adafactor's": (factored(gradient), 2e-3), "Muon's": (orthogonal(gradient), 0.2),
    }  # fmt: skip
    for (says, direction, room), word in zip(found, words, strict=True):
        assert word in says and room == made[word][1]
        assert np.array_equal(direction, made[word][0].reshape(-1))


@pytest.mark.parametrize("shape", [None, (1, 48), (48, 1)])
def test_vectors_have_no_direction_of_a_matrix(shape: Any) -> None:
    gradient = RNG.normal(size=48)
    case = replace(step_of(-gradient, gradient), shape=shape)
    assert len(list(directions(case, "adamw"))) == 1
    assert len(list(directions(case, "sgd"))) == 1
    assert len(list(directions(case, "adafactor"))) == 2


def test_a_step_is_along_a_direction_against_it_and_by_its_decay() -> None:
    direction = RNG.normal(size=64)
    assert is_step_along(direction, 1e-3, ADAM, step_of(-0.02 * direction))
    assert not is_step_along(direction, 1e-3, ADAM, step_of(0.02 * direction))
    assert not is_step_along(direction, 1e-3, ADAM, step_of(np.zeros(64)))
    assert not is_step_along(np.zeros(64), 1e-3, ADAM, step_of(-0.02 * direction))
    assert not is_step_along(direction[:63], 1e-3, ADAM, step_of(-0.02 * direction))
    before = step_of(direction).before
    decayed = step_of(-0.02 * direction - 0.003 * before)
    assert not is_step_along(direction, 1e-3, ADAM, decayed)
    assert is_step_along(direction, 1e-3, replace(ADAM, wd=0.1), decayed)
    alone = replace(ADAM, wd=0.1, decay_on="matrices")
    assert is_step_along(direction, 1e-3, alone, decayed)
    assert not is_step_along(direction, 1e-3, alone, replace(decayed, vector=True))


@pytest.mark.parametrize(("share", "along"), [(0.9, True), (1.1, False)])
def test_what_is_left_is_at_most_a_share_of_the_step(share: float, along: bool) -> None:
    direction = np.tile([1.0, 2.0], 32)
    across = np.tile([2.0, -1.0], 32)  # as long, and at a right angle
    change = -0.02 * (direction + share * 0.05 * across)
    assert is_step_along(direction, 0.05, ADAM, step_of(change)) == along


@pytest.mark.parametrize(("times", "along"), [(5.0, True), (3.0, False)])
def test_a_step_is_four_times_its_rounding_at_least(times: float, along: bool) -> None:
    """Of float32 a spacing and a half: half a one to store, a whole one to add."""
    direction = np.where(np.arange(64) % 2, 1.0, -1.0)
    case = step_of(np.zeros(64), encodings=("F32", "F32"))
    case = replace(case, before=np.full(64, 1.5), after=np.full(64, 1.5))
    size = times * float(np.linalg.norm(case.rounding)) / 8
    moved = replace(case, after=case.before - size * direction)
    assert is_step_along(direction, 1e-3, ADAM, moved) == along


def guesses(case: StepCase, recipe: Recipe = ADAM) -> list[Any]:
    return list(guess_other_optimizer(case, recipe))


def test_a_first_step_of_another_rule_is_said_once() -> None:
    gradient = RNG.normal(size=(8, 6))
    for word, direction in (
        ("SGD", gradient), ("Adafactor's", factored(gradient)), ("Muon's", orthogonal(gradient)),
    ):  # fmt: skip
        case = step_of(-0.03 * direction, gradient)
        (one,) = guesses(case)
        assert word in one.says and one.says.endswith("; stated is adamw")
        assert (one.cause, one.most, one.free) == ("other_optimizer", "explained", 1)
        assert one.right(case) and not one.right(step_of(0.03 * direction, gradient))
    sgd = Recipe("sgd", lr=0.5, step=1)
    (one,) = guesses(step_of(-0.03 * np.sign(gradient), gradient), sgd)
    assert "Lion's" in one.says and one.says.endswith("; stated is sgd")


def test_a_right_step_and_one_of_no_rule_have_no_guess() -> None:
    gradient = RNG.normal(size=(8, 6))
    sgd = Recipe("sgd", lr=0.5, step=1)
    assert not guesses(step_of(-0.5 * gradient, gradient), sgd)
    assert not guesses(step_of(RNG.normal(size=(8, 6)), gradient))


def test_only_first_steps_of_enough_fine_elements_are_tried() -> None:
    gradient = RNG.normal(size=(8, 4))
    case = step_of(-0.03 * gradient, gradient)
    assert guesses(case) and guesses(case, replace(ADAM, step=None))
    assert not guesses(case, replace(ADAM, step=2))
    assert not guesses(replace(case, gradient=None))
    assert not guesses(replace(case, moments=Moments(None, None, 1)))
    assert not guesses(replace(case, encodings=("F32", "BF16")))
    few = step_of(-0.03 * gradient.reshape(-1)[:31], gradient.reshape(-1)[:31])
    assert not guesses(few)


def test_epsilon_is_asked_in_both_places_and_by_every_other_power() -> None:
    case: Any = SimpleNamespace(signs=False)
    recipe = Recipe("adamw", lr=0.1, eps=1e-8)
    found = list(epsilon.guess_epsilon(case, recipe))
    places = [one.recipe and one.recipe.epsilon for one in found if one.cause == "epsilon_place"]
    assert places == ["inside", "uncorrected"]
    values = {
        one.recipe and one.recipe.eps: one.says for one in found if one.cause == "epsilon_value"
    }
    powers = {float(f"1e-{n}") for n in (1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 15)}
    assert set(values) == powers
    assert values[1e-3] == "epsilon is 0.001, stated is 1e-08"
    signs: Any = SimpleNamespace(signs=True)
    assert not list(epsilon.guess_epsilon(signs, recipe))
    assert not list(epsilon.guess_epsilon(case, Recipe("sgd", lr=0.1)))


def test_a_gradient_was_multiplied_or_divided_by_a_whole_number() -> None:
    case: Any = SimpleNamespace(gradient=np.ones(1), moments=None)
    recipe = Recipe("adamw", lr=0.1, scale=0.5)
    found = list(scaled_gradients.guess_scale(case, recipe))
    numbers = {one.recipe.scale / 0.5: one.says for one in found if one.recipe}
    assert len(numbers) == len(found)
    for number in (2, 3, 31, 32, 64, 1 << 24, 100, 1000):
        assert numbers[number] == f"the optimizer had {number} times the gradient that was given"
        assert numbers[1 / number].startswith(f"the optimizer had 1/{number} of the gradient")
    assert not {1, 33, 1 << 25} & set(numbers)
    assert not list(scaled_gradients.guess_scale(case, Recipe("sgd", lr=0.1)))
    for held, some in (
        (Moments(None, None, 1, True), False),
        (Moments(None, None, 1, False), True),
    ):
        case = SimpleNamespace(gradient=np.ones(1), moments=held)
        assert bool(list(scaled_gradients.guess_scale(case, recipe))) == some
    case = SimpleNamespace(gradient=None, moments=None)
    assert not list(scaled_gradients.guess_scale(case, recipe))


def test_corrections_are_asked_of_rules_with_two_moments() -> None:
    case: Any = SimpleNamespace()
    both: Any = list(bias_correction.guess_uncorrected(case, ADAM))
    assert [one.recipe.correction for one in both] == ["none", "first"]
    assert [one.says.split(" ")[0] for one in both] == ["neither", "the"]
    (alone,) = bias_correction.guess_second_alone(case, ADAM)
    assert alone.recipe is not None and alone.recipe.correction == "second"
    assert {one.cause for one in (*both, alone)} == {"bias_correction"}
    assert alone.says.startswith("the second moment alone is corrected")
    lion = Recipe("lion", lr=0.1)
    assert not list(bias_correction.guess_uncorrected(case, lion))
    assert not list(bias_correction.guess_second_alone(case, lion))


def test_another_correction_is_asked_of_a_state_before_the_step() -> None:
    held = Moments(np.ones(1), np.ones(1), 3, after=False)
    case: Any = SimpleNamespace(moments=held, others={})
    found = list(bias_correction.guess_other_correction(case, ADAM))
    asked = [(one.recipe.corrected_b1, one.recipe.corrected_b2) for one in found if one.recipe]
    first = [(rate, None) for rate in (0.8, 0.85, 0.95, 0.98)]
    second = [(None, rate) for rate in (0.9, 0.95, 0.98, 0.99, 0.995)]
    assert asked == first + second
    assert found[0].number == ("corrected_b1", 0.8) and found[-1].number == ("corrected_b2", 0.995)
    assert "beta 1 of 0.9, as stated, and corrected for one of 0.8" in found[0].says
    case = SimpleNamespace(moments=held, others={"corrected_b1": 0.5})
    found = list(bias_correction.guess_other_correction(case, ADAM))
    assert found[0].number == ("corrected_b1", 0.5) and len(found) == 6
    for other in (None, replace(held, after=True), replace(held, step=0)):
        case = SimpleNamespace(moments=other, others={})
        assert not list(bias_correction.guess_other_correction(case, ADAM))
    case = SimpleNamespace(moments=held, others={})
    assert not list(bias_correction.guess_other_correction(case, Recipe("lion", lr=0.1)))
