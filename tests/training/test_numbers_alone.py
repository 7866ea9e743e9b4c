"""Numbers of an optimizer's state and verdicts on parameters, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.optimizers import Recipe
from aprfmt.training import (
    explained_step,
    gradient_comparison,
    numbered_states,
    parameter_verdicts,
    step_notes,
)
from aprfmt.training.judgement import Judgement
from aprfmt.training.numbered_states import Candidate, Numbered
from aprfmt.training.saved_arrays import SavedArrays
from tests.training.replaced import replaced


def matched(steps: Any, changes: Any) -> dict[str, str]:
    def given(values: Any) -> Any:
        return lambda: np.asarray(values, np.float64)

    found = numbered_states._match_changes(
        [Numbered(str(i), (4,), given(one)) for i, one in enumerate(steps)],
        [Candidate(f"p{i}", f"p{i}", (4,), given(one)) for i, one in enumerate(changes)],
    )
    return {number: one.name for number, one in found.items()}


def test_a_number_is_the_parameter_whose_change_its_step_is_like() -> None:
    """A second may be half as like, of parameters and of numbers; the sign does not count."""
    e = np.eye(4)
    half, near = np.full(4, 0.5), np.array([0.51, 0.5, 0.5, 0.4])
    assert matched([e[0], e[1]], [e[1], e[0]]) == {"0": "p1", "1": "p0"}
    assert matched([-2 * e[0], e[1]], [e[1], 3 * e[0]]) == {"0": "p1", "1": "p0"}
    assert matched([e[0]], [e[0], half]) == {"0": "p0"}  # exactly half as like
    assert matched([e[0]], [e[0], near]) == {}
    assert matched([e[0], half], [e[0]]) == {"0": "p0"}
    assert matched([e[0], near], [e[0]]) == {}
    least = numbered_states.LEAST
    for like, found in ((least + 0.01, {"0": "p0"}), (least - 0.01, {})):
        change = np.array([like, (1 - like**2) ** 0.5, 0, 0])
        assert matched([e[0]], [change, e[2]]) == found
    for odd in (np.zeros(4), np.full(4, np.nan), np.full(4, np.inf)):
        assert matched([e[0], odd], [e[0], odd]) == {"0": "p0"}


def test_a_sample_of_an_array_is_runs_from_its_first_element_to_its_last() -> None:
    small = np.arange(numbered_states.SAMPLE, dtype=np.float32)
    assert np.array_equal(numbered_states.sample_of(small.reshape(2, -1)), small)
    large = np.arange(3 * numbered_states.SAMPLE)
    found = numbered_states.sample_of(large)
    runs, length = numbered_states.BLOCKS, numbered_states.SAMPLE // numbered_states.BLOCKS
    assert found.dtype == np.float64 and found.shape == (runs * length,)
    assert (found[0], found[-1]) == (0, large[-1])
    assert (np.diff(found.reshape(runs, length), axis=1) == 1).all()
    assert len(np.unique(found)) == len(found)


# --- the verdict on one parameter -----------------------------------------------------------------

NONE = "no batch says its gradient, and no checkpoint is of after the step"


def judged(found: Any, **more: Any) -> Any:
    """Return (row, verdict for causes) of a parameter; `found` compared its gradient."""
    parameter: Any = SimpleNamespace(
        key="k", names=("n",), before=SimpleNamespace(shape=(2,), encoding="F32"), after=None
    )
    rows = {} if found is None else {"k": found}
    given = {"gradients": {}, "compared": rows, "recipe": None, "given": {}, "computed": None}
    held: Any = SimpleNamespace(**(given | more))
    return parameter_verdicts._judge_parameter(held, parameter, bool(more.get("updates")), None)


def compared(verdict: str = "", why: str = "", **more: Any) -> Any:
    found: Any = SimpleNamespace(verdict=verdict, why=why) if verdict else None
    return explained_step.ComparedGradient(found=found, **more)


def test_a_parameter_without_an_update_is_judged_by_its_gradient() -> None:
    """Why nothing was compared is said where nothing was; a difference keeps its own words."""
    row, wrong = judged(None)
    assert (row.verdict, row.why, wrong) == ("not compared", NONE, None)
    row, wrong = judged(explained_step.ComparedGradient(why="no gradient of it was given"))
    assert (row.verdict, row.why, wrong) == ("not compared", "no gradient of it was given", None)
    for verdict, why in (("agrees", ""), ("differs", "twice as large"), ("agrees", "rounded")):
        one = compared(verdict, why, distance=0.25)
        row, wrong = judged(one)
        assert (row.verdict, row.why, wrong, row.distance) == (verdict, why, one.found, 0.25)
    odd = {"k": SimpleNamespace(nonfinite=3)}
    row, wrong = judged(compared("agrees"), gradients=odd)
    assert (row.verdict, wrong) == ("differs", None)
    assert row.why == "its gradient holds 3 NaN or infinite numbers"
    sound = {"k": SimpleNamespace(nonfinite=0)}
    row, wrong = judged(None, gradients=sound, updates=True)  # not of this parameter
    assert (row.verdict, row.why, row.gradient) == ("not compared", NONE, sound["k"])


@pytest.mark.parametrize("alike", [False, True])
def test_a_parameters_change_is_what_the_step_added(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are of the weights before the step; equal bytes are no change, and are not read."""
    asked: list[str] = []

    def pieces(before: Any, after: Any) -> Any:
        asked.append("read")
        yield 0, 2, np.array([3.0, 4.0]), np.array([3.0, 10.0])
        yield 2, 4, np.array([12.0, 1.0]), np.array([4.0, 1.0 + 2.0**-23])

    monkeypatch.setattr(parameter_verdicts, "pieces", pieces)
    monkeypatch.setattr(parameter_verdicts, "same_bytes", lambda parameter: alike)
    before = SimpleNamespace(shape=(2, 2), encoding="F32")
    parameter: Any = SimpleNamespace(key="k", names=("n",), before=before, after=before)
    held: Any = SimpleNamespace(gradients={}, compared={}, recipe=None, given={}, computed=None)
    row, _ = parameter_verdicts._judge_parameter(held, parameter, True, None)
    found = row.update
    assert found is not None and asked == ["read"] * (not alike)
    if alike:
        assert (found.elements, found.moved, found.one_step) == (4, 0, 0)
        assert (found.norm, found.largest, found.nonfinite, row.norm) == (0.0, 0.0, 0, None)
        return
    assert (found.elements, found.moved, found.one_step, found.nonfinite) == (4, 3, 1, 0)
    assert found.norm == pytest.approx(10.0) and found.largest == 8.0
    assert row.norm == pytest.approx(170**0.5)  # 9 + 16 + 144 + 1
    assert row.why == "no --optimizer says what the step was to do"
    lone, _ = parameter_verdicts._judge_parameter(held, parameter, False, None)
    assert lone.update is None and lone.why == NONE


# --- what the files did not let us compare --------------------------------------------------------


def noted(**more: Any) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return ([(kind, key, why)] that was left, the notes) of a step with three judged weights."""
    kinds = {"a": ("BF16", "BF16"), "b": ("BF16", "BF16"), "c": ("F32", "BF16")}
    parameters = [
        SimpleNamespace(
            key=key,
            before=SimpleNamespace(encoding=first),
            after=SimpleNamespace(encoding=second),
            vector=False,
        )
        for key, (first, second) in kinds.items()
    ]
    judged = more.pop("judged")
    held: Any = SimpleNamespace(
        has_wrong_gradient=lambda key: False,
        **{
            "given": None,
            "computed": None,
            "state": None,
            "parameters": parameters,
            "left": [],
            "notes": [],
            "used": set(),
            "has_state_after": lambda: True,
            "trained_in": None,
        }
        | more,
    )
    rows: Any = [SimpleNamespace(key=key, encoding=kinds[key][0]) for key in kinds]
    with replaced(
        step_notes,
        must_decay=lambda step, parameter: parameter.key == "b",
        add_hidden_decays=lambda step, judged, kinds: None,
        _add_doubts=lambda step: None,
        _add_right_halves=lambda step, rows: None,
    ):
        step_notes.add_notes(held, rows, judged)
    return [(one.kind, one.name, one.why) for one in held.left], held.notes


def agreed(**more: Any) -> Any:
    return Judgement("agrees", **more)


def test_steps_that_agree_only_as_far_as_their_type_shows_are_left() -> None:
    found, notes = noted(
        judged={"a": agreed(shows=False), "b": agreed(), "c": Judgement("differs", shows=False)}
    )
    assert found == [("step", "a", "smaller than BF16 shows")]
    (note,) = notes
    assert note.startswith("steps of a are smaller than BF16 shows, and leave no trace: they are")
    assert "lost unless the trainer holds finer copies" in note
    found, _ = noted(judged={"a": agreed(shows=False), "b": agreed(shows=False)})
    assert [one[:2] for one in found] == [("step", "a"), ("step", "b")]
    found, notes = noted(judged={"c": agreed(shows=False)})
    assert found[0] == ("step", "c", "smaller than F32 shows") and notes == [], "F32 loses none"
    (coarse,), _ = noted(judged={"c": agreed(), "a": agreed()})
    assert coarse[:2] == ("rounding", "c")
    assert coarse[2].startswith("F32 before the step, BF16 after")
    assert noted(judged={"c": Judgement("differs"), "a": agreed()}) == ([], [])


@pytest.mark.parametrize(
    ("counts", "trained_in", "says"),
    [
        ((1000, 200.0, 200, 0), None, "they are lost, as the bits of other weights show"),
        ((1000, 200.0, 0, 0), None, ""),
        ((1000, 0.0, 0, 0), None, "they are lost unless"),
        ((1000, 200.0, 200, 0), "float32", ""),
    ],
)
def test_steps_that_leave_no_trace_are_lost_where_no_finer_copies_are_held(
    counts: tuple[int, float, int, int], trained_in: str | None, says: str
) -> None:
    """Seen red, each: a note beside finer copies; no note beside weights that hold none."""
    judged = {"a": agreed(shows=False), "b": agreed(held_counts=counts)}
    _, notes = noted(judged=judged, parameters=same_kinds(), trained_in=trained_in)
    assert [says in note for note in notes] == ([True] if says else [])


def test_a_direction_without_a_gradient_is_left_and_a_decay_that_sizes_do_not_show() -> None:
    signs = {"a": agreed(signs=True), "b": agreed(signs=True), "c": agreed(signs=False)}
    found, _ = noted(judged=signs, parameters=same_kinds())
    why = "no gradient was given: sizes are compared, not signs"
    decay = ("decay", "b", "no gradient was given, and the sizes do not show the decay")
    assert found == [("direction", "a", why), ("direction", "b", why), decay]
    shown = {**signs, "b": agreed(signs=True, decay=0.1)}
    assert noted(judged=shown, parameters=same_kinds())[0] == found[:2]


def same_kinds() -> list[Any]:
    side = SimpleNamespace(encoding="BF16")
    return [SimpleNamespace(key=key, before=side, after=side, vector=False) for key in "abc"]


def test_what_the_update_is_held_to_is_noted_with_what_was_not_said() -> None:
    computed = "no gradients were given: the update is held to those computed of the batch"
    given = SimpleNamespace(placed={"a": 1, "b": 1})
    judged = {"a": agreed(), "b": agreed(), "c": agreed()}
    kinds = same_kinds()
    assert noted(judged=judged, parameters=kinds, computed=1) == ([], [computed])
    assert noted(judged={}, parameters=kinds, computed=1)[1] == []
    assert noted(judged=judged, parameters=kinds, computed=1, given=given) == ([], [])
    found, _ = noted(judged=judged, parameters=kinds, given=given, used={"b"})
    assert [one[:2] for one in found] == [("gradient", "a")]
    clips = {"a": agreed(clipped=("norm", 2.0)), "b": agreed(clipped=("value", 0.5))}
    assert noted(judged=clips, parameters=kinds)[1] == [
        "the gradients given were clipped to the norm 2 in the step",
        "each element of the gradients given was clipped to 0.5 in the step",
    ]
    (note,) = noted(judged={"a": agreed(decays_all=True), "b": agreed()}, parameters=kinds)[1]
    assert note.startswith("norms and biases decay, as all weights do: a ")


# --- arrays and gradients that files hold ---------------------------------------------------------


def test_points_are_read_by_their_own_names_in_their_files() -> None:
    def file(**arrays: Any) -> Any:
        return SimpleNamespace(
            shapes={name: list(one.shape) for name, one in arrays.items()},
            read=lambda name: arrays[name],
        )

    one, other = np.arange(6.0).reshape(2, 3), np.arange(4.0)
    held = {"grad.q": file(q=one, x=other), "grad.k": file(k=other)}
    own = {"grad.q": "q", "grad.k": "k"}
    saved = SavedArrays(held, own, {}, {}, points={"L0.q": "grad.q", "L0.k": "grad.k"})
    assert saved.point_shapes == {"L0.q": (2, 3), "L0.k": (4,)}
    assert np.array_equal(saved.point("L0.q"), one) and np.array_equal(saved.point("L0.k"), other)


def earlier(
    *,
    rule: str = "adamw",
    number: int | None = 2,
    steps: Any = 1,
    vector: bool = False,
    **more: Any,
) -> Any:
    """Return the gradient of the step before by a first moment of 0.5 of four values."""
    recipe = Recipe("adamw", lr=0.1, step=number, b1=0.75)
    moment = SimpleNamespace(rows=lambda start, stop: np.full((stop - start, 2), 0.5, np.float32))
    first = SimpleNamespace(reader=lambda parameter: more.get("reader", moment))
    held: Any = SimpleNamespace(
        state=None if more.get("stateless") else SimpleNamespace(first=first, steps=steps),
        recipe=None if more.get("unstated") else recipe,
    )
    parameter: Any = SimpleNamespace(before=SimpleNamespace(shape=(2, 2)), vector=False)
    with replaced(gradient_comparison, recipe_of=lambda step, parameter: recipe):
        return gradient_comparison._earlier_gradient(held, parameter)


def test_the_first_moment_of_the_second_step_is_the_first_gradient() -> None:
    """The average holds a share 1 - b1 of it; later ones hold others besides."""
    assert earlier().tolist() == [[2.0, 2.0]] * 2 and earlier().dtype == np.float64
    assert earlier(steps=None).tolist() == [[2.0, 2.0]] * 2
    each: list[dict[str, Any]] = [
        {"number": 1}, {"number": 3}, {"number": None}, {"steps": 2}, {"steps": 0},
        {"stateless": True}, {"unstated": True}, {"reader": None},
    ]  # fmt: skip
    for known in each:
        assert earlier(**known) is None, known
