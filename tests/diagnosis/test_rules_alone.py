"""Rules of a diagnosis, each by itself: which command mends, what is equal, what comes last."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.base.budget import Budget, BudgetSpent
from aprfmt.base.protocols import TypedValue
from aprfmt.causes.tensor import shared_ranges
from aprfmt.diagnosis import (
    accumulated_rounding,
    derived_quantities,
    forward_level,
    renumbered_tokens,
    sides,
    tokenizer_findings,
    wrong_operations,
)
from aprfmt.diagnosis.diagnosis_order import DiagnosisRun
from aprfmt.diagnosis.search import Search
from aprfmt.errors import CodecError, FormatError, UnsupportedError, UsageError
from aprfmt.model.completeness import ANY
from aprfmt.model.ledger import LATE
from aprfmt.tokenizer import carriers
from aprfmt.tokenizer.keys import CHAT_TEMPLATE

# --- the keys of a tokenizer that a command sets ------------------------------------------------


def arguments(written: Any, *where: str, style: str = "gguf", folder: Path | None = None) -> Any:
    b: Any = SimpleNamespace(key_style=style, metadata={"gone": 1, "kept": 2})
    a: Any = SimpleNamespace(folder=None if folder is None else SimpleNamespace(path=folder))

    def to_gguf(model: Any) -> Any:
        if isinstance(written, Exception):
            raise written
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carriers, "to_gguf", to_gguf)
        return tokenizer_findings.tokenizer_set_arguments(a, b, where)


def test_a_command_holds_short_texts_and_numbers() -> None:
    """A list fits no command, and is another answer than a tokenizer that GGUF cannot express."""
    written = {
        "n": 3,
        "x": 0.5,
        "on": True,
        "text": "a b",
        "typed": TypedValue(7, "uint32"),
        "list": [1, 2],
        "kept": "it's",
        "long": "x" * 120,
        "longer": "x" * 121,
        "line": "a\nb",
    }
    for where, expected in (
        (("n", "x", "on"), ["n=3", "x=0.5", "on=true"]),
        (("text", "typed"), ["'text=a b'", "typed=7"]),
        (("gone", "n"), ["--remove gone", "n=3"]),
        (("nobody's", "n"), ["n=3"]),
        (("kept",), ["'kept=it'\"'\"'s'"]),
        (("n", "n"), ["n=3"]),
        (("long",), ["long=" + "x" * 120]),
        (("longer",), []),
        (("line",), []),
        (("n", "list"), []),
        ((), []),
    ):
        assert arguments(written, *where) == expected, where
    assert arguments(written, "n", style="hf") == []
    assert arguments(FormatError("no such tokenizer"), "n") is None


def test_a_template_is_set_of_its_own_file(tmp_path: Path) -> None:
    template = "{{ messages }}\n" * 40
    (tmp_path / "chat_template.jinja").write_text(template)
    written = {CHAT_TEMPLATE: template}
    named = f"{CHAT_TEMPLATE}=@{tmp_path}/chat_template.jinja"
    assert arguments(written, CHAT_TEMPLATE, folder=tmp_path) == [named]
    assert arguments({CHAT_TEMPLATE: template + " "}, CHAT_TEMPLATE, folder=tmp_path) == []
    assert arguments(written, CHAT_TEMPLATE) == []
    assert arguments({"other": template}, "other", folder=tmp_path) == []


# --- rows under other ids -----------------------------------------------------------------------


def test_rows_of_tokens_are_found_by_their_texts_and_the_others_where_they_stand() -> None:
    order = [2, 0, 1]

    def table(values: Any) -> Any:
        held = np.asarray(values, np.float32)
        return SimpleNamespace(shape=held.shape, rows=lambda start, stop: held[start:stop])

    def same(x: Any, y: Any) -> bool:
        a, b = (SimpleNamespace(roles={} if one is None else {"t": one}) for one in (x, y))
        left: Any = a
        right: Any = b
        return renumbered_tokens._same_rows(left, right, "t", order)

    for more in (0, 1, 2):  # rows that no token has
        rows = np.arange(2.0 * (3 + more)).reshape(-1, 2)
        moved = rows.copy()
        moved[order] = rows[:3]
        assert same(table(rows), table(moved)) and not same(table(rows), table(rows))
        for at in range(3 + more):
            wrong = moved.copy()
            wrong[at] += 1
            assert not same(table(rows), table(wrong)), at
        assert not same(table(rows), table(moved[:, :1])) and not same(table(rows), None)
    assert not same(table([[1], [2]]), table([[1], [2]])) and not same(None, table([[1]]))


# --- the last look of an examination ------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "directed", "NaN", "arithmetic"])
def test_a_small_difference_with_a_direction_is_looked_for_where_nothing_else_is(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points in fewer bits are told only where nothing is."""
    guessed = "the arithmetic" if what == "arithmetic" else ""
    flagged = what in ("NaN", "arithmetic")
    views = [SimpleNamespace(key="L0.q", one_sided_nonfinite=not guessed, layer=0)] * flagged
    found: Any = SimpleNamespace(flagged=views, views={})
    recorded: Any = SimpleNamespace(shapes={}, without=())
    directed: list[str] = []

    def look(*given: Any) -> list[Any]:
        directed.append("asked")
        return ["directed"] * (what == "directed")

    left = SimpleNamespace(flagged=[], views={})
    for name, made in (
        ("record_points", lambda patched: {}),
        ("_read_in_its_arithmetic", lambda patched, recorded: (recorded, found)),
        ("find_directed_mistake", look),
        ("recheck_answers", lambda divergences, *given: divergences),
        ("points_in_16_bits", lambda *given: {"few": "points"}),
        ("Mismatch", lambda *given: SimpleNamespace(fitting=True)),
        ("replace", lambda case, **changed: case),
        ("find_unwritten_rows", lambda case: None),
        ("find_other_capture_point", lambda case: None),
        ("find_shifted_series", lambda case: None),
        ("_answers_of_table", lambda case, known: ()),
        ("is_wide", lambda case: False),
        ("Search", lambda *given: SimpleNamespace(tried=0, smallest_remaining_share=1.0)),
        ("_search_usual_mistakes", lambda *given: []),
        ("find_faint_mistakes", lambda *given: None),
        ("explain_by_arithmetic", lambda *given: (recorded, guessed) if guessed else None),
        ("run_shadow_pass", lambda *given: left),
    ):
        monkeypatch.setattr(wrong_operations, name, made)
    recorded.ignoring = lambda keys: recorded
    patched: Any = None
    report: Any = wrong_operations.examine(patched, recorded)
    assert directed == ["asked"] * (not flagged)
    told = {"directed": ["directed"], "NaN": views}.get(what, [])
    assert [getattr(one, "view", one) for one in report.divergences] == told
    assert (report.supposed, report.unfinished) == (guessed, False)
    assert report.short == ({"few": "points"} if what == "nothing" else {})


# --- the end of a walk --------------------------------------------------------------------------


def end_of(walk: Any, *, budget: bool = True, passes: Any = None, **answers: Any) -> Any:
    """Return the reason of a walk over two traces, with every step but the last ones replaced."""

    def compare() -> None:
        if isinstance(passes, Exception):
            raise passes
        if passes:
            getattr(walk, passes).append("one") if passes == "points" else walk.judged.update(A=1)

    usual = {
        "_find_mixed_checkpoint": False,
        "_choose_sequence": None,
        "_load_trace": None,
        "_settle_ids": "",
        "_unrunnable_reason": "",
        "_empty_model_reason": "",
        "_compare_without_ids": "without ids",
        "_judge_other_sequences": False,
        "_judge_recorded_ids": None,
        "_find_seen_padding": False,
        "_has_budget": budget,
    }
    for name, answer in (usual | answers).items():
        setattr(walk, name, lambda *given, answer=answer: answer)
    walk.make_diagnosis = lambda reason="": reason or "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_level, "compare_passes", lambda run: compare())
        patch.setattr(forward_level, "incomparable_reason", lambda run: "not comparable")
        return DiagnosisRun.run(walk)


def test_a_walk_without_anything_in_common_says_so() -> None:
    def walk(*, findings: int = 0, checked: int = 0, ids: Any = (1, 2), reason: str = "") -> Any:
        side = SimpleNamespace(kind="trace", model=None, label="A")
        levels = SimpleNamespace(
            findings=["one"] * findings,
            checked=["ids"] * checked,
            reason=reason,
            not_checked=[],
            left=(),
        )
        budget = Budget(9.0, clock=lambda: 0.0)
        made = SimpleNamespace(
            a=side,
            b=side,
            levels=levels,
            ids=ids,
            judged={},
            points=[],
            reporter=SimpleNamespace(budget=budget),
        )
        made._has_tower_alone = lambda: False
        made._record_omitted_pass = lambda: DiagnosisRun._record_omitted_pass(cast(Any, made))
        return made

    nothing = "there is nothing that both sides have"
    assert end_of(walk()) == nothing
    assert end_of(walk(checked=1)) == end_of(walk(findings=1)) == "not comparable"
    assert end_of(walk(), passes="points") == end_of(walk(), passes="judged") == "not comparable"
    assert end_of(walk(reason="why")) == "made"
    assert end_of(walk(), _settle_ids="no ids") == "no ids"
    assert end_of(walk(), _unrunnable_reason="no pass", _settle_ids="no ids") == "no pass"
    assert end_of(walk(ids=None)) == "without ids"
    for name in ("_find_mixed_checkpoint", "_judge_other_sequences", "_find_seen_padding"):
        assert end_of(walk(), **{name: True}) == "made"
    for how in ({"budget": False}, {"passes": BudgetSpent("time")}):
        late = walk(checked=1)
        assert end_of(late, **how) == "not comparable"
        assert late.levels.not_checked == ["forward pass: left by the budget of 9 s"]
        assert [(row.kind, row.state) for row in late.levels.left] == [("level", LATE)]
    with pytest.raises(FormatError, match="odd"):
        end_of(walk(), passes=FormatError("odd"))
    held = walk(findings=1)
    assert end_of(held, passes=FormatError("odd")) == "not comparable"
    assert held.levels.not_checked == ["forward pass: odd"]


# --- tensors that share bytes -------------------------------------------------------------------


def ranges(*places: tuple[int, int], path: str = "f") -> dict[str, Any]:
    return {
        f"t{i}": SimpleNamespace(
            path=path,
            info=SimpleNamespace(name=f"t{i}", offset=at, nbytes=size, encoding="F32", shape=()),
        )
        for i, (at, size) in enumerate(places)
    }


def test_ranges_overlap_with_the_one_that_reaches_furthest() -> None:
    def found(*places: tuple[int, int]) -> list[tuple[Any, ...]]:
        return [tuple(one) for one in shared_ranges.shared_ranges(ranges(*places))]

    assert found((0, 8), (8, 8), (16, 0)) == []
    assert found((0, 9), (8, 8)) == [("t0", "t1", 8, 9)]
    assert found((0, 20), (4, 4), (10, 20)) == [("t0", "t1", 4, 8), ("t0", "t2", 10, 20)]
    assert found((8, 8), (0, 9)) == [("t1", "t0", 8, 9)]
    assert found((0, 8), (4, 0), (0, 8)) == [("t0", "t2", 0, 8)]
    two: Any = ranges((0, 8)) | {"u": ranges((4, 8), path="g")["t0"]}
    assert list(shared_ranges.shared_ranges(two)) == []


def test_pairs_that_share_bytes_are_counted_beyond_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_ranges, "_proof", lambda *given: None)
    for pairs in (1, 2, 3, 5):
        tensors = ranges(*((8 * i, 9) for i in range(pairs + 1)))
        model: Any = SimpleNamespace(source=SimpleNamespace(tensors=tensors), path=Path("m"))
        good: Any = SimpleNamespace(source=SimpleNamespace(tensors={}), path=Path("n"))
        for a, b, label in ((model, good, "A"), (good, model, "B")):
            (row,) = shared_ranges.overlap_findings([], a, b, "write B")
            assert row.says.startswith(f"{label}'s tensors share bytes of m, so that")
            assert row.says.count(", 1 byte") == min(pairs, 2)
            assert row.says.endswith(f"; {pairs - 2} more pairs") is (pairs > 2)
            assert row.says.count(" and t") == min(pairs, 2) and "1 bytes" not in row.says
            assert (row.next == "write B") is (label == "B") and row.side == label


def test_layers_are_counted_with_the_first_of_them() -> None:
    assert derived_quantities._layer_count_text(["L3"]) == "1 layer (L3)"
    assert derived_quantities._layer_count_text(["L0", "L1"]) == "2 layers (L0, ...)"


def test_the_share_that_a_single_change_leaves_is_that_of_the_best() -> None:
    for left, share in (([], 1.0), ([0.3], 0.75), ([0.3, 0.1, 0.2], 0.25), ([0.0], 0.0)):
        singles = [SimpleNamespace(residual=one) for one in left]
        view = SimpleNamespace(residual=0.4)
        search: Any = SimpleNamespace(singles=singles, case=SimpleNamespace(view=view))
        found = Search.smallest_remaining_share.fget  # type: ignore[attr-defined]
        assert found(search) == pytest.approx(share)


# --- experts that rounding may choose otherwise ---------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
def test_other_experts_may_be_chosen_where_a_margin_is_as_small_as_what_rounding_moves(
    layer: int,
) -> None:
    """Each layer by the logits of its own router; without both passes' logits any margin is."""
    times = accumulated_rounding.TIMES
    logits = np.array([[1.0, 2.0], [3.0, 4.0]])

    def flips(margin: float, moved: float, without: str = "") -> bool:
        def made(by: float, side: str) -> Any:
            views = {}
            for each in (0, 1):
                least = margin if each == layer else 100.0
                views[f"L{each}.router_margin"] = SimpleNamespace(
                    point="router_margin", mine=np.array([[least + 1], [least]])
                )
                shift = np.where(logits == 3, by if each == layer else 0.0, 0.0)
                views[f"L{each}.router"] = SimpleNamespace(point="router", mine=logits + shift)
            for one in ("router", "router_margin"):
                if without == f"{side} {one}":
                    del views[f"L{layer}.{one}"]
            return SimpleNamespace(views=views)

        return accumulated_rounding._experts_may_flip(made(0.0, "exact"), made(moved, "rounded"))

    for moved in (0.25, -0.25):
        assert flips(times * 0.25, moved) and not flips(times * 0.25 + 1e-9, moved)
    assert flips(0.0, 0.0) and not flips(1e-9, 0.0)
    assert flips(1e9, 0.0, "exact router") and flips(1e9, 0.0, "rounded router")
    assert not flips(0.0, 0.25, "rounded router_margin")
    assert not flips(0.0, 0.25, "exact router_margin")


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_first_arithmetic_that_explains_all_points_is_named(
    dtype: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are finer than the type of a recorded point, or that type itself, explain none."""
    levels = accumulated_rounding.LEVELS
    tried: list[int] = []

    def run(patched: Any, recorded: Any, level: Any) -> Any:
        tried.append(levels.index(level))
        return level

    view = SimpleNamespace(recorded=SimpleNamespace(dtype=dtype))
    other = SimpleNamespace(recorded=None)
    found: Any = SimpleNamespace(flagged=[view, other], views={"v": view, "o": other})
    with_bounds: list[Any] = []

    def bounded(bounds: Any) -> str:
        with_bounds.append(bounds)
        return "read"

    read = SimpleNamespace(with_bounds=bounded)
    recorded: Any = SimpleNamespace(trace="trace", with_trace=lambda trace: read)
    directed: list[Any] = []
    for name, made in (
        ("needs_measured_rounding", lambda one: one is view),
        ("_rounded_pass", run),
        ("_fits_arithmetic", lambda one, made, level: levels.index(level) >= first),
        ("_directed_points", lambda *given: iter(directed)),
        ("TraceInArithmetic", lambda trace, dtype: (trace, dtype)),
        ("_long_point_bounds", lambda long, *given: (long, *given)),
    ):
        monkeypatch.setattr(accumulated_rounding, name, made)

    def explained(nearest: float = 1.0) -> Any:
        tried.clear()
        patched: Any = None
        return accumulated_rounding.explain_by_arithmetic(patched, recorded, found, nearest)

    begin = {"float32": 0, "float16": 2, "bfloat16": 3}[dtype]
    named = max(begin, first)
    expected = ("read", levels[named].says) if named < len(levels) else None
    assert explained() == expected
    assert tried == list(range(begin, min(named + 1, len(levels))))
    if expected is not None:
        assert with_bounds == [([view], levels[named], found, levels[named].dtype)]
    assert explained(accumulated_rounding.CUT) == expected
    assert explained(accumulated_rounding.CUT - 1e-9) is None and not tried
    directed.append(view)
    assert explained() is None
    monkeypatch.setattr(accumulated_rounding, "needs_measured_rounding", lambda one: False)
    assert explained() is None and not tried


@pytest.mark.parametrize(
    ("apart", "few"),
    [
        ([3, 0, 0, 0, 0, 0], True),
        ([1] * 8, False),  # four of eight alike: half of all, and no more
        ([1] * 7, True),
        ([2, 1, 1, 1, 1, 1, 1, 1], True),  # 7 of 11
        ([1] * 400, False),
        ([10, 10, 10, 10] + [1] * 396, True),  # 400 of 796
        ([9, 9, 9, 9] + [1] * 396, False),  # 324 of 720
    ],
)
def test_a_few_values_make_up_most_of_a_difference(apart: list[float], few: bool) -> None:
    mine = np.zeros(len(apart))
    theirs = np.array(apart) * np.where(np.arange(len(apart)) % 2, 1.0, -1.0)
    for order in (1, -1):
        recorded = SimpleNamespace(
            comparable_values=lambda given, axis, order=order: (given, theirs[::order])
        )
        view: Any = SimpleNamespace(recorded=recorded, mine=mine, axis=0)
        assert accumulated_rounding._is_concentrated(view) is few


@pytest.mark.parametrize("error", ["codec", "format", "index", "other", ""])
def test_a_damaged_model_is_opened_but_not_one_whose_weights_do_not_decode(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, Any] = {
        "codec": CodecError, "format": FormatError, "index": UnsupportedError, "other": UsageError,
    }  # fmt: skip

    def open_model(path: Any, **given: Any) -> Any:
        if error:
            raise kinds[error]("cut")
        return "opened", path, given

    def open_damaged(path: Any, **given: Any) -> Any:
        return "damaged", path, given

    monkeypatch.setattr(sides, "open_model", open_model)
    monkeypatch.setattr(sides, "open_damaged", open_damaged)
    if error in ("codec", "other"):
        with pytest.raises(kinds[error], match=r"^cut$"):
            sides.open_tolerating_damage("m", "llama")
        return
    found: Any = sides.open_tolerating_damage("m", "llama")
    how = "damaged" if error else "opened"
    assert found == (how, "m", {"arch": "llama", "allow_missing": ANY})


@pytest.mark.parametrize("kind", ["usual mistakes", "faint mistakes"])
def test_what_was_found_together_is_applied_before_the_search_goes_on(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass is of the changed model, on the trace as that change reads it."""
    view = SimpleNamespace(key="L0.q", one_sided_nonfinite=False, layer=0)
    found: Any = SimpleNamespace(flagged=[view], views={})
    clean: Any = SimpleNamespace(flagged=[], views={})
    passes: list[Any] = []

    def run(patched: Any, recorded: Any) -> Any:
        passes.append((patched, recorded))
        return clean

    together = ["one", "two"] if kind.startswith("usual") else []
    for name, made in (
        ("record_points", lambda patched: {}),
        ("_read_in_its_arithmetic", lambda patched, recorded: (recorded, found)),
        ("find_directed_mistake", lambda *given: pytest.fail("there is a mistake")),
        ("recheck_answers", lambda divergences, *given: divergences),
        ("points_in_16_bits", lambda *given: pytest.fail("there is a mistake")),
        ("Mismatch", lambda *given: SimpleNamespace(fitting=True)),
        ("replace", lambda case, **changed: case),
        ("find_unwritten_rows", lambda case: None),
        ("find_other_capture_point", lambda case: None),
        ("find_shifted_series", lambda case: None),
        ("_answers_of_table", lambda case, known: ()),
        ("is_wide", lambda case: False),
        ("Search", lambda *given: SimpleNamespace(tried=0, smallest_remaining_share=1.0)),
        ("_search_usual_mistakes", lambda *given: together),
        ("_last_pass", lambda found: ("changed model", "changed trace")),
        ("explain_by_arithmetic", lambda *given: None),
        ("find_faint_mistakes", lambda *given: ("faint", "changed model", "changed trace", "")),
        ("run_shadow_pass", run),
    ):
        monkeypatch.setattr(wrong_operations, name, made)
    recorded: Any = SimpleNamespace(shapes={}, without=())
    patched: Any = "model"
    report = wrong_operations.examine(patched, recorded)
    assert passes == [("changed model", "changed trace")]
    assert list(report.divergences) == (together or ["faint"])  # type: ignore[comparison-overlap]
    assert (report.before, report.after) == (found, clean)
