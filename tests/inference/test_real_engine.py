"""What vLLM itself wrote on a CPU (fixtures/make_vllm.py): its dump, answer and loaded weights."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.run import aprfmt

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "vllm"
MODEL = FOLDER / "model"


def test_its_dump_is_rounding() -> None:
    """Every point of prompt and decode steps is compared, but for the rotation's module."""
    done = aprfmt("diagnose", MODEL, FOLDER / "dump", "--json")
    assert done.code == 0 and done.json["verdict"] == "precision", done.out
    left = [one["name"] for one in done.json["not_compared"]]
    assert left == ["model.layers.0.self_attn.rotary_emb.0"]  # one module of all layers


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
