"""The text of qwen2_vl, qwen2_5_vl, qwen3_vl and qwen3_vl_moe: qwen2 and qwen3 with sections.

A text has one position for time, height and width, so it runs as qwen2's or qwen3's would. The
towers are in qwen_vl_vision.py. qwen3_vl's tower also adds to the first layers, of which llama.cpp
wants the number. Sources: transformers' modeling_qwen2_vl, modeling_qwen2_5_vl, modeling_qwen3_vl
and modeling_qwen3_vl_moe; the converter's qwenvl.py and qwen3vl.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layout_steps import Oriented
from aprfmt.arch.qwen2 import QWEN2, upper_layers
from aprfmt.arch.qwen2_moe import DENSE_LOSS
from aprfmt.arch.qwen3 import QWEN3
from aprfmt.arch.qwen3_moe import QWEN3_MOE
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.rope_sections import IGNORED, old_sections_rule
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_every_layer, window_rules
from aprfmt.arch.spec import ArchSpec, Binding, Facts, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import LAYER
from aprfmt.arch.value_checks import sequence
from aprfmt.base.protocols import Value

_MROPE = {"mrope": "default"}  # what the first checkpoints call it
_TWO, _THREE = RopeDefaults(theta=1e6, aliases=_MROPE), RopeDefaults(theta=5e5, aliases=_MROPE)
_IGNORED = IGNORED.union(
    "video_token_id vision_start_token_id vision_end_token_id vision_token_id".split()
)
_SEEN = 3  # layers that a tower of qwen3_vl adds to, if its configuration lists none


def _deepstack_rule() -> HyperRule:
    """Return the rule for how many first layers the tower adds to; none in a text alone."""
    tower = "vision_config"

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (number of first layers that image features are added to, key) of config.json.

        The key is in the vision tower's object `tower`; None without that object.
        """
        sees = facts.values.get(tower)
        if not isinstance(sees, Mapping):
            return None
        listed = sees.get("deepstack_visual_indexes")
        key = f"{tower}.deepstack_visual_indexes"
        return (_SEEN, tower) if listed is None else (len(sequence(listed, key)), key)

    return HyperRule(
        "deepstack_layers",
        {"gguf": ("{arch}.n_deepstack_layers",)},
        "int",
        0,
        read={"hf": read},
        write={"hf": lambda value, hp: {}},
    )


_TOWERS_OWN = Loss(
    "hf",
    "deepstack_layers",
    lambda hp: bool(hp["deepstack_layers"]),
    "config.json lists them with the tower, which a text alone has not",
)


def _qwen2_vl_spec(name: str, chosen: bool) -> ArchSpec:
    """Return the architecture of qwen2's text with rotary sections.

    GGUF calls both `qwen2vl`: a file of that name is read as the `chosen` one.
    """
    return ArchSpec(
        name=name,
        hyper=hyper_rules.hyper_table(
            hyper_rules.n_kv_heads(8),
            divided_head_dim_rule(),
            hyper_rules.context_length(32768),
            hyper_rules.norm_eps(1e-5),
            hyper_rules.flag("attention_bias", True, present=("attn_q.bias",)),
            *rope_rules(_TWO),
            old_sections_rule(_TWO, (16, 24, 24)),
            *window_rules(
                Window(layers=upper_layers(80), gguf_layers=window_every_layer, switch=True)
            ),
        ),
        tensors=QWEN2.tensors,
        bindings=QWEN2.bindings,
        block=QWEN2.block,
        lost=(*losses.common_losses(), IGNORED_WINDOW),
        ignored=_IGNORED | {"use_mrope"},
        derived=ROPE_TENSORS,
        evidence=None if chosen else lambda names, values: False,
    )


QWEN2_VL = _qwen2_vl_spec("qwen2_vl", chosen=True)
QWEN2_5_VL = _qwen2_vl_spec("qwen2_5_vl", chosen=False)


def _qwen3_vl_rules(heads: int) -> tuple[HyperRule, ...]:
    """Return the rules that qwen3's two forms share; `heads` is the default of key heads."""
    return (
        hyper_rules.n_kv_heads(heads),
        hyper_rules.context_length(128000),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(_THREE),
        old_sections_rule(_THREE, (24, 20, 20), interleaved=True),
        _deepstack_rule(),
    )


QWEN3_VL = ArchSpec(
    name="qwen3_vl",
    hyper=hyper_rules.hyper_table(*_qwen3_vl_rules(32), hyper_rules.head_dim(128)),
    tensors=QWEN3.tensors,
    bindings=QWEN3.bindings,
    block=QWEN3.block,
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY, _TOWERS_OWN),
    ignored=_IGNORED,
    derived=ROPE_TENSORS,
)


def _read_tied(facts: Facts, hp: Params) -> tuple[Value, str] | None:
    """Return (whether the head is tied, key) of config.json; None without the key.

    A text model's own config.json means a tied head where it lacks the key: (True, "model_type").
    """
    found = facts.first("tie_word_embeddings")
    alone = facts.values.get("model_type") == "qwen3_vl_moe_text"
    if found is None and alone and "text_config" not in facts.values:
        return True, "model_type"
    return found


# One tensor for all experts, exchanged as published.
_EXPERTS = "mlp.experts."
_PUBLISHED = (
    Binding(
        (f"{LAYER}{_EXPERTS}gate_up_proj",),
        ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        (Oriented("2*moe_ffn_size", "hidden_size"),
         Split(("moe_ffn_size", "moe_ffn_size"), axis=1)),
    ),
    Binding(
        (f"{LAYER}{_EXPERTS}down_proj",),
        ("ffn_down_exps.weight",),
        (Oriented("hidden_size", "moe_ffn_size"),),
    ),
)  # fmt: skip
_STORED = {name for binding in _PUBLISHED for name in binding.stored}

QWEN3_VL_MOE = ArchSpec(
    name="qwen3_vl_moe",
    hyper=hyper_rules.hyper_table(
        *_qwen3_vl_rules(16),
        replace(hyper_rules.tied_embeddings(), read={"hf": _read_tied}),
        *moe.expert_count_rules(60, 4),
        moe.expert_size_rule(hf_default=1408),
        moe.sparse_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
    ),
    tensors=QWEN3_MOE.tensors,
    bindings={
        **QWEN3_MOE.bindings,
        "hf": (
            *_PUBLISHED,
            *(row for row in QWEN3_MOE.bindings["hf"] if _STORED.isdisjoint(row.stored)),
        ),
    },
    block=QWEN3_MOE.block,
    lost=(*losses.common_losses(), losses.ONE_BIAS_KEY, DENSE_LOSS, _TOWERS_OWN),
    ignored=_IGNORED | {"norm_topk_prob", "sliding_window"},
)
