"""Small inputs that fuzzing starts from, made by code; all of them valid unless a table says so."""

import json
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tests.formats.gguf_files import ARR, BOOL, DATA, F32, I32, STR, U32, File

LONGEST = 2000  # bytes: larger ones only slow the engine down


def _short(cases: Iterable[Any]) -> list[bytes]:
    return [case.data for case in cases if len(case.data) < LONGEST]


def gguf() -> list[bytes]:
    """Return the tables of legal, odd and malformed files, and files with one of everything."""
    from tests.formats.gguf.test_gguf_fuzz import seed
    from tests.formats.gguf_cases import LEGAL, MALFORMED, WARNED

    return [seed("<"), seed(">"), *_short((*LEGAL, *WARNED, *MALFORMED))]


def apr() -> list[bytes]:
    from tests.formats.apr_cases import LEGAL, MALFORMED, WARNED

    return _short((*LEGAL, *WARNED, *MALFORMED))


def safetensors() -> list[bytes]:
    from tests.formats.safetensors_cases import LEGAL, MALFORMED

    return _short((*LEGAL, *MALFORMED))


def pytorch() -> list[bytes]:
    """Return a sound file of torch.save, and archives of all small hostile pickles."""
    from tests.formats.hostile_pickles import PICKLES, SOUND, archived

    made = [archived(SOUND), *(archived(body) for body, _ in PICKLES.values())]
    return [data for data in made if len(data) < LONGEST]


def index() -> list[bytes]:
    return [
        b'{"metadata":{"total_size":16},"weight_map":{"a":"m-00001-of-00002.safetensors",'
        b'"b":"m-00002-of-00002.safetensors"}}',
        b'{"version":"2.0","shard_count":1,"total_size":9,"tensor_count":1,"shards":[{"filename":'
        b'"m-00000-of-00001.apr","index":0,"size":9,"tensors":["a"]}],"weight_map":{"a":0}}',
        b'{"weight_map":{"a":"../../etc/passwd"}}',
        b'{"weight_map":{"a":"sub/\\u00e9.safetensors","b":"CON","c":"x:y"}}',
    ]


def config() -> list[bytes]:
    """Return a config.json of every architecture and variant."""
    from aprfmt.arch import ARCHS
    from tests.models import MAKERS, VARIANTS

    rows = [(arch, dict(values)) for arch, (_, values) in MAKERS.items()]
    rows += [(arch, {**MAKERS[arch][1], **changed}) for arch, changed in VARIANTS.values()]
    return [_json({"model_type": ARCHS[arch].called["hf"][0], **row}) for arch, row in rows]


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def tokenizer() -> list[bytes]:
    """Return a byte-level BPE, a SentencePiece-like one, and the other models of the library."""
    from tests.tokenizer.test_hostile import JSON

    blank: dict[str, Any] = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "byte_fallback": True,
            "vocab": {"<unk>": 0, "_": 1, "a": 2, "_a": 3}, "merges": ["_ a"],
        },
    }  # fmt: skip
    unigram = {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["a", -1.5]]}}
    words = {"model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "a": 1}}}
    split: dict[str, Any] = {
        **JSON,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": "\\p{N}{1,3}|[^\\s]+|\\s"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
    }
    return [_json(one) for one in (JSON, blank, unigram, words, split)]


def vocabulary() -> list[bytes]:
    """Return GGUF files that hold little more than a vocabulary."""
    bpe = File().key("general.architecture", STR, "llama")
    bpe.key("tokenizer.ggml.model", STR, "gpt2").key("tokenizer.ggml.pre", STR, "gpt-2")
    _texts(bpe, "tokens", ["a", "b", "ab", "<s>"])
    bpe.raw_key("tokenizer.ggml.token_type", ARR, bpe.array(I32, [1, 1, 1, 3]))
    _texts(bpe, "merges", ["a b"])
    bpe.key("tokenizer.ggml.bos_token_id", U32, 3).key("tokenizer.ggml.add_bos_token", BOOL, 1)
    bpe.key("tokenizer.chat_template", STR, "{{ messages[0].content }}")
    spm = File().key("general.architecture", STR, "gemma3")
    spm.key("tokenizer.ggml.model", STR, "llama")
    _texts(spm, "tokens", ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a", "<0x0A>"])
    spm.raw_key("tokenizer.ggml.token_type", ARR, spm.array(I32, [2, 3, 3, 1, 1, 1, 6]))
    spm.raw_key("tokenizer.ggml.scores", ARR, spm.array(F32, [0, 0, 0, -3, -2, -1, 0]))
    return [bpe.build(), spm.build()]


def _texts(file: File, name: str, values: list[str]) -> None:
    file.raw_key(f"tokenizer.ggml.{name}", ARR, file.array(STR, values))


def imatrix() -> list[bytes]:
    """Return the old container with and without its tail, and the GGUF one."""
    old = struct.pack("<i", 2)
    for name in (b"blk.0.attn_q.weight", b"blk.0.ffn_up.weight"):
        old += struct.pack("<i", len(name)) + name + struct.pack("<ii4f", 7, 4, 1, 2, 3, 4)
    new = File(data=DATA[4:36]).key("general.type", STR, "imatrix")
    new.raw_key("imatrix.datasets", ARR, new.array(STR, ["calib.txt"]))
    new.key("imatrix.chunk_count", U32, 3)
    new.tensor("blk.0.attn_q.weight.in_sum2", [2]).tensor("blk.0.attn_q.weight.counts", [1], 0, 32)
    new.data = struct.pack("<2f24xf28x", 3, 4, 2)
    return [old, old + struct.pack("<ii", 100, 5) + b"calib", new.build()]


def trace() -> list[bytes]:
    """Return saved traces with and without values."""
    from aprfmt.inference.trace import SCHEMA
    from aprfmt.tensors.stats import compute_stats
    from tests.formats.safetensors_cases import entry, file

    stats = compute_stats(np.arange(4, dtype=np.float32)).to_json()
    rows = [
        {
            "key": key,
            "point": key.partition(".")[2] or key,
            "layer": None,
            "shape": [4],
            "count": 4,
            "positions": [0],
            "dtype": "float32",
            "form": "fused",
            "device": "cpu",
            "stats": stats,
            "sha256": "0" * 64,
        }
        for key in ("L0.attn_out", "logits")
    ]
    header = {
        "schema": SCHEMA,
        "run": {"ids": [1]},
        "records": rows,
        "aliases": {"x": "logits"},
        "nonfinite": None,
    }
    text = json.dumps(header, separators=(",", ":"))
    meta = {"__metadata__": {"aprfmt.trace": text}}
    return [file(meta), file({**meta, "logits": entry()}, DATA[:16])]


def aprt() -> list[bytes]:
    return [struct.pack("<4sII2f", b"APRT", 3, 2, 1.0, -2.0), struct.pack("<4sII", b"APRT", 3, 0)]


def npz() -> list[bytes]:
    """Return archives of numpy's own making, stored and deflated, and one with an odd header."""
    import io

    found = []
    for save in (np.savez, np.savez_compressed):
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            "input_ids": np.arange(3),
            "model.layers.0": np.ones((1, 3, 2), np.float32),
            "turned": np.asfortranarray(np.ones((2, 3), np.float16)),
            "__order__": np.array(["model.layers.0"]),
        }
        save(buffer, **arrays)
        found.append(buffer.getvalue())
    buffer = io.BytesIO()
    np.savez(buffer, objects=np.array([{}, None]), allow_pickle=True)
    return [*found, buffer.getvalue()]


def model() -> list[bytes]:
    """Return GGUF files of a whole llama and a whole qwen2 with four columns."""
    return [_model("llama"), _model("qwen2")]


def _model(arch: str, more: Callable[[File], object] = bool, data: bytes = DATA) -> bytes:
    file = File().key("general.architecture", STR, arch)
    sizes = {
        "block_count": 1,
        "context_length": 8,
        "embedding_length": 4,
        "feed_forward_length": 4,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    for key, size in sizes.items():
        file.key(f"{arch}.{key}", U32, size)
    file.key(f"{arch}.attention.layer_norm_rms_epsilon", F32, 1e-5)
    shapes = {
        "token_embd": [4, 3], "output_norm": [4], "blk.0.attn_norm": [4], "blk.0.attn_q": [4, 4],
        "blk.0.attn_k": [4, 2], "blk.0.attn_v": [4, 2], "blk.0.attn_output": [4, 4],
        "blk.0.ffn_norm": [4], "blk.0.ffn_gate": [4, 4], "blk.0.ffn_up": [4, 4],
        "blk.0.ffn_down": [4, 4],
    }  # fmt: skip
    more(file)
    at = 0
    for name, dims in shapes.items():
        file.tensor(f"{name}.weight", dims, "F32", at)
        at += -(-4 * dims[0] * (dims[1] if len(dims) > 1 else 1) // 32) * 32
    file.data = data[:at]
    return file.build()


def resume() -> list[bytes]:
    head = (
        b'{"schema":"aprfmt.resume/1","sources":{"m.gguf":"1:2:3:4 5"},"plan":"0a","run":"0",'
        b'"signature":"0"}\n'
    )
    tensor = b'{"tensor":"t","crc":7,"counts":[0,0,0]}\n'
    return [head, head + tensor, head + tensor + b'{"moves":[["","m.gguf","1:2:3:4"]]}\n']


def patch() -> list[bytes]:
    import hashlib

    digest = hashlib.sha256(b"ab").hexdigest()
    head = '{"schema":"aprfmt.patch/1","file":"1:2:3","pieces":[[5,1],[9,1]],"sha256":"%s"}\n'
    return [(head % digest).encode() + b"ab", (head % "").encode() + b"ab"]


def journal() -> list[bytes]:
    from aprfmt.formats.journal import Journal
    from aprfmt.formats.temporary_files import temporary_name

    made = Journal("x", [(temporary_name("m.gguf"), "m.gguf")], ["old.gguf"], {"old.gguf": "1:2:3"})
    planted = made.dumps().replace(b'"signature":"', b'"signature":"0')
    return [planted, b'{"schema":"aprfmt.journal/1","moves":[],"removes":["../x"]}']
