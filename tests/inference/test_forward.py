"""Logits and intermediates of every architecture against transformers.

The same float64 arithmetic everywhere agrees to 1e-12; what `.double()` leaves in float32 (norms,
softmax, angles) costs up to 1e-6, a delta net 5e-6; float32 costs below 5e-6. Read from a Hugging
Face folder.

Seen red, each alone: eps 1e-5; half and interleaved pairs swapped; biases left out; one key too
many in the causal mask; the window one position longer; attention's softcap or the final one left
out; head_dim^-0.5 where the file says otherwise; norm offset 0 for gemma; rope on smollm3's
unrotated layers; sinks or the embedding scale left out; the residual scale on attention only; the
logit scale inverted; the shared expert's gate left out; gpt2's division by layer left out; torch's
fused attention without the window; a convolution's taps reversed; a key head's value heads tiled;
softplus left out of the decay; queries not divided by the root of their size; the gates of a short
convolution exchanged, or one left out; keys of the first layer of a kind for those of the
last; copies of the stream not added to their prediction; values not normalised; layers' inputs not
divided by the root of 2; the factor behind a layer left out; an indexer's rope left out, one key
fewer chosen, its choice not used in layers without an indexer of their own; lightning attention's
slopes alike in all layers; a delta net's strength not doubled.
"""

import numpy as np
import pytest

from tests.berts import BERTS
from tests.inference.judge import (
    WITHOUT_A_FUNCTION,
    architecture,
    backend,
    judged,
    rel,
    run,
    traced64,
)
from tests.models import EVERY, MAKERS

EVERYWHERE = {
    "q", "q_rope", "k_rope", "v", "scores", "probs", "attn", "attn_out", "out",
    "final_norm", "attn_norm", "ffn_norm", "ffn_out",
}  # fmt: skip

PER_LAYER = {
    "per_layer_embd", "per_layer_proj", "per_layer", "per_layer_gate", "per_layer_mul",
    "per_layer_out", "per_layer_contrib",
}  # fmt: skip
INDEXER = {
    "index_q", "index_k", "index_q_rope", "index_k_rope", "index_w", "index_scores", "index_keys",
}  # fmt: skip
# Points of architectures with operations of their own, in one of their models at least.
ADDITIONAL = {
    "gemma3n": PER_LAYER | {
        "altup_modes", "altup_modes_after", "altup_predicted", "altup_corrected", "altup_merged",
        "laurel", "v_norm", "in",
    },
    "gemma4": {"v_norm"},
    "gemma4_unified": {"v_norm"},
    "deepseek_v32": INDEXER,
    "minimax_m3_vl": {
        "index_q", "index_k", "index_q_rope", "index_k_rope", "index_block_scores", "index_blocks",
        "ffn_gate", "ffn_up", "ffn_mul", "q_norm", "k_norm",
    },
    "deepseek_v4": INDEXER - {"index_k", "index_k_rope"} | {
        "hc_attn_post", "hc_attn_comb", "hc_attn_in", "hc_ffn_post", "hc_ffn_comb", "hc_ffn_in",
        "hc_merged", "mid", "q_a_norm", "q_norm", "k", "k_norm", "compress_kv", "compress_gate",
        "compressed_k", "index_compress_kv", "index_compress_gate", "index_compressed_k",
        "attn_mixed", "attn_low",
    },
    "minimax": {
        "lightning_qkv", "lightning_gate", "lightning", "lightning_norm", "lightning_gated",
    },
    "glm_moe_dsa": INDEXER,
    "lfm3": {"attn_gate", "attn_contrib", "ffn_contrib", "conv", "conv_gated"},
}  # fmt: skip


def test_the_points_of_two_models_are_compared() -> None:
    """Those that only one of an architecture's models has."""
    points = {key.partition(".")[2] or key for key in judged("gemma4").true_found}
    assert points >= {*PER_LAYER, "ffn_stream"}
    points = {key.partition(".")[2] for key in judged("gemma4-experts").true_found}
    assert points >= {
        "ffn_mlp", "moe_norm", "router_in", "router", "experts", "expert_w", "moe_out", "ffn_moe",
        "ffn_combined", "ffn_contrib",
    }  # fmt: skip
    points = {key.partition(".")[2] for key in judged("gemma3n").true_found}
    assert "ffn_topk" in points


_SSM = {"ssm_gate", "ssm_conv_in", "conv", "ssm_dt", "ssm_step", "ssm_scan", "ssm_gated"}
_OF_ATTENTION = {"q", "q_rope", "k_rope", "v", "scores", "probs", "attn"}
# What models with a state space mixer have besides EVERYWHERE, and what they do not have.
SCANNED = {
    "mamba": ({*_SSM, "ssm_x"}, {*_OF_ATTENTION, "ffn_norm", "ffn_out"}),
    "falcon_mamba": ({*_SSM, "ssm_x"}, {*_OF_ATTENTION, "ffn_norm", "ffn_out"}),
    "mamba2": (_SSM, {*_OF_ATTENTION, "ffn_norm", "ffn_out"}),
    "nemotron_h": (_SSM | {"ffn_up", "ffn_act"}, {"ffn_norm", "q_rope", "k_rope"}),
    "nemotron_h_moe": (_SSM | {"router", "experts", "expert_w"}, {"ffn_norm", "q_rope", "k_rope"}),
    "bamba": (_SSM, set()),
    "granite_hybrid": (_SSM | {"ffn_gate"}, {"q_rope", "k_rope"}),
    "granite_hybrid_moe": (_SSM | {"router"}, {"ffn_out"}),
    "falcon_h1": (_SSM | {"ssm_out"}, {"ffn_out"}),
}

# Mixed by delta nets, which transformers computes in float32 whatever the model's dtype.
# Scores as large as they come, whose softmax transformers computes in float32.
UNSCALED = ("gemma3n", "gemma4", "minimax")  # of minimax the decays are float32
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear")


@pytest.mark.parametrize("name", EVERY)
def test_float64_is_transformers_at_every_point(name: str) -> None:
    judge = judged(name)
    logits, trace = traced64(name)
    loose = (*RECURRENT, *UNSCALED, *SCANNED)
    mixed = 5e-6 if architecture(name) in loose else 1e-6
    assert rel(logits, judge.true_logits) < 1e-12
    assert rel(logits, judge.logits) < mixed
    compared = set()
    for key, expected in judge.true_found.items():
        found = trace.recorded_values(key)
        assert found is not None, f"{key} is not captured"
        assert rel(found, expected) < 1e-12, key
        assert rel(found, judge.found[key]) < mixed, key
        compared.add(key.partition(".")[2] or key)
    normless = architecture(name) in ("olmo2", "olmo3", "exaone4")
    parallel = architecture(name) in (
        "phi2",
        "cohere",
        "cohere2",
        "gptj",
        "falcon",
    ) or name.endswith("parallel")
    if architecture(name).startswith(("hunyuan", "ministral")):
        compared |= {point.replace("_attn", "_rope") for point in compared}
    hidden = {"attn_norm", "ffn_norm"} if normless else {"ffn_norm"} if parallel else set()
    if architecture(name) in ("opt_350m", *BERTS):
        hidden = {"attn_norm", "ffn_norm", "final_norm"}
    if architecture(name) in WITHOUT_A_FUNCTION:
        hidden |= {"scores", "probs", "q_rope", "k_rope"}
    more, less = SCANNED.get(architecture(name), (set(), set()))
    if name == "falcon_h1-unnormed":
        more = more - {"ssm_gate"}  # no module reads it
    assert compared >= (EVERYWHERE | more) - hidden - less
    if architecture(name).startswith("lfm"):
        assert compared >= {"conv_in", "conv_x", "conv", "conv_gated"}
    if architecture(name) in ADDITIONAL:
        assert compared >= ADDITIONAL[architecture(name)]
    if architecture(name) in RECURRENT:
        apart = {"delta_qkv", "delta_gate", "attn_gate", "beta_mm", "alpha"}
        if "next" in name:
            apart = {"attn_gate"}  # one product there
        if "kimi" in name:
            apart = {"delta_gate_low", "delta_gate", "forget_low", "forget", "beta_mm"}
        if "olmo" in name:
            apart = {"delta_gate", "attn_contrib", "ffn_contrib", "beta_mm", "alpha"}
        assert compared >= {"conv", "beta", "decay", "delta", "delta_norm"} | apart


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32"])
@pytest.mark.parametrize("name", EVERY)
def test_float32_is_within_rounding(name: str, run_: str) -> None:
    assert rel(run(name, backend(run_)), judged(name).true_logits) < 5e-6


@pytest.mark.parametrize("name", MAKERS)
def test_torch_in_float64_agrees_too(name: str) -> None:
    assert rel(run(name, backend("torch:float64")), judged(name).true_logits) < 1e-12


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", MAKERS)
def test_tied_and_untied_heads(name: str, tied: bool) -> None:
    logits = run(name, backend("numpy:float64"), tied)
    assert rel(logits, judged(name, tied).true_logits) < 1e-12


def test_the_last_row_alone_and_chosen_rows_equal_all_rows() -> None:
    from aprfmt.inference.forward import forward
    from aprfmt.inference.weights import model_weights
    from aprfmt.model import open_model
    from tests.models import IDS

    b = backend("numpy:float64")
    with open_model(judged("gemma2").folder) as model:
        weights = model_weights(model)
        every = forward(b, model.spec, model.hyper, weights, IDS, logits_rows="all")
        last = forward(b, model.spec, model.hyper, weights, IDS)
        some = forward(b, model.spec, model.hyper, weights, IDS, logits_rows=[3, 4, 20])
    np.testing.assert_allclose(last, every[-1:], rtol=1e-12)
    np.testing.assert_allclose(some, every[[3, 4, 20]], rtol=1e-12)
