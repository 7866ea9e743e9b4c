"""A part of a model trained further, or a layer that is a copy of another: one cause each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

Values = Any
TABLES = ("embed_tokens", "lm_head")
PARTS: dict[str, tuple[str, ...]] = {
    "the MLP": (".mlp.",),
    "one kind of matrix in all layers": ("0.mlp.down", "1.mlp.down", "0.mlp.up", "1.mlp.up"),
    "the first layer": (".layers.0.self_attn", ".layers.0.mlp"),
    "the last layer": (".layers.1.self_attn", ".layers.1.mlp"),
    "the MLP of a layer": (".layers.1.mlp",),
    "the table of tokens": ("embed_tokens",),
    "the MLP and the table": (".mlp.", "embed_tokens"),
}


def edited(into: Path, source: Path, change: Callable[[str, Values], Values]) -> Path:
    """Write a copy of a folder of F32 tensors, each as `change(name, values)` gives it."""
    into.mkdir()
    for name in ("config.json",):
        (into / name).write_bytes((source / name).read_bytes())
    rows = {}
    for name, (kind, shape, raw) in tensors_of(source).items():
        values = np.frombuffer(raw, np.float32).reshape(shape).copy()
        rows[name] = (kind, shape, np.ascontiguousarray(change(name, values)).tobytes())
    write_mixed(into / "model.safetensors", rows)
    return into


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "base"
    llama_folder(folder, "F32", hidden=64)
    return folder


@pytest.mark.parametrize("step", [0.01, 0.3])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_trained_is_derived(
    part: str, step: float, base: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)

    def trained(name: str, values: Values) -> Values:
        if not any(word in name for word in PARTS[part]):
            return values
        return values + rng.standard_normal(values.shape, np.float32) * values.std() * step

    shown = aprfmt("diff", base, edited(tmp_path / "b", base, trained), "--json").json
    found = {row["key"]: row["explanation"] for row in shown["tensors"] if row["explanation"]}
    assert found and {one["cause"] for one in found.values()} == {"derived"}
    assert {one["confirmed"] for one in found.values()} == {True}


@pytest.mark.parametrize(("axes", "decay"), [((0, 1), 1.0), ((1,), 1.0), ((0,), 1.0), ((), 0.9)])
def test_factors_of_rows_and_columns_are_no_training(
    axes: tuple[int, ...], decay: float, base: Path, tmp_path: Path
) -> None:
    """A DoRA merge, or one taken out along another axis; steps with weight decay are a training.

    Seen red: "trained further" for factors.
    """
    rng = np.random.default_rng(0)

    def changed(name: str, values: Values) -> Values:
        if ".mlp." not in name:
            return values
        pair = [rng.standard_normal((n, 4), np.float32) for n in values.shape]
        moved = values + values.std() * (
            0.005 * pair[0] @ pair[1].T
            if axes
            else 0.02 * rng.standard_normal(values.shape, np.float32)
        )
        for axis in axes:
            shape = [1, 1]
            shape[axis] = values.shape[axis]
            moved = moved * (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        return moved * np.float32(decay)

    shown = aprfmt("diff", base, edited(tmp_path / "b", base, changed), "--json").json
    (cause,) = shown["findings"]
    assert cause["cause"] == "derived"
    assert ("factors of their own" in cause["text"]) == bool(axes)
    assert ("trained further" in cause["text"]) != bool(axes)


@pytest.mark.parametrize("names", [
    (".layers.0.mlp.up",), (".layers.0.mlp.up", ".layers.1.self_attn.q"),
    (".layers.0.mlp.up", ".layers.1.mlp.down", ".layers.1.self_attn.o"),
])  # fmt: skip
def test_single_matrices_are_no_training(
    names: tuple[str, ...], base: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)

    def noisy(name: str, values: Values) -> Values:
        if not any(word in name for word in names):
            return values
        return values + rng.standard_normal(values.shape, np.float32) * values.std()

    shown = aprfmt("diff", base, edited(tmp_path / "b", base, noisy), "--json").json
    found = [row["explanation"] for row in shown["tensors"] if row["explanation"]]
    assert "derived" not in {one["cause"] for one in found}


@pytest.mark.parametrize(("layer", "other"), [(1, 0), (0, 1)])
def test_a_layer_that_is_a_copy_is_one_cause(
    layer: int, other: int, base: Path, tmp_path: Path
) -> None:
    held = tensors_of(base)

    def copied(name: str, values: Values) -> Values:
        raw = held[name.replace(f".layers.{layer}.", f".layers.{other}.")][2]
        return np.frombuffer(raw, np.float32).reshape(values.shape)

    shown = aprfmt("diff", base, edited(tmp_path / "b", base, copied), "--json").json
    (cause,) = shown["findings"]
    assert cause["cause"] == "layer_order" and cause["confirmed"]
    assert f"layer {layer} of B is a copy of layer {other}" in cause["text"]


@pytest.mark.parametrize("encoding", ["F16", "Q8_0"])
def test_a_copied_tensor_is_one_in_another_type_too(
    encoding: str, base: Path, tmp_path: Path
) -> None:
    """Seen red: "layers stand elsewhere ...: 1 is 0", as if layer 0 stood elsewhere too."""
    held = tensors_of(base)
    name = "model.layers.1.mlp.up_proj.weight"
    wanted = name.replace(".1.", ".0.")
    assert name in held and wanted in held

    def copied(each: str, values: Values) -> Values:
        if each != name:
            return values
        return np.frombuffer(held[wanted][2], np.float32).reshape(values.shape)

    b = tmp_path / "b.gguf"
    made = aprfmt("convert", edited(tmp_path / "b", base, copied), b, "--encoding", encoding)
    assert made.code == 0, made.err
    shown = aprfmt("diff", base, b, "--json").json
    (cause,) = [one for one in shown["findings"] if one["cause"] == "layer_order"]
    assert cause["confirmed"]
    assert "layer 1 of B is a copy of layer 0 (1 tensor)" in cause["text"], cause["text"]


def _of(name: str, change: Callable[[Values], None]) -> Callable[[str, Values], Values]:
    def changed(each: str, values: Values) -> Values:
        if name in each:
            change(values)
        return values

    return changed


def _two(values: Values) -> None:
    values[[3, 40], [5, 9]] = values[[40, 3], [9, 5]]


def _neighbours(values: Values) -> None:
    values[7, [0, 1]] = values[7, [1, 0]]


def _three(values: Values) -> None:
    values[[1, 2, 30], [0, 8, 4]] = values[[2, 30, 1], [8, 4, 0]]


def _a_row(values: Values) -> None:
    values[3] *= -1


def _all(values: Values) -> None:
    values *= -1


@pytest.mark.parametrize("change", [_two, _neighbours, _three])
def test_exchanged_values_are_called_that(
    change: Callable[[Values], None], base: Path, tmp_path: Path
) -> None:
    b = edited(tmp_path / "b", base, _of("layers.1.mlp.up", change))
    shown = aprfmt("diff", base, b, "--json").json
    (found,) = [row["explanation"] for row in shown["tensors"] if row["explanation"]]
    assert found["confirmed"] and "values are exchanged" in " ".join(found["evidence"])


@pytest.mark.parametrize("change", [_a_row, _all])
def test_a_turned_sign_is_called_that(
    change: Callable[[Values], None], base: Path, tmp_path: Path
) -> None:
    b = edited(tmp_path / "b", base, _of("layers.1.mlp.up", change))
    shown = aprfmt("diff", base, b, "--json").json
    (found,) = [row["explanation"] for row in shown["tensors"] if row["explanation"]]
    assert found["confirmed"] and "sign" in found["evidence"][0]


FIRST = (".layers.0.", "embed_tokens")
BETWEEN = ("0.self_attn", "gate", "up", "1.mlp", "norm", "embed", "head")  # no part of a model


@pytest.mark.parametrize(
    ("kept", "cause", "says"),
    [
        (FIRST, "derived", "files of two states were mixed, or a training changed"),
        (BETWEEN, "stale_tensor", "files of two states were mixed"),
    ],
    ids=["between layers", "inside a layer"],
)
def test_a_file_of_another_state_is_named(
    kept: tuple[str, ...], cause: str, says: str, base: Path, tmp_path: Path
) -> None:
    """Seen red: a training without the file, or matrices "of another checkpoint, or damaged"."""
    rng = np.random.default_rng(0)

    def trained(name: str, values: Values) -> Values:
        moved = values + rng.standard_normal(values.shape, np.float32) * values.std() * 0.02
        return values if any(word in name for word in kept) else moved

    whole = edited(tmp_path / "b", base, trained)
    rows = tensors_of(whole)
    (whole / "model.safetensors").unlink()
    names: dict[str, str] = {}
    for number, first in ((1, True), (2, False)):
        part = f"model-{number:05d}-of-00002.safetensors"
        held = {n: row for n, row in rows.items() if any(word in n for word in kept) == first}
        write_mixed(whole / part, held)
        names |= dict.fromkeys(held, part)
    index = {"metadata": {}, "weight_map": names}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    found = aprfmt("diff", base, whole, "--json").json["causes"]
    assert [one["cause"] for one in found] == [cause]
    assert "all matrices of model-00002-of-00002.safetensors of B, and none" in found[0]["says"]
    assert says in found[0]["says"]
    assert ("training changed" in found[0]["says"]) == (cause == "derived")


def test_a_training_of_a_part_of_each_file_names_none(base: Path, tmp_path: Path) -> None:
    def trained(name: str, values: Values) -> Values:
        return values * np.float32(1.001) + np.sin(values) if ".mlp." in name else values

    whole = edited(tmp_path / "b", base, trained)
    (found,) = aprfmt("diff", base, whole, "--json").json["causes"]
    assert "states were mixed" not in found["says"]
