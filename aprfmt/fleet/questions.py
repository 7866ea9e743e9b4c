"""The questions of a scan: the checks of a file, and reports that compare many models.

The checks are the rows of the one table (aprfmt.checks); REPORTS are the others. An *item* is one
thing that a model is made of: a file, a tensor, a key, a text.
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.outcome import Outcome
from aprfmt.checks.check_runner import run_check
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.value_pass import undecodable_reason
from aprfmt.checks.records import NotRun
from aprfmt.checks.table import file_checks
from aprfmt.errors import AprfmtError, ArchError, UsageError
from aprfmt.model import Model
from aprfmt.model.ledger import OF_WEIGHTS
from aprfmt.model.manifest import tensor_rows
from aprfmt.tensors.companions import all_bytes

ARCHITECTURE = "general.architecture"
ACCOUNT = "account"  # the question of items that no table lists
SHOWN = 5  # findings stored of one answer; `validate` has them all


@dataclass(frozen=True, slots=True)
class QuestionAnswer:
    """The answer to one question: an outcome, one line, findings of checks, and its facts."""

    outcome: Outcome
    found: str = ""
    findings: Sequence[Mapping[str, str]] = ()
    details: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One row: its name, what an answer of PASS says, and the function that gives it."""

    name: str
    proves: str
    ask: Callable[[CheckContext], QuestionAnswer]


def tensor_digests(context: CheckContext) -> QuestionAnswer:
    """Return an answer whose details have the SHA-256 of every tensor's stored and decoded values.

    `details["tensors"]` are rows (key, encoding, shape, bytes, SHA-256 stored, SHA-256 decoded),
    with None for what cannot be read. NOT_RUN if none can be read.
    """
    model = context.model
    rows = [
        [
            row["key"],
            row["encoding"],
            row["shape"],
            _stored_bytes(model, row["names"]),
            hashlib.sha256("".join(row["raw"]).encode()).hexdigest() if row["raw"] else None,
            row.get("decoded"),
        ]
        for row in tensor_rows(model)
    ]
    lost = sum(row[4] is None for row in rows)
    outcome: Outcome = "NOT_RUN" if lost == len(rows) else "PASS"
    note = f", {lost} cannot be read" if lost else ""
    return QuestionAnswer(outcome, f"{len(rows)} tensors{note}", details={"tensors": rows})


def _stored_bytes(model: Model, names: Sequence[str]) -> int:
    """Return the stored bytes of the named tensors, scales and other companions included."""
    return sum(all_bytes(model[name]) for name in names if name in model)


def template_hash(context: CheckContext) -> QuestionAnswer:
    """Return an answer whose details have SHA-256 of the chat template and of the vocabulary.

    The vocabulary is hashed in order of its ids. The template's is None where there is none.
    """
    carried = context.carried
    text = carried.chat_template()
    words = context.words
    pieces = hashlib.sha256()
    for piece in words.tokens:
        pieces.update(f"{piece}\0".encode(errors="surrogatepass"))
    found = None if text is None else hashlib.sha256(text.encode(errors="replace")).hexdigest()
    said = "no chat template" if text is None else f"{len(text)} characters"
    return QuestionAnswer(
        "PASS",
        said,
        details={
            "template": found,
            "characters": 0 if text is None else len(text),
            "vocabulary": pieces.hexdigest(),
            "pieces": len(words.tokens),
        },
    )


def bytes_by_encoding(context: CheckContext) -> QuestionAnswer:
    """Return an answer whose details have bytes and parameters by encoding, and `quantized`.

    `quantized` is whether any tensor has an encoding that is no plain number type of NumPy.
    """
    bytes_of: Counter[str] = Counter()
    count_of: Counter[str] = Counter()
    for name in context.model:
        view = context.model[name]
        bytes_of[view.encoding] += all_bytes(view)
        count_of[view.encoding] += math.prod(view.shape)
    most = ", ".join(name for name, _ in bytes_of.most_common(3))
    return QuestionAnswer(
        "PASS",
        most or "no tensors",
        details={
            "bytes": dict(bytes_of),
            "parameters": dict(count_of),
            "quantized": any(not find_encoding(name).numpy for name in bytes_of),
        },
    )


def architecture_support(context: CheckContext) -> QuestionAnswer:
    """Return an answer with the architecture's name, how far aprfmt knows it, and `shapes`.

    `shapes` is the SHA-256 of the roles and shapes of all tensors, None where the roles are not
    known. NOT_RUN with the level "unknown" for an architecture without tables.
    """
    named = ""
    with suppress(AprfmtError):
        config = context.model.config or {}
        named = str(config.get("model_type") or context.model.metadata.get(ARCHITECTURE) or "")
    try:
        spec = context.spec
    except NotRun as why:
        return QuestionAnswer(
            "NOT_RUN", str(why), details={"architecture": named, "level": "unknown"}
        )
    shape: list[tuple[str, tuple[int, ...]]] = []
    with suppress(AprfmtError, ArchError):
        shape = sorted((key, tuple(view.shape)) for key, view in context.model.roles.items())
    mark = hashlib.sha256(repr(shape).encode()).hexdigest() if shape else None
    return QuestionAnswer(
        "PASS", spec.name, details={"architecture": spec.name, "level": "full", "shapes": mark}
    )


def unread_items(context: CheckContext) -> QuestionAnswer:
    """Return an answer whose details count `items` that no table lists, and `weights`.

    Tensors that cannot be decoded count as items too. `weights` is the number of those tensors, and
    of the unlisted weights where the file says what model it is: they may change what it computes.
    """
    ledger, stored = context.ledger, context.model.source.tensors
    kinds: Counter[str] = Counter(item.kind for item in ledger.unread)
    weights = {one.name for one in ledger.unread if one.kind in OF_WEIGHTS and ledger.of_a_model}
    lost = {name for name, tensor in stored.items() if undecodable_reason(tensor)}
    kinds["tensor that cannot be decoded"] = len(lost - {one.name for one in ledger.unread})
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return QuestionAnswer(
        "PASS",
        f"not read: {said}" if said else f"{len(ledger.items)} items",
        details={"items": kinds.total(), "weights": len(weights | lost)},
    )


REPORTS: tuple[Question, ...] = (
    Question(ACCOUNT, "how many items of a model are not read", unread_items),
    Question("digests", "which tensors are equal to others'", tensor_digests),
    Question("template", "which chat template and which vocabulary a model has", template_hash),
    Question(
        "encodings", "how many bytes and parameters stand in which encoding", bytes_by_encoding
    ),
    Question(
        "support", "which architecture a model is of, and how far it is known", architecture_support
    ),
)


def _check_question(row: Any) -> Question:
    """Return the Question that runs one row of the table of checks on a model."""

    def ask_check(context: CheckContext) -> QuestionAnswer:
        """Return the check's outcome, what it found in a line, its first findings as dicts."""
        answer = run_check(row, context)
        lines = [check.found for check in answer.checks if check.outcome == answer.outcome]
        found = answer.why or next(filter(None, lines), "")
        return QuestionAnswer(
            answer.outcome, found, [asdict(one) for one in itertools.islice(answer.findings, SHOWN)]
        )

    return Question(row.name, row.proves, ask_check)


def select_questions(names: Sequence[str] = ()) -> dict[str, Question]:
    """Return {name: question} in the table's order; all of them for no names.

    Raises UsageError for an unknown name.
    """
    every = {row.name: row for row in (*map(_check_question, file_checks()), *REPORTS)}
    for name in names:
        if name not in every:
            raise UsageError(f"no check {name!r}; expected one of {', '.join(every)}")
    return {name: row for name, row in every.items() if not names or name in names}
