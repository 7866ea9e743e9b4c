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
)  # fmt: skip
