"""Findings on config flags that a model's tensors contradict, and on packings stated twice."""

from aprfmt.causes.contradicted_flags import contradiction_findings, judged_contradictions
from aprfmt.causes.packing_files import packing_file_findings
from aprfmt.diagnosis.records import Evidence
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.measure.findings import Finding
from aprfmt.model import Model


def add_flag_findings(a: Model, b: Model, found: Levels, *, measured: bool = True) -> None:
    """Add to `found` the config flags that a model's tensors contradict and the other model lacks.

    Such a flag (as of tied heads or biases) is tried as stated and as the tensors imply. Where both
    compute the same it is evidence only. With `measured` the logits of both are computed, which
    makes it a confirmed finding or evidence; without, the finding is `located`. So is the finding
    that two files state different packings.
    """
    for label, model, other in (("A", a, b), ("B", b, a)):
        found.stated += packing_file_findings(model, other, label)
        changing, idle = judged_contradictions(model, other)
        for row in idle:
            says = row.says.format(side=label) + "; both readings compute the same"
            found.evidence.append(Evidence("config", says, (row.key, *row.keys[:4])))
        for one in contradiction_findings(changing, model, label):
            made: Finding | None = one
            if measured:
                from aprfmt.diagnosis.flag_effects import measure_flag

                made = measure_flag(one, model, other)
            if made is None:
                says = f"{one.says}; the logits do not show it"
                found.evidence.append(Evidence("config", says, one.where[:1]))
            else:
                found.stated.append(made)
