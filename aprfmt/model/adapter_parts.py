"""The stored tensors of a LoRA adapter by name, and why it may not be mergeable.

A *module* is a weight's name without its ending. A *pair* is the factors A and B of one module. A
*part* is what a tensor of a module is: "a", "b", "alpha" and so on.

No numbers are read, so that `inspect` can promise what a merge will do. Source: peft 0.21,
tuners/lora and utils/save_and_load.py; llama.cpp, convert_lora_to_gguf.py and llama-adapter.cpp,
which refuses a tensor that is no factor; kohya's sd-scripts, networks/lora.py; mlx-lm,
tuner/lora.py, tuner/dora.py and tuner/utils.py.
"""

import math
import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from aprfmt.base.bounded_regex import matches_start
from aprfmt.errors import FormatError
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.model.diffusion_modules import diffusers_module, has_exchanged_halves
from aprfmt.model.hf_folder import MAX_CONFIG, parse_config
from aprfmt.model.sidecar_files import ADAPTER_CONFIG

if TYPE_CHECKING:
    from aprfmt.base.protocols import Value
    from aprfmt.model import Model

DEFAULT_ALPHA = 8  # of PEFT's LoraConfig, where adapter_config.json has no lora_alpha
PREFIX = "base_model.model."  # before every name of PEFT's
ENDS: Mapping[str, tuple[str, str]] = {  # ending -> (spelling, which part of a pair)
    ".lora_A.weight": ("peft", "a"),
    ".lora_B.weight": ("peft", "b"),
    ".lora_embedding_A": ("peft", "embedding_a"),
    ".lora_embedding_B": ("peft", "embedding_b"),
    ".lora_magnitude_vector": ("peft", "magnitude"),
    ".lora_magnitude_vector.weight": ("peft", "magnitude"),
    ".lora_a": ("gguf", "a"),
    ".lora_b": ("gguf", "b"),
    ".lora_down.weight": ("kohya", "a"),
    ".lora_up.weight": ("kohya", "b"),
    ".alpha": ("kohya", "alpha"),
    ".dora_scale": ("kohya", "magnitude"),
}
_LONGEST_FIRST = sorted(ENDS, key=len, reverse=True)
# Initializations that take their factors out of the base, to which alone the trained ones can be
# added. PEFT writes another word where it saves an adapter for the base as it was.
_OF_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_UNREAD = ("lora_bias", "alora_invocation_tokens", "trainable_token_indices")
# Parts that say by themselves whose spelling it is: trainers add the others to foreign names.
_DECIDING = ("a", "b", "embedding_a", "embedding_b")
# Inside PEFT's ModulesToSaveWrapper (utils/other.py): the trained module, and the one before.
_SAVED, _ORIGINAL = ".modules_to_save.", ".original_module."
MLX_LENGTHS = ".m"  # ending of DoRA's lengths in MLX, next to .lora_a and .lora_b
_MLX_TABLES = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings")  # ends of modules
GGUF_EMBEDDING = "token_embd.weight"  # whose factors llama.cpp stores the other way round
WRAPPED = ".base_layer"  # of a module that PEFT wrapped more than once
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")  # whole names, or ends of them
_STACKED = 3  # axes of a factor for stacked experts
_NUMBERS = {"F32": "<f", "F16": "<e", "BF16": "<f", "F64": "<d"}
# What loaders compute from the configuration, and a converter may have added to an adapter.
_COMPUTED = re.compile(
    r"(^|\.)(rope_freqs|rope_factors_long|rope_factors_short)\.weight$"
    r"|(^|\.)(inv_freq|position_ids|masked_bias)$"
)


_FACTOR = ".lora_"  # in the names of factors of PEFT's
# A part of PEFT's with the adapter's name after it.
_NAMED = re.compile(
    r"(\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)|\.modules_to_save)"
    r"\.(?!weight$|bias$)([^.]+)(?=\.weight$|\.bias$|$)"
)


# Begins a module of a diffusion pipeline's adapter: diffusers' names, sd-scripts' and ComfyUI's.
# Language models have `transformer.h.`, `transformer.wte` and `transformer.encoder.` (ChatGLM).
_COMPONENT = re.compile(
    r"lora_(unet|transformer|prior|te[12]?)_|"
    r"(unet|diffusion_model|prior|text_encoder(?:_[23])?|transformer(?!\.(?:h|wte|encoder)\.))\."
)
# Why such an adapter is not merged.
OF_DIFFUSION = "it is of a diffusion pipeline, and bases here are language models"
_DENOISERS = frozenset({"unet", "transformer", "diffusion_model", "prior"})
_TEXT_ENCODERS = {"te": "text_encoder", "te1": "text_encoder", "te2": "text_encoder_2"}
DENOISER = "denoiser"


class AdapterParts(NamedTuple):
    """The stored names of an adapter, by what each tensor is.

    `spellings`: which conventions the factors' names follow: peft, gguf, kohya, mlx. Names such as
    `.alpha` and `.dora_scale` occur in several and do not decide that. `factors`: module ->
    {part ("a", "b", "alpha", ...): stored name}. `replacements`: name in the base -> stored name.
    `stray`: tensors that do not belong to an adapter. `copies`: what PEFT saves of a trained module
    a second time, or of the module before it was trained. `named` is the adapter's name that stands
    in all its names, as in a state_dict of PEFT's model; what PEFT saves and loads has none.
    """

    spellings: frozenset[str]
    factors: Mapping[str, Mapping[str, str]]
    replacements: Mapping[str, str]  # name in the base -> stored name
    stray: tuple[str, ...]
    copies: tuple[str, ...] = ()
    named: str = ""


def adapter_parts(model: "Model") -> AdapterParts:
    """Return the stored names of an adapter: factors of pairs, whole tensors, and stray ones.

    Stray are tensors that loaders compute and that are no part of an adapter.
    """
    factors: dict[str, dict[str, str]] = {}
    whole: dict[str, str] = {}
    stray: list[str] = []
    spellings: set[str] = set()
    named = adapter_name(model)
    for stored in model:
        name = without_adapter_name(stored, named)
        end = next((end for end in _LONGEST_FIRST if name.endswith(end)), "")
        if end:
            spelling, part = ENDS[end]
            module = name.removesuffix(end).removeprefix(PREFIX)
            if part in _DECIDING:
                spellings.add("mlx" if _is_mlx_module(spelling, module) else spelling)
            factors.setdefault(module, {})[part] = stored
        elif _COMPUTED.search(name):
            stray.append(stored)
        else:
            whole[name.removeprefix(PREFIX)] = stored
    if spellings == {"mlx"}:
        for name in [name for name in whole if name.endswith(MLX_LENGTHS)]:
            if name.removesuffix(MLX_LENGTHS) in factors:
                factors[name.removesuffix(MLX_LENGTHS)]["magnitude"] = whole.pop(name)
    copies = _take_saved_modules(whole)
    return AdapterParts(frozenset(spellings), factors, whole, tuple(stray), copies, named)


def diffusion_component(module: str) -> tuple[str, str]:
    """Return (component of a diffusion pipeline, rest of an adapter's module); ("", module) else.

    The component is "denoiser" (a U-Net or transformer), or that of a text encoder. The rest has
    underscores for dots and diffusers' names, so that it is the same in all spellings.
    """
    found = _COMPONENT.match(module)
    if found is None:
        return "", module
    name = found[1] or found[2]
    rest = module[found.end() :].replace(".", "_")
    if name in _DENOISERS:
        return DENOISER, diffusers_module(rest)
    return _TEXT_ENCODERS.get(name, name), rest


def exchanges_halves(module: str) -> bool:
    """Return whether diffusers stores the output halves of this module in the other order.

    `module` is a stored name. The original's projection before the last layer (shift, scale) is
    the only such module.
    """
    found = _COMPONENT.match(module)
    return found is not None and has_exchanged_halves(module[found.end() :].replace(".", "_"))


def diffusion_components(model: "Model", parts: AdapterParts) -> dict[str, int]:
    """Return {component: number of modules} of a diffusion pipeline's adapter; {} for another one.

    Every module has to be of a component of a pipeline. Names of PEFT's own files are no
    pipeline's. In kohya's naming one component has to be the denoiser, as adapters of language
    models are named like those of a text encoder.
    """
    if parts.spellings - {"peft", "kohya"} or any(name.startswith(PREFIX) for name in model):
        return {}
    found = Counter(diffusion_component(module)[0] for module in parts.factors)
    kohya = parts.spellings == {"kohya"}
    return {} if "" in found or (kohya and DENOISER not in found) else dict(found)


def diffusion_names(model: "Model") -> dict[str, str]:
    """Return {stored name: name without a spelling} of a diffusion pipeline's adapter; else {}."""
    parts = adapter_parts(model)
    if not diffusion_components(model, parts):
        return {}
    return {
        stored: ".".join((*diffusion_component(module), part))
        for module, own in parts.factors.items()
        for part, stored in own.items()
    }


def _is_mlx_module(spelling: str, module: str) -> bool:
    """Return whether the names .lora_a and .lora_b follow a module's name, as MLX writes them.

    `spelling` is "gguf" for these names, which llama.cpp also writes, but after the name of the
    module's weight.
    """
    return spelling == "gguf" and not module.endswith(".weight")


def is_mlx_table(module: str) -> bool:
    """Return whether a module of an MLX adapter is an embedding, by its name.

    For a table [tokens, size] the factors are [tokens, r] and [r, size].
    """
    return module.rpartition(".")[2] in _MLX_TABLES


def mlx_parameter(config: Mapping[str, Any], key: str) -> Any:
    """Return a value of lora_parameters in MLX's adapter_config.json; None without it."""
    held = config.get("lora_parameters")
    return held.get(key) if isinstance(held, Mapping) else None


def _mlx_obstacle(config: Mapping[str, Any], parts: AdapterParts, model: "Model") -> str:
    """Return why an adapter of MLX cannot be merged, as a clause; "" if it can.

    Its scale is in adapter_config.json alone. Its factors of stacked experts have three axes.
    """
    scale = mlx_parameter(config, "scale")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        said = "has no scale" if scale is None else f"says scale {scale!r}"
        return f"lora_parameters of adapter_config.json {said}, by which MLX multiplies the pairs"
    for module, own in parts.factors.items():
        if any(len(model[name].shape) == _STACKED for name in own.values()):
            return f"{module} has MLX's factors of stacked experts, which are not read here"
    return ""


def adapter_name(names: Iterable[str]) -> str:
    """Return the adapter's own name that its stored names contain; "" if none or several.

    PEFT's modules are called lora_A.NAME in memory; what save_pretrained writes is without it.
    """
    matches = (_NAMED.search(name) for name in names if _FACTOR in name)
    found = {match[2] for match in matches if match is not None}
    return found.pop() if len(found) == 1 else ""


def without_adapter_name(name: str, adapter: str) -> str:
    """Return a stored name without the part that is the adapter's own name, `adapter`.

    With "" for `adapter` it is returned unchanged.
    """
    if not adapter:
        return name
    return _NAMED.sub(lambda match: match[1] if match[2] == adapter else match[0], name)


def _take_saved_modules(whole: dict[str, str]) -> tuple[str, ...]:
    """Rename the keys of whole tensors that are inside PEFT's wrapper of a trained module.

    `whole`, {name in the base: stored name}, is changed: the keys become the module's own names.
    Returns the stored names that were taken out: the module as it was, and a second copy.
    """
    saved = [name for name in whole if _SAVED in name]
    copies = [whole.pop(name) for name in list(whole) if _ORIGINAL in name and saved]
    for name in saved:
        plain = name.replace(_SAVED, ".", 1)
        if plain in whole:
            copies.append(whole[plain])
        whole[plain] = whole.pop(name)
    return tuple(copies)


def plain_module(module: str) -> str:
    """Return a module's name without the wrappers of PEFT."""
    return unwrap_module(module)[0].replace(f"{WRAPPED}.", ".")


def unwrap_module(module: str) -> tuple[str, int]:
    """Return (module name without PEFT's `.base_layer` endings, how many were removed)."""
    depth = 0
    while module.endswith(WRAPPED):
        module, depth = module.removesuffix(WRAPPED), depth + 1
    return module, depth


def target_parameters(config: Mapping[str, Any], module: str) -> tuple[str, ...]:
    """Return a module's parameters that PEFT's target_parameters lists; () for most modules.

    An entry names MODULE.PARAMETER, or the end of that. An entry without a module means every
    module that is not listed in target_modules itself.
    """
    found = []
    entries = config.get("target_parameters")
    for entry in entries if isinstance(entries, list) else ():
        owner, _, name = str(entry).rpartition(".")
        named = module == owner or module.endswith(f".{owner}")
        if named if owner else not _is_target_module(config, module):
            found.append(name)
    return tuple(dict.fromkeys(found))


def _is_target_module(config: Mapping[str, Any], module: str) -> bool:
    """Return whether target_modules of adapter_config.json names or matches this module."""
    targets = config.get("target_modules")
    if isinstance(targets, str):
        return matches_start(rf"({targets})$", module)
    names = targets if isinstance(targets, list) else ()
    return any(module == name or module.endswith(f".{name}") for name in names)


def value_by_pattern(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches a module's name or its end, or `default`.

    `patterns` is PEFT's rank_pattern or alpha_pattern: {regular expression: value}.
    """
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        if matches_start(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def adapter_scale(config: Mapping[str, Any], alpha: float, rank: int) -> float:
    """Return the factor of a pair's product: alpha / r, with rsLoRA alpha / sqrt(r)."""
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def stored_alpha(model: "Model", parts: AdapterParts, module: str) -> float | None:
    """Return the number in the alpha tensor of a module's pair; None without a readable one."""
    name = parts.factors[module].get("alpha")
    if name is None:
        return None
    tensor = model[name].stored[0]
    form = _NUMBERS.get(tensor.info.encoding)
    raw = bytes(tensor.raw(0, min(8, tensor.info.nbytes)))
    if form is None or len(raw) < struct.calcsize(form):
        return None
    if tensor.info.encoding == "BF16":
        raw = b"\0\0" + raw[:2]
    (found,) = struct.unpack_from(form, raw)
    return float(found)


def assumed_alpha_text(config: Mapping[str, Any], parts: AdapterParts, model: "Model") -> str:
    """Return that an adapter's configuration states no alpha, as a sentence; "" if it has one.

    "" too for a file without a configuration, for names of other libraries than PEFT, and where
    tensors or patterns give the alpha of every pair.
    """
    stated = "lora_alpha" in config or "adapter.lora.alpha" in model.metadata
    if stated or not config or parts.spellings != {"peft"} or not parts.factors:
        return ""
    known = (
        value_by_pattern(config.get("alpha_pattern"), module, None) is not None
        or stored_alpha(model, parts, module) is not None
        for module in parts.factors
    )
    if all(known):
        return ""
    return (
        f"adapter_config.json has no lora_alpha: PEFT takes its default, {DEFAULT_ALPHA}, and "
        "other loaders another number, or 0"
    )


def alpha_contradiction(config: Mapping[str, Any], parts: AdapterParts, model: "Model") -> str:
    """Return how stored alphas contradict adapter_config.json, as a sentence; "" if they agree.

    Only for files of PEFT's names. PEFT reads the configuration alone, other loaders (diffusers,
    vLLM, sd-scripts) the tensors.
    """
    if parts.spellings != {"peft"}:
        return ""
    apart = []
    for module, own in parts.factors.items():
        alpha = stored_alpha(model, parts, module)
        claimed = value_by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 0))
        factor = own.get("a")
        if alpha is None or factor is None or not isinstance(claimed, int | float):
            continue
        rank = model[factor].shape[0]
        scale = adapter_scale(config, float(claimed), rank)
        if rank and not math.isclose(alpha / rank, scale, rel_tol=1e-3):
            apart.append((own["alpha"], alpha, alpha / rank, scale))
    if not apart:
        return ""
    name, alpha, mine, theirs = apart[0]
    return (
        f"{name} is {alpha:g}, which makes the scale {mine:g}, and adapter_config.json makes it "
        f"{theirs:g} ({len(apart)} of {len(parts.factors)} pairs): PEFT goes by the configuration, "
        "other loaders by the tensors; set lora_alpha to what was trained, or take the tensors out"
    )


def whole_in_gguf(parts: AdapterParts) -> tuple[str, ...]:
    """Return the stored names of whole tensors for which llama.cpp refuses a GGUF adapter.

    It (llama-adapter.cpp) takes names that end in `.lora_a` or `.lora_b`, passes over
    `_norm.weight`, and refuses a file with any other. () for other spellings.
    """
    whole = parts.replacements.values() if parts.spellings == {"gguf"} else ()
    return tuple(name for name in whole if not name.endswith("_norm.weight"))


def is_saved_base(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a whole tensor is the base's own, which PEFT saved with the module's pair.

    `name` is its name in the base with the wrapper, such as `q_proj.base_layer.bias`. A bias that
    `bias` of the configuration makes trainable stands there too, and is the adapter's.
    """
    trained = name.endswith(".bias") and config.get("bias") in ("all", "lora_only")
    return f"{WRAPPED}." in name and not trained


TRANSPOSED_DORA = "DoRA of matrices that are stored [in, out] (fan_in_fan_out) is not merged here"


def dora_obstacle(config: Mapping[str, Any]) -> str:
    """Return why DoRA of an adapter cannot be merged, as a clause; "" where it can, or is none.

    Its gradients can be computed all the same.
    """
    return TRANSPOSED_DORA if config.get("use_dora") and config.get("fan_in_fan_out") else ""


def merge_obstacle(
    config: Mapping[str, Any], parts: AdapterParts, model: "Model", *, compare: bool = False
) -> str:
    """Return why an adapter cannot be used, as a clause; "" if names and config allow it.

    `dora_obstacle` stands in the way of a merge alone. With `compare` the adapter is compared with
    a merged model and not merged: contradictory alphas, and tensors that no merge reads, are then
    no obstacle.
    """
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        return f"peft_type is {kind!r}; LORA is what is read"
    for key in _UNREAD:
        if config.get(key):
            return f"{key} of adapter_config.json is not read here"
    odd_pair = _parameter_obstacle(config, parts)
    if odd_pair:
        return odd_pair
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.lower().startswith(_OF_BASE):
        return (
            f"adapter_config.json says init_lora_weights {began!r}, which changed the base as "
            "well; save it by PEFT's path_initial_model_for_weight_conversion first"
        )
    odd = [*odd_tensors(parts).values()]
    if odd and not compare:
        return f"{odd[0]} is no part of a LoRA that is read here"
    if len(parts.spellings) > 1:
        return f"it has names of {', '.join(sorted(parts.spellings))}"
    if not compare and diffusion_components(model, parts):
        return OF_DIFFUSION
    if not compare and lacks_scale(config, parts):
        return "no adapter_config.json that can be read lies next to it, and alpha is only there"
    if parts.spellings == {"mlx"}:
        return _mlx_obstacle(config, parts, model)
    return "" if compare else alpha_contradiction(config, parts, model)


def lacks_scale(config: Mapping[str, Any], parts: AdapterParts) -> bool:
    """Return whether nothing says the scale of an adapter: PEFT's names without a configuration."""
    return parts.spellings == {"peft"} and not config


def odd_tensors(parts: AdapterParts) -> Mapping[str, str]:
    """Return {name: stored name} of whole tensors whose names can be those of no base."""
    kohya = "kohya" in parts.spellings  # has no whole tensors
    return {name: own for name, own in parts.replacements.items() if "lora" in name or kohya}


def pair_fault(config: Mapping[str, Any], parts: AdapterParts, model: "Model", module: str) -> str:
    """Return why the factors of a module are no pair of a LoRA, as a clause; "" if they are one.

    By names and shapes alone: one factor without the other, DoRA's lengths lost, axes that do not
    fit, or another rank than adapter_config.json says.
    """
    own = parts.factors[module]
    embedding = "embedding_a" in own or "embedding_b" in own
    names = ("embedding_a", "embedding_b") if embedding else ("a", "b")
    for part in names:
        if part not in own:
            return f"{module} has no {part} next to {', '.join(own)}"
    if config.get("use_dora") and "magnitude" not in own:
        return f"{module} has no lora_magnitude_vector, and adapter_config.json says use_dora"
    if parts.spellings == {"mlx"}:
        return _mlx_pair_fault(config, module, *(model[own[part]].shape for part in names))
    turned = parts.spellings == {"gguf"} and module == GGUF_EMBEDDING
    a, b = (model[own[part]].shape for part in names)
    if len(a) != 2 or len(b) != 2 or a[turned] != b[1] or not b[1]:
        expected = "[tokens, r] and [size, r]" if turned else "[r, in] and [out, r]"
        flat = len(a) < 2 and len(b) < 2
        saved = (
            "; a partitioned run (ZeRO stage 3, FSDP) was saved without gathering" if flat else ""
        )
        exchanged = len(a) == len(b) == 2 and a[1 - turned] == b[0] > 0
        saved = "; both are transposed" if exchanged else saved
        return f"{module}: factors are {list(a)} and {list(b)}; expected {expected}{saved}"
    if "kohya" in parts.spellings or target_parameters(config, unwrap_module(module)[0]):
        return ""  # the rank is the file's own, or one for several experts
    claimed = value_by_pattern(config.get("rank_pattern"), module, config.get("r", b[1]))
    return _other_rank_clause(module, claimed, b[1], claimed == a[1 - turned] == b[0])


def _other_rank_clause(module: str, claimed: "Value", found: int, transposed: bool) -> str:
    """Return a clause if a module's factors have another rank than adapter_config.json says; or "".

    `claimed` is the config's rank, `found` the factors'. `transposed`: with rows and columns
    exchanged, both factors have the claimed rank, which the clause adds.
    """
    if claimed == found:
        return ""
    turned = "; both are transposed: exchanged, they have that rank" if transposed else ""
    return f"{module}: adapter_config.json says rank {claimed}, its factors have {found}{turned}"


def _mlx_pair_fault(
    config: Mapping[str, Any], module: str, a: tuple[int, ...], b: tuple[int, ...]
) -> str:
    """Return why factors of shapes `a` and `b` are no pair of an MLX adapter, as a clause; else "".

    A pair has [in, r] and [r, out], or for stacked experts [experts, r, in] and [experts, out, r].
    """
    stacked = len(a) == len(b) == _STACKED
    fits = a[1] == b[2] if stacked else len(a) == len(b) == 2 and a[1] == b[0]
    if not fits or not a[1]:
        return f"{module}: factors are {list(a)} and {list(b)}; expected [in, r] and [r, out]"
    claimed = mlx_parameter(config, "rank")
    if claimed is None:
        return ""
    return _other_rank_clause(module, claimed, a[1], not stacked and claimed == a[0] == b[1])


def pair_faults_text(config: Mapping[str, Any], parts: AdapterParts, model: "Model") -> str:
    """Return the first fault of a pair and how many pairs have one; "" if all are pairs."""
    found = [
        fault for module in parts.factors if (fault := pair_fault(config, parts, model, module))
    ]
    more = f" ({len(found)} of {len(parts.factors)} pairs)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else ""


def _parameter_obstacle(config: Mapping[str, Any], parts: AdapterParts) -> str:
    """Return why pairs for single parameters (target_parameters) cannot be merged, or ""."""
    depths: dict[str, set[int]] = {}
    for module in parts.factors:
        name, depth = unwrap_module(module)
        depths.setdefault(name, set()).add(depth)
    for name, found in depths.items():
        targets = target_parameters(config, name)
        if len(found) > max(len(targets), 1) or found != set(range(len(found))):
            return (
                f"{name} has {len(found)} pairs, one wrapped in the other, and target_parameters "
                f"of adapter_config.json names {len(targets)} of its parameters"
            )
    return ""


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
