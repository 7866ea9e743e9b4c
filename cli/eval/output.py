"""Prints the losses of `aprfmt eval`, and makes their JSON."""

import math
from typing import TYPE_CHECKING, TypedDict

from aprfmt.cli import render, run_options
from aprfmt.cli.eval.windows import WindowFacts, window_rows

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.inference.loss import MeanLoss


class LossFacts(TypedDict):
    """A mean loss with its unit (nats per token), and what it was measured on."""

    loss: float
    unit: str
    perplexity: float
    uniform_loss: float
    vocab_size: int
    loss_tokens: int
    samples: int
    skipped: list[str]


def loss_to_json(loss: "MeanLoss") -> LossFacts:
    """Return a mean loss as JSON, with its unit, perplexity and counts."""
    return {
        "loss": loss.nats,
        "unit": "nats per token",
        "perplexity": loss.perplexity if not math.isnan(loss.nats) else loss.nats,
        "uniform_loss": loss.uniform_loss,
        "vocab_size": loss.vocab,
        "loss_tokens": loss.tokens,
        "samples": loss.samples,
        "skipped": list(loss.skipped),
    }


class DraftAcceptance(TypedDict):
    """How many drafts the model accepts, and the fraction below which a head is dead."""

    drafts: int
    accepted: int
    acceptance: float
    least: float


class KlFacts(TypedDict):
    """How far two models' predictions are apart: KL in nats per token, fractions of tokens."""

    kl: float
    max_kl: float
    top1: float
    correct_change: float
    tokens: int


class ComparedModel(LossFacts):
    """The other model's loss, and how far its predictions are from the first's."""

    run: run_options.RunLocation
    divergence: KlFacts | None


class EvalFacts(LossFacts, WindowFacts):
    """What `aprfmt eval` says of texts."""

    run: run_options.RunLocation


def draft_verdict(draft: DraftAcceptance) -> str:
    """Return whether a draft head is alive or dead, with the fraction of drafts accepted."""
    if not draft["drafts"]:
        return "not measured: no draft was scored"
    state = "alive" if draft["acceptance"] >= draft["least"] else "dead"
    return f"{state}: {100 * draft['acceptance']:.1f} % of {draft['drafts']} drafts accepted"


def answer(
    body: EvalFacts, draft: DraftAcceptance | None, against: ComparedModel | None
) -> "list[Line]":
    """Return the short answer as (text, style) lines: losses, and how far two models are apart.

    `draft` and `against` are None where they were not asked for. `body` has the JSON of the texts'
    losses.
    """
    lines: list[Line] = []
    if draft is not None:
        lines.append((f"draft head {draft_verdict(draft)}", ""))
    both: list[EvalFacts | ComparedModel] = [body] if against is None else [body, against]
    for found in both:
        lines.append(
            (
                f"  {run_options.run_headline(found['run'])}: {found['loss']:.6f} nats per token, "
                f"perplexity {found['perplexity']:.4f}, {found['loss_tokens']} labels of "
                f"{found['samples']} samples; a uniform guess is {found['uniform_loss']:.4f}",
                "",
            )
        )
    apart = None if against is None else against["divergence"]
    if apart is not None:
        lines.append(
            (
                f"  mean KL {apart['kl']:.6g} nats per token, max {apart['max_kl']:.6g}, "
                f"same top token {100 * apart['top1']:.2f} %",
                "",
            )
        )
    return lines


def show(body: EvalFacts, draft: DraftAcceptance | None, against: ComparedModel | None) -> None:
    """Print the draft head's verdict, each model's loss, and how far two models are apart.

    `body` has the JSON of the texts' losses.
    """
    if draft is not None:
        render.line(f"draft head {draft_verdict(draft)}")
    both: list[EvalFacts | ComparedModel] = [body] if against is None else [body, against]
    for found in both:
        render.line(run_options.run_headline(found["run"]), style="head")
        render.print_pairs(
            [
                *(window_rows(body) if found is body else ()),
                ("loss", f"{found['loss']:.6f} nats per token"),
                ("perplexity", f"{found['perplexity']:.4f}"),
                ("uniform guess", f"{found['uniform_loss']:.4f} nats = ln({found['vocab_size']})"),
                (
                    "scored",
                    f"{found['loss_tokens']} labels of {found['samples']} samples"
                    + (f", {len(found['skipped'])} skipped" if found["skipped"] else ""),
                ),
            ]
        )
    difference = None if against is None else against["divergence"]
    if difference is not None:
        render.line("this model against the other", style="head")
        render.print_pairs(
            [
                ("mean KL", f"{difference['kl']:.6g} nats per token"),
                ("max KL", f"{difference['max_kl']:.6g} nats"),
                ("same top token", f"{100 * difference['top1']:.2f} %"),
                ("right token's probability", f"{difference['correct_change']:+.6f} on average"),
            ]
        )
