"""`diagnose`: where two models, traces or runs first differ, and why."""

from aprfmt.diagnosis.entry import diagnose
from aprfmt.diagnosis.records import Diagnosis, Evidence, Finding, PointRow

__all__ = ["Diagnosis", "Evidence", "Finding", "PointRow", "diagnose"]
