"""Hyperparameters: old and new spellings, what the tensors say, what a foreign file leaves out."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.arch import ARCHS, arch_names, ernie_moe, gemma3n, gemma4, rope_sections
from aprfmt.arch.hyperparameters import (
    derived_tensors,
    expected_losses,
    inexpressible_names,
    read_back_hyper,
    read_hyper,
    write_hyper,
)
from aprfmt.arch.rope_gguf import UNTURNED
from aprfmt.arch.rope_hf import HFRope, RopeDefaults
from aprfmt.arch.spec import (
    CARRIED,
    HYPER_NAMES,
    MISSING,
    SPECIAL_NAMES,
    Facts,
    HyperParam,
    HyperParams,
)
from aprfmt.arch.value_checks import inverse, nearest_float32, same_value, shortest_decimal
from aprfmt.errors import ArchError
from aprfmt.model.resolve import read_missing_as_default, reconcile_hyperparameters
from tests.approved import check
from tests.arch.tiny import SIZES, TINY, Tiny, as_file, make, read

LLAMA = {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 50000.0}


def hf(arch: str, config: dict[str, Any]) -> HyperParams:
    return read_hyper(ARCHS[arch], Facts("hf", config, {}), "config.json")[0]


# Keys of APR by which realizar finds a hyperparameter, its own first (its `GgufToAprMetadata`).
REALIZAR = {
    "hidden_size": ("hidden_size", "hidden_dim", "d_model", "n_embd"),
    "n_layers": ("num_layers", "n_layers", "num_hidden_layers", "n_layer"),
    "n_heads": ("num_heads", "n_heads", "num_attention_heads", "n_head"),
    "n_kv_heads": ("num_kv_heads", "n_kv_heads", "num_key_value_heads"),
    "vocab_size": ("vocab_size", "n_vocab"),
    "ffn_size": ("intermediate_size", "ffn_dim", "intermediate_dim", "n_inner"),
    "context_length": ("max_position_embeddings", "max_seq_len", "context_length", "n_ctx"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "norm_eps"),
}
VALUES = {
    "hidden_size": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96,
    "ffn_size": 48, "context_length": 128, "norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize("name", REALIZAR)
def test_every_name_that_realizar_reads_is_read(name: str) -> None:
    """Each alone, behind a null under its own name, and the first of several."""
    own = {keys[0]: VALUES[key] for key, keys in REALIZAR.items() if key != name}
    canonical = REALIZAR[name][0]
    for key in REALIZAR[name]:
        for values in ({key: VALUES[name]}, {canonical: None, key: VALUES[name]}):
            facts = Facts("apr", {**own, **values}, {})
            assert read_hyper(ARCHS["llama"], facts, "m.apr")[0][name] == VALUES[name], key
        both = {**own, key: VALUES[name] * 2, canonical: VALUES[name]}
        found, _ = read_hyper(ARCHS["llama"], Facts("apr", both, {}), "m.apr")
        assert found[name] == VALUES[name], key


@pytest.mark.parametrize(
    ("ratios", "shapes", "says"),
    [
        ([0, 4, 128, 4], True, None),
        ([0, 4, 128, 8], True, "layers of one kind have the ratios [8, 128]"),
        ([0, 4, 128, 8], False, None),  # a header alone: no tensor says which layers are which
        ([0, 4, 4, 16], True, "layers of one kind have the ratios [4, 16]"),
    ],
)
def test_layers_of_one_kind_have_one_ratio(
    ratios: list[int], shapes: bool, says: str | None
) -> None:
    """The layers with an indexer are a kind, the others with a ratio are another."""
    rules = {rule.name: rule for rule in ARCHS["deepseek_v4"].hyper}
    stored: dict[str, tuple[int, ...]] = {"L1.indexer.proj.weight": (4, 4)}
    if ratios[3] == 4:
        stored["L3.indexer.proj.weight"] = (4, 4)
    values = {"deepseek4.attention.compress_ratios": ratios}
    facts = Facts("gguf", values, stored if shapes else {}, arch_key="deepseek4")
    hp = {"n_layers": 4}
    made = [rules[name].read["gguf"] for name in ("sparse_rate", "heavy_rate")]
    if says is not None:
        with pytest.raises(ArchError, match="^" + re.escape(f"{next(iter(values))}: {says}")):
            [rule(facts, hp) for rule in made]
        return
    key = "deepseek4.attention.compress_ratios"
    heavy = min(ratio for ratio in ratios if ratio not in (0, 4))
    assert [rule(facts, hp) for rule in made] == [(4, key), (heavy, key)]


@pytest.mark.parametrize("stored", [None, (0,), (2,)])
def test_kinds_of_layers_are_read_from_ratios_and_what_is_stored(stored: Any) -> None:
    """Ratio 0 is a window; where the indexer's tensors are there they say the layers, else 4."""
    rules = {rule.name: rule for rule in ARCHS["deepseek_v4"].hyper}
    key = "deepseek4.attention.compress_ratios"
    shapes = {f"L{layer}.indexer.proj.weight": (4, 4) for layer in stored or ()}
    facts = Facts("gguf", {key: [8, 0, 4, 128, 0]}, shapes, arch_key="deepseek4")
    indexed = set(stored or (2,))
    layers = {"window_layers": {1, 4}, "index_layers": indexed, "heavy_layers": {0, 2, 3} - indexed}
    for name, which in layers.items():
        found = rules[name].read["gguf"](facts, {"n_layers": 5})
        assert found == (tuple(layer in which for layer in range(5)), key), name


def test_every_table_gives_every_hyperparameter() -> None:
    for name in arch_names():
        rules = tuple(rule.name for rule in ARCHS[name].hyper)
        assert rules[: len(HYPER_NAMES)] == tuple(HYPER_NAMES)
        assert set(rules[len(HYPER_NAMES) :]) <= set(SPECIAL_NAMES)


def worse(value: Any) -> list[Any]:
    """Return values that a damaged or foreign file may have in place of one."""
    made: list[Any] = [None, "x", -1, True, [1], {}]
    if isinstance(value, list) and value:
        made += [value[:-1], value[::-1], [*value[:-1], 7], [*value, *value]]
    elif isinstance(value, int | float) and value is not True:
        made += [value + 1, 0]
    return made


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_a_wrong_value_is_read_or_refused_by_the_name_of_a_key(tiny: Tiny) -> None:
    """No other error, and no message or report with the tables' own spelling of a key."""
    found = read(tiny)
    tried = refused = 0
    for style in ("gguf", "hf", "apr"):
        facts = as_file(found, style, dict(write_hyper(found.spec, found.hp, style)))
        for key, value in facts.values.items():
            for bad in worse(value):
                tried += 1
                damaged = replace(facts, values={**facts.values, key: bad})
                try:
                    _, report = read_hyper(found.spec, damaged, "m")
                except ArchError as error:
                    refused += 1
                    assert "{" not in str(error).replace("is {}", ""), (key, bad)
                else:
                    assert "{arch}" not in repr(report), (key, bad)
    assert 0 < refused < tried


# Architectures whose keys are written by rules of their own.
WRITTEN = (
    "bamba",
    "deepseek_v3",
    "deepseek_v4",
    "falcon",
    "falcon_h1",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt2",
    "gpt_oss",
    "granite_hybrid",
    "kimi_linear",
    "lfm2",
    "llama4",
    "mamba2",
    "minimax",
    "minimax_m3_vl",
    "mpt",
    "nemotron_h",
    "olmo_hybrid",
    "opt",
    "qwen3_next",
)


def test_the_keys_of_every_style_are_those_that_were_approved() -> None:
    """A line for each key and value, with the architectures that have it; what a style loses."""
    lines: dict[str, list[str]] = {}
    for arch in WRITTEN:
        spec, hp = read(LAYERED[arch]).spec, read(LAYERED[arch]).hp
        prefix = (spec.called.get("gguf") or ("",))[0] + "."
        for style in ("gguf", "hf", "apr"):
            for key, value in write_hyper(spec, hp, style).items():
                line = f"{style} {key.removeprefix(prefix)}: {json.dumps(value)}"
                lines.setdefault(line, []).append(arch)
            for name, values in derived_tensors(spec, hp, style).items():
                line = (
                    f"{style} tensor {name}: {len(values)} from {values[0]:.6g} to {values[-1]:.6g}"
                )
                lines.setdefault(line, []).append(arch)
            for loss in expected_losses(spec, hp, style):
                lines.setdefault(f"{style} loses {loss.name}: {loss.consequence}", []).append(arch)
    told = [f"{line} ({' '.join(whose)})" for line, whose in lines.items()]
    check(Path(__file__).parent / "answers" / "keys.txt", "\n".join(sorted(told)))


# What the defaults of other hyperparameters are computed from.
READ_BEFORE: dict[str, Any] = {
    "n_layers": 6,
    "hidden_size": 60,
    "n_heads": 20,
    "n_kv_heads": 4,
    "head_dim": 10,
    "ffn_size": 96,
    "vocab_size": 100,
    "n_experts": 12,
    "n_experts_used": 3,
    "moe_ffn_size": 24,
    "rope_dim": 6,
    "rope_theta": 5e4,
    "sliding_window": 7,
    "norm_eps": 1e-4,
    "context_length": 50,
    "ssm_state": 11,
    "ssm_heads": 9,
    "ssm_head_dim": 13,
    "ssm_groups": 3,
    "dense_layers": 2,
}


def test_what_is_taken_where_no_key_says_it_is_as_approved() -> None:
    """A line for each default, with the architectures that have it; most have the first."""
    told: dict[str, dict[str, list[str]]] = {}
    specs = {name: ARCHS[name] for name in arch_names()}
    for arch, spec in sorted(specs.items()):
        for rule in spec.hyper:
            for style, default in (("", rule.default), *rule.default_in.items()):
                if default is MISSING:
                    continue
                try:
                    value = json.dumps(default(READ_BEFORE) if callable(default) else default)
                except KeyError as error:
                    value = f"of {error.args[0]}"
                name = f"{rule.name} in {style}" if style else rule.name
                told.setdefault(name, {}).setdefault(value, []).append(arch)
    lines = []
    for name, values in sorted(told.items()):
        usual, *others = sorted(values.items(), key=lambda one: -len(one[1]))
        many = len(usual[1]) > len(specs) / 2
        lines.append(f"{name}: {usual[0]} ({'most' if many else ' '.join(usual[1])})")
        lines += [f"{name}: {value} ({' '.join(whose)})" for value, whose in others]
    check(Path(__file__).parent / "answers" / "defaults.txt", "\n".join(lines))


# Which layers are of a kind: (style, name) -> the architectures whose keys say any pattern.
FLAGS: dict[tuple[str, str], str] = {
    ("hf", "window_layers"): """cohere2 dots1 exaone4 exaone_moe gemma2 gemma3 gemma3n gpt_oss
        llama4 ministral modernbert olmo3""",
    ("gguf", "window_layers"): """cohere2 dots1 exaone4 exaone_moe gemma2 gemma3 gemma3n gemma4
        gpt_oss llama4 ministral mistral modernbert olmo3 starcoder2""",
    ("hf", "moe_layers"): """deepseek_v32 ernie4_5_moe exaone_moe glm4_moe_lite glm_moe_dsa hy_v3
        kimi_linear llama4 minimax_m3_vl qwen2_moe qwen3_moe qwen3_next""",
    ("gguf", "moe_layers"): "nemotron_h_moe",
    ("hf", "attention_layers"): "bamba granite_hybrid nemotron_h",
    ("gguf", "attention_layers"): "bamba granite_hybrid lfm2 nemotron_h",
    ("hf", "delta_layers"): "kimi_linear olmo_hybrid qwen3_5 qwen3_next",
    ("gguf", "delta_layers"): "kimi_linear",
    ("hf", "index_layers"): "glm_moe_dsa minimax_m3_vl",
    ("gguf", "index_layers"): "deepseek_v4 glm_moe_dsa",
    ("hf", "conv_layers"): "lfm2 lfm3",
    ("hf", "rope_layers"): "llama4 smollm3",
    ("hf", "heavy_layers"): "deepseek_v4",
    ("hf", "hash_layers"): "deepseek_v4",
    ("hf", "lightning_layers"): "minimax",
    ("gguf", "lightning_layers"): "minimax",
    ("gguf", "wide_layers"): "gemma4",
    ("gguf", "mlp_layers"): "nemotron_h",
}
MODERNBERT = {**SIZES, "norm_eps": 1e-5, "local_attention": 8}
LAYERED = {tiny.arch: tiny for tiny in reversed(TINY)}


@pytest.mark.parametrize(("style", "name"), FLAGS)
def test_which_layers_are_of_a_kind_comes_back_whatever_the_pattern(style: str, name: str) -> None:
    """One layer otherwise than in the model, and every layer otherwise: no step makes that."""
    for arch in FLAGS[style, name].split():
        own = hf(arch, MODERNBERT) if arch == "modernbert" else read(LAYERED[arch]).hp
        flags, middle = own[name], own["n_layers"] // 2
        one = tuple(on is (i != middle) for i, on in enumerate(flags))
        for pattern in (one, tuple(not on for on in flags)):
            hp = own.with_values(**{name: pattern})
            assert read_back_hyper(ARCHS[arch], hp, style)[name] == pattern, (arch, pattern)


# Numbers that a style stores in a form of its own -> architectures whose keys say any of them.
NUMBERS: dict[tuple[str, str], str] = {
    ("hf", "altup_streams"): "gemma3n", ("gguf", "altup_streams"): "gemma3n",
    ("hf", "attn_scale"): "gemma3 gpt2 gpt_bigcode mpt", ("gguf", "attn_scale"): "llama mpt",
    ("hf", "conv_taps"): "kimi_linear", ("gguf", "delta_value_dim"): "qwen3_5 qwen3_next",
    ("hf", "embedding_width"): "opt_350m", ("hf", "ffn_down_scale"): "falcon_h1",
    ("hf", "ffn_gate_scale"): "falcon_h1", ("hf", "ffn_size"): "lfm2",
    ("gguf", "ffn_size"): "gemma4 nemotron_h", ("gguf", "global_head_dim"): "gemma4",
    ("gguf", "global_kv_heads"): "gemma4", ("gguf", "head_dim"): "deepseek_v3 gemma4",
    ("hf", "heavy_rate"): "deepseek_v4", ("gguf", "heavy_rate"): "deepseek_v4",
    ("hf", "index_block"): "minimax_m3_vl", ("hf", "index_head_dim"): "minimax_m3_vl",
    ("hf", "index_heads"): "minimax_m3_vl", ("hf", "index_local_blocks"): "minimax_m3_vl",
    ("hf", "index_topk"): "minimax_m3_vl", ("gguf", "moe_ffn_size"): "nemotron_h_moe",
    ("hf", "n_kv_heads"): "falcon falcon_40b", ("gguf", "n_kv_heads"): "bamba gemma4 lfm2",
    ("gguf", "norm_eps"): "nemotron_h", ("hf", "position_offset"): "roberta_causal",
    ("hf", "qk_nope_head_dim"): "deepseek_v2 deepseek_v3 kimi_linear", ("hf", "qkv_clip"): "mpt",
    ("hf", "rope_dim"): "bamba deepseek_v4 glm4 gpt_neox gptj phi2 phi3 qwen3_next stablelm",
    ("hf", "rope_theta"): "gemma3n granite_hybrid llama olmoe qwen3_5",
    ("hf", "rope_theta_local"): "deepseek_v4 gemma3 gemma4 lfm3",
    ("hf", "shared_ffn_size"): "deepseek_v3 ernie4_5_moe glm4_moe hy_v3 kimi_linear",
    ("gguf", "shared_ffn_size"): "deepseek_v3 deepseek_v4 ernie4_5_moe glm4_moe",
    ("hf", "sliding_window"): "gemma2 gpt_oss llama4 mistral olmo3 starcoder2",
    ("gguf", "sliding_window"): "gemma2 gpt_oss mistral olmo3 starcoder2",
    ("hf", "sparse_rate"): "deepseek_v4", ("hf", "ssm_size"): "bamba falcon_h1 mamba mamba2",
    ("hf", "ssm_step_low"): "falcon_h1 mamba2", ("gguf", "swiglu_limit"): "deepseek_v4",
    ("hf", "temperature_length"): "llama4", ("hf", "temperature_scale"): "llama4 ministral3",
    ("gguf", "value_head_dim"): "deepseek_v3 kimi_linear",
}  # fmt: skip


@pytest.mark.parametrize(("style", "name"), NUMBERS)
def test_a_number_that_a_style_stores_in_its_own_form_comes_back(style: str, name: str) -> None:
    """Twice the model's own: no default, and none that other keys say."""
    for arch in NUMBERS[style, name].split():
        own = read(LAYERED[arch]).hp
        other = 2 * own[name] or 0.5
        hp = own.with_values(**{name: other})
        back = read_back_hyper(ARCHS[arch], hp, style)[name]
        assert same_value(back, other), (arch, own[name], back)


# --- old and new spellings of the rotary positions ---------------------------------------------

OLD_AND_NEW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {"rope_theta": 7000.0, "rope_scaling": None},
              {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}),
    "linear": ("llama", {"rope_theta": 7000.0, "rope_scaling": {"type": "linear", "factor": 4}},
               {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7000.0}}),
    "dynamic": ("llama", {"rope_theta": 7e3, "rope_scaling": {"type": "dynamic", "factor": 2}},
                {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7e3}}),
    "partial": ("phi2", {"rope_theta": 7000.0, "partial_rotary_factor": 0.4},
                {"rope_parameters": {"rope_theta": 7000.0, "partial_rotary_factor": 0.4}}),
    "phi3": ("phi3", {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5]},
    }, {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5],
            "long_factor": [2.0, 3.5], "original_max_position_embeddings": 64,
        },
    }),
    "gemma3": ("gemma3", {
        "rope_theta": 2e6, "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }, {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        },
    }),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD_AND_NEW)
def test_old_and_new_rope_keys_say_the_same(case: str) -> None:
    arch, old, new = OLD_AND_NEW[case]
    a, b = hf(arch, {**SIZES, **old}), hf(arch, {**SIZES, **new})
    assert dict(a) == dict(b)


@pytest.mark.parametrize("case", OLD_AND_NEW)
def test_transformers_reads_the_old_keys_alike(case: str) -> None:
    """transformers turns the old keys into the new ones; both give our hyperparameters."""
    from transformers import AutoConfig

    arch, old, _ = OLD_AND_NEW[case]
    model_type = next(tiny.model_type for tiny in TINY if tiny.arch == arch)
    config = AutoConfig.for_model(model_type, **{**SIZES, **copy.deepcopy(old)})
    standard = hf(arch, config.to_dict())
    ours = hf(arch, {**SIZES, **old})
    for name in HYPER_NAMES:
        if name.startswith("rope"):
            assert ours[name] == standard[name], name


def test_phi3s_trained_length_is_4096_unless_the_top_level_says() -> None:
    """transformers lets its own default override the rope object."""
    from transformers import AutoConfig

    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.5],
            "original_max_position_embeddings": 64}  # fmt: skip
    sizes = {**SIZES, "max_position_embeddings": 8192}
    theirs = AutoConfig.for_model("phi3", **sizes, rope_parameters=dict(rope)).rope_parameters
    ours = hf("phi3", {**sizes, "rope_parameters": rope})["rope_scaling"]
    assert ours["original_context_length"] == theirs["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_old_names_of_longrope(old_name: str) -> None:
    _, old, new = OLD_AND_NEW["phi3"]
    old = {**old, "rope_scaling": {**old["rope_scaling"], "type": old_name}}
    assert dict(hf("phi3", {**SIZES, **old})) == dict(hf("phi3", {**SIZES, **new}))


@pytest.mark.parametrize(
    ("low", "high"), [(None, None), (1.0, None), (None, 4.0), (4.0, 4.0)], ids=str
)
def test_llama3_scaling_needs_two_different_bounds(low: float | None, high: float | None) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
    bounds = {"low_freq_factor": low, "high_freq_factor": high}
    config = {**LLAMA, "rope_scaling": rope | {k: v for k, v in bounds.items() if v is not None}}
    with pytest.raises(ArchError, match=f"low_freq_factor {low}, high_freq_factor {high}; expect"):
        hf("llama", config)


OTHER_FORMS: dict[str, Any] = {
    "do_layer_norm_before": False, "_remove_final_layer_norm": True,
    "layer_norm_elementwise_affine": False, "word_embed_proj_dim": 7,
}  # fmt: skip


@pytest.mark.parametrize("key", OTHER_FORMS)
def test_forms_of_opt_that_are_not_known_are_refused(key: str) -> None:
    config = make(next(tiny for tiny in TINY if tiny.arch == "opt")).config
    hf("opt", config)
    with pytest.raises(ArchError, match=f"{key}: is {OTHER_FORMS[key]}"):
        hf("opt", {**config, key: OTHER_FORMS[key]})


def test_opts_projections_beside_norms_before_are_refused() -> None:
    config = make(next(tiny for tiny in TINY if tiny.arch == "opt_350m")).config
    assert hf("opt_350m", config)["embedding_width"] == 16
    with pytest.raises(ArchError, match="do_layer_norm_before: is True; expected False"):
        hf("opt_350m", {**config, "do_layer_norm_before": True})


@pytest.mark.parametrize("key", ["norm_bias", "attention_bias", "mlp_bias"])
def test_modernbert_with_biases_is_refused(key: str) -> None:
    """Its embedding came out without them."""
    config = {"hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3,
              "intermediate_size": 50, "vocab_size": 57, "norm_bias": False}  # fmt: skip
    read_hyper(ARCHS["modernbert"], Facts("hf", config, {}), "config.json")
    with pytest.raises(ArchError, match=f"{key}: is True; expected False"):
        read_hyper(ARCHS["modernbert"], Facts("hf", config | {key: True}, {}), "config.json")


def test_nested_text_config_is_read() -> None:
    text = {"hidden_size": 24, "num_hidden_layers": 3, "rope_scaling": None, "sliding_window": 9}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 99}}
    hp, report = read_hyper(ARCHS["gemma3"], Facts("hf", config, {}), "config.json")
    assert (hp["hidden_size"], hp["n_layers"], hp["n_heads"]) == (24, 3, 8)
    assert report.read["text_config.hidden_size"] == "hidden_size"
    assert hp.of("n_heads").origin == "default"
    assert "n_heads" in report.defaulted
    assert report.unknown == ()
    assert "vision_config" in report.ignored


def test_unknown_keys_are_named_nested_ones_too() -> None:
    config = {**LLAMA, "mystery": 1, "rope_scaling": {"type": "linear", "factor": 2, "odd": 3}}
    report = read_hyper(ARCHS["llama"], Facts("hf", config, {}), "config.json")[1]
    assert set(report.unknown) == {"mystery", "rope_scaling.odd"}


# --- what the tensors say -----------------------------------------------------------------------


def test_tensors_win_over_flags_and_the_conflict_is_told() -> None:
    shapes = {"token_embd.weight": (50, 24), "L0.attn_q.bias": (24,), "L3.ffn_up.weight": (40, 24)}
    config = {**LLAMA, "attention_bias": False, "tie_word_embeddings": False}
    hp, report = read_hyper(ARCHS["llama"], Facts("hf", config, shapes), "config.json")
    assert hp["attention_bias"] is True
    assert hp["tied_embeddings"] is True
    assert hp["vocab_size"] == 50
    assert [conflict.text.split()[0] for conflict in report.conflicts] == [
        "vocab_size", "tie_word_embeddings", "attention_bias",
    ]  # fmt: skip


def test_a_key_wins_over_a_shape_and_the_conflict_is_told() -> None:
    shapes = {"token_embd.weight": (56, 30)}
    hp, report = read_hyper(ARCHS["llama"], Facts("hf", LLAMA, shapes), "config.json")
    assert (hp["hidden_size"], hp.of("hidden_size").origin) == (24, "config")
    assert any("30" in one.text and "the key is believed" in one.text for one in report.conflicts)


def test_sizes_without_a_key_come_from_the_tensors() -> None:
    shapes = {"token_embd.weight": (50, 24), "L0.ffn_up.weight": (40, 24), "L6.attn_q.weight": ()}
    values = {
        "llama.attention.head_count": 6,
        "llama.context_length": 9,
        "llama.attention.layer_norm_rms_epsilon": nearest_float32(1e-5),
    }
    hp, report = read_hyper(ARCHS["llama"], Facts("gguf", values, shapes), "x.gguf")
    for name, value in {"vocab_size": 50, "hidden_size": 24, "n_layers": 7, "ffn_size": 40}.items():
        assert (hp[name], hp.of(name).origin) == (value, "shape")
    assert hp["norm_eps"] == 1e-5
    assert "head_dim" in report.defaulted


def test_apr_aliases_and_null() -> None:
    values = {
        "hidden_size": None,
        "d_model": 24,
        "n_layer": 3,
        "num_heads": 6,
        "n_heads": 5,
        "num_kv_heads": None,
        "vocab_size": 56,
        "intermediate_size": 40,
        "rope_type": 0,
        "model_type": "Llama",
        "tokenizer.model": "gpt2",
        "mystery": True,
    }
    facts = Facts("apr", values, {}, names="hf")
    hp, report = read_hyper(ARCHS["llama"], facts, "x.apr")
    assert [hp[n] for n in ("hidden_size", "n_layers", "n_heads", "n_kv_heads")] == [24, 3, 6, 6]
    assert hp.of("hidden_size").key == "d_model"
    assert report.unknown == ("n_heads", "mystery")
    assert len(report.conflicts) == 1 and "rope_type is 0" in report.conflicts[0].text
    as_gguf = Facts("apr", values, {}, names="gguf")
    assert read_hyper(ARCHS["llama"], as_gguf, "x.apr")[1].conflicts == ()


# --- writing -----------------------------------------------------------------------------------


def test_what_gguf_cannot_say_is_kept_and_warned_of() -> None:
    tiny = next(t for t in TINY if t.id == "smollm3-listed")
    found = read(tiny)
    assert inexpressible_names(found.spec, found.hp, "gguf") == ("rope_layers",)
    written = write_hyper(found.spec, found.hp, "gguf")
    assert written[CARRIED + "rope_layers"] == "[false,true,true,false]"
    assert CARRIED + "rope_layers" not in write_hyper(found.spec, found.hp, "gguf", complete=False)
    assert {loss.name for loss in expected_losses(found.spec, found.hp, "gguf")} == {
        "rope_layers",
        "sliding_window",
    }


def test_logit_scale_divides_in_granite_and_multiplies_in_cohere() -> None:
    granite = read(next(t for t in TINY if t.id == "granite-scaled"))
    assert granite.hp["logit_scale"] == 1 / 6
    assert write_hyper(granite.spec, granite.hp, "gguf")["granite.logit_scale"] == 6.0
    assert write_hyper(granite.spec, granite.hp, "hf")["logits_scaling"] == 6.0
    cohere = read(next(t for t in TINY if t.id == "cohere-qk_norm"))
    assert write_hyper(cohere.spec, cohere.hp, "gguf")["command-r.logit_scale"] == 0.3


def test_apr_keys_are_canonical_and_never_null() -> None:
    from aprfmt.arch.hyper_rules import BASE

    aliases = {key for rule in BASE for key in rule.keys.get("apr", ())[1:]}
    for tiny in TINY:
        found = read(tiny)
        written = write_hyper(found.spec, found.hp, "apr", complete=False)
        assert not aliases & set(written)
        assert None not in written.values()


def test_gguf_numbers_have_the_types_readers_expect() -> None:
    for tiny in TINY:
        found = read(tiny)
        for key, value in write_hyper(found.spec, found.hp, "gguf").items():
            assert value is not None
            if key.startswith(CARRIED):
                continue
            if key == "gemma3n.activation_sparsity_scale":
                assert all(type(one) is float for one in value)  # by layer
            elif key.endswith(("epsilon", "freq_base", "freq_base_swa", "_scale", ".factor")):
                assert type(value) is float, key
            elif isinstance(value, list) and (
                "attention_layers" in found.hp or found.spec.name == "kimi_linear"
            ):
                # by layer: 0 where there is no attention, or no MLP
                assert key.endswith(("head_count_kv", "feed_forward_length")), key
            elif key in ("gemma4.attention.head_count_kv", "gemma4.feed_forward_length"):
                listed = value if isinstance(value, list) else [value]
                assert all(type(one) is int for one in listed), key  # by layer where they differ
            elif key.endswith(("_length", "_count", "head_count_kv", "sliding_window")):
                assert type(value) is int, key


# --- numbers -----------------------------------------------------------------------------------


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_shortest_is_the_same_float32(value: float) -> None:
    assert nearest_float32(shortest_decimal(value)) == value


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_shortest_has_nine_digits_at_most(value: float) -> None:
    assert float(f"{shortest_decimal(value):.9g}") == shortest_decimal(value)


@given(st.floats(1e-6, 1e6))
def test_shortest_undoes_rounding_of_short_decimals(value: float) -> None:
    decimal = float(f"{value:.6g}")
    assert shortest_decimal(nearest_float32(decimal)) == decimal


@given(st.integers(1, 10**6))
def test_inverse_of_inverse(n: int) -> None:
    assert inverse(inverse(float(n), "x"), "x") == n
    assert math.isclose(inverse(n / 8, "x"), 8 / n)


# --- garbage -----------------------------------------------------------------------------------

GARBAGE: st.SearchStrategy[Any] = st.sampled_from([
    0, -1, 2**70, 1.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), True, "", "yarn", "silu",
    [], [0], [None] * 99, ["full_attention"] * 4, {}, {"rope_type": []}, {"rope_type": "llama3"},
    {"type": "yarn", "factor": 0}, {"full_attention": {"rope_type": "linear"}},
    {"rope_type": "longrope", "short_factor": 3}, None, b"x", [[]], {"type": "yarn", "factor": 1e9},
])  # fmt: skip


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_garbage_is_an_arch_error_or_a_model(data: st.DataObject) -> None:
    tiny: Tiny = data.draw(st.sampled_from(TINY))
    style = data.draw(st.sampled_from(["hf", "gguf", "apr"]))
    found = read(tiny)
    written = write_hyper(found.spec, found.hp, style)
    if style == "hf":
        written = {**make(tiny).config, **written}
    for key in data.draw(st.lists(st.sampled_from(sorted(written)), min_size=1, max_size=3)):
        written[key] = data.draw(GARBAGE)
    try:
        hp, _ = read_hyper(found.spec, as_file(found, style, written), "garbage")
        for target in ("hf", "gguf", "apr"):
            write_hyper(found.spec, hp, target)
    except ArchError as error:
        assert "garbage" in str(error) or "keys of" in str(error)


# --- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [None, 0, 1, 3, 30, 31])
@pytest.mark.parametrize("arch", ["qwen2", "qwen2_moe"])
def test_windowed_layers_follow_max_window_layers_as_in_transformers(
    arch: str, first: int | None
) -> None:
    """Configs from before `layer_types` say by this number alone which layers are windowed."""
    from transformers import AutoConfig

    config = {**SIZES, "num_hidden_layers": 31, "use_sliding_window": True, "sliding_window": 9}
    if first is not None:
        config["max_window_layers"] = first
    kinds = AutoConfig.for_model(arch, **config).layer_types
    windowed = tuple(kind == "sliding_attention" for kind in kinds)
    assert hf(arch, config)["window_layers"] == windowed
    assert hf(arch, {**config, "use_sliding_window": False})["window_layers"] == (False,) * 31


@pytest.mark.parametrize(
    ("native", "carried", "notes"),
    [
        (1e-6, float(np.float32(1e-6)), 0),
        (True, True, 0),
        (True, 1, 1),
        (0, False, 1),
        ((True, False), (1, 0), 1),
        ([{"rope_type": "yarn"}], [{"rope_type": "yarn"}], 0),
    ],
)
def test_what_a_file_and_its_config_say_is_equal_up_to_float32(
    native: Any, carried: Any, notes: int
) -> None:
    """Booleans are no numbers, in lists neither: the file's own key wins, and a note says so."""
    mine = HyperParams({"x": HyperParam(native, "metadata", "x")})
    other = HyperParams({"x": HyperParam(carried, "config", "x")})
    rows, found = reconcile_hyperparameters(mine, other, "m.gguf")
    assert len(found) == notes
    assert rows["x"].value is (native if notes else carried)


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
def test_only_what_gguf_cannot_say_is_taken_from_a_carried_config(tiny: Tiny) -> None:
    """Without any one key or tensor of a value, the value is what a reader of GGUF takes.

    What the keys alone give is the oracle. Seen red: a softcap and a rope scaling from the config.
    """
    found = read(tiny)
    facts = as_file(found, "gguf", write_hyper(found.spec, found.hp, "gguf"))
    own = {key: value for key, value in facts.values.items() if not key.startswith(CARRIED)}
    whole = read_hyper(found.spec, replace(facts, values=own), "whole", complete=False)[0]
    rows, notes = read_missing_as_default(found.spec, found.hp, facts, "m.gguf")
    assert not notes and all(rows[name] == found.hp.of(name) for name in rows)
    said_by = {whole.of(name).key for name in whole} - {""}
    for gone in said_by:
        tensors = {name: held for name, held in facts.tensors.items() if name != gone}
        values = {key: value for key, value in own.items() if key != gone}
        less = replace(facts, values=values, tensors=tensors)
        try:
            alone = read_hyper(found.spec, less, "less", complete=False)[0]
        except ArchError:  # sizes that contradict each other
            continue
        rows, notes = read_missing_as_default(found.spec, found.hp, less, "m.gguf")
        lost = [
            name
            for name in alone
            if whole.of(name).key == gone and alone.of(name).origin == "default"
        ]
        assert all(same_value(rows[name].value, alone[name]) for name in lost), (gone, lost)
        assert len(notes) <= len(lost), (gone, notes)


# Forms that transformers builds and cannot run.
FALCONS_THAT_DO_NOT_RUN = (
    ("falcon_40b-plain", {"parallel_attn": False}, "parallel_attn: is False; expected True"),
    ("falcon_40b-plain", {"new_decoder_architecture": False}, "is False; expected True"),
    ("falcon_rw-groups", {"parallel_attn": False}, "parallel_attn: is False; expected True"),
)


@pytest.mark.parametrize(("tiny_id", "changed", "says"), FALCONS_THAT_DO_NOT_RUN)
def test_forms_of_falcon_that_do_not_run_are_refused(
    tiny_id: str, changed: dict[str, bool], says: str
) -> None:
    tiny = next(tiny for tiny in TINY if tiny.id == tiny_id)
    config = make(tiny).config
    hf(tiny.arch, config)
    with pytest.raises(ArchError, match=says):
        hf(tiny.arch, {**config, **changed})


def test_groups_of_heads_are_read_without_a_number_as_transformers_reads_them() -> None:
    """RefinedWeb's config.json has no flag, falcon's null for one key head a query head."""
    config = make(next(tiny for tiny in TINY if tiny.id == "falcon_40b-plain")).config
    old = {key: value for key, value in config.items() if key != "new_decoder_architecture"}
    assert hf("falcon_40b", old)["n_kv_heads"] == 2
    assert hf("falcon_40b", {**config, "num_kv_heads": None})["n_kv_heads"] == 6


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("held", [[2, "a", 1], [2, -1, 1], [2, None, 1], [1.5, 1, 1], [2]])
def test_sections_that_are_no_numbers_name_their_key(name: str, held: list[Any]) -> None:
    facts = Facts("hf", {name: {"mrope_section": held}}, {})
    with pytest.raises(ArchError, match=rf"^{name}\.mrope_section: "):
        rope_sections._read_hf(facts, {})


@pytest.mark.parametrize(("factor", "refused"), [(2.0, False), (4.0, True)])
def test_a_scaling_of_windowed_layers_is_that_of_the_full_ones(
    factor: float, refused: bool
) -> None:
    kinds = {
        "full_attention": {"rope_type": "linear", "factor": 2.0},
        "sliding_attention": {"rope_type": "linear", "factor": factor},
    }
    rope = HFRope(RopeDefaults(nested=True), Facts("hf", {"rope_parameters": kinds}, {}))
    if refused:
        with pytest.raises(ArchError, match="windowed layers have a scaling of their own"):
            rope.read_scaling(4096)
    else:
        found = rope.read_scaling(4096)
        assert found is not None and found[0] is not None and found[0]["factor"] == 2.0


@pytest.mark.parametrize("own", [1, 2, 3])
@pytest.mark.parametrize("windows", [(True, False, True, True), (True, True, False, True)])
def test_a_layer_without_keys_of_its_own_needs_an_earlier_one_of_its_kind(
    windows: tuple[bool, ...], own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma3n, "require_causal", lambda value, facts, hp: "a remark")
    hp: Any = {gemma3n.OWN: tuple(i < own for i in range(4))}
    lacking = next((i for i in range(own, 4) if windows[i] not in windows[:own]), None)
    if lacking is None:
        assert gemma3n._check_kv_sources(windows, cast(Any, None), hp) == "a remark"
        return
    with pytest.raises(ArchError, match=f"layer {lacking} has .* expected one of the first {own} "):
        gemma3n._check_kv_sources(windows, cast(Any, None), hp)


# --- what config.json leaves out -----------------------------------------------------------------

# Keys whose default here is not transformers': sizes, which the tensors say, and what published
# files always state.
STATED = {
    "deepseek_v2": {"n_shared_experts", "moe_intermediate_size"},
    "deepseek_v3": {"n_shared_experts", "moe_intermediate_size"},
    "ministral3": {"rope_parameters"},
    "mamba2": {"num_hidden_layers"},
    "granite_hybrid_moe": {"intermediate_size"},
    "falcon_h1": {"mamba_d_ssm", "rope_parameters"},
}
PLAIN = {tiny.arch: tiny.model_type for tiny in TINY if tiny.id.endswith("-plain")}


@pytest.mark.parametrize("arch", PLAIN)
def test_a_key_that_is_left_out_is_what_transformers_takes_for_it(arch: str) -> None:
    """Seen red: all layers of a granite hybrid with attention, where transformers gives it none."""
    transformers = pytest.importorskip("transformers")
    standard = transformers.AutoConfig.for_model(PLAIN[arch])
    config = json.loads(standard.to_json_string(use_diff=False))
    try:
        whole = hf(arch, config)
    except ArchError:
        pytest.skip("transformers' default is another architecture")
    apart = set()
    for key in config:
        try:
            found = hf(arch, {other: value for other, value in config.items() if other != key})
        except ArchError as error:
            assert re.search(r"nothing says|expected|needs", str(error)), (key, error)
            continue
        if dict(found) != dict(whole):
            apart.add(key)
    assert apart == STATED.get(arch, set())


@pytest.mark.parametrize("key", ["attn_layer_indices", "layer_types"])
def test_layers_of_a_hybrid_attend_where_config_json_says_so(key: str) -> None:
    arch, kind = {"attn_layer_indices": ("bamba", "bamba"),
                  "layer_types": ("granite_hybrid", "granitemoehybrid")}[key]  # fmt: skip
    tiny = next(tiny for tiny in TINY if tiny.model_type == kind)
    config = {k: v for k, v in make(tiny).config.items() if k != key and k != "layers_block_type"}
    assert not any(hf(arch, config)["attention_layers"])


@pytest.mark.parametrize(("said", "strength"), [(True, 2.0), (False, 1.0), (None, 2.0)])
def test_a_switch_of_a_delta_net_is_read_by_its_value(said: bool | None, strength: float) -> None:
    config = make(next(tiny for tiny in TINY if tiny.id == "olmo_hybrid-plain")).config
    config = {**config, "linear_allow_neg_eigval": said}
    if said is None:
        del config["linear_allow_neg_eigval"]
    assert hf("olmo_hybrid", config)["delta_strength"] == strength


def test_a_gguf_of_gemma4_turns_all_pairs_where_nothing_is_said() -> None:
    sizes = {"head_dim": 16, "global_head_dim": 16, "rope_scaling": None}
    assert gemma4._rope_divisors(sizes) == (1.0,) * 8
    scaled = sizes | {"rope_scaling": {"type": "linear", "factor": 8.0}}
    assert gemma4._rope_divisors(scaled) == (1.0,) * 8
    part = sizes | {"rope_scaling": {"type": "proportional", "rotated": 6, "factor": 8.0}}
    assert gemma4._rope_divisors(part) == (8.0,) * 3 + (UNTURNED,) * 5


@pytest.mark.parametrize("said", ["start", "end", "interval", ""])
def test_the_key_of_layers_with_experts_is_the_one_that_is_there(said: str) -> None:
    keys = {
        name: f"moe_layer_{name}" + ("_index" if name != "interval" else "")
        for name in ("start", "end", "interval")
    }
    values = {"start": 1, "end": 2, "interval": 2}
    config = {keys[said]: values[said]} if said else {}
    rule = ernie_moe._moe_layers_rule()
    assert callable(rule.read["hf"])
    found = rule.read["hf"](Facts("hf", config, {}), {"n_layers": 4})
    layers = {
        "start": (False, True, True, True), "end": (False, True, True, False),
        "interval": (False, True, False, True), "": (False, True, True, True),
    }  # fmt: skip
    assert found == (layers[said], keys.get(said, ""))


@pytest.mark.parametrize("said", ["", "first", "step", "both", "every"])
def test_layers_with_experts_of_a_gguf_follow_the_keys_that_are_there(said: str) -> None:
    keys = {"first": "e.leading_dense_block_count", "step": "e.interleave_moe_layer_step"}
    values = {"first": 2, "step": 1 if said == "every" else 2}
    there = [name for name in keys if said in (name, "both") or (said, name) == ("every", "step")]
    rule = ernie_moe._moe_layers_rule()
    assert callable(rule.read["gguf"])
    values_there = {keys[name]: values[name] for name in there}
    found = rule.read["gguf"](Facts("gguf", values_there, {}, "e"), {"n_layers": 5})
    layers = {
        "first": (False, False, True, True, True), "step": (False, True, False, True, False),
        "both": (False, False, False, True, False), "every": (True,) * 5,
    }  # fmt: skip
    assert found == ((layers[said], keys[there[0]]) if said else None)


def test_a_stored_vector_has_at_most_65536_values() -> None:
    for shape in ((1 << 16,), (4, 2), ((1 << 16) + 1,), (257, 256)):
        values = np.zeros(shape, np.float32)
        tensor = type("Stored", (), {"shape": shape, "numpy": lambda self, made=values: made})()
        facts = Facts("hf", {}, {}, tensors={"inv_freq": tensor})
        assert facts.vector("other") is None
        if values.size > 1 << 16:
            with pytest.raises(ArchError, match="inv_freq"):
                facts.vector("inv_freq")
        else:
            assert facts.vector("inv_freq") == (0.0,) * values.size
