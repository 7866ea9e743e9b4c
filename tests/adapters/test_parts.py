"""What stands in an adapter's file beside its factors: said by `inspect`, and held by a merge."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from aprfmt.adapters import merge_answers
from aprfmt.adapters.merging import MergeLoss, loss_notes
from tests.cli.run import aprfmt
from tests.models import save_tiny

PREFIX = "base_model.model."
STRAY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
HELD = 320


def base_folder(folder: Path, *, tied: bool = False) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=HELD, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def adapter_folder(
    folder: Path, whole: Mapping[str, torch.Tensor] | None = None, **config: Any
) -> Path:
    """Write PEFT's folder of an adapter for q_proj, with whole tensors by the base's names."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    held = {}
    for layer in range(2):
        name = f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_"
        held[f"{name}A.weight"] = torch.randn((4, 64), generator=generator) * 0.1
        held[f"{name}B.weight"] = torch.randn((64, 4), generator=generator) * 0.1
    held |= {f"{PREFIX}{name}": tensor for name, tensor in (whole or {}).items()}
    save_file(held, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def merge(base: Path, adapter: Path, out: Path) -> Any:
    return aprfmt("convert", base, out, "--adapter", adapter, "--to", "safetensors")


REFUSED: Mapping[str, Mapping[str, Any]] = {
    "tokens trained alone": {"trainable_token_indices": [1, 2]},
    "biases of the factors": {"lora_bias": True},
    "another method": {"peft_type": "LOHA"},
    "taken out of the base": {"init_lora_weights": "pissa"},
    "DoRA along the other axis": {"use_dora": True, "fan_in_fan_out": True},
}


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_inspect_promises_no_merge_that_is_refused(
    config: Mapping[str, Any], tmp_path: Path
) -> None:
    name = "model.layers.{}.self_attn.q_proj.lora_magnitude_vector"
    lengths = {name.format(layer): torch.ones(64) for layer in range(2)}
    whole = lengths if config.get("use_dora") else {}
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "a", whole, **config)
    done = merge(base, adapter, tmp_path / "out")
    assert done.code == 2
    shown = aprfmt("inspect", adapter, "--json").json["summary"]
    why = done.err.strip().rpartition(".safetensors: ")[2]
    assert why in shown["next"] and "--adapter" not in shown["next"]


@pytest.mark.parametrize("lost", [0, 1])
def test_dora_without_its_lengths_is_no_lora(lost: int, tmp_path: Path) -> None:
    """Seen red: merged as LoRA, without a word."""
    name = "model.layers.{}.self_attn.q_proj.lora_magnitude_vector"
    held = {name.format(1 - lost): torch.ones(64)}
    base = base_folder(tmp_path / "base")
    adapter = adapter_folder(tmp_path / "a", held, use_dora=True)
    done = merge(base, adapter, tmp_path / "out")
    said = f"model.layers.{lost}.self_attn.q_proj has no lora_magnitude_vector"
    assert done.code == 2 and said in done.err and not (tmp_path / "out").exists()
    assert said in aprfmt("validate", adapter).out


def test_inspect_promises_a_merge_that_is_made(tmp_path: Path) -> None:
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "a")
    shown = aprfmt("inspect", adapter, "--json").json["summary"]
    assert "--adapter" in shown["next"] and "--base" in shown["next"]
    assert merge(base, adapter, tmp_path / "out").code == 0
    done = aprfmt("convert", adapter, tmp_path / "a.gguf", "--base", base)
    assert done.code == 0, done.err


TABLES = ("lm_head.weight", "model.embed_tokens.weight")


@pytest.mark.parametrize("rows", [HELD + 4, HELD + 64, HELD - 8])
def test_a_vocabulary_of_another_size_is_merged_into_the_model_that_was_trained(
    rows: int, tmp_path: Path
) -> None:
    """The oracle is the base that transformers resized, with the pairs added."""
    base = base_folder(tmp_path / "base")
    trained = LlamaForCausalLM.from_pretrained(base)
    trained.resize_token_embeddings(rows)
    tables = {name: trained.get_parameter(name).detach().clone() for name in TABLES}
    adapter = adapter_folder(tmp_path / "a", tables)
    own = load_file(adapter / "adapter_model.safetensors")
    for layer, block in enumerate(trained.model.layers):
        name = f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_"
        block.self_attn.q_proj.weight.data += 2 * own[f"{name}B.weight"] @ own[f"{name}A.weight"]
    trained.save_pretrained(tmp_path / "trained")
    done = merge(base, adapter, tmp_path / "out")
    assert done.code == 0, done.err
    assert f"the vocabulary has {rows} rows" in done.err
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("trained", "out"))
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=1e-5, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == rows
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight.shape == (rows, 64)
    for copy, code in (("trained", 0), ("base", 1)):
        assert aprfmt("diff", base, tmp_path / copy, "--adapter", adapter, "--json").code == code


@pytest.mark.parametrize("tied", [True, False])
def test_all_tensors_with_a_row_for_each_token_have_to_come(tied: bool, tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", tied=tied)
    adapter = adapter_folder(tmp_path / "a", {TABLES[1]: torch.ones(HELD + 4, 64)})
    shown = aprfmt("inspect", adapter, "--json").json["summary"]
    assert f"{TABLES[1]} [{HELD + 4}, 64]" in shown["says"]
    assert "--base" not in shown["next"]  # only a merge takes them along
    done = merge(base, adapter, tmp_path / "out")
    if tied:
        assert done.code == 0, done.err
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert found[TABLES[1]].shape == (HELD + 4, 64) and TABLES[0] not in found
    else:
        assert done.code == 2 and f"lm_head.weight would have {HELD}" in done.err, done.err
        assert f"resize_token_embeddings({HELD + 4})" in done.err
        assert not (tmp_path / "out").exists()
    done = aprfmt("convert", adapter, tmp_path / "a.gguf", "--base", base)
    assert done.code == 2 and TABLES[1] in done.err and "only a merge" in done.err


def test_two_tables_of_two_sizes_are_refused(tmp_path: Path) -> None:
    whole = {name: torch.ones(HELD + 4 * at, 64) for at, name in enumerate(TABLES, 1)}
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "a", whole)
    done = merge(base, adapter, tmp_path / "out")
    assert done.code == 2 and f"would have {HELD + 8}" in done.err, done.err


def test_a_gguf_base_keeps_its_vocabulary(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", tied=True)
    adapter = adapter_folder(tmp_path / "a", {TABLES[1]: torch.ones(HELD + 4, 64)})
    assert aprfmt("convert", base, tmp_path / "base.gguf").code == 0
    done = aprfmt("convert", tmp_path / "base.gguf", tmp_path / "o.gguf", "--adapter", adapter)
    assert done.code == 2 and not (tmp_path / "o.gguf").exists(), done.err


def _tokenizer(folder: Path, tokens: int, added: int) -> None:
    vocab = {f"t{i}": i for i in range(tokens - added)}
    rows = [
        {"id": i, "content": f"<a{i}>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i in range(tokens - added, tokens)
    ]  # fmt: skip
    said = {
        "version": "1.0", "added_tokens": rows, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(said))


@pytest.mark.parametrize(("tokens", "code"), [(HELD + 4, 0), (HELD + 2, 0), (HELD + 5, 2)])
def test_the_tokenizer_goes_with_the_rows(tokens: int, code: int, tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base")
    _tokenizer(base, HELD, 0)
    whole = {name: torch.ones(HELD + 4, 64) for name in TABLES}
    adapter = adapter_folder(tmp_path / "a", whole)
    done = merge(base, adapter, tmp_path / "without")
    assert done.code == 0 and "put that of the training there" in done.err, done.err
    _tokenizer(adapter, tokens, tokens - HELD)
    done = merge(base, adapter, tmp_path / "out")
    assert done.code == code, done.err
    if code:
        assert f"has {tokens} tokens" in done.err and not (tmp_path / "out").exists()
        return
    text = (tmp_path / "out" / "tokenizer.json").read_text()
    assert text == (adapter / "tokenizer.json").read_text()


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_pair_for_a_table_that_grew_is_added_to_the_saved_one(
    change: float, tmp_path: Path
) -> None:
    """PEFT saves a resized table under base_layer, where a pair changes it."""
    base = base_folder(tmp_path / "base", tied=True)
    held = load_file(base / "model.safetensors")[TABLES[1]]
    table = torch.cat([held + change, torch.ones(4, 64)])
    module = f"{PREFIX}model.embed_tokens"
    adapter = adapter_folder(tmp_path / "a")
    a, b = torch.randn(4, HELD + 4), torch.randn(64, 4)
    own = load_file(adapter / "adapter_model.safetensors") | {
        f"{module}.base_layer.weight": table,
        f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b,
    }  # fmt: skip
    save_file(own, adapter / "adapter_model.safetensors")
    done = merge(base, adapter, tmp_path / "out")
    if change:
        assert done.code == 2 and "belongs to another base" in done.err, done.err
        return
    assert done.code == 0, done.err
    found = load_file(tmp_path / "out" / "model.safetensors")[TABLES[1]]
    torch.testing.assert_close(found, table + 2 * (b @ a).T, rtol=1e-5, atol=1e-5)


def test_a_table_of_the_same_size_is_merged(tmp_path: Path) -> None:
    base, table = base_folder(tmp_path / "base"), torch.randn(HELD, 64)
    adapter = adapter_folder(tmp_path / "a", {"model.embed_tokens.weight": table})
    assert merge(base, adapter, tmp_path / "out").code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], table)


@pytest.mark.parametrize("tied_in_training", [True, False])
def test_a_table_that_was_trained_alone_does_not_take_the_head_along(
    tied_in_training: bool, tmp_path: Path
) -> None:
    """PEFT wraps what modules_to_save names: the head goes on with the base's table.

    Seen red: the trained table was the head of the merge too, and the merge was "verified".
    """
    base, table = base_folder(tmp_path / "base", tied=True), torch.randn(HELD, 64)
    said = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": tied_in_training}
    adapter = adapter_folder(tmp_path / "a", {TABLES[1]: table}, **said)
    done = merge(base, adapter, tmp_path / "out")
    if tied_in_training:
        assert done.code == 0, done.err
        return
    assert done.code == 2 and "the head stayed as it was" in done.err, done.err
    # The merge that PEFT makes has both tables.
    held = load_file(base / "model.safetensors")
    own = load_file(adapter / "adapter_model.safetensors")
    for layer in range(2):
        name = f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_"
        change = 2 * own[f"{name}B.weight"] @ own[f"{name}A.weight"]
        held[f"model.layers.{layer}.self_attn.q_proj.weight"] += change
    merged = shutil.copytree(base, tmp_path / "merged")
    config = json.loads((merged / "config.json").read_text()) | {"tie_word_embeddings": False}
    (merged / "config.json").write_text(json.dumps(config))
    for head, code in ((held[TABLES[1]], 0), (table, 1)):
        both = held | {TABLES[0]: head.clone(), TABLES[1]: table}
        save_file(both, merged / "model.safetensors")
        done = aprfmt("diff", base, merged, "--adapter", adapter)
        assert done.code == code, done.out + done.err


@pytest.mark.parametrize("trains", ["all", "lora_only"])
def test_biases_that_were_trained_next_to_a_pair_are_merged(trains: str, tmp_path: Path) -> None:
    """PEFT saves them under base_layer. Seen red: "it belongs to another base"."""
    save_tiny("qwen2", tmp_path / "base")
    base, module = tmp_path / "base", "model.layers.0.self_attn.q_proj"
    bias = load_file(base / "model.safetensors")[f"{module}.bias"] + 0.5
    held = load_file(base / "model.safetensors")[f"{module}.weight"]
    adapter = adapter_folder(tmp_path / "a", bias=trains)
    own = {
        f"{PREFIX}{module}.lora_A.weight": torch.ones(4, held.shape[1]) * 0.1,
        f"{PREFIX}{module}.lora_B.weight": torch.ones(held.shape[0], 4) * 0.1,
        f"{PREFIX}{module}.base_layer.bias": bias,
    }
    save_file(own, adapter / "adapter_model.safetensors")
    assert "the base's own" not in aprfmt("inspect", adapter).out
    done = merge(base, adapter, tmp_path / "out")
    assert done.code == 0, done.err
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[f"{module}.bias"], bias)
    assert aprfmt("diff", base, tmp_path / "out", "--adapter", adapter).code == 0
    assert aprfmt("convert", adapter, tmp_path / "a.gguf", "--base", base).code == 2


@pytest.mark.parametrize("same", [True, False])
def test_a_head_for_a_tied_base_is_the_table_or_refused(same: bool, tmp_path: Path) -> None:
    base, table = base_folder(tmp_path / "base", tied=True), torch.randn(HELD, 64)
    head = table.clone() if same else table + 1
    adapter = adapter_folder(
        tmp_path / "a", {"model.embed_tokens.weight": table, "lm_head.weight": head}
    )
    done = merge(base, adapter, tmp_path / "out")
    if not same:
        assert done.code == 2 and "one tensor for both" in done.err, done.err
        return
    assert done.code == 0, done.err
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], table) and "lm_head.weight" not in found


@pytest.mark.parametrize("rows", [HELD, HELD + 8])
@pytest.mark.parametrize("inner", [False, True])
def test_a_trained_pair_of_head_and_table_is_judged_on_a_tied_base(
    inner: bool, rows: int, tmp_path: Path
) -> None:
    """PEFT's modules_to_save of both: a merged model has two tensors where the base has one."""
    base = base_folder(tmp_path / "base", tied=True)
    tables = {name: torch.randn(rows, 64) for name in TABLES}
    whole = dict(tables)
    if inner:  # as peft 0.21 saves them with a resized table
        for name, table in tables.items():
            module = name.removesuffix(".weight")
            whole[f"{module}.modules_to_save.weight"] = table
            whole[f"{module}.original_module.weight"] = torch.zeros(rows, 64)
            whole[name] = table.clone()
    adapter = adapter_folder(tmp_path / "a", whole)
    own = load_file(adapter / "adapter_model.safetensors")
    trained = LlamaForCausalLM.from_pretrained(base)
    trained.config.tie_word_embeddings = False
    trained.resize_token_embeddings(rows)
    trained.lm_head.weight = torch.nn.Parameter(tables[TABLES[0]])
    trained.model.embed_tokens.weight = torch.nn.Parameter(tables[TABLES[1]])
    for layer, block in enumerate(trained.model.layers):
        name = f"{PREFIX}model.layers.{layer}.self_attn.q_proj.lora_"
        block.self_attn.q_proj.weight.data += 2 * own[f"{name}B.weight"] @ own[f"{name}A.weight"]
    trained.save_pretrained(tmp_path / "trained")
    done = aprfmt("diff", base, tmp_path / "trained", "--adapter", adapter)
    assert done.code == 0 and "once" in done.out, done.err + done.out
    held = load_file(tmp_path / "trained" / "model.safetensors")
    held[TABLES[0]] = held[TABLES[0]] + 1
    save_file(held, tmp_path / "trained" / "model.safetensors", {"format": "pt"})
    done = aprfmt("diff", base, tmp_path / "trained", "--adapter", adapter)
    assert done.code == 1 and "output.weight" in done.out, done.out


def _with_stray(path: Path, into: Path, name: str) -> None:
    """Copy a GGUF by gguf's own writer, with one tensor more."""
    import gguf
    import numpy as np

    read = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(into, "llama")
    for key, field in read.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in read.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_tensor_is_named_and_left_out(name: str, tmp_path: Path) -> None:
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "a")
    made = aprfmt("convert", adapter, tmp_path / "ok.gguf", "--base", base)
    assert made.code == 0, made.err
    stray = tmp_path / "stray.gguf"
    _with_stray(tmp_path / "ok.gguf", stray, name)
    assert name in aprfmt("inspect", stray, "--json").json["summary"]["says"]
    found = aprfmt("validate", stray, "--json").json
    (finding,) = [one for one in found["findings"] if name in one["found"]]
    assert found["exit"] == 1
    for path in (stray, tmp_path / "ok.gguf"):
        done = merge(base, path, tmp_path / path.stem)
        assert done.code == 0 and (name in done.err) == (path == stray), done.err
    one, other = (load_file(tmp_path / n / "model.safetensors") for n in ("stray", "ok"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    words = finding["todo"].partition("aprfmt ")[2].replace("OUT", str(tmp_path / "new.gguf"))
    mended = aprfmt(*words.split())
    assert mended.code == 0, mended.err
    assert aprfmt("validate", tmp_path / "new.gguf").code == 0


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_a_whole_tensor_of_a_gguf_is_said_where_llama_cpp_refuses_it(
    name: str, tmp_path: Path
) -> None:
    """Seen red: "not decided", and the advice of a merge that is refused."""
    base, adapter = base_folder(tmp_path / "base"), adapter_folder(tmp_path / "a")
    assert aprfmt("convert", adapter, tmp_path / "ok.gguf", "--base", base).code == 0
    _with_stray(tmp_path / "ok.gguf", tmp_path / "whole.gguf", name)
    shown = aprfmt("inspect", tmp_path / "whole.gguf", "--json").json["summary"]["next"]
    found = aprfmt("validate", tmp_path / "whole.gguf", "--json").json
    refused = name == "token_embd.weight"
    assert ("llama.cpp refuses it" in shown, found["exit"] == 1) == (refused, refused)
    if refused:
        words = shown.partition("aprfmt ")[2].replace("OUT", str(tmp_path / "new.gguf"))
        assert aprfmt(*words.split()).code == 0
        assert aprfmt("validate", tmp_path / "new.gguf").code == 0


def _changed(folder: Path, change: Any) -> Path:
    """Write an adapter whose stored tensors are changed by a function of {name: tensor}."""
    path = adapter_folder(folder) / "adapter_model.safetensors"
    held = load_file(path)
    change(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, path)
    return folder


FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
NO_PAIRS: Mapping[str, tuple[Any, str]] = {
    "placeholders of ZeRO stage 3": (
        lambda held: held.update(dict.fromkeys(held, torch.zeros(0))),
        "factors are [0] and [0]",
    ),
    "flat parts of FSDP": (
        lambda held: held.update({name: one.reshape(-1)[:64] for name, one in held.items()}),
        "a partitioned run (ZeRO stage 3, FSDP) was saved without gathering",
    ),
    "one rank's rows": (
        lambda held: held.update({f"{FIRST}A.weight": held[f"{FIRST}A.weight"][:2]}),
        "factors are [2, 64] and [64, 4]",
    ),
    "a factor alone": (lambda held: held.pop(f"{FIRST}B.weight"), "has no b next to a"),
    "another rank than is said": (
        lambda held: held.update(
            {name: one[:2] if "lora_A" in name else one[:, :2] for name, one in held.items()}
        ),
        "adapter_config.json says rank 4, its factors have 2",
    ),
    "empty factors": (
        lambda held: held.update(
            {name: one[:0] if "lora_A" in name else one[:, :0] for name, one in held.items()}
        ),
        "factors are [0, 64] and [64, 0]",
    ),
}


@pytest.mark.parametrize("case", NO_PAIRS)
def test_factors_that_are_no_pairs_promise_no_merge(case: str, tmp_path: Path) -> None:
    """What a merge refuses, `inspect` does not promise and `validate` does not pass.

    Seen red: "a LoRA adapter of rank 0; merge it into its base", and PASS.
    """
    change, says = NO_PAIRS[case]
    adapter = _changed(tmp_path / "adapter", change)
    shown = aprfmt("inspect", adapter).out
    assert "it can be merged by no program" in shown and says in shown
    assert "of rank 0" not in shown and "merge it into its base" not in shown
    checked = aprfmt("validate", adapter)
    assert checked.code == 1 and says in checked.out
    refused = merge(base_folder(tmp_path / "base"), adapter, tmp_path / "out")
    assert refused.code == 2 and says.partition(";")[0] in refused.err


def test_a_right_adapter_passes(tmp_path: Path) -> None:
    adapter = adapter_folder(tmp_path / "adapter")
    assert aprfmt("validate", adapter).code == 0
    assert "of rank 4" in aprfmt("inspect", adapter).out


@pytest.mark.parametrize("also", [False, True])
def test_weights_of_the_base_beside_the_factors_are_said(also: bool, tmp_path: Path) -> None:
    """As where a state_dict of PEFT's model was saved for the adapter; a merge is the same.

    Seen red: they were "whole", as if the adapter had trained them.
    """
    base = base_folder(tmp_path / "base")
    adapter = adapter_folder(tmp_path / "adapter")
    one = merge(base, adapter, tmp_path / "one")
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    for name, tensor in load_file(base / "model.safetensors").items():
        if "q_proj" in name:
            held[f"{PREFIX}{name.replace('.weight', '.base_layer.weight')}"] = tensor
        elif also:
            held[f"{PREFIX}{name}"] = tensor
    save_file(held, file)
    shown = aprfmt("inspect", adapter).out
    assert "2 of them the base's own (model.layers.0.self_attn.q_proj.base_layer.weight" in shown
    assert ("of them whole" in shown) is also
    other = merge(base, adapter, tmp_path / "other")
    assert (one.code, other.code) == (0, 0)
    mine, theirs = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "other"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_what_stored_types_lose_of_a_merge_is_said_with_the_worst_weight() -> None:
    """The share of all by the root of the squares; the worst by its own share."""
    assert loss_notes([], Path("a")) == ()
    small = MergeLoss("L0.q", ("q",), "BF16", 10, 3, 0, 0.3, 0.5)
    large = MergeLoss("L1.q", ("r",), "F16", 20, 9, 4, 4.0, 12.0)
    for losses in ([small, large], [large, small]):
        (note,) = loss_notes(losses, Path("a"))
        share = (0.3**2 + 4.0**2) ** 0.5 / (0.5**2 + 12.0**2) ** 0.5
        assert (note.level, note.where, note.key) == ("warning", "a", "merge_rounding")
        assert note.text == (
            f"BF16, F16 takes {share:.2g} of the change in 2 weights, 4 of 30 changed values stay "
            "as they were (most in L0.q: 0.6); --encoding F32 holds all of it"
        )
    (note,) = loss_notes([small], Path("a"))
    assert "stay as they were" not in note.text and "in 1 weight (most in L0.q" in note.text


def test_pairs_that_are_all_as_many_layers_off_are_told_together() -> None:
    """Those past the last layer begin again with the first; one pair alone is no rule."""

    def weight(key: str, source: str) -> Any:
        return SimpleNamespace(key=key, source=source)

    def said(*moves: tuple[int, int], more: Any = ()) -> tuple[str, ...]:
        rows = [weight(f"L{to}.attn_q.weight", f"L{own}.attn_q.weight") for own, to in moves]
        found: tuple[str, ...] = merge_answers._layer_offset_text([*rows, *more], 4)
        return found

    own = weight("L0.attn_q.weight", "L0.attn_q.weight")
    other = weight("L0.attn_q.weight", "L1.attn_k.weight")
    head = weight("output.weight", "output.weight")
    assert said((0, 1), (1, 2), more=(own, other, head)) == (
        "the pairs were merged 1 layer too far up: that of layer N into layer N+1 (2 of 5 weights)",
    )
    assert said((2, 0), (3, 1)) == (
        "the pairs were merged 2 layers too far down: that of layer N into layer N-2 (2 of 2 "
        "weights)",
    )
    assert said((0, 1), (1, 2), (3, 0)) == (
        "the pairs were merged 1 layer too far up: that of layer N into layer N+1, counted on from "
        "the other end where there is none (3 of 3 weights)",
    )
    assert said((0, 1)) == said() == said((0, 1), (1, 3)) == ()


def test_a_packed_weight_is_of_the_coarsest_type_that_holds_it() -> None:
    fine, coarse = 1 + 2.0**-10, 1 + 2.0**-7
    for values, dtype in (
        ([1.0, 0.0, -2.0], "BF16"),
        ([coarse, 2.0**100], "BF16"),
        ([fine, 1.0], "F16"),
        ([coarse, fine], "F16"),
        ([fine, 2.0**100], "F32"),
        ([1 + 2.0**-11], "F32"),
    ):
        assert merge_answers._dtype_of_values(np.array([values])) == dtype, values


def test_changes_of_other_layers_come_nearest_first_and_those_of_known_ways_before() -> None:
    keys = {f"L{i}.attn_q.weight": i for i in (0, 1, 2, 4, 7)}
    views: dict[str, Any] = {
        key: SimpleNamespace(shape=(2, 2) if i != 7 else (3, 2), names=(f"t{i}",))
        for key, i in keys.items()
    }
    views |= {"L3.attn_k.weight": views["L0.attn_q.weight"], "output.weight": None}
    model: Any = SimpleNamespace(roles=views, find=views.get)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_answers, "merged_values", lambda view, times: np.full(1, 3.0 * times))
        patch.setattr(
            merge_answers, "OtherChange", lambda key, values: (keys[key], float(values[0]))
        )

        def tried(key: str, *first: int, changed: str = "t0 t1 t2 t4 t7") -> list[Any]:
            rows = merge_answers._changes_of_layers(model, set(changed.split()), key, set(first))
            return [layer for layer, change in rows if change == 3.0]

        assert tried("L2.attn_q.weight") == [1, 0, 4]
        assert tried("L4.attn_q.weight") == [2, 1, 0]
        assert tried("L2.attn_q.weight", -2) == [4, 1, 0]
        assert tried("L2.attn_q.weight", 2, 1) == [1, 0, 4]
        assert tried("L4.attn_q.weight", changed="t0 t4") == [0]
        assert tried("output.weight") == tried("L9.attn_q.weight") == []


def test_a_change_was_moved_by_as_many_layers_as_its_own_is_above() -> None:
    for key, source, moved in (
        ("L4.attn_q.weight", "L3.attn_q.weight", 1),
        ("L1.attn_q.weight", "L3.attn_q.weight", -2),
        ("L4.attn_q.weight", "L3.attn_k.weight", 0),
        ("L0.attn_q.weight", "L0.attn_q.weight", 0),
        ("output.weight", "output.weight", 0),
    ):
        weight: Any = SimpleNamespace(key=key, source=source)
        assert merge_answers._layers_moved(weight) == moved, key
