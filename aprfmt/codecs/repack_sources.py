"""Read a packed weight as four-bit codes and scales: the half of a repack that reads.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes. A *group* is the elements that share one scale.

Every function here raises CodecError with the reason where a weight of its dialect cannot be read
as four-bit codes: of other bits, in order of activation, with factors for its inputs. `target` is
the encoding that is to be written; only readers of E2M1 codes need it.
"""

from collections.abc import Callable

import numpy as np

from aprfmt.codecs import awq, fp8_block, gptq, mlx
from aprfmt.codecs import compressed_tensors as compressed
from aprfmt.codecs import modelopt as nvidia
from aprfmt.codecs.base import F32, U8, Array
from aprfmt.codecs.compressed_claims import NAME
from aprfmt.codecs.dialect import (
    Config,
    Parts,
    StoredPart,
    check_shape,
    part_array,
    part_scales,
    part_words,
    required_part,
)
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.weight_layout import PackedCodes, transpose_numbers
from aprfmt.errors import CodecError

_FLOATS = ("F16", "BF16", "F32")


def _rows_of_bytes(part: StoredPart, rows: int) -> U8:
    """Return a part's bytes as [rows, bytes]."""
    return np.frombuffer(part.raw, np.uint8).reshape(rows, -1)


def code_rows(main: StoredPart, shape: tuple[int, ...]) -> Callable[[int, int], U8]:
    """Return a function of (start, stop) that gives the code bytes of these rows of a main part.

    The low nibble of a byte is the first code.
    """
    rows = _rows_of_bytes(main, int(np.prod(shape[:-1], dtype=np.int64)))
    return lambda start, stop: rows[start:stop]


def _flatten_matrices(numbers: Array) -> Array:
    """Return numbers [matrices, down, across] as [rows, across]."""
    return np.ascontiguousarray(numbers).reshape(-1, numbers.shape[-1])


def _check_finite(name: str, suffix: str, numbers: Array) -> Array:
    """Return the numbers unchanged; CodecError for one that is not finite.

    The error names the dialect (`name`), the part (`suffix`) and the position.
    """
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        index = [int(i) for i in np.argwhere(wrong)[0]]
        raise CodecError(f"{name}: part {suffix!r} holds {numbers[tuple(index)]} at {index}")
    return numbers


def _check_four_bits(bits: object) -> None:
    """Raise CodecError unless `bits` is 4."""
    if bits != 4:
        raise CodecError(f"codes have {bits} bits, expected 4")


def _micro_grid(
    shape: tuple[int, ...],
    main: StoredPart,
    exponents: StoredPart,
    size: int,
    form: str,
    tensor_scale: F32 | None = None,
    divisor: F32 | None = None,
    exact: bool = True,
) -> GridWeight:
    """Return the weight of E2M1 codes (part `main`) under scales of one byte (part `exponents`).

    `size` is the number of inputs in a group, `form` the encodings that the scales may have,
    divided by spaces. `tensor_scale`, `divisor` and `exact` are those of `Groups`. Raises
    CodecError for scales of another encoding.
    """
    if exponents.encoding not in form.split():
        raise CodecError(f"scales are {exponents.encoding}, expected {' or '.join(form.split())}")
    held = _rows_of_bytes(exponents, int(np.prod(shape[:-1], dtype=np.int64)))
    groups = Groups(
        size, held, tensor_scale=tensor_scale, exact=exact, divisor=divisor, codes="e2m1"
    )
    return GridWeight(shape, groups, code_rows(main, shape))


_POWERS, _E4M3 = "U8 F8_E8M0", "F8_E4M3"


def _scale_form(target: str, is_power: bool) -> str:
    """Return the encodings, divided by spaces, that E2M1 codes' scales may have in `target`.

    `is_power` says whether the weight's scales are powers of two. Raises CodecError where the
    target needs the other kind.
    """
    if is_power != (target == "MXFP4"):
        raise CodecError(f"its scales are {'powers of two' if is_power else 'E4M3'}")
    return _POWERS if is_power else _E4M3


def read_modelopt(packed: PackedWeight, target: str) -> GridWeight:
    """Return a ModelOpt NVFP4 or MXFP4 weight as 4-bit codes and scales.

    Raises CodecError where its scales are not of the kind that the encoding `target` has.
    """
    return _read_modelopt(packed.parts, packed.config, target)


def read_modelopt_experts(packed: PackedWeight, target: str) -> GridWeight:
    """Return stacked ModelOpt NVFP4 experts as 4-bit codes and scales, [experts, out, in].

    They are stored with inputs before outputs and are transposed. Raises CodecError where the
    scales are not of the kind that the encoding `target` has.
    """
    return _read_modelopt(
        nvidia.as_weight_parts(packed.parts, transpose=True), packed.config, target
    )


def _read_modelopt(parts: Parts, config: Config, target: str) -> GridWeight:
    """Return a ModelOpt weight's parts as 4-bit codes and scales.

    Raises CodecError for codes that are not E2M1, scales not of the kind that the encoding `target`
    has, and where inputs are multiplied by factors.
    """
    algorithm = nvidia.algorithm_of(config)
    if algorithm.packs != -1 or algorithm.group is None:
        raise CodecError(f"{config.get('quant_algo')} is not E2M1 by group of inputs")
    if nvidia.SMOOTH in parts:
        raise CodecError(f"part {nvidia.SMOOTH!r} multiplies its inputs")
    form, shape = _scale_form(target, not algorithm.second), nvidia.DIALECT.shape_of(parts, config)
    algorithm.scale(parts)  # none is NaN or negative
    whole = nvidia.second_scale(parts, shape).reshape(-1) if algorithm.second else None
    main, scale = parts[nvidia.DIALECT.main], parts[nvidia.SCALE]
    return _micro_grid(shape, main, scale, algorithm.group, form, whole)


def read_compressed_micro(packed: PackedWeight, target: str) -> GridWeight:
    """Return a compressed-tensors NVFP4 or MXFP4 weight as 4-bit codes and scales.

    NVFP4's global scale is a divisor; `exact` says whether its reciprocal gives the same scales.
    Raises CodecError where the scales are not of the kind that `target` has.
    """
    parts, config = packed.parts, packed.config
    kind, size, powers = compressed.micro_format(config)
    _check_four_bits(kind.kind.bits)
    form, shape = _scale_form(target, powers is not None), packed.dialect.shape_of(parts, config)
    main, stored = parts[packed.dialect.main], required_part(NAME, parts, compressed.SCALE)
    held = part_scales(NAME, parts, compressed.SCALE, form.split())
    whole, divisor, exact = None, None, True
    if powers is None:
        divisor = compressed.global_scale(parts)
        whole = (np.float32(1) / divisor).astype(np.float32)
        seen = np.unique(held)
        exact = bool(np.array_equal(seen / divisor, seen * whole))
    return _micro_grid(shape, main, stored, size, form, whole, divisor, exact)


def read_gpt_oss(packed: PackedWeight, target: str) -> GridWeight:
    """Return gpt-oss's MXFP4 experts as codes with a power of two for each 32 inputs.

    `target` is not used.
    """
    parts = packed.parts
    shape, power = (
        packed.dialect.shape_of(parts, packed.config),
        required_part("gpt_oss", parts, "_scales"),
    )
    check_shape("gpt_oss", "_scales", power.shape, parts["_blocks"].shape[:3])
    part_scales("gpt_oss", parts, "_scales", ("U8",))
    return _micro_grid(shape, parts["_blocks"], power, 32, _POWERS)


def read_fp8_micro(packed: PackedWeight, target: str) -> GridWeight:
    """Return E2M1 codes in int8 or F4 with powers of two, as DeepSeek-V4 stores its experts.

    `target` is not used. Raises CodecError for codes of eight bits and for a scale that is NaN.
    """
    parts, dialect = packed.parts, packed.dialect
    main = required_part(fp8_block.NAME, parts, dialect.main)
    if main.encoding not in fp8_block.PACKED:
        raise CodecError(f"its codes are {main.encoding}, of eight bits")
    shape, suffix = dialect.shape_of(parts, packed.config), dialect.parts[0]
    part_scales(fp8_block.NAME, parts, suffix, _POWERS.split())  # none is NaN
    return _micro_grid(shape, main, parts[suffix], 32, _POWERS)


def read_mlx_micro(packed: PackedWeight, target: str) -> GridWeight:
    """Return an MLX weight of mode mxfp4 or nvfp4 as 4-bit codes and scales.

    Raises CodecError unless the mode is the name of `target`.
    """
    mode = str(packed.config.get("mode", "affine"))
    if mode != target.lower():
        raise CodecError(f"its mode is {mode}")
    shape = packed.dialect.shape_of(packed.parts, packed.config)
    stored = required_part(mlx.NAME, packed.parts, ".scales")
    size = int(packed.config["group_size"])
    check_shape(mlx.NAME, ".scales", stored.shape, (*shape[:-1], shape[-1] // size))
    if mode == "nvfp4":
        as_floats = stored._replace(encoding="F8_E4M3")
        part_scales(mlx.NAME, {".scales": as_floats}, ".scales", ("F8_E4M3",))
    return _micro_grid(shape, required_part(mlx.NAME, packed.parts, ".weight"), stored, size, "U8")


def read_mlx_affine(packed: PackedWeight, target: str) -> GridWeight:
    """Return a 4-bit MLX weight as codes with scales and biases; `target` is not used.

    Raises CodecError for another mode, other bits, or numbers that are not finite.
    """
    parts, config = packed.parts, packed.config
    if config.get("mode", "affine") != "affine":
        raise CodecError(f"its mode is {config['mode']}")
    _check_four_bits(config.get("bits"))
    shape = packed.dialect.shape_of(parts, config)
    found = [
        _check_finite(mlx.NAME, suffix, part_array(mlx.NAME, parts, suffix, _FLOATS))
        for suffix in (".scales", ".biases")
    ]
    size = int(config["group_size"])
    for suffix, numbers in zip((".scales", ".biases"), found, strict=True):
        check_shape(mlx.NAME, suffix, numbers.shape, (*shape[:-1], shape[-1] // size))
    groups = Groups(size, _flatten_matrices(found[0]), _flatten_matrices(found[1]), "it has biases")
    return GridWeight(shape, groups, code_rows(parts[".weight"], shape))


def _zero_point_groups(size: int, scale: F32, zeros: F32) -> Groups:
    """Return scales and zero points [rows, groups] of 4-bit integer codes as `Groups`.

    Where all zero points are 8, the default, they are left out.
    """
    low, high = (int(zeros.min()), int(zeros.max())) if zeros.size else (8, 8)
    if low == high == 8:
        return Groups(size, scale)
    if not zeros.flags.c_contiguous:
        zeros = transpose_numbers(zeros.T)
    why = f"zero points are {low} to {high}, not 8"
    return Groups(size, scale, -(zeros * scale), why, zeros=zeros)


def read_gptq(packed: PackedWeight, target: str) -> GridWeight:
    """Return a 4-bit GPTQ weight as codes, scales and zero points; `target` is not used.

    Raises CodecError for other bits, and where `g_idx` reorders the inputs.
    """
    parts, config = packed.parts, packed.config
    _check_four_bits(config.get("bits"))
    outputs, inputs = packed.dialect.shape_of(parts, config)
    scale = _check_finite(gptq.NAME, ".scales", part_array(gptq.NAME, parts, ".scales", _FLOATS))
    zeros = gptq.read_zero_points(parts, config, outputs, scale)
    count = scale.shape[0]
    group = gptq.input_groups(parts, config, inputs, count)
    size = inputs // count if count else 0
    if not size or not np.array_equal(group, np.arange(inputs) // size):
        raise CodecError("its inputs are grouped in another order (g_idx)")
    words = part_words(gptq.NAME, parts, ".qweight", ("I32",))
    every = PackedCodes(4, "columns", words[None])

    def read_codes(start: int, stop: int) -> U8:
        """Return the 4-bit codes of rows [start, stop), uint8 [rows, in/2], low nibble first."""
        return np.ascontiguousarray(every.streams(0, start, stop))

    groups = _zero_point_groups(size, transpose_numbers(scale), zeros.T)
    return GridWeight((outputs, inputs), groups, read_codes)


def read_awq(packed: PackedWeight, target: str) -> GridWeight:
    """Return an AWQ weight as codes, scales and zero points; `target` is not used."""
    parts, config = packed.parts, packed.config
    outputs, inputs = packed.dialect.shape_of(parts, config)
    scale = _check_finite(awq.NAME, ".scales", part_array(awq.NAME, parts, ".scales", _FLOATS))
    zeros, size = awq.read_zero_points(parts, config, outputs, inputs, scale)
    words = awq.wrap_words(part_words(awq.NAME, parts, ".qweight", ("I32",)))

    def read_codes(start: int, stop: int) -> U8:
        """Return the 4-bit codes of rows [start, stop), uint8 [rows, in/2], low nibble first."""
        return np.ascontiguousarray(words.streams(0, start, stop))

    groups = _zero_point_groups(size, transpose_numbers(scale), zeros)
    return GridWeight((outputs, inputs), groups, read_codes)


def read_compressed_integers(packed: PackedWeight, target: str) -> GridWeight:
    """Return 4-bit compressed-tensors integers as codes, scales and zero points.

    `target` is not used. Raises CodecError for other bits, scales of tiles, or rows that end within
    a word.
    """
    parts, config = packed.parts, packed.config
    _check_four_bits(compressed.weight_arguments(config).get("num_bits"))
    shape = packed.dialect.shape_of(parts, config)
    main = required_part(NAME, parts, packed.dialect.main)
    scale, zeros = compressed.group_numbers(parts, config, shape)
    _check_finite(NAME, compressed.SCALE, scale)
    if shape[-1] % 8:
        raise CodecError(f"rows of {shape[-1]} codes end within a word")
    size = shape[-1] // scale.shape[-1]
    flat = _flatten_matrices(scale)
    groups = (
        Groups(size, flat)
        if zeros is None
        else _zero_point_groups(size, flat, _flatten_matrices(zeros + 8))
    )
    return GridWeight(shape, groups, code_rows(main, shape))
