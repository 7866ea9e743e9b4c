"""The adapters of fixtures/adapters, laid out as folders, with what PEFT merged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import aprfmt
from tests.conftest import ROOT

FILE = ROOT / "fixtures" / "adapters" / "peft.safetensors"
EXPERTS = FILE.with_name("peft_experts.safetensors")
EXPERT_CASES = ("apart", "one_of_two", "other_module", "columns_first", "biases_too")
CASES = ("plain", "rank_stabilised", "dora", "patterns", "embedding", "saved", "half")
Tensors = dict[str, Any]


def golden() -> tuple[Tensors, dict[str, str]]:
    """Return the file's tensors as arrays, bfloat16 ones with ml_dtypes, and its metadata."""
    import ml_dtypes

    with aprfmt.open(FILE) as model:
        found = {}
        for name, view in model.items():
            raw = bytes(view.raw())
            kind = np.dtype(ml_dtypes.bfloat16 if view.encoding == "BF16" else np.float32)
            found[name] = np.frombuffer(raw, kind).reshape(view.shape)
        return found, {key: str(value) for key, value in model.metadata.items()}


def part(tensors: Tensors, begin: str) -> Tensors:
    """Return the tensors whose names begin so, without that."""
    return {k.removeprefix(begin): v for k, v in tensors.items() if k.startswith(begin)}


def write(folder: Path, case: str) -> tuple[Path, Path, Tensors]:
    """Write the base's folder and the adapter's; return both, and what PEFT merged."""
    import ml_dtypes

    tensors, said = golden()
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir(parents=True)
    adapter.mkdir()
    own = part(tensors, "base|")
    if case == "half":
        own = {name: value.astype(ml_dtypes.bfloat16) for name, value in own.items()}
    save_file(own, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps(json.loads(said["config"])))
    save_file(part(tensors, f"{case}|adapter|"), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(said[case])
    return base, adapter, part(tensors, f"{case}|merged|")


def expert_golden() -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and the metadata of the file with pairs for single parameters."""
    with aprfmt.open(EXPERTS) as model:
        tensors = {name: view.numpy() for name, view in model.items()}
        return tensors, {key: str(value) for key, value in model.metadata.items()}


def write_experts(folder: Path, case: str) -> tuple[Path, Path, Tensors]:
    """Write the base's folder and the adapter's of a case; return both, and what PEFT merged."""
    tensors, said = expert_golden()
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir(parents=True)
    adapter.mkdir()
    save_file(part(tensors, f"{case}|base|"), base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(said[f"{case}|config"])
    save_file(part(tensors, f"{case}|adapter|"), adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(said[case])
    return base, adapter, part(tensors, f"{case}|merged|")
