"""What objects in a file of torch.save hold beside tensors is read, so that it can differ."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aprfmt.formats import open_source
from tests.cli.run import aprfmt


def metadata(value: Any, path: Path) -> dict[str, Any]:
    """Return the values that the reader finds in a saved value beside its tensors."""
    torch.save(value, path)
    with open_source(path) as source:
        return dict(source.metadata)


@pytest.mark.parametrize(("count", "at"), [(601, 300), (101, 50), (100, 50), (3, 1)])
def test_bytes_that_differ_in_their_middle_are_a_difference(
    tmp_path: Path, count: int, at: int
) -> None:
    """Seen red: long bytes were compared by their beginning and end."""
    mine = b"x" * count
    other = mine[:at] + b"y" + mine[at + 1 :]
    for file, held in (("a.pt", mine), ("b.pt", other), ("c.pt", mine)):
        torch.save({"t": torch.ones(2), "b": held}, tmp_path / file)
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "b.pt").code == 1
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "c.pt").code == 0


def test_settings_of_a_module_are_values(tmp_path: Path) -> None:
    """Seen red: two norms with other epsilons were equal."""
    mine, other = torch.nn.LayerNorm(4, eps=1e-5), torch.nn.LayerNorm(4, eps=1e-3)
    assert metadata(mine, tmp_path / "a.pt") == {
        "training": True, "normalized_shape": [4], "eps": 1e-5, "elementwise_affine": True,
    }  # fmt: skip
    assert metadata(other, tmp_path / "b.pt")["eps"] == 1e-3
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "b.pt").code == 1
    assert aprfmt("diff", tmp_path / "a.pt", tmp_path / "a.pt").code == 0


def test_settings_stand_under_the_name_of_their_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.25))
    found = metadata(module, tmp_path / "x.pt")
    assert (found["0.in_features"], found["1.p"]) == (3, 0.25)
    assert not [name for name in found if "hook" in name or "_buffers" in name]


class Layer(torch.nn.Module):
    """A module whose attributes are a tensor, its model and an object that all layers share."""

    def __init__(self, config: Any, table: torch.Tensor) -> None:
        super().__init__()
        self.config, self.table = config, table
        self.weight = torch.nn.Parameter(torch.ones(2))


def model() -> torch.nn.Module:
    """Return a model of two layers, each of which refers to the model."""
    config = SimpleNamespace(eps=1e-6)
    config.itself = config
    whole = torch.nn.Module()
    whole.layers = torch.nn.ModuleList(Layer(config, torch.full((3,), n)) for n in range(2))
    for layer in whole.layers:
        layer.__dict__["owner"] = [whole]  # which is none of its modules
    return whole


def test_modules_and_objects_that_settings_refer_to_are_added_once(tmp_path: Path) -> None:
    """A module has its place among the modules, and an object that holds itself has an end."""
    torch.save(model(), tmp_path / "x.pt")
    with open_source(tmp_path / "x.pt") as source:
        assert sorted(source.tensors) == [
            "layers.0.table", "layers.0.weight", "layers.1.table", "layers.1.weight",
        ]  # fmt: skip
        held = {name: value for name, value in source.metadata.items() if "training" not in name}
    assert held == {"layers.0.config.eps": 1e-6}


class Counter:
    """An object whose state is no dict."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __getstate__(self) -> Any:
        return self.values

    def __setstate__(self, state: Any) -> None:
        self.values = state


@pytest.mark.parametrize(
    ("mine", "other"), [((1, 2), (1, 3)), ((torch.ones(2), 1), (torch.zeros(2), 1))]
)
def test_a_state_that_is_no_dict_is_read(tmp_path: Path, mine: Any, other: Any) -> None:
    """Seen red: only attributes were."""
    torch.save({"x": Counter(*mine)}, tmp_path / "a.pt")
    torch.save({"x": Counter(*other)}, tmp_path / "b.pt")
    done = aprfmt("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert (done.code, "x.state" in done.out) == (1, True)
