"""Conclusions of a diagnosis from facts made for each: rows, points, tails, commands."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt import diagnosis
from aprfmt.base.protocols import TensorInfo
from aprfmt.causes.forward import capture_point, dumped_ranks, mixed_checkpoints
from aprfmt.causes.tensor import unwritten_tail
from aprfmt.diagnosis import (
    blended_model,
    conclusion,
    diagnosis_order,
    forward,
    forward_level,
    model_comparison,
    model_pair,
    next_commands,
    packing,
    packing_keys,
    probes,
    trace_pair,
    zero_values,
)
from aprfmt.errors import CodecError
from aprfmt.inference.trace import Trace
from aprfmt.measure import differing_units as units
from aprfmt.measure.findings import Finding
from aprfmt.model.completeness import ANY
from aprfmt.model.ledger import LATE

# --- rows and experts that differ ---------------------------------------------------------------


class Table:
    """Rows of a stored tensor of bytes, read as a reader reads them; it notes its reads."""

    def __init__(self, values: Any, columns: int = 2) -> None:
        held = np.asarray(values, np.uint8).reshape(-1, columns)
        self.rows, self.columns, self.row_bytes, self.held = *held.shape, columns, held
        self.windows: list[tuple[int, int]] = []
        self.dropped = 0
        self.bytes = self

    def window(self, start: int, stop: int) -> bytes:
        self.windows.append((start, stop))
        return self.held.tobytes()[start:stop]

    def drop(self) -> None:
        self.dropped += 1


@pytest.mark.parametrize("size", [1, 4, 5, 1 << 20])
def test_rows_and_experts_that_differ_are_numbered(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In slices of whole rows, whatever their size; an expert is several rows."""
    monkeypatch.setattr(units, "RowReader", lambda side: side)
    monkeypatch.setattr(units, "SLICE", size)
    values = np.arange(24)
    for wrong in ([], [0], [5], [23], [0, 1, 11, 22]):
        other = values.copy()
        other[wrong] += 1
        a, b = Table(values), Table(other)
        assert units.differing_units([a, b], 12) == sorted({at // 2 for at in wrong})
        assert units.differing_units([a, b], 4) == sorted({at // 6 for at in wrong})
        assert a.dropped == b.dropped == 2
    assert units.differing_units([Table(values), Table(values)], 5) == []
    assert units.differing_units([Table(values), Table(values, 4)], 12) == []
    assert units.differing_units([Table(values), Table(values + 1)], 0) == []


def test_each_differing_table_of_both_models_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    table, experts = "token_embd.weight", "L0.ffn_up_exps.weight"
    assert table in probes.TABLES
    monkeypatch.setattr(probes, "differing_units", lambda sides, count: [count, *sides[1].own])
    monkeypatch.setattr(probes, "_distant_rows", lambda sides: [-1])

    def rows(*listed: Any, lost: str = "") -> Any:
        def model(side: str) -> Any:
            def find(key: str) -> Any:
                own = [len(key)] if side == "B" else []
                return None if lost == f"{side} {key}" else SimpleNamespace(shape=(7, 2), own=own)

            return SimpleNamespace(find=find)

        report: Any = SimpleNamespace(
            tensors=[
                SimpleNamespace(
                    key=key, verdict=verdict, shape_a=(7, 2), shape_b=shape,
                    encoding_a="F32", encoding_b=kind,
                )
                for key, verdict, shape, kind in listed
            ]
        )  # fmt: skip
        found = probes.differing_rows(model("A"), model("B"), report)
        return found.rows, found.experts

    one, other = (table, "DIFFERENT", (7, 2), "F32"), (experts, "DIFFERENT", (7, 2), "F32")
    in_table, in_experts = {table: [7, len(table)]}, {experts: [7, len(experts)]}
    assert rows(one, other) == (in_table, in_experts)
    for side in "AB":
        assert rows(one, other, lost=f"{side} {table}") == ({}, in_experts)
        assert rows(other, one, lost=f"{side} {experts}") == (in_table, {})
    for skipped in ((table, "SAME_BYTES", (7, 2), "F32"), (table, "DIFFERENT", (7, 3), "F32")):
        assert rows(skipped, other) == ({}, in_experts)
    assert rows((table, "DIFFERENT", (7, 2), "F16"), other) == ({table: [-1]}, in_experts)
    assert rows((table, "WITHIN", (7, 2), "F16"), other) == ({}, in_experts)
    assert rows((experts, "DIFFERENT", (7, 2), "F16"), one) == (in_table, {})
    assert rows(("L0.attn_q.weight", "DIFFERENT", (7, 2), "F32")) == ({}, {})
    assert probes.differing_rows(SimpleNamespace(), SimpleNamespace(), None).rows == {}  # type: ignore[arg-type]


# --- points of two traces -----------------------------------------------------------------------


def point(key: str, rel: float | None, *, beyond: bool = False, rows: str = "") -> Any:
    return SimpleNamespace(
        key=key, rel_l2=rel, beyond=beyond, rows=rows, tolerance=0.1, alone=False, why=""
    )


def test_shared_rows_that_agree_are_told_with_their_largest_distance() -> None:
    rows = [point("L0.q", 0.25, rows="1-3"), point("L0.k", None, rows="1-3"), point("L0.v", 0.5)]
    found: Any = trace_pair.partial_rows_finding(rows)
    assert (found.where, found.residual_before) == (("L0.q", "L0.k"), 0.25)
    assert found.verdict == "same" and "other rows (1-3)" in found.says
    assert trace_pair.partial_rows_finding([*rows, point("L1.q", 0.9, beyond=True)]) is None
    assert trace_pair.partial_rows_finding(rows[2:]) is None
    assert trace_pair.partial_rows_finding([point("logits", 0.1, rows="3")]) is None


def test_points_were_recorded_elsewhere_where_each_is_another_or_no_later_one_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    equal, later = {"L0.q": "q of another"}, {"L0.k": "L0.scores"}
    monkeypatch.setattr(trace_pair, "nonfinite_finding", lambda pairs: None)
    monkeypatch.setattr(
        trace_pair, "equal_neighbour", lambda key, a, b, bound: equal.get(key, "") * (bound == 0.1)
    )
    monkeypatch.setattr(
        trace_pair, "_agreeing_later_point", lambda pair, pairs: later.get(pair.key, "")
    )
    monkeypatch.setattr(trace_pair, "_capture_point_finding", lambda *given: ("elsewhere", *given))
    monkeypatch.setattr(trace_pair, "likely_cause", lambda key, a, b: ("mask", ""))
    monkeypatch.setattr(trace_pair, "_first_row_clause", lambda *given: "; of 3 rows")
    monkeypatch.setattr(trace_pair, "partial_rows_finding", lambda pairs: "rows")
    a, b = SimpleNamespace(name="A"), SimpleNamespace(name="B")

    def found(*keys: str) -> Any:
        pairs = [point(key, 0.5, beyond=key != "L0.x") for key in keys]
        return trace_pair.signature_finding(pairs, a, b)

    for keys in (["L0.q"], ["L0.k"], ["L0.x", "L0.q", "L0.k"]):
        kind, beyond, moved, dead, one, other = found(*keys)
        assert kind == "elsewhere" and [pair.key for pair in beyond] == [*keys[-2:]][-len(beyond) :]
        assert moved == {key: equal[key] for key in keys if key in equal}
        assert dead == {key: later[key] for key in keys if key in later}
        assert (one, other) == (a, b)
    for keys in (["L0.v"], ["L0.q", "L0.v"], ["L0.k", "L0.v"], ["L0.v", "L0.q"]):
        made = found(*keys)
        assert (made.cause, made.residual_before, made.verdict) == ("mask", 0.5, "bug")
        says = f"{keys[0]} is the first point beyond its tolerance; of 3 rows"
        assert (made.says, made.where) == (says, (keys[0],))
    assert found("L0.x") == "rows" and found() == "rows"


@pytest.mark.parametrize("relation", ["", "k"])
def test_a_stream_was_taken_elsewhere_where_what_follows_then_agrees(
    relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the point alone, else of the same point of all layers."""
    views: dict[str, Any] = {}
    given: Any = {"used": False, "after": None, "passes": []}

    def run(patched: Any, recorded: Any, cut: str) -> Any:
        given["passes"].append((sorted(recorded), cut))
        return SimpleNamespace(views={} if given["after"] is None else {cut: given["after"]})

    monkeypatch.setattr(capture_point, "recorded_values_are_used", lambda case: given["used"])
    monkeypatch.setattr(
        capture_point, "_keys_in_all_layers", lambda case, points: ["L0.out", "L1.out"]
    )
    monkeypatch.setattr(
        capture_point, "keys_after", lambda case: ["L1.out", "L1.ffn_norm", "L2.out"]
    )
    monkeypatch.setattr(capture_point, "run_shadow_pass", run)
    monkeypatch.setattr(capture_point, "keys_taken_elsewhere", lambda case, drop: set(drop))
    monkeypatch.setattr(capture_point, "_relation_text", lambda case, view: relation)
    monkeypatch.setattr(capture_point, "_rows_text", lambda case: " (rows)")
    case: Any = SimpleNamespace(
        view=SimpleNamespace(key="L0.out", point="out"),
        layer=0,
        found=SimpleNamespace(views=views),
        patched=None,
        recorded=SimpleNamespace(has_record=lambda key: key != "L1.ffn_norm"),
        without=lambda drop: drop,
    )

    def view(*, flagged: bool = False, residual: Any = 0.0, odd: bool = False) -> Any:
        return SimpleNamespace(flagged=flagged, residual=residual, one_sided_nonfinite=odd)

    def change() -> Any:
        given["passes"].clear()
        return capture_point._stream_taken_elsewhere(case)

    views["L1.out"] = view(flagged=True, residual=None)  # nothing measured there before
    given["after"] = view()
    found = change()
    assert given["passes"] == [(["L0.out"], "L1.out")] and found.drop == {"L0.out"}
    assert found.values["agrees"] == "L1.out" and found.says.endswith(
        "L1.out, which is computed from it, agrees"
    )
    assert (" (rows)" in found.says) is not bool(relation)
    views["L1.out"] = view(flagged=True, residual=0.5)
    for after in (None, view(flagged=True), view(residual=None)):
        given["after"] = after
        assert change() is None and given["passes"] == [(["L0.out"], "L1.out")]
    given["after"] = view()
    for before in (view(), view(flagged=True, odd=True)):
        views["L1.out"] = before
        assert change() is None and not given["passes"]
    views["L2.out"] = view(flagged=True)
    found = change()
    assert given["passes"] == [(["L0.out", "L1.out"], "L2.out")] and found.where == (
        "L0.out", "L1.out",
    )  # fmt: skip
    given["used"] = True
    assert change() is None


# --- a run of two models' parts -----------------------------------------------------------------


def test_a_mixture_is_told_with_the_distances_before_and_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes = {"own": 8.0, "q": 2.0, "k": 1.0, "v": 0.0}

    def run(patched: Any, recorded: Any) -> Any:
        view = SimpleNamespace(residual=passes[patched.name], tolerance=1.0, whole_tolerance=0.5)
        return SimpleNamespace(name=patched.name, compared_count=1, views={"out": view})

    closed: list[bool] = []

    def patched(name: str) -> Any:
        weights = SimpleNamespace(close=lambda: closed.append(True))
        return SimpleNamespace(
            name=name, weights=weights, with_weights=lambda arrays: patched(*arrays)
        )

    model = SimpleNamespace(unpatched=lambda *given: patched("own"))
    monkeypatch.setattr(mixed_checkpoints, "PatchedModel", model)
    monkeypatch.setattr(mixed_checkpoints, "record_points", lambda patched: {})
    monkeypatch.setattr(mixed_checkpoints, "run_shadow_pass", run)
    monkeypatch.setattr(mixed_checkpoints, "_mixture_finding", lambda *given: given)
    roles = {name: SimpleNamespace(numpy=lambda: np.zeros(1)) for name in "qkv"}
    other: Any = SimpleNamespace(roles=roles)

    def found(*parts: Any) -> Any:
        monkeypatch.setattr(mixed_checkpoints, "_differing_parts", lambda model, other: parts)
        return mixed_checkpoints.find_mixture(other, other, Trace({}, {}), [1], "float32", "B")

    keys, of, before, after, label = found(("q",), ("k",), ("v",))
    assert (keys, of, label) == (("k",), other, "B")  # the first that fits, one tolerance off
    assert (before.name, after.name) == ("own", "k")
    assert found(("q",)) is None and found() is None and len(closed) == 3


# --- ends that were never written ---------------------------------------------------------------


def stored(name: str, offset: int, data: bytes) -> Any:
    def raw(start: int = 0, stop: int | None = None) -> memoryview:
        return memoryview(data)[start:stop]

    return SimpleNamespace(
        info=TensorInfo(name, (len(data),), "U8", offset, len(data), 0),
        path=Path("f.gguf"),
        parts={},
        raw=raw,
        drop=lambda: None,
    )


def tails(zeros: int, *, gap: int = 0, size: int = 400) -> list[Any]:
    """Return what is found where the last `zeros` bytes of three tensors of `size` are zero."""
    right = bytes(range(1, 101)) * (size // 100)

    def model(zeros: int) -> Any:
        held, views = bytearray(right * 3), {}
        held[len(held) - zeros :] = bytes(zeros)
        for at, name in enumerate("xyz"):
            data = bytes(held[size * at : size * at + size])
            views[name] = SimpleNamespace(stored=[stored(name, 1000 + (size + gap) * at, data)])
        return SimpleNamespace(roles=views, values=views.values)

    rows: Any = [
        SimpleNamespace(key=name, verdict="DIFFERENT")
        for at, name in enumerate("xyz")
        if zeros > size * (2 - at)
    ]
    return list(unwritten_tail.unwritten_tails(model(0), model(zeros), rows))


@pytest.mark.parametrize("gap", [0, 50])
def test_an_end_of_zeros_is_counted_in_the_files_bytes(gap: int) -> None:
    for zeros, keys in ((401, ("y", "z")), (800, ("y", "z")), (801, ("x", "y", "z"))):
        (found,) = tails(zeros, gap=gap)
        missing = zeros + gap * (len(keys) - 1)
        end = 1000 + 3 * 400 + 2 * gap
        start = end - missing
        if zeros == 800:  # a tensor of zeros alone: the last byte that is none ends the one before
            start, missing = start - gap, missing + gap
        assert found.where == keys and found.confirmed
        assert f"zero from byte {start} to its end ({missing} bytes)" in found.says
        assert found.says.endswith(f"; {len(keys)} tensors")
        assert found.proof is not None and found.proof.count == missing
    for zeros in (0, 300, 400):
        assert tails(zeros, gap=gap) == []  # one tensor alone is explained by itself


def test_an_end_of_few_zeros_says_nothing() -> None:
    for zeros, found in ((150, 0), (255, 0), (256, 1), (299, 1), (300, 0)):  # 300: all of the file
        assert len(tails(zeros, size=100)) == found, zeros


# --- what comes next ----------------------------------------------------------------------------


@pytest.mark.parametrize("verdict", ["same", "precision", "bug"])
@pytest.mark.parametrize("own", ["", "a command"])
@pytest.mark.parametrize("usual", ["mends it", "looks at it"])
def test_a_finding_that_needs_nothing_has_no_command_but_its_own(
    usual: str, own: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_commands, "MENDS", ("mends",))
    monkeypatch.setattr(next_commands, "_usual_step", lambda parts, finding: usual)
    monkeypatch.setattr(
        next_commands, "reach_difference_command", lambda parts, finding: "reach it"
    )
    for exercised in ("exercised", "not_exercised"):
        finding: Any = SimpleNamespace(next=own, verdict=verdict, exercised=exercised)
        parts: Any = None
        found = next_commands.next_command(parts, finding)
        if own or verdict != "bug":
            assert found == own
        elif exercised == "exercised" or usual == "mends it":
            assert found == usual
        else:
            assert found == "reach it"


def command_after(
    kinds: tuple[str, str],
    *,
    ids: Any = (),
    reason: str = "no ids",
    model: str = "",
    left: Any = (),
    trace: Any = None,
    other_model: bool = False,
    unrunnable: str = "",
    records: Any = ("L0.q",),
) -> str:
    sides = [
        SimpleNamespace(kind=kind, path=Path(f"{label}.st"), text=f"{label} text", label=label)
        for label, kind in zip("AB", kinds, strict=True)
    ]
    ended: Any = SimpleNamespace(
        a=sides[0],
        b=sides[1],
        levels=SimpleNamespace(other_model=other_model),
        traces={"B": SimpleNamespace(run=trace, records=records)} if trace is not None else {},
        ids=ids,
        model_of=lambda side: SimpleNamespace(path=Path(model)) if model else None,
        _unrunnable_reason=lambda: unrunnable,
    )
    return diagnosis_order.DiagnosisRun._command_after_end(ended, reason, left)


def test_the_command_behind_an_end_asks_for_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(diagnosis_order, "trace_ids", lambda trace: None)
    monkeypatch.setattr(
        diagnosis_order, "mapping_command", lambda *given: " ".join(("map", *given))
    )
    monkeypatch.setattr(
        diagnosis_order, "inspect_unreadable_command", lambda *given: f"inspect {given}"
    )
    both, one = ("trace", "trace"), ("model", "trace")
    assert command_after(both) == "aprfmt diagnose A.st B.st --model MODEL --ids IDS"
    assert command_after(both, model="m x") == "aprfmt diagnose A.st B.st --model 'm x' --ids IDS"
    for kinds in (one, one[::-1]):
        assert command_after(kinds, model="m") == "aprfmt diagnose A.st B.st --ids IDS"
    assert command_after(("model", "model"), ids=(1,)) == "aprfmt diff A.st B.st --top 20"
    assert command_after(one, model="m", unrunnable="a tower") == ""
    assert command_after(both, ids=(1,), other_model=True) == "aprfmt diff A.st B.st --top 20"
    assert command_after(one, model="m", trace={}, records=()) == "aprfmt trace --load B.st"
    lost = {"lost": ["L0.q"]}
    assert "--ids IDS" in command_after(one, model="m", trace=lost, records=())
    assert command_after(both, ids=(1, 2), model="m") == "map m 1,2 B-again.safetensors"
    for run, begin in (({}, "map m"), ({"aprfmt": "1"}, "aprfmt trace m --payload --points all")):
        many = tuple(range(next_commands.MOST_IDS + 1))
        assert command_after(both, ids=many[1:], model="m", trace=run).startswith(begin)
        assert "IDS" in command_after(both, ids=many, model="m", trace=run)
        assert "IDS" not in command_after(both, ids=many[1:], model="m", trace=run)
    late: Any = SimpleNamespace(state=LATE)
    other: Any = SimpleNamespace(state="unreadable")
    assert command_after(one, reason="", left=[other, late]) == "aprfmt diagnose 'A text' 'B text'"
    assert command_after(one, reason="", left=[other]).endswith("'A.st', 'B.st')")


@pytest.mark.parametrize("point_name", ["q", "scores", "logits"])
def test_arrays_whose_rows_have_another_size_are_named(point_name: str) -> None:
    def left(
        shape: tuple[int, ...],
        mine: tuple[int, ...] = (3, 8),
        positions: Any = None,
        recorded: Any = None,
    ) -> list[str]:
        view = SimpleNamespace(point=point_name, recorded=recorded, mine=np.zeros(mine))
        record = SimpleNamespace(shape=shape, positions=positions)
        views: Any = {"L0.q": view, "L0.lost": view}
        trace: Any = SimpleNamespace(records={"L0.q": record})
        return [one.why for one in forward_level._unfitting_arrays(trace, views)]

    rows = point_name == "q"
    assert left((3, 8)) == [] and left((5, 8)) == [] and left((2, 4, 2)) == []
    assert left((3, 6)) == ["its rows have 6 values, the model's 8"] * rows
    assert left((6, 4), positions=[4, 5, 6]) == []  # two lines each of three positions
    assert left((6, 5), positions=[4, 5, 6]) == ["its rows have 10 values, the model's 8"] * rows
    assert left((3, 8), positions=[4, 5]) == ["its rows have 12 values, the model's 8"] * rows
    assert left((3, 6), recorded="values") == [] and left((0, 6)) == [] and left(()) == []


# --- small facts --------------------------------------------------------------------------------


def test_a_weights_codes_are_its_largest_part() -> None:
    def part(name: str, nbytes: int) -> Any:
        return SimpleNamespace(info=SimpleNamespace(name=name, nbytes=nbytes))

    for order in ((8, 64, 16), (64, 8, 16), (8, 16, 64)):
        parts = {str(size): part(f"p{size}", size) for size in order}
        model: Any = {"w": SimpleNamespace(stored=[SimpleNamespace(parts=parts)])}
        assert model_comparison._codes_name(model, "w") == "p64"


@pytest.mark.parametrize("window", [1, 4, 1 << 20])
def test_a_value_other_than_zero_is_found_in_any_row(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_values, "WINDOW", window)
    dropped: list[bool] = []

    def reader(values: Any) -> Any:
        rows: Callable[[Any], Any] = lambda index: values[index]  # noqa: E731
        return SimpleNamespace(
            rows=len(values), columns=2, take=rows, drop=lambda: dropped.append(True)
        )

    assert not zero_values._has_nonzero(reader(np.zeros((5, 2))))
    for at in range(10):
        values = np.zeros(10)
        values[at] = -1e-30
        assert zero_values._has_nonzero(reader(values.reshape(5, 2))), at
    assert len(dropped) == 11


# --- models whose packed weights do not decode ----------------------------------------------------


@pytest.mark.parametrize("wrong", ["a", "b", "both", "neither"])
@pytest.mark.parametrize("damaged", ["", "a", "b"])
def test_packed_weights_are_mended_of_the_side_that_decodes(
    damaged: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B by a command from A; of A only what is wrong is said. B is examined first."""
    asked: list[Any] = []

    class Opened(SimpleNamespace):
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            asked.append(f"closed {self.name}")

    def opened(text: str, **given: Any) -> Any:
        assert given == {"arch": "llama", "allow_missing": ANY, "damaged": True}
        return Opened(name=text, damage="cut" * (text == damaged))

    def examine(good: Any, bad: Any, label: str) -> Any:
        asked.append((good.name, bad.name, label))
        if bad.name != wrong and wrong != "both":
            return None
        finding = Finding("packing_claim", "it is", "tensor", "bug", ("k",), True)
        return SimpleNamespace(findings=[finding], evidence=(), left=("w",))

    monkeypatch.setattr(diagnosis, "open_model", opened)
    monkeypatch.setattr(packing, "examine_packed", examine)
    monkeypatch.setattr(
        packing_keys, "repair_packing_command", lambda good, bad, one: f"{good.name} to {bad.name}"
    )
    monkeypatch.setattr(diagnosis, "compare_by_name", lambda texts, a, b: (texts, a.name, b.name))
    with ExitStack() as stack:
        error = CodecError("does not decode")
        found: Any = diagnosis._diagnose_packing("a", "b", "llama", stack, error)
        looked = [one for one in asked if isinstance(one, tuple)]
    label = "B" if wrong in ("b", "both") and damaged != "a" else ""
    label = label or ("A" if wrong in ("a", "both") and damaged != "b" else "")
    both = [("a", "b", "B")] * (damaged != "a") + [("b", "a", "A")] * (damaged != "b")
    if not label:
        assert looked == both
        assert found == ((("a", "b"), "a", "b") if damaged else None)
        return
    assert looked == (both[:1] if label == "B" else both)
    (one,) = found.findings
    assert one.next == ("a to b" if label == "B" else "")
    assert (found.a, found.b) == ("a", "b") and found.evidence[0].says == "does not decode"
    assert found.not_checked == (
        f"{label} does not open, so nothing else", "w: what is wrong with it",
    )  # fmt: skip


@pytest.mark.parametrize("mended", ["", "set the key"])
@pytest.mark.parametrize("anew", [False, True])
def test_what_repairs_b_is_a_key_or_b_written_again(
    anew: bool, mended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models a key first; what only differs is compared by its tensors."""
    monkeypatch.setattr(packing_keys, "repair_packing_command", lambda a, b, finding: mended)
    monkeypatch.setattr(next_commands, "is_repaired_by_rewriting", lambda *given: anew)
    monkeypatch.setattr(next_commands, "rewrite_b_command", lambda parts, finding: "write again")
    monkeypatch.setattr(next_commands, "diff_tensors_command", lambda parts, finding: "diff")
    finding: Any = SimpleNamespace(cause="c", confirmed=True, values={})
    rest = "write again" if anew else "diff"
    for a, b, kind in (
        ("a", "b", "model"), (None, "b", "model"), ("a", None, "model"), ("a", "b", "trace"),
    ):  # fmt: skip
        side = SimpleNamespace(model=b, kind=kind)
        parts: Any = SimpleNamespace(a=SimpleNamespace(model=a), b=side)
        two = a is not None and b is not None and kind == "model"
        assert next_commands.repair_command(parts, finding) == ((two and mended) or rest)


# --- what was found of two sides ------------------------------------------------------------------


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_findings_of_traces_are_all_there_is_where_the_last_pass_agrees(
    pair: bool, unlike: bool, flagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models are judged by what is left of their difference; ranks that differ come first."""
    ranks = Finding("rank_mismatch", "ranks differ", "forward", "bug", (), True)
    own = Finding("mask", "it is", "forward", "bug", ("k",), True)
    monkeypatch.setattr(forward, "shared_findings", lambda a, b: [])
    monkeypatch.setattr(dumped_ranks, "differing_ranks", lambda traces: [ranks] * unlike)
    monkeypatch.setattr(conclusion, "largest_gains", lambda points: ["a gain"])
    monkeypatch.setattr(trace_pair, "nonfinite_finding", lambda pairs: None)
    after = SimpleNamespace(flagged=["point"] * flagged)
    judged = SimpleNamespace(findings=[own], examined=SimpleNamespace(after=after))
    levels = SimpleNamespace(findings=[], evidence=[], complete="as it was", reason="")
    ended: Any = SimpleNamespace(
        levels=levels, judged={"B": judged}, pair="models" if pair else None, traces={},
        rows_apart=None, points=[], pairs=[],
    )  # fmt: skip
    forward_level.conclude(ended)
    assert levels.findings == [own, *[ranks] * unlike] and levels.evidence == ["a gain"]
    assert levels.complete == ("as it was" if pair or unlike else not flagged)


@pytest.mark.parametrize("sure", [0, 2])
@pytest.mark.parametrize("layers", [1, 3, 5])
def test_rounded_routers_that_choose_other_experts_are_counted_by_layer(
    layers: int, sure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers with most tokens; a bug where a gap is wider than rounding moves a sound run."""
    monkeypatch.setattr(blended_model, "count_stages", lambda a, b: 4)
    router = "L0.ffn_gate_inp.weight"
    finding = Finding("encoding", "rounded", "tensor", "precision", (router,), False)
    other = Finding("other", "other", "tensor", "precision", ("L1.attn_q.weight",), False)
    asked: list[Any] = []

    def count(keys: Any, rounded: Any, probe: Any) -> Any:
        asked.append((keys, rounded))
        return {layer: (layer + 1, sure * (layer == 0)) for layer in range(layers)}

    parts = [SimpleNamespace(keys=[router, "L0.ffn_norm.weight"]), SimpleNamespace(keys=["L1.q"])]
    levels = SimpleNamespace(findings=[finding, other], parts=parts)
    measuring: Any = SimpleNamespace(
        probes=[SimpleNamespace(ids=range(9))],
        is_affordable=lambda: True,
        passes=SimpleNamespace(count_rerouted_tokens=count),
    )
    pair: Any = SimpleNamespace(levels=levels, a=None, b=None)
    model_pair.ModelPair._add_other_choices(pair, measuring)
    assert asked == [([router], {"L0.ffn_norm.weight", "L1.q"})]
    found, left = levels.findings
    assert left is other and found.verdict == ("bug" if sure else "precision")
    most = [f"{n + 1} of 9 in layer {n}" for n in range(layers)][::-1][: model_pair.LAYERS]
    says = f"rounded; the routers so rounded choose other experts for tokens: {', '.join(most)}"
    says += ", and some in 2 more layers" * (layers == 5)
    says += "; 2 of them by gaps wider than rounding moves a sound run" * bool(sure)
    assert found.says == says


# --- hyperparameters that differ ------------------------------------------------------------------


@pytest.mark.parametrize("own_head", ["A", "B", ""])
@pytest.mark.parametrize("head", ["DIFFERENT", "SAME_BYTES", "WITHIN", "ONLY_IN_A", ""])
def test_a_tied_head_explains_the_head_that_differs_and_no_other_key_does(
    head: str, own_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that is a copy of the embedding is no difference of the pass."""
    causes = {"tied_embedding": ["tied_embeddings"], "rope_theta": ["rope_theta"]}
    for name, made in (
        ("held_conflicts", lambda resolution: []),
        ("explains_vocabulary_size", lambda rows: False),
        ("is_of_own_keys", lambda row: False),
        ("misleading_findings", lambda a, b, rows: []),
        ("_differs_by_length", lambda a, b: False),
        ("_group_by_cause", lambda rows: causes),
        ("tensors_of_hyperparameter", lambda name, tensors: (f"tensor of {name}",)),
        ("has_own_head", lambda model: model.label == own_head),
        ("difference_sentence", lambda row, *models: f"{row.name} differs"),
        ("differing_sub_keys", lambda row: (f"part of {row.name}",)),
        ("lost_tensors", lambda name, a, b: ()),
        ("_side_with_default", lambda rows: ""),
    ):
        monkeypatch.setattr(model_comparison, name, made)
    rows = [SimpleNamespace(name=name, a=1, b=2, decisive=True) for (name,) in causes.values()]
    added: list[tuple[Any, Any]] = []
    found: Any = SimpleNamespace(
        checked=[], evidence=[], stated=[],
        add=lambda finding, touched: added.append((finding, touched)),
    )  # fmt: skip
    tensors: Any = {"output.weight": SimpleNamespace(verdict=head)} if head else {}
    sides: list[Any] = [SimpleNamespace(label=label, resolution=None) for label in "AB"]
    report: Any = SimpleNamespace(hyperparameters=rows, tensors=[])
    explained = model_comparison._compare_hyperparameters(
        sides[0], sides[1], report, tensors, found
    )
    rope = (
        "rope_theta",
        ("part of rope_theta", "rope_theta", "tensor of rope_theta"),
        ("tensor of rope_theta",),
    )
    keys = ("tensor of tied_embeddings", *["output.weight"] * bool(head))
    tied = ("tied_embedding", ("part of tied_embeddings", "tied_embeddings", *keys), keys)
    copied = head in ("SAME_BYTES", "WITHIN") or not own_head
    made_of = [(one.cause, one.where, touched.keys) for one, touched in added]
    assert made_of == ([rope] if copied else [tied, rope])
    assert explained == {"tensor of rope_theta", *([] if copied else keys)}
    says = "tied_embeddings differs" + "; the stored head is a copy of the embedding" * copied
    assert [one.says for one in found.evidence] == [says, "rope_theta differs"]
