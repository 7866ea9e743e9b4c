"""Checks which modules config.json declares quantized against the weights in the file.

Loaders build their modules by that declaration. A plain weight that is declared packed is then
dropped, and so are the parts of a packed one that a list leaves unquantized.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from aprfmt.arch.name_templates import PREFIXES, strip_prefix
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.protocols import Value
from aprfmt.base.sequences import join_first
from aprfmt.codecs.module_lists import (
    MORE,
    claims_packed,
    group_without_modules,
    is_listed,
    may_list_any,
    method_of,
    unquantized_list,
)
from aprfmt.errors import AprfmtError, CodecError
from aprfmt.model.packing import packing_config
from aprfmt.model.patterns import close_names
from aprfmt.model.relations import Relation, opening_path
from aprfmt.model.renames import command_line
from aprfmt.tensors.companions import key_of_section, quantization_section

if TYPE_CHECKING:
    from aprfmt.model import Model

# The roles of projections that every library quantizes where nothing says otherwise. Routers,
# gates of shared experts, heads, embeddings and mixers are left out: libraries differ there.
_PROJECTIONS = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_qkv",
    "attn_output",
    "attn_q_a",
    "attn_q_b",
    "attn_kv_b",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
_EXPERTS = ("_exps", "_shexp")
_FLOATS = ("F32", "F16", "BF16")
_WEIGHT = ".weight"
_SHOWN = 2
Section = Mapping[str, Value]


def wrong_claims(model: "Model") -> Relation | None:
    """Return the Relation on modules whose weights contradict the quantization section; else None.

    None too for a method whose lists of modules are not known, and where no weight is packed.
    """
    section = None if model.config is None else quantization_section(model.config)
    if section is None or method_of(section) is None:
        return None
    try:
        plain, packed = _plain_and_packed(model)
        if not packed:
            return None
        return _claim_relation(model, section, plain, packed)
    except (AprfmtError, CodecError):
        return None  # reported where the section or architecture is read


def stale_names(model: "Model") -> list[tuple[str, str]]:
    """Return (listed name, nearest module or "") of listed modules that the file does not have.

    Only full names in the quantization section's lists count. Patterns, single words and heads may
    fit nothing in a good file, as lists are copied between models.
    """
    section = None if model.config is None else quantization_section(model.config)
    if section is None or method_of(section) is None:
        return []
    own = {name.rpartition(".")[0]: None for name in model.source.tensors}
    every = dict.fromkeys(_module_spellings(_with_parents(own)))
    listed = [*unquantized_list(section)[1], *_extra_listed_modules(section)]
    return [
        (name, next(iter(close_names(name, own, 1)), ""))
        for name in listed
        if _is_full_name(name) and name not in every and not may_list_any(section, name, every)
    ]


def _is_full_name(name: str) -> bool:
    """Return whether a listed name is a full module path, not a pattern or a single word."""
    return name.count(".") > 1 and not any(mark in name for mark in "*^$\\[](){}|+?:")


def _extra_listed_modules(section: Section) -> list[str]:
    """Return the module names in the section's second list, the one under the key MORE; else []."""
    more = section.get(MORE)
    return [name for name in more if isinstance(name, str)] if isinstance(more, list) else []


def _with_parents(modules: Iterable[str]) -> list[str]:
    """Return module names together with those of all modules around them, each once."""
    found: dict[str, None] = {}
    for module in modules:
        while module and module not in found:
            found[module] = None
            module = module.rpartition(".")[0]
    return list(found)


def _module_spellings(modules: Iterable[str]) -> list[str]:
    """Return the modules' names under each prefix that Hugging Face's layouts may give them."""
    found: dict[str, None] = {}
    for module in modules:
        own = strip_prefix(module, "hf")
        found.update(dict.fromkeys((module, *(f"{prefix}{own}" for prefix in PREFIXES["hf"]))))
    return list(found)


def _plain_and_packed(model: "Model") -> tuple[dict[str, None], dict[str, None]]:
    """Return (modules with plain projection weights, modules with packed weights).

    The keys of the dicts are module names in file order, the values None.
    """
    plain: dict[str, None] = {}
    packed: dict[str, None] = {}
    for name, view in model.items():
        if view.parts and name.endswith(_WEIGHT):
            packed[name.removesuffix(_WEIGHT)] = None
    for key, view in model.roles.items():
        role = split_key(key)[1].removesuffix(_WEIGHT)
        base = next((role.removesuffix(end) for end in _EXPERTS if role.endswith(end)), role)
        if base not in _PROJECTIONS or not key.endswith(_WEIGHT):
            continue
        for stored in view.stored:
            single = len(stored.info.shape) == 2 and not stored.parts
            if single and stored.info.encoding in _FLOATS and stored.info.name.endswith(_WEIGHT):
                plain[stored.info.name.removesuffix(_WEIGHT)] = None
    return plain, packed


def _misclaimed_modules(
    section: Section, plain: Iterable[str], packed: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return (plain modules declared as packed, packed modules declared as plain).

    `plain` and `packed` are the modules as the file has them.
    """
    claimed = [name for name in plain if claims_packed(section, name, _module_spellings([name]))]
    claimed += [
        name for name in plain if name in _extra_listed_modules(section) and name not in claimed
    ]
    left = [name for name in packed if is_listed(section, name)]
    if not left and group_without_modules(section, _module_spellings(packed)):
        left = list(packed)
    return claimed, left


def _claim_relation(
    model: "Model", section: Section, plain: Collection[str], packed: Collection[str]
) -> Relation | None:
    """Return the Relation of wrongly claimed modules, with the repair command; None if none."""
    claimed, left = _misclaimed_modules(section, plain, packed)
    if not claimed and not left:
        return None
    key = unquantized_list(section)[0]
    stale = stale_names(model)
    parts = []
    if claimed:
        parts.append(
            f"{len(claimed)} weights are plain, and config.json claims them as packed "
            f"({join_first(claimed, _SHOWN)}): loaders look for their codes and drop the weights"
        )
    if left:
        group = group_without_modules(section, _module_spellings(packed))
        why = f"the targets of {group} fit none" if group else f"{key} leaves them as they are"
        parts.append(
            f"{len(left)} weights are packed, and by config.json they are plain "
            f"({join_first(left, _SHOWN)}): "
            f"{why}, so that loaders drop their codes"
        )
    if stale:
        name, nearest = stale[0]
        near = f", the nearest is {nearest}" if nearest else ""
        parts.append(f"{len(stale)} names of {key} are no module here ({name}{near})")
    remedy = _remedy_command(model, section, plain, packed, [name for name, _ in stale])
    where = tuple(f"{name}{_WEIGHT}" for name in (*claimed, *left))
    return Relation("claims", "; ".join(parts), where, (), remedy)


def _remedy_command(
    model: "Model",
    section: Section,
    plain: Collection[str],
    packed: Collection[str],
    stale: Collection[str],
) -> str:
    """Return the `aprfmt set` command that corrects the lists and targets; "" if none does.

    `stale` are listed names without a module. The result is checked: a command is returned only if
    no module contradicts the changed section.
    """
    if model.folder is None:
        return ""
    # The list that can be edited, and the method's way of matching it.
    config = packing_config(model) or {}
    place = key_of_section(config)
    key, entries = unquantized_list(section)
    method = method_of(section)
    if not place or not key or method is None:
        return ""
    kept = [
        name
        for name in entries
        if name not in stale and not any(method.fits(name, module) for module in packed)
    ]
    made: dict[str, Value] = {**section, key: kept}
    edits: dict[str, Value] = {}
    # A group whose targets match nothing gets all linear layers.
    group = group_without_modules(section, _module_spellings(packed))
    if group:
        groups = section["config_groups"]
        made["config_groups"] = {group: {**groups[group], "targets": ["Linear"]}}
        edits[f"{place}.config_groups.{group}.targets"] = ["Linear"]
    # Add an entry for each plain module that is still declared packed.
    for name in _misclaimed_modules(made, plain, packed)[0]:
        if claims_packed(made, name, _module_spellings([name])):
            kept = [*kept, _covering_name(name, packed, method.form)]
            made[key] = kept
    edits[f"{place}.{key}"] = kept
    # Only a command that leaves no contradiction is returned.
    if _misclaimed_modules(made, plain, packed) != ([], []):
        return ""
    pairs = [f"config.json:{where}={json.dumps(value)}" for where, value in edits.items()]
    return command_line("set", opening_path(model.path), *pairs, "--in-place")


def _covering_name(module: str, packed: Iterable[str], form: str) -> str:
    """Return a list entry that fits a plain module and no packed one.

    It is the pattern of the module's last two names where no packed module ends so, else the module
    itself, spelled as the method's `form` says.
    """
    end = ".".join(module.split(".")[-2:])
    alone = any(name.endswith(f".{end}") for name in packed)
    return module if alone else form.replace("NAME", end)
