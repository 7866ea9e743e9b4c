"""t5 and its family: an encoder, and a decoder of as many or fewer layers that attends to it.

A *stack* is the encoder's layers or the decoder's. A *part* of a layer is what Hugging Face numbers
as `layer.N`: self-attention, attention to the encoder, the MLP.

Layers of both stacks share the number {L}; the longer stack counts them. The MLP is gated (t5 v1.1,
flan, mt5, umt5) or not; the tables of distances are in the first layers, umt5's in every one. An
encoder alone (t5encoder, of diffusion models) is another row. Sources: transformers' modeling_t5
and modeling_umt5; the gguf package's name map; the converter's t5.py.
"""

from collections.abc import Collection, Mapping
from typing import Any

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.spec import ArchSpec, Binding, Facts, Found, HyperRule, Params
from aprfmt.arch.spec_builders import Made, names_only_spec
from aprfmt.arch.stack_rules import longest_stack_reader, stack_layers_rule
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, Rows, make_tables
from aprfmt.arch.value_checks import text
from aprfmt.base.protocols import Value

_COUNTS = {
    "encoder": {"hf": "num_layers", "gguf": "{arch}.block_count"},
    "decoder": {"hf": "num_decoder_layers", "gguf": "{arch}.decoder_block_count"},
}
_SHORT = {"encoder": "enc", "decoder": "dec"}


def _stack_row(stack: str, role: str, hf: str, shape: tuple[str, ...], needs: str = "") -> RoleRow:
    """Return the tensor-table row of a tensor in every layer of a stack ("encoder" or "decoder").

    `hf` is its name after "layer.", which begins with the number of the part of the layer.
    """
    both = " & ".join(filter(None, (f"{stack}_layers", needs)))
    gguf = f"{_SHORT[stack]}.blk.{{L}}.{role}.weight"
    return RoleRow(
        f"{_SHORT[stack]}.{role}.weight",
        f"{stack}.block.{{L}}.layer.{hf}.weight",
        shape,
        both,
        gguf=gguf,
    )


def _attention_rows(stack: str, prefix: str, module: str) -> Rows:
    """Return the rows of an attention; `prefix` is "cross_" for the decoder's second one."""
    return (
        _stack_row(stack, f"{prefix}attn_q", f"{module}.q", (Q, "hidden_size")),
        _stack_row(stack, f"{prefix}attn_k", f"{module}.k", (KV, "hidden_size")),
        _stack_row(stack, f"{prefix}attn_v", f"{module}.v", (KV, "hidden_size")),
        _stack_row(stack, f"{prefix}attn_o", f"{module}.o", ("hidden_size", Q)),
    )


def _mlp_rows(stack: str, at: int, gated: bool) -> Rows:
    """Return the tensor-table rows of the MLP, which is part `at` of a layer."""
    module, into, out = f"{at}.DenseReluDense", ("ffn_size", "hidden_size"), ("hidden_size",)
    gate = (_stack_row(stack, "ffn_gate", f"{module}.wi_0", into),) if gated else ()
    return (
        *gate,
        _stack_row(stack, "ffn_up", f"{module}.{'wi_1' if gated else 'wi'}", into),
        _stack_row(stack, "ffn_down", f"{module}.wo", (*out, "ffn_size")),
    )


def _stack_rows(stack: str, gated: bool) -> Rows:
    """Return the tensor-table rows of the encoder's or the decoder's layers."""
    cross = stack == "decoder"
    width = ("hidden_size",)
    return (
        _stack_row(stack, "attn_norm", "0.layer_norm", width),
        *_attention_rows(stack, "", "0.SelfAttention"),
        _stack_row(
            stack,
            "attn_rel_b",
            "0.SelfAttention.relative_attention_bias",
            ("position_buckets", "n_heads"),
            f"{stack}_bias_layers",
        ),
        *((_stack_row(stack, "cross_attn_norm", "1.layer_norm", width),) if cross else ()),
        *(_attention_rows(stack, "cross_", "1.EncDecAttention") if cross else ()),
        _stack_row(stack, "ffn_norm", f"{1 + cross}.layer_norm", width),
        *_mlp_rows(stack, 1 + cross, gated),
    )


def _last_norm_row(stack: str) -> RoleRow:
    """Return the tensor-table row of the norm after a stack's last layer."""
    name = f"{_SHORT[stack]}.output_norm.weight"
    return RoleRow(
        name, f"{stack}.final_layer_norm.weight", ("hidden_size",), gguf=name, layered=False
    )


_TABLE = ("vocab_size", "hidden_size")
_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # the same table again


def _make_t5_tables(gated: bool, *stacks: str) -> Made:
    """Return (tensor table, bindings) of a model with these stacks ("encoder", "decoder").

    `gated`: its MLP has a gate.
    """
    head = (RoleRow("output.weight", "lm_head.weight", _TABLE, "!tied_embeddings", layered=False),)
    return make_tables(
        (
            RoleRow("token_embd.weight", "shared.weight", _TABLE, layered=False),
            *(row for stack in stacks for row in _stack_rows(stack, gated)),
            *map(_last_norm_row, stacks),
            *(head if len(stacks) > 1 else ()),
        ),
        hf_more=() if len(stacks) > 1 else (Binding(_TIED[:1], ("token_embd.weight",)),),
    )


def _write_nothing(value: Value, hp: Params) -> Params:
    """Return {}: the write function of a hyperparameter that other rules write."""
    return {}


def _longest_stack_rule(*stacks: str) -> HyperRule:
    """Return the rule that reads and writes `n_layers`: the layers of the longer stack."""
    read = longest_stack_reader(*(tuple(_COUNTS[stack].values()) for stack in stacks))
    usual = hyper_rules.n_layers()
    return HyperRule(
        "n_layers",
        {"apr": usual.keys["apr"]},
        "size",
        default_in={"hf": 6},
        read={"hf": read, "gguf": read},
        write={"hf": _write_nothing, "gguf": _write_nothing},
        high=usual.high,
        shape=usual.shape,
    )


def _bias_layers_rule(stack: str, in_all: bool) -> HyperRule:
    """Return the rule for which layers of a stack have a table of distances: all, or the first."""

    def default_layers(hp: Params) -> tuple[bool, ...]:
        """Return one boolean per layer: it has a table of position biases.

        All layers of the stack have one, or the first alone.
        """
        layers: tuple[bool, ...] = hp[f"{stack}_layers"]
        return layers if in_all else tuple(on and i == 0 for i, on in enumerate(layers))

    return HyperRule(f"{stack}_bias_layers", default=default_layers)


def _activation_rule(default: str) -> HyperRule:
    """Return the rule that reads and writes `feed_forward_proj`: an activation, gated or not."""
    usual = hyper_rules.activation(default)
    names = {"relu": "relu", "gated-gelu": "gelu_tanh", "gated-silu": "silu", "gelu": "gelu",
             "silu": "silu"}  # fmt: skip

    def read(facts: Facts, hp: Params) -> Found:
        """Return (activation of the MLPs, key) of config.json's `feed_forward_proj`.

        None without the key. A word that is not in `names` gives `default`.
        """
        found = facts.first("feed_forward_proj")
        return None if found is None else (names.get(text(*found), default), found[1])

    return HyperRule(
        usual.name,
        default=default,
        read={"hf": read},
        write={
            "hf": lambda value, hp: {
                "feed_forward_proj": "relu" if value == "relu" else "gated-gelu"
            }
        },
    )


def _write_norm_eps(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: epsilon} under both keys that llama.cpp asks for."""
    keys = ("rms_epsilon", "epsilon")
    return {f"{{arch}}.attention.layer_norm_{key}": value for key in keys}


def _t5_rules(gated: bool, bias_in_all: bool, *stacks: str) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of a model with these stacks.

    `gated`: its MLP has a gate. `bias_in_all`: all layers have a table of distances, not only one.
    """
    alone = len(stacks) == 1
    eps = hyper_rules.norm_eps(1e-6, "layer_norm_epsilon")
    return hyper_rules.hyper_table(
        _longest_stack_rule(*stacks),
        hyper_rules.hidden_size(512, "d_model"),
        hyper_rules.n_heads(8, "num_heads"),
        hyper_rules.n_kv_heads(hf=""),
        hyper_rules.head_dim(64, "d_kv"),
        hyper_rules.ffn_size(2048, "d_ff"),
        hyper_rules.context_length(512, "n_positions"),
        HyperRule(eps.name, eps.keys, eps.kind, eps.default, write={"gguf": _write_norm_eps}),
        _activation_rule("gelu_tanh" if gated else "relu"),
        hyper_rules.fixed("tied_embeddings", True) if alone else hyper_rules.tied_embeddings(True),
        hyper_rules.fixed("attn_scale", 1.0),
        hyper_rules.size(
            "position_buckets",
            "relative_attention_num_buckets",
            "attention.relative_buckets_count",
            default=32,
        ),
        *NO_ROPE,
        *(stack_layers_rule(stack, _COUNTS[stack]) for stack in stacks),
        *(_bias_layers_rule(stack, bias_in_all) for stack in stacks),
    )


_IGNORED = frozenset(
    """attention.layer_norm_epsilon decoder_start_token_id relative_attention_max_distance
    dense_act_fn is_gated_act dropout_rate num_decoder_layers scale_decoder_outputs
    layerdrop use_bias""".split()
)


def _has_name_part(names: Collection[str], *parts: str) -> bool:
    """Return whether any tensor name contains one of the parts."""
    return any(part in name for name in names for part in parts)


def _evidence_of_form(gated: bool, bias_in_all: bool, decoder: bool) -> Any:
    """Return a function that says whether tensor names are those of one variant of t5.

    `gated`: its MLP has a gate. `bias_in_all`: all layers have a table of distances, not only one.
    `decoder`: it has a decoder.
    """
    second = (
        "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.",
        "enc.blk.1.attn_rel_b.",
    )

    def evidence(names: Collection[str], values: Mapping[str, Value]) -> bool:
        """Return whether the tensor names are those of one form of t5.

        The form is `gated` (its MLP), `bias_in_all` (layers have a table of distances) and
        `decoder`. `values` (the metadata) is not used: every evidence function is given both.
        """
        form = (
            _has_name_part(names, ".wi_0.", ".ffn_gate."),
            _has_name_part(names, *second),
            _has_name_part(names, "decoder.block.", "dec.blk."),
        )
        return form == (gated, bias_in_all, decoder)

    return evidence


def _t5_spec(name: str, gated: bool, *stacks: str) -> ArchSpec:
    """Return the architecture of one form of t5: gated or not, with these stacks."""
    every = name.startswith("umt5")
    return names_only_spec(
        name,
        _make_t5_tables(gated, *stacks),
        _t5_rules(gated, every, *stacks),
        evidence=_evidence_of_form(gated, every, len(stacks) > 1),
        # An encoder alone has no head that could be tied.
        ignored=_IGNORED if len(stacks) > 1 else _IGNORED | {"tie_word_embeddings"},
        buffers={"hf": _TIED},
    )


_BOTH = ("encoder", "decoder")
T5 = _t5_spec("t5", False, *_BOTH)
T5_GATED = _t5_spec("t5_gated", True, *_BOTH)
UMT5 = _t5_spec("umt5", True, *_BOTH)
T5_ENCODER = _t5_spec("t5_encoder", False, "encoder")
T5_GATED_ENCODER = _t5_spec("t5_gated_encoder", True, "encoder")
UMT5_ENCODER = _t5_spec("umt5_encoder", True, "encoder")
