"""AutoRound: its sections, which name the packing of another method, read as sections of that one.

packing_format                  weights
auto_round:auto_gptq            GPTQ, zero points stored less one
auto_round, :gptqmodel          GPTQ v2: zero points as they are
auto_round:auto_awq             AWQ, gemm
auto_round:llm_compressor       compressed-tensors, by data_type and bits: MXFP4, MXFP8, NVFP4
auto_round:fp8_static           compressed-tensors, FP8 with a scale for the weight or a row

`extra_config` says otherwise of single modules, by full name, or by a pattern; bits of 16 and more
are those of a module that is left as it is.
Source: auto-round 0.16, export/export_to_autoround/ and inference/convert_model.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.bounded_regex import matches_start
from aprfmt.codecs.dialect import Config
from aprfmt.codecs.scope import Scope, section_mapping
from aprfmt.errors import UnsupportedError

_LEFT = 16  # bits: what is not quantized
_PATTERN = set("*^$\\[](){}|+?")  # characters that a module's name has not
_PACKINGS = ("auto_round", "auto-round", "autoround", "gptq", "awq", "compressor", "fp8")
# data_type up to "_", and bits -> the format of compressed-tensors that is the same
_FLOATS: Mapping[tuple[str, int], str] = {
    ("mx", 4): "mxfp4-pack-quantized", ("mx", 8): "mxfp8-quantized",
    ("nv", 4): "nvfp4-pack-quantized", ("fp8", 8): "float-quantized", ("fp", 8): "float-quantized",
}  # fmt: skip


def _rewrite_section(section: Mapping[str, Any]) -> Config | None:
    """Return an AutoRound section as a section of the method whose packing it names.

    The result is a quantization section of GPTQ, AWQ or compressed-tensors. It is None where the
    weights are left unquantized (16 bits or more). Raises UnsupportedError for a packing or data
    type that is not decoded.
    """
    # Weights of 16 bits and more are not quantized.
    bits = section.get("bits")
    if isinstance(bits, int) and bits >= _LEFT:
        return None
    facts = {"bits": bits, "group_size": section.get("group_size")}
    packing = str(section.get("packing_format", "auto_round:auto_gptq"))
    if not any(word in packing for word in _PACKINGS):
        raise UnsupportedError(f"auto-round: packing {packing!r} is not one we decode")
    # AWQ, then GPTQ, then compressed-tensors.
    if "awq" in packing:
        return {"quant_method": "awq", "version": "gemm", **facts}
    kind = str(section.get("data_type", "int"))
    if kind.startswith("int") and "compressor" not in packing:
        v1 = "gptq" in packing and "gptqmodel" not in packing
        return {"quant_method": "gptq", "checkpoint_format": "gptq" if v1 else "gptq_v2", **facts}
    form = _FLOATS.get((kind.partition("_")[0], bits if isinstance(bits, int) else 0))
    if form is None or "e5m3" in packing or kind == "nvfp4_v2":
        raise UnsupportedError(
            f"auto-round: packing {packing!r} of {kind} in {bits} bits is not one we decode"
        )
    weights = {"num_bits": bits, "type": "float", "group_size": facts["group_size"]}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


def _section_at(section: Config, module: str) -> Config | None:
    """Return one module's section, in terms of the method that packs it; None if not quantized.

    An entry of `extra_config` under the module's name comes before one under a pattern.
    """
    extra = section_mapping(section, "extra_config")
    own = extra.get(module)
    if own is None:
        patterns = (name for name in extra if _PATTERN & set(name))
        found = next((name for name in patterns if matches_start(name, module)), None)
        own = extra[found] if found is not None else None
    return _rewrite_section({**section, **own} if isinstance(own, Mapping) else section)


def _all_sections(section: Config) -> Sequence[Config]:
    """Return the distinct GPTQ, AWQ or compressed-tensors sections that some module may have."""
    rows = section_mapping(section, "extra_config").values()
    own = [_rewrite_section({**section, **row}) for row in rows if isinstance(row, Mapping)]
    found: list[Config] = []
    for one in (_rewrite_section(section), *own):
        if one is not None and one not in found:
            found.append(one)
    return found


SCOPE = Scope(_section_at, _all_sections)
