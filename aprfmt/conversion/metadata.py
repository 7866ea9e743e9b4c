"""Make the metadata of an output: configuration, tokenizer, provenance, for each target format.

What a format has keys for is written under these keys, the rest verbatim under `aprfmt.*`, so that
converting back gives the same folder again.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aprfmt.arch.draft_head import head_count_keys
from aprfmt.arch.hyperparameters import write_hyper
from aprfmt.arch.value_checks import same_value
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import Note, TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.base.version import __version__
from aprfmt.codecs import codec
from aprfmt.conversion.dialects import DialectWeight, quantization_config
from aprfmt.conversion.gguf_vocabulary import KEY as VOCABULARY_KEY
from aprfmt.conversion.gguf_vocabulary import restored_vocabulary, vocabulary_record
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output, Plan
from aprfmt.conversion.quantize_options import IMATRIX_RECORD, RECORD
from aprfmt.conversion.restated_keys import restate_special_tokens, restated_config
from aprfmt.conversion.sidecar_files import config_text, drop_files, has_own_config
from aprfmt.errors import FormatError
from aprfmt.formats import FORMATS, FormatSpec
from aprfmt.model import Model
from aprfmt.model.carried_files import BARE as BARE_KEY
from aprfmt.model.carried_files import FILES_KEY, SAFETENSORS, json_object
from aprfmt.model.carried_files import FOREIGN as GGUF_KEY
from aprfmt.model.packing import (
    MODELOPT_FILE,
    OLDER_FILES,
    without_packing,
    without_torchao_metadata,
)
from aprfmt.model.remote_code import code_texts
from aprfmt.quantizing.mixture import Mixture, is_quantized
from aprfmt.tensors.companions import SECTIONS
from aprfmt.tokenizer.carriers import add_named_templates, to_apr, to_gguf, to_hf
from aprfmt.tokenizer.generation import gguf_settings, text_with_settings
from aprfmt.tokenizer.keys import GENERATION_CONFIG, GENERATION_KEYS, HF_JSON, TEMPLATE_FILE

# An output of --generic: its architecture, and where the source's own name for it is kept.
GENERIC, GENERIC_KEY = "aprfmt-generic", "aprfmt.generic"
ARCH_KEY_OF = {"gguf": "general.architecture", "apr": "architecture"}
ARCH_KEYS = (*ARCH_KEY_OF.values(), "hf_model_type", "hf_architecture")
HASH_KEY = "aprfmt.source.sha256"


@dataclass
class CarriedMetadata:
    """Metadata for the sink, and text files to write next to the weights (HF folders)."""

    metadata: dict[str, Value | TypedValue]
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def verbatim_bytes(self) -> int:
        """Size of the verbatim tokenizer.json in the metadata, 0 without one."""
        text = self.metadata.get(HF_JSON, "")
        return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def target_metadata(model: Model, target: str, plan: Plan, options: Options) -> CarriedMetadata:
    """Return the target's metadata and text files, with what the options change.

    A conversion to the same format keeps the metadata verbatim.
    """
    # Verbatim, or made for the target with the records of the conversion.
    if model.format == target:
        carried = CarriedMetadata(
            {key: value for key, value in model.typed.items() if not key.startswith("split.")},
            dict(model.folder.texts) if model.folder is not None else {},
        )
        if carried.texts:
            add_named_templates(carried.texts, model.carried)
    else:
        style = FORMATS[target].keys_like or target
        carried = CARRIERS[style](model, plan)
        carried.metadata.update(plan.restoration.metadata())
        carried.metadata.update(_identity(model))
        if all(output.copies for output in plan.outputs if is_quantized(output.source_encoding)):
            carried.metadata.update(_quantization_record(model))
    if "config.json" in carried.texts:  # a folder, whose configuration names its code
        carried.texts.update(code_texts(model.folder))
    # What encodings and the user's options change.
    _claim_packing(carried, model, plan.outputs, options)
    if any(not output.copies for output in plan.outputs) and model.format == target == "gguf":
        carried.metadata["general.file_type"] = TypedValue(file_type(plan.outputs), "uint32")
    carried.metadata.update(options.extra_metadata)
    carried.texts.update(options.texts)
    for key, value in options.metadata.items():
        carried.metadata[key] = _typed_like(model, key, value)
    whole = options.carry and "tokenizer.json" not in plan.files_dropped
    for key in (*options.remove, *(() if whole else (HF_JSON,))):
        carried.metadata.pop(key, None)
    drop_files(carried.metadata, carried.texts, plan.files_dropped, f"{model.path}: {FILES_KEY}")
    return carried


def _quantization_record(model: Model) -> dict[str, Value | TypedValue]:
    """Return {key: value} of the source's keys that record how it was quantized.

    They are true in another format, too.
    """
    return {
        key: TypedValue(value, "uint32") if type(value) is int else value
        for key, value in model.metadata.items()
        if key.startswith((RECORD, IMATRIX_RECORD))
    }


def _claim_packing(
    carried: CarriedMetadata, model: Model, outputs: Sequence[Output], options: Options
) -> None:
    """Make every config.json in `carried` say whether and how weights are packed.

    It is changed wherever it is: a metadata key, a text file, or one of the embedded files. Nothing
    changes where no weight was packed or decoded.
    """
    packed = {output.part.packed.encoding for output in outputs if output.part is not None}
    parts = {id(part) for tensor in model.values() for part in tensor.parts.values()}
    if not packed and (not parts or any(id(s) in parts for o in outputs for s in o.sources)):
        return  # nothing was packed, or packed weights are copied: the config already says so
    # Remove what other tools recorded of the packing.
    claim, files = _packing_keys(outputs, packed, options)
    for name in (MODELOPT_FILE, *OLDER_FILES):
        carried.texts.pop(name, None)
    carried.metadata = without_torchao_metadata(carried.metadata)
    kept = carried.metadata.get(SAFETENSORS)
    if isinstance(kept, str):
        plain = without_torchao_metadata(json_object(kept, f"{model.path}: {SAFETENSORS}"))
        carried.metadata[SAFETENSORS] = json.dumps(plain)
    # Change config.json wherever it is: as a file, as one key, among other files.
    texts = [(carried.texts, "config.json"), (carried.metadata, "aprfmt.hf_config")]
    for place, key in texts:
        text = place.get(key)
        if isinstance(text, str):
            place[key] = _claimed_text(text, claim, model)
    text = carried.metadata.get(FILES_KEY)
    if isinstance(text, str):
        held = json_object(text, f"{model.path}: {FILES_KEY}")
        if isinstance(held.get("config.json"), str):
            held["config.json"] = _claimed_text(held["config.json"], claim, model)
        gone = [held.pop(name, None) for name in (MODELOPT_FILE, *OLDER_FILES)]
        if any(one is not None for one in gone) or files or "config.json" in held:
            carried.metadata[FILES_KEY] = json.dumps({**held, **files}, ensure_ascii=False)
    elif "config.json" in carried.texts:
        carried.texts.update(files)
    config = carried.metadata.get("hf_config")
    if isinstance(config, Mapping):
        carried.metadata["hf_config"] = _with_claim(dict(config), claim)


def _packing_keys(
    outputs: Sequence[Output], packed: set[str], options: Options
) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
    """Return (keys of config.json for packed weights or None, {file name: text} of files).

    `packed` are the encodings of packed outputs. The files are those that a dialect asks for.
    """
    if not packed:
        return None, {}
    for output in outputs:
        if output.part is not None and isinstance(output.part.packed, DialectWeight):
            claim, files = quantization_config(outputs)
            return claim, {name: json.dumps(held, indent=4) + "\n" for name, held in files.items()}
    name = min(packed)
    return {SECTIONS[0]: codec(name).config(options.packing, _unpacked_modules(outputs, name))}, {}


def _unpacked_modules(outputs: Sequence[Output], packing: str) -> list[str]:
    """Return the modules that transformers would pack as `packing`, but that are not packed."""
    mixture = Mixture(packing, (), n_layers=0)
    return [
        output.info.name.removesuffix(".weight")
        for output in outputs
        if output.part is None
        and mixture.choose(output.role or output.info.name, output.info.shape, "F32") is not None
    ]


def _claimed_text(text: str, claim: Mapping[str, Any] | None, model: Model) -> str:
    """Return a config.json's text with its keys about packing replaced by those of `claim`.

    If `claim` is None, these keys are only removed. A text that already says so is unchanged.
    """
    config = json_object(text, f"{model.path}: the config.json it carries")
    changed = _with_claim(dict(config), claim)
    if changed == config:
        return text
    return json.dumps(changed, indent=2) + "\n"


def _with_claim(config: dict[str, Any], claim: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a config with its keys about packing replaced by those of `claim`.

    If `claim` is None, these keys are only removed. Keys that were sorted are sorted in the result.
    """
    if claim is None:
        return without_packing(config)
    ordered = list(config) == sorted(config)
    plain = without_packing(config)
    made = {key: claim.get(key, plain.get(key)) for key in config if key in claim or key in plain}
    made |= claim
    return dict(sorted(made.items())) if ordered else made


def _typed_like(model: Model, key: str, value: Value | TypedValue) -> Value | TypedValue:
    """Return a user's value with the key's type in the file, unless it names a type itself."""
    types = model.source.types
    return (
        TypedValue(value, types[key])
        if key in types and not isinstance(value, TypedValue)
        else value
    )


def _identity(model: Model) -> dict[str, Value]:
    """Return the keys that record the source's file name, size, format and writer."""
    size = sum(path.stat().st_size for path in model.source.files)
    found: dict[str, Value] = {
        "aprfmt.writer": f"aprfmt {__version__}",
        "aprfmt.source.file": model.path.name,
        "aprfmt.source.format": model.format,
        "aprfmt.source.size": str(size),
    }
    for key in ("general.quantized_by", "transformers_version", "aprfmt.writer"):
        writer = model.metadata.get(key) or (model.config or {}).get(key)
        if isinstance(writer, str):
            found["aprfmt.source.writer"] = f"{key} {writer}"
    return found


def file_type(outputs: Sequence[Output]) -> int:
    """Return llama.cpp's file type number for the encoding that holds most elements of matrices.

    It is 1024 (guessed) for an encoding without a number.
    """
    counts: Counter[str] = Counter()
    for output in outputs:
        if len(output.info.shape) > 1:
            size = math.prod(output.info.shape)
            counts[output.info.encoding] += size
    name = counts.most_common(1)[0][0] if counts else "F32"
    number = find_encoding(name).file_type
    return 1024 if number is None else number  # 1024: guessed, as llama.cpp's own constant says


def model_name(model: Model) -> str:
    """Return the model name in the metadata, else the name of the folder or file."""
    for key in ("general.name", "name"):
        name = model.metadata.get(key)
        if isinstance(name, str) and name:
            return name
    path = model.path
    return path.resolve().parent.name if model.folder is not None else path.stem


def _small_files(model: Model) -> dict[str, str]:
    """Return {file name: text} of the companion files to carry, without tokenizer.json."""
    texts = dict(model.carried.embedded_texts)
    if model.folder is not None:
        texts.update({k: v for k, v in model.folder.texts.items() if k != "tokenizer.json"})
    if not has_own_config(model):
        texts.pop("config.json", None)
    elif "config.json" in texts:
        texts["config.json"] = config_text(model) or texts["config.json"]
    return texts


def _foreign_gguf(model: Model) -> str | None:
    """Return the GGUF keys that other formats have no key for, as JSON {key: [type, value]}.

    None where there is none.
    """
    kept = {}
    for key, value in model.metadata.items():
        type_name = model.source.types.get(key, "")
        if not type_name or key.startswith(("tokenizer.", "split.", "aprfmt.")):
            continue
        plain = value.tolist() if type_name.startswith("array") else value
        kept[key] = [type_name, _jsonable_numbers(plain)]
    return json.dumps(kept, ensure_ascii=True, separators=(",", ":")) if kept else None


def _jsonable_numbers(value: Any) -> Any:
    """Return a value with infinities and NaN replaced by their names, for JSON."""
    if isinstance(value, list):
        return [_jsonable_numbers(one) for one in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def _numbers_from_names(value: Any, type_name: str) -> Any:
    """Return a value of a float type with the names "inf", "-inf" and "nan" replaced by numbers.

    Values of other types, and other texts, are returned unchanged.
    """
    if isinstance(value, list):
        return [_numbers_from_names(one, type_name) for one in value]
    named = isinstance(value, str) and "float" in type_name and value in _NAMES
    return float(value) if named else value


_NAMES = ("inf", "-inf", "nan")


def _strip_type(value: Value | TypedValue) -> Value:
    """Return a metadata value without its type."""
    return value.value if isinstance(value, TypedValue) else value


def _carried_gguf(model: Model) -> dict[str, TypedValue]:
    """Return {key: typed value} of the GGUF keys that a model carries; {} without any.

    Raises FormatError if the record of them is damaged.
    """
    text = model.metadata.get(GGUF_KEY)
    if not isinstance(text, str):
        return {}
    where = f"{model.path}: {GGUF_KEY}"
    found = {}
    for key, row in json_object(text, where).items():
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str):
            raise FormatError(f"{where}: {shorten(key, 80)!r} is not a pair of a type and a value")
        found[key] = TypedValue(_numbers_from_names(row[1], row[0]), row[0])
    return found


def _note_rowless(model: Model, plan: Plan, tokens: Mapping[int, str]) -> None:
    """Note in the plan that tokens without a row are not in the copy's vocabulary."""
    shown = [f"{shorten(token, 40)!r} ({i})" for i, token in list(tokens.items())[:3]]
    more = ", ..." if len(tokens) > len(shown) else ""
    text = (
        f"{len(tokens)} tokens have no row of the embedding and are left out of the vocabulary: "
        f"{', '.join(shown)}{more}; a text that has one is split into others"
    )
    plan.notes.append(Note("warning", model.carried.origin, text, "rowless_tokens"))


def _to_gguf(model: Model, plan: Plan) -> CarriedMetadata:
    """Return the metadata of a GGUF: architecture, hyperparameters, tokenizer, carried keys."""
    spec, hyper = model.spec, model.hyper
    found: dict[str, Value | TypedValue] = {
        "general.architecture": spec.called["gguf"][0],
        "general.type": "model",
        "general.name": model_name(model),
    }
    # Keys of an earlier GGUF stay unless the hyperparameters say otherwise.
    found.update(carried := _carried_gguf(model))
    heads = head_count_keys(spec, "gguf", hyper, plan.names)
    for key, value in {**write_hyper(spec, hyper, "gguf"), **heads}.items():
        if key not in carried or not same_value(carried[key].value, _strip_type(value)):
            found[key] = value
    if not heads:
        found.pop(f"{spec.called['gguf'][0]}.nextn_predict_layers", None)
    # Keys that follow from the encodings.
    if "general.file_type" not in carried or any(
        o.info.encoding != o.source_encoding for o in plan.outputs
    ):
        found["general.file_type"] = TypedValue(file_type(plan.outputs), "uint32")
    if any(find_encoding(o.info.encoding).block_size > 1 for o in plan.outputs):
        found["general.quantization_version"] = TypedValue(2, "uint32")
    # Tokenizer, configuration and companion files.
    found.update(to_gguf(model, partial(_note_rowless, model, plan)))
    found.update(restored_vocabulary(model, found))
    if (
        model.folder is not None and GENERATION_CONFIG in model.carried.files
    ):  # it says all, as it stands now
        for row in GENERATION_KEYS.values():
            found.pop(row.gguf, None)
    if model.key_style != "gguf":
        found.update(gguf_settings(model))
    text = config_text(model) if has_own_config(model) else None
    if text is not None:
        found["aprfmt.hf_config"] = text
    files = _small_files(model)
    files.pop("config.json", None)
    if files:
        found[FILES_KEY] = json.dumps(files, ensure_ascii=False)
    found.update(_source_metadata(model))
    return CarriedMetadata(found)


def _source_metadata(model: Model) -> dict[str, Value]:
    """Return {key: JSON} that carries a safetensors `__metadata__` through other formats; or {}."""
    if model.key_style != "safetensors":
        kept = model.metadata.get(SAFETENSORS)
        return {SAFETENSORS: kept} if isinstance(kept, str) else {}
    plain = {k: v for k, v in model.metadata.items() if not k.startswith("aprfmt.")}
    return {SAFETENSORS: json.dumps(plain)} if plain else {}


def _to_apr(model: Model, plan: Plan) -> CarriedMetadata:
    """Return the metadata of an APR: hyperparameters, tokenizer, configuration, carried keys."""
    config = model.config
    found: dict[str, Value | TypedValue] = {
        "model_type": model.spec.name,
        "name": model_name(model),
        "original_format": model.format,
        "param_count": sum(
            math.prod(o.info.shape if o.part is None else o.part.packed.shape)
            for o in plan.outputs
            if not o.companion
        ),
    }
    # Hyperparameters, tokenizer, configuration and companion files.
    found.update(write_hyper(model.spec, model.hyper, "apr"))
    found.update(to_apr(model, partial(_note_rowless, model, plan)))
    if config is not None and has_own_config(model):
        found["hf_config"] = restated_config(model, config)
    files = _small_files(model)
    if files:
        found[FILES_KEY] = json.dumps(files, ensure_ascii=False)
    # What only a GGUF or safetensors has keys for is carried as JSON.
    if model.source.types:
        kept = _foreign_gguf(model)
        if kept is not None:
            found[GGUF_KEY] = kept
    vocabulary = vocabulary_record(model) if model.key_style == "safetensors" else None
    if vocabulary is not None:  # of a GGUF itself, APR has both lists under keys of its own
        found[VOCABULARY_KEY] = vocabulary
    found.update(_source_metadata(model))
    return CarriedMetadata(found)


def _to_safetensors(model: Model, plan: Plan) -> CarriedMetadata:
    """Return the metadata and text files of a safetensors folder, config.json among them."""
    texts = dict(model.carried.embedded_texts)
    text = config_text(model) if has_own_config(model) else None
    if text is None:
        spec, hyper = model.spec, model.hyper
        config = write_hyper(spec, hyper, "hf") | head_count_keys(spec, "hf", hyper, plan.names)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    texts["config.json"] = text
    files = to_hf(model)
    if files and TEMPLATE_FILE not in files:
        texts.pop(TEMPLATE_FILE, None)  # left out where tokenizer_config.json has several by name
    texts.update(files)
    settings = text_with_settings(model, texts.get(GENERATION_CONFIG))
    if settings is not None:
        texts[GENERATION_CONFIG] = settings
    restate_special_tokens(model, texts)
    metadata: dict[str, Value | TypedValue] = {"format": "pt"}
    kept = model.metadata.get(SAFETENSORS)
    if isinstance(kept, str):
        metadata.update(json_object(kept, f"{model.path}: aprfmt.source.metadata"))
    foreign = _foreign_gguf(model) if model.source.types else model.metadata.get(GGUF_KEY)
    if isinstance(foreign, str):
        metadata[GGUF_KEY] = foreign
    vocabulary = vocabulary_record(model)
    if vocabulary is not None:
        metadata[VOCABULARY_KEY] = vocabulary
    return CarriedMetadata(metadata, texts)


CARRIERS: Mapping[str, Callable[[Model, Plan], CarriedMetadata]] = {
    "gguf": _to_gguf,
    "apr": _to_apr,
    "safetensors": _to_safetensors,
}


def bare_metadata(model: Model, target: FormatSpec, *, marked: bool = False) -> dict[str, Any]:
    """Return the metadata of a container-only copy (`--arch none`), nothing added.

    With `marked` (`--generic`), architecture keys say GENERIC, which no loader knows, and the name
    in the source is stored under another key. Values without a type in the target (nulls, objects,
    arrays) are stored as JSON under one key, and are restored in a target that has such values.
    """
    values = {k: _expand_lazy(v) for k, v in model.metadata.items() if not k.startswith("split.")}
    held = values.pop(BARE_KEY, None)
    if isinstance(held, str):
        values |= json_object(held, f"{model.path}: {BARE_KEY}")
    if marked:
        stated = [values.pop(key) for key in ARCH_KEYS if key in values]
        key = ARCH_KEY_OF.get(target.name)
        values |= {GENERIC_KEY: str(stated[0]) if stated else "", **({key: GENERIC} if key else {})}
    rest = {key: value for key, value in values.items() if not target.takes(value)}
    found = {key: value for key, value in values.items() if key not in rest}
    if rest:
        found[BARE_KEY] = json.dumps(rest, ensure_ascii=False)
    return found


def _expand_lazy(value: Value) -> Any:
    """Return a lazy array as a list, any other value unchanged."""
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()
