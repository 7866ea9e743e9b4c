"""`diagnose`: where two models, traces or runs first differ, and why."""

from aprfmt.diagnosis.records import Diagnosis, Evidence, Finding, PointRow
from aprfmt.diagnosis.walk import diagnose

__all__ = ["Diagnosis", "Evidence", "Finding", "PointRow", "diagnose"]
