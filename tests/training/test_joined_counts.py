"""Step counts that grow with every parameter are one mistake.

Seen red: with no limit by the number of parameters; with groups of parameters joined as well.
"""

import pytest

from aprfmt.causes.training.optimizers import changed, parse_recipe
from aprfmt.causes.training.step_case import StepGuess
from aprfmt.training.judgement import Judgement
from aprfmt.training.step_causes import fewest_mistakes, joined_counts

RECIPE = parse_recipe("adam:lr=1e-3,step=1")


def judged(counts: list[int]) -> dict[str, Judgement]:
    """Return the verdicts on parameters whose steps were corrected for these counts."""
    made = {}
    for number, count in enumerate(counts):
        says = f"as at step {count}"
        guess = StepGuess("step_count", says, changed(RECIPE, counted=count), 1)
        made[f"L{number}.attn_q.weight"] = (
            Judgement("agrees") if count == 1 else Judgement("differs", says, (guess,))
        )
    return made


@pytest.mark.parametrize("counts", [[1, 2, 3, 4, 5], [5, 3, 1, 4, 2], [2, 3, 4, 6, 1, 5]])
def test_a_count_that_grows_with_every_parameter_is_one_mistake(counts: list[int]) -> None:
    found = judged(counts)
    [(one, also)] = joined_counts(fewest_mistakes(found), found)
    assert set(one.keys) == {key for key, each in found.items() if each.verdict == "differs"}
    assert one.cause == "step_count" and not also and "grows with every parameter" in one.says
    assert "from 2 (" in one.says and f"to {max(counts)} (" in one.says


@pytest.mark.parametrize(
    "counts", [[1, 2, 3, 1], [2, 2, 3, 4, 5, 1], [2, 2, 2], [2, 3, 4, 9, 1, 30]]
)
def test_other_counts_stay_apart(counts: list[int]) -> None:
    found = judged(counts)
    mistakes = fewest_mistakes(found)
    assert joined_counts(mistakes, found) == mistakes
