"""What GGUF or config.json cannot express for most architectures, and what readers assume."""

from collections.abc import Callable

from aprfmt.arch.spec import Loss, Params


def _has_scaling(*kinds: str) -> Callable[[Params], bool]:
    """Return a function (hp -> bool): whether the rope scaling is of one of these types."""
    return lambda hp: hp["rope_scaling"] is not None and hp["rope_scaling"]["type"] in kinds


WHOLE_HEADS = Loss(
    "hf",
    "rope_dim",
    lambda hp: hp["rope_dim"] != hp["head_dim"],
    "transformers rotates whole heads of this architecture, whatever config.json says",
)


def common_losses(activation: str = "silu", *, partial: bool = False) -> tuple[Loss, ...]:
    """Return what GGUF or config.json cannot express of most architectures, as Loss records.

    `activation` is the one that llama.cpp computes. `partial`: config.json has a key for rotating
    only some elements of each head.
    """
    return (
        *(() if partial else (WHOLE_HEADS,)),
        Loss(
            "gguf",
            "activation",
            lambda hp: hp["activation"] != activation,
            f"GGUF has no key for it: llama.cpp computes {activation}",
        ),
        Loss(
            "gguf",
            "rope_scaling",
            _has_scaling("dynamic"),
            "GGUF has no key for dynamic scaling: llama.cpp rotates unscaled, so that its logits "
            "differ beyond the trained context length",
        ),
        Loss(
            "gguf",
            "rope_scaling",
            lambda hp: _has_scaling("yarn")(hp) and not hp["rope_scaling"]["truncate"],
            "GGUF has no key for yarn without truncation: llama.cpp rounds the bounds of the ramp "
            "to whole dimensions, so that the frequencies between them differ",
        ),
        Loss(
            "gguf",
            "rope_scaling",
            _has_scaling("longrope"),
            "llama.cpp turns by the long factors once the context it is opened with is longer than "
            "the trained one, transformers once the text is: short texts differ in long contexts",
        ),
        Loss(
            "gguf",
            "rope_scaling",
            lambda hp: (
                _has_scaling("yarn")(hp)
                and hp["rope_scaling"]["mscale"] != hp["rope_scaling"]["mscale_all_dim"]
            ),
            "GGUF keeps yarn's mscale_all_dim only: llama.cpp takes mscale to be the same",
        ),
    )


ONE_BIAS_KEY = Loss(
    "hf",
    "attention_out_bias",
    lambda hp: hp["attention_out_bias"] != hp["attention_bias"],
    "config.json has one key for the biases of q, k, v and of the output: transformers makes all "
    "of them or none",
)
