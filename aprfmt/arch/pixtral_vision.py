"""Pixtral's vision tower and projector, of llava and mistral3: a file of its own in GGUF (mmproj).

The tower has RMSNorms, a gated MLP and no table of positions: rope rotates by row and column.
The folder is that of the whole model, its config.json is read below `vision_config`. mistral3
joins patches after a norm before the projector. llama.cpp also wants the text's row of the token
that breaks lines of patches, which is not a tensor of the tower. Sources: transformers'
modeling_pixtral, modeling_llava and modeling_mistral3; the gguf package's name map; the
converter's llava.py.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.layout_steps import RowsPermuted
from aprfmt.arch.role_vocabulary import PROJECTORS
from aprfmt.arch.spec import HyperRule, Loss, Params
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, linear, make_tables, norm, single_row
from aprfmt.arch.vision_towers import UNUSED, evidence_of_projector, tower_rules
from aprfmt.base.protocols import Value

_NAME = "pixtral_vision"
KIND = PROJECTORS[_NAME]
_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_LAYER = _TOWER + "transformer.layers.{L}."
_USUAL = (1024, 24, 16, 4096, 1024)  # PixtralVisionConfig's, which published files leave out
_WIDE, _OUT = ("hidden_size",), "projection_size"
MEAN = [0.48145466, 0.4578275, 0.40821073]
DEVIATION = [0.26862954, 0.26130258, 0.27577711]


def _write_projector(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: value} of the projector's kind, width and image statistics."""
    return {
        "general.type": "mmproj",
        "{arch}.projector_type": KIND,
        "{arch}.vision.projection_dim": value,
        "{arch}.vision.image_mean": MEAN,
        "{arch}.vision.image_std": DEVIATION,
    }


def _layer_rows() -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a layer of the tower."""
    rows = (
        *norm("ln1", _LAYER + "attention_norm"),
        *linear("attn_q", _LAYER + "attention.q_proj", Q, "hidden_size",
            gguf_steps=(RowsPermuted("n_heads"),)),
        *linear("attn_k", _LAYER + "attention.k_proj", KV, "hidden_size",
            gguf_steps=(RowsPermuted("n_kv_heads"),)),
        *linear("attn_v", _LAYER + "attention.v_proj", KV, "hidden_size"),
        *linear("attn_out", _LAYER + "attention.o_proj", "hidden_size", Q),
        *norm("ln2", _LAYER + "ffn_norm"),
        *linear("ffn_gate", _LAYER + "feed_forward.gate_proj", "ffn_size", "hidden_size"),
        *linear("ffn_up", _LAYER + "feed_forward.up_proj", "ffn_size", "hidden_size"),
        *linear("ffn_down", _LAYER + "feed_forward.down_proj", "hidden_size", "ffn_size"),
    )  # fmt: skip
    return tuple(replace(row, gguf=f"v.blk.{{L}}.{row.role}") for row in rows)


def _projection_rows(number: int, into: str) -> tuple[RoleRow, ...]:
    """Return the table rows of one of the projector's two matrices, weight and optional bias."""
    role, hf = f"mm.{number}", f"{_PROJECTOR}linear_{number}"
    return (
        single_row(f"{role}.weight", f"{hf}.weight", _OUT, into),
        single_row(f"{role}.bias", f"{hf}.bias", _OUT, needs="optional"),
    )


PIXTRAL_VISION = names_only_spec(
    _NAME,
    make_tables(
        (
            single_row(
                "v.patch_embd.weight",
                _TOWER + "patch_conv.weight",
                "hidden_size",
                "image_channels",
                "patch_size",
                "patch_size",
            ),
            *norm("v.pre_ln", _TOWER + "ln_pre", layered=False),
            *_layer_rows(),
            single_row(
                "mm.input_norm.weight", _PROJECTOR + "norm.weight", *_WIDE, needs="optional"
            ),
            single_row(
                "mm.patch_merger.weight",
                _PROJECTOR + "patch_merger.merging_layer.weight",
                "hidden_size",
                "patch_merge*patch_merge*hidden_size",
                needs="optional",
            ),
            *_projection_rows(1, "hidden_size"),
            *_projection_rows(2, _OUT),
        )
    ),
    hyper_rules.hyper_table(
        *tower_rules(1e-5, "gelu", class_token=False, usual=_USUAL, rotates=True),
        hyper_rules.size(
            "patch_merge", "spatial_merge_size", "vision.spatial_merge_size", default=1
        ),
        HyperRule(
            "projection_size",
            {"gguf": ("{arch}.vision.projection_dim",)},
            "size",
            write={"gguf": _write_projector},
            shape=hyper_rules.axis("mm.1.weight", 0),
        ),
    ),
    lost=(
        Loss(
            "gguf",
            "projection_size",
            lambda hp: True,
            "llama.cpp also wants the text's row of [IMG_BREAK] as v.token_embd.img_break, which "
            "is none of the tower's: it refuses the file without",
        ),
    ),
    evidence=evidence_of_projector(KIND),
    section="vision_config",
    ignored=UNUSED | {"text_config"},
)
