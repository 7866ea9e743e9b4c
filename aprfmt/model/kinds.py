"""Recognises files that open but are no whole model: adapters, imatrix, projectors, ...

A row of KINDS recognises one kind by what its writers put into it. `--arch` overrides this: who
names an architecture gets a model of it.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from aprfmt.base.sequences import join_first
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.model.adapter_parts import (
    HEADS,
    WRAPPED,
    adapter_name,
    adapter_parts,
    alpha_contradiction,
    diffusion_components,
    is_scaling_vector,
    lacks_scale,
    merge_obstacle,
    mlx_parameter,
    pair_faults_text,
    plain_module,
    target_parameters,
    unwrap_module,
)
from aprfmt.model.hf_folder import MAX_CONFIG, parse_config
from aprfmt.model.renames import prefix_rule_onto
from aprfmt.model.sidecar_files import ADAPTER_CONFIG
from aprfmt.model.towers import has_towers

if TYPE_CHECKING:
    from aprfmt.model import Model

_SHOWN = 3  # names in a line


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file that is no whole model of aprfmt: a row of KINDS.

    `is_one(model)` recognises it, `says(model)` describes the file, `todo(model)` is what to do
    next, as a clause. `foreign` marks a whole model in a layout that is not read here.
    """

    name: str
    is_one: "Callable[[Model], bool]"
    says: "Callable[[Model], str]"
    todo: "Callable[[Model], str]"
    foreign: bool = False  # a whole model that is not read here, whatever --arch says


def find_kind(model: "Model") -> Kind | None:
    """Return the Kind of a file that is not a whole model; None for a model."""
    return next((kind for kind in KINDS if kind.is_one(model)), None)


# Name endings of the two factors of a LoRA: PEFT's, llama.cpp's and MLX's, kohya's.
FACTORS = (
    ".lora_A.weight", ".lora_B.weight", ".lora_a", ".lora_b", ".lora_down.weight",
    ".lora_up.weight", ".lora_embedding_A", ".lora_embedding_B",
)  # fmt: skip
FACTOR_PARTS = (".alpha", ".lora_magnitude_vector", ".lora_magnitude_vector.weight", ".dora_scale")


def _is_adapter(model: "Model") -> bool:
    """Return whether a file is a LoRA adapter, by `general.type` or its tensor names."""
    if _general_type(model) == "adapter":
        return True
    if model.format == "gguf":
        return False
    return any(map(methodcaller("endswith", FACTORS), model)) or bool(adapter_name(model))


def _adapter_text(model: "Model") -> str:
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
    if parts.spellings == {"mlx"}:
        alpha, base = mlx_parameter(config, "scale"), config.get("model")
        scale = f", scale {alpha:g}" if isinstance(alpha, (int, float)) else ""
    what = "a LoRA adapter of MLX" if parts.spellings == {"mlx"} else "a LoRA adapter"
    components = diffusion_components(model, parts)
    if components:
        counts = ", ".join(f"{name} {count}" for name, count in components.items())
        what += f" of a diffusion pipeline (modules: {counts})"
    found = f"{what}{rank}{scale}{_for_base(base)}, {len(model)} tensors"
    bases = [name for name in parts.replacements if f"{WRAPPED}." in name]
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
    """Return the rank of a factor pair; 0 if no factor has two axes.

    `shapes` are the stored shapes of the pair. For factors of stacked experts, one of whose axes is
    rank times experts, it is the configuration's `r`.
    """
    if target_parameters(config, unwrap_module(module)[0]) and isinstance(config.get("r"), int):
        return int(config["r"])
    return (
        min(min(shape) for shape in shapes if len(shape) > 1)
        if any(len(shape) > 1 for shape in shapes)
        else 0
    )


def _adapter_next_step(model: "Model") -> str:
    """Return what aprfmt can do with an adapter, or why it cannot be merged, as a clause."""
    parts = adapter_parts(model)
    config = peft_config(model)
    obstacle = merge_obstacle(config, parts, model)
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
    if parts.replacements:
        return f"{merge}, which alone takes whole tensors along"
    if any(target_parameters(config, unwrap_module(module)[0]) for module in parts.factors):
        return f"{merge}, the one form that pairs for single parameters have here"
    return f"{merge}, or write it in another form (aprfmt convert ADAPTER OUT --base BASE)"


def drop_stray_command(model: "Model", names: Sequence[str]) -> str:
    """Return the command that writes an adapter without the stray tensors `names`."""
    drop = " ".join(f"--drop {name}" for name in names)
    return f"aprfmt convert {model.path} OUT --generic {drop}"


def peft_config(model: "Model") -> dict[str, Any]:
    """Return adapter_config.json from the folder of the weights; {} if absent or not readable."""
    path = model.path.with_name(ADAPTER_CONFIG)
    if not path.is_file():
        return {}
    with closing(open_bytes(path)) as file:
        try:
            return dict(parse_config(file.view[: MAX_CONFIG + 1], path))
        except FormatError:
            return {}


def _general_type(model: "Model") -> object:
    """Return the value of a GGUF's key `general.type`, None without it."""
    return model.metadata.get("general.type")


def _is_scaling_adapter(model: "Model") -> bool:
    """Return whether a file is an IA3 adapter, by its tensor names."""
    return model.format != "gguf" and any(map(is_scaling_vector, model))


def _scaling_adapter_text(model: "Model") -> str:
    """Return a description of an IA3 adapter, with its base model."""
    to = _for_base(peft_config(model).get("base_model_name_or_path"))
    return f"an IA3 adapter{to}, {len(model)} tensors: vectors that scale activations"


def _for_base(base: object) -> str:
    """Return " for " and the name of an adapter's base model; "" where it is no name."""
    return f" for {shorten(base, 100)}" if isinstance(base, str) and base else ""


def _is_imatrix(model: "Model") -> bool:
    """Return whether a file is an importance matrix, by `general.type` or its tensor names."""
    return _general_type(model) == "imatrix" or (
        len(model) > 0 and all(name.endswith((".in_sum2", ".counts")) for name in model)
    )


def _imatrix_text(model: "Model") -> str:
    """Return a description of an importance matrix: how many weights, of which data set."""
    weights = sum(name.endswith(".in_sum2") for name in model)
    sets: Any = model.metadata.get("imatrix.datasets")
    of = ""
    if isinstance(sets, Sequence) and not isinstance(sets, str) and len(sets):
        of = f" of {shorten(str(sets[0]), 100)}"
    return f"an importance matrix (imatrix) for {weights} weights{of}"


def _is_projector(model: "Model") -> bool:
    """Return whether a file is a multimodal projector that no architecture of aprfmt reads.

    A vision tower without a projector is a separate model, and not one of these.
    """
    from aprfmt.arch.role_vocabulary import PROJECTORS

    if model.metadata.get("clip.projector_type") in PROJECTORS.values():
        return False
    tower = model.metadata.get("general.architecture") == "clip"
    return _general_type(model) == "mmproj" or (
        tower and any(name.startswith("mm.") for name in model)
    )


def _projector_text(model: "Model") -> str:
    """Return a description of a projector's file, with its type."""
    kind = model.metadata.get("clip.projector_type")
    of = f" of type {shorten(kind, 40)}" if isinstance(kind, str) else ""
    return f"a multimodal projector (mmproj){of}: the vision or audio half of a model"


def _is_vocabulary(model: "Model") -> bool:
    """Return whether a GGUF has a vocabulary and no tensors."""
    return not len(model) and "tokenizer.ggml.tokens" in model.metadata


def _vocabulary_text(model: "Model") -> str:
    """Return a description of a vocabulary-only file, with its number of tokens."""
    tokens: Any = model.metadata["tokenizer.ggml.tokens"]
    return f"a vocabulary of {len(tokens)} tokens without weights"


# Names of attention and MLP in Meta's and Mistral's own checkpoints, whose q and k have the rows of
# a rotated pair side by side. Sources: mistral-inference, and transformers' scripts
# convert_mistral_weights_to_hf.py and convert_llama_weights_to_hf.py, which rename and permute.
_OWN = ("layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "tok_embeddings.weight")


def _is_meta_format(model: "Model") -> bool:
    """Return whether tensors have the names of Meta's and Mistral's original checkpoints."""
    return model.key_style == "safetensors" and sum(name in model for name in _OWN) > 1


def _meta_format_text(model: "Model") -> str:
    """Return a description of a model in the original format of Meta's or Mistral's releases."""
    beside = " with params.json" if model.path.with_name("params.json").is_file() else ""
    return (
        f"a model in Mistral's (and Meta's) own format{beside}: names like {_OWN[0]}, rows of q "
        "and k in adjacent pairs"
    )


KINDS: tuple[Kind, ...] = (
    Kind("adapter", _is_adapter, _adapter_text, _adapter_next_step),
    Kind("scaling_adapter", _is_scaling_adapter, _scaling_adapter_text, lambda model: (
        "it is not merged here; merge it with PEFT's merge_and_unload")),
    Kind("imatrix", _is_imatrix, _imatrix_text, lambda model: (
        f"aprfmt quantize MODEL OUT.gguf --type Q4_K_M --imatrix {model.path} uses it")),
    Kind("projector", _is_projector, _projector_text, lambda model: (
        f"the language model is in another file; aprfmt tensors {model.path} lists this one")),
    Kind("vocabulary", _is_vocabulary, _vocabulary_text, lambda model: (
        f"aprfmt tokenize {model.path} TEXT uses it")),
    Kind("own_format", _is_meta_format, _meta_format_text, lambda model: (
        "convert it to Hugging Face's first, with transformers' convert_mistral_weights_to_hf.py "
        "(convert_llama_weights_to_hf.py for Llama), and open that folder"), foreign=True),
)  # fmt: skip
