"""whisper: an encoder of mel spectra after two convolutions, and a decoder that attends to it.

A *stack* is the encoder's layers or the decoder's. Layers of both stacks share the number {L}; the
longer stack counts them. Keys have no biases. GGUF has no form of the whole model. Source:
transformers' modeling_whisper.
"""

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.spec import HyperRule
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.stack_rules import longest_stack_reader, stack_layers_rule
from aprfmt.arch.tensor_rows import Q, RoleRow, Rows, linear, make_tables, norm, single_row

_COUNTS = {"encoder": "encoder_layers", "decoder": "decoder_layers"}  # keys of config.json
_TABLE = ("vocab_size", "hidden_size")


def _attention_rows(stack: str, prefix: str, module: str) -> Rows:
    """Return the table rows of one attention of a stack ("encoder" or "decoder"), with its norm.

    `prefix` begins its roles, `module` is its name in a layer of Hugging Face files.
    """
    at, needs = f"model.{stack}.layers.{{L}}.{module}", f"{stack}_layers"
    return (
        *linear(f"{prefix}_q", f"{at}.q_proj", Q, "hidden_size", needs, bias=""),
        *linear(f"{prefix}_k", f"{at}.k_proj", Q, "hidden_size", needs),
        *linear(f"{prefix}_v", f"{at}.v_proj", Q, "hidden_size", needs, bias=""),
        *linear(f"{prefix}_o", f"{at}.out_proj", "hidden_size", Q, needs, bias=""),
        *norm(f"{prefix}_norm", f"{at}_layer_norm", needs=needs, bias=True),
    )


def _stack_rows(stack: str, size: str) -> Rows:
    """Return the table rows of a stack's layers; `size` is the MLP's width, a size expression."""
    at, needs, name = f"model.{stack}.layers.{{L}}", f"{stack}_layers", stack[:3]
    width = "hidden_size"
    return (
        *_attention_rows(stack, f"{name}.attn", "self_attn"),
        *(_attention_rows(stack, "dec.cross_attn", "encoder_attn") if stack == "decoder" else ()),
        *linear(f"{name}.ffn_up", f"{at}.fc1", size, width, needs, bias=""),
        *linear(f"{name}.ffn_down", f"{at}.fc2", width, size, needs, bias=""),
        *norm(f"{name}.ffn_norm", f"{at}.final_layer_norm", needs=needs, bias=True),
    )


def _convolution_rows(number: int, into: str) -> Rows:
    """Return the rows of one of the encoder's convolutions; `into` are its input channels."""
    role, hf = f"enc.conv{number}", f"model.encoder.conv{number}"
    return (
        single_row(f"{role}.weight", f"{hf}.weight", "hidden_size", into, "3"),
        single_row(f"{role}.bias", f"{hf}.bias", "hidden_size"),
    )


WHISPER = names_only_spec(
    "whisper",
    make_tables(
        (
            single_row("token_embd.weight", "model.decoder.embed_tokens.weight", *_TABLE),
            single_row(
                "position_embd.weight",
                "model.decoder.embed_positions.weight",
                "context_length",
                "hidden_size",
            ),
            *_convolution_rows(1, "mel_bins"),
            *_convolution_rows(2, "hidden_size"),
            single_row(
                "enc.position_embd.weight",
                "model.encoder.embed_positions.weight",
                "source_length",
                "hidden_size",
            ),
            *_stack_rows("encoder", "ffn_size"),
            *_stack_rows("decoder", "decoder_ffn_size"),
            *norm("enc.output_norm", "model.encoder.layer_norm", bias=True, layered=False),
            *norm("output_norm", "model.decoder.layer_norm", bias=True, layered=False),
            RoleRow("output.weight", "proj_out.weight", _TABLE, "!tied_embeddings", layered=False),
        )
    ),
    hyper_rules.hyper_table(
        HyperRule(
            "n_layers",
            kind="size",
            default_in={"hf": 4},
            read={"hf": longest_stack_reader(*((key,) for key in _COUNTS.values()))},
            write={"hf": lambda value, hp: {}},
            shape=hyper_rules.n_layers().shape,
        ),
        hyper_rules.hidden_size(384, "d_model"),
        hyper_rules.n_heads(6, "encoder_attention_heads"),
        hyper_rules.n_kv_heads(hf=""),
        hyper_rules.head_dim(hf=""),
        hyper_rules.ffn_size(1536, "encoder_ffn_dim"),
        hyper_rules.context_length(448, "max_target_positions"),
        hyper_rules.fixed("norm_eps", 1e-5),
        hyper_rules.activation("gelu", "activation_function"),
        hyper_rules.tied_embeddings(True),
        *NO_ROPE,
        *(stack_layers_rule(stack, {"hf": key}) for stack, key in _COUNTS.items()),
        hyper_rules.size("decoder_ffn_size", "decoder_ffn_dim", hf_default=1536),
        hyper_rules.size("source_length", "max_source_positions", hf_default=1500),
        hyper_rules.size("mel_bins", "num_mel_bins", hf_default=80),
    ),
)
