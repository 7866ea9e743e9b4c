"""Weight norm in torch's two spellings, multiplied out, and without its lengths.

torch itself renames, parametrizes and folds. Seen red: the newer spelling "only in B" of the same
model, "no cause of the table fits" of a folded and of a lost one; lengths over the wrong axes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations, remove_weight_norm, weight_norm

from aprfmt.model.weight_norm import normed_weights, older_spellings
from tests.cli.run import aprfmt
from tests.diagnosis.test_remedies import written

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
NEW = "parametrizations.weight.original"


class Vocoder(torch.nn.Module):
    """Three layers with weight norm over `dim`, and one without."""

    def __init__(self, norm: Any, dim: int | None = 0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.convs = torch.nn.ModuleList([norm(torch.nn.Conv1d(8, 8, 5), dim=dim) for _ in "abc"])
        self.last = torch.nn.Linear(8, 12)
        for name, values in self.named_parameters():
            if name.endswith(("_g", f"{NEW}0")):
                values.data *= 1 + 0.4 * torch.rand(values.shape)


def both(dim: int | None = 0) -> tuple[Any, Any]:
    """Return the state of one model in the older and in the newer spelling."""
    old, new = Vocoder(weight_norm, dim), Vocoder(parametrizations.weight_norm, dim)
    new.load_state_dict(old.state_dict())  # torch's own hook renames
    return old.state_dict(), new.state_dict()


def asked(folder: Path, a: Any, b: Any, prefix: str = "", command: str = "diagnose") -> Any:
    torch.save(a, folder / "a.pt")
    torch.save({prefix + name: values for name, values in b.items()}, folder / "b.pt")
    return aprfmt(command, folder / "a.pt", folder / "b.pt", "--json").json


def causes(told: Any) -> Mapping[str, Any]:
    return {one["cause"]: one for one in told["causes"]}


@pytest.mark.parametrize("swapped", [False, True])
def test_both_spellings_are_the_same_model(swapped: bool, tmp_path: Path) -> None:
    old, new = both()
    for command in ("diff", "diagnose"):
        told = asked(tmp_path, *((new, old) if swapped else (old, new)), command=command)
        assert told["exit"] == 0 and not told["causes"], told["causes"]


def test_values_that_differ_under_the_newer_names_are_found_there(tmp_path: Path) -> None:
    old, new = both()
    name = f"convs.1.{NEW}1"
    new[name] = torch.randn(new[name].shape)
    told = asked(tmp_path, old, new)
    assert told["exit"] == 1
    (found,) = told["causes"]
    assert found["where"] in ([name], ["convs.1.weight_v"]), found


@pytest.mark.parametrize("prefix", ["", "generator."])
@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("spelling", [0, 1])
def test_a_folded_weight_is_the_same_and_the_directions_alone_are_not(
    spelling: int, dim: int | None, prefix: str, tmp_path: Path
) -> None:
    normed = both(dim)[spelling]
    folded = Vocoder(weight_norm, dim)
    folded.load_state_dict(both(dim)[0])
    for one in folded.convs:
        remove_weight_norm(one)
    good = folded.state_dict()
    for a, b, label in ((normed, good, "B"), (good, normed, "A")):
        found = causes(asked(tmp_path, a, b, prefix))
        assert set(found) <= {"weight_norm_folded", "other_names", "renamed"}, found
        folded_one = found["weight_norm_folded"]
        assert folded_one["level"] == "confirmed" and len(folded_one["where"]) == 9
        assert f"{label} has the weight whose weight norm" in folded_one["says"]
    v = "weight_v" if not spelling else f"{NEW}1"
    lost = {
        name: normed[name.replace("weight", v)].clone() if "convs" in name and "bias" not in name
        else values for name, values in good.items()
    }  # fmt: skip
    told = asked(tmp_path, normed, lost, prefix)
    assert told["exit"] == 1 and told["verdict"] == "bug"
    row = causes(told)["weight_norm_lost"]
    assert row["level"] == "confirmed" and len(row["where"]) == 9
    assert "B has the directions of A's weight norm" in row["says"]


def test_the_command_gives_the_lengths_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normed = both()[0]
    lost = {
        name.replace("weight_v", "weight"): values.clone()
        for name, values in normed.items() if not name.endswith("_g")
    }  # fmt: skip
    told = asked(tmp_path, normed, lost)
    command = causes(told)["weight_norm_lost"]["remedy"]["command"]
    made = written(command, tmp_path / "b.pt", tmp_path / "made", monkeypatch)
    assert aprfmt("diagnose", tmp_path / "a.pt", made).code == 0


def test_a_weight_that_is_neither_is_not_named(tmp_path: Path) -> None:
    normed = both()[0]
    other = {k: v for k, v in normed.items() if "_g" not in k and "_v" not in k}
    for i in range(3):
        other[f"convs.{i}.weight"] = torch.randn(8, 8, 5)
    assert not {"weight_norm_folded", "weight_norm_lost"} & set(
        causes(asked(tmp_path, normed, other))
    )


def test_only_whole_pairs_of_names_are_weight_norm() -> None:
    new = ["a.parametrizations.weight.original0", "a.parametrizations.weight.original1"]
    hidden = [f"lstm.parametrizations.weight_hh_l0.original{n}" for n in (0, 1)]
    assert older_spellings([*new, *hidden]) == dict(
        zip([*new, *hidden],
            ["a.weight_g", "a.weight_v", "lstm.weight_hh_l0_g", "lstm.weight_hh_l0_v"], strict=True)
    )  # fmt: skip
    assert not older_spellings(new[:1])
    assert not older_spellings([*new, "a.weight_g"])  # both are stored: neither is renamed
    assert not older_spellings(["a.parametrizations.weight.original"])  # spectral, orthogonal
    assert normed_weights([*new, "b.weight_v", "c.weight_g", "c.weight_v"]) == {
        "a.weight": tuple(new), "c.weight": ("c.weight_g", "c.weight_v"),
    }  # fmt: skip
