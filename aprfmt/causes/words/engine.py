"""Causes that engines have and files have not: norms left out, of another kind or elsewhere."""

from aprfmt.causes.row import Cause

ENGINE = (
    Cause(
        "norm_kind", "forward", "bug",
        "A norm is of another kind: with the mean of a row taken away, or without.",
        "Rows differ by a multiple of the norm's weight from the first norm on.",
        "The pass with the other kind of norm is equal.",
    ),
    Cause(
        "norm_skipped", "forward", "bug",
        "A norm is left out: after attention or the MLP, before them, or before the head.",
        "The input of the norm stands where its result should.",
        "The pass without the named norm is equal.",
    ),
    Cause(
        "qk_norm", "forward", "bug",
        "q and k are not normalised, or after rope instead of before, or over all heads together "
        "instead of each one.",
        "q and k are equal before their norm, and scores differ.",
        "The pass with the norms of q and k as named is equal.",
    ),
    Cause(
        "recurrence", "forward", "bug",
        "A gated delta net computes its decay, its strength, its keys, its state or its output "
        "gate by another rule: A_log without exp, keys that are not normalised, no dt_bias.",
        "What the layer reads from its state differs more from token to token; its products are "
        "equal.",
        "The rule with the named part exchanged is equal.",
    ),
    Cause(
        "tensor_parallel", "forward", "bug",
        "A sum over devices lacks a device's part, or has one in another's place.",
        "Attention's or the MLP's last product is that of some of its columns only.",
        "The product in which the named shards count as named is equal.",
    ),
    Cause(
        "token_ids", "forward", "bug",
        "The run read other tokens than its records say.",
        "The embedding's rows are those of other ids at single places; all rows from there on "
        "differ.",
        "The pass with the named ids is equal.",
    ),
    Cause(
        "token_type_ids", "forward", "bug",
        "Tokens have another type, or no row of the table of types is added.",
        "The embedding differs by one vector in every row.",
        "The pass with the named row of the types is equal.",
    ),
    Cause(
        "dropout", "forward", "bug",
        "Dropout is on: the run was made in training mode.",
        "Some values are zero, and all others are larger by one factor; two runs differ.",
        "The share of zeros gives the factor that all other values have.",
    ),
)  # fmt: skip
