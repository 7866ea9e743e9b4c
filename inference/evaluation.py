"""The loss of a model on texts: samples cut into windows, and the one loop that scores them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from aprfmt.errors import UsageError
from aprfmt.inference.draft import DraftCounts, DraftSession
from aprfmt.inference.loss import (
    KlDivergence,
    LossWindow,
    MeanLoss,
    compare_distributions,
    cross_entropy,
    mean_divergence,
    mean_loss,
    plan_loss_windows,
    rows_at_once,
    sample_window,
)
from aprfmt.inference.session import Numbers, Session

# Rows of logits judged at a time: their float64 copies stay below about 128 MB.
ROW_BYTES = 128 << 20
SHIFTS = 3  # labels a row is held against: its own token, the next, the one after


@dataclass(frozen=True)
class Sample:
    """Token ids of one text; labels are scored from `prompt` on.

    `cut`: the sample has one window, what is too long is cut off. The first `prefix` tokens, those
    the model puts before a text, are repeated before every window.
    """

    name: str
    ids: Sequence[int]
    prompt: int = 0
    cut: bool = False
    prefix: int = 0


Planned = Sequence[tuple[Sample, list[LossWindow]]]


def plan_windows(
    samples: Sequence[Sample], capacity: int, overlap: int = 0, convention: str = "disjoint"
) -> tuple[Planned, list[str]]:
    """Return ([(sample, its windows)], messages on samples that have no label to score).

    `capacity` is the most tokens of a window, `overlap` how many of them two windows share. Raises
    UsageError for options that a convention does not support.
    """
    if convention != "disjoint" and (overlap or any(sample.cut for sample in samples)):
        found = "--overlap" if overlap else "a prompt with its response"
        raise UsageError(
            f"--convention {convention} knows no {found.removeprefix('a ')}; expected whole texts "
            "in windows that share no token; leave it out"
        )
    planned, skipped = [], []
    for sample in samples:
        count = len(sample.ids)
        if sample.cut:
            one = sample_window(sample.prompt, count - sample.prompt, capacity)
            cut = [] if one is None else [one]
        else:
            cut = plan_loss_windows(
                count, capacity, overlap=overlap, prefix=sample.prefix, convention=convention
            )
        if cut:
            planned.append((sample, cut))
        else:
            skipped.append(
                f"{sample.name}: skipped, {no_label_reason(sample, capacity, convention)}"
            )
    return planned, skipped


def no_label_reason(sample: Sample, capacity: int, convention: str) -> str:
    """Return why a sample has no loss token, and what would give it one.

    `capacity` is the most tokens of a window, `convention` the name of the rule that cuts windows.
    """
    count = len(sample.ids)
    if count < 2 or count == sample.prompt:
        todo = "a response" if sample.cut and count == sample.prompt else "a longer text"
        return f"{count} tokens leave no loss token; give {todo}"
    if not sample.cut:
        return (
            f"{count} tokens fill no window of {capacity}, and {convention} scores no other; "
            "give a longer text or a smaller --max-seq-len"
        )
    return (
        f"its prompt of {sample.prompt} tokens fills the window of {capacity}; raise "
        f"--max-seq-len above {sample.prompt}"
    )


@dataclass(frozen=True)
class EvaluationResult:
    """The losses of one model, or of two with the distance between them.

    `shifts` are the means against the token itself, the next and the one after, over the same rows;
    `acceptance` is that of a draft head.
    """

    loss: MeanLoss
    other: MeanLoss | None = None
    divergence: KlDivergence | None = None
    shifts: tuple[float, ...] = ()
    acceptance: DraftCounts | None = None


@dataclass(frozen=True)
class _PassRows:
    """Logits [rows, vocab] of a pass and of another model's, and the tokens they predict.

    The first row predicts `ids[start]`. `drafts` are a draft head's, of the last rows.
    """

    mine: Numbers
    theirs: Numbers | None
    ids: Sequence[int]
    start: int
    drafts: Numbers | None = None

    def labels(self, shift: int = 0, count: int | None = None) -> Sequence[int]:
        """Return the token each row predicts, or the token `shift` positions after that.

        `count` is how many rows, None for all.
        """
        first = self.start + shift
        return self.ids[first : first + (len(self.mine) if count is None else count)]


def _run_window(
    sample: Sample, window: LossWindow, mine: Session, other: Session | None
) -> Iterator[_PassRows]:
    """Yield the logits of one window, by the model or by both models, a few rows at a time.

    `mine` is the model's session, `other` that of the model compared with it, None without one.
    """
    vocab = int(mine.hp["vocab_size"])
    step, most = max(1, ROW_BYTES // (8 * vocab)), rows_at_once(vocab)
    ids, rows = window.ids(sample.ids), window.rows
    others = repeat(None) if other is None else other.logits_in_parts(ids, rows, most)
    at = rows.start + 1
    for here, there in zip(mine.logits_in_parts(ids, rows, most), others, strict=False):
        for first in range(0, len(here), step):
            part = here[first : first + step]
            yield _PassRows(part, None if there is None else there[first : first + step], ids, at)
            at += len(part)


def _run_window_with_drafts(
    sample: Sample, window: LossWindow, draft: DraftSession
) -> Iterator[_PassRows]:
    """Yield the logits of one window, by a model and its draft head, a few rows at a time."""
    vocab = int(draft.hp["vocab_size"])
    most = min(max(1, ROW_BYTES // (8 * vocab)), rows_at_once(vocab))
    ids, at = window.ids(sample.ids), window.rows.start + 1
    for mine, drafts in draft.logits_of_both(ids, window.rows, most):
        yield _PassRows(mine, None, ids, at, drafts)
        at += len(mine)


def score_windows(
    session: Session,
    planned: Planned,
    skipped: Sequence[str],
    other: Session | None = None,
    progress: Callable[[int, int], object] | None = None,
    shifts: bool = False,
    draft: DraftSession | None = None,
) -> EvaluationResult:
    """Return the losses of every window by one model or two.

    `planned` are (sample, its windows), `skipped` messages on samples without a label, both from
    plan_windows. `shifts`: rows are also scored against their own token and the one after the next.
    With a `draft` head of the model its drafts are counted, and no other model is compared.
    `progress` is called with (windows done, all windows).
    """
    vocab = int(session.hp["vocab_size"])
    mine: list[Numbers] = []
    theirs: list[Numbers] = []
    parts: list[KlDivergence] = []
    shifted: list[list[Numbers]] = [[] for _ in range(SHIFTS if shifts else 0)]
    acceptance = None if draft is None else DraftCounts()
    total, done = sum(len(cut) for _, cut in planned), 0
    # One list of losses a sample, its windows joined.
    for sample, cut in planned:
        scored: list[Numbers] = []
        scored_there: list[Numbers] = []
        for window in cut:
            passes = (
                _run_window(sample, window, session, other)
                if draft is None
                else _run_window_with_drafts(sample, window, draft)
            )
            for rows in passes:
                if acceptance is not None and rows.drafts is not None:
                    acceptance = acceptance.add_rows(rows.mine, rows.drafts)
                scored.append(cross_entropy(rows.mine, rows.labels()))
                if rows.theirs is not None:
                    scored_there.append(cross_entropy(rows.theirs, rows.labels()))
                    parts.append(compare_distributions(rows.theirs, rows.mine, rows.labels()))
                _score_shifted(rows, shifted)
            done += 1
            if progress is not None:
                progress(done, total)
        mine.append(np.concatenate(scored))
        if scored_there:
            theirs.append(np.concatenate(scored_there))
    return EvaluationResult(
        mean_loss(mine, vocab, skipped),
        None if other is None else mean_loss(theirs, vocab, skipped),
        mean_divergence(parts) if parts else None,
        tuple(mean_loss(each, vocab).nats for each in shifted),
        acceptance,
    )


def _score_shifted(rows: _PassRows, shifted: Sequence[list[Numbers]]) -> None:
    """Append a pass's losses against three tokens to `shifted`, to show labels that are off by one.

    List 0 gets each row's loss against the row's own token, list 1 against the next token, which
    is the right label, and list 2 against the one after it. The last row of a pass, which has no
    token after the next, is left out.
    """
    count = min(len(rows.mine), len(rows.ids) - 1 - rows.start)
    for shift, kept in enumerate(shifted, -1):
        if count > 0:
            kept.append(cross_entropy(rows.mine[:count], rows.labels(shift, count)))
