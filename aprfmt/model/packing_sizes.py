"""Bits, group sizes and modes that a quantization section may state of the weights in the files.

A packed weight whose section states others than it was made with decodes to another shape, or
not at all. The shape that the rest of config.json asks for says which ones are right.
"""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError
from aprfmt.model.config_paths import Changes, Key, read_with_changes, value_at_path
from aprfmt.tensors.companions import SECTIONS, quantization_section

if TYPE_CHECKING:
    from aprfmt.model import Model

GROUPS = (16, 32, 64, 128, 256)
BITS = (2, 3, 4, 5, 6, 8)
_BITS, _GROUP = ("bits", "num_bits"), ("group_size",)  # the keys that state them


def size_changes(section: Mapping[str, Value], weights: Collection[str]) -> Iterator[Changes]:
    """Yield changes of a quantization section's sizes and mode to try, as {path of key: value}.

    Group sizes alone come first, then bits alone, then MLX's modes, then both sizes. If modules of
    `weights` (stored names) have their own settings, these are changed before those of all modules.
    """
    modules = {name.rpartition(".")[0] for name in weights}
    paths = [
        [path for word in words for path in _paths(section, word)] for words in (_BITS, _GROUP)
    ]
    own = [[path for path in found if not modules.isdisjoint(path)] for found in paths]
    for bits, groups in (own, paths) if any(own) else (paths,):
        single = [dict.fromkeys(bits, one) for one in BITS] if bits else []
        sized = [dict.fromkeys(groups, one) for one in GROUPS] if groups else []
        yield from sized
        yield from single
        yield from mode_changes(section, bits)
        yield from ({**one, **other} for one in single for other in sized)


def mode_changes(section: Mapping[str, Value], bits: Collection[Key]) -> Iterator[Changes]:
    """Yield changes {path of key: value} that state each of MLX's modes next to the keys `bits`.

    A mode comes with its bits and its group size. Nothing is yielded if the section is not MLX's.
    """
    from aprfmt.codecs.mlx import DIALECT, MODES

    for name, mode in MODES.items() if DIALECT.recognises(section) else ():
        keys: dict[str, Value] = {"mode": name}
        if mode.codes is not None:
            keys |= {"bits": mode.codes.kind.bits, "group_size": mode.group}
        yield {
            (*path[:-1], key): value
            for path in bits
            for key, value in keys.items()
            if key == "mode" or value_at_path(section, (*path[:-1], key)) != value
        }


def _paths(section: Mapping[str, Value], name: str, above: Key = ()) -> Iterator[Key]:
    """Yield the paths of a key of this name in a section, nested ones too."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _paths(value, name, (*above, key))
        elif key == name and value is not None:
            yield (*above, key)


def in_every_section(config: Mapping[str, Value], changes: Changes) -> Changes:
    """Return changes of a section as changes of config.json, in each of its equal sections.

    mlx-lm reads one key and transformers another. {} where config.json has no section at the top.
    """
    section = quantization_section(config)
    places = [key for key in SECTIONS if section is not None and config.get(key) == section]
    return {(place, *key): value for place in places for key, value in changes.items()}


def changes_text(changes: Changes) -> list[str]:
    """Return changes of config.json as arguments of `aprfmt set`, quoted for a shell."""
    return [
        shlex.quote(f"config.json:{'.'.join(key)}={json.dumps(value)}")
        for key, value in changes.items()
    ]


def fitting_sizes(model: "Model") -> list[str]:
    """Return KEY=VALUE arguments by which all packed weights decode to the shapes they should have.

    [] where they do already, or by no sizes.
    """
    return changes_text(fitting_changes(model))


def lost_settings_text(changes: Changes) -> str:
    """Return in words which settings of single modules a config.json lacks; "" for none.

    `changes` are those of `fitting_changes`, such as "8 bits in groups of 64 fit 12 modules".
    """
    modules = {key[1]: value for key, value in changes.items() if isinstance(value, Mapping)}
    sizes = Counter(
        f"{one['bits']} bits in groups of {one['group_size']}" for one in modules.values()
    )
    parts = [f"{text} fit {count} module{'s' * (count > 1)}" for text, count in sizes.items()]
    return ", ".join(parts) + ", of which the section has no settings" if parts else ""


def fitting_changes(model: "Model") -> Changes:
    """Return changes of config.json by which all packed weights have the shapes they should have.

    {} where they have them already, or by no sizes.
    """
    config = None if model.folder is None else model.folder.config
    section = quantization_section(config or {})
    if config is None or section is None:
        return {}
    try:
        wrong = _wrong_weights(model)
    except AprfmtError:
        return {}  # the checks of the architecture say it
    unjoined = len(model.damage) > len(model.source.damage)  # parts that are no weight as stated
    for changes in size_changes(section, wrong) if wrong or unjoined else ():
        inside = in_every_section(config, changes)
        if inside and _all_fit(model, inside):
            return inside
    own = in_every_section(config, _sizes_by_module(model, section, wrong))
    return own if own and _all_fit(model, own) else {}


def _all_fit(model: "Model", changes: Changes) -> bool:
    """Return whether a changed config.json gives all packed weights the shapes they should have."""
    try:
        made = read_with_changes(model, changes)
        return not made.resolution.coverage.missing and not _wrong_weights(made)
    except AprfmtError:
        return False


def _sizes_by_module(
    model: "Model", section: Mapping[str, Value], wrong: Collection[str]
) -> Changes:
    """Return changes of an MLX section that give each module of `wrong` weights its own sizes.

    `wrong` are stored names. They are the first bits and group size by which the module's weight
    has its shape, as settings of single modules state that were lost. {} where a module has none,
    and for other methods, whose sections name no single modules.
    """
    from aprfmt.codecs.mlx import DIALECT

    config = None if model.folder is None else model.folder.config
    if config is None or not DIALECT.recognises(section):
        return {}
    left = {name.rpartition(".")[0] for name in wrong}
    found: dict[str, dict[str, Value]] = {}
    for bits, group in product(BITS, GROUPS):
        sizes: dict[str, Value] = {"group_size": group, "bits": bits}
        tried: Changes = {(module,): sizes for module in sorted(left)}
        try:
            still = _wrong_weights(read_with_changes(model, in_every_section(config, tried)))
        except AprfmtError:
            continue
        fits = left - {name.rpartition(".")[0] for name in still}
        found |= {module: sizes for module in sorted(fits)}
        left -= fits
        if not left:
            break
    return {} if left else {(module,): found[module] for module in sorted(found)}


def _wrong_weights(model: "Model") -> list[str]:
    """Return the stored names of packed weights with a wrong shape, or scales that do not fit."""
    misshapen = {key for key, _, _ in model.resolution.coverage.misshapen}
    found: list[str] = []
    for key, view in model.roles.items():
        packed = [one.packed for one in view.stored if one.packed is not None]
        try:
            fits = all(make().laid_out() is not None for make in packed)
        except AprfmtError:
            fits = False
        if packed and (key in misshapen or not fits):
            found += view.names
    return found
