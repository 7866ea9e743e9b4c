"""`aprfmt step`: forty mistakes are named and placed, and no step that is right is accused."""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes import causes_of, modules_of
from aprfmt.causes.training.optimizers import Recipe
from aprfmt.causes.training.step_case import StepCase, StepGuess, StepHypothesis
from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.training import update_check
from aprfmt.training.memory import estimate_step
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.conversion.folders import llama_folder
from tests.training import (
    adapter_steps,
    adapters,
    framework_steps,
    judged_steps,
    loop_steps,
    mixer_steps,
    part_steps,
    thread_steps,
    trainer_steps,
)
from tests.training.faults import (
    FAULTS,
    INNOCENTS,
    STATED,
    UNDECIDED,
    StepFault,
    by_numbers,
    finer,
    later,
)
from tests.training.gradient_faults import (
    GRADIENT_FAULTS,
    GRADIENT_INNOCENTS,
    GradientFault,
    noisy,
    report_of,
    right_gradients,
)
from tests.training.steps import (
    B1,
    B2,
    EMBED,
    EPS,
    HEAD,
    HIDDEN,
    LAYERS,
    LR,
    Q1,
    VOCAB,
    WD,
    Made,
    Values,
    adamw,
    adamw_all,
    decaying_groups,
    gradients,
    moments,
    right,
    save,
    save_arrays,
    stepped,
    stepped_optimizer,
    torch_steps,
    weights,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_mistake_is_named_where_it_is(fault: StepFault, tmp_path: Path) -> None:
    report = fault.make().report(tmp_path)
    assert report.exit_code == 1
    assert [cause.cause for cause in report.causes] == [fault.cause]
    found = report.causes[0]
    assert (len(found.roles), found.level) == (fault.tensors, fault.level)


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_two_mistakes_give_is_not_confirmed(name: str, tmp_path: Path) -> None:
    """Seen red: the correction of a moment confirmed where the rate was a tenth."""
    report = UNDECIDED[name]().report(tmp_path)
    assert report.exit_code == 1
    assert [cause.level for cause in report.causes] == ["explained"]
    assert "as well given by" in report.causes[0].says


@pytest.mark.parametrize("decay", [True, False])
def test_an_average_saved_in_place_of_weights_is_no_confirmed_rate(
    decay: bool, tmp_path: Path
) -> None:
    """The bytes are the same. Seen red: "the rate is 2e-07", confirmed."""
    stated = STATED if decay else STATED.replace("wd=0.1", "wd=0")
    after = stepped(right if decay else partial(right, wd=0.0))
    averaged = {n: w + np.float32(1e-3) * (after[n] - w) for n, w in weights().items()}
    (found,) = Made(averaged, stated, grads=gradients(1)).report(tmp_path).causes
    assert (found.cause, found.level) == ("step_factor", "explained")
    assert "EMA" in found.says


def test_norms_decay_only_next_to_a_matrix_that_decays(tmp_path: Path) -> None:
    """A constant in the gradient may look like decay in a norm; no matrix shows a decay then."""
    made = by_numbers(f"adam:lr={LR},wd={WD / 1000},step=1")
    vectors = {name: x for name, x in torch_steps(adamw_all)[0][0].items() if x.ndim < 2}
    for after, said in ((made.after, False), (torch_steps(adamw_all)[0][0], True)):
        stated = f"adamw:lr={LR},wd={WD},step=1"
        (folder := tmp_path / str(said)).mkdir()
        report = Made(after | vectors, stated, grads=gradients(1)).report(folder)
        assert any("norms and biases decay" in note for note in report.notes) == said


@pytest.mark.parametrize("made", [1.0, 0.0])
def test_the_states_decay_tells_a_lost_one_from_none(made: float, tmp_path: Path) -> None:
    """The bits are the same. Seen red: confirmed without the state."""
    make = partial(adamw_all, lr=1e-3, weight_decay=made, foreach=False)
    (after,), state = stepped_optimizer(make, dtype="bfloat16")
    torch = pytest.importorskip("torch")
    torch.save(state.state_dict(), tmp_path / "state.pt")
    given: dict[str, Any] = {
        "after": save(tmp_path / "after", after, "BF16"),
        "grads": [save_arrays(tmp_path / "g.npz", gradients(1))],
        "optimizer": "adamw:lr=1e-3,wd=1,step=1,decay_on=all",
    }
    before = save(tmp_path / "before", weights(), "BF16")
    (found,) = explain_step(before, **given).causes
    assert (found.cause, found.level) == ("decay_rounded_away", "explained")
    assert "as well given by decay_missing; --optimizer-state" in found.says
    (found,) = explain_step(before, **given, optimizer_state=tmp_path / "state.pt").causes
    assert found.cause == ("decay_rounded_away" if made else "decay_missing")
    assert "as well given by" not in found.says


@pytest.mark.parametrize("name", INNOCENTS)
def test_a_right_step_is_not_accused(name: str, tmp_path: Path) -> None:
    report = INNOCENTS[name]().report(tmp_path)
    assert report.causes == () and report.exit_code == 0
    assert report.counts["agrees"] == len(report.tensors)


@pytest.mark.parametrize("fault", GRADIENT_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_gradient_is_named_where_it_is(fault: GradientFault, tmp_path: Path) -> None:
    state = None if fault.state is None else fault.state()
    report = report_of(
        tmp_path, fault.make(right_gradients()), optimizer=fault.optimizer, state=state
    )
    assert report.exit_code == 1
    assert [cause.cause for cause in report.causes] == [fault.cause]
    found = report.causes[0]
    assert (len(found.roles), found.level) == (fault.tensors, fault.level)
    assert fault.says in found.says


def test_rounding_of_few_bits_is_open_until_it_is_said(tmp_path: Path) -> None:
    """Float32 files whose trainer computed in bfloat16: no alarm, and no verdict before that."""
    given = noisy(1e-2)(right_gradients())
    assert report_of(tmp_path, given).exit_code == 2
    assert report_of(tmp_path / "said", given, trained_in="bfloat16").exit_code == 0


@pytest.mark.parametrize("part", [EMBED, HEAD])
def test_one_part_of_a_tied_gradient_is_named(part: str, tmp_path: Path) -> None:
    parts = right_gradients()
    both = {name: each for name, each in parts.items() if name != HEAD}
    both[EMBED] = parts[EMBED] + parts[HEAD]
    report = report_of(tmp_path, both | {EMBED: parts[part]}, right=both)
    assert [(one.cause, one.level) for one in report.causes] == [("gradient_tied", "explained")]
    whole = report_of(tmp_path / "right", both, right=both)
    assert whole.causes == () and whole.exit_code == 0


def test_every_cause_of_a_step_has_its_fault() -> None:
    """Those of adapters and of points stand in tests of their own, others in the judged steps."""
    judged: tuple[Any, ...] = (
        *judged_steps.FAULTS, *judged_steps.RELATIVES, *thread_steps.THREAD_FAULTS,
        *adapter_steps.ADAPTER_FAULTS,
    )  # fmt: skip
    loops = (*loop_steps.LOOP_FAULTS, *loop_steps.LOOP_RELATIVES)
    trainers = (*trainer_steps.TRAINER_FAULTS, *trainer_steps.TRAINER_RELATIVES)
    others = (
        *framework_steps.FRAMEWORK_FAULTS, *part_steps.PART_FAULTS, *mixer_steps.MIXER_FAULTS,
    )  # fmt: skip
    every: tuple[Any, ...] = (*FAULTS, *GRADIENT_FAULTS, *judged, *loops, *trainers, *others)
    seeded = {fault.cause for fault in every} - {"", "nonfinite"}
    rows = {row.name for module in modules_of("training") for row in causes_of(module)}
    assert seeded | {"adapter_half_frozen", "adapter_frozen", "backward_operation"} == rows


@pytest.mark.parametrize("name", GRADIENT_INNOCENTS)
def test_a_right_gradient_is_not_accused(name: str, tmp_path: Path) -> None:
    change, encoding = GRADIENT_INNOCENTS[name]
    report = report_of(tmp_path, change(right_gradients()), encoding)
    assert report.causes == () and report.exit_code == 0
    assert report.counts["agrees"] == len(report.tensors)


def test_the_first_step_of_an_adapter_moves_b_alone(tmp_path: Path) -> None:
    """Seen red: A of a pair whose B is zero taken for one that should move."""
    report = adapters.report_of(tmp_path, True, lambda name: "lora_A" in name)
    assert report.causes == () and report.exit_code == 0
    assert report.tensors[0].key == "L0.attn_q.weight.lora_a"


def test_gradients_of_an_adapter_go_by_the_names_of_peft(tmp_path: Path) -> None:
    """As named_parameters() has them, with the adapter's name in each. Seen red: without it."""
    before = adapters.adapter(False)
    named = {
        name.replace(".weight", ".default.weight"): g
        for name, g in adapters.gradients(before).items()
    }
    report = explain_step(
        save(tmp_path / "base", weights(), "BF16"),
        adapter=adapters.write(tmp_path / "before", before),
        after=adapters.write(tmp_path / "after", adapters.stepped(before, lambda name: False)),
        grads=[save_arrays(tmp_path / "g.npz", named)],
        optimizer=f"adam:lr={LR},step=1",
    )
    assert report.exit_code == 0 and report.pronounced.says == "agrees, 8 tensors"


@pytest.mark.parametrize("stored", ["", ".weight"])
@pytest.mark.parametrize("given", [".default.weight", ".weight", ".mine", ""])
@pytest.mark.parametrize("frozen", [False, True])
def test_magnitudes_of_dora_are_one_parameter_in_all_spellings(
    stored: str, given: str, frozen: bool, tmp_path: Path
) -> None:
    """PEFT trains a module's weight and saves it without `.weight`. Seen red: without that name."""
    part = "lora_magnitude_vector"
    before = adapters.adapter(False)
    for module in adapters.MODULES:
        size = before[f"base_model.model.{module}.lora_B.weight"].shape[0]
        before[f"base_model.model.{module}.{part}{stored}"] = np.full(size, 2, np.float32)
    named = {
        f"{name.partition(part)[0]}{part}{given}" if part in name else name: g
        for name, g in adapters.gradients(before).items()
    }
    after = adapters.stepped(before, lambda name: frozen and part in name)
    report = explain_step(
        save(tmp_path / "base", weights(), "BF16"),
        adapter=adapters.write(tmp_path / "before", before),
        after=adapters.write(tmp_path / "after", after),
        grads=[save_arrays(tmp_path / "g.npz", named)],
        optimizer=f"adam:lr={LR},step=1",
    )
    found = [(one.cause, len(one.roles)) for one in report.causes]
    assert found == ([("frozen", len(adapters.MODULES))] if frozen else [])
    assert report.exit_code == int(frozen) and not report.left and len(report.tensors) == 12


@pytest.mark.parametrize(
    ("cause", "still", "count"),
    [
        ("adapter_half_frozen", lambda name: "1.self_attn.q_proj.lora_B" in name, 1),
        ("adapter_half_frozen", lambda name: "0.self_attn.v_proj.lora_A" in name, 1),
        ("adapter_frozen", lambda name: "q_proj" in name, 4),
    ],
)
def test_a_factor_that_did_not_move_is_named(
    cause: str, still: Callable[[str], bool], count: int, tmp_path: Path
) -> None:
    report = adapters.report_of(tmp_path, False, still)
    assert [(one.cause, len(one.roles)) for one in report.causes] == [(cause, count)]
    assert report.exit_code == 1


def test_an_adapter_whose_a_is_frozen_everywhere_is_open(tmp_path: Path) -> None:
    """It may be meant so; it is not said to agree either."""
    report = adapters.report_of(tmp_path, False, lambda name: "lora_A" in name)
    assert report.causes == () and report.exit_code == 2


# --- bad input ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint, the one after a step, one of another width, and arrays."""
    folder = tmp_path_factory.mktemp("files")
    w, g = weights(), gradients(1)
    half = {name: each[: len(each) // 2] for name, each in g.items()}
    state = {f"{name}.exp_avg": each for name, each in g.items()}
    factored = {f"{EMBED}.exp_avg_sq_{each}": np.ones(3) for each in ("row", "col")}
    return {
        "before": save(folder / "before", w, "F32"),
        "after": save(folder / "after", stepped(right), "F32"),
        "other": llama_folder(folder / "other", "F32", hidden=32, layers=1),
        "grads": save_arrays(folder / "grads.npz", g),
        "deep": llama_folder(folder / "deep", "F32", hidden=HIDDEN, vocab=VOCAB, layers=LAYERS + 1),
        "whole": save_arrays(folder / "whole.npz", {n: x.astype(np.int32) for n, x in g.items()}),
        "both": save_arrays(folder / "both.npz", g | {f"{HEAD}.grad": g[HEAD]}),
        "half": save_arrays(folder / "half.npz", half),
        "names": save_arrays(folder / "names.npz", {"weight": g[HEAD]}),
        "state": save_arrays(folder / "state.npz", state),
        "factored": save_arrays(folder / "factored.npz", factored),
        "adapter": adapters.write(folder / "adapter", adapters.adapter(True)),
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "nothing to explain; give --after CKPT"),
        ({"after": "other"}, r"other.*: is a checkpoint of another model: .* is \[33, 32\]; "
         r"expected \[40, 64\]"),
        ({"after": "deep"}, "deep.*: is a checkpoint of another model: layer 2 is only in the one "
         "after the step"),
        ({"after": "after", "grads": "whole"}, "whole.npz: .* is of int32; expected gradients in "
         "floating point"),
        ({"after": "after", "grads": "both"}, ".* and .*grad are both of .*; give each array once"),
        ({"after": "after", "optimizer": "adamw:lr=1,sparse=maybe"}, "sparse=maybe; expected 1 or"),
        ({"after": "after", "optimizer": "sgd:lr=1,nesterov=on"}, "nesterov=on; expected 1 or 0"),
        ({"after": "adapter"}, "is an adapter, .* is a whole model"),
        ({"after": "after", "grads": "half"}, r"half.npz: .* is \[.*\]; expected \["),
        ({"after": "after", "grads": "names"}, "names.npz: holds no gradient of .*'weight' is no "
         "parameter of it"),
        ({"after": "after", "optimizer": "adamw"}, "no lr; expected the rate of this step"),
        ({"after": "after", "optimizer": "adamw:lr=-1"}, "lr=-1; expected a finite number of"),
        ({"after": "after", "optimizer": "adamw:lr=1,b1=1.5"}, "b1=1.5; expected .* below 1"),
        ({"after": "after", "optimizer": "adamw:lr=1,rate=2"}, "'rate=2'; expected NAME=VALUE of"),
        ({"after": "after", "optimizer": "sgd:lr=1,b1=0.9"}, "sgd has no b1; expected NAME="),
        ({"after": "after", "optimizer": "adamw:lr=1,lr=2"}, "lr is given twice; give it once"),
        ({"after": "after", "optimizer_state": "factored", "optimizer": "adam:lr=1"},
         "has exp_avg_sq_row, and --optimizer says adam; expected the rule that made it"),
        ({"after": "after", "optimizer": "muon:lr=1"}, "no optimizer 'muon'; known: adamw, adam"),
        ({"after": "after", "optimizer_state": "state"}, "state.npz: holds no settings of its "
         "optimizer"),
        ({"after": "after", "optimizer_state": "state", "optimizer": "adamw:lr=1"},
         "state.npz: does not say how many steps were made; add step=N"),
        ({"after": "after", "optimizer_state": "grads", "optimizer": "adam:lr=1"},
         "grads.npz: holds no optimizer's state"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(given: dict[str, str], says: str, files: dict[str, Path]) -> None:
    """Nothing is said by halves: an error, and no report."""
    read = {
        name: value if name == "optimizer" else (files[value],) if name == "grads" else files[value]
        for name, value in given.items()
    }
    with pytest.raises(AprfmtError) as found:
        explain_step(files["before"], **read)  # type: ignore[arg-type]
    assert re.search(says, str(found.value)) and "\n" not in str(found.value)


def state_of(folder: Path, group: dict[str, Any], step: float = 1.0) -> Path:
    """Write torch's state of AdamW with other settings of its group, or another count."""
    import torch

    names = list(weights())
    held = {
        number: {
            "step": torch.tensor(step),
            "exp_avg": torch.from_numpy(gradients(1)[name]) * (1 - B1),
            "exp_avg_sq": torch.from_numpy(gradients(1)[name]) ** 2 * (1 - B2),
        }
        for number, name in enumerate(names)
    }
    own = {"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": 0.0}
    own |= {"params": list(range(len(names))), "param_names": names}
    path = folder / "state.pt"
    torch.save({"state": held, "param_groups": [own | group]}, path)
    return path


@pytest.mark.parametrize(
    ("group", "step", "says"),
    [
        ({"lr": "fast"}, 1.0, "lr of parameter group 0 is 'fast'; expected a finite number"),
        ({"lr": float("nan")}, 1.0, "lr of parameter group 0 is nan; expected a finite number"),
        ({"weight_decay": -1.0}, 1.0, "weight_decay of parameter group 0 is -1.0; expected"),
        ({"betas": (0.9,)}, 1.0, r"betas of parameter group 0 are \[0.9\]; expected two numbers"),
        ({"betas": (0.9, float("inf"))}, 1.0, "betas of parameter group 0 is inf; expected"),
        ({}, -1.0, "step is -1; expected a whole number of at least 0"),
        ({}, float("nan"), "step is nan; expected a whole number"),
        ({}, 1.5, "step is 1.5; expected a whole number"),
    ],
)
def test_a_state_that_no_optimizer_has_is_one_line(
    group: dict[str, Any], step: float, says: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """Seen red: a division by zero, and a beta of 0.999 where none was given."""
    state = state_of(tmp_path, group, step)
    with pytest.raises(FormatError) as found:
        explain_step(files["before"], after=files["after"], optimizer_state=state)
    assert re.search(says, str(found.value)) and "\n" not in str(found.value)


def test_a_rate_that_is_a_tensor_is_read(tmp_path: Path) -> None:
    import torch

    after = stepped(lambda w, g: right(w, g, wd=0.0))
    made = [save(tmp_path / name, w, "F32") for name, w in (("a", weights()), ("b", after))]
    state = state_of(tmp_path, {"lr": torch.tensor(LR)})
    report = explain_step(made[0], after=made[1], optimizer_state=state)
    assert report.exit_code == 0, report.pronounced.says


def test_a_file_without_arrays_is_one_line(files: dict[str, Path], tmp_path: Path) -> None:
    empty = save_arrays(tmp_path / "empty.npz", {})
    with pytest.raises(FormatError, match="holds no array; expected gradients by parameter"):
        explain_step(files["before"], grads=[empty])


def test_a_gradient_with_nan_is_a_difference(files: dict[str, Path], tmp_path: Path) -> None:
    g = {name: each.copy() for name, each in gradients(1).items()}
    g[HEAD][0, 0] = np.nan
    grads = save_arrays(tmp_path / "nan.npz", g)
    report = explain_step(files["before"], after=files["after"], grads=[grads], optimizer=STATED)
    assert report.exit_code == 1
    assert [(one.cause, one.where) for one in report.causes] == [("nonfinite", (HEAD,))]


def test_a_parameter_without_a_gradient_stays_open(files: dict[str, Path], tmp_path: Path) -> None:
    """It is in the denominator, whatever all others are. Seen red: left out of the verdict."""
    g = {name: each for name, each in gradients(1).items() if name != HEAD}
    grads = save_arrays(tmp_path / "some.npz", g)
    after = save(tmp_path / "after", stepped(lambda w, g: -0.5 * g), "F32")
    report = explain_step(files["before"], after=after, grads=[grads], optimizer="sgd:lr=0.5")
    assert [row.key for row in report.tensors if row.verdict == "not compared"] == ["output.weight"]
    assert report.exit_code == 2 and report.counts["agrees"] == 20


@pytest.mark.parametrize("size", [1e-4, 1e-5])
def test_sizes_of_gradients_near_epsilon_say_no_rate(size: float, tmp_path: Path) -> None:
    """Seen red: `the rate is 0.986 of the stated one`, confirmed, over a step that is right."""
    after = torch_steps(adamw, scale=size)[0][0]
    report = Made(after).report(tmp_path)
    assert report.causes == () and report.exit_code != 1
    assert any("as small as epsilon" in row.why for row in report.tensors) or size > 1e-5


def test_a_step_of_one_parameter_without_a_gradient_is_no_agreement(tmp_path: Path) -> None:
    """Its step goes up the gradient. Seen red: taken for right by its size."""
    wrong = stepped(lambda w, g: LR * g / (np.abs(g) + EPS) - LR * WD * w, (HEAD,))
    some = {name: g for name, g in gradients(1).items() if name != HEAD}
    report = Made(wrong, STATED, grads=some).report(tmp_path)
    assert report.exit_code == 2 and report.counts["not compared"] == 1


def test_a_coarser_file_after_the_step_is_open(files: dict[str, Path], tmp_path: Path) -> None:
    """float32 before it, bfloat16 after it: what that rounded away is not known. Seen red: 0."""
    after = save(tmp_path / "after", finer(stepped(right)), "BF16")
    grads = [files["grads"]]
    report = explain_step(files["before"], after=after, grads=grads, optimizer=STATED)
    assert report.causes == () and report.exit_code == 2
    assert "F32 before the step, BF16 after it" in report.pronounced.says


def torch_state(folder: Path, make: Callable[[Any, Any], Any]) -> StepReport:
    """Return what is said of torch's second step by its gradients and its state alone."""
    import torch

    _, earlier = stepped_optimizer(make)
    (before, after), later = stepped_optimizer(make, 2)
    torch.save(earlier.state_dict(), folder / "2.pt")
    torch.save(later.state_dict(), folder / "3.pt")
    saved = save(folder / "b", before, "F32")
    reached = save(folder / "a", after, "F32")
    grads = [save_arrays(folder / "g.npz", gradients(2))]
    older = explain_step(saved, after=reached, grads=grads, optimizer_state=folder / "2.pt")
    assert older.exit_code == 0, older.pronounced.says  # the state of before, and nobody said so
    return explain_step(saved, after=reached, optimizer_state=folder / "3.pt")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Adam", {"lr": LR, "weight_decay": WD}),
        ("AdamW", {"lr": LR, "weight_decay": WD, "maximize": True}),
        ("SGD", {"lr": 0.5, "momentum": 0.9}),
    ],
)
def test_what_a_state_says_of_its_optimizer_is_used(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """L2 that is added to the gradient, a step upwards, no count. Seen red: a decay that misses."""
    report = torch_state(tmp_path, lambda t, p: getattr(t.optim, name)(p, **settings))
    assert report.exit_code == 0 and report.counts["agrees"] == 21, report.pronounced.says


def test_states_of_8_bits_are_decoded(tmp_path: Path) -> None:
    """Those of before the step are what it was made of; those of after it were rounded since."""
    rng = np.random.default_rng(3)
    table = np.sort(np.concatenate([[-1, 0, 1], rng.uniform(-1, 1, 253)])).astype(np.float32)
    coded: Values = {}
    decoded: dict[str, Values] = {"1": {}, "2": {}}
    for number, values in zip("12", moments(1), strict=True):
        for name, each in values.items():
            largest = np.abs(each).reshape(-1, 64).max(1)
            share = each.reshape(-1, 64) / np.where(largest, largest, 1)[:, None]
            codes = np.abs(share[..., None] - table).argmin(-1).astype(np.uint8)
            if number == "2":
                codes = np.maximum(codes, np.searchsorted(table, 0)).astype(np.uint8)
            coded[f"{name}.state{number}"] = codes.reshape(each.shape)
            coded[f"{name}.qmap{number}"] = table
            coded[f"{name}.absmax{number}"] = largest.astype(np.float32)
            decoded[number][name] = (table[codes] * largest.astype(np.float32)[:, None]).reshape(
                each.shape
            )
    after = {}
    for name, w in weights().items():
        g = gradients(2)[name].astype(np.float64)
        m = B1 * decoded["1"][name] + (1 - B1) * g
        v = B2 * decoded["2"][name] + (1 - B2) * g * g
        step = -LR * (m / (1 - B1**2)) / (np.sqrt(v / (1 - B2**2)) + EPS)
        after[name] = (w + step - (LR * WD * w if w.ndim > 1 else 0)).astype(np.float32)
    stated = f"adamw:lr={LR},wd={WD},step=2"
    state = coded | {"step": np.asarray([1.0])}
    report = Made(after, stated, grads=gradients(2), state=state).report(tmp_path)
    assert report.exit_code == 0, report.pronounced.says
    state = coded | {"step": np.asarray([2.0])}
    later = Made(after, stated, grads=gradients(2), state=state).report(tmp_path / "later")
    assert later.exit_code == 2 and later.causes == ()


def test_what_is_of_no_parameter_stays_open(files: dict[str, Path], tmp_path: Path) -> None:
    grads = save_arrays(tmp_path / "more.npz", gradients(1) | {"model.vision.weight": np.ones(3)})
    report = explain_step(files["before"], after=files["after"], grads=[grads], optimizer=STATED)
    assert report.exit_code == 2 and "gradient model.vision.weight" in report.pronounced.says


@pytest.mark.parametrize("wrapped", ["module.{}", "_orig_mod.{}", "{}.grad", "grads.{}"])
def test_names_of_trainers_are_known(wrapped: str, files: dict[str, Path], tmp_path: Path) -> None:
    g = {wrapped.format(name): each for name, each in gradients(1).items()}
    grads = save_arrays(tmp_path / "g.npz", g)
    report = explain_step(files["before"], after=files["after"], grads=[grads], optimizer=STATED)
    assert report.exit_code == 0


# --- files of torch -----------------------------------------------------------------------------


def test_the_state_that_torch_saves_is_read_by_its_names(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """Settings are those of its groups; parameters are named there, or told by their shapes."""
    import torch

    (after,), optimizer = stepped_optimizer(adamw_all)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    grads = {name: torch.from_numpy(g) for name, g in gradients(1).items()}
    torch.save(grads, tmp_path / "grads.pt")
    stepped_to = save(tmp_path / "after", after, "F32")
    report = explain_step(
        files["before"],
        after=stepped_to,
        optimizer_state=tmp_path / "state.pt",
        grads=[tmp_path / "grads.pt"],
    )
    assert report.exit_code == 0 and report.counts["agrees"] == 21
    assert report.optimizer == f"adamw:lr={LR:g},b1=0.9,b2=0.999,eps=1e-08,wd={WD:g},step=1"


Steps = Callable[[Values, Values], Values]  # weights before and after a step -> those after it


def numbered_step(folder: Path, reverse: bool, fault: Steps) -> StepReport:
    """Return what is said of torch's second step by a state whose parameters are numbers.

    Parameters are handed over in the order of the model, or `reverse`; norms have half the rate.
    """
    import torch

    def make(torch: Any, parameters: list[Any]) -> Any:
        groups = decaying_groups(parameters[:: -1 if reverse else 1])
        groups[1]["lr"] = LR / 2
        return torch.optim.AdamW(groups, lr=LR)

    (before, after), optimizer = stepped_optimizer(make, 2)
    torch.save(optimizer.state_dict(), folder / "numbers.pt")
    return explain_step(
        save(folder / "before", before, "F32"),
        after=save(folder / "after", fault(before, after), "F32"),
        optimizer_state=folder / "numbers.pt",
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_of_a_state_are_told_by_their_steps(reverse: bool, tmp_path: Path) -> None:
    """Every parameter is held to its own moments and to the settings of its own group."""
    report = numbered_step(tmp_path, reverse, lambda before, after: after)
    assert report.exit_code == 0 and report.counts["agrees"] == 21, report.pronounced.says
    assert any("numbers of the state" in note for note in report.notes)
    assert not report.left  # nothing was taken for right by its size alone


def test_a_wrong_step_is_seen_by_a_state_of_numbers(tmp_path: Path) -> None:
    """Seen red: its sizes taken for an agreement. What was told by values may not hide a fault."""
    upwards = numbered_step(
        tmp_path,
        False,
        lambda before, after: {n: 2 * before[n] - w if w.ndim > 1 else w for n, w in after.items()},
    )
    assert upwards.exit_code == 1 and upwards.counts["differs"] == 16
    q0, q1 = Q1.replace("1", "0"), Q1
    (tmp_path / "other").mkdir()
    exchanged = numbered_step(
        tmp_path / "other",
        False,
        lambda before, after: (
            after | {a: before[a] + after[b] - before[b] for a, b in ((q0, q1), (q1, q0))}
        ),
    )
    assert exchanged.exit_code == 1 and 1 <= exchanged.counts["differs"] <= 2


def test_memory_is_that_of_a_piece_and_of_the_largest_gradient(files: dict[str, Path]) -> None:
    """Said from headers; what was measured beside it stands in the benchmark of steps."""
    plain = estimate_step(files["before"], files["after"])
    given = estimate_step(files["before"], files["after"], arrays=[files["grads"]])
    assert plain.parameters == 21
    assert plain.read_bytes == 2 * sum(w.nbytes for w in weights().values())
    assert given.peak_bytes - plain.peak_bytes == 16 * HIDDEN * HIDDEN


def test_gradients_beside_the_state_after_a_step_are_said_not_to_be_compared(
    tmp_path: Path,
) -> None:
    """The state says what the step was; gradients of another step would go unnoticed."""
    report = later(grads=gradients(3)).report(tmp_path)
    kinds = {one.kind for one in report.left}
    assert report.exit_code == 2 and "gradient" in kinds and report.counts["agrees"] == 21
    assert "could not be compared: 21 gradients" in report.pronounced.says


def test_gradients_saved_in_float16_are_held_as_its_arithmetic_computes(tmp_path: Path) -> None:
    """A trainer that saves them in a type of few bits computed in one, whatever the weights."""
    given = noisy(1e-2)(right_gradients())
    report = report_of(tmp_path, {name: g.astype(np.float16) for name, g in given.items()})
    assert report.causes == () and report.counts["agrees"] == len(report.tensors)
    wide = report_of(tmp_path / "wide", given)
    assert wide.counts["agrees"] < len(wide.tensors), "the same noise in float32 is a difference"


def test_a_number_read_from_some_elements_is_judged_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without others it would always be right: it was made of them."""
    shown: list[set[float]] = []
    asked: list[set[float]] = []

    def holds(case: StepCase) -> bool:
        asked.append(set(case.before))
        return len(case.before) > 100 or not shown[-1] & set(case.before)

    def find(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
        shown.append(set(case.before))
        yield StepGuess("x", "x", free=1, holds=holds)

    row = StepHypothesis(("x",), find)
    monkeypatch.setattr(update_check, "UPDATES", (row,))
    before = np.arange(200.0)
    case = StepCase("k", False, before, before + 1, ("F32", "F32"), np.arange(200), signs=True)
    nothing: Any = SimpleNamespace(
        right=False,
        share=0.0,
        held_counts=(0, 0.0, 0, 0),
        exact=False,
        told_by_bits=False,
        case=case,
    )
    monkeypatch.setattr(update_check, "_measure_step_and_decay", lambda fit, recipe: (None, None))
    monkeypatch.setattr(update_check, "measured_factor", lambda case, recipe: (math.nan, 1.0))
    found = update_check._explain_difference(nothing, Recipe("sgd"), nothing, case, nothing)
    assert [guess.cause for guess in found.guesses] == ["x"]
    assert [len(one) for one in asked] == [200, 100]
    assert asked[1] | shown[0] == set(before) and not asked[1] & shown[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora_alpha": 16}, "another adapter: lora_alpha of its adapter_config.json is 16"),
        ({"use_rslora": True}, "another adapter: use_rslora of its adapter_config.json is True"),
        ("modules", "another adapter: .*v_proj.lora_A.weight is only in the one before the step"),
        ("base", r"an adapter of another base: .* is \[4, 64\]; expected 32 in place of 64"),
    ],
)
def test_another_adapter_is_one_line(change: Any, says: str, tmp_path: Path) -> None:
    """Seen red: the pairs that both have compared, and the others listed."""
    values = adapters.adapter(False)
    base = save(tmp_path / "base", weights(), "F32")
    before = adapters.write(tmp_path / "before", values)
    after = adapters.write(tmp_path / "after", values)
    if change == "base":
        base = llama_folder(tmp_path / "other", "F32", hidden=32, layers=LAYERS)
    elif change == "modules":
        some = {name: w for name, w in values.items() if "v_proj" not in name}
        after = adapters.write(tmp_path / "some", some)
    else:
        config = json.loads((after / "adapter_config.json").read_text())
        (after / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(AprfmtError, match=says):
        explain_step(base, adapter=before, after=after, optimizer=f"adam:lr={LR},step=1")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_theta": 77.0}, "another model: rope_theta is 77.0"),
        ({"rms_norm_eps": 0.5}, "another model: norm_eps is 0.5"),
        ({"num_key_value_heads": 1, "head_dim": 32}, "another model: "),
    ],
)
def test_a_checkpoint_of_another_configuration_is_one_line(
    change: dict[str, Any], says: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """All names and shapes are the same. Seen red: `agrees`."""
    after = save(tmp_path / "after", stepped(right), "F32")
    config = json.loads((after / "config.json").read_text())
    (after / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(AprfmtError, match=says):
        explain_step(files["before"], after=after, optimizer=STATED)


def test_what_cannot_be_explained_together_is_one_line(
    files: dict[str, Path], tmp_path: Path
) -> None:
    """Differences without their batch, of an adapter; a state of another step or another rule."""
    counted = save_arrays(
        tmp_path / "counted.npz",
        {f"{name}.{kind}": each for name, each in gradients(1).items() for kind in ("exp_avg",)}
        | {"step": np.asarray([3.0])},
    )
    state: dict[str, Any] = {"after": files["after"], "optimizer_state": files["state"]}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"grads": [files["grads"]], "differences": True}, "give --batch FILE and --grads FILE"),
        ({"after": files["after"], "batch": files["grads"], "differences": True},
         "give --batch FILE and --grads FILE"),
        (state | {"optimizer": "adamw:lr=1"}, "does not say how many steps were made; add step=N"),
        (state | {"optimizer": "adafactor:lr=1"},
         "has no second moments by row and column, and --optimizer says adafactor"),
        (state | {"optimizer_state": files["factored"], "optimizer": "adam:lr=1"},
         "has exp_avg_sq_row, and --optimizer says adam; expected the rule that made it"),
        (state, "holds no settings of its optimizer"),
        *(
            (state | {"optimizer_state": counted, "optimizer": f"adamw:lr=1,step={step}"},
             f"is of step 3; expected that of step {step}, or of {step - 1} before it")
            for step in (1, 2, 5)
        ),
    )  # fmt: skip
    for given, says in cases:
        with pytest.raises(UsageError) as found:
            explain_step(files["before"], **given)
        assert says in str(found.value) and "\n" not in str(found.value)
    for step in (3, 4):  # of after the step, and of before it
        stated = f"adamw:lr=1,step={step}"
        explain_step(files["before"], **state | {"optimizer_state": counted, "optimizer": stated})


def test_a_step_up_the_gradient_by_momentum_is_that_of_its_state(tmp_path: Path) -> None:
    def made(torch: Any, parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True, maximize=True)

    report = torch_state(tmp_path, made)
    assert report.counts["differs"] == 0, report.pronounced.says
    assert any("maximize: the step goes up" in note for note in report.notes)
    assert any("nesterov" in note for note in report.notes if "settings of the optimizer" in note)


def test_the_rate_of_a_state_may_be_the_next_steps(tmp_path: Path) -> None:
    """A schedule has set it since: the parameters show this step's, unless it is stated."""
    import torch

    schedules = []

    def make(torch: Any, parameters: list[Any]) -> Any:
        optimizer = adamw_all(torch, parameters)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 / (step + 1))
        schedules.append(schedule)
        return optimizer

    (made,), optimizer = stepped_optimizer(make)
    schedules[0].step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    before = save(tmp_path / "before", weights(), "F32")
    after = save(tmp_path / "after", made, "F32")
    grads = [save_arrays(tmp_path / "grads.npz", gradients(1))]
    for rate, agrees in ((None, True), (LR / 2, True), (LR / 4, False)):
        stated = None if rate is None else f"adamw:lr={rate},wd={WD}"
        given: dict[str, Any] = {"optimizer": stated, "optimizer_state": tmp_path / "state.pt"}
        report = explain_step(before, after=after, grads=grads, **given)
        assert (report.counts["differs"] == 0) == agrees, (rate, report.pronounced.says)
        left = [one.why for one in report.left if one.kind == "rate"]
        assert len(left) == (rate is None)
        assert all("the steps are those of 0.5 times the group's first rate" in why for why in left)


def test_a_state_with_more_than_a_rule_has_is_of_another_rule(tmp_path: Path) -> None:
    """The rest of Kahan summation: a step that is not the rule's is not accused."""
    weights_after, state = torch_steps(adamw_all)
    after = {name: w + np.float32(0.01) for name, w in weights_after[-1].items()}
    stated = f"adamw:lr={LR},wd={WD},step=1"
    carried = {f"{name}.shift": w for name, w in after.items()}
    rests: tuple[tuple[Values, str], ...] = (({}, "differs"), (carried, "not compared"))
    for rest, verdict in rests:
        made = Made(after, stated, grads=gradients(1), state=state | rest)
        report = made.report(tmp_path / verdict.replace(" ", "_"))
        assert {row.verdict for row in report.tensors} == {verdict}
        said = ["the state has shift, which no rule here" in row.why for row in report.tensors]
        assert said == [bool(rest)] * len(said)


@pytest.mark.parametrize("around", [("", ""), ("module._orig_mod.", ""), ("model.", ".grad")])
def test_the_answer_says_how_names_were_read(around: tuple[str, str], tmp_path: Path) -> None:
    """Seen red: a prefix taken away without a word."""
    begin, end = around
    report = report_of(tmp_path, {begin + n + end: g for n, g in right_gradients().items()})
    assert report.exit_code == 0
    said = [note for note in report.notes if note.startswith("names of the gradients")]
    assert len(said) == any(around) and all(f"'{each}'" in said[0] for each in around if each)


@pytest.mark.parametrize("given", [True, False])
def test_what_a_step_lacks_is_not_what_was_given(given: bool, tmp_path: Path) -> None:
    """Seen red: "the step needs the gradient (--grads)", which was given."""
    made = Made(stepped(right), "adafactor:lr=1e-3", grads=gradients(1) if given else None)
    report = made.report(tmp_path)
    wanted = "next to the gradient, the state of after the step" if given else "--grads"
    assert all(wanted in row.why for row in report.tensors)
