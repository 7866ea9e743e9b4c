"""Models in which every string is hostile: escapes, bidirectional controls, markup, line breaks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import TensorInfo, TypedValue
from aprfmt.formats import open_sink
from tests.conversion.folders import llama_folder

# Clears the screen, sets a title, ends with BEL and ST, turns the direction, hides, recolours by
# C1, begins a line of its own, and is a script where markup is read.
NASTY = (
    "\x1b[2J\x1b]0;t\x07\x1b\\\u202e\u2066\u200b\x9b31m\x85\u2028\r\nPLANTED: all is well\n"
    "\x00\x7f\ufeff<script>alert(1)</script><img src=x onerror=alert(1)>'\"&`"
)
PLANTED = "PLANTED"
BYTES = "\udcff\udc9b"  # bytes that are no UTF-8, as GGUF values keep them
HALF = "\ud800"  # half of a pair, as JSON can escape it
TEMPLATE = "{{ '" + NASTY.replace("'", "").replace("\x00", "") + "' }}{{ messages[0].content }}"
NAME = f"n\x1b[2J\u202e\x9b\n{PLANTED}"  # a tensor's; short enough for every format
FILE = "f\x1b[2J\u202e\n<img src=x>"  # a file's


def folder(root: Path) -> Path:
    """Write a Hugging Face folder: config, tokenizer, template and metadata all say NASTY."""
    made = llama_folder(root / FILE, "BF16", hidden=32, layers=1, vocab=8, heads=2, kv_heads=1)
    config = json.loads((made / "config.json").read_text())
    config |= {
        "_name_or_path": NASTY,
        NASTY: NASTY,
        "transformers_version": NASTY,
        "torch_dtype": NASTY,
        "quantized_by": [NASTY, {NASTY: NASTY}],
    }
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (made / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "bos_token": tokens()[3], NASTY: NASTY})
    )
    (made / "generation_config.json").write_text(json.dumps({NASTY: NASTY}))
    return made


def tokens() -> list[str]:
    return ["a", "b", "ab", f"<{NASTY}>", NASTY, f"x{NASTY}", "c", "d"]


def tokenizer_json() -> dict[str, Any]:
    flags = {
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
        "single_word": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [{"id": 3, "content": tokens()[3], **flags}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {text: i for i, text in enumerate(tokens()) if i != 3},
            "merges": [["a", "b"]],
        },
    }


def tensors() -> Mapping[str, TensorInfo]:
    info = TensorInfo(NAME, (8, 4), "F32", 0, 128, 16)
    return {name: TensorInfo(name, info.shape, "F32", 0, 128, 16) for name in (NAME, "plain")}


def gguf(path: Path, arch: str = "llama", damaged: bool = False) -> Path:
    """Write a GGUF: keys, values, arrays, names and vocabulary are hostile.

    `damaged` puts bytes that are no UTF-8 into template, name and vocabulary too.
    """
    bad = BYTES if damaged else ""
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": NASTY + bad,
        NASTY: NASTY,
        f"{NASTY}.list": [NASTY, NASTY],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens()[:7], f"d{bad}"],
        "tokenizer.ggml.token_type": TypedValue([1, 1, 1, 3, 1, 1, 1, 1], "array:int32"),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": TEMPLATE + bad,
        "aprfmt.hf_config": json.dumps({"model_type": arch, NASTY: NASTY}) + bad,
        "split.count": TypedValue(0, "uint16"),
        "no.utf8": f"x{BYTES}",
        "no.utf8.list": [BYTES, "y"],
    }
    return _write(path, "gguf", metadata)


def apr(path: Path, arch: str = "llama") -> Path:
    """Write an APR: every key and value is hostile."""
    metadata = {
        "model_type": NASTY,
        "architecture": arch,
        "license": NASTY,
        "name": NASTY,
        NASTY: {NASTY: [NASTY]},
        "tokenizer.vocabulary": tokens(),
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.model_type": NASTY,
        f"half{HALF}": HALF,
    }
    return _write(path, "apr", metadata)


def safetensors(path: Path) -> Path:
    return _write(path, "safetensors", {NASTY: NASTY, "format": "pt"})


def _write(path: Path, form: str, metadata: Mapping[str, Any]) -> Path:
    infos = list(tensors().values())
    with open_sink(path, form) as sink:
        infos = getattr(sink, "order", list)(infos)
        sink.plan(metadata, infos)
        for number, info in enumerate(infos):
            sink.write(info.name, [memoryview(bytes([number]) * info.nbytes)])
    return path


def index(root: Path) -> Path:
    """Write an index that names hostile files."""
    path = root / f"{FILE}.safetensors.index.json".replace("/", "")
    path.write_text(json.dumps({"weight_map": {NAME: NASTY, NASTY: f"{NASTY}.safetensors"}}))
    return path


def trace(path: Path) -> Path:
    """Write a saved trace whose run, device and aliases are hostile."""
    from aprfmt.inference.trace import SCHEMA
    from tests.fuzz import seeds

    header = json.loads(_trace_header(seeds.trace()[0]))
    assert header["schema"] == SCHEMA
    header["run"] = {"prompt": NASTY, NASTY: NASTY, "model": NASTY, "ids": [1]}
    header["aliases"] = {NASTY: NASTY}
    header["nonfinite"] = NASTY
    for row in header["records"]:
        row |= {"device": NASTY, "dtype": NASTY, "sha256": NASTY}
    with open_sink(path, "safetensors") as sink:
        sink.plan({"aprfmt.trace": json.dumps(header)}, [])
    return path


def _trace_header(data: bytes) -> str:
    size = int.from_bytes(data[:8], "little")
    text: str = json.loads(data[8 : 8 + size])["__metadata__"]["aprfmt.trace"]
    return text
