"""Findings on tokenizers, templates and generation settings, and the keys that repair B's."""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.diagnosis.records import Evidence
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import set_command
from aprfmt.measure.proofs import Proof, unfitted_proof
from aprfmt.measure.texts import compare_equal_tokenizers, uncompared_tokenizers
from aprfmt.model import Model
from aprfmt.tokenizer.keys import CHAT_TEMPLATE, TEMPLATE_FILE

if TYPE_CHECKING:
    from aprfmt.causes.tokenizer.vocabulary_lists import TokenizerDifference

_OF = "probe texts, conversations and ends that are not A's; a share"


def add_tokenizer_findings(a: Model, b: Model, found: Levels) -> None:
    """Add findings and evidence on differing tokenizers to `found`; no pass is needed."""
    report = compare_equal_tokenizers(a, b)
    if report is None:
        from aprfmt.causes.tokenizer.comparison import compare_tokens

        report = compare_tokens(a, b)
    found.stated += [_token_finding(row, b) for row in report.findings]
    for row in report.findings:
        found.evidence += [
            Evidence("identity", f"{label}: {text}", row.where[:1])
            for label, text in zip("AB", row.example, strict=False)
        ]
    found.evidence += [
        Evidence("identity", f"tokenizer: {row.says}; without effect", row.where)
        for row in report.notes
        if not row.told
    ]
    found.evidence += [Evidence("identity", text) for text in report.remarks]
    found.added = report.added
    found.checked += report.checked
    found.not_checked += report.not_checked
    found.left += uncompared_tokenizers(a, b, report)


def list_token_findings(a: Model, b: Model) -> tuple[Finding, ...]:
    """Return the findings on tokenizers that differ, each with what it does to the probe texts."""
    if compare_equal_tokenizers(a, b) is not None:
        return ()
    from aprfmt.causes.tokenizer.comparison import compare_tokens

    return tuple(_token_finding(row, b) for row in compare_tokens(a, b).findings)


def _token_finding(one: "TokenizerDifference", b: Model) -> Finding:
    """Return the finding of one difference between the tokenizers."""
    says = one.says
    if one.example:
        says += f"; first shown by {one.example[0]} in A"
        says += f", {one.example[-1].partition(' is ')[2]} in B"
    elif not one.probed:
        says += "; texts could not be encoded on both sides, so that none was tried"
    elif not one.shown:
        says += "; no probe text and no conversation shows it"
    return Finding(
        one.cause,
        says,
        "identity",
        "bug",
        one.where,
        one.shown,
        "",
        one.before,
        one.after,
        _OF,
        {one.name: {"a": one.a, "b": one.b}},
        exercised="shows" if one.shown else "not_exercised",
        proof=_difference_proof(one),
        counted=True,
        next=_set_command(b, one.mend),
    )


def _difference_proof(one: "TokenizerDifference") -> Proof | None:
    """Return the Proof of a difference; None where probes differ even with A's lists or texts in B.

    It is a weak proof where no probe showed the difference.
    """
    if one.after != 0:
        return None
    return unfitted_proof() if one.shown else Proof(1, 1.0, 1, 0.0)


def _set_command(b: Model, keys: tuple[str, ...]) -> str:
    """Return the `set` command for KEY=VALUE texts `keys` in a copy of B; "" without keys."""
    if not keys:
        return ""
    return set_command(b.path if b.folder is None else b.folder.path, [*map(shlex.quote, keys)])


_LONGEST = 120  # characters of a text in a command


def tokenizer_set_arguments(a: Model, b: Model, where: Sequence[str]) -> list[str] | None:
    """Return the arguments of `aprfmt set` that give B A's tokenizer keys in `where`, or None.

    [] where one of the keys holds a list, or B is no GGUF: a command cannot hold that. None where
    GGUF cannot express A's tokenizer.
    """
    if b.key_style != "gguf":
        return []
    try:
        from aprfmt.tokenizer.carriers import to_gguf

        return list(_set_arguments(a, b, to_gguf(a), dict.fromkeys(where)))
    except LookupError:
        return []
    except AprfmtError:
        return None


def _set_arguments(
    a: Model, b: Model, written: dict[str, Value | TypedValue], where: Iterable[str]
) -> Iterator[str]:
    """Yield a KEY=VALUE argument per key; LookupError for a value too large for a command.

    `written` are the keys that a conversion of A writes.
    """
    for key in where:
        if key not in written and key not in b.metadata:
            continue
        if key not in written:
            yield f"--remove {shlex.quote(key)}"
            continue
        held = written[key]
        value = held.value if isinstance(held, TypedValue) else held
        file = None if a.folder is None else a.folder.path / TEMPLATE_FILE
        if (
            key == CHAT_TEMPLATE
            and file is not None
            and file.is_file()
            and file.read_text(encoding="utf-8") == value
        ):
            yield shlex.quote(f"{key}=@{file}")
        elif isinstance(value, str) and len(value) <= _LONGEST and value.isprintable():
            yield shlex.quote(f"{key}={value}")
        elif isinstance(value, bool | int | float):
            yield shlex.quote(f"{key}={json.dumps(value)}")
        else:
            raise LookupError(key)


def has_more_tokens(a: Model, b: Model) -> bool:
    """Return whether B's tokenizer has more tokens than A's; True if a tokenizer is missing."""
    try:
        return b.tokenizer.vocab_size > a.tokenizer.vocab_size
    except AprfmtError:
        return True
