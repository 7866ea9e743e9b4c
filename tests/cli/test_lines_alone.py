"""Printed lines and commands of answers, each of facts made for it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.adapters.merge_command import MergeCommand
from aprfmt.cli import (
    check_page,
    diff,
    dry_run,
    hash_,
    html_page,
    options,
    render,
    scan,
    set_,
    tree,
)
from aprfmt.cli.parity import output as parity_output
from aprfmt.cli.parity import page as parity_page
from aprfmt.cli.step import output as step_output
from aprfmt.cli.trace import modes
from aprfmt.cli.trace import output as trace_output
from aprfmt.training.report import UpdateFacts


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is printed, as (text, style)."""
    lines: list[tuple[str, str]] = []

    def line(text: str = "", style: str = "") -> None:
        lines.append((text, style))

    for name in ("line", "say", "say_verdict"):
        monkeypatch.setattr(render, name, line)
    return lines


# --- parity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["", "Q8_0"])
def test_a_parity_names_its_runs_and_what_the_weights_went_through(
    through: str, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(parity_output, "warn_of_unknown_points", lambda found: None)
    monkeypatch.setattr(parity_output, "show_pair", lambda *given: shown.append(given))
    monkeypatch.setattr(parity_output, "distance_texts", lambda found: ["far"])
    runs = [
        SimpleNamespace(via="", requested="numpy", ran="numpy", points=7),
        SimpleNamespace(via="a server", requested="torch", ran="torch:cpu", points=5),
    ]
    found: Any = SimpleNamespace(
        through=through, architecture="llama", weights_class="decoded", model="m", ids=(1, 2, 3),
        runs=runs, pairs=["pair"], conclusion=SimpleNamespace(says="nothing compared"),
    )  # fmt: skip
    parity_output.show(found, True)
    went = f", weights through {through} and back" if through else ""
    assert [text for text, _ in told] == [
        f"m (llama, decoded weights{went}), 3 tokens",
        "  reference: numpy (7 points)",
        "  run 1: torch (torch:cpu) (5 points, via a server)".replace("via ", ""),
        "far",
    ]
    assert shown == [(found, "pair", True)]
    found.pairs = []
    told.clear()
    parity_output.show(found, False)
    assert ("nothing compared", "warn") in told


def test_a_bug_is_reproduced_by_its_bundle_or_by_the_pair_that_shows_it() -> None:
    body: Any = {
        "verdict": "bug", "bundle": {"path": "a b.npz"}, "model": "m", "tokens": {"ids": [3, 4]},
        "runs": [{"requested": name} for name in ("numpy", "torch", "cuda")],
        "pairs": [{"verdict": "same", "a": 0, "b": 1}, {"verdict": "bug", "a": 0, "b": 2}],
    }  # fmt: skip
    assert parity_page._reproduction_command(body) == "aprfmt parity --replay 'a b.npz'"
    assert parity_page._reproduction_command(body | {"bundle": None}) == (
        "aprfmt parity m --ids 3,4 --between numpy cuda --bundle bug.npz"
    )
    assert parity_page._reproduction_command(body | {"verdict": "same"}) is None


# --- traces -------------------------------------------------------------------------------------


def test_statistics_are_cells_of_few_digits() -> None:
    stats: Any = dict.fromkeys(trace_output.COLUMNS, 0) | {
        "count": 1234567, "mean": 0.123456789, "std": None, "l2": 1e10, "nan": 3,
    }  # fmt: skip
    assert trace_output._stat_cells(stats) == [
        "1234567", "0.12346", "-", "0", "0", "0", "1e+10", "0", "3", "0",
    ]  # fmt: skip


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("asked", ["", "payload", "engine", "dry_run"])
def test_points_are_listed_where_no_run_is_asked_for(
    asked: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request: Any = SimpleNamespace(payload=False, engine="", dry_run=False, draft=None, budget=None)
    setattr(request, asked or "other", True)
    wanted: Any = SimpleNamespace(
        force=False, save=None, save_aprt=None, html=None, accept=(), same_dtype=None,
        reference=None, exact=False,
    )  # fmt: skip
    where: Any = SimpleNamespace(backend="numpy")
    for name in ("show_points", "show_run"):
        monkeypatch.setattr(modes, name, lambda *given, name=name: name)
    monkeypatch.setattr(modes, "replace", lambda where, **given: where)
    monkeypatch.setattr(dry_run, "print_trace_estimate", lambda *given: "estimate")
    monkeypatch.setattr(options, "check_new", lambda *given: None)
    none: Any = SimpleNamespace(ids=None, mapping=None, arrays=None)
    expected = "show_points" if listed or not asked else "show_run"
    expected = "estimate" if asked == "dry_run" and not listed else expected
    found: Any = modes.run_trace("m", None, listed, request, wanted, none, none, where)
    assert found == expected


# --- estimates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("notes", [0, 1])
def test_runs_together_are_added_up_where_there_are_several(
    notes: int, runs: int, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.inference import memory_estimate

    devices = [SimpleNamespace(fits=fits, to_json=lambda: "device") for fits in (True, False)]
    monkeypatch.setattr(memory_estimate, "add_devices", lambda known: devices)
    monkeypatch.setattr(dry_run, "_print_estimate", lambda one: told.append(("run", "")))
    monkeypatch.setattr(dry_run, "_print_device", lambda one: told.append(("device", "")))
    bodies: list[Any] = []

    def emit(body: Any, code: int, show: Any) -> int:
        bodies.append(body["dry_run"])
        show()
        return code

    monkeypatch.setattr(render, "emit", emit)
    estimate = SimpleNamespace(to_json=lambda: "estimate")
    model: Any = SimpleNamespace(path=Path("m"), spec=SimpleNamespace(name="llama"))
    found: Any = [estimate] * runs + ["not counted"] * notes
    assert dry_run._report_estimates(model, 7, found) == 0
    (body,) = bodies
    assert (body["runs"], body["notes"]) == (["estimate"] * runs, ["not counted"] * notes)
    assert (body["tokens"], body["fits"], body["devices"]) == (7, False, ["device"] * 2)
    together = ["together, one after the other, all kept open", "device", "device"]
    assert [text for text, _ in told] == ["run"] * (runs + notes) + together * (runs > 1)


# --- comparisons and lists ----------------------------------------------------------------------


def test_what_is_said_of_a_merge_is_printed_line_by_line(told: list[tuple[str, str]]) -> None:
    found: Any = SimpleNamespace(
        undecided=False, text="as it says", found="once", says=["one [x]", "two"], weights=[],
        others=["t1", "t2"], differs=False, adapter=Path("a"),
    )  # fmt: skip
    verdict: Any = SimpleNamespace(not_compared=(), exit=0, says="all of it")
    diff.show_adapter(found, verdict, Path("c"), Path("b"), MergeCommand("again"))
    texts = [text for text, _ in told]
    assert texts[0] == "a is merged into b, of the base c: as it says"
    assert [text.replace("\\", "") for text in texts[1:3]] == ["  one [x]", "  two"]
    assert texts[3].startswith("  2 tensors differ that it does not change: t1, t2")


def test_changed_keys_are_told_with_a_type_that_is_new() -> None:
    def text(how: str, old: Any, new: Any, old_type: str = "", new_type: str = "") -> str:
        change: Any = SimpleNamespace(
            key="k", how=how, old=old, new=new, old_type=old_type, new_type=new_type
        )
        return set_.change_line(change)

    assert text("added", None, 3, "", "uint32") == "k: (new) -> 3 (uint32)"
    assert text("added", None, 3) == "k: (new) -> 3"
    assert text("removed", 3, None, "uint32") == "k: 3 -> (removed)"
    assert text("set", 3, 4, "uint32", "uint32") == "k: 3 -> 4"
    assert text("set", 3, 4, "uint32", "int8") == "k: 3 -> 4 (uint32 -> int8)"


def test_a_tree_is_drawn_to_its_depth_in_the_order_of_numbers(told: list[tuple[str, str]]) -> None:
    def node(name: str, *children: Any, **more: Any) -> Any:
        return {"name": name, "children": list(children), "tensors": 2, "nbytes": 8, **more}

    leaf = {"encoding": "F32", "shape": [2]}
    root = node("", node("b", node("10", **leaf), node("9", node("w", **leaf))), node("a", **leaf))
    every = [
        "├── a  [2] F32",
        "└── b  (2 tensors, 8 B)",
        "    ├── 9  (2 tensors, 8 B)",
        "    │   └── w  [2] F32",
        "    └── 10  [2] F32",
    ]
    for depth, lines in ((None, every), (3, every), (2, every[:3] + every[4:]), (1, every[:2])):
        told.clear()
        tree.show(root, depth, "m")
        texts = [text.replace("\\", "").replace("8 bytes", "8 B") for text, _ in told]
        assert texts == ["m", *lines], depth


def test_failures_beyond_the_first_are_counted() -> None:
    most = hash_._FAILURES
    found: Any = SimpleNamespace(says="not as listed", exit=1)
    for count in (0, 1, most, most + 1, most + 5):
        rows = [{"key": f"t{i}", "what": "other bytes"} for i in range(count)]
        body: Any = {"model": "m x", "failures": rows}
        lines = [text for text, _ in hash_.answer(body, found, None)]
        assert lines[0] == "not as listed" and lines[-1] == "next: aprfmt validate 'm x'"
        shown = [f"  FAIL t{i}: other bytes" for i in range(min(count, most))]
        more = [f"  ... {count - most} more (-v, --json)"] if count > most else []
        assert lines[1:-1] == shown + more
    found.exit = 0
    body = {"model": "m"}
    assert [text for text, _ in hash_.answer(body, found, None)] == ["not as listed"]


@pytest.mark.parametrize("left", [0, 3])
def test_a_scan_says_what_its_budget_left_and_what_comes_next(
    left: int, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "verdict_text", lambda report: "the verdict")
    monkeypatch.setattr(scan, "_damage_text", lambda row: f"damage of {row['model']}")
    found: Any = {
        "counts": {"FAIL": 0}, "damage": [], "copies": {"tensors": 0, "bytes": 0},
        "families": [], "templates": [], "unread": [],
    }  # fmt: skip
    report: Any = SimpleNamespace(
        found=found, exit_code=0, asked=5, kept=2, left=left, out=Path("rows")
    )
    rest = f", {left} left (budget)" if left else ""
    scan.show(report)
    assert told == [
        ("the verdict", "good"), (f"5 asked now, 2 known before{rest}; rows in rows", ""),
    ]  # fmt: skip
    assert [text for text, _ in scan.answer(report)] == [
        "the verdict", f"5 asked now{rest}; rows in rows",
    ]  # fmt: skip
    found["unread"] = [{"model": "u0", "weights": 0}, {"model": "u 1", "weights": 2}]
    assert scan.answer(report)[-1][0] == "next: aprfmt inspect 'u 1' --account"
    found["damage"] = [{"model": "d 1"}, {"model": "d2"}]
    assert scan.answer(report)[-1][0] == "next: aprfmt validate 'd 1'"


# --- steps of a training run --------------------------------------------------------------------


def test_runs_whose_gradients_are_wrong_stand_out(
    told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *, flips: Any = (), first: str | None = None, update: Any = None) -> Any:
        return SimpleNamespace(
            run=name, loss=0.5, flips=flips, first_wrong=first, wrong=4, update=update
        )

    runs = [run("x"), run("y", first="L0.q", update=0.25), run("z", flips=(1, 2))]
    report: Any = SimpleNamespace(
        pronounced=SimpleNamespace(says="one is wrong", exit=1), loss=0.5, runs=runs
    )
    monkeypatch.setattr(step_output, "_more_command", lambda *given: f"more of {given}")
    step_output.show_runs(report, "m", False)
    assert told[0] == ("one is wrong", "bad") and told[-1] == ("next: more of ('m', False)", "head")
    lines = {text.split(":")[0].strip(): (text, style) for text, style in told}
    assert lines["x"] == ("  x: loss 0.500000, within what rounding explains", "")
    assert lines["y"][0] == (
        "  y: loss 0.500000, wrong first at L0.q, 4 gradients in all; the optimizer's first step "
        "is 0.25 from that of float64"
    )
    assert lines["y"][1] == "bad" and lines["z"][1] == ""
    assert "its routers choose other experts at 2 points: not judged" in lines["z"][0]


def test_what_moved_in_a_step_and_what_did_not_is_counted() -> None:
    def row(key: str, moved: int | None) -> Any:
        facts = None if moved is None else UpdateFacts(10, moved, 0, 3.0 if moved else 0.0, 0.0)
        return SimpleNamespace(key=key, update=facts)

    report: Any = SimpleNamespace(
        tensors=[row("a", 5), row("b", 10), row("c", 0), row("d", None)],
        loss=0.5, computed_on="cpu", notes=["a note"],
        norms=SimpleNamespace(gradient=2.0, computed=1.5),
    )  # fmt: skip
    assert list(step_output._facts(report)) == [
        ("  loss 0.500000 nats per label, on cpu", ""),
        ("  norm of all gradients 2, 1.5 computed here", ""),
        ("  moved: 2 tensors, 75.0% of their elements, norm 4.243", ""),
        ("  not moved: 1 tensors: c", "warn"),
        ("  a note", ""),
    ]


def test_a_page_of_gates_says_how_many_were_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_page, "render_html", lambda *given: json.dumps(given[:3]))
    body = {
        "model": "m", "requested": "r", "ran": "s", "why": "w", "saved_baseline": None,
        "gates": ["g"], "outcome": "PASS",
    }  # fmt: skip
    for fewest, shown in ((0, None), (3, 3)):
        _, facts, data = json.loads(check_page.gates_page(body | {"min_run": fewest}, 1, "says"))
        assert facts == {
            "model": "m", "asked for": "r", "ran on": "s", "why": "w", "fewest gates": shown,
            "baseline written": None,
        }  # fmt: skip
        assert data == {"gates": ["g"], "code": 1, "sentence": "says", "outcome": "PASS"}
