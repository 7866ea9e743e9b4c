"""What commands print, part by part, of facts made for it.

Seen red: each of the lines left out, and every condition of one turned around.
"""

import contextlib
import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click
import gguf
import numpy as np
import pytest
import safetensors.numpy

from aprfmt import codecs, errors
from aprfmt.adapters.merge_answers import ChangedWeight
from aprfmt.adapters.merge_command import MergeCommand
from aprfmt.base.protocols import Damage
from aprfmt.cli import attest as attest_command
from aprfmt.cli import (
    check_output,
    damage_report,
    demo,
    logprobs,
    options,
    output_format,
    render,
    tree,
)
from aprfmt.cli import diff as diff_command
from aprfmt.cli import explain as explain_command
from aprfmt.cli import hash_ as hash_command
from aprfmt.cli import hex as hex_command
from aprfmt.cli import repair as repair_command
from aprfmt.cli import set_ as set_command
from aprfmt.cli.ci_reports import ReportCase, sarif_log
from aprfmt.cli.eval import batch as batch_command
from aprfmt.cli.eval import output as eval_output
from aprfmt.cli.inspect import output as inspect_output
from aprfmt.cli.inspect import page as inspect_page
from aprfmt.cli.parity import output as parity_output
from aprfmt.cli.step import output as step_output
from aprfmt.cli.trace import dumped_arrays, page, recording, reference
from aprfmt.errors import OutputError, UsageError
from aprfmt.inference import reported_loss as reported
from aprfmt.measure.traces import PointDiff, TraceDiff
from aprfmt.model import missing_path
from aprfmt.recovery import Repair
from aprfmt.recovery.byte_ranges import Range
from tests.cli.run import aprfmt


@pytest.mark.parametrize("saved", [None, "b.json"])
@pytest.mark.parametrize("other", [None, "other.gguf"])
@pytest.mark.parametrize("skipped", [(), ("speed", "parity")])
@pytest.mark.parametrize("code", [0, 1, 2])
def test_the_answer_of_qa_ends_with_what_is_next(
    code: int, skipped: tuple[str, ...], other: str | None, saved: str | None
) -> None:
    failed = SimpleNamespace(name="loops", where="p1", found="a loop", expected="none", todo="look")
    gates = [SimpleNamespace(name="golden", outcome="FAIL" if code == 1 else "PASS",
                             failed=[failed] * (code == 1))]  # fmt: skip
    gates += [SimpleNamespace(name=name, outcome="NOT_RUN", failed=[]) for name in skipped]
    report: Any = SimpleNamespace(
        gates=gates, exit_code=code, subject=Path("a model.gguf"),
        pronounced=SimpleNamespace(says="the verdict", exit=code, not_compared=()),
    )  # fmt: skip
    lines = check_output.gates_answer(report, saved, other)
    assert lines[0] == ("the verdict", {0: "good", 1: "bad", 2: "warn"}[code])
    texts = [text for text, _ in lines[1:]]
    wanted = []
    if code == 1:
        wanted.append("  golden: loops (p1): a loop; expected none; look")
    if skipped:
        wanted.append("not run: speed, parity")
    if saved:
        wanted.append("baseline written to b.json")
    assert texts[: len(wanted)] == wanted
    rest = texts[len(wanted) :]
    assert len(rest) == (code != 0)
    if code:
        assert rest[0].startswith("next: aprfmt ") and "'a model.gguf'" in rest[0]
        assert ("other.gguf" in rest[0]) is (other is not None)


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("code", [0, 1, 2])
def test_log_probabilities_are_said_equal_or_by_their_distances(code: int, bits: bool) -> None:
    numbers = {"max_difference": 0.5, "mean_abs_difference": 0.25, "mean_kl": 0.125, "max_kl": 1.0}
    table: Any = SimpleNamespace(
        bits=bits,
        scaled=0.1,
        tolerance=SimpleNamespace(rel_l2=0.2),
        to_json=lambda: numbers,
        relation=None,
    )
    verdict: Any = SimpleNamespace(says="agrees", exit=code)
    text, style = logprobs.headline(table, verdict)
    if bits:
        assert (text, style) == ("agrees; log-probabilities: every bit equal", "good")
        return
    said = "agrees; log-probabilities: max 0.5, mean 0.25, KL mean 0.125 max 1 nats"
    assert text.startswith(said) and style == ("bad" if code else "good")
    assert text[len(said) :] == ("" if code else "; 0.1 of the logits' spread, 0.2 allowed")


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("level", "key", "printed"),
    [("warning", "trailing_bytes", "warned"), ("note", "remark", "warned"), ("note", "x", "said")],
)
def test_notes_of_a_file_are_warnings_or_said_with_verbose(
    level: str, key: str, printed: str, verbose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []
    for name in ("_print_file", "_print_hyperparameters", "_print_warnings", "_print_encodings"):
        monkeypatch.setattr(inspect_output, name, lambda *given: None)
    monkeypatch.setattr(render, "warn", lambda text, key: told.append(("warned", text, key)))
    monkeypatch.setattr(render, "say", lambda text, style="": told.append(("said", text)))
    monkeypatch.setattr(render, "line", lambda text, style="": told.append(("line", text)))
    monkeypatch.setattr(render, "print_pairs", lambda rows: None)
    body: Any = {
        "summary": {"line": "m: llama", "kind": "model"}, "architecture": "llama", "tokenizer": {},
        "notes": [{"level": level, "key": key, "where": "m.gguf", "text": "8 bytes follow"}],
    }  # fmt: skip
    inspect_output.show(body, verbose=verbose, metadata=False, full=False)
    assert told[0] == ("said", "m: llama")
    assert (("line", "more: -v, --metadata") in told) is not verbose
    found = [row for row in told if any("8 bytes follow" in text for text in row)]
    if printed == "warned":
        assert found == [("warned", "m.gguf: 8 bytes follow", key)]
    else:
        assert found == ([("said", "note: m.gguf: 8 bytes follow")] if verbose else [])


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_that_stays_erases_the_progress_first(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(render, "progress_wanted", lambda: terminal)
    monkeypatch.setattr(render.STATUS, "_shown", 5)
    render.ProgressLine("scan").say("one of two")
    assert err.getvalue() == ("\r     \rscan: one of two\n" if terminal else "")
    assert render.STATUS._shown == (0 if terminal else 5)


@pytest.mark.parametrize("counted", [False, True])
def test_the_status_is_not_written_over_progress(
    counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times the thread wakes up; what counts says more than what is being done."""
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    status = render.StatusLine()
    status._text, status._counted = "diff: opening", "5 of 9" if counted else ""
    wakes = iter([False, False, True])
    ended: Any = SimpleNamespace(wait=lambda pause: next(wakes), is_set=lambda: False)
    status._write_periodically(ended, 0.0)
    assert err.getvalue().count("diff: opening") == (0 if counted else 2)


@pytest.mark.parametrize("name", ["Q4_K", "exit-codes", "DIFFERENT", "logits"])
def test_explain_prints_every_text_that_it_finds(name: str) -> None:
    rows = aprfmt("explain", name, "--json").json["found"]
    out = aprfmt("explain", name).out
    assert rows and out.count("\n") >= 2 * len(rows)
    flat = " ".join(out.split())
    for row in rows:
        assert f"{row['name']} ({row['section']})" in out
        assert " ".join(row["text"].split()) in flat


@pytest.mark.parametrize("why", [None, "", "its shape is of no point"])
def test_why_an_array_is_no_point_stands_in_its_row(
    why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []
    monkeypatch.setattr(render, "table", lambda rows, *given: tables.append(list(rows)))
    monkeypatch.setattr(render, "line", lambda text: tables.append(text))
    row = {"name": "x", "shape": [2], "key": None} | ({} if why is None else {"why": why})
    for file in ("", "m.map.json"):
        dumped_arrays.show_mapping({"names": [row], "file": file})
    ((cells,), again, line) = tables
    assert cells == again[0] == ("x", "[2]", "-", "", "", "-", why or "")
    assert line.startswith("mapping: m.map.json (correct it")


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
@pytest.mark.parametrize("near", [False, True])
def test_a_path_of_no_model_names_at_most_three_others(
    near: bool, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"llama-{i}.gguf" if near else f"{i}{i}{i}{i}.apr" for i in range(count)]
    found = [tmp_path / name for name in names]
    for path in found:
        path.touch()
    monkeypatch.setattr(missing_path, "model_candidates", lambda folder: found)
    said = missing_path.missing_path_message(tmp_path / "llama.gguf")
    assert said.startswith(f"{tmp_path / 'llama.gguf'}: no such file or folder")
    assert sum(str(path) in said for path in found) == min(count, 3)
    assert ("; near names: " in said) is (near and count > 0)
    assert ("; models there: " in said) is (not near and count > 0)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1001, "1.0 kB"), (999_999, "1000.0 kB"),
        (1_000_000, "1.0 MB"), (10**9, "1.0 GB"), (10**12, "1.0 TB"), (25 * 10**14, "2500.0 TB"),
    ],
)  # fmt: skip
def test_a_size_is_said_in_the_unit_that_it_reaches(count: int, text: str) -> None:
    assert render.size_text(count) == text


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("form", ["human", "json", "agent"])
def test_progress_is_for_people_at_a_terminal(
    form: str, quiet: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setattr(render, "is_flag_set", lambda flag: quiet)
    monkeypatch.setattr(output_format, "answer_format", lambda: form)
    assert render.progress_wanted() is (terminal and not quiet and form != "agent")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([True, False, True, True, False], "10110"), ([True] * 6, "True in all 6 layers"),
        ([2, 2, 2, 2, 2], "2 in all 5 layers"), ([1, 2, 3, 4, 5], "[1, 2, 3, 4, 5]"),
        ([True, False], "[True, False]"), ((1, 0, 1, 1, 0), "(1, 0, 1, 1, 0)"), (0.5, "0.5"),
    ],
)  # fmt: skip
def test_a_value_of_each_layer_takes_one_cell(value: object, text: str) -> None:
    assert inspect_output._value_cell(value) == text


@pytest.mark.parametrize("part", ["bytes", "blocks", "fields"])
def test_hex_prints_what_it_was_asked_for(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(render, "line", lambda text: printed.append("bytes"))
    monkeypatch.setattr(hex_command, "_print_blocks", lambda body: printed.append("blocks"))
    monkeypatch.setattr(hex_command, "_print_fields", lambda body: printed.append("fields"))
    body: Any = {"bytes": {"bytes": "0001", "offset": 4}, "blocks": {"blocks": []},
                 "fields": {"fields": []}}[part]  # fmt: skip
    hex_command.show(body)
    assert printed == [part]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("written", [None, Path("s.json")])
@pytest.mark.parametrize("code", [0, 1, 2])
def test_an_attestation_is_printed_with_what_differs_and_what_is_next(
    code: int, written: Path | None, verbose: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(render, "say", lambda text, style="": told.append((text, style)))
    different = [("  t1: block 3 differs", "bad")] * (code == 1)
    monkeypatch.setattr(attest_command, "_difference_lines", lambda found, verbose: different)
    found: Any = SimpleNamespace(
        pronounced=SimpleNamespace(says="the verdict", exit=code), base="a b", model="q.gguf",
        remark="of the base" * (code == 2),
    )  # fmt: skip
    attest_command.show(found, written, verbose)
    texts = [text for text, _ in told]
    assert texts[0] == "the verdict"
    assert ("  t1: block 3 differs" in texts) is (code == 1)
    assert ("  statement written to s.json" in texts) is (written is not None)
    assert ("  remark: of the base" in texts) is (code == 2)
    assert any("aprfmt diagnose 'a b' q.gguf" in text for text in texts) is (code > 0)


def test_types_are_explained_with_their_numbers_in_gguf() -> None:
    """gguf-py has the numbers; what GGUF has no number for says none."""
    texts = explain_command._type_texts()
    numbers = {kind.name.removeprefix("MOSTLY_"): int(kind) for kind in gguf.LlamaFileType}
    known = {name: numbers[name] for name in texts if name in numbers}
    asked = [name for name in known if "encoding its role asks for" in texts[name]]
    assert len(asked) > 10
    for name in asked:
        assert texts[name].endswith(f" general.file_type {known[name]}."), texts[name]
    assert not any("file_type" in text for name, text in texts.items() if name.startswith("GPTQ"))


def test_encodings_are_explained_with_their_codes() -> None:
    """gguf-py and safetensors have the codes; what has none of theirs names none."""
    texts = explain_command._encoding_texts()
    numbers = {kind.name: int(kind) for kind in gguf.GGMLQuantizationType}
    theirs = {*safetensors.numpy._TYPES, "BF16"}
    codes = {
        name: text.partition("bits a weight; ")[2].partition(".")[0].split(", ")
        for name, text in texts.items()
        if "bits a weight; " in text
    }
    assert theirs <= codes.keys()
    for name in codes.keys() & (theirs | numbers.keys()):
        of_gguf = [f"ggml id {numbers[name]}"] if name in numbers else []
        assert [code for code in codes[name] if "ggml" in code] == of_gguf
        of_theirs = [f"safetensors {name}"] if name in theirs else []
        assert [code for code in codes[name] if "safetensors" in code] == of_theirs


@pytest.mark.parametrize(
    ("says", "todo"),
    [
        ("named", ["mean", "sum"]), ("likely", ["mean", "sum"]), ("ambiguous", []),
        ("unmeasured", []), ("unexplained", []),
    ],
)  # fmt: skip
def test_a_wrong_loss_has_the_remedy_of_its_first_explanation(
    says: str, todo: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistakes = {name: SimpleNamespace(todo=f"mend {name}") for name in ("mean", "sum", "shift")}
    monkeypatch.setattr(reported, "MISTAKES", mistakes)
    guesses = [reported.LossGuess(("mean", "sum"), 1.0), reported.LossGuess(("shift",), 1.0)]
    answer: Any = SimpleNamespace(says=says, guesses=guesses)
    found = batch_command.mistake_remedy(answer)
    if todo:
        assert found == "mend mean; mend sum"
    else:
        assert "mend" not in found and found


@pytest.mark.parametrize("odd", [(), (1,), (0, 2)])
def test_a_demo_whose_steps_end_otherwise_than_they_should_fails(
    odd: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [
        {"command": f"aprfmt step{i}", "exit": 2 if i in odd else i % 2, "expected": i % 2}
        for i in range(3)
    ]
    monkeypatch.setattr(demo, "run_steps", lambda folder: steps)
    done = aprfmt("demo", "--format", "agent")
    assert done.code == (1 if odd else 0)
    word = "FAIL" if odd else "PASS"
    assert done.out.startswith(f"{word}: {3 - len(odd)} of 3 steps gave the exit code")
    assert [f"aprfmt step{i}" in done.out for i in range(3)] == [i in odd for i in range(3)]


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("why", ["", "not finite on one side"])
def test_a_points_row_says_its_verdict_and_its_tolerance_or_reason(why: str, beyond: bool) -> None:
    point = PointDiff("L0.out", 0.5, 0.25, (0,), 0.125, beyond, why=why)
    word = "BEYOND" if beyond else "not comparable" if why else "within"
    wanted = ("-", "-", word, why) if why else ("0.5", "0.25", word, "0.125")
    assert reference._point_row(point) == ("L0.out", *wanted)


@pytest.mark.parametrize("known", [False, True])
def test_a_tensors_row_of_a_step_has_a_dash_for_what_is_not_known(known: bool) -> None:
    update = SimpleNamespace(moved=3, elements=12, norm=0.5, step=None)
    row: Any = SimpleNamespace(
        key="L0.attn_q", verdict="agrees", norm=2.0, why="by its moments",
        gradient=SimpleNamespace(norm=0.125) if known else None, computed=None,
        update=update if known else None,
    )  # fmt: skip
    middle = ("0.125", "-", "25.0%", "0.5", "-") if known else ("-",) * 5
    assert step_output._cells(row) == ("L0.attn_q", "agrees", "2", *middle, "by its moments")


def test_kinds_of_errors_are_explained_by_their_classes() -> None:
    texts = explain_command._error_texts()
    assert {"format", "usage", "conversion", "unsupported"} <= set(texts)
    for kind in ("format", "usage"):
        name = f"{kind.capitalize()}Error"
        value = getattr(errors, name)
        assert texts[kind].startswith(f"{name} ({value.__mro__[1].__name__}")
        assert texts[kind].endswith(value.__doc__)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (60, "1 min 0 s"), (200, "3 min 20 s"),
        (3599, "59 min 59 s"), (3600, "1 h 0 min"), (7500, "2 h 5 min"), (90000, "25 h 0 min"),
    ],
)  # fmt: skip
def test_a_time_is_said_in_the_unit_that_it_reaches(seconds: float, text: str) -> None:
    assert render.duration_text(seconds) == text


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("count", [0, 2])
def test_hash_prints_hashes_or_what_is_not_as_the_manifest_says(
    count: int, compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("say", "line", "say_verdict"):
        monkeypatch.setattr(render, name, lambda text, *given, **more: told.append(text))
    tensors: list[Any] = [
        {"key": f"t{i}", "decoded": "d" * 64, "raw": ["r" * 64], "encoding": "F32"}
        for i in range(2)
    ]
    tensors += [{"key": f"late{i}", "not_reached": "after 1 s"} for i in range(count)]
    failures = [{"key": f"t{i}", "what": "bytes differ"} for i in range(count)]
    body: Any = {"tensors": tensors, "failures": failures, "written": "m.json"}
    hash_command.show(body, SimpleNamespace(says="verdict", exit=1) if compared else None)  # type: ignore[arg-type]
    if compared:
        assert told == [*(f"FAIL t{i}: bytes differ" for i in range(count)), "verdict"]
        return
    assert [line.split() for line in told[:2]] == [
        ["d" * 64, "r" * 16, "F32", f"t{i}"] for i in range(2)
    ]
    late = ["2 tensors not hashed, after 1 s: late0, late1"] * (count > 0)
    assert told[2:] == [*late, "wrote m.json"]


@pytest.mark.parametrize("explained", [False, True])
def test_flips_and_experts_of_a_pair_say_whether_rounding_explains_them(
    explained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(render, "line", told.append)
    flip = SimpleNamespace(
        position=3, a=5, b=6, margin_a=0.5, margin_b=0.25, largest=1.5, explained=explained
    )
    logits = SimpleNamespace(
        rel_l2=0.5, max_abs=2.0, argmax=0.75, rows=4, k=5, top_k=0.5, kl_mean=0.25, kl_max=1.0,
        flips=[flip] * 7,
    )  # fmt: skip
    losses = SimpleNamespace(
        reference=2.0, forward=2.5, own=None, own_off=None, own_bound=None, why="not asked"
    )
    expert = SimpleNamespace(
        key="L1.experts", position=2, gone=(1,), came=(4,), gap=None, explained=explained
    )
    pair: Any = SimpleNamespace(logits=logits, losses=losses, experts=[expert] * 9)
    parity_output.show_outcomes(pair)
    word = "within rounding" if explained else "beyond rounding"
    flips = [line for line in told if "position 3: 5 (by 0.5) became 6 (by 0.25)" in line]
    experts = [line for line in told if "L1.experts, position 2: experts [1] became [4]" in line]
    assert (len(flips), len(experts)) == (5, 8)
    assert all(line.endswith(word) for line in (*flips, *experts))
    assert any("reference 2.000000, other forward 2.500000 (+0.5), its own loss not asked" in line
               for line in told)  # fmt: skip
    assert len(told) == 15


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("config", [None, "m/config.json"])
@pytest.mark.parametrize("imports", [(), ("os.system", "torch.x")])
def test_facts_of_a_file_are_printed_one_by_one(
    imports: tuple[str, ...], config: str | None, files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[Any] = []
    monkeypatch.setattr(render, "print_pairs", pairs.extend)
    body: Any = {
        "path": "m.gguf", "format": "gguf", "version": "3", "file_bytes": 2_000_000,
        "files": ["x"] * files, "tensor_count": 7, "config": config, "imports": list(imports),
    }  # fmt: skip
    inspect_output._print_file(body)
    found = dict(pairs)
    assert (found["file"], found["format"]) == ("m.gguf", "gguf 3")
    assert found["size"] == "2.0 MB" + (" in 3 files" if files > 1 else "") + ", 7 tensors"
    assert found.get("config") == config
    assert found.get("pickle imports") == (", ".join(imports) or None)


def test_the_table_of_a_step_has_a_row_for_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[Any] = []
    monkeypatch.setattr(
        render, "table", lambda rows, heads, justify: tables.append((rows, heads, justify))
    )
    monkeypatch.setattr(step_output, "_cells", lambda row: (row,) * 9)
    step_output._table(SimpleNamespace(tensors=["a", "b"]))  # type: ignore[arg-type]
    ((rows, heads, justify),) = tables
    assert [row[0] for row in rows] == ["a", "b"] and len(heads) == len(justify) == 9


@pytest.mark.parametrize("names", [("a",), ("a.b", "a.c"), ("a.b", "a.b.c"), ("a.b.c", "d", "a.e")])
def test_a_tree_counts_every_tensor_once(names: tuple[str, ...]) -> None:
    sizes = {name: 10**i for i, name in enumerate(names)}
    tensors: Any = [
        (name, SimpleNamespace(nbytes=size, shape=(size,), encoding="I8"))
        for name, size in sizes.items()
    ]

    def check(node: tree.TreeNode, prefix: str) -> None:
        leaf = "shape" in node
        below = [name for name in names if name == prefix or (not leaf and name.startswith(prefix))]
        own = [prefix] if leaf else [name for name in below if name != prefix.rstrip(".")]
        assert node["tensors"] == len(own) and node["nbytes"] == sum(sizes[name] for name in own)
        assert leaf == (not node["children"])
        for child in node["children"]:
            end = "" if "shape" in child else "."
            check(child, f"{prefix}{child['name']}{end}")

    check(tree.build_tree(tensors), "")


def point(key: str, rel_l2: float | None, tolerance: float = 1e-3, **more: Any) -> PointDiff:
    apart = None if rel_l2 is None else rel_l2 * 2
    beyond = rel_l2 is not None and rel_l2 > tolerance
    return PointDiff(key, rel_l2, apart, None, tolerance, beyond, **more)


@pytest.mark.parametrize(
    ("points", "text", "style"),
    [
        ((), "no point could be compared", "bad"),
        (
            (point("L0.q", None, why="other shapes"), point("L0.k", None, why="no values")),
            "no point could be compared: other shapes",
            "bad",
        ),
        (
            (point("L0.q", 0.0), point("L0.k", 0.0)),
            "all 2 points within tolerance; nearest to its tolerance: L0.q, relL2 0 of 0.001; "
            "every value equal",
            "good",
        ),
        (
            (point("L0.q", 2e-4), point("L0.k", 0.0), point("out", 1e-4, 2e-4)),
            "all 3 points within tolerance; nearest to its tolerance: out, relL2 0.0001 of "
            "0.0002; values differ at 2 of 3 points",
            "good",
        ),
        (
            (point("L0.q", 2e-4), point("L0.k", None, why="other shapes")),
            "1 of 2 points compared, all within tolerance; 1 NOT-RUN; nearest to its tolerance: "
            "L0.q, relL2 0.0002 of 0.001; values differ at 1 of 2 points",
            "warn",
        ),
        (
            (point("L0.q", 2e-4), point("L0.k", 2e-3), point("out", 3e-3)),
            "first point beyond tolerance: L0.k; 2 of 3 points beyond",
            "bad",
        ),
    ],
)
def test_a_traces_verdict_counts_its_points(
    points: tuple[PointDiff, ...], text: str, style: str
) -> None:
    first = next((point.key for point in points if point.beyond), None)
    assert reference.reference_verdict(TraceDiff(points, first, (), ())) == (text, style)


def test_points_of_other_rows_have_no_verdict() -> None:
    rows = [point("L0.q", 0.0), point("L0.k", 5.0, why="rows 0-3 | 0-2"), point("out", 0.0)]
    found = TraceDiff(tuple(rows), "L0.k", (), (), other_rows=("L0.k",))
    assert reference.reference_verdict(found) == (
        "no verdict: 1 of 3 points hold other rows, the first is L0.k (rows 0-3 | 0-2); trace "
        "both with the same --positions",
        "bad",
    )


def test_a_heat_map_has_the_positions_that_most_points_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest are not those of most; more than are shown are grouped by their largest."""
    monkeypatch.setattr(page, "MOST", 3)
    few, many = (2, 3, 4, 5), tuple(range(9))
    rows: dict[str, list[float | None]] = {
        "L0.q": [1.0, 2.0, 7.12345, None], "L1.q": [4.0, 3.0, None, None], "out": [1.0] * 4,
        "L0.k": [5.0] * 9, "L1.k": [1.0], "L1.v": [1.0, 2.0],
    }  # fmt: skip
    positions = {
        "L0.q": few, "L1.q": few, "out": few, "L0.k": many, "L1.k": (2,), "L1.v": (2, 3, 4),
    }  # fmt: skip
    bounds = {"L1.q": (1e-3, True), "out": (2e-3, False)}
    maps, names = page.heat_maps(rows, positions, bounds)
    assert names == ["2 to 3", "4 to 5"]
    assert maps == [
        {"point": "q", "rows": ["L0", "L1"], "values": [[2.0, 7.123], [4.0, None]],
         "tolerances": [None, 1e-3], "beyond": [False, True]},
        {"point": "out", "rows": ["model"], "values": [[1.0, 1.0]],
         "tolerances": [2e-3], "beyond": [False]},
    ]  # fmt: skip
    assert page.heat_maps({"L1.k": [1.0]}, {"L1.k": (2,)}, {}) == ([], [])
    assert page.heat_maps({"out": rows["out"][:3]}, {"out": few[:3]}, {})[1] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("places", "name"),
    [
        (("L0.attn_q.weight (blk.0.attn_q.weight)",), "blk.0.attn_q.weight"),
        (("model.norm.weight", "lm_head.weight"), "model.norm.weight"),
        (("config.json: x", "L1.attn_q.bias (h.1.b.bias)", "a.weight"), "h.1.b.bias"),
        (("general.architecture", "L0.attn_q.weight (packed)"), ""),
        ((), ""),
    ],
)
def test_the_next_command_looks_at_the_first_stored_weight(
    places: tuple[str, ...], name: str
) -> None:
    assert check_output._first_tensor_name(places) == name


@pytest.mark.parametrize("divergence", [False, True])
def test_a_loss_beside_another_models_says_how_far_they_are_apart(
    divergence: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.cli.run_options.run_headline", str)
    monkeypatch.setattr(eval_output, "window_rows", lambda body: [("windows", "2")])
    facts = {
        "loss": 2.5, "perplexity": 12.1825, "uniform_loss": 3.5, "vocab_size": 33,
        "loss_tokens": 7, "samples": 2, "skipped": [],
    }  # fmt: skip
    apart = {"kl": 0.25, "max_kl": 1.5, "top1": 0.875, "correct_change": -0.0125}
    body: Any = {**facts, "run": "mine"}
    other: Any = {
        **facts, "run": "theirs", "loss": 2.75, "skipped": ["s"],
        "divergence": apart if divergence else None,
    }  # fmt: skip
    eval_output.show(body, None, other)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    last = [
        "this model against the other", "mean KL 0.25 nats per token", "max KL 1.5 nats",
        "same top token 87.50 %", "right token's probability -0.012500 on average",
    ]  # fmt: skip
    assert lines == [
        "mine", "windows 2", "loss 2.500000 nats per token", "perplexity 12.1825",
        "uniform guess 3.5000 nats = ln(33)", "scored 7 labels of 2 samples",
        "theirs", "loss 2.750000 nats per token", "perplexity 12.1825",
        "uniform guess 3.5000 nats = ln(33)", "scored 7 labels of 2 samples, 1 skipped",
        *(last if divergence else []),
    ]  # fmt: skip


@pytest.mark.parametrize("shown", [1, 4])
@pytest.mark.parametrize("more", [0, 1, 7])
def test_hex_says_how_many_fields_it_leaves_out(
    more: int, shown: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A field's bytes are followed by dots where it has more of them."""
    fields = [{"offset": 16 * i, "bytes": "4142", "nbytes": 2 + i, "name": f"f{i}", "value": i}
              for i in range(shown)]  # fmt: skip
    body: Any = {"fields": fields, "count": shown + more}
    hex_command.show(body)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:shown]] == [
        [f"{16 * i:08x}", "41", "42", *[".."] * (i > 0), f"f{i}", "=", str(i)] for i in range(shown)
    ]
    assert lines[shown:] == [f"... {more} more (--limit)"] * (more > 0)


@pytest.mark.parametrize("patched", [None, 0, 12])
def test_a_change_in_place_is_said_with_its_bytes(
    patched: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    change: Any = SimpleNamespace(
        key="general.name", how="set", old="a", new="b", old_type="string", new_type="string"
    )
    set_command.show_changes([change], Path("m.gguf"), patched)
    lines = capsys.readouterr().out.splitlines()
    said = [f"changed {patched} bytes of m.gguf in place; every tensor lies where it lay"]
    assert lines == [*said * (patched is not None), "  general.name: a -> b"]


@pytest.mark.parametrize("unproven", [[], [(0, 4)]])
@pytest.mark.parametrize("proof", ["", *repair_command.PROOFS])
def test_a_repair_is_good_where_every_byte_is_proven(
    proof: str, unproven: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(render, "say", lambda text, style="": told.append((text, style)))
    found = Repair(2000, [Range(10, 40, "a tensor"), Range(50, 55, "lost")], unproven, proof)
    repair_command.show(found, Path("out.gguf"))
    assert [text for text, _ in told[:2]] == ["10..40  30 B  a tensor", "50..55  5 B  lost"]
    ((text, style),) = told[2:]
    assert style == ("good" if proof and not unproven else "warn")
    said = repair_command.PROOFS.get(proof, "nothing proves the rest")
    assert text == f"wrote out.gguf: 2.0 kB, 35 B of them new; {said}"
    assert ("nothing proves" in text) is not bool(proof)


@pytest.mark.parametrize("count", range(1, 8))
def test_weights_with_one_mistake_are_shown_and_the_rest_is_counted(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to four have a line each; of more, three and a number: no line counts a single one."""
    wrong = [ChangedWeight(f"w{i}", "", 2.0, 0.0, "twice", "added twice")
             for i in range(count)]  # fmt: skip
    right = [ChangedWeight(f"r{i}", "", 1.0, 0.0, "once") for i in range(3)]
    found: Any = SimpleNamespace(
        adapter="ad",
        found="mixed",
        text=f"mixed ({3 + count} weights)",
        weights=[*right, *wrong],
        says=[],
        others=[],
        differs=True,
        undecided=False,
    )
    verdict: Any = SimpleNamespace(exit=1, not_compared=(), says="said")
    diff_command.show_adapter(found, verdict, Path("a"), Path("b"), MergeCommand("aprfmt convert"))
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first == f"ad is merged into b, of the base a: mixed ({3 + count} weights)"
    assert last == "next: aprfmt convert"
    shown = count if count <= 4 else 3
    assert lines[:shown] == [f"  w{i}: twice: added twice" for i in range(shown)]
    left = count - shown
    assert lines[shown:] == [f"  {left} more weights: twice: added twice"] * (left > 0)


@pytest.mark.parametrize(
    ("file", "uri"),
    [
        ("m.gguf", "m.gguf"), ("a folder/m 1.gguf", "a%20folder/m%201.gguf"),
        ("50%#.apr", "50%25%23.apr"), ("https://h.org/a b?x=1#2", "https://h.org/a b?x=1#2"),
        ("hf://owner/name@v1", "hf://owner/name@v1"),
    ],
)  # fmt: skip
def test_an_address_is_itself_in_sarif_and_a_path_is_quoted(file: str, uri: str) -> None:
    log = sarif_log("validate", [ReportCase("shapes", file, "fail", "wrong")], 1)
    (place,) = log["runs"][0]["results"][0]["locations"]
    assert place == {"physicalLocation": {"artifactLocation": {"uri": uri}}}


@pytest.mark.parametrize("more", [-1, 0, 1, 50])
def test_a_value_is_cut_at_the_width_and_says_that_it_was(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * (render.WIDEST + more)
    found = render.field_text("name", text)
    assert found == (text if more <= 0 else text[: render.WIDEST - 3] + "...")
    assert len(found) <= render.WIDEST
    monkeypatch.setattr(output_format, "answer_format", lambda: "agent")
    assert render.field_text("name", text) == text


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"long": "x" * 99, "n": 1}, {"long": "x" * 99, "n": 2}, "n: 1 | 2"),
        ({"n": 1, "m": 3}, {"n": 1}, "m: 3 | -"), ({}, {"n": None}, "n: - | null"),
        ({"n": {"a": 1, "b": [2]}}, {"n": {"a": 1, "b": []}, "m": 0}, "n.b: [2] | [], m: - | 0"),
        ({x: 1 for x in "abcde"}, {}, "a: 1 | -, b: 1 | -, c: 1 | -, d: 1 | -, 1 more (--json)"),
        ({"n": 1}, None, "{'n': 1} | -"), (1, 2, "1 | 2"), ({"n": 1}, {"n": 1.0}, None),
    ],
)  # fmt: skip
def test_of_two_objects_the_parts_that_differ_are_shown(a: Any, b: Any, says: str | None) -> None:
    """Seen red: both sides were cut before the part that differs, and looked the same."""
    whole = f"{render.field_text('name', a)} | {render.field_text('name', b)}"
    assert render.sides_text("name", a, b) == (says or whole)


@pytest.mark.parametrize("returned", [0, 1, 2, None])
@pytest.mark.parametrize("silent", [False, True])
def test_a_step_of_the_demo_ends_as_its_command_does(returned: int | None, silent: bool) -> None:
    @click.group()
    def group() -> None:
        pass

    @group.command()
    def step() -> int | None:
        print("shown")
        return returned

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert demo.run_command(group, ["step"], silent) == (returned or 0)
    assert out.getvalue() == ("" if silent else "shown\n")


@pytest.mark.parametrize("encoding", ["Q4_0", "Q8_0", "Q6_K"])
def test_a_block_that_the_file_ends_in_has_its_fields_and_no_more(encoding: str) -> None:
    """Bytes behind the block are another's: they are no field of it."""
    layout = codecs.codec(encoding).layout
    assert layout is not None
    block = bytes(range(layout.itemsize))
    alone = hex_command.block_row(encoding, block, 0, 0)
    assert "".join(field["bytes"] for field in alone["fields"]) == block.hex()
    more = hex_command.block_row(encoding, block + b"\xff" * layout.itemsize, 0, 0)
    assert more["fields"] == alone["fields"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_no_cause_explains_is_named_once_and_counted(count: int) -> None:
    rows = [
        SimpleNamespace(key=f"L{i}.ffn_up.weight", name_a="", name_b=f"blk.{i}.up", verdict="BUG")
        for i in range(count)
    ]
    report: Any = SimpleNamespace(
        causes=(), worst=lambda: rows, hyperparameters=(), tokenizer=(), metadata=(), asked=(),
        beside=None, tensors=(), other_model="", outside_tower=(),
    )  # fmt: skip
    more = f", and {count - 1} more (-v)" if count > 1 else ""
    lines = list(diff_command._other_difference_lines(report))
    assert lines == [(f"  BUG: blk.0.up (L0.ffn_up.weight){more}", "bad")]


def test_a_status_line_keeps_no_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "progress_wanted", lambda: True)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    made: list[threading.Thread] = []
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        made.append(thread)
        started(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    status = render.StatusLine()
    status.begin("diff", "reading")
    status.end()
    (thread,) = made
    assert thread.daemon


def test_a_weight_is_odd_if_it_is_not_merged_once_or_something_is_said_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each alone is enough for a line; neither is none."""
    rows = [("once", ""), ("once", "in another type"), ("not merged", ""), ("twice", "added twice")]
    found: Any = SimpleNamespace(
        adapter="ad", found="mixed", text="mixed", says=[], others=[], differs=True,
        undecided=False,
        weights=[ChangedWeight(f"w{i}", "", 1.0, 0.0, *row) for i, row in enumerate(rows)],
    )  # fmt: skip
    verdict: Any = SimpleNamespace(exit=1, not_compared=(), says="said")
    diff_command.show_adapter(found, verdict, Path("a"), Path("b"), MergeCommand("aprfmt convert"))
    _, *lines, _ = capsys.readouterr().out.splitlines()
    assert sorted(line.split(":")[0].strip() for line in lines) == ["w1", "w2", "w3"]


@pytest.mark.parametrize("shown", [0, 5])
@pytest.mark.parametrize(
    ("kinds", "partial", "code"),
    [
        ([], False, 0), ([], True, 0), (["truncated"], False, 2), (["truncated"], True, 0),
        (["format"], True, 2), (["truncated", "format"], True, 2),
    ],
)  # fmt: skip
def test_damage_is_a_line_of_its_own_and_a_code(
    kinds: list[str], partial: bool, code: int, shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a terminal shows of the work is erased first, or the line would be behind it."""
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(render.STATUS, "_shown", shown)
    damage: Any = [Damage("m.gguf", f"{kind} here", ("t",), kind) for kind in kinds]
    rows, found = damage_report.report_damage(damage, partial=partial)
    assert (len(rows), found) == (len(kinds), code)
    text = err.getvalue()
    if not kinds:
        assert text == ""
        return
    begin = "aprfmt: " if code else "warning: "
    erased = "\r" + " " * shown + "\r" if shown else ""
    assert text.startswith(f"{erased}{begin}m.gguf: ") and text.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "status"),
    [(None, None), ("{% if %}", "error"), ("{{ messages[0].content }}", "ok")],
)
def test_a_page_shows_conversations_as_the_template_renders_them(
    template: str | None, status: str | None
) -> None:
    found: Any = SimpleNamespace(
        template=template, special_token_texts={}, carried=SimpleNamespace(where="m")
    )
    rows = inspect_page.template_previews(found)
    assert bool(rows) is (template is not None)
    assert {row["status"] for row in rows} == ({status} if status else set())
    assert all(row["name"] and row["lines"] for row in rows)


def test_a_page_is_named_by_its_file_or_the_folder_of_a_file_of_no_name(tmp_path: Path) -> None:
    for path, title in (
        ("llama/model.safetensors", "llama"),
        ("llama/model-q4.gguf", "model-q4.gguf"),
        ("m", "m"),
    ):
        assert inspect_page._model_title(tmp_path / path) == title


def test_values_lines_and_tokens_of_a_page_are_cut_and_counted() -> None:
    text, lines = inspect_page._metadata_text, inspect_page._split_lines
    most = "x" * inspect_page.LONGEST
    assert text(most) == most and text(3) == "3" and text(None) == "None"
    assert text(most + "y") == f"{most}... ({len(most) + 1} characters)"
    assert text(list(range(8))) == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert text(list(range(9))) == "9: [0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert text(["a" * 41, (1, 2)]) == f"[{'a' * 40}, [1, 2]]"
    assert lines(None) == [] and lines("") == [""] and lines("a\nb") == ["a", "b"]
    long = "\n" * inspect_page.LINES
    assert lines(long[:-1]) == [""] * inspect_page.LINES
    assert lines(long) == [*[""] * inspect_page.LINES, "... 1 more lines"]
    tokens = [f"t{i}" for i in range(130)]
    words = SimpleNamespace(
        tokens=tokens,
        types=[1] * 127 + [3, 6, 99],
        kind="bpe",
        ids={"bos": 127, "eos": 128},
        added=[127, 128, 500],
        merges=None,
        pre="p",
    )
    found: Any = SimpleNamespace(
        vocabulary=words,
        stop_ids=(128, 129),
        template=None,
        adds_bos=True,
        adds_eos=None,
        special_token_texts={},
        carried=SimpleNamespace(where="m"),
    )
    body: Any = inspect_page._tokenizer_json(found, False)
    assert (body["count"], body["merges"], body["whole"]) == (130, 0, False)
    assert (body["bos"], body["eos"], body["kind"], body["pre"]) == (True, None, "bpe", "p")
    assert body["special"] == [
        [127, "t127", "control", "bos"],
        [128, "t128", "byte", "eos, ends a text"],
    ]
    assert body["specials"] == 2 and body["suspicious"] == body["previews"] == []
    assert [row[0] for row in body["tokens"]] == list(range(0, 130, 2))
    whole: Any = inspect_page._tokenizer_json(found, True)
    assert [row[0] for row in whole["tokens"]] == list(range(130)) and whole["whole"] is True
    assert whole["tokens"][129] == [129, "t129", ""] and whole["tokens"][0] == [0, "t0", ""]
    words.added = list(range(130)) + list(range(1000))
    many: Any = inspect_page._tokenizer_json(found, False)
    assert len(many["special"]) == inspect_page.SPECIALS and many["specials"] == 260


def test_options_of_a_page_need_one_and_it_must_not_exist(tmp_path: Path) -> None:
    for stats, vocabulary, says in (
        (True, False, "--stats goes"),
        (False, True, "--vocabulary goes"),
        (True, True, "--stats and --vocabulary goes"),
    ):
        with pytest.raises(UsageError, match=f"{says} into a page; add --html FILE"):
            inspect_page.PageRequest(None, stats, vocabulary, False).check()
        inspect_page.PageRequest(tmp_path / "new.html", stats, vocabulary, False).check()
    inspect_page.PageRequest(None, False, False, True).check()
    there = tmp_path / "there.html"
    there.write_text("")
    inspect_page.PageRequest(there, False, False, True).check()
    with pytest.raises(OutputError):
        inspect_page.PageRequest(there, False, False, False).check()


def test_a_size_is_read_in_the_unit_that_it_names() -> None:
    """Units are powers of 1000, in either case, with B or without; a part of one is a size."""
    none: Any = None
    for at, unit in enumerate(("", "K", "M", "G", "T")):
        for text in (f"2500{unit}", f" 2500{unit.lower()}b ", f"2500.0{unit}B"):
            assert options.parse_size(none, none, text) == 2500 * 1000**at
    assert options.parse_size(none, none, "1.5T") == 1_500_000_000_000
    assert options.parse_size(none, none, None) is None
    for text in ("999", "0.5K", "-2G", "2P", "G", "", "nan", "1e40T"):
        with pytest.raises(click.BadParameter):
            options.parse_size(none, none, text)


def test_a_text_has_the_ids_of_all_tokens_that_decode_to_it() -> None:
    """By its bytes where they are given; the vocabulary is decoded once, at the first text."""
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.extend(ids)
        return ["a", "b", "a", "\ufffd"][ids[0]]

    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=decode), hyper={"vocab_size": 4})
    ids = logprobs.piece_to_ids(model)
    assert decoded == []
    assert [ids(text, None) for text in ("a", "b", "c")] == [[0, 2], [1], []]
    assert ids("?", b"b") == [1] and ids("?", b"\xff") == [3]
    assert decoded == [0, 1, 2, 3]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_points_that_are_not_known_are_warned_of_up_to_a_number(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(render, "warn", lambda text, key: said.append(text))
    names = [f"p{at}" for at in range(recording.UNKNOWN + more)]
    recording.warn_of_unknown("run.npz", dict.fromkeys(names, "no point"))
    assert said == [f"run.npz: {name}: no point" for name in names[: recording.UNKNOWN]]


def test_a_model_that_does_not_decode_is_opened_to_change_its_texts_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy needs the weights: it is refused, and the line says what can be done."""

    def opened(path: Path, damaged: bool = False) -> Any:
        if not damaged:
            raise errors.CodecError("a block is cut off")
        return "opened"

    monkeypatch.setattr("aprfmt.model.open_model", opened)
    assert set_command.open_to_edit(Path("m"), True) == cast(Any, "opened")
    with pytest.raises(errors.CodecError, match="a block is cut off; --in-place changes the text"):
        set_command.open_to_edit(Path("m"), False)
    monkeypatch.setattr("aprfmt.model.open_model", lambda path, damaged=False: damaged)
    assert set_command.open_to_edit(Path("m"), True) is cast(Any, False)


@pytest.mark.parametrize(
    "words",
    [
        ("qa", "m", "--device", "cuda"),
        ("qa", "m", "--also", "torch:cuda"),
        ("parity", "m", "--between", "cpu", "cuda"),
        ("parity", "m", "--between", "cupy", "cpu"),
    ],
    ids=" ".join,
)
def test_a_gpu_that_is_not_there_is_said_before_anything_is_read(
    words: tuple[str, ...], demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `--dry-run` it is not asked: that opens the model, and runs nothing."""
    from aprfmt.checks.gates import running
    from aprfmt.inference import device

    asked: list[str] = []

    def opened(*given: object, **more: object) -> None:
        asked.append("opened")
        raise errors.UsageError("it was opened")

    monkeypatch.setattr(device, "gpu_problem", lambda backend: f"no GPU for {backend}")
    monkeypatch.setattr(running, "run", opened)
    monkeypatch.setattr("aprfmt.cli.parity.modes.prepare_runs", opened)
    made = [demo_model if word == "m" else word for word in words]
    done = aprfmt(*made)
    assert done.code == 2 and "no GPU for" in done.err and not asked
    if words[0] == "parity":
        assert "no GPU" not in aprfmt(*made, "--dry-run").err and asked == ["opened"]


def test_the_digests_of_parameters_are_not_made_where_their_file_stays(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.model import role_manifest

    held = tmp_path / "roles.json"
    held.write_text("kept")
    made: list[int] = []
    usual = role_manifest.parameter_rows

    def noted(model: Any, ranks: int, progress: Any) -> Any:
        made.append(ranks)
        return usual(model, ranks, progress)

    monkeypatch.setattr(role_manifest, "parameter_rows", noted)
    monkeypatch.setattr(role_manifest, "roles_path", lambda path: held)
    with pytest.raises(errors.OutputError, match="exists"):
        hash_command._write_role_manifest(demo_model, None, 1, False)
    assert not made and held.read_text() == "kept" and [*tmp_path.iterdir()] == [held]
    assert hash_command._write_role_manifest(demo_model, None, 2, True) == 0
    assert made == [2] and held.read_text() != "kept" and [*tmp_path.iterdir()] == [held]


def test_new_doubts_of_a_check_are_counted_beyond_a_number() -> None:
    """One line more is a doubt itself, or counts at least two."""
    for new, shown in ((0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (9, 2)):
        after = {"ids": ["old", *map(str, range(new))], "shapes": ["other"]}
        found = list(set_command.new_doubts({"ids": ["old", "gone"], "names": ["other"]}, after))
        more = [f"and {new - 2} more of the check ids (aprfmt validate)"] if new > shown else []
        assert found == [*map(str, range(shown)), *more, "other"]


@pytest.mark.parametrize("option", ["--index", "--by-index"])
def test_an_index_and_its_shards_are_repaired_from_themselves_alone(
    option: str, tmp_path: Path
) -> None:
    safetensors.numpy.save_file({}, tmp_path / "x.safetensors")
    output = ("-o", tmp_path / "out")
    given = {"--from": tmp_path, "--manifest": tmp_path / "m.json"}
    for more in ("--from", "--manifest", "--partial", "--compare"):
        value = (given[more],) if more in given else ()
        done = aprfmt("repair", tmp_path, *output, option, more, *value)
        assert done.code == 2 and f"{option} reads the shards alone" in done.err, more
    done = aprfmt("repair", tmp_path, *output, "--index", "--by-index")
    assert done.code == 2 and ": one" in done.err
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    for same in (tmp_path, tmp_path / "." / ".." / tmp_path.name):
        done = aprfmt("repair", tmp_path, "-o", same, "--by-index", "--force")
        assert done.code == 2 and "is the folder itself" in done.err


def test_commands_that_have_an_option_are_named_up_to_four(monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.cli import main

    for count in (1, 2, 4, 5, 6):
        names = [f"aprfmt c{i}" for i in range(count)]
        monkeypatch.setattr(main, "_commands_with_option", lambda name, ctx, names=names: names)
        done = aprfmt("tree", "--quietly")
        more = f" and {count - 4} more" if count > 4 else ""
        has = "has" if count == 1 else "have"
        assert f"No such option '--quietly'; {', '.join(names[:4])}{more} {has} it" in done.err
    monkeypatch.setattr(main, "_commands_with_option", lambda name, ctx: [])
    assert "have it" not in aprfmt("tree", "--quietly").err


def test_the_speed_of_a_run_is_said_of_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aprfmt.cli import run as run_command

    monkeypatch.setattr("aprfmt.cli.run_options.run_headline", lambda run: "on a machine")
    steps = {"median_seconds": 0.002, "first_seconds": 0.01, "range_seconds": (0.001, 0.003)}
    base = {
        "decode_tokens_per_second": 8.04,
        "prefill_tokens": 5,
        "prefill_tokens_per_second": 40.0,
        "load_seconds": 1.5,
    }
    whole = "a step 2 ms (1 to 3), the first 10"
    for changed, count, end, begins, lacks in (
        ({}, 3, "max_tokens", "3 tokens, --max-tokens reached; 8.0 tokens/s; a step", ""),
        ({}, 1, "context", "1 token, the context is full; 8.0 tokens/s; a step", ""),
        ({"decode_tokens_per_second": None}, 0, "eos", "0 tokens, eos; a step", "8.0"),
        ({"prefill_tokens_per_second": None}, 3, "eos", "3 tokens, eos; 8.0", "prompt"),
        ({"median_seconds": None}, 3, "eos", "3 tokens, eos; 8.0 tokens/s; prompt", "a step"),
        ({"first_seconds": None}, 3, "eos", "3 tokens, eos; 8.0 tokens/s; prompt", "a step"),
        ({"range_seconds": None}, 3, "eos", "3 tokens, eos; 8.0 tokens/s; prompt", "a step"),
    ):
        took: Any = {**base, **changed, "steps": steps | changed}
        where: Any = None
        run_command.report_speed(where, count, end, took, 0.25)
        said = capsys.readouterr().err
        assert said.startswith(begins) and (not lacks or lacks not in said), changed
        assert said.endswith("loaded in 1.50 s, tokenizer meanwhile in 0.25 s; on a machine\n")
        assert (whole in said) is (lacks != "a step")
        assert ("prompt of 5 at 40.0 tokens/s" in said) is (lacks != "prompt")


def test_a_value_in_a_table_is_short_where_layers_agree_or_are_on_and_off() -> None:
    cell = inspect_output._value_cell
    assert cell([4] * 5) == "4 in all 5 layers" and cell((True,) * 6) == "True in all 6 layers"
    assert cell([4] * 4) == "[4, 4, 4, 4]" and cell([1, 1.0, 1, 1, 1]) == "[1, 1.0, 1, 1, 1]"
    assert cell([True, False, True, True, False]) == "10110"
    assert cell((False, True, True, True)) == "(False, True, True, True)"
    assert cell([True, False, True, True, 2]) == "[True, False, True, True, 2]"
    assert cell("a word that is long") == "a word that is long" and cell(7) == "7"


def test_options_of_a_demo_go_with_the_one_that_they_are_for(tmp_path: Path) -> None:
    for words, said in (
        (("--force", "--out", tmp_path / "a"), "--force goes with --into"),
        (("--into", tmp_path / "a", "--out", tmp_path / "b"), "give one"),
    ):
        done = aprfmt("demo", *words)
        assert done.code == 2 and said in done.err
        assert not list(tmp_path.iterdir())


def test_an_index_that_was_made_again_is_told_with_its_counts(tmp_path: Path) -> None:
    for at in (1, 2):
        name = f"model-0000{at}-of-00002.safetensors"
        tensors = {f"t{at}.{n}": np.zeros(2, np.float32) for n in range(at)}
        safetensors.numpy.save_file(tensors, tmp_path / name)
    path = tmp_path / "model.safetensors.index.json"
    done = aprfmt("repair", tmp_path, "--index")
    assert (done.code, done.err) == (0, ""), done.err
    assert f"wrote {path}: 3 tensors in 2 shards" in done.out
    lost = tmp_path / "model-00001-of-00002.safetensors"
    for gone, name in ((lost, "1"), (tmp_path / lost.name.replace("00001", "00002"), "2")):
        kept = gone.rename(tmp_path / "kept")
        done = aprfmt("repair", tmp_path, "--index", "--force")
        assert done.code == 2 and f"shard {name} of 2 is missing" in done.err
        kept.rename(gone)
