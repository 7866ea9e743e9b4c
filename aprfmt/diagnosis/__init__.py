"""`diagnose`: where two models, traces or runs first differ, and why."""

from aprfmt.diagnosis.entry import diagnose
from aprfmt.diagnosis.found import Diagnosis, Evidence, PointRow
from aprfmt.measure.findings import Finding

__all__ = ["Diagnosis", "Evidence", "Finding", "PointRow", "diagnose"]
