"""Gibberish, golden files, and which side of format x prompt form is at fault.

Seen red: the share of U+FFFD taken of the whole file, a fragment counted twice, a stop token that
is expected but never comes accepted, the two sides of the grid exchanged.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aprfmt import qa
from aprfmt.checks.gates.generation import FORMS, Generated, faulty_side, judged, python_fault
from aprfmt.checks.gates.gibberish import signals
from aprfmt.checks.gates.golden import DEFAULT, NAME, TEXT, Prompt, read
from aprfmt.errors import FormatError
from tests.cli.run import aprfmt
from tests.qa.faults import copied, other_template

ORDINARY = (
    "",
    "4",
    "Paris",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "- one\n- two\n- three\n--------------------------------\n",
    "def f(a):\n            return a\n" + " " * 24 + "# indent",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "Très bien, merci: déjà vu à l'été",
    "The last character is cut \ufffd",
    TEXT,
)
GIBBERISH = {
    "not ASCII": "это совсем не по-английски, нет",
    "in a row": "and the the the the the the",
    "broken": "abc\ufffddef\ufffd ghi jkl",
    "%": "!!!!!!!!!!",
}


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_has_no_signal(text: str) -> None:
    assert signals(text, "an English prompt") == []


@pytest.mark.parametrize("signal", GIBBERISH)
def test_each_signal_marks_its_kind_of_gibberish(signal: str) -> None:
    found = signals(GIBBERISH[signal], "an English prompt")
    assert [sentence for sentence in found if signal in sentence], found


def test_another_script_is_no_gibberish_where_the_prompt_has_it() -> None:
    assert signals("это совсем не по-английски, нет", "Как тебя зовут?") == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("abcd" * 3, True),
        ("abcd" * 2 + "abc", False),
        ("abc" * 3, False),
        ("0123456789abcdef" * 3, True),
        ("0123456789abcdefg" * 3, False),
    ],
)
def test_a_fragment_is_4_to_16_bytes_three_times(text: str, wrong: bool) -> None:
    assert bool(signals(text)) == wrong


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def fib(n):\n    return n\n", ""),
        ("def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fi", ""),
        ("def fib(n):\n    return (n\n", "syntax error"),
        ("def other(n):\n    return n\n", "no function fib"),
        ("def fib(n:\n", "syntax error"),
    ],
)
def test_python_answers_are_parsed(text: str, fault: str) -> None:
    found = python_fault(text, ["fib"])
    assert (fault in found) if fault else not found


GRID: tuple[tuple[str, str], ...] = (
    # here direct, here chat, there direct, there chat -> what is named
    ("FFPP", "apr fails where gguf passes: its weights"),
    ("PFPP", "apr fails where gguf passes: its chat template"),
    ("FPPP", "apr fails where gguf passes: its weights"),
    ("PFPF", "the chat template both carry"),
    ("FPFP", "expects a template"),
    ("FFFF", "fail alike"),
    ("FFPF", "fail alike"),
)


@pytest.mark.parametrize(("grid", "named"), GRID)
def test_the_grid_names_the_faulty_side(grid: str, named: str) -> None:
    keys = [(side, form) for side in ("apr", "gguf") for form in FORMS]
    cells: dict[tuple[str, str], bool | None] = {
        key: mark == "P" for key, mark in zip(keys, grid, strict=True)
    }
    assert named in faulty_side(cells, "apr", "gguf")
    alone = {key: value for key, value in cells.items() if key[0] == "apr"}
    assert ("only chat" in faulty_side(alone, "apr", None)) == grid.startswith("PF")


def test_a_broken_copy_is_told_from_the_original(
    demo_model: Path, golden: Path, tmp_path: Path
) -> None:
    """2 x 2: this file's template is wrong, the other copy's is not."""
    folder = copied(demo_model, tmp_path / "model")
    other_template(folder)
    report = qa.run(folder, only=("golden-output",), golden=golden, against=demo_model)
    found = report.gate("golden-output").details
    passed = {(row["side"], row["form"]): row["passed"] for row in found["grid"]}
    assert passed == {
        ("safetensors", "direct"): True,
        ("safetensors", "chat"): False,
        ("safetensors (--against)", "direct"): True,
        ("safetensors (--against)", "chat"): True,
    }
    assert "its chat template, special or stop tokens" in found["faulty_side"]
    alone = qa.run(folder, only=("golden-output",), golden=golden)
    assert "the chat template both carry" in alone.gate("golden-output").details["faulty_side"]


def written(path: Path, **rows: Any) -> Path:
    path.write_text(json.dumps({"format": 1, **rows}))
    return path


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [
        ({}, "neither"),
        ({"greedy": [{"prompt": "x"}]}, "with a name"),
        ({"greedy": [{"name": "a"}]}, "neither prompt nor messages"),
        ({"greedy": [{"name": "a", "prompt": "x"}] * 2}, "one entry twice"),
        ({"greedy": [{"name": "a", "prompt": 3}]}, "prompt is 3; expected text"),
        ({"greedy": [{"name": "a", "prompt": "x", "output_ids": [-1]}]}, "output_ids"),
        ({"greedy": [{"name": "a", "prompt": "x", "parses": "perl"}]}, "perl"),
        ({"greedy": [{"name": "a", "messages": [{"role": "user"}]}]}, "role and content"),
        ({"losses": [{"name": "a"}]}, "neither text nor ids"),
        ({"losses": [{"name": "a", "ids": [1, 2], "nats_per_token": "2"}]}, "expected a number"),
    ],
)
def test_a_wrong_golden_file_is_an_error_with_its_place(
    rows: dict[str, Any], fragment: str, tmp_path: Path, demo_model: Path
) -> None:
    path = written(tmp_path / "golden.json", **rows)
    with pytest.raises(FormatError, match=fragment):
        read(path)
    done = aprfmt("qa", demo_model, "--golden", path)
    assert done.code == 2 and str(path) in done.err


def test_a_users_own_prompts_and_expectations(demo_model: Path, tmp_path: Path) -> None:
    france = [{"role": "user", "content": "What is the capital of France?"}]
    path = written(
        tmp_path / "mine.json",
        greedy=[
            {"name": "paris", "messages": france, "contains": "Paris", "max_tokens": 8},
            {"name": "rome", "messages": france, "contains": ["Rome"], "max_tokens": 8},
            {
                "name": "coin",
                "prompt": "It is a truth universally acknowledged",
                "output_ids": [12],
                "smallest_lead": 0.006,
            },
            {"name": "long", "prompt": "It is a truth. " * 200, "contains": "x"},
        ],
    )
    report = qa.run(demo_model, only=("golden-output",), golden=path)
    outcomes = {each.name: each.outcome for each in report.gate("golden-output").checks}
    assert outcomes["paris-answer"] == "PASS"
    assert outcomes["rome-answer"] == "FAIL"
    assert outcomes["coin-answer"] == "NOT_RUN"  # a coin flip is not a verdict
    assert outcomes["long-answer"] == "NOT_RUN"  # nor is what does not fit the context
    assert report.exit_code == 1


def test_a_loss_in_bits_is_refused(demo_model: Path, tmp_path: Path) -> None:
    ids = [1417, 362, 258, 1168, 1529, 457, 72, 1182, 567, 527]
    path = written(
        tmp_path / "bits.json", losses=[{"name": "bits", "ids": ids, "nats_per_token": 17.213}]
    )
    gate = qa.run(demo_model, only=("loss",), golden=path).gate("loss")
    assert "loss-stated-in-nats" in {each.name for each in gate.failed}


def test_a_loss_in_bits_below_the_uniform_one_is_told_by_its_ratio(
    demo_model: Path, tmp_path: Path
) -> None:
    """ln(1536) is 7.34: 3.19 nats are 4.60 bits, which could be nats by their size."""
    row = next(
        each
        for each in json.loads((demo_model / NAME).read_text())["losses"]
        if each["nats_per_token"] > 3
    )
    nats = row["nats_per_token"]
    assert nats / math.log(2) < math.log(1536)
    # stated, is it said to be in bits: bits, rounded bits, and a number that is only too high
    for stated, said in (
        (nats / math.log(2), True),
        (round(nats / math.log(2), 1), True),
        (nats * 1.3, False),
        (nats, False),
    ):
        path = written(tmp_path / "g.json", losses=[row | {"nats_per_token": stated}])
        gate = qa.run(demo_model, only=("loss",), golden=path).gate("loss")
        failed = {each.name: each for each in gate.failed}
        assert ("loss-stated-in-nats" in failed) == said
        assert ("loss-as-stated" in failed) == (stated != nats)
        if said:
            assert "times the measured nats" in failed["loss-stated-in-nats"].found


@pytest.mark.parametrize(("ids", "asked"), [([1417, 362, 258], False), ([1417, 362, 258, 9], True)])
def test_two_predictions_say_nothing_about_shifted_labels(
    ids: list[int], asked: bool, demo_model: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "short.json", losses=[{"name": "short", "ids": ids}])
    names = {
        each.name for each in qa.run(demo_model, only=("loss",), golden=path).gate("loss").checks
    }
    assert "loss-finite" in names and ("loss-labels-shifted" in names) == asked


def test_without_a_golden_file_nothing_is_expected_but_sense() -> None:
    assert not any(prompt.expects for prompt in DEFAULT.prompts)
    assert {prompt.form for prompt in DEFAULT.prompts} == set(FORMS)


@pytest.mark.parametrize(
    ("messages", "prompt", "named"),
    [((), "one two", []), (({"role": "user", "content": "hi"},), None, []),
     (({"role": "user", "content": "hi"},), "<u>hi", ["p-template"])],
)  # fmt: skip
def test_a_template_is_judged_only_where_a_chat_states_its_text(
    messages: Any, prompt: str | None, named: list[str]
) -> None:
    asked = Prompt("p", messages=messages, prompt=prompt)
    answer = Generated("other text", (1, 2), (3,), "Paris", None)
    names = [each.name for each in judged(asked, answer, None)]  # type: ignore[arg-type]
    assert [name for name in names if name.endswith("-template")] == named
