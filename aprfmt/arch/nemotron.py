"""nemotron: LayerNorms that store weight - 1, a plain MLP of squared relus.

Half of each head is rotated. Source: transformers' modeling_nemotron; the converter's nemotron.py,
which adds the 1.
"""

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.layout_steps import Added
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec
from aprfmt.arch.tensor_rows import FUSED, RoleRow, attention, make_tables, model_rows, plain_mlp


def _norm_rows(role: str, hf: str, layered: bool = True) -> tuple[RoleRow, ...]:
    """Return the table rows of a LayerNorm, weight and bias; GGUF stores the weight plus 1."""
    width = ("hidden_size",)
    return (
        RoleRow(f"{role}.weight", f"{hf}.weight", width, gguf_steps=(Added(1.0),), layered=layered),
        RoleRow(f"{role}.bias", f"{hf}.bias", width, layered=layered),
    )


_BEFORE, (*_, _HEAD) = model_rows()
_TENSORS, _BINDINGS = make_tables(
    (
        *_BEFORE,
        *_norm_rows("attn_norm", "input_layernorm"),
        *attention(),
        *_norm_rows("ffn_norm", "post_attention_layernorm"),
        *plain_mlp("mlp.up_proj", "mlp.down_proj", bias="mlp_bias"),
        *_norm_rows("output_norm", "model.norm", layered=False),
        _HEAD,
    ),
    hf_more=FUSED,
)

NEMOTRON = ArchSpec(
    name="nemotron",
    hyper=hyper_rules.hyper_table(
        hyper_rules.context_length(4096),
        hyper_rules.norm_eps(1e-5, "norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("relu2"),
        hyper_rules.tied_embeddings(shown=False),
        *hyper_rules.attention_biases(),
        hyper_rules.mlp_bias(),
        *rope_rules(RopeDefaults(partial=0.5)),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", norm_offset=1, mlp="plain"),
    lost=(*losses.common_losses("relu2", partial=True), losses.ONE_BIAS_KEY),
)
