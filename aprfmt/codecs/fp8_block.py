"""FP8 by block, and what is published with it: a weight with a scale for each tile of it.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

weight            F8_E4M3 [..., out, in]; or int8 or F4: E2M1 codes, two a byte, the low nibble
                  first ([..., out, in/2] as int8), with a scale for 32 inputs
weight_scale_inv  float [..., ceil(out/128), ceil(in/128)], or one number for the whole weight;
                  E8M0, in bytes too, is a power of two. DeepSeek-V4 calls it `scale`,
                  AutoFP8 and vLLM `weight_scale`, ComfyUI `scale_weight`

value = weight * scale: the "inverse" in the name is that of quantizing. The tile's size is
`weight_block_size` of config.json; tiles at the ends may be short. Without it, and for the tiles of
1 x 32 that MXFP8 and packed experts have besides others, it follows from the number of scales.
Without the tile's size the scales may be one number a row too, [..., out]. Experts that are stored
together are NAME and NAME_scale_inv.

A file of a diffusion model stands alone, without config.json. FP8 codes with a float scale are read
there by the same rule (`UNCLAIMED`). A tensor `scaled_fp8` marks such a file, and `comfy_quant`
(JSON in bytes) such a weight. Marked weights are read so with a config.json without a section
too. Source: transformers 5.23, integrations/finegrained_fp8.py (Fp8Dequantize); ComfyUI,
comfy/ops.py (scaled_fp8_ops) and comfy/quant_ops.py.
"""

import numpy as np

from aprfmt.codecs import f4, fp8
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
from aprfmt.codecs.weight_layout import (
    GroupNumbers,
    WeightLayout,
    broadcast_to_matrices,
    wrap_codes,
)
from aprfmt.errors import CodecError

NAME = "fp8_block"
_METHODS = ("fp8", "mxfp8")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_POWERS = ("F8_E8M0", "U8")
_PLAIN = ("F32", "BF16", "F16")
_BYTES = tuple(kind.name for kind in fp8.OF_TWO_SIGNS)
PACKED, _PAIRS = ("I8", "F4"), "I8"
_MICRO = (1, 32)  # the tile of packed codes, and of MXFP8
MARKER = "scaled_fp8"  # last part of the name of the tensor that marks a file
OWN_MARKER = ".comfy_quant"  # suffix of the tensor that marks one weight
UNCLAIMED: Config = {"quant_method": "fp8"}  # what a scale says where no configuration does


def _recognizes(config: Config) -> bool:
    """Return whether a quantization section names one of the methods that store FP8 like this."""
    return config.get("quant_method") in _METHODS


def _claimed_tile(config: Config) -> tuple[int, int] | None:
    """Return (rows, columns) of the tile that the configuration states; None where it states none.

    Raises CodecError for a `weight_block_size` that is not two positive integers.
    """
    size = config.get("weight_block_size")
    if size is None:
        return _MICRO if config.get("quant_method") == "mxfp8" else None
    good = isinstance(size, list | tuple) and len(size) == 2
    if not good or not all(type(n) is int and 0 < n < 1 << 31 for n in size):
        raise CodecError(f"{NAME}: config says weight_block_size {size!r}, expected two numbers")
    return size[0], size[1]


class _DialectRows:
    """The functions of a dialect whose main part and scales have the given suffixes."""

    def __init__(self, main: str, scale: str) -> None:
        """Set the suffixes of the codes (`main`) and of their scales."""
        self.main, self.scale = main, scale

    def shape_of(self, parts: Parts, config: Config) -> tuple[int, ...]:
        """Return the weight's shape [..., out, in]; CodecError where the parts do not fit."""
        main = required_part(NAME, parts, self.main)
        if main.encoding not in (*_BYTES, *PACKED):
            raise CodecError(
                f"{NAME}: part {self.main!r} is {main.encoding}, expected FP8, or E2M1 in I8 or F4"
            )
        shape = (*main.shape[:-1], main.shape[-1] * 2) if main.encoding == _PAIRS else main.shape
        self.tile(parts, shape, config)
        return shape

    def tile(self, parts: Parts, shape: tuple[int, ...], config: Config) -> tuple[int, int] | None:
        """Return (rows, columns) of the tile under one scale; None if one scale is for all.

        Raises CodecError where the number of scales fits neither the configuration nor the weight.
        """
        # One scale for all, or one a row.
        stored, claimed = required_part(NAME, parts, self.scale), _claimed_tile(config)
        if all(n == 1 for n in stored.shape):
            return None
        if self._has_row_scales(parts, shape, config):
            return 1, shape[-1]
        if len(shape) < 2 or len(stored.shape) != len(shape):
            raise CodecError(
                f"{NAME}: part {self.scale!r} has shape {list(stored.shape)} for a weight of "
                f"{list(shape)}"
            )
        # Without a configured size the grid of scales divides the weight.
        packed = parts[self.main].encoding in PACKED
        if claimed is None and not packed:
            return self._tile_from_grid(stored.shape, shape)
        # Else the grid must be that of an allowed tile.
        micro = packed or stored.encoding in _POWERS
        allowed = [_MICRO] if packed else [claimed, _MICRO] if micro else [claimed]
        grids = {tile: _tile_counts(shape, tile) for tile in allowed if tile is not None}
        for tile, grid in grids.items():
            if grid == stored.shape:
                return tile
        tall, wide = next(iter(grids))
        raise CodecError(
            f"{NAME}: part {self.scale!r} has shape {list(stored.shape)}, expected "
            f"{list(grids[tall, wide])} for tiles of {tall} x {wide}"
        )

    def _has_row_scales(self, parts: Parts, shape: tuple[int, ...], config: Config) -> bool:
        """Return whether the scales are one number a row, without an axis of columns."""
        plain = _claimed_tile(config) is None and parts[self.main].encoding not in PACKED
        return plain and len(shape) > 1 and parts[self.scale].shape == shape[:-1]

    def _tile_from_grid(self, grid: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
        """Return (rows, columns) of the tile that a grid of scales divides a weight into.

        It is used where the configuration says no size. Raises CodecError where it does not divide.
        """
        check_shape(NAME, self.scale, grid[:-2], shape[:-2])
        if not all(grid[-2:]) or shape[-2] % grid[-2] or shape[-1] % grid[-1]:
            raise CodecError(
                f"{NAME}: config says no weight_block_size, and part {self.scale!r} of "
                f"{list(grid)} divides no weight of {list(shape)}"
            )
        return shape[-2] // grid[-2], shape[-1] // grid[-1]

    def laid_out(self, parts: Parts, config: Config, shape: tuple[int, ...]) -> WeightLayout:
        """Return the layout of the weight's codes, with their scales by tile."""
        known = self.codes(parts, config)
        raw = part_raw(NAME, parts, self.main, (*_BYTES, *PACKED))
        codes, values = wrap_codes(raw, known.bits, shape, known.values)
        scale = part_scale_numbers(NAME, parts, self.scale, _SCALES)
        tile = self.tile(parts, shape, config)
        whole = (shape[-2], shape[-1])
        scales = scale.array.reshape(1, 1) if tile is None else scale.array
        if tile is not None and scales.ndim < len(shape):
            scales = scales[..., None]
        grid = scales.shape[-2:]
        numbers = GroupNumbers(broadcast_to_matrices(scales, shape, grid), scale.table)
        return WeightLayout(shape, codes, values, tile or whole, numbers)

    def codes(self, parts: Parts, config: Config) -> CodeTable:
        """Return the table of the numbers that the main part's codes stand for, by its encoding."""
        name = required_part(NAME, parts, self.main).encoding
        if name in PACKED:
            return CodeTable(4, f4.CODEC.values)
        kind = next((kind for kind in fp8.OF_TWO_SIGNS if kind.name == name), fp8.E4M3)
        return CodeTable(8, kind.values)


def _tile_counts(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, ...]:
    """Return how many tiles a shape [..., rows, columns] has, as [..., down, across]."""
    return (*shape[:-2], -(-shape[-2] // tile[0]), -(-shape[-1] // tile[1]))


def _make_dialect(
    name: str, main: str, scale: str, *optional: str, called: tuple[str, ...] = ()
) -> Dialect:
    """Return the dialect of FP8 codes and scales with these suffixes.

    `optional` are suffixes that may exist too, `called` other suffixes of the scales.
    """
    rows = _DialectRows(main, scale)
    return Dialect(
        name=name,
        main=main,
        weight=main,
        parts=(scale,),
        optional=optional,
        facts=("weight_block_size",),
        recognises=_recognizes,
        shape_of=rows.shape_of,
        laid_out=rows.laid_out,
        codes=rows.codes,
        coded=(*_BYTES, *PACKED),
        called={scale: called, ".input_scale": (".scale_input",)},
    )


DIALECT = _make_dialect(
    NAME,
    ".weight",
    ".weight_scale_inv",
    ".activation_scale",
    ".input_scale",
    OWN_MARKER,
    called=(".scale", ".weight_scale", ".qscale_weight", ".scale_weight"),
)
EXPERTS = _make_dialect("fp8_experts", "", "_scale_inv", "_activation_scale")


def has_multiplying_scale(parts: Parts) -> bool:
    """Return whether an FP8 weight's codes are to be multiplied by its float scale.

    It is judged by size, without a configuration: True where the median of the scales is at most 1.
    Weights are far smaller than 1, so that a scale above 1 is the one that quantizing multiplied
    by. False without scales, or for other encodings. `parts` are those of a weight, by suffix.
    """
    rows = next((row for row in (DIALECT, EXPERTS) if row.main in parts), None)
    if rows is None or rows.parts[0] not in parts:
        return False
    scale = parts[rows.parts[0]]
    if parts[rows.main].encoding not in _BYTES or scale.encoding not in _PLAIN:
        return False
    numbers = np.abs(part_scale_numbers(NAME, parts, rows.parts[0], _PLAIN).array)
    return bool(numbers.size) and bool(np.median(numbers) <= 1)
