"""Points of a dump that could not be compared are named, and agree with nothing."""

from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import tiny_folder, trace


def narrower(values: dict[str, Any]) -> dict[str, Any]:
    """Return one point of a run, each of whose rows lacks three values."""
    return {"L0.ffn_up": values["L0.ffn_up"][..., :-3]}


def test_an_array_of_another_width_is_not_compared() -> None:
    """Nothing else was recorded, so that the side agrees with nothing."""
    folder = tiny_folder("llama")
    found = diagnose(str(folder), str(trace(folder, "narrow", rename=narrower)))
    assert found.exit_code == 2 and found.verdict == "not_comparable"
    assert "no point of the two has values on the same rows" in found.sentence
    assert ("captured array", "L0.ffn_up", "unreadable") in [
        (row.kind, row.name, row.state) for row in found.left
    ]


def test_an_array_of_another_width_is_named_beside_points_that_agree() -> None:
    folder = tiny_folder("llama")
    run = trace(folder, "narrow-one", rename=lambda own: {**own, **narrower(own)})
    found = diagnose(str(folder), str(run))
    assert found.exit_code == 2 and "L0.ffn_up" in found.sentence
    assert [row.name for row in found.left] == ["L0.ffn_up"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_side_of_which_nothing_was_compared_is_said(swapped: bool) -> None:
    """The other run's points all agree with the model's."""
    folder = tiny_folder("llama")
    sides = [trace(folder, "all-points"), trace(folder, "narrow", rename=narrower)]
    if swapped:
        sides.reverse()
    found = diagnose(*map(str, sides), model=str(folder))
    assert found.exit_code == 2
    assert f"no point of {'A' if swapped else 'B'} could be compared" in found.sentence
