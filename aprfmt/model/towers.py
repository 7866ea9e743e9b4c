"""Vision and audio towers of multimodal checkpoints: their tensor names in both layouts.

transformers writes them at the top (`vision_tower.`) or below `model.` and reads both. Source:
the key mappings of its multimodal classes (gemma3, llava, qwen2_vl, qwen2_5_vl, mistral3 and
others), which put `model.` before these modules, and the one that takes `vision_model.` out of
a tower.
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.model import Model
    from aprfmt.model.renames import Rename

MODULES = frozenset(
    "visual vision_tower vision_model vision_encoder vision_embed_tokens audio_tower audio_model "
    "audio_encoder multi_modal_projector multi_modality_projector image_newline embed_vision "
    "embed_audio mm_projector connector vqmodel image_projection".split()
)
_SECTIONS = ("vision_config", "audio_config", "vision_tower_config", "image_config")


def has_towers(config: Mapping[str, Value] | None) -> bool:
    """Return whether a configuration describes a vision or audio tower."""
    return config is not None and any(config.get(key) for key in _SECTIONS)


def tower_name(name: str) -> str:
    """Return a tower tensor's name, the same for both layouts; "" for other tensors.

    "" too where the module's name is repeated (`visual.visual.`): loaders find no such tensor.
    """
    short = name.removeprefix("model.")
    module, dot, rest = short.partition(".")
    if module not in MODULES or rest.startswith(f"{module}."):
        return ""
    return f"{module}{dot}{rest.removeprefix('vision_model.')}"


def tower_root(name: str) -> str:
    """Return a tower tensor's name up to the tower's module, such as `model.vision_tower`.

    It serves as a pattern of the tower's tensors.
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part in MODULES), 0)
    return ".".join(parts[: at + 1])


def tower_rule(names: Iterable[str], unbound: Iterable[str]) -> "Rename | None":
    """Return the rename that moves a tower to where loaders look for it; None if not needed.

    `names` are all names of the file, `unbound` those without a role.
    """
    below = any(name.startswith("model.language_model.") for name in names)
    found: dict[tuple[str, ...], int] = {}
    for name in unbound:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts[:-1]) if part in MODULES), None)
        if at is not None and not tower_name(name):
            while at + 2 < len(parts) and parts[at + 1] == parts[at]:
                at += 1
            found[tuple(parts[: at + 1])] = found.get(tuple(parts[: at + 1]), 0) + 1
    if not found:
        return None
    from aprfmt.model.renames import Rename

    most = max(found, key=lambda each: found[each])
    return Rename(".".join(most) + ".", ("model." if below else "") + most[-1] + ".")


def names_in_towers(model: "Model", names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names that belong to a tower that the configuration describes.

    () where the configuration describes no tower.
    """
    if not has_towers(model.config):
        return ()
    return tuple(name for name in names if tower_name(name))


def tower_architecture(model: "Model", other: "Model") -> str:
    """Return the architecture that opens `model` as its tower, to compare it with `other`; or "".

    "" unless `other` is a tower alone (an mmproj file, say), and `model` is multimodal, has such a
    tower by its configuration, and is opened as its language model without a forced architecture.
    """
    try:
        tower, whole = other.spec, model.spec
    except ArchError:
        return ""
    stated = (model.config or {}).get(tower.section)
    if tower.section not in _SECTIONS or whole.section in _SECTIONS or model.forced is not None:
        return ""
    return tower.name if isinstance(stated, Mapping) else ""


def names_outside_tower(model: "Model", other: "Model") -> tuple[str, ...]:
    """Return the stored tensors of a multimodal model that are not of its tower, which `other` is.

    They are those of its language model. () unless `model` is opened as a tower, and every tensor
    of `other` is one of the same tower.
    """
    try:
        spec, alone = (
            model.spec,
            other.spec.name == model.spec.name and not other.resolution.unbound,
        )
    except ArchError:
        return ()
    if spec.section not in _SECTIONS or not alone:
        return ()
    return tuple(name for name in model.resolution.unbound if not tower_name(name))


def tower_options(model: "Model", other: "Model") -> tuple[str, ...]:
    """Return the options of `convert` that write the tower `other` alone from a multimodal model.

    () where `other` is no tower alone.
    """
    outside = names_outside_tower(model, other)
    if not outside:
        return ()
    parts = [name.split(".") for name in outside]
    roots = dict.fromkeys(".".join(each[: 1 + (each[0] == "model")]) for each in parts)
    drops = (f"--drop {shlex.quote(f'{root}.*')}" for root in roots)
    return (f"--arch {model.spec.name}", *drops)
