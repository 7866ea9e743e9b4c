"""What is known before any pass: names of places, configurations that cannot be read, equality."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.causes import restored_keys
from aprfmt.codecs.dialect import StoredPart
from aprfmt.conversion import convert
from aprfmt.diagnosis import diagnose, packing
from aprfmt.diagnosis import model_comparison as unread
from aprfmt.diagnosis.accumulated_rounding import TIMES, _experts_may_flip
from aprfmt.diagnosis.model_comparison import compare_models
from aprfmt.diagnosis.stored_names import stored_names_of_places
from aprfmt.measure.findings import Finding
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder, trace
from tests.models import IDS


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
        monkeypatch.setattr(restored_keys, "misfit_reason", lambda model: misfit.get(id(model), ""))
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


def scale_part(*values: float) -> StoredPart:
    return StoredPart(np.array(values, np.float32).tobytes(), "F32", (len(values),))


@pytest.mark.parametrize("bad", [(), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("wrong", [np.nan, -1.0, np.inf])
def test_values_of_a_lost_scale_say_nothing(bad: tuple[int, ...], wrong: float) -> None:
    codes, right = np.arange(1.0, 7.0).reshape(3, 2), [0.5, 0.25, 2.0]

    def packed(scales: StoredPart) -> Any:
        numbers = np.frombuffer(scales.raw, np.float32)
        return SimpleNamespace(
            parts={"scale": scales},
            decode=lambda: codes * numbers[:, None],
            replace_parts=lambda parts: packed(parts["scale"]),
        )

    made = packed(scale_part(*right))
    own = scale_part(*(wrong if at in bad else scale for at, scale in enumerate(right)))
    dialect = SimpleNamespace(signed=False)
    weight: Any = SimpleNamespace(parts={"scale": own}, dialect=dialect)
    expected, values = packing._known_values(made, weight, codes + 100, made.decode())
    assert np.array_equal(values, made.decode())
    wanted = codes + 100
    wanted[list(bad)] = values[list(bad)]
    assert np.array_equal(expected, wanted)


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_a_reference_of_another_format_is_found_by_role(form: str, tmp_path: Path) -> None:
    name, source = "model.layers.1.mlp.down_proj.weight", tiny_folder("llama")
    path = source
    if form == "gguf":
        path = tmp_path / "m.gguf"
        convert(source, path)
    weight: Any = SimpleNamespace(name=name)
    with open_model(path) as good, open_model(source) as plain:
        found = packing._reference_values(good, weight)
        assert found is not None and np.array_equal(found, plain[name].numpy())
        assert packing._reference_values(good, SimpleNamespace(name="no.such")) is None  # type: ignore[arg-type]


LISTS = [
    "identity: architecture, tensor count",
    "hyperparameters: every one that changes the forward pass, with origin",
    "tensors: bytes, then values of all 30",
]
SAME_FILE = ["identity: the same file", "hyperparameters: of the same file",
             "tensors: of the same file"]  # fmt: skip


def both_passes(tokens: int) -> str:
    return (f"forward pass: numpy float32 of both models on {tokens} tokens, with each finding "
            "taken away")  # fmt: skip


IDS_SAME = f"token ids: {len(IDS)}, the same on both sides"
OWN_INPUTS = (
    "B: 57 points on its own inputs through the operations of model.safetensors (numpy float32)"
)
TWO_RUNS = "both runs with each other: 57 points"
# What is compared -> all that was checked: a level that is left out was not looked at.
CHECKED: dict[str, tuple[str, str, list[int] | None, list[str]]] = {
    "another eps": ("model", "eps", None, [*LISTS, both_passes(48)]),
    "another eps, ids": ("model", "eps", [1, 2, 3, 4, 5], [*LISTS, both_passes(5)]),
    "a copy": ("model", "copy", None,
               [*LISTS, "forward pass: not needed, equal logits are proven"]),
    "itself": ("model", "model", None, [*SAME_FILE, "forward pass: not needed, of the same file"]),
    "a run of it": ("model", "run", None, [IDS_SAME, OWN_INPUTS, TWO_RUNS]),
    "two runs": ("run", "other run", None, [IDS_SAME, TWO_RUNS]),
}  # fmt: skip


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("sides"), tiny_folder("llama")
    shutil.copytree(model, folder / "copy")
    return {
        "model": model, "copy": folder / "copy",
        "eps": changed(folder / "eps", {"rms_norm_eps": 0.25}),
        "run": trace(model, "checked-run"),
        "other run": trace(model, "checked-other", hp={"norm_eps": 2.5e-3}),
    }  # fmt: skip


@pytest.mark.parametrize("case", CHECKED)
def test_all_that_was_looked_at_is_said_and_how_much_of_it(
    case: str, sides: dict[str, Path]
) -> None:
    a, b, ids, checked = CHECKED[case]
    found = diagnose(str(sides[a]), str(sides[b]), ids=ids)
    assert list(found.checked) == checked


@pytest.mark.parametrize("count", [1, 4, 5])
def test_extra_tensors_are_named_and_dots_stand_for_those_that_are_not(
    count: int, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "m", {})
    rows = load_file(folder / "model.safetensors")
    names = [f"a_planted.{i}" for i in range(count)]
    more = dict.fromkeys(names, rows[NORM])
    save_file({**rows, **more}, folder / "model.safetensors")
    found = diagnose(str(tiny_folder("llama")), str(folder))
    (row,) = (one for one in found.findings if one.cause == "extra_tensor")
    said = ", ".join(names[:4]) + ", ..." * (count > 4)
    assert row.says.endswith(f"llama does not read: {said}") and row.where == tuple(names)
    many = f"{count} tensor{'s' * (count > 1)}"
    assert row.says.startswith(f"B has {many} that the other has not")
    assert any(text.startswith(f"{said}: only in B") for text in found.not_checked)
