"""Of which weights a quantization section speaks, and what it says of each of them.

A model's section may hold several groups, exceptions and lists of what is left as it is. A *scope*
reads those of one method: it gives the section as it holds for one module, in the keys that the
dialects read, so that a dialect never sees more than one kind of weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aprfmt.base.regexes import matches_start
from aprfmt.base.registry import Registry
from aprfmt.codecs.dialect import Config
from aprfmt.errors import CodecError


class Scope(NamedTuple):
    """How a method says what holds where.

    `at(section, module)` gives the section for a module (`model.layers.0.mlp.up_proj`), or None
    where it is left as it is; `every(section)` all sections that `at` can give. Both raise
    CodecError for a section that cannot be read.
    """

    at: Callable[[Config, str], Config | None]
    every: Callable[[Config], Sequence[Config]]


# quant_method of config.json -> its scope; "" is MLX, which names no method
SCOPES: Registry[Scope] = Registry(
    "scopes",
    {
        "": "aprfmt.codecs.scopes:MLX",
        "gptq": "aprfmt.codecs.scopes:GPTQ",
        "compressed-tensors": "aprfmt.codecs.compressed_scope:SCOPE",
        "modelopt": "aprfmt.codecs.modelopt_scope:SCOPE",
        "auto-round": "aprfmt.codecs.auto_round:SCOPE",
    },
    CodecError,
)
_ALSO: Mapping[str, str] = {
    "auto_round": "auto-round", "autoround": "auto-round", "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt",
}  # fmt: skip


def scope_of(section: Config) -> Scope | None:
    """Return the scope of a section's method; None where one statement holds for all weights."""
    method = section.get("quant_method", "")
    if not isinstance(method, str):
        return None
    method = _ALSO.get(method, method)
    return SCOPES[method] if method in SCOPES.own else None


def section_at(section: Config, module: str) -> Config | None:
    """Return what a section says of one module; None where the module is left as it is."""
    scope = scope_of(section)
    return section if scope is None else scope.at(section, module)


def sections(section: Config) -> Sequence[Config]:
    """Return all sections that `section_at` can give for some module."""
    scope = scope_of(section)
    return [section] if scope is None else scope.every(section)


def table(section: Config, key: str) -> Mapping[str, Any]:
    """Return a mapping of the section, empty where it has none; CodecError for anything else."""
    value = section.get(key) or {}
    if not isinstance(value, Mapping):
        raise CodecError(f"config says {key} {value!r}, expected names and what holds for them")
    return value


def names(section: Config, *keys: str) -> list[str]:
    """Return the list of names that the first key present has; CodecError for anything else."""
    value: Any = next((section[key] for key in keys if section.get(key) is not None), [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CodecError(f"config says {keys[0]} {value!r}, expected a list of names")
    return [str(name) for name in value]


def _mlx_at(section: Config, module: str) -> Config | None:
    """Return MLX's settings of a module: its own in place of the model's, or False for none."""
    base = {key: value for key, value in section.items() if not isinstance(value, Mapping | bool)}
    own = section.get(module)
    if own is False:
        return None
    return {**base, **own} if isinstance(own, Mapping) else base


def _mlx_every(section: Config) -> Sequence[Config]:
    own = [_mlx_at(section, key) for key, value in section.items() if isinstance(value, Mapping)]
    return [found for found in (_mlx_at(section, ""), *own) if found is not None]


MLX = Scope(_mlx_at, _mlx_every)


def _gptq_at(section: Config, module: str) -> Config | None:
    """Return GPTQModel's settings of a module: the first rule of `dynamic` that matches it.

    A rule is a pattern, after `-:` one for modules that are left as they are.
    """
    for pattern, own in table(section, "dynamic").items():
        if not matches_start(pattern.removeprefix("-:").removeprefix("+:"), module):
            continue
        if pattern.startswith("-:"):
            return None
        return {**section, **own} if isinstance(own, Mapping) else section
    return section


GPTQ = Scope(
    _gptq_at,
    lambda section: [
        section,
        *({**section, **own} for own in table(section, "dynamic").values()
          if isinstance(own, Mapping)),
    ],
)  # fmt: skip
