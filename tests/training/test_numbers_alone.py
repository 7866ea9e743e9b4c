"""Numbers of an optimizer's state and verdicts on parameters, each by itself."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from aprfmt.training import numbered_states, step
from aprfmt.training.numbered_states import Candidate, Numbered


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
    given = {"gradients": {}, "compared": {} if found is None else {"k": found}, "recipe": None}
    held: Any = SimpleNamespace(**(given | more))
    return step._Step._judge_parameter(held, parameter, bool(more.get("updates")), None)


def compared(verdict: str = "", why: str = "", **more: Any) -> Any:
    found: Any = SimpleNamespace(verdict=verdict, why=why) if verdict else None
    return step._Compared(found=found, **more)


def test_a_parameter_without_an_update_is_judged_by_its_gradient() -> None:
    """Why nothing was compared is said where nothing was; a difference keeps its own words."""
    row, wrong = judged(None)
    assert (row.verdict, row.why, wrong) == ("not compared", NONE, None)
    row, wrong = judged(step._Compared(why="no gradient of it was given"))
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
