"""The table of weights written in a dialect's tensors, and of what is laid out anew undecoded.

What a writer is stands in `writer.py`; the types of `quantize` that use one are rows of
quantizing/mixture.py.
"""

from collections.abc import Callable, Mapping

from aprfmt.base.registry import Registry
from aprfmt.codecs.grids import GridWeight
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.repack_sources import (
    read_awq,
    read_compressed_integers,
    read_compressed_micro,
    read_fp8_micro,
    read_gptq,
    read_modelopt,
)
from aprfmt.codecs.writer import Writer
from aprfmt.errors import CodecError

ReadWeight = Callable[[PackedWeight, str], GridWeight]
# What is laid out anew without decoding: encoding read -> encodings written. Blocks of GGUF are
# read by repack_blocks.
PAIRS: Mapping[str, tuple[str, ...]] = {
    "Q4_0": ("COMPRESSED_PACKED", "GPTQ", "AWQ", "MLX"),
    "Q4_1": ("MLX",),
    "NVFP4": ("MODELOPT", "COMPRESSED_PACKED_FLOAT"),
    "MXFP4": ("COMPRESSED_PACKED_FLOAT", "GPT_OSS"),
    "FP8_BLOCK": ("COMPRESSED_PACKED_FLOAT",),
    "GPTQ": ("AWQ", "COMPRESSED_PACKED"),
    "AWQ": ("GPTQ", "COMPRESSED_PACKED"),
    "COMPRESSED_PACKED": ("GPTQ", "AWQ"),
    "MODELOPT": ("COMPRESSED_PACKED_FLOAT",),
    "COMPRESSED_PACKED_FLOAT": ("MODELOPT",),
}
READS: Mapping[str, ReadWeight] = {
    "GPTQ": read_gptq,
    "AWQ": read_awq,
    "COMPRESSED_PACKED": read_compressed_integers,
    "MODELOPT": read_modelopt,
    "COMPRESSED_PACKED_FLOAT": read_compressed_micro,
    "FP8_BLOCK": read_fp8_micro,
}

WRITERS: Registry[Writer] = Registry(
    "writers",
    {
        "COMPRESSED-INT4": "aprfmt.codecs.write_compressed:INT4",
        "COMPRESSED-FP8": "aprfmt.codecs.write_compressed:FP8",
        "COMPRESSED-NVFP4": "aprfmt.codecs.write_fp4:COMPRESSED",
        "COMPRESSED-MXFP4": "aprfmt.codecs.write_fp4:MXFP4",
        "GPT-OSS-MXFP4": "aprfmt.codecs.write_fp4:GPT_OSS",
        "MODELOPT-NVFP4": "aprfmt.codecs.write_fp4:MODELOPT",
        "GPTQ": "aprfmt.codecs.write_gptq_awq:GPTQ",
        "AWQ": "aprfmt.codecs.write_gptq_awq:AWQ",
        "MLX": "aprfmt.codecs.write_mlx:MLX",
    },
    CodecError,
)
