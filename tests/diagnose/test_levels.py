"""What is known before any pass: names of places, configurations that cannot be read, equality."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.diagnosis import unread
from aprfmt.diagnosis.accumulated_rounding import TIMES, _experts_may_flip
from aprfmt.diagnosis.models import compare_models
from aprfmt.diagnosis.stored_names import stored_names_of_places
from aprfmt.measure.findings import Finding
from aprfmt.model import open_model
from tests.diagnose.engines import tiny_folder


def changed(folder: Path, config: dict[str, Any], *tensors: str) -> Path:
    """Return a copy of a tiny llama with keys of config.json changed, and tensors doubled."""
    shutil.copytree(tiny_folder("llama"), folder)
    held = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**held, **config}))
    if tensors:
        rows = load_file(folder / "model.safetensors")
        more = {name: 2 * rows[name] for name in tensors}
        save_file({**rows, **more}, folder / "model.safetensors")
    return folder


NORM = "model.layers.1.input_layernorm.weight"
CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...], bool]] = {
    "nothing": ({"note": 1}, (), True),
    "a hyperparameter": ({"rms_norm_eps": 0.25}, (), False),
    "a tensor": ({}, (NORM,), False),
    "both": ({"rms_norm_eps": 0.25}, (NORM,), False),
}


@pytest.mark.parametrize("what", CHANGES)
def test_only_models_without_any_difference_need_no_pass(what: str, tmp_path: Path) -> None:
    config, tensors, equal = CHANGES[what]
    folder = changed(tmp_path / "m", config, *tensors)
    with open_model(tiny_folder("llama")) as a, open_model(folder) as b:
        found = compare_models(a, b)
    assert found.report is not None and not found.reason, found.reason
    assert found.unmoved == equal


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("L1.attn_norm.weight", (NORM,)),
        ("norm_eps", ("rms_norm_eps",)),
        ("rope_theta", ("rope_parameters.rope_theta",)),
        ("no_such_place", None),
    ],
)
@pytest.mark.parametrize("side", ["A", "B"])
def test_places_have_the_names_of_the_file(
    place: str, names: tuple[str, ...] | None, side: Any
) -> None:
    with open_model(tiny_folder("llama")) as model:
        if place in ("norm_eps", "rope_theta"):
            assert place in model.hyper
            assert names == (model.hyper.of(place).key,)
        finding = Finding("dtype", "x", "tensor", "bug", (place,), False, side=side)
        for sides in ((model, None), (None, model), (model, model)):
            found = stored_names_of_places([finding], *sides)
            assert found == ({} if names is None else {place: names})


@pytest.mark.parametrize("fault", ["none", "refused", "misfit"])
def test_a_key_is_restored_from_a_reference_that_is_read(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference that does not fit its own tensors says nothing about another's."""
    good = changed(tmp_path / "good", {"rms_norm_eps": "x"} if fault == "refused" else {})
    bad = changed(tmp_path / "bad", {"hidden_act": "nope"})
    with open_model(good) as a, open_model(bad) as b:
        misfit = {id(a): "shapes"} if fault == "misfit" else {}
        monkeypatch.setattr(unread, "misfit_reason", lambda model: misfit.get(id(model), ""))
        found = unread.read_with_restored_key(a, b, "B")
    assert (found is None) == (fault != "none")
    if found is not None:
        assert found[1].cause == "activation" and "hidden_act" in found[1].where


class View:
    """A point of a pass, with its value."""

    def __init__(self, point: str, *values: float) -> None:
        self.point, self.mine = point, np.array(values, np.float64)


def rounded_pass(margin: float, logit: float) -> Any:
    views = {"L0.router_margin": View("router_margin", 5.0, margin),
             "L0.router": View("router", 1.0, logit)}  # fmt: skip
    return type("Pass", (), {"views": views})()


@pytest.mark.parametrize(
    ("margin", "moved", "may"),
    [(1.0, 0.0, False), (0.0, 0.0, True), (TIMES * 0.25, 0.25, True), (TIMES * 0.26, 0.25, False)],
)
def test_rounding_may_choose_another_expert_within_its_reach(
    margin: float, moved: float, may: bool
) -> None:
    """A margin of zero is a tie, which the order of the experts decides."""
    assert _experts_may_flip(rounded_pass(margin, 2.0), rounded_pass(margin, 2.0 + moved)) == may
