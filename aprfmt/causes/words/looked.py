"""Rounding, what is not a number, and where one looked: causes of every level."""

from aprfmt.causes.row import Cause

LOOKED = (
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
