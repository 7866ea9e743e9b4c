"""`aprfmt eval`: the loss of a model on a text, in nats, and its distance from another model."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render, running

if TYPE_CHECKING:
    from aprfmt.inference.loss import Divergence, Loss, Window

# Windows without --max-seq-len: 512 tokens, or the model's context where that is less.
DEFAULT_WINDOW = 512
# Rows of logits judged at a time: their float64 copies stay below about 128 MB.
ROW_BYTES = 128 << 20
MAX_LINE = 64 << 20  # bytes of a line of --samples
MAX_TEXT = 1 << 30  # bytes of a --text; a tokenizer takes a hundred times as much


@dataclass(frozen=True)
class Sample:
    """Token ids of one text; labels are scored from `prompt` on. `cut`: not continued when long."""

    name: str
    ids: list[int]
    prompt: int = 0
    cut: bool = False


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
    help=f"Tokens a window holds (default: {DEFAULT_WINDOW}, or the model's context).",
)
@click.option("--overlap", type=click.IntRange(min=0), default=0, show_default=True,
              help="Tokens of the window before that a window repeats unscored.")  # fmt: skip
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
    against: str | None,
    random_weights: bool,
    arch: str | None,
    as_json: bool,
    quiet: bool,
    **where: Any,
) -> int:  # fmt: skip
    """Measure the cross-entropy of a text in nats per token, and the perplexity.

    A label is the token after the one that predicts it. Exit 1 for a loss that cannot be: NaN, an
    exact 0.0, above ln(vocab), or too good to be true.
    """
    from aprfmt.errors import UsageError
    from aprfmt.inference.loss import judge
    from aprfmt.outcome import Report

    if not (texts or samples or ids):
        raise UsageError("nothing to evaluate; give --text FILE, --samples FILE.jsonl or --ids")
    with ExitStack() as stack:
        opened, session, choice = stack.enter_context(running.session(model, arch=arch, **where))
        found = list(read_samples(opened, texts, samples, ids))
        capacity = window_size(opened, max_seq_len)
        planned, skipped = plan(found, capacity, overlap)
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
            "max_seq_len": capacity,
            "overlap": overlap,
            "windows": sum(len(windows) for _, windows in planned),
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


def read_samples(
    model: Any, texts: tuple[Path, ...], samples: Path | None, ids: str | None
) -> Iterator[Sample]:
    """Yield what is to be scored, tokenized as the model does it."""
    for path in texts:
        text = read_text(path)
        yield Sample(str(path), check(model, model.tokenizer.encode(text)))
    if samples is not None:
        yield from read_lines(model, samples)
    if ids is not None:
        yield Sample("--ids", running.check_ids(model, running.parse_ids(ids)))


def check(model: Any, ids: list[int]) -> list[int]:
    """Return the ids, all inside the embedding; an empty sample is skipped later, loudly."""
    return running.check_ids(model, ids) if ids else ids


def read_text(path: Path) -> str:
    """Return a regular file's UTF-8 text as it is; FormatError where it is none."""
    from aprfmt.errors import FormatError
    from aprfmt.formats.mapped import MappedFile

    file = MappedFile(path)  # refuses pipes and devices
    try:
        if file.size > MAX_TEXT:
            raise FormatError(f"{path}: {file.size} bytes; a text of at most {MAX_TEXT} is read")
        return str(file.view, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: byte {error.object[error.start]:#04x} at {error.start} is no UTF-8; "
            "expected a UTF-8 text"
        ) from None
    finally:
        file.close()


def read_lines(model: Any, path: Path) -> Iterator[Sample]:
    """Yield the samples of a .jsonl file; FormatError names the line that is none."""
    from aprfmt.errors import FormatError
    from aprfmt.formats.jsonio import loads

    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}: line {number}"
        row = loads(line, where, max_bytes=MAX_LINE)
        known = ({"text"}, {"prompt", "response"})
        if not isinstance(row, dict) or not any(keys <= row.keys() for keys in known):
            raise FormatError(f'{where}: has no "text", and no "prompt" with "response"')
        parts = [row["text"]] if "text" in row else [row["prompt"], row["response"]]
        if not all(isinstance(part, str) for part in parts):
            raise FormatError(f"{where}: a value is no string")
        tokenizer = model.tokenizer
        ids = tokenizer.encode(parts[0])
        if len(parts) == 1:
            yield Sample(where, check(model, ids))
            continue
        response = tokenizer.encode(parts[1], add_special=False)
        yield Sample(where, check(model, [*ids, *response]), prompt=len(ids), cut=True)


def window_size(model: Any, asked: int | None) -> int:
    """Return how many tokens a window holds; asking for more than the context is warned of."""
    context = int(model.hyper["context_length"])
    if asked is not None and asked > context:
        render.warn(f"{model.path}: windows of {asked} tokens; the model was made for {context}")
    return asked if asked is not None else min(context, DEFAULT_WINDOW)


def plan(
    samples: list[Sample], capacity: int, overlap: int
) -> "tuple[list[tuple[Sample, list[Window]]], list[str]]":
    """Return every sample with its windows, and what is said of those without a loss token."""
    from aprfmt.inference.loss import sample_window, windows

    planned, skipped = [], []
    for sample in samples:
        count = len(sample.ids)
        if sample.cut:
            one = sample_window(sample.prompt, count - sample.prompt, capacity)
            cut = [] if one is None else [one]
        else:
            cut = windows(count, capacity, overlap=overlap)
        if cut:
            planned.append((sample, cut))
        elif count < 2 or count == sample.prompt:
            todo = "a response" if sample.cut and count == sample.prompt else "a longer text"
            skipped.append(f"{sample.name}: skipped, {count} tokens leave no loss token; "
                           f"give {todo}")  # fmt: skip
        else:
            skipped.append(
                f"{sample.name}: skipped, its prompt of {sample.prompt} tokens fills the window of "
                f"{capacity}; raise --max-seq-len above {sample.prompt}"
            )
    return planned, skipped


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

    from aprfmt.inference.loss import cross_entropy, divergence, mean_divergence, mean_loss

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
            ids = sample.ids[window.start : window.stop]
            rows = range(window.first - 1 - window.start, len(ids) - 1)
            labels = sample.ids[window.first : window.stop]
            here = session.prefill(ids, rows)
            there = None if other is None else other.prefill(ids, rows)
            for at in range(0, len(labels), step):
                part, wanted = here[at : at + step], labels[at : at + step]
                scored.append(cross_entropy(part, wanted))
                if there is not None:
                    scored_there.append(cross_entropy(there[at : at + step], wanted))
                    parts.append(divergence(there[at : at + step], part, wanted))
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
            ("loss", f"{found['loss']:.6f} nats per token"),
            ("perplexity", f"{found['perplexity']:.4f}"),
            ("uniform guess", f"{found['uniform_loss']:.4f} nats = ln({found['vocab_size']})"),
            ("scored", f"{found['loss_tokens']} tokens of {found['samples']} samples"
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
