"""Find the settings of each module in a quantization section, by the section's method.

The table of scopes; what a scope is stands in `scope.py`.
"""

from collections.abc import Mapping, Sequence

from aprfmt.base.registry import Registry
from aprfmt.codecs.dialect import Config
from aprfmt.codecs.scope import Scope
from aprfmt.errors import CodecError

# quant_method of config.json -> its scope; "" is MLX, which names no method
SCOPES: Registry[Scope] = Registry(
    "scopes",
    {
        "": "aprfmt.codecs.mlx:SCOPE",
        "gptq": "aprfmt.codecs.gptq:SCOPE",
        "compressed-tensors": "aprfmt.codecs.compressed_scope:SCOPE",
        "modelopt": "aprfmt.codecs.modelopt_scope:SCOPE",
        "auto-round": "aprfmt.codecs.auto_round:SCOPE",
        "torchao": "aprfmt.codecs.torchao:SCOPE",
    },
    CodecError,
)
_ALSO: Mapping[str, str] = {
    "auto_round": "auto-round", "autoround": "auto-round", "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt", "modelopt_mxfp8": "modelopt",
}  # fmt: skip


def scope_of(section: Config) -> Scope | None:
    """Return how a section's method states settings by module; None if all have the same."""
    method = section.get("quant_method", "")
    if not isinstance(method, str):
        return None
    method = _ALSO.get(method, method)
    return SCOPES[method] if method in SCOPES.own else None


def section_at(section: Config, module: str) -> Config | None:
    """Return the section that applies to one module; None where the module is not quantized."""
    scope = scope_of(section)
    return section if scope is None else scope.section_of(section, module)


def all_sections(section: Config) -> Sequence[Config]:
    """Return all sections that `section_at` can give for some module."""
    scope = scope_of(section)
    return [section] if scope is None else scope.every(section)
