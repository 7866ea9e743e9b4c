"""How usual mistakes are tried: never without a bound, and never confirmed by a loose fit."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.mismatch import Change, Mismatch
from aprfmt.causes.forward.mlp import UPS, solve_activation_number
from aprfmt.causes.forward.usual_blocks import UsualMistake
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis import search as searching
from aprfmt.diagnosis.attention_rows import solve_masks
from aprfmt.diagnosis.search import SearchStep, bound_with
from aprfmt.diagnosis.wrong_operations import examine
from aprfmt.inference.engines.opening import open_trace
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.model import open_model
from tests.diagnosis import dumps
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.engine_changes import LAYERS, LOGITS, THREE
from tests.diagnosis.engines import COARSE, broken, tiny_folder, trace
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.silenced import without
from tests.models import IDS

STRANGE = ["hf-eps-outside", "hf-added-to-itself", "hf-rope-backwards", "hf-softmax-twice",
           "hf-one-norm-eps", "hf-quick-gelu"]  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_without_its_rows_no_other_cause_is_confirmed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    a, b = fault.make()
    without(monkeypatch, fault.causes[0])
    found = diagnose(str(a), str(b))
    assert found.verdict == "bug"
    assert not [row.cause for row in found.findings if row.confirmed], found.sentence


def strange() -> Any:
    """A trace whose every layer has noise at four points, which nothing explains."""

    def make() -> Any:
        random = np.random.default_rng(5)

        def alter(point: str, layer: int, x: Any) -> Any:
            if point not in ("attn_out", "ffn_out", "q", "ffn_mul"):
                return x
            return x + random.standard_normal(x.shape).astype(x.dtype)

        return alter

    return trace(tiny_folder("llama"), "search-noise", points=COARSE, alter=make)


def test_all_searches_of_a_trace_share_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    beneath = Mismatch.attempt_all

    def counted(case: Mismatch, changes: Any) -> Any:
        passes.append(len(changes))
        return beneath(case, changes)

    monkeypatch.setattr(searching, "RUNS", 4)
    with open_model(tiny_folder("llama")) as model, open_trace(strange()) as made:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        without(monkeypatch, "none")  # every row stays
        monkeypatch.setattr("aprfmt.causes.forward.table.TABLE", ())
        monkeypatch.setattr(Mismatch, "attempt_all", counted)
        found = examine(patched, RecordedTrace(made, IDS, {}))
        patched.weights.close()
    assert len(found.divergences) >= 4
    assert 0 < len(passes) <= 4 * searching.ALL + 1


# Where two values are multiplied -> whether one is a gate's activation of an MLP.
PRODUCTS = [("lfm2", "conv_gated", False), ("llama", "ffn_mul", True), ("lfm2", "conv_x", False),
            ("gemma3n", "per_layer_mul", False), ("minimax", "lightning_gated", False)]  # fmt: skip


@pytest.mark.parametrize(("base", "point", "gated"), PRODUCTS)
def test_other_forms_of_a_gated_product_are_tried_at_that_of_an_mlp_alone(
    base: str, point: str, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up that is clamped or gets 1 added says nothing of a convolution that differs."""

    def make() -> Any:
        return lambda at, layer, x: x * x.dtype.type(1.25) if at == point else x

    cases: dict[str, Mismatch] = {}

    def seen(case: Mismatch, changes: Any) -> Any:
        cases.setdefault(case.view.point, case)

    made = trace(tiny_folder(base), f"product-{point}", alter=make)
    with open_model(tiny_folder(base)) as model, open_trace(made) as recorded:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        monkeypatch.setattr("aprfmt.causes.forward.table.TABLE", ())
        monkeypatch.setattr(Mismatch, "attempt_all", seen)
        examine(patched, RecordedTrace(recorded, IDS, {}))
        case = cases[point]
        assert case.call("mul") is not None and case.gives_point_value(case.call("mul"))
        tried = {change.says for change in solve_activation_number(case)}
        patched.weights.close()
    assert {*UPS} & tried == ({*UPS} if gated else set())


def without_biases(model: Any, stack: ExitStack) -> None:
    """No bias of q, k and v is added."""
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            parameter.data.zero_()


def test_what_later_answers_disprove_is_dropped() -> None:
    """With the mask put right, attention agrees with q, k and v as recorded: without a bias."""
    broken = wrong.both(without_biases, wrong.seen(lambda i, j: j + 0 * i >= 0))
    a, b = dumps.dump("qwen2", "no-biases-no-mask", {}, broken, dumps.everything, dumps.as_npz)
    found = diagnose(str(a), str(b))
    assert {row.cause for row in found.findings} == {"missing_bias", "mask"}
    assert not any(row.also for row in found.findings), found.sentence


def test_masks_are_read_from_the_rows_that_differ() -> None:
    says = [change.says for change in solve_masks(np.array([9, 10, 11, 12]), 13)]
    assert any("tokens from 9 on" in text for text in says)
    assert any("chunks of 9" in text for text in says)
    first = [change.says for change in solve_masks(np.arange(6), 13)]
    assert any("the first 7 tokens all see each other" in text for text in first)
    assert not list(solve_masks(np.array([], np.int64), 13))
    assert all(isinstance(change, Change) for change in solve_masks(np.array([3]), 13))


@pytest.mark.parametrize("layers", [(), (3,), (1, 2), (0, 1, 2)])
def test_every_usual_change_is_tried_in_each_of_several_layers(
    layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one layer alone it is tried as it is: once more would be the same pass."""
    usual = [
        UsualMistake(Change("mask", "a", (), scoped=True)),
        UsualMistake(Change("mask", "b", (), scoped=True), frozenset({1})),
        UsualMistake(Change("mask", "c", (), scoped=False)),
    ]
    monkeypatch.setattr(searching, "spanned_layers", lambda case: frozenset(layers))
    monkeypatch.setattr(searching, "single_layer_mistakes", lambda patched: [])
    search = object.__new__(searching.Search)
    search.case = SimpleNamespace(patched=None)  # type: ignore[assignment]
    monkeypatch.setattr(search, "_usual_changes", lambda: usual, raising=False)
    made = [(step.change.says, step.layers) for step in search._single_layer_steps()]
    every = [("a", frozenset({at})) for at in layers]
    assert made == ([] if len(layers) < 2 else [*every, ("b", frozenset({1}))])


@pytest.mark.parametrize("n", [2, 5, 13])
def test_every_number_of_first_tokens_that_rows_allow_is_tried_once(n: int) -> None:
    """Rows from `first` on differ: up to `first` tokens are hidden, at most eight."""
    for first in range(n):
        said = [change.says for change in solve_masks(np.arange(first, n), n)]
        assert len(said) == len(set(said))
        hidden = [text for text in said if text.endswith("hidden from later ones")]
        gone = [text for text in said if text.endswith(f"gone from token {first} on")]
        assert len(hidden) == min(first, 8)
        assert len(gone) == min(max(first - 1, 0), 8)
        for count in range(1, len(hidden) + 1):
            what = "token is" if count == 1 else f"{count} tokens are"
            assert f"the first {what} hidden from later ones" in hidden[count - 1]
        assert sum("do not see those before" in text for text in said) == (first > 1)


# Numbers that nobody uses, in a run without points but its logits -> the cause and the number. Each
# leaves the first token as it is, as a later pass does that runs otherwise.
FROM_LOGITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "base": ({"rope_theta": 7345.0}, "rope_theta", "7345"),
    "positions": ({"rope_scaling": {"type": "linear", "factor": 3.3}}, "rope_scaling", "3.3"),
    "scores": ({"attn_scale": 0.41}, "attention_scale", "0.41"),
}


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_numbers_are_fitted_before_one_pass_is_blamed(name: str) -> None:
    """Seen red: changes of one pass took all passes, and no number was left to be fitted."""
    wrong, cause, says = FROM_LOGITS[name]
    folder = tiny_folder("qwen2", **THREE)
    made = trace(folder, f"search-{name}", points=LOGITS, hp=wrong)
    found = diagnose(str(folder), str(made))
    assert [row.cause for row in found.findings if row.confirmed] == [cause], found.sentence
    assert says in found.sentence


def test_a_sound_run_of_logits_alone_is_the_same() -> None:
    folder = tiny_folder("qwen2", **THREE)
    found = diagnose(str(folder), str(trace(folder, "search-sound", points=LOGITS)))
    assert found.verdict == "same" and not found.findings


def late_own_token(op: Any, scores: Any, heads: Any) -> Any:
    """Let no token from 18 on read itself."""
    late, mask = np.arange(18, len(heads.mask)), np.array(heads.mask)
    mask[late, late] = False
    return op(scores, replace(heads, mask=mask, causal=None))


def test_one_pass_is_blamed_where_no_number_fits() -> None:
    folder = tiny_folder("qwen2", **THREE)
    made = trace(
        folder, "search-chunk", points=LAYERS, backend=lambda: broken("probs", late_own_token)
    )
    found = diagnose(str(folder), str(made))
    assert [row.cause for row in found.findings if row.confirmed] == ["mask"], found.sentence
    assert "from token 18 on" in found.sentence


def test_values_between_two_neighbours_leave_room_where_all_changes_round() -> None:
    """Seen red: a cache in bfloat16 whose logits are two tolerances off called a bug."""
    rounds, other = (
        SearchStep(Change(cause, cause, ()), None) for cause in ("rounding", "norm_eps")
    )

    def bound(steps: tuple[SearchStep, ...], residual: float | None) -> float:
        view: Any = SimpleNamespace(residual=residual, tolerance=2e-5)
        return bound_with(view, steps)

    assert bound((rounds,), 5e-3) == pytest.approx(1e-4)
    assert bound((rounds, rounds), 1e-4) == pytest.approx(6e-5)
    for steps, residual in (((other,), 5e-3), ((rounds, other), 5e-3), ((rounds,), None)):
        assert bound(steps, residual) == 2e-5
