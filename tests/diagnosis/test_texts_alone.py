"""Sentences of a diagnosis and single steps of it, each by itself."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.budget import BudgetSpent
from aprfmt.diagnosis import paired_pass, progress, stored_names, tokenizer_findings, trace_pair
from aprfmt.diagnosis.next_commands import recording_sentence
from aprfmt.diagnosis.records import Evidence
from aprfmt.diagnosis.search import Search
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.inference.replay.shadow import PointRecorder

# --- two models by their stored names -------------------------------------------------------------


def tokenizer_row(name: str, *, decisive: bool) -> Any:
    return SimpleNamespace(name=name, decisive=decisive, a="1", b="2")


def test_a_comparison_by_names_says_what_it_was_limited_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_names, "list_token_findings", lambda a, b: ())
    none: Any = None
    for rows, apart in (([], ""), (["pieces"], "pieces"), (["pieces", "ids"], "pieces, ids")):
        table = [tokenizer_row(name, decisive=True) for name in rows]
        report: Any = SimpleNamespace(
            tokenizer=[tokenizer_row("size", decisive=False), *table],
            tensors=[SimpleNamespace(verdict="SAME_BYTES")] * 3,
            compared={"tokenizers": 2},
        )  # fmt: skip
        text = stored_names._comparison_limits_text(report)
        if apart:
            assert text == (
                f"the tensors are equal, the tokenizers differ ({apart}); no pass was made"
            )
        else:
            assert text == (
                "equal in what was compared: 3 tensors by their stored names, and the tokenizer; "
                "not compared: hyperparameters and forward pass"
            )
        assert [one.where for one in stored_names._known_differences(report, none, none)] == [
            (name,) for name in rows
        ]


@pytest.mark.parametrize(
    ("tensors", "tokenizers", "said"),
    [
        (3, 0, "equal in what was compared: 3 tensors by their stored names; not compared: "),
        (0, 2, "equal in what was compared: the tokenizer; not compared: "),
        (0, 0, "neither side has a tensor or a tokenizer to compare; not compared: "),
    ],
)
def test_nothing_is_equal_that_neither_side_has(tensors: int, tokenizers: int, said: str) -> None:
    report: Any = SimpleNamespace(
        tokenizer=[], tensors=[1] * tensors, compared={"tokenizers": tokenizers}
    )
    text = stored_names._comparison_limits_text(report)
    assert text == f"{said}hyperparameters and forward pass"


def test_damage_is_said_with_what_it_cost() -> None:
    def said(a: int, b: int, unread: int) -> str:
        report: Any = SimpleNamespace(tensors=list(range(9)))
        broken = {
            label: tuple(f"f{i}: cut" for i in range(count))
            for label, count in (("A", a), ("B", b))
        }
        return stored_names._damage_sentence(report, broken, [f"t{i}" for i in range(unread)])

    assert said(0, 0, 0) == said(0, 0, 2) == ""
    start = "a file is not whole: "
    end = " tensors by their stored names{}; get the file again"
    assert said(1, 0, 0) == f"{start}A: f0: cut; equal in what was compared: 9{end.format('')}"
    cost = "; not compared: 2 tensors (t0, t1)"
    assert said(0, 3, 2) == (
        f"{start}B: f0: cut (and 2 more); equal in what was compared: 7{end.format(cost)}"
    )
    assert said(1, 1, 0).startswith(f"{start}A: f0: cut; B: f0: cut; equal")
    assert said(1, 0, 9).startswith(f"{start}A: f0: cut; no tensor could be compared; not compared")


def test_a_part_is_compared_with_a_part_of_its_kind_alone() -> None:
    def side(name: str, *, foreign: bool = False) -> Any:
        kind = SimpleNamespace(
            name=name, foreign=foreign, says=lambda side: f"an {name}", todo=lambda side: "merge it"
        )
        return SimpleNamespace(kind=kind if name else None)

    def said(a: Any, b: Any) -> str:
        return stored_names._part_sentence(a, b)

    whole, part, other = side(""), side("adapter"), side("x", foreign=True)
    assert said(whole, whole) == said(part, part) == said(other, other) == ""
    # Seen red: "the same tensor stands under another name", with q and k as a bug beside it.
    assert said(whole, other) == "B is an x; merge it"
    assert said(part, whole) == "A is an adapter, no whole model; merge it"
    assert said(whole, part) == "B is an adapter, no whole model; merge it"
    assert said(side("imatrix"), part) == (
        "A is an imatrix, no whole model; merge it; B is an adapter, no whole model; merge it"
    )


def test_the_next_command_is_another_than_this_one() -> None:
    for commands, command in (
        ([], "aprfmt validate 'b c'"),
        (["aprfmt diagnose a b"], "aprfmt validate 'b c'"),
        (["aprfmt diagnose a b", "aprfmt explain x", "aprfmt y"], "aprfmt explain x"),
    ):
        report: Any = SimpleNamespace(next=commands, b="b c")
        assert stored_names._command_after_diff(report) == command


# --- what to record -------------------------------------------------------------------------------


def test_a_sentence_says_what_to_record_and_in_which_layers() -> None:
    def point(key: str, layer: int, **more: Any) -> Any:
        given = {"recorded": None, "base": "", "after": ()}
        return SimpleNamespace(key=key, layer=layer, **(given | more))

    def said(lacking: dict[str, int], *, last: int) -> str:
        views = {"embd": point("embd", -1, recorded=1)}
        views |= {key: point(key, layer) for key, layer in lacking.items()}
        view = point(f"L{last}.out", last, after=("embd",))
        return recording_sentence(view, views | {view.key: view}, [1, 2], "m.gguf")

    text = said({"L0.q": 0, "L0.k": 0}, last=0)
    assert text.startswith("next: dump q, k of the engine in layer 0; transformers calls them ")
    assert " --points q,k --layers 0 --ids 1,2 --save right.safetensors; " in text
    assert "q_proj" in text and "k_proj" in text
    many = said({"L0.out": 0, "L1.q": 1, "L1.out": 1, "L2.out": 2}, last=3)
    assert many.startswith("next: dump out of the engine in layers 0-2")
    assert " --points out --layers 0,1,2 --ids" in many
    whole = said({"embd_norm": -1}, last=0)
    assert whole.startswith("next: dump embd_norm of the engine") and "--layers" not in whole
    assert " in layer" not in whole.partition(";")[0]
    assert said({}, last=0) == ""


# --- tokenizers -----------------------------------------------------------------------------------


def difference(**more: Any) -> Any:
    given: dict[str, Any] = {
        "cause": "pieces",
        "says": "so",
        "example": (),
        "probed": True,
        "shown": False,
        "where": ("k", "l"),
        "before": 0.5,
        "after": 0.0,
        "name": "n",
        "a": 1,
        "b": 2,
        "mend": (),
        "told": False,
    }
    return SimpleNamespace(**(given | more))


def test_differences_of_tokenizers_are_findings_with_what_shows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = difference(example=("'x' is [1]", "'x' is [2]"), shown=True, mend=("k=it's",))
    report = SimpleNamespace(
        findings=[shown, difference(says="other")],
        notes=[difference(says="unused"), difference(says="known", told=True)],
        remarks=["a remark"],
        added=(7,),
        checked=["tokenizer"],
        not_checked=["template"],
    )
    monkeypatch.setattr(tokenizer_findings, "compare_equal_tokenizers", lambda a, b: report)
    monkeypatch.setattr(tokenizer_findings, "uncompared_tokenizers", lambda a, b, report: ("left",))
    found = Levels()
    b: Any = SimpleNamespace(folder=None, path=Path("b.gguf"))
    tokenizer_findings.add_tokenizer_findings(b, b, found)
    assert [one.says for one in found.stated] == [
        "so; first shown by 'x' is [1] in A, [2] in B",
        "other; no probe text and no conversation shows it",
    ]
    assert found.evidence == [
        Evidence("identity", "A: 'x' is [1]", ("k",)),
        Evidence("identity", "B: 'x' is [2]", ("k",)),
        Evidence("identity", "tokenizer: unused; without effect", ("k", "l")),
        Evidence("identity", "a remark"),
    ]
    assert (found.added, found.checked, found.not_checked) == ((7,), ["tokenizer"], ["template"])
    assert tuple(map(str, found.left)) == ("left",)
    assert found.stated[0].next.startswith("aprfmt set b.gguf")
    assert "'k=it'\"'\"'s'" in found.stated[0].next and not found.stated[1].next
    assert [one.exercised for one in found.stated] == ["shows", "not_exercised"]
    assert all(one.proof is not None for one in found.stated)
    odd = tokenizer_findings._token_finding(difference(probed=False, after=0.5), b)
    assert odd.says == "so; texts could not be encoded on both sides, so that none was tried"
    assert odd.proof is None


# --- rows of traces -------------------------------------------------------------------------------


def test_rows_are_taken_by_position_where_each_has_one() -> None:
    values = np.arange(24.0).reshape(3, 4, 2)
    for axis, positions in ((0, [5, 9, 2]), (1, [3, 1, 7, 8])):
        found = trace_pair._rows_at_positions(values, positions, positions[::-1][:2], axis)
        assert found is not None
        assert np.array_equal(found, np.flip(values, axis).take([0, 1], axis))
        assert trace_pair._rows_at_positions(values, positions[1:], positions[1:], axis) is None
        assert trace_pair._rows_at_positions(values, None, positions, axis) is None
    for axis in (3, 4):  # beyond the last axis
        assert trace_pair._rows_at_positions(values, [1, 2], [1], axis) is None


# --- joined changes -------------------------------------------------------------------------------


def test_joined_changes_take_the_values_that_bring_them_nearest() -> None:
    """Each but the last, of the same thing alone; a pass without a distance changes nothing."""

    def step(cause: str, value: int) -> Any:
        return SimpleNamespace(changed_thing=cause, value=value)

    def joined(steps: Any, nearness: float) -> Any:
        return SimpleNamespace(steps=tuple(steps), nearness=nearness)

    rope = [step("rope", value) for value in range(4)]
    eps = [step("eps", value) for value in range(3)]
    measured: list[Any] = []

    def best(nearness: Any) -> list[int]:
        measured.clear()

        def measure(steps: Any) -> Any:
            measured.append([one.value for one in steps])
            near = nearness(*measured[-1])
            return None if near is None else joined(steps, near)

        search: Any = SimpleNamespace(measure=measure)
        start = joined((rope[0], eps[0]), 1.0)
        found: Any = Search._with_best_values(search, start, [*rope, *eps])
        return [one.value for one in found.steps]

    assert best(lambda x, y: 0.5) == [0, 0] and measured == [[1, 0], [2, 0], [3, 0]]
    assert best(lambda x, y: {1: 2.0, 2: 3.0, 3: 2.5}[x]) == [2, 0]
    assert best(lambda x, y: None) == best(lambda x, y: 1.0) == [0, 0]
    assert best(lambda x, y: 4.0 if x == 3 else None) == [3, 0]


# --- stages ---------------------------------------------------------------------------------------


def test_a_stage_is_run_where_it_is_and_its_experts_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage 0 is the embedding's, stage n that of layer n - 1; experts of all passes are joined."""
    runs: list[Any] = []

    class Patched:
        def __init__(self, *given: Any) -> None:
            self.ids, self.own = given[4], None

        def run(self, recorder: Any, rows: Any, span: Any) -> str:
            runs.append((recorder.at.layer, recorder.keep, rows, span.start, span.stop))
            recorder.values = {"L3.experts": np.array([[len(runs), 2]]), "L3.out": np.zeros(2)}
            return f"{span.stream}+"

    monkeypatch.setattr(paired_pass, "PatchedModel", Patched)
    monkeypatch.setattr(PointRecorder, "__init__", lambda self, patched: None)
    owner: Any = SimpleNamespace(backend=None, routed={})
    blend: Any = SimpleNamespace(spec=None, hp=None, weights=None)
    for stage in range(4):
        probe: Any = SimpleNamespace(ids=(1, 2), rows=None if stage % 2 else (0,))
        x, values = paired_pass.PairedPass.run_stage(owner, blend, probe, stage, "x", stage == 2)
        assert x == "x+" and set(values) == {"L3.experts", "L3.out"}
    assert runs == [
        (0, False, (0,), 0, 1),
        (0, False, "all", 1, 2),
        (1, True, (0,), 2, 3),
        (2, False, "all", 3, 4),
    ]
    assert owner.routed == {3: {1, 2, 3, 4}}


def test_long_passes_are_announced_and_stop_where_the_time_is_up() -> None:
    told: list[str] = []
    done: list[tuple[int, int]] = []
    budget: Any = SimpleNamespace(has_time=lambda: len(done) < 1, reason="time is up")
    reporter = progress.ProgressReporter(lambda at, of: done.append((at, of)), told.append, budget)
    rate, speed = progress.PER_SECOND, progress.VALUES_PER_SECOND
    for seconds, minutes in ((30, 0), (31, 1), (80, 1), (100, 2), (3600, 60)):
        told.clear()
        reporter.announce_passes(seconds * rate)
        reporter.announce_comparison(int(seconds * speed))
        assert len(told) == 2 * bool(minutes)
        assert all(f"about {minutes} minutes" in text for text in told)
    reporter.report_progress(2, 5)
    with pytest.raises(BudgetSpent, match="time is up"):
        reporter.report_progress(3, 5)
    assert done == [(2, 5)]
    progress.ProgressReporter().announce_passes(1e15)
