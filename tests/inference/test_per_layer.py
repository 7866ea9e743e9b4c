"""What layers share: keys and values, an embedding, copies of the stream; and what is refused.

Seen red: keys taken of the first layer of a kind, not of the last; what layers share not given
from stage to stage; a mix that was run.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.arch.gemma3n import GEMMA3N, kv_sources, std_multiplier
from aprfmt.arch.hyperparameters import read_hyper, write_hyper
from aprfmt.arch.spec import Facts
from aprfmt.arch.value_checks import nearest_float32
from aprfmt.errors import ArchError
from aprfmt.inference.forward import Span, StageOutput, forward
from aprfmt.inference.layer_heads import key_value_layer
from aprfmt.inference.session import Session
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.models import IDS, save_tiny

SHARING = ("gemma3n", "gemma4", "gemma4-experts")


def changed(folder: Path, **values: Any) -> Path:
    """Change keys of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize("name", SHARING)
def test_stages_give_each_other_what_later_layers_use(name: str) -> None:
    b = backend("numpy:float64")
    with open_model(judged(name).folder) as model:
        weights = model_weights(model)
        stream: Any = None
        for stage in range(int(model.hyper["n_layers"]) + 2):
            stream = forward(
                b, model.spec, model.hyper, weights, IDS, logits_rows="all",
                span=Span(stage, stage + 1, stream),
            )  # fmt: skip
            last = stage == int(model.hyper["n_layers"]) + 1
            assert isinstance(stream, StageOutput) is (name != "gemma4-experts" and not last)
    assert rel(stream, judged(name).true_logits) < 1e-12


def test_a_layer_reads_the_last_of_its_kind() -> None:
    own, windows = (True,) * 4 + (False,) * 3, (True, False, True, False, False, True, True)
    hp = {"own_kv_layers": own, "window_layers": windows}
    assert kv_sources(hp) == (0, 1, 2, 3, 3, 2, 2)
    assert tuple(key_value_layer(hp, layer) for layer in range(7)) == kv_sources(hp)


def test_layers_without_an_owner_of_their_kind_are_refused(tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path)
    kinds = ["full_attention"] * 3 + ["sliding_attention", "full_attention", "full_attention"]
    changed(tmp_path, layer_types=kinds)
    with open_model(tmp_path) as model, pytest.raises(ArchError, match="layer 3 has a window"):
        Session.open(model, backend("numpy:float64"))


MIXES: Mapping[str, dict[str, Any]] = {
    "hidden_size_per_layer_input": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 10, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    },
    "num_kv_shared_layers": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 10, "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    },
    "attention_k_eq_v": {"attention_k_eq_v": True, "num_kv_shared_layers": 0},
}  # fmt: skip


@pytest.mark.parametrize("key", MIXES)
def test_what_no_published_model_mixes_is_not_run(key: str, tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path, **MIXES[key])
    with open_model(tmp_path) as model:
        with pytest.raises(ArchError, match=f"{key}.*no published gemma4 has both"):
            Session.open(model, backend("numpy:float64"))


def test_another_active_copy_is_refused(tmp_path: Path) -> None:
    save_tiny("gemma3n", tmp_path)
    with pytest.raises(ArchError, match="altup_active_idx: is 1; expected 0"):
        with open_model(changed(tmp_path, altup_active_idx=1)) as model:
            Session.open(model, backend("numpy:float64"))


def test_a_last_layer_with_a_window_is_said_to_have_none(tmp_path: Path) -> None:
    save_tiny("gemma4", tmp_path)
    kinds = json.loads((tmp_path / "config.json").read_text())["layer_types"]
    changed(tmp_path, layer_types=[*kinds[:-1], "sliding_attention"])
    with open_model(tmp_path) as model:
        assert model.hyper["window_layers"][-1] is False
        assert any(
            "the last layer has a window" in x.text for x in model.resolution.report.conflicts
        )
        with Session.open(model, backend("numpy:float64")) as session:
            assert rel(session.logits(IDS), judged("gemma4").true_logits) < 1e-12


@given(st.lists(st.integers(0, 999), min_size=4, max_size=4))
def test_shares_come_back_from_their_standard_deviations(thousandths: list[int]) -> None:
    shares = tuple(count / 1000 for count in thousandths)
    hp, _ = read_hyper(
        GEMMA3N, Facts("hf", {"num_hidden_layers": 4, "activation_sparsity_pattern": shares,
                              "num_kv_shared_layers": 0}, {}), "config.json",
    )  # fmt: skip
    written = write_hyper(GEMMA3N, hp, "gguf")
    listed = written["gemma3n.activation_sparsity_scale"]
    assert listed == [nearest_float32(std_multiplier(share)) for share in shares]
    back, _ = read_hyper(GEMMA3N, Facts("gguf", written, {}, "gemma3n"), "x.gguf")
    np.testing.assert_array_equal(back["ffn_sparsity"], shares)
