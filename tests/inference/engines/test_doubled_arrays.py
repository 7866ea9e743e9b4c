"""Of two arrays for one point one is recorded, and the other is not left out without a word.

The values are those of hooks on transformers' modules. Seen red: "same: nothing that was compared
differs", exit 0, of noise under `model.layers.1.mlp` beside the sound `mlp.down_proj`.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.inference.engines import record_collector
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.trace import KeptValues
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

PAIRS = {"mlp": "mlp.down_proj", "self_attn": "self_attn.o_proj"}


@cache
def outputs() -> dict[str, Any]:
    """Return {module: its output} of transformers' run of a tiny Llama, of every module."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).eval()
    found: dict[str, Any] = {}

    def hook(name: str) -> Any:
        def keep(_: Any, __: Any, out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            found[name] = out.detach().float().numpy().copy()

        return keep

    for name, module in model.named_modules():
        parts = name.split(".")
        if name in ("model.embed_tokens", "model.norm", "lm_head") or (
            len(parts) > 2 and parts[1] == "layers" and not name.endswith(("rotary_emb", "act_fn"))
        ):
            module.register_forward_hook(hook(name))
    with torch.no_grad():
        model(torch.tensor([list(IDS)]))
    return found


def judged(tmp_path: Path, arrays: dict[str, Any], ending: str = ".npz") -> Diagnosis:
    """Return what is said of captured arrays beside the model; a folder of .npy without ending."""
    path = tmp_path / f"b{ending}"
    if ending == ".safetensors":
        save_file({"input_ids": np.array([IDS]), **arrays}, path)
    elif ending:
        np.savez(path, input_ids=np.array([IDS]), **arrays)
    else:
        path.mkdir()
        for name, values in arrays.items():
            np.save(path / f"{name}.npy", values)
    return diagnose(str(tiny_folder("llama")), str(path), ids=IDS)


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ""], ids=["npz", "tensors", "folder"])
@pytest.mark.parametrize("first", [True, False], ids=["outer first", "inner first"])
@pytest.mark.parametrize("outer", PAIRS)
def test_the_one_that_is_not_recorded_is_named(
    outer: str, first: bool, ending: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    name, inner = f"model.layers.1.{outer}", f"model.layers.1.{PAIRS[outer]}"
    made = outputs()
    noise = rng.standard_normal(made[name].shape).astype(np.float32)
    wrong = made | {name: noise}
    order = [name, inner] if first else [inner, name]
    rest = [key for key in wrong if key not in order]
    found = judged(tmp_path, {key: wrong[key] for key in [*order, *rest]}, ending)
    assert found.exit_code == 2, found.sentence
    (row,) = [one for one in found.pronounced.not_compared if name in one.name]
    assert "another array of the same point" in row.why


@pytest.mark.parametrize("ending", [".npz", ""], ids=["npz", "folder"])
@pytest.mark.parametrize("factor", [10 / 9, 1.3])
def test_dropout_between_two_modules_is_said(factor: float, ending: str, tmp_path: Path) -> None:
    """The values that are left are 1 / (1 - p) times as large, or it is no dropout."""
    made = outputs()
    inner = made["model.layers.1.mlp.down_proj"]
    kept = np.random.default_rng(4).random(inner.shape) >= 0.1
    dropped = np.asarray(np.where(kept, factor * inner, 0), np.float32)
    found = judged(tmp_path, made | {"model.layers.1.mlp": dropped}, ending)
    (row,) = [one for one in found.pronounced.not_compared if "layers.1.mlp" in one.name]
    assert ("after dropout of 0.1" in row.why) == (factor == 10 / 9), row.why


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ""], ids=["npz", "tensors", "folder"])
def test_two_equal_arrays_are_one(ending: str, tmp_path: Path) -> None:
    made = outputs()
    for outer, inner in PAIRS.items():
        assert np.array_equal(made[f"model.layers.1.{outer}"], made[f"model.layers.1.{inner}"])
    found = judged(tmp_path, made, ending)
    assert found.exit_code == 0, found.sentence


def test_values_that_the_next_norm_wrote_over(tmp_path: Path) -> None:
    """In every layer, as a fused kernel does it. Seen red: exit 2 where all points are there."""
    made = outputs()
    count = sum(name.endswith(".mlp") for name in made)
    after = [f"model.layers.{n}.input_layernorm" for n in range(1, count)] + ["model.norm"]
    wrong = dict(made)
    for layer, norm in enumerate(after):
        for name in ("mlp", "mlp.down_proj"):
            wrong[f"model.layers.{layer}.{name}"] = made[norm]
    found = judged(tmp_path, wrong)
    assert (found.cause, found.exit_code) == ("capture_point", 0), found.sentence
    assert found.lead is not None and found.lead.certainty == "confirmed"
    assert {*found.lead.where} == {f"L{layer}.ffn_out" for layer in range(count)}
    assert "L1.attn_norm" in found.sentence


def test_an_array_that_cannot_be_read_again_is_named_by_its_distance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured apart without reading it, it is not left out; unmeasured, nothing is known of it."""
    here = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    for apart, again, named in (
        (None, None, False),
        (None, here, False),
        (None, here[:2], False),
        (None, 2 * here, True),
        (0.0, None, False),
        (1e-9, 2 * here, False),
        (0.5, None, True),
        (0.5, here[:2], True),
        (0.5, here, True),
    ):
        collector = Collector(KeptValues(), None, tokens=4, dtype="float32")
        for collector.giver, values in (("first", here), ("second", here)):
            collector.add("q", 0, values)
        monkeypatch.setattr(record_collector, "_distance_of_tiles", lambda a, b, apart=apart: apart)

        def add(name: str, other: Collector, again: Any = again) -> None:
            assert name == "first"
            if again is not None:
                other.add("q", 0, again)

        collector.note_unlike_seconds(add)
        assert list(collector.unknown) == ["first"] * named and collector.lost == {
            *collector.unknown
        }
