"""An answer as a worker process returns it: its line of the results file, and its facts.

A *row* is the answer to one question about one model, as the results file has it.

Line and facts are made in the process that asked, so that the process that gathers them only
writes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aprfmt.fleet.questions import ACCOUNT
from aprfmt.fleet.tasks import DERIVES, ERROR, OPEN, Row


class RowFacts(NamedTuple):
    """The facts of one row that a summary needs.

    `model` are columns of its table of models, `tensors` rows (SHA-256 stored, SHA-256 decoded,
    bytes, key). `found`, `findings` and `details` (JSON) are empty where no list shows them.
    """

    identity: str
    name: str
    outcome: str
    base: str = ""
    found: str = ""
    findings: str = ""
    details: str = ""
    model: Mapping[str, Any] = {}
    tensors: Sequence[tuple[str, str | None, int, str]] = ()


class AnswerLine(NamedTuple):
    """A row as a line of JSON, its end included, and its facts."""

    line: bytes
    facts: RowFacts


def encode_answer(row: Row) -> AnswerLine:
    """Return an AnswerLine: the row as a line of JSON, and the facts for the summary."""
    text = json.dumps(row, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return AnswerLine(text.encode() + b"\n", summary_facts(row))


def summary_facts(row: Row) -> RowFacts:
    """Return the facts of a row that a summary needs."""
    identity, name, outcome = row["identity"], row["check"], row["outcome"]
    details = row["details"]
    if name == DERIVES:
        base = row["base_identity"]
        return RowFacts(identity, name, outcome, base, row["found"], details=json.dumps(details))
    shown = outcome in ("FAIL", ERROR)
    return RowFacts(
        identity,
        name,
        outcome,
        "",
        row["found"] if shown else "",
        json.dumps(row["findings"]) if shown else "",
        json.dumps(details) if name == ACCOUNT else "",
        model=_model_columns(name, details),
        tensors=_tensor_rows(details) if name == "digests" else (),
    )


def _model_columns(name: str, details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return {column: value} that an answer adds to the summary's table of models.

    {} for a question that adds none. `name` is the question, `details` are the answer's.
    """
    if name == OPEN:
        return {"format": details.get("format")}
    if name == "support":
        return {
            "arch": details.get("architecture"),
            "level": details.get("level"),
            "shapes": details.get("shapes"),
        }
    if name == "encodings":
        return {
            "quantized": details.get("quantized"),
            "encodings": json.dumps(details.get("bytes", {})),
        }
    if name == "template":
        return {
            "template": details.get("template") or "none",
            "vocabulary": details.get("vocabulary"),
        }
    return {}


def _tensor_rows(details: Mapping[str, Any]) -> list[tuple[str, str | None, int, str]]:
    """Return (SHA-256 stored, SHA-256 decoded, bytes, key) of each tensor that could be read."""
    return [
        (raw, decoded, size, key)
        for key, _, _, size, raw, decoded in details.get("tensors", ())
        if raw is not None
    ]
