"""FP8 by block (DeepSeek V3 and its kin): an E4M3 weight with a scale for each tile of it.

weight            F8_E4M3 [..., out, in]
weight_scale_inv  float [..., ceil(out/128), ceil(in/128)], or one number for the whole weight

value = weight * scale: the "inverse" in the name is that of quantizing. The tile's size is
`weight_block_size` of config.json; tiles at the ends may be short.
"""

import numpy as np

from aprfmt.codecs import fp8
from aprfmt.codecs.base import F32
from aprfmt.codecs.dialect import CodeTable, Config, Dialect, Parts, array, fits, need
from aprfmt.errors import CodecError

NAME = "fp8_block"
_MAIN, _SCALE = ".weight", ".weight_scale_inv"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


def _recognises(config: Config) -> bool:
    return config.get("quant_method") == "fp8"


def _shape_of(parts: Parts, config: Config) -> tuple[int, ...]:
    return need(NAME, parts, _MAIN).shape


def _decode(parts: Parts, config: Config, out: F32) -> None:
    scale = array(NAME, parts, _SCALE, _SCALES)
    out[:] = array(NAME, parts, _MAIN, [kind.name for kind in fp8.OF_TWO_SIGNS])
    if scale.size == 1:
        out *= scale.reshape(())
        return
    size = config.get("weight_block_size")
    if not isinstance(size, list | tuple) or len(size) != 2 or out.ndim < 2:
        raise CodecError(f"{NAME}: config says weight_block_size {size!r}, expected two numbers")
    tall, wide = size
    if not all(type(n) is int and 0 < n < 1 << 31 for n in (tall, wide)):
        raise CodecError(f"{NAME}: config says weight_block_size {size!r}, expected two numbers")
    rows, columns = out.shape[-2:]
    tiles = (*out.shape[:-2], -(-rows // tall), -(-columns // wide))
    fits(NAME, _SCALE, scale.shape, tiles)
    across = np.repeat(scale, wide, axis=-1)[..., :columns]
    for tile in range(tiles[-2]):
        out[..., tile * tall : (tile + 1) * tall, :] *= across[..., tile : tile + 1, :]


def _codes(parts: Parts, config: Config) -> CodeTable:
    name = need(NAME, parts, _MAIN).encoding
    kind = next((kind for kind in fp8.OF_TWO_SIGNS if kind.name == name), fp8.E4M3)
    return CodeTable(8, kind.values)


DIALECT = Dialect(
    name=NAME,
    main=_MAIN,
    weight=_MAIN,
    parts=(_SCALE,),
    optional=(),
    facts=("weight_block_size",),
    recognises=_recognises,
    shape_of=_shape_of,
    decode=_decode,
    codes=_codes,
)
