"""Checks of the tokenizer as it is stored: lists, sizes, ids, merges, and the chat template.

What is read here is the file's own lists, fillers and ids beyond the end included: building the
tokenizer forgives some of that.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from aprfmt.base.text_escape import shorten
from aprfmt.checks.bounds import VOCAB_SHARE
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.stored_vocabulary import StoredVocabulary, read_vocabulary
from aprfmt.checks.records import Finding, NotRun, Result
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.tokenizer.carried import Carried
from aprfmt.tokenizer.conversations import lacking
from aprfmt.tokenizer.loading import load
from aprfmt.tokenizer.stated import stated
from aprfmt.tokenizer.template import scan_template
from aprfmt.tokenizer.template_language import TODO, foreign_template
from aprfmt.tokenizer.turn_ends import unstopped_turn

_MANY = 20  # findings of one kind; the rest is counted


def check_lists(ctx: CheckContext) -> Result:
    """Check that the vocabulary builds: lists of their lengths, every token once."""
    words = read_vocabulary(ctx.carried)
    findings = [
        Finding(where, f"{length} elements", f"{len(words.tokens)}, one a token",
                "the vocabulary is damaged")
        for where, length in words.lists.items()
        if length != len(words.tokens)
    ]  # fmt: skip
    counts = Counter(token for token in words.tokens if token is not None)
    twice = [token for token, count in counts.items() if count > 1]
    findings += [
        Finding(words.where, f"token {token!r} stands {counts[token]} times", "each token once",
                level="warning")
        for token in twice[:_MANY]
    ]  # fmt: skip
    failed = any(one.level == "fail" for one in findings)
    if not failed and not _wrong_merges(words) and _has_ids(ctx.carried):
        load(ctx.model)  # else the check of what is wrong says it
    return Result(f"{len(words.tokens)} tokens", findings)


def _has_ids(carried: Carried) -> bool:
    """Say whether the special ids are numbers at all."""
    try:
        carried.ids()
    except FormatError:
        return False
    return True


def check_size(ctx: CheckContext) -> Result:
    """Check that every token has a row of the embedding; in GGUF every row has a token."""
    rows, origin = _rows(ctx)
    words = ctx.words
    count = len(words.tokens)
    said = f"{count} tokens, {rows} rows"
    dense = words.own and ctx.model.format in _DENSE
    few = not VOCAB_SHARE.low <= count / max(rows, 1)  # padding is less than that
    if count <= rows and not few and not (dense and count < rows):
        return Result(said)
    # Placeholders of other models of a family are added behind the embedding (gemma 3's image).
    level: Literal["fail", "warning"] = "warning"
    if dense or few or words.plain > rows:
        level = "fail"
    todo = "the tokenizer is not of this model, or one of the two is cut"
    expected = f"{rows}, the rows of {origin}"
    return Result(said, [Finding(words.where, f"{count} tokens", expected, todo, level)])


# Formats whose readers size the embedding by the list of tokens; others may pad the embedding.
_DENSE = ("gguf",)


def _rows(ctx: CheckContext) -> tuple[int, str]:
    """Return the rows of the embedding as stored, and its name."""
    resolution = ctx.resolution
    logical = resolution.roles.get("token_embd.weight")
    if logical is None or not logical.shape:
        raise NotRun("the model stores no token embedding")
    return logical.shape[0], logical.stored[0].info.name


def check_ids(ctx: CheckContext) -> Result:
    """Check that every special id is that of a token."""
    words = ctx.words
    count = len(words.tokens)
    stated = [(ctx.carried.where + f": {role}", i) for role, i in ctx.carried.ids().items()]
    stated += _configured(ctx)
    findings = _no_ids(ctx)
    for where, i in stated:
        if i >= count or words.tokens[i] is None:
            findings.append(
                Finding(where, f"id {i}", f"an id below {count} that has a token",
                        "generation would not stop, or would begin wrongly")
            )  # fmt: skip
    if not stated and not findings:
        raise NotRun("neither metadata nor configuration state a special id")
    if not findings:
        findings += _unstopped(ctx)
    return Result(f"{len(stated)} ids", findings)


def _unstopped(ctx: CheckContext) -> list[Finding]:
    """Return a finding where the template ends a turn with an id at which no generation stops.

    Base models come with a chat template, too: their own eos is another token, and it is a warning.
    """
    try:
        found = unstopped_turn(ctx.carried)
    except AprfmtError:
        return []  # the checks of the lists and of the template say it
    if found is None:
        return []
    level: Literal["fail", "warning"] = "fail" if found.contradicted else "warning"
    return [
        Finding(ctx.carried.where, found.says, "a turn's end that stops a generation",
                found.todo, level)
    ]  # fmt: skip


def _configured(ctx: CheckContext) -> list[tuple[str, int]]:
    """Return the ids that config.json and generation_config.json state, by place."""
    return [(where, i) for where, i in _said(ctx) if type(i) is int and i >= 0]


def _no_ids(ctx: CheckContext) -> list[Finding]:
    """Return a finding for each value that stands in place of an id and is not an id."""
    return [
        Finding(where, shorten(repr(value), 80), "an id, a list of ids, or null",
                "what reads it stops nowhere, or not at all")
        for where, value in _said(ctx)
        if value is not None and (type(value) is not int or value < -1)
    ]  # fmt: skip


def _said(ctx: CheckContext) -> list[tuple[str, Any]]:
    """Return what config.json and generation_config.json say where ids stand; -1 means none."""
    found = []
    for name, source in (
        ("config.json", ctx.model.config or {}),
        ("generation_config.json", ctx.carried.parse("generation_config.json")),
    ):
        for role in ("bos", "eos", "pad"):
            value = source.get(f"{role}_token_id")
            every = value if isinstance(value, list) else [value]
            found += [(f"{name}: {role}_token_id", i) for i in every]
    return found


def check_merges(ctx: CheckContext) -> Result:
    """Check that every merge joins two tokens to a third."""
    words = ctx.words
    if words.merges is None:
        raise NotRun("the vocabulary has no merges")
    wrong = _wrong_merges(words)
    expected = "two tokens that make a third"
    findings = [
        Finding(
            f"{words.where}: merge {number}", repr(merge), expected, "the tokenizer is not whole"
        )
        for number, merge in wrong[:_MANY]
    ]
    if len(wrong) > _MANY:
        findings.append(Finding(words.where, f"{len(wrong) - _MANY} more merges", expected))
    return Result(f"{len(words.merges)} merges", findings)


def _wrong_merges(words: StoredVocabulary) -> list[tuple[int, Any]]:
    known = {token for token in words.tokens if token is not None}
    wrong: list[tuple[int, Any]] = []
    for number, merge in enumerate(words.merges or ()):
        parts: Sequence[Any] = merge
        if isinstance(merge, str):  # at the first space that is not its first character
            at = merge.find(" ", 1)
            parts = (merge[:at], merge[at + 1 :]) if at > 0 else (merge,)
        good = len(parts) == 2 and all(isinstance(part, str) and part in known for part in parts)
        if not good or "".join(parts) not in known:
            wrong.append((number, merge))
    return wrong


def check_template(ctx: CheckContext) -> Result:
    """Check that the chat template only joins texts, and names no token the vocabulary lacks."""
    text = ctx.model.carried.chat_template()
    if text is None:
        raise NotRun("the model carries no chat template")
    foreign = foreign_template(text)
    if foreign is not None:
        where, expected = f"chat template, line {foreign.line}", "a jinja2 template"
        todo = f"engines refuse it or use another; {TODO}"
        one = Finding(where, f"is {foreign.says}", expected, todo)
        return Result(f"{len(text)} characters", [one])
    findings = [
        Finding(f"chat template, {line}", what, "a template that joins texts",
                "read it before you let a program render it")
        for line, _, what in (sentence.partition(": ") for sentence in scan_template(text))
    ]  # fmt: skip
    findings += _unknown_tokens(ctx)
    return Result(f"{len(text)} characters", findings)


def _unknown_tokens(ctx: CheckContext) -> list[Finding]:
    """Return a finding for each control token that the template writes and no id stands for."""
    try:
        side = stated(ctx.model)
    except AprfmtError:
        return []  # the check tokenizer says it
    return [
        Finding("chat template", f"writes {token!r}", "tokens of the model's own vocabulary",
                "the template is another model's, or the vocabulary lost its added tokens")
        for token in (lacking(side) if side is not None else [])[:_MANY]
    ]  # fmt: skip
