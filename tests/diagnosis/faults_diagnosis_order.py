"""Faults that try the walk itself: what probes must reach or cannot, and what is stacked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import aprfmt
from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.fault import Fault, Pair

Config = Callable[[dict[str, Any]], None]
L1 = "model.layers.1."
UP, DOWN = f"{L1}mlp.up_proj.weight", f"{L1}mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def made(
    name: str,
    base: str,
    says: str,
    causes: tuple[str, ...],
    where: str = "",
    *,
    verdict: str = "bug",
    confidence: str = "confirmed",
    source: Callable[[str, Mapping[str, Any]], Path] | None = None,
    size: Mapping[str, Any] | None = None,
    **how: Any,
) -> Fault:
    """Return the fault of a copy; `size` are other numbers of the tiny model."""

    def make() -> Pair:
        folder = (source or _tiny)(base, size or {})
        return folder, files.copy(folder, f"walk-{name}", **how)

    places = (where,) if where else ()
    return Fault(name, base, says, make, causes, places, verdict, confidence)


def _tiny(base: str, size: Mapping[str, Any]) -> Path:
    return tiny_folder(base, **size)


def _shut(base: str, size: Mapping[str, Any]) -> Path:
    """A model whose router never chooses expert 3 of layer 1: its correction is far below."""

    def shut(x: Any) -> Any:
        x[3] = -1e6
        return x

    name = f"{L1}mlp.gate.e_score_correction_bias"
    return files.copy(tiny_folder(base), f"walk-shut-{base}", tensors=files.edit(name, shut))


def one_bit(row: int) -> Callable[[Any], Any]:
    """Return an edit of the highest exponent bit of one value of a row."""

    def run(x: Any) -> Any:
        x.view(np.uint32)[row, 7] ^= np.uint32(1 << 26)
        return x

    return run


def setting(**values: Any) -> Config:
    """Return an editor of a config; values of rope_parameters go there."""

    def run(config: dict[str, Any]) -> None:
        for key, value in values.items():
            if "rope_parameters" in config and key in config["rope_parameters"]:
                config["rope_parameters"][key] = value
            else:
                config[key] = value

    return run


def mscale_alone(config: dict[str, Any]) -> None:
    config["rope_parameters"] |= {"mscale": 0.5}


def scaled_by_one(config: dict[str, Any]) -> None:
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 1.0}


def one_nan_and_a_factor(rows: files.Rows) -> None:
    def nan(x: Any) -> Any:
        x[3, 5] = np.nan
        return x

    files.edit("model.layers.2.mlp.up_proj.weight", nan)(rows)
    files.edit(UP, lambda x: x * 1.25)(rows)


def hidden_by_zeros(rows: files.Rows) -> None:
    """Nothing that the MLP's inner product is made of shows through a down product of zeros."""
    files.edit(DOWN, lambda x: 0 * x)(rows)
    files.edit(UP, lambda x: x * 1.25)(rows)


def repeated_heads(in_turn: bool) -> Callable[[files.Rows], None]:
    """Return an edit that gives each of four query heads a key head of its own, of two."""

    def repeat(x: Any) -> Any:
        heads = x.reshape(2, -1, x.shape[-1])
        more = np.tile(heads, (2, 1, 1)) if in_turn else np.repeat(heads, 2, 0)
        return more.reshape(-1, x.shape[-1])

    def run(rows: files.Rows) -> None:
        for ending in ("k_proj.weight", "v_proj.weight"):
            files.edit_all(ending, repeat)(rows)

    return run


def factor_in_experts(but: str = "") -> Callable[[files.Rows], None]:
    """Return an edit that multiplies the experts' down products by 1.7, but for those of a name."""

    def run(rows: files.Rows) -> None:
        for key in [key for key in rows if ".experts." in key and "down_proj" in key]:
            if not (but and but in key):
                files.edit(key, lambda x: x * 1.7)(rows)

    return run


def factor_and_damage(rows: files.Rows) -> None:
    factor_in_experts()(rows)
    files.edit(f"{L1}self_attn.o_proj.weight", lambda x: x * 1.25)(rows)


def factors_of_gguf() -> Pair:
    """llama3's rule and a GGUF that holds its factors only, as those of other converters do."""
    folder = tiny_folder("llama-llama3")
    whole = files.converted(folder, "walk-llama3.gguf")
    with aprfmt.open(whole) as model:
        ours = [key for key in model.metadata if key.startswith("aprfmt.")]
    bare = place("walk-llama3-factors.gguf")
    words = [word for key in ours for word in ("--remove", key)]
    assert command("set", whole, *words, "-o", bare, "--force").code == 0
    return folder, bare


LONG = {"max_position_embeddings": 8192}
FACTORS = [1.0, 1.6, 9.4, 3.5, 4.4, 6.0]

WALK: tuple[Fault, ...] = (
    made("row-reached", "llama", "a bit of one row of a long embedding", ("bit_rot",),
         "token_embd.weight", size={"vocab_size": 997},
         tensors=files.edit(EMBEDDING, one_bit(611))),
    made("position-reached", "gpt2", "a bit of position 60's row", ("bit_rot",),
         "position_embd.weight",
         tensors=files.edit("transformer.wpe.weight", one_bit(60))),
    made("position-beyond", "gpt2", "a bit of position 1500's row", ("bit_rot",),
         "position_embd.weight", size={"n_positions": 2048},
         tensors=files.edit("transformer.wpe.weight", one_bit(1500))),
    made("expert-unrouted", "deepseek_v3", "a bit of an expert that no token is routed to",
         ("bit_rot",), "L1.ffn_down_exps.weight", source=_shut,
         tensors=files.edit(f"{L1}mlp.experts.3.down_proj.weight", one_bit(5))),
    made("expert-routed", "deepseek_v3", "a bit of an expert that some tokens are routed to",
         ("bit_rot",), "L1.ffn_down_exps.weight",
         tensors=files.edit(f"{L1}mlp.experts.3.down_proj.weight", one_bit(5))),
    made("heads-in-a-row", "llama", "each key head once for every query head that reads it",
         ("equal_function",), "n_kv_heads", verdict="same",
         config=setting(num_key_value_heads=4), tensors=repeated_heads(False)),
    made("heads-in-turn", "llama", "the same, dealt out in turn", ("gqa_mapping",), "n_kv_heads",
         config=setting(num_key_value_heads=4), tensors=repeated_heads(True)),
    made("factor-in-experts", "deepseek_v3", "the routing's factor in the experts, and 1 there",
         ("equal_function",), "routed_scale", verdict="same",
         config=setting(routed_scaling_factor=1.0), tensors=factor_in_experts()),
    made("factor-in-some", "deepseek_v3", "the same but for one expert", ("moe_routing", "scale"),
         "routed_scale", confidence="confirmed",
         config=setting(routed_scaling_factor=1.0), tensors=factor_in_experts("experts.3.")),
    made("factor-and-damage", "deepseek_v3", "the same, and a factor in one other weight",
         ("scale", "moe_routing"), "",
         config=setting(routed_scaling_factor=1.0), tensors=factor_and_damage),
    made("window-is-context", "mistral-no-window", "a window as long as the context",
         ("equal_quantities",), "sliding_window", verdict="same",
         config=setting(sliding_window=64)),
    made("window-beyond", "mistral", "a window of 6000 for 5000, of a context of 8192",
         ("sliding_window",), "sliding_window", confidence="unconfirmed",
         size=LONG | {"sliding_window": 5000},
         config=setting(sliding_window=6000)),
    made("window-later", "mistral", "a window of 150 for 200", ("sliding_window",),
         "sliding_window", size=LONG | {"sliding_window": 200},
         config=setting(sliding_window=150)),
    made("scaling-by-one", "llama", "a linear scaling by 1", ("equal_quantities",),
         "rope_scaling", verdict="same", config=scaled_by_one),
    made("yarn-mscale-idle", "llama-yarn", "yarn's mscale, which is read beside its other half",
         ("equal_quantities",), "rope_scaling.mscale", verdict="same", config=mscale_alone),
    Fault("llama3-as-factors", "llama-llama3", "a GGUF with one factor a pair for llama3's rule",
          factors_of_gguf, (), verdict="same"),
    made("long-factor", "phi3", "one factor of longrope beyond 32 tokens", ("rope_scaling",),
         "rope_scaling", config=setting(long_factor=FACTORS)),
    made("long-factor-beyond", "phi3", "the same beyond 4096 tokens", ("rope_scaling",),
         "rope_scaling", confidence="unconfirmed",
         size=LONG | {"original_max_position_embeddings": 4096},
         config=setting(long_factor=FACTORS)),
    made("three-stacked", "llama", "eps, base and a factor", ("norm_eps", "rope_theta", "scale"),
         "norm_eps", config=setting(rms_norm_eps=1e-5, rope_theta=1e4),
         tensors=files.edit(UP, lambda x: x * 1.25)),
    made("nan-and-factor", "llama", "a NaN in one layer, a factor in another",
         ("scale", "nonfinite"), "L1.ffn_up.weight", tensors=one_nan_and_a_factor),
    made("below-rounding", "llama", "eps larger by a ten-millionth of a millionth", ("norm_eps",),
         "norm_eps", confidence="unconfirmed",
         config=setting(rms_norm_eps=3.0001e-4)),
    made("one-hides-another", "llama", "a factor in front of a product of zeros",
         ("scale", "stale_tensor"), "L1.ffn_up.weight",
         tensors=hidden_by_zeros),
)  # fmt: skip

# What passes say of the first cause: it shows, stays inside rounding, or is not reached.
EXERCISED: Mapping[str, str] = {
    "row-reached": "shows",
    "position-reached": "shows",
    "position-beyond": "not_exercised",
    "expert-unrouted": "not_exercised",
    "expert-routed": "shows",
    "window-beyond": "not_exercised",
    "window-later": "shows",
    "long-factor": "shows",
    "long-factor-beyond": "not_exercised",
    "three-stacked": "shows",
    "below-rounding": "below_rounding",
    "one-hides-another": "shows",
}
