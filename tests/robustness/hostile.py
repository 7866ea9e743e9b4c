"""Hostile files and folders, and odd ones that are valid: functions that make them, by id.

A maker gets an empty folder and returns what is given to a command as its MODEL.
"""

import gzip
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.conversion.folders import llama_folder, write_mixed, write_safetensors
from tests.formats import apr_cases, gguf_cases, safetensors_cases
from tests.formats.gguf_files import ARR, DATA, STR, U32, File
from tests.formats.safetensors_cases import file

Maker = Callable[[Path], Path]

_DATA: Mapping[str, Mapping[str, bytes]] = {
    "gguf": {case.id: case.data for case in (*gguf_cases.MALFORMED, *gguf_cases.WARNED)},
    "apr": {case.id: case.data for case in (*apr_cases.MALFORMED, *apr_cases.WARNED)},
    "safetensors": {case.id: case.data for case in safetensors_cases.MALFORMED},
}


def _bytes(name: str, data: bytes) -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def _case(kind: str, id: str) -> Maker:
    return _bytes(f"{id}.{kind}", _DATA[kind][id])


def small_llama(folder: Path, **changes: Any) -> Path:
    """Write a folder of one tiny layer with a tokenizer; `changes` are keys of its config.json."""
    model = llama_folder(folder / "model", "F32", hidden=8, layers=1, vocab=5)
    config = json.loads((model / "config.json").read_text())
    for key, value in changes.items():
        config[key] = value
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return model


TOKENIZER: dict[str, Any] = {
    "version": "1.0", "added_tokens": [],
    "pre_tokenizer": {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": {"h": 0, "i": 1, "hi": 2, "a": 3, "b": 4},
              "merges": ["h i"]},
}  # fmt: skip


def _config(**changes: Any) -> Maker:
    return lambda folder: small_llama(folder, **changes)


def _text(name: str, text: str | bytes) -> Maker:
    """Replace one text file of a good folder."""

    def make(folder: Path) -> Path:
        model = small_llama(folder)
        data = text if isinstance(text, bytes) else text.encode()
        (model / name).write_bytes(data)
        return model

    return make


def index(value: Any) -> Maker:
    """Replace the weights of a good folder by an index (a JSON value, or raw text)."""

    def make(folder: Path) -> Path:
        model = small_llama(folder)
        text = value if isinstance(value, str) else json.dumps(value)
        (model / "model.safetensors.index.json").write_text(text)
        return model

    return make


def weights_in(name: object) -> Maker:
    """Return an index that says every tensor stands in the file `name`."""
    return index({"metadata": {}, "weight_map": {"a": name, "b": "model.safetensors"}})


def _shard(put: Callable[[Path], None]) -> Maker:
    """Return an index that names one more file, put there as no file should be."""

    def make(folder: Path) -> Path:
        model = weights_in("more.safetensors")(folder)
        put(model / "more.safetensors")
        return model

    return make


def _gguf(**keys: Any) -> Maker:
    """A GGUF of a llama with hostile values of metadata keys (uint32, else text)."""

    def make(folder: Path) -> Path:
        built = File(data=DATA[:128]).key("general.architecture", STR, "llama")
        for key, value in keys.items():
            name = key.replace("__", ".")
            if isinstance(value, int):
                built.key(name, U32, value)
            elif isinstance(value, list):
                built.raw_key(name, ARR, built.array(STR, value))
            else:
                built.key(name, STR, value)
        path = folder / "keys.gguf"
        path.write_bytes(built.tensor("token_embd.weight", [8, 4]).build())
        return path

    return make


class _Canary:
    """Unpickled, it would write a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch CANARY",)


def _torch_zip(folder: Path) -> Path:
    path = folder / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(_Canary()))
    return path


def _sparse(name: str, head: bytes, size: int = 8 << 30) -> Maker:
    def make(folder: Path) -> Path:
        with (folder / name).open("wb") as out:
            out.write(head)
            out.truncate(size)
        return folder / name

    return make


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "model.gguf")
    return folder / "model.gguf"


def _link(target: str) -> Maker:
    def make(folder: Path) -> Path:
        (folder / "model.gguf").symlink_to(target)
        return folder / "model.gguf"

    return make


def _folder_named(name: str) -> Maker:
    def make(folder: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    return make


def _hostile_names(folder: Path) -> Path:
    names = (
        "a\x1b[31m.weight",
        "b\u202egnp.weight",
        "c\nd",
        "e\x9b2J",
        "../../etc/passwd",
        "f\x00",
    )
    shapes: dict[str, tuple[int, ...]] = {name: (2,) for name in names}
    write_safetensors(folder / "n.safetensors", shapes, dict.fromkeys(names, bytes(8)), "F32")
    return folder / "n.safetensors"


_FAR = 2_000_000_000

# Refused by everything that opens them: exit 2, and the line says this.
REFUSED: Mapping[str, tuple[Maker, str]] = {
    "gguf_truncated": (_case("gguf", "DATA_NOT_ENOUGH_DATA"), "1 too few"),
    "gguf_counts": (_case("gguf", "HEADER_BAD_N_KV"), "the key count at offset 16"),
    "gguf_overlap": (_case("gguf", "overlap"), "overlaps"),
    "apr_header_crc": (_case("apr", "header_crc"), "header checksum"),
    "apr_count_forged": (_case("apr", "count_forged"), "900000 index entries"),
    "safetensors_deep": (_case("safetensors", "deep"), "deep"),
    "safetensors_overlap": (_case("safetensors", "overlap_amplify"), "overlaps"),
    "polyglot_zip": (_case("safetensors", "polyglot_zip"), "22 bytes follow"),
    "empty": (_bytes("x.gguf", b""), "an empty file"),
    "pickle": (_bytes("model.gguf", pickle.dumps(_Canary())), "a pickle, which runs code"),
    "pickle_protocol_0": (_bytes("x.pt", pickle.dumps(_Canary(), 0)), "a pickle, which runs code"),
    "torch_zip": (_torch_zip, "system; expected only what torch.save writes"),
    "joblib": (_bytes("x.joblib", pickle.dumps(_Canary(), 4)), "a pickle, which runs code"),
    "joblib_packed": (_bytes("x.joblib", zlib.compress(pickle.dumps(_Canary()))),
                      "(zlib); joblib files hold pickles"),
    "joblib_gzip": (_bytes("x.gz", gzip.compress(pickle.dumps(_Canary()))), "(gzip); joblib"),
    "hdf5": (_bytes("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(30)), "an HDF5 file"),
    "npy": (_bytes("x.npy", b"\x93NUMPY\1\0" + bytes(30)), "a NumPy array"),
    "lfs_pointer": (_bytes("x.gguf", b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs"),
    "html": (_bytes("x.gguf", b"<!DOCTYPE html><html>404</html>"), "a web page saved in place"),
    "fifo": (_fifo, "not a regular file"),
    "device": (_link("/dev/zero"), "not a regular file"),
    "link_loop": (_link("model.gguf"), "a loop of links"),
    "link_nowhere": (_link("gone.gguf"), "no such file"),
    "folder_as_file": (_folder_named("model.gguf"), "holds no model"),
    "missing": (lambda folder: folder / "gone.gguf", "no such file"),
    "sparse_zeros": (_sparse("x.gguf", b""), "is no file that was written"),
    "sparse_safetensors": (_sparse("x.safetensors", (1 << 33).to_bytes(8, "little") + b"{"),
                           "the format allows 100000000"),
    "config_not_json": (_text("config.json", "{"), "not JSON"),
    "config_list": (_text("config.json", "[]"), "expected an object"),
    "config_deep": (_text("config.json", "[" * 100_000), "deeper than the limit"),
    "config_not_utf8": (_text("config.json", b"\xff\xfe{}"), "not UTF-8"),
    "config_huge": (_text("config.json", b" " * (17 << 20)), "the limit is"),
    "index_fifo": (_shard(os.mkfifo), "is not a regular file"),
    "index_device": (_shard(lambda path: path.symlink_to("/dev/zero")), "is not a regular file"),
    "index_folder": (_shard(Path.mkdir), "is not a regular file"),
    "index_empty": (index({"weight_map": {}}), "has no weight_map"),
    "index_not_json": (index("{"), "not JSON"),
    "index_parent": (weights_in("../secret.safetensors"), "not a plain path"),
    "index_absolute": (weights_in("/etc/passwd"), "it leads beyond one subfolder"),
}  # fmt: skip

# Opened, or refused by some commands only: either way with a proper message.
ODD: Mapping[str, Maker] = {
    "names": _hostile_names,
    "gguf_trailing": _case("gguf", "trailing"),
    "gguf_unknown_type": _case("gguf", "type_142"),
    "layers_2e9": _config(num_hidden_layers=_FAR),
    "experts_2e9": _config(num_local_experts=_FAR, model_type="mixtral",
                           architectures=["MixtralForCausalLM"]),
    "vocab_2e9": _config(vocab_size=_FAR),
    "heads_0": _config(num_attention_heads=0),
    "heads_negative": _config(num_attention_heads=-4, num_key_value_heads=-4),
    "hidden_text": _config(hidden_size="many"),
    "rope_deep": _config(rope_scaling={"type": "yarn", "factor": {"a": [1]}}),
    "eps_null": _config(rms_norm_eps=None),
    "arch_list": _config(architectures=[[1]], model_type={"a": 1}),
    "quantization_odd": _config(quantization_config={"quant_method": "gptq", "bits": "four"}),
    "template_huge": _text("chat_template.jinja", "{{ messages }}" * 100_000),
    "template_loop": _text("chat_template.jinja", "{% for i in range(10**9) %}x{% endfor %}"),
    "template_globals": _text("chat_template.jinja", "{{ cycler.__init__.__globals__ }}"),
    "template_control": _text("chat_template.jinja", "\x1b]0;title\x07{{ messages[0].content }}"),
    "tokenizer_not_json": _text("tokenizer.json", "{"),
    "tokenizer_deep": _text("tokenizer.json", '{"a":' * 100_000),
    "tokenizer_ids": _text("tokenizer.json", json.dumps(
        {**TOKENIZER, "model": {**TOKENIZER["model"], "vocab": {"a": _FAR, "b": -1}}})),
    "tokenizer_regex": _text("tokenizer.json", json.dumps(
        {**TOKENIZER, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"},
                                        "behavior": "Isolated", "invert": False}})),
    "generation_odd": _text("generation_config.json", '{"eos_token_id": [[], "x", 1e30]}'),
    "gguf_layers_2e9": _gguf(llama__block_count=_FAR),
    "gguf_file_type": _gguf(general__file_type=4_000_000_000),
    "gguf_arch_control": _gguf(general__name="\x1b[2J\u202e"),
    "gguf_tokens": _gguf(tokenizer__ggml__model="gpt2",
                         tokenizer__ggml__tokens=["a", "\x1b[2J", "b"],
                         tokenizer__ggml__bos_token_id=_FAR),
    "gguf_hf_config": _gguf(aprfmt__hf_config="[" * 100_000),
    "gguf_files": _gguf(aprfmt__files='{"../../CANARY": "x", "config.json": "{}"}'),
}  # fmt: skip


# --- valid, and to be read ------------------------------------------------------------------


def _apr(**changes: Any) -> Maker:
    from tests.formats.apr_files import AprFile

    return _bytes("x.apr", AprFile(**changes).build())


def _many(kind: str) -> Maker:
    def make(folder: Path) -> Path:
        count = 10_000
        if kind == "safetensors":
            rows = {f"blk.{n}.w": ("F32", (1,), struct.pack("<f", n)) for n in range(count)}
            write_mixed(folder / "many.safetensors", rows)
            return folder / "many.safetensors"
        if kind == "gguf":
            built = File(alignment=4, data=bytes(4 * count)).key("general.alignment", U32, 4)
            for n in range(count):
                built.tensor(f"blk.{n}.w", [1], offset=4 * n)
            (folder / "many.gguf").write_bytes(built.build())
            return folder / "many.gguf"
        from tests.formats.apr_files import AprFile, Tensor

        tensors = [Tensor(b"blk.%05d.w" % n, (1,), data=bytes(4)) for n in range(count)]
        (folder / "many.apr").write_bytes(AprFile(tensors=tensors).build())
        return folder / "many.apr"

    return make


def _sparse_valid(folder: Path) -> Path:
    count = (8 << 30) // 4
    head = file({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}})
    return _sparse("big.safetensors", head, len(head) + 4 * count)(folder)


def _big_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of 36 MB, as the largest vocabularies have: 262k tokens, 515k merges."""
    model = small_llama(folder)
    tokens = [f"tok{n:06x}" for n in range(262_144)]
    vocab = ",\n".join(f'      "{token}": {n}' for n, token in enumerate(tokens))
    merges = ",\n".join(
        f'      [\n        "{tokens[n % 4096]}",\n        "{tokens[n % 8191]}"\n      ]'
        for n in range(515_000)
    )
    head = json.dumps({key: TOKENIZER[key] for key in ("version", "added_tokens")})[:-1]
    text = f'{head}, "model": {{"type": "BPE", "vocab": {{{vocab}}}, "merges": [{merges}]}}}}'
    (model / "tokenizer.json").write_text(text)
    return model


VALID: Mapping[str, Maker] = {
    "apr_no_tensors": _apr(tensors=()),
    "gguf_header_only": _bytes("x.gguf", File().build()),
    "safetensors_empty": _bytes("x.safetensors", file({})),
    "many_gguf": _many("gguf"),
    "many_safetensors": _many("safetensors"),
    "many_apr": _many("apr"),
    "padded_header": _bytes("x.safetensors", file("{}" + " " * 5_000_000)),
    "sparse_8_gib": _sparse_valid,
    "link_to_a_file": lambda folder: _linked(folder),
    "extension_lies": _bytes("x.safetensors", gguf_cases.LEGAL[4].data),
    "big_tokenizer": _big_tokenizer,
}


def _linked(folder: Path) -> Path:
    (folder / "blob").write_bytes(gguf_cases.LEGAL[4].data)
    (folder / "model.gguf").symlink_to("blob")
    return folder / "model.gguf"
