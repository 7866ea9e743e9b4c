"""`aprfmt eval`: the loss of a model on a text, in nats, and its distance from another model."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render, running
from aprfmt.cli.eval_windows import (
    Sample,
    plan,
    read_samples,
    window_rows,
    window_tokens,
    windows_to_json,
)

if TYPE_CHECKING:
    from aprfmt.inference.loss import Divergence, Loss, Window

# Rows of logits judged at a time: their float64 copies stay below about 128 MB.
ROW_BYTES = 128 << 20


@click.command("eval")
@click.argument("model")
@click.option("--text", "texts", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
              help="A UTF-8 text file; several are samples of their own.")  # fmt: skip
@click.option("--samples", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.jsonl",
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
    model: str,
    texts: tuple[Path, ...],
    samples: Path | None,
    ids: str | None,
    max_seq_len: int | None,
    overlap: int,
    convention: str,
    against: str | None,
    random_weights: bool,
    arch: str | None,
    as_json: bool,
    quiet: bool,
    **where: Any,
) -> int:  # fmt: skip
    """Measure the cross-entropy of a text in nats per token, and the perplexity.

    A label is the token after the one that predicts it. A long text is cut into windows that share
    no token; each begins with BOS where the model adds one, else its first token is no label. Exit
    1 for a loss that cannot be: NaN, an exact 0.0, above ln(vocab), or too good to be true.
    """
    from aprfmt.base.outcome import Report
    from aprfmt.errors import UsageError
    from aprfmt.inference.loss import judge

    if not (texts or samples or ids):
        raise UsageError("nothing to evaluate; give --text FILE, --samples FILE.jsonl or --ids")
    with ExitStack() as stack:
        opened, session, choice = stack.enter_context(running.session(model, arch=arch, **where))
        found = list(read_samples(opened, texts, samples, ids))
        capacity = window_tokens(opened, max_seq_len, convention)
        planned, skipped = plan(found, capacity, overlap, convention)
        for text in skipped:
            render.warn(text)
        other = None
        if against is not None:
            other = stack.enter_context(other_session(against, opened, found, where))
        with render.Progress("evaluating", quiet) as progress:
            measured = measure(session, other[1] if other else None, planned, skipped, progress)
        kind: Any = "random" if random_weights else "trained"
        checks = judge(measured.loss, kind, str(opened.path))
        body: dict[str, Any] = {
            "run": running.run_facts(opened, choice, session),
            **loss_to_json(measured.loss),
            **windows_to_json(opened, planned, capacity, overlap, convention),
        }
        if other is not None and measured.other is not None:
            checks += judge(measured.other, kind, str(other[0].path))
            difference = measured.divergence
            body["against"] = {
                "run": running.run_facts(other[0], other[2], other[1]),
                **loss_to_json(measured.other),
                "divergence": None if difference is None else asdict(difference),
            }
        report = Report(str(opened.path), tuple(checks))
        body["gate"] = report.to_json()
    if not as_json:
        show(body)
        running.show_checks(report.checks)
    return render.emit("eval", report.exit_code, body, as_json)


def other_session(text: str, model: Any, samples: list[Sample], where: dict[str, Any]) -> Any:
    """Open the model to compare with, on the same device unless @RUN names one.

    UsageError where it has another vocabulary.
    """
    from contextlib import contextmanager

    from aprfmt.errors import UsageError
    from aprfmt.inference.device import split_run

    @contextmanager
    def opened() -> Iterator[tuple[Any, Any, Any]]:
        run = split_run(text)[1]
        kept = where if run is None else {
            key: value for key, value in where.items() if key not in ("device", "backend", "dtype")
        }  # fmt: skip
        with running.session(text, **kept) as (other, session, choice):
            sizes = [int(each.hyper["vocab_size"]) for each in (model, other)]
            if sizes[0] != sizes[1]:
                raise UsageError(
                    f"{other.path}: {sizes[1]} tokens in the vocabulary, {model.path} has "
                    f"{sizes[0]}; distributions over different tokens cannot be compared"
                )
            here, there = running.tokenizer_of(model), running.tokenizer_of(other)
            used = sorted({i for sample in samples for i in sample.ids})
            if here is not None and there is not None:
                for i in used:
                    if here.token(i) != there.token(i):
                        raise UsageError(
                            f"{other.path}: token {i} is {there.token(i)!r}, in {model.path} "
                            f"{here.token(i)!r}; their ids mean other things"
                        )
            yield other, session, choice

    return opened()


@dataclass(frozen=True)
class Measured:
    """The losses of one model, or of two with the distance between them."""

    loss: "Loss"
    other: "Loss | None"
    divergence: "Divergence | None"


def measure(
    session: Any, other: Any, planned: "list[tuple[Sample, list[Window]]]", skipped: list[str],
    progress: render.Progress,
) -> Measured:  # fmt: skip
    """Run every window through the model or both; logits are judged a few rows at a time."""
    import numpy as np

    from aprfmt.inference.loss import (
        cross_entropy,
        divergence,
        mean_divergence,
        mean_loss,
        rows_at_once,
    )

    vocab = int(session.hp["vocab_size"])
    step = max(1, ROW_BYTES // (8 * vocab))
    mine: list[Any] = []
    theirs: list[Any] = []
    parts: list[Divergence] = []
    total, done = sum(len(windows) for _, windows in planned), 0
    for sample, windows in planned:
        scored: list[Any] = []
        scored_there: list[Any] = []
        for window in windows:
            ids, rows, most = window.ids(sample.ids), window.rows, rows_at_once(vocab)
            others = repeat(None) if other is None else other.in_parts(ids, rows, most)
            at = window.first
            for here, there in zip(session.in_parts(ids, rows, most), others, strict=False):
                for first in range(0, len(here), step):
                    part = here[first : first + step]
                    wanted = sample.ids[at : at + len(part)]
                    at += len(part)
                    scored.append(cross_entropy(part, wanted))
                    if there is not None:
                        twin = there[first : first + step]
                        scored_there.append(cross_entropy(twin, wanted))
                        parts.append(divergence(twin, part, wanted))
            done += 1
            progress(done, total)
        mine.append(np.concatenate(scored))
        if scored_there:
            theirs.append(np.concatenate(scored_there))
    return Measured(
        mean_loss(mine, vocab, skipped),
        None if other is None else mean_loss(theirs, vocab, skipped),
        mean_divergence(parts) if parts else None,
    )


def loss_to_json(loss: "Loss") -> dict[str, Any]:
    """Return the numbers with their unit."""
    return {
        "loss": loss.nats,
        "unit": "nats per token",
        "perplexity": loss.perplexity if not math.isnan(loss.nats) else loss.nats,
        "uniform_loss": loss.uniform,
        "vocab_size": loss.vocab,
        "loss_tokens": loss.tokens,
        "samples": loss.samples,
        "skipped": list(loss.skipped),
    }


def show(body: dict[str, Any]) -> None:
    """Print the losses, and how far the two distributions are apart."""
    for found in (body, body.get("against")):
        if found is None:
            continue
        where = found["run"]
        render.line(running.headline(where), style="head")
        render.pairs([
            *(window_rows(body) if found is body else ()),
            ("loss", f"{found['loss']:.6f} nats per token"),
            ("perplexity", f"{found['perplexity']:.4f}"),
            ("uniform guess", f"{found['uniform_loss']:.4f} nats = ln({found['vocab_size']})"),
            ("scored", f"{found['loss_tokens']} labels of {found['samples']} samples"
             + (f", {len(found['skipped'])} skipped" if found["skipped"] else "")),
        ])  # fmt: skip
    difference = (body.get("against") or {}).get("divergence")
    if difference is not None:
        render.line("this model against the other", style="head")
        render.pairs([
            ("mean KL", f"{difference['kl']:.6g} nats per token"),
            ("max KL", f"{difference['max_kl']:.6g} nats"),
            ("same top token", f"{100 * difference['top1']:.2f} %"),
            ("right token's probability", f"{difference['correct_change']:+.6f} on average"),
        ])  # fmt: skip
