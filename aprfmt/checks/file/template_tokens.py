"""Checks of the tokens that a chat template writes (marks), and of their embedding rows."""

from collections.abc import Iterator

import numpy as np

from aprfmt.checks import bounds
from aprfmt.checks.context import CheckContext
from aprfmt.checks.records import CheckFinding, Level, NotRun, Result, list_names
from aprfmt.errors import AprfmtError
from aprfmt.tensors.view import View
from aprfmt.tokenizer.absent_keys import absent_types
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer
from aprfmt.tokenizer.template_marks import Mark, cut_marks, template_marks, turn_end_of

ELEMENTS_AT_ONCE = 1 << 22  # elements decoded at a time


def check_token_types(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each template token that is split in a text.

    A token that the chat template writes is found as one token only if its type is CONTROL or
    USER_DEFINED. A type that llama.cpp overrides is a warning. Raises NotRun where no template
    writes a token.
    """
    missing = absent_types(ctx.carried)
    findings = []
    if missing is not None:
        findings.append(
            CheckFinding(ctx.carried.where, missing.says, "a type for each token", missing.todo)
        )
    side, found = _template_tokens(ctx)
    if not found and not findings:
        raise NotRun("no chat template writes a token of the vocabulary")
    for cut in cut_marks(side, found) if side is not None else ():
        healed = cut.healed or not cut.mark.written
        note = "; llama.cpp overrides its type, other engines do not" if cut.healed else ""
        place = (
            "tokenizer.ggml.token_type" if side is not None and side.uses_lists else "added_tokens"
        )
        level: Level = "warning" if healed else "fail"
        findings.append(
            CheckFinding(
                f"{ctx.carried.where}: {place}",
                f"the chat template writes {cut.text}{note}",
                "marks of type CONTROL or USER_DEFINED",
                "set its type, or convert again from the source",
                level,
            )
        )
    findings += _unlisted_marks(ctx, side, found)
    return Result(f"{len(found)} marks of the chat template", findings)


def _unlisted_marks(
    ctx: CheckContext, side: StatedTokenizer | None, found: list[Mark]
) -> Iterator[CheckFinding]:
    """Yield a finding on tokens of the template that tokenizer.json alone would split.

    Only tokenizer_config.json lists them as added tokens, and not every program reads it. `side` is
    the model's tokenizer, `found` are the template's tokens.
    """
    if side is None or side.data is None:
        return
    listed = side.listed_tokens
    names = dict.fromkeys(mark.text for mark in found if mark.text not in listed and mark.written)
    lost = [name for name in names if any(row["content"] == name for row in side.added_tokens)]
    cut = side.split_without_config(lost)
    if cut:
        first, ids = next(iter(cut.items()))
        yield CheckFinding(
            f"{ctx.carried.where}: added_tokens",
            f"{list_names(list(cut))}: named in tokenizer_config.json alone; tokenizer.json makes "
            f"{len(ids)} tokens of {first!r}",
            "added tokens that tokenizer.json lists",
            "take the tokenizer.json of the model that this one was made from",
            "warning",
        )


def _template_tokens(ctx: CheckContext) -> tuple[StatedTokenizer | None, list[Mark]]:
    """Return (the tokenizer that programs use for this format, the chat template's tokens).

    (None, []) where it cannot be read. It is read once for a context.
    """
    if "marks" not in ctx.shared:
        try:
            side = ctx.stated
            ctx.shared["marks"] = side, [] if side is None else template_marks(side)
        except AprfmtError:
            ctx.shared["marks"] = None, []  # the check tokenizer says it
    kept: tuple[StatedTokenizer | None, list[Mark]] = ctx.shared["marks"]
    return kept


def check_token_rows(ctx: CheckContext) -> Result:
    """Return a Result with a finding for rows of chat tokens that were never trained.

    In the embedding the tokens that the chat template writes are checked; in the head only the
    token that ends a turn, the one that the model itself has to write. Rows of zeros, equal rows,
    rows of noise that is far smaller than other rows, and rows that are the mean of all rows were
    made when the vocabulary grew, and never trained.
    Raises NotRun where there is nothing to check.
    """
    _ = ctx.carried
    side, found = _template_tokens(ctx)
    if side is None:
        raise NotRun("the vocabulary cannot be read; see the check tokenizer")
    written = {mark.id: mark.text for mark in found if mark.written}
    if not written:
        raise NotRun("no chat template writes a token of the vocabulary")
    end = turn_end_of(side, found)
    findings: list[CheckFinding] = []
    for role, ids in (("token_embd.weight", list(written)), ("output.weight", [end])):
        logical = ctx.resolution.roles.get(role)
        wanted = {i: written.get(i, "") for i in ids if i is not None}
        if logical is not None and len(logical.shape) == 2 and logical.damage == "" and wanted:
            findings += _find_untrained_rows(logical, wanted)
    if "token_embd.weight" not in ctx.resolution.roles:
        raise NotRun("the model stores no token embedding")
    return Result(f"rows of {len(written)} tokens", findings)


def _find_untrained_rows(tensor: View, wanted: dict[int, str]) -> Iterator[CheckFinding]:
    """Yield a finding for rows of zeros, equal rows, tiny rows, and rows that are the mean of all.

    `tensor` is [vocab, hidden], `wanted` is {token id: its text} of the rows to look at.
    """
    size, width = tensor.shape[0], tensor.shape[1]
    # One pass over the rows: their sum, their lengths, and the rows that are asked for.
    total, rows, lengths = np.zeros(width), {}, np.zeros(size)
    for start, stop, values in tensor.chunks(ELEMENTS_AT_ONCE):
        total += values.sum(axis=0, dtype=np.float64)
        lengths[start:stop] = np.linalg.norm(values, axis=1)
        rows.update({i: np.array(values[i - start]) for i in wanted if start <= i < stop})
    name = tensor.stored[0].info.name
    todo = "train them, or take the rows of the model that knows these tokens"
    zero = [i for i, row in rows.items() if not row.any()]
    if zero:
        yield CheckFinding(
            name, f"rows of zeros: {_list_tokens(zero, wanted)}", "rows that were trained", todo
        )
    # Rows of zeros are equal too, and are named above.
    alike: dict[bytes, list[int]] = {}
    for i, row in rows.items():
        if i not in zero:
            alike.setdefault(row.tobytes(), []).append(i)
    for group in alike.values():
        if len(group) > 1:
            yield CheckFinding(
                name,
                f"one row for several tokens: {_list_tokens(group, wanted)}",
                "a row of its own for each, trained",
                todo,
            )
    # Few rows have no meaningful mean, and no usual length.
    others = lengths[(lengths > 0) & ~np.isin(np.arange(size), list(wanted))]
    if len(others) <= bounds.MEAN_OF_ROWS_FROM:
        return
    usual = float(np.median(others))
    tiny = [i for i in rows if i not in zero and lengths[i] < bounds.SMALL_ROW.low * usual]
    if tiny:
        share = max(lengths[i] for i in tiny) / usual
        yield CheckFinding(
            name,
            f"rows of {share:.2g} of a usual row's length: {_list_tokens(tiny, wanted)}",
            f"at least {bounds.SMALL_ROW.low} of it: {bounds.SMALL_ROW.reason}",
            todo,
            "fail" if share < bounds.LOST_ROW else "warning",
        )
    # Some tools give new tokens the mean of all rows, with a little noise.
    mean = (total - sum(row.astype(np.float64) for row in rows.values())) / (size - len(rows))
    length = float(np.linalg.norm(mean))
    spread = max(usual**2 - length**2, 0.0) ** 0.5
    limit = max(bounds.MEAN_ROW.high * length, bounds.SPREAD * spread)
    near = [
        i
        for i, row in rows.items()
        if i not in (*zero, *tiny) and np.linalg.norm(row - mean) <= limit
    ]
    if near:
        yield CheckFinding(
            name,
            f"rows that are the mean of all rows: {_list_tokens(near, wanted)}",
            "rows that were trained",
            todo,
            "warning",
        )


def _list_tokens(ids: list[int], texts: dict[int, str]) -> str:
    """Return the number of tokens and the first few as text, each as 'TEXT' (ID)."""
    return list_names([f"{texts[i]!r} ({i})" for i in ids])
