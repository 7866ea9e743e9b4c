"""Parts of a diagnosis, each by itself."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt import diagnosis
from aprfmt.causes import restored_keys
from aprfmt.causes.forward import linear, mixed_checkpoints, rotations, weights
from aprfmt.causes.forward.dumped_ranks import differing_ranks, differing_requests
from aprfmt.causes.forward.mismatch import Change
from aprfmt.causes.forward.point_signatures import likely_cause
from aprfmt.causes.forward.product import Product
from aprfmt.causes.forward.relations import relation_text
from aprfmt.causes.forward.usual_blocks import UsualMistake
from aprfmt.codecs import scale_checks as credible
from aprfmt.codecs.dialects import DIALECTS
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.diagnosis import (
    accumulated_rounding,
    batch_sequences,
    block_scales,
    configuration_keys,
    derived_quantities,
    diagnosis_order,
    finding_effects,
    model_comparison,
    model_pair,
    next_commands,
    packing,
    packing_repairs,
    probes,
    records,
    renamed_parts,
    run_arithmetic,
    statistics_evidence,
    tensors,
    tokenizer_findings,
    trace_pair,
    wrong_operations,
)
from aprfmt.diagnosis import forward as forward_words
from aprfmt.diagnosis import search as searching
from aprfmt.diagnosis.diagnosis_text import titled_lines
from aprfmt.diagnosis.next_commands import missing_points
from aprfmt.diagnosis.paired_pass import PairedPass, compare_passes
from aprfmt.diagnosis.records import Touched
from aprfmt.diagnosis.search import DEEPEST, LEAST, Search, SearchStep, TriedSteps, may_act
from aprfmt.diagnosis.static_findings import POSITIONS, DifferingRows, Levels
from aprfmt.diagnosis.trace_results import Divergence, Solution, layer_scopes
from aprfmt.errors import ArchError
from aprfmt.inference.backends import blas
from aprfmt.inference.record import Record
from aprfmt.inference.replay.patched_model import OperationCall, PassLocation, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedValue
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.inference.trace import Trace
from aprfmt.measure import tolerances, trace_view
from aprfmt.measure.nonfinite import NonFinite
from aprfmt.measure.records import TensorDiff
from aprfmt.measure.traces import PointDiff, RunPair
from aprfmt.model import config_paths, open_model
from aprfmt.model.config_paths import GONE
from aprfmt.tensors.stats import compute_stats
from tests.cli.run import aprfmt as command
from tests.diagnosis.engines import tiny_folder


def point(key: str, layer: int, recorded: Any = None, after: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(key=key, layer=layer, recorded=recorded, base=False, after=after)


def test_what_lacks_lies_between_the_last_good_point_and_the_divergence() -> None:
    keys = ["L0.attn_norm", "L0.q", "L0.k", "L0.mid", "L0.out"]
    views = {key: point(key, 0, recorded=1 if key == "L0.attn_norm" else None) for key in keys}
    view = point("L0.mid", 0, after=("L0.attn_norm",))
    assert missing_points(view, views) == ["L0.q", "L0.k"]
    assert missing_points(point("L0.out", 0, after=("L0.k",)), views) == ["L0.mid"]
    assert missing_points(point("L9.q", 9), views) == []


def test_of_several_layers_their_outputs_lack() -> None:
    keys = [f"L{i}.{name}" for i in range(3) for name in ("q", "out")]
    views = {key: point(key, int(key[1])) for key in keys}
    assert missing_points(point("L2.out", 2, after=("L0.q",)), views) == ["L0.out", "L1.out"]
    assert missing_points(point("L1.out", 1, after=("L0.q",)), views) == ["L0.out"]
    assert missing_points(point("L0.out", 0), {"embd": point("embd", -1), **views}) == [
        "embd",
        "L0.q",
    ]


def test_alike_are_other_steps_of_the_same_cause_that_solve_it() -> None:
    def step(cause: str) -> Any:
        return SimpleNamespace(change=SimpleNamespace(cause=cause))

    own, twin, failing, other = step("rope"), step("rope"), step("rope"), step("norm")
    measured: list[Any] = []

    def measure(steps: Any) -> Any:
        measured.append(steps[-1])
        return SimpleNamespace(steps=steps)

    singles = [SimpleNamespace(steps=(one,)) for one in (own, twin, failing, other)]
    search: Any = SimpleNamespace(
        runs=0, measure=measure, singles=singles, solves=lambda one: one.steps[-1] is not failing
    )
    assert Search.same_cause_steps(search, [own], own) == [twin]
    assert measured == [twin, failing]


@pytest.mark.parametrize("label", ["ONLY_IN_A", "ONLY_IN_B"])
def test_tensors_that_one_side_lacks_are_evidence_and_the_reason(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_is_role_of_pass", lambda a, b, key: True)
    monkeypatch.setattr(tensors, "roles_without_place", lambda a, b: frozenset())
    rows: Any = [SimpleNamespace(key=f"L{i}.ffn_up.weight", verdict=label) for i in range(3)]
    evidence: list[Any] = []
    found: Any = SimpleNamespace(
        evidence=evidence, reason="", add=lambda *_: None, ended=False, not_checked=[], stated=[]
    )
    model: Any = SimpleNamespace(unread=None, find=lambda key: None, roles={})
    tensors._add_missing_tensors(model, model, rows, found)
    side = "B" if label == "ONLY_IN_A" else "A"
    assert [one.says for one in evidence] == [f"{side} lacks 3 tensors"]
    assert evidence[0].where == tuple(row.key for row in rows)
    (cause,) = found.stated
    assert found.ended and cause.cause == "missing_tensors" and cause.side == side
    assert cause.says.startswith(f"{side} lacks 3 of the tensors: L0.ffn_up")
    assert found.not_checked == [f"forward pass: {side} lacks tensors that it reads"]


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_factors_of_columns_are_said_only_of_rows_enough_to_show_them(tokens: int) -> None:
    """Two rows are any two rows' multiples nearly: a fit of them is none."""
    rng = np.random.default_rng(3)
    mine = rng.normal(size=(tokens, 8))
    said = relation_text(mine, mine * rng.uniform(0.5, 2, 8), 1e-3)
    assert ("every column" in said) == (tokens > 2)
    assert "every row" in relation_text(mine, mine * rng.uniform(0.5, 2, (tokens, 1)), 1e-3)
    assert "same vector added" in relation_text(mine, mine + 5 * rng.normal(size=8), 1e-3)
    assert relation_text(mine, mine, 1e-3) == ""


@pytest.mark.parametrize("lost", [np.s_[:, 4:], np.s_[:, :4], np.s_[:, 3], np.s_[2], np.s_[3:]])
def test_zeros_in_place_of_values_are_no_relation(lost: Any) -> None:
    """A factor of 0 gives them; a column that is zero on both sides has any factor."""
    mine = np.random.default_rng(8).normal(size=(6, 8))
    theirs = mine.copy()
    theirs[lost] = 0
    assert relation_text(mine, theirs, 1e-3) == ""
    mine[lost] = 0
    assert "every column" in relation_text(mine, theirs * np.arange(1, 9), 1e-3)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_an_experts_capacity_is_tried_where_all_rows_are_compared(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.diagnosis.search.find_capacity", lambda case: ["change"])
    calls = [SimpleNamespace(op="add_weighted")]
    case = SimpleNamespace(view=SimpleNamespace(calls=calls), rows=range(rows), tokens=5)
    steps = list(Search._row_steps(cast(Any, SimpleNamespace(case=case))))
    assert [cast(Any, step.change) for step in steps] == ["change"] * (rows == 5)


@pytest.mark.parametrize("spanned", [1, 2])
@pytest.mark.parametrize("layer", [-1, 0])
def test_an_answer_is_tried_in_fewer_layers_only_where_it_lies_in_one(
    spanned: int, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    change = Change("rope", "", ())
    monkeypatch.setattr(wrong_operations, "spanned_layers", lambda case: range(spanned))

    def scopes(case: Any, change: Change) -> list[None]:
        asked.append(change)
        return [None]

    monkeypatch.setattr(wrong_operations, "layer_scopes", scopes)
    passed = SimpleNamespace(flagged=[])
    monkeypatch.setattr(wrong_operations, "run_shadow_pass", lambda patched, recorded: passed)
    monkeypatch.setattr(wrong_operations, "measure_agreement", lambda case, found, change: None)
    view = SimpleNamespace(calls=())
    case: Any = SimpleNamespace(
        layer=layer, view=view, patched=SimpleNamespace(n_layers=2), recorded=None
    )
    found = wrong_operations._furthest_in_scope(case, [SearchStep(change, None)], 0.0, set(), {}, 0)
    assert bool(asked) == (spanned == 1 and layer >= 0)
    assert found is not None and found.reach == math.inf


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("right", [True, False])
def test_a_change_of_all_layers_leaves_the_others_right(
    right: bool, layer: int, scoped: bool
) -> None:
    """Other layers are put right by narrowing, which a change of the whole pass does not allow."""
    before = SimpleNamespace(base="", after=(), residual=0.0, flagged=not right)
    wrong = SimpleNamespace(base="", after=(), key="L1.q", layer=1)
    found: Any = SimpleNamespace(flagged=[wrong])
    case: Any = SimpleNamespace(layer=layer, found=SimpleNamespace(views={"L1.q": before}))
    spoils = wrong_operations._spoils_layer(case, found, None, scoped)
    assert spoils == (right and (layer == 1 or not scoped))


@pytest.mark.parametrize("right", [2, 4])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_rows_made_for_another_number_of_heads_are_named(heads: int, right: int) -> None:
    """Of 32 rows: made for pairs alone, and put right for the true number, as loaders do."""
    rows = np.arange(32)
    pairs = rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    undone = pairs.reshape(right, -1, 2).swapaxes(1, 2).reshape(-1)
    for order, words in ((pairs, ""), (undone, f", and undone for {right}")):
        if heads == right or np.array_equal(order, rows):
            continue
        assert linear._wrong_head_count(order, right) == (heads, words)
    swapped = np.roll(rows, 32 // right)
    assert linear._wrong_head_count(swapped, right) is None, "whole heads"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("turned", [False, True])
def test_frequencies_are_looked_at_where_they_may_change(kind: str, turned: bool) -> None:
    """Behind the context, and behind the one that the scaling was made from."""
    scaled: dict[str, Any] = {
        "rope_scaling": {"type": kind, "original_context_length": 64},
        "context_length": 256,
    }
    plain: dict[str, Any] = {"rope_scaling": None, "context_length": 512}
    a, b = (plain, scaled) if turned else (scaled, plain)
    assert derived_quantities._critical_lengths(a, b, 1024) == [1, 65, 257, 1024]
    assert derived_quantities._critical_lengths(a, b, 100) == [1, 65, 100]
    assert derived_quantities._critical_lengths(plain, plain, 1024) == [1]


class Values:
    """A trace of one point."""

    def __init__(self, values: Any) -> None:
        self.found = np.asarray(values)

    def recorded_values(self, key: str) -> Any:
        return self.found


def test_a_first_divergence_is_known_by_its_signature() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 8))
    row = rng.normal(size=8)
    probs = np.tril(np.ones((1, 4, 4))) / np.arange(1, 5)[:, None]
    seen: list[tuple[str, Any, Any, str]] = [
        ("L0.q", x, x + row, "missing_bias"),
        ("L0.q", x, x + rng.normal(size=x.shape), ""),
        ("L0.q", x[:1], x[:1] + row, ""),  # of one row any difference is a vector
        ("L0.attn_norm", x, x + row, ""),
        ("L0.probs", probs, probs + 0.1, "mask"),
        ("L0.probs", probs, probs * 0.9, "softmax_reduction"),
        ("L0.scores", x, x * 2, "attention_scale"),
        ("L0.out", x, x * 2, "multiplier"),
        ("L0.attn_norm", x, x * rng.uniform(0.5, 2, (4, 1)), "norm_eps"),
        ("L0.q_rope", x, x[:, ::-1], "rope_theta"),
        ("L0.q", x, x * np.nan, ""),
        ("L0.q", x, x[:2], ""),
    ]
    for key, a, b, cause in seen:
        assert likely_cause(key, cast(Any, Values(a)), cast(Any, Values(b)))[0] == cause, key


@pytest.mark.parametrize("layers", [1, 3])
def test_masks_are_tried_in_every_layer_and_in_each_that_lies_between(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.diagnosis.search.spanned_layers", lambda case: set(range(layers)))
    monkeypatch.setattr("aprfmt.diagnosis.search.solve_masks", lambda rows, tokens: ["mask"])
    monkeypatch.setattr("aprfmt.diagnosis.search.row_solvers", lambda case: [])
    view = SimpleNamespace(calls=[SimpleNamespace(op="probs")], tolerance=1e-3)
    case = SimpleNamespace(
        view=view, rows=range(5), tokens=5, distances_by_row=lambda view: np.ones(5)
    )
    steps = list(Search._row_steps(cast(Any, SimpleNamespace(case=case))))
    each = [frozenset({layer}) for layer in range(layers)] if layers > 1 else []
    assert [step.layers for step in steps] == [None, *each]


def test_changes_of_different_things_are_joined_and_none_twice() -> None:
    """Two values of one thing are not made together; the nearest is continued first."""
    named = (("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"), ("d", "z"))
    steps = [SearchStep(Change(cause, "", (where,)), None) for cause, where in named]
    measured: list[tuple[SearchStep, ...]] = []

    def measure(tried: tuple[SearchStep, ...]) -> TriedSteps:
        measured.append(tried)
        return TriedSteps(tried, 1.0, float(len(tried)))

    search: Any = SimpleNamespace(
        nearness=lambda view: 0.0, case=SimpleNamespace(view=None), runs=100,
        singles=[TriedSteps((step,), 1.0, 1.0 + at / 8) for at, step in enumerate(steps)],
        _with_best_values=lambda best, others: best, solves=lambda tried: False, measure=measure,
    )  # fmt: skip
    assert Search._join_changes(search) == []
    assert measured[0] == (steps[4], steps[0])
    for tried in measured:
        assert len({step.changed_thing for step in tried}) == len(tried) <= DEEPEST
    keys = [frozenset(map(id, tried)) for tried in measured]
    assert len(keys) == len({*keys}) and max(map(len, keys)) == 4


@pytest.mark.parametrize(("gain", "continued"), [(LEAST / 2, 0), (LEAST, 0), (2 * LEAST, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_a_change_is_continued_where_it_brings_the_rows_nearer_by_more_than_the_least(
    first: bool, gain: float, continued: int
) -> None:
    """A single one (`first`) against the start, a joined one against what it continues."""
    steps = [SearchStep(Change(name, "", (name,)), None) for name in "abc"]
    measured: list[tuple[SearchStep, ...]] = []

    def measure(tried: tuple[SearchStep, ...]) -> TriedSteps:
        measured.append(tried)
        return TriedSteps(tried, 1.0, 0.0 if first or len(tried) > 2 else 1.0 + gain)

    start = gain if first else 1.0
    search: Any = SimpleNamespace(
        nearness=lambda view: 0.0, case=SimpleNamespace(view=None), runs=100,
        singles=[TriedSteps((step,), 1.0, start if not at else LEAST / 4)
                 for at, step in enumerate(steps)],
        _with_best_values=lambda best, others: best, solves=lambda tried: False, measure=measure,
    )  # fmt: skip
    assert Search._join_changes(search) == []
    pairs = [tried for tried in measured if len(tried) == 2]
    assert len(pairs) == (2 * continued if first else 2)
    assert bool([tried for tried in measured if len(tried) > 2]) == (not first and bool(continued))


@pytest.mark.parametrize(
    ("next_points", "tried", "taken"),
    [
        (["L1.q", "L2.q", None], 3, 2), ([None, "L1.q", None], 1, 0),
        (["L1.q", None, "L2.q"], 2, 1),
        (["L1.q", "L2.q", "L1.q"], 3, 1), (["L2.q", "L2.q", "L1.q"], 3, 0),
        (["L0.q", "L0.q", "L0.q"], 3, None), (["L0.q", "L0.q", "L1.q"], 3, 2),
    ],
)  # fmt: skip
def test_the_layers_are_those_in_which_the_pass_agrees_furthest(
    next_points: list[str | None], tried: int, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All, those like this one, this one; none is tried after one that agrees to the end."""
    scopes = [None, frozenset({0, 1}), frozenset({0})]
    passes = iter(next_points)
    change = Change("rope", "", (), scoped=True)
    monkeypatch.setattr(wrong_operations, "spanned_layers", lambda case: [0])
    monkeypatch.setattr(wrong_operations, "layer_scopes", lambda case, change: scopes)
    monkeypatch.setattr(wrong_operations, "measure_agreement", lambda case, found, change: None)

    def ran(patched: Any, recorded: Any) -> Any:
        key = next(passes)
        return SimpleNamespace(flagged=[] if key is None else [point("L9.k", 9), point(key, 0)])

    monkeypatch.setattr(wrong_operations, "run_shadow_pass", ran)
    case: Any = SimpleNamespace(
        layer=0, patched=None, recorded=None, found=SimpleNamespace(views={})
    )
    order = {"L0.q": 0, "L1.q": 1, "L2.q": 2}
    found = wrong_operations._furthest_in_scope(
        case, [SearchStep(change, None)], 0.25, {"L9.k"}, order, 0
    )
    assert len(next_points) - len(list(passes)) == tried
    if taken is None:
        assert found is None
        return
    assert found is not None and found.residual == 0.25
    key = next_points[taken]
    assert (found.layers, found.reach) == (scopes[taken], math.inf if key is None else order[key])


def test_a_step_that_agrees_further_takes_the_place_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, better = (SearchStep(Change(name, "", ()), None) for name in ("a", "b", "a"))
    asked: list[list[SearchStep]] = []

    def reaching(case: Any, steps: Any, *rest: Any) -> Any:
        asked.append(list(steps))
        answer = Solution(steps[-1].change, None, 0.1, None, 1.0, cast(Any, None), cast(Any, None))
        return replace(answer, reach=5.0 if better in steps and len(steps) == 2 else 1.0)

    monkeypatch.setattr(wrong_operations, "_furthest_in_scope", reaching)
    joined = TriedSteps((first, second), 0.1, 2.0)
    search: Any = SimpleNamespace(
        run=lambda: [joined], necessary_steps=lambda joined: [(first, 0.3), (second, 0.4)],
        same_cause_steps=lambda steps, step: [better] if step is first else [],
        other_cause_steps=lambda steps, step: [],
    )  # fmt: skip
    view = SimpleNamespace(key="L0.q")
    monkeypatch.setattr(
        wrong_operations, "replace", lambda one, **new: one if one is view else replace(one, **new)
    )
    case: Any = SimpleNamespace(found=SimpleNamespace(views={"L0.q": view}), view=view)
    made = wrong_operations._search_usual_mistakes(case, search, [], set())
    assert asked == [[first, second], [better, second]]
    assert [one.answer.change for one in made if one.answer] == [better.change, second.change]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_configuration_does_not_fit_where_several_tensors_have_other_shapes(count: int) -> None:
    wrong = [(f"L{i}.attn_q.weight", (8, 4), (4, 4)) for i in range(count)]
    model: Any = SimpleNamespace(
        path="m", resolution=SimpleNamespace(coverage=SimpleNamespace(misshapen=wrong))
    )
    says = (
        f"m: {count} tensors have other shapes than the configuration gives, such as "
        "L0.attn_q.weight: [8, 4] for [4, 4]"
    )
    assert restored_keys.misfit_reason(model) == (says if count > 1 else "")


def test_a_model_that_cannot_be_read_has_no_other_shapes() -> None:
    class Unread:
        @property
        def resolution(self) -> Any:
            raise ArchError("unknown architecture")

    model: Any = Unread()
    assert restored_keys.misfit_reason(model) == ""
    assert restored_keys.refusal_reason(model) == "unknown architecture"
    assert restored_keys.architecture_name(
        cast(Any, SimpleNamespace(spec=SimpleNamespace(name="a")))
    )


@pytest.mark.parametrize(
    ("windows", "layer", "alike"),
    [
        ((1, 1, 1, 1), 2, None),  # all of one kind: that scope is the first one
        ((1, 0, 1, 0), 2, {0, 2}),
        ((1, 1, 1, 0), 0, {0, 1, 2}),
        ((1, 0, 0, 0), 0, None),  # the only one of its kind: that scope is the last one
        ((1,), 0, None),
    ],
)
def test_a_change_is_tried_everywhere_in_its_kind_and_in_its_layer(
    windows: tuple[int, ...], layer: int, alike: set[int] | None
) -> None:
    same = (0,) * len(windows)
    hp = {"window_layers": windows, "rope_layers": same, "moe_layers": same}
    patched = SimpleNamespace(hp=hp, n_layers=len(windows))
    case: Any = SimpleNamespace(layer=layer, patched=patched, view=SimpleNamespace(calls=()))
    change = Change("rope", "", (), scoped=True)
    kind = [] if alike is None else [frozenset(alike)]
    assert layer_scopes(case, change) == [None, *kind, frozenset({layer})]
    assert layer_scopes(case, replace(change, scoped=False)) == [None]
    case.layer = -1
    assert layer_scopes(case, change) == [None]


@pytest.mark.parametrize("most", [0, 2, 5, 9])
def test_keys_that_do_not_matter_are_left_out_up_to_so_many(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of six keys in which files differ the last one alone mends; each try is a whole reading."""
    tried: list[set[Any]] = []

    def mends(a: Any, b: Any, changes: Any, names: Any) -> bool:
        tried.append(set(changes))
        assert (a, b) == (right, model)
        return ("k5",) in changes

    monkeypatch.setattr(configuration_keys, "_MOST", most)
    monkeypatch.setattr(configuration_keys, "_repairs", mends)
    monkeypatch.setattr(
        configuration_keys, "_keys_to_change", lambda a, b: [((f"k{i}",), i) for i in range(6)]
    )
    model: Any = SimpleNamespace(
        key_style="gguf", resolution=SimpleNamespace(report=SimpleNamespace(read={}))
    )
    right: Any = SimpleNamespace(resolution=model.resolution)
    words = configuration_keys.repair_arguments(right, model, ["x"])
    assert words == [f"k{i}={i}" for i in range(min(most, 5), 6)]
    assert len(tried) == 1 + min(most, 5)


def test_one_file_twice_is_said_to_be_one_and_a_copy_is_compared(
    demo_model: Path, tmp_path: Path
) -> None:
    path, copy = tmp_path / "m.gguf", tmp_path / "copy.gguf"
    assert command("convert", demo_model, path, "--quiet").code == 0
    shutil.copy(path, copy)
    (tmp_path / "link.gguf").symlink_to(path)
    with open_model(path) as a:
        for other, same in ((path, True), (tmp_path / "link.gguf", True), (copy, False)):
            with open_model(other) as b:
                found = model_comparison.compare_models(a, b)
            says = [one.says for one in found.evidence]
            assert ("A and B are the same file, m.gguf" in says) == same
            assert ("identity: the same file" in found.checked) == same
            assert (found.report is None) == same


def test_products_of_a_diagnosis_have_one_thread_and_then_their_own_again(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bits of a product may depend on its threads, and a verdict on last bits."""
    seen: list[int | None] = []

    class DiagnosisRun:
        def __init__(self, *parts: Any) -> None: ...

        def run(self) -> str:
            seen.append(blas.blas_threads())
            return "walked"

    monkeypatch.setattr(diagnosis, "DiagnosisRun", DiagnosisRun)
    before = blas.blas_threads()
    assert before is not None
    blas.set_blas_threads(2)
    try:
        found: Any = diagnosis.diagnose(str(demo_model), str(demo_model), ids=[1, 2])
        assert found == "walked" and seen == [1] and blas.blas_threads() == 2
    finally:
        blas.set_blas_threads(before)


def test_another_rotation_says_in_which_layers_and_from_which_length_on(demo_model: Path) -> None:
    with open_model(demo_model) as model:
        hyper = dict(model.hyper)
    other = derived_quantities.compare_quantity("rope_theta", hyper, {**hyper, "rope_theta": 1e4})
    assert other is not None and not other.equal
    assert (other.position, other.length) == (1, 2)
    assert other.where == tuple(f"L{layer}" for layer in range(int(hyper["n_layers"])))
    assert "in 4 layers (L0, ...) and for any sequence" in other.says
    long = {**hyper, "context_length": 2048}
    scaling = {"type": "dynamic", "factor": 2.0}
    other = derived_quantities.compare_quantity(
        "rope_scaling", long, {**hyper, "rope_scaling": scaling}
    )
    assert other is not None and other.position == 512, other
    assert "for sequences of more than 512 tokens" in other.says
    same = derived_quantities.compare_quantity("rope_theta", hyper, dict(hyper))
    assert same is not None and same.equal and not same.where and same.length == 0


def test_ids_that_reach_experts_become_probes_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of tokens that are tried, those are measured that a differing expert is given."""
    made: list[list[Any]] = []

    def measurement(passes: Any, parts: Any, probes: list[Any]) -> Any:
        made.append(probes)
        return SimpleNamespace(probes=probes)

    monkeypatch.setattr(finding_effects, "PartMeasurement", measurement)
    monkeypatch.setattr(probes, "make_probe", lambda ids, hyper, why: tuple(ids))
    for budget, tried, kept in ((math.inf, 3, 2), (5, 2, 1), (0, 0, 0)):
        routed: dict[int, set[int]] = {0: {1}}
        passes = SimpleNamespace(routed=routed, flops=0, pass_flops=lambda one: 2, runs=[])

        def stage(one: tuple[int, ...], passes: Any = passes) -> None:
            passes.runs.append(one)
            passes.flops += 1
            passes.routed[0] |= {1: set(), 2: {4}, 3: {6, 7}}[len(passes.runs)]

        passes.stage_inputs = stage
        measuring: Any = SimpleNamespace(
            passes=passes,
            parts=[],
            probes=["first"],
            known={1: 1},
            measure_shares=lambda neutral: "again",
        )
        monkeypatch.setattr(finding_effects, "BUDGET", budget)
        side: Any = SimpleNamespace(hyper={"vocab_size": 100})
        apart = DifferingRows(experts={"L0.ffn_gate_exps.weight": [1, 4, 6]})
        pair = model_pair.ModelPair(side, side, cast(Any, None), apart)
        found: Any = pair._reach_experts(measuring, cast(Any, "before"), [])
        assert len(passes.runs) == tried
        assert measuring.probes == ["first", *passes.runs[1:tried]][: kept + 1]
        assert found == ("again" if kept else "before")


def test_rows_that_the_probes_read_are_counted() -> None:
    coverage = SimpleNamespace(run=[], not_reached=[])
    levels: Any = SimpleNamespace(coverage=coverage, added={7, 9})
    apart = DifferingRows({"token_embd.weight": [1, 2, 5], "position_embd.weight": [0, 9]})
    side: Any = SimpleNamespace(hyper={})
    probe = SimpleNamespace(ids=[2, 9, 5], rows=None, why="x")
    measuring: Any = SimpleNamespace(passes=SimpleNamespace(routed={}), probes=[probe])
    chosen: Any = SimpleNamespace(rows=[2, 5, 30], ids=[2, 9, 5])
    model_pair.ModelPair(side, side, levels, apart)._add_coverage(measuring, chosen)
    assert coverage.run[1:] == [
        "1 of 2 special and added tokens",
        "2 of 3 rows that differ in token_embd.weight",
        "1 of 2 rows that differ in position_embd.weight",
    ]
    assert coverage.not_reached == [
        "token_embd.weight: 1 of its differing rows, the first is row 1",
        "position_embd.weight: 1 of its differing rows, the first is row 9",
    ]


def test_lines_of_one_kind_are_counted_where_there_are_several() -> None:
    rows = ["L0.attn_q: 3 rows differ", "L1.attn_q: 4 rows differ", "the head is tied"]
    _, several, one = (line for line, _ in titled_lines("evidence", rows))
    assert several == "  L0.attn_q: 3 rows differ (and 1 more like this)"
    assert one == "  the head is tied"


@pytest.mark.parametrize("label", ["A", "B"])
def test_a_side_that_is_read_with_a_restored_key_is_compared_in_its_place(
    label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = SimpleNamespace(
        stated=["later"],
        evidence=["more"],
        models={},
        checked=["tokens", model_comparison._NO_PASS],
    )
    compared: list[Any] = []

    def compare(*given: Any) -> Any:
        compared.extend(given)
        return found

    monkeypatch.setattr(model_comparison, "compare_models", compare)
    whole: Any = ("made", "finding", "error")
    made: Any = model_comparison._compare_with_repaired(cast(Any, "good"), whole, label, None)
    assert made is found
    assert compared == (["made", "good", None] if label == "A" else ["good", "made", None])
    assert (found.stated, found.evidence) == (["finding", "later"], ["error", "more"])
    assert found.models == {label: "made"}
    assert found.checked == ["tokens", f"forward pass: {label} with the key that lets it be read"]


@pytest.mark.parametrize("nonfinite", ["", "L1.attn_out"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("unknown", [{}, {"kq-0": "its scale is not known"}])
def test_what_a_saved_trace_lacks_is_said_of_its_side(
    nonfinite: str, held: bool, unknown: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = SimpleNamespace(
        records={"embd": 0, "logits": 0}, run={"model": "m.gguf", "unknown": unknown},
        nonfinite=nonfinite, recorded_values=lambda key: 1 if held else None,
    )  # fmt: skip
    said: list[tuple[Any, ...]] = []
    levels = SimpleNamespace(not_checked=[])
    stage: Any = SimpleNamespace(
        ids=None, stack=None, levels=levels, model_of=lambda side: None,
        add_evidence=lambda *given: said.append(given),
        store_trace=lambda side, given: trace,
    )  # fmt: skip
    monkeypatch.setattr(diagnosis_order, "open_side_trace", lambda *given: trace)
    monkeypatch.setattr(trace_view, "backend_name", lambda given: "")
    diagnosis_order.DiagnosisRun._load_trace(stage, cast(Any, SimpleNamespace(label="B")))
    assert said[0] == ("identity", "B: a trace of 2 points from m.gguf")
    assert [one for one in said[1:]] == (
        [("forward", f"B has a NaN or an infinity, first at {nonfinite}", nonfinite)]
        if nonfinite
        else []
    )
    assert ("B: holds statistics, no values" in levels.not_checked) is not held
    assert [row for row in levels.not_checked if "kq-0" in row] == (
        ["B: kq-0: its scale is not known"] if unknown else []
    )


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1.0, 0.5, 0.0], [1.0, 0.5, 0.0], 0.0),
        ([1.0, 0.5, 0.0], [1.0, 0.5, 0.1], math.inf),
        ([1.0, 0.5, 0.0], [1.0, 0.75, 0.0], 0.5),
        ([1.0, 0.5, 0.1], [1.0, 0.5, 0.0], 1.0),
        ([1.0, 0.5], [1.0, 0.5, 0.0], math.inf),
    ],
)
def test_pairs_that_turn_in_neither_model_are_the_same(
    one: list[float], other: list[float], apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rope over a part of a head, as some models store it: the other frequencies are zero."""
    made = {"a": np.array(one), "b": np.array(other)}
    monkeypatch.setattr(derived_quantities, "rotation_of_layer", lambda hp, layer: "default")
    monkeypatch.setattr(
        derived_quantities,
        "compute_frequencies",
        lambda hp, kind, length: SimpleNamespace(inv_freq=made[hp["of"]], factor=1.0),
    )
    assert derived_quantities._frequency_distance({"of": "a"}, {"of": "b"}, 0, 8) == apart


@pytest.mark.parametrize("tokens", [7, 8, 9])
@pytest.mark.parametrize("equal", [False, True])
def test_what_differs_behind_the_longest_probe_is_not_reached(tokens: int, equal: bool) -> None:
    """The length is that of the shortest sequence in which the difference shows."""
    left: list[str] = []
    row = SimpleNamespace(equal=equal, length=8, says="the masks differ")
    pair: Any = SimpleNamespace(
        quantities={1: [row]},
        levels=SimpleNamespace(
            findings=[SimpleNamespace(cause=cause) for cause in ("rope_theta", "sliding_window")],
            coverage=SimpleNamespace(not_reached=left),
        ),
    )
    model_pair.ModelPair._add_unreached_quantities(pair, tokens)
    says = f"sliding_window: the masks differ; the longest probe has {tokens} tokens"
    assert left == ([says] if tokens < 8 and not equal else [])


@pytest.mark.parametrize(
    ("example", "probed", "shown", "ends"),
    [
        (
            ("x is [1, 2]", "x is [3]"), True, True,
            "; first shown by x is [1, 2] in A, [3] in B",
        ),
        ((), False, False, "; texts could not be encoded on both sides, so that none was tried"),
        ((), True, False, "; no probe text and no conversation shows it"),
        ((), True, True, ""),
    ],
)  # fmt: skip
def test_a_difference_of_tokenizers_says_what_shows_it(
    example: tuple[str, ...], probed: bool, shown: bool, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_findings, "_set_command", lambda model, mend: f"set {mend}")
    monkeypatch.setattr(tokenizer_findings, "_difference_proof", lambda one: None)
    one: Any = SimpleNamespace(
        says="a merge is missing", example=example, probed=probed, shown=shown, cause="merges",
        where=("B",), before=0.5, after=0.0, name="merges", a=3, b=2, mend=("k=v",),
    )  # fmt: skip
    found = tokenizer_findings._token_finding(one, cast(Any, None))
    assert found.says == f"a merge is missing{ends}"
    assert found.exercised == ("shows" if shown else "not_exercised")
    assert (found.values, found.next) == ({"merges": {"a": 3, "b": 2}}, "set ('k=v',)")


@pytest.mark.parametrize("kind", ["model", "trace"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("unsided", [False, True])
@pytest.mark.parametrize("written", ["", "aprfmt convert A B"])
def test_b_is_written_again_or_its_tensors_are_compared(
    written: str, unsided: bool, trained: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_commands, "diff_tensors_command", lambda asked, finding: "aprfmt diff")
    monkeypatch.setattr(next_commands, "rewrite_command", lambda *given: written)
    monkeypatch.setattr(next_commands, "matrix_encodings", lambda model: {})
    monkeypatch.setattr(next_commands, "input_scale_endings", lambda model: ())
    monkeypatch.setattr(next_commands, "tower_options", lambda a, b: ())
    monkeypatch.setattr(next_commands, "overflows_encoding", lambda values, theirs: False)
    monkeypatch.setattr(next_commands, "is_trained_part", lambda *given: False)
    model = SimpleNamespace(metadata={}, damage={}, source=SimpleNamespace(notes=()))
    side = SimpleNamespace(kind=kind, model=model, path="A")
    asked: Any = SimpleNamespace(a=side, b=side, trained=trained)
    finding: Any = SimpleNamespace(cause="x", values={}, side="B", leaves_side_open=unsided)
    found = next_commands.rewrite_b_command(asked, finding)
    no_source = trained or unsided
    assert found == (
        "" if kind == "trace" else "aprfmt diff" if no_source else written or "aprfmt diff"
    )


@pytest.mark.parametrize("verdict", ["same", "not_comparable", "bug", "undecided"])
def test_without_a_finding_only_equality_is_sure(verdict: str) -> None:
    told: Any = SimpleNamespace(lead=None, verdict=verdict)
    sure = records.Diagnosis.confidence.fget(told)  # type: ignore[attr-defined]
    assert sure == ("confirmed" if verdict in ("same", "not_comparable") else "unconfirmed")
    told.lead = SimpleNamespace(confidence="ambiguous")
    assert records.Diagnosis.confidence.fget(told) == "ambiguous"  # type: ignore[attr-defined]


@pytest.mark.parametrize("off", [0.0, 1e-3, math.inf, math.nan])
def test_a_point_without_rounding_or_beyond_all_has_no_bound_of_its_own(
    off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulated_rounding, "_experts_may_flip", lambda *given: False)
    monkeypatch.setattr(accumulated_rounding, "_is_concentrated", lambda view: 0.0)
    monkeypatch.setattr(accumulated_rounding, "_rounding_distance", lambda view, twin: off)
    view: Any = SimpleNamespace(key="L1.out")
    bounds = accumulated_rounding._long_point_bounds([view], cast(Any, 0), cast(Any, 0), "float32")
    wanted = {"L1.out": accumulated_rounding.TIMES * 1e-3} if off == 1e-3 else {}
    assert bounds == wanted


@pytest.mark.parametrize("explained", [False, True])
@pytest.mark.parametrize("doubtful", [False, True])
@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("faint", [False, True])
def test_a_divergence_is_told_with_what_explains_it_and_what_else_would(
    faint: bool, others: int, doubtful: bool, explained: bool
) -> None:
    change = Change("rope_theta", "the base as in A", ())
    answer = SimpleNamespace(change=change, then=None, layers=(3, 1), residual=0.25)
    view = SimpleNamespace(
        key="L1.q_rope", base="L1.q", residual=0.5, tolerance=0.1,
        calls=[SimpleNamespace(op="rope"), SimpleNamespace(op="rope")],
    )  # fmt: skip
    divergence: Any = SimpleNamespace(
        view=view, answer=answer if explained else None, likely="", faint=faint, tried=7,
        doubtful=doubtful, others=[answer] * others,
    )  # fmt: skip
    found = [row.says for row in forward_words._divergence_evidence("B", divergence, {})]
    wanted = [] if faint else ["B's own input through the model's rope is 0.5 from B's L1.q_rope"]
    if not explained:
        wanted.append("nothing in the table makes L1.q_rope agree, nor do 7 passes")
    elif faint:
        wanted.append("L1.q_rope is no further off than this run's arithmetic makes it, but not")
    else:
        wanted += ["rope_theta fits L1.q_rope loosely"] * doubtful
        wanted.append(
            "with this applied in layer 1, 3 alone - the base as in A - L1.q_rope is 0.25"
        )
        wanted += ["rope_theta explains it as well (the base as in A)"] * others
    assert len(found) == len(wanted)
    assert all(text.startswith(begin) for text, begin in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("mine", "theirs", "paths"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {"a": 2}, {("a",): 1}),
        ({"a": 1}, {}, {("a",): 1}),
        ({}, {"a": 1}, {("a",): GONE}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {("a", "c"): 2}),
        ({"a": {"b": 1}}, {"a": None}, {("a", "b"): 1}),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"d": 1}}},
         {("a", "b", "c"): 1, ("a", "b", "d"): GONE}),
        ({"a": {"b": 1}}, {"a": 5}, {("a",): {"b": 1}}),
    ],
)  # fmt: skip
def test_keys_in_which_configurations_differ_are_the_innermost(
    mine: Any, theirs: Any, paths: Any
) -> None:
    assert dict(config_paths.differing_keys(mine, theirs)) == paths


@pytest.mark.parametrize("label", ["ONLY_IN_A", "ONLY_IN_B"])
@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (("a.bias",), ["a.bias"]), (("a.bias", "a.weight"), []), (("a.weight",), []),
        (("a.bias", "b.bias", "b.weight"), ["a.bias"]),
        (("a.bias", "c.bias"), ["a.bias", "c.bias"]),
    ],
)  # fmt: skip
def test_a_bias_that_went_with_its_weight_is_no_loss_of_its_own(
    lost: tuple[str, ...], named: list[str], label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_is_role_of_pass", lambda a, b, key: True)
    monkeypatch.setattr(tensors, "roles_without_place", lambda a, b: frozenset())
    levels = Levels()
    model: Any = SimpleNamespace(unread=None, find=lambda key: None, roles={})
    rows: Any = [SimpleNamespace(verdict=label, key=key) for key in lost]
    tensors._add_missing_tensors(model, model, rows, levels)
    side = "B" if label == "ONLY_IN_A" else "A"
    found = [(list(one.where), one.side) for one in levels.findings if one.cause == "missing_bias"]
    assert found == ([(named, side)] if named else [])


ZEROS, ONES, NAN = (np.full(2, x, "<f4").tobytes() for x in (0, 1, np.nan))


@pytest.mark.parametrize(
    ("theirs", "codes", "inputs", "right"),
    [
        (ONES, b"\x01\x02", ONES, True),
        (ZEROS, b"\x01\x02", ONES, False),  # the reference's scales are lost too
        (ZEROS, b"\x01\x01", ONES, True),  # a weight of one value
        (NAN, b"\x01\x02", ONES, False),
        (ONES, b"\x01\x02", NAN, False),  # no value depends on it, and a run does
        (ONES, b"\x03\x02", ONES, False),  # other codes
    ],
)
def test_a_part_is_the_wrong_one_where_the_weight_is_right_with_the_references(
    theirs: bytes, codes: bytes, inputs: bytes, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(encoding: str, parts: Any, shape: Any) -> Any:
        if isinstance(parts, bytes):
            return np.frombuffer(parts, "<f4")
        return np.frombuffer(parts[""], np.uint8) * np.frombuffer(parts["scale"], "<f4")

    def part(raw: bytes) -> Any:
        return SimpleNamespace(info=SimpleNamespace(encoding="F32", shape=(2,)), raw=lambda: raw)

    reference = {"": codes if codes != b"\x03\x02" else b"\x01\x02", "scale": theirs}
    monkeypatch.setattr(block_scales, "raw_parts", lambda right: reference)
    for module in (block_scales, credible):
        monkeypatch.setattr(module, "decode", decoded)
    own: Any = {"": part(codes), "scale": part(ONES[::-1]), "input_scale": part(inputs)}
    weight: Any = SimpleNamespace(info=SimpleNamespace(encoding="NF4", shape=(2,)))
    assert block_scales._is_right_with_part(weight, own, "scale") is right


@pytest.mark.parametrize("sides", ["A", "B", "AB", ""])
def test_every_dump_is_asked_whether_its_ranks_differ(sides: str) -> None:
    row = {"name": "norm", "pass": 3, "says": "rank 1 differs", "apart": 0.5, "axis": "tp",
           "ranks": (0, 1)}  # fmt: skip
    traces: Any = {
        side: SimpleNamespace(run={"dump": {"unequal": (row,) if side in sides else ()}})
        for side in "AB"
    }
    found = list(differing_ranks(traces))
    assert [one.side for one in found] == list(sides)
    assert all(one.says == "norm (pass 3): rank 1 differs" for one in found)


@pytest.mark.parametrize("beyond, says", [((), ""), (("L1.out",), "L1.out (0.5 apart)")])
def test_requests_of_a_dump_that_differ_are_reported_once(
    beyond: tuple[str, ...], says: str
) -> None:
    row = {"requests": "request 0 and request 1", "tokens": 5, "compared": 3,
           "unequal": ("L0.out", "L1.out"), "beyond": beyond, "apart": 0.5}  # fmt: skip
    traces: Any = {"B": SimpleNamespace(run={"dump": {"repeats": (row, row)}})}
    found = list(differing_requests(traces))
    assert [(one.side, one.where, one.says.endswith(f"{says}; 1 more pairs differ so"))
            for one in found] == [("B", beyond, True)] * bool(beyond)  # fmt: skip


@pytest.mark.parametrize("lacks", ["A", "B", "both"])
def test_a_point_without_numbers_on_a_side_is_said_not_to_be_compared(lacks: str) -> None:
    def trace(side: str) -> Any:
        record = SimpleNamespace(
            point="ffn_norm", positions=None, dtype="float32", shape=(2, 3), stats=None, digest="",
            values=None, seen=None,
        )  # fmt: skip
        values = None if lacks in (side, "both") else np.ones((2, 3))
        return SimpleNamespace(
            run={}, resolution=0.0, records={"L0.ffn_norm": record},
            find_record=lambda key: record, recorded_values=lambda key: values,
            values_mask=lambda key: None,
        )  # fmt: skip

    asked: list[str] = []

    def compare(key: str, *_: Any) -> str:
        asked.append(key)
        return "not compared"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_pair, "compare_point", compare)
        between: Any = SimpleNamespace()
        found: Any = trace_pair.compare_shared_rows("L0.ffn_norm", trace("A"), trace("B"), between)
    assert (found, asked) == ("not compared", ["L0.ffn_norm"])


@pytest.mark.parametrize("positions", [[], [5], [5, 9]])
@pytest.mark.parametrize("solved", [[], [3], [3, 40]])
def test_a_probe_is_as_long_as_it_takes_to_reach_a_difference(
    positions: list[int], solved: list[int]
) -> None:
    """The first differing position, and what is computed from hyperparameters."""
    parts = [Touched(keys=(POSITIONS, "output_norm.weight")), Touched(keys=("output.weight",)),
             Touched(hyper=("rope_theta",))]  # fmt: skip
    rows = {POSITIONS: positions, "token_embd.weight": [7]}
    reached: Any = {2: [SimpleNamespace(length=each) for each in solved]}
    side: Any = None
    pair = model_pair.ModelPair(side, side, Levels(parts=parts), DifferingRows(rows), reached)
    expected = {2: max(solved, default=0)} | ({0: 6} if positions else {})
    assert pair.lengths_needed() == expected


@pytest.mark.parametrize(("tolerance", "sure"), [(0.5, True), (0.25, True), (0.2499, False)])
def test_a_nan_is_the_only_difference_where_the_rest_is_within_one_operation(
    tolerance: float, sure: bool
) -> None:
    mine, theirs = np.array([[3.0, 3.0, 0.0]]), np.array([[4.0, np.nan, 0.0]])
    view = ShadowPoint(
        "L0.q", "q", 0, mine, RecordedValue(theirs, None, "float32"), math.inf, tolerance, 1.0, ()
    )
    assert view.finite_distance == 0.25
    finding = forward_words._nonfinite_finding("B", view)
    assert (finding.cause, finding.confirmed) == ("nonfinite", sure)
    assert finding.residual_after == (0.25 if sure else None)


def test_logits_are_compared_over_the_ids_that_both_have() -> None:
    """A's norm is the measure, and a NaN is on the side that has it."""
    rng = np.random.default_rng(8)
    mine, theirs = rng.standard_normal((3, 8)), 2 * rng.standard_normal((3, 11))
    for a, b in ((mine, theirs), (theirs, mine)):
        both = a[:, :8], b[:, :8]
        pair = RunPair(("numpy", "numpy"))
        found = compare_passes(
            pair, {"L0.q": mine, "logits": a}, {"logits": b, "L0.q": theirs}, "float64"
        )
        apart = np.linalg.norm(both[0] - both[1]) / np.linalg.norm(both[0])
        assert found["logits"].rel_l2 == pytest.approx(apart) and found["logits"].beyond
        assert found["L0.q"].rel_l2 == math.inf and found["L0.q"].beyond
        assert list(found) == ["L0.q", "logits"]
        odd = b.copy()
        odd[1, 2] = np.nan
        seen = compare_passes(pair, {"logits": a}, {"logits": odd}, "float64")["logits"].nonfinite
        assert seen is not None and (seen.alone, seen.a, seen.b, seen.side) == (1, 0, 1, "B")


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_statistics_may_differ_as_the_coarser_of_two_runs_does(dtypes: tuple[str, str]) -> None:
    a, b = (
        Trace({}, {"L0.q": Record("q", 0, (4,), None, dtype, None, "", compute_stats(np.ones(4)))})
        for dtype in dtypes
    )
    bound = statistics_evidence._stats_bound(a, b, "L0.q")
    assert bound == tolerances.statistics_tolerance("bfloat16", "bfloat16")
    assert bound > tolerances.statistics_tolerance("float32", "float32")


def usual(cause: str, layers: set[int] | None) -> Any:
    return UsualMistake(Change(cause, "says", ()), None if layers is None else frozenset(layers))


@pytest.mark.parametrize("here", [set(), {0}, {1}, {0, 1}, {3}])
@pytest.mark.parametrize("acting", [True, False])
def test_a_mistake_of_single_layers_is_tried_where_one_of_them_is_passed(
    acting: bool, here: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"first": {0}, "both": {0, 1}, "second": {1}, "any": None}
    mistakes = [usual(cause, layers) for cause, layers in rows.items()]
    monkeypatch.setattr(searching, "single_layer_mistakes", lambda patched: mistakes)
    monkeypatch.setattr(searching, "may_act", lambda case, change, layers: acting)
    monkeypatch.setattr(searching, "spanned_layers", lambda case: frozenset(here))
    held: Any = SimpleNamespace(case=SimpleNamespace(patched=None), _usual_changes=lambda: [])
    found = [(step.change.cause, step.everywhere) for step in Search._single_layer_steps(held)]
    wanted = [cause for cause, layers in rows.items() if layers is not None and layers & here]
    assert found == [(cause, False) for cause in wanted if acting]


@pytest.mark.parametrize(
    ("op", "moved", "acts"),
    [
        ("rope", True, True), ("embed", True, True), ("linear", True, False),
        ("rms_norm", True, False), ("rope", False, False), ("linear", False, False),
    ],
)  # fmt: skip
def test_other_positions_act_where_tokens_are_placed(op: str, moved: bool, acts: bool) -> None:
    """Nothing else reads them: a change of them is not tried at a product or a norm."""
    with open_model(tiny_folder("llama")) as model:
        patched = PatchedModel.unpatched(model, range(4), "float32").with_positions(range(4))
        call = OperationCall(op, (), {}, None, PassLocation("q", 0))
        case: Any = SimpleNamespace(patched=patched, view=SimpleNamespace(calls=[call], point="q"))
        positions = range(1, 5) if moved else range(4)
        change = Change(
            "positions", "says", (), lambda patched, layers: patched.with_positions(positions)
        )
        assert searching.may_act(case, change, None) is acts
        patched.weights.close()


@pytest.mark.parametrize("key", packing_repairs.CLAIMS)
@pytest.mark.parametrize("at", range(5))
def test_every_other_claim_is_tried_whichever_is_stated(key: str, at: int) -> None:
    """Of the same dialect's codes; the one that is stated is no repair."""
    values = packing_repairs.CLAIMS[key]
    method = "modelopt" if key == "quant_algo" else "compressed-tensors"
    config: Any = {"quant_method": method, key: values[at]}
    dialect = next(DIALECTS[name] for name in DIALECTS if DIALECTS[name].recognises(config))
    weight = packing_repairs.StoredWeight("w", dialect, {}, (), config)
    now = PackedWeight(dialect, {}, config)
    repairs = [
        row for row in packing_repairs._repairs_by_claim(weight, now) if f"says {key} " in row.says
    ]
    found = {str(repair.packed.config[key]) for repair in repairs}
    same = {
        value
        for value in values
        for name in DIALECTS
        if DIALECTS[name].main == dialect.main and DIALECTS[name].recognises({**config, key: value})
    }
    assert values[at] in same and found == same - {values[at]}


@pytest.mark.parametrize("count", [0, 1, packing.MOST, packing.MOST + 1, packing.MOST + 5])
@pytest.mark.parametrize("fits", [True, False])
def test_as_many_packed_weights_are_put_right_as_are_said(
    fits: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def repair(weight: Any, reference: Any) -> Any:
        tried.append(weight.name)
        return [("scales_missing", "is gone", True)] if fits else []

    broken = [SimpleNamespace(name=f"w{i}", missing=()) for i in range(count)]
    monkeypatch.setattr(packing, "_undecodable_weights", lambda *given: broken)
    monkeypatch.setattr(packing, "find_wrong_scales", lambda *given: [])
    monkeypatch.setattr(packing, "_working_repairs", repair)
    model: Any = None
    found = packing.examine_packed(model, model, "B")
    assert tried == [f"w{i}" for i in range(min(count, packing.MOST))]
    if not fits or not count:
        assert found is None
        return
    assert found is not None
    (finding,) = found.findings
    more = len(tried) - 1
    assert finding.says == "B: w0: is gone" + f", and so in {more} more" * bool(more)
    said = [row.says for row in found.evidence]
    expected = f"{count} packed weights of B do not decode; {packing.MOST} of them were put right"
    assert said == [expected] * (count > packing.MOST)


@pytest.mark.parametrize("points", [0, 1])
@pytest.mark.parametrize(("distance", "asked"), [(0.0, 0), (0.999, 0), (1.0, 0), (1.001, 1)])
def test_a_run_within_tolerance_of_its_model_is_no_mixture(
    distance: float, asked: int, points: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A distance of a tolerance is within it; where no point was compared, nothing is said."""
    looked: list[bool] = []

    def parts(*given: Any) -> list[Any]:
        looked.append(True)
        return []

    view = SimpleNamespace(residual=distance * 0.5, tolerance=0.25, whole_tolerance=0.5)
    passed = SimpleNamespace(compared_count=points, views={"q": view})
    monkeypatch.setattr(mixed_checkpoints, "run_shadow_pass", lambda *given: passed)
    monkeypatch.setattr(mixed_checkpoints, "record_points", lambda patched: {})
    monkeypatch.setattr(mixed_checkpoints, "_differing_parts", parts)
    with open_model(tiny_folder("llama")) as model:
        found = mixed_checkpoints.find_mixture(model, model, Trace({}, {}), [1], "float32", "B")
    assert found is None and len(looked) == asked * points


@pytest.mark.parametrize("proven", ["", "every tensor is equal"])
@pytest.mark.parametrize("absent", ["", "; 3 points are in no trace"])
@pytest.mark.parametrize("seen", ["", "another fact", records.ALL_ZERO])
def test_the_sentence_of_equality_has_its_proof_or_what_was_absent(
    seen: str, absent: str, proven: str
) -> None:
    """A proof covers the points that nothing recorded; files of zeros alone are said."""
    evidence = [records.Evidence("tensor", seen)] if seen else []
    told: Any = SimpleNamespace(
        _end_reason="", lead=None, verdict="same", proven=proven, evidence=evidence,
        _absent_points_clause=lambda: absent, _not_compared_clause=lambda: "; the rest",
    )  # fmt: skip
    said = records.Diagnosis.sentence.fget(told)  # type: ignore[attr-defined]
    clause = f"; {proven}" if proven else absent
    clause += f"; {seen}" if seen == records.ALL_ZERO else ""
    assert said == f"same: nothing that was compared differs{clause}; the rest"


@pytest.mark.parametrize("count", [0, 1, tolerances.ALL_PRODUCTS - 1, tolerances.ALL_PRODUCTS, 9])
@pytest.mark.parametrize("flagged", [0, 1, 9])
@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
def test_products_point_to_an_arithmetic_if_they_are_many_and_one_is_off(
    encoding: str, flagged: int, count: int
) -> None:
    """Not of a few products, none where all are within tolerance, none of quantized weights."""
    off = tolerances.ROUNDOFF["bfloat16"]
    whole = tolerances.arithmetic_of_errors(off, off, off)
    assert whole
    weight = SimpleNamespace(encoding=encoding)
    views = {
        str(i): SimpleNamespace(
            calls=[OperationCall("linear", (None, weight), {}, None, PassLocation("q", 0))],
            residual=off,
            flagged=i < flagged,
        )
        for i in range(count)
    }
    found = run_arithmetic.arithmetic_of_products(cast(Any, SimpleNamespace(views=views)))
    judged = encoding == "F32" and flagged > 0 and count >= tolerances.ALL_PRODUCTS
    assert found == (whole if judged else "")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_weights_of_every_blend_are_closed(count: int) -> None:
    """Threads that read weights ahead end before the files are closed under them."""
    closed: list[int] = []
    blends = [
        SimpleNamespace(weights=SimpleNamespace(close=partial(closed.append, i)))
        for i in range(count)
    ]
    made: Any = SimpleNamespace(_blends=blends)
    PairedPass.close(made)
    assert closed == list(range(count))


@pytest.mark.parametrize(
    ("changes", "calls", "point", "acts"),
    [
        ({"hp": "other"}, (), "q", True),
        ({"spec": "other"}, (), "q", True),
        ({"own": "other"}, (), "q", True),
        ({}, ("linear",), "q", False),
        ({"overrides": {"linear": (1, 2)}}, ("linear",), "q", True),
        ({"overrides": {"linear": (1, 2)}}, ("add",), "q", False),
        ({"overrides": {"linear": (1,)}}, ("linear",), "q", False),  # it was overridden before
        ({"positions": (1, 2)}, ("rope",), "q", True),
        ({"positions": (1, 2)}, ("embed",), "embd", True),
        ({"positions": (1, 2)}, ("linear",), "q", False),
        ({"taps": {"x": 1}}, ("add_weighted",), "out", True),
        ({"taps": {"x": 1}}, ("linear",), "q", False),
        ({"taps": {"q": 1}}, ("linear",), "q", True),
        ({"taps": {"behind": 1}}, ("linear",), "q", True),  # a product is made of it
    ],
)
def test_a_change_may_act_where_it_replaces_what_the_point_was_made_of(
    changes: dict[str, Any], calls: tuple[str, ...], point: str, acts: bool
) -> None:
    """Seen red: the model's numbers held against themselves, an older override for a new one."""
    usual: dict[str, Any] = {
        "hp": "own", "spec": "own", "own": "own", "overrides": {"linear": (1,)}, "positions": None,
        "taps": {}, "replaced": (), "weights": {},
    }  # fmt: skip
    before = SimpleNamespace(**usual)
    after = SimpleNamespace(**{**usual, **changes})
    view = SimpleNamespace(
        point=point,
        calls=[
            SimpleNamespace(op=op, weights=(), vectors=(), location=SimpleNamespace(point="behind"))
            for op in calls
        ],
    )
    case: Any = SimpleNamespace(patched=before, view=view)
    change: Any = SimpleNamespace(make=lambda patched, layers: after)
    assert may_act(case, change, None) is acts

    def impossible(patched: Any, layers: Any) -> Any:
        raise KeyError("no such weight")

    assert may_act(case, SimpleNamespace(make=impossible), None) is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rest", "tolerance", "sure"),
    [(0.25, 0.5, True), (0.25, 0.25, True), (0.25, 0.2499, False), (0.0, 0.0, True),
     (None, 0.5, False), (math.inf, 0.5, False)],
)  # fmt: skip
@pytest.mark.parametrize("values", [("nan", "1"), ("1", "-inf"), ("nan", "inf")])
def test_a_nan_of_a_trace_is_sure_where_the_rest_is_within_the_tolerance(
    values: tuple[str, str], rest: float | None, tolerance: float, sure: bool
) -> None:
    odd = NonFinite(1, 1, 1, 1, (0,), values, 0, None)
    pairs = [
        PointDiff(f"L{i}.q", math.inf, math.inf, (0,), tolerance, True, nonfinite=odd,
                  rel_l2_finite=rest if i == 1 else 9.0)
        for i in (1, 2)
    ]  # fmt: skip
    plain = PointDiff("L0.q", 0.0, 0.0, (0,), tolerance, False)
    assert trace_pair.nonfinite_finding([plain]) is None
    finding = trace_pair.nonfinite_finding([plain, *pairs])
    assert finding is not None and finding.confirmed is sure
    assert finding.residual_after == (rest if sure else None)
    side = {("nan", "1"): "A", ("1", "-inf"): "B"}.get(values, "")
    assert finding.side == side


@pytest.mark.parametrize(
    ("explained", "fits"), [(0.0, True), (0.25, True), (0.2500001, False), (math.nan, False)]
)
def test_a_rotation_explains_up_to_ten_times_the_tolerance(
    explained: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rotations.Rotation(np.ones((2, 2), complex), np.arange(2), explained, False)
    monkeypatch.setattr(rotations, "solve_rotation", lambda case: found)
    case: Any = SimpleNamespace(view=SimpleNamespace(tolerance=0.025))
    assert 10 * case.view.tolerance == 0.25
    assert rotations.explaining_rotation(case) is (found if fits else None)
    monkeypatch.setattr(rotations, "solve_rotation", lambda case: None)
    assert rotations.explaining_rotation(case) is None


@pytest.mark.parametrize("allowed", [400, 2000])
def test_one_step_of_each_other_cause_is_named_that_does_as_well(allowed: int) -> None:
    """In all its layers, in place of one step, beside the others; none of the same cause."""

    def step(cause: str, *, everywhere: bool = True, mends: bool = True) -> SearchStep:
        return SearchStep(Change(cause, "mends" if mends else "", ()), None, everywhere)

    mine, beside = step("rope"), step("mask")
    singles = [
        step("scale", mends=False), step("scale"), step("scale"),
        step("norm_eps", everywhere=False), step("rope"), beside, step("bias"),
        step("softcap", mends=False),
    ]  # fmt: skip
    tried: list[tuple[SearchStep, ...]] = []

    def measure(steps: tuple[SearchStep, ...]) -> TriedSteps:
        tried.append(steps)
        return TriedSteps(steps, 0.0 if steps[-1].change.says else 1.0, 1.0)

    search: Any = SimpleNamespace(
        singles=[TriedSteps((one,), 1.0, 1.0) for one in singles], allowed=allowed, runs=0,
        measure=measure, solves=lambda one: one.residual == 0.0,
    )  # fmt: skip
    found = Search.other_cause_steps(search, [beside, mine], mine)
    assert found == [singles[1], singles[6]]
    assert search.runs == min(searching.OTHERS, allowed // 4)
    assert [steps[0] for steps in tried] == [beside] * 4
    assert [steps[1] for steps in tried] == [singles[i] for i in (0, 1, 6, 7)]


FACTORS: dict[str, tuple[Any, str, bool, str]] = {
    # what was done to the output -> point, whether there is a bias, what is said
    "all": (1.5, "ffn_down", False, "w is multiplied by 1.5"),
    "all turned": (-2.0, "ffn_down", False, "w is multiplied by -2"),
    "all but the bias": (0.25, "q", True, "w is multiplied by 0.25"),
    "logits": (1.5, "logits", False, ""),  # a temperature does so as well
    "logits turned": (-1.5, "logits", False, "w is multiplied by -1.5"),
    "logits with a bias": (1.5, "logits", True, "w is multiplied by 1.5"),
    "two rows": ([1, 3, 1, 1, 0.5, 1], "q", False, "2 rows of w are multiplied by numbers"),
    "a row hardly": ([1, 3, 1, 1.0015, 1, 1], "q", False, "2 rows of w are multiplied by numbers"),
    "a row less so": ([1, 3, 1, 1.0005, 1, 1], "q", False, "1 rows of w are multiplied by numbers"),
    "a row lost": ([1, 0, 1, 1, 1, 1], "q", False, ""),
    "nothing of it": (0.0, "q", False, ""),
}


@pytest.mark.parametrize("many", [2, 8])
@pytest.mark.parametrize("what", FACTORS)
def test_a_factor_of_a_weight_is_solved_from_its_output(
    what: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor, point, biased, says = FACTORS[what]
    rng = np.random.default_rng(many)
    x, w = rng.standard_normal((many, 5)), rng.standard_normal((6, 5))
    bias = rng.standard_normal(6) if biased else None
    added = 0.0 if bias is None else bias
    product = Product(x, x @ w.T * np.array(factor) + added, x @ w.T + added, bias, "w", "w")
    monkeypatch.setattr(weights, "product_with_weight", lambda case: (product, w))
    case: Any = SimpleNamespace(
        view=SimpleNamespace(tolerance=1e-6, point=point),
        patched=SimpleNamespace(weights={"w": SimpleNamespace(shape=w.shape)}, stated=None),
    )
    found = list(weights.find_output_factor(case))
    if not says or (isinstance(factor, list) and many <= 2):  # too few rows to judge each
        assert not found
        return
    (change,) = found
    assert change.cause == "scale" and change.says.startswith(says) and change.where == ("w",)
    assert change.general is isinstance(factor, list)
    other = replace(product, theirs=rng.standard_normal((many, 6)))
    monkeypatch.setattr(weights, "product_with_weight", lambda case: (other, w))
    assert not list(weights.find_output_factor(case))


@pytest.mark.parametrize(("apart", "still"), [(0.0, True), (0.25, True), (0.2501, False)])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_nothing_is_turned_up_to_ten_times_the_tolerance(
    apart: float, still: bool, style: str
) -> None:
    """By numpy's own complex numbers; every pair is longer by one factor."""
    x = np.random.default_rng(3).standard_normal((4, 2, 6))
    pairs = rotations.complex_pairs(x, 3, style) * (1 + apart)
    y = np.concatenate([pairs.real, pairs.imag], -1)
    case: Any = SimpleNamespace(
        rows=np.arange(4), view=SimpleNamespace(tolerance=np.nextafter(0.025, 1))
    )
    found = rotations._fit_pair_rotations(case, x, y, 3, style)
    assert found.still is still and found.explained < 1e-12
    np.testing.assert_allclose(found.turn, 1 + apart)


def test_what_nothing_explains_is_as_far_as_its_worst_tensor() -> None:
    """A tensor without a distance counts in the number and takes nothing from the others."""

    def row(key: str, rel_l2: float | None) -> Any:
        stats = rel_l2 and SimpleNamespace(rel_l2=rel_l2, cosine=0.5)
        return SimpleNamespace(key=key, stats=stats, shape_a=(2, 2))

    for distances, worst in (((0.5, None, 2.0), 2.0), ((0.25,), 0.25), ((None, None), None)):
        rows = [row(f"L{at}.q", one) for at, one in enumerate(distances)]
        finding, touched = tensors._unexplained_finding(rows)
        assert (finding.residual_before, finding.confirmed) == (worst, False)
        assert finding.says.startswith(f"{len(rows)} tensors have other values")
        assert ("nothing relates" in finding.says) is (worst is None)
        assert ("belong to the other side's (correlation at least 0.5)" in finding.says) is (
            worst is not None
        )
        assert touched == Touched((), tuple(row.key for row in rows))


def test_a_copy_within_its_own_steps_is_not_confirmed() -> None:
    """The unit of a float type is known without the copy; the steps of blocks stand in it."""
    for coarser, other in product(("F16", "Q8_0", "Q4_K", "IQ2_XXS"), ("F32", "BF16", "Q6_K")):
        for a, b in ((coarser, other), (other, coarser)):
            row = TensorDiff("L0.q", "WITHIN", encoding_a=a, encoding_b=b)
            ((found, _),) = tensors.coarser_copies([row])
            blocks = found.values["encoding"].startswith(("Q", "IQ"))
            said = ("quantisation", "explained") if blocks else ("rounding", "confirmed")
            assert (found.cause, found.certainty) == said


def test_a_point_taken_elsewhere_is_dropped_where_it_agrees_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one that is explained by its place, and only if all other changes make it agree."""

    def answered(name: str, dropped: bool) -> Divergence:
        change = SimpleNamespace(name=name, drop=frozenset([name] * dropped), general=False)
        view: Any = SimpleNamespace(key=name, calls=())
        return Divergence(view, cast(Any, SimpleNamespace(change=change, layers=frozenset({0}))))

    def passed(steps: Any) -> Any:
        asked.append([change.name for change, _ in steps])
        return SimpleNamespace(flagged=[] if agrees else [SimpleNamespace(key="L0.q")])

    monkeypatch.setattr(
        wrong_operations, "_apply_changes", lambda patched, recorded, steps: (steps,)
    )
    monkeypatch.setattr(wrong_operations, "run_shadow_pass", passed)
    nothing: Any = SimpleNamespace(flagged=())
    for drop, agrees in ((False, True), (True, False), (True, True)):
        asked: list[list[str]] = []
        given = [answered("L0.k", False), answered("L0.v", False), answered("L0.q", drop)]
        kept = wrong_operations.recheck_answers(given, nothing, nothing, nothing)
        left = given[:2] if drop and agrees else given
        assert [one.view.key for one in kept] == [one.view.key for one in left]
        assert asked == [["L0.k", "L0.v"]] * drop


def test_what_no_packing_knows_is_a_tail_of_the_module_that_it_stands_behind() -> None:
    """A module is packed where the other file has its weight and this one has none."""

    def model(*names: str) -> Any:
        return SimpleNamespace(
            source=SimpleNamespace(tensors=dict.fromkeys(names)), config=None, folder=None,
            path=Path("none/model.safetensors"), metadata={}, key_style="safetensors",
        )  # fmt: skip

    good = model(
        "a.q.qweight", "a.q.scales", "b.q.weight", "c.q.qweight", "d.q.qweight", "n.weight"
    )
    bad = model("a.q.packed", "a.q.steps", "b.q.weight", "b.q.odd", "c.q.weight", "e.alone")
    assert renamed_parts._unknown_tails(good, bad) == {
        "a.q": ["packed", "steps"],
        "b.q": ["odd"],
        "d.q": [],
        "n": [],
    }
    parts = model("a.q.qweight", "a.q.steps", "b.q.weight", "c.q.weight", "d.q.weight", "n.weight")
    assert renamed_parts._unknown_tails(good, parts) == {"a.q": ["steps"]}


def test_the_source_that_a_file_names_is_told_with_its_digest() -> None:
    def told(**metadata: Any) -> str:
        held = {f"aprfmt.source.{key}": value for key, value in metadata.items()}
        return model_comparison._named_source(cast(Any, SimpleNamespace(metadata=held)))

    assert told() == told(sha256="ab" * 32) == told(file=3) == ""
    assert told(file="m.gguf") == told(file="m.gguf", sha256=4) == ", made from m.gguf"
    digest = "0123456789abcdef" * 4
    assert told(file="m", sha256=digest) == ", made from m (SHA-256 0123456789ab...)"


def test_points_that_changes_drop_are_left_out_of_the_trace() -> None:
    made: list[Any] = []

    def change(name: str, *drop: str) -> Change:
        def make(patched: Any, layers: Any) -> Any:
            made.append((name, patched, layers))
            return f"{patched}+{name}"

        return Change("x", name, (), make, drop=frozenset(drop))

    trace: Any = SimpleNamespace(without={"L0.q"}, ignoring=sorted)
    steps: Any = [
        (change("a", "L1.k"), {1}),
        (change("b"), None),
        (change("c", "L0.v", "L1.k"), {0}),
    ]
    apply: Any = partial(wrong_operations._apply_changes, cast(Any, "m"), trace)
    assert apply(steps) == ("m+a+b+c", ["L0.q", "L0.v", "L1.k"])
    assert made == [("a", "m", {1}), ("b", "m+a", None), ("c", "m+a+b", {0})]
    assert trace.without == {"L0.q"}
    assert apply([]) == ("m", ["L0.q"])


def test_rows_of_another_sequence_are_told_where_they_are_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the same dump, as long, and not the model's own for the ids that they stand under."""
    own, other, third = (1, 2, 3), (4, 5, 6), (7, 8, 9)
    asked: list[Any] = []

    def told(others: Any, departs: Mapping[Any, bool | None]) -> Any:
        def answer(trace: Any, model: Any, ids: Any, dtype: str) -> bool | None:
            asked.append(ids)
            return departs.get(ids, True)

        asked.clear()
        monkeypatch.setattr(batch_sequences, "dump_sequences", lambda trace: (None, others))
        monkeypatch.setattr(batch_sequences, "_differs_from_model", answer)
        trace: Any = SimpleNamespace(records={"embd": 1, "L0.q": 2})
        return batch_sequences.rows_of_other_ids("B", trace, cast(Any, None), own, "float32")

    found = told([own, None, other, third], {third: False})
    assert found.values == {"ids": list(own), "rows_of": list(third)} and found.side == "B"
    assert found.where == ("embd", "L0.q") and asked == [own, other, third]
    assert told([own, other, third], {other: False, third: False}).values["rows_of"] == [4, 5, 6]
    assert told([own, other], {own: False, other: False}) is None and asked == [own]
    assert told([own, other], {own: None, other: False}) is None  # nothing was compared
    assert told([own, other], {other: None}) is None
    assert told([None], {}) is None and not asked
    for length in ((4, 5), (4, 5, 6, 7)):
        assert told([length], {length: False}) is None and not asked
    many = [(9, 9, n) for n in range(batch_sequences.FEW + 1)]
    assert told(many, {many[-1]: False}) is None
    assert told(many, {many[-2]: False}) is not None


def test_values_beside_a_point_are_those_of_its_layer_and_what_enters_it() -> None:
    keys = ["embd", "embd_scaled", "L0.in", "L0.q", "L0.out", "L1.mid", "L1.attn_out", "L1.out"]
    held = {key: np.full(4, at + 1.0) for at, key in enumerate(keys)}
    held["final_norm"] = np.full(4, 9.0)
    trace: Any = SimpleNamespace(find_record=held.get, recorded_values=held.get)

    def beside(key: str) -> dict[str, float]:
        return {name: float(values[0]) for name, values in trace_pair._neighbour_values(key, trace)}

    assert beside("L0.q") == {
        "L0.in": 3,
        "L0.out": 5,
        "embd": 1,
        "embd_scaled": 2,
        "q plus the residual stream": 7,
        "q less the residual stream": 1,
    }
    found = beside("L1.attn_out")
    assert {"L1.mid", "L1.out", "L0.out"} <= found.keys() and "embd" not in found
    pairs = list(trace_pair._neighbour_values("L1.attn_out", trace))
    sums = [(name, float(values[0])) for name, values in pairs if "residual" in name]
    assert sums == [
        ("attn_out plus the residual stream", 12.0),
        ("attn_out less the residual stream", 2.0),
        ("attn_out plus the residual stream", 13.0),
        ("attn_out less the residual stream", 1.0),
    ]
    assert beside("final_norm") == {"embd": 1, "embd_scaled": 2}
    held["L1.mid"] = np.full(3, 1.0)  # of another size: not added
    held["L0.out"] = np.full(5, 1.0)
    assert not any("residual" in name for name in beside("L1.attn_out"))
