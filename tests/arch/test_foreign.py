"""Files of other writers: what a GGUF leaves out, what it keeps in tensors."""

from typing import Any

import pytest

from aprfmt.arch import ARCHS, find_arch, mimo
from aprfmt.arch.hyperparameters import derived_tensors, expected_losses, read_hyper, write_hyper
from aprfmt.arch.spec import Facts, HyperParams
from aprfmt.arch.value_checks import nearest_float32
from aprfmt.errors import ArchError
from tests.arch.tiny import SIZES, TINY, Vector, make, read

LLAMA = {**SIZES, "rms_norm_eps": 1e-5, "rope_theta": 50000.0}


def hf(arch: str, config: dict[str, Any]) -> HyperParams:
    return read_hyper(ARCHS[arch], Facts("hf", config, {}), "config.json")[0]


# --- foreign GGUF files ------------------------------------------------------------------------

FOREIGN = {"embedding_length": 24, "block_count": 8, "feed_forward_length": 40, "context_length": 9,
           "attention.head_count": 6, "attention.key_length": 10, "attention.sliding_window": 5,
           "attention.layer_norm_rms_epsilon": nearest_float32(1e-6), "vocab_size": 56}  # fmt: skip


def foreign(arch: str, extra: dict[str, Any] | None = None) -> tuple[HyperParams, Any]:
    prefix = ARCHS[arch].called["gguf"][0]
    values = {f"{prefix}.{key}": value for key, value in {**FOREIGN, **(extra or {})}.items()}
    return read_hyper(ARCHS[arch], Facts("gguf", values, {}, prefix), "x.gguf")


def test_gemma_without_keys_is_read_as_llama_cpp_reads_it() -> None:
    hp, report = foreign("gemma2")
    assert hp["attn_scale"] == 10**-0.5
    assert hp["window_layers"] == (True, False) * 4
    assert (hp["attn_softcap"], hp["final_softcap"]) == (50.0, 30.0)
    assert {text.split()[3].rstrip(",") for text in report.assumed} == {
        "attn_scale",
        "window_layers",
    }
    largest, _ = foreign("gemma2", {"block_count": 46})
    assert largest["attn_scale"] == (24 // 6) ** -0.5
    hp, report = foreign("gemma3")
    assert hp["rope_theta_local"] == 10000.0
    assert hp["window_layers"] == (*(True,) * 5, False, True, True)
    assert any("rope_theta_local" in text for text in report.assumed)


def test_a_pattern_in_the_file_is_believed() -> None:
    hp, report = foreign("gemma3", {"attention.sliding_window_pattern": 4})
    assert hp["window_layers"] == (True, True, True, False) * 2
    assert not any("window_layers" in text for text in report.assumed)
    listed = [i in (2, 3) for i in range(8)]
    hp, _ = foreign("olmo3", {"attention.sliding_window_pattern": listed})
    assert hp["window_layers"] == tuple(listed)


def test_llama4_is_read_as_llama_cpp_reads_it() -> None:
    """Its loader has chunks of 8192 unless the key says 0, and goes by counts for the rest."""
    moe = {
        "expert_count": 16,
        "expert_used_count": 1,
        "expert_feed_forward_length": 20,
        "interleave_moe_layer_step": 2,
        "rope.freq_base": 5e5,
    }
    hp, report = foreign("llama4", moe)
    assert (hp["sliding_window"], hp["temperature_scale"], hp["temperature_length"]) == (
        8192,
        0.1,
        8192,
    )
    assert hp["window_layers"] == hp["rope_layers"] == (True, True, True, False) * 2
    assert hp["qk_norm"] and hp["moe_layers"] == (False, True) * 4
    assert any("rope_layers" in text for text in report.assumed)
    hp, _ = foreign("llama4", moe | {"expert_count": 128, "attention.sliding_window": 0})
    assert (hp["sliding_window"], hp["temperature_scale"], hp["qk_norm"]) == (None, None, False)
    assert not any(hp["window_layers"]) and hp["rope_layers"] == (*(True,) * 7, False)


def test_llama4s_published_configs_say_it_in_numbers_and_empty_lists() -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "intermediate_size_mlp": 128,
        "vocab_size": 50,
    }
    hp = hf(
        "llama4",
        sizes | {"attn_temperature_tuning": 4, "no_rope_layers": [], "no_rope_layer_interval": 2},
    )
    assert (hp["temperature_scale"], hp["temperature_length"]) == (0.1, 8192)
    assert hp["rope_layers"] == hp["window_layers"] == (True, False) * 4
    hp = hf("llama4", sizes | {"attn_temperature_tuning": 0, "attention_chunk_size": None})
    assert (hp["temperature_scale"], hp["sliding_window"]) == (None, None)


def test_smollm3_rotates_all_but_every_fourth() -> None:
    hp, report = foreign("smollm3", {"rope.freq_base": 5e6})
    assert hp["rope_layers"] == (True, True, True, False) * 2
    assert any("every fourth" in text for text in report.assumed)


def test_what_a_file_must_say() -> None:
    with pytest.raises(ArchError, match=r"gemma3\.attention\.sliding_window"):
        foreign("gemma3", {"attention.sliding_window": None})
    with pytest.raises(ArchError, match=r"x\.gguf: nothing says norm_eps"):
        foreign("llama", {"attention.layer_norm_rms_epsilon": None})
    with pytest.raises(ArchError, match=r"granite\.logit_scale"):
        foreign("granite")


def test_keys_nobody_knows_are_reported() -> None:
    _, report = foreign("mistral", {"mystery": 1})
    assert report.unknown == ("llama.mystery",)
    values = {"general.mystery": 1, "llama.block_count": 2, "other.block_count": 3}
    facts = Facts("gguf", values, {}, "llama")
    report = read_hyper(ARCHS["llama"], facts, "x.gguf", complete=False)[1]
    assert (report.unknown, report.read) == ((), {"llama.block_count": "n_layers"})


@pytest.mark.parametrize("key", ["block_count", "rope.dimension_count"])
def test_sizes_that_lists_are_made_of_are_bounded(key: str) -> None:
    with pytest.raises(ArchError, match=rf"llama\.{key}: is 2147483647"):
        foreign("llama", {key: 2**31 - 1})


CARRIED_WRONG = {
    "rope_style": '"x"', "activation": "3", "window_layers": "[true]", "moe_layers": "true",
    "rope_scaling": '{"type": "yarn"}', "n_heads": "null", "norm_eps": '"x"', "vocab_size": "1.5",
    "qk_norm": "1", "router": "null", "attn_scale": "{",
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIED_WRONG)
def test_carried_values_are_checked(name: str) -> None:
    values: dict[str, Any] = {f"llama.{key}": value for key, value in FOREIGN.items()}
    values[f"aprfmt.hyper.{name}"] = CARRIED_WRONG[name]
    with pytest.raises(ArchError, match=rf"x\.gguf: aprfmt\.hyper\.{name}"):
        read_hyper(ARCHS["llama"], Facts("gguf", values, {}), "x.gguf")


# --- scaling kept in tensors -------------------------------------------------------------------


def llama3(original: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }


@pytest.mark.parametrize("original", [8192, 4096])
def test_rope_freqs(original: int) -> None:
    """The standard parameters are recognised, others stay divisors; both divide alike."""
    config = {
        **SIZES,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_scaling": llama3(original),
        "max_position_embeddings": 131072,
    }
    hp = hf("llama", config)
    spec = ARCHS["llama"]
    made = derived_tensors(spec, hp, "gguf")
    assert list(made) == ["rope_freqs.weight"]
    written = write_hyper(spec, hp, "gguf", complete=False)
    facts = Facts("gguf", written, {}, tensors={n: Vector(v) for n, v in made.items()})
    back, _ = read_hyper(spec, facts, "x.gguf")
    assert back.of("rope_scaling").origin == "tensor"
    if original == 8192:
        assert back["rope_scaling"] == hp["rope_scaling"]
    else:
        assert back["rope_scaling"]["type"] == "factors"
        again = derived_tensors(spec, back, "gguf")["rope_freqs.weight"]
        assert [nearest_float32(x) for x in again] == [
            nearest_float32(x) for x in made["rope_freqs.weight"]
        ]


def test_llama3_divisors_against_transformers() -> None:
    tiny = next(t for t in TINY if t.id == "llama-llama3")
    hp, rotary = read(tiny).hp, make(tiny).model.model.rotary_emb
    divisors = derived_tensors(ARCHS["llama"], hp, "gguf")["rope_freqs.weight"]
    dim = hp["rope_dim"]
    ours = [hp["rope_theta"] ** (-2 * i / dim) / divisors[i] for i in range(dim // 2)]
    assert rotary.inv_freq.tolist() == pytest.approx(ours, rel=1e-6)


def test_divisors_go_to_config_json_as_longrope() -> None:
    hp = hf("llama", LLAMA).with_values(rope_scaling={"type": "factors", "factors": (1.0, 2.5)})
    config = write_hyper(ARCHS["llama"], hp, "hf")
    assert hf("llama", config)["rope_scaling"] == hp["rope_scaling"]


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    values = {f"llama.{key}": value for key, value in FOREIGN.items()}
    facts = Facts("gguf", values, {}, tensors={"rope_freqs.weight": Vector((1.0, 2.0))})
    with pytest.raises(ArchError, match=r"rope_freqs.weight.*2 values; expected 5"):
        read_hyper(ARCHS["llama"], facts, "x.gguf")


# --- configurations as they are published ------------------------------------------------------

KIMI: dict[str, Any] = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 163840,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "norm_topk_prob": True, "scoring_func": "sigmoid", "rope_theta": 50000.0,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0,
        "beta_slow": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def test_kimi_k2_is_a_deepseek_v3() -> None:
    assert find_arch("hf", "kimi_k2").name == "deepseek_v3"
    hp, report = read_hyper(ARCHS["deepseek_v3"], Facts("hf", KIMI, {}), "config.json")
    assert (hp["n_experts"], hp["n_expert_groups"], hp["routed_scale"]) == (384, 1, 2.827)
    assert hp["moe_layers"] == (False, *[True] * 60)
    assert report.unknown == ()


def test_mistral3_is_ministral3_with_or_without_growing_queries() -> None:
    inner = {
        "hidden_size": 5120,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "intermediate_size": 32768,
        "vocab_size": 131072,
    }
    small = {**inner, "model_type": "mistral", "rope_theta": 1e9, "sliding_window": None}
    grown = {
        **inner,
        "model_type": "ministral3",
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16384,
            "max_position_embeddings": 262144,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "rope_theta": 1e6,
        },
    }
    for text, expected in ((small, (None, None)), (grown, (0.1, 16384))):
        config = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
        spec = find_arch("hf", "mistral3")
        hp, report = read_hyper(spec, Facts("hf", config, {}), "config.json")
        assert (hp["temperature_scale"], hp["temperature_length"]) == expected
        assert report.unknown == () and hp["head_dim"] == 128


@pytest.mark.parametrize(("arch", "stored"), [("ministral3", 0.5), ("deepseek_v3", 0.05)])
def test_yarns_logarithm_is_stored_tenfold_smaller_for_deepseek_alone(
    arch: str, stored: float
) -> None:
    """As its converter does, which llama.cpp's loader of deepseek2 undoes."""
    tiny = next(tiny for tiny in TINY if tiny.arch == arch)
    scaling = {
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "mscale": 0.5,
        "mscale_all_dim": 0.5,
        "truncate": True,
    }
    hp = read(tiny).hp.with_values(rope_scaling=scaling)
    written = write_hyper(ARCHS[arch], hp, "gguf", complete=False)
    [value] = [v for key, v in written.items() if key.endswith("yarn_log_multiplier")]
    assert value == pytest.approx(stored)
    found = read_hyper(ARCHS[arch], Facts("gguf", written, {}), "x.gguf")[0]["rope_scaling"]
    assert found["mscale_all_dim"] == 0.5


def test_what_llama_cpp_computes_otherwise_is_said() -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "intermediate_size": 96,
    }
    for act, expected in (("relu2", ["activation"]), ("silu", [])):
        hp = hf("bitnet", sizes | {"hidden_act": act})
        assert [loss.name for loss in expected_losses(ARCHS["bitnet"], hp, "gguf")] == expected
    tiny = next(tiny for tiny in TINY if tiny.id == "phi3-longrope")
    said = expected_losses(ARCHS["phi3"], read(tiny).hp, "gguf")
    assert any("long factors" in loss.consequence for loss in said)


def test_gemma4_without_a_softcap_says_so_in_a_gguf() -> None:
    """llama.cpp caps its logits at 30 unless the key says otherwise; 0 switches it off."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    for said, stored in ((None, 0.0), (20.0, 20.0)):
        hp = hf("gemma4", sizes | {"final_logit_softcapping": said})
        written = write_hyper(ARCHS["gemma4"], hp, "gguf", complete=False)
        assert written["gemma4.final_logit_softcapping"] == stored
        back, _ = read_hyper(ARCHS["gemma4"], Facts("gguf", written, {}, "gemma4"), "x.gguf")
        assert back["final_softcap"] == said
        del written["gemma4.final_logit_softcapping"]
        back, _ = read_hyper(ARCHS["gemma4"], Facts("gguf", written, {}, "gemma4"), "x.gguf")
        assert back["final_softcap"] == 30.0


def test_exaone4_may_spell_its_windows_in_letters() -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 50,
    }
    for pattern, windowed in (
        ("LLG", (True, True, False) * 2),
        (2, (True, False) * 3),
        (0, (False,) * 6),
    ):
        hp = hf("exaone4", {**sizes, "sliding_window_pattern": pattern})
        assert hp["window_layers"] == hp["rope_layers"] == windowed
    with pytest.raises(ArchError, match="expected a period, or letters L and G"):
        hf("exaone4", {**sizes, "sliding_window_pattern": "LXG"})


def test_hunyuans_alpha_stretches_the_base_once() -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 50,
        "head_dim": 128,
    }
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32}
    hp = hf("hunyuan_v1_dense", {**sizes, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert hp["rope_theta"] == pytest.approx(11158839.9251) and hp["rope_scaling"] is None
    del scaling["alpha"]
    hp = hf("hunyuan_v1_dense", {**sizes, "rope_theta": 10000.0, "rope_scaling": scaling})
    assert hp["rope_scaling"] == {"type": "dynamic", "factor": 1.0}


@pytest.mark.parametrize(
    ("full", "local", "which", "named"),
    [
        (None, None, None, ""),
        (None, True, (True, False), "add_swa_attention_sink_bias"),
        (True, None, (False, True), "add_full_attention_sink_bias"),
        (True, False, (False, True), "add_swa_attention_sink_bias"),
        (False, False, (False, False), "add_swa_attention_sink_bias"),
        (True, True, (True, True), "add_swa_attention_sink_bias"),
    ],
)
def test_which_layers_of_mimo_have_sinks_and_which_key_says_it(
    full: bool | None, local: bool | None, which: tuple[bool, bool] | None, named: str
) -> None:
    keys = {"add_full_attention_sink_bias": full, "add_swa_attention_sink_bias": local}
    said = {key: value for key, value in keys.items() if value is not None}
    found = mimo._read_sink_layers(Facts("hf", said, {}), {"window_layers": (True, False)})
    assert found == (None if which is None else (which, named))


@pytest.mark.parametrize(
    "listed",
    [None, [True] * 7 + [False], [False] * 8, [True, False] * 4, [True, False] * 5, [1, 0] * 4],
)
def test_minimax_lists_its_lightning_layers_or_all_but_every_eighth_are(listed: Any) -> None:
    """As llama.cpp takes a file without the list; one that is too long tells of the layers."""
    values = {"residual_scale": 1.0, "expert_count": 4, "expert_used_count": 2}
    rest = {} if listed is None else {"attention.recurrent_layers": listed}
    if listed is not None and listed[0] == 1 and listed[0] is not True:
        with pytest.raises(ArchError, match="recurrent_layers"):
            foreign("minimax", {**values, **rest})
        return
    hp, _ = foreign("minimax", {**values, **rest})
    wanted = [True] * 7 + [False] if listed is None else listed[:8]
    assert list(hp["lightning_layers"]) == wanted


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_list_of_lightning_layers_is_of_all_layers(length: int) -> None:
    values = {"residual_scale": 1.0, "expert_count": 4, "expert_used_count": 2}
    says = rf"recurrent_layers: has {length} entries; expected 8"
    with pytest.raises(ArchError, match=says):
        foreign("minimax", {**values, "attention.recurrent_layers": [True] * length})


@pytest.mark.parametrize("arch", ["t5", "t5_gated", "umt5"])
@pytest.mark.parametrize(("encoder", "decoder"), [(0, 2), (2, 0), (1, 1), (1, 3), (3, 1)])
def test_each_stack_has_a_layer(arch: str, encoder: int, decoder: int) -> None:
    """Whichever stack is the longer one; the longer one counts."""
    config = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2, "vocab_size": 11,
              "num_layers": encoder, "num_decoder_layers": decoder}  # fmt: skip
    if not (encoder and decoder):
        key = "num_decoder_layers" if encoder else "num_layers"
        with pytest.raises(ArchError, match=rf"{key}: is 0; expected a whole number, 1 to"):
            hf(arch, config)
        return
    assert hf(arch, config)["n_layers"] == max(encoder, decoder)


@pytest.mark.parametrize(
    ("arch", "turns"),
    [("qwen2_vl", None), ("qwen2_5_vl", None), ("qwen3_vl", True), ("qwen3_vl_moe", True)],
)
def test_a_configuration_says_whether_pairs_of_sections_take_turns(
    arch: str, turns: bool | None
) -> None:
    """transformers rotates otherwise by this key, and published files of qwen3-vl have it."""
    sizes = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
             "hidden_size": 48, "head_dim": 8}  # fmt: skip
    scaling = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    said = {} if turns is None else {"mrope_interleaved": turns}
    hp = hf(arch, {**sizes, "rope_scaling": {**scaling, **said}})
    written = write_hyper(ARCHS[arch], hp, "hf", complete=False)["rope_scaling"]
    assert written["mrope_section"] == [2, 1, 1]
    assert written.get("mrope_interleaved") is turns


def test_layers_of_deepseek_v4_whose_experts_are_listed_are_the_first_three() -> None:
    """By a list of kinds, by a count, or by neither; a GGUF has a count alone."""
    (rule,) = (one for one in ARCHS["deepseek_v4"].hyper if one.name == "hash_layers")
    default: Any = rule.default
    for layers in (1, 3, 4, 6):
        assert default({"n_layers": layers}) == tuple(i < 3 for i in range(layers))
    hp: Any = {"n_layers": 3}
    read, gguf = rule.read["hf"], rule.read["gguf"]
    kinds = ["moe", "hash_moe", "moe", "hash_moe"]
    assert read(Facts("hf", {"mlp_layer_types": kinds}, {}), hp) == (
        (False, True, False),
        "mlp_layer_types",
    )
    for count in range(4):
        expected = tuple(i < count for i in range(3))
        facts = Facts("hf", {"num_hash_layers": count}, {})
        assert read(facts, hp) == (expected, "num_hash_layers")
        key = "deepseek4.hash_layer_count"
        assert gguf(Facts("gguf", {key: count}, {}, "deepseek4"), hp) == (expected, key)
        assert rule.write["gguf"](expected, hp) == {"{arch}.hash_layer_count": count}
    assert read(Facts("hf", {}, {}), hp) is None and gguf(Facts("gguf", {}, {}, "d"), hp) is None
    assert rule.write["hf"]((True, False), hp) == {"mlp_layer_types": ["hash_moe", "moe"]}
    for kinds in (["moe"] * 2, ["moe", "dense", "moe"]):
        with pytest.raises(ArchError, match=r"mlp_layer_types: (has 2 entries|layer 1 is 'dense')"):
            read(Facts("hf", {"mlp_layer_types": kinds}, {}), hp)
