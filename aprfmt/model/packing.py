"""Where a model says how its weights are quantized: config.json, or ModelOpt's own file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import FormatError
from aprfmt.model.carried_files import FILES_KEY, json_object, read_texts
from aprfmt.tensors.companions import SECTIONS, section_of

if TYPE_CHECKING:
    from aprfmt.model import Model

MODELOPT_FILE = "hf_quant_config.json"  # {"producer": ..., "quantization": what config.json lacks}


def packing_config(model: "Model") -> Mapping[str, Value] | None:
    """Return the model's configuration with what it says of quantization in one place.

    config.json comes first, then `hf_quant_config.json`. Raises FormatError where that is read and
    is damaged.
    """
    config = model.config
    if config is not None and section_of(config) is not None:
        return config
    text = _modelopt_text(model)
    if text is None:
        return config
    where = f"{model.path}: {MODELOPT_FILE}"
    section = json_object(text, where).get(SECTIONS[1])
    if not isinstance(section, Mapping):
        raise FormatError(f"{where}: has no object {SECTIONS[1]!r}; expected the quantization")
    return {**(config or {}), SECTIONS[0]: {**section, "quant_method": "modelopt"}}


def _modelopt_text(model: "Model") -> str | None:
    if model.folder is not None:
        return model.folder.texts.get(MODELOPT_FILE)
    carried = model.metadata.get(FILES_KEY)
    if not isinstance(carried, str) or MODELOPT_FILE not in carried:
        return None
    return read_texts(model).get(MODELOPT_FILE)


def without_packing(config: Mapping[str, Value]) -> dict[str, Value]:
    """Return a configuration that says nothing of quantization, nor its text part."""
    inner = config.get("text_config")
    found = {key: value for key, value in config.items() if key not in SECTIONS}
    if isinstance(inner, Mapping) and any(key in inner for key in SECTIONS):
        found["text_config"] = {k: v for k, v in inner.items() if k not in SECTIONS}
    return found
