"""What an adapter is, in words, and what can be done with it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.base.sequences import join_first
from aprfmt.base.text_escape import shorten
from aprfmt.model.adapter_parts import (
    DEFAULT_ALPHA,
    HEADS,
    adapter_parts,
    alpha_contradiction,
    assumed_alpha_text,
    diffusion_components,
    dora_obstacle,
    is_saved_base,
    lacks_scale,
    merge_obstacle,
    mlx_parameter,
    pair_faults_text,
    peft_config,
    plain_module,
    target_parameters,
    unwrap_module,
    whole_in_gguf,
)
from aprfmt.model.renames import prefix_rule_onto
from aprfmt.model.towers import has_towers

if TYPE_CHECKING:
    from aprfmt.model import Model

_SHOWN = 3  # names in a line


def adapter_text(model: "Model") -> str:
    """Return a description of an adapter: rank, alpha, base model, and its whole tensors."""
    config = peft_config(model)
    parts = adapter_parts(model)
    ranks = {
        _pair_rank(config, module, [model[name].shape for name in own.values()])
        for module, own in parts.factors.items()
    }
    ranks.discard(0)  # factors of a partitioned run, which are no matrices
    rank = " of rank " + " or ".join(map(str, sorted(ranks)[:3])) if ranks else ""
    alpha = config.get("lora_alpha", model.metadata.get("adapter.lora.alpha"))
    scale = f", alpha {alpha:g}" if isinstance(alpha, (int, float)) else ""
    base = config.get("base_model_name_or_path", model.metadata.get("general.base_model.0.name"))
    if assumed_alpha_text(config, parts, model):
        scale = f", no alpha stated (PEFT takes {DEFAULT_ALPHA}, other loaders another number)"
    if parts.spellings == {"mlx"}:
        alpha, base = mlx_parameter(config, "scale"), config.get("model")
        scale = f", scale {alpha:g}" if isinstance(alpha, (int, float)) else ""
    what = "a LoRA adapter of MLX" if parts.spellings == {"mlx"} else "a LoRA adapter"
    components = diffusion_components(model, parts)
    if components:
        counts = ", ".join(f"{name} {count}" for name, count in components.items())
        what += f" of a diffusion pipeline (modules: {counts})"
    found = f"{what}{rank}{scale}{_for_base(base)}, {len(model)} tensors"
    bases = [name for name in parts.replacements if is_saved_base(name, config)]
    whole = [name for name in parts.replacements if name not in bases]
    if whole:
        each = [f"{name} {list(model[parts.replacements[name]].shape)}" for name in whole]
        found += f", {len(each)} of them whole ({join_first(each, _SHOWN)})"
    if bases:
        # Of an embedding PEFT's save_pretrained writes it, too.
        dumped = any("embed" not in name and not name.endswith(HEADS) for name in bases)
        of = ": a state_dict of PEFT's model, of which a merge takes what differs" if dumped else ""
        found += f", {len(bases)} of them the base's own ({join_first(bases, _SHOWN)}){of}"
    if parts.stray:
        stray = join_first(parts.stray, _SHOWN)
        found += f", {len(parts.stray)} no part of an adapter and left out ({stray})"
    return found


def astray_modules_text(model: "Model", base: "Model") -> str:
    """Return a clause on modules of an adapter that its base does not have; "" if it has all.

    "" too where the base is of another format than the adapter, or multimodal: then modules are
    named otherwise in memory than in the file.
    """
    from aprfmt.arch.binding import bind_names

    parts, config = adapter_parts(model), peft_config(model)
    plain = [
        plain_module(module)
        for module in parts.factors
        if not target_parameters(config, unwrap_module(module)[0])
    ]
    names = [f"{module}.weight" for module in plain]
    astray = [name for name in names if name not in base and not name.endswith(HEADS)]
    if parts.spellings != {"peft"} or not astray:
        return ""
    if base.style != "hf" or has_towers(base.config):
        return ""
    rule = prefix_rule_onto(astray, set(base))
    if rule is None and bind_names(base.spec, "hf", astray).groups:
        return ""  # experts that the base stacks, or another library's names of a role
    says = f"{len(astray)} of its {len(plain)} modules have names that {base.path} has not "
    says += f"({astray[0].removesuffix('.weight')}), so that loaders leave them out"
    return says + (f": {rule.text}" if rule is not None else "")


def _pair_rank(config: dict[str, Any], module: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the rank of the factors A and B of a module; 0 if neither has two axes.

    `shapes` are the stored shapes of the factors. For factors of stacked experts, one of whose axes
    is rank times experts, it is the configuration's `r`.
    """
    if target_parameters(config, unwrap_module(module)[0]) and isinstance(config.get("r"), int):
        return int(config["r"])
    return (
        min(min(shape) for shape in shapes if len(shape) > 1)
        if any(len(shape) > 1 for shape in shapes)
        else 0
    )


def adapter_next_step(model: "Model") -> str:
    """Return what aprfmt can do with an adapter, or why it cannot be merged, as a clause."""
    parts = adapter_parts(model)
    config = peft_config(model)
    obstacle = merge_obstacle(config, parts, model) or dora_obstacle(config)
    if obstacle and obstacle == alpha_contradiction(config, parts, model):
        return f"it is not merged here: {obstacle}"
    fault = pair_faults_text(config, parts, model)
    if fault:
        return f"it can be merged by no program: {fault}"
    if diffusion_components(model, parts):
        return f"it is not merged here ({obstacle}); diffusers loads it (load_lora_weights)"
    if lacks_scale(config, parts):
        return f"it is not merged here: {obstacle}; put the one there that was saved with it"
    if obstacle:
        tool = "mlx_lm.fuse" if parts.spellings == {"mlx"} else "PEFT's merge_and_unload"
        return f"it is not merged here ({obstacle}); merge it with {tool}"
    merge = f"merge it into its base (aprfmt convert BASE OUT --adapter {model.path})"
    if parts.named:
        return (
            f"its names have the adapter's own, {parts.named!r}, in them, which no loader reads: "
            f"save it by save_pretrained, or {merge}"
        )
    refused = whole_in_gguf(parts)
    if refused:
        return (
            f"llama.cpp refuses it for {join_first(refused, _SHOWN)}, which is whole; leave it out "
            f"if it is the base's own: {drop_stray_command(model, refused)}"
        )
    if parts.replacements:
        return f"{merge}, which alone takes whole tensors along"
    if any(target_parameters(config, unwrap_module(module)[0]) for module in parts.factors):
        return f"{merge}, the one form that pairs for single parameters have here"
    return f"{merge}, or write it in another form (aprfmt convert ADAPTER OUT --base BASE)"


def drop_stray_command(model: "Model", names: Sequence[str]) -> str:
    """Return the command that writes an adapter without the stray tensors `names`."""
    drop = " ".join(f"--drop {name}" for name in names)
    return f"aprfmt convert {model.path} OUT --generic {drop}"


def scaling_adapter_text(model: "Model") -> str:
    """Return a description of an IA3 adapter, with its base model."""
    to = _for_base(peft_config(model).get("base_model_name_or_path"))
    return f"an IA3 adapter{to}, {len(model)} tensors: vectors that scale activations"


def other_adapter_text(model: "Model") -> str:
    """Return a description of an adapter of another method than LoRA and IA3: its peft_type."""
    config = peft_config(model)
    to = _for_base(config.get("base_model_name_or_path"))
    method = shorten(str(config.get("peft_type")), 40)
    return f"an adapter of PEFT's method {method}{to}, {len(model)} tensors"


def _for_base(base: object) -> str:
    """Return " for " and the name of an adapter's base model; "" where it is no name."""
    return f" for {shorten(base, 100)}" if isinstance(base, str) and base else ""
