"""All gradients of a batch, and mistakes of a backward pass that explain those that differ."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import join_first
from aprfmt.causes.row import LAST
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.optimizers import F64
from aprfmt.inference.gradients.changes import (
    NO_ROUTER_LOSS,
    BackwardChange,
    QuantizedBase,
    RouterFactors,
)
from aprfmt.measure.verdicts import Certainty

Ints = NDArray[np.int64]
# Roles after the layers and of a layer, in the order in which a backward pass reaches them.
_BACKWARD = (
    "output.",
    "output_norm",
    "layer_output_scale",
    "post_ffw_norm",
    "ffn_down",
    "ffn_up",
    "ffn_gate_up",
    "ffn_gate_inp",
    "ffn_gate",
    "ffn_norm",
    "post_attention_norm",
    "attn_output",
    "attn_v",
    "attn_k",
    "attn_q",
    "attn_norm",
)


class ChangedGradients(Protocol):
    """A batch's gradients by role key, computed with a mistake."""

    @property
    def keys(self) -> Collection[str]:
        """The role keys of all parameters that have a gradient."""
        ...

    @property
    def scored(self) -> int:
        """The number of labels whose losses the loss is the mean of."""
        ...

    def gradient(self, key: str) -> F64:
        """Return dL/dW of a parameter, float64 in the role's shape; KeyError for none."""
        ...

    def gradient_near(self, key: str, given: F64) -> F64:
        """Return `gradient` with the padding token's row as the trainer computes it.

        Trainers differ in whether this row of the table gets the gradient of reading the token;
        the way that is nearer to the gradient `given` is used.
        """
        ...


class HeadParts(Protocol):
    """What each label of a batch alone adds to the gradient of the output head."""

    @property
    def key(self) -> str:
        """The role key of the output head, or of the table that is tied to it."""
        ...

    def solve(self, given: F64) -> tuple[float, F64]:
        """Return (relative L2 distance, factor of each label) of the best fit to a head's gradient.

        `given` is that gradient, [rows, elements].
        """
        ...


class LabelParts(Protocol):
    """What each label of a batch alone adds to one gradient, and where the labels are.

    `rows`, `columns` and `tokens` [labels] are in the order of the batch's rows and columns.
    """

    @property
    def key(self) -> str:
        """The role key of the parameter whose gradient is split by labels."""
        ...

    @property
    def rows(self) -> Ints:
        """The number of the batch's row that each label is in, [labels]."""
        ...

    @property
    def columns(self) -> Ints:
        """The number of the batch's column that each label's token is in, [labels]."""
        ...

    @property
    def tokens(self) -> Ints:
        """The token id of each label, [labels]."""
        ...

    @property
    def head(self) -> HeadParts | None:
        """What each label adds to the gradient of the head; None where that is not known."""
        ...

    def mean(self, factors: F64) -> F64:
        """Return the gradient, float64 [elements], of the labels' mean loss with weights `factors`.

        `factors` is [labels].
        """
        ...


@dataclass(frozen=True)
class BackwardCase:
    """What is known of all gradients of one batch.

    `case` gives the pair of gradients of a parameter by its role key; `names` are its stored names.
    `right` are the keys whose gradients agree, `wrong` those that differ, `missing` those that were
    not given. `norms` are the norms of the given gradient and of the computed one. `recompute`
    computes the batch's gradients with a mistake, of some stored names or of all. `labels` are the
    scored labels of each row of the batch, `row_length` its columns, `packed` says that a row holds
    several documents. `dropout` are the model's own rates by key. `open` are the keys whose
    difference arithmetic of few bits may leave. `by_label` computes what each label adds to the
    gradient of the last norm, None where that is not known. `routers` are the factors of routers'
    auxiliary losses that the computed gradients have. `experts`: the model has experts.
    `padded_first`: a row of the batch begins with padding, `padded_last`: one ends with it.
    `adapter` is (scale, rank) of an adapter whose pairs all have these, else None. `norm_offset` is
    what an RMSNorm of the model adds to its weight, 0 or 1; None of a model with other norms.
    `base` is the quantization that the numbers of an adapter's base show, None for none.
    `partly_labelled`: some tokens of the batch's text are no labels. `windowed`: some layers attend
    to a window.
    """

    case: Callable[[str], GradientCase]
    names: Mapping[str, Collection[str]]
    right: frozenset[str]
    wrong: frozenset[str]
    missing: frozenset[str]
    norms: Mapping[str, tuple[float, float]]
    recompute: Callable[[BackwardChange, Collection[str] | None], ChangedGradients]
    labels: tuple[int, ...] = ()
    row_length: int = 0
    packed: bool = False
    dropout: Mapping[str, float] = field(default_factory=dict)
    open: frozenset[str] = frozenset()
    by_label: Callable[[], LabelParts | None] = lambda: None
    routers: RouterFactors = NO_ROUTER_LOSS
    experts: bool = False
    padded_first: bool = False
    adapter: tuple[float, int] | None = None
    padded_last: bool = False
    norm_offset: int | None = None
    base: QuantizedBase | None = None
    partly_labelled: bool = False
    windowed: bool = False

    @property
    def first(self) -> tuple[str, ...]:
        """The role keys of wrong or missing gradients where a backward pass comes by first.

        They are all of one layer, or of the tensors after the layers, or of the embedding tables.
        """
        return first_wrong(self.wrong | self.missing)

    @property
    def first_layer(self) -> int | None:
        """The number of the first layer with wrong gradients, in backward order.

        None if wrong gradients outside the layers come before.
        """
        return split_key(self.first[0])[0] if self.first else None

    def right_at(self, *roles: str) -> bool:
        """Return whether the first wrong layer has right gradients for all keys of these roles.

        `roles` are beginnings of roles, such as "attn_q". A missing gradient is not right.
        """
        return not any(split_key(key)[1].startswith(roles) for key in self.first)


def backward_order(key: str) -> tuple[int, int, int, str]:
    """Return a sort key by which parameters are ordered as a backward pass reaches them.

    That is the head, the last norm, the layers from the last to the first, and the tables.
    """
    layer, role = split_key(key)
    ranks = [i for i, name in enumerate(_BACKWARD) if role.startswith(name)]
    rank = ranks[0] if ranks else len(_BACKWARD)
    if layer is not None:
        return 1, -layer, rank, role
    return (0 if role.startswith("output") else 2), 0, rank, role


def first_wrong(wrong: Collection[str]) -> tuple[str, ...]:
    """Return those of the wrong role keys that a backward pass reaches first.

    They are of one layer, of the tensors after the layers, or of the embedding tables. () for no
    wrong keys.
    """
    ordered = sorted(wrong, key=backward_order)
    return tuple(
        key for key in ordered if backward_order(key)[:2] == backward_order(ordered[0])[:2]
    )


def first_place(wrong: Collection[str], right: Collection[str]) -> str:
    """Return where a backward pass goes wrong: `after L2.attn_output, at L2.attn_v, L2.attn_k`.

    After the last of the `right` keys that it reaches before any of the `wrong` ones, at the
    first wrong ones. "" for no wrong keys.
    """
    found = first_wrong(wrong)
    if not found:
        return ""
    before = [key for key in right if backward_order(key) < backward_order(found[0])]
    at = list(dict.fromkeys(key.rpartition(".")[0] for key in found))
    text = "at " + join_first(at, 3)
    if not before:
        return text
    return f"after {max(before, key=backward_order).rpartition('.')[0]}, {text}"


def all_differ(case: BackwardCase) -> bool:
    """Return whether nearly all gradients differ, those next to the loss among them.

    Next to the loss are, of a model, the tensors after its layers; of an adapter, its last layer.
    """
    unlike = case.wrong | case.open
    first = first_wrong(unlike | case.missing)
    every = first_wrong(unlike | case.missing | case.right)
    at_loss = bool(first) and split_key(first[0])[0] == split_key(every[0])[0]
    return at_loss and len(case.right) <= len(unlike) / 4


@dataclass(frozen=True)
class BackwardGuess:
    """A mistake of a whole backward pass; `change` makes the gradients that were given.

    In its place `source` may say it: {key: key whose computed gradient was given for it}. A mistake
    with neither was not made again, and is said as likely. `alone`: the mistake reaches the wrong
    gradients alone, and all others are those of the batch. `most` is the most that may be said of
    it: "explained" where other mistakes make the same gradients. `objective`: it is no mistake but
    another objective than the batch states, and nothing says whether its gradients are right.
    """

    cause: str
    says: str
    change: BackwardChange | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False
    most: Certainty = "confirmed"
    objective: bool = False


@dataclass(frozen=True, slots=True)
class BackwardHypothesis:
    """A row of the table of hypotheses: causes that it can find, and the function that tries them.

    The hypothesis with the lowest rank is tried first.
    """

    causes: tuple[str, ...]
    find: Callable[[BackwardCase], Iterator[BackwardGuess]]
    rank: int = LAST
    because: str = "offered by another package"
