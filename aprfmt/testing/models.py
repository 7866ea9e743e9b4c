"""Compare a model with the one it was made from, in a test.

A failure's message is the diagnosis.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Literal

from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.diagnosis_text import report_text
from aprfmt.diagnosis.records import Diagnosis
from aprfmt.errors import UsageError

Within = Literal["same", "precision"]
ALLOWED: dict[Within, tuple[str, ...]] = {"same": ("same",), "precision": ("same", "precision")}


def assert_same_model(
    a: str | PathLike[str],
    b: str | PathLike[str],
    *,
    within: Within = "precision",
    model: str | PathLike[str] | None = None,
    ids: Sequence[int] | None = None,
    prompt: str | None = None,
) -> Diagnosis:
    """Return the diagnosis if A and B compute the same; AssertionError with its text otherwise.

    `a` and `b` are what `aprfmt diagnose` takes: models in any format, `MODEL@RUN`, saved traces
    (with the `model` they ran on). `within="precision"` allows the rounding of dtypes and of
    quantized encodings, `within="same"` does not. Raises UsageError, FormatError and the other
    errors of reading a file where one of them cannot be read.
    """
    if within not in ALLOWED:
        raise UsageError(f"within={within!r}; expected one of {', '.join(ALLOWED)}")
    found = diagnose(
        str(a), str(b), model=None if model is None else str(model), ids=ids, prompt=prompt
    )
    if found.kind not in ALLOWED[within]:
        raise AssertionError(report_text(found))
    return found
