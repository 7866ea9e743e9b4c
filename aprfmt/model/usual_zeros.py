"""Names of tensors that are zero throughout in sound files.

Training leaves no weight of a working layer at zero, so a matrix of zeros was never filled or a
step lost it. Some tensors begin as zeros, are optional, or hold no parameter.
"""

import re

# What is zero where nothing is wrong. Sources: peft and LyCORIS initialise one factor of each
# adapter to zero; ControlNet (lllyasviel), diffusers' controlnet_* modules and its SD3, Hunyuan and
# VACE blocks connect by layers that begin as zeros; optimizers and caches begin as zeros; models of
# one segment zero the table of segments; imatrix files count what was never used.
_USUALLY_ZERO = re.compile(
    r"""
      bias | (^|[._/])(b|beta|betas)$
    | lora | dora | hada_ | lokr | (^|[._])b?oft_ | vera_ | miss_block | bone_
    | zero | controlnet_ | middle_block_out | input_hint_block | pos_embed_input
    | (before|after)_proj
    | (^|[./])(gates?|alpha)(\.(weight|kernel))?$
    | exp_avg | exp_inf | momentum | optimizer | opt_state | (^|[._/])grads?([._/]|$)
    | (mask|cache|state|states|buffer|mask_tokens?)$ | (^|[._/])(running_|past_|h0$|c0$)
    | token_type | segment_emb | in_sum | counts$
    """,
    re.VERBOSE | re.IGNORECASE,
)


def is_usually_zero(name: str) -> bool:
    """Return whether a tensor of this stored name is zero throughout in sound files too."""
    return _USUALLY_ZERO.search(name) is not None
