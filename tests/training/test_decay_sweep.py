"""No decay that the weights do not show is said to be the stated one, whatever rate and type.

Seen red: BF16 weights that 1.5 times the decay gave, to the bit in 999 of 1000, "agrees"; F32
weights whose decay is below the spacing of 1 - lr * wd, "agrees" with any; a first step of finer
copies that agreed without a word on its decay; an interval of a factor that rounding had moved.
"""

from pathlib import Path

import numpy as np
import pytest

from aprfmt.causes.training.lost_updates import MULTIPLES, DecayEvidence
from tests.training.steps import EPS, Made, Values, gradients, rounded, weights


def after(encoding: str, lr: float, share: float) -> Values:
    """Return the weights after AdamW's first step, each matrix less a share of itself."""
    made = {}
    for name, w in weights().items():
        g = gradients()[name].astype(np.float64)
        kept = w.astype(np.float64) * (1 - share if w.ndim > 1 else 1)
        whole = (kept - lr * g / (np.abs(g) + EPS)).astype(np.float32)
        made[name] = whole if encoding == "F32" else rounded(whole, encoding)
    return made


@pytest.mark.parametrize("times", [0.25, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("lr", "wd"), [(1e-6, 1e-2), (1e-5, 0.1), (1e-4, 0.1), (1e-2, 0.1)])
@pytest.mark.parametrize("encoding", ["BF16", "F16", "F32"])
def test_a_decay_is_right_only_where_the_weights_show_it(
    encoding: str, lr: float, wd: float, times: float, tmp_path: Path
) -> None:
    rule = f"adamw:lr={lr},wd={wd},step=1,decay_on=matrices"
    made = Made(after(encoding, lr, times * lr * wd), rule, grads=gradients(), encoding=encoding)
    report = made.report(tmp_path)
    open_ = [each for each in report.left if each.kind == "decay"]
    if times != 1:
        assert report.exit_code or open_, "agrees with another decay"
    else:
        assert {one.cause for one in report.causes} <= {"update_rounded_away"}
    # What is said of the decays that the bits allow is true of the one that was made.
    for said in {each.why.partition("may be ")[2].partition(" times")[0] for each in open_} - {""}:
        least, largest = map(float, said.split(" to "))
        assert least <= times <= largest, said


def evidence(right: float, wrong: int = 0) -> DecayEvidence:
    """Return what 1000 weights show that are those of one multiple, all others but `wrong`."""
    found = tuple(1000 if each == right else 1000 - wrong for each in MULTIPLES)
    return DecayEvidence(matches=found + (0,) * len(MULTIPLES), total=1000, coarse=True)


def test_bits_decide_a_decay_only_against_its_neighbours() -> None:
    assert evidence(1.0, 30).stated and evidence(1.0, 30).interval == (0.75, 1.25)
    assert not evidence(1.0, 10).stated and evidence(1.0, 10).interval == (0.0, np.inf)
    assert evidence(1.5, 30).other and evidence(1.5, 30).interval == (1.25, 2.0)
    assert evidence(16.0, 30).interval == (8.0, np.inf)
    both = evidence(1.0, 10) + evidence(1.0, 10)
    assert both.stated and both.total == 2000, "chance is that of all together"
    assert not (evidence(1.0, 30) + evidence(1.5, 30)).allowed, "no multiple gives both"
    # Without bits, the measured factor of weights that are not counted, and its constant.
    fine = DecayEvidence(weight=1e6, moment=1e6)
    assert fine.stated and not (fine + DecayEvidence(constant=0.3)).stated
    assert not DecayEvidence(weight=1e6, moment=1e6, coarse=True).stated
