"""Seeds of the targets in `sidefiles`: small files of each kind, made by code."""

import hashlib
import io
import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.seeds import _json, _model, _texts
from tests.fuzz.sidefiles import FILES, PARTS, STAGES


def golden() -> list[bytes]:
    prompt = {
        "name": "a",
        "prompt": "b",
        "output_ids": [1, 2],
        "contains": ["c"],
        "smallest_lead": 0.5,
        "max_tokens": 4,
    }
    chat = {
        "name": "b",
        "messages": [{"role": "user", "content": "x"}],
        "parses": "python",
        "defines": ["f"],
        "output_text": "y",
        "prompt_ids": [3],
    }
    text = {"name": "t", "text": "abc", "ids": [1, 2], "nats_per_token": 2.5, "tolerance": 0.1}
    return [
        _json({"format": 1, "greedy": [prompt, chat], "losses": [text]}),
        _json({"greedy": [{"name": "a", "prompt": "b", "contains": "c"}]}),
    ]


def baseline() -> list[bytes]:
    measure = {"value": 1.5, "unit": "bits", "tolerance": 0.01, "kind": "relative", "reason": "x"}
    gates = {
        "loss": {
            "outcome": "PASS",
            "measures": {"bpb": measure, "odd": {**measure, "value": None}},
        },
        "greedy": {"outcome": "NOT_RUN", "measures": {}},
    }
    return [_json({"format": 1, "model": "m", "ran": "numpy:cpu:float32", "gates": gates})]


def calibration() -> list[bytes]:
    row = {
        "pair": ["numpy", "torch"],
        "weights": "exact",
        "point": "q",
        "dtype": "float32",
        "rel_l2": 1e-7,
        "max_over_rms": 1e-6,
        "largest": 1e-8,
        "runs": 3,
        "evidence": "5 times the largest",
    }
    return [_json({"schema": "aprfmt.thresholds/1", "rows": [row], "beyond": [], "repeats": 3})]


def manifest() -> list[bytes]:
    tensor = {
        "key": "a",
        "names": ["a"],
        "encoding": "F32",
        "shape": [1],
        "raw": ["0"],
        "decoded": "1",
    }
    files = [
        {"name": "m.gguf", "size": 3, "sha256": "0", "outside": "1"},
        {"name": "config.json", "size": 2, "sha256": "0"},
    ]
    other = {**tensor, "key": "b", "decoded": None, "undecodable": "x"}
    found = {
        "schema": "aprfmt.hash-manifest/1",
        "format": "gguf",
        "files": files,
        "tensors": [tensor, other],
    }
    return [_json(found), _json({**found, "format": "apr", "files": []})]


_ROW = "     [      0.5000,      -0.2500,       0.1250,       1.0000  ],\n"


def eval_text() -> list[bytes]:
    """Return printed nodes of a llama with four columns, one with a head, and a long axis."""
    lines = ["number of input tokens = 2", "  1", "  2"]
    nodes = [
        ("embd", "GET_ROWS", "token_embd.weight{4, 3, 1, 1}, inp_tokens{2, 1, 1, 1}"),
        ("attn_norm-0", "MUL", "norm-0{4, 2, 1, 1}, blk.0.attn_norm.weight{4, 1, 1, 1}"),
        ("Qcur-0", "MUL_MAT", "blk.0.attn_q.weight{4, 4, 1, 1}, attn_norm-0{4, 2, 1, 1}"),
        ("l_out-0", "ADD", "ffn_out-0{4, 2, 1, 1}, ffn_inp-0{4, 2, 1, 1}"),
    ]
    for name, op, sources in nodes:
        head = f"common_debug_cb_eval: {name:>24} = (f32) {op:>10}({sources}}}) = {{4, 2, 1, 1}}\n"
        lines.append(head + " [\n  [\n" + _ROW * 2 + "  ],\n ]\n sum = 2.750000")
    wide = "common_debug_cb_eval: kq-0 = (f32) MUL_MAT(cache_k_l0{2, 8, 1, 1}, Qcur-0{2, 2, 2, 1}"
    wide += "}) = {8, 2, 2, 1}\n [\n"
    row = "   [ 0.1000, 0.2000, 0.3000, ..., 0.6000, nan, -inf ],\n"
    text = "\n".join(lines)
    return [text.encode(), f"{text}\n0.00.1.2 I {wide}{row * 4} ]\n sum = nan\n".encode()]


def companions() -> list[bytes]:
    """Return tokenizer_config.json and its like as one text each, with what each may hold."""
    first: dict[str, Any] = {
        "tokenizer_config.json": {
            "bos_token": "<s>", "add_bos_token": True, "chat_template": "{{ messages }}",
            "added_tokens_decoder": {"4": {"content": "<x>", "special": True, "lstrip": False}},
            "additional_special_tokens": ["<y>", {"content": "<z>"}],
        },
        "special_tokens_map.json": {"eos_token": {"content": "b"}, "pad_token": "a"},
        "generation_config.json": {"eos_token_id": [1, 3], "bos_token_id": 3},
        "chat_template.json": {"chat_template": "{{ 1 }}"},
        "added_tokens.json": {"<q>": 9},
        "config.json": {"model_type": "llama", "vocab_size": 8, "eos_token_id": 3,
                        "text_config": {"bos_token_id": 1}},
        "chat_template.jinja": None,
    }  # fmt: skip
    second = {
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "x"}], "extra_special_tokens":
            {"image": "<i>"}, "eos_token": {"content": "<s>"}, "model_max_length": 1e30,
        },
        "config.json": {"model_type": "llama", "eos_token_id": [3, 4]},
    }  # fmt: skip
    return [
        PARTS.join(b"" if one.get(name) is None else _json(one[name]) for name in FILES)
        for one in (first, second)
    ]


def carried() -> list[bytes]:
    files = {
        "tokenizer_config.json": '{"bos_token":"<s>"}',
        "chat_template.jinja": "{{ 1 }}",
        "generation_config.json": '{"eos_token_id":3}',
        "config.json": '{"vocab_size":4}',
    }
    return [
        _json({
            "aprfmt.files": json.dumps(files), "aprfmt.hf_config": '{"vocab_size":8}',
            "tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ messages }}", "general.architecture": "llama",
        }),
        _json({"tokenizer.ggml.model": "gpt2",
               "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
               "tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.merges": ["a b"]}),
    ]  # fmt: skip


def packed() -> list[bytes]:
    """Return one weight of each dialect, and one of bitsandbytes with its companions."""
    from aprfmt.codecs import codec

    raw = codec("NF4").encode(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    shapes = {"": (32, 1), "absmax": (1,), "quant_map": (16,)}
    parts: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for suffix, data in raw.items():
        kind = "F32" if suffix in ("absmax", "quant_map") else "U8"
        name = f"w.weight{'.' * bool(suffix)}{suffix}"
        parts[name] = (kind, shapes.get(suffix, (len(data),)), bytes(data))
    found = [_tensors({}, parts)]
    for section, tensors in _DIALECTS:
        made = {
            name: (kind, shape, _PLAIN.get(name) or bytes(i * 37 % 251 for i in range(size)))
            for name, (kind, shape, size) in tensors.items()
        }
        found.append(_tensors({"quantization_config": section}, made))
    return found


_PLAIN = {"w.g_idx": bytes(32), "w.weight_shape": struct.pack("<qq", 2, 8)}
_GPTQ = {"w.qweight": ("I32", (1, 8), 32), "w.qzeros": ("I32", (1, 1), 4),
         "w.scales": ("F16", (1, 8), 16), "w.g_idx": ("I32", (8,), 32)}  # fmt: skip
_WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 4, "type": "int"}
_GROUPS = {"group_0": {"weights": _WEIGHTS, "targets": ["Linear"]}}
_DIALECTS: list[tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], int]]]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": -1}, _GPTQ),
    ({"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"},
     {"w.qweight": ("I32", (8, 1), 32), "w.qzeros": ("I32", (1, 1), 4),
      "w.scales": ("F16", (1, 8), 16)}),
    ({"quant_method": "fp8", "weight_block_size": [2, 2]},
     {"w.weight": ("F8_E4M3", (2, 4), 8), "w.weight_scale_inv": ("F32", (1, 2), 8)}),
    ({"quant_method": "mxfp4"},
     {"w_blocks": ("U8", (1, 2, 1, 16), 32), "w_scales": ("U8", (1, 2, 1), 2)}),
    ({"bits": 4, "group_size": 32},
     {"w.weight": ("U32", (1, 4), 16), "w.scales": ("F16", (1, 1), 2),
      "w.biases": ("F16", (1, 1), 2)}),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS},
     {"w.weight_packed": ("I32", (2, 1), 8), "w.weight_scale": ("F32", (2, 2), 16),
      "w.weight_shape": ("I64", (2,), 16)}),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
      "config_groups": _GROUPS},
     {"w.weight_packed": ("U8", (1, 8), 8), "w.weight_scale": ("F8_E4M3", (1, 1), 1),
      "w.weight_global_scale": ("F32", (1,), 4)}),
    ({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": _GROUPS},
     {"w.weight": ("I8", (2, 4), 8), "w.weight_scale": ("F32", (2, 1), 8)}),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["re:(a|b)*c$"],
      "config_groups": {"a": {"weights": _WEIGHTS, "targets": ["Linear"], "format": "dense"},
                        "b": {"weights": _WEIGHTS, "targets": ["re:.*w$"],
                              "format": "int-quantized"}}},
     {"w.weight": ("I8", (2, 4), 8), "w.weight_scale": ("F32", (2, 1), 8)}),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["v*"],
      "quantized_layers": {"w": {"quant_algo": "NVFP4", "group_size": 16}}},
     {"w.weight": ("U8", (2, 8), 16), "w.weight_scale": ("F8_E4M3", (2, 1), 2),
      "w.weight_scale_2": ("F32", (), 4)}),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
     {"w": ("U8", (2, 8, 3), 48), "w_weight_scale": ("F8_E4M3", (2, 1, 3), 6),
      "w_weight_scale_2": ("F32", (2,), 8)}),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]},
     {"w": ("F8_E4M3", (2, 1, 2), 4), "w_scale_inv": ("F32", (2, 1, 1), 8),
      "v.weight": ("I8", (2, 16), 32), "v.scale": ("F8_E8M0", (2, 1), 2)}),
    ({"quant_method": "torchao", "tensors": {"w.weight": {"_type": "NVFP4Tensor", "_data": {
        "block_size": 16, "is_swizzled_scales": True}}}},
     {"w._weight_qdata": ("U8", (2, 8), 16), "w._weight_scale": ("F8_E4M3", (32, 16), 512)}),
    ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
      "group_size": -1, "extra_config": {"v.*": {"bits": 16}}}, _GPTQ),
]  # fmt: skip


def _tensors(config: dict[str, Any], parts: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"config": json.dumps(config)}}
    data = b""
    for name, (kind, shape, raw) in parts.items():
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = _json(header)
    return len(text).to_bytes(8, "little") + text + data


def validation() -> list[bytes]:
    """Return whole models with a vocabulary, claims and a template."""
    from tests.formats.gguf_files import ARR, BOOL, F32, I32, STR, U32

    def more(file: Any) -> None:
        file.key("general.file_type", U32, 0).key("tokenizer.ggml.model", STR, "llama")
        _texts(file, "tokens", ["<unk>", "\u2581", "a"])
        file.raw_key("tokenizer.ggml.token_type", ARR, file.array(I32, [2, 1, 1]))
        file.raw_key("tokenizer.ggml.scores", ARR, file.array(F32, [0, -3, -2]))
        file.key("tokenizer.ggml.bos_token_id", U32, 1)
        file.key("tokenizer.ggml.add_bos_token", BOOL, 1)
        file.key("tokenizer.chat_template", STR, "{{ messages }}")

    return [_model("llama", more), _model("gemma"), _model("qwen2", more)]


_SMALL = np.linspace(-1, 1, 256, dtype=np.float32).tobytes()


@cache
def _bundles() -> tuple[bytes, ...]:
    """Cut a norm and a product out of a model of four columns, as parity does."""
    from aprfmt.formats.gguf.reader import open_buffer
    from aprfmt.inference.device import parse_run
    from aprfmt.inference.parity.bundle import ReproductionBundle, save_bundle
    from aprfmt.inference.parity.cell import cut_cell
    from aprfmt.inference.session import Session
    from aprfmt.inference.trace import KeptValues
    from aprfmt.model import Model

    found = []
    numpy = parse_run("numpy").open()
    with Model(open_buffer(_model("llama", data=_SMALL), Path("fuzz.gguf")), None) as model:
        with Session.open(model, numpy) as session:
            kept = KeptValues()
            trace = session.trace(
                [1, 2], list(session.points), keep=kept.keep, fetch=kept.fetch, logits_rows="all"
            )
        for key in ("L0.attn_norm", "logits"):
            cell = cut_cell(model, key, [1, 2], trace.recorded_values, numpy)
            value = cell.run(numpy)
            made = ReproductionBundle(
                cell, value, value, ("numpy", "numpy"), 0.0, 1e-6, False, {"model": "x"}
            )
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "x.safetensors")
                save_bundle(path, made, ["aprfmt"])
                found.append(path.read_bytes())
    return tuple(found)


def bundle() -> list[bytes]:
    return list(_bundles())


def stages() -> list[bytes]:
    """Return variants of the file beside the stages: right, unknown positions, another file's."""
    shapes = dict(zip(STAGES, ([2, 3], [1, 2]), strict=True))
    files: dict[str, Any] = {
        name: {
            "sha256": hashlib.sha256(raw).hexdigest(),
            "shape": shapes[name],
            "positions": list(range(shapes[name][0])),
            "dtype": "float32",
            "form": "stepped",
            "device": "cpu",
        }
        for name, raw in STAGES.items()
    }
    run = {"ids": [1, 2], "model": "m.gguf", "backend": {"backend": "numpy", "tf32": False}}
    bare = {name: {**row, "positions": None, "form": None} for name, row in files.items()}
    other = {name: {**row, "sha256": "0" * 64} for name, row in files.items()}
    return [
        _json({"schema": 1, "run": run, "files": files}),
        _json({"schema": 1, "run": {}, "files": bare}),
        _json({"schema": 1, "run": {"ids": None}, "files": other}),
    ]


def npy() -> list[bytes]:
    found = []
    for ids in (np.arange(3), np.arange(4, dtype=">u2").reshape(1, 4), np.int32(7)):
        buffer = io.BytesIO()
        np.save(buffer, ids)
        found.append(buffer.getvalue())
    return found
