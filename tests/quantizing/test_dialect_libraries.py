"""Whole folders in the dialects of other libraries, decoded by these libraries themselves.

NOT-RUN where a library is not installed (the extra `oracles`); what they make of single weights is
in fixtures/oracles, which `tests/codecs/test_writers.py` reads without them.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.quantizing.mixture import SCHEMES
from tests.codecs.data import Array

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
ROOT = Path(__file__).resolve().parents[2]
Parts = Mapping[str, Any]  # suffix -> tensor


def need(name: str) -> None:
    """Skip where a library is missing, without importing it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"NOT-RUN: {name} is not installed")


@pytest.fixture
def bare() -> Iterator[Callable[[str], None]]:
    """Import modules of a package without its own `__init__`, as make_oracles does; and undo it."""
    path = ROOT / "fixtures" / "oracle_layouts.py"
    spec = importlib.util.spec_from_file_location("oracle_layouts", path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = set(sys.modules)
    yield module.bare
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("awq", "auto_gptq"):
            del sys.modules[name]


PACKED = 28  # weights of the demo model that a scheme packs


def weights(folder: Path) -> Iterator[tuple[str, Array, Parts]]:
    """Yield the packed weights of a folder, all seven of each layer.

    They are (name, the values we read, the stored tensors).
    """
    from safetensors import safe_open

    packed = 0
    with aprfmt.open(folder) as model, safe_open(folder / "model.safetensors", "pt") as file:
        for name, view in model.items():
            if view.parts:
                stem = name.removesuffix("weight")
                stored = {p.info.name: file.get_tensor(p.info.name) for p in view.parts.values()}
                yield name, view.numpy(), {n.removeprefix(stem): t for n, t in stored.items()}
                packed += 1
    assert packed == PACKED


def written(source: Path, folder: Path, scheme: str) -> Path:
    report = aprfmt.convert(source, folder, to="safetensors", quantize=scheme)
    assert sum(t.encoding == SCHEMES[scheme].base for t in report.tensors) == PACKED
    return folder


COMPRESSED = [name for name in SCHEMES if name.startswith("COMPRESSED")]


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_transformers_loads_it_by_compressed_tensors(
    scheme: str, demo_model: Path, tmp_path: Path
) -> None:
    """The model's weights are those we read, rounded to its dtype; it runs."""
    need("compressed_tensors")
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: transformers is missing")
    folder = written(demo_model, tmp_path / "q", scheme)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            device_map="cpu",
            quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        )
    held = model.state_dict()
    for name, values, _ in weights(folder):
        assert torch.equal(torch.from_numpy(values).to(held[name].dtype), held[name]), name
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8)[None]).logits).all()


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("MLX")])
def test_mlx_decodes_it(scheme: str, demo_model: Path, tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core", reason="NOT-RUN: mlx is missing", exc_type=ImportError)
    folder = written(demo_model, tmp_path / "q", scheme)
    held = mx.load(str(folder / "model.safetensors"))
    for name, values, _ in weights(folder):
        stem = name.removesuffix("weight")
        numbers = [held[stem + part].astype(mx.float32) for part in ("scales", "biases")]
        size = int(scheme.rpartition("g")[2])
        judged = mx.dequantize(held[name], *numbers, group_size=size, bits=4, stream=mx.cpu)
        np.testing.assert_array_equal(np.array(judged), values)


def test_modelopt_decodes_it(demo_model: Path, tmp_path: Path) -> None:
    need("modelopt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qtensor = importlib.import_module("modelopt.torch.quantization.qtensor")
    folder = written(demo_model, tmp_path / "q", "MODELOPT-NVFP4")
    for _, values, parts in weights(folder):
        held = qtensor.NVFP4QTensor(values.shape, torch.float32, parts["weight"])
        judged = held.dequantize(
            torch.float32,
            scale=parts["weight_scale"],
            double_scale=parts["weight_scale_2"],
            block_sizes={-1: 16},
        )
        np.testing.assert_array_equal(judged.numpy(), values)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("GPTQ")])
def test_auto_gptq_decodes_it(
    scheme: str, demo_model: Path, tmp_path: Path, bare: Callable[[str], None]
) -> None:
    """Version 2 after GPTQModel's own step to version 1: one less in every zero point."""
    need("auto_gptq")
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        bare(name)
    qlinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda_old")
    folder, size = written(demo_model, tmp_path / "q", scheme), int(scheme.rpartition("g")[2])
    for name, values, parts in weights(folder):
        layer = qlinear.QuantLinear(4, size, *values.shape[::-1], False, weight_dtype=torch.float32)
        zeros = parts["qzeros"] - (0x11111111 if "v2" in scheme else 0)
        found = {**parts, "qzeros": zeros, "scales": parts["scales"].float()}
        layer.load_state_dict(found)
        judged = layer(torch.eye(values.shape[1])).t()
        np.testing.assert_array_equal(judged.numpy(), values, err_msg=name)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("AWQ")])
def test_autoawq_decodes_it(
    scheme: str, demo_model: Path, tmp_path: Path, bare: Callable[[str], None]
) -> None:
    need("awq")
    bare("awq")
    packing = importlib.import_module("awq.utils.packing_utils")
    folder, size = written(demo_model, tmp_path / "q", scheme), int(scheme.rpartition("g")[2])
    for name, values, parts in weights(folder):
        judged = packing.dequantize_gemm(
            parts["qweight"], parts["qzeros"], parts["scales"], 4, size
        )
        found = values.astype(np.float16)
        np.testing.assert_array_equal(judged.t().numpy(), found, err_msg=name)
