"""Adapters in another spelling: the same change of the same weights."""

import json
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.adapters import convert_adapter, convert_merged
from aprfmt.errors import ConversionError, FormatError
from tests.adapters.golden import write
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed

TARGETS = {"gguf": "lora.gguf", "kohya": "lora.safetensors", "peft": "folder"}


@pytest.mark.parametrize(
    ("case", "ways"),
    [
        ("plain", ("gguf", "kohya", "peft")),
        ("rank_stabilised", ("kohya", "peft", "gguf")),
        ("dora", ("kohya", "peft")),
        ("patterns", ("kohya", "peft")),
        ("embedding", ("gguf", "peft")),
    ],
)
def test_through_other_spellings_and_back(case: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Each way from the one before, and the last to PEFT: its factors are those of the first."""
    base, adapter, _ = write(tmp_path, case)
    convert_merged(base, tmp_path / "merged", adapter, to="safetensors")
    last = adapter
    for way in ways:
        out = tmp_path / way / TARGETS[way]
        out.parent.mkdir()
        done = command("convert", last, out, "--base", base, "--json")
        assert done.code == 0 and done.json["counts"]["lossy"] == 0
        assert done.json["verified"] == len(done.json["tensors"])
        into = tmp_path / f"merged-{way}"
        convert_merged(base, into, out, to="safetensors")
        assert aprfmt.diff(tmp_path / "merged", into).equal
        last = out
    convert_adapter(last, tmp_path / "back", base)
    first = {n: row for n, row in tensors_of(adapter).items() if "base_layer" not in n}
    assert tensors_of(tmp_path / "back") == first


def test_a_table_of_tokens_stands_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    """convert_lora_to_gguf.py transposes A; llama-adapter.cpp wants [tokens, r], [size, r]."""
    import gguf

    base, adapter, _ = write(tmp_path, "embedding")
    convert_adapter(adapter, tmp_path / "lora.gguf", base)
    stored = tensors_of(adapter)
    prefix = "base_model.model.model.embed_tokens.lora_embedding"
    a, b = (np.frombuffer(stored[f"{prefix}_{part}"][2], "<f4") for part in "AB")
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "lora.gguf").tensors}
    np.testing.assert_array_equal(found["token_embd.weight.lora_a"], a.reshape(4, 24).T)
    np.testing.assert_array_equal(found["token_embd.weight.lora_b"], b.reshape(32, 4))


def test_kohyas_names_alphas_and_lengths(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "dora")
    convert_adapter(adapter, tmp_path / "lora.safetensors", base)
    with aprfmt.open(tmp_path / "lora.safetensors") as model:
        found = {name: view.shape for name, view in model.items()}
        alpha = model["lora_te_model_layers_0_mlp_up_proj.alpha"].numpy()
    module = "lora_te_model_layers_0_mlp_up_proj"
    ends = {
        "lora_down.weight": (4, 32),
        "lora_up.weight": (40, 4),
        "alpha": (),
        "dora_scale": (40, 1),
    }
    assert {name: found[f"{module}.{name}"] for name in ends} == ends and float(alpha) == 6.0
    assert len(found) == 2 * len(ends)


def test_alphas_that_are_not_one_are_a_pattern(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path, "patterns")
    convert_adapter(adapter, tmp_path / "again", base)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    said = {}
    for name in config["target_modules"]:
        module = f"model.layers.0.self_attn.{name}"
        alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
        said[name] = (config["rank_pattern"].get(module, config["r"]), alpha)
    assert said == {"q_proj": (4, 5), "o_proj": (2, 6)}
    with pytest.raises(ConversionError, match="no one alpha"):
        convert_adapter(adapter, tmp_path / "lora.gguf", base)


def test_what_a_spelling_cannot_say_is_refused(tmp_path: Path) -> None:
    base, adapter, _ = write(tmp_path / "e", "embedding")
    with pytest.raises(ConversionError, match="embedding has no form in kohya's file"):
        convert_adapter(adapter, tmp_path / "lora.safetensors", base)
    with pytest.raises(ConversionError, match=r"written as \.gguf, as \.safetensors"):
        convert_adapter(adapter, tmp_path / "lora.bin", base)
    base, adapter, _ = write(tmp_path / "d", "dora")
    convert_adapter(adapter, tmp_path / "lora.safetensors", base)
    rows = tensors_of(tmp_path)
    name = "lora_te_model_layers_0_mlp_up_proj.dora_scale"
    kind, _, data = rows[name]
    rows[name] = (kind, (1, 32), data[: 32 * 4])  # lengths of columns, as some tools store
    write_mixed(tmp_path / "lora.safetensors", rows)
    with pytest.raises(FormatError, match=r"is \[1, 32\]; expected a length for each of 40 rows"):
        convert_merged(base, tmp_path / "out", tmp_path / "lora.safetensors", to="safetensors")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", ["plain", "dora", "patterns", "embedding"])
def test_peft_merges_what_we_write(case: str, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    base, adapter, expected = write(tmp_path, case)
    between = tmp_path / ("lora.gguf" if case == "embedding" else "lora.safetensors")
    convert_adapter(adapter, between, base)
    convert_adapter(between, tmp_path / "again", base)
    tuned = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "again"
    )
    merged = tuned.merge_and_unload().state_dict()
    assert expected
    for name, values in expected.items():
        np.testing.assert_allclose(merged[name].numpy(), values, rtol=2e-6, atol=2e-6)
