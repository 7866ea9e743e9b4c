"""The audio towers of qwen2_audio and voxtral: whisper's encoder and a projector (mmproj in GGUF).

The folder is that of the whole model, its config.json is read below `audio_config`. A GGUF has the
convolutions' biases as columns. Sources: transformers' modeling_qwen2_audio and modeling_voxtral;
the gguf package's name map; the converter's ultravox.py.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.role_vocabulary import PROJECTORS
from aprfmt.arch.spec import ArchSpec, HyperRule, Params
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import Q, RoleRow, Rows, linear, make_tables, norm, single_row
from aprfmt.arch.vision_towers import UNUSED, evidence_of_projector, tower_size_rule
from aprfmt.base.protocols import Value

_TOWER, _PROJECTOR = "audio_tower.", "multi_modal_projector."
_LAYER = _TOWER + "layers.{L}."
_COLUMN = (Reshaped(("hidden_size",), ("hidden_size", "1")),)
_IGNORED = frozenset(
    """has_audio_encoder audio.image_size audio.projector.stack_factor activation_dropout dropout
    encoder_layerdrop layerdrop scale_embedding audio_token_index audio_token_id vocab_size
    text_config""".split()
)


def _layer_rows() -> Rows:
    """Return the tensor-table rows of a layer's tensors."""
    rows = (
        *norm("ln1", _LAYER + "self_attn_layer_norm", bias=True),
        *linear("attn_q", _LAYER + "self_attn.q_proj", Q, "hidden_size", bias=""),
        *linear("attn_k", _LAYER + "self_attn.k_proj", Q, "hidden_size"),
        *linear("attn_v", _LAYER + "self_attn.v_proj", Q, "hidden_size", bias=""),
        *linear("attn_out", _LAYER + "self_attn.out_proj", "hidden_size", Q, bias=""),
        *norm("ln2", _LAYER + "final_layer_norm", bias=True),
        *linear("ffn_up", _LAYER + "fc1", "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", _LAYER + "fc2", "hidden_size", "ffn_size", bias=""),
    )
    return tuple(replace(row, gguf=f"a.blk.{{L}}.{row.role}") for row in rows)


def _convolution_rows(number: int, into: str) -> Rows:
    """Return the tensor-table rows of one of the two convolutions.

    `into` are its input channels.
    """
    role, hf = f"a.conv1d.{number}", f"{_TOWER}conv{number}"
    return (
        single_row(f"{role}.weight", f"{hf}.weight", "hidden_size", into, "3"),
        single_row(f"{role}.bias", f"{hf}.bias", "hidden_size", gguf_steps=_COLUMN),
    )


def _tower_spec(name: str, shown: str, *projector: RoleRow, joins: bool = False) -> ArchSpec:
    """Return the architecture of a tower and its projector.

    `shown` is the role whose first axis is the text model's width. `joins`: the projector reads
    several frames at once, as many as make up an MLP's width.
    """
    kind = PROJECTORS[name]

    def write_projector(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: value} that describe the audio projector: its type and width.

        `value` is the output width, the text model's. Where the projector joins frames, their
        number is added.
        """
        return {
            "general.type": "mmproj",
            "{arch}.has_audio_encoder": True,
            "{arch}.projector_type": kind,
            "{arch}.audio.projection_dim": value,
            **({"{arch}.audio.projector.stack_factor": joined_frames(hp)} if joins else {}),
        }

    def joined_frames(hp: Params) -> int:
        """Return how many of the encoder's frames the projector reads as one row.

        That is MLP width / hidden size.
        """
        return int(hp["ffn_size"]) // int(hp["hidden_size"])

    return names_only_spec(
        name,
        make_tables(
            (
                *_convolution_rows(1, "mel_bins"),
                *_convolution_rows(2, "hidden_size"),
                single_row(
                    "a.position_embd.weight",
                    _TOWER + "embed_positions.weight",
                    "source_length",
                    "hidden_size",
                ),
                *_layer_rows(),
                *norm("a.post_ln", _TOWER + "layer_norm", bias=True, layered=False),
                *projector,
            )
        ),
        hyper_rules.hyper_table(
            tower_size_rule("hidden_size", "d_model hidden_size", "audio.embedding_length", 1280),
            tower_size_rule(
                "n_layers", "encoder_layers num_hidden_layers", "audio.block_count", 32
            ),
            tower_size_rule(
                "n_heads",
                "encoder_attention_heads num_attention_heads",
                "audio.attention.head_count",
                20,
            ),
            HyperRule("n_kv_heads", default=lambda hp: hp["n_heads"]),
            HyperRule("head_dim", default=lambda hp: hp["hidden_size"] // hp["n_heads"]),
            HyperRule("value_head_dim", default=lambda hp: hp["head_dim"]),
            tower_size_rule(
                "ffn_size", "encoder_ffn_dim intermediate_size", "audio.feed_forward_length", 5120
            ),
            hyper_rules.fixed("vocab_size", 0),
            hyper_rules.fixed("context_length", 0),
            HyperRule(
                "norm_eps",
                {"gguf": ("{arch}.audio.attention.layer_norm_epsilon",)},
                "positive",
                1e-5,
            ),
            hyper_rules.activation("gelu", "activation_function"),
            hyper_rules.fixed("tied_embeddings", True),
            *NO_ROPE,
            hyper_rules.size(
                "source_length",
                "max_source_positions",
                hf_default=1500,
                shape=hyper_rules.axis("a.position_embd.weight", 0),
            ),
            tower_size_rule("mel_bins", "num_mel_bins", "audio.num_mel_bins", 128),
            HyperRule(
                "projection_size",
                {"gguf": ("{arch}.audio.projection_dim",)},
                "size",
                write={"gguf": write_projector},
                shape=hyper_rules.axis(shown, 0),
            ),
        ),
        evidence=evidence_of_projector(kind),
        section="audio_config",
        ignored=UNUSED | _IGNORED,
    )


QWEN2_AUDIO_TOWER = _tower_spec(
    "qwen2_audio_tower",
    "mm.a.fc.weight",
    single_row("mm.a.fc.weight", _PROJECTOR + "linear.weight", "projection_size", "hidden_size"),
    single_row("mm.a.fc.bias", _PROJECTOR + "linear.bias", "projection_size"),
)
VOXTRAL_TOWER = _tower_spec(
    "voxtral_tower",
    "mm.a.mlp.1.weight",
    single_row("mm.a.mlp.1.weight", _PROJECTOR + "linear_1.weight", "projection_size", "ffn_size"),
    single_row(
        "mm.a.mlp.2.weight", _PROJECTOR + "linear_2.weight", "projection_size", "projection_size"
    ),
    joins=True,
)
