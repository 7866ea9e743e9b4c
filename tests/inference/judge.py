"""transformers as the judge: its logits and every intermediate of ours that it shows.

`judged(name)` runs a tiny model twice in float64: as `.double()` leaves it (norms, softmax and
rope still float32 inside), and with these forced to float64 too. Hooks and a wrapper around eager
attention collect intermediates under our keys, [tokens, ...] without the batch.
"""

import contextlib
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Trace
from aprfmt.model import open_model
from tests.models import FUSED, IDS, MAKERS, VARIANTS, save_tiny

Found = dict[str, np.ndarray]
_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-judge-")

# Module below a layer -> (points of its output, point of its input).
MODULES: dict[str, tuple[tuple[str, ...], str]] = {
    r"(input|attention)_layernorm|operator_norm|ln_1|ln_attn|norm_1|self_attn_layer_norm|norm": (
        ("attn_norm",),
        "",
    ),
    r"ln_mlp": (("ffn_norm",), ""),
    r"(self_)?attention\.query_key_value": (("q", "k", "v"), ""),
    r"(self_)?attention\.dense|(self_)?attn\.out_proj": (("attn_out",), "attn"),
    r"attn\.q_proj": (("q",), ""),
    r"attn\.k_proj": (("k",), ""),
    r"attn\.v_proj": (("v",), ""),
    r"(self_attn|mixer)\.q_proj": (("q",), ""),
    r"(self_attn|mixer)\.k_proj": (("k",), ""),
    r"(self_attn|mixer)\.v_proj": (("v",), ""),
    r"self_attn\.qkv_proj|attn\.c_attn|attn\.Wqkv": (("q", "k", "v"), ""),
    r"self_attn\.q_(norm|layernorm)": (("q_norm",), ""),
    r"self_attn\.k_(norm|layernorm)": (("k_norm",), ""),
    r"self_attn\.query_layernorm": (("q_attn",), ""),
    r"self_attn\.key_layernorm": (("k_attn",), ""),
    r"self_attn\.q_a_proj": (("q_a",), ""),
    r"self_attn\.q_a_layernorm": (("q_a_norm",), ""),
    r"self_attn\.q_b_proj": (("q",), ""),
    r"self_attn\.kv_a_proj_with_mqa": (("kv_a",), ""),
    r"self_attn\.kv_a_layernorm": (("kv_a_norm",), ""),
    r"self_attn\.output_gate": (("lightning_gate",), ""),
    r"self_attn\.norm": (("lightning_norm",), "lightning"),
    r"self_attn\.indexer\.wq_b": (("index_q",), ""),
    r"self_attn\.indexer\.k_norm": (("index_k",), ""),
    r"self_attn\.indexer\.weights_proj": (("index_w",), ""),
    r"self_attn\.indexer\.q_norm": (("index_q",), ""),
    r"self_attn\.q_a_norm": (("q_a_norm",), ""),
    r"self_attn\.q_b_norm": (("q_norm",), ""),
    r"self_attn\.kv_proj": (("k",), ""),
    r"self_attn\.kv_norm": (("k_norm",), ""),
    r"self_attn\.compressor\.kv_proj": (("compress_kv",), ""),
    r"self_attn\.compressor\.gate_proj": (("compress_gate",), ""),
    r"self_attn\.compressor\.indexer\.kv_proj": (("index_compress_kv",), ""),
    r"self_attn\.compressor\.indexer\.gate_proj": (("index_compress_gate",), ""),
    r"self_attn\.compressor\.indexer\.q_b_proj": (("index_q",), ""),
    r"self_attn\.compressor\.indexer\.scorer\.weights_proj": (("index_w",), ""),
    r"self_attn\.compressor\.indexer\.scorer": (("index_scores",), ""),
    r"self_attn\.o_a_proj": ((), "attn"),
    r"self_attn\.o_b_proj": (("attn_out",), "attn_low"),
    r"self_attn\.(o_proj|dense)|attn\.c_proj|mixer\.o_proj": (("attn_out",), "attn"),
    r"(pre_)?feedforward_layernorm|pre_ff_layernorm|ln_2|norm_2|final_layer_norm|ffn_norm": (
        ("ffn_norm",),
        "mid",
    ),
    r"(mixer|mamba)\.x_proj": (("ssm_x",), ""),
    r"(mixer|mamba)\.out_proj": (("attn_out",), "ssm_gated"),
    r"mixer\.up_proj": (("ffn_up",), ""),
    r"mixer\.act_fn": (("ffn_act",), ""),
    r"mixer\.down_proj": (("ffn_out",), "ffn_mul"),
    r"mixer\.fc1_latent_proj": (("latent",), ""),
    r"mixer\.fc2_latent_proj": ((), "latent_out"),
    r"shared_mlp\.input_linear": (("ffn_gate", "ffn_up"), ""),
    r"shared_mlp\.activation": (("ffn_act",), ""),
    r"shared_mlp\.output_linear": (("ffn_out",), "ffn_mul"),
    r"post_self_attn_layernorm": (("attn_contrib",), ""),
    r"post_feedforward_layernorm|post_mlp_layernorm": (("ffn_contrib",), ""),
    r"self_attn\.v_norm": (("v_norm",), ""),
    r"self_attn\.g_proj": (("attn_gate",), ""),
    r"post_operator_norm": (("attn_contrib",), ""),
    r"post_ffn_norm": (("ffn_contrib",), ""),
    r"laurel": (("laurel",), ""),
    r"post_feedforward_layernorm_1": (("ffn_mlp",), ""),
    r"pre_feedforward_layernorm_2": (("moe_norm",), ""),
    r"router\.proj": (("router",), "router_in"),
    r"experts": (("moe_out",), ""),
    r"post_feedforward_layernorm_2": (("ffn_moe",), ""),
    r"per_layer_input_gate": (("per_layer_gate",), ""),
    r"per_layer_projection": (("per_layer_out",), "per_layer_mul"),
    r"post_per_layer_input_norm": (("per_layer_contrib",), ""),
    r"self_attn\.forget_gate\.f_a_proj": (("forget_low",), ""),
    r"self_attn\.forget_gate\.f_b_proj": (("forget",), ""),
    r"self_attn\.g_a_proj": (("delta_gate_low",), ""),
    r"self_attn\.g_b_proj": (("delta_gate",), ""),
    r"linear_attn\.in_proj_qkv": (("delta_qkv",), ""),
    r"linear_attn\.(in_proj_z|g_proj)": (("delta_gate",), ""),
    r"linear_attn\.(in_proj_b|b_proj)|self_attn\.b_proj": (("beta_mm",), ""),
    r"linear_attn\.(in_proj_a|a_proj)": (("alpha",), ""),
    r"linear_attn\.(out_proj|o_proj)": (("attn_out",), "delta_norm"),
    r"conv\.in_proj": (("conv_in",), ""),
    r"conv\.out_proj": (("attn_out",), "conv_gated"),
    r"feed_forward\.w1": (("ffn_gate",), ""),
    r"feed_forward\.w3": (("ffn_up",), ""),
    r"feed_forward\.w2": (("ffn_out",), "ffn_mul"),
    r"(mlp|feed_forward)\.gate_proj": (("ffn_gate",), ""),
    r"(mlp|feed_forward)\.(up_proj|fc1|c_fc|fc_in|dense_h_to_4h)|ffn\.up_proj|fc1": (
        ("ffn_up",),
        "",
    ),
    r"mlp\.gate_up_proj": (("ffn_gate", "ffn_up"), ""),
    r"(mlp|feed_forward)\.(act_fn|activation_fn|act)|ffn\.act|activation_fn": (("ffn_act",), ""),
    r"(mlp|feed_forward)\.(down_proj|fc2|c_proj|fc_out|dense_4h_to_h)|ffn\.down_proj|fc2": (
        ("ffn_out",),
        "ffn_mul",
    ),
    r"(mlp|block_sparse_moe|feed_forward|mixer)\.(gate|router)": (("router",), ""),
    r"mlp|block_sparse_moe|feed_forward|mixer": (("ffn_out",), ""),
    r"attention\.self\.query": (("q",), ""),
    r"attention\.self\.key": (("k",), ""),
    r"attention\.self\.value": (("v",), ""),
    r"attention\.output\.dense": (("attn_out",), "attn"),
    r"attention\.output\.LayerNorm": (("mid",), "attn_sum"),
    r"intermediate\.dense": (("ffn_up",), ""),
    r"output\.dense": (("ffn_out",), "ffn_act"),
    r"output\.LayerNorm": (("out",), "ffn_sum"),
    r"": (("out",), "in"),
}
# Their attention is no function of its own in transformers' code.
WITHOUT_A_FUNCTION = ("gptj", "falcon", "falcon_40b", *FUSED, "bloom", "mpt")
# Model types whose MLP's module adds the stream to what it returns.
ADDING = ("bloom",)
# Model types whose post_attention_layernorm ends the attention.
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
SANDWICH = ("gemma2", "gemma3_text", "gemma3n_text", *GEMMA4, "olmo2", "olmo3", "exaone4")
# Model types whose code leaves rotated vectors in adjacent pairs.
PAIRED = ("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "gptj", "llama4_text")
WHOLE: dict[str, str] = {
    r"model\.(decoder\.)?embed_tokens|transformer\.(wte|word_embeddings)": "embd",
    r"(model|backbone)\.embeddings": "embd",
    r"gpt_neox\.embed_in": "embd",
    r"model\.embed_tokens_per_layer": "per_layer_embd",
    r"model\.per_layer_projection_norm": "per_layer_proj",
    r"transformer\.word_embeddings_layernorm": "embd_norm",
    r"(model|transformer|backbone)\.(norm|embedding_norm|final_layernorm|ln_f|norm_f)": (
        "final_norm"
    ),
    r"(gpt_neox|model\.decoder)\.final_layer_norm": "final_norm",
    r"model\.hc_head": "hc_merged",
    r"model\.decoder\.project_in": "embd_in",
    r"model\.decoder\.project_out": "head_in",
    r"(bert|roberta)\.embeddings\.word_embeddings": "embd",
    r"(bert|roberta)\.embeddings\.LayerNorm": "embd_norm",
    r"(cls\.predictions\.transform|lm_head)\.dense": "head_in",
    r"cls\.predictions\.transform\.LayerNorm|lm_head\.layer_norm": "final_norm",
    r"lm_head|(cls\.predictions|lm_head)\.decoder": "logits_raw",
}
# The function of a delta net, in transformers' code.
_RULES = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
_CONVOLUTION = "causal_conv1d_fn"  # the function of a short convolution, there too
_SCANS = "mamba_selective_scan", "mamba2_chunk_scan"  # those of state space mixers
_STACKS = """model.layers transformer.h gpt_neox.layers transformer.blocks model.decoder.layers
    backbone.layers
    bert.encoder.layer roberta.encoder.layer"""
_LAYER = re.compile(rf"(?:{'|'.join(map(re.escape, _STACKS.split()))})\.(\d+)\.?(.*)")


@dataclass(frozen=True)
class Judged:
    """One tiny model, its folder, and what transformers computed in float64."""

    folder: Path
    logits: np.ndarray
    found: Found
    true_logits: np.ndarray
    true_found: Found


@cache
def judged(name: str, tied: bool | None = None) -> Judged:
    folder = Path(_FOLDER.name) / f"{name}-{tied}"
    model = save_tiny(name, folder, tied=tied).double()
    ids = torch.tensor([IDS])
    found: Found = {}
    true_found: Found = {}
    with torch.no_grad():
        with watched(model, found):
            logits = model(ids).logits[0].numpy()
        with everything_float64(model), watched(model, true_found):
            true_logits = model(ids).logits[0].numpy()
    return Judged(folder, logits, found, true_logits, true_found)


@contextlib.contextmanager
def everything_float64(model: Any) -> Iterator[None]:
    """Make what the modelling code computes in float32 float64; frequencies stay as they are."""
    saved = torch.float32, torch.float, torch.Tensor.float
    code: Any = sys.modules[type(model).__module__]
    gelu = getattr(code, "bloom_gelu_forward", None)  # its constant has eight digits
    config = getattr(model, "config", None)  # a part of a model has none
    for module in model.modules():
        if hasattr(module, "mup_vector"):  # falcon_h1's factors are made in float32
            module.mup_vector = _factors(model.config)
        if hasattr(module, "get_slope_rate"):  # minimax's slopes and what follows from them
            _slopes_in_float64(module)
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale.fill_(module.scalar_embed_scale)
        for name, value in _kept_factors(config).items():
            if isinstance(getattr(module, name, None), torch.Tensor):
                getattr(module, name).fill_(value)
        if type(module).__name__ == "PhimoeRotaryEmbedding":  # makes them in each pass
            made = module.original_inv_freq, module.attention_scaling
            module.rope_init_fn = lambda config, made=made: made
        if hasattr(module, "pos_embd_dim"):  # gptj's cos and sin are made in float32
            module.embed_positions = _turns(*module.embed_positions.shape)
    if gelu is not None:
        code.bloom_gelu_forward = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        if gelu is not None:
            code.bloom_gelu_forward = gelu
        torch.float32, torch.float = saved[:2]
        torch.Tensor.float = saved[2]  # type: ignore[method-assign]


def _slopes_in_float64(module: Any) -> None:
    """Make a lightning attention's buffers of decays anew in float64."""
    saved = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        slopes = module.get_slope_rate().double()
        made = (slopes, *module.decay_factors(slopes))
    finally:
        torch.set_default_dtype(saved)
    names = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    for name, value in zip(names, made, strict=True):
        getattr(module, name).copy_(value)


def _kept_factors(cfg: Any) -> dict[str, float]:
    """Return the factors that gemma3n keeps in float32."""
    width = getattr(cfg, "hidden_size", 1)
    return {
        "per_layer_projection_scale": width**-0.5,
        "per_layer_input_scale": 2.0**-0.5,
        "router_input_scale": 1 / width,
    }


def _factors(cfg: Any) -> Any:
    """Return falcon_h1's factors on a mixer's projection, in float64."""
    width, shared = cfg.mamba_d_ssm, cfg.mamba_n_groups * cfg.mamba_d_state
    sizes = torch.tensor([width, width, shared, shared, cfg.mamba_n_heads])
    return torch.tensor(cfg.ssm_multipliers, dtype=torch.float64).repeat_interleave(sizes)


def _turns(count: int, dim: int) -> Any:
    """Return sin and cos in float64 of float32 frequencies, side by side."""
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.int64) / dim))
    angles = torch.arange(count, dtype=torch.float64)[:, None] * inv_freq.double()
    return torch.cat((torch.sin(angles), torch.cos(angles)), dim=1)


@contextlib.contextmanager
def watched(model: Any, found: Found) -> Iterator[None]:
    """Collect intermediates of one forward pass under our keys."""
    code = sys.modules[type(model).__module__]
    original: Callable[..., Any] | None = getattr(code, "eager_attention_forward", None)
    cfg = model.config

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        assert original is not None
        out, weights = original(module, query, key, value, mask, **options)
        prefix = f"L{module.layer_idx}."
        if cfg.model_type == "deepseek_v4":
            found[prefix + "attn_mixed"] = _halves(cfg, out)[0].flatten(1).numpy()
            tokens = query.shape[2]  # keys of windows come after theirs
            if key.shape[2] > tokens:
                windows = _halves(cfg, key[:, :, tokens:])
                found[prefix + "compressed_k"] = windows[0].transpose(0, 1).numpy()
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scaling = options.get("scaling")
        scores = query @ repeated.transpose(2, 3) * scaling
        cap = options.get("softcap")
        found[prefix + "scores"] = (scores if cap is None else torch.tanh(scores / cap) * cap)[
            0
        ].numpy()
        found[prefix + "probs"] = weights[0].numpy()
        if cfg.model_type == "deepseek_v4":
            key, value = (x[:, :, : query.shape[2]] for x in (key, _halves(cfg, value)))
        turned, *names = _turned(cfg, module)
        if cfg.model_type == "opt":  # scaled already
            query = query * query.shape[-1] ** 0.5
        shared = getattr(module, "is_kv_shared_layer", False)  # an earlier layer's keys
        for name, x in zip(names, (query, None if shared else key), strict=True):
            if x is None:
                continue
            halved = _halves(cfg, x) if turned else x
            found[prefix + name] = halved[0].transpose(0, 1).numpy()
        normed = hasattr(module, "v_norm") or shared
        if not normed:
            found[prefix + "v"] = value[0].transpose(0, 1).numpy()
        return out, weights

    handles = [
        module.register_forward_hook(_hook(path, cfg, found))
        for path, module in model.named_modules()
    ]
    rule_name = next((name for name in _RULES if hasattr(code, name)), "")
    rule = getattr(code, rule_name, None)

    def ruled(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **options: Any) -> Any:
        assert rule is not None
        layer = f"L{_entered(found)}."
        joined = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
        read, state = rule(q, k, v, g=g, beta=beta, **options)
        channels = g.flatten(2)
        for name, x in (
            ("conv", joined),
            ("beta", beta),
            ("decay", channels),
            ("delta", read.flatten(2)),
        ):
            found[layer + name] = x[0].numpy()
        return read, state

    scans = {name: getattr(code, name) for name in _SCANS if hasattr(code, name)}
    convolves = hasattr(cfg, "conv_L_cache") or scans
    convolution = getattr(code, _CONVOLUTION, None) if convolves else None

    def scanned(x: Any, dt: Any, *args: Any, **options: Any) -> Any:
        layer, [original] = f"L{_entered(found)}.", scans.values()
        low, high = options.get("dt_limit", (0.0, math.inf))
        bias = options.get("dt_bias", options.get("delta_bias"))
        raw = dt[0] if "mamba2_chunk_scan" in scans else dt[0].T
        read = original(x, dt, *args, **{**options, "z": None, "return_last_state": False})
        one = raw.ndim == 2 and "mamba2_chunk_scan" not in scans
        found[layer + "ssm_dt"] = raw.numpy()
        found[layer + "ssm_step"] = torch.nn.functional.softplus(raw + bias).clamp(
            low, high).numpy()  # fmt: skip
        found[layer + "ssm_scan"] = (read[0].T if one else read[0].flatten(1)).numpy()
        if options.get("z") is not None:
            found[layer + "ssm_gate"] = options["z"][0].T.numpy()
        return original(x, dt, *args, **options)

    def convolved(x: Any, *args: Any, **options: Any) -> Any:
        assert convolution is not None
        layer = f"L{_entered(found)}."
        found[layer + ("ssm_conv_in" if scans else "conv_x")] = x[0].T.numpy()
        mixed = convolution(x, *args, **options)
        found[layer + "conv"] = mixed[0].T.numpy()
        return mixed

    altered = list(_methods_watched(model, found))
    kinds = any(hasattr(cfg, name) for name in ("index_topk", "index_block_size"))
    watches = kinds and cfg.model_type != "deepseek_v4"
    indexed = list(_indexer_watched(code, found, cfg)) if watches else []
    if convolution is not None:
        setattr(code, _CONVOLUTION, convolved)
    for name in scans:
        setattr(code, name, scanned)
    if original is not None:
        code.eager_attention_forward = attend  # type: ignore[attr-defined]
    if rule is not None:
        setattr(code, rule_name, ruled)
    try:
        yield
    finally:
        for module, name in altered:
            delattr(module, name)
        for name, function in indexed:
            setattr(code, name, function)
        if convolution is not None:
            setattr(code, _CONVOLUTION, convolution)
        for name, scan in scans.items():
            setattr(code, name, scan)
        if rule is not None:
            setattr(code, rule_name, rule)
        if original is not None:
            code.eager_attention_forward = original  # type: ignore[attr-defined]
        for handle in handles:
            handle.remove()


def _methods_watched(model: Any, found: Found) -> Iterator[tuple[Any, str]]:
    """Record what methods that are no modules return (altup, per-layer inputs); yield them."""

    def watch(module: Any, name: str, keep: Callable[[Any], None]) -> tuple[Any, str]:
        method = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            out = method(*args, **options)
            keep(out)
            return out

        setattr(module, name, call)
        return module, name

    def kept(key: str) -> Callable[[Any], None]:
        def keep(out: Any) -> None:
            found[key] = _side_by_side(out)

        return keep

    for path, module in model.named_modules():
        layer = _LAYER.fullmatch(path)
        if layer is not None and layer[2] == "altup":
            prefix = f"L{layer[1]}."
            yield watch(module, "predict", kept(prefix + "altup_predicted"))
            yield watch(module, "correct", kept(prefix + "altup_corrected"))

            def modes(out: Any, prefix: str = prefix) -> None:
                first = prefix + "altup_modes"
                found[first if first not in found else f"{first}_after"] = out[0].numpy()

            yield watch(module, "compute_router_modalities", modes)
        if hasattr(module, "project_per_layer_inputs"):

            def whole(out: Any) -> None:
                found["per_layer"] = out[0].flatten(1).numpy()

            yield watch(module, "project_per_layer_inputs", whole)


def _indexer_watched(code: Any, found: Found, cfg: Any) -> Iterator[tuple[str, Any]]:
    """Record what an indexer rotates and scores; yield the names that are replaced, and by what."""

    class Functions:
        """torch's functions, of which one is watched: an indexer alone uses it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.nn.functional, name)

        def relu(self, x: Any) -> Any:
            prefix, kept = f"L{_entered(found)}.", torch.nn.functional.relu(x)
            found[prefix + "index_relu"] = kept[0].numpy()
            return kept

    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        if (function := getattr(code, name, None)) is None:
            continue

        def turn(q: Any, k: Any, *args: Any, function: Any = function, **options: Any) -> Any:
            turned = function(q, k, *args, **options)
            if hasattr(cfg, "index_block_size") and q.shape[-1] == cfg.index_head_dim:
                for part, x in zip("qk", turned, strict=True):
                    rotated = x[0].transpose(0, 1).numpy()
                    found[f"L{_entered(found)}.index_{part}_rope"] = rotated
            if options.get("unsqueeze_dim") == 2:  # attention has its heads first
                for part, x in zip("qk", turned, strict=True):
                    found[f"L{_entered(found)}.index_{part}_turned"] = x[0].numpy()
            return turned

        yield name, function
        setattr(code, name, turn)
    yield "F", code.F
    code.F = Functions()


def _indexed(found: Found, prefix: str, chosen: Any) -> None:
    """Put together what an indexer gave: rotated parts before the others, scores, the choice."""
    weights, relu = found[prefix + "index_w"], found.pop(prefix + "index_relu")
    found[prefix + "index_scores"] = np.einsum("qh,qhk->qk", weights, relu) * relu.shape[1] ** -0.5
    kept = np.zeros(found[prefix + "index_scores"].shape)
    np.put_along_axis(kept, chosen[0].long().numpy(), 1, axis=-1)
    found[prefix + "index_keys"] = np.tril(kept)
    for part in "qk":
        turned = found.pop(f"{prefix}index_{part}_turned")
        whole = found[f"{prefix}index_{part}"].reshape(*turned.shape[:2], -1)
        rest = whole[..., turned.shape[-1] :]
        found[f"{prefix}index_{part}_rope"] = np.concatenate([turned, rest], axis=-1)


def _indexed_blocks(found: Found, prefix: str, chosen: np.ndarray, size: int) -> None:
    """Put together what an indexer of blocks gave: each block's best score, and the choice."""
    q, k = found[prefix + "index_q_rope"], found[prefix + "index_k_rope"][:, 0]
    scores = np.einsum("thd,kd->htk", q, k)
    scores[:, ~np.tri(len(k), dtype=bool)] = -np.inf
    best = [scores[..., i : i + size].max(axis=-1) for i in range(0, len(k), size)]
    found[prefix + "index_block_scores"] = np.stack(best, axis=-1)
    kept = np.zeros((*scores.shape[:2], len(best) + 1))
    np.put_along_axis(kept, chosen, 1, axis=-1)  # -1 is no block
    found[prefix + "index_blocks"] = kept[..., :-1]


def _of_streams(found: Found, prefix: str, name: str, args: Any, out: Any, cfg: Any) -> bool:
    """Record what deepseek_v4's own modules read and give; return whether `name` is one of them."""
    branch = name.removesuffix("_hc")
    if branch in ("attn", "ffn") and name != branch:
        for part, x in zip(("post", "comb", "in"), out, strict=True):
            found[f"{prefix}hc_{branch}_{part}"] = x[0].flatten(1).numpy()
        if branch == "ffn":
            found[prefix + "mid"] = args[0][0].flatten(1).numpy()
    elif name == "post_attention_layernorm":
        found[prefix + "ffn_norm"] = out[0].numpy()
    elif name == "self_attn.compressor.indexer":
        kept = np.zeros(found[prefix + "index_scores"].shape)
        for row, windows in zip(kept, out[0].numpy(), strict=True):
            row[windows[windows >= 0]] = 1
        found[prefix + "index_keys"] = kept
    elif name.endswith("indexer.scorer"):
        q, keys = (_halves(cfg, x)[0] for x in args[:2])
        found[prefix + "index_q_rope"] = q.numpy()
        found[prefix + "index_compressed_k"] = keys[:, None].numpy()
        found[prefix + "index_scores"] = out[0].numpy()
    else:
        return False
    return True


def _side_by_side(copies: Any) -> np.ndarray:
    """Return copies of the stream [n, 1, tokens, hidden] as [tokens, n * hidden]."""
    joined: np.ndarray = copies[:, 0].transpose(0, 1).flatten(1).numpy().copy()
    return joined


def _turned(cfg: Any, module: Any) -> tuple[bool, str, str]:
    """Say whether a layer rotates, and which points its attention reads as query and key."""
    turned = cfg.model_type != "cohere2" or module.sliding_window is not None
    late = cfg.model_type.startswith("hunyuan")
    tempered = cfg.model_type == "ministral3"
    if cfg.model_type == "llama4_text":
        turned = bool(cfg.no_rope_layers[module.layer_idx])
        late, tempered = turned and cfg.use_qk_norm, not turned and cfg.attn_temperature_tuning
    return turned, "q_attn" if late or tempered else "q_rope", "k_attn" if late else "k_rope"


def _entered(found: Found) -> int:
    """Return the layer whose norm before mixing was the last to run."""
    return max(int(key[1:].partition(".")[0]) for key in found if key.endswith(".attn_norm"))


def _halves(cfg: Any, x: Any) -> Any:
    """Bring adjacent pairs into split halves, as our q_rope and k_rope have them."""
    if cfg.model_type in PAIRED:
        part = int(x.shape[-1] * (cfg.rope_parameters.get("partial_rotary_factor") or 1))
        turned = x[..., :part]
        return torch.cat([turned[..., 0::2], turned[..., 1::2], x[..., part:]], dim=-1)
    if cfg.model_type == "deepseek_v2":
        nope, pe = x[..., : cfg.qk_nope_head_dim], x[..., cfg.qk_nope_head_dim :]
        return torch.cat([nope, pe[..., 0::2], pe[..., 1::2]], dim=-1)
    if cfg.model_type == "deepseek_v4":
        nope, pe = x[..., : -cfg.qk_rope_head_dim], x[..., -cfg.qk_rope_head_dim :]
        return torch.cat([nope, pe[..., 0::2], pe[..., 1::2]], dim=-1)
    return x


def _hook(path: str, cfg: Any, found: Found) -> Callable[..., None]:
    layer = _LAYER.fullmatch(path)

    def keep(key: str, x: Any) -> None:
        found[key] = _tokens_first(x, cfg)

    def whole(module: Any, args: Any, out: Any) -> None:
        for pattern, point in WHOLE.items():
            if re.fullmatch(pattern, path):
                scaled = point == "embd" and hasattr(module, "embed_scale")
                keep("embd_scaled" if scaled else point, out)
                if point == "final_norm" and hasattr(cfg, "altup_num_inputs"):
                    keep("altup_merged", args[0])
                if point == "per_layer_proj":
                    found[point] = out[0].flatten(1).numpy()

    def inside(module: Any, args: Any, out: Any) -> None:
        assert layer is not None
        name, prefix = layer[2], f"L{layer[1]}."
        if cfg.model_type == "deepseek_v4" and _of_streams(found, prefix, name, args, out, cfg):
            return
        if name == "post_attention_layernorm":
            sandwich = cfg.model_type in SANDWICH
            if cfg.model_type == "olmo_hybrid":
                sandwich = cfg.layer_types[int(layer[1])] == "full_attention"
            keep(prefix + ("attn_contrib" if sandwich else "ffn_norm"), out)
            if not sandwich and not getattr(cfg, "use_parallel_residual", False):
                keep(prefix + "mid", args[0])
            return
        if not name and hasattr(cfg, "altup_num_inputs"):
            found[prefix + "in"] = _side_by_side(args[0])
            found[prefix + "out"] = _side_by_side(out)
            return
        if name == "router" and cfg.model_type in GEMMA4:
            keep(prefix + "expert_w", out[1].gather(-1, order := (-out[1]).argsort(dim=-1)))
            keep(prefix + "experts", out[2].gather(-1, order))
            return
        if name == "post_feedforward_layernorm" and getattr(cfg, "enable_moe_block", False):
            keep(prefix + "ffn_combined", args[0])
        if name == "per_layer_input_gate" and cfg.model_type in GEMMA4:
            keep(prefix + "ffn_stream", args[0])
        if (
            name == "mlp.act_fn"
            and (getattr(cfg, "activation_sparsity_pattern", None) or [0] * 99)[int(layer[1])]
        ):
            keep(prefix + "ffn_topk", args[0])
        if getattr(cfg, "do_layer_norm_before", True) is False and name.endswith("_layer_norm"):
            attends = name.startswith("self_attn")
            keep(prefix + ("attn_sum" if attends else "ffn_sum"), args[0])
            keep(prefix + ("mid" if attends else "out"), out)
            return
        if cfg.model_type == "minimax" and name in ("self_attn.qkv_proj", "self_attn.out_proj"):
            joins = name.endswith("qkv_proj")
            keep(prefix + ("lightning_qkv" if joins else "attn_out"), out)
            if not joins:
                keep(prefix + "lightning_gated", args[0])
            return
        if cfg.model_type == "kimi_linear" and cfg.layer_types[int(layer[1])] != "full_attention":
            if re.fullmatch(r"self_attn\.[qkv]_proj", name):
                return  # parts of delta_qkv
            if name == "self_attn.o_proj":
                keep(prefix + "delta_norm", args[0])
        if name == "self_attn.indexer" and hasattr(cfg, "index_block_size"):
            _indexed_blocks(found, prefix, out[0].numpy(), cfg.index_block_size)
            return
        if name == "self_attn.indexer":
            _indexed(found, prefix, out)
            return
        if name == "self_attn.qk_norm":  # called for q, then for k
            part = "q" if args[0].shape[2] == cfg.num_attention_heads else "k"
            keep(f"{prefix}{part}_rope", _halves(cfg, args[0]))
            return
        if name in ("mixer.norm", "mamba.norm") and len(args) == 2:  # gated
            keep(prefix + "ssm_gate", args[1])
            return
        if _hidden(cfg, name, module):
            return
        for pattern, (points, before) in MODULES.items():
            if not re.fullmatch(pattern, name) or (name == "mlp" and cfg.model_type in ADDING):
                continue
            if before:
                keep(prefix + before, args[0])
            if not points:
                continue
            if cfg.model_type == "falcon_h1":
                points = {"mamba.out_proj": ("ssm_out",), "feed_forward": ("ffn_contrib",)}.get(
                    name, points)  # fmt: skip
            gated = hasattr(cfg, "linear_num_value_heads") and cfg.model_type != "olmo_hybrid"
            if name == "self_attn.q_proj" and gated:
                points = ("q", "attn_gate")
            first = out[0] if isinstance(out, tuple) else out
            if name == "attn.Wqkv" and cfg.attn_config.clip_qkv:
                first = first.clamp(-cfg.attn_config.clip_qkv, cfg.attn_config.clip_qkv)
            if name == "mlp":  # falcon adds the attention's output to it in place
                first = first.clone()
            for point, part in zip(points, _split(cfg, points, first), strict=True):
                keep(prefix + point, part)
            if points == ("router",) and len(out) == 2:  # weights of all experts, logits
                order = out[1].topk(cfg.num_experts_per_tok, dim=-1).indices
                keep(prefix + "router", out[1])
                keep(prefix + "experts", order)
                keep(prefix + "expert_w", out[0].gather(-1, order))
            elif points == ("router",):
                order = torch.argsort(-out[1], dim=-1, stable=True)
                late = cfg.routed_scaling_factor if hasattr(cfg, "index_block_size") else 1
                keep(prefix + "expert_w", out[1].gather(-1, order) * late)
                keep(prefix + "experts", out[2].gather(-1, order))

    return whole if layer is None else inside


def _hidden(cfg: Any, name: str, module: Any) -> bool:
    """Say whether a module's result is none of our points in this model."""
    if name == "mixer":  # experts alone are added to by what stands inside
        return not type(module).__name__.endswith("MoE")
    if type(module).__name__ == "Identity":
        return True
    joined = name.startswith("shared_mlp") or name == "block_sparse_moe"
    shared = getattr(cfg, "shared_intermediate_size", 0) and getattr(cfg, "num_local_experts", 0)
    return joined and bool(shared)


def _split(cfg: Any, points: tuple[str, ...], joined: Any) -> Any:
    """Cut a joined result into its points' parts; q, k and v may come by groups of heads."""
    if points == ("q", "attn_gate"):
        halves = joined.unflatten(-1, (cfg.num_attention_heads, -1)).chunk(2, dim=-1)
        return [part.flatten(-2) for part in halves]
    if points == ("q", "k", "v") and (groups := _groups(cfg)):
        each = joined.unflatten(-1, (groups, -1))
        dim = cfg.hidden_size // cfg.num_attention_heads
        query = each.shape[-1] - 2 * dim
        return [part.flatten(-2) for part in each.split([query, dim, dim], dim=-1)]
    return joined.split(_widths(cfg, points, joined.shape[-1]), dim=-1)


def _groups(cfg: Any) -> int:
    """Return the groups of heads of a fused projection, 0 for q, k and v in order."""
    heads: int = cfg.num_attention_heads
    one = 1 if getattr(cfg, "multi_query", False) else heads
    falcons = cfg.num_kv_heads if getattr(cfg, "new_decoder_architecture", False) else one
    return {"gpt_neox": heads, "bloom": heads, "gpt_bigcode": one, "falcon": falcons}.get(
        cfg.model_type, 0
    )


def _widths(cfg: Any, points: tuple[str, ...], width: int) -> list[int]:
    if points != ("q", "k", "v"):
        return [width // len(points)] * len(points)
    kv = getattr(cfg, "num_key_value_heads", cfg.num_attention_heads)
    head = width // (cfg.num_attention_heads + 2 * kv)
    return [cfg.num_attention_heads * head, kv * head, kv * head]


def _tokens_first(x: Any, cfg: Any) -> np.ndarray:
    """Drop the batch; [heads, tokens, d] becomes [tokens, heads, d]."""
    values: np.ndarray = x.detach().numpy()
    values = values[0] if values.shape[0] == 1 and values.ndim > 1 else values
    if values.ndim == 3 and values.shape[1] == len(IDS):
        values = values.swapaxes(0, 1)
    return values


def traced(name: str, backend: Backend, tied: bool | None = None) -> tuple[np.ndarray, Trace]:
    """Run ours over every point; return all logits and the trace with its values."""
    kept = KeptValues()
    with open_model(judged(name, tied).folder) as model, Session.open(model, backend) as session:
        trace = session.trace(
            IDS, tuple(session.points), keep=kept.keep, fetch=kept.fetch, logits_rows="all"
        )
    logits = trace.recorded_values("logits")
    assert logits is not None
    return logits, trace


@cache
def traced64(name: str) -> tuple[np.ndarray, Trace]:
    """Run the reference, numpy in float64, over every point."""
    return traced(name, backend("numpy:float64"))


def run(name: str, backend: Backend, tied: bool | None = None) -> np.ndarray:
    """Return ours: logits of all tokens, nothing recorded."""
    with open_model(judged(name, tied).folder) as model, Session.open(model, backend) as session:
        return session.logits(IDS)


def backend(text: str, **options: Any) -> Backend:
    """Return `numpy:float64`'s backend on the CPU."""
    name, dtype = text.split(":")
    return BACKENDS[name]("cpu", dtype, **options)


def rel(found: Any, expected: Any) -> float:
    """Return the relative L2 distance; infinite where shapes of different size are compared."""
    a, b = (np.asarray(x, np.float64).reshape(-1) for x in (found, expected))
    if a.size != b.size:
        return math.inf
    apart = np.where(a == b, 0, a - np.where(np.isinf(b), 0, b))  # equal infinities are not apart
    return float(np.linalg.norm(apart)) / max(float(np.linalg.norm(b[~np.isinf(b)])), 1e-300)


def median_row(found: Any, expected: Any) -> float:
    """Return the median of the rows' relative L2 distances, of arrays [tokens, width]."""
    return float(np.median([rel(*rows) for rows in zip(found, expected, strict=True)]))


def architecture(name: str) -> str:
    """Return the architecture of a maker or a variant."""
    return name if name in MAKERS else VARIANTS[name][0]
