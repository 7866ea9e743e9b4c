"""Quantized weights of safetensors that are several tensors: GPTQ, AWQ, compressed-tensors, MLX.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

The table of dialects; what a dialect is stands in `dialect.py`, which weights a configuration
speaks of in `scopes.py`.
"""

import math
from collections.abc import Container, Sequence

import numpy as np

from aprfmt.base.registry import Registry
from aprfmt.codecs.base import F32
from aprfmt.codecs.dialect import Config, Dialect, Parts, required_part
from aprfmt.codecs.scale_checks import check_scales
from aprfmt.codecs.scopes import all_sections, section_at
from aprfmt.codecs.weight_layout import WeightLayout
from aprfmt.errors import CodecError, UnsupportedError

DIALECTS: Registry[Dialect] = Registry(
    "dialects",
    {
        "gptq": "aprfmt.codecs.gptq:DIALECT",
        "awq": "aprfmt.codecs.awq:DIALECT",
        "fp8_block": "aprfmt.codecs.fp8_block:DIALECT",
        "fp8_experts": "aprfmt.codecs.fp8_block:EXPERTS",
        "gpt_oss": "aprfmt.codecs.gpt_oss:DIALECT",
        "mlx": "aprfmt.codecs.mlx:DIALECT",
        "compressed_packed": "aprfmt.codecs.compressed_tensors:PACKED",
        "compressed_packed_float": "aprfmt.codecs.compressed_tensors:PACKED_FLOAT",
        "compressed_plain": "aprfmt.codecs.compressed_tensors:PLAIN",
        "modelopt": "aprfmt.codecs.modelopt:DIALECT",
        "modelopt_experts": "aprfmt.codecs.modelopt:EXPERTS",
        "torchao": "aprfmt.codecs.torchao:DIALECT",
    },
    CodecError,
)


def dialect_of(config: Config) -> Dialect:
    """Return the dialect that a quantization section names.

    Raises UnsupportedError with the method's name.
    """
    for name in DIALECTS:
        dialect = DIALECTS[name]
        if dialect.recognises(config):
            return dialect
    method = config.get("quant_method", config.get("format", "unnamed"))
    raise UnsupportedError(
        f"quantization {method!r} of config.json is not one we decode: {', '.join(DIALECTS)}"
    )


def dialects_of(section: Config) -> list[Dialect]:
    """Return the dialects of the weights that a section covers, in the table's order.

    Raises UnsupportedError with the method's name where there is none, CodecError where the section
    cannot be read.
    """
    every = all_sections(section)
    found = [
        row
        for row in map(DIALECTS.__getitem__, DIALECTS)
        if any(row.recognises(one) for one in every)
    ]
    if not found:
        dialect_of(every[0] if len(every) == 1 else section)
    return found


def dialects_at(section: Config, module: str) -> tuple[Sequence[Dialect], Config] | None:
    """Return (dialects that a module's weight can have, the section that holds for this module).

    None where the module is not quantized. Raises CodecError for a section that cannot be read.
    """
    stated = section_at(section, module)
    if stated is None:
        return None
    return [row for row in map(DIALECTS.__getitem__, DIALECTS) if row.recognises(stated)], stated


def unmistakable_dialects(rows: Sequence[Dialect]) -> list[Dialect]:
    """Return the dialects not in `rows` whose codes have a suffix that no plain weight has."""
    every = map(DIALECTS.__getitem__, DIALECTS)
    return [row for row in every if row.main != row.weight and row not in rows]


def dialects_of_codes(name: str, encoding: str, names: Container[str]) -> list[Dialect]:
    """Return the dialects in which a stored tensor holds the codes of a packed weight.

    Either its name ends in a suffix that plain weights never have, or its encoding means nothing by
    itself; and all other parts of the dialect are among `names`.
    """
    every = map(DIALECTS.__getitem__, DIALECTS)
    return [
        row
        for row in every
        if (encoding in row.coded or row.main not in ("", row.weight))
        and name.endswith(row.main or name)
        and all(row.stored(name.removesuffix(row.main), part, names) for part in row.parts)
    ]


def is_packed_part(name: str) -> bool:
    """Return whether a tensor's name is that of a packed weight's codes or of a companion."""
    rows = [DIALECTS[key] for key in DIALECTS]
    ends = {end for row in rows for end in (*row.parts, *row.optional)}
    mains = {row.main for row in rows if row.main not in ("", row.weight, ".weight")}
    return name.endswith((*ends, *mains))


def lay_out(dialect: Dialect, parts: Parts, config: Config) -> WeightLayout | None:
    """Return where a packed weight's codes, scales and zero points are, ready to decode by rows.

    None for a weight without elements. Raises CodecError where parts do not fit.
    """
    for suffix in (dialect.main, *dialect.parts):
        required_part(dialect.name, parts, suffix)
    shape = dialect.shape_of(parts, config)
    if not math.prod(shape):
        return None
    with np.errstate(all="ignore"):
        laid = dialect.laid_out(parts, config, (1,) * (2 - len(shape)) + shape)
    check_scales(dialect.name, dialect.main, parts, laid)
    return laid


def decode_weight(dialect: Dialect, parts: Parts, config: Config) -> F32:
    """Return the weight as a new float32 array. Raises CodecError where parts do not fit."""
    found = lay_out(dialect, parts, config)
    if found is None:
        return np.empty(dialect.shape_of(parts, config), np.float32)
    return found.decode(threads=1).reshape(dialect.shape_of(parts, config))
