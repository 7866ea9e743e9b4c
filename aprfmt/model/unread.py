"""Packed weights that are not decoded: named by their method, with what they are stored in.

Such tensors are copied as they are; nothing reads numbers out of them by guess.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING

from aprfmt.base.protocols import LazyTensor, Note, TensorInfo, Value
from aprfmt.errors import CodecError, UnsupportedError
from aprfmt.tensors.companions import quantization_section

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec, HyperParams

# Encodings in which a module of a quantized model holds codes; I64 is for positions and counts.
CODED = frozenset({
    "I8", "U8", "I16", "U16", "I32", "U32", "F4",
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
})  # fmt: skip
# Last parts of names that are codes whatever their encoding and axes: HQQ's, which may view them as
# floats, and SpQR's.
_CODES = ("W_q", "dense_weights")
# What stands below a packed module, beside names like `_data`: the weight whose parts quanto stores
# under its name, and the codebooks of VPTQ.
_BELOW = ("weight", "centroids", "res_centroids", "outlier_centroids")
_SCALE = re.compile(r"scal|amax", re.IGNORECASE)
# FP8 by the byte: a cast of values, or codes whose scale stands in another tensor.
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SHOWN = 3


@dataclass(frozen=True)
class UndecodedPacking:
    """What config.json says is packed, and cannot be decoded here.

    `method` is "" where it says nothing of weights that are packed all the same. `weights` are the
    names that the weights would have, `tensors` what they are stored in; `why` is what stands
    against decoding them, where more than the method does.
    """

    method: str
    weights: frozenset[str]
    tensors: tuple[TensorInfo, ...]
    why: str

    @property
    def claim(self) -> str:
        """What config.json says, and why that does not serve."""
        why = f" ({self.why})" if self.why else ""
        return (
            f"quantization {self.method!r} of config.json is not decoded here{why}"
            if self.method
            else f"config.json says nothing of quantization, but weights are packed{why}"
        )

    @property
    def says(self) -> str:
        """The sentence about it."""
        measures = [f"{t.name} {t.encoding} {list(t.shape)}" for t in self.tensors[:_SHOWN]]
        more = ", ..." if len(self.tensors) > _SHOWN else ""
        return (
            f"{self.claim}: {len(self.weights)} weights in {len(self.tensors)} tensors "
            f"({', '.join(measures)}{more})"
        )

    @property
    def refusal(self) -> str:
        """What an error says of work that would need their numbers."""
        todo = "get the config.json that belongs to them"
        if self.method:
            todo = "decode them with the tool that made them"
        return (
            f"{self.says}; expected weights that can be read; copy them as they are (to "
            f"safetensors or APR), or {todo}"
        )

    def note(self, where: str) -> Note:
        """Return the remark for a listing."""
        return Note(
            "warning", where, f"{self.says}; they are copied as they are stored", "unread_weights"
        )

    def roles(
        self, spec: "ArchSpec", style: str, hyper: "HyperParams", missing: Iterable[str]
    ) -> frozenset[str]:
        """Return those of the missing roles whose weights these are."""
        from aprfmt.arch.binding import groups_for

        return frozenset(
            key
            for key in missing
            if any(
                self.weights & {*group.stored} for group in groups_for(spec, style, [key], hyper)
            )
        )


def undecoded_packing(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Value] | None, why: str
) -> UndecodedPacking | None:
    """Return what is packed and was not joined; None where there is nothing of the kind."""
    section, given = quantization_section(config or {}), why
    if section is None and not _any_coded(tensors):
        return None
    modules: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not tensor.parts:
            modules[_module_of(name)].append(tensor.info)
    method = ""
    if section is not None:
        method = str(section.get("quant_method", section.get("format", "unnamed")))
        why = why or _undescribed_reason(section)
    if section is not None and (why or not _is_read(section)):
        coded = {module for module, infos in modules.items() if any(map(_is_coded, infos))}
        sparse = sparsity_format(section)
        if not why and (sparse or "format" in section):
            why = f"sparsity {sparse!r}" if sparse else f"format {section['format']!r}"
    else:
        coded = {module for module, infos in modules.items() if _is_foreign(module, infos, section)}
        why = f"none of them is a tensor of {method} as it is read here"
    if section is None:
        coded |= _modules_without_scale(tensors, modules)
        odd = ((module, _misnamed_scale(module, modules[module])) for module in sorted(coded))
        why = given or next((f"{one} has a scale of another name, {n}" for one, n in odd if n), "")
    if not coded:
        return None
    weights = frozenset(f"{module}.weight" for module in coded)
    stored = (
        info
        for module, infos in modules.items()
        if module in coded
        for info in infos
        if info.name != f"{module}.bias"
    )
    return UndecodedPacking(method, weights, tuple(stored), why)


def _module_of(name: str) -> str:
    """Return the module that a stored tensor belongs to."""
    module, _, last = name.rpartition(".")
    while module:
        above, _, last = module.rpartition(".")
        if last not in _BELOW and not last.startswith("_"):
            break
        module = above
    return module


def _any_coded(tensors: Mapping[str, LazyTensor]) -> bool:
    """Say whether `_is_coded` is true of any, taking no name apart: a file may hold a million."""
    if any(map(methodcaller("endswith", _CODES), tensors)):
        return any(_is_coded(tensor.info) for tensor in tensors.values())
    kinds = set(map(attrgetter("info.encoding"), tensors.values())) & CODED
    return bool(kinds) and any(_is_coded(tensor.info) for tensor in tensors.values())


def _is_coded(info: TensorInfo) -> bool:
    """Say whether a tensor holds the codes of a weight, as far as name, encoding and axes tell."""
    named = info.name.rpartition(".")[2] in _CODES
    return named or (info.encoding in CODED and len(info.shape) > 1)


def _is_foreign(
    module: str, infos: Sequence[TensorInfo], section: Mapping[str, Value] | None
) -> bool:
    """Say whether a module holds a packed weight of which a section does not speak.

    It does where codes and scales of a dialect stand together, and where a section says that it is
    packed but none of its tensors is a part of anything that is decoded.
    """
    if not any(map(_is_coded, infos)):
        return False
    from aprfmt.codecs.dialects import beside_codes, dialects_at, packed_in

    if section is None and _misnamed_scale(module, infos):
        return True
    plain = next((info for info in infos if info.name == f"{module}.weight"), None)
    names = {info.name for info in infos}
    if plain is None and section is None:
        return any(packed_in(info.name, info.encoding, names) for info in infos)
    if plain is None:
        return not any(map(beside_codes, names))
    rows = packed_in(plain.name, plain.encoding, names)
    if section is None or not rows:
        return bool(rows)
    try:
        found = dialects_at(section, module)
    except CodecError:
        return False  # told where the section is read
    return found is not None and not any(row in found[0] for row in rows)


def _misnamed_scale(module: str, infos: Sequence[TensorInfo]) -> str:
    """Return the name of what must be the scale of a module's FP8 codes; "" without one.

    Its own name has the word, and it is no scale of what goes into the layer.
    """
    if not any(info.encoding in _FP8 and len(info.shape) > 1 for info in infos):
        return ""
    from aprfmt.codecs.dialect import OF_INPUTS

    for info in infos:
        odd = _SCALE.search(info.name.removeprefix(module)) and not OF_INPUTS.search(info.name)
        if odd and info.encoding not in _FP8 and not info.name.endswith("scale_input"):
            return info.name
    return ""


def _modules_without_scale(
    tensors: Mapping[str, LazyTensor], modules: Mapping[str, Sequence[TensorInfo]]
) -> set[str]:
    """Return the modules with FP8 codes without a scale, in a file where others have theirs."""
    scaled = {
        name
        for name, tensor in tensors.items()
        if tensor.parts and tensor.parts[""].info.encoding in _FP8
    }
    if not scaled:
        return set()
    return {
        module
        for module, infos in modules.items()
        if any(info.encoding in _FP8 and len(info.shape) > 1 for info in infos)
    }


def sparsity_format(section: Mapping[str, Value]) -> str:
    """Return how compressed-tensors leaves the zeros of weights out; "" where it does not."""
    said = section.get("sparsity_config")
    form = said.get("format") if isinstance(said, Mapping) else None
    return form if isinstance(form, str) and form != "dense" else ""


def _undescribed_reason(section: Mapping[str, Value]) -> str:
    """Return why nothing is known of the weights of a method that is read; "" for others."""
    from aprfmt.codecs.scopes import all_sections

    try:
        all_sections(section)
    except UnsupportedError as error:
        return str(error)
    except CodecError:
        pass  # told where the section is read
    return ""


def _is_read(section: Mapping[str, Value]) -> bool:
    """Say whether a section names weights that are decoded, be they damaged or not."""
    from aprfmt.codecs.dialects import dialects_of

    try:
        return bool(dialects_of(section))
    except UnsupportedError:
        return False
    except CodecError:
        return True
