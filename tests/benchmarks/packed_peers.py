"""What the benchmark of packed weights compares with: the libraries that the dialects are of."""

import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fixtures"))

Task = Callable[[], object]
Peer = tuple[str, Task]  # the library with its version, what decodes a weight of its making


def _named(distribution: str, task: Task) -> Peer:
    return f"{distribution} {importlib.metadata.version(distribution)}", task


def _weight(rows: int, columns: int) -> Any:
    import torch

    torch.set_num_threads(1)
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def modelopt(case: str, rows: int, columns: int) -> Peer:
    """Return ModelOpt's quantized tensor of the case."""
    weight = _weight(rows, columns)
    import torch

    qtensor: Any = import_module("modelopt.torch.quantization.qtensor")

    library: Any = qtensor
    if "NVFP4" in case:
        held, scale, second = library.NVFP4QTensor.quantize(weight, 16)
        return _named(
            "nvidia-modelopt",
            lambda: held.dequantize(
                torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16}
            ),
        )
    kind = library.MXFP8QTensor if "MX" in case else library.FP8QTensor
    held, scale = kind.quantize(weight)
    return _named("nvidia-modelopt", lambda: held.dequantize(torch.float32, scale=scale))


def compressed(case: str, rows: int, columns: int) -> Peer:
    """Return the compressor of the case's format."""
    weight = _weight(rows, columns)
    import torch

    BaseCompressor: Any = import_module("compressed_tensors.compressors").BaseCompressor
    module = import_module("compressed_tensors.quantization")
    QuantizationArgs, QuantizationScheme = module.QuantizationArgs, module.QuantizationScheme

    form, bits, kind, strategy, size = next(
        row
        for name, row in {
            "INT4": ("pack-quantized", 4, "int", "group", 32),
            "NVFP4": ("nvfp4-pack-quantized", 4, "float", "tensor_group", 16),
            "MXFP4": ("mxfp4-pack-quantized", 4, "float", "group", 32),
            "FP8": ("float-quantized", 8, "float", "channel", None),
            "INT8": ("int-quantized", 8, "int", "channel", None),
        }.items()
        if name in case
    )
    said = {"num_bits": bits, "type": kind, "strategy": strategy}
    arguments = QuantizationArgs(**said, **({} if size is None else {"group_size": size}))
    scale = torch.full((rows, columns // (size or columns)), 0.25)
    state = {"weight": weight, "weight_scale": scale}
    if "NVFP4" in case:
        state["weight_global_scale"] = torch.tensor([1024.0])
        state["weight_scale"] = scale * 1024
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor: Any = BaseCompressor.get_value_from_registry(form)
    made = compressor.compress(state, scheme)
    parts = {k: v.contiguous() for k, v in made.items() if torch.is_tensor(v)}
    return _named("compressed-tensors", lambda: compressor.decompress(dict(parts), scheme))


def fp8(case: str, rows: int, columns: int) -> Peer:
    """Return what transformers decodes tiles and powers of two with."""
    weight = _weight(rows, columns)
    import torch

    Fp8Dequantize: Any = import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize

    back: Any = Fp8Dequantize(None)._dequantize_one
    if "FP4" in case:
        codes = weight[:, ::2].to(torch.int8)
        power = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
        scale = power.view(torch.float8_e8m0fnu)
        return _named("transformers", lambda: back(codes, scale, torch.float32))
    held, tiles = weight.to(torch.float8_e4m3fn), torch.rand(rows // 128, columns // 128)
    return _named("transformers", lambda: back(held, tiles, torch.float32))


def gpt_oss(case: str, rows: int, columns: int) -> Peer:
    """Return what transformers decodes gpt-oss's experts with."""
    weight = _weight(rows, columns)
    import torch

    decode: Any = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors

    blocks = weight[:, ::2].to(torch.uint8).reshape(1, rows, columns // 32, 16)
    power = torch.full((1, rows, columns // 32), 120, dtype=torch.uint8)
    return _named("transformers", lambda: decode(blocks, power, dtype=torch.float32))


def mlx(case: str, rows: int, columns: int) -> Peer:
    """Return mx.dequantize on the CPU."""
    mx: Any = import_module("mlx.core")
    import numpy as np

    bits, size = int(case.split()[1]), int(case.rpartition("g")[2])
    weight = np.random.default_rng(0).standard_normal((rows, columns), np.float32)
    held = mx.quantize(mx.array(weight), group_size=size, bits=bits, stream=mx.cpu)
    mx.eval(*held)
    return _named(
        "mlx", lambda: mx.eval(mx.dequantize(*held, group_size=size, bits=bits, stream=mx.cpu))
    )


def gptq(case: str, rows: int, columns: int) -> Peer:
    """Return auto-round's layer on one token: it decodes the weight, then multiplies."""
    weight = _weight(rows, columns)
    import torch

    qlinear_torch: Any = import_module("auto_round_extension.torch.qlinear_torch")

    bits, size = int(case.split()[1]), int(case.split()[3].lstrip("g"))
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = weight
    scale = torch.full((rows, columns // size), 0.25)
    layer = qlinear_torch.QuantLinear(bits, size, columns, rows, False)
    layer.device = "cpu"
    layer.pack(linear, scale, torch.full(scale.shape, 8.0), None, device="cpu")
    token = torch.zeros(1, columns, dtype=torch.float16)
    return _named("auto-round", lambda: layer(token))


def awq(case: str, rows: int, columns: int) -> Peer:
    """Return AutoAWQ's dequantize_gemm."""
    _weight(1, 8)
    import torch

    bare: Any = import_module("oracle_layouts").bare

    if "awq" not in sys.modules:
        bare("awq")
    dequantize_gemm: Any = import_module("awq.utils.packing_utils").dequantize_gemm

    size = int(case.rpartition("g")[2])
    words = torch.randint(-(2**31), 2**31 - 1, (columns, rows // 8), dtype=torch.int32)
    zeros, scale = words[: columns // size].clone(), torch.rand(columns // size, rows).half()
    decode: Any = dequantize_gemm
    return _named("autoawq", lambda: decode(words, zeros, scale, 4, size))


def torchao(case: str, rows: int, columns: int) -> Peer:
    """Return the dequantize of torchao's class."""
    weight = _weight(rows, columns)
    import torch

    mx_formats: Any = import_module("torchao.prototype.mx_formats")
    quant_api: Any = import_module("torchao.quantization.quant_api")

    configs: Any = quant_api
    micro: Any = mx_formats
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows, bias=False)).to(torch.bfloat16)
    model[0].weight.data = weight.to(torch.bfloat16)
    how = (
        micro.NVFP4WeightOnlyConfig()
        if "NVFP4" in case
        else configs.Int8WeightOnlyConfig(version=2)
    )
    configs.quantize_(model, how)
    held: Any = model[0].weight
    return _named("torchao", lambda: held.dequantize())


# the beginning of a case's name -> its library; ModelOpt and MXFP6 have cases without a decoder
PEERS: Mapping[str, Callable[[str, int, int], Peer]] = {
    "ModelOpt NVFP4": modelopt, "ModelOpt FP8": modelopt, "ModelOpt MXFP8": modelopt,
    "compressed INT4 g32": compressed, "compressed NVFP4": compressed,
    "compressed MXFP4": compressed, "compressed FP8": compressed, "compressed INT8": compressed,
    "FP8": fp8, "DeepSeek-V4": fp8, "gpt-oss": gpt_oss, "MLX": mlx, "GPTQ": gptq, "AWQ": awq,
    "torchao": torchao,
}  # fmt: skip
