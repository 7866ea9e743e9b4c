"""Packed weights that no codec decodes: their method, and the tensors they are stored in."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.base.encodings import BY_CLAIM
from aprfmt.base.protocols import LazyTensor, Note, TensorInfo, Value
from aprfmt.base.sequences import join_first
from aprfmt.errors import ArchError, CodecError, UnsupportedError
from aprfmt.tensors.companions import holds_codes, is_coded, quantization_section

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec, HyperParams

# What stands below a packed module, next to names like `_data`: the weight whose parts quanto
# stores under its name, and the codebooks of VPTQ.
_BELOW = ("weight", "centroids", "res_centroids", "outlier_centroids")
_SCALE = re.compile(r"scal|amax", re.IGNORECASE)
# FP8 by the byte: a cast of values, or codes whose scale is another tensor.
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_INT8_SCALE = "SCB"  # next to a weight in LLM.int8(): the largest magnitude of each row
# Last parts of names that one tool alone gives a packed weight's tensors -> that tool.
_TOOLS: Mapping[str, str] = {
    _INT8_SCALE: "bitsandbytes (LLM.int8())",
    "W_q": "HQQ",
    "_data": "quanto",
    "codebooks": "AQLM",
    "q_weight": "EXL2",
    "trellis": "EXL3",
}
_SHOWN = 3


@dataclass(frozen=True)
class UndecodedPacking:
    """Weights that are packed and that no codec here decodes.

    `method` is the quantization method in config.json, "" if it declares none. `weights` are the
    names that the weights would have, `tensors` what they are stored in. `why` says why they are
    not decoded, where the method alone does not say it. `lacks` are the suffixes of tensors that
    stand next to such codes and are not in the file: without them no program reads the weights.
    `tool` is the one that gives tensors such names where config.json declares no method, "" where
    the names do not show it.
    """

    method: str
    weights: frozenset[str]
    tensors: tuple[TensorInfo, ...]
    why: str
    lacks: tuple[str, ...] = ()
    tool: str = ""

    @property
    def claim(self) -> str:
        """What config.json declares, and why it is not decoded here, as a clause."""
        if self.lacks:
            return (
                f"weights of {self.method} are codes alone, without {', '.join(self.lacks)}: what "
                "the codes count for is lost"
            )
        why = f" ({self.why})" if self.why else ""
        return (
            f"quantization {self.method!r} of config.json is not decoded here{why}"
            if self.method
            else f"config.json says nothing of quantization, but weights are packed{why}"
        )

    @property
    def text(self) -> str:
        """The `claim`, with the number of weights and the first tensors, as a clause."""
        measures = [f"{t.name} {t.encoding} {list(t.shape)}" for t in self.tensors]
        return f"{self._claim_with_counts} ({join_first(measures, _SHOWN)})"

    @property
    def _claim_with_counts(self) -> str:
        """The `claim` and how many weights and tensors it speaks of, as a clause."""
        return f"{self.claim}: {len(self.weights)} weights in {len(self.tensors)} tensors"

    @property
    def refusal(self) -> str:
        """The error message of commands that need the values of these weights."""
        return (
            f"{self.text}; expected weights that can be read; copy them as they are (to "
            f"safetensors or APR), or {self.todo}"
        )

    @property
    def why_not_compared(self) -> str:
        """Why nothing is said of the values of these weights, as a clause."""
        return f"{self._claim_with_counts}; {self.todo}"

    @property
    def todo(self) -> str:
        """What makes these weights readable, as an imperative clause."""
        if self.lacks:
            return "save the model again with all its tensors"
        if self.tool:
            return f"decode them with {self.tool}"
        if self.method:
            return "decode them with the tool that made them"
        return "get the config.json that belongs to them"

    def as_note(self, where: str) -> Note:
        """Return the warning Note for a listing of the model at `where`."""
        return Note(
            "warning", where, f"{self.text}; they are copied as they are stored", "unread_weights"
        )

    def roles_among(
        self, spec: "ArchSpec", style: str, hyper: "HyperParams", missing: Iterable[str]
    ) -> frozenset[str]:
        """Return those of the `missing` roles whose weights are among these undecoded ones.

        `style` is the naming of the file, `hyper` the model's hyperparameters. A key in `missing`
        may be no role, but a tensor's stored name; it is not returned.
        """
        from aprfmt.arch.binding import groups_for

        def holds(key: str) -> bool:
            """Return whether a role's weight is among these undecoded ones; False for no role."""
            try:
                groups = groups_for(spec, style, [key], hyper)
            except ArchError:
                return False
            return any(self.weights & {*group.stored} for group in groups)

        return frozenset(filter(holds, missing))


def undecoded_packing(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Value] | None,
    why: str,
    lacking: Iterable[str] = (),
) -> UndecodedPacking | None:
    """Return the packed weights that no codec decodes; None if there are none.

    `tensors` are the stored ones after codes and scales were joined, `config` has the quantization
    section. `why` is the error of an earlier attempt to join them, "" without one. `lacking` are
    weights that lack a part of the packing that is stated for them: a codec decodes that packing.
    """
    # Without a section, only tensors that hold codes suggest packed weights.
    section, reason = quantization_section(config or {}), why
    joined: dict[str, set[str]] = {}
    if section is None and not holds_codes(tensors):
        return None
    # Tensors by module, and what the section says about its method.
    modules: dict[str, list[TensorInfo]] = defaultdict(list)
    for name, tensor in tensors.items():
        if not tensor.parts:
            modules[_module_of(name)].append(tensor.info)
    method = ""
    if section is not None:
        method = str(section.get("quant_method", section.get("format", "unnamed")))
        why = why or _undescribed_reason(section)
    # The modules with codes: all under an unknown method, else the unexplained ones.
    if section is not None and (why or not _has_known_convention(section)):
        coded = {module for module, infos in modules.items() if any(map(is_coded, infos))}
        sparse = sparsity_format(section)
        if not why and (sparse or "format" in section):
            why = f"sparsity {sparse!r}" if sparse else f"format {section['format']!r}"
    else:
        coded = {
            module
            for module, infos in modules.items()
            if _is_undeclared_packed(module, infos, section)
        }
        why = f"none of them is a tensor of {method} as it is read here"
    coded -= {weight.rpartition(".")[0] for weight in lacking}
    tool = ""
    if section is None:
        joined = _joined_scales(tensors, modules)
        coded |= _modules_without_scale(tensors, modules) | joined.keys()
        odd = ((module, _misnamed_scale(module, modules[module])) for module in sorted(coded))
        why = reason or next((f"{one} has a scale of another name, {n}" for one, n in odd if n), "")
        tool = next(filter(None, (_tool_of(modules[one]) for one in sorted(coded))), "")
        why = f"their tensors have the names of {tool}" if tool and not reason else why
    if not coded:
        return None
    # The weights that these would be, and the tensors that hold them.
    weights = frozenset(f"{module}.weight" for module in coded)
    held = coded.union(*joined.values())
    stored = (
        info
        for module, infos in modules.items()
        if module in held
        for info in infos
        if info.name != f"{module}.bias"
    )
    lacks = _lost_companions(section or {}, coded, tensors)
    return UndecodedPacking(method, weights, tuple(stored), why, lacks, tool)


def _lost_companions(
    section: Mapping[str, Value], modules: Iterable[str], tensors: Mapping[str, LazyTensor]
) -> tuple[str, ...]:
    """Return the suffixes of tensors that bitsandbytes stores next to codes and that are missing.

    `modules` are those with codes. () unless every one of them lacks the tensor, and for other
    methods.
    """
    if section.get("quant_method") != "bitsandbytes":
        return ()
    from aprfmt.codecs import CODECS

    kind = str(section.get("bnb_4bit_quant_type", "fp4")).upper()  # bitsandbytes' default
    four = any(section.get(key) for key in ("load_in_4bit", "_load_in_4bit"))
    claim = next((claim for claim, row in BY_CLAIM.items() if row.name == kind), "")
    if four and claim:
        codec = CODECS[kind]
        wanted = [*(part for part in codec.parts[1:] if part != claim), claim]
    else:
        wanted = [] if four else [_INT8_SCALE]
    stored_parts = {
        suffix
        for module in modules
        for suffix in wanted
        if not {f"{module}.{suffix}", f"{module}.weight.{suffix}"}.isdisjoint(tensors)
    }
    return tuple(f".{suffix}" for suffix in wanted if suffix not in stored_parts)


def _module_of(name: str) -> str:
    """Return the name of the module that a stored tensor belongs to.

    Components that a quantizer adds below a module are removed.
    """
    module, _, last = name.rpartition(".")
    while module:
        above, _, last = module.rpartition(".")
        if last not in _BELOW and not last.startswith("_"):
            break
        module = above
    return module


def _is_undeclared_packed(
    module: str, infos: Sequence[TensorInfo], section: Mapping[str, Value] | None
) -> bool:
    """Return whether a module holds a packed weight that the section does not declare.

    True where codes and scales of a known kind of packing occur together, where codes stand with a
    name that one tool alone gives, and where a section declares the module packed but none of its
    tensors belongs to a decoded weight.
    """
    if not any(map(is_coded, infos)):
        return False
    from aprfmt.codecs.dialects import dialects_at, dialects_of_codes, is_packed_part

    if section is None and (_tool_of(infos) or _misnamed_scale(module, infos)):
        return True
    plain = next((info for info in infos if info.name == f"{module}.weight"), None)
    names = {info.name for info in infos}
    if plain is None and section is None:
        return any(dialects_of_codes(info.name, info.encoding, names) for info in infos)
    if plain is None:
        return not any(map(is_packed_part, names))
    rows = dialects_of_codes(plain.name, plain.encoding, names)
    if section is None or not rows:
        return bool(rows)
    try:
        found = dialects_at(section, module)
    except CodecError:
        return False  # reported where the section is read
    return found is not None and not any(row in found[0] for row in rows)


def _tool_of(infos: Iterable[TensorInfo]) -> str:
    """Return the tool whose names a packed module's tensors have; "" where they do not show it."""
    lasts = (info.name.rpartition(".")[2] for info in infos)
    return next((_TOOLS[last] for last in lasts if last in _TOOLS), "")


def _misnamed_scale(module: str, infos: Sequence[TensorInfo]) -> str:
    """Return the name of the tensor that must be the scale of a module's FP8 codes; "" if none.

    Its name contains "scal" or "amax", and it is not a scale of the layer's inputs.
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
    """Return the modules with FP8 codes without a scale, if other modules have scales."""
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


def _joined_scales(
    tensors: Mapping[str, LazyTensor], modules: Mapping[str, Sequence[TensorInfo]]
) -> dict[str, set[str]]:
    """Return {module: joined modules with its scale} of FP8 codes that are part of a joined tensor.

    An engine's state has `qkv_proj.weight` and `qkv_proj.weight_scale`, and q, k and v are cut out
    of the first: the scale is the codes' own, under the name of the joined module.
    """
    found: dict[str, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.info.encoding not in _FP8 or len(tensor.info.shape) < 2:
            continue
        for whole in dict.fromkeys(_module_of(one.info.name) for one in tensor.made_of):
            if _misnamed_scale(whole, [*modules.get(whole, ()), tensor.info]):
                found.setdefault(_module_of(name), set()).add(whole)
    return found


def sparsity_format(section: Mapping[str, Value]) -> str:
    """Return the sparse format that compressed-tensors declares; "" if weights are dense."""
    stated = section.get("sparsity_config")
    form = stated.get("format") if isinstance(stated, Mapping) else None
    return form if isinstance(form, str) and form != "dense" else ""


def _undescribed_reason(section: Mapping[str, Value]) -> str:
    """Return why a known method's section is too incomplete to decode weights, or ""."""
    from aprfmt.codecs.scopes import all_sections

    try:
        all_sections(section)
    except UnsupportedError as error:
        return str(error)
    except CodecError:
        pass  # reported where the section is read
    return ""


def _has_known_convention(section: Mapping[str, Value]) -> bool:
    """Return whether a section declares a kind of packing that is decoded here.

    True too for a damaged section, which is reported where it is read.
    """
    from aprfmt.codecs.dialects import dialects_of

    try:
        return bool(dialects_of(section))
    except UnsupportedError:
        return False
    except CodecError:
        return True
