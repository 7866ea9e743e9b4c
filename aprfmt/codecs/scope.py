"""The type `Scope`: how the quantization section of one method is read for each module of a model.

A model's section may hold several groups, exceptions and lists of modules that are not quantized. A
scope gives the section as it holds for one module, in the keys that the dialects read, so that a
dialect never sees more than one kind of weight. The table of scopes stands in `scopes.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aprfmt.codecs.dialect import Config
from aprfmt.errors import CodecError


class Scope(NamedTuple):
    """Two functions that read the quantization section of one method.

    `section_of(section, module)` returns the section for a module (`model.layers.0.mlp.up_proj`),
    or None where the module is not quantized. `every(section)` returns all sections that
    `section_of` can return. Both raise CodecError for a section that cannot be read, `every` also
    UnsupportedError where the section says nothing of the weights.
    """

    section_of: Callable[[Config, str], Config | None]
    every: Callable[[Config], Sequence[Config]]


def section_mapping(section: Config, key: str) -> Mapping[str, Any]:
    """Return the mapping under `key` of a section, empty where there is none; else CodecError."""
    value = section.get(key) or {}
    if not isinstance(value, Mapping):
        raise CodecError(f"config says {key} {value!r}, expected names and what holds for them")
    return value


def section_names(section: Config, *keys: str) -> list[str]:
    """Return the list of names under the first of `keys` that the section has; [] without any.

    Raises CodecError for anything but a list of names.
    """
    value: Any = next((section[key] for key in keys if section.get(key) is not None), [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CodecError(f"config says {keys[0]} {value!r}, expected a list of names")
    return [str(name) for name in value]
