"""phi-3 and phi-4: one matrix for q, k, v and one for gate and up, longrope.

GGUF keeps both matrices whole (`ffn_up` has 2*ffn_size rows, gate first). Source:
docs/reference/architectures.md; the converter's phi.py.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_gguf import ROPE_TENSORS
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec
from aprfmt.arch.tensor_rows import (
    KV,
    LAYER,
    Q,
    RoleRow,
    linear,
    make_tables,
    norm,
    with_model_rows,
)

_QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")
GATE_UP = ("ffn_gate.weight", "ffn_up.weight")
_IN_QKV, IN_GATE_UP = (Split((Q, KV, KV)),), (Split(("ffn_size", "ffn_size")),)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *(
            RoleRow(role, "", (rows, "hidden_size"), gguf="")
            for role, rows in zip(_QKV, (Q, KV, KV), strict=True)
        ),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q),
        *norm("ffn_norm", "post_attention_layernorm"),
        *(RoleRow(role, "", ("ffn_size", "hidden_size"), gguf="") for role in GATE_UP),
        *linear("ffn_down", "mlp.down_proj", "hidden_size", "ffn_size"),
    ),
    hf_first=(
        Binding((LAYER + "self_attn.qkv_proj.weight",), _QKV, _IN_QKV),
        Binding((LAYER + "mlp.gate_up_proj.weight",), GATE_UP, IN_GATE_UP),
    ),
    gguf_first=(
        Binding(("blk.{L}.attn_qkv.weight",), _QKV, _IN_QKV),
        Binding(("blk.{L}.ffn_up.weight",), GATE_UP, IN_GATE_UP),
    ),
    gguf_more=tuple(Binding((f"blk.{{L}}.{role}",), (role,)) for role in _QKV),
)

PHI3 = ArchSpec(
    name="phi3",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(4096),
        hyper_rules.norm_eps(1e-5),
        *rope_rules(
            RopeDefaults(partial=1.0, original=4096, aliases={"su": "longrope", "yarn": "longrope"})
        ),
        *window_rules(Window(listed=False, stated=True)),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(),
    lost=(*losses.common_losses(partial=True), IGNORED_WINDOW),
    derived=ROPE_TENSORS,
)
