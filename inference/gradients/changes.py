"""What a trainer's backward pass may do otherwise while the loss stays as it is."""

from dataclasses import dataclass
from typing import Literal

# Operations whose backward is another one:
# a key head's gradient that is that of one query head of its group, or the mean over them;
# rope that rotates gradients forward, passes them on unrotated, or gives none;
# attention whose probabilities are computed again without the mask, or without the window of it;
# a gated delta net whose decay, or whose strength of writing, is a constant;
# norms whose scale, mean, or both are constants; norms that multiply by their weight where the
# value has 1 + the weight, by 1 + the weight where it has the weight, or by nothing;
# routers whose weights are constants, or the sum by which these are divided; a shared expert's gate
# that is a constant; a tied table's use as the head, or as the embedding.
Operation = Literal[
    "kv_first_head",
    "kv_last_head",
    "kv_mean",
    "rope_forward",
    "rope_unrotated",
    "rope_cut",
    "mask_left_out",
    "window_left_out",
    "decay_cut",
    "strength_cut",
    "norm_scale_constant",
    "norm_mean_constant",
    "norm_constant",
    "norm_offset_left_out",
    "norm_offset_added",
    "norm_weight_left_out",
    "router_cut",
    "router_sum_constant",
    "shared_gate_cut",
    "head_cut",
    "embedding_cut",
]
# How the documents of a packed row see each other, and how their positions count then.
Joined = Literal["positions count on", "positions restart"]
Padding = Literal["attended", "counted", "scored", "scored and seen"]
# How the factors A and B of an adapter's pairs are taken: A for B and B for A, which square factors
# allow; the same, and each has its gradient under its own name; the product transposed.
FactorOrder = Literal["exchanged", "exchanged, gradients by name", "transposed"]
# How a backward decodes the 4-bit weights of a frozen base, where its forward decodes them rightly:
# double quantization takes the mean off the scales before they are quantized; one scale is the
# largest.
Misreading = Literal[
    "scales without their offset",
    "scales of the block before",
    "scales of the block after",
    "one scale for all blocks",
    "codes of the other encoding",
    "codes of a byte exchanged",
]

Parts = Literal["layers", "head", "layers and head"]  # of a model, whose matrices are quantized


@dataclass(frozen=True)
class QuantizedBase:
    """How the matrices of a frozen base's layers were quantized by bitsandbytes before a step.

    `encoding` is NF4 or FP4, `block` the elements under one scale, `nested` says that the scales
    are quantized too (double quantization). `parts` are the matrices that were quantized: those of
    the layers, the output head, or both.
    """

    encoding: Literal["NF4", "FP4"]
    block: int = 64
    nested: bool = False
    parts: Parts = "layers"


@dataclass(frozen=True)
class RouterFactors:
    """What the auxiliary losses of routers are multiplied by in the batch's loss, 0 for none.

    `balance` is of load balancing over all layers together, `by_layer` of the mean of each layer's
    own, `z` of the z-loss.
    """

    balance: float = 0.0
    by_layer: float = 0.0
    z: float = 0.0

    @property
    def any(self) -> bool:
        """Whether a factor is not zero."""
        return bool(self.balance or self.by_layer or self.z)


NO_ROUTER_LOSS = RouterFactors()

# Of which the sum over query heads that share them is another one.
SharedParts = Literal["keys and values", "keys", "values"]
# What the factors of a `WeighedShares` are of: the query heads that share a key (or a key and a
# value), in equal parts; the heads of queries and keys at their rotation, in equal parts; or the
# two elements of each pair that is rotated, of what the rotation reads or of what it gives.
ShareKind = Literal["sharing heads", "heads", "pairs read", "pairs given"]


@dataclass(frozen=True)
class WeighedShares:
    """Equal shares of heads, or of elements of each head, whose gradients count otherwise.

    `queries` and `keys` are a factor for each share, 1.0 for right; () for queries or keys whose
    gradients are right. Of "sharing heads" `keys` alone count, and are factors of the query heads.
    """

    of: ShareKind
    queries: tuple[float, ...] = ()
    keys: tuple[float, ...] = ()


@dataclass(frozen=True)
class BackwardChange:
    """One mistake in a backward pass.

    `operation` is the operation whose backward is another one. `rows` are factors of the batch's
    rows in the loss, 1.0 for right. `joined`: documents of a packed row see each other.
    `norm_tokens` are the columns [start, stop) of the batch that reach the gradients of norms.
    `shift` is how far ahead of a row its label is, 1 for right, -1 for one before it, and
    `unmasked` says that every token of the mask is one, `inverted` that those are that are none in
    the batch. `labels` are factors of the scored labels in the loss, in the order of rows and
    columns, 1.0 for right. `smoothing` is the share of a
    label that is spread over the vocabulary, `z_loss` the factor of the squared logarithm of the
    softmax's denominator in the loss. `router` are factors of auxiliary losses in place of those
    that the batch states. `rolled` is by how many (rows, columns) the labels are rolled before the
    loss shifts them, as torch.roll does it.
    `edges` says that the first token of each document of a packed row is a label of the one before.
    `adapter_scale` multiplies what an adapter adds. `merged` is how many times its product is in
    the frozen base besides, by the stated scale. `factors` says how its factors are taken, None for
    right, and `base` how the frozen base was quantized, None for as it is. `lengths_in_graph`: the
    lengths that DoRA divides by, of the rows of weight and product, are no constants. `misread`
    says how the backward alone decodes a base of 4 bits, None for rightly. `shares` are factors of
    gradients in attention by shares of its heads, None for right. `of_shared` says of what the sum
    over query heads that share it is wrong, where `operation` or `shares` is of that sum. `cut` are
    role keys of weights whose products are constants, as where a result is detached.
    `padding` says what becomes of the padding at the beginning of a row: tokens attend to it, or
    their positions count it; or of that at the end: its tokens are labels, too, and see the text
    alone, or the padding before them as well.
    """

    operation: Operation | None = None
    rows: tuple[float, ...] | None = None
    joined: Joined | None = None
    norm_tokens: tuple[int, int] | None = None
    shift: int = 1
    rolled: tuple[int, int] = (0, 0)
    unmasked: bool = False
    inverted: bool = False
    edges: bool = False
    labels: tuple[float, ...] | None = None
    smoothing: float = 0.0
    z_loss: float = 0.0
    router: RouterFactors | None = None
    padding: Padding | None = None
    adapter_scale: float = 1.0
    merged: float = 0.0
    factors: FactorOrder | None = None
    base: QuantizedBase | None = None
    lengths_in_graph: bool = False
    misread: Misreading | None = None
    shares: WeighedShares | None = None
    of_shared: SharedParts = "keys and values"
    cut: frozenset[str] = frozenset()

    @property
    def is_of_backward(self) -> bool:
        """Whether an operation's own backward is wrong: no value of the pass is another one."""
        wrong = self.operation, self.misread, self.shares
        return any(each is not None for each in wrong) or bool(self.cut)

    @property
    def scores_padding(self) -> bool:
        """Whether the tokens of the padding at the end of a row are labels, too."""
        return self.padding in ("scored", "scored and seen")

    @property
    def runs_padding(self) -> bool:
        """Whether the pass includes the padding at the end of a row.

        It is if it is scored, if labels are earlier tokens (rows of padding then have labels too),
        or if the mask is left out.
        """
        return self.scores_padding or self.shift < 0 or self.operation == "mask_left_out"

    @property
    def hides_padding(self) -> bool:
        """Whether the padding at the end of a row is run, and no token attends to it."""
        return self.runs_padding and self.padding != "scored and seen"


RIGHT = BackwardChange()
