"""Level one: the tokenizers, chat templates and generation settings of two models."""

import shlex
from pathlib import Path

from aprfmt.causes.tokenizer.comparison import TokenFinding, compare_tokens
from aprfmt.diagnosis.found import Evidence
from aprfmt.diagnosis.levels import Levels
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name
from aprfmt.measure.texts import lacking_tokenizer
from aprfmt.model import Model

_OF = "probe texts, conversations and ends that are not A's; a share"


def tokenizers(a: Model, b: Model, found: Levels) -> None:
    """Record what differs of two models' tokenizers in `found.stated`; no pass is needed for it."""
    report = compare_tokens(a, b)
    found.stated += [_cause(row, b) for row in report.findings]
    for row in report.findings:
        found.evidence += [
            Evidence("identity", f"{label}: {text}", row.difference.where[:1])
            for label, text in zip("AB", row.example, strict=False)
        ]
    found.evidence += [
        Evidence("identity", f"tokenizer: {row.says}; without effect", row.where)
        for row in report.notes
    ]
    found.evidence += [Evidence("identity", text) for text in report.remarks]
    found.added = report.added
    found.checked += report.checked
    found.not_checked += report.not_checked
    found.left = lacking_tokenizer(a, b, report)


def _cause(row: TokenFinding, b: Model) -> Finding:
    one = row.difference
    says = one.says
    if row.example:
        says += f"; first shown by {row.example[0]} in A"
        says += f", {row.example[-1].partition(' is ')[2]} in B"
    elif not row.probed:
        says += "; texts could not be encoded on both sides, so that none was tried"
    elif not row.shown:
        says += "; no probe text and no conversation shows it"
    return Finding(
        one.cause, says, "identity", "bug", one.where, row.shown, "", row.before, row.after, _OF,
        {one.name: {"a": one.a, "b": one.b}}, exercised="shows" if row.shown else "not_exercised",
        reached="explained" if row.after == 0 else "located", counted=True,
        next=_mended(b, one.mend),
    )  # fmt: skip


def _mended(b: Model, keys: tuple[str, ...]) -> str:
    """Return the command that sets keys in a copy of B; "" without keys."""
    if not keys:
        return ""
    words = " ".join(map(shlex.quote, keys))
    path = Path(b.path) if b.folder is None else Path(b.folder.path)
    return f"aprfmt set {shlex.quote(str(path))} {words} -o {fixed_name(path)}"
