"""The one table of causes: what can make two models, runs or traces differ, in words.

Strings only, so that anything may import it. What tests for a cause and what confirms it lives
beside the evidence it needs (tensors: aprfmt.compare.explain, forward passes: aprfmt.diagnosis);
both name causes from here, and a test compares the lists. Other packages add rows through the
entry-point group `aprfmt.causes`.
"""

from dataclasses import dataclass
from typing import Literal

from aprfmt.base.registry import Registry

Level = Literal["identity", "config", "tensor", "forward", "capture"]
Verdict = Literal["same", "precision", "bug", "not_comparable"]

# The order in which evidence is looked at; the first level that explains the later ones decides.
LEVELS: dict[Level, str] = {
    "identity": "the same checkpoint, tokenizer and token ids",
    "config": "hyperparameters that change the forward pass, with their origin",
    "tensor": "stored bytes, then values",
    "forward": "the forward pass, point by point in execution order",
    "capture": "where and on which rows the values were taken",
}

VERDICTS: dict[Verdict, str] = {
    "same": "the same computation; nothing differs but how it is stored, or where or on which rows "
    "it was looked at",
    "precision": "the same computation in other rounding: another dtype, a quantized copy within "
    "its bound, another order of summation, an expert flipped by a margin inside the rounding",
    "bug": "another computation; the cause and the place are named",
    "not_comparable": "the two do not answer the same question; the reason says why",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause: at which level it is first seen, what it says of two sides, and how it is told.

    `verdict` is what two sides that differ by this cause alone are. `signature` is what makes it
    likely, `confirms` the transformation that makes the difference vanish; a cause that was only
    seen and not confirmed is reported as unconfirmed.
    """

    name: str
    level: Level
    verdict: Verdict
    means: str
    signature: str
    confirms: str


_ROWS = (
    Cause(
        "dtype_mislabel", "tensor", "bug",
        "The same bytes under the label of another 16-bit type, such as BF16 weights tagged F16.",
        "Equal bytes and other encodings, or values that are finite and moderate but unrelated.",
        "Reading the bytes as the other type gives the other side's values, bit for bit.",
    ),
    Cause(
        "endianness", "tensor", "bug",
        "Values stored in the other byte order.",
        "Values of wild magnitude; the same multiset of bytes.",
        "Swapping the bytes of every value gives the other side's values, bit for bit.",
    ),
    Cause(
        "byte_offset", "tensor", "bug",
        "The data is read or was written some bytes too early or too late.",
        "Equal byte runs at another place of the tensor.",
        "Shifting by the printed number of bytes makes the overlapping bytes equal.",
    ),
    Cause(
        "bit_rot", "tensor", "bug",
        "Very few damaged bits in data that is otherwise equal to the byte.",
        "One or a few differing bytes; the other blocks and tensors are equal.",
        "Undoing the named bits makes the bytes equal.",
    ),
    Cause(
        "transpose", "tensor", "bug",
        "A matrix stored or read with rows and columns exchanged.",
        "Equal multiset of values; shapes exchanged, or a square matrix that differs off the "
        "diagonal.",
        "The transposed matrix equals the other side's.",
    ),
    Cause(
        "row_offset", "tensor", "bug",
        "Rows are stored some rows further down or up, as in an embedding read one token off.",
        "Every row equals a row of the other side at one constant distance.",
        "Moving the rows by the printed number makes them equal.",
    ),
    Cause(
        "head_order", "tensor", "bug",
        "Whole attention heads stand in another order.",
        "Equal multiset of blocks of head_dim rows.",
        "Putting the heads in the printed order makes the tensors equal.",
    ),
    Cause(
        "rope_pairing", "tensor", "bug",
        "Rope turns adjacent elements where the weights are laid out for split halves, or the "
        "other way round.",
        "q and k are equal before rope and differ after it; position 0 is equal and the rotated "
        "vectors have equal length. In tensors: rows permuted inside each head.",
        "Rope with the other pairing, or the rows permuted back, makes the difference vanish.",
    ),
    Cause(
        "gqa_mapping", "forward", "bug",
        "Query heads read the wrong key and value heads, or rows were permuted with the wrong "
        "head count.",
        "q, k and v are equal; scores of some heads differ while others are equal.",
        "Attention with the named mapping of heads makes the difference vanish.",
    ),
    Cause(
        "swapped_tensors", "tensor", "bug",
        "Two tensors of one shape stand under each other's names, such as gate and up.",
        "A tensor equals a differently named one of the other side.",
        "Exchanging the names makes both equal.",
    ),
    Cause(
        "layer_order", "tensor", "bug",
        "Layers stand in another order, or each tensor of a layer belongs to another layer.",
        "Tensors of a layer equal those of another layer of the other side.",
        "Renumbering the layers makes them equal.",
    ),
    Cause(
        "expert_order", "tensor", "bug",
        "The experts of a layer stand in another order than their router's rows.",
        "Equal multiset of experts.",
        "Putting the experts in the printed order makes the stack equal.",
    ),
    Cause(
        "permuted_neurons", "tensor", "same",
        "An MLP's neurons stand in another order, in gate, up and down alike; the function is "
        "equal.",
        "Each of the layer's MLP tensors has its rows (down: its columns) in another order.",
        "One order makes all of them equal.",
    ),
    Cause(
        "permuted_heads", "tensor", "same",
        "Attention heads stand in another order, in all tensors of the layer alike and every "
        "query head with its key head; the function is equal.",
        "Blocks of head_dim rows of q, k or v and columns of the output product are in another "
        "order.",
        "One order of query heads and one of key heads make all of them equal.",
    ),
    Cause(
        "permuted_experts", "tensor", "same",
        "The experts of a layer stand in another order, their router's rows too; the function is "
        "equal.",
        "The router's rows and every stack of experts are in another order.",
        "One order makes all of them equal.",
    ),
    Cause(
        "extra_tensor", "tensor", "same",
        "One side stores a tensor that nothing of the architecture reads.",
        "A name on one side only that is no role; everything else is compared without it.",
        "The forward pass does not ask for it.",
    ),
    Cause(
        "stale_tensor", "tensor", "bug",
        "A tensor was left at other values: of an older checkpoint, of initialisation, or zero.",
        "One tensor differs everywhere and relates to no tensor of the other side.",
        "It is constant, or of the size and spread of the other side's and related to it in "
        "nothing; in a pass, the values solved for it make every later difference vanish. That "
        "the other side's tensor removes the difference is true of any damage.",
    ),
    Cause(
        "missing_bias", "config", "bug",
        "A bias that one side adds is dropped on the other.",
        "The difference is the same vector in every row and equals the bias.",
        "Dropping (or adding) the bias makes the difference vanish.",
    ),
    Cause(
        "norm_eps", "config", "bug",
        "The norms use another epsilon.",
        "The ratio is constant along a row and largest for small rows, from the first norm on.",
        "Solving both sides' rows gives one epsilon; the norms with it are equal.",
    ),
    Cause(
        "norm_offset", "tensor", "bug",
        "Norm weights with one added where they should not be, or without where they should "
        "(gemma stores w and multiplies by 1 + w; GGUF stores 1 + w).",
        "Norm weights or the norms' factors differ by a constant 1.",
        "Adding the printed offset makes them equal.",
    ),
    Cause(
        "scale", "tensor", "bug",
        "A tensor multiplied by a constant, or by one constant a row.",
        "The ratio of the values is constant; cosine is 1.",
        "Dividing by the printed factor makes them equal.",
    ),
    Cause(
        "tied_embedding", "config", "bug",
        "The head is the embedding on one side and a matrix of its own on the other.",
        "Everything up to the final norm is equal and the logits differ; or a head is stored on "
        "one side only and is no copy of the embedding.",
        "Multiplying with the other matrix makes the logits equal.",
    ),
    Cause(
        "rope_theta", "config", "bug",
        "Rope turns with another base frequency.",
        "q and k are equal before rope and differ after it, more with position, but not in the "
        "first pair; the lengths are equal.",
        "The angles of the rows give the base; rope with it is equal.",
    ),
    Cause(
        "rope_scaling", "config", "bug",
        "Rope scaling for long contexts is missing, or its factors are others.",
        "As rope_theta, but the angles follow no single base, or all shrink by one factor.",
        "The angles give the factor of every frequency; rope with the other rule is equal.",
    ),
    Cause(
        "rope_layers", "config", "bug",
        "Layers rotate that should not, do not where they should, or use the other kind of rope "
        "(local and global layers exchanged).",
        "Some layers are equal after rope and others not.",
        "Turning rope on, off or to the other kind in the named layers makes them equal.",
    ),
    Cause(
        "partial_rotary", "config", "bug",
        "Another number of elements of each head is rotated.",
        "Elements past some index are rotated on one side and equal to the input on the other.",
        "Rope over the printed number of elements is equal.",
    ),
    Cause(
        "positions", "forward", "bug",
        "Tokens have other positions: counted from another start, or not at all.",
        "Rope's angles, or the learned rows, belong to positions at a constant distance.",
        "The pass with the printed positions is equal.",
    ),
    Cause(
        "sliding_window", "config", "bug",
        "Attention reaches back further, or less far, than the layer's window.",
        "Early rows are equal, rows past the window differ.",
        "Attention with the printed window is equal.",
    ),
    Cause(
        "mask", "forward", "bug",
        "Attention is not causal, or masks what it should see.",
        "The last row is equal and the first differs most; probabilities past the diagonal are "
        "not zero.",
        "Attention with the other mask is equal.",
    ),
    Cause(
        "softcap", "config", "bug",
        "Attention scores or logits are not capped, or by another cap.",
        "The larger a score or logit, the more it differs; one is a function of the other.",
        "Capping with the printed cap makes them equal.",
    ),
    Cause(
        "attention_scale", "config", "bug",
        "Attention scores are multiplied by another factor.",
        "q and k are equal and all scores differ by one factor.",
        "Attention with the printed factor is equal.",
    ),
    Cause(
        "softmax_reduction", "forward", "bug",
        "The softmax does not sum over all its keys, as over tiles of 32 that were not combined.",
        "Scores are equal, rows of the probabilities do not sum to 1 or are right for short rows "
        "only.",
        "A softmax over tiles of the printed size is equal.",
    ),
    Cause(
        "activation", "config", "bug",
        "Another activation function: gelu with erf for tanh, silu for gelu, a clamp left out.",
        "The inputs of the activation are equal, its outputs are another function of them.",
        "The named function gives the other side's values.",
    ),
    Cause(
        "residual", "forward", "bug",
        "A sublayer's output is not added to the stream, or is added in another place.",
        "The stream is equal to what was added, or unchanged, or both sublayers read one input.",
        "The sum as named is equal.",
    ),
    Cause(
        "multiplier", "config", "bug",
        "A factor of the embedding, the residual or the logits is missing or another.",
        "All values of a point differ by one factor.",
        "Multiplying by the printed factor makes them equal.",
    ),
    Cause(
        "moe_routing", "config", "bug",
        "Experts are chosen or weighted by another rule: not renormalised, another gate function, "
        "number of experts, grouping or scale.",
        "Router logits are equal; chosen experts or their weights differ, by more than the "
        "margins allow.",
        "Routing by the named rule gives the other side's weights.",
    ),
    Cause(
        "kv_cache", "forward", "bug",
        "Keys or values read from the cache are not those of the tokens: stale, moved or cut.",
        "One pass over all tokens is equal, steps with a cache are not; attention's output "
        "belongs to other keys or values than the recorded ones.",
        "Attention over the keys of the named rows is equal.",
    ),
    Cause(
        "quantisation", "tensor", "precision",
        "One side is a quantized copy: every value is within its block's step.",
        "Another encoding, no outlier beyond a step, the usual mean square error.",
        "Quantizing the other side gives these bytes, or every value is inside the bound.",
    ),
    Cause(
        "nonfinite", "tensor", "bug",
        "A NaN or an infinity on one side, where the other holds a number: damage, an overflow, or "
        "an operation that divides by nothing.",
        "A value of one side that is not finite, in a tensor or at a capture point; index and "
        "count are said.",
        "All other values of the tensor or point are equal, or within its bound.",
    ),
    Cause(
        "rounding", "forward", "precision",
        "The same computation rounded otherwise: another dtype, another order of summation, an "
        "expert flipped by a margin inside the rounding.",
        "Small differences without a first jump, of the size the coarser arithmetic makes.",
        "Recomputing in the coarser arithmetic, or one operation on the other's input, stays "
        "inside the tolerance everywhere.",
    ),
    Cause(
        "capture_point", "capture", "same",
        "The values were taken at another point of the same computation: before the bias, "
        "before rope, without the residual.",
        "A point equals another point of the other side.",
        "Renaming the point makes it equal.",
    ),
    Cause(
        "capture_rows", "capture", "same",
        "The values belong to other rows of the same computation, such as the last token only.",
        "Other counts or positions; the shared rows are equal.",
        "Comparing the rows of equal positions shows no difference.",
    ),
    Cause(
        "none", "identity", "same",
        "Nothing differs.",
        "Every compared value is equal.",
        "Nothing to confirm.",
    ),
)  # fmt: skip

CAUSES: Registry[Cause] = Registry("causes", {}, held={row.name: row for row in _ROWS})


def describe(name: str) -> str:
    """Return a cause's row as one paragraph.

    Raises AprfmtError for a name that is not in the table.
    """
    row = CAUSES[name]
    return (
        f"{row.means} Level: {row.level} ({LEVELS[row.level]}). Verdict: {row.verdict}. "
        f"Seen by: {row.signature} Confirmed when: {row.confirms}"
    )
