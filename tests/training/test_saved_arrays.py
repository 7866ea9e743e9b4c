"""What is read of the gradients and the optimizer's state that a trainer saved."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from aprfmt.errors import FormatError, UnsupportedError, UsageError
from aprfmt.model import Model, open_model
from aprfmt.model.hf_folder import find_weights
from aprfmt.model.renames import Rename
from aprfmt.training.parameters import pair_parameters
from aprfmt.training.saved_arrays import (
    OptimizerState,
    open_gradients,
    open_state,
    place_names,
    plain_name,
    unread_files,
)
from aprfmt.training.step import explain_step
from tests.models import tiny
from tests.training.judged_steps import backward, batch_of, with_gradients, written

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


def test_each_parameter_has_its_own_count_of_steps(model: Model, tmp_path: Path) -> None:
    one = moments()["state"][QUERY]
    norm = {"exp_avg": torch.ones(16), "exp_avg_sq": torch.ones(16)}
    for query, last in ((3, torch.tensor(4.0)), (torch.tensor(3.0), 4)):
        own = {"state": {QUERY: {**one, "step": query}, NORM: {**norm, "step": last}}}
        with ExitStack() as stack:
            found = state_of(model, tmp_path / "o.pt", own, stack)
            assert found.steps == 4 and found.fewer == {"L0.attn_q.weight": 3}
    groups = [{"params": [QUERY], "step": 9}, {"params": [NORM], "step": 2}]
    with ExitStack() as stack:
        said: dict[str, Any] = {"state": {QUERY: one, NORM: norm}, "param_groups": groups}
        found = state_of(model, tmp_path / "g.pt", said, stack)
        assert found.steps == 9 and found.fewer == {"output_norm.weight": 2}
        groups[1]["step"] = 9
        found = state_of(model, tmp_path / "e.pt", said, stack)
        assert found.steps == 9 and not found.fewer


def test_what_an_adapters_module_reads_and_gives_are_two_arrays(model: Model) -> None:
    inside = "x.lora_A.default", "x.lora_magnitude_vector.default"
    for name in inside:
        assert plain_name(name) != plain_name(f"{name}#in")
        assert plain_name(f"{name}.weight").startswith(name.rpartition(".")[0])
    rows = pair_parameters(model, None, None).rows
    names = [each + end for each in inside for end in ("", "#in")]
    assert place_names(names, rows, model) == ({}, tuple(names))


def test_what_a_module_gives_is_no_gradient_of_its_weight(model: Model) -> None:
    """DoRA's lengths are a module of PEFT's. Seen red: "both of", where points are given too."""
    rows = pair_parameters(model, None).rows
    part = "model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    names = [f"{part}.default.weight", f"{part}.default", f"{part}.default#in"]
    assert place_names(names, rows, model) == ({}, tuple(names))
    with pytest.raises(UsageError, match="are both of"):
        place_names([part, f"{part}.default.weight"], rows, model)


# What is wrong with a state -> what is said.
WRONG: Mapping[str, tuple[Any, type[Exception], str]] = {
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


def test_files_beside_shards_are_said_to_be_unread(
    folder: Path, stepped: Any, tmp_path: Path
) -> None:
    """Seen red: "agrees", where half of the gradients were in a .pt that nobody read."""
    grads = {name: p.grad for name, p in stepped.named_parameters()}
    (tmp_path / "g").mkdir()
    save_file({NORM: grads.pop(NORM)}, tmp_path / "g" / "0.safetensors")
    assert unread_files([tmp_path / "g", tmp_path / "g" / "0.safetensors"]) == ()
    torch.save(grads, tmp_path / "g" / "1.pt")
    report = explain_step(folder, grads=[tmp_path / "g"])
    assert report.exit_code == 2
    assert [one.name for one in report.left if one.kind == "file"] == [str(tmp_path / "g" / "1.pt")]


def test_shards_of_trainers_are_refused_with_what_to_do(
    model: Model, stepped: Any, tmp_path: Path
) -> None:
    """What torch's own tool joins is read. Seen red: "no zip64 directory end; it is damaged"."""
    made = torch.optim.AdamW(list(stepped.named_parameters()))
    made.step()
    state = get_state_dict(stepped, made)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_shards({"optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    zero = tmp_path / "global_step1" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    zero.parent.mkdir()
    torch.save({"state": {}}, zero)
    rows = pair_parameters(model, None).rows
    shard = next((tmp_path / "dcp").glob("*.distcp"))
    for path, says in {
        tmp_path / "dcp": f"^{shard}: is a distributed checkpoint of torch.*dcp_to_torch FOLDER",
        shard: f"^{shard}: is a distributed checkpoint of torch",
        zero.parent: f"^{zero}: is one rank's part of DeepSpeed's ZeRO state.*safe_get_full_opt",
        zero: f"^{zero}: is one rank's part",
    }.items():
        with ExitStack() as stack, pytest.raises(UnsupportedError, match=says):
            open_state(path, rows, model, stack)
        with ExitStack() as stack, pytest.raises(UnsupportedError, match=says):
            open_gradients([path], rows, model, stack)
    # As a checkpoint: torch's, DeepSpeed's with `latest`, the step in it, and a part of stage 3.
    part = zero.parent / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    torch.save({"module": {}}, part)
    (tmp_path / "latest").write_text(zero.parent.name)
    for path, says in {
        tmp_path / "dcp": "dcp_to_torch FOLDER FILE.pt$",
        tmp_path: "zero_to_fp32.py FOLDER OUTPUT",
        zero.parent: "zero_to_fp32.py FOLDER OUTPUT",
    }.items():
        with pytest.raises(UnsupportedError, match=says):
            find_weights(path)
    for path in (zero, part, shard):
        with pytest.raises(UnsupportedError, match=f"^{path}: is "):
            explain_step(tmp_path, after=path)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "joined.pt")
    with ExitStack() as stack:
        found = open_state(tmp_path / "joined.pt", rows, model, stack)
        assert (found.steps, found.unread, found.left) == (1, (), ())
        held = made.state[dict(stepped.named_parameters())[QUERY]]["exp_avg"]
        assert np.array_equal(values_of(found.first, model, QUERY), held.numpy())


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_tied_head_beside_its_table_is_one_gradient(arch: str, tmp_path: Path) -> None:
    """Or in place of it. Seen red: "it is of no parameter of the model"."""
    tiny(arch, tied=True).save_pretrained(tmp_path / "m")
    with open_model(tmp_path / "m") as model:
        rows = pair_parameters(model, None).rows
        row = next(each for each in rows if each.key == "token_embd.weight")
        values = torch.from_numpy(model[row.names[0]].numpy().copy())
        head = "lm_head.weight"
        for kind, held, apart in (
            ("equal", {row.names[0]: values, head: values.clone()}, 0.0),
            ("rounded", {row.names[0]: values, head: values.bfloat16()}, 0.0),
            ("other", {row.names[0]: values, head: 0.5 * values}, 0.5),
            ("alone", {head: values}, None),
        ):
            save_file(held, tmp_path / f"{kind}.safetensors")
            with ExitStack() as stack:
                found = open_gradients([tmp_path / f"{kind}.safetensors"], rows, model, stack)
                second = found.second_table(rows)
                assert (second is None) == (apart is None)
                if second is not None:
                    assert second[0] == head and second[1] == pytest.approx(apart)
                assert found.unplaced == ()
                assert np.array_equal(found.values(row, found.placed[row.key]), values)


@pytest.mark.parametrize("kind", ["parts", "other"])
def test_two_gradients_of_a_tied_table_differ(kind: str, tmp_path: Path) -> None:
    """Of parts, both together are the computed one, and it is said."""
    made, batch = tiny("llama", tied=True), batch_of()
    given: dict[str, Any] = written(tmp_path, made, batch)
    if kind == "parts":
        made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    grads = backward(made, batch)
    grads.setdefault("lm_head.weight", 0.5 * grads["model.embed_tokens.weight"])
    report = explain_step(given.pop("model"), **given, **with_gradients(tmp_path, grads))
    assert not [one for one in report.left if one.kind == "gradient"]
    (cause,) = report.causes
    assert (report.exit_code, cause.roles) == (1, ("token_embd.weight",))
    assert (cause.cause, cause.level) == (
        ("gradient_tied", "explained") if kind == "parts" else ("", "located")
    )
    assert ("both together are the computed one" in cause.says) == (kind == "parts")


def test_moments_of_a_tied_head_beside_its_table(tmp_path: Path) -> None:
    """Two that differ are of a trainer that holds two weights: which are the model's is open."""
    made = tiny("llama", tied=True)
    made.save_pretrained(tmp_path / "m")
    table = made.model.embed_tokens.weight.detach()
    with open_model(tmp_path / "m") as model:
        for factor, left in ((1.0, ()), (0.5, ("lm_head.weight",))):
            moments = {"model.embed_tokens.weight": {"exp_avg": table, "exp_avg_sq": table}}
            moments["lm_head.weight"] = {"exp_avg": factor * table, "exp_avg_sq": table.clone()}
            with ExitStack() as stack:
                found = state_of(model, tmp_path / f"{factor}.pt", {"state": moments}, stack)
                assert found.left == left and found.unread == ()
