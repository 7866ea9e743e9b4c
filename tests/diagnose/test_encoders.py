"""Faults of encoders, in traces of their own forward pass with one thing changed.

Seen red: a causal mask named a window, positions and biases of scores not named.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprfmt.inference.session import Session
from aprfmt.inference.trace import Kept
from aprfmt.inference.trace_file import save_trace
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.inference.encoders import IDS, encoded
from tests.inference.judge import backend

# name -> (encoder, hyperparameters, fields of the block, cause, where it is first seen)
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "causal": ("bert", {}, {"attends": "causal"}, "mask", "L0.probs"),
    "epsilon": ("distilbert", {"norm_eps": 1e-5}, {}, "norm_eps", "embd_norm"),
    "tanh": ("bert", {"activation": "gelu_tanh"}, {}, "activation", "L0.ffn_act"),
    "row": ("roberta", {"position_offset": 1}, {}, "positions", "embd_scaled"),
    "rows": ("xlm-roberta", {"position_offset": 0}, {}, "positions", "embd_scaled"),
    "distance": ("mpnet", {}, {"score_bias": "none"}, "positions", "L0.scores"),
    "base": ("nomic_bert", {"rope_theta": 10000.0}, {}, "rope_theta", "L0.q_rope"),
    "window": ("modernbert", {"sliding_window": 20}, {}, "mask", "L1.probs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_of_a_fault_is_named(fault: str, tmp_path: Path) -> None:
    name, values, fields, cause, first = FAULTS[fault]
    folder, kept, path = encoded(name).folder, Kept(), tmp_path / "trace.safetensors"
    with open_model(folder) as model:
        spec = replace(model.spec, block=replace(model.spec.block, **fields))
        hyper = model.hyper.replaced(**values)
        session = Session(spec, hyper, model_weights(model), backend("numpy:float32"))
        save_trace(
            path, session.trace(IDS, tuple(session.points), keep=kept.keep, fetch=kept.fetch)
        )
    found = aprfmt("diagnose", path, folder, "--json")
    assert found.code == 1, found.err
    [told] = found.json["causes"]
    assert (told["cause"], told["confirmed"], told["first"]) == (cause, True, first), told
