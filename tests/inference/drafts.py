"""Draft heads of transformers' own modules, in float64: what ours is held to.

transformers runs none. Here a head is its decoder layer, norms and a linear layer in the order that
DeepSeek-V3's report (2.2), vLLM's deepseek_mtp.py and qwen3_next_mtp.py and llama.cpp's qwen35.cpp
give: fc(concat(norm(embedding of the next token), norm(hidden))), the layer, a norm, the head.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.drawn import fill
from tests.inference.judge import Found, everything_float64, watched
from tests.models import IDS, save_tiny

_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-drafts-")
# Where published checkpoints keep a head: its own modules, and its layer behind N others.
DEEPSEEK = {"enorm": "model.layers.{N}.enorm", "hnorm": "model.layers.{N}.hnorm",
            "fc": "model.layers.{N}.eh_proj", "norm": "model.layers.{N}.shared_head.norm",
            "layer": "model.layers.{N}", "counts": "num_nextn_predict_layers"}  # fmt: skip
QWEN = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "fc": "mtp.fc",
        "norm": "mtp.norm", "layer": "mtp.layers.0", "counts": "mtp_num_hidden_layers"}  # fmt: skip
NAMED = {
    "deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK,
    "qwen3_next": QWEN, "qwen3_5": QWEN, "qwen3_5_moe": QWEN,
}  # fmt: skip


@dataclass(frozen=True)
class Drafted:
    """A folder with a draft head, and what transformers' modules compute in float64."""

    folder: Path
    logits: np.ndarray  # of the model
    found: Found  # of the head, under our keys


def head_of(model: Any) -> Any:
    """Return a head with drawn weights, as a module whose parts are named as a model's."""
    code, config = sys.modules[type(model).__module__], model.config
    last = model.model.layers[-1]
    layers = list(model.model.layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and hasattr(last, "linear_attn"):
        last = next(layer for layer in reversed(layers) if hasattr(layer, "self_attn"))
    index = layers.index(last)
    body = torch.nn.Module()
    size, norm = config.hidden_size, type(model.model.norm)
    body.layers = torch.nn.ModuleList([type(last)(config, index)])
    body.norm = norm(size, eps=config.rms_norm_eps)
    head = type(f"{type(model).__name__}Draft", (torch.nn.Module,), {"__module__": code.__name__})()
    head.model = body
    head.enorm, head.hnorm = (norm(size, eps=config.rms_norm_eps) for _ in range(2))
    head.fc = torch.nn.Linear(2 * size, size, bias=False)
    fill(head, 7)
    head.config = config
    for module in head.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
    return head.eval()


def run(model: Any, head: Any, ids: Any) -> tuple[np.ndarray, Found]:
    """Return the model's logits and the head's points: all float64."""
    found: Found = {}
    head.lm_head = model.lm_head
    hidden = model.model(ids).last_hidden_state
    x = model.model.embed_tokens(ids[:, 1:])
    parts = head.enorm(x), head.hnorm(hidden[:, :-1])
    x = head.fc(torch.cat(parts, dim=-1))
    names = ("draft_embd_norm", "draft_hidden", "draft_hidden_norm", "draft_in")
    for name, value in zip(names, (parts[0], hidden[:, :-1], parts[1], x), strict=True):
        found[name] = value[0].numpy()
    places = torch.arange(x.shape[1])[None]
    turns = model.model.rotary_emb(x, places)
    mask = torch.full((x.shape[1],) * 2, torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    with watched(head, found):
        x = head.model.layers[0](x, position_embeddings=turns, attention_mask=mask[None, None])
        head.lm_head(head.model.norm(x))
    return model.lm_head(hidden)[0].numpy(), found


@cache
def drafted(name: str, tied: bool | None = None) -> Drafted:
    """Return a tiny model of `name` with a draft head under the published names."""
    folder = Path(_FOLDER.name) / f"{name}-{tied}"
    model = save_tiny(name, folder, tied=tied).double()
    head = head_of(model)
    add(folder, head, NAMED[name], len(model.model.layers))
    with torch.no_grad(), everything_float64(model):
        logits, found = run(model, head.double(), torch.tensor([IDS]))
    return Drafted(folder, logits, found)


def add(folder: Path, head: Any, names: dict[str, str], count: int) -> None:
    """Write a head's weights into a folder's only file of weights, and its key."""
    path, config = folder / "model.safetensors", folder / "config.json"
    state = load_file(path)
    for part in ("enorm", "hnorm", "fc"):
        state[f"{names[part]}.weight"] = getattr(head, part).weight.detach().float()
    state[f"{names['norm']}.weight"] = head.model.norm.weight.detach().float()
    for name, value in head.model.layers[0].state_dict().items():
        state[f"{names['layer']}.{name}"] = value.detach().float()
    renamed = {name.replace("{N}", str(count)): value for name, value in state.items()}
    save_file({name: value.contiguous() for name, value in renamed.items()}, path)
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {names["counts"]: 1}))
