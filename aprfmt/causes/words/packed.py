"""Causes of packed encodings: codes, scales and zero points that were written or read wrong."""

from aprfmt.causes.row import Cause

PACKED = (
    Cause(
        "scales_missing", "tensor", "bug",
        "A packed weight lacks one of its parts: its scales, zero points or index.",
        "The weight cannot be decoded; the file has no tensor of that name.",
        "With the other side's part it decodes to the other side's values.",
    ),
    Cause(
        "scales_shape", "tensor", "bug",
        "The scales of a packed weight are transposed, or of groups of another size than is "
        "claimed.",
        "The weight cannot be decoded; its scales have another shape than its codes ask for.",
        "Turned back, or as the other side has them, it decodes to the other side's values.",
    ),
    Cause(
        "scales_invalid", "tensor", "bug",
        "Scales of a packed weight are NaN, infinite, negative or all zero.",
        "The weight cannot be decoded; its scales hold what no quantizer writes.",
        "With these scales replaced it decodes to the other side's values, or does so everywhere "
        "else.",
    ),
    Cause(
        "packing_claim", "tensor", "bug",
        "config.json claims another packing than the bytes have: another method, group size or "
        "format, or none at all.",
        "The weights cannot be decoded as they are said to be packed.",
        "Read as is named, they decode to the other side's values.",
    ),
    Cause(
        "zero_point", "tensor", "bug",
        "The zero points of a packed weight are off: by one (GPTQ's two formats), or by half the "
        "codes (signed for unsigned).",
        "The errors of every group are one whole number of its steps.",
        "Moving the zero points by it leaves errors that are usual for the encoding.",
    ),
    Cause(
        "packing_order", "tensor", "bug",
        "The codes of a packed weight stand in another order in their words or blocks: AWQ's for "
        "GPTQ's, the high nibble first, halves for neighbours.",
        "Values of every word correlate with those of the other side in one fixed order.",
        "In the named order the errors are usual for the encoding.",
    ),
    Cause(
        "quant_scale", "tensor", "bug",
        "The scales of a packed weight are inverted, ignored, shared, shifted by a group, "
        "transposed, or otherwise those of other groups.",
        "Every group is a multiple of what it should be.",
        "One factor for each group leaves errors that are usual for the encoding; the factors go "
        "with the scales as is said.",
    ),
    Cause(
        "quant_min", "tensor", "bug",
        "What is added to each group's values has the other sign, is lost or another group's, or "
        "d and dmin are exchanged.",
        "Every group is moved by a number that goes with its minimum.",
        "With the minima put right the errors are usual for the encoding.",
    ),
    Cause(
        "nested_offset", "tensor", "bug",
        "The offset of scales that are quantized themselves was not added (double quantization).",
        "All scales are too small by one number.",
        "Adding it leaves errors that are usual for the encoding.",
    ),
    Cause(
        "group_index", "tensor", "bug",
        "Inputs are scaled by other groups than theirs: g_idx ignored or lost, or another size of "
        "groups.",
        "Columns, each as a whole, have the scales of another group.",
        "With a group found for every input the errors are usual for the encoding.",
    ),
    Cause(
        "fp8_variant", "tensor", "bug",
        "The bytes of one 8-bit float are read as another: E4M3, E5M2, or one of their FNUZ kin.",
        "Values of the other format's codes, or half or twice as large.",
        "Read as the named format they have errors that are usual for it.",
    ),
)  # fmt: skip
