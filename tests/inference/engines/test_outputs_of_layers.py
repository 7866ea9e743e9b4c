"""Modules that give what leaves a layer: each alone is read as the layer's output, of any model.

transformers says which they are: their result is the layer's own, to the bit. Seen red: the last
norm of a layer that normalises its sums is no point; its name read as the one before the MLP.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.engines.opening import open_trace
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.inference.encoders import ENCODERS, encoded
from tests.inference.encoders import IDS as ENCODED
from tests.models import IDS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

AFTER = {
    "bert": {"output", "output.LayerNorm"},
    "bert-relu": {"output", "output.LayerNorm"},
    "roberta": {"output", "output.LayerNorm"},
    "xlm-roberta": {"output", "output.LayerNorm"},
    "mpnet": {"output", "output.LayerNorm"},
    "distilbert": {"output_layer_norm"},
    "nomic_bert": {"post_mlp_layernorm"},
    "jina_embeddings_v3": {"post_mlp_layernorm"},
    "modernbert": set(),
}


def saved(path: Path, arrays: dict[str, Any]) -> None:
    """Write an .npz."""
    np.savez(path, **arrays)


def results(model: Any, ids: tuple[int, ...]) -> dict[str, dict[str, np.ndarray]]:
    """Return {path of a layer: {path below it: result}} of the modules that give its output."""
    found: dict[str, Any] = {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, torch.Tensor):
                found[path] = first.numpy().copy()

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(keep(path))
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    layers = {path for path in found if path.rpartition(".")[2].isdigit()}
    return {
        layer: {
            path.removeprefix(f"{layer}."): value
            for path, value in found.items()
            if path.startswith(f"{layer}.")
            and np.array_equal(value.ravel(), found[layer].ravel())
            and "dropout" not in path
        }
        | {"": found[layer]}
        for layer in layers
    }


def read_alone(
    folder: Path, given: dict[str, np.ndarray], path: Path, ids: tuple[int, ...]
) -> None:
    """Hold every module to be read as its layer's output."""
    for name, value in given.items():
        saved(path, {"input_ids": np.array([ids]), name: value})
        number = next(part for part in name.split(".") if part.isdigit())
        with open_model(folder) as model, open_trace(path, None, model) as found:
            assert [*found.records] == [f"L{number}.out"], (name, found.run.get("unknown"))
            mine = found.recorded_values(f"L{number}.out")
            assert mine is not None and np.array_equal(mine.ravel(), value.ravel())


@pytest.mark.parametrize("name", ENCODERS)
def test_the_last_module_of_a_layer_is_its_output(name: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(encoded(name).folder, attn_implementation="eager").eval()
    layers = results(model, ENCODED)
    assert len(layers) == 4
    for layer, found in layers.items():
        assert {*found} == {"", *AFTER[name]}
        given = {f"{layer}.{below}".rstrip("."): value for below, value in found.items()}
        read_alone(encoded(name).folder, given, tmp_path / "one.npz", ENCODED)


def test_the_last_norm_of_a_decoder_that_normalises_its_sums(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_folder("opt_350m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for layer, found in results(model, IDS).items():
        assert {*found} == {"", "final_layer_norm"}
        given = {f"{layer}.{below}".rstrip("."): value for below, value in found.items()}
        read_alone(folder, given, tmp_path / "one.npz", IDS)


def test_the_last_norm_before_an_mlp_is_no_output(tmp_path: Path) -> None:
    """opt has a norm of the same name, of what the MLP reads."""
    folder, path = tiny_folder("opt"), tmp_path / "one.npz"
    with open_model(folder) as model:
        value = np.ones((1, len(IDS), int(model.hyper["hidden_size"])), np.float32)
        saved(
            path, {"input_ids": np.array([IDS]), "model.decoder.layers.0.final_layer_norm": value}
        )
        with open_trace(path, None, model) as found:
            assert [*found.records] == ["L0.ffn_norm"]


def test_arrays_without_a_point_are_mapped_by_the_command_that_is_advised(tmp_path: Path) -> None:
    """The file that was given stands in the command, without the ids that it has itself."""
    folder = encoded("bert").folder
    values = encoded("bert").found
    path = tmp_path / "run of it.npz"
    arrays: dict[str, Any] = {
        f"block{n}.thing": values[f"L{n}.out"].astype(np.float32) for n in range(4)
    }
    known: dict[str, Any] = {"input_ids": np.array([ENCODED])}
    for ids in (known, {}):
        saved(path, arrays | ids)
        given = () if ids else ("--ids", ",".join(map(str, ENCODED)))
        done = aprfmt("diagnose", folder, path, *given)
        command = done.out.partition("next: aprfmt ")[2].splitlines()[0]
        assert f"--map '{path}'" in command and ("--ids" in command) == (not ids)
