"""`aprfmt eval`: the loss of a model on a text, in nats, and its distance from another model."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from aprfmt.cli import eval_batch, eval_other, eval_show, options, render, running
from aprfmt.cli.eval_windows import read_samples, window_tokens, windows_to_json
from aprfmt.compare.thresholds import REPORTED
from aprfmt.errors import UsageError


@dataclass(frozen=True)
class Asked:
    """What is scored, and how it is cut."""

    texts: tuple[Path, ...]
    samples: Path | None
    ids: str | None
    max_seq_len: int | None
    overlap: int
    convention: str
    batch: Path | None
    reported: tuple[float, float] | None
    within: float

    @property
    def texts_given(self) -> bool:
        """Whether there is a text to score."""
        return bool(self.texts or self.samples or self.ids)


@click.command("eval")
@options.gathered(asked=Asked, where=running.Where)
@click.argument("model")
@click.option("--text", "texts", multiple=True, type=options.FILE,
              help="A UTF-8 text file, - is stdin; several are samples of their own.")  # fmt: skip
@click.option("--samples", type=options.FILE, metavar="FILE.jsonl",
              help='One {"prompt": ..., "response": ...} or {"text": ...} a line; '
              "only responses are scored.")  # fmt: skip
@click.option("--ids", metavar="IDS", help="Token ids instead of text: 1,2,3 or a .npy file.")
@click.option(
    "--max-seq-len",
    type=click.IntRange(min=2),
    metavar="N",
    help="Tokens a window holds, BOS included (default: 2048, or 512 as llama.cpp does; the "
    "model's context where that is less).",
)
@click.option("--overlap", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens of the window before that a window repeats unscored.")  # fmt: skip
@click.option("--convention", type=click.Choice(["disjoint", "llama.cpp"]), default="disjoint",
              show_default=True, help="disjoint scores the whole text; llama.cpp, as its "
              "llama-perplexity, whole windows only and the second half of each.")  # fmt: skip
@click.option("--batch", type=options.FILE, metavar="FILE.npz",
              help="A trainer's batch in place of a text: ids, labels (-100: not scored), mask, "
              "and its logits if it has them.")  # fmt: skip
@click.option("--reported", callback=eval_batch.parse_reported, metavar="LOSS",
              help="The loss that was reported of --batch, as it was printed, or nan: name the "
              "mistake that gives it.")  # fmt: skip
@click.option("--within", type=click.FloatRange(0, 0.5), default=REPORTED, show_default=True,
              help="How far --reported may lie from the loss, as a part of it.")  # fmt: skip
@click.option(
    "--against",
    metavar="OTHER[@RUN]",
    help="Compare next-token distributions with this model, on the same tokens.",
)
@click.option("--random-weights", is_flag=True,
              help="The model is untrained: expect 0.5 nats to 1.5 times ln(vocab).")  # fmt: skip
@running.where
@options.arch
@options.common
def command(
    model: str, asked: Asked, against: str | None, random_weights: bool, as_json: bool,
    quiet: bool, where: running.Where,
) -> int:  # fmt: skip
    """Measure the cross-entropy of a text in nats per token, and the perplexity.

    A label is the token after the one that predicts it. A long text is cut into windows that share
    no token; each begins with BOS where the model adds one, else its first token is no label. Exit
    1 for a loss that cannot be: NaN, an exact 0.0, above ln(vocab), or too good to be true.
    """
    from aprfmt.base.outcome import Report
    from aprfmt.inference.evaluation import measure, plan
    from aprfmt.inference.loss import judge

    if asked.batch is not None:
        return of_batch(model, asked, against, where, as_json, quiet)
    if asked.reported is not None:
        raise UsageError("--reported is the loss of a --batch; give --batch FILE.npz")
    if not asked.texts_given:
        raise UsageError(
            "nothing to evaluate; give --text FILE, --samples FILE.jsonl, --ids or --batch FILE.npz"
        )
    with ExitStack() as stack:
        run = stack.enter_context(running.session(model, where))
        found = list(read_samples(run.model, asked.texts, asked.samples, asked.ids))
        capacity = window_tokens(run.model, asked.max_seq_len, asked.convention)
        cut = capacity, asked.overlap, asked.convention
        planned, skipped = plan(found, *cut)
        for text in skipped:
            render.warn(text, "skipped_sample")
        other = None
        if against is not None:
            other = stack.enter_context(eval_other.opened(against, run, found, where))
        with render.Progress("evaluating", quiet) as progress:
            twin = None if other is None else other.session
            measured = measure(run.session, planned, skipped, twin, progress)
        kind: Literal["random", "trained"] = "random" if random_weights else "trained"
        checks = judge(measured.loss, kind, str(run.model.path))
        body: dict[str, Any] = {
            "run": running.run_facts(run),
            **eval_show.loss_to_json(measured.loss),
            **windows_to_json(run.model, planned, *cut),
        }
        if other is not None and measured.other is not None:
            checks += judge(measured.other, kind, str(other.model.path))
            difference = measured.divergence
            body["against"] = {
                "run": running.run_facts(other),
                **eval_show.loss_to_json(measured.other),
                "divergence": None if difference is None else asdict(difference),
            }
        report = Report(str(run.model.path), tuple(checks))
        body["gate"] = report.to_json()
    if not as_json:
        eval_show.show(body)
        running.show_checks(report.checks)
    return render.emit("eval", report.exit_code, body, as_json)


def of_batch(
    model: str, asked: Asked, against: str | None, where: running.Where, as_json: bool, quiet: bool
) -> int:
    """Score a trainer's batch, and say what is wrong with the loss that was reported of it."""
    from aprfmt.base.outcome import Report

    others = {
        "--text, --samples or --ids": asked.texts_given, "--against": against is not None,
        "--max-seq-len": asked.max_seq_len is not None, "--overlap": bool(asked.overlap),
        "--convention": asked.convention != "disjoint",
    }  # fmt: skip
    found = [name for name, given in others.items() if given]
    if found:
        raise UsageError(f"--batch is scored as it is; found {found[0]} beside it")
    assert asked.batch is not None
    with running.session(model, where) as run:
        body, checks = eval_batch.measure(run, asked.batch, asked.reported, asked.within, quiet)
        body = {"run": running.run_facts(run), **body, **eval_show.loss_to_json(body["loss"])}
        report = Report(str(run.model.path), tuple(checks))
        body["gate"] = report.to_json()
        if not as_json:
            eval_batch.show(run, body)
            running.show_checks(report.checks)
    return render.emit("eval", report.exit_code, body, as_json)
