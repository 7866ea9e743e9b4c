"""Which group a module belongs to, against compressed-tensors applying the same section."""

import itertools
from typing import Any

import pytest

from aprfmt.codecs.scopes import section_at

why = "NOT-RUN: compressed-tensors is not installed"
quantization: Any = pytest.importorskip("compressed_tensors.quantization", reason=why)
torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

TARGETS = ["Linear", "Embedding", "re:.*self_attn.*", r"re:model\.layers\.\d\.mlp\.(gate|up)_proj",
           "re:.*experts.*down_proj$", "model.layers.1.mlp.up_proj", "re:.*_proj",
           "model.layers.0.self_attn.q_proj", "re:^(?!.*experts).*down_proj$"]  # fmt: skip
IGNORED: list[list[str]] = [
    [], ["lm_head"], ["re:.*q_proj$", "lm_head"], ["re:.*layers.1.*"], ["Embedding", "lm_head"],
]  # fmt: skip


def tiny() -> Any:
    nn = torch.nn

    def named(**parts: Any) -> Any:
        module = nn.Module()
        for name, part in parts.items():
            module.add_module(name, part)
        return module

    def linear() -> Any:
        return nn.Linear(4, 4, bias=False)

    def mlp() -> Any:
        return named(gate_proj=linear(), up_proj=linear(), down_proj=linear())

    layers = [
        named(
            self_attn=named(q_proj=linear(), o_proj=linear()),
            mlp=mlp() if at else named(gate=linear(), experts=nn.ModuleList([mlp(), mlp()])),
        )
        for at in range(2)
    ]
    model = named(embed_tokens=nn.Embedding(4, 4), layers=nn.ModuleList(layers))
    return named(model=model, lm_head=linear())


@pytest.mark.parametrize("ignored", IGNORED, ids=["+".join(names) or "none" for names in IGNORED])
def test_modules_have_the_groups_the_library_gives_them(ignored: list[str]) -> None:
    for pair in itertools.combinations(TARGETS, 2):
        groups = {
            f"group_{bits}": {
                "targets": [target],
                "format": "int-quantized",
                "weights": {"num_bits": bits, "type": "int"},
            }
            for bits, target in zip((4, 8), pair, strict=True)
        }
        section = {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": groups,
            "ignore": ignored,
        }
        model = tiny()
        config = quantization.QuantizationConfig(config_groups=groups, ignore=ignored)
        quantization.apply_quantization_config(model, config)
        for name, module in model.named_modules():
            if not hasattr(module, "weight"):
                continue
            scheme = getattr(module, "quantization_scheme", None)
            said = section_at(section, name)
            bits = None if scheme is None else scheme.weights.num_bits
            (group,) = said["config_groups"].values() if said else (None,)
            assert (group and group["weights"]["num_bits"]) == bits, (pair, ignored, name)
