"""Kernels of convolutions in another shape: a matrix, a transposed one, input channels last.

Seen red: such a kernel was another shape, and its values were of another state of training; three
axes with the channels last were experts; nothing wrote the kernel back.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.model import open_model
from tests.arch.towers import made
from tests.cli.run import aprfmt as command
from tests.model.relations.edits import edited, remedied, same

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

Change = Callable[[Any], Any]
MOVES: dict[str, tuple[Change, str]] = {
    "a matrix": (lambda t: t.flatten(1), "[out, in * size]"),
    "a transposed matrix": (lambda t: t.flatten(1).T, "[in * size, out]"),
    "channels last": (lambda t: t.movedim(1, -1), "input channels last"),
}
TOWERS = ("qwen2_vl_vision", "gemma3_vision", "qwen2_audio_tower")  # of three, two and one axis


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of tiny towers, each in a folder of its label."""
    root = tmp_path_factory.mktemp("towers")
    for label in TOWERS:
        made(label, root / label)
    return root


def moved(good: Path, bad: Path, change: Change) -> Path:
    def edit(held: dict[str, Any]) -> dict[str, Any]:
        return {n: change(t).contiguous() if t.ndim > 2 else t for n, t in held.items()}

    return edited(good, bad, edit)


@pytest.mark.parametrize("label", TOWERS)
@pytest.mark.parametrize("move", MOVES)
def test_a_kernel_in_another_shape_is_one_relation_and_is_written_back(
    label: str, move: str, towers: Path, tmp_path: Path
) -> None:
    good, (change, said) = towers / label, MOVES[move]
    bad = moved(good, tmp_path / "bad", change)
    with open_model(good) as model:
        assert model.relations == ()
        kernels = [name for name in model if len(model[name].shape) > 2]
    with open_model(bad) as model:
        (relation,) = model.relations
    assert relation.kind == "kernels" and sorted(relation.where) == sorted(kernels)
    assert said in relation.says
    report = aprfmt.diff(good, bad)
    assert report.exit_code() == 1 and not report.differs
    found = command("diagnose", good, bad, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["stored_shape"]
    same(good, remedied(relation.remedy, tmp_path / "mended"))


def test_a_kernel_of_other_values_is_not_called_the_same(towers: Path, tmp_path: Path) -> None:
    def change(t: Any) -> Any:
        return torch.roll(t, 1, 0).flatten(1)

    bad = moved(towers / "gemma3_vision", tmp_path / "bad", change)
    report = aprfmt.diff(towers / "gemma3_vision", bad)
    assert report.differs and len({row.cause for row in report.findings} - {"stored_shape"}) == 1


@pytest.mark.parametrize("mark", ["mlx", "pt"])
def test_what_mlx_wrote_has_its_channels_last_rightly(
    mark: str, towers: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    good = towers / "gemma3_vision"
    folder = moved(good, tmp_path / "made", MOVES["channels last"][0])
    file = folder / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": mark})
    with open_model(folder) as model:
        assert len(model.relations) == (mark == "pt")
    assert aprfmt.diff(good, folder).exit_code() == (mark == "pt")


def test_a_matrix_of_other_sizes_is_read_as_no_kernel(towers: Path, tmp_path: Path) -> None:
    bad = moved(towers / "gemma3_vision", tmp_path / "bad", lambda t: t.flatten(1)[:, 1:])
    with open_model(bad) as model:
        assert model.relations == ()


def _bare(folder: Path, name: str, kernel: Any) -> Path:
    from safetensors.torch import save_file

    path = folder / f"{name}.safetensors"
    save_file({"beside": torch.arange(64.0), "some.kernel": kernel.contiguous()}, path)
    return path


# Axes joined that no reader of kernels looks for: of a stack, and all of them.
JOINED: dict[str, Any] = {"stack": lambda t: t.flatten(0, 1), "vector": lambda t: t.flatten()}


@pytest.mark.parametrize("move", [*MOVES, *JOINED])
@pytest.mark.parametrize("swapped", [False, True])
def test_without_an_architecture_the_values_show_the_shape(
    move: str, swapped: bool, tmp_path: Path
) -> None:
    kernel = torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    change = MOVES[move][0] if move in MOVES else JOINED[move]
    pair = _bare(tmp_path, "a", kernel), _bare(tmp_path, "b", change(kernel))
    (finding,) = aprfmt.diff(*pair[:: -1 if swapped else 1]).findings
    assert (finding.cause, finding.confirmed) == ("stored_shape", True), finding
    if move in ("channels last", "a transposed matrix"):
        assert f"{'A' if swapped else 'B'} has" in finding.says


@pytest.mark.parametrize("move", [*MOVES, *JOINED])
def test_other_values_of_as_many_elements_are_no_shape(move: str, tmp_path: Path) -> None:
    kernel, other = (torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
                     for seed in (1, 2))  # fmt: skip
    change = MOVES[move][0] if move in MOVES else JOINED[move]
    half = torch.cat([kernel[:16], other[16:]])
    for kind, b in (("all", other), ("half", half)):
        pair = _bare(tmp_path, "a", kernel), _bare(tmp_path, kind, change(b))
        causes = {one.cause for one in aprfmt.diff(*pair).findings}
        assert "stored_shape" not in causes
