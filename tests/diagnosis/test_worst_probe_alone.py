"""The effect of a part is that of the probe which shows it most.

Seen red: the probe that shows it least, an infinite distance smaller than any other.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.diagnosis.finding_effects import PartMeasurement


@pytest.mark.parametrize(
    ("distances", "worst"),
    [((0.1, 0.5, 0.2), 0.5), ((0.5, math.inf), math.inf), ((math.nan, 0.5), math.nan)],
)
def test_the_worst_probe_counts(distances: tuple[float, ...], worst: float) -> None:
    results = [SimpleNamespace(distance=each) for each in distances]
    passes: Any = SimpleNamespace(
        blend=list,
        run_from_first_difference=lambda blend, probe: results[probe],
        run_and_compare_points=lambda blend, probe: results[probe],
    )
    part: Any = SimpleNamespace(hyper=("n_heads",), keys=())
    probes: Any = range(len(results))
    measured = PartMeasurement(passes, [part], probes)
    found: Any = measured.without([])
    assert found.distance == pytest.approx(worst, nan_ok=True)
    points: Any = PartMeasurement(passes, [part], probes)
    assert points.with_only([]) is results[0]  # whose points are shown
    assert points.without([]).distance == pytest.approx(worst, nan_ok=True)
