"""gemma3n (text): several copies of the stream (altup), short cuts (laurel), embeddings a layer.

The last layers look at the keys and values of earlier ones; files may hold unused ones for them.
Norms are stored as they are, in GGUF too. Sources: transformers' modeling_gemma3n; the gguf
package's name map; the converter's gemma.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import rules
from aprfmt.arch.gemma import embedding_scale
from aprfmt.arch.gemma2 import softcap
from aprfmt.arch.joins import Stacked
from aprfmt.arch.named import named
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import KV, Q, RoleRow, around, gated_mlp, linear, norm, tables
from aprfmt.arch.spec import MISSING, Facts, HyperRule, Loss
from aprfmt.arch.values import sequence
from aprfmt.arch.values import whole as whole_number
from aprfmt.arch.window import Window, period, window_rules
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
Rows = tuple[RoleRow, ...]
OWN, PER = "own_kv_layers", "per_layer_size"
_LAST = {"hf": "num_kv_shared_layers", "gguf": "{arch}.attention.shared_kv_layers"}


def once(role: str, hf: str, *shape: str, needs: str = "") -> RoleRow:
    """Return the row of a whole-model tensor."""
    return RoleRow(f"{role}.weight", f"{hf}.weight", shape, needs, layered=False)


def per_layer_embeddings(needs: str = "") -> Rows:
    """Return the embedding that has a part for every layer, its projection and its norm."""
    wide = f"n_layers*{PER}"
    return (
        once("per_layer_token_embd", "model.embed_tokens_per_layer", "per_layer_vocab", wide,
            needs=needs),
        once("per_layer_model_proj", "model.per_layer_model_projection", wide, "hidden_size",
            needs=needs),
        once("per_layer_proj_norm", "model.per_layer_projection_norm", PER, needs=needs),
    )  # fmt: skip


def per_layer_inputs(needs: str = "") -> Rows:
    """Return what brings a layer's part of that embedding into the stream."""
    return (
        *linear("inp_gate", "per_layer_input_gate", PER, "hidden_size", needs),
        *linear("proj", "per_layer_projection", "hidden_size", PER, needs),
        *norm("post_norm", "post_per_layer_input_norm", needs=needs),
    )


def four_norms() -> tuple[Rows, Rows, Rows, Rows]:
    """Return the norms around attention and around the MLP."""
    return (
        norm("attn_norm", "input_layernorm"),
        norm("post_attention_norm", "post_attention_layernorm"),
        norm("ffn_norm", "pre_feedforward_layernorm"),
        norm("post_ffw_norm", "post_feedforward_layernorm"),
    )


def own_kv(default: int) -> HyperRule:
    """Return the rule for the layers with keys and values of their own: all but the last few."""

    def layers(shared: int, hp: Params) -> tuple[bool, ...]:
        return tuple(i < hp["n_layers"] - shared for i in range(hp["n_layers"]))

    def read(key: str, facts: Facts, hp: Params) -> Found:
        found = facts.first(key)
        return None if found is None else (layers(whole_number(*found), hp), found[1])

    hf, gguf = _LAST["hf"], _LAST["gguf"]
    return HyperRule(
        OWN, default=lambda hp: layers(default, hp),
        read={"hf": lambda facts, hp: read(hf, facts, hp),
              "gguf": lambda facts, hp: read(gguf, facts, hp)},
        write={"hf": lambda value, hp: {hf: value.count(False)},
               "gguf": lambda value, hp: {gguf: value.count(False)}},
    )  # fmt: skip


def listed_windows(size: int, every: int) -> tuple[HyperRule, HyperRule]:
    """Return the rules for windows; a GGUF lists the layers, one by one."""
    positions, layers = window_rules(Window(size, MISSING, period(every), stated=True))
    key = "{arch}.attention.sliding_window_pattern"
    write = {**layers.write, "gguf": lambda value, hp: {key: list(value)}}
    return positions, replace(layers, write=write)


def per_layer_sizes(vocab: int, default: int) -> tuple[HyperRule, HyperRule]:
    """Return the rules for the width and the rows of the embedding a layer."""
    key = "{arch}.embedding_length_per_layer_input"
    return (
        HyperRule(PER, {"hf": ("hidden_size_per_layer_input",), "gguf": (key,)}, "int",
            default, {"gguf": 0}),
        rules.size("per_layer_vocab", "vocab_size_per_layer_input", default=vocab,
            shape=rules.axis("per_layer_token_embd.weight", 0), shape_wins=True),
    )  # fmt: skip


PADDED = Loss(
    "gguf",
    "per_layer_vocab",
    lambda hp: hp[PER] > 0 and hp["per_layer_vocab"] < hp["vocab_size"],
    "llama.cpp expects a row for every token in the embedding of the layers; the converter "
    "appends zeros",
)


def same_width(default: int) -> HyperRule:
    """Return the rule for the MLPs' width; a list says it for every layer."""

    def read(key: str, facts: Facts, hp: Params) -> Found:
        found = facts.first(key)
        if found is None or isinstance(found[0], (int, float)):
            return found
        widths = {whole_number(width, found[1]) for width in sequence(found[0], found[1], 1)}
        if len(widths) > 1:
            raise ArchError(f"{found[1]}: has {len(widths)} widths; expected one for all layers")
        return widths.pop(), found[1]

    rule = rules.ffn_size(default)
    gguf = rule.keys["gguf"][0]
    return replace(rule, read={
        "hf": lambda facts, hp: read("intermediate_size", facts, hp),
        "gguf": lambda facts, hp: read(gguf, facts, hp),
    })  # fmt: skip


_N, _ROWS = "altup_streams", four_norms()


def _side(role: str, hf: str) -> RoleRow:
    """Return the row of the projections of the copies, which GGUF stacks."""
    return RoleRow(
        f"{role}.weight", f"model.{hf}.{{E}}.weight", ("altup_extra", "hidden_size", "hidden_size"),
        hf_steps=(Stacked("altup_extra"),), layered=False,
    )  # fmt: skip


_ALTUP = (
    RoleRow("altup_correct_coef.weight", "altup.correction_coefs.weight", (_N, _N)),
    RoleRow("altup_correct_scale.weight", "altup.correct_output_scale", ("hidden_size",)),
    RoleRow("altup_predict_coef.weight", "altup.prediction_coefs.weight", (f"{_N}*{_N}", _N)),
    *linear("altup_router", "altup.modality_router", _N, "hidden_size"),
    *norm("altup_router_norm", "altup.router_norm"),
    *linear("laurel_l", "laurel.linear_left", "laurel_rank", "hidden_size"),
    *linear("laurel_r", "laurel.linear_right", "hidden_size", "laurel_rank"),
    *norm("laurel_post_norm", "laurel.post_laurel_norm"),
)
GEMMA3N = named(
    "gemma3n",
    tables(around(
        *per_layer_embeddings(),
        _side("altup_proj", "altup_projections"),
        _side("altup_unembd_proj", "altup_unembed_projections"),
        *_ROWS[0],
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size"),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", OWN),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", OWN),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q),
        *norm("attn_q_norm", "self_attn.q_norm", ("head_dim",)),
        *norm("attn_k_norm", "self_attn.k_norm", ("head_dim",), OWN),
        *_ROWS[1],
        *_ALTUP,
        *_ROWS[2],
        *gated_mlp(),
        *_ROWS[3],
        *per_layer_inputs(),
    )),
    rules.hyper_table(
        rules.hidden_size(2048),
        rules.n_layers(35),
        rules.n_heads(8),
        rules.n_kv_heads(2),
        rules.head_dim(256),
        same_width(16384),
        rules.vocab_size(262400),
        rules.context_length(32768),
        rules.activation("gelu_tanh", "hidden_activation"),
        rules.tied_embeddings(True),
        rules.fixed("qk_norm", True),
        rules.fixed("attn_scale", 1.0),
        *rope_rules(Rope(theta=1e6, theta_local=10000.0, local_key="rope_local_base_freq",
            layers="full")),
        *listed_windows(512, 5),
        softcap("final_softcap", "final_logit_softcapping", "final_logit_softcapping", 30.0),
        embedding_scale(),
        own_kv(15),
        *per_layer_sizes(262144, 256),
        rules.size(_N, "altup_num_inputs", "altup.num_inputs", default=4),
        HyperRule("altup_extra", default=lambda hp: hp[_N] - 1),
        rules.size("laurel_rank", "laurel_rank", default=64,
            shape=rules.axis("laurel_l.weight", 0), shape_wins=True),
    ),
    lost=(PADDED,),
)  # fmt: skip
