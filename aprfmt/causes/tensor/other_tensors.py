"""Hypotheses that a tensor is another one: exchanged, of another layer or checkpoint.

A *side* is file A or file B, named by `label`; `mine` is the side's tensor of the pair. A *guess*
is a change of one tensor of a pair after which both should be equal.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.row import Cause
from aprfmt.causes.tensor.arithmetic import store_as
from aprfmt.causes.tensor.context import sample_line
from aprfmt.causes.tensor.differing_pair import SAMPLE_ROWS, DifferingPair, row_distances
from aprfmt.causes.tensor.foreign_values import constant_value, fingerprint, judge_foreign
from aprfmt.causes.tensor.guess import Guess, PairHypothesis
from aprfmt.causes.tensor.proof import FEW, make_finding, prove_values
from aprfmt.errors import AprfmtError
from aprfmt.measure.encoding_noise import UNIT, pair_noise
from aprfmt.measure.findings import Finding
from aprfmt.measure.named_causes import fixed_name
from aprfmt.measure.numbers import to_float64
from aprfmt.measure.proofs import Proof
from aprfmt.measure.records import EQUAL
from aprfmt.measure.row_reader import RowReader
from aprfmt.model import Model
from aprfmt.model.relations import opening_path
from aprfmt.model.usual_zeros import is_usually_zero
from aprfmt.tensors import norms
from aprfmt.tensors.companions import constant_codes

if TYPE_CHECKING:
    from aprfmt.causes.tensor.context import PairContext

_RELATED = 0.2  # correlation of the values from which a head started from the embedding
_ROWS = 512  # rows of both that are read
WINDOW = 1 << 20  # values read at a time
LEAST_SHARED = 64  # values of a tensor that is stored twice: fewer are equal by chance


def has_trained_head(a: Model, b: Model) -> bool:
    """Return whether B has a trained output head where A's is its embedding.

    A trained head resembles B's embedding, from which it started. False for one that does not: it
    was newly created, and nothing is lost with it.
    """
    try:
        if b.hyper["tied_embeddings"] or not a.hyper["tied_embeddings"]:
            return False
        return _table_correlation(b, "token_embd.weight", "output.weight") > _RELATED
    except (AprfmtError, KeyError):
        return False


def is_lost_head(values: Mapping[str, Any]) -> bool:
    """Return whether A has an output head of its own and B has none, by a finding's `values`."""
    tied = values.get("tied_embeddings", {})
    return isinstance(tied, Mapping) and (tied.get("a"), tied.get("b")) == (False, True)


def _table_correlation(model: Model, first: str, second: str) -> float:
    """Return the correlation of two tensors' first rows; 0.0 where one is not stored.

    `first` and `second` are their roles.
    """
    views = [model.roles.get(key) for key in (first, second)]
    if views[0] is None or views[1] is None or views[0].shape != views[1].shape:
        return 0.0
    x, y = (view.rows(0, min(_ROWS, view.shape[0])) for view in views if view is not None)
    norm = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0


CAUSE_ROWS = (
    Cause(
        "other_names", "tensor", "same",
        "A tensor has another name in each file, and no reader is known that asks for either.",
        "A tensor that one file alone has is equal to one that the other file alone has.",
        "All values of both are equal.",
    ),
    Cause(
        "stored_once", "tensor", "same",
        "One file stores a tensor under two names, the other once, as shared tensors are saved.",
        "A tensor that one file lacks is equal to another one that both have.",
        "All values are equal.",
    ),
    Cause(
        "table_under_head", "tensor", "bug",
        "Of a shared embedding and head only the head's name is stored: readers that tie them look "
        "for the embedding, and leave it as it was initialised.",
        "The file lacks the embedding, and its head has the other side's values of it.",
        "All values are equal under the other name.",
    ),
    Cause(
        "missing_bias", "config", "bug",
        "A bias that one side adds is dropped on the other.",
        "The difference is the same vector in every row and equals the bias.",
        "Dropping (or adding) the bias makes the difference vanish.",
        keys=("attention_bias", "attention_out_bias", "mlp_bias", "head_bias", "conv_bias",
              "ssm_bias", "ssm_out_bias"),
        next="stored",
        shown_by_pass=True,
    ),
    Cause(
        "tied_embedding", "config", "bug",
        "The head is the embedding on one side and a matrix of its own on the other.",
        "Everything up to the final norm is equal and the logits differ; or a head is stored on "
        "one side only and is no copy of the embedding.",
        "Multiplying with the other matrix makes the logits equal.",
        keys=("tied_embeddings",),
        next="again",
        own_key="tied_embeddings",
        is_lost=is_lost_head,
        is_trained=has_trained_head,
    ),
    Cause(
        "swapped_tensors", "tensor", "bug",
        "Two tensors of one shape stand under each other's names, such as gate and up.",
        "Each of two tensors equals the other one of the other side.",
        "Exchanging the names makes both equal.",
        weights="exchanged",
    ),
    Cause(
        "copied_tensor", "tensor", "bug",
        "A tensor was overwritten by a copy of another one, or the other one is read in its place.",
        "A tensor equals a differently named one of the other side, and that one does not equal it "
        "in turn.",
        "The other tensor in its place makes both equal.",
    ),
    Cause(
        "layer_order", "tensor", "bug",
        "Layers stand in another order, or each tensor of a layer belongs to another layer.",
        "Tensors of a layer equal those of another layer of the other side.",
        "Renumbering the layers makes them equal.",
        weights="exchanged",
    ),
    Cause(
        "stale_tensor", "tensor", "bug",
        "A tensor was left at other values: of an older checkpoint, of initialisation, or zero.",
        "One tensor differs everywhere and relates to no tensor of the other side.",
        "It is constant, or has the size and spread of the other side's and no relation to it. "
        "In a pass, the values computed for it make every later difference vanish. The other "
        "side's tensor in its place would remove any damage, and proves nothing.",
    ),
    Cause(
        "value_order", "tensor", "bug",
        "A tensor holds the other side's values at other places: parts of rows or columns dealt "
        "out in turn, or an order that has no name here.",
        "Both sides have the same values, each as often; no other known order of them fits.",
        "The parts put back in their order give the other side. An order without a name is not "
        "made again: the values of both sides, sorted, only show where it is.",
    ),
)  # fmt: skip

KEPT_ROWS = 0.5  # share of equal rows from which a tensor is a damaged copy of the right one
SHOWN = 3  # other tensors named
FEW_MOVED = 16  # values at other places below which their sorted order proves little
MOVED_APART = 0.1  # relative: values that moved are far from those that were there
MOST_SORTED = 1 << 24  # values of two types up to which they are sorted
SUMMED = 1e-9  # relative: norms of the same values in another order
TIED = ("output.weight", "token_embd.weight")  # a tied head equals the embedding
# Stored names of the two where the architecture is not known, after those of their towers.
HEADS, TABLES = ("lm_head.weight",), ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")


def guess_other_tensor(case: DifferingPair) -> Iterator[Guess]:
    """Yield guesses that B has another tensor's values under this name.

    The tensors may be exchanged, renumbered or copied. Nothing for a tensor most of whose rows
    are right: then it is damaged, whatever else equals it.
    """
    context = case.context
    if case.a.columns > 1 and (
        (row_distances(case.sample_a, case.sample_b) <= case.slack()).mean() > KEPT_ROWS
    ):
        return
    for label, mine, others in (("B", case.b, "a"), ("A", case.a, "b")):
        for key in [key for key in context.keys_with_equal_sample(others, mine) if key != case.key][
            :SHOWN
        ]:
            other = context.reader(others, key)
            if other is None or _exchange_changes_nothing(case, label, mine, key):
                continue
            guess = _guess_renamed(case, label, mine, key, other)
            if guess is not None:
                yield guess


def _exchange_changes_nothing(case: DifferingPair, label: str, mine: RowReader, key: str) -> bool:
    """Return whether a side has equal values under its own name and under `key`.

    Exchanging them would then change nothing. False for a head that is a copy of the embedding,
    and where only B has them equal: these are other causes. `mine` is the side's tensor.
    """
    stored = case.context.reader(label.lower(), key)
    equal = stored is not None and stored.shape == mine.shape and _same_sample(stored, mine)
    return (
        equal and not _is_head_and_table(case.key, key) and not _is_copy_of_other(case, label, key)
    )


def _is_copy_of_other(case: DifferingPair, label: str, key: str) -> bool:
    """Return whether B has one tensor twice, here and under `key`, where A has two different ones.

    `label` is a side whose tensors here and under `key` are equal; False if it is A. False too
    where all values of B's are equal.
    """
    own = case.context.reader("a", key)
    if label != "B" or own is None or own.shape != case.a.shape:
        return False
    varied = len(set(case.sample_b.reshape(-1).tolist())) > 1
    return varied and not _same_sample(own, case.a)


def _guess_renamed(
    case: DifferingPair, label: str, mine: RowReader, key: str, other: RowReader
) -> Guess | None:
    """Return the guess why a side's tensor has the values of the other file's tensor `key`.

    The two tensors are exchanged, one is a copy of the other, the head is tied to the table of
    tokens, or layers are in another order. `label` ("A" or "B") is the side, `mine` its tensor,
    `other` the other file's tensor of the name `key`. None if A's values are in B under `key`
    without an exchange and the pair is no head and table: that does not say what B has here.
    """
    layer, role = split_key(case.key)
    layer_there, role_there = split_key(key)
    told, there = ("B", "A") if label == "B" else ("A", "B")
    back = "a" if label == "A" else "b"
    # Does the tensor of that name hold this one's values in turn?
    returned = case.context.reader(back, key)
    held = case.a if label == "B" else case.b
    exchanged = (
        returned is not None and returned.shape == held.shape and _same_sample(returned, held)
    )
    tied = _is_head_and_table(case.key, key)
    if not exchanged and label == "A" and not tied:
        return None
    # Name it: a tied head, another layer's tensor, or another role's.
    if not exchanged and tied:
        cause = "tied_embedding"
        text = f"{told}'s head has the values of the embedding; {there} has a separate head"
        if (case.key, key) == TIED and _is_stale_head(case, there):
            text += f", though its configuration ties them: {there}'s head is stale"
    elif role == role_there and layer is not None and layer_there is not None:
        cause = "layer_order"
        text = f"{told}'s layer {layer} has the tensor of {there}'s layer {layer_there}"
    else:
        cause = "swapped_tensors" if exchanged else "copied_tensor"
        text = f"{told}'s {role} has the values of {there}'s {role_there}"
        if layer != layer_there:
            text = f"{told}'s {case.key} has the values of {there}'s {key}"
    more = (
        f"and the other way round: {case.key} and {key} are exchanged"
        if exchanged
        else f"{told}'s {case.key} equals {there}'s {key}"
    )
    own = case.context.reader(label.lower(), key)
    if not exchanged and own is not None and own.shape == mine.shape and _same_sample(own, other):
        more += f", and so does {told}'s {key}: one was copied over the other, not exchanged"
    return case.guess(
        cause,
        (text, more),
        there,
        other.take,
        pair_noise(mine.encoding, other.encoding),
        where=(case.key, key),
    )


def _is_head_and_table(key: str, other: str) -> bool:
    """Return whether two keys are those of a head and of an embedding.

    Keys are roles, or stored names where the architecture is not known.
    """
    named = key.endswith(HEADS) and other.endswith(TABLES)
    return (key, other) == TIED or named


def _is_stale_head(case: DifferingPair, label: str) -> bool:
    """Return whether a side is an engine's state dict with a head that the model's config ties.

    The head of a model's own file is not called stale: there the configuration is wrong.
    """
    model = case.context.models[label.lower()]
    said = model.resolution.report.overruled.get("tied_embeddings")
    return getattr(model.source, "of_engine", False) and said is not None and bool(said.value)


def _same_sample(x: RowReader, y: RowReader) -> bool:
    """Return whether two tensors agree in a few fixed elements, within their encodings."""
    a, b = sample_line(x), sample_line(y)
    norm = max(norms.exact_norm(a), norms.exact_norm(b))
    return norms.exact_norm(a - b) <= 1.5 * pair_noise(x.encoding, y.encoding) * norm


def _undecoded_tensors(context: "PairContext", label: str) -> frozenset[str]:
    """Return the stored names of the packed weights of a model that no codec decodes.

    `label` is the model, "a" or "b". They are codes and their companions.
    """
    packing = context.models[label].unread
    return frozenset() if packing is None else frozenset(part.name for part in packing.tensors)


def explain_renamed(key: str, label: str, context: "PairContext") -> Finding | None:
    """Return the finding that the other file has this tensor under another name, or None.

    `label` is the file that has the key, "a" or "b". None for codes of packed weights that are not
    decoded, whose values are not known.
    """
    there = "b" if label == "a" else "a"
    mine = context.reader(label, key)
    undecoded = _undecoded_tensors(context, label)
    if mine is None or key in undecoded:
        return None
    codes_there = _undecoded_tensors(context, there)
    # Tensors that the other file alone has, and that look equal.
    for other in context.keys_with_equal_sample(there, mine):
        row = context.results.get(other)
        reader = context.reader(there, other)
        if row is None or row.verdict != f"ONLY_IN_{there.upper()}" or reader is None:
            continue
        if other in codes_there:
            continue
        # Compare all values.
        a, b = (mine, reader) if label == "a" else (reader, mine)
        case = DifferingPair(key, a, b, context)
        case.known = False
        apart = case.before
        if apart.relative <= case.slack() and (case.slack() or not apart.changed):
            names = (key, other) if label == "a" else (other, key)
            text = "the same tensor stands under another name in each file"
            more = f"A's {names[0]} equals B's {names[1]}"
            sample = mine.take(np.arange(min(mine.rows, FEW)))
            proof = prove_values(sample, apart.count, 0, case.slack())
            asked = context.has_role(label, key) or context.has_role(there, other)
            cause = "swapped_tensors" if asked else "other_names"
            return make_finding(cause, (key, other), (text, more), None, apart.relative, proof)
    return _explain_stored_once(key, label, mine, context)


def _explain_stored_once(
    key: str, label: str, mine: RowReader, context: "PairContext"
) -> Finding | None:
    """Return the finding that one file stores a tensor twice, the other once, or None.

    `mine` is tensor `key` of file `label` ("a" or "b"), which the other file lacks. The file has to
    hold the same values under another name too, and the other file under that name. None for a
    tensor that stores a role again in another layout, which `stored_twice` names. A table of
    tokens that is stored under the head's name only is lost for readers, which look for the table.
    """
    there = "b" if label == "a" else "a"
    if mine.size < LEAST_SHARED or context.has_role(label, key):
        return None
    if context.is_second_layout(label, key):
        return None
    for other in context.keys_with_equal_sample(there, mine):
        row, twice, once = (
            context.results.get(other), context.reader(label, other), context.reader(there, other)
        )  # fmt: skip
        if row is None or row.verdict not in EQUAL or twice is None or once is None:
            continue
        if twice.shape != mine.shape or once.shape != mine.shape:
            continue
        case = DifferingPair(key, mine, once, context)
        case.known = False
        if case.before.changed:
            continue
        says = f"{label.upper()} stores one tensor under two names, {there.upper()} under one"
        more = f"both equal {there.upper()}'s {other}"
        proof = prove_values(mine.take(np.arange(min(mine.rows, FEW))), mine.size, 0, 0.0)
        if not (key.endswith(TABLES) and other.endswith(HEADS)):
            return make_finding("stored_once", (key, other), (says, more), None, 0.0, proof)
        says = f"{there.upper()} stores the table of tokens only under the name of the head"
        more = f"{there.upper()}'s {other} equals {label.upper()}'s {key}, which readers look for"
        made = make_finding("table_under_head", (key, other), (says, more), None, 0.0, proof)
        if there == "a":
            return replace(made, side="A")
        path = opening_path(context.models["b"].path)
        rename = f"aprfmt convert {shlex.quote(str(path))} {fixed_name(path)} --rename"
        return replace(made, next=f"{rename} {shlex.quote(f'{other}={key}')}")
    return None


def guess_zero_bias(case: DifferingPair) -> Iterator[Guess]:
    """Yield the guess that a bias is all zeros on one side."""
    if not case.role.endswith(".bias") or case.numbers is not None:
        return
    zeros = lambda rows: np.zeros((len(rows), case.a.columns))  # noqa: E731
    for label, sample in (("B", case.sample_b), ("A", case.sample_a)):
        if sample.any():
            continue
        text = f"{label}'s bias is zero everywhere: it is not added"
        missing = "A" if label == "B" else "B"
        yield case.guess("missing_bias", (text,), missing, zeros, 0.0, constant=True)
        return


def explain_constant_side(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that one of two differing sides has a single value everywhere.

    Which operation made it is not known, as any function of one number gives one number. But a
    weight of zeros in B is lost: A's values, all set to zero, are B's. The two may have two shapes.
    """
    sides = (("B", case.b), ("A", case.a))
    for label, side in sides:
        sample = side.take(np.unique(np.linspace(0, side.rows - 1, SAMPLE_ROWS).astype(np.int64)))
        if sample.size < 2 or np.ptp(to_float64(sample)) != 0:
            continue
        step = max(1, WINDOW // max(1, side.columns))
        windows = (
            np.arange(start, min(side.rows, start + step)) for start in range(0, side.rows, step)
        )
        value = constant_value(side, windows)
        if value is not None:
            yield _constant_finding(case, label, value)
            return


def _constant_finding(case: DifferingPair, label: str, value: float) -> Finding:
    """Return the finding that side "A" or "B" of a pair holds `value` everywhere."""
    told = [f"{label} holds {value + 0.0:g} everywhere: it was never filled"]
    shaped = case.a.shape == case.b.shape
    if not shaped:
        told[0] += f"; shape {list(case.a.shape)} in A, {list(case.b.shape)} in B"
    before = case.before.relative if shaped else None
    lost = (
        label == "B" and not value and not is_usually_zero(case.key) and bool(case.sample_a.any())
    )
    proof = Proof(case.b.size, 1.0, 0, math.inf, accused=True) if lost else None
    # A table of another size is not A's to give back: A's would not fit B's configuration.
    mends = lost and shaped
    return make_finding("stale_tensor", (case.key,), told, before, None, proof, confirmed=mends)


def explain_placeholder(key: str, a: RowReader, b: RowReader) -> Finding | None:
    """Return the finding that one side has at most one value in place of a whole tensor, or None.

    Source: DeepSpeed's ZeRO stage 3 leaves parameters of shape [0], and other partitioned runs
    [1]; a checkpoint saved without gathering them has these.
    """
    for label, mine, other in (("B", b, a), ("A", a, b)):
        if mine.size <= 1 < other.size and len(mine.shape) == 1:
            text = (
                f"{label} has shape {list(mine.shape)}, a placeholder: the values are not in the "
                "file, as where a partitioned run (ZeRO stage 3, FSDP) is saved without gathering"
            )
            told = (text, f"the other side has {list(other.shape)}")
            return make_finding("stale_tensor", (key,), told, None, None, None, confirmed=False)
    return None


def explain_empty_codes(key: str, a: RowReader, b: RowReader) -> Finding | None:
    """Return the finding that one side's packed codes are all the same byte; None if not."""
    for label, side in (("B", b), ("A", a)):
        stored = side.side.stored
        code = constant_codes(stored[0]) if len(stored) == 1 else None
        if code is not None:
            text = f"{label}'s codes are all bytes {code:#04x}: it was never filled"
            told = text, f"in {stored[0].parts[''].info.name}"
            return make_finding("stale_tensor", (key,), told, None, None, None, confirmed=False)
    return None


def guess_stale_tensor(case: DifferingPair) -> Iterator[Guess | Finding]:
    """Yield the guess that one file's tensor is the base's, then the finding of unrelated tensors.

    The base is a third model. The finding comes only where most other tensors are equal; it is not
    confirmed.
    """
    context = case.context
    for label, mine, other in (("B", case.b, "A"), ("A", case.a, "B")):
        base = context.reader("base", case.key) if case.numbers is None else None
        if base is not None and base.shape == mine.shape:
            says = f"{label}'s tensor is the base's, {other}'s is not"
            yield case.guess(
                "stale_tensor", (says,), other, base.take, pair_noise(base.encoding, mine.encoding)
            )
    if case.numbers is not None:
        return  # siblings are compared for whole tensors only
    # Most other tensors must be equal, and this one different throughout.
    verdicts = [row.verdict for key, row in context.results.items() if key != case.key]
    equal = sum(verdict in EQUAL or verdict == "WITHIN" for verdict in verdicts)
    apart = case.before
    far = row_distances(case.sample_a, case.sample_b) > 2 * case.slack()
    if not verdicts or equal < 0.5 * len(verdicts) or far.mean() < 0.5:
        return
    # Judge whether the tensor is another one or a damaged copy.
    judged = judge_foreign(case.a, case.b)
    what = "holds other values: of another checkpoint, or damaged"
    if judged.sure:
        what = "looks taken from another checkpoint"
    if judged.drawn:
        what = "holds an initialisation: it was never loaded, or never trained"
    which = "" if judged.drawn else "; `diff --base` with a base could show which"
    yield make_finding(
        "stale_tensor",
        (case.key,),
        (
            f"this tensor {what}{which}",
            f"{equal} of {len(verdicts)} other tensors are equal, {apart.changed} of {apart.count} "
            f"values of this one are not, by {apart.relative:.3g} of its norm",
            judged.says,
        ),
        apart.relative,
        None,
        None,
        confirmed=False,
    )


def explain_other_order(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding that both sides have the same values in another order.

    Block encodings are left out: their rounding does not tell values apart.
    """
    apart, sides = case.before, (case.a, case.b)
    if case.numbers is not None or any(side.encoding not in UNIT for side in sides):
        return
    far = apart.changed < FEW_MOVED or apart.relative < MOVED_APART
    if far or apart.nonfinite is not None or not _are_near(*apart.norms, case.slack()):
        return
    if not _hold_same_values(*sides):
        return
    text = "B holds A's values at other places, in an order that has no name here"
    told = text, f"{apart.changed} of {apart.count} values are not where they are in A"
    yield make_finding(
        "value_order", (case.key,), told, apart.relative, None, None, confirmed=False
    )


def _hold_same_values(a: RowReader, b: RowReader) -> bool:
    """Return whether both tensors have the same values equally often, in the coarser type."""
    if a.encoding == b.encoding:
        return fingerprint(a) == fingerprint(b)
    if a.size > MOST_SORTED:
        return False
    fine, coarse = (a, b) if UNIT[a.encoding] < UNIT[b.encoding] else (b, a)
    rounded = store_as(coarse.encoding)(fine.whole)
    return np.array_equal(np.sort(rounded, axis=None), np.sort(coarse.whole, axis=None))


def _are_near(x: float, y: float, slack: float) -> bool:
    """Return whether two norms are equal within `slack`, relative, or the rounding of sums."""
    return abs(x - y) <= max(slack, SUMMED) * max(x, y)


HYPOTHESES = (
    PairHypothesis(
        ("value_order",),
        explain_other_order,
        308,
        "any order at all, before it is said that nothing relates the two",
    ),
    PairHypothesis(("missing_bias",), guess_zero_bias, 40, "zeros fit every later hypothesis"),
    PairHypothesis(
        ("stale_tensor",),
        explain_constant_side,
        50,
        "one value everywhere is a function of any other side",
        shapes=True,
        part=True,
    ),
    PairHypothesis(
        ("layer_order", "swapped_tensors", "copied_tensor", "tied_embedding"),
        guess_other_tensor,
        120,
        "equal to another tensor, before orders of this one",
    ),
    PairHypothesis(
        ("stale_tensor",),
        guess_stale_tensor,
        310,
        "says only that nothing relates the two",
        part=True,
    ),
)
