"""Every architecture against the models transformers makes of tiny configurations."""

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from aprfmt.arch import ARCHS, arch_names
from aprfmt.arch.binding import bind_names, groups_for
from aprfmt.arch.hyperparameters import inexpressible_names, read_hyper, write_hyper
from aprfmt.arch.required_roles import compare_roles
from aprfmt.arch.spec import Facts
from aprfmt.arch.value_checks import same_value
from tests.arch.bases import OLDER, assumed, silent
from tests.arch.tiny import TINY, Tiny, as_file, make, parameter_shapes, read, ready

every = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)


def test_every_architecture_has_a_tiny_model() -> None:
    specs = [ARCHS[name] for name in arch_names() if ARCHS[name].level == "full"]
    full = {spec.name for spec in specs if spec.block.head != "none"}
    assert {tiny.arch for tiny in TINY} == full


@every
def test_names_and_shapes(tiny: Tiny) -> None:
    found = read(tiny)
    assert found.spec.name == tiny.arch
    assert found.bound.unbound == ()
    assert not found.bound.incomplete
    result = compare_roles(found.spec, found.hp, found.shapes)
    assert (result.missing, result.misshapen) == ((), ())
    assert result.found == result.expected == len(found.shapes)


@every
def test_every_key_is_accounted_for(tiny: Tiny) -> None:
    report = read(tiny).report
    assert report.unknown == ()
    assert report.conflicts == ()
    assert set(report.read) & set(report.ignored) == set()


# Hyperparameter -> attributes of a config that may hold it.
KEYS = {
    "context_length": "max_position_embeddings max_seq_len",
    "norm_eps": "rms_norm_eps layer_norm_eps norm_epsilon layer_norm_epsilon norm_eps",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale",
    "attn_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
    "norm_topk": "norm_topk_prob",
    "routed_scale": "routed_scaling_factor",
    "n_experts": "n_routed_experts num_local_experts num_experts",
    "n_experts_used": "num_experts_per_tok",
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
    "shared_ffn_size": "shared_expert_intermediate_size",
    "parallel_residual": "use_parallel_residual",
    "attn_scale_by_layer": "scale_attn_by_inverse_layer_idx",
    "swiglu_limit": "swiglu_limit",
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "conv_taps": "linear_conv_kernel_dim conv_L_cache",
    "swiglu_alpha": "swiglu_alpha",
}


def body_of(model: Any) -> Any:
    """Return the part without a head; llama4 names another as its base."""
    return model.model if model.base_model is model else model.base_model


def rotary_of(body: Any) -> Any:
    """Return the module that makes cos and sin, None without; lfm2_moe names it otherwise."""
    return getattr(body, "rotary_emb", None) or getattr(body, "pos_emb", None)


def attributes(c: Any, model: Any) -> dict[str, Any]:
    """Return hyperparameters as transformers' config object and modules have them."""
    n = c.num_hidden_layers
    heads = getattr(c, "num_attention_heads", 0)
    mla = hasattr(c, "kv_lora_rank")
    kinds = getattr(c, "layer_types", None) or []
    window = getattr(c, "sliding_window", None) or None
    body = body_of(model)
    stacks = ("layers", "h", "blocks", "decoder.layers", "encoder.layer")
    paths = {name for name, _ in body.named_modules()}
    layers = body.get_submodule(next(stack for stack in stacks if stack in paths))
    names = ("self_attn", "attn", "attention", "self_attention", "mixer")
    mixers = [getattr(layer, name, None) for layer in layers for name in names]
    scans = [mixer for mixer in body.modules() if hasattr(mixer, "ssm_state_size")]
    attending = [m for m in mixers if m is not None and m not in scans]
    attention = next((m for m in attending if hasattr(m, "kv_lora_rank")), None)
    attention = attention or next(iter(attending), None)
    found: dict[str, Any] = {
        "hidden_size": c.hidden_size,
        "n_layers": n,
        "vocab_size": c.vocab_size,
        "sliding_window": window,
        "tied_embeddings": c.tie_word_embeddings,
    }
    if scans:
        found |= _scan(scans[0])
    if attention is not None:
        dim = getattr(attention, "head_dim", None) or c.hidden_size // heads
        found |= {
            "n_heads": heads,
            "n_kv_heads": _key_heads(c),
            "attn_scale": getattr(attention, "scaling", None)
            or getattr(attention, "softmax_scale", None)
            or dim**-0.5,
            "head_dim": c.qk_head_dim if mla else dim,
        }
    if "linear_attention" in kinds and not scans:
        found["delta_layers"] = tuple(kind == "linear_attention" for kind in kinds)
    if "conv" in kinds:
        found["conv_layers"] = tuple(kind == "conv" for kind in kinds)
        found["rope_layers"] = tuple(kind != "conv" for kind in kinds)
    if scans and "linear_attention" in kinds:
        found["ssm_layers"] = tuple(kind == "linear_attention" for kind in kinds)
    if hasattr(c, "shared_intermediate_size") and scans:
        dense = not c.num_local_experts
        found["ffn_size" if dense else "shared_ffn_size"] = c.shared_intermediate_size
    elif hasattr(c, "intermediate_size") and attention is not None:
        found["ffn_size"] = getattr(c, "intermediate_size_mlp", c.intermediate_size)
        found["ffn_size"] = getattr(c, "dense_intermediate_size", found["ffn_size"])
    if isinstance(found.get("ffn_size"), list):
        found["ffn_size"] = found["ffn_size"][0]
    if hasattr(layers[0], "feed_forward") and hasattr(layers[0].feed_forward, "w1"):
        found["ffn_size"] = layers[0].feed_forward.w1.out_features  # lfm2 adjusts the stated one
    if hasattr(c, "attention_chunk_size"):
        found["sliding_window"] = c.attention_chunk_size
        found["window_layers"] = tuple(kind == "chunked_attention" for kind in kinds)
        found["rope_layers"] = tuple(bool(on) for on in c.no_rope_layers)
        found["moe_layers"] = tuple(layer in c.moe_layers for layer in range(n))
        tuned = c.attn_temperature_tuning
        found["temperature_scale"] = c.attn_scale if tuned else None
        found["temperature_length"] = c.floor_scale if tuned else None
    if kinds and window is not None and c.model_type != "mistral":
        found["window_layers"] = tuple(kind == "sliding_attention" for kind in kinds)
    for name, key in KEYS.items():
        present = [k for k in key.split() if hasattr(c, k)]
        if present:
            stated = getattr(c, present[0])
            found[name] = 0 if stated is None and name == "n_experts" else stated
    return found


def _scan(mixer: Any) -> dict[str, Any]:
    """Return the hyperparameters of a state space mixer, as its module has them."""
    found = {
        "ssm_size": mixer.intermediate_size,
        "ssm_state": mixer.ssm_state_size,
        "conv_taps": mixer.conv_kernel_size,
    }
    if not hasattr(mixer, "n_groups"):
        return found | {"ssm_rank": mixer.time_step_rank}
    low, high = mixer.time_step_limit
    return found | {
        "ssm_heads": mixer.num_heads,
        "ssm_groups": mixer.n_groups,
        "ssm_step_low": low,
        "ssm_step_high": None if math.isinf(high) else high,
    }


def _key_heads(c: Any) -> int:
    """Return the key heads; falcon stores them in its newer form only."""
    if c.model_type == "falcon" and not c.new_decoder_architecture:
        return 1 if c.multi_query else int(c.num_attention_heads)
    if c.model_type in ("gemma4_text", "gemma4_unified_text"):
        return int(c.per_layer_config[c.layer_types.index("sliding_attention")].num_key_value_heads)
    found = getattr(c, "num_key_value_heads", None) or getattr(c, "num_kv_heads", None)
    return int(found or c.num_attention_heads)


def close(a: Any, b: Any) -> bool:
    """Say whether two values are equal, floats but for the last digits."""
    if isinstance(a, float) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)


# Attributes that mean something else in transformers, or are not used there.
ELSEWHERE: dict[str, set[str]] = {
    "gpt2": {"attn_scale"},
    "deepseek_v2": {"norm_topk"},
    "qwen2_moe": {"sliding_window", "window_layers"},
    "mpt": {"logit_scale"},
    "granite_hybrid_moe": {"ffn_size"},
    "nemotron_h_moe": {"ffn_size"},
    "minimax": {"delta_layers", "window_layers"},  # its linear attention is another
    "nemotron_h": {"norm_topk", "routed_scale", "n_experts", "n_experts_used"},
}


@every
def test_hyperparameters_equal_the_configs(tiny: Tiny) -> None:
    made, hp = make(tiny), read(tiny).hp
    held = attributes(made.live, made.model)
    assert held.keys() - ELSEWHERE.get(tiny.arch, set())
    for name, value in held.items():
        if name not in ELSEWHERE.get(tiny.arch, set()):
            assert close(hp[name], value), (name, hp[name], value)


@every
def test_defaults_are_those_of_transformers(tiny: Tiny) -> None:
    """A config.json with only the unusual keys means the same as one with all keys."""
    found = read(tiny)
    facts = Facts("hf", {**tiny.sizes, **tiny.config}, found.known, names="hf")
    sparse, report = read_hyper(found.spec, facts, tiny.id)
    for name in sparse:
        if name != "rope_theta" or tiny.arch not in OLDER:
            assert sparse[name] == found.hp[name], name
    assert report.unknown == ()


@every
def test_an_unsaid_base_is_that_of_transformers(tiny: Tiny, tmp_path: Path) -> None:
    made, found = make(tiny), read(tiny)
    config = silent(made.config)
    sparse, _ = read_hyper(found.spec, Facts("hf", config, found.known, names="hf"), tiny.id)
    if sparse["rope_theta"] is not None and len(config) < len(made.config):
        kind = made.config["model_type"]
        assert sparse["rope_theta"] == OLDER.get(tiny.arch, assumed(kind, config, tmp_path))


@every
def test_rotary_parameters(tiny: Tiny) -> None:
    """Rotated elements, base and cos/sin factor as the rotary module has them."""
    made, hp = make(tiny), read(tiny).hp
    rotary = rotary_of(body_of(made.model))
    if made.config["model_type"] == "gptj":  # its tables are buffers of every layer
        assert (hp["rope_theta"], hp["rope_dim"]) == (10000.0, made.config["rotary_dim"])
        return
    if rotary is None or getattr(made.live, "alibi", False):  # falcon has one it does not use
        assert hp["rope_theta"] is None or not any(hp["rope_layers"])
        return
    kinds = {"": "rope_theta"}
    if hasattr(rotary, "compress_inv_freq"):
        kinds = {"compress_": "rope_theta", "main_": "rope_theta_local"}
    if hasattr(rotary, "full_attention_inv_freq"):
        local = "rope_theta" if hp["rope_theta_local"] is None else "rope_theta_local"
        kinds = {"full_attention_": "rope_theta", "sliding_attention_": local}
    windowed = ("sliding_attention_", "main_")  # kinds without a scaling
    for kind, theta in kinds.items():
        frequencies = getattr(rotary, f"{kind}inv_freq")
        other = None if kind in windowed else hp["global_head_dim"]
        assert 2 * len(frequencies) == (hp["rope_dim"] if other is None else other)
        scaling = hp["rope_scaling"]
        factor = 1.0
        if scaling is not None and "attention_factor" in scaling and kind not in windowed:
            factor = scaling["attention_factor"]
        assert getattr(rotary, f"{kind}attention_scaling") == pytest.approx(factor)
        if scaling is None or kind in windowed:
            last = 2 * (len(frequencies) - 1)
            assert float(1 / frequencies[-1]) == pytest.approx(
                hp[theta] ** (last / hp["rope_dim"]), rel=1e-6
            )


PAIRED = [tiny for tiny in TINY if tiny.label == "plain" and tiny.arch not in (
    "gpt2", "gpt_oss", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "lfm3", "olmo3",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "gpt_bigcode",
    "gptj",
    "bloom", "mpt", "opt", "opt_350m", "falcon_rw", "falcon_rw_40b", "bert_causal",
    "roberta_causal", "mamba", "falcon_mamba", "mamba2", "nemotron_h", "nemotron_h_moe",
    "granite_hybrid", "kimi_linear", "deepseek_v4",
)]  # fmt: skip


@pytest.mark.parametrize("tiny", PAIRED, ids=lambda tiny: tiny.id)
def test_pairing_of_rotated_elements(tiny: Tiny) -> None:
    """Rotate the first element: it mixes with the second, or with the one half a head on."""
    import torch

    model = body_of(make(tiny).model)
    module: Any = importlib.import_module(type(model).__module__)
    dim = read(tiny).hp["rope_dim"]
    q = torch.zeros(1, 1, 3, dim)
    q[..., 0] = 1.0
    table = rotary_of(model)(q, torch.arange(3)[None])
    if isinstance(table, tuple):
        turned = module.apply_rotary_pos_emb(q, q, *table)[0][0, 0, 2]
    else:  # complex numbers, and tokens before heads
        turned = module.apply_rotary_emb(*(q.swapaxes(1, 2),) * 2, table)[0][0, 2, 0]
    partner = {"interleaved": 1, "half": dim // 2}[read(tiny).hp["rope_style"]]
    assert set(turned.nonzero().flatten().tolist()) == {0, partner}


@every
@pytest.mark.parametrize("style", ["hf", "gguf", "apr"])
def test_written_keys_read_back_equal(tiny: Tiny, style: str) -> None:
    found = read(tiny)
    written = write_hyper(found.spec, found.hp, style)
    back, report = read_hyper(found.spec, as_file(found, style, written), tiny.id)
    assert set(back) == set(found.hp) == {rule.name for rule in found.spec.hyper}
    for name in back:
        same = back[name] == found.hp[name] or (
            style != "hf" and same_value(back[name], found.hp[name])
        )
        assert same, (name, back[name], found.hp[name])
    assert report.unknown == ()
    assert report.conflicts == ()
    if style == "hf":
        assert inexpressible_names(found.spec, found.hp, style) == ()


@every
def test_transformers_loads_the_written_config(tiny: Tiny, tmp_path: Path) -> None:
    import transformers

    auto: Any = transformers
    ready()
    found = read(tiny)
    (tmp_path / "config.json").write_text(json.dumps(write_hyper(found.spec, found.hp, "hf")))
    config = auto.AutoConfig.from_pretrained(tmp_path)
    if hasattr(config, "pad_token_id"):
        config.pad_token_id = None
    model = auto.AutoModelForCausalLM.from_config(config)
    assert type(model) is type(make(tiny).model)
    assert parameter_shapes(model) == make(tiny).shapes
    again = attributes(config.get_text_config(), model)
    for name, value in attributes(make(tiny).live, make(tiny).model).items():
        assert close(again[name], value), (name, again[name], value)


RENAMED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "stablelm",
    "olmoe", "hunyuan_v1_moe", "glm4_moe", "solar_open", "exaone_moe", "hy_v3", "minimax_m2",
    "ernie4_5_moe", "gpt_neox", "qwen3_next", "qwen3_5_moe", "lfm2_moe", "granite_hybrid_moe",
    "granite_hybrid", "nemotron_h_moe", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "minimax",
)  # fmt: skip
SAVED = [tiny for tiny in TINY if tiny.arch in RENAMED]


@pytest.mark.parametrize("tiny", SAVED, ids=lambda tiny: tiny.id)
def test_names_on_disk_are_those_we_write(tiny: Tiny, tmp_path: Path) -> None:
    """transformers 5 saves experts under other names than it holds them under."""
    from safetensors import safe_open

    found = read(tiny)
    make(tiny).model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        names = list(file.keys())
    bound = bind_names(found.spec, "hf", names)
    assert bound.unbound == ()
    assert {key for group in bound.groups for key in group.roles} == set(found.shapes)
    written = groups_for(found.spec, "hf", found.shapes, found.hp)
    stored = sorted(set(names) - set(bound.buffers))
    assert sorted(name for group in written for name in group.stored) == stored
