"""Single rows of logits that are another token's: each is named, in logits and log-probabilities.

Seen red: only the interval of all operations was said, with 31 weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis import search as searching
from tests.diagnosis.engine_changes import LOGITS
from tests.diagnosis.engines import tiny_folder, trace
from tests.models import IDS

N = len(IDS)


@pytest.fixture(autouse=True)
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few usual mistakes: none of them is what these rows are."""
    monkeypatch.setattr(searching, "RUNS", 24)


def taken(rows: Mapping[int, int], logarithms: bool = False) -> Callable[[Any], Any]:
    """Return a `rename` by which row i of the logits is row rows[i]; `logarithms`: of softmax."""

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        x = np.asarray(values["logits"], np.float64)
        if logarithms:
            x = x - np.log(np.exp(x).sum(-1, keepdims=True))
        order = [rows.get(at, at) for at in range(len(x))]
        return {"logits": x[order].astype(np.float32)}

    return rename


CASES: Mapping[str, tuple[Mapping[int, int], bool, str]] = {
    "one row": ({12: 11}, False, "the logits of 1 of"),
    "exchanged": ({5: 8, 8: 5}, False, "those of position 5 are those of position 8, those of"),
    "late from a token on": ({at: at - 1 for at in range(9, N)}, False,
                             "those of position 9 are those of position 8"),
    "of log-probabilities": ({12: 11}, True, "those of position 12 are those of position 11"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_row_of_another_token_is_named(name: str) -> None:
    rows, logarithms, says = CASES[name]
    folder = tiny_folder("qwen2")
    run = trace(folder, f"row-{name}".replace(" ", "-"), points=LOGITS,
                rename=taken(rows, logarithms))  # fmt: skip
    found = diagnose(str(folder), str(run))
    (finding,) = [one for one in found.findings if one.verdict == "bug"]
    assert (finding.cause, finding.certainty) == ("logits_row", "confirmed"), found.sentence
    assert says in finding.says and finding.values["rows"] == {str(a): b for a, b in rows.items()}


def test_a_row_of_no_token_is_no_other_row() -> None:
    def rename(values: dict[str, Any]) -> dict[str, Any]:
        logits = np.array(values["logits"])
        logits[12] = logits[11] * 1.01
        return {"logits": logits}

    folder = tiny_folder("qwen2")
    found = diagnose(str(folder), str(trace(folder, "row-none", points=LOGITS, rename=rename)))
    assert "logits_row" not in [one.cause for one in found.findings], found.sentence
