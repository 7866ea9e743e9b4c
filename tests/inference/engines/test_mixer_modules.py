"""Modules that hold a layer's mixer or MLP: each is read as what it gives, of every kind of layer.

transformers computes the values. Seen red: `mamba`, `mixer` and `conv` were no capture points; the
experts without the shared MLP at their side were values that nothing explains.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.engines.opening import open_trace
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

MODULES: tuple[tuple[str, str, set[str]], ...] = (
    ("mamba", "mixer", {"attn_out"}),
    ("mamba2", "mixer", {"attn_out"}),
    ("nemotron_h", "mixer", {"attn_out", "ffn_out"}),
    ("bamba", "mamba self_attn", {"attn_out"}),
    ("falcon_h1", "mamba", {"ssm_out"}),
    ("falcon_h1", "mamba self_attn", {"attn_out", "ssm_out"}),
    ("lfm2", "conv self_attn", {"attn_out"}),
    ("granite_hybrid", "mamba shared_mlp", {"attn_out", "ffn_out"}),
    ("granite_hybrid_moe", "mamba shared_mlp block_sparse_moe", {"attn_out"}),
    ("gpt_neox", "attention mlp", {"attn_out", "ffn_out"}),
    ("falcon", "self_attention mlp", {"attn_out", "ffn_out"}),
    ("bloom", "self_attention", set()),  # the stream is added inside of the module
)


def outputs(folder: Path, names: set[str]) -> dict[str, Any]:
    """Return what transformers' layers and their modules of these names give, ids and logits."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found: dict[str, Any] = {"input_ids": np.array(IDS)}

    def take(path: str) -> Any:
        def hook(module: Any, given: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            found[path] = value.detach().reshape(-1, value.shape[-1]).numpy().copy()

        return hook

    for path, module in network.named_modules():
        above, _, name = path.rpartition(".")
        if name.isdigit() or (name in names and above.rpartition(".")[2].isdigit()):
            module.register_forward_hook(take(path))
    with torch.inference_mode():
        found["logits"] = network.eval()(torch.tensor([IDS]), use_cache=False).logits[0].numpy()
    return found


@pytest.mark.parametrize(("base", "names", "points"), MODULES)
def test_the_result_of_a_mixers_module_is_a_point(
    base: str, names: str, points: set[str], tmp_path: Path
) -> None:
    folder, path = tiny_folder(base), tmp_path / "dump.npz"
    arrays = outputs(folder, {*names.split()})
    np.savez(path, **arrays)
    with open_model(folder) as model, open_trace(path, None, model) as trace:
        found = {record.point for record in trace.records.values()}
    assert found == {*points, "out", "logits"}
    assert diagnose(str(folder), str(path)).verdict in ("same", "precision")


@pytest.mark.parametrize("name", ["block_sparse_moe", "shared_mlp"])
def test_one_summand_of_a_mixture_is_no_fault(name: str, tmp_path: Path) -> None:
    """The experts and the shared MLP are added outside of both modules."""
    folder, path = tiny_folder("granite_hybrid_moe"), tmp_path / "dump.npz"
    np.savez(path, **outputs(folder, {name}))
    found = diagnose(str(folder), str(path))
    assert (found.verdict, found.cause) == ("same", "capture_point")
    says = {"block_sparse_moe": "without the shared expert", "shared_mlp": "shared expert alone"}
    assert found.lead is not None and says[name] in found.lead.says


@pytest.mark.parametrize(("gate", "points"), [(True, ["moe_out"]), (False, [])])
def test_a_mixer_of_an_unknown_model_is_what_its_modules_show(
    gate: bool, points: list[str], tmp_path: Path
) -> None:
    """Attention, a state space mixer, an MLP and a mixture all have that name."""
    path = tmp_path / "dump.npz"
    names = ["backbone.layers.0.mixer", *(["backbone.layers.0.mixer.gate"] if gate else [])]
    arrays: dict[str, Any] = {name: np.ones((5, 8), np.float32) for name in names}
    np.savez(path, **arrays, input_ids=np.arange(5))
    with open_trace(path) as trace:
        found = [record.point for record in trace.records.values() if record.point != "router"]
    assert found == points
