"""Packed models of several architectures, with experts: the same as the model of their values."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.dialect_floats import fp8_tensor, nvfp4
from tests.conversion.dialect_folders import Rows, of_inputs, stored_row
from tests.conversion.folders import tensors_of, write_mixed
from tests.models import save_tiny

ARCHS = ("qwen3_moe", "deepseek_v3", "phi3")
KEPT = ("embed", "lm_head", "norm", ".gate.")


def write_both(folder: Path, arch: str) -> tuple[Path, Path]:
    """Write a model in ModelOpt's NVFP4 and FP8, and the same values as F32."""
    packed, plain = folder / "packed", folder / "plain"
    for target in (packed, plain):
        save_tiny(arch, target, "float32")
    rng = np.random.default_rng(0)
    rows: Rows = {}
    values: Rows = {}
    layers = {}
    for name, row in tensors_of(plain).items():
        rows[name] = values[name] = row
        if len(row[1]) != 2 or any(part in name for part in KEPT):
            continue
        make, algorithm = (fp8_tensor, "FP8") if row[1][1] % 16 else (nvfp4, "NVFP4")
        parts, made = make(row[1], rng)
        del rows[name]
        module = name.removesuffix(".weight")
        rows |= {f"{module}.{suffix}": stored_row(x) for suffix, x in parts.items()}
        values[name] = stored_row(made.astype(np.float32))
        layers[module] = {"quant_algo": algorithm}
    write_mixed(packed / "model.safetensors", rows)
    write_mixed(plain / "model.safetensors", values)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("arch", ARCHS)
def test_every_command_sees_the_weights_themselves(arch: str, tmp_path: Path) -> None:
    packed, plain = write_both(tmp_path, arch)
    shown = aprfmt("inspect", packed, "--json").json
    assert shown["ok"] and not shown["unclaimed"]
    assert shown["parameters"] == aprfmt("inspect", plain, "--json").json["parameters"]
    assert aprfmt("diff", packed, plain).code == 0
    assert aprfmt("diagnose", packed, plain, "--json").json["verdict"] == "same"
    made = []
    for source in (packed, plain):
        made.append(tmp_path / f"{source.name}.gguf")
        more = ["--pure", "--allow-requantize", "--quiet"]
        more += [f"--drop={each}" for each in of_inputs(source)]
        done = aprfmt("quantize", source, made[-1], "--type", "Q8_0", *more)
        assert done.code == 0, done.err
    assert aprfmt("diff", *made).code == 0
    traced = aprfmt("trace", packed, "--reference", plain, "--payload", "--ids", "1,5,9")
    assert traced.code == 0, traced.out + traced.err
