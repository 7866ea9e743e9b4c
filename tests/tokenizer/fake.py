"""Stand-ins for open models: the parts of a Model that tokenizers look at."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never, cast

from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ArchError
from aprfmt.model import Model
from aprfmt.model.carried_files import parse_embedded_files
from aprfmt.model.hf_folder import read_folder
from aprfmt.tokenizer.stored_parts import Carried


class _Fake(SimpleNamespace):
    """Reads its parts anew at every access: tests change them."""

    @property
    def resolution(self) -> Never:
        """Raise ArchError: there are no tensors."""
        raise ArchError(f"{self.path}: no tensors")

    @property
    def carried(self) -> Carried:
        return Carried(cast(Model, self))

    @property
    def embedded_files(self) -> Mapping[str, Any]:
        return parse_embedded_files(self.metadata, self.path)

    @property
    def typed(self) -> Mapping[str, Any]:
        """Values with their types, where the file has types."""
        return {
            key: TypedValue(value, self.source.types[key]) if key in self.source.types else value
            for key, value in self.metadata.items()
        }


def fake(form: str, metadata: Mapping[str, Any], folder: Path | None = None) -> Model:
    """Return a model of format `form`; Typed values become values with types, as in a GGUF."""
    plain = {k: v.value if isinstance(v, TypedValue) else v for k, v in metadata.items()}
    types = {k: v.type for k, v in metadata.items() if isinstance(v, TypedValue)}
    opened = None if folder is None else read_folder(folder)
    return cast(
        Model,
        _Fake(
            format=form,
            key_style=form,
            metadata=plain,
            source=SimpleNamespace(types=types if form == "gguf" else {}),
            folder=opened,
            config=None if opened is None else opened.config,
            path=Path(f"fake.{form}") if folder is None else folder / "model.safetensors",
        ),
    )


def folder_model(folder: Path) -> Model:
    """Return the model of a Hugging Face folder."""
    return fake("safetensors", {}, folder)


def without_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Take the verbatim tokenizer.json away, so that the vocabulary itself has to do."""
    return {key: value for key, value in metadata.items() if "huggingface" not in key}


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """Write keys with the gguf package's own writer; Typed types are given as they are."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        name = value.type if isinstance(value, TypedValue) else ""
        plain = value.value if isinstance(value, TypedValue) else value
        if name.startswith("array:") or isinstance(plain, list):
            writer.add_array(key, plain)
        elif isinstance(plain, bool):
            writer.add_bool(key, plain)
        elif isinstance(plain, int):
            writer.add_uint32(key, plain)
        else:
            writer.add_string(key, plain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of the folder's tokenizer.json."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    return dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]


def added_ids(folder: Path) -> dict[str, int]:
    """Return text -> id of the folder's added tokens."""
    rows = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {row["content"]: row["id"] for row in rows}


def gguf_vocabulary(folder: Path, pre: str, **more: Any) -> dict[str, Any]:
    """Return GGUF keys of the folder's byte-level vocabulary under another `pre` name."""
    vocab, merges = byte_level(folder)
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_bos_token": False,
        **more,
    }
