"""A model as MLX's converters store it is the same model: experts, kernels, norms, names.

`_as_mlx` stores what mlx-lm's `sanitize` of each architecture does (models/*.py at d78bf58), from
the weights under Hugging Face's names. Seen red: names of stacked experts left out, norms read as
they are stored, norms read so beside kernels of torch's layout.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aprfmt.arch import ARCHS
from aprfmt.arch.binding import bind_names, logical_shapes
from aprfmt.arch.mlx_layout import mlx_bindings
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.models import save_tiny

Tensors = dict[str, Any]
_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
)


def _stacked(held: Tensors, stack: str, names: Mapping[str, str]) -> Tensors:
    """Return tensors with the experts of each block stacked; `names` are their parts' new ones."""
    import torch

    made, groups = {}, dict[str, list[Any]]()
    for name, tensor in held.items():
        found = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found is None:
            made[name] = tensor
            continue
        key = f"{found[1]}.{stack}.{names.get(found[3], found[3])}.weight"
        groups.setdefault(key, []).append((int(found[2]), tensor))
    for key, each in groups.items():
        made[key] = torch.stack([tensor for _, tensor in sorted(each, key=lambda one: one[0])])
    return made


def _halved(held: Tensors, old: str, stack: str, axis: int, turned: bool = False) -> Tensors:
    """Return tensors with gate and up apart, which `old` and its kin have in one."""
    made = {}
    for name, tensor in held.items():
        if name.endswith(old):
            gate, up = tensor.chunk(2, axis)
            above = name.removesuffix(old)
            for part, half in (("gate_proj", gate), ("up_proj", up)):
                half = half.transpose(1, 2) if turned else half
                made[f"{above}{stack}.{part}.weight"] = half.contiguous()
        else:
            made[name] = tensor
    return made


def _renamed(held: Tensors, pattern: str, new: str, change: Callable[[Any], Any]) -> Tensors:
    return {
        re.sub(pattern, new, name): change(tensor) if re.search(pattern, name) else tensor
        for name, tensor in held.items()
    }


def _kernels(held: Tensors) -> Tensors:
    return {n: t.transpose(1, 2) if "conv" in n and t.ndim == 3 else t for n, t in held.items()}


def _with_ones(held: Tensors, amount: float = 1.0) -> Tensors:
    return {n: t + amount if n.endswith(_NORMS) else t for n, t in held.items()}


def _gpt_oss(held: Tensors) -> Tensors:
    made = {}
    for name, tensor in held.items():
        below, _, part = name.partition(".experts.")
        kind = "bias" if part.endswith("bias") else "weight"
        tensor = tensor.transpose(1, 2) if part and kind == "weight" else tensor
        if part.startswith("gate_up"):
            made[f"{below}.experts.gate_proj.{kind}"] = tensor[:, 0::2]
            made[f"{below}.experts.up_proj.{kind}"] = tensor[:, 1::2]
        elif part:
            made[f"{below}.experts.down_proj.{kind}"] = tensor
        else:
            made[name] = tensor
    return made


def _kv_b(held: Tensors, heads: int, nope: int) -> Tensors:
    made = {}
    for name, tensor in held.items():
        if not name.endswith("kv_b_proj.weight"):
            made[name] = tensor
            continue
        each = tensor.reshape(heads, -1, tensor.shape[1])
        above = name.removesuffix("kv_b_proj.weight")
        made[f"{above}embed_q.weight"] = each[:, :nope].transpose(1, 2)
        made[f"{above}unembed_out.weight"] = each[:, nope:]
    return made


_W = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
AS_MLX: Mapping[str, Callable[[Tensors, Mapping[str, Any]], Tensors]] = {
    "qwen3_moe": lambda t, c: _stacked(t, "switch_mlp", {}),
    "mixtral": lambda t, c: _stacked(t, "switch_mlp", _W),
    "dots1": lambda t, c: _stacked(t, "experts", {}),
    "deepseek_v3": lambda t, c: _kv_b(
        _stacked(t, "switch_mlp", {}), c["num_attention_heads"], c["qk_nope_head_dim"]
    ),
    "qwen3_next": lambda t, c: _with_ones(_kernels(_stacked(t, "switch_mlp", {}))),
    "qwen3_5": lambda t, c: {f"language_model.{n}": x for n, x in _with_ones(_kernels(t)).items()},
    "granitemoe": lambda t, c: _renamed(
        _halved(t, "input_linear.weight", "switch_mlp", 1),
        r"output_linear",
        "switch_mlp.down_proj",
        lambda x: x,
    ),
    "gpt_oss": lambda t, c: _gpt_oss(t),
    "lfm2_moe": lambda t, c: _kernels(
        _renamed(
            _renamed(
                _renamed(_stacked(t, "switch_mlp", _W), r"\.w1\.", ".gate_proj.", lambda x: x),
                r"\.w2\.",
                ".down_proj.",
                lambda x: x,
            ),
            r"\.w3\.",
            ".up_proj.",
            lambda x: x,
        )
    ),
    "nemotron_h_moe": lambda t, c: _kernels(
        _stacked(t, "switch_mlp", {"up_proj": "fc1", "down_proj": "fc2"})
    ),
}


def _folders(arch: str, root: Path) -> tuple[Path, Path, Tensors]:
    """Return a tiny model's folder, another for its copy, and the tensors MLX would store."""
    good, copy = root / "good", root / "mlx"
    save_tiny(arch, good, "bfloat16" if arch in ("qwen3_5", "qwen3_next") else "float32")
    shutil.copytree(good, copy)
    config = json.loads((good / "config.json").read_text())
    held = {name: tensor.float() for name, tensor in load_file(good / "model.safetensors").items()}
    if arch in ("qwen3_5", "qwen3_next"):  # so that 1 + w is exact
        held = {n: t.mul(64).round().div(64) if n.endswith(_NORMS) else t for n, t in held.items()}
        _store(held, good)
    return good, copy, AS_MLX[arch](held, config)


def _store(held: Tensors, folder: Path) -> None:
    tensors = {name: tensor.contiguous().clone() for name, tensor in held.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})


@pytest.mark.parametrize("arch", AS_MLX)
def test_the_same_model_as_mlx_stores_it_is_the_same(arch: str, tmp_path: Path) -> None:
    good, copy, held = _folders(arch, tmp_path)
    _store(held, copy)
    with open_model(good) as a, open_model(copy) as b:
        assert b.relations == () and b.resolution.missing == ()
        assert a.roles.keys() == b.roles.keys() and b.resolution.unclaimed == ()
        for key in a.roles:
            assert (a.roles[key].numpy() == b.roles[key].numpy()).all(), key
    said = aprfmt("diagnose", good, copy, "--json").json
    assert said["verdict"] == "same", said["sentence"]


@pytest.mark.parametrize("amount", [0, 1, 2])
def test_the_one_of_a_norm_is_added_once(amount: int, tmp_path: Path) -> None:
    good, copy, held = _folders("qwen3_5", tmp_path)
    _store(_with_ones(held, amount - 1.0), copy)
    said = aprfmt("diagnose", good, copy, "--json").json
    if amount == 1:
        assert said["verdict"] == "same"
        target = tmp_path / "out.gguf"
        assert aprfmt("convert", copy, target, "--quiet").code == 0
        assert aprfmt("diagnose", good, target, "--json").json["verdict"] == "same"
    else:
        assert said["causes"][0]["cause"] == "norm_offset", said["sentence"]
        assert said["causes"][0]["level"] == "confirmed"


def test_norms_beside_kernels_of_torch_are_read_as_they_are(tmp_path: Path) -> None:
    good, copy, held = _folders("qwen3_5", tmp_path)
    one = next(name for name in held if name.endswith("conv1d.weight"))
    held[one] = held[one].transpose(1, 2)
    _store(held, copy)
    said = aprfmt("diagnose", good, copy, "--json").json
    assert {one["cause"] for one in said["causes"]} == {"norm_offset"}, said["sentence"]


@pytest.mark.parametrize(
    "arch", [name for name in ARCHS if any("_exps." in r.role for r in ARCHS[name].tensors)]
)
def test_every_architecture_with_experts_knows_them_stacked(arch: str) -> None:
    spec = ARCHS[arch]
    rows = mlx_bindings(spec, "hf")
    if not any(
        "experts" in name or "_linear" in name
        for row in spec.bindings.get("hf", ())
        for name in row.stored
    ):
        pytest.skip("has no published names of experts")
    stacked = [row for row in rows if "switch_mlp" in row.stored[0]]
    wanted = {rule.role for rule in spec.tensors if re.search(r"_exps\.(weight|bias)$", rule.role)}
    assert {role for row in stacked for role in row.roles} == wanted
    names = {row.roles[0]: row.stored[0].replace("{L}", "0") for row in stacked}
    bound = bind_names(spec, "hf", names.values())
    assert {key.removeprefix("L0.") for group in bound.groups for key in group.roles} == wanted
    for group in bound.groups:
        assert logical_shapes(group.binding, [(3, 5, 7)], {}) == [(3, 5, 7)]
