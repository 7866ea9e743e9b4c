"""Causes about tensors that were moved, cut, folded, merged or trained on."""

from aprfmt.causes.row import Cause

MOVED = (
    Cause(
        "fused_order", "tensor", "bug",
        "The rows of what is stored as one tensor (q, k and v; gate and up) stand in another "
        "order: per head, per KV group, row by row, by shard, parts exchanged.",
        "Every row of the parts together equals a row of the other side's, in another part.",
        "One order of all rows makes the parts equal, biases included where they moved.",
    ),
    Cause(
        "wrong_rows", "tensor", "bug",
        "Rows, heads or experts hold the values of other ones: of a neighbour, another layer, or "
        "one of them twice.",
        "The differing rows equal other rows of the other side, which stand there as well.",
        "Every differing row is found, to the bit, at the printed place.",
    ),
    Cause(
        "value_heads", "tensor", "bug",
        "The value heads of a delta net stand key head by key head on one side, and with the key "
        "heads running fastest on the other, as in a GGUF of qwen3_5.",
        "Equal multiset of blocks of a value head's rows (of the output: columns).",
        "Putting the value heads in the other order makes the tensors equal.",
    ),
    Cause(
        "tap_order", "tensor", "bug",
        "The kernels of a short convolution run the other way: the first tap is the last.",
        "Every kernel holds the other side's values in reverse.",
        "Reversing every kernel makes the tensors equal.",
    ),
    Cause(
        "function_of", "tensor", "bug",
        "Values are a function of the other side's: reciprocals, squares, absolute values, "
        "logarithms, a constant taken away.",
        "One function of one variable relates all values.",
        "Applying the function makes the tensors equal.",
    ),
    Cause(
        "partial_fold", "tensor", "bug",
        "Factors were folded into products and not taken out where they came from, or only into "
        "some of what reads them.",
        "The columns of products are multiplied by the norm's own weights, or by factors that "
        "undo a change of the norm in some products only.",
        "Undoing the fold makes the named products equal; the partner does not undo it.",
    ),
    Cause(
        "partial_merge", "tensor", "bug",
        "An adapter was merged into some shards, or some layers, only.",
        "Differences of low rank in one shard's matrices, none in the others'.",
        "The rank of every difference, and the shards that hold the tensors.",
    ),
    Cause(
        "lora_merge", "identity", "not_comparable",
        "An adapter of low rank was merged into one side, or once more than into the other: other "
        "weights, derived from the same ones.",
        "The differences of an adapter's targets have a low rank, in all layers; nothing else "
        "differs.",
        "The rank of every difference. Which side is meant, or whether it was merged twice, the "
        "weights do not say.",
    ),
    Cause(
        "derived", "identity", "not_comparable",
        "One side was trained further: other weights, not a damaged copy.",
        "Nearly all matrices differ and are related to the other side's.",
        "Most matrices differ, by the printed distances, and correlate with the other side's.",
    ),
    Cause(
        "norm_folded", "tensor", "same",
        "The weights of norms were multiplied into the products that read them, and set to one; "
        "the function is equal.",
        "Columns of products are multiplied by the norm's weights, and the norm is one everywhere.",
        "Every product that reads the norm equals the other side's times the norm's weights.",
    ),
    Cause(
        "scales_folded", "tensor", "same",
        "Factors were moved from one tensor into the next (activation-aware scaling): the function "
        "is equal.",
        "Rows or norms are divided by factors, and columns of what reads them multiplied by them.",
        "Every tensor that reads the factors undoes them.",
    ),
    Cause(
        "padded_vocabulary", "tensor", "same",
        "The embedding and the head have rows behind the vocabulary, which no token id reaches.",
        "The first rows are equal, and the tokenizer has no ids for the others.",
        "The rows of the shorter side are equal, and so are their logits.",
    ),
)  # fmt: skip
