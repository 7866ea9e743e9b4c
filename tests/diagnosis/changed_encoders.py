"""Encoders with one thing changed: traces of their own forward pass, and copies of their files.

Seen red: a causal mask named a window, positions and biases of scores not named.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.inference.trace_file import save_trace
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from tests.diagnosis.fault import Fault, Pair
from tests.inference.encoders import IDS, encoded, write_pooling
from tests.inference.judge import backend

# name -> (encoder, hyperparameters, fields of the block, cause, where it is first seen, in words)
CHANGED: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = {
    "causal": ("bert", {}, {"attends": "causal"}, "mask", "L0.probs", "a causal mask"),
    "epsilon": ("distilbert", {"norm_eps": 1e-5}, {}, "norm_eps", "embd_norm", "1e-5 in the norms"),
    "tanh": ("bert", {"activation": "gelu_tanh"}, {}, "activation", "L0.ffn_act",
             "the tanh form of GELU"),
    "row": ("roberta", {"position_offset": 1}, {}, "positions", "embd_scaled",
            "positions begin at the padding's row"),
    "rows": ("xlm-roberta", {"position_offset": 0}, {}, "positions", "embd_scaled",
             "positions begin at the table's first row"),
    "distance": ("mpnet", {}, {"score_bias": "none"}, "positions", "L0.scores",
                 "nothing added for the distance"),
    "base": ("nomic_bert", {"rope_theta": 10000.0}, {}, "rope_theta", "L0.q_rope",
             "base 10000 for 1000"),
    "jina": ("jina_embeddings_v3", {"activation": "gelu_tanh"}, {}, "activation", "L0.ffn_act",
             "the tanh form of GELU"),
    "window": ("modernbert", {"sliding_window": 20}, {}, "mask", "L1.probs", "another window"),
}  # fmt: skip


def changed_trace(name: str, path: Path) -> Path:
    """Write the trace of an encoder with one thing changed; return the encoder's folder."""
    label, values, fields, *_ = CHANGED[name]
    folder, kept = encoded(label).folder, KeptValues()
    with open_model(folder) as model:
        spec = replace(model.spec, block=replace(model.spec.block, **fields))
        hyper = model.hyper.with_values(**values)
        session = Session(spec, hyper, model_weights(model), backend("numpy:float32"))
        save_trace(
            path, session.trace(IDS, tuple(session.points), keep=kept.keep, fetch=kept.fetch)
        )
    return folder


def encoder(name: str) -> Fault:
    """Return the fault of an encoder's trace with the change of this name in CHANGED."""
    label, _, _, cause, _, says = CHANGED[name]

    def make() -> Pair:
        path = Path(mkdtemp()) / f"encoder-{name}.safetensors"
        return changed_trace(name, path), path

    return Fault(f"encoder-{name}", label, says, make, (cause,))


def pooled_otherwise() -> Pair:
    """Return two copies of an encoder: one pools its first row, one the mean of all."""
    folders = []
    for kind in ("cls", "mean"):
        folder = Path(mkdtemp()) / f"encoder-{kind}"
        shutil.copytree(encoded("bert").folder, folder)
        write_pooling(folder, kind)
        folders.append(folder)
    return folders[0], folders[1]
