"""Parts of the explanation of a training step, each by itself.

Seen red: moments of a sample left out, Adafactor's rate without the parameter's scale, gradients
called clipped that are larger than the norm, and sums of an update exchanged.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.optimizers import Recipe, parse_recipe
from aprfmt.errors import UsageError
from aprfmt.inference.gradients.changes import BackwardChange
from aprfmt.model import open_model
from aprfmt.training import (
    clipped_gradients,
    explained_step,
    numbered_states,
    reference_gradients,
    step_recipe,
    update_check,
)
from aprfmt.training.judgement import Judgement
from aprfmt.training.numbered_states import Candidate, Numbered
from aprfmt.training.reference_gradients import BatchNumbers
from aprfmt.training.saved_arrays import open_arrays
from aprfmt.training.update import Sums
from tests.models import save_tiny


class Numbers:
    """A weight of float32 by rows, as a file gives it."""

    encoding = "F32"

    def __init__(self, values: Any) -> None:
        self.values, self.shape = values, values.shape

    def rows(self, start: int, stop: int) -> Any:
        return self.values[start:stop]

    def chunks(self, size: int) -> Iterator[tuple[int, int, Any]]:
        yield 0, len(self.values), self.values

    def drop(self) -> None:
        pass


@pytest.mark.parametrize("rows", [40, 4000])
@pytest.mark.parametrize("known", [(), ("first",), ("second",), ("first", "second")])
def test_moments_of_a_sample_are_those_of_its_elements(known: tuple[str, ...], rows: int) -> None:
    rng = np.random.default_rng(4)
    before, after, gradient, first, second = rng.normal(size=(5, rows, 64)).astype(np.float32)
    held = update_check.StepInputs(
        gradient=update_check.RowReader(Numbers(gradient).rows),
        first=update_check.RowReader(Numbers(first).rows) if "first" in known else None,
        second=update_check.RowReader(Numbers(second).rows) if "second" in known else None,
    )
    parameter: Any = SimpleNamespace(
        key="k", vector=False, before=Numbers(before), after=Numbers(after)
    )
    case = update_check.sample_case(parameter, held, False)
    numbers = np.unique(case.rows)
    assert len(case.before) == (rows * 64 if rows == 40 else len(numbers) * 64)
    assert len(numbers) < rows or rows == 40
    assert case.gradient is not None and (case.moments is None) == (not known)
    for found, whole in ((case.before, before), (case.after, after), (case.gradient, gradient)):
        assert np.array_equal(found, whole[numbers].reshape(-1))
    for name, whole in (("first", first), ("second", second)):
        kept = getattr(case.moments, name, None)
        assert (kept is not None) is (name in known)
        assert kept is None or np.array_equal(kept, whole[numbers].reshape(-1))


def test_a_negative_multiple_of_the_step_is_said_of_a_change_along_it_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: "it moved -2 times the step" of a weight that came from somewhere else."""
    monkeypatch.setattr(update_check, "UPDATES", ())
    rng = np.random.default_rng(5)
    before, gradient, noise = rng.normal(size=(3, 40, 64)).astype(np.float32)
    step = -np.float32(0.01) * gradient
    held = update_check.StepInputs(gradient=update_check.RowReader(Numbers(gradient).rows))

    def why(change: Any) -> str:
        after = (before + change).astype(np.float32)
        parameter: Any = SimpleNamespace(
            key="k", names=("k",), vector=False, before=Numbers(before), after=Numbers(after)
        )
        found = update_check.judge_update(parameter, parse_recipe("sgd:lr=0.01"), held)
        assert found.verdict == "differs"
        return found.why

    for times in (3.0, -2.0, -0.5):  # along the step, forward or back
        assert f"moved {times:.3g} times the step" in why(times * step)
        near = re.search(r"moved (\S+) times", why(times * step + 0.001 * abs(times) * noise))
        assert near is not None and float(near[1]) == pytest.approx(times, rel=0.02)
    far = 5 * 0.01 * noise  # most of the change is in other directions
    assert why(-2 * step + far) == "the change is no step of this optimizer"
    assert "times the step" in why(2 * step + far)


def _adafactors() -> dict[str, Callable[[Any], Any]]:
    import torch

    def ours(**options: Any) -> Callable[[Any], Any]:
        from transformers.optimization import Adafactor

        return lambda weight: Adafactor([weight], lr=0.01, relative_step=False, **options)

    return {
        "torch": lambda weight: torch.optim.Adafactor([weight], lr=0.01, weight_decay=0.0),
        "torch, large": lambda weight: torch.optim.Adafactor([weight], lr=3.0, weight_decay=0.0),
        "transformers": ours(scale_parameter=False),
        "transformers, scaled": ours(scale_parameter=True),
        "transformers, clipped": ours(scale_parameter=True, clip_threshold=0.5),
        "transformers, small": ours(scale_parameter=True, eps=(1e-30, 0.9)),
    }


@pytest.mark.parametrize(
    "label",
    ["torch", "torch, large", "transformers", "transformers, scaled", "transformers, clipped",
     "transformers, small"],
)  # fmt: skip
@pytest.mark.parametrize("steps", [1, 4])
def test_the_rate_of_adafactor_is_what_its_norms_make_of_it(label: str, steps: int) -> None:
    """Its step is the gradient by the root of the second moment, times the rate found here."""
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    if label.startswith("transformers"):
        pytest.importorskip("transformers", reason="NOT-RUN: transformers is not installed")
    generator = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(6, 8, generator=generator) * 0.3)
    optimizer = _adafactors()[label](weight)
    for _ in range(steps):
        before = weight.detach().double().numpy().copy()
        weight.grad = torch.randn(6, 8, generator=generator)
        optimizer.step()
    (state,) = optimizer.state.values()
    if label.startswith("torch"):
        row, column = state["row_var"].double(), state["col_var"].double()
        second = (row @ column / row.mean()).numpy()
    else:
        row, column = state["exp_avg_sq_row"].double(), state["exp_avg_sq_col"].double()
        second = ((row / row.mean())[:, None] * column[None]).numpy()
    gradient = weight.grad.double().numpy()
    stage: Any = SimpleNamespace(
        state=SimpleNamespace(group_of=lambda name: optimizer.param_groups[0])
    )
    parameter: Any = SimpleNamespace(names=("w",), before=Numbers(before), after=Numbers(before))
    held = update_check.StepInputs(
        gradient=update_check.RowReader(Numbers(gradient).rows),
        second=update_check.RowReader(Numbers(second).rows),
    )
    lr = optimizer.param_groups[0]["lr"]
    recipe = Recipe("adafactor", lr=lr, step=steps)
    found = step_recipe.adafactor_recipe(stage, parameter, recipe, held)
    made = before - found.relative * lr * gradient / np.sqrt(second)
    assert np.allclose(made, weight.detach().double().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [1.0, 0.7, 0.7123])
@pytest.mark.parametrize("before", [None, 0.5, 3.0])
@pytest.mark.parametrize("cause", ["gradient_factor", "other"])
def test_gradients_of_a_usual_norm_are_clipped_ones_if_theirs_was_larger(
    cause: str, before: float | None, bound: float
) -> None:
    """A norm that no trainer clips to, or that is not below the gradients' own, says nothing."""
    differs = Judgement("differs", guesses=(SimpleNamespace(cause=cause),))  # type: ignore[arg-type]
    stage: Any = SimpleNamespace(
        compared={"w": explained_step.ComparedGradient(found=differs)}, notes=[], recipe=None,
        computed=None, computed_norm=lambda: before, other_norms={}, computed_norms={},
        optimizer_groups=[],
    )  # fmt: skip
    clipped_gradients.accept_clipping(stage, bound)
    clipped = before == 3.0 and bound != 0.7123 and cause == "gradient_factor"
    assert stage.compared["w"].found.verdict == ("agrees" if clipped else "differs")
    assert [f"norm {bound:g}; it was 3" in note for note in stage.notes] == [True] * clipped


def test_sums_of_an_update_are_those_of_its_elements() -> None:
    rng = np.random.default_rng(8)
    before = rng.normal(size=(9, 40))
    after = before + rng.normal(size=before.shape) * (rng.random(before.shape) < 0.3)
    after[2, 3], before[4, 5] = np.nan, np.inf
    sums = Sums()
    for start in range(0, 9, 4):
        sums.add(before[start : start + 4], after[start : start + 4], "F32")
    finite = np.isfinite(before) & np.isfinite(after)
    change = (after - before)[finite]
    found = sums.facts()
    assert (found.elements, found.moved) == (360, int(np.count_nonzero(change)))
    assert found.nonfinite == 2 and found.one_step == 0 < found.moved
    assert found.norm == pytest.approx(np.linalg.norm(change))
    assert found.largest == np.abs(change).max()


@pytest.mark.parametrize("held", [{}, {"wd": 0.1}, {"lr": 0.5}, {"lr": 0.5, "wd": 0.1}])
@pytest.mark.parametrize("stated", [None, "adamw", "adamw:wd=0.2", "adamw:lr=0.25"])
def test_the_rate_of_a_step_is_stated_or_held(
    stated: str | None, held: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What --optimizer states goes before what the state holds; without a rate nothing is known."""
    monkeypatch.setattr(step_recipe, "_state_settings", lambda state: held)
    state = SimpleNamespace(factored=(), kind="adamw", path="state.npz")
    directed: list[Recipe] = []

    def direct(step: Any, recipe: Recipe) -> Recipe:
        directed.append(recipe)
        return recipe

    step: Any = SimpleNamespace(state=state, optimizer=stated, notes=[])
    monkeypatch.setattr(step_recipe, "_with_step_number", lambda step, recipe: recipe)
    monkeypatch.setattr(step_recipe, "_with_direction", direct)
    find = step_recipe.find_recipe
    if stated == "adamw:lr=0.25":
        recipe = find(step)
        assert recipe is not None and recipe.lr == 0.25 and directed == [recipe]
    elif "lr" in held:
        recipe = find(step)
        assert recipe is not None and recipe.lr == 0.5
        decay = held.get("wd", Recipe("adamw", 0.5).wd)
        assert recipe.wd == (0.2 if stated == "adamw:wd=0.2" else decay)
    else:
        says = "state.npz: holds no settings" if stated is None else "no lr; expected the rate"
        with pytest.raises(UsageError, match=says):
            find(step)


def candidate(name: str, values: Any, shape: tuple[int, ...] = (2,)) -> Candidate:
    return Candidate(name, name, shape, lambda: np.asarray(values, np.float64))


def number(name: str, values: Any, shape: tuple[int, ...] = (2,)) -> Numbered:
    return Numbered(name, shape, lambda: np.asarray(values, np.float64))


@pytest.mark.parametrize(
    ("least", "apart", "second", "recognized"),
    [
        (1.0, 0.5, (0, 1), True),  # as much alike as it has to be
        (1.0, 0.0, (0, 1), True),  # another is as much alike as it may be
        (1.1, 0.5, (0, 1), False),
        (1.0, 0.5, (1, 1), False),  # two parameters that changed alike
    ],
)
def test_a_number_is_like_one_parameter_and_no_other(
    least: float, apart: float, second: Any, recognized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbered_states, "LEAST", least)
    monkeypatch.setattr(numbered_states, "SECOND_SHARE", apart)
    theirs = [candidate("L0.attn_q.weight", (4, 0)), candidate("L1.attn_q.weight", second)]
    found = numbered_states._match_changes(
        [number("0", (-2, 0))], theirs
    )  # a step against the change
    assert [row.name for row in found.values()] == ["L0.attn_q.weight"] * recognized


def test_a_number_takes_the_place_that_other_layers_give_it() -> None:
    """Of two parameters of one shape that are left, the order of another layer says which."""
    roles = ("attn_norm.weight", "attn_q.weight", "attn_k.weight", "ffn_norm.weight")
    keys = [f"L{layer}.{role}" for layer in range(2) for role in roles]
    rng = np.random.default_rng(1)
    changes = dict(zip(keys, np.eye(8), strict=True))
    candidates = [candidate(key, changes[key], (8,)) for key in keys]
    silent = {"L1.attn_q.weight", "L1.attn_k.weight"}  # whose moments say nothing
    numbered = [
        number(str(at), changes[key] if key not in silent else rng.normal(size=8) * 0, (8,))
        for at, key in enumerate(keys)
    ]
    found, looked = numbered_states.recognize_numbers(
        numbered, candidates, [[str(at) for at in range(8)]]
    )
    assert looked and found == {str(at): key for at, key in enumerate(keys)}
    # Without another layer neither is settled.
    some = [row for row in candidates if row.key.startswith("L1.")]
    found, _ = numbered_states.recognize_numbers(numbered[4:], some, [["4", "5", "6", "7"]])
    assert found == {"4": keys[4], "7": keys[7]}


# Share of the numbers that are told: where q, k and v have one shape their order stays open.
LEAST_TOLD = {"opt": 0.3}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gpt2", "opt", "gpt_neox"])
def test_numbers_of_no_step_follow_named_parameters(arch: str, groups: int, tmp_path: Path) -> None:
    """Judged by torch's order of a model. Known numbers are few; one of them may be wrong."""
    model = save_tiny(arch, tmp_path / "m", "float32")
    called = {"lm_head.weight": "embed_out.weight"} if arch == "gpt_neox" else {}  # in the file
    named = {called.get(name, name): p for name, p in model.named_parameters()}
    roles: dict[str, str] = {}  # of a stored tensor; of one that holds several, the first
    with open_model(tmp_path / "m") as opened:
        for key, view in opened.roles.items():
            if len(view.names) == 1:
                roles.setdefault(view.names[0], key)
    assert named.keys() <= roles.keys()
    rows = [candidate(roles[n], (0,), tuple(named[n].shape)) for n in roles if n in named]
    parts = [list(named)]
    if groups == 2:
        parts = [[n for n in named if (named[n].ndim > 1) == wide] for wide in (True, False)]
    names = [n for each in parts for n in each]
    right = {str(at): roles[n] for at, n in enumerate(names)}
    shapes = {str(at): tuple(named[n].shape) for at, n in enumerate(names)}
    numbers = [[str(names.index(n)) for n in each] for each in parts]
    by_key = {row.key: row for row in rows}
    known = {"0": by_key[right["0"]]}
    found = numbered_states._settle_by_modules(numbers, known, shapes, rows)
    assert {n: row.key for n, row in found.items()}.items() <= right.items()
    assert len(found) > LEAST_TOLD.get(arch, 0.6) * len(names)
    # A known number that no order has leaves all others open, and so does none.
    wrong = next(row for row in rows if row.shape != shapes["0"])
    assert not numbered_states._settle_by_modules(numbers, {"0": wrong}, shapes, rows)
    assert not numbered_states._settle_by_modules(numbers, {}, shapes, rows)


@pytest.mark.parametrize("twice", [False, True])
def test_an_array_is_in_one_of_the_files_that_are_given(twice: bool, tmp_path: Path) -> None:
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(first, q=np.ones(2), k=np.ones(3))
    more: dict[str, Any] = {"k": np.ones(3)} if twice else {}
    np.savez(second, v=np.ones(4), **more)
    with ExitStack() as stack:
        if twice:
            said = f"{second}: k is in {first} too; give each array once"
            with pytest.raises(UsageError, match=re.escape(said)):
                open_arrays([first, second], stack)
            return
        found = open_arrays([first, second], stack)
        assert {name: held.shapes[own] for name, (held, own) in found.items()} == {
            "q": (2,), "k": (3,), "v": (4,),
        }  # fmt: skip
        assert [held.path for held, _ in found.values()] == [first, first, second]


# --- the gradients that a step is held against --------------------------------------------------


class GradientsOf:
    """Stands for `batch_gradients`: notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, base: Any, batch: Any, **how: Any) -> Any:
        self.asked.append(how)
        return SimpleNamespace(values={"at": how["dtype"]}, loss=1.0, how=how["dtype"], keys=())


@dataclass(frozen=True)
class Pair:
    """An adapter's pair of factors, of as many ranks as `a` has rows."""

    scale: float
    a: Any


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[GradientsOf]:
    from aprfmt.adapters import trained_pairs
    from aprfmt.inference.gradients import batch_gradients, device_gradients, memory

    gradients = GradientsOf()
    monkeypatch.setattr(batch_gradients, "batch_gradients", gradients)
    monkeypatch.setattr(device_gradients, "flipped_routers", lambda x, y: (x["at"], y["at"]))
    monkeypatch.setattr(
        trained_pairs, "open_trained_pairs", lambda adapter, base, stack: list(adapter or ())
    )
    monkeypatch.setattr(reference_gradients, "read_step_batch", lambda batch, base: batch)
    monkeypatch.setattr(reference_gradients, "_router_points", lambda base: ["L0.experts"])
    monkeypatch.setattr(reference_gradients, "dtype_of", lambda base: "bfloat16")
    monkeypatch.setattr(reference_gradients, "_free_device_memory", lambda device: 1000)
    peaks = {"all": 900, "layer": 100}
    monkeypatch.setattr(
        memory,
        "gradient_memory",
        lambda *given, activations, **how: SimpleNamespace(
            peak=peaks[activations] * how["device"].get("times", 1)
        ),
    )
    monkeypatch.setattr(
        reference_gradients,
        "batch_numbers",
        lambda batch, scale: BatchNumbers({"scale": scale} if scale is not None else {}),
    )
    yield gradients


BASE: Any = SimpleNamespace(path="m", hyper={"n_experts": 8}, roles={"L1.ffn_gate_inp.weight": 0})


def test_a_model_whose_layers_are_all_dense_has_no_routers(asked: GradientsOf) -> None:
    """Its configuration counts experts; guesses about routers' losses are not for it."""
    dense: Any = SimpleNamespace(path="m", hyper={"n_experts": 8}, roles={"L1.ffn_up.weight": 0})
    for base, experts in ((BASE, True), (dense, False)):
        batch: Any = None
        device: Any = {}
        _, numbers = reference_gradients.compute_gradients(base, batch, device=device)
        assert numbers.experts is experts


def computed(**how: Any) -> Any:
    batch: Any = None
    return reference_gradients.compute_gradients(BASE, batch, **{"device": {}} | how)


def test_gradients_are_computed_in_the_trainers_arithmetic_too(asked: GradientsOf) -> None:
    """There the routers' choices are recorded; in one arithmetic a single pass is made."""
    found, numbers = computed(points=["L0.q"])
    exact, rounded = asked.asked
    assert (exact["dtype"], rounded["dtype"]) == ("float64", "bfloat16")
    assert exact["points"] == rounded["points"] == ("L0.q", "L0.experts")
    assert found.flips == ("bfloat16", "float64") and found.rounded.how == "bfloat16"
    assert numbers.experts and numbers.adapter is None and not numbers.counts
    asked.asked.clear()
    found, _ = computed(points=["L0.q"], dtype="bfloat16")
    (only,) = asked.asked
    assert only["points"] == ["L0.q"] and found.rounded is None and not found.flips
    asked.asked.clear()
    computed(trained_in="float32")
    assert [one["dtype"] for one in asked.asked] == ["float64", "float32"]


def test_gradients_take_the_memory_that_is_free(asked: GradientsOf) -> None:
    """Activations of one layer at a time where those of all take more than nine tenths."""
    for times, held in ((1, "all"), (1.001, "layer"), (9, "layer")):
        asked.asked.clear()
        computed(device={"times": times})
        assert {one["activations"] for one in asked.asked} == {held}
    with pytest.raises(UsageError, match=r"m: a backward in float64 takes .* or --dtype float32"):
        computed(device={"times": 9.1})


def test_gradients_are_computed_again_with_a_mistake(asked: GradientsOf) -> None:
    """An adapter's scale is multiplied; of an adapter all of its parameters are wanted."""
    pairs = [Pair(2.0, [0] * 4), Pair(2.0, [0] * 4)]
    found, numbers = computed(adapter=pairs)
    assert numbers.adapter == (2.0, 4) and numbers.counts == {"scale": 2.0}
    asked.asked.clear()
    change = BackwardChange(adapter_scale=0.25)
    again = found.recompute(change, ["w"])
    (how,) = asked.asked
    assert [pair.scale for pair in how["pairs"]] == [0.5, 0.5] and how["trained"] is None
    assert how["change"] is change and how["dtype"] == "float64" and again.rounded is None
    assert found.by_label() is None
    plain, _ = computed()
    plain.recompute(change, ["w"])
    assert (asked.asked[-1]["trained"], asked.asked[-1]["pairs"]) == (["w"], [])
    for mixed, known in (
        ([Pair(2.0, [0] * 4), Pair(1.0, [0] * 4)], {}),
        ([Pair(2.0, [0] * 4), Pair(2.0, [0] * 8)], {"scale": 2.0}),
    ):
        _, numbers = computed(adapter=mixed)
        assert numbers.adapter is None and numbers.counts == known
