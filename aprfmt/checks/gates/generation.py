"""The gate on generated text: golden answers, gibberish, stop tokens, and what is at fault.

A *form* of prompt is a plain text ("direct") or a conversation ("chat"). A *cell* is the answer of
one copy of the model to one form.

A forward pass that agrees does not make generation right: templates, stop tokens and the cache are
only seen here.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprfmt.base.outcome import Check, check, not_run
from aprfmt.checks import bounds
from aprfmt.checks.gates.gibberish import gibberish_signals, quote_short
from aprfmt.checks.gates.golden import GoldenPrompt
from aprfmt.checks.gates.model_under_test import ModelUnderTest
from aprfmt.checks.records import NotRun, Result
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats import writable_formats
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.inference.session import Session
from aprfmt.tokenizer.base import Tokenizer

FORMS = ("direct", "chat")
SHOWN = 60  # characters of an answer in a message


@dataclass(frozen=True)
class Generated:
    """A model's answer to a prompt; `stop` is the stop token that ended it, None at the limit.

    `prompt` is the rendered text, `ids` include the stop token.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    stop: int | None


def check_golden_output(subject: ModelUnderTest) -> Result:
    """Return a Result with checks of greedy answers to all golden prompts, and what is at fault.

    Each answer is compared and searched for gibberish. Where one fails, another copy of the model
    answers too. Raises NotRun without a tokenizer or prompts.
    """
    tokenizer = subject.need_tokenizer()
    prompts = subject.golden.prompts
    if not prompts:
        raise NotRun(f"{subject.golden.origin} holds no prompt")
    checks: list[Check] = []
    answers: dict[str, str] = {}
    good: dict[str, bool] = {}
    typical: dict[str, GoldenPrompt] = {}  # of each form: the first that fails, else the first
    for prompt in prompts:
        if prompt.messages and tokenizer.chat_template is None:
            checks.append(not_run(f"{prompt.name}-answer", "the model has no chat template"))
            continue
        found, answer = check_prompt(subject.session, tokenizer, prompt)
        checks += found
        if answer is not None:
            answers[prompt.name] = answer.text
        if prompt.form not in typical or (good[prompt.form] and _any_failed(found)):
            typical[prompt.form] = prompt
        good[prompt.form] = good.get(prompt.form, True) and not _any_failed(found)
    cells: dict[tuple[str, str], bool | None] = {
        (subject.model.format, form): good.get(form) for form in FORMS
    }
    details: dict[str, Any] = {"golden": subject.golden.origin, "answers": answers}
    if not all(good.values()):
        other, cells_there = _ask_other_copy(subject, typical)
        cells |= cells_there
        details["faulty_side"] = faulty_side(cells, subject.model.format, other)
        checks.append(
            Check(
                "faulty-side",
                "FAIL",
                subject.where,
                _cells_text(cells),
                "PASS in all of format x prompt form",
                details["faulty_side"],
            )
        )
    details["grid"] = [
        {"side": side, "form": form, "passed": passed} for (side, form), passed in cells.items()
    ]
    seen = "" if _any_failed(checks) else _pass_summary(checks)
    return Result(checks=checks, details=details, found=seen)


def _pass_summary(checks: Sequence[Check]) -> str:
    """Return words on a PASS: how many answers are readable, right, and ended by a stop token.

    `checks` are those of all answers.
    """
    rows: dict[str, list[Check]] = {}
    for one in checks:
        rows.setdefault(one.name.rpartition("-")[2], []).append(one)
    read = rows.get("readable", [])
    words = [f"{len(read)} answer{'s' * (len(read) != 1)} without gibberish"]
    for kind, said in (("answer", "as expected"), ("end", "ended by a stop token")):
        passed = sum(one.outcome == "PASS" for one in rows.get(kind, []))
        words.append(f"{passed} of {len(read)} {said}")
    return ", ".join(words)


def _any_failed(checks: Sequence[Check]) -> bool:
    """Return whether any of the checks failed."""
    return any(each.outcome == "FAIL" for each in checks)


# --- one prompt -------------------------------------------------------------------------------


class _RecordingSampler(Sampler):
    """A sampler that records the tokens it draws, the stop token included."""

    def __init__(self, sampling: Sampling) -> None:
        """Start without drawn tokens; `sampling` is that of the base class."""
        super().__init__(sampling)
        self.drawn: list[int] = []

    def __call__(self, logits: Any) -> int:
        """Return the token drawn from logits [vocab], after recording it."""
        self.drawn.append(super().__call__(logits))
        return self.drawn[-1]


def generate_answer(session: Session, tokenizer: Tokenizer, prompt: GoldenPrompt) -> Generated:
    """Return a model's greedy answer to a prompt, with its own chat template and stop tokens.

    Raises NotRun for a prompt that does not fit the context, FormatError for an id outside the
    embedding.
    """
    if prompt.messages:
        text, ids = tokenizer.chat(prompt.messages)
    else:
        assert prompt.prompt is not None
        text, ids = prompt.prompt, tokenizer.encode(prompt.prompt)
    room = int(session.hp["context_length"]) - len(ids)
    rows = int(session.hp["vocab_size"])
    if ids and max(ids) >= rows:
        raise FormatError(f"token id {max(ids)}; the embedding has {rows} rows")
    if not ids or room < 1:
        raise NotRun(f"{len(ids)} tokens do not fit a context of {len(ids) + room}")
    sampler = _RecordingSampler(Sampling())
    for _ in session.generate(ids, sampler, min(prompt.max_tokens, room), tokenizer.stop_ids):
        pass
    drawn = sampler.drawn
    stop = drawn[-1] if drawn and drawn[-1] in tokenizer.stop_ids else None
    shown = tokenizer.decode([i for i in drawn if i != stop], skip_special=True)
    return Generated(text, tuple(ids), tuple(drawn), shown, stop)


def check_prompt(
    session: Session, tokenizer: Tokenizer, prompt: GoldenPrompt
) -> tuple[list[Check], Generated | None]:
    """Return (the checks of one prompt, its answer or None where there is none)."""
    try:
        answer = generate_answer(session, tokenizer, prompt)
    except NotRun as reason:
        return [not_run(f"{prompt.name}-answer", str(reason))], None
    except AprfmtError as error:  # a NaN, a template that does not render: never a skip
        return [
            check(
                f"{prompt.name}-answer",
                False,
                str(error),
                "an answer",
                "trace the model on this prompt",
            )
        ], None
    return list(judge_answer(prompt, answer, tokenizer)), answer


def judge_answer(prompt: GoldenPrompt, answer: Generated, tokenizer: Tokenizer) -> list[Check]:
    """Return the checks of a model's answer: its prompt, readability, end, and expected content."""
    checks = []
    if prompt.messages and prompt.prompt is not None:
        checks.append(
            check(
                f"{prompt.name}-template",
                answer.prompt == prompt.prompt,
                repr(answer.prompt),
                repr(prompt.prompt),
                "the chat template is another one",
            )
        )
    if prompt.prompt_ids is not None:
        checks.append(
            check(
                f"{prompt.name}-tokens",
                answer.prompt_ids == prompt.prompt_ids,
                _ids_text(answer.prompt_ids),
                _ids_text(prompt.prompt_ids),
                "the tokenizer is another one" if not _any_failed(checks) else "see the template",
            )
        )
    said = [i for i in answer.ids if i != answer.stop]
    found = gibberish_signals(
        answer.text, answer.prompt, said, lambda ids: tokenizer.decode(ids, skip_special=False)
    )
    checks.append(
        check(
            f"{prompt.name}-readable",
            not found,
            "; ".join(found) or quote_short(answer.text),
            "no gibberish",
            "compare the model with its source: aprfmt diagnose",
        )
    )
    checks.append(_check_end(prompt, answer, tokenizer))
    if prompt.expects:
        checks.append(_check_content(prompt, answer, tokenizer))
    return checks


def _check_end(prompt: GoldenPrompt, answer: Generated, tokenizer: Tokenizer) -> Check:
    """Return PASS where a stop token ended the answer, NOT_RUN where the limit did.

    Whether a stop token would have come later is not known.
    """
    name, count = f"{prompt.name}-end", len(answer.ids)
    if answer.stop is not None:
        token = tokenizer.decode([answer.stop], skip_special=False)
        return check(
            name,
            True,
            f"stop token {answer.stop} {token!r} after {count - 1} tokens",
            "a stop token",
        )
    why = f"no stop token in {count} tokens, the most that were asked for"
    return not_run(name, why if tokenizer.stop_ids else "the model names no stop token")


def _check_content(prompt: GoldenPrompt, answer: Generated, tokenizer: Tokenizer) -> Check:
    """Return the check that an answer has the tokens, text or code that is expected.

    A wrong answer is NOT_RUN where the expected tokens lead by too little to say anything.
    """
    name, todo = f"{prompt.name}-answer", "compare the model with its source: aprfmt diagnose"
    wrong = ""
    if prompt.output_ids is not None and answer.ids != prompt.output_ids:
        pairs = zip(answer.ids, prompt.output_ids, strict=False)
        at = next(
            (i for i, (a, b) in enumerate(pairs) if a != b),
            min(len(answer.ids), len(prompt.output_ids)),
        )
        wrong = f"leaves the expected tokens after {at}"
    elif prompt.output_ids is None and prompt.output_text is not None:
        if answer.text.strip() != prompt.output_text.strip():
            wrong = "another text"
    missing = [text for text in prompt.contains if text not in answer.text]
    if missing:
        wrong = f"without {missing[0]!r}"
    if prompt.parses is not None:
        wrong = wrong or python_fault(answer.prompt + answer.text, prompt.defines)
    expected = prompt.output_text
    if expected is None:
        expected = f"containing {', '.join(prompt.contains)}" if prompt.contains else "as stated"
    lead = prompt.smallest_lead
    if wrong and lead is not None and lead < bounds.LEAD:
        return not_run(name, f"{wrong}, which says nothing: the expected token leads by {lead:g}")
    found = f"{wrong}: {quote_short(answer.text)}" if wrong else quote_short(answer.text)
    return check(name, not wrong, found, quote_short(expected), todo)


def python_fault(text: str, functions: Sequence[str]) -> str:
    """Return why a text is not Python that defines these functions; "" if it is.

    The text may be cut off: as few of its last lines as necessary are left out.
    """
    lines = text.splitlines()
    for end in range(len(lines), 0, -1):
        try:
            tree = ast.parse("\n".join(lines[:end]))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing = [name for name in functions if name not in defined]
        return f"defines no function {missing[0]}" if missing else ""
    return "a syntax error in the first line"


def _ids_text(ids: Sequence[int]) -> str:
    """Return token ids as text: their number and the first eight."""
    return f"{len(ids)} ids: {' '.join(map(str, ids[:8]))}{' ...' if len(ids) > 8 else ''}"


# --- format x prompt form ---------------------------------------------------------------------


def _ask_other_copy(
    subject: ModelUnderTest, typical: Mapping[str, GoldenPrompt]
) -> tuple[str | None, dict[tuple[str, str], bool | None]]:
    """Return (name of another copy of the model, {(name, form): whether its answer passes}).

    The copy is the model of `--against`, else one converted to another format. It answers one
    prompt of each form in `typical`; None for a form that it was not asked. (None, {}) where there
    is no other copy.
    """
    try:
        if subject.other is not None:
            model, name = subject.other, f"{subject.other.format} (--against)"
        else:
            target = next(
                name for name in writable_formats(own=True) if name != subject.model.format
            )
            model, name = subject.copy(target), target
        tokenizer = model.tokenizer
        session = subject.open_session(model)
    except AprfmtError:
        return None, {}
    cells: dict[tuple[str, str], bool | None] = dict.fromkeys((name, form) for form in FORMS)
    with session:
        for form, prompt in typical.items():
            if form == "direct" or tokenizer.chat_template is not None:
                cells[name, form] = not _any_failed(check_prompt(session, tokenizer, prompt)[0])
    return name, cells


def faulty_side(
    cells: Mapping[tuple[str, str], bool | None], original: str, copy: str | None
) -> str:
    """Return in words what is at fault, by which forms of prompt pass in the original and a copy.

    `cells` is {(original or copy, form): passed, or None if not asked}; forms are "direct" and
    "chat". `copy` is None without another copy.
    """
    mine = {form: cells.get((original, form)) for form in FORMS}
    if copy is None:
        if mine["chat"] is False and mine["direct"]:
            return "only chat fails: the chat template, its special tokens or the stop tokens"
        return "no other copy could be asked: the weights, the tokenizer or the engine"
    other = {form: cells.get((copy, form)) for form in FORMS}
    ours = [form for form in FORMS if mine[form] is False]
    both = [form for form in ours if other[form] is False]
    if not both:
        what = (
            "its chat template, special or stop tokens"
            if ours == ["chat"]
            else ("its weights, configuration or tokenizer")
        )
        return f"{original} fails where {copy} passes: {what}"
    if both == ["chat"] and mine["direct"]:
        return "chat fails in both and direct prompts pass: the chat template both carry"
    if both == ["direct"] and mine["chat"]:
        return "direct prompts fail in both and chat passes: the model expects a template"
    return f"{original} and {copy} fail alike: the model itself, or the engine"


def _cells_text(cells: Mapping[tuple[str, str], bool | None]) -> str:
    """Return "COPY FORM PASS" (or FAIL, NOT-RUN) for each answer asked for, joined by commas.

    `cells` is {(copy, form): passed, or None if not asked}.
    """
    words = {True: "PASS", False: "FAIL", None: "NOT-RUN"}
    return ", ".join(f"{side} {form} {words[passed]}" for (side, form), passed in cells.items())
