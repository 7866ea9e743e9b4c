"""Sidecar files of a model: what a file next to the weights is, by its name."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aprfmt.model.key_readings import matching_row


@dataclass(frozen=True, slots=True)
class FileRow:
    """A table row: a regular expression of file names, how such files are used, and the source.

    `companion` is the kind under which a conversion reports the file (it must be copied or left out
    by a flag), "" for the rest. `as_stored`: loaders read it and aprfmt does not, so that two
    folders are compared by its content. `needed`: a folder without it is another model.
    """

    names: str
    reading: str
    source: str
    companion: str = ""
    as_stored: bool = False
    needed: bool = False


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
_FROM_PRETRAINED = "transformers' from_pretrained reads no such file"
_OTHER_WEIGHTS = "from_pretrained takes model.safetensors before them"

# The first row that fits counts.
ROWS: tuple[FileRow, ...] = (
    FileRow(r"config\.json", "hyperparameter", "its keys are items", "configuration", needed=True),
    FileRow(r"hf_quant_config\.json", "part of", "ModelOpt's claim of packed weights",
            "configuration", as_stored=True),
    FileRow(r"quant(ize)?_config\.json", "part of", "AutoGPTQ's and AutoAWQ's claim of packing",
            "configuration", as_stored=True),
    FileRow(r"tokenizer(_config)?\.json|special_tokens_map\.json", "tokenizer part",
            "transformers' tokenizers: its keys are items", "tokenizer"),
    # What other loaders take: slow tokenizers, llama.cpp's converter, mistral-common.
    FileRow(r"added_tokens\.json|vocab\.(json|txt)|merges\.txt|tokenizer\.model|spiece\.model|"
            r".*\.tiktoken", "tokenizer part", "transformers' tokenizers", "tokenizer",
            as_stored=True),
    FileRow(r"tekken\.json", "tokenizer part", "mistral-common", as_stored=True),
    FileRow(r"chat_template\.(json|jinja)", "tokenizer part", "transformers' apply_chat_template",
            "template"),
    FileRow(r"generation_config\.json", "setting", "its keys are items", "generation config"),
    FileRow(r"((image_|video_)?preprocessor|processor)_config\.json", "setting",
            "transformers' processors of images, video and audio", "preprocessor",
            as_stored=True, needed=True),
    FileRow(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)(\.(txt|md))?", "text", "a licence",
            "licence"),
    FileRow(r"adapter_config\.json|adapter_model.*\.(safetensors|bin|gguf)|"
            r"(\d+_)?adapters\.safetensors", "unread", "", "adapter"),
    FileRow(r".*imatrix.*\.(gguf|dat)|.*\.imatrix", "setting", "what llama-quantize weighs by",
            "imatrix"),
    FileRow(r"mmproj.*\.gguf", "unread", "", "tower"),
    FileRow(r"(mtp|.*draft).*\.(safetensors|gguf)", "unread", "", "draft head"),
    FileRow(r"modules\.json|sentence_\w+_config\.json|config_sentence_transformers\.json",
            "setting", "sentence-transformers", as_stored=True, needed=True),
    FileRow(r".*\.(md|rst|txt|png|jpe?g|gif|svg|webp|pdf|html|ipynb|log|csv|mp4)", "text",
            "nothing that loads a model reads it"),
    FileRow(r"recipe\.ya?ml|mergekit_config\.ya?ml|README|CITATION\.cff|requirements\.txt", "text",
            "how the model was made"),
    FileRow(r"golden\.json", "setting", "prompts and answers, which qa asks for"),
    FileRow(r".*\.aprfmt-hash\.json", "setting", "digests, which validate holds against the files"),
    FileRow(r".*\.aprfmt-roles\.json", "without effect",
            "digests, which a script in an engine compares"),
    FileRow(r"\..*", "without effect", "a hidden file: " + _FROM_PRETRAINED),
    FileRow(r".*\.py", "without effect",
            "code, run only with trust_remote_code; the forward pass here is that of the tables",
            as_stored=True),
    FileRow(r"optimizer.*|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json|"
            r"training_args\.(bin|json)|all_results\.json|(train|eval)_results\.json|latest",
            "without effect", "the state of a training, which no loader of weights reads"),
    FileRow(r"pytorch_model.*\.(bin|json)|tf_model.*\.h5|flax_model.*|rust_model\.ot|.*\.onnx|"
            r"consolidated.*|model\.ckpt.*", "without effect", _OTHER_WEIGHTS),
    FileRow(r"params\.json", "without effect", "vLLM's mistral format; the others take config.json",
            as_stored=True),
    FileRow(r".*\.(gguf|apr)", "without effect", "a model of its own, whole in its file"),
)  # fmt: skip

# Subfolders. Others are read by their files: which of them a loader takes is not known.
FOLDERS: tuple[FileRow, ...] = (
    FileRow("additional_chat_templates", "tokenizer part", "transformers' templates, by name"),
    FileRow("1_Pooling", "hyperparameter", "how a text's rows become one"),
    FileRow(
        r"onnx|openvino|coreml|tflite|original|metal|gguf|mlx",
        "without effect",
        "the model for another runtime, whole in its folder",
    ),
    FileRow(
        r"(checkpoint|step|epoch)[-_]?\d+|global_step\d+|runs|logs?|wandb|\w+_logs",
        "without effect",
        "of a training, which no loader of weights reads",
    ),
    FileRow(r"\..*|__pycache__", "without effect", "a hidden folder: " + _FROM_PRETRAINED),
)
_PLAIN = frozenset({"text", "without effect"})
_UNKNOWN = FileRow("", "unread", "")
_OF_TEXT = FileRow("", "without effect", "no file in it is one that loaders read", as_stored=True)
_OF_ADAPTERS = FileRow(
    "", "without effect", "an adapter, which loaders take only where its own folder is named"
)


@cache
def file_row(name: str) -> FileRow:
    """Return the first row that matches a file name; one with reading "unread" if none does."""
    return matching_row(ROWS, name) or _UNKNOWN


def folder_row(path: Path) -> FileRow:
    """Return the table's row of a subfolder, which says whether loaders read its files.

    A name without a row is judged by the files in it, at any depth: "unread" if a loader may read
    one of them, else "without effect". Files of an adapter's folder, which has adapter_config.json,
    are the adapter's and no part of the model. Links to folders are not followed.
    """
    row = matching_row(FOLDERS, path.name)
    if row is not None:
        return row
    found = _OF_TEXT
    for _, folders, names in os.walk(path):
        if ADAPTER_CONFIG in names:
            found = _OF_ADAPTERS
            folders.clear()
        elif any(file_row(name).reading not in _PLAIN for name in names):
            return _UNKNOWN
    return found


def companion_kind(name: str) -> str:
    """Return the kind of a sidecar file that belongs to the model; "" for any other file."""
    return file_row(name).companion
