"""A gradient by autograd and by differences of the loss: one accepts what the other accepts."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step

SIZES: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
DELTA = {
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
LATENT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 24,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("Qwen3NextConfig", SIZES | DELTA),
    "latent": ("DeepseekV3Config", LATENT),
    "mamba": ("MambaConfig", {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2,
                              "state_size": 8}),
}  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-both-ways-")


@cache
def made(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Return a folder with a random model and a batch, and transformers' float32 gradients."""
    folder = Path(_FOLDER.name) / name
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    ids = torch.randint(5, 120, (2, 24))
    np.savez(folder / "batch.npz", input_ids=ids.numpy(), labels=ids.numpy())
    model(input_ids=ids, labels=ids).loss.backward()
    grads = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
    return folder, grads


def report_of(name: str, folder: Path, differences: bool, **changed: torch.Tensor) -> StepReport:
    """Return what is said of a model's gradients; `changed` by the gradients' names."""
    path, grads = made(name)
    save_file({**grads, **changed}, folder / "grads.safetensors")
    return explain_step(
        path,
        grads=[folder / "grads.safetensors"],
        batch=path / "batch.npz",
        differences=differences,
    )


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_float32_gradients_agree_both_ways(name: str, differences: bool, tmp_path: Path) -> None:
    """Seen red: A_log of a delta net, whose small gradient float32 rounds by 0.5 %, by differences.

    And a model of DeepSeek left open by its experts' biases, which no gradient moves.
    """
    report = report_of(name, tmp_path, differences)
    wrong = [(row.key, row.why) for row in report.tensors if row.verdict != "agrees"]
    assert report.exit_code == 0 and not report.causes, wrong


@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("change", ["zero", "turned", "twice"])
def test_a_wrong_gradient_of_that_size_differs_both_ways(
    change: str, differences: bool, tmp_path: Path
) -> None:
    name = "model.layers.1.linear_attn.A_log"
    right = made("delta")[1][name]
    other = {"zero": right * 0, "turned": right.flip(0), "twice": right * 2}[change].contiguous()
    report = report_of("delta", tmp_path, differences, **{name: other})
    assert report.exit_code == 1
    assert [row.key for row in report.tensors if row.verdict == "differs"] == ["L1.ssm_a.weight"]
