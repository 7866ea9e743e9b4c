"""A converter to GGUF on the gguf package alone, as llama.cpp's script does it, with its bugs.

Names by gguf's own tensor map, values by numpy, encodings by gguf's and libgguf's quantizers.
What llama.cpp's script changes in a family's weights stands in `_changed`; the arguments of
`convert` leave a step out or do it wrongly.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.diagnosis.engines import place
from tests.field.hf import base, state_of
from tests.field.row import Pair

Array = Any
# Hugging Face type -> gguf's name of it.
ARCHS: Mapping[str, str] = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3",
    "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "granite": "GRANITE",
    "phi3": "PHI3", "olmo2": "OLMO2", "qwen3_moe": "QWEN3MOE", "smollm3": "SMOLLM3",
    "starcoder2": "STARCODER2",
}  # fmt: skip
PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3")
CENTRED = ("gemma", "gemma2", "gemma3_text")
NUMPY = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0")


@dataclass(frozen=True)
class Wrong:
    """What a converter does wrongly: the defaults are right.

    `k_heads(n_heads, n_kv_heads)` is the head count of the key rows' permutation, 0 for none at
    all; `plus` what is added to norms that are stored less one. `tensors` edits or drops (None)
    values by GGUF name, `packed` encoded bytes; `keys` edits the metadata.
    """

    permute: bool = True
    permute_bias: bool = True
    k_heads: Callable[[int, int], int] = lambda heads, kv_heads: kv_heads
    plus: float = 1.0
    freqs: bool = True
    tensors: Callable[[str, Array], Array | None] = lambda name, x: x
    packed: Callable[[str, Array], Array] = lambda name, raw: raw
    keys: Callable[[dict[str, Any]], None] = lambda keys: None


def permute(x: Array, heads: int) -> Array:
    """Order rows of split halves for adjacent pairs, inside each of `heads` heads."""
    if not heads:
        return x
    return x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def converted(
    arch: str,
    name: str,
    encoding: str = "F32",
    wrong: Wrong | None = None,
    *,
    weights: str = "float32",
    edit: Callable[[Path], Path] | None = None,
    **options: Any,
) -> Callable[[], Pair]:
    """Return a maker of a folder and its GGUF; `edit` makes another folder to convert instead."""

    def make() -> Pair:
        source = base(arch, weights, **options)
        start = source if edit is None else edit(source)
        return source, convert(start, f"field-{name}.gguf", encoding, wrong or Wrong())

    return make


def convert(source: Path, name: str, encoding: str = "F32", wrong: Wrong | None = None) -> Path:
    """Write a folder as GGUF and return the file."""
    import gguf

    wrong = wrong or Wrong()
    config = json.loads((source / "config.json").read_text())
    arch = getattr(gguf.MODEL_ARCH, ARCHS[config["model_type"]])
    path = place(name)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    keys = _keys(config, gguf.MODEL_ARCH_NAMES[arch]) | tokens_of(source)
    wrong.keys(keys)
    for key, value in keys.items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for hf_name, x in _stacked(source).items():
        found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert found is not None, hf_name
        value = wrong.tensors(found, _changed(hf_name, x, config, wrong))
        if value is not None:
            _write(writer, found, value, encoding, wrong)
    factors = _rope_factors(config)
    if factors is not None and wrong.freqs:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(source: Path) -> dict[str, Array]:
    """Return float32 values by name, experts stacked as GGUF has them."""
    import torch

    found: dict[str, Array] = {}
    experts: dict[str, list[tuple[int, Array]]] = {}
    for name, value in state_of(source).items():
        x = value.to(torch.float32).numpy()
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name)
        if match:
            experts.setdefault(f"{match[1]}.{match[3]}", []).append((int(match[2]), x))
        else:
            found[name] = x
    for name, rows in experts.items():
        found[name] = np.stack([x for _, x in sorted(rows, key=lambda row: row[0])])
    return found


def _changed(name: str, x: Array, config: Mapping[str, Any], wrong: Wrong) -> Array:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if config["model_type"] in PERMUTED and wrong.permute:
        if name.endswith("q_proj.weight"):
            return permute(x, heads)
        if name.endswith("k_proj.weight"):
            return permute(x, wrong.k_heads(heads, kv_heads))
        if name.endswith("q_proj.bias") and wrong.permute_bias:
            return permute(x, heads)
        if name.endswith("k_proj.bias") and wrong.permute_bias:
            return permute(x, wrong.k_heads(heads, kv_heads))
    if config["model_type"] in CENTRED and name.endswith("norm.weight"):
        return x + np.float32(wrong.plus)
    return x


def _write(writer: Any, name: str, x: Array, encoding: str, wrong: Wrong) -> None:
    import gguf

    plain = x.ndim == 1 or "_norm" in name or "ffn_gate_inp" in name or encoding == "F32"
    if plain:
        writer.add_tensor(name, np.ascontiguousarray(x, np.float32))
        return
    kind = getattr(gguf.GGMLQuantizationType, encoding)
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if x.shape[-1] % block:  # as llama.cpp: what does not fit stays F16
        encoding, kind = "F16", gguf.GGMLQuantizationType.F16
    raw = wrong.packed(name, quantize(x, encoding))
    if encoding == "F16":
        writer.add_tensor(name, raw)
    else:
        writer.add_tensor(name, raw, raw_dtype=kind)


def quantize(x: Array, encoding: str) -> Array:
    """Return a matrix's encoded rows, by gguf's quantizer or, for K and IQ types, libgguf's."""
    import gguf

    x = np.ascontiguousarray(x, np.float32)
    kind = getattr(gguf.GGMLQuantizationType, encoding)
    if encoding == "F16":
        return x.astype(np.float16)
    if encoding == "BF16" or encoding in NUMPY:
        return gguf.quants.quantize(x, kind)
    import libgguf

    rows = x.reshape(-1, x.shape[-1])
    raw = np.frombuffer(bytes(libgguf.quantize_rows(rows, kind)), np.uint8)
    return raw.reshape(*x.shape[:-1], -1)


def _keys(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return the keys that llama.cpp's script writes for the families of ARCHS."""
    kind = config["model_type"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": hidden,
        "context_length": config["max_position_embeddings"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta") or 10000.0)),
        "vocab_size": config["vocab_size"],
    }
    if "rms_norm_eps" in config:
        found["attention.layer_norm_rms_epsilon"] = float(config["rms_norm_eps"])
    if "norm_epsilon" in config:
        found["attention.layer_norm_epsilon"] = float(config["norm_epsilon"])
    if config.get("head_dim"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    scaling = rope.get("rope_type")
    if scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling, "rope.scaling.factor": float(rope["factor"])}
    if scaling == "yarn":
        length = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = length
    found |= _family_keys(config, kind)
    return {"general.name": "tiny"} | {f"{arch}.{key}": value for key, value in found.items()}


def _family_keys(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind in ("gemma2", "gemma3_text", "phi3", "starcoder2") and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
    if kind == "gemma2":
        found["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        found["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if kind == "gemma3_text":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        found["rope.freq_base_swa"] = float(local)
    if kind == "granite":
        found |= {
            "attention.scale": float(config["attention_multiplier"]),
            "embedding_scale": float(config["embedding_multiplier"]),
            "residual_scale": float(config["residual_multiplier"]),
            "logit_scale": float(config["logits_scaling"]),
        }
    if kind == "qwen3_moe":
        found |= {
            "expert_count": config.get("num_experts") or config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if kind == "mixtral":
        found |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
    return found


def _rope_factors(config: Mapping[str, Any]) -> Array | None:
    """Return what a llama3 rope's frequencies are divided by, None for another rope."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    steps = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    length = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for frequency in rope["rope_theta"] ** -steps.astype(np.float64):
        wavelength = 2 * np.pi / frequency
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def tokens_of(source: Path) -> dict[str, Any]:
    """Return the keys of a folder's byte-level vocabulary; none without a tokenizer."""
    path = source / "tokenizer.json"
    if not path.exists():
        return {}
    read = json.loads(path.read_text())
    vocab = dict(read["model"]["vocab"])
    added = {row["content"]: row for row in read["added_tokens"]}
    vocab |= {text: row["id"] for text, row in added.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    config = json.loads((source / "config.json").read_text())
    types = [(3 if added[t]["special"] else 4) if t in added else 1 for t in tokens]
    missing = config["vocab_size"] - len(tokens)
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(missing)],
        "tokenizer.ggml.token_type": types + [5] * missing,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in read["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.add_bos_token": False,
    }
    template = source / "chat_template.jinja"
    if template.exists():
        found["tokenizer.chat_template"] = template.read_text()
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    for kind, add in (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    ):
        if isinstance(value, kind):
            add(key, value)
            return
    raise TypeError(key)


def decoded(
    arch: str, name: str, encoding: str, dtype: str = "bfloat16", **options: Any
) -> Callable[[], Pair]:
    """Return a maker of a folder and its GGUF decoded to a folder again, by gguf's decoder."""

    def make() -> Pair:
        import torch

        from tests.field import hf

        source = base(arch, "float32", **options)

        def change(state: hf.State) -> None:
            for key, value in state.items():
                if value.ndim == 2 and "norm" not in key:
                    state[key] = torch.from_numpy(there_and_back(value.numpy(), encoding))
                state[key] = state[key].to(getattr(torch, dtype))

        return source, hf.copy(source, f"field-{name}", change, config={"dtype": dtype})

    return make


def there_and_back(x: Array, encoding: str) -> Array:
    """Encode and decode a matrix."""
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, encoding)
    if x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        return x.astype(np.float16).astype(np.float32)
    return np.ascontiguousarray(gguf.quants.dequantize(quantize(x, encoding), kind), np.float32)
