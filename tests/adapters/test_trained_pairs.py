"""Gradients of LoRA factors beside a frozen base: against peft, and against the merged weight's.

Seen red, each alone: the scale left out; `b` not taken by the role's rows; the base trained too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.adapters.trained_pairs import trained_pairs
from aprfmt.errors import UnsupportedError
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.batch_gradients import BatchGradients, batch_gradients
from aprfmt.model import open_model
from aprfmt.model.adapter_reading import read_adapter
from tests.inference.gradient_judge import write_batch
from tests.inference.judge import everything_float64
from tests.models import save_tiny

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "gpt_neox": ["query_key_value", "dense"],
    "mamba2": ["in_proj"],
}


def written(folder: Path, name: str, modules: dict[str, tuple[int, int]], **config: Any) -> Path:
    """Write an adapter of rank 3 for these modules (out, in) by hand; no factor is zero."""
    import json

    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    tensors = {}
    for module, (out, width) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = rng.normal(size=(3, width)) / 4
        tensors[f"base_model.model.{module}.lora_B.weight"] = rng.normal(size=(out, 3)) / 4
    folder.mkdir()
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, folder / FILE)
    said = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": TARGETS[name], **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


FILE = "adapter_model.safetensors"


def computed(base: Path, adapter: Path, batch: Path, **how: Any) -> BatchGradients:
    """Return our gradients of the factors."""
    opened, pairs = read_adapter(adapter)
    with opened, open_model(base) as model:
        loaded = read_batch(batch, int(model.hyper["vocab_size"]))
        return batch_gradients(model, loaded, pairs=trained_pairs(pairs, model), **how)


def apart(mine: np.ndarray, other: np.ndarray) -> float:
    """Return the relative L2 distance."""
    assert mine.shape == other.shape
    return float(np.linalg.norm(mine - other) / np.linalg.norm(other))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", TARGETS)
def test_factors_gradients_are_pefts(name: str, dora: bool, tmp_path: Path) -> None:
    """Those of DoRA's lengths too, which are divided by others that are constants.

    Seen red: lengths left out; divided by those of the base alone, or by such with a gradient.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = save_tiny(name, tmp_path / "base").double()
    ids, _, labels = write_batch(tmp_path / "batch.npz", False)
    options: dict[str, Any] = {"fan_in_fan_out": True} if name == "gpt2" else {}
    config = LoraConfig(
        r=3, lora_alpha=7, target_modules=TARGETS[name], init_lora_weights=False, use_dora=dora,
        **options,
    )  # fmt: skip
    tuned: Any = get_peft_model(model, config).double()
    with torch.no_grad():
        for key, p in tuned.named_parameters():
            if "magnitude" in key:  # at first the lengths of the rows as they are
                p.mul_(torch.linspace(0.5, 1.5, p.numel()))
    tuned.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        for parameter in tuned.parameters():  # what is saved is float64 already
            parameter.copy_(parameter.double())
    with everything_float64(model):
        logits = tuned(torch.tensor(ids)).logits[:, :-1].flatten(0, 1)
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)[:, 1:].flatten())
        loss.backward()
    theirs = {
        key.replace(".default.weight" if "magnitude" in key else ".default", ""): p.grad.numpy()
        for key, p in tuned.named_parameters()
        if p.requires_grad
    }
    for how in ({}, {"activations": "layer"}):
        mine = computed(tmp_path / "base", tmp_path / "adapter", tmp_path / "batch.npz", **how)
        assert abs(mine.loss - loss.item()) < 1e-12 and not mine.by_role
        assert mine.adapter.keys() == theirs.keys() and len(theirs) > 3
        for key, expected in theirs.items():
            assert apart(mine.adapter[key], expected) < 1e-9, key


def test_factors_gradients_follow_from_the_merged_weights(tmp_path: Path) -> None:
    """dL/dB = scale * G @ A.T and dL/dA = scale * B.T @ G, G the merged weight's. Needs no peft."""
    import torch

    model: Any = save_tiny("phi3", tmp_path / "base")
    write_batch(tmp_path / "batch.npz", False)
    module = "model.layers.1.self_attn.qkv_proj"
    weight = model.get_parameter(f"{module}.weight")
    adapter = written(tmp_path / "adapter", "phi3", {module: tuple(weight.shape)})
    mine = computed(tmp_path / "base", adapter, tmp_path / "batch.npz")
    from safetensors.numpy import load_file

    a, b = (
        load_file(adapter / FILE)[f"base_model.model.{module}.lora_{x}.weight"].astype(np.float64)
        for x in "AB"
    )
    with torch.no_grad():
        model.double()
        model.get_parameter(f"{module}.weight").add_(torch.from_numpy(2.0 * b @ a))
    model.save_pretrained(tmp_path / "merged")
    with open_model(tmp_path / "merged") as merged:
        batch = read_batch(tmp_path / "batch.npz", int(merged.hyper["vocab_size"]))
        whole = batch_gradients(merged, batch, trained=[f"{module}.weight"])
        gradient = whole.parameters[f"{module}.weight"]
    assert abs(mine.loss - whole.loss) < 1e-12
    key = f"{module}.weight"
    assert set(mine.keys) == {f"{key}.lora_a", f"{key}.lora_b"}
    assert apart(mine.gradient(f"{key}.lora_a"), 2.0 * b.T @ gradient) < 1e-9
    assert apart(mine.gradient(f"{key}.lora_b"), 2.0 * gradient @ a.T) < 1e-9


DEMO = Path(__file__).resolve().parents[2] / "fixtures" / "demo"  # a Qwen2, in bfloat16
# SmolLM2-135M's own widths, heads, base of rope and tied table; four of its 30 layers, and fewer
# tokens.
SMOL: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 4096, "head_dim": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192,
}  # fmt: skip


def plain_base(name: str, folder: Path) -> Path:
    """Write the base of a QLoRA, before it is quantized; return its folder."""
    if name == "demo":
        return DEMO
    sizes = SMOL if name == "smollm2" else {"hidden_size": 64, "intermediate_size": 128}
    save_tiny("llama", folder, tied=name == "smollm2", **sizes)
    return folder


@pytest.mark.parametrize("name", ["llama", "demo", "smollm2"])
def test_the_gradients_of_a_base_in_nf4_are_those_of_bitsandbytes(
    name: str, tmp_path: Path
) -> None:
    """In float64 peft gets the numbers that bitsandbytes decodes, and ours are within 1e-14.

    Its own layers compute in float32. In 12 draws of factors they were 1.6e-6 to 4.1e-6 of a
    gradient from ours, and as far from peft in float64: it is their rounding. Seen red:
    alpha / r 1e-5 too large.
    """
    import bitsandbytes
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = plain_base(name, tmp_path / "plain")
    auto: Any = AutoModelForCausalLM
    plain = auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    quantized: Any = auto.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        attn_implementation="eager",
    )
    quantized.save_pretrained(tmp_path / "base")
    for each, module in quantized.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        if state is not None:
            decoded = bitsandbytes.functional.dequantize_4bit(module.weight.data, state)
            plain.get_submodule(each).weight.data = decoded.double()
    ids, _, labels = write_batch(tmp_path / "batch.npz", False)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=TARGETS["llama"], init_lora_weights=False)
    tuned: Any = get_peft_model(quantized, config)
    tuned.train()  # in eval mode bitsandbytes multiplies in bfloat16 on a CPU
    tuned.save_pretrained(tmp_path / "adapter")
    exact: Any = PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True).double()

    def stepped(model: Any) -> tuple[float, dict[str, np.ndarray]]:
        logits = model(torch.tensor(ids)).logits[:, :-1].flatten(0, 1)
        loss: Any = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)[:, 1:].flatten())
        loss.backward()
        return loss.item(), {
            key.replace(".default", ""): p.grad.double().numpy()
            for key, p in model.named_parameters()
            if p.requires_grad
        }

    own = stepped(tuned)
    with everything_float64(plain):
        true = stepped(exact)
    mine = computed(tmp_path / "base", tmp_path / "adapter", tmp_path / "batch.npz")
    for (loss, theirs), most in ((own, 5e-6), (true, 1e-9)):
        assert abs(mine.loss - loss) < min(most, 1e-6) * loss  # 1.2e-6 is a step of float32 here
        assert mine.adapter.keys() == theirs.keys()
        assert len(theirs) == 6 * plain.config.num_hidden_layers
        for key, expected in theirs.items():
            assert apart(mine.adapter[key], expected) < most, key


def test_lengths_of_other_spellings_and_at_routers_are_refused(tmp_path: Path) -> None:
    """Kohya's may be of the other axis; a router's product is made wider than others."""
    from safetensors.numpy import save_file

    save_tiny("qwen3_moe", tmp_path / "base")
    write_batch(tmp_path / "batch.npz", False)
    modules = {"self_attn.q_proj": "lora_te", "mlp.gate": "base_model.model"}
    for part, begin in modules.items():
        name = f"model.layers.0.{part}"
        with open_model(tmp_path / "base") as model:
            rows, columns = model[f"{name}.weight"].shape
        adapter = written(tmp_path / part, "llama", {name: (rows, columns)}, use_dora=True)
        tensors = {
            f"base_model.model.{name}.lora_A.weight": np.ones((3, columns), np.float32),
            f"base_model.model.{name}.lora_B.weight": np.ones((rows, 3), np.float32),
            f"base_model.model.{name}.lora_magnitude_vector": np.ones(rows, np.float32),
        }
        if begin != "base_model.model":
            short = f"{begin}_{name.replace('.', '_')}"
            tensors = {
                f"{short}.lora_down.weight": np.ones((3, columns), np.float32),
                f"{short}.lora_up.weight": np.ones((rows, 3), np.float32),
                f"{short}.dora_scale": np.ones((rows, 1), np.float32),
            }
            (adapter / "adapter_config.json").unlink()
        save_file(tensors, adapter / FILE)
        with pytest.raises(UnsupportedError, match="DoRA's lengths"):
            computed(tmp_path / "base", adapter, tmp_path / "batch.npz")
