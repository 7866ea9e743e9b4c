"""FP8 codes in a file without config.json: decoded with their scale, or never read as values."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt import validate
from aprfmt.model import open_model
from tests.cli.run import aprfmt

SHAPES = {"blocks.0.attn.to_q": (64, 128), "blocks.0.ff": (256, 64), "blocks.1.ff": (64, 256)}
BLOCK = 32
Made = tuple[torch.Tensor, torch.Tensor]


def spread(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a scale for every element."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    if scale.dim() == 1:
        scale = scale[:, None]
    down, across = (n // s for n, s in zip(shape, scale.shape, strict=True))
    return scale.repeat_interleave(down, 0).repeat_interleave(across, 1)


def whole(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().max() / 448


def one(weight: torch.Tensor) -> torch.Tensor:
    return whole(weight).reshape(1)


def row(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(1) / 448


def rows(weight: torch.Tensor) -> torch.Tensor:
    return row(weight)[:, None]


def blocks(weight: torch.Tensor) -> torch.Tensor:
    down, across = (n // BLOCK for n in weight.shape)
    return weight.reshape(down, BLOCK, across, BLOCK).abs().amax((1, 3)) / 448


# How files call the scale, its input's scale, and what marks the file.
SPELLINGS: Mapping[str, tuple[str, str, str]] = {
    "compressed": (".weight_scale", ".input_scale", ""),
    "deepseek": (".weight_scale_inv", ".input_scale", ""),
    "comfyui": (".scale_weight", ".scale_input", "scaled_fp8"),
    "comfyui, prefixed": (".scale_weight", ".scale_input", "model.diffusion_model.scaled_fp8"),
}


def written(
    path: Path, spelling: str, per: Callable[[torch.Tensor], torch.Tensor] = whole
) -> dict[str, torch.Tensor]:
    """Write a file and return its weights as torch decodes them (float32) by name."""
    generator = torch.Generator().manual_seed(3)
    scale_name, _, marker = SPELLINGS[spelling]
    above = marker.removesuffix("scaled_fp8")
    held: dict[str, torch.Tensor] = {}
    right = {}
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=generator) * 0.03
        scale = per(weight)
        codes = (weight / spread(scale, shape)).to(torch.float8_e4m3fn)
        held |= {f"{above}{name}.weight": codes, f"{above}{name}{scale_name}": scale.clone()}
        held[f"{above}{name}.bias"] = torch.zeros(shape[0])
        right[f"{above}{name}.weight"] = codes.float() * spread(scale, shape)
    if marker:
        held[marker] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    save_file(held, path)
    return right


def changed(path: Path, into: Path, change: Callable[[str, torch.Tensor], Any]) -> None:
    """Write a copy whose tensors are what `change` gives: (name, tensor), or None for none."""
    made = (change(name, tensor) for name, tensor in load_file(path).items())
    save_file(dict(each for each in made if each is not None), into)


def convert(source: Path, into: Path) -> Any:
    return aprfmt("convert", source, into, "--generic", "--encoding", "F32")


@pytest.mark.parametrize("per", [whole, one, row, rows, blocks])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_codes_are_decoded_with_their_scale(
    spelling: str, per: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    right = written(tmp_path / "m.safetensors", spelling, per)
    done = convert(tmp_path / "m.safetensors", tmp_path / "f32.safetensors")
    assert done.code == 0, done.err
    found = load_file(tmp_path / "f32.safetensors")
    assert {name for name in found if not name.endswith("bias")} == set(right)
    for name, values in right.items():
        assert torch.equal(found[name], values), name
    shown = aprfmt("diff", tmp_path / "m.safetensors", tmp_path / "f32.safetensors", "--json")
    assert {row["verdict"] for row in shown.json["tensors"]} <= {"SAME_VALUES", "SAME_BYTES"}


@pytest.mark.parametrize("into", ["copy.safetensors", "copy.apr"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_copy_keeps_every_stored_part_once(spelling: str, into: str, tmp_path: Path) -> None:
    source = tmp_path / "m.safetensors"
    written(source, spelling)
    for at, to in ((source, tmp_path / into), (tmp_path / into, tmp_path / "back.safetensors")):
        done = aprfmt("convert", at, to, "--generic")
        assert done.code == 0, done.err
    back, before = load_file(tmp_path / "back.safetensors"), load_file(source)
    assert back.keys() == before.keys()
    for name, tensor in before.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (back[name], tensor)))


def test_two_spellings_of_one_file_are_equal(tmp_path: Path) -> None:
    for spelling in ("compressed", "comfyui"):
        written(tmp_path / f"{spelling}.safetensors", spelling)
    sides = [tmp_path / f"{spelling}.safetensors" for spelling in ("compressed", "comfyui")]
    shown = aprfmt("diff", *sides, "--json")
    assert {row["verdict"] for row in shown.json["tensors"]} == {"SAME_VALUES", "SAME_BYTES"}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("spelling", ["compressed", "comfyui"])
def test_a_cast_without_the_scale_is_one_cause(spelling: str, turned: bool, tmp_path: Path) -> None:
    source, cast = tmp_path / "m.safetensors", tmp_path / "cast.safetensors"
    right = written(source, spelling)
    changed(source, cast, lambda name, tensor: (
        None if "scale" in name else
        (name, tensor.bfloat16() if name.endswith("weight") else tensor)))  # fmt: skip
    sides = (cast, source) if turned else (source, cast)
    shown = aprfmt("diff", *sides, "--json").json
    found = {row["key"]: row["explanation"] for row in shown["tensors"] if row["explanation"]}
    assert set(found) == set(right)
    assert {(one["cause"], one["confirmed"]) for one in found.values()} == {("quant_scale", True)}
    assert {one["residual_after"] for one in found.values()} == {0.0}


def _renamed(name: str, tensor: torch.Tensor) -> Any:
    return name.replace(".scale_weight", ".weight_rescaling"), tensor


def _reciprocal(name: str, tensor: torch.Tensor) -> Any:
    return name, 1 / tensor if name.endswith("scale_weight") else tensor


def _one_lost(name: str, tensor: torch.Tensor) -> Any:
    return None if name == "blocks.0.ff.scale_weight" else (name, tensor)


def _of_other_rows(name: str, tensor: torch.Tensor) -> Any:
    return name, tensor.expand(7).clone() if name.endswith("scale_weight") else tensor


@pytest.mark.parametrize("change", [_renamed, _reciprocal, _one_lost, _of_other_rows])
def test_codes_whose_scale_is_not_understood_are_no_values(
    change: Callable[[str, torch.Tensor], Any], tmp_path: Path
) -> None:
    written(tmp_path / "m.safetensors", "comfyui")
    odd = tmp_path / "odd.safetensors"
    changed(tmp_path / "m.safetensors", odd, change)
    done = convert(odd, tmp_path / "f32.safetensors")
    assert done.code == 2 and not (tmp_path / "f32.safetensors").exists()
    assert "weights are packed" in done.err and len(done.err.strip().splitlines()) == 1
    assert any("weights are packed" in note["text"] for note in
               aprfmt("inspect", odd, "--json").json["notes"])  # fmt: skip
    copied = aprfmt("convert", odd, tmp_path / "copy.safetensors", "--generic")
    assert copied.code == 0, copied.err


def test_a_cast_to_fp8_without_any_scale_holds_values(tmp_path: Path) -> None:
    values = torch.randn((32, 64), generator=torch.Generator().manual_seed(0))
    save_file({"a.weight": values.to(torch.float8_e4m3fn)}, tmp_path / "m.safetensors")
    assert convert(tmp_path / "m.safetensors", tmp_path / "f32.safetensors").code == 0
    found = load_file(tmp_path / "f32.safetensors")["a.weight"]
    assert torch.equal(found, values.to(torch.float8_e4m3fn).float())


def test_codes_of_one_dimension_need_no_scale(tmp_path: Path) -> None:
    """A norm beside scaled matrices is what it holds; a matrix without its scale is no value."""
    written(tmp_path / "m.safetensors", "compressed")
    held = load_file(tmp_path / "m.safetensors")
    norm = torch.linspace(-3, 3, 64).to(torch.float8_e4m3fn)
    held["blocks.0.norm.weight"] = norm
    source, into = tmp_path / "n.safetensors", tmp_path / "f32.safetensors"
    save_file(held, source)
    assert convert(source, into).code == 0
    assert torch.equal(load_file(into)["blocks.0.norm.weight"], norm.float())
    for shape in ((1, 64), (64, 1)):
        save_file({**held, "blocks.1.gate.weight": norm.reshape(shape).clone()}, source)
        with open_model(source) as model:
            assert model.unread is not None
            assert model.unread.weights == {"blocks.1.gate.weight"}
        assert convert(source, tmp_path / "none.safetensors").code == 2


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("case", ["codes alone", "cast without a scale", "codes and their scale"])
def test_codes_whose_scale_is_lost_are_no_values(
    case: str, kind: torch.dtype, tmp_path: Path
) -> None:
    """Among weights in BF16, as a converter leaves them. Seen red: PASS."""
    made: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(number)) * 0.02
        if number:
            made[f"{name}.weight"] = weight.bfloat16()
            continue
        scale = weight.abs().max() / torch.finfo(kind).max
        codes = weight if case == "cast without a scale" else weight / scale
        made[f"{name}.weight"] = codes.to(kind)
        if case == "codes and their scale":
            made[f"{name}.weight_scale"] = scale
    save_file(made, tmp_path / "model.safetensors")
    checks = {row.name: row for row in validate(tmp_path / "model.safetensors").checks}
    lost = case == "codes alone"
    assert checks["values"].outcome == ("FAIL" if lost else "PASS"), checks["values"]
    said = str(checks["values"])
    assert (
        "blocks.0.attn.to_q.weight" in said and "whose scale is not in the file" in said
    ) == lost
