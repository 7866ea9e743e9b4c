"""`aprfmt eval`: the loss of a model on a text, in nats, and its distance from another model."""

import click

from aprfmt.cli import options, run_options
from aprfmt.cli.eval import batch, scoring
from aprfmt.cli.eval.scoring import EvalRequest
from aprfmt.errors import UsageError
from aprfmt.measure.tolerances import REPORTED


@click.command("eval")
@options.gather_options(asked=EvalRequest, where=run_options.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=options.FILE,
    help="A UTF-8 text file, - is stdin; several are samples of their own.",
)
@click.option(
    "--samples",
    type=options.FILE,
    metavar="FILE.jsonl",
    help='One {"prompt": ..., "response": ...} or {"text": ...} a line; only responses are scored.',
)
@click.option("--ids", metavar="IDS", help="Token ids instead of text: 1,2,3, a .npy or .pt file.")
@click.option(
    "--max-seq-len",
    type=options.WholeNumber(2),
    metavar="N",
    help="Tokens a window holds, BOS included (default: 2048, or 512 as llama.cpp does; "
    "the model's context where that is less).",
)
@click.option(
    "--overlap",
    type=options.WholeNumber(0),
    default=0,
    show_default=True,
    help="Tokens of the window before that a window repeats unscored.",
)
@click.option(
    "--convention",
    type=click.Choice(["disjoint", "llama.cpp"]),
    default="disjoint",
    show_default=True,
    help="disjoint scores the whole text; llama.cpp, as its "
    "llama-perplexity, whole windows only and the second half of each.",
)
@click.option(
    "--batch",
    type=options.FILE,
    metavar="FILE",
    help="A trainer's batch in place of a text, safetensors, npz or .pt: ids, labels (-100: "
    "not scored), mask, and its logits if it has them.",
)
@click.option(
    "--reported",
    callback=batch.parse_reported,
    metavar="LOSS",
    help="The loss that was reported of --batch, as it was printed, or nan: name the "
    "mistake that gives it.",
)
@click.option(
    "--within",
    type=options.RealNumber(0, 0.5),
    default=REPORTED,
    show_default=True,
    help="How far --reported may be from the loss, as a share of the loss.",
)
@click.option(
    "--against",
    type=options.MODEL_RUN,
    metavar="OTHER[@RUN]",
    help="Compare next-token distributions with this model, on the same tokens.",
)
@click.option(
    "--draft",
    is_flag=True,
    help="Run the model's draft head (MTP) too: the share of its drafts that the model "
    "accepts, that is of places where the head's likeliest token, guessed one token "
    "earlier, is the model's likeliest one.",
)
@click.option(
    "--least-accepted",
    type=options.RealNumber(0, 1),
    metavar="SHARE",
    help="Exit 1 below this share of --draft (default: 0.05, a dead head).",
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="The model is untrained: expect 0.5 nats to 1.5 times ln(vocab).",
)
@options.verbose("Every number and every check, those that passed too.")
@options.accept()
@run_options.where
@options.arch
@options.common
def command(model: str, asked: EvalRequest, where: run_options.WhereOptions) -> int:
    """Measure the cross-entropy of a text in nats per token, and the perplexity.

    A label is the token after the one that predicts it. A long text is cut into windows that share
    no token. Each begins with BOS if the model adds one, else its first token is no label. Exit 1
    for an impossible loss: NaN, an exact 0.0, above ln(vocab), or too good to be true. With
    --draft also if nearly no draft is accepted.
    """
    if asked.least_accepted is not None and not asked.draft:
        raise UsageError("--least-accepted is a bound for --draft; give --draft too")
    if asked.batch is not None:
        return scoring.evaluate_batch(model, asked, where)
    if asked.reported is not None:
        raise UsageError("--reported is the loss of a --batch; give --batch FILE")
    if not asked.texts_given:
        raise UsageError(
            "nothing to evaluate; give --text FILE, --samples FILE.jsonl, --ids or --batch FILE"
        )
    return scoring.evaluate_texts(model, asked, where)
