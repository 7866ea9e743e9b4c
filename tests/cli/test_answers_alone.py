"""Short answers and printed tables of commands, each from a body of its own."""

import math
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from aprfmt.cli import (
    check_output,
    check_page,
    ci_reports,
    demo,
    diagnose,
    doctor,
    explain,
    html_page,
    logprobs,
    main,
    output_format,
    quantize,
    render,
    repair,
    run_options,
    terminal,
)
from aprfmt.cli import hash_ as hash_command
from aprfmt.cli import hex as hex_command
from aprfmt.cli.eval import batch
from aprfmt.cli.inspect import output as inspected
from aprfmt.cli.parity import output as parity_output
from aprfmt.cli.step import output as step_output
from aprfmt.cli.trace import dumped_arrays, reference
from aprfmt.cli.trace import page as trace_page
from aprfmt.cli.trace.point_selection import parse_layers
from aprfmt.errors import UsageError
from aprfmt.recovery import salvage


class Told(list[tuple[str, str]]):
    """What was printed: (text, style) of lines, and rows of tables and pairs by their cells."""

    def texts(self, style: str | None = None) -> list[str]:
        return [text for text, own in self if style is None or own == style]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    lines = Told()

    def line(text: str = "", style: str = "") -> None:
        lines.append((text, style))

    def table(rows: Any, headers: Any = (), justify: str = "") -> None:
        lines.extend((" | ".join(map(str, row)), "row") for row in rows)

    def pairs(rows: Any) -> None:
        lines.extend((f"{name} = {value}", "pair") for name, value in rows)

    monkeypatch.setattr(render, "line", line)
    monkeypatch.setattr(render, "say", line)
    monkeypatch.setattr(render, "warn", lambda text, key: lines.append((text, f"warn {key}")))
    monkeypatch.setattr(render, "table", table)
    monkeypatch.setattr(render, "print_pairs", pairs)
    return lines


# --- hash and inspect ---------------------------------------------------------------------------


def test_failures_of_a_manifest_are_shown_up_to_a_number_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    most = hash_command._FAILURES
    for count in (0, most - 1, most, most + 1):
        rows = [{"key": f"k{i}", "what": "differs"} for i in range(count)]
        body: Any = {"model": str(path), "failures": rows}
        found: Any = SimpleNamespace(says="so", exit=int(count > 0))
        lines = hash_command.answer(body, found, tmp_path / "x.json")
        texts = [text for text, _ in lines]
        assert texts[0] == "so" and texts[1 : 1 + min(count, most)] == [
            f"  FAIL k{i}: differs" for i in range(min(count, most))
        ]
        assert sum("more (-v" in text for text in texts) == (count > most)
        assert any(text.startswith("next: aprfmt repair") for text in texts) is (count > 0)
    broken: Any = SimpleNamespace(says="so", exit=2)
    other = tmp_path / "x.json"
    for model, given, count in ((path, None, 1), (path, other, 0), (tmp_path, other, 1)):
        body = {"model": str(model), "failures": [{"key": "k", "what": "w"}] * count}
        (*_, (text, style)) = hash_command.answer(body, broken, given)
        assert (text, style) == (f"next: aprfmt validate {model}", "head")


def inspect_body(**more: Any) -> Any:
    return {
        "config": None,
        "file_bytes": 2_000_000,
        "tensor_count": 7,
        "format": "gguf",
        "version": "3",
        "path": "m.gguf",
        "architecture": "llama",
        "level": "full",
        "summary": {"line": "a model", "kind": "model"},
        "architecture_error": "unknown",
        "stored_again": [],
        "hyperparameters": {
            "n_layers": {"value": 2, "origin": "file", "key": "llama.block_count"},
            "eps": {"value": 0.5, "origin": "default", "key": ""},
        },
        "used": ["n_layers"],
        "conflicts": [],
        "roles": {"missing": [], "required": 9, "accepted": []},
        "keys": {"unknown": [], "ignored": []},
        "unclaimed": [],
        "draft": [],
        "towers": {},
        "encodings": {"F16": {"tensors": 7, "parameters": 12345, "bytes": 24690}},
        "damage": [],
    } | more


def test_the_short_answer_of_inspect_has_doubts_and_what_is_beside_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inspected, "missing_roles", lambda roles: roles["missing"])
    plain = [
        ("a model", "head"),
        ("  m.gguf: gguf 3, 2.0 MB, 7 tensors", ""),
        ("  n_layers 2", ""),
        ("  encodings: F16 in 7 tensors", ""),
    ]
    assert inspected.answer(inspect_body()) == plain
    for more, line, style in (
        ({"conflicts": ["two sizes"]}, "  contradiction: two sizes", "bad"),
        ({"roles": {"missing": ["a", "b"]}}, "  missing: a, b", "bad"),
        ({"keys": {"unknown": ["x", "y"]}}, "  config keys unknown: x, y", "warn"),
        ({"unclaimed": ["t"]}, "  tensors of no role: t", "warn"),
        ({"draft": ["t", "u"]}, "  draft head: 2 tensors", ""),
        ({"towers": {"mtmd": 5}}, "  tower: 5 tensors, mtmd", ""),
    ):
        lines = inspected.answer(inspect_body(**more))
        assert [one for one in lines if one not in plain] == [(line, style)]
        assert lines[-1] == plain[-1]
    config = inspected.answer(inspect_body(config="c.json"))
    assert config[1][0].endswith("7 tensors, config c.json")
    damaged = inspected.answer(inspect_body(damage=["x"]))
    assert damaged[-1] == ("next: aprfmt validate m.gguf", "head")
    for kind, said in (("model", [("  unknown", "warn")]), ("adapter", [])):
        none = inspect_body(architecture=None, summary={"line": "a model", "kind": kind})
        assert inspected.answer(none)[2:-1] == said
    account = {
        "items": 9,
        "kinds": [{"items": 8, "kind": "keys", "reading": "read"}],
        "contradicted": [{"kind": "key", "name": "k", "why": "two"}],
        "unread": [{"kind": "tensor", "name": "t", "why": ""}],
        "unreadable": [{"kind": "file", "name": "f", "why": "cut"}],
    }
    rows = inspected.answer(inspect_body(account=account, damage=["x"]))[4:]
    assert rows == [
        ("  9 items: 8 keys read", ""),
        ("  contradicted: key k: two", "warn"),
        ("  unread: tensor t", "warn"),
        ("  cannot be read: file f: cut", "warn"),
    ]


def test_tables_of_inspect_have_titles_and_what_to_do(told: Told) -> None:
    inspected._print_hyperparameters(inspect_body(), False)
    assert told == [("hyperparameters", "head"), ("n_layers | 2 | file", "row")]
    told.clear()
    keys = {"unknown": ["u"], "ignored": ["i", "j"]}
    more: Any = {"keys": keys, "draft": ["t"], "towers": {"mtmd": 5, "a tower": 2}}
    inspected._print_hyperparameters(inspect_body(**more, unclaimed=list("abcdefgh")), True)
    assert told.texts("row") == [
        "n_layers | 2 | file | llama.block_count",
        "eps | 0.5 | default | ",
    ]
    assert told.texts("")[0:2] == ["config keys ignored: i, j", "config keys unknown: u"]
    assert told.texts("")[2:] == [
        "draft head: 1 tensors; aprfmt eval --draft runs it",
        "tower: 5 tensors, mtmd; aprfmt convert --arch mtmd takes it out",
        "tower: 2 tensors, a tower",
        "tensors of no role: a, b, c, d, e, f",
    ]
    told.clear()
    inspected._print_hyperparameters(inspect_body(keys=keys, draft=["t"], level="names"), False)
    assert told.texts("") == ["config keys unknown: u", "draft head: 1 tensors"]
    told.clear()
    inspected._print_encodings(inspect_body())
    assert told == [("encodings", "head"), ("F16 | 7 | 12,345 | 24.7 kB", "row")]
    told.clear()
    widest = inspected.WIDEST
    values = {"a": "x" * widest, "b": "y" * (widest + 1), "c": 7}
    body = inspect_body(metadata=values, metadata_names={"c": "seven"})
    inspected._print_metadata(body, False)
    cut = f"b = {'y' * widest}... ({widest + 1} characters; --full)"
    assert told[:2] == [("metadata", "head"), (f"a = {'x' * widest}", "pair")]
    assert told[2:] == [(cut, "pair"), ("c = 7 = seven", "pair")]
    told.clear()
    inspected._print_metadata(body, True)
    assert told.texts("pair")[1] == f"b = {'y' * (widest + 1)}"
    told.clear()
    account = {
        "items": 9,
        "kinds": [{"items": 8, "kind": "keys", "reading": "read"}],
        "contradicted": [{"kind": "key", "name": "k", "why": "two"}],
        "unread": [{"kind": "tensor", "name": "t", "why": ""}],
        "unreadable": [{"kind": "file", "name": "f", "why": "cut"}],
    }
    inspected._print_account(account)
    assert told == [
        ("account", "head"),
        ("read | keys | 8", "row"),
        ("all |  | 9", "row"),
        ("  contradicted: key k: two", "warn"),
        ("  unread: tensor t", "warn"),
        ("  cannot be read: file f: cut", "bad"),
    ]


def test_missing_tensors_and_contradictions_are_warned_of(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspected, "missing_roles", lambda roles: roles["missing"])
    inspected._print_warnings(inspect_body())
    assert not told
    roles = {"missing": list("abcde"), "required": 9, "accepted": list("wxyz")}
    inspected._print_warnings(inspect_body(conflicts=["two sizes"], roles=roles))
    says = "of 9 tensors the configuration demands are missing"
    assert told == [
        ("m.gguf: two sizes", "warn contradiction"),
        (f"5 {says}: a, b, c, d, ...", "warn missing_tensors"),
        (f"4 {says} and accepted as such: w, x, y, z", "warn accepted_missing"),
    ]


# --- losses, steps, calibrations ----------------------------------------------------------------


def test_a_reported_loss_is_known_to_half_of_its_last_digit() -> None:
    none: Any = None
    assert batch.parse_reported(none, none, None) is None
    for text, value, half in (
        ("2", 2.0, 0.0),
        ("-3", -3.0, 0.0),
        ("2.5", 2.5, 0.05),
        ("+2.500", 2.5, 0.0005),
        (" 2.E1 ", 20.0, 5.0),
        ("2.5e2", 250.0, 5.0),
        ("25e-1", 2.5, 0.05),
        (".5", 0.5, 0.05),
        ("2.", 2.0, 0.0),
        ("inf", math.inf, 0.0),
    ):
        found = batch.parse_reported(none, none, text)
        assert found is not None and found[0] == value
        assert found[1] == pytest.approx(half, rel=1e-12), text
    found = batch.parse_reported(none, none, "NaN")
    assert found is not None and math.isnan(found[0]) and found[1] == 0.0
    for text in ("", ".", "+", "1e", "1e1000", "0x1", "1,5", "-inf"):
        with pytest.raises(click.BadParameter):
            batch.parse_reported(none, none, text)


def test_a_wrong_loss_is_put_right_by_what_is_known_of_it() -> None:
    def remedy(says: str, logits: bool = False) -> str:
        answer: Any = SimpleNamespace(says=says, distinct_mistakes=[["mean_of_means"]])
        return batch.mistake_remedy(answer, logits)

    assert remedy("ambiguous").startswith("give a batch in which these differ")
    assert remedy("unmeasured") == "give labels, or leave them out to score every token"
    assert remedy("unknown").startswith("compare the forward passes: save the trainer's logits")
    assert remedy("unknown", True).startswith("the batch's own logits do not give it")
    told = {
        remedy(says, logits) for says in ("ambiguous", "unmeasured") for logits in (False, True)
    }
    assert len(told) == 2


def step_row(moved: int, elements: int, norm: float, key: str = "w") -> Any:
    update = SimpleNamespace(moved=moved, elements=elements, norm=norm)
    return SimpleNamespace(key=key, update=update if elements else None)


def test_what_a_step_moved_is_counted_in_tensors_elements_and_norm() -> None:
    norms = SimpleNamespace(gradient=None, computed=None)
    report: Any = SimpleNamespace(
        tensors=[
            step_row(3, 4, 3.0),
            step_row(4, 4, 4.0),
            step_row(0, 9, 0.0, "still"),
            step_row(0, 0, 0.0),
        ],
        loss=None,
        norms=norms,
        notes=["a note"],
        computed_on="numpy",
    )
    assert list(step_output._facts(report)) == [
        ("  moved: 2 tensors, 87.5% of their elements, norm 5", ""),
        ("  not moved: 1 tensors: still", "warn"),
        ("  a note", ""),
    ]
    report.tensors, report.notes, report.loss = [], [], 2.5
    report.norms = SimpleNamespace(gradient=1.5, computed=2.0)
    assert list(step_output._facts(report)) == [
        ("  loss 2.500000 nats per label, on numpy", ""),
        ("  norm of all gradients 1.5, 2 computed here", ""),
    ]
    report.norms = SimpleNamespace(gradient=1.5, computed=None)
    assert list(step_output._facts(report))[1] == ("  norm of all gradients 1.5", "")


def test_a_calibration_shows_eight_points_that_nothing_excuses(told: Told) -> None:
    row = SimpleNamespace(
        pair=("numpy", "torch"),
        weights="exact",
        point="q",
        dtype="float32",
        rel_l2=0.001,
        max_over_rms=0.25,
        largest=0.0005,
        runs=6,
    )
    found: Any = SimpleNamespace(rows=[row], beyond=[f"p{i}" for i in range(9)])
    for written in (None, "t.json"):
        parity_output.show_calibration(found, written)
        assert told[0] == ("numpy/torch | exact | q | float32 | 0.001 | 0.25 | 0.0005 | 6", "row")
        assert told.texts("bad") == [f"beyond what a tolerance may excuse: p{i}" for i in range(8)]
        assert told.texts("") == (["wrote t.json"] if written else [])
        told.clear()


def test_of_logprobs_the_largest_differences_are_shown_by_position(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "headline", lambda table, verdict: ("so far apart", "bad"))
    most = logprobs.SHOWN
    for count in (most, most + 1):
        rows = [
            SimpleNamespace(
                position=i,
                token=None if i else 5,
                here=1.0,
                reference=None,
                difference=0.5,
                largest=float(i),
                kl=0.25,
            )
            for i in range(count)
        ]
        table: Any = SimpleNamespace(rows=rows, first=rows[3] if count > most else None)
        logprobs.show(table, table, "ref")
        assert told[:2] == [("against ref", "head"), ("so far apart", "bad")]
        shown = [int(text.partition(" ")[0]) for text in told.texts("row")]
        assert shown == list(range(count - most, count))
        assert told.texts("row")[0].endswith(f" | 1.0000 | - | 0.5000 | {count - most} | 0.25")
        more = [f"the {most} largest of {count} (--json has all)"] if count > most else []
        assert told.texts("dim") == more
        first = ["so far apart"] + ["first position beyond: 3, 3 apart"] * (count > most)
        assert told.texts("bad") == first
        lines = logprobs.answer(table, table, "ref", ("x", "y"))
        assert lines[0] == ("so far apart (against ref)", "bad")
        assert lines[-2:] == [("next: x", "head"), ("next: y", "head")]
        assert len(lines) == 3 + (count > most)
        told.clear()


# --- hex, gates, doctor, explain ----------------------------------------------------------------


def test_bytes_of_a_file_begin_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(20)))
    assert hex_command.plain_bytes(path, 18, 9)["bytes"] == "1213"
    assert hex_command.plain_bytes(path, 0, 2)["bytes"] == "0001"
    for offset in (20, 21):
        with pytest.raises(UsageError, match="the file has 20 bytes"):
            hex_command.plain_bytes(path, offset, 1)


def test_blocks_are_printed_with_sixteen_bytes_and_values_at_most(told: Told) -> None:
    def block(size: int, values: Any, fields: bool = True) -> Any:
        raw = bytes(range(size)).hex()
        held = [{"name": "qs", "bytes": raw, "value": [1, 2]}] if fields else []
        return {"block": 3, "offset": 64, "bytes": raw, "fields": held, "values": values}

    rows = [block(16, None), block(17, [1.5] * 16), block(17, list(range(17)), False)]
    body: Any = {"tensor": "w", "shape": [2, 32], "encoding": "Q8_0", "count": 9, "blocks": rows}
    hex_command._print_blocks(body)
    sixteen = bytes(range(16)).hex(" ")
    assert told.texts("head") == ["w [2, 32] Q8_0, 9 blocks", *["block 3 at offset 64"] * 3]
    lines = told.texts("")
    assert lines[0].split("  ")[1].startswith("qs") and lines[0].endswith("[1, 2]")
    assert f" {sixteen} " in lines[0] and ".." not in lines[0] and f"{sixteen} .." in lines[1]
    assert lines[2] == "  values   " + " ".join(["1.5"] * 16)
    assert lines[3].startswith("  00000040  ") and lines[4].startswith("  00000050  10")
    assert lines[5] == "  values   " + " ".join(map(str, range(16))) + " .."


def test_floats_are_shown_in_lines_of_sixteen_bytes(demo_model: Path) -> None:
    body, _ = hex_command.tensor_blocks(demo_model, "model.norm.weight", 0, 2)
    assert [len(row["bytes"]) // 2 for row in body["blocks"]] == [16, 16]
    assert body["blocks"][1]["offset"] - body["blocks"][0]["offset"] == 16
    last = body["count"] - 1
    (only,) = hex_command.tensor_blocks(demo_model, "model.norm.weight", last, 2)[0]["blocks"]
    assert only["block"] == last
    with pytest.raises(UsageError, match=f"--block {last + 1}, the tensor has {last + 1} blocks"):
        hex_command.tensor_blocks(demo_model, "model.norm.weight", last + 1, 1)


def gate(outcome: str, *checks: tuple[str, str, str, str]) -> Any:
    rows = [
        SimpleNamespace(name=name, outcome=own, where=where, found="f", expected="e", todo=todo)
        for name, own, where, todo in checks
    ]
    failed = [row for row in rows if row.outcome == "FAIL"]
    return SimpleNamespace(
        name="g",
        outcome=outcome,
        seconds=1.5,
        checks=rows,
        failed=failed,
        proves="proof",
        why="why",
    )


def test_gates_are_printed_with_what_failed_and_what_to_do(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_output, "show_verdict", lambda said: told.append((said, "verdict")))
    for each, lines in (
        (
            gate("PASS", ("g", "PASS", "", ""), ("h", "NOT_RUN", "here", "")),
            ["proof: f", "        NOT-RUN h (here): f; expected e"],
        ),
        (gate("NOT_RUN", ("g", "NOT_RUN", "", "")), ["why"]),
        (
            gate("FAIL", ("a", "FAIL", "", "do"), ("b", "FAIL", "x", ""), ("c", "PASS", "", "")),
            [
                "2 of 3 checks failed",
                "        FAIL a: f; expected e; do",
                "        FAIL b (x): f; expected e",
            ],
        ),
    ):
        report: Any = SimpleNamespace(subject="m", choice="numpy", gates=[each], pronounced="so")
        check_output.show_gates(report, None)
        assert told[0] == ("m on numpy", "head") and told[-1] == ("so", "verdict")
        found = [text for text, _ in told[1:-1]]
        assert found[0].startswith(each.outcome.replace("_", "-")) and found[0].endswith(lines[0])
        assert ("1.50 s" in found[0]) is (each.outcome != "NOT_RUN") and found[1:] == lines[1:]
        told.clear()
    check_output.show_gates(report, "base.json")
    assert told[-1][0].endswith("base.json")


def test_a_page_of_gates_has_the_facts_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[Any] = []

    def render_html(*given: Any) -> str:
        pages.append(given)
        return "page"

    monkeypatch.setattr(html_page, "render_html", render_html)
    names = ("model", "requested", "ran", "why", "saved_baseline", "gates", "outcome")
    for least in (0, 3):
        body = {name: name for name in names} | {"min_run": least}
        assert check_page.gates_page(body, 2, "words") == "page"
        _, facts, data, _ = pages.pop()
        assert facts["fewest gates"] == (least or None) and facts["ran on"] == "ran"
        assert data == {"gates": "gates", "code": 2, "sentence": "words", "outcome": "outcome"}
    for strict in (False, True):
        check_page.validation_page({"subject": "s", "format": "f", "strict": strict})
        facts = pages.pop()[1]
        assert facts["warnings"] == ("fail (--strict)" if strict else None)


def facts_of_doctor(**more: Any) -> Any:
    gpu = {"index": 0, "name": "H200", "memory": 3 << 30, "compute": "9.0"}
    devices = {"gpus": [gpu], "why": "", "driver": None, "cuda": "13", "torch": "", "cupy": "old"}
    package = {"name": "torch", "version": "2", "for": "runs", "get": "pip install torch"}
    other = {"name": "cupy", "version": None, "for": "speed", "get": "pip install cupy"}
    return {
        "aprfmt": "1",
        "python": "3",
        "system": "linux",
        "cpus": 2,
        "packages": [package, other],
        "native": {"built": True, "why": "", "cpu": "avx2", "kernels": ["q8"], "disabled": {}},
        "devices": devices,
        "llama_cpp": {"folder": "/l", "version": "b1", "why": ""},
    } | more


def test_doctor_says_what_is_here_and_how_to_get_the_rest(told: Told) -> None:
    body = facts_of_doctor()
    assert doctor.answer(body) == [
        ("aprfmt 1, python 3, linux, 2 cpus, kernels avx2", "head"),
        ("  here: torch", ""),
        ("  cupy is not installed (speed): pip install cupy", ""),
        ("  gpu: cuda:0 H200", ""),
        ("  cupy does not use it: old", "warn"),
        ("  llama.cpp: /l: b1", ""),
    ]
    none: Any = {
        "gpus": [],
        "why": "no driver",
        "driver": None,
        "cuda": None,
        "torch": "t",
        "cupy": "c",
    }
    kernels = {"built": False, "why": "no compiler", "cpu": "", "kernels": [], "disabled": {}}
    without = facts_of_doctor(
        devices=none, native=kernels, llama_cpp={"folder": None, "version": None, "why": "not set"}
    )
    lines = doctor.answer(without)
    assert lines[0][0].endswith("no kernels: no compiler")
    assert lines[-2:] == [("  gpu: no driver", ""), ("  llama.cpp: not set", "")]
    doctor.show(body)
    assert told.texts("row") == [
        "torch | 2 | runs | ",
        "cupy | not installed | speed | pip install cupy",
    ]
    assert told.texts("head") == ["packages", "devices", "engine llama.cpp", "native kernels"]
    assert told.texts("warn") == ["  cupy: old"]
    assert told.texts("") == [
        "  cpu",
        "  cuda:0  H200, 3.0 GiB, compute 9.0",
        "  driver unknown, CUDA up to 13",
        "  torch: can use the GPU",
        "  /l: b1",
        "  avx2: q8",
    ]
    told.clear()
    doctor.show(without)
    assert told.texts("warn") == [] and "  no GPU: no driver" in told.texts("")
    assert told.texts("")[-1].startswith("  none: no compiler; the numpy codecs do the same")
    assert "  not set" in told.texts("") and "  torch: t" in told.texts("")
    told.clear()
    body["native"]["disabled"] = {"q8": "wrong"}
    body["llama_cpp"] = {"folder": "/l", "version": None, "why": "broken"}
    doctor.show(body)
    assert told.texts("warn") == ["  cupy: old", "  broken", "  switched off: q8: wrong"]


def test_a_package_is_found_under_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "unrecorded" or None)
    every = doctor._DISTRIBUTIONS["cupy"]
    for name in every:
        there.clear()
        there[name] = "7"
        assert doctor.installed_version("cupy") == "7"
    assert doctor.installed_version("torch") is None
    assert doctor.installed_version("unrecorded") == "unknown"
    hint = doctor.install_hint
    assert hint("x", ()) == "pip install x" and hint("x", ("gpu", "all")).count(" or ") == 1


def test_what_is_not_known_is_told_with_near_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section, or a name however it is spelled; of a stored name its last part."""
    rows = {
        "cause": {"gradient_sign": "g", "rope_theta": "r"},
        "encoding": {"F16": "f"},
        "exit code": {"0": "zero", "1": "one"},
        "error": {"format": "broken"},
    }
    monkeypatch.setattr(explain, "all_topics", lambda: rows)
    for name, found in (
        ("gradient_sign", ["g"]),
        ("Gradient-Sign", ["g"]),
        ("gradient sign", ["g"]),
        ("fp16", ["f"]),
        ("F16", ["f"]),
        ("FormatError", ["broken"]),
        ("encodings", ["f"]),
        ("blk.0.rope_theta.weight", ["r"]),
        ("Exit-Codes", ["zero", "one"]),
        ("L1.rope_theta.bias", ["r"]),
        ("cause", ["g", "r"]),
    ):
        assert [text for _, _, text in explain.find_topics(name)] == found, name
    with pytest.raises(UsageError, match=r"nothing to explain about 'gradient_sig'; near: .*gra"):
        explain.find_topics("gradient_sig")


def test_findings_fail_by_their_level_or_all_of_them() -> None:
    def levels(level: str, strict: bool, *, noted: bool = True) -> list[str]:
        finding = {
            "check": "c",
            "level": level,
            "where": "w",
            "found": "f",
            "expected": "e",
            "todo": "",
            "says": "s",
            "text": "t",
        }
        check = {
            "name": "c",
            "outcome": "PASS",
            "found": "f",
            "expected": "e",
            "todo": "",
            "where": "",
            "why": "",
        }
        body = {"subject": "m", "checks": [check], "findings": [finding] * noted, "strict": strict}
        return [one.level for one in ci_reports.cases_of_validation(body)]

    assert levels("fail", False) == levels("fail", True) == levels("warning", True) == ["fail"]
    assert levels("warning", False) == ["warning"] and levels("fail", True, noted=False) == ["pass"]


def test_a_command_of_another_package_is_one_of_click(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(loaded: Any) -> Any:
        def load() -> Any:
            if isinstance(loaded, Exception):
                raise loaded
            return loaded

        return SimpleNamespace(name="extra", value="pkg:cmd", load=load)

    def found(loaded: Any, name: str = "extra") -> Any:
        monkeypatch.setattr(main, "installed_entry_points", lambda group: [point(loaded)])
        return main.plugin_command(name)

    command = click.Command("extra")
    assert found(command) is command and found(command, "other") is None
    with pytest.raises(UsageError, match=r"'extra' \(pkg:cmd\): is int; expected a click.Command"):
        found(3)
    for error in (ImportError("gone"), AttributeError("gone")):
        with pytest.raises(Exception, match="cannot be imported: gone; install the package"):
            found(error)


def test_numbers_of_layers_are_those_of_the_model() -> None:
    assert parse_layers(None, 3) == {0, 1, 2} and parse_layers("0, 2-3", 4) == {0, 2, 3}
    assert parse_layers("3", 4) == parse_layers("3-3", 4) == {3}
    for text in ("4", "2-4", "3-2"):
        with pytest.raises(UsageError, match="the model has layers 0 to 3"):
            parse_layers(text, 4)
    for text in ("", "-1", "1-", "a", "1234567"):
        with pytest.raises(UsageError, match="is no layer"):
            parse_layers(text, 4)


def test_points_that_are_not_finite_are_named_those_of_one_side_first(told: Told) -> None:
    def point(key: str, alone: bool | None) -> Any:
        text: Callable[[str, str], str] = lambda one, two: f"{one} not {two}"  # noqa: E731
        found = None if alone is None else SimpleNamespace(alone=alone, text=text)
        return SimpleNamespace(key=key, nonfinite=found)

    rows = [
        point("a", False),
        point("b", None),
        point("L0.router_margin", False),
        point("c", True),
        point("L1.router_margin", True),
    ]
    run_options.show_nonfinite(rows, "mine")
    said = "mine not the reference"
    assert told == [
        (f"c: {said}", "bad"),
        (f"L1.router_margin: {said}", "bad"),
        (f"a: {said}", "warn"),
    ]


def test_help_of_quantize_ends_with_the_types_and_the_example() -> None:
    command = quantize.TypesInHelp("x", epilog="the example")
    text = command.get_help(click.Context(command))
    assert "Types:" in text and "Q4_K_M" in text and text.rstrip().endswith("the example")


def test_a_salvaged_file_and_a_demo_say_where_they_are(
    told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Any] = []

    def emit(body: Any, code: int, show: Any, **more: Any) -> int:
        bodies.append((body, code, more.pop("written", False)))
        show()
        for text, style in more.pop("answer", list)():
            told.append((text, style))
        return code

    monkeypatch.setattr(render, "emit", emit)
    for missing in ({}, {"a": "cut"}):
        found = SimpleNamespace(kept=["b", "c"], missing=missing)
        monkeypatch.setattr(salvage, "salvage", lambda *given, found=found, **more: found)
        assert repair.salvage_file(tmp_path / "x", tmp_path / "y", False) == 0
        body, _, written = bodies.pop()
        assert (body["kept"], body["missing"], written) == (2, missing, True)
        whole = "" if missing else ", every one that it held"
        assert told.texts("")[-1] == f"wrote {tmp_path / 'y'}: 2 tensors{whole}"
        assert ("missing a: cut" in told.texts("")) is bool(missing)
        says = [text for text, style in told if style == "warn salvaged"]
        assert [text.partition(": ")[2][:15] for text in says] == ["1 of 3 tensors "] * len(missing)
        told.clear()
    steps = [{"exit": 0, "expected": 0, "command": "x"}, {"exit": 1, "expected": 0, "command": "y"}]
    for count, code in ((1, 0), (2, 1)):
        monkeypatch.setattr(demo, "run_steps", lambda folder, count=count: steps[:count])
        for given in ([], ["--out", str(tmp_path / f"demo{count}")]):
            told.clear()
            assert demo.command.main(given, standalone_mode=False) == code
            body, own, _ = bodies.pop()
            assert own == code and bool(body["folder"]) is bool(given)
            kept = "(the files were in a temporary folder; keep them with --out DIR)"
            ways = "  --into DIR writes the model, --out DIR keeps the files"
            assert told.texts("dim") == ([] if given else [kept, ways])
            word = "FAIL" if code else "PASS"
            first = f"{word}: 1 of {count} steps gave the exit code that they should"
            assert first in told.texts("bad" if code else "good")
            assert ("  exit 1, expected 0: y" in told.texts("bad")) is bool(code)


# --- reports for CI servers ---------------------------------------------------------------------


def row_of(outcome: str, name: str = "c", **more: str) -> dict[str, Any]:
    return {
        "name": name,
        "outcome": outcome,
        "found": "f",
        "expected": "e",
        "todo": "",
        "where": "",
    } | more


def test_gates_and_models_of_a_scan_have_a_case_for_each_answer() -> None:
    checks = [row_of("PASS"), row_of("FAIL", "d", todo="do", where="w"), row_of("NOT_RUN", "n")]
    gates = [
        {"name": "g", "outcome": "FAIL", "checks": checks, "why": "", "seconds": 2.0},
        {"name": "h", "outcome": "NOT_RUN", "checks": checks, "why": "", "seconds": 1.0},
        {"name": "i", "outcome": "PASS", "checks": checks[:1], "why": "why", "seconds": 0.0},
    ]
    for gate in gates:
        gate["proves"] = "p"
    found = ci_reports.cases_of_gates({"model": "m", "gates": gates})
    case = ci_reports.ReportCase
    assert found == [
        case("g: d", "m", "fail", "f; expected e; do", "w"),
        case("g: n", "m", "not run", "f"),
        case("h", "m", "not run", "p", seconds=1.0),
        case("i", "m", "pass", "why"),
    ]
    damage = [
        {
            "model": "a",
            "check": "layout",
            "outcome": "FAIL",
            "found": "x",
            "findings": [row_of("FAIL", where="w"), row_of("FAIL", where="v", todo="do")],
        },
        {"model": "b", "check": "open", "outcome": "ERROR", "found": "no file", "findings": []},
    ]
    models = [{"model": "a", "PASS": 3, "NOT_RUN": 1}, {"model": "b", "PASS": 0, "NOT_RUN": 2}]
    assert ci_reports.cases_of_scan({"models": models, "damage": damage}) == [
        case("layout", "a", "fail", "w: f; expected e; v: f; expected e; do"),
        case("other checks", "a", "pass", "3 answers passed, 1 not run"),
        case("open", "b", "error", "no file"),
        case("other checks", "b", "not run", "0 answers passed, 2 not run"),
    ]
    levels = [
        ci_reports._case_level(word) for word in ("PASS", "FAIL", "NOT_RUN", "ERROR", "error")
    ]
    assert levels == ["pass", "fail", "not run", "error", "error"]


def test_the_first_failure_is_said_without_the_verdict_and_the_rest_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = ci_reports.ReportCase
    passed, verdict = case("a", "m", "pass"), case("verdict", "m", "fail", "so")
    tensor, key = case("tensor", "m", "fail", "far", "w"), case("key", "m", "error", "gone")
    for cases, text in (
        ([passed], ""),
        ([passed, case("w", "m", "warning")], ""),
        ([verdict], "aprfmt: m: verdict: so\n"),
        ([verdict, tensor, key], "aprfmt: m: tensor: w: far (and 1 more)\n"),
        ([passed, tensor, verdict], "aprfmt: m: tensor: w: far\n"),
        ([case(ci_reports.DAMAGED, "m", "error"), tensor], ""),
    ):
        render.say_first_failure(cases)
        assert capsys.readouterr().err == text


# --- runs, replays and references ---------------------------------------------------------------


def test_a_replay_says_what_is_not_as_it_was_recorded(told: Told) -> None:
    for moved, lines in (
        ((0.0, 0.0), []),
        ((0.25, 0.0), ["  the reference gives another result than recorded: relL2 0.25"]),
        ((0.0, 0.5), ["  the other run gives another result than recorded: relL2 0.5"]),
    ):
        for again in (False, True):
            found: Any = SimpleNamespace(
                key="L0.q",
                runs=("numpy", "torch"),
                distance=0.1,
                recorded=0.2,
                bound=0.01,
                largest=0.3,
                at=(1, 2),
                reference=moved[0],
                other=moved[1],
                reproduced=again,
            )
            parity_output.show_replay(found)
            assert told[0] == ("L0.q: torch against numpy", "head")
            now = "  apart now 0.1, recorded 0.2, rounding 0.01; largest 0.3 at [1, 2]"
            assert told.texts("") == [now, *lines]
            last = "reproduced: the operation is wrong" if again else "not reproduced"
            assert told[-1] == (last, "bad" if again else "good")
            told.clear()


def test_a_runs_page_names_its_first_ids_and_where_it_ran() -> None:
    most = html_page.IDS
    for count in (0, most, most + 1):
        run = {
            "ids": list(range(count)),
            "architecture": "llama",
            "prompt": "p",
            "aprfmt": "1",
            "backend": {"backend": "torch", "dtype": "float32", "threads": 3},
        }
        trace: Any = SimpleNamespace(run=run)
        found = trace_page.run_identity(trace, {"reference": {"against": "other"}})
        assert str(found["tokens"]).endswith(" ...") is (count > most)
        assert (found["ran on"], found["reference"]) == ("torch:float32", "other")
    nothing: Any = SimpleNamespace(run={})
    found = trace_page.run_identity(nothing, {})
    assert found["tokens"] is found["reference"] is None and found["ran on"] == ""


def test_the_answer_of_a_trace_has_points_beyond_what_was_not_run_and_the_next_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference, "reference_verdict", lambda difference: ("so", "bad"))
    monkeypatch.setattr(
        reference, "_point_row", lambda point: ("k", "0.1", "0.2", "-", point.why or "0.01")
    )
    most = reference.LISTED
    for count in (0, 1, most, most + 1):
        points = [SimpleNamespace(key=f"p{i}", beyond=i < count, why="") for i in range(count + 2)]
        difference: Any = SimpleNamespace(
            first_token=None, points=points, rounding_ratios={}, repeats=(), not_checked=["speed"]
        )
        lines = reference.reference_answer(difference, "other@numpy", "my model")
        assert lines[0] == ("so (against other@numpy)", "bad")
        assert [text for text, style in lines if style == "bad"][1:] == [
            f"  p{i}: relL2 0.1, max abs 0.2, tolerance 0.01" for i in range(min(count, most))
        ]
        assert [text for text, style in lines if style == "dim"] == (
            ["  1 more points beyond (-v)"] if count > most else []
        )
        assert ("  NOT-RUN: speed", "warn") in lines
        following = [("next: aprfmt diagnose other 'my model'", "head")]
        assert lines[-1:] == (following if count else [("  NOT-RUN: speed", "warn")])
        for same in ("my model", "my model/model.safetensors"):
            (text, _) = reference.reference_answer(difference, "my model@x", same)[-1]
            assert not text.startswith("next")
    points[0].why = "other rows"
    difference.first_token = SimpleNamespace(text="the first token")
    difference.rounding_ratios = {"a": 2.0, "b": 3.5}
    lines = reference.reference_answer(difference, "other", "")
    assert lines[1:3] == [("  the first token", "bad"), ("  p0: other rows", "bad")]
    assert ("  largest R: 3.5 at b", "") in lines and not lines[-1][0].startswith("next")


def test_steps_of_a_demo_are_told_and_end_where_one_does(
    told: Told, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = [(f"why {name}", ["x", name], 0) for name in "abc"]
    monkeypatch.setattr(demo, "demo_steps", lambda folder: steps)
    for form, codes in (("", [0, 1]), ("json", [1]), ("agent", [0, 0, 0])):
        left = iter(codes)
        monkeypatch.setattr(demo, "run_command", lambda *given, left=left: next(left))
        monkeypatch.setattr(output_format, "answer_format", lambda form=form: form)
        rows = demo.run_steps(tmp_path)
        assert [row["exit"] for row in rows] == codes
        assert rows[0] == {"why": "why a", "command": "aprfmt x a", "exit": codes[0], "expected": 0}
        first = [("", ""), ("# why a", "dim"), ("$ aprfmt x a", "head")]
        then = [("", ""), ("# why b", "dim"), ("$ aprfmt x b", "head")]
        assert told == ([] if form else [*first, *then])
        told.clear()


def test_runs_of_a_step_are_judged_with_a_table_where_it_is_asked_for(told: Told) -> None:
    def run(name: str, **more: Any) -> Any:
        return SimpleNamespace(
            **{
                "run": name,
                "loss": 2.0,
                "flips": (),
                "first_wrong": None,
                "wrong": 0,
                "update": None,
            }
            | more
        )

    runs = [run("a"), run("b", flips=(1, 2)), run("c", first_wrong="L1.q", wrong=3, update=0.25)]
    row = SimpleNamespace(key="w", size=1.5, apart=(0.1, 0.2, 0.3), wrong=(0, 2))
    for code in (0, 1):
        for verbose in (False, True):
            pronounced = SimpleNamespace(says="so", exit=code)
            report: Any = SimpleNamespace(
                pronounced=pronounced, loss=2.5, runs=runs, gradients=[row]
            )
            step_output.show_runs(report, "m", verbose)
            assert told[0][0] == "so" and "loss 2.500000" in told[1][0]
            chosen = "its routers choose other experts at 2 points: not judged"
            step = "the optimizer's first step is 0.25 from that of float64"
            assert told[2:5] == [
                ("  a: loss 2.000000, within what rounding explains", ""),
                (f"  b: loss 2.000000, {chosen}", ""),
                (f"  c: loss 2.000000, wrong first at L1.q, 3 gradients in all; {step}", "bad"),
            ]
            table = ["w | 1.5 | 0.1 | 0.2 | 0.3 | a, c"] if verbose else []
            assert told.texts("row") == table
            assert any(text.startswith("next: ") for text in told.texts("head")) is bool(code)
            told.clear()


def test_the_points_around_the_first_divergence_are_shown_in_full_answers(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.diagnosis import diagnosis_text

    points = [
        SimpleNamespace(key=f"p{i}", direct=float(i), shadow=None, gain=2.0, tolerance=0.5)
        for i in range(12)
    ]
    for i, point in enumerate(points):
        point.beyond = i > 4
    for name in ("cause_lines", "evidence_lines", "coverage_lines"):
        monkeypatch.setattr(diagnosis_text, name, lambda result, name=name: [(name, "")])
    monkeypatch.setattr(diagnosis_text, "first_lines", lambda *given: [("short", "")])
    monkeypatch.setattr(render, "say_lines", told.extend)
    result: Any = SimpleNamespace(sentence="so", kind="bug", points=points, first="p5")
    diagnose.show(result)
    assert told == [("short", "")]
    told.clear()
    diagnose.show(result, True)
    assert told[0] == ("so", "bad") and told.texts("") == [
        "cause_lines",
        "evidence_lines",
        "coverage_lines",
    ]
    rows = told.texts("row")
    assert [text.partition(" |")[0] for text in rows] == [
        "  p2",
        "  p3",
        "  p4",
        "> p5",
        "  p6",
        "  p7",
        "  p8",
    ]
    assert rows[3] == "> p5 | 5 | - | 2 | 0.5 | beyond" and rows[2].endswith("| 0.5 | ")
    told.clear()
    for first, shown in (("p1", 5), (None, 0)):
        result.first = first
        diagnose._print_points(result)
        assert len(told.texts("row")) == shown
        told.clear()


def test_arrays_that_are_no_points_are_named_those_with_a_reason_first(tmp_path: Path) -> None:
    near = {"b": "of shape [2]", "a": "of shape [3, 4]", "c": "of shape [5]"}
    model: Any = SimpleNamespace(path="m")
    for written, there in ((None, "save a mapping with -o"), (tmp_path / "x", "name them in")):
        error = dumped_arrays._no_point_error(tmp_path, near, model, written, {"c": "odd"})
        said = "c of shape [5] (odd), b of shape [2], a of shape [3, 4]; "
        assert f"none of its 3 arrays is a point of m: {said}" in str(error)
        assert there in str(error)


def test_a_bar_of_progress_is_filled_in_colour_or_without() -> None:
    def width(text: str) -> int:
        return sum(char == "━" for char in text)

    plain = [terminal.draw_bar(done, 4, colour=False, encoding="utf-8") for done in (0, 2, 4)]
    assert all(len(text) == terminal.BAR and "\x1b" not in text for text in plain)
    assert [width(text) for text in plain] == [0, terminal.BAR // 2, terminal.BAR]
    coloured = terminal.draw_bar(2, 4, colour=True, encoding="utf-8")
    assert "\x1b[" in coloured and width(coloured) >= terminal.BAR // 2
    assert terminal.draw_bar(0, 0, colour=False, encoding="utf-8") == plain[2]
    assert "━" not in terminal.draw_bar(2, 4, colour=False, encoding="ascii")
