"""`aprfmt logits --reference`: log-probabilities of two runs by token, as one table.

A *side* is the log-probabilities of one of two runs: *this side* is judged, the other is the
reference.
"""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.cli import render, run_options
from aprfmt.errors import FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.measure.logprob_relations import ModelFactor
    from aprfmt.measure.logprob_tables import LogprobTable, Side
    from aprfmt.measure.tolerances import Threshold
    from aprfmt.model import Model
    from aprfmt.model.verdict import Pronounced

SHOWN = 8  # positions with the largest differences


def compare_logprob_sides(
    model: str, reference: Path, loaded: Path | None, tokens: run_options.TokenOptions,
    where: run_options.WhereOptions, out: Path | None, answer_dtype: str | None = None,
    accept: Sequence[str] = (), exact: bool = False,
) -> int:  # fmt: skip
    """Compare log-probabilities with `reference`, print a table, and return the exit code.

    This side is a run of the model, or the file `loaded` if given. `answer_dtype` is the dtype of
    the arithmetic (--answer-dtype) for a server's answer, which does not name it. `out` is refused,
    since it writes logits of a run. `accept` are patterns of what was not compared. With `exact`
    any bit that differs is a difference. Raises
    UsageError where the two are of different tokens, FormatError where they have no position in
    common.
    """
    from aprfmt.inference.engines.logprobs import SeveralAnswersError
    from aprfmt.measure.logprob_tables import LogprobMatrix, compare_logprobs, rows_from_logits

    if out is not None:
        raise UsageError("--out writes a run's logits; leave --reference out")
    with ExitStack() as stack:
        # The reference names the tokens; ids that are given must begin it.
        run = stack.enter_context(run_options.open_session(model, where))
        given = run_options.token_ids(run.model, tokens)[0] if tokens.given else None
        of_loaded = None
        try:
            theirs, dtype = read_side(reference, run.model, given, stack)
        except SeveralAnswersError:
            if loaded is None or given is not None:
                raise
            # Of several answers the one to the other side's tokens counts.
            of_loaded = read_side(loaded, run.model, given, stack)
            theirs, dtype = read_side(reference, run.model, given, stack, of_loaded[0].ids)
        dtype = dtype or answer_dtype
        ids = list(theirs.ids)
        if given is not None and ids[: len(given)] != given:
            raise UsageError(f"{reference}: is of other tokens than the ids given")
        # The other side is a saved one, or a run of the model on these tokens.
        if loaded is not None:
            mine, found = of_loaded or read_side(loaded, run.model, given, stack, ids)
            own = found or answer_dtype
            name = str(loaded)
            least = min(len(mine.ids), len(ids))
            if list(mine.ids[:least]) != ids[:least]:
                at = next(i for i, pair in enumerate(zip(mine.ids, ids, strict=False))
                          if pair[0] != pair[1])  # fmt: skip
                raise UsageError(
                    f"{loaded} and {reference} are of other tokens, the first at {at}: "
                    f"{mine.ids[at]} against {ids[at]}"
                )
        else:
            run_options.check_ids(run.model, ids)
            name, own = model, run.request.choice.dtype
            mine = rows_from_logits(ids, run.session.logits(ids), range(len(ids)), model)
        # Compare at the positions that both have, within rounding of their dtypes.
        bound, in_float32 = logit_bounds(run.model, (mine, theirs), (own, dtype))
        factor = model_factor(run.model, run=loaded is None)
        table = compare_logprobs(mine, theirs, bound, in_float32, factor)
        if loaded is None:  # a run has every row, also those that the reference was not asked for
            table = replace(table, lost=())
        if not table.compared:
            raise FormatError(
                f"{reference}: none of its positions is one of {name}; expected log-probabilities "
                "of the same tokens"
            )
        verdict = table_verdict(table, str(loaded or reference), accept, exact)
        # Of a saved trace `diagnose` says why; an answer of a server has no points.
        saved = verdict.exit == 1 and loaded is None and isinstance(theirs, LogprobMatrix)
        both = f"{shlex.quote(str(reference))} {shlex.quote(str(run.model.path))}"
        commands = (f"aprfmt diagnose {both}",) if saved else ()
        body: dict[str, Any] = {
            "here": name, "reference": str(reference),
            "tokens": {"ids": ids, "text": None}, "logprobs": table.to_json(),
            **verdict.to_json(),
        }  # fmt: skip
    return render.emit(
        body, verdict.exit, lambda: show(table, verdict, str(reference)),
        answer=lambda: answer(table, verdict, str(reference), commands),
    )  # fmt: skip


def model_factor(model: "Model", run: bool) -> "ModelFactor | None":
    """Return the model's own factor of its logits, by its file's name; None where it is 1.

    `run`: this side is a run of the model.
    """
    from aprfmt.measure.logprob_relations import ModelFactor

    value = float(model.hyper["logit_scale"])
    if value in (0.0, 1.0):
        return None
    return ModelFactor(value, model.hyper.of("logit_scale").key or "logit_scale", run)


def logit_bounds(
    model: "Model", sides: "tuple[Side, Side]", dtypes: tuple[str | None, str | None]
) -> "tuple[Threshold, Threshold | None]":
    """Return (tolerance on the difference of two runs' logits, a stricter one or None).

    The first is for the coarser arithmetic of the two. An unknown arithmetic is recognised by
    logits of 16 bits. If they are not of 16 bits, the first tolerance takes the unknown one for
    bfloat16, in which servers compute, and the second for float32: a difference between the two
    tolerances decides nothing. The second is None if nothing had to be guessed. `dtypes` are the
    sides', None for an unknown one.
    """
    from aprfmt.measure.logprob_tables import has_16_bit_logits, logit_size
    from aprfmt.measure.tolerances import MAX_FACTOR, ROUNDOFF, Threshold, logit_bound

    size = logit_size(*sides)
    layers, width = int(model.hyper["n_layers"]), int(model.hyper["hidden_size"])

    def bound(dtypes: Sequence[str], why: str) -> Threshold:
        """Return the bound on the logits' difference for the coarsest of several dtypes.

        `why` is added to the reason that the bound gives.
        """
        coarser = max(dtypes, key=lambda dtype: ROUNDOFF[dtype])
        found = logit_bound(coarser, layers, width, size, moe=bool(model.hyper["n_experts"]))
        reason = f"{coarser}{why}: roundings of {layers} layers"
        return Threshold(found, MAX_FACTOR * found, reason, "the type's unit roundoff")

    known = [dtype for dtype in dtypes if dtype is not None]
    unknown = [side for side, dtype in zip(sides, dtypes, strict=True) if dtype is None]
    hidden = [side for side in unknown if not has_16_bit_logits(side)]
    why = "" if not unknown else ", assumed" if hidden else ", whose numbers its logits are"
    loose = bound([*known, *(["bfloat16"] if unknown else [])], why)
    if not hidden:
        return loose, None
    shown = ["bfloat16"] if len(hidden) < len(unknown) else []
    return loose, bound([*known, *shown, "float32"], "")


def read_side(
    path: Path, model: "Model", ids: Sequence[int] | None, stack: ExitStack,
    wanted: Sequence[int] | None = None,
) -> "tuple[Side, str | None]":  # fmt: skip
    """Return (log-probabilities by position, dtype) of a server's answer or a saved trace.

    `ids` are the tokens if known, and `stack` closes the trace. Of several answers in a file the
    one to the tokens `ids` is read, or to `wanted` if `ids` are not known. The dtype is None for
    an answer and a dump, which do not say their arithmetic. Raises UsageError if there is no such
    file, FormatError for a trace without logits or token ids.
    """
    from aprfmt.inference.engines.logprobs import is_logprobs, read_logprobs
    from aprfmt.inference.engines.opening import is_trace, open_trace
    from aprfmt.measure.logprob_tables import rows_from_logits

    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    if is_logprobs(path):
        return read_logprobs(path, ids, piece_to_ids(model), ids or wanted), None
    if not is_trace(path):
        raise FormatError(no_logprobs_message(path))
    trace = stack.enter_context(open_trace(path, ids, model))
    record, values = trace.find_record("logits"), trace.recorded_values("logits")
    known = trace.run.get("ids") or ids
    if record is None or values is None or known is None:
        what = "logits" if values is None else "token ids"
        raise FormatError(f"{path}: holds no {what}; expected rows of logits and their tokens")
    positions = record.positions or tuple(range(len(values)))
    says = trace.run.get("format") != "captures"
    return rows_from_logits(known, values, positions, str(path)), record.dtype if says else None


def no_logprobs_message(path: Path) -> str:
    """Return the error for a file that is no server's answer and no saved trace.

    It says how the file begins, by which keys an answer is known, and how a trace is saved.
    """
    from aprfmt.formats.foreign_formats import HEAD, text_kind
    from aprfmt.inference.engines.logprobs import WRITERS

    kind = ""
    if path.is_file():
        with path.open("rb") as file:
            kind = text_kind(file.read(HEAD))
    found = f"is {kind}, and has no log-probabilities" if kind else "has no log-probabilities"
    return (
        f"{path}: {found}; expected the answer of a server (vLLM, SGLang, OpenAI-compatible), "
        f".json or .jsonl with one of the keys {', '.join(WRITERS)}; or a saved trace with "
        "logits, as `aprfmt trace MODEL --payload -o run.safetensors` writes it"
    )


def piece_to_ids(model: "Model") -> Any:
    """Return a function (text, bytes or None) -> token ids that decode to this text.

    The vocabulary is decoded once, at the first call.
    """

    @cache
    def texts() -> dict[str, list[int]]:
        """Return {decoded text: ids of the tokens that decode to it} of the whole vocabulary."""
        found: dict[str, list[int]] = {}
        tokenizer = model.tokenizer
        for one in range(int(model.hyper["vocab_size"])):
            found.setdefault(tokenizer.decode([one]), []).append(one)
        return found

    def ids(text: str, raw: bytes | None) -> list[int]:
        """Return the token ids that decode to `text`, or to the bytes `raw` if given."""
        if raw is not None:
            text = raw.decode("utf-8", "replace")
        return texts().get(text, [])

    return ids


def table_verdict(
    table: "LogprobTable", answer: str, accept: "Sequence[str]" = (), exact: bool = False
) -> "Pronounced":
    """Return the verdict over the positions that both sides have, with those left out named.

    It is open (exit 2) if positions of this side were not compared, and if the arithmetic of
    `answer` (a file's name) is unknown and the difference is between float32's and bfloat16's
    bound. `table` is the comparison of both sides, `accept` are patterns (`unread:PATTERN`) of what
    was not compared and is taken for equal. With `exact` any bit that differs is a difference.
    """
    from aprfmt.measure.trace_rows import positions_text
    from aprfmt.model.ledger import NotCompared
    from aprfmt.model.verdict import Compared, VerdictWords, pronounce

    words = VerdictWords("within tolerance", "beyond tolerance")
    if exact:
        words = VerdictWords("every bit equal", "bits differ")
    every = table.compared + len(table.lost) + len(table.unshared) + table.only_there
    left = []
    lone = ((table.lost, "the reference does not have them"),
            (table.unshared, "no token is listed on both sides"))  # fmt: skip
    for positions, why in lone:
        if positions:
            where = f"at positions {positions_text(positions)}"
            left.append(NotCompared("log-probabilities", where, "unreadable", why))
    if table.only_there:
        left.append(NotCompared("captured array", f"{table.only_there} positions of the reference",
                                "unread", "not on this side"))  # fmt: skip
    if table.undecided:
        why = "it is not said: bfloat16 explains the difference, float32 does not; --answer-dtype"
        left.append(NotCompared("arithmetic", f"of {answer}", "unreadable", why))
    differs = table.beyond or (exact and not table.bits)
    return pronounce(
        words, Compared(differs, {"positions": (table.compared, every)}, tuple(left)), accept
    )


def headline(table: "LogprobTable", verdict: "Pronounced") -> tuple[str, str]:
    """Return (verdict with the distances of the two runs, style).

    `table` is the comparison of both sides.
    """
    found = table.to_json()
    words = f"{verdict.says}; log-probabilities:"
    if table.bits:
        return f"{words} every bit equal", "good"
    mean = found["mean_abs_difference"]
    said = (
        f"{words} max {found['max_difference']:.3g}, "
        + ("" if mean is None else f"mean {mean:.3g}, ")
        + f"KL mean {found['mean_kl']:.3g} max {found['max_kl']:.3g} nats"
    )
    if table.relation is not None:
        said = (
            f"{verdict.says}; {table.relation.says}; log-probabilities:{said.removeprefix(words)}"
        )
    elif not verdict.exit:
        said += f"; {table.scaled:.2g} of the logits' spread, {table.tolerance.rel_l2:.2g} allowed"
    return said, "bad" if verdict.exit else "good"


def show(table: "LogprobTable", verdict: "Pronounced", reference: str) -> None:
    """Print the verdict and the positions with the largest differences in log-probability.

    `table` is the comparison of both sides, `reference` the other side's name.
    """
    render.say(f"against {reference}", style="head")
    text, style = headline(table, verdict)
    render.say(text, style=style)
    if table.first is not None:
        render.say(f"first position beyond: {_first_position_text(table)}", style="bad")
    worst = sorted(table.rows, key=lambda row: -row.largest)[:SHOWN]
    cells = [
        (
            str(row.position),
            "-" if row.token is None else str(row.token),
            render.number_text(row.here, ".4f"),
            render.number_text(row.reference, ".4f"),
            render.number_text(row.difference, ".4f"),
            f"{row.largest:.3g}",
            f"{row.kl:.3g}",
        )
        for row in sorted(worst, key=lambda row: row.position)
    ]
    headers = ("position", "next token", "here", "reference", "difference", "largest", "KL")
    render.table(cells, headers, "rrrrrrr")
    if len(table.rows) > len(worst):
        render.line(f"the {len(worst)} largest of {len(table.rows)} (--json has all)", style="dim")


def _first_position_text(table: "LogprobTable") -> str:
    """Return the first position beyond the tolerance, and its distance, as words."""
    assert table.first is not None
    return f"{table.first.position}, {table.first.largest:.3g} apart"


def answer(
    table: "LogprobTable", verdict: "Pronounced", reference: str, commands: "Sequence[str]" = ()
) -> "list[Line]":
    """Return the short answer as (text, style) lines: verdict, first position beyond, `commands`.

    `table` is the comparison of both sides.
    """
    text, style = headline(table, verdict)
    lines: list[Line] = [(f"{text} (against {reference})", style)]
    if table.first is not None:
        lines.append((f"  first position beyond: {_first_position_text(table)}", "bad"))
    return [*lines, *((f"next: {one}", "head") for one in commands)]
