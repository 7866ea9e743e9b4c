"""Small Hugging Face folders made without any library under test."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

SIZES = {"BF16": 2, "F16": 2, "F32": 4}


def llama_folder(
    folder: Path,
    encoding: str,
    *,
    hidden: int = 64,
    layers: int = 2,
    ffn: int = 0,
    vocab: int = 33,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    seed: int = 0,
    replaced: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a llama folder with random bits of moderate size; `replaced` sets raw bytes by name."""
    rng = np.random.default_rng(seed)
    ffn = ffn or hidden
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            shapes[at + f"self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[at + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, ffn)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    data = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        data[name] = float_bytes(values, encoding)
    data.update(replaced or {})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "head_dim": hidden // heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "hidden_act": "silu", "tie_word_embeddings": tied, "attention_bias": False,
        "mlp_bias": False, "rope_scaling": None,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_safetensors(folder / "model.safetensors", shapes, data, encoding)
    return folder


def float_bytes(
    values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", encoding: str
) -> bytes:
    """Return float32 values in a plain encoding; BF16 by truncation, which random data may have."""
    if encoding == "F32":
        return values.astype("<f4").tobytes()
    if encoding == "F16":
        return values.astype("<f2").tobytes()
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], data: Mapping[str, bytes], encoding: str
) -> None:
    """Write a safetensors file of one encoding by hand."""
    write_mixed(path, {name: (encoding, shape, data[name]) for name, shape in shapes.items()})


def write_mixed(
    path: Path,
    rows: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write {name: (dtype, shape, bytes)} by hand: length, header padded to 8, data by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    at = 0
    for name in sorted(rows):
        dtype, shape, raw = rows[name]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(rows[name][2] for name in sorted(rows))
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return {name: (dtype, shape, bytes)} of a folder's safetensors files, parsed by hand."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        for name, row in header.items():
            if name != "__metadata__":
                start, stop = row["data_offsets"]
                body = raw[8 + length + start : 8 + length + stop]
                found[name] = (row["dtype"], tuple(row["shape"]), body)
    return found
