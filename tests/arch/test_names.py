"""Names both ways, against the gguf package's own tables; styles, spellings, what is missing."""

import re
from dataclasses import replace
from typing import Any

import gguf
import pytest

from aprfmt.arch import ARCHS, arch_names
from aprfmt.arch.binding import bind_names, detect_style, groups_for, known_shapes
from aprfmt.arch.name_templates import NameIndex, expand_template, strip_prefix
from aprfmt.arch.required_roles import compare_roles, expected_roles
from aprfmt.arch.spec import ArchSpec, TensorRule, role_key, split_key
from aprfmt.errors import ArchError
from aprfmt.model.renames import prefix_rules
from tests.arch.tiny import IN_GGUF, TINY, Tiny, make, read

every_arch = pytest.mark.parametrize(
    "arch", [name for name in arch_names() if "gguf" in ARCHS[name].called]
)
every = pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.id)
every_in_gguf = pytest.mark.parametrize("tiny", IN_GGUF, ids=lambda tiny: tiny.id)
# Architectures that no version of the package has -> base names of llama.cpp's own table, which is
# in `src/llama-arch.cpp`. It has the name of a layer's tensor and says nothing of config.json.
_WHOLE = {"token_embd", "output_norm", "output"}
_EXPERTS = {f"ffn_{part}_{kind}" for part in ("gate", "up", "down") for kind in ("exps", "shexp")}
_BLOCK = {"attn_norm", "ffn_norm", "ffn_gate_inp", "exp_probs_b", *_EXPERTS}
_COMPRESSOR = ("kv", "gate", "ape", "norm")
_HYPER = ("fn", "base", "scale")
NEWER = {
    "deepseek4": (
        {*_WHOLE, *(f"output_hc_{part}" for part in _HYPER)},
        {
            *_BLOCK,
            "ffn_gate_tid2eid",
            "attn_q_a",
            "attn_q_a_norm",
            "attn_q_b",
            "attn_kv",
            "attn_kv_a_norm",
            "attn_sinks",
            "attn_output_a",
            "attn_output_b",
            "indexer.proj",
            "indexer.attn_q_b",
            *(f"hc_{half}_{part}" for half in ("attn", "ffn") for part in _HYPER),
            *(f"{of}_compressor_{part}" for of in ("attn", "indexer") for part in _COMPRESSOR),
        },
    ),
    "hy_v3": (
        _WHOLE,
        {
            *_BLOCK,
            *(f"attn_{part}" for part in ("q", "k", "v", "output", "q_norm", "k_norm")),
            *(f"ffn_{part}" for part in ("gate", "up", "down")),
        },
    ),
    "minimax-01": (
        _WHOLE,
        {
            *(name for name in _BLOCK if not name.endswith("shexp") and name != "exp_probs_b"),
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "attn_qkv",
            "attn_gate",
            "attn_norm_2",
        },
    ),
    "minimax-m3": (
        _WHOLE,
        {
            *_BLOCK,
            "attn_q",
            "attn_k",
            "attn_v",
            "attn_output",
            "attn_q_norm",
            "attn_k_norm",
            "ffn_gate",
            "ffn_up",
            "ffn_down",
            *(f"indexer.{part}_{kind}" for part in "qk" for kind in ("proj", "norm")),
        },
    ),
}
every_in_package = pytest.mark.parametrize(
    "tiny",
    [tiny for tiny in IN_GGUF if ARCHS[tiny.arch].called["gguf"][0] not in NEWER],
    ids=lambda tiny: tiny.id,
)

# Base names of the gguf package that are not roles here: rope_freqs and factors are
# hyperparameters, and no converter writes the others.
NO_ROLES = {"rope_freqs", "rope_factors_long", "rope_factors_short", "blk.{bid}.attn_rot_embd"}
ONCE = {
    "output",
    "dense_2",
    "cls",
    "cls.output",
    "cls.norm",
    "output_norm",
    "position_embd",
    "token_types",
}
# Base names llama.cpp knows for an architecture that its Hugging Face form never fills: llama's
# experts are mixtral, phi2 has one norm, phi3's q, k, v and deepseek's are stored together.
_DRAFT = {
    f"nextn.{part}" for part in (
        "eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm",
    )
}  # fmt: skip
_CROSS_BIAS = "dec.blk.{bid}.cross_attn_rel_b"
_T5_GATES = ("enc.blk.{bid}.ffn_gate", "dec.blk.{bid}.ffn_gate")
_GRANITE_MOE = {"ffn_gate_inp"} | {
    f"ffn_{part}_{kind}" for part in ("gate", "up", "down") for kind in ("exps", "shexp")
}
UNFILLED = {
    "llama": {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
    "mistral": {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
    "internlm3": {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
    "phi2": {"ffn_norm"},
    "phi3": set(),
    "deepseek_v2": {"attn_k", "attn_v", "exp_probs_b"},
    "deepseek_v3": {"attn_k", "attn_v"},
    "glm4_moe_lite": {"attn_k", "attn_v"},
    "deepseek_v32": _DRAFT,
    "glm_moe_dsa": _DRAFT,
    "glm4": {"attn_qkv"} | _DRAFT,
    "glm4_moe": _DRAFT,
    "exaone_moe": _DRAFT,
    "solar_open": {"attn_q_norm", "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down"} | _DRAFT,
    "granitemoe": {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"},
    "falcon": {"attn_norm_2"},
    # What bert's other forms have: a joined projection, q/k-norms, a classifier's head.
    "phimoe": {"attn_qkv"},
    "bert": {"attn_qkv", "cls", "cls.output", "output_norm"},
    "distilbert": {"attn_qkv", "cls", "cls.output", "output_norm", "token_types"},
    "modernbert": {"cls", "cls.output", "cls.norm"},
    "nomic_bert": {"output_norm", "position_embd"},
    "jina_embeddings_v3": {"output_norm"},
    "mpt": {"attn_q_norm", "attn_k_norm", "ffn", "position_embd"},
    "gpt_bigcode": set(),
    "t5": {_CROSS_BIAS, *_T5_GATES},
    "t5_gated": {_CROSS_BIAS},
    "umt5": {_CROSS_BIAS},
    "t5_encoder": {"output", _T5_GATES[0]},
    "t5_gated_encoder": {"output"},
    "umt5_encoder": {"output"},
    "lfm2": {"dense_2"},  # of an embedding model's own projection
    "nemotron_h_moe": {"ffn_up", "ffn_down"},  # MLPs beside experts
    "bamba": _GRANITE_MOE,
    "granite_hybrid": _GRANITE_MOE,
    "granite_hybrid_moe": {"ffn_gate", "ffn_up", "ffn_down"},
    "ministral3": {"ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"},
}


# Architectures of llama.cpp's that this version of the package lacks -> one with the same tensors.
LIKE = {"deepseek32": "glm-dsa"}


def model_arch(spec: ArchSpec) -> gguf.MODEL_ARCH:
    name = spec.called["gguf"][0]
    name = LIKE.get(name, name)
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)


@every_arch
def test_gguf_base_names_are_those_of_the_gguf_package(arch: str) -> None:
    spec = ARCHS[arch]
    if spec.called["gguf"][0] in NEWER:
        whole, layered = NEWER[spec.called["gguf"][0]]
        theirs = whole | {f"blk.{{bid}}.{name}" for name in layered}
    else:
        theirs = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[model_arch(spec)]} - NO_ROLES
    ours = {
        name.removesuffix(".weight")
        .removesuffix(".bias")
        .removesuffix(".scale")
        .replace("{L}", "{bid}")
        .removesuffix(".{E}")
        .replace("{E}", "{bid}")
        for binding in spec.bindings["gguf"]
        for name in binding.stored
    }
    if spec.called["gguf"][0] == "clip":
        ours = {
            re.sub(r"\.\d+$", ".{bid}", name.removesuffix(".weight.1")) for name in ours
        }  # of projectors and convolutions
    assert ours <= theirs
    if spec.called["gguf"][0] == "clip":
        return  # one list for the towers and projectors of all multimodal models
    unfilled = {
        name if name in ONCE or ".blk." in name else f"blk.{{bid}}.{name}"
        for name in UNFILLED.get(arch, set())
    }
    assert theirs - ours == unfilled


# The converter's own merged names where it stacks experts, and what it calls differently.
MERGED = {
    "block_sparse_moe.experts.w": "feed_forward.experts.w",
    "_layernorm.norms.weight": "_layernorm.weight",
    "down_proj_bias": "down_proj.bias",
    "gate.e_score_correction_bias": "gate.e_score_correction.bias",
    "moe.e_score_correction_bias": "moe.e_score_correction.bias",
    "feed_forward.expert_bias": "feed_forward.expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
}


def converters_name(name: str) -> str:
    """Return the name the converter asks the gguf package's table about."""
    parts = [p for i, p in enumerate(name.split(".")) if not (p.isdigit() and i > 3)]
    merged = ".".join(parts)
    for ours, theirs in MERGED.items():
        if ours in merged and not merged.endswith(theirs):
            merged = merged.replace(ours, theirs)
    merged = re.sub(r"(altup_\w*projections)\.\d+", r"\1", merged)
    whole = (".weight", ".bias", ".A_log", ".D")
    merged = merged if merged.endswith(whole) else merged + ".weight"
    return merged.replace("model.layers.0.feed_forward", "layers.0.feed_forward")


# The converter names these itself: a mixture's shared MLP is the only one without experts.
OWN_NAMES = {"granite_hybrid": ("ffn_down.weight",)}


@every_in_package
def test_names_against_the_gguf_packages_map(tiny: Tiny) -> None:
    """A role stored whole in both styles has the GGUF name gguf-py gives its HF name."""
    found = read(tiny)
    table = gguf.get_tensor_name_map(model_arch(found.spec), found.hp["n_layers"])
    first = {key for key in found.shapes if split_key(key)[0] in (None, 0)}
    styles: dict[str, dict[str, str]] = {}
    for style in ("hf", "gguf"):
        styles[style] = {}
        for key in first:
            try:
                group = groups_for(found.spec, style, {key}, found.hp)[0]
            except ArchError:
                continue  # fused with others, or a role this style has no name for
            if style == "hf" or len(group.stored) == 1:  # deepseek's kv_b is two there
                styles[style][key] = group.stored[0]
    compared = 0
    for key in styles["hf"].keys() & styles["gguf"].keys():
        if key.endswith(".scale"):
            continue  # the converter names these itself (gemma4)
        if split_key(key)[1] in OWN_NAMES.get(tiny.arch, ()):
            continue
        asked = converters_name(styles["hf"][key])
        spellings = (asked, asked.removeprefix("transformer."), f"model.{asked}")
        named = (table.get_name(name, (".weight", ".bias")) for name in spellings)
        theirs = next(filter(None, named), None)
        assert theirs is not None, key
        assert theirs == styles["gguf"][key], key
        compared += 1
    assert compared >= 5


@every_in_gguf
def test_gguf_names_bind_to_the_same_roles(tiny: Tiny) -> None:
    found = read(tiny)
    try:
        groups = groups_for(found.spec, "gguf", found.shapes, found.hp)
    except ArchError as error:
        assert tiny.label in ("mixed", "qk_norm"), error  # GGUF has no names for these
        return
    bound = bind_names(found.spec, "gguf", [name for group in groups for name in group.stored])
    assert bound.groups == tuple(groups)
    assert bound.unbound == ()
    bound_roles = dict.fromkeys((k for g in bound.groups for k in g.roles), ())
    assert compare_roles(found.spec, found.hp, bound_roles).missing == ()


@every
def test_no_template_matches_anothers_names(tiny: Tiny) -> None:
    """Every template's own names lead back to this template, with the numbers in them."""
    for style, bindings in read(tiny).spec.bindings.items():
        templates = [name for binding in bindings for name in binding.stored]
        index = NameIndex(style, [(name, name) for name in templates])
        for template in templates:
            found = index.find(expand_template(template, 3, 5))
            assert found is not None and found.value == template
            assert found.layer == (3 if "{L}" in template else None)
            assert found.element == (5 if "{E}" in template else None)


SPELLINGS = {
    "without model.": lambda name: name.removeprefix("model."),
    "language_model.model.": lambda name: "language_model." + name,
    "model.language_model.": lambda name: name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_of_hf_names(spelling: str) -> None:
    tiny = next(t for t in TINY if t.id == "gemma3-plain")
    names = [SPELLINGS[spelling](name) for name in make(tiny).shapes]
    assert detect_style(names) == "hf"
    bound = bind_names(
        ARCHS["gemma3"], "hf", [*names, "vision_tower.vision_model.encoder.layers.0.x"]
    )
    assert len(bound.groups) == len(names)
    assert bound.unbound == ("vision_tower.vision_model.encoder.layers.0.x",)


def test_gpt2_without_its_prefix_and_with_its_masks() -> None:
    names = [n.removeprefix("transformer.") for n in make(TINY_GPT2).shapes]
    bound = bind_names(ARCHS["gpt2"], "hf", [*names, "h.0.attn.bias", "h.1.attn.masked_bias"])
    assert (bound.unbound, len(bound.buffers)) == ((), 2)
    assert detect_style(names) == "hf"


TINY_GPT2 = next(t for t in TINY if t.id == "gpt2-plain")


def test_two_spellings_of_one_tensor_are_refused() -> None:
    with pytest.raises(ArchError, match="two spellings"):
        bind_names(ARCHS["llama"], "hf", ["model.norm.weight", "norm.weight"])


def test_of_two_bindings_of_a_role_the_earlier_has_it() -> None:
    names = ["blk.0.attn_kv_b.weight", "blk.0.attn_v_b.weight", "blk.0.attn_k_b.weight"]
    bound = bind_names(ARCHS["deepseek_v2"], "gguf", names)
    assert [group.stored for group in bound.groups] == [(names[2], names[1])]
    assert bound.unbound == (names[0],)
    assert bind_names(ARCHS["deepseek_v2"], "gguf", names[:2]).groups[0].stored == (names[0],)


def test_the_first_mixtral_files_have_one_tensor_an_expert() -> None:
    names = [f"blk.0.ffn_{x}.{e}.weight" for x in ("gate", "up", "down") for e in range(3)]
    bound = bind_names(ARCHS["mixtral"], "gguf", names)
    assert [group.roles for group in bound.groups] == [
        (f"L0.ffn_{x}_exps.weight",) for x in ("gate", "up", "down")
    ]


def test_styles() -> None:
    assert detect_style(["token_embd.weight", "blk.0.attn_q.weight"]) == "gguf"
    assert detect_style(["foo", "bar.0.baz"]) is None
    assert detect_style([]) is None


def test_numbers_are_canonical() -> None:
    index = NameIndex("gguf", [("blk.{L}.ffn_up.{E}.weight", 1)])
    match = index.find("blk.12.ffn_up.3.weight")
    assert match is not None and (match.layer, match.element) == (12, 3)
    for name in (
        "blk.012.ffn_up.3.weight",
        "blk.1.ffn_up.weight",
        "blk.1234567.ffn_up.0.weight",
        "blk.x.ffn_up.0.weight",
        "blk.٣.ffn_up.0.weight",
        "",
        "...",
    ):
        assert index.find(name) is None
    assert expand_template("blk.{L}.ffn_up.{E}.weight", 12, 3) == "blk.12.ffn_up.3.weight"
    assert strip_prefix("model.layers.1.x", "hf") == "layers.1.x"
    assert split_key(role_key(7, "attn_q.weight")) == (7, "attn_q.weight")
    assert split_key("Largest.weight") == (None, "Largest.weight")


def test_what_is_missing_is_named() -> None:
    tiny = next(t for t in TINY if t.id == "mixtral-plain")
    found, names = read(tiny), list(make(tiny).shapes)
    stored = groups_for(found.spec, "hf", found.shapes, found.hp)
    names = [name for group in stored for name in group.stored]
    lost = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    bound = bind_names(found.spec, "hf", [n for n in names if n not in (lost, "model.norm.weight")])
    roles = {key: found.shapes[key] for group in bound.groups for key in group.roles}
    lacking = compare_roles(found.spec, found.hp, roles)
    assert lacking.missing == lacking.vital == ("L1.ffn_down_exps.weight", "output_norm.weight")
    assert bound.incomplete == {"L1.ffn_down_exps.weight": (lost,)}
    assert len(bound.unbound) == found.hp["n_experts"] - 1


def test_expected_tensors_of_qwen2_5_half_a_billion() -> None:
    """290 tensors, 291 with a head of its own, 72 of them biases (24 layers)."""
    tiny = next(t for t in TINY if t.id == "qwen2-plain")
    hp = read(tiny).hp.with_values(n_layers=24, tied_embeddings=True)
    expected = expected_roles(ARCHS["qwen2"], hp)
    assert len(expected) == 290
    assert sum(key.endswith(".bias") for key in expected) == 72
    assert len(expected_roles(ARCHS["qwen2"], hp.with_values(tied_embeddings=False))) == 291
    assert list(expected)[:2] == ["token_embd.weight", "L0.attn_norm.weight"]
    assert list(expected)[-1] == "output_norm.weight"


def test_a_rule_that_says_no_more_is_required_in_every_layer() -> None:
    tiny = next(t for t in TINY if t.id == "qwen2-plain")
    spec = ARCHS["qwen2"]
    more = replace(spec, tensors=(*spec.tensors, TensorRule("attn_sinks.weight", ("n_heads",))))
    extra = set(expected_roles(more, read(tiny).hp)) - set(expected_roles(spec, read(tiny).hp))
    assert extra == {f"L{i}.attn_sinks.weight" for i in range(int(read(tiny).hp["n_layers"]))}


def test_a_layer_beyond_the_model_has_no_place_in_a_conversion() -> None:
    tiny = next(t for t in TINY if t.id == "deepseek_v3-plain")
    found = read(tiny)
    with pytest.raises(ArchError, match="multi-token prediction"):
        groups_for(found.spec, "gguf", ["L4.attn_norm.weight"], found.hp)


def test_shapes_known_before_the_hyperparameters() -> None:
    tiny = next(t for t in TINY if t.id == "gpt2-plain")
    known = known_shapes(read(tiny).bound, make(tiny).shapes)
    assert known["L0.ffn_up.weight"] == (96, 24)  # Conv1D undone
    assert known["L0.attn_q.weight"] == ()  # its size needs the head count


@pytest.mark.parametrize("arch", ARCHS)
def test_stored_frequencies_are_a_buffer_of_every_model_with_rope(arch: str) -> None:
    """Seen red: of other architectures than Llama they were a tensor that nothing reads."""
    spec = ARCHS[arch]
    names = [f"model.{where}rotary_emb.inv_freq" for where in ("", "layers.1.self_attn.")]
    bound = bind_names(spec, "hf", names)
    rope = spec.block.position == "rope"
    assert (list(bound.buffers), list(bound.unbound)) == ((names, []) if rope else ([], names))


NAMES_AT_AN_END = {
    "blk.{L}.ffn_up.{E}.weight": ("blk.7.ffn_up.3.weight", "x.y.blk.0.ffn_up.0.weight"),
    "output_norm.weight": ("output_norm.weight", "a.output_norm.weight"),
    "scale": ("scale", "a.b.scale"),
    "layer.0.q.weight": ("layer.0.q.weight", "encoder.layer.0.q.weight"),
    "blk.{L}.0": ("blk.3.0", "a.blk.3.0"),
}


def test_what_no_template_ends_as_is_not_searched() -> None:
    """Seen red: eight searches for each of 900,000 names that nothing here has."""
    index = NameIndex("gguf", [(name, name) for name in NAMES_AT_AN_END])
    for template, names in NAMES_AT_AN_END.items():
        assert index.find(names[0]) is not None, template
        assert all(index.can_end(name) for name in names), template
    for name in ("blk.3.c.weight", "scale.weight", "x", "", "blk.3.0.bias"):
        assert not index.can_end(name) and index.find(name) is None, name


def test_strangers_names_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a search of each end of each name, where the last components are nobody's."""
    asked = 0
    find = NameIndex.find

    def counted(self: Any, name: str) -> Any:
        nonlocal asked
        asked += 1
        return find(self, name)

    monkeypatch.setattr(NameIndex, "find", counted)
    spec = ARCHS["llama"]
    names = [f"model.layers.{n}.{kind}.weight" for n in range(50) for kind in "abcd"]
    assert prefix_rules(spec, "hf", names, False) == [] and asked == 0
    known = [f"net.model.layers.{n}.mlp.up_proj.weight" for n in range(5)]
    assert list(map(str, prefix_rules(spec, "hf", [*names, *known], False))) == ["net.="]
    assert asked
