"""MXFP4 as gpt-oss stores its experts: E2M1 codes and E8M0 exponents in two tensors.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

NAME_blocks  uint8 [experts, out, in/32, 16]  two codes a byte, the low nibble first NAME_scales
uint8 [experts, out, in/32]      exponents, biased by 127

value = E2M1[code] * 2**(exponent - 127). The weight is [experts, out, in] as it is stored;
transformers turns the two last axes, as unquantized checkpoints hold it. Not GGUF's MXFP4: there
the nibbles of a block are its two halves. Source: transformers, integrations/mxfp4.py
(convert_moe_packed_tensors).
"""

from aprfmt.codecs import f4
from aprfmt.codecs.dialect import (
    CodeTable,
    Config,
    Dialect,
    Parts,
    check_shape,
    part_raw,
    part_scale_numbers,
    required_part,
)
from aprfmt.codecs.weight_layout import PackedCodes, WeightLayout
from aprfmt.errors import CodecError

NAME = "gpt_oss"


def _recognizes(config: Config) -> bool:
    """Return whether a quantization section is gpt-oss's, whose method is "mxfp4"."""
    return config.get("quant_method") == "mxfp4"


def _weight_shape(parts: Parts, config: Config) -> tuple[int, ...]:
    """Return the shape [experts, out, in] of the weight that these parts store; else CodecError."""
    shape = required_part(NAME, parts, "_blocks").shape
    if len(shape) != 4 or shape[3] != 16:
        raise CodecError(
            f"{NAME}: part '_blocks' has shape {list(shape)}, expected [experts, out, in/32, 16]"
        )
    return shape[0], shape[1], shape[2] * 32


def _lay_out(parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
    """Return the layout of the experts' codes, with the exponents of their groups of 32."""
    blocks = part_raw(NAME, parts, "_blocks", ("U8",))
    scales = part_scale_numbers(NAME, parts, "_scales", ("U8",))
    check_shape(NAME, "_scales", scales.array.shape, parts["_blocks"].shape[:3])
    codes = blocks.reshape(*shape[:2], shape[2] // 2)
    return WeightLayout(shape, PackedCodes(4, "rows", codes), f4.CODEC.values, (1, 32), scales)


DIALECT = Dialect(
    name=NAME,
    main="_blocks",
    weight="",
    parts=("_scales",),
    optional=(),
    facts=(),
    recognises=_recognizes,
    shape_of=_weight_shape,
    laid_out=_lay_out,
    codes=lambda parts, config: CodeTable(4, f4.CODEC.values),
)
