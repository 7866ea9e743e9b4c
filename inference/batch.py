"""A trainer's batch: token ids, labels and mask of a file of arrays, and the loss of every row.

Rows and tokens are counted from 0; row t of the logits predicts token t + 1. A label below 0
(-100 in transformers and torch) is not scored.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError, UsageError
from aprfmt.inference.engines.captures import Captures, read_array_file
from aprfmt.inference.loss import log_probabilities, rows_at_once
from aprfmt.inference.session import Numbers, Session

NAMES: Mapping[str, tuple[str, ...]] = {
    "ids": ("ids", "input_ids", "tokens"),
    "labels": ("labels", "targets"),
    "mask": ("mask", "attention_mask"),
    "logits": ("logits",),
}
# Arrays of 0 and 1 that say which labels are scored, as trainers name them.
SCORED = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "response_mask")
# Arrays that say which document of a packed row a token is of, as trainers name them.
POSITIONS = ("position_ids",)  # transformers: they begin anew with each document
LENGTHS = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seqlens_k", "cu_seq_lens_k")
DOCUMENTS = ("document_ids", "doc_ids", "segment_ids", "sequence_ids", "seq_idx")
# The lengths of the documents one after another. TRL's packing writes the first name.
EACH_LENGTH = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths")
# What kernels of attention take for the longest document: those of a shorter one leave tokens out.
LONGEST = ("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k")
NUMBERED_MASK = "the mask"  # a mask that numbers the documents from 1, as messages call it
# What a trainer multiplies its routers' auxiliary losses by, by the keys of transformers.
BALANCE, Z_LOSS = "router_aux_loss_coef", "router_z_loss_coef"
# What `labels[t]` may be: the token at t + shift. 0 is transformers' convention (the loss shifts),
# 1 that of loaders that shift themselves; the others are mistakes of the file.
SHIFTS: Mapping[int, str] = {
    0: "the tokens themselves; the loss shifts them",
    1: "the next tokens: shifted in the file",
    2: "the tokens after the next: shifted twice in the file",
    -1: "the tokens before",
}
PROPER = (0, 1)
AHEAD = 3  # tokens a row is scored against: its own, the next, the one after


@dataclass(frozen=True)
class Batch:
    """Arrays [samples, tokens]; `label` [samples, tokens + 1] says which tokens are scored.

    `ids` has one column more, the token after the last where the labels hold it, else -1.
    `logits` [samples, tokens, vocab] are the trainer's, if the file has them. `document`
    [samples, tokens] numbers the documents of a packed row from 0; the first token of each but the
    first is no label, and `edges` says how many such tokens the file has labels for. `unread` are
    arrays of the file that nothing here reads. `ends` are the ids that end a turn or a text;
    `labels_given` and `mask_given` say whether the file has these arrays. `router_balance` and
    `router_z` are what the auxiliary losses of routers are multiplied by in the trainer's loss,
    None where the file does not say it; `router_by_config`: the model's configuration says it.
    `padding_label` [samples, tokens + 1] are the tokens of padding that the file has labels for.
    They are no labels here. The `mask` has the end of a text that the file's mask calls padding,
    being made of the id of padding: a label is such an end where no token after it has one.
    """

    path: Path
    ids: NDArray[np.int64]
    label: NDArray[np.bool_]
    mask: NDArray[np.bool_]
    shift: int
    logits: Numbers | None = None
    document: NDArray[np.int64] | None = None
    edges: int = 0
    unread: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    labels_given: bool = True
    mask_given: bool = True
    router_balance: float | None = None
    router_z: float | None = None
    router_by_config: bool = False
    padding_label: NDArray[np.bool_] | None = None

    @property
    def padding_labels(self) -> int:
        """The number of labels of the file whose tokens are padding."""
        return 0 if self.padding_label is None else int(self.padding_label.sum())

    @property
    def scored_padding(self) -> NDArray[np.bool_]:
        """Mask [samples, tokens + 1] of the padding after a text that a trainer would score.

        These are the tokens for which the file has labels, or all where it has none for padding.
        """
        after_text = np.zeros(self.label.shape, bool)
        after_text[:, :-1] = np.logical_or.accumulate(self.mask, 1) & ~self.mask
        return after_text & self.padding_label if self.padding_labels else after_text

    @property
    def document_count(self) -> int:
        """The number of documents in all rows; a row that is not packed is one."""
        if self.document is None:
            return len(self.mask)
        return int((self.document.max(1) + 1).sum())

    @property
    def document_starts(self) -> NDArray[np.bool_]:
        """Mask [samples, tokens + 1] of the first token of each document but a row's first."""
        found = np.zeros(self.label.shape, bool)
        if self.document is not None:
            found[:, 1:-1] = np.diff(self.document, axis=1) > 0
        return found

    @property
    def row_length(self) -> int:
        """The number of tokens of a row, padding included."""
        return int(self.mask.shape[1])

    @property
    def label_count(self) -> int:
        """The number of labels that an earlier token predicts.

        The first token of a text is predicted by none.
        """
        return int(self.predicted.sum())

    @property
    def hidden_count(self) -> int:
        """The number of tokens that have no label though a token of their document precedes them.

        Padding is not counted, nor the token after a row, which only labels hold.
        """
        may = np.zeros(self.label.shape, bool)
        may[:, 1:-1] = self.mask[:, 1:] & self.mask[:, :-1]
        return int((may & ~self.document_starts & ~self.label).sum())

    @property
    def predicted(self) -> NDArray[np.bool_]:
        """Mask [samples, tokens] of the tokens other than padding whose next token is a label."""
        found: NDArray[np.bool_] = self.label[:, 1:] & self.mask
        return found

    @property
    def unpredicted_labels(self) -> int:
        """The number of labels that only padding precedes: first tokens of texts."""
        return int(self.label[:, 1:].sum()) - self.label_count

    @property
    def is_end(self) -> NDArray[np.bool_]:
        """Mask [samples, tokens + 1] of the tokens that end a turn or a text."""
        return np.isin(self.ids, sorted(self.ends))


@dataclass(frozen=True)
class EndCounts:
    """How many scored texts end with one id (`places`), and how many of these ends are labels.

    `scored` counts the latter, `unknown` the ends that may be padding of the same id. `padding`
    says that the batch is padded with the id.
    """

    id: int
    places: int
    scored: int
    unknown: int
    padding: bool


@dataclass(frozen=True)
class SharedPrompt:
    """First tokens that rows with unlike padding before them share, and how many rows score them.

    `row` has the least padding; it masks its first `masked` tokens, which `rows` rows with more
    padding begin with too. `scored` of these tokens are scored in `scoring` of the rows.
    `column` is the one that the labels of every row begin in, after the padding. `paddings` is how
    many unlike paddings the scoring rows have. With one of them the tokens may be an answer there.
    """

    row: int
    masked: int
    rows: int
    column: int
    scored: int
    scoring: int
    paddings: int


@dataclass(frozen=True)
class ScoredSample:
    """The losses in nats of one sample's rows, float64 [AHEAD, tokens]; NaN where none was run.

    Entry k of row t is the loss of token t + k. `with_padding` are those of a pass that includes
    the padding, whose tokens attend to the padding before them; the same array where there is no
    padding. `hidden_padding` are those of a pass in which nothing attends to the padding after the
    text; None where a row begins with padding or has none. For a packed row `joined` has {how
    positions count: losses} of passes in which its documents see each other; None for a row that is
    one document. `continued` are those of its documents alone whose positions count from the
    beginning of the row. `vocabulary_mean` and `log_total`, float64 [tokens], are of the rows of
    `nats`: the mean loss of all tokens of the vocabulary, and the logarithm of the sum of the
    exponentials of the logits; None where they are not known.
    """

    nats: Numbers
    with_padding: Numbers
    joined: Mapping[str, Numbers] | None = None
    continued: Numbers | None = None
    hidden_padding: Numbers | None = None
    vocabulary_mean: Numbers | None = None
    log_total: Numbers | None = None


class RowTerms(NamedTuple):
    """What the losses of rows are made of, float64, in nats: see ScoredSample for each.

    `nats` are [AHEAD, rows], `vocabulary_mean` and `log_total` are [rows].
    """

    nats: Numbers
    vocabulary_mean: Numbers
    log_total: Numbers


def read_batch(path: Path, vocab: int, ends: Collection[int] = ()) -> Batch:
    """Return the batch of a file (.npz, .safetensors, or torch.save's): ids, labels, mask, logits.

    Arrays that a .pt nests in others, as a tokenizer's result does, are known by their last name.
    Without labels all tokens of the mask are labels. `ends` are the model's ids that end a turn or
    a text. Raises FormatError for arrays that do not form a batch, and for labels that are not the
    ids shifted by one distance.
    """
    with ExitStack() as stack:
        file = _open_arrays(path, stack)
        found = {name: _read_array(file, name, known) for name, known in NAMES.items()}
        packed = {
            name: held
            for name in (*POSITIONS, *LENGTHS, *DOCUMENTS)
            if (held := _read_array(file, name, (name,))) is not None
        }
        lengths = {
            name: held
            for name in EACH_LENGTH
            if (held := _read_array(file, name, (name,))) is not None
        }
        longest = {
            name: held for name in LONGEST if (held := _read_array(file, name, (name,))) is not None
        }
        factors = {
            name: _factor(path, name, held)
            for name in (BALANCE, Z_LOSS)
            if (held := _read_array(file, name, (name,))) is not None
        }
        kept = _read_array(file, "scored labels", SCORED)
        names = {name for known in NAMES.values() for name in known} | set(packed) | set(factors)
        names |= set(SCORED) | set(longest) | set(lengths)
        unread = tuple(sorted(name for name in file.shapes if _last_name(name) not in names))
    # The ids, and a mask whose padding is at the ends of rows only.
    ids = found["ids"]
    if ids is None:
        raise FormatError(
            f"{path}: holds {shorten(', '.join(sorted(file.shapes)[:8]), 200) or 'no array'}; "
            f"expected an array {' or '.join(NAMES['ids'])}"
        )
    ids = _check_integers(path, "ids", ids)
    _check_vocabulary(path, ids, vocab)
    if found["mask"] is None:
        mask = ~_marked_padding(path, packed, ids.shape)
    else:
        mask, numbers = _read_mask(path, found["mask"], ids.shape)
        packed |= {} if numbers is None else {NUMBERED_MASK: numbers}
    for sample in np.flatnonzero(np.abs(np.diff(mask.astype(np.int8), axis=1)).sum(1) > 1):
        inside = np.flatnonzero(mask[sample])
        if len(inside) != inside[-1] - inside[0] + 1:
            raise FormatError(
                f"{path}: mask of sample {sample} has a hole between tokens {inside[0]} and "
                f"{inside[-1]}; expected padding at the ends only"
            )
    # Labels, by default every token of the mask, and logits of the same rows.
    given = found["labels"]
    labels = (
        np.where(mask, ids, -100)
        if given is None
        else _check_integers(path, "labels", given, ids.shape)
    )
    if kept is not None:
        labels = _keep_scored(labels, _check_flags(path, kept, ids.shape), mask, given is not None)
    logits = found["logits"]
    if logits is not None:
        logits = logits[None] if logits.ndim == 2 else logits
        if logits.shape != (*ids.shape, vocab) or logits.dtype.kind != "f":
            raise FormatError(
                f"{path}: logits {list(logits.shape)} of {logits.dtype}; expected "
                f"{[*ids.shape, vocab]} of floats"
            )
    # Whether labels are the tokens or the next ones, and where documents of a row begin.
    shift = _label_shift(path, ids, labels, mask)
    mask = mask | _hidden_ends(ids, labels, mask, shift, ends)
    longer, label = _align_labels(ids, labels, mask, shift)
    for name, held in lengths.items():
        ends = np.cumsum([0, *held.reshape(-1)]) if held.dtype.kind in "iu" else np.zeros(1)
        if int(ends[-1]) in (mask.size, int(mask.sum())):
            packed[name] = ends
        else:  # lengths of something else
            unread = tuple(sorted((*unread, name)))
    document = _document_numbers(path, packed, mask)
    _check_longest(path, longest, document, mask)
    batch = Batch(
        path,
        longer,
        label,
        mask,
        shift,
        logits,
        document,
        0,
        unread,
        frozenset(ends),
        given is not None or kept is not None,
        found["mask"] is not None,
        factors.get(BALANCE),
        factors.get(Z_LOSS),
        padding_label=_padding_labels(ids, labels, mask, shift),
    )
    # The first token of a document is no label: no row of its document predicts it.
    edges = int((label & batch.document_starts).sum()) if given is not None else 0
    return replace(batch, label=label & ~batch.document_starts, edges=edges)


def first_predicted(batch: Batch) -> NDArray[np.int64]:
    """Return the place of each row's first label that an earlier token predicts, int64 [samples].

    It is the number of tokens of a row for a row without such a label.
    """
    found = batch.predicted
    first: NDArray[np.int64] = np.where(found.any(1), found.argmax(1) + 1, batch.row_length)
    return first


def find_shared_prompt(batch: Batch) -> SharedPrompt | None:
    """Return the first tokens that rows of unlike padding share, or None where none tell anything.

    A prompt is known only by a row that masks it. Rows that score some of these tokens count only
    where all rows end in the last column, and where all labels begin in one column or at the
    second token of a text: then a column was counted in place of tokens. Otherwise the same text
    may be a prompt in one row and an answer in another, as where turns of a chat are rows. None
    too for packed rows, and where the file does not say what is scored.
    """
    if batch.document is not None or not batch.labels_given:
        return None
    rows = np.flatnonzero(batch.predicted.any(1))
    start, first = batch.mask.argmax(1), first_predicted(batch)
    if not len(rows) or len(set(start[rows].tolist())) < 2:
        return None
    row = int(rows[start[rows].argmin()])
    begin, column = int(start[row]), int(first[row])
    masked = column - begin
    prompt = batch.ids[row, begin:column]
    alike = [
        int(i)
        for i in rows
        if start[i] > begin
        and start[i] + masked <= batch.row_length
        and batch.mask[i, start[i] : start[i] + masked].all()
        and np.array_equal(batch.ids[i, start[i] : start[i] + masked], prompt)
    ]
    if not alike:
        return None
    # Tokens of the prompt that these rows score.
    counts = [int(batch.predicted[i, start[i] : start[i] + masked - 1].sum()) for i in alike]
    by_column = bool(
        batch.mask[rows, -1].all() and (first[rows] == np.maximum(column, start[rows] + 1)).all()
    )
    if any(counts) and not by_column:
        return None
    scoring = [i for i, count in zip(alike, counts, strict=True) if count]
    paddings = len(set(start[scoring].tolist()))
    return SharedPrompt(row, masked, len(alike), column, sum(counts), len(scoring), paddings)


def document_spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """Yield (sample, first token, token after the last) of each document; padding is left out."""
    for sample, mask in enumerate(batch.mask):
        inside = np.flatnonzero(mask)
        if len(inside):
            starts = (int(at) for at in np.flatnonzero(batch.document_starts[sample]))
            for start, end in pairwise([int(inside[0]), *starts, int(inside[-1]) + 1]):
                yield sample, start, end


ENDS_TOGETHER = 2  # tokens: `<|im_end|>`, a line feed, `<|endoftext|>` are one end


def count_turn_ends(batch: Batch) -> list[EndCounts]:
    """Return, for each id that ends a turn, how many ends of scored text are labels.

    An end counts where the token before it is a label, for the end of a prompt is not to be scored.
    Of several ends that follow each other one label is enough. Padding whose id ends a turn hides
    where a text ends: such an end is unknown where it is not scored. A text's first token, and what
    repeats it there, ends nothing. Ids that end no text are left out.
    """
    # Ends of scored text: the token before is a label, and no document begins with the end.
    samples = len(batch.ids)
    end, label = batch.is_end & (batch.ids >= 0), batch.label
    real = np.append(batch.mask, label[:, -1:], axis=1)
    places = np.zeros(end.shape, bool)
    places[:, 1:] = end[:, 1:] & label[:, :-1] & ~batch.document_starts[:, 1:]
    for sample, start, stop in document_spans(batch):  # BOS may have the id of an end
        run = batch.ids[sample, start:stop] == batch.ids[sample, start]
        places[sample, start : start + (len(run) if run.all() else int(run.argmin()))] = False
    scored = end & label
    # Of ends that follow a scored end closely only those scored themselves count.
    near = np.zeros(end.shape, bool)
    for back in range(1, ENDS_TOGETHER + 1):
        near[:, back:] |= scored[:, :-back]
    places &= ~near | scored
    # Without a mask, a run of equal tokens at the end of a row may be padding.
    padding = ~real
    if not batch.mask_given:
        for sample in range(samples):
            row = batch.ids[sample, : batch.row_length]
            other = np.flatnonzero(row != row[-1])
            first = int(other[-1]) + 1 if len(other) else 0
            padding[sample, first : batch.row_length] = batch.row_length - first > 1
    found = []
    for i in sorted(batch.ends):
        here = places & (batch.ids == i)
        known = here & (scored | ~padding)
        many, labelled = int(known.sum()), int((known & scored).sum())
        unknown = int((here & ~known).sum())
        filled = bool(
            (padding[:, : batch.row_length] & (batch.ids[:, : batch.row_length] == i)).any()
        )
        if many or unknown:
            found.append(EndCounts(i, many, labelled, unknown, filled))
    return found


def _read_mask(
    path: Path, values: Numbers, shape: tuple[int, ...]
) -> tuple[NDArray[np.bool_], NDArray[np.int64] | None]:
    """Return (mask [samples, tokens], numbers of documents or None) of a file's mask.

    The array has 0 and 1, or the numbers of documents from 1, with 0 for padding: [samples,
    tokens]. Or it has the columns that each row attends to: [samples, tokens, tokens], with an axis
    of one head or without it, of booleans, 0 and 1, or what is added to the scores (0 where a row
    attends). Raises FormatError, with `path`, for other arrays, and for rows that attend to another
    set of tokens than those of their document up to their own.
    """
    square = (shape[0], shape[1], shape[1])
    if values.shape in (square, (shape[0], 1, *square[1:])):
        return _read_square_mask(path, values.reshape(square))
    numbers = _check_integers(path, "mask", values, shape)
    if numbers.min() < 0:
        raise FormatError(
            f"{path}: mask holds {numbers.min()}; expected 0 and 1, or the numbers of documents "
            "from 1, with 0 for padding"
        )
    return numbers != 0, numbers if numbers.max() > 1 else None


def _read_square_mask(
    path: Path, values: Numbers
) -> tuple[NDArray[np.bool_], NDArray[np.int64] | None]:
    """Return the same as `_read_mask`, of a mask [samples, tokens, tokens]."""
    attends = values == 0 if values.dtype.kind == "f" and values.min() < 0 else values != 0
    tokens = attends.shape[1]
    mask = np.diagonal(attends, axis1=1, axis2=2)
    first = attends.argmax(2)  # the first token of each token's document
    column = np.arange(tokens)
    own = (column >= first[:, :, None]) & (column <= column[:, None])
    wrong = np.argwhere(mask & (attends != own).any(2))
    if len(wrong):
        sample, row = (int(i) for i in wrong[0])
        raise FormatError(
            f"{path}: row {row} of sample {sample} of the mask attends to other tokens than those "
            f"from {first[sample, row]} to its own; expected a causal mask of whole documents"
        )
    numbers = np.where(mask, first + 1, 0).astype(np.int64)
    return mask, numbers if len(np.unique(numbers[mask])) > 1 else None


def _marked_padding(
    path: Path, packed: Mapping[str, Numbers], shape: tuple[int, ...]
) -> NDArray[np.bool_]:
    """Return a mask [samples, tokens] of the padding that a batch without a mask shows otherwise.

    It has a number of a document below 0, or 0 where 0 only follows the documents of a row; or it
    follows the text, and its position does not rise. `packed` are the arrays that mark documents.
    """
    padding = np.zeros(shape, bool)
    for name, values in packed.items():
        if name in LENGTHS:
            continue
        rows = _check_integers(path, name, values, shape)
        if name in DOCUMENTS:
            zero = rows == 0
            before_text = zero[:, :-1] & ~zero[:, 1:]
            is_padding = not before_text.any() and bool((zero.any(1) & ~zero.all(1)).any())
            padding |= (rows < 0) | (zero & is_padding)
            continue
        stays = np.pad(np.diff(rows, axis=1) == 0, ((0, 0), (1, 0)))
        # The positions of padding are equal up to the row's end. The first of them is of the text
        # where it rises by one.
        end = np.logical_and.accumulate(stays[:, ::-1], axis=1)[:, ::-1]
        begins = np.zeros(shape, bool)
        begins[:, 1:-1] = end[:, 2:] & ~end[:, 1:-1] & (np.diff(rows, axis=1)[:, :-1] != 1)
        padding |= end | begins
    return padding


def _check_longest(
    path: Path,
    longest: Mapping[str, Numbers],
    document: NDArray[np.int64] | None,
    mask: NDArray[np.bool_],
) -> None:
    """Raise FormatError for a stated length that is less than that of the longest document.

    `longest` are the file's arrays of one number, by name.
    """
    numbers = np.zeros(mask.shape, np.int64) if document is None else document
    most = max(
        int(np.bincount(row[inside]).max(initial=0))
        for row, inside in zip(numbers, mask, strict=True)
    )
    for name, values in longest.items():
        stated = int(values.reshape(-1)[0]) if values.size == 1 and values.dtype.kind in "iu" else 0
        if stated < most:
            raise FormatError(
                f"{path}: {name} is {shorten(str(values.tolist()), 80)}, but a document has {most} "
                "tokens: attention computed with it leaves out what is after it"
            )


def _document_numbers(
    path: Path, packed: Mapping[str, Numbers], mask: NDArray[np.bool_]
) -> NDArray[np.int64] | None:
    """Return the number of each token's document in its row [samples, tokens], from 0.

    None where no row holds several documents. `packed` are the file's arrays that mark documents.
    Raises FormatError for arrays of another size, and for two that disagree about the documents.
    """
    said: dict[str, NDArray[np.bool_]] = {}
    for name, values in packed.items():
        begins = _document_starts(path, name, values, mask)
        begins[:, 0] = False
        begins[:, 1:] &= mask[:, :-1] & mask[:, 1:]  # padding is no document
        said[name] = begins
    for name, begins in said.items():
        first = next(iter(said))
        if not np.array_equal(begins, said[first]):
            sample, at = np.argwhere(begins != said[first])[0]
            raise FormatError(
                f"{path}: {first} and {name} mark other documents: token {at} of sample {sample} "
                f"begins one in {name if begins[sample, at] else first} alone; leave out the wrong "
                "one"
            )
    found = next(iter(said.values()), None)
    if found is None or not found.any():
        return None
    return np.cumsum(found, axis=1, dtype=np.int64)


def _document_starts(
    path: Path, name: str, values: Numbers, mask: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return a mask [samples, tokens] of the tokens at which a document begins.

    The array `values` is a list of cumulative lengths, positions, or document numbers, depending on
    its `name`. Raises FormatError, with `path`, for values that are none of these.
    """
    if name not in (*LENGTHS, *EACH_LENGTH):
        rows = _check_integers(path, name, values, mask.shape)
        steps = np.diff(rows, axis=1)
        apart = steps != 1 if name in POSITIONS else steps != 0
        return np.pad(apart, ((0, 0), (1, 0)))
    ends = values.reshape(-1)
    total, filled = mask.size, int(mask.sum())
    rising = ends.dtype.kind in "iu" and len(ends) > 1 and bool((np.diff(ends) >= 0).all())
    if not rising or int(ends[0]) != 0 or int(ends[-1]) not in (total, filled):
        raise FormatError(
            f"{path}: {name} is {shorten(str(values.tolist()), 80)}; expected the ends of the "
            f"documents, rising from 0 to all {total} tokens of the batch"
            + (f", or its {filled} without padding" if filled != total else "")
        )
    places = np.arange(total) if int(ends[-1]) == total else np.flatnonzero(mask)
    flat = np.zeros(total, bool)
    flat[places[ends[1:-1][ends[1:-1] < ends[-1]]]] = True
    return flat.reshape(mask.shape)


def _open_arrays(path: Path, stack: ExitStack) -> Captures:
    """Return the arrays of a batch's file; a single number of a .pt is an array, too.

    Raises FormatError for a file that holds no arrays, and for a .pt with lists in their place.
    """
    file = read_array_file(path, stack)
    numbers = {
        name: np.asarray(value)
        for name, value in file.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    arrays = {name for known in NAMES.values() for name in known}
    for name, value in file.values.items():
        listed = [part for part in name.split(".") if part in arrays]
        if listed and value is not None:
            raise FormatError(f"{path}: {listed[0]} is no tensor; save it as torch.tensor(...)")

    def read(name: str) -> Numbers:
        """Return an array of the batch's file, or one of its single numbers, by its name."""
        return numbers[name] if name in numbers else file.read(name)

    shapes = dict(file.shapes) | {name: () for name in numbers}
    return replace(file, shapes=shapes, read=read)


def _last_name(name: str) -> str:
    """Return the last name in the path of an array of a .pt: `input_ids` of `batch.input_ids`."""
    return name.rpartition(".")[2]


def _read_array(file: Captures, name: str, known: tuple[str, ...]) -> Numbers | None:
    """Return the array of a file that has one of the `known` names, None if it has none.

    Raises FormatError if it has two; `name` is what messages call it.
    """
    there = [key for key in file.shapes if _last_name(key) in known]
    if len(there) > 1:
        raise FormatError(f"{file.path}: holds {' and '.join(there)}; expected one array of {name}")
    return file.read(there[0]) if there else None


def _factor(path: Path, name: str, values: Numbers) -> float:
    """Return an array of one number as a float; FormatError if it has more, or is below 0."""
    number = float(values.reshape(-1)[0]) if values.size == 1 and values.dtype.kind in "fiu" else -1
    if not 0 <= number < np.inf:
        raise FormatError(
            f"{path}: {name} is {shorten(str(values.tolist()), 80)}; expected one number of at "
            "least 0"
        )
    return number


def _check_integers(
    path: Path, name: str, values: Numbers, shape: tuple[int, ...] | None = None
) -> NDArray[np.int64]:
    """Return an array as int64 [samples, tokens]; FormatError for other types or shapes.

    An array of one axis is one sample. `shape` is the expected shape, None for any. `path` and
    `name` name the array in messages.
    """
    wide = values[None] if values.ndim == 1 else values
    kinds = "iub" if name == "mask" else "iu"
    if wide.dtype.kind not in kinds or wide.ndim != 2 or not wide.size:
        raise FormatError(
            f"{path}: {name} {list(values.shape)} of {values.dtype}; expected integers "
            "[samples, tokens]"
        )
    if shape is not None and wide.shape != shape:
        raise FormatError(f"{path}: {name} {list(wide.shape)}; ids are {list(shape)}")
    return wide.astype(np.int64)


def _check_vocabulary(path: Path, ids: NDArray[np.int64], vocab: int) -> None:
    """Raise FormatError for ids outside a vocabulary of `vocab` tokens."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise FormatError(
            f"{path}: token id {low if low < 0 else high}; the embedding has {vocab} rows"
        )


def _check_flags(path: Path, values: Numbers, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return an array that says which labels are scored as booleans [samples, tokens].

    Raises FormatError with `path` for another shape than `shape`, and for numbers other than 0 and
    1: they are weights of labels, which nothing here counts with.
    """
    rows = values[None] if values.ndim == 1 else values
    if rows.shape != shape or not np.isin(rows, (0, 1)).all():
        raise FormatError(
            f"{path}: {' or '.join(SCORED[:2])} {list(values.shape)} of {values.dtype}; expected "
            f"0 and 1 of {list(shape)}"
        )
    flags: NDArray[np.bool_] = rows.astype(bool)
    return flags


def _keep_scored(
    labels: NDArray[np.int64], flags: NDArray[np.bool_], mask: NDArray[np.bool_], given: bool
) -> NDArray[np.int64]:
    """Return the labels [samples, tokens] with -100 where `flags` says that none is scored.

    If the file has labels (`given`), flag t is of label t. If it has none, flag t may be of token t
    or of row t, which predicts token t + 1. It is of the row unless the last token of a text has a
    flag: no row predicts a token after it.
    """
    if given:
        return np.where(flags, labels, -100)
    last = mask.copy()
    last[:, :-1] &= ~mask[:, 1:]
    if not (flags & last).any():
        flags = np.pad(flags, ((0, 0), (1, 0)))[:, :-1]
    return np.where(flags, labels, -100)


def _padding_labels(
    ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_], shift: int
) -> NDArray[np.bool_]:
    """Return a mask [samples, tokens + 1] of the tokens of padding that have labels."""
    everywhere = np.ones_like(mask)
    _, label = _align_labels(ids, labels, everywhere, shift)
    tokens = ids.shape[1]
    found = np.zeros(label.shape, bool)
    found[:, :tokens] = label[:, :tokens] & ~mask
    return found


def _hidden_ends(
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    mask: NDArray[np.bool_],
    shift: int,
    ends: Collection[int],
) -> NDArray[np.bool_]:
    """Return a mask [samples, tokens] of the ends of texts that `mask` calls padding.

    They are the only tokens of padding that have labels: each is one of the `ends`, follows a text,
    and is not what that text ends with already. Where other tokens of the padding have labels, too,
    the labels were made without the mask, and nothing says which of them are ends.
    """
    first = np.zeros_like(mask)
    first[:, 1:] = mask[:, :-1] & ~mask[:, 1:]
    first[:, 1:] &= ids[:, 1:] != ids[:, :-1]
    labelled = _padding_labels(ids, labels, mask, shift)[:, :-1]
    found = labelled & first & np.isin(ids, sorted(ends))
    return found if np.array_equal(found, labelled) else np.zeros_like(mask)


def _label_shift(
    path: Path, ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_]
) -> int:
    """Return how many tokens after its own column each label's token stands: a key of SHIFTS.

    0 (a label is the id at its place) and 1 (it is the next id) are right, the others are mistakes
    of the file. Labels of padding do not count. Raises FormatError where no shift fits all labels.
    """
    wrong: dict[int, tuple[int, int]] = {}
    for shift in SHIFTS:
        there, here = _token_label_pairs(ids, labels, mask, shift)
        off = np.argwhere((here >= 0) & (here != there))
        if not len(off):
            return shift
        wrong[shift] = (int(off[0][0]), int(off[0][1]))
    sample, at = wrong[0]
    raise FormatError(
        f"{path}: label {labels[sample, at]} at token {at} of sample {sample} is neither that "
        f"token ({ids[sample, at]}) nor the next; expected labels that are the ids, or the ids "
        "one ahead, with -100 where nothing is scored"
    )


def _token_label_pairs(
    ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_], shift: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (tokens, labels): each label with the token `shift` columns after its own.

    Both have the same shape; columns that have no such token are cut off. Labels of padding are
    -100.
    """
    kept = np.where(mask, labels, -100)
    if shift < 0:
        return ids[:, :shift], kept[:, -shift:]
    stop = ids.shape[1] - shift
    return ids[:, shift:], kept[:, :stop]


def _align_labels(
    ids: NDArray[np.int64], labels: NDArray[np.int64], mask: NDArray[np.bool_], shift: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return (ids [samples, tokens + 1], mask of the same shape of ids that are labels).

    The last column is the token after the last where labels hold it, else -1.
    """
    samples, tokens = ids.shape
    longer = np.concatenate([ids, np.full((samples, 1), -1, np.int64)], 1)
    label = np.zeros(longer.shape, bool)
    valid = (labels >= 0) & mask
    for at in range(tokens):
        to = at + shift
        if 0 <= to <= tokens:
            label[:, to] = valid[:, at]
            if to == tokens:
                longer[:, to] = np.where(valid[:, at], labels[:, at], -1)
    label[:, 0] &= shift == 0  # no row predicts the first token; its mask is unchanged
    return longer, label


def other_packings(batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Yield (description, batch) for each way in which a trainer could pack a batch's samples.

    Samples follow each other in their order: all in one row, or in rows of the batch's width.
    Nothing where the rows are packed already, or where fewer than two rows hold tokens.
    """
    lengths = batch.mask.sum(1)
    if batch.document is not None or np.count_nonzero(lengths) < 2:
        return
    every = [int(i) for i in np.flatnonzero(lengths)]
    rows: list[list[int]] = [[]]
    for sample in every:
        if rows[-1] and int(lengths[rows[-1]].sum() + lengths[sample]) > batch.row_length:
            rows.append([])
        rows[-1].append(sample)
    yield "packed into one row", _pack_rows(batch, [every])
    if 1 < len(rows) < len(every):
        yield f"packed into rows of {batch.row_length}", _pack_rows(batch, rows)


def _pack_rows(batch: Batch, rows: list[list[int]]) -> Batch:
    """Return a batch whose rows hold the listed samples one after the other, without padding."""
    lengths = batch.mask.sum(1)
    width = max(int(lengths[row].sum()) for row in rows)
    ids = np.zeros((len(rows), width + 1), np.int64)
    ids[:, width] = -1
    label = np.zeros(ids.shape, bool)
    document = np.zeros((len(rows), width), np.int64)
    mask = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        at = 0
        for number, sample in enumerate(row):
            places = np.flatnonzero(batch.mask[sample])
            end = at + len(places)
            ids[i, at:end] = batch.ids[sample, places]
            label[i, at:end] = batch.label[sample, places]
            document[i, at:end], mask[i, at:end] = number, True
            at = end
        document[i, at:] = len(row) - 1
    found = replace(batch, ids=ids, label=label, mask=mask, document=document, logits=None)
    return replace(found, label=label & ~found.document_starts)


def score_batch(batch: Batch, session: Session | None) -> Iterator[ScoredSample]:
    """Yield the losses of each sample, by the session's model or from the file's logits.

    The logits are used where `session` is None. The model runs each document alone, without
    padding, its positions from 0; then the row with its padding. It runs a row of several
    documents three more times: as one text whose positions count on, as one text whose positions
    restart at each document, and each document alone with the positions that it has in the row.
    """
    for sample in range(len(batch.mask)):
        ids, mask = batch.ids[sample], batch.mask[sample]
        if session is None:
            assert batch.logits is not None
            rows = row_terms([batch.logits[sample]], ids, 0)
            yield ScoredSample(
                rows.nats, rows.nats, vocabulary_mean=rows.vocabulary_mean, log_total=rows.log_total
            )
            continue
        inside = np.flatnonzero(mask)
        whole = np.full((AHEAD, batch.row_length), np.nan)
        if not len(inside):
            yield ScoredSample(whole, _terms_of_pass(session, ids, 0, batch.row_length).nats)
            continue
        first, stop = int(inside[0]), int(inside[-1]) + 1
        nats, joined, continued = whole.copy(), None, None
        mean, total = whole[0].copy(), whole[0].copy()
        cuts = [first, *(int(at) for at in np.flatnonzero(batch.document_starts[sample])), stop]
        for start, end in pairwise(cuts):
            terms = _terms_of_pass(session, ids, start, end)
            nats[:, start:end] = terms.nats
            mean[start:end], total[start:end] = terms.vocabulary_mean, terms.log_total
        padded = stop - first < batch.row_length
        if len(cuts) > 2:
            places = np.concatenate([np.arange(end - start) for start, end in pairwise(cuts)])
            joined = {name: whole.copy() for name in ("positions count on", "positions restart")}
            joined["positions count on"][:, first:stop] = _terms_of_pass(
                session, ids, first, stop
            ).nats
            joined["positions restart"][:, first:stop] = _terms_of_pass(
                session, ids, first, stop, places
            ).nats
            continued = nats.copy()
            for start, end in pairwise(cuts[1:]):
                continued[:, start:end] = _terms_of_pass(
                    session, ids, start, end, np.arange(start - first, end - first)
                ).nats
        padding = _terms_of_pass(session, ids, 0, batch.row_length).nats if padded else nats
        hidden = None
        if padded and not first and len(cuts) == 2:
            hidden = _terms_of_pass(session, ids, 0, batch.row_length, hidden_from=stop).nats
        yield ScoredSample(nats, padding, joined, continued, hidden, mean, total)


def _terms_of_pass(
    session: Session,
    ids: NDArray[np.int64],
    first: int,
    stop: int,
    places: Numbers | None = None,
    hidden_from: int | None = None,
) -> RowTerms:
    """Return the losses in nats of the rows of a pass over tokens [first, stop).

    `places` are the tokens' positions, None for positions that count from 0. No token attends to
    those from `hidden_from` on, None for none hidden.
    """
    most = rows_at_once(int(session.hp["vocab_size"]))
    tokens = [int(i) for i in ids[first:stop]]
    if hidden_from is not None:
        parts = session.logits_of_hidden_end(tokens, hidden_from - first, most)
        return row_terms(parts, ids, first)
    if places is not None:
        return row_terms(session.logits_at_positions(tokens, places, most), ids, first)
    return row_terms(session.logits_in_parts(tokens, range(len(tokens)), most), ids, first)


def row_terms(parts: Any, ids: NDArray[np.int64], first: int) -> RowTerms:
    """Return the losses in nats of the rows of a pass, against the tokens at and after each row.

    Entry k of token t's row is the loss of token t + k. `parts` yields the logits in arrays [n,
    vocab] that follow each other; together they are those of the tokens from `first` on. A loss is
    NaN where there is no token. Raises UsageError without any logits.
    """
    found = []
    at = first
    for part in parts:
        logits = np.asarray(part)
        logs = log_probabilities(logits)
        losses = np.full((AHEAD, len(logs)), np.nan)
        for ahead in range(AHEAD):
            targets = ids[at + ahead : at + ahead + len(logs)]
            rows = np.flatnonzero(targets >= 0)
            losses[ahead, rows] = -logs[rows, targets[rows]]
        # By the largest logit: others are infinite where tokens of the vocabulary are masked out.
        top = logits.argmax(-1)[:, None]
        both = (np.take_along_axis(each, top, -1)[:, 0] for each in (logits, logs))
        total = np.subtract(*both, dtype=np.float64)
        found.append(RowTerms(losses, -logs.mean(-1), total))
        at += len(logs)
    if not found:
        raise UsageError("no tokens to run; give at least one")
    return RowTerms(*(np.concatenate(each, -1) for each in zip(*found, strict=True)))
