"""gemma3's vision tower and projector, which GGUF keeps in a separate file (mmproj).

The tower is siglip's without its head; the projector normalises the pooled patches (with 1 + w)
and multiplies them into the text model's width. The folder is that of the whole model: what reads
its config.json under this name looks into `vision_config`. Mean and deviation of the colours are
those of the published preprocessors. Sources: transformers' modeling_gemma3; the converter's
gemma.py.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.gemma import PLUS_ONE
from aprfmt.arch.role_vocabulary import PROJECTORS
from aprfmt.arch.spec import Binding, HyperRule, Params
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import RoleRow, make_tables
from aprfmt.arch.vision_towers import (
    POSITION_IDS,
    UNUSED,
    evidence_of_projector,
    siglip_rows,
    siglip_rules,
)
from aprfmt.base.protocols import Value

_NAME = "gemma3_vision"
KIND = PROJECTORS[_NAME]
_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_COLOURS = [0.5, 0.5, 0.5]


def _write_projector(value: Value, hp: Params) -> Params:
    """Return GGUF's {key: value} of the projector: kind, width, image statistics, pooling."""
    side = int(hp["image_size"]) // int(hp["patch_size"])
    pooled = side // int(hp["image_tokens"] ** 0.5)
    return {
        "general.type": "mmproj",
        "{arch}.projector_type": KIND,
        "{arch}.vision.projection_dim": value,
        "{arch}.vision.image_mean": _COLOURS,
        "{arch}.vision.image_std": _COLOURS,
        **({"{arch}.vision.projector.scale_factor": pooled} if pooled not in (0, 4) else {}),
    }


_SIGLIP = siglip_rows()
_WIDTHS = ("hidden_size", "projection_size")
_TENSORS, _BINDINGS = make_tables(
    (
        *(replace(row, hf=f"{_TOWER}vision_model.{row.hf}") for row in _SIGLIP),
        RoleRow("mm.input_projection.weight", f"{_PROJECTOR}mm_input_projection_weight", _WIDTHS,
            layered=False),
        RoleRow("mm.soft_emb_norm.weight", f"{_PROJECTOR}mm_soft_emb_norm.weight",
            ("hidden_size",), gguf_steps=PLUS_ONE, layered=False),
    ),
    hf_more=tuple(Binding((f"{_TOWER}{row.hf}",), (row.role,)) for row in _SIGLIP),
)  # fmt: skip

GEMMA3_VISION = names_only_spec(
    _NAME,
    (_TENSORS, _BINDINGS),
    hyper_rules.hyper_table(
        *siglip_rules(),
        hyper_rules.size("image_tokens", "mm_tokens_per_image", default=256),
        HyperRule(
            "projection_size",
            {"gguf": ("{arch}.vision.projection_dim",)},
            "size",
            write={"gguf": _write_projector},
            shape=hyper_rules.axis("mm.input_projection.weight", 1),
        ),
    ),
    evidence=evidence_of_projector(KIND),
    section="vision_config",
    ignored=UNUSED | {"text_config", "vision.projector.scale_factor"},
    buffers={"hf": (f"{_TOWER}vision_model.{POSITION_IDS}", _TOWER + POSITION_IDS)},
)
