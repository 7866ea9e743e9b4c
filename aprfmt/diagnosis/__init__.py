"""`diagnose`: where two models, traces or runs first differ, and why."""

from aprfmt.diagnosis.entry import diagnose
from aprfmt.diagnosis.found import CauseFound, Diagnosis, Evidence, PointRow

__all__ = ["CauseFound", "Diagnosis", "Evidence", "PointRow", "diagnose"]
