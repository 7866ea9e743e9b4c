"""What is read of the gradients and the optimizer's state that a trainer saved."""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aprfmt.errors import FormatError, UsageError
from aprfmt.model import Model, open_model
from aprfmt.model.renames import Rename
from aprfmt.training.parameters import pair_parameters
from aprfmt.training.saved_arrays import OptimizerState, open_gradients, open_state, place_names
from tests.models import tiny
from tests.training.judged_steps import backward, batch_of

NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved") / "m"
    tiny("llama", tied=False).save_pretrained(made)
    return made


@pytest.fixture
def model(folder: Path) -> Iterator[Model]:
    with open_model(folder) as opened:
        yield opened


@pytest.fixture(scope="module")
def stepped() -> Any:
    """A model with the gradients of a batch."""
    made = tiny("llama", tied=False)
    backward(made, batch_of())
    return made


def state_of(model: Model, path: Path, said: Any, stack: ExitStack) -> OptimizerState:
    torch.save(said, path)
    return open_state(path, pair_parameters(model, None, None).rows, model, stack)


def values_of(kept: Any, model: Model, name: str) -> Any:
    row = next(r for r in pair_parameters(model, None, None).rows if r.names == (name,))
    reader = kept.reader(row)
    return None if reader is None else reader.rows(0, row.before.shape[0])


def moments(**more: Any) -> dict[str, Any]:
    """Return the state of one parameter by its name."""
    one = {"exp_avg": torch.ones(16, 16), "exp_avg_sq": torch.ones(16, 16)}
    return {"state": {QUERY: {**one, **more}}}


def test_two_names_that_are_one_parameter_are_refused(model: Model) -> None:
    rows = pair_parameters(model, None, None).rows
    placed, left = place_names([f"grads.{NORM}", "x"], rows, model)
    assert left == ("x",) and len(placed) == 1
    with pytest.raises(UsageError, match=f"^{NORM} and grad.{NORM} are both of {NORM}; give each"):
        place_names([NORM, f"grad.{NORM}"], rows, model)
    rename = Rename("mine.", "model.")
    assert place_names(["mine.norm.weight"], rows, model, [rename])[1] == ()
    with pytest.raises(UsageError, match=f"^{NORM} and mine.norm.weight are both of"):
        place_names([NORM, "mine.norm.weight"], rows, model, [rename])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int32", "int64", "bool", "float16"])
def test_gradients_are_numbers_in_floating_point(kind: str, model: Model, tmp_path: Path) -> None:
    values = torch.ones(model[NORM].shape).to(getattr(torch, kind))
    save_file({NORM: values}, tmp_path / "g.safetensors")
    rows = pair_parameters(model, None, None).rows
    with ExitStack() as stack:
        if kind == "float16":
            assert open_gradients([tmp_path / "g.safetensors"], rows, model, stack).placed
            return
        with pytest.raises(FormatError, match=f"{NORM} is of {kind}; expected gradients in"):
            open_gradients([tmp_path / "g.safetensors"], rows, model, stack)


def test_a_parameter_has_the_settings_of_its_group(
    model: Model, stepped: Any, tmp_path: Path
) -> None:
    """By names in the group, as torch has them, and by numbers whose names are known."""
    named = dict(stepped.named_parameters())
    groups = [
        {"params": [(n, p) for n, p in named.items() if p.ndim > 1], "lr": 0.5},
        {"params": [(n, p) for n, p in named.items() if p.ndim == 1], "lr": 0.25},
    ]
    made = torch.optim.AdamW(groups)
    made.step()
    with ExitStack() as stack:
        found = state_of(model, tmp_path / "o.pt", made.state_dict(), stack)
        assert (found.kind, found.steps, found.indexed) == ("adamw", 1, True)
        assert {found.group_of(name)["lr"] for name, p in named.items() if p.ndim > 1} == {0.5}
        assert {found.group_of(name)["lr"] for name, p in named.items() if p.ndim == 1} == {0.25}
        assert found.group_of("none") == {} and not found.scheduled
        for name, p in named.items():
            wanted = made.state[p]
            for kept, key in ((found.first, "exp_avg"), (found.second, "exp_avg_sq")):
                got = values_of(kept, model, name)
                assert np.array_equal(np.reshape(got, -1), wanted[key].numpy().reshape(-1)), name
        plain = made.state_dict()
        plain["param_groups"] = [
            {**group, "initial_lr": 0.5, "param_names": None} for group in plain["param_groups"]
        ]
        names = [each for group in made.param_groups for each in group["param_names"]]
        plain["param_groups"].append({"params": list(range(len(names))), "param_names": names})
        found = state_of(model, tmp_path / "p.pt", plain, stack)
        assert found.scheduled and found.group_of(NORM)["lr"] == 0.25


def test_the_second_moment_of_adafactor_is_made_of_its_means(
    model: Model, stepped: Any, tmp_path: Path
) -> None:
    """Rows times columns over the rows' mean, as torch's step makes it; vectors have their own."""
    named = dict(stepped.named_parameters())
    made: Any = torch.optim.Adafactor(list(named.items()))
    made.step()
    with ExitStack() as stack:
        found = state_of(model, tmp_path / "o.pt", made.state_dict(), stack)
        assert found.kind == "adafactor" and found.factored == "row_var"
        for name, p in named.items():
            held = made.state[p]
            wanted = (
                held["variance"]
                if p.ndim == 1
                else held["row_var"] @ held["col_var"] / held["row_var"].mean(-2, keepdim=True)
            )
            got = np.reshape(values_of(found.second, model, name), p.shape)
            assert np.allclose(got, wanted.numpy(), rtol=1e-5), name
        assert not found.first.placed


# What is wrong with a state -> what is said.
WRONG: Mapping[str, tuple[Any, type[Exception], str]] = {
    "other steps": (
        {"state": {QUERY: {**moments()["state"][QUERY], "step": 3},
                   NORM: {"exp_avg": torch.ones(16), "step": torch.tensor(4.0)}}},
        FormatError, "its parameters are of steps 3 to 4; expected one number"),
    "half a step": (moments(step=1.5), FormatError, "step is 1.5; expected a whole number"),
    "a step before the first": (moments(step=-1), FormatError, "step is -1; expected a whole"),
    "no number of steps": (moments(step=torch.tensor(float("nan"))), FormatError, "step is nan"),
    "no steps": (moments(step=torch.zeros(0)), FormatError, "step is nan; expected a whole"),
    "one beta": (
        {**moments(), "param_groups": [{"betas": [0.9], "params": [0]}]},
        FormatError, r"betas of parameter group 0 are \[0.9\]; expected two numbers"),
    "a negative beta": (
        {**moments(), "param_groups": [{"betas": [0.9, -1.0], "params": [0]}]},
        FormatError, "betas of parameter group 0 is -1.0; expected a finite number"),
    "a rate that is none": (
        {**moments(), "param_groups": [{"lr": 0.1}, {"lr": float("inf")}]},
        FormatError, "lr of parameter group 1 is inf; expected a finite number"),
    "a rate that is a word": (
        {**moments(), "param_groups": [{"lr": True}]},
        FormatError, "lr of parameter group 0 is True; expected a finite number"),
    "another model": (
        {"state": {"encoder.weight": {"exp_avg": torch.ones(4)}}},
        UsageError, "holds the state of another model: 'encoder.weight' is no parameter of"),
    "no state": ({"weights": torch.ones(4)}, FormatError, "holds no optimizer's state"),
    "numbers alone": (
        {"state": {0: {"exp_avg": torch.ones(16)}, 1: {"exp_avg": torch.ones(7)}}},
        FormatError, "names its parameters by numbers, of which nothing says what they are"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_cannot_be_used_is_refused(wrong: str, model: Model, tmp_path: Path) -> None:
    said, kind, match = WRONG[wrong]
    path = tmp_path / "o.pt"
    with ExitStack() as stack, pytest.raises(kind, match=f"^{re.escape(str(path))}: .*{match}"):
        state_of(model, path, said, stack)


def test_what_a_state_has_besides_moments_is_named(model: Model, tmp_path: Path) -> None:
    """An array of a moment's size; one number, or a step, is none."""
    size = tuple(model[QUERY].shape)
    one = {"exp_avg": torch.ones(size), "exp_avg_sq": torch.ones(size), "step": 2}
    more = {"shift": torch.zeros(size), "scale": torch.ones(1), "other": torch.ones(3)}
    with ExitStack() as stack:
        found = state_of(model, tmp_path / "o.pt", {"state": {QUERY: {**one, **more}}}, stack)
        assert found.unused == {QUERY: "shift"} and found.steps == 2 and not found.indexed
        settings = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        begun = state_of(model, tmp_path / "p.pt", settings, stack)
        assert begun.steps == 0 and begun.group_of("any") == {"lr": 0.5, "params": [0]}
        assert (begun.kind, begun.first.placed, begun.second.placed) == ("sgd", {}, {})


@pytest.mark.parametrize("lacks", ["", "qmap1", "absmax1", "blocks", "table"])
def test_codes_are_read_by_their_table_and_block_scales(
    lacks: str, model: Model, tmp_path: Path
) -> None:
    """Without one of them, or with a size that bitsandbytes has not, a state's codes are not."""
    size = tuple(model[QUERY].shape)
    count = size[0] * size[1]
    codes = np.random.default_rng(0).integers(0, 256, count, np.uint8)
    table, scales = np.linspace(-1, 1, 256, dtype=np.float32), np.arange(1, count // 64 + 1)
    held = {
        "state1": torch.from_numpy(codes.reshape(size)),
        "qmap1": torch.from_numpy(table if lacks != "table" else table[:255].copy()),
        "absmax1": torch.from_numpy(scales.astype(np.float32))[: -1 if lacks == "blocks" else None],
        "step": 1,
    }
    assert count % 64 == 0 and count > 64
    held = {name: each for name, each in held.items() if name != lacks}
    with ExitStack() as stack:
        found = state_of(model, tmp_path / "o.pt", {"state": {QUERY: held}}, stack)
        assert found.coded == (QUERY,)
        got = values_of(found.first, model, QUERY)
        if lacks:
            assert got is None
            return
        wanted = table[codes] * np.repeat(scales, 64).astype(np.float32)
        assert np.array_equal(np.reshape(got, -1), wanted)


def test_a_folder_of_shards_is_one_set_of_gradients(
    model: Model, stepped: Any, tmp_path: Path
) -> None:
    """Seen red: a folder read as dumped arrays alone, and refused."""
    grads = {name: p.grad for name, p in stepped.named_parameters()}
    names = sorted(grads)
    (tmp_path / "shards").mkdir()
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({n: grads[n] for n in part}, tmp_path / "shards" / f"{number}.safetensors")
    with ExitStack() as stack:
        rows = pair_parameters(model, None).rows
        found = open_gradients([tmp_path / "shards"], rows, model, stack)
        assert set(found.placed) == {row.key for row in rows}
        assert np.array_equal(values_of(found, model, NORM).reshape(-1), grads[NORM].numpy())
