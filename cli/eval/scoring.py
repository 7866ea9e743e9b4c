"""What `aprfmt eval` scores: texts or a trainer's batch, and the model to compare with."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from aprfmt.base.outcome import Check, Report
from aprfmt.cli import check_output, render, run_options
from aprfmt.cli.eval import batch, output
from aprfmt.cli.eval.windows import read_samples, window_tokens, windows_to_json
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.inference.evaluation import Sample
    from aprfmt.inference.loss import KlDivergence
    from aprfmt.inference.running import Run
    from aprfmt.model.ledger import NotCompared


@dataclass(frozen=True)
class EvalRequest:
    """What `aprfmt eval` was asked to score, and how texts are cut into windows.

    `ids` are token ids as text, `overlap` tokens shared by neighbouring windows, `reported` is what
    `parse_reported` returns, `within` the relative difference allowed to it, `against` a second
    model. `draft` measures a draft head, of whose tokens at least `least_accepted` must be
    accepted.
    """

    texts: tuple[Path, ...]
    samples: Path | None
    ids: str | None
    max_seq_len: int | None
    overlap: int
    convention: str
    batch: Path | None
    reported: tuple[float, float] | None
    within: float
    against: str | None
    draft: bool
    least_accepted: float | None
    random_weights: bool
    verbose: bool
    accept: tuple[str, ...]

    @property
    def texts_given(self) -> bool:
        """Whether texts, samples or token ids were given."""
        return bool(self.texts or self.samples or self.ids)


def evaluate_texts(model: str, request: EvalRequest, where: run_options.WhereOptions) -> int:
    """Score texts with one model or with two, print the losses, and return the exit code.

    `request` says what to score, `where` has the options of the run. Raises UsageError for --draft
    together with --against.
    """
    from aprfmt.inference.draft import ALIVE, DraftSession
    from aprfmt.inference.evaluation import plan_windows, score_windows
    from aprfmt.inference.loss import assess_loss
    from aprfmt.model.ledger import items_of_other_model

    if request.draft and request.against is not None:
        raise UsageError("--draft measures one model; leave --against out")
    with ExitStack() as stack:
        run = stack.enter_context(run_options.open_session(model, where))
        draft = stack.enter_context(DraftSession(run.model, run.session)) if request.draft else None
        # Cut the texts into windows; the other model, if any, is scored on the same ones.
        found = list(read_samples(run.model, request.texts, request.samples, request.ids))
        capacity = window_tokens(run.model, request.max_seq_len, request.convention)
        cut = capacity, request.overlap, request.convention
        planned, skipped = plan_windows(found, *cut)
        for text in skipped:
            render.warn(text, "skipped_sample")
        other = None
        if request.against is not None:
            other = stack.enter_context(open_compared_model(request.against, run, found, where))
        with render.ProgressLine("evaluating") as progress:
            other_session = None if other is None else other.session
            measured = score_windows(
                run.session, planned, skipped, other_session, progress, draft=draft
            )
        # Judge the losses, then what was asked for besides: the draft head, the other model.
        kind: Literal["trained", "random"] = "random" if request.random_weights else "trained"
        checks = assess_loss(measured.loss, kind, str(run.model.path))
        scored: output.EvalFacts = {
            "run": run_options.run_facts(run),
            **output.loss_to_json(measured.loss),
            **windows_to_json(run.model, planned, *cut),
        }
        draft_found: output.DraftAcceptance | None = None
        against: output.ComparedModel | None = None
        if measured.acceptance is not None:
            least = ALIVE if request.least_accepted is None else request.least_accepted
            checks.insert(0, measured.acceptance.check_acceptance(least, str(run.model.path)))
            found_drafts = measured.acceptance
            draft_found = output.DraftAcceptance(
                drafts=found_drafts.drafts,
                accepted=found_drafts.accepted,
                acceptance=found_drafts.acceptance_rate,
                least=least,
            )
        if other is not None and measured.other is not None:
            if measured.loss.tokens:  # nothing scored is one thing, whichever model it is
                checks += assess_loss(measured.other, kind, str(other.model.path))
            against = {
                "run": run_options.run_facts(other),
                **output.loss_to_json(measured.other),
                "divergence": kl_to_json(measured.divergence),
            }
        body: dict[str, object] = {**scored}
        body |= {} if draft_found is None else {"draft": draft_found}
        body |= {} if against is None else {"against": against}
        return report_checks(
            run,
            body,
            checks,
            lambda: output.show(scored, draft_found, against),
            lambda: output.answer(scored, draft_found, against),
            verbose=request.verbose,
            command=_next_command(run, request.against, against),
            not_compared=() if other is None else items_of_other_model(other.model, run.model),
            accept=request.accept,
        )


def _next_command(run: "Run", other: str | None, found: "output.ComparedModel | None") -> str:
    """Return the command that says why two models' predictions differ; "" where they do not."""
    apart = None if found is None else found["divergence"]
    if other is None or apart is None or (apart["max_kl"] == 0 and apart["top1"] == 1):
        return ""
    from aprfmt.model.relations import opening_path

    return shlex.join(["aprfmt", "diagnose", other, str(opening_path(run.model.path))])


def kl_to_json(found: "KlDivergence | None") -> "output.KlFacts | None":
    """Return two models' KL divergence as JSON; None where it was not measured."""
    if found is None:
        return None
    return {
        "kl": found.kl,
        "max_kl": found.max_kl,
        "top1": found.top1,
        "correct_change": found.correct_change,
        "tokens": found.tokens,
    }


def evaluate_batch(model: str, request: EvalRequest, where: run_options.WhereOptions) -> int:
    """Score a trainer's batch, judge the loss reported for it, and return the exit code.

    Raises UsageError for an option that goes with texts only. `request` says what to score, `where`
    has the options of the run.
    """
    others = {
        "--text, --samples or --ids": request.texts_given, "--against": request.against is not None,
        "--draft": request.draft,
        "--max-seq-len": request.max_seq_len is not None, "--overlap": bool(request.overlap),
        "--convention": request.convention != "disjoint",
    }  # fmt: skip
    found = [name for name, given in others.items() if given]
    if found:
        raise UsageError(f"--batch is scored as it is; found {found[0]} with it")
    from aprfmt.model.ledger import array_items

    assert request.batch is not None
    with run_options.open_session(model, where) as run:
        body, verdict, checks = batch.score_batch_file(
            run, request.batch, request.reported, request.within
        )
        said = {**body} if verdict is None else {**body, "reported": verdict}
        left = array_items("batch array", body["batch"]["unread"])
        return report_checks(
            run,
            said,
            checks,
            lambda: batch.show(body, verdict),
            not_compared=left,
            accept=request.accept,
        )


def report_checks(
    run: "Run",
    body: Mapping[str, object],
    checks: "list[Check]",
    show: Callable[[], None],
    answer: "Callable[[], list[Line]] | None" = None,
    verbose: bool = False,
    command: str = "",
    not_compared: "Sequence[NotCompared]" = (),
    accept: "Sequence[str]" = (),
) -> int:
    """Print the findings and the verdict of the checks, and return the exit code.

    `body` is the JSON so far, `show` prints it, and `answer` returns its short form (None: `show`
    serves for both). `verbose` prints every check to people, `command` is the next one, "" for
    none. `not_compared` are arrays of a batch that nothing reads; they are named
    together with what nothing reads of the model. `accept` are patterns (`unread:PATTERN`) of
    those that the user accepts. `run` is the run whose model is judged.
    """
    from aprfmt.checks.records import pronounce_report

    report = Report(str(run.model.path), tuple(checks))
    verdict = pronounce_report(report, run.model, not_compared, accept)
    command = command or check_output.account_command(verdict, report.subject)

    def show_all() -> None:
        """Print the verdict, the findings, then every check; the short answer if not `verbose`."""
        if answer is not None and not verbose:
            return check_output.show_short(
                lines(), check_output.count_passed(report.checks), "checks"
            )
        check_output.show_verdict(verdict)
        show()
        check_output.show_checks(report.checks)
        if command:
            render.say(f"next: {command}", style="head")

    def lines() -> "list[Line]":
        """Return the short answer as (text, style) lines: verdict, findings, checks that failed."""
        assert answer is not None
        return [
            check_output.verdict_line(verdict),
            *answer(),
            *check_output.failure_lines(report.checks),
            *([(f"next: {command}", "head")] if command else []),
        ]

    gate = {**body, "gate": report.to_json(), **verdict.to_json()}
    return render.emit(gate, verdict.exit, show_all, answer=None if answer is None else lines)


@contextmanager
def open_compared_model(
    text: str, first_run: "Run", samples: "list[Sample]", where: run_options.WhereOptions
) -> "Iterator[Run]":
    """Yield a run of the model to compare with, on the same device unless its @RUN names one.

    Raises UsageError where its tokens differ from those of `first_run` on the samples. `text` is
    that MODEL[@RUN], `first_run` the first run.
    """
    from aprfmt.inference.device import split_run
    from aprfmt.tokenizer.loading import refuse_other_tokens

    with run_options.open_session(
        text, where.for_other_model(run=split_run(text)[1] is not None)
    ) as there:
        refuse_other_tokens(first_run.model, there.model, chain(*(each.ids for each in samples)))
        yield there
