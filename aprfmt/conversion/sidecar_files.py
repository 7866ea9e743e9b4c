"""Find what a source has besides its tensors.

These are files of its folder, or what a single file stores in its keys.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aprfmt.arch.spec import ArchSpec
from aprfmt.conversion.restated_keys import restated_config
from aprfmt.errors import AprfmtError, OutputError
from aprfmt.formats import FORMATS
from aprfmt.model import Model
from aprfmt.model.carried_files import FILES_KEY, foreign_gguf_keys, json_object
from aprfmt.model.hf_folder import read_text
from aprfmt.model.sidecar_files import companion_kind
from aprfmt.remote.paths import is_remote
from aprfmt.tokenizer.carriers import has_tokenizer

VOCABULARY, TEMPLATE = "vocabulary", "chat template"  # in a file's keys
KEYS = {VOCABULARY: "tokenizer.", TEMPLATE: "tokenizer.chat_template"}


def sidecar_names(source: Model) -> Sequence[str]:
    """Return the names of a folder's companion files, or of those embedded in one of our files.

    Other files of the same folder are ignored: outputs of other runs come and go there.
    """
    if source.folder is None:
        return sorted(source.carried.embedded_texts)
    names = set(source.folder.texts)
    if not is_remote(source.folder.path):
        others = (path.name for path in source.folder.path.iterdir() if path.is_file())
        names.update(filter(companion_kind, others))
    return sorted(names - {path.name for path in source.source.files})


def embedded_files(source: Model) -> Mapping[str, str]:
    """Return {name: kind} of what a single file stores in its keys where a folder has files.

    {} for a folder.
    """
    if source.folder is not None:
        return {}
    found = {VOCABULARY: "tokenizer"} if has_tokenizer(source.carried) else {}
    if source.carried.readable_template() is not None:
        found[TEMPLATE] = "template"
    every = dict.fromkeys((*source.metadata, *foreign_gguf_keys(source)))
    licences = [key for key in every if key.startswith("general.license")]
    return {**found, **dict.fromkeys(licences, "licence")}


def drop_files(
    metadata: dict[str, Any], texts: dict[str, str], names: Sequence[str], where: str
) -> None:
    """Remove the files `names` from a copy's texts and from those in its metadata, in place.

    `where` names the metadata key in an error.
    """
    for name in names:
        texts.pop(name, None)
    text = metadata.get(FILES_KEY)
    if names and isinstance(text, str):
        held = json_object(text, where)
        left = {name: held[name] for name in held if name not in names}
        metadata[FILES_KEY] = json.dumps(left, ensure_ascii=False)


def config_text(model: Model) -> str | None:
    """Return config.json verbatim if its text is available, else the parsed object as JSON.

    An embedded one says what the file's own keys say. None without a configuration.
    """
    if model.folder is not None and "config.json" in model.folder.texts:
        return model.folder.texts["config.json"]
    if model.config is None:
        return None
    config = restated_config(model, model.config)
    texts = model.carried.embedded_texts
    if "config.json" in texts and config == model.config:
        return texts["config.json"]
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def has_own_config(model: Model) -> bool:
    """Return whether config.json describes this model, not a larger one with several towers."""
    part = model.spec.section != ArchSpec.section
    return not part or (model.config or {}).get("model_type") in model.spec.called["hf"]


def texts_to_write(
    weights: Path, folder: Path | None, texts: Mapping[str, str], force: bool
) -> dict[Path, str]:
    """Return {path: text} of the texts to write next to the weights, without those already there.

    Next to a single file (`folder` is None) there may be another model's config.json. It is
    replaced only with `force` together with the weights it belongs to, and never if the folder has
    other weights. Raises OutputError where it may not be replaced.
    """
    found = {weights.parent / name: text for name, text in texts.items()}
    if folder is not None:
        return found
    found = {path: text for path, text in found.items() if not _has_text(path, text)}
    taken = [path for path in found if path.exists()]
    others = _other_weights(weights) if taken else []
    if taken and (others or not force or not weights.exists()):
        whose = f"that of {others[0].name}" if others else "of another model"
        raise OutputError(
            f"{taken[0]}: is there already and says something else ({whose}?); give "
            f"{weights.name} a separate folder"
        )
    return found


def _has_text(path: Path, text: str) -> bool:
    """Return whether a file exists and has exactly this text."""
    try:
        return path.is_file() and read_text(path) == text
    except AprfmtError:
        return False


def _other_weights(weights: Path) -> list[Path]:
    """Return the other model files of the folder, to which its config.json may belong."""
    extensions = {extension for name in FORMATS.own for extension in FORMATS[name].extensions}
    return [
        path
        for path in sorted(weights.parent.iterdir())
        if path.suffix in extensions
        and path.name != weights.name
        and not path.name.startswith(f"{weights.stem}-")  # shards of `weights` itself
    ]
