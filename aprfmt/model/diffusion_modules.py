"""Modules of diffusion transformers: the original names of Flux and SD3, and those of diffusers.

Names have underscores for dots. Sources: diffusers' loaders/lora_conversion_utils.py (Flux) and
scripts/convert_sd3_to_diffusers.py. The projection before the last layer gives (shift, scale) in
the original and (scale, shift) in diffusers: its outputs are exchanged by halves.
"""

import re
from collections.abc import Mapping

_DOUBLE = r"double_blocks_(\d+)_"
_SINGLE = r"single_blocks_(\d+)_"
_JOINT = r"joint_blocks_(\d+)_"
_BLOCK = r"transformer_blocks_\1_"
SWAPPED = "norm_out_linear"  # diffusers' name of the projection with exchanged halves

# Pattern of an original module -> diffusers' module.
_RENAMED: Mapping[str, str] = {
    _DOUBLE + "img_attn_proj": _BLOCK + "attn_to_out_0",
    _DOUBLE + "txt_attn_proj": _BLOCK + "attn_to_add_out",
    _DOUBLE + "img_mlp_0": _BLOCK + "ff_net_0_proj",
    _DOUBLE + "img_mlp_2": _BLOCK + "ff_net_2",
    _DOUBLE + "txt_mlp_0": _BLOCK + "ff_context_net_0_proj",
    _DOUBLE + "txt_mlp_2": _BLOCK + "ff_context_net_2",
    _DOUBLE + "img_mod_lin": _BLOCK + "norm1_linear",
    _DOUBLE + "txt_mod_lin": _BLOCK + "norm1_context_linear",
    _SINGLE + "linear2": "single_" + _BLOCK + "proj_out",
    _SINGLE + "modulation_lin": "single_" + _BLOCK + "norm_linear",
    _JOINT + "x_block_attn_proj": _BLOCK + "attn_to_out_0",
    _JOINT + "context_block_attn_proj": _BLOCK + "attn_to_add_out",
    _JOINT + "x_block_mlp_fc1": _BLOCK + "ff_net_0_proj",
    _JOINT + "x_block_mlp_fc2": _BLOCK + "ff_net_2",
    _JOINT + "context_block_mlp_fc1": _BLOCK + "ff_context_net_0_proj",
    _JOINT + "context_block_mlp_fc2": _BLOCK + "ff_context_net_2",
    _JOINT + "x_block_adaLN_modulation_1": _BLOCK + "norm1_linear",
    "guidance_in_in_layer": "time_text_embed_guidance_embedder_linear_1",
    "guidance_in_out_layer": "time_text_embed_guidance_embedder_linear_2",
    "time_in_in_layer": "time_text_embed_timestep_embedder_linear_1",
    "time_in_out_layer": "time_text_embed_timestep_embedder_linear_2",
    "vector_in_in_layer": "time_text_embed_text_embedder_linear_1",
    "vector_in_out_layer": "time_text_embed_text_embedder_linear_2",
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "final_layer_linear": "proj_out",
    "final_layer_adaLN_modulation_1": SWAPPED,
}
# Pattern of an original module that joins several -> what each begins with, and their ends.
_JOINED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    _DOUBLE + "img_attn_qkv": (_BLOCK + "attn_", ("to_q", "to_k", "to_v")),
    _DOUBLE + "txt_attn_qkv": (_BLOCK + "attn_", ("add_q_proj", "add_k_proj", "add_v_proj")),
    _JOINT + "x_block_attn_qkv": (_BLOCK + "attn_", ("to_q", "to_k", "to_v")),
    _JOINT + "context_block_attn_qkv": (
        _BLOCK + "attn_", ("add_q_proj", "add_k_proj", "add_v_proj")
    ),
    _SINGLE + "linear1": (
        "single_" + _BLOCK, ("attn_to_q", "attn_to_k", "attn_to_v", "proj_mlp")
    ),
}  # fmt: skip


def diffusers_module(module: str) -> str:
    """Return diffusers' name of an original denoiser's module, with underscores instead of dots.

    A module of another model, or one that diffusers splits into several, keeps its name.
    """
    for pattern, name in _RENAMED.items():
        found = re.fullmatch(pattern, module)
        if found is not None:
            return found.expand(name)
    return module


def has_exchanged_halves(module: str) -> bool:
    """Return whether diffusers has the two halves of a module's outputs in the other order.

    `module` has the original's name; False for one with diffusers' name.
    """
    return diffusers_module(module) == SWAPPED != module


def joined_modules(module: str) -> tuple[str, ...]:
    """Return diffusers' modules that one original module joins (q, k, v, say), first rows first.

    () for a module that joins none.
    """
    for pattern, (start, ends) in _JOINED.items():
        found = re.fullmatch(pattern, module)
        if found is not None:
            return tuple(found.expand(start) + end for end in ends)
    return ()
