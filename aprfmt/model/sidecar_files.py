"""Sidecar files of a model: what a file next to the weights is, by its name."""

import re
from dataclasses import dataclass
from functools import cache

from aprfmt.model.readings import matching_row


@dataclass(frozen=True, slots=True)
class FileRow:
    """A row: a regular expression of file names, how such files are used, and the source.

    `companion` is the kind under which a conversion reports the file (it must be copied or left
    out by a flag), "" for the rest. `as_stored`: loaders read it and nothing here does, so that two
    folders are compared by what it holds.
    """

    names: str
    reading: str
    source: str
    companion: str = ""
    as_stored: bool = False


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT
_FROM_PRETRAINED = "transformers' from_pretrained reads no such file"
_OTHER_WEIGHTS = "from_pretrained takes model.safetensors before them"

# The first row that fits counts.
ROWS: tuple[FileRow, ...] = (
    FileRow(r"config\.json", "hyperparameter", "its keys are items", "configuration"),
    FileRow(r"hf_quant_config\.json", "part of", "ModelOpt's claim of packed weights",
            "configuration"),
    FileRow(r"quant(ize)?_config\.json", "part of", "AutoGPTQ's and AutoAWQ's claim of packing",
            "configuration"),
    FileRow(r"tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|"
            r"vocab\.(json|txt)|merges\.txt|tokenizer\.model|spiece\.model|.*\.tiktoken",
            "tokenizer part", "transformers' tokenizers", "tokenizer"),
    FileRow(r"tekken\.json", "tokenizer part", "mistral-common"),
    FileRow(r"chat_template\.(json|jinja)", "tokenizer part", "transformers' apply_chat_template",
            "template"),
    FileRow(r"generation_config\.json", "setting", "its keys are items", "generation config"),
    FileRow(r"((image_|video_)?preprocessor|processor)_config\.json", "setting",
            "transformers' processors of images, video and audio", "preprocessor", as_stored=True),
    FileRow(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)(\.(txt|md))?", "text", "a licence",
            "licence"),
    FileRow(r"adapter_config\.json|adapter_model.*\.(safetensors|bin|gguf)", "unread", "",
            "adapter"),
    FileRow(r".*imatrix.*\.(gguf|dat)|.*\.imatrix", "setting", "what llama-quantize weighs by",
            "imatrix"),
    FileRow(r"mmproj.*\.gguf", "unread", "", "tower"),
    FileRow(r"(mtp|.*draft).*\.(safetensors|gguf)", "unread", "", "draft head"),
    FileRow(r"modules\.json|sentence_\w+_config\.json|config_sentence_transformers\.json",
            "setting", "sentence-transformers", as_stored=True),
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
            "code, run only with trust_remote_code; the forward pass here is that of the tables"),
    FileRow(r"optimizer.*|scheduler\.pt|scaler\.pt|rng_state.*\.pth|trainer_state\.json|"
            r"training_args\.(bin|json)|all_results\.json|(train|eval)_results\.json|latest",
            "without effect", "the state of a training, which no loader of weights reads"),
    FileRow(r"pytorch_model.*\.(bin|json)|tf_model.*\.h5|flax_model.*|rust_model\.ot|.*\.onnx|"
            r"consolidated.*|params\.json|model\.ckpt.*", "without effect", _OTHER_WEIGHTS),
    FileRow(r".*\.(gguf|apr)", "without effect", "a model of its own, whole in its file"),
)  # fmt: skip

# Subfolders: only one that an index or modules.json names is read.
FOLDERS: tuple[FileRow, ...] = (
    FileRow(
        "additional_chat_templates",
        "tokenizer part",
        "transformers' templates by name",
        as_stored=True,
    ),
    FileRow(".*", "without effect", _FROM_PRETRAINED + " below the folder"),
)
_UNKNOWN = FileRow("", "unread", "")


@cache
def file_row(name: str) -> FileRow:
    """Return the first row that matches a file name; a row with reading `unread` if none does."""
    return matching_row(ROWS, name) or _UNKNOWN


def folder_row(name: str) -> FileRow:
    """Return the first row that matches the name of a subfolder."""
    return next(row for row in FOLDERS if re.fullmatch(row.names, name))


def companion_kind(name: str) -> str:
    """Return the kind of a sidecar file that belongs to the model; "" for any other file."""
    return file_row(name).companion
