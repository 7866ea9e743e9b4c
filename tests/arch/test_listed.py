"""Architectures known by their names: every tensor has one role and comes back, in every format.

Seen red: a role bound to another one's tensor, a step left out of a fused projection, a command
that ran a forward pass of such a model.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

import aprfmt
from aprfmt.arch import ARCHS
from aprfmt.arch.binding import bind_names, groups_for
from aprfmt.arch.hyperparameters import read_hyper, write_hyper
from aprfmt.arch.required_roles import expected_roles
from aprfmt.arch.spec import Facts
from aprfmt.errors import AprfmtError
from aprfmt.model import open_model
from tests.arch.bases import OLDER, assumed, silent
from tests.arch.listed import HOMELESS, LISTED, UNMAPPED, save
from tests.arch.test_names import converters_name
from tests.cli.run import aprfmt as run

every = pytest.mark.parametrize("label", LISTED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Path]]:
    base = tmp_path_factory.mktemp("listed")
    for label in LISTED:
        save(label, base / label)
    yield {label: base / label for label in LISTED}


def drops(label: str) -> dict[str, Any]:
    return {"drop": (HOMELESS[label],)} if label in HOMELESS else {}


def asked(name: str) -> str:
    """Return the name that the converter asks the map about."""
    spelled = name.removeprefix("transformer.").replace("projection_weight", "projection.weight")
    merged = converters_name(spelled)
    merged = re.sub(r"(altup_\w*projections)\.\d+", r"\1", merged)
    merged = re.sub(r"^backbone\.(layers\.\d+)\.mixer\.experts", r"model.\1.mlp.experts", merged)
    return re.sub(r"^model\.(layers\.\d+\.feed_forward\.experts\.w)", r"\1", merged)


def test_every_such_architecture_has_a_tiny_model() -> None:
    named = {name for name in ARCHS.own if ARCHS[name].level == "names"}
    assert named <= {arch for arch, *_ in LISTED.values()}


@every
def test_every_tensor_has_one_role_and_back(label: str, folders: Mapping[str, Path]) -> None:
    with open_model(folders[label]) as model:
        assert model.spec.name == LISTED[label][0]
        stored = list(model)
        found = model.resolution
        assert found.unbound == () and found.missing == () and found.coverage.misshapen == ()
        held = [key for group in bind_names(model.spec, "hf", stored).groups for key in group.roles]
        assert len(held) == len(set(held)) == len(model.roles)
        groups = groups_for(model.spec, "hf", model.roles, model.hyper)
        assert sorted(name for group in groups for name in group.stored) == sorted(stored)
        assert found.report.conflicts == ()


@every
def test_an_unsaid_base_is_that_of_transformers(
    label: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "m").mkdir()
    for file in folders[label].iterdir():
        (tmp_path / "m" / file.name).symlink_to(file)
    whole = json.loads((folders[label] / "config.json").read_text())
    config = silent(whole)
    (tmp_path / "m" / "config.json").unlink()
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with open_model(tmp_path / "m") as model:
        theta = model.hyper.get("rope_theta")
    if theta is not None and len(config) < len(whole):
        arch, kind, *_ = LISTED[label]
        assert theta == OLDER.get(arch, assumed(kind, config, tmp_path))


@every
def test_gguf_names_are_those_of_the_gguf_package(label: str, folders: Mapping[str, Path]) -> None:
    spec = ARCHS[LISTED[label][0]]
    if "gguf" not in spec.called:
        assert "gguf" not in spec.bindings
        return
    name = spec.called["gguf"][0]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    compared = 0
    with open_model(folders[label]) as model:
        table = gguf.get_tensor_name_map(arch, max(3, model.hyper["n_layers"]))  # mm.2 is one
        heard = ("audio.",) if "mel_bins" in model.hyper else ()  # what the converter asks for
        theirs = {
            name: table.get_name(form, (".weight", ".bias"))
            for name in (stored for view in model.roles.values() for stored in view.names)
            for form in (
                f"audio.{name}" if "audio" in label or "voxtral" in label else name,
                name,
                asked(name),
                f"vision_tower.vision_model.{name}",
                *(prefix + name for prefix in heard),
            )
            if table.get_name(form, (".weight", ".bias")) is not None
        }
        left = HOMELESS.get(label, "-")
        kept = [role for role in model.roles if left not in role]
        groups = groups_for(spec, "gguf", kept, model.hyper)
        ours = {role: group.stored[0] for group in groups for role in group.roles}
        for role, stored in ours.items():
            if not any(part in role for part in UNMAPPED.get(label, ())):
                assert theirs[model.roles[role].names[0]] == stored, role
                compared += 1
    assert compared >= 10


@every
@pytest.mark.parametrize("extension", ["gguf", "apr"])
def test_there_and_back_is_the_same_file(
    label: str, extension: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    spec = ARCHS[LISTED[label][0]]
    target = tmp_path / f"model.{extension}"
    if extension == "gguf" and "gguf" not in spec.called:
        with pytest.raises(AprfmtError, match="no name for"):
            aprfmt.convert(folders[label], target)
        return
    options = drops(label) if extension == "gguf" else {}
    aprfmt.convert(folders[label], target, **options)
    aprfmt.convert(target, tmp_path / "back", to="safetensors")
    before = load_file(folders[label] / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    left = {"pooler": "pooler", "output.weight": "lm_head", "v.head": "head."}
    gone = left.get(HOMELESS.get(label, ""), "")
    kept = {name for name in before if not (options and gone in name)}
    assert set(after) == kept
    for name in kept:
        np.testing.assert_array_equal(after[name], before[name])


@every
def test_a_gguf_of_others_says_every_size(label: str, folders: Mapping[str, Path]) -> None:
    """The keys that llama.cpp's converter writes are enough, without any of ours."""
    spec = ARCHS[LISTED[label][0]]
    if "gguf" not in spec.called:
        return
    with open_model(folders[label]) as model:
        written = write_hyper(spec, model.hyper, "gguf", complete=False)
        facts = Facts("gguf", written, {role: view.shape for role, view in model.roles.items()})
        found, report = read_hyper(spec, facts, label)
        assert report.unknown == () and report.conflicts == ()
        assert expected_roles(spec, found) == expected_roles(spec, model.hyper)


def test_the_level_is_said_and_no_forward_pass_is_tried(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    shown = run("inspect", folders["persimmon"], "--json").json
    assert (shown["architecture"], shown["level"]) == ("persimmon", "names")
    assert "(names only)" in run("inspect", folders["persimmon"]).out
    assert run("validate", folders["persimmon"]).code == 0
    assert run("diff", folders["persimmon"], folders["persimmon"]).code == 0
    ids = ("--ids", "1,2,3")
    for command in (
        ("trace", folders["persimmon"], "--payload", *ids),
        ("trace", folders["persimmon"], "--list-points"),
        ("run", folders["persimmon"], *ids),
        ("eval", folders["persimmon"], *ids),
        ("parity", folders["persimmon"], "--between", "numpy", "torch", *ids),
    ):
        done = run(*command)
        assert done.code == 2, (command, done.out, done.err)
        assert "known by its names and shapes only" in done.err, (command, done.err)
        assert done.err.strip().count("\n") == 0


def test_a_heads_tensors_are_of_no_role(folders: Mapping[str, Path], tmp_path: Path) -> None:
    """Published encoders have the head they were trained with, below the module's own name."""
    import safetensors.numpy

    tensors = load_file(folders["bert"] / "model.safetensors")
    named = {f"bert.{name}": values for name, values in tensors.items()}
    named["cls.predictions.bias"] = np.zeros(56, np.float32)
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folders["bert"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_model(tmp_path) as model:
        assert model.resolution.unbound == ("cls.predictions.bias",)
        assert model.resolution.missing == ()
