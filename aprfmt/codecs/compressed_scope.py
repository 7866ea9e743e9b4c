"""Find the group of a compressed-tensors section that a module belongs to.

A *section* is the quantization settings in config.json, a *config group* one entry of its
`config_groups`: a kind of quantization and the modules it is for.

A target or an ignored name is a module's full name, a pattern after `re:` that matches at its
start, or the name of a class. The order is compressed-tensors': a full name before a pattern, a
pattern before a class. Class names are not in the file: `Embedding` is taken to be what is called
so, every other class whatever else is stored packed.

Source: compressed-tensors 0.20, utils/match.py and quantization/lifecycle/apply.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.bounded_regex import matches_start
from aprfmt.codecs.dialect import Config
from aprfmt.codecs.scope import Scope, section_mapping, section_names
from aprfmt.errors import CodecError

MIXED = "mixed-precision"
DENSE = "dense"  # weights that are stored as they are
PATTERN = "re:"
_EMBEDDING = "Embedding"
_CALLED = ("embed", "wte", "wpe")  # last parts of names of modules that are embeddings


def is_named(target: str, module: str) -> bool:
    """Return whether `target` is a module's name, or a pattern ("re:...") that matches it."""
    if target.startswith(PATTERN):
        return matches_start(target.removeprefix(PATTERN), module)
    return target == module


def _is_class(target: str, module: str) -> bool:
    """Return whether `target` is the class of a module, guessed from the module's name.

    Modules with "embed", "wte" or "wpe" in the name are taken for `Embedding`, all others for any
    other class that a target names.
    """
    if not target.isidentifier() or not target[:1].isupper():
        return False
    embeds = any(word in module.rpartition(".")[2] for word in _CALLED)
    return embeds is (target == _EMBEDDING)


def weight_groups(section: Config) -> dict[str, Mapping[str, Any]]:
    """Return {name: group} of the section's groups that quantize weights.

    Raises CodecError for a group that is not a mapping.
    """
    found = {}
    for name, group in section_mapping(section, "config_groups").items():
        if not isinstance(group, Mapping):
            raise CodecError(f"config says config_groups {name!r} {group!r}, expected a group")
        if isinstance(group.get("weights"), Mapping):
            found[name] = group
    return found


def _group_at(groups: Mapping[str, Mapping[str, Any]], module: str) -> str | None:
    """Return the name of the group whose target fits a module best; None if none fits.

    A full name comes before a pattern, a pattern before a class.
    """
    wanted = {
        target: name for name, group in groups.items() for target in section_names(group, "targets")
    }
    ordered = sorted(wanted, key=lambda target: (PATTERN in target, target))
    for fits in (is_named, _is_class):
        found = next((target for target in ordered if fits(target, module)), None)
        if found is not None:
            return wanted[found]
    return None


def _section_of_group(section: Config, name: str, group: Mapping[str, Any]) -> Config:
    """Return the section with only this group in it, and the group's `format` if it has one."""
    own = group.get("format")
    form = own if isinstance(own, str) and own else section.get("format")
    return {**section, "format": form, "config_groups": {name: group}}


def _section_at(section: Config, module: str) -> Config | None:
    """Return the section that applies to one module; None where the module is not quantized.

    With a single group the whole section is returned, even if the group does not match the module.
    """
    if any(
        is_named(name, module) or (name == _EMBEDDING and _is_class(name, module))
        for name in section_names(section, "ignore")
    ):
        return None
    groups = weight_groups(section)
    if len(groups) < 2 and section.get("format") != MIXED:
        return section  # there is but one statement, be it for whatever is packed
    name = _group_at(groups, module)
    found = None if name is None else _section_of_group(section, name, groups[name])
    return None if found is None or found["format"] == DENSE else found


def _all_sections(section: Config) -> Sequence[Config]:
    """Return every section that some module may have: one for each group where groups differ."""
    groups = weight_groups(section)
    if len(groups) < 2 and section.get("format") != MIXED:
        return [section]
    return [_section_of_group(section, name, group) for name, group in groups.items()]


SCOPE = Scope(_section_at, _all_sections)
