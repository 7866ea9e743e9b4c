"""`aprfmt eval --batch`: a trainer's batch scored again, and the reported loss explained."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from aprfmt.base.outcome import Check, check, not_run
from aprfmt.cli import render, run_options
from aprfmt.cli.eval import output

if TYPE_CHECKING:
    from aprfmt.inference.batch import Batch, EndCounts
    from aprfmt.inference.reported_loss import LossVerdict
    from aprfmt.inference.running import Run
    from aprfmt.tokenizer.base import Tokenizer


class BatchFacts(TypedDict):
    """What a batch holds.

    `hidden` counts the tokens that could be labels and are none: an earlier token could predict
    them, and they are no padding. `loss_of_logits` is the loss of the trainer's logits, None
    without these. `unread` are arrays of the file that nothing here reads.
    """

    path: str
    samples: int
    tokens: int
    padding: int
    labels: int
    hidden: int
    shift: int
    documents: int
    unread: list[str]
    loss_of_logits: float | None


class ReportedLoss(TypedDict):
    """The loss that was reported, the one recomputed, and which mistakes give it."""

    value: float
    recomputed: float
    within: float
    verdict: str
    mistakes: list[list[str]]
    guesses: list[dict[str, object]]


class BatchResult(output.LossFacts):
    """What `aprfmt eval --batch` says."""

    run: run_options.RunLocation
    batch: BatchFacts


def parse_reported(
    context: click.Context, param: click.Parameter, value: str | None
) -> tuple[float, float] | None:
    """Return (the reported loss, half a unit of its last printed digit); None without a value.

    The half unit is 0 for a whole number. "nan" and "inf" are numbers here. Raises BadParameter for
    any other text.
    """
    if value is None:
        return None
    text = value.strip().lower()
    found = re.fullmatch(r"([+-]?\d*)\.?(\d*)(?:e([+-]?\d{1,3}))?", text)
    if text in ("nan", "inf"):
        return float(text), 0.0
    if found is None or not (found[1].strip("+-") or found[2]):
        raise click.BadParameter(
            f"{value!r} is no number; expected a loss as it was printed, or nan", context, param
        )
    exponent = int(found[3] or 0) - len(found[2])
    return float(text), 0.5 * 10.0**exponent if found[2] or found[3] else 0.0


def score_batch_file(
    run: "Run", path: Path, reported: tuple[float, float] | None, within: float
) -> "tuple[BatchResult, ReportedLoss | None, list[Check]]":
    """Score a trainer's batch and judge its reported loss; return (JSON, reported loss, checks).

    `reported` is (loss, half a unit of its last printed digit), or None. `within` is how far the
    reported loss may be off, as a fraction of the loss. The second item is None where no loss was
    reported.
    """
    from aprfmt.inference.batch import read_batch, score_batch
    from aprfmt.inference.loss import assess_loss, mean_loss
    from aprfmt.inference.reported_loss import explain_loss, label_losses
    from aprfmt.tokenizer.loading import try_load_tokenizer

    # Score the batch with this model.
    vocab = int(run.model.hyper["vocab_size"])
    tokenizer = try_load_tokenizer(run.model)
    ends = run_options.stop_token_ids(run.model) if tokenizer is None else tokenizer.stop_ids
    batch = read_batch(path, vocab, ends)
    scored = []
    with render.ProgressLine("scoring") as progress:
        for one in score_batch(batch, run.session):
            scored.append(one)
            progress(len(scored), len(batch.mask))
    loss = mean_loss(label_losses(batch, scored), vocab)
    body: BatchResult = {
        "run": run_options.run_facts(run),
        "batch": batch_to_json(batch),
        **output.loss_to_json(loss),
    }
    # Check the batch itself: shifted labels, edges of documents, ends of turns.
    spelled = {i: repr(tokenizer.token(i)) for i in ends} if tokenizer is not None else {}
    checks = [
        shift_check(batch),
        *edge_checks(batch),
        *padding_checks(batch),
        *prompt_checks(batch),
    ]
    checks += end_checks(batch, spelled)
    checks += [] if tokenizer is None else frame_checks(batch, tokenizer)
    # With the trainer's logits, tell a wrong loss from a wrong forward pass.
    theirs = None
    if batch.logits is not None:
        theirs = list(score_batch(batch, None))
        other = mean_loss(label_losses(batch, theirs), vocab)
        body["batch"]["loss_of_logits"] = other.nats
        checks.append(logits_check(batch, loss.nats, other.nats, within))
    # The reported loss is explained by the trainer's logits where there are some.
    if reported is None:
        return body, None, [*checks, *assess_loss(loss, "trained", str(run.model.path))]
    number, digit = reported
    if theirs is None:
        answer = explain_loss(batch, scored, number, within, digit, run.session)
    else:
        answer = explain_loss(batch, theirs, number, within, digit)
    return body, answer_to_json(answer), [*checks, reported_check(batch, answer, vocab)]


def shift_check(batch: "Batch") -> Check:
    """Return the Check that the labels are the token ids, unshifted or shifted by one."""
    from aprfmt.inference.batch import PROPER, SHIFTS

    return check(
        "labels-shifted",
        batch.shift in PROPER,
        SHIFTS[batch.shift],
        "the ids themselves, or the ids one ahead",
        "shift the labels once",
        str(batch.path),
    )


def edge_checks(batch: "Batch") -> list[Check]:
    """Return a list of one Check: no document's first token is a label of the document before.

    It is empty for a batch without packed documents.
    """
    if batch.document is None:
        return []
    found = f"{batch.document_count} documents in {len(batch.mask)} rows; "
    return [
        check(
            "documents-apart",
            not batch.edges,
            found
            + (
                f"labels of {batch.edges} first tokens are set"
                if batch.edges
                else "no label is the first token of one"
            ),
            "no document scored by the one before",
            "set the label of each document's first token to -100",
            str(batch.path),
        )
    ]


def padding_checks(batch: "Batch") -> list[Check]:
    """Return [the Check that no token of padding is a label]; [] where nothing says what is scored.

    Labels that the mask leaves out here are scored by trainers that look at labels alone.
    """
    if not batch.labels_given or batch.mask.all():
        return []
    count = batch.padding_labels
    return [
        check(
            "padding-unscored",
            not count,
            f"{count} label{'s' * (count != 1)} of tokens that the mask calls padding"
            if count
            else "no label is padding",
            "no label after the mask: a trainer that looks at labels alone scores it",
            "set the labels of padding to -100",
            str(batch.path),
        )
    ]


def prompt_checks(batch: "Batch") -> list[Check]:
    """Return [the Check that a prompt is masked by its tokens, not by the columns of the file].

    [] where no rows with unlike padding before them share the first tokens that one of them masks.
    """
    from aprfmt.inference.batch import find_shared_prompt

    shared = find_shared_prompt(batch)
    if shared is None:
        return []
    same = f"the first {shared.masked} tokens, which row {shared.row} masks"
    if not shared.scored:
        found = f"{same}, are masked in {shared.rows} rows with more padding before them"
    else:
        found = (
            f"labels begin in column {shared.column}, however much padding is before the text: "
            f"of {same}, {shared.scored} {'are' if shared.scored != 1 else 'is'} scored in "
            f"{shared.scoring} of {shared.rows} rows with more padding"
        )
        if count := batch.unpredicted_labels:
            found += f"; labels of first tokens, which padding predicts: {count}"
    if shared.paddings == 1:
        why = f"{found}: it may be an answer there; give rows with more unlike padding"
        return [not_run("prompt-masked", why, str(batch.path))]
    return [
        check(
            "prompt-masked",
            not shared.scored,
            found,
            "the same tokens masked in every row",
            "count the prompt's tokens from where the attention mask begins, not from column 0",
            str(batch.path),
        )
    ]


def end_checks(batch: "Batch", spelled: Mapping[int, str]) -> list[Check]:
    """Return [the Check that the tokens which end turns are among the labels], or [].

    A model learns to stop from these labels only. [] where the file has no labels: then all tokens
    are scored. The check is NOT_RUN where no token that ends turns is known. `spelled` is {token
    id: its text}.
    """
    from aprfmt.inference.batch import count_turn_ends

    # Without labels, scored tokens or known ends there is nothing to check.
    name, where = "ends-scored", str(batch.path)
    if not batch.labels_given or not batch.label_count:
        return []
    if not batch.ends:
        return [not_run(name, "the model names no token that ends a turn", where)]
    counts = count_turn_ends(batch)
    known = [each for each in counts if each.places]
    if not known:
        why = "no scored text ends with a token that ends a turn"
        if counts:
            ids = ", ".join(str(each.id) for each in counts)
            why = f"the batch is padded with {ids}, so that the ends of its texts are not known"
        return [not_run(name, why, where)]
    # An end that is never a label is one that the model never learns to write.
    lost = [each for each in known if not each.scored]

    def count_text(counts: "EndCounts") -> str:
        """Return how often a token ends scored text, and how often it is a label, as words."""
        text = " ".join(filter(None, (str(counts.id), spelled.get(counts.id, ""))))
        return f"token {text} ends a scored text {counts.places} times, {counts.scored} are labels"

    padded = any(each.padding for each in lost)
    return [
        check(
            name,
            not lost,
            "; ".join(map(count_text, lost or known)),
            "the end of a turn among the labels, or the model never learns to stop",
            ("padding has the same id: " if padded else "")
            + "mask the labels of padding by the attention mask, not by the token's id",
            where,
        )
    ]


def frame_checks(batch: "Batch", tokenizer: "Tokenizer") -> list[Check]:
    """Return [the Check that texts begin and end with a special token once], or [].

    [] for a batch of which no text has it twice, if the tokenizer puts nothing before a text and
    has no BOS. Texts that have it unlike numbers of times are padded, which no mask says.
    """
    from aprfmt.causes.tokenizer.recorded_ids import repeated_beginning, times_text
    from aprfmt.inference.batch import document_spans

    name, where = "frame-once", str(batch.path)
    texts = [tuple(batch.ids[row, a:b].tolist()) for row, a, b in document_spans(batch)]
    begun = [found for ids in texts if (found := repeated_beginning(tokenizer, ids)) is not None]
    ended = [
        ids[-1]
        for ids in texts
        if len(ids) > 2 and ids[-1] in batch.ends and ids[-2] == ids[-1] != ids[-3]
    ]
    # Padding that nothing marks is of any length. Rows cut anywhere from texts that follow each
    # other may begin with an end and a beginning of the same id.
    pad, every = tokenizer.pad_id, len(begun) == len(texts) > 1
    if len({*begun}) > 1 or (not batch.mask_given and begun and (pad,) == begun[0][0]):
        begun = []
    begun = [each for each in begun if every or not batch.ends.intersection(each[0])]
    if not batch.mask_given or len(ended) < sum(ids[-1] in batch.ends for ids in texts):
        ended = []
    words = []
    for many, twice, times, says in (
        (len(begun), begun[0][0] if begun else (), begun[0][1] if begun else 0, "begin"),
        (len(ended), tuple(ended[:1]), 2, "end"),
    ):
        if many:
            shown = ", ".join(f"{i} {tokenizer.token(i)!r}" for i in twice)
            words.append(f"{many} of {len(texts)} texts {says} with {shown} {times_text(times)}")
    if not words and not tokenizer.prefix_ids and tokenizer.bos_id is None:
        return []
    return [
        check(
            name,
            not words,
            "; ".join(words) or "no text begins or ends with a special token twice",
            "each special token once, as the tokenizer or the chat template puts it",
            "two of the tokenizer, the chat template and the trainer write it: let one do it, such "
            "as by add_special_tokens=False for a rendered chat",
            where,
        )
    ]


def logits_check(batch: "Batch", ours: float, theirs: float, within: float) -> Check:
    """Return the check that the file's logits give the same loss as this model's.

    `ours` and `theirs` are losses in nats per token, `within` the fraction of the loss by which
    they may differ.
    """
    return check(
        "logits-agree",
        abs(ours - theirs) <= within * abs(ours),
        f"{theirs:.6g} nats from the file's logits",
        f"{ours:.6g} nats of this model's, within {within:g} of it",
        "the forward passes differ: trace both, and diagnose the traces",
        str(batch.path),
    )


def reported_check(batch: "Batch", answer: "LossVerdict", vocabulary: int) -> Check:
    """Return the check that the reported loss is the recomputed one; a failure names why not.

    `answer` compares both, `batch` is what the loss is of, `vocabulary` the number of tokens.
    """
    agrees, found = answer.says == "agrees", f"{answer.reported:.6g} was reported"
    expected = f"{answer.right:.6g} nats per token, recomputed from {batch.label_count} labels"
    said = found if agrees else f"{found}: {mistake_sentence(answer, vocabulary)}"
    todo = mistake_remedy(answer, batch.logits is not None)
    return check("loss-reported", agrees, said, expected, todo, str(batch.path))


def mistake_sentence(answer: "LossVerdict", vocabulary: int) -> str:
    """Return a sentence on which mistakes of a training loop would give the reported loss.

    It says so too where no known mistake gives it, or where no label is there to compute it from.
    `vocabulary` is the number of tokens.
    """
    from aprfmt.inference.reported_loss import MISTAKES, guessing_text

    if answer.says == "unmeasured":
        return "there is no label to recompute it from"
    if not answer.guesses:
        of = guessing_text(answer, vocabulary)
        return "no mistake of the table gives this number" + (f"; {of}" if of else "")
    shown = []
    for causes in answer.distinct_mistakes[:4]:
        one = next(guess for guess in answer.guesses if guess.mistakes == causes)
        says = ", and ".join(MISTAKES[name].says for name in causes)
        value = "" if math.isnan(one.value) else f", which gives {one.value:.6g}"
        shown.append(says + (f" ({one.detail})" if one.detail else "") + value)
    if answer.says == "named":
        return shown[0]
    if answer.says == "likely":
        return f"likely, and not certain: {shown[0]}"
    return "it may be that " + ", or that ".join(shown)


def mistake_remedy(answer: "LossVerdict", logits: bool = False) -> str:
    """Return what to do about a reported loss that is wrong.

    `logits` says that the batch has the trainer's logits.
    """
    if answer.says in ("named", "likely"):
        return answer.guesses[0].advice()
    if answer.says == "ambiguous":
        return "give a batch in which these differ: samples of unlike length, another size"
    if answer.says == "unmeasured":
        return "give labels, or leave them out to score every token"
    if logits:
        return (
            "the batch's own logits do not give it: look at what comes after them in the trainer, "
            "the labels, their weights and the terms that are added"
        )
    return "compare the forward passes: save the trainer's logits as `logits` in the batch"


def batch_to_json(batch: "Batch") -> BatchFacts:
    """Return what the batch file holds, as JSON; `loss_of_logits` is None until it is computed."""
    samples, tokens = batch.mask.shape
    return {
        "path": str(batch.path),
        "samples": samples,
        "tokens": tokens,
        "padding": int((~batch.mask).sum()),
        "labels": batch.label_count,
        "hidden": batch.hidden_count,
        "shift": batch.shift,
        "documents": batch.document_count,
        "unread": list(batch.unread),
        "loss_of_logits": None,
    }


def answer_to_json(answer: "LossVerdict") -> ReportedLoss:
    """Return `answer`, the verdict on the reported loss, as JSON with every guess that gives it."""
    return {
        "value": answer.reported,
        "recomputed": answer.right,
        "within": answer.within,
        "verdict": answer.says,
        "mistakes": [list(names) for names in answer.distinct_mistakes],
        "guesses": [asdict(guess) | {"mistakes": list(guess.mistakes)} for guess in answer.guesses],
    }


def show(body: BatchResult, reported: ReportedLoss | None) -> None:
    """Print what the batch holds, the recomputed loss, and the reported one.

    `body` is the JSON of the batch.
    """
    loss, batch = body["loss"], body["batch"]
    render.line(run_options.run_headline(body["run"]), style="head")
    rows = [
        ("batch", f"{batch['samples']} samples of {batch['tokens']} tokens, {batch['padding']} of "
         f"padding, {batch['labels']} labels"
         + (f", {batch['hidden']} tokens not scored" if batch["hidden"] else "")),
        ("loss", f"{loss:.6f} nats per token"),
    ]  # fmt: skip
    if batch["documents"] != batch["samples"]:
        rows.insert(1, ("packed", f"{batch['documents']} documents, each scored by itself"))
    if batch["unread"]:
        shown = ", ".join(map(render.escape, batch["unread"][:8]))
        more = "" if len(batch["unread"]) <= 8 else ", ..."
        count = len(batch["unread"])
        rows.append(("not read", f"{count} array{'s' * (count > 1)}: {shown}{more}"))
    if batch["loss_of_logits"] is not None:
        rows.append(("of its logits", f"{batch['loss_of_logits']:.6f} nats per token"))
    if reported is not None:
        rows.append(("reported", f"{reported['value']:.6g}"))
    render.print_pairs(rows)
