"""What vLLM itself wrote on a CPU (fixtures/make_vllm.py): its dump, answer and loaded weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.inference.judge import backend

FOLDER = Path(__file__).resolve().parents[3] / "fixtures" / "vllm"
MODEL = FOLDER / "model"


def test_its_dump_is_rounding() -> None:
    """Every point of prompt and decode steps is compared, but for the rotation's module."""
    done = aprfmt("diagnose", MODEL, FOLDER / "dump", "--json")
    assert done.code == 0 and done.json["verdict"] == "precision", done.out
    left = [one["name"] for one in done.json["not_compared"]]
    rotated = "model.layers.0.self_attn.rotary_emb"  # one module of all layers, and two results
    assert left == [f"{rotated}.0", f"{rotated}.1"]


def test_its_log_probabilities_are_within_what_its_arithmetic_makes() -> None:
    done = aprfmt("logits", MODEL, "--reference", FOLDER / "answer.json", "--json")
    found = done.json["logprobs"]
    assert done.code == 0 and found["tolerance_float32"] is None, done.out  # its logits are 16-bit
    assert found["compared"] == 11 and 0.002 < found["scaled"] < found["tolerance"] / 3


@pytest.mark.parametrize("fault", [("rope_theta", 500.0), ("rms_norm_eps", 0.1)], ids=str)
def test_a_wrong_key_is_seen_in_both(fault: tuple[str, float], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config |= {fault[0]: fault[1]}
    if fault[0] == "rope_theta":
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": fault[1]}
    (model / "config.json").write_text(json.dumps(config))
    done = aprfmt("diagnose", model, FOLDER / "dump", "--json")
    assert done.code == 1 and [one["cause"] for one in done.json["causes"]] == [
        "rope_theta" if fault[0] == "rope_theta" else "norm_eps"
    ], done.json["causes"]
    answer = aprfmt("logits", model, "--reference", FOLDER / "answer.json", "--json")
    assert answer.code == 1


def test_its_weights_are_packed_away() -> None:
    done = aprfmt("diff", MODEL, FOLDER / "state.pt", "--json")
    assert done.code == 2 and "8 parameters hold no numbers" in done.err
    verdicts = [one["verdict"] for one in done.json["tensors"]]
    assert (verdicts.count("SAME_BYTES"), verdicts.count("UNREADABLE")) == (7, 14)
    assert len(verdicts) == 21


def test_two_ranks_of_it_come_together() -> None:
    """Two ranks by gloo share the one key head; the rotation's output is no point and is left."""
    done = aprfmt("diagnose", MODEL, FOLDER / "dump_tp2", "--json")
    assert done.code == 0 and done.json["verdict"] == "precision", done.out
    left = {one["name"]: one["why"] for one in done.json["not_compared"]}
    assert set(left) == {f"model.layers.0.self_attn.rotary_emb.{part}" for part in (0, 1)}
    assert "its name says no point" in left["model.layers.0.self_attn.rotary_emb.0"]


SGLANG = FOLDER.parent / "sglang" / "dump"


def test_files_of_sglangs_dumper_come_together() -> None:
    """Two ranks by gloo: they say which process they are of, and by their dims how to join them."""
    done = aprfmt("diagnose", MODEL, SGLANG, "--json")
    assert done.code == 0 and done.json["verdict"] == "precision", done.out
    assert not done.json["not_compared"]


def test_dims_of_two_axes_need_more_than_a_process(tmp_path: Path) -> None:
    import torch

    for rank in range(2):
        meta = {"step": 0, "rank": rank, "world_rank": rank, "world_size": 2, "dims": "t[cp] h[tp]"}
        name = f"step=0___rank={rank}___dump_index=1___name=model.layers.0.mlp.up_proj.pt"
        meta["name"] = "model.layers.0.mlp.up_proj"
        torch.save({"value": torch.ones(4, 48), "meta": meta}, tmp_path / name)
    done = aprfmt("trace", MODEL, "--map", tmp_path, "--ids", "1,2,3,4,5,6,7,8")
    assert done.code == 2 and "among cp and tp ranks" in done.err


@pytest.mark.parametrize("form", ["affine", "mxfp4"])
def test_files_of_mlx_hold_its_values(form: str) -> None:
    """mlx_lm quantized and saved the model: a weight's values are its own, to the bit."""
    folder = FOLDER.parent / "mlx" / form
    values = np.load(folder / "values.npz")
    with open_model(folder) as model:
        found = model["model.layers.1.mlp.up_proj.weight"].numpy()
        assert np.array_equal(found, values["up"])
        assert not model.damage and not model.resolution.missing
        logits = Session.open(model, backend("numpy:float32")).logits((5, 80, 33, 21, 7, 20, 64, 9))
    away = np.abs(logits - values["logits"]).max() / np.abs(values["logits"]).max()
    assert away < 1e-5
