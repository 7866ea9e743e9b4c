"""Which encoding every tensor gets: literals from llama.cpp's source, and files it made."""

from pathlib import Path

import pytest

import aprfmt
from aprfmt.conversion import Options
from aprfmt.conversion.quantize_options import model_mixture
from aprfmt.errors import UsageError
from aprfmt.quantizing.mixture import (
    FALLBACK,
    SCHEMES,
    Mixture,
    deciding_name,
    fitting_encoding,
    is_bitsandbytes_linear,
    is_linear,
)

# Llama-3-8B: rows, columns of the GGUF tensors of a layer.
LAYER = {
    "attn_norm": (4096,), "attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096),
    "attn_output": (4096, 4096), "ffn_norm": (4096,), "ffn_gate": (14336, 4096),
    "ffn_up": (14336, 4096), "ffn_down": (4096, 14336),
}  # fmt: skip
MODEL = {"token_embd": (128256, 4096), "output_norm": (4096,), "output": (128256, 4096)}
MORE_BITS_32 = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
ALL_32 = set(range(32))

# scheme -> (base, output, {kind: {encoding: layers}}) where the base is not used.
EXPECTED: dict[str, tuple[str, str, dict[str, dict[str, set[int]]]]] = {
    "Q4_K_M": ("Q4_K", "Q6_K", {"attn_v": {"Q6_K": MORE_BITS_32},
                                "ffn_down": {"Q6_K": MORE_BITS_32}}),
    "Q5_K_M": ("Q5_K", "Q6_K", {"attn_v": {"Q6_K": MORE_BITS_32},
                                "ffn_down": {"Q6_K": MORE_BITS_32}}),
    "Q4_K_S": ("Q4_K", "Q6_K", {"attn_v": {"Q5_K": {0, 1, 2, 3}},
                                "ffn_down": {"Q5_K": {0, 1, 2, 3}}}),
    "Q5_K_S": ("Q5_K", "Q6_K", {}),
    "Q3_K_M": ("Q3_K", "Q6_K", {"attn_v": {"Q5_K": {0, 1}, "Q4_K": ALL_32 - {0, 1}},
                                "ffn_down": {"Q5_K": {0, 1}, "Q4_K": ALL_32 - {0, 1}},
                                "attn_output": {"Q4_K": ALL_32}}),
    "Q2_K": ("Q2_K", "Q6_K", {"attn_v": {"Q4_K": ALL_32}, "ffn_down": {"Q3_K": ALL_32},
                              "attn_output": {"Q3_K": ALL_32}}),
    "IQ4_XS": ("IQ4_XS", "Q6_K", {"attn_v": {"Q5_K": ALL_32}, "ffn_down": {"Q5_K": {0, 1, 2, 3}}}),
    "IQ4_NL": ("IQ4_NL", "Q6_K", {"attn_v": {"Q5_K": ALL_32}, "ffn_down": {"Q5_K": {0, 1, 2, 3}}}),
    "Q6_K": ("Q6_K", "Q6_K", {}),
    "Q8_0": ("Q8_0", "Q8_0", {}),
    "Q4_0": ("Q4_0", "Q6_K", {}),
    "Q4_1": ("Q4_1", "Q6_K", {}),
    "Q5_0": ("Q5_0", "Q6_K", {}),
    "Q5_1": ("Q5_1", "Q6_K", {}),
    "F16": ("F16", "F16", {}),
    "BF16": ("BF16", "BF16", {}),
    "F32": ("F32", "F32", {}),
}  # fmt: skip
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10,
    "Q3_K_M": 12, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip


def llama_names(layers: int = 32) -> dict[str, tuple[int, ...]]:
    """Return role keys and shapes, in the order of a file that sorts its names as text."""
    names = {f"{base}.weight": shape for base, shape in MODEL.items()}
    for layer in sorted(range(layers), key=str):
        names |= {f"L{layer}.{base}.weight": shape for base, shape in LAYER.items()}
    return names


def llama(scheme: str, layers: int = 32, **facts: object) -> Mixture:
    """Return the mixture of a model of Llama-3's shape."""
    facts = {"n_layers": layers, "n_gqa": 4, "arch": "llama"} | facts
    return Mixture(scheme, list(llama_names(layers)), **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_gqa", "encoding"), [(1, "Q3_K"), (3, "Q3_K"), (4, "Q4_K"), (8, "Q4_K")]
)
def test_values_of_q2_k_go_by_the_queries_that_share_them(n_gqa: int, encoding: str) -> None:
    # llama_tensor_get_type: n_gqa() >= 4 ? GGML_TYPE_Q4_K : GGML_TYPE_Q3_K
    mixture = llama("Q2_K", n_gqa=n_gqa)
    found = [mixture.choose(f"L{i}.attn_v.weight", LAYER["attn_v"], "F16") for i in range(32)]
    assert set(found) == {encoding}


@pytest.mark.parametrize("scheme", EXPECTED)
def test_llama_of_32_layers(scheme: str) -> None:
    base, output, others = EXPECTED[scheme]
    mixture = llama(scheme)
    for name, shape in llama_names().items():
        found = mixture.choose(name, shape, "F16")
        kind = name.split(".")[-2]
        expected: str | None = base
        if "norm" in name:
            expected = None
        elif kind == "output":
            expected = output
        elif name.startswith("L"):
            layer = int(name[1:].split(".")[0])
            for encoding, at in others.get(kind, {}).items():
                if layer in at:
                    expected = encoding
        assert found == expected, name


def test_every_ggml_scheme_has_an_expectation_and_its_file_type() -> None:
    ggml = {name: row.file_type for name, row in SCHEMES.items() if row.file_type is not None}
    assert set(EXPECTED) == set(ggml)
    assert ggml == FILE_TYPES


@pytest.mark.parametrize("name", ["gemma", "smollm2"])
def test_files_that_llama_cpp_made(name: str, request: pytest.FixtureRequest) -> None:
    """Gemma's 640 columns take every fallback; SmolLM2 is Q4_1."""
    path: Path = request.getfixturevalue(name)
    by_type = {number: scheme for scheme, number in FILE_TYPES.items()}
    with aprfmt.open(path) as model:
        scheme = by_type[model.metadata["general.file_type"]]
        mixture = model_mixture(model, Options(quantize=scheme), False)
        for tensor in model.values():
            found = mixture.choose(tensor.name, tensor.shape, "F32") or "F32"
            assert found == tensor.encoding, tensor.name


def test_a_tied_embedding_is_the_head() -> None:
    names = [name for name in llama_names() if name != "output.weight"]
    mixture = Mixture("Q4_K_M", names, n_layers=32)
    assert mixture.choose("token_embd.weight", (100, 256), "F16") == "Q6_K"
    assert mixture.choose("token_embd.weight", (100, 96), "F16") == "Q8_0"
    assert llama("Q4_K_M").choose("token_embd.weight", (100, 256), "F16") == "Q4_K"


def test_an_importance_matrix_spares_or_raises_ffn_down() -> None:
    for scheme, without, given in (
        ("IQ4_XS", "Q5_K", "IQ4_XS"),
        ("Q4_0", "Q4_0", "Q4_1"),
        ("Q5_0", "Q5_0", "Q5_1"),
    ):
        for imatrix, expected in ((False, without), (True, given)):
            mixture = llama(scheme, imatrix=imatrix)
            assert mixture.choose("L3.ffn_down.weight", (4096, 14336), "F16") == expected
            assert mixture.choose("L4.ffn_down.weight", (4096, 14336), "F16") == scheme


def test_seventy_billions_and_eight_experts_raise_attention() -> None:
    assert llama("Q4_K_S", 80).choose("L40.attn_v.weight", (1024, 8192), "F16") == "Q5_K"
    assert llama("Q4_K_S", 79).choose("L40.attn_v.weight", (1024, 8192), "F16") == "Q4_K"
    eight = llama("Q4_K_M", n_experts=8)
    for base, expected in (
        ("attn_v", "Q8_0"),
        ("attn_k", "Q8_0"),
        ("attn_output", "Q5_K"),
        ("attn_q", "Q4_K"),
    ):
        assert eight.choose(f"L5.{base}.weight", (1024, 4096), "F16") == expected


def test_experts_are_numbered_by_their_layer() -> None:
    """Three dense-less layers: the shared and the stacked down projection have one number."""
    names = [
        f"L{i}.{base}.weight"
        for i in range(16)
        for base in ("attn_v", "ffn_down_exps", "ffn_down_shexp")
    ]
    mixture = Mixture("Q4_K_M", names, n_layers=16, n_experts=64)
    for layer in range(16):
        more = layer < 2 or layer >= 14 or (layer - 2) % 3 == 2
        for base, shape in (("ffn_down_exps", (64, 512, 256)), ("ffn_down_shexp", (512, 256))):
            found = mixture.choose(f"L{layer}.{base}.weight", shape, "F16")
            assert found == ("Q6_K" if more else "Q4_K"), (layer, base)


def test_falcon_has_rules_of_its_own() -> None:
    falcon = llama("Q4_K_M", arch="falcon")
    assert falcon.choose("output.weight", (128256, 4096), "F16") == "Q8_0"
    found = [falcon.choose(f"L{i}.ffn_down.weight", (4096, 14336), "F16") for i in range(8)]
    assert found == ["Q6_K", "Q6_K", "Q5_K", "Q5_K", "Q4_K", "Q4_K", "Q5_K", "Q4_K"]


def test_pure_takes_the_base_everywhere_but_where_it_does_not_fit() -> None:
    mixture = llama("Q4_K_M", pure=True)
    for name, shape in llama_names().items():
        assert mixture.choose(name, shape, "F16") == (None if "norm" in name else "Q4_K")
    assert mixture.choose("L0.attn_q.weight", (64, 96), "F16") == "Q5_0"


@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if not row.mixes])
def test_pure_changes_nothing_of_a_type_that_is_no_mixture(scheme: str) -> None:
    arch = SCHEMES[scheme].arch or "llama"
    plain, pure = llama(scheme, arch=arch), llama(scheme, arch=arch, pure=True)
    shapes = {**llama_names(4), "L0.attn_q.weight": (64, 96), "L1.ffn_gate_up_exps": (4, 64, 64)}
    for name, shape in shapes.items():
        assert plain.choose(name, shape, "F16") == pure.choose(name, shape, "F16")


def test_what_does_not_fit_becomes_what_llama_cpp_makes_of_it() -> None:
    """Source: tensor_type_fallback in llama-quant.cpp."""
    assert dict(FALLBACK) == {
        "Q2_K": "Q4_0",
        "Q3_K": "Q4_0",
        "TQ1_0": "Q4_0",
        "TQ2_0": "Q4_0",
        "Q2_0": "Q4_0",
        "Q4_K": "Q5_0",
        "Q5_K": "Q5_1",
        "Q6_K": "Q8_0",
        "IQ4_XS": "IQ4_NL",
    }


@pytest.mark.parametrize("wanted", FALLBACK)
def test_columns_that_do_not_fit(wanted: str) -> None:
    assert fitting_encoding(wanted, 512) == wanted
    assert fitting_encoding(wanted, 96) == FALLBACK[wanted]
    assert fitting_encoding(wanted, 40) == "F16"


@pytest.mark.parametrize("name", [
    "L0.attn_q.bias", "L0.attn_q_norm.weight", "L0.ffn_gate_inp.weight", "position_embd.weight",
    "blk.0.ssm_conv1d.weight", "blk.2.time_mix_w1.weight", "altup_proj.weight",
    "token_types.weight",
    "blk.1.laurel_l.weight", "per_layer_model_proj.weight", "v.patch_embd.weight", "L0.rope_freqs",
])  # fmt: skip
def test_what_is_never_quantized(name: str) -> None:
    assert Mixture("Q4_K_M", [name], n_layers=4).choose(name, (512, 512), "F16") is None


@pytest.mark.parametrize("shape", [(512,), (1, 512), (1, 1, 512)])
def test_ggml_counts_no_dimensions_of_one(shape: tuple[int, ...]) -> None:
    assert Mixture("Q8_0", [], n_layers=1).choose("L0.attn_q.weight", shape, "F16") is None


@pytest.mark.parametrize(
    ("name", "shape", "encoding"),
    [
        ("L0.ffn_gate_exps.weight", (4, 64, 32), "GPT_OSS"),
        ("model.layers.0.mlp.experts.down_proj", (4, 32, 64), "GPT_OSS"),
        ("L0.ffn_gate_exps.weight", (4, 64, 33), None),
        ("L0.ffn_gate_exps.weight", (64, 32), None),
        ("L0.attn_q.weight", (4, 64, 32), None),
    ],
)
def test_stacks_of_experts_alone_are_packed_as_gpt_oss_is(
    name: str, shape: tuple[int, ...], encoding: str | None
) -> None:
    mixture = Mixture("GPT-OSS-MXFP4", [name], n_layers=1, n_experts=4, arch="gpt-oss")
    assert mixture.choose(name, shape, "BF16") == encoding


def test_integers_stay_integers() -> None:
    assert llama("Q4_K_M").choose("L0.attn_q.weight", (512, 512), "I32") is None


def test_a_fused_qkv_counts_as_the_value() -> None:
    names = ("model.layers.0.qkv_proj.weight", "L0.attn_q.weight", "L0.attn_v.weight")
    assert deciding_name(names) == "L0.attn_v.weight"
    assert deciding_name(("blk.3.attn_qkv.weight", *names)) == "blk.3.attn_qkv.weight"
    mixture = Mixture("Q4_K_M", ["blk.0.attn_qkv.weight"], n_layers=1)
    assert mixture.choose("blk.0.attn_qkv.weight", (512, 512), "F16") == "Q6_K"


def test_an_unknown_scheme_lists_all() -> None:
    with pytest.raises(UsageError, match=r"Q9_K: is not known; near names: .*Q6_K.*lists all"):
        Mixture("Q9_K", [], n_layers=1)


@pytest.mark.parametrize(
    ("name", "base", "shape", "packed"),
    [
        ("blk.0.attn_q.weight", "attn_q", (8, 8), True),
        ("blk.0.attn_norm.weight", "attn_norm", (8, 8), False),
        ("blk.0.ffn_gate_inp.weight", "ffn_gate_inp", (8, 8), False),
        ("blk.0.ffn_gate_inp_shexp.weight", "ffn_gate_inp_shexp", (8,), True),
        ("blk.0.ffn_up_exps.weight", "ffn_up_exps", (4, 8, 8), False),
        ("blk.0.ffn_up_exps.weight", "ffn_up_exps", (8, 8), False),
        ("token_embd.weight", "token_embd", (8, 8), False),
        ("output.weight", "output", (8, 8), False),
        ("blk.0.attn_q.bias", "attn_q", (8,), False),
        ("blk.0.altup_router.weight", "gate", (8, 8), False),
        ("blk.0.laurel_l.weight", "left", (8, 8), False),
        ("model.norm_proj.weight", "attn_q", (8, 8), True),
        ("model.layers.0.attn_norm", "attn_q", (8, 8), True),
    ],
)
def test_what_is_a_linear_goes_by_the_role_and_what_is_kept_by_the_name_too(
    name: str, base: str, shape: tuple[int, ...], packed: bool
) -> None:
    assert is_bitsandbytes_linear(name, base, shape) is packed
    if packed and len(shape) == 2:
        assert is_linear(name, base, "weight", shape) and not is_linear(name, base, "bias", shape)
    elif base not in ("ffn_gate_inp_shexp",):
        assert not is_linear(name, base, "weight", shape) or base.endswith("_exps")


def test_layers_are_numbered_by_their_names_only_with_several_experts() -> None:
    """Where the first layers have none of a kind, the others are counted; with experts they keep
    their own numbers, and so their places among the layers that get more bits."""
    names = [f"blk.{layer}.ffn_down.weight" for layer in range(8, 24)]
    for experts in (0, 1, 8):
        mixture = Mixture("Q4_K_M", names, n_layers=24, n_experts=experts)
        found = [mixture.choose(name, (256, 256), "F32") for name in names]
        place = {name: at + 8 * (experts > 1) for at, name in enumerate(names)}
        more = [at < 3 or at >= 21 or (at - 3) % 3 == 2 for at in place.values()]
        assert found == ["Q6_K" if each else "Q4_K" for each in more]
