"""Adapters of a multimodal model: the modules' names in memory are not those of its file.

transformers keeps the text model at `model.language_model.` and published files have it at
`language_model.model.`; PEFT writes the first. Seen red: refused for a name in neither file.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import aprfmt

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TEXT: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 32,
    "query_pre_attn_scalar": 16, "max_position_embeddings": 128,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
SCALE = 2.0


def folders(tmp_path: Path, prefix: str) -> tuple[Path, Path, Path]:
    """Return (base, its merge, adapter); the adapter's modules have names that begin so."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4,
        image_token_index=250, boi_token_index=251, eoi_token_index=252,
    )  # fmt: skip
    base, merged, adapter = (tmp_path / name for name in ("base", "merged", "adapter"))
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    factors = {}
    for name in [name for name in stored if "language_model" in name and "down_proj" in name]:
        a, b = torch.randn(4, 96) * 0.1, torch.randn(64, 4) * 0.1
        module = prefix + name.partition("layers.")[2].removesuffix(".weight")
        factors[f"base_model.model.{module}.lora_A.weight"] = a
        factors[f"base_model.model.{module}.lora_B.weight"] = b
        stored[name] = stored[name] + SCALE * (b @ a)
    shutil.copytree(base, merged)
    save_file(stored, merged / "model.safetensors", {"format": "pt"})
    adapter.mkdir()
    save_file(factors, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    return base, merged, adapter


@pytest.mark.parametrize("prefix", ["model.language_model.layers.", "language_model.model.layers."])
def test_an_adapter_by_either_name_is_merged_once(prefix: str, tmp_path: Path) -> None:
    base, merged, adapter = folders(tmp_path, prefix)
    told = aprfmt("diff", base, merged, "--adapter", adapter)
    assert (told.code, "once (2 weights)" in told.out) == (0, True), told.out + told.err
    made = aprfmt("convert", base, tmp_path / "out", "--to", "safetensors", "--adapter", adapter)
    assert made.code == 0
    again = aprfmt("diff", base, tmp_path / "out", "--adapter", adapter)
    assert (again.code, "once (2 weights)" in again.out) == (0, True)
