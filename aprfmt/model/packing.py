"""Finds what a model's files declare about the quantization of its weights.

config.json declares it, ModelOpt's own file where that does not; what torchao's classes are
made of is in the metadata of safetensors, which our GGUF and APR files embed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Note, Value
from aprfmt.base.sequences import join_first
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.model.carried_files import FILES_KEY, SAFETENSORS, json_object, read_embedded_files
from aprfmt.tensors.companions import SECTIONS, quantization_section

if TYPE_CHECKING:
    from aprfmt.model import Model

_TORCHAO = "tensor_names"  # JSON list: the weights that the metadata describe
TENSORS = "tensors"  # of torchao's section: what is said of each weight
_SIZE = "group_size"
_SHOWN = 3  # names in a line
MODELOPT_FILE = "hf_quant_config.json"  # {"producer": ..., "quantization": what config.json lacks}

# By the libraries' own file, which loaders of their time read before config.json had a section.
# Sources: AutoGPTQ 0.7, quantization/config.py; AutoAWQ 0.2, models/_config.py.
OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_OLDER_KEYS = {"w_bit": "bits", "q_group_size": "group_size"}
# What loaders take where a file has no such key. Source: AutoGPTQ 0.7, quantization/config.py.
_OLDER_DEFAULTS: Mapping[str, Mapping[str, Value]] = {
    "gptq": {"sym": True, "checkpoint_format": "gptq"}
}
_OLDER_COMPARED = (
    "quant_method", "bits", "group_size", "desc_act", "sym", "zero_point", "version",
    "checkpoint_format",
)  # fmt: skip


def unclaimed_part_text(config: Mapping[str, Value] | None, name: str) -> str:
    """Return what config.json says of quantization, for a message about an unexplained tensor.

    "" unless `name`, a stored tensor, is of a packed weight by its name. The text begins with a
    colon.
    """
    from aprfmt.codecs.dialects import is_packed_part

    if not is_packed_part(name):
        return ""
    section = quantization_section(config or {})
    says = "nothing of packing" if section is None else repr(section.get("quant_method", "unnamed"))
    return f": it stands next to packed weights, of which config.json says {says}"


def packing_config(model: "Model") -> Mapping[str, Value] | None:
    """Return config.json's keys, its quantization section completed from the model's other files.

    A section that config.json lacks comes from hf_quant_config.json, AutoGPTQ's or AutoAWQ's file.
    A section of ModelOpt gets its group size from hf_quant_config.json, one of torchao its
    descriptions of weights from the metadata. None if there is no config.json and no such file.
    Raises FormatError where such a file is read and is damaged.
    """
    config = model.config
    section = None if config is None else quantization_section(config)
    method = None if section is None else section.get("quant_method")
    if section is not None and method == "torchao":
        found = dict(_torchao_descriptions(model)) or section.get(TENSORS, {})
        return {**(config or {}), SECTIONS[0]: {**section, TENSORS: found}}
    if section is None:
        stated = _older_section(model)
        if stated is not None:
            return {**(config or {}), SECTIONS[0]: stated[1]}
    said = _modelopt_section(model) if method in (None, "modelopt") else None
    if said is None or (section is not None and (method is None or _SIZE not in said)):
        return config
    if section is not None:  # the section of W4A16_AWQ says no size of groups
        return {**(config or {}), SECTIONS[0]: {_SIZE: said[_SIZE], **section}}
    return {**(config or {}), SECTIONS[0]: {**said, "quant_method": "modelopt"}}


def _modelopt_section(model: "Model") -> Mapping[str, Value] | None:
    """Return the quantization object of hf_quant_config.json, None without that file.

    Raises FormatError where it is damaged.
    """
    text = _modelopt_text(model)
    if text is None:
        return None
    where = f"{model.path}: {MODELOPT_FILE}"
    said = json_object(text, where).get(SECTIONS[1])
    if not isinstance(said, Mapping):
        raise FormatError(f"{where}: has no object {SECTIONS[1]!r}; expected the quantization")
    return said


def _older_section(model: "Model") -> tuple[str, Mapping[str, Value], Mapping[str, str]] | None:
    """Return (file, section, file's names of the keys) from AutoGPTQ's or AutoAWQ's own file.

    The section's keys have config.json's names. None without such a file. Raises FormatError where
    the file is damaged.
    """
    for name in OLDER_FILES:
        found = _section_of_older_file(model, name)
        if found is not None:
            return name, *found
    return None


def _section_of_older_file(
    model: "Model", name: str
) -> tuple[Mapping[str, Value], Mapping[str, str]] | None:
    """Return (section, file's names of its keys) of one of OLDER_FILES; None without the file.

    Raises FormatError where the file is damaged.
    """
    text = None if model.folder is None else model.folder.texts.get(name)
    if text is None:
        return None
    said = json_object(text, f"{model.path}: {name}")
    names = {_OLDER_KEYS.get(key, key): key for key in said}
    named = {key: said[own] for key, own in names.items()}
    return {"quant_method": OLDER_FILES[name], **named}, names


def settings_of_older_file(model: "Model", name: str) -> Mapping[str, Value] | None:
    """Return what loaders take from AutoGPTQ's or AutoAWQ's own file, under config.json's keys.

    Defaults for absent keys are included; keys that change no weight of this model are left out.
    None without the file, or where it is damaged.
    """
    try:
        found = _section_of_older_file(model, name)
    except FormatError:
        return None
    if found is None:
        return None
    section = _with_defaults(found[0])
    return {
        key: _lower_text(value) for key, value in section.items() if changes_weights(model, key)
    }


def _with_defaults(section: Mapping[str, Value]) -> dict[str, Value]:
    """Return a quantization section with the defaults that loaders use for absent keys."""
    return {**_OLDER_DEFAULTS.get(str(section.get("quant_method")), {}), **section}


def stated_packing(model: "Model") -> Mapping[str, Value]:
    """Return the keys of config.json's quantization section with defaults; {} without a section."""
    section = quantization_section(model.config or {})
    return {} if section is None else _with_defaults(section)


@dataclass(frozen=True)
class PackingConflict:
    """A key of the packing that config.json and a quantizer's own file state differently.

    `key` is its name in config.json's section and `name` that in the file.
    """

    file: str
    key: str
    name: str
    used: Value  # config.json's, which is used here
    other: Value


def packing_conflicts(model: "Model") -> tuple[PackingConflict, ...]:
    """Return the keys that AutoGPTQ's or AutoAWQ's own file states differently than config.json.

    Raises FormatError where that file is damaged.
    """
    section = quantization_section(model.config or {})
    if section is None or section.get("quant_method") not in OLDER_FILES.values():
        return ()
    stated = _older_section(model)
    if stated is None:
        return ()
    file, said, names = stated
    used, other = _with_defaults(section), _with_defaults(said)
    return tuple(
        PackingConflict(file, key, names.get(key, key), used[key], other[key])
        for key in _OLDER_COMPARED
        if key in used and key in other and _lower_text(used[key]) != _lower_text(other[key])
    )


def changes_weights(model: "Model", key: str) -> bool:
    """Return whether another value of a quantization key would make loaders read other weights.

    It would not where the inputs' groups are in order (`desc_act`), or all zero points are in the
    middle (`sym`). True where packed weights cannot be read.
    """
    from aprfmt.codecs import gptq

    if key not in ("desc_act", "sym"):
        return True
    try:
        weights = [one.packed() for _, v in model.items() for one in v.stored if one.packed]
        if key == "desc_act":
            return not all(gptq.are_groups_in_order(one.parts) for one in weights)
        return not all(gptq.are_zeros_in_middle(one.parts, one.config) for one in weights)
    except AprfmtError:
        return True


def _lower_text(value: Value) -> Value:
    """Return a section's text in lower case (versions are GEMM or gemm), other values unchanged."""
    return value.lower() if isinstance(value, str) else value


def conflicting_packings(model: "Model") -> Note | None:
    """Return a warning where config.json and another file state different packings.

    The other files are hf_quant_config.json, quantize_config.json and quant_config.json. None where
    they agree or one states none.
    """
    section = quantization_section(model.config or {})
    apart = packing_conflicts(model)
    if apart:
        shown = "; ".join(f"{one.key} {one.used!r} and {one.other!r}" for one in apart)
        text = f"config.json and {apart[0].file} differ: {shown}; the first is used here, older "
        return Note("warning", str(model.path), f"{text}loaders use the second", "two_packings")
    if section is None or section.get("quant_method") != "modelopt":
        return None
    said = _modelopt_section(model) or {}
    stated, other = section.get("quant_algo"), said.get("quant_algo")
    if None in (stated, other) or stated == other:
        return None
    text = f"config.json says quant_algo {stated!r}, {MODELOPT_FILE} {other!r}; the first is used"
    return Note("warning", str(model.path), text, "two_packings")


_INPUTS_AS_STORED = "A16"  # in the name of an algorithm that quantizes weights alone


def partial_input_scales(model: "Model") -> Note | None:
    """Return a warning where some packed weights have an input scale and others have none.

    None where all or none of the weights with the same encoding and configuration have one, or the
    configuration says that inputs are not quantized.
    """
    from aprfmt.codecs.dialect import OF_INPUTS

    # Group weights of the same encoding and configuration: with and without a scale.
    kinds: dict[str, tuple[list[str], list[str]]] = {}
    for name, view in model.items():
        for stored in view.stored:
            if stored.packed is None:
                continue
            weight = stored.packed()
            if _INPUTS_AS_STORED in str(weight.config.get("quant_algo")):
                continue
            has = next(
                (
                    part.info.name
                    for suffix, part in stored.parts.items()
                    if OF_INPUTS.search(suffix)
                ),
                "",
            )
            kind = f"{stored.info.encoding} {sorted(weight.config.items(), key=repr)}"
            kinds.setdefault(kind, ([], []))[not has].append(has or name)
    # A group with both is worth a warning.
    for kind, (held, lacking) in kinds.items():
        if held and lacking:
            what = held[0].rpartition(".")[2]
            shown = join_first(lacking, _SHOWN)
            text = (
                f"{len(lacking)} of {len(held) + len(lacking)} {kind.split()[0]} weights have no "
                f"{what}, and the others do: {shown}; engines take 1.0, or 0, for theirs"
            )
            return Note("warning", str(model.path), text, "partial_input_scales")
    return None


def _torchao_descriptions(model: "Model") -> Iterator[tuple[str, Value]]:
    """Yield (weight's name, description) from torchao's metadata; nothing if there is none.

    Raises FormatError for a damaged one.
    """
    metadata = model.metadata
    carried = metadata.get(SAFETENSORS)
    if isinstance(carried, str):
        metadata = json_object(carried, f"{model.path}: {SAFETENSORS}")
    if _TORCHAO not in metadata:
        return
    for name, text in metadata.items():
        if name != _TORCHAO and isinstance(text, str) and text.startswith("{"):
            yield name, json_object(text, f"{model.path}: metadata {name}")


def without_torchao_metadata(metadata: Mapping[str, Value]) -> dict[str, Value]:
    """Return the metadata of a safetensors file without torchao's descriptions of weights."""
    if _TORCHAO not in metadata:
        return dict(metadata)
    return {
        name: text
        for name, text in metadata.items()
        if name != _TORCHAO and not (isinstance(text, str) and text.startswith('{"_type"'))
    }


def _modelopt_text(model: "Model") -> str | None:
    """Return the text of hf_quant_config.json from the folder or embedded; None without it."""
    if model.folder is not None:
        return model.folder.texts.get(MODELOPT_FILE)
    if not any(name.endswith("_scale") for name in model.source.tensors):
        return None  # nothing that such a file is about: megabytes of carried files stay unread
    carried = model.metadata.get(FILES_KEY)
    if not isinstance(carried, str) or MODELOPT_FILE not in carried:
        return None
    return read_embedded_files(model).get(MODELOPT_FILE)


def without_packing(config: Mapping[str, Value]) -> dict[str, Value]:
    """Return config.json's keys without quantization sections, also in `text_config`."""
    inner = config.get("text_config")
    found = {key: value for key, value in config.items() if key not in SECTIONS}
    if isinstance(inner, Mapping) and any(key in inner for key in SECTIONS):
        found["text_config"] = {k: v for k, v in inner.items() if k not in SECTIONS}
    return found


def input_scale_endings(model: "Model") -> tuple[str, ...]:
    """Return the endings of the names of a model's scales of activations, each once."""
    names = dict.fromkeys(
        suffix for view in model.values() for one in view.stored for suffix in one.parts
    )
    if not names:
        return ()
    from aprfmt.codecs.dialect import OF_INPUTS

    found = (OF_INPUTS.search(name) for name in names)
    return tuple(dict.fromkeys(match[0] for match in found if match))
