"""Tiny encoders by transformers, and what it computes of them under our keys, in float64.

Sizes are odd, weights large enough that a wrong mask, row, bias or norm shows. The embedding is
what sentence-transformers makes of the last rows: mean, first or last.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.drawn import fill
from tests.inference.judge import everything_float64

Found = dict[str, np.ndarray]
# No padding id of any of them (0 and 1) is among these.
IDS = (3, 17, 55, 5, 5, 41, 8, 37, 2, 50, 31, 12, 48, 19, 4, 33, 20, 9, 46, 21, 35, 40, 11)
_SIZES: Mapping[str, Any] = {
    "hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 50,
    "vocab_size": 57, "max_position_embeddings": 61, "layer_norm_eps": 3e-4,
}  # fmt: skip
_TYPED = {**_SIZES, "type_vocab_size": 3}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
_WINDOWED = {k: v for k, v in _SIZES.items() if k != "layer_norm_eps"} | {
    "norm_eps": 3e-4, "local_attention": 10, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 9000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}  # fmt: skip
# name -> (model type, configuration, how its rows are pooled)
ENCODERS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "bert": ("bert", _TYPED, "mean"),
    "bert-relu": ("bert", {**_TYPED, "hidden_act": "relu"}, "cls"),
    "roberta": ("roberta", {**_TYPED, "pad_token_id": 1}, "cls"),
    "xlm-roberta": ("xlm-roberta", {**_TYPED, "pad_token_id": 1, "type_vocab_size": 1}, "mean"),
    "distilbert": ("distilbert", {
        "dim": 36, "n_layers": 4, "n_heads": 3, "hidden_dim": 50, "vocab_size": 57,
        "max_position_embeddings": 61,
    }, "mean"),
    "mpnet": ("mpnet", _SIZES, "mean"),
    "nomic_bert": ("nomic_bert", {**_TYPED, **_ROPE}, "mean"),
    "modernbert": ("modernbert", _WINDOWED, "cls"),
    "jina_embeddings_v3": ("jina_embeddings_v3", {**_TYPED, **_ROPE}, "mean"),
}  # fmt: skip
_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-encoders-")
# Path below a layer -> (points of its output, point of its input), by transformers' modules.
_MODULES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "attention.self.query": (("q",), ""), "attention.self.key": (("k",), ""),
    "attention.self.value": (("v",), ""), "attention.output.dense": (("attn_out",), "attn"),
    "attention.output.LayerNorm": (("mid",), "attn_sum"),
    "intermediate": (("ffn_act",), ""), "intermediate.dense": (("ffn_up",), ""),
    "output.dense": (("ffn_out",), "ffn_act"), "output.LayerNorm": (("out",), "ffn_sum"),
    "attention.q_lin": (("q",), ""), "attention.k_lin": (("k",), ""),
    "attention.v_lin": (("v",), ""), "attention.out_lin": (("attn_out",), "attn"),
    "sa_layer_norm": (("mid",), "attn_sum"), "ffn.lin1": (("ffn_up",), ""),
    "ffn.lin2": (("ffn_out",), "ffn_act"), "output_layer_norm": (("out",), "ffn_sum"),
    "attention.attn.q": (("q",), ""), "attention.attn.k": (("k",), ""),
    "attention.attn.v": (("v",), ""), "attention.attn.o": (("attn_out",), "attn"),
    "attention.LayerNorm": (("mid",), "attn_sum"),
    "self_attn.q_proj": (("q",), ""), "self_attn.k_proj": (("k",), ""),
    "self_attn.v_proj": (("v",), ""), "self_attn.o_proj": (("attn_out",), "attn"),
    "post_attention_layernorm": (("mid",), "attn_sum"), "mlp.fc1": (("ffn_up",), ""),
    "mlp.fc2": (("ffn_out",), "ffn_act"), "mlp.up_proj": (("ffn_up",), ""),
    "mlp.gate_proj": (("ffn_gate",), ""), "mlp.down_proj": (("ffn_out",), "ffn_mul"),
    "post_mlp_layernorm": (("out",), "ffn_sum"),
    "attn.Wqkv": (("q", "k", "v"), ""), "attn.Wo": (("attn_out",), "attn"),
    "mlp_norm": (("ffn_norm",), "mid"), "mlp.Wi": (("ffn_gate", "ffn_up"), ""),
    "mlp.Wo": (("ffn_out",), "ffn_mul"), "mlp.act": (("ffn_act",), ""), "": (("out",), "in"),
}  # fmt: skip
_WHOLE = {
    "embeddings.word_embeddings": ("embd", ""), "embeddings.tok_embeddings": ("embd", ""),
    "embeddings.LayerNorm": ("embd_norm", "embd_scaled"), "embeddings.norm": ("embd_norm", "embd"),
    "final_norm": ("final_norm", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Encoded:
    """A tiny encoder's folder, its intermediates in float64, its last rows and its embedding."""

    folder: Path
    found: Found
    rows: np.ndarray
    embedding: np.ndarray


def _model(name: str, **changed: Any) -> Any:
    """Return a tiny encoder by transformers."""
    import transformers

    auto: Any = transformers
    kind, values, _ = ENCODERS[name]
    config = auto.AutoConfig.for_model(kind, **deepcopy({**values, **changed}))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = auto.AutoModel.from_config(config)
    fill(model, 1)
    return model.eval()


def made(name: str, folder: Path, ids: tuple[int, ...] = IDS, **changed: Any) -> np.ndarray:
    """Save a tiny encoder with changed options; return a text's embedding in float64."""
    model, pooling = _model(name, **changed), ENCODERS[name][2]
    model.save_pretrained(folder)
    write_pooling(folder, pooling)
    with torch.no_grad(), everything_float64(model.double()):
        return pooled(model(torch.tensor([ids])).last_hidden_state[0].numpy(), pooling)


@cache
def encoded(name: str) -> Encoded:
    """Make a tiny encoder, save it with its pooling file, and run it."""
    model, pooling = _model(name), ENCODERS[name][2]
    folder = Path(_FOLDER.name) / name
    model.save_pretrained(folder)
    write_pooling(folder, pooling)
    found: Found = {}
    handles = [
        module.register_forward_hook(_hook(path, found))
        for path, module in model.double().named_modules()
    ]
    with torch.no_grad(), everything_float64(model):
        rows = model(torch.tensor([IDS])).last_hidden_state[0].numpy()
    for handle in handles:
        handle.remove()
    return Encoded(folder, found, rows, pooled(rows, pooling))


def write_pooling(folder: Path, kind: str) -> None:
    """Write the file in which sentence-transformers keeps how it pools."""
    keys = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    stated = {f"pooling_mode_{key}": kind == word for word, key in keys.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    text = json.dumps({"word_embedding_dimension": 36, **stated})
    (folder / "1_Pooling" / "config.json").write_text(text)


def pooled(rows: np.ndarray, kind: str) -> np.ndarray:
    """Return the embedding of rows without padding."""
    found: np.ndarray = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[kind]
    return found


def _hook(path: str, found: Found) -> Callable[..., None]:
    prefix, _, rest = path.rpartition("layer." if "layer." in path else "layers.")
    layer, _, below = rest.partition(".")
    inside = prefix != "" or path.startswith("layers.")

    def keep(key: str, x: Any) -> None:
        found[key] = x.detach().numpy()[0]

    def hook(module: Any, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out
        if path in _WHOLE:
            point, before = _WHOLE[path]
            keep(point, first)
            if before:
                keep(before, args[0])
        if not inside or below not in _MODULES:
            return
        points, before = _MODULES[below]
        for point, part in zip(points, first.chunk(len(points), -1), strict=True):
            keep(f"L{layer}.{point}", part)
        if before:
            keep(f"L{layer}.{before}", args[0])

    return hook
