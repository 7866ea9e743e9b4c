"""Seeded faults of files: what converters write wrong, and what damages a copy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from aprfmt.arch.grouped_rows import Tiled
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.fault import Fault, Pair
from tests.diagnosis.making import damaged, halves_for_pairs

L1 = "model.layers.1."
UP = f"{L1}mlp.up_proj.weight"


def joined_as_text(data: bytes) -> bytes:
    """Return float32 values in 12 pieces, the last one shorter, in the order 0, 1, 10, 11, 2."""
    size = 4 * (len(data) // 4 // 12 + 1)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(pieces[i] for i in sorted(range(len(pieces)), key=str))


def shifted(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[count:] + bytes(count)


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]


def swapped_bytes(data: bytes) -> bytes:
    return np.frombuffer(data, "<f4").byteswap().tobytes()


def other_theta(config: dict[str, Any]) -> None:
    config["rope_parameters"]["rope_theta"] = 10000.0


def no_theta(config: dict[str, Any]) -> None:
    """Leave the base out, as a writer without a key for it does: a default stands in."""
    config.pop("rope_parameters", None)
    config.pop("rope_theta", None)


def plain_rope(config: dict[str, Any]) -> None:
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0}


def compiled(rows: files.Rows) -> None:
    for name in list(rows):
        rows[f"_orig_mod.{name}"] = rows.pop(name)


def twice_the_size(config: dict[str, Any]) -> None:
    config["intermediate_size"] *= 2


def whole_rotary(config: dict[str, Any]) -> None:
    config["partial_rotary_factor"] = config["rope_parameters"]["partial_rotary_factor"] = 1.0


def first_experts(rows: files.Rows) -> None:
    for part in ("gate", "up", "down"):
        a, b = (f"{L1}mlp.experts.{i}.{part}_proj.weight" for i in (0, 1))
        rows[a], rows[b] = rows[b], rows[a]


def head_overwritten(rows: files.Rows) -> None:
    rows["lm_head.weight"] = rows["model.embed_tokens.weight"]


def neurons_moved(rows: files.Rows) -> None:
    """Give an MLP's neurons another order, in gate, up and down alike: the same function."""
    order = np.random.default_rng(7).permutation(72)
    for name in ("gate_proj", "up_proj"):
        files.edit(f"{L1}mlp.{name}.weight", lambda x: x[order])(rows)
    files.edit(f"{L1}mlp.down_proj.weight", lambda x: x[:, order])(rows)


def heads_moved(rows: files.Rows) -> None:
    """Exchange the two key heads, and the query heads with them, one of them inside its group."""
    query, key = np.array([3, 2, 0, 1]), np.array([1, 0])
    for name, order in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        files.edit(f"{L1}self_attn.{name}.weight", _blocks(order))(rows)
    files.edit(f"{L1}self_attn.o_proj.weight", lambda x: _blocks(query)(x.T).T)(rows)


def head_rows_moved(rows: files.Rows) -> None:
    """Order the rows inside each of opt's four heads anew, in q and k alike."""
    order = np.concatenate([h * 12 + np.random.default_rng(h).permutation(12) for h in range(4)])
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias"):
        files.edit(f"model.decoder.layers.1.self_attn.{name}", lambda x: x[order])(rows)


def _blocks(order: Any) -> Callable[[Any], Any]:
    return lambda x: x.reshape(len(order), -1, x.shape[-1])[order].reshape(x.shape)


def routed_experts_moved(rows: files.Rows) -> None:
    """Give the experts another order and their router's rows the same: the same function."""
    order = (4, 0, 1, 5, 2, 3)
    before = dict(rows)
    for part in ("gate", "up", "down"):
        for new, old in enumerate(order):
            name = f"{L1}mlp.experts.{{}}.{part}_proj.weight"
            rows[name.format(new)] = before[name.format(old)]
    files.edit(f"{L1}mlp.gate.weight", lambda x: x[list(order)])(rows)


def one_more(rows: files.Rows) -> None:
    rows[f"{L1}mlp.rotary_cache"] = ("F32", (4, 3), np.arange(12, dtype="<f4").tobytes())


def one_more_and_a_factor(rows: files.Rows) -> None:
    one_more(rows)
    files.edit(UP, lambda x: x * 1.25)(rows)


def value_heads_tiled(rows: files.Rows) -> None:
    """Deal six value heads of 7 elements out to two key heads of 9, in all that has them."""
    parts = {
        "in_proj_qkv.weight": Tiled("7", "36"), "in_proj_z.weight": Tiled("7"),
        "in_proj_a.weight": Tiled("1"), "in_proj_b.weight": Tiled("1"), "A_log": Tiled("1"),
        "dt_bias": Tiled("1"), "conv1d.weight": Tiled("7", "36"),
        "out_proj.weight": Tiled("7", axis=1),
    }  # fmt: skip
    sizes = {"delta_key_heads": 2, "delta_value_heads": 6}
    for name, step in parts.items():
        files.edit_all(f"linear_attn.{name}", partial(_applied, step, sizes))(rows)


def _applied(step: Tiled, sizes: dict[str, int], x: Any) -> Any:
    return step.apply([x], sizes)[0]


def overflowed(x: Any) -> Any:
    x[2, 7] = np.inf
    return x


def noisy(x: Any) -> Any:
    return x + 0.05 * np.random.default_rng(3).standard_normal(x.shape)


def scrambled(x: Any) -> Any:
    return np.random.default_rng(3).permutation(x.reshape(-1)).reshape(x.shape)


def layer_lost(rows: files.Rows) -> None:
    """Leave a whole layer out."""
    for name in [name for name in rows if ".layers.1." in name]:
        del rows[name]


def two_edits(rows: files.Rows) -> None:
    files.edit(UP, lambda x: x * 1.25)(rows)
    files.raw(f"{L1}self_attn.o_proj.weight", flipped(103))(rows)


NORM = f"{L1}input_layernorm.weight"


def exchanged(x: Any) -> Any:
    """Exchange single values."""
    for a, b in (((3, 5), (40, 9)), ((1, 1), (2, 2))) if x.ndim > 1 else ((3, 17),):
        x[a], x[b] = x[b].copy(), x[a].copy()
    return x


def signs_of(*places: Any) -> Callable[[Any], Any]:
    """Turn the signs at some places."""

    def change(x: Any) -> Any:
        for place in places:
            x[place] *= -1
        return x

    return change


def large(rows: files.Rows) -> None:
    """Give a matrix two values that F16 does not hold."""
    files.edit(UP, lambda x: np.where(np.arange(x.size).reshape(x.shape) % 901 == 17, 9e4, x))(rows)


def by_f16(x: Any) -> Any:
    """Take values through F16: large ones become infinite."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def by_f16_held(x: Any) -> Any:
    """Take values through an F16 that holds large ones at its largest."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float32)


def trained(*words: str) -> Callable[[files.Rows], None]:
    """Train the tensors whose names have one of these words a little."""
    draws = np.random.default_rng(5)

    def run(rows: files.Rows) -> None:
        for name in [name for name in rows if any(word in name for word in words)]:
            files.edit(name, lambda x: x + 0.02 * x.std() * draws.standard_normal(x.shape))(rows)

    return run


def from_large(name: str, says: str, cause: str, change: Callable[[Any], Any]) -> Fault:
    """Return the fault of a matrix with large values that went through F16."""

    def make() -> Pair:
        source = tiny_folder("llama")

        def both(rows: files.Rows) -> None:
            large(rows)
            files.edit(UP, change)(rows)

        a = files.copy(source, f"{name}-right", tensors=large)
        return a, files.copy(source, f"damaged-{name}", tensors=both)

    return Fault(name, "llama", says, make, (cause,), ("L1.ffn_up.weight",))


VALUE_FAULTS: tuple[Fault, ...] = (
    damaged("values-exchanged", "llama", "two pairs of values exchanged", "bit_rot",
            "L1.ffn_up.weight", tensors=files.edit(UP, exchanged)),
    damaged("norm-exchanged", "llama", "two values of a norm exchanged", "bit_rot",
            "L1.attn_norm.weight", tensors=files.edit(NORM, exchanged)),
    damaged("one-sign", "llama", "the sign of one value", "bit_rot", "L1.ffn_up.weight",
            tensors=files.edit(UP, signs_of((7, 3)))),
    damaged("row-sign", "llama", "the sign of a row", "scale", "L1.ffn_up.weight",
            tensors=files.edit(UP, signs_of(7))),
    damaged("column-sign", "llama", "the sign of a column", "scale", "L1.ffn_up.weight",
            tensors=files.edit(UP, signs_of((slice(None), 5)))),
    damaged("rates-sign", "qwen3_5", "the sign of all rates", "scale", "L0.ssm_a.weight",
            tensors=files.edit_all("A_log", lambda x: -x)),
    damaged("rates-first", "qwen3_5", "rates as training begins", "stale_tensor",
            "L0.ssm_a.weight", confidence="unconfirmed",
            tensors=files.edit_all("A_log", lambda x: np.log(np.arange(1, len(x) + 1)))),
    damaged("row-constant", "llama", "one row never filled", "stale_tensor", "L1.ffn_up.weight",
            tensors=files.edit(UP, lambda x: np.where(np.arange(72)[:, None] == 9, 0.25, x))),
    from_large("f16-infinite", "values beyond F16 became infinite", "nonfinite", by_f16),
    from_large("f16-held", "values beyond F16 held at its largest", "function_of", by_f16_held),
    damaged("norms-trained", "llama", "norms alone trained", "derived", "L0.attn_norm.weight",
            verdict="not_comparable", tensors=trained("norm.weight")),
    damaged("biases-trained", "qwen2", "biases alone trained", "derived", "L0.attn_q.bias",
            verdict="not_comparable", tensors=trained(".bias")),
    damaged("expert-trained", "qwen3_moe", "one expert of every layer trained", "derived",
            "L0.ffn_gate_exps.weight", verdict="not_comparable", tensors=trained("experts.3.")),
    damaged("layers-trained", "qwen3", "the last two layers trained", "derived",
            "L1.attn_q.weight", verdict="not_comparable",
            tensors=trained("layers.1.", "layers.2.")),
)  # fmt: skip

FILE_FAULTS: tuple[Fault, ...] = (
    *VALUE_FAULTS,
    damaged("demo-mislabel", "demo", "BF16 bytes tagged F16", "dtype_mislabel",
            "token_embd.weight", upstream=(8,), tensors=files.relabel("F16")),
    damaged("one-infinity", "llama", "one weight is infinite", "nonfinite", "L1.ffn_up.weight",
            tensors=files.edit(UP, overflowed)),
    damaged("mislabel-one", "llama", "one tensor's label", "dtype_mislabel", "L1.attn_q.weight",
            dtype="bfloat16", upstream=(8,),
            tensors=files.relabel("F16", f"{L1}self_attn.q_proj.weight")),
    damaged("demo-bias-dropped", "demo", "the k biases are gone", "missing_bias",
            "L0.attn_k.bias", upstream=(33,), tensors=files.drop("k_proj.bias")),
    damaged("demo-eps", "demo", "eps 1e-5 for 1e-6", "norm_eps", "norm_eps",
            config={"rms_norm_eps": 1e-5}),
    damaged("demo-theta-lost", "demo", "no base in the configuration: a default", "rope_theta",
            "rope_theta", upstream=(3,), config=no_theta),
    damaged("byte-order", "llama", "values in the other byte order", "endianness",
            "L1.ffn_up.weight", tensors=files.raw(UP, swapped_bytes)),
    damaged("ranks-as-text", "llama", "12 ranks' pieces joined in the order of their names",
            "piece_order", "L1.ffn_up.weight", tensors=files.raw(UP, joined_as_text)),
    damaged("two-bytes-off", "llama", "data two bytes too early", "byte_offset",
            "L1.ffn_up.weight", tensors=files.raw(UP, shifted(2))),
    damaged("bit", "llama", "one bit", "bit_rot", "L1.ffn_up.weight",
            tensors=files.raw(UP, flipped(103))),
    damaged("transposed", "llama", "a matrix and its shape transposed", "transpose",
            "L1.ffn_up.weight", upstream=(2, 23), tensors=files.edit(UP, lambda x: x.T)),
    damaged("reversed-shape", "llama-square", "a square matrix by columns", "transpose",
            "L1.attn_output.weight", upstream=(2,),
            tensors=files.edit(f"{L1}self_attn.o_proj.weight", lambda x: x.T)),
    damaged("embedding-rows", "llama", "embedding one row on", "row_offset", "token_embd.weight",
            tensors=files.edit("model.embed_tokens.weight", lambda x: np.roll(x, 1, 0))),
    damaged("head-order", "llama", "heads exchanged", "head_order", "L1.attn_q.weight",
            tensors=files.edit(f"{L1}self_attn.q_proj.weight",
                               lambda x: x.reshape(4, 16, -1)[[1, 0, 2, 3]].reshape(64, -1))),
    damaged("key-head-order", "llama", "the two key heads exchanged", "head_order",
            "L1.attn_k.weight",
            tensors=files.edit(f"{L1}self_attn.k_proj.weight", lambda x: np.roll(x, 16, 0))),
    damaged("pairing-rows", "llama", "q rows as GGUF orders them", "rope_pairing",
            "L0.attn_q.weight", upstream=(24,),
            tensors=files.edit_all("q_proj.weight", lambda x: halves_for_pairs(x, 4))),
    damaged("wrong-head-count", "llama", "k rows permuted for 4 heads, of 2", "gqa_mapping",
            "L0.attn_k.weight",
            tensors=files.edit_all("k_proj.weight", lambda x: halves_for_pairs(x, 4))),
    damaged("gate-up", "llama", "gate and up exchanged", "swapped_tensors", "L1.ffn_gate.weight",
            tensors=files.swap(f"{L1}mlp.gate_proj.weight", UP)),
    damaged("layers-exchanged", "llama", "layers 1 and 2 exchanged", "layer_order",
            "L1.attn_q.weight", tensors=files.swap("model.layers.1.", "model.layers.2.")),
    damaged("experts-exchanged", "qwen3_moe", "experts 0 and 1 exchanged", "expert_order",
            "L1.ffn_up_exps.weight", tensors=first_experts),
    damaged("left-at-zero", "llama", "a weight never written", "stale_tensor",
            "L1.ffn_up.weight", tensors=files.edit(UP, lambda x: 0 * x)),
    damaged("old-weight", "llama", "a weight of another checkpoint", "stale_tensor",
            "L1.ffn_up.weight",
            tensors=files.edit(UP, lambda x: np.random.default_rng(1).normal(0, 0.14, x.shape))),
    damaged("noise", "llama", "noise upon a weight", "stale_tensor", "L1.ffn_up.weight",
            confidence="unconfirmed", tensors=files.edit(UP, noisy)),
    damaged("scrambled", "llama", "a weight's values in no order at all", "value_order",
            "L1.ffn_up.weight", confidence="unconfirmed", tensors=files.edit(UP, scrambled)),
    damaged("neurons", "llama", "neurons in another order, consistently", "permuted_neurons",
            ("L1.ffn_up.weight", "L1.ffn_gate.weight", "L1.ffn_down.weight"), verdict="same",
            tensors=neurons_moved),
    damaged("heads-with-groups", "llama", "heads in another order, consistently",
            "permuted_heads", ("L1.attn_q.weight", "L1.attn_v.weight", "L1.attn_output.weight"),
            verdict="same", tensors=heads_moved),
    damaged("rows-inside-heads", "opt", "rows inside heads in another order, in q and k alike",
            "permuted_head_rows", ("L1.attn_q.weight", "L1.attn_k.bias"), verdict="same",
            tensors=head_rows_moved),
    damaged("experts-with-router", "qwen3_moe", "experts and their router in another order",
            "permuted_experts", ("L1.ffn_gate_inp.weight", "L1.ffn_down_exps.weight"),
            verdict="same", tensors=routed_experts_moved),
    damaged("extra", "llama", "one more tensor, of no role", "extra_tensor",
            "model.layers.1.mlp.rotary_cache", verdict="bug", tensors=one_more),
    damaged("extra-and-scale", "llama", "the same, and a weight times 1.25",
            ("scale", "extra_tensor"), ("L1.ffn_up.weight",), tensors=one_more_and_a_factor),
    damaged("times-1.25", "llama", "a weight times 1.25", "scale", "L1.ffn_up.weight",
            tensors=files.edit(UP, lambda x: 1.25 * x)),
    damaged("norms-plus-1", "gemma", "1 added to norms that are stored without", "norm_offset",
            "L0.attn_norm.weight", tensors=files.edit_all("norm.weight", lambda x: x + 1)),
    damaged("norms-twice", "qwen3_5", "1 added once more to norms that are stored without",
            "norm_offset", "L0.attn_norm.weight",
            tensors=files.edit_all("layernorm.weight", lambda x: x + 1)),
    damaged("value-heads", "qwen3_5", "value heads of the delta nets tiled, as a GGUF has them",
            "value_heads", ("L0.ssm_out.weight", "L0.attn_qkv.weight", "L0.ssm_a.weight"),
            tensors=value_heads_tiled),
    damaged("rates-exponentiated", "qwen3_5", "decay rates stored as -exp of their logarithm",
            "function_of", "L0.ssm_a.weight",
            tensors=files.edit_all("A_log", lambda x: -np.exp(x))),
    damaged("rates-positive", "qwen3_5", "decay rates stored as exp of their logarithm",
            "function_of", "L0.ssm_a.weight", tensors=files.edit_all("A_log", np.exp)),
    damaged("rates-twice", "qwen3_5", "the same change of decay rates made twice",
            "function_of", "L0.ssm_a.weight",
            tensors=files.edit_all("A_log", lambda x: -np.exp(-np.exp(x)))),
    damaged("taps-reversed", "qwen3_5", "kernels of the convolutions reversed", "tap_order",
            "L0.ssm_conv1d.weight",
            tensors=files.edit_all("conv1d.weight", lambda x: x[..., ::-1])),
    damaged("short-taps-reversed", "lfm2", "kernels of the convolutions reversed", "tap_order",
            "L0.shortconv.conv.weight",
            tensors=files.edit_all("conv.conv.weight", lambda x: x[..., ::-1])),
    damaged("kernels-transposed", "qwen3_5", "kernels stored by taps under the channels' shape",
            "transpose", "L0.ssm_conv1d.weight",
            tensors=files.edit_all("conv1d.weight", lambda x: x.T.reshape(x.shape))),
    damaged("kernels-by-channels", "qwen3_5", "kernels read by channels that are stored by taps",
            "transpose", "L0.ssm_conv1d.weight",
            tensors=files.edit_all("conv1d.weight", lambda x: x.reshape(x.shape[::-1]).T)),
    damaged("head-gone", "llama", "no head, tied instead", "tied_embedding", "output.weight",
            tensors=files.drop("lm_head.weight"), config={"tie_word_embeddings": True}),
    damaged("head-overwritten", "llama", "the embedding stored as the head", "tied_embedding",
            "output.weight", tensors=head_overwritten),
    damaged("theta-key", "llama", "base 10000 for 5000", "rope_theta", "rope_theta",
            config=other_theta),
    damaged("scaling-key", "llama-llama3", "no rope scaling", "rope_scaling", "rope_scaling",
            config=plain_rope),
    damaged("no-rope-key", "smollm3", "all layers rotate", "rope_layers", "rope_layers",
            config={"no_rope_layers": [1] * 5}),
    damaged("rotary-key", "phi2", "whole heads rotate", "partial_rotary", "rope_dim",
            config=whole_rotary),
    damaged("window-key", "mistral", "no window", "sliding_window", "sliding_window",
            config={"sliding_window": None}),
    damaged("softcap-key", "gemma2", "no cap on the scores", "softcap", "attn_softcap",
            config={"attn_logit_softcapping": None}),
    damaged("scale-key", "gemma2", "another attention scale", "attention_scale", "attn_scale",
            config={"query_pre_attn_scalar": 16}),
    damaged("activation-key", "llama", "gelu for silu", "activation", "activation",
            config={"hidden_act": "gelu"}),
    damaged("multiplier-key", "granite", "residual multiplier 1", "multiplier", "residual_scale",
            config={"residual_multiplier": 1.0}),
    damaged("routing-key", "qwen3_moe", "weights not renormalised", "moe_routing", "norm_topk",
            config={"norm_topk_prob": False}),
    damaged("head-count-key", "llama-square", "2 heads of 24 for 4 of 12", "gqa_mapping",
            "n_heads", config={"num_attention_heads": 2, "num_key_value_heads": 2,
                               "head_dim": 24}),
    damaged("names-of-a-compiled", "llama", "every name begins with _orig_mod.", "tensor_names",
            "_orig_mod.model.layers.0.mlp.up_proj.weight", tensors=compiled),
    damaged("mlp-size-key", "llama", "an MLP of twice the size", "config_sizes",
            "intermediate_size", config=twice_the_size),
    damaged("key-and-tensors", "llama", "eps, a factor and a bit at once",
            ("norm_eps", "bit_rot", "scale"), "norm_eps", config={"rms_norm_eps": 1e-5},
            tensors=two_edits),
    damaged("tensors-lost", "llama", "a layer's MLP is not in the file", "missing_tensors",
            "L2.ffn_up.weight", upstream=(1, 33), tensors=files.drop("2.mlp.up_proj.weight")),
    damaged("layer-lost", "qwen2", "a layer is not in the file, with its biases",
            "missing_tensors", "L1.attn_q.weight", tensors=layer_lost),
    damaged("zeros", "llama", "every tensor is zero", "stale_tensor", "lm_head.weight",
            confidence="unconfirmed", tensors=files.edit_all("", lambda x: 0 * x)),
    damaged("same-bytes", "llama", "nothing", (), (), verdict="same"),
)  # fmt: skip
