"""Gibberish, golden files, and which side of format x prompt form is at fault.

Seen red: the share of U+FFFD taken of the whole file, a fragment counted twice, a stop token that
is expected but never comes accepted, the two sides of the grid exchanged.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aprfmt as package
from aprfmt.checks.gates import running as qa
from aprfmt.checks.gates.generation import FORMS, Generated, faulty_side, judge_answer, python_fault
from aprfmt.checks.gates.gibberish import SHOWN, _find_loops, gibberish_signals
from aprfmt.checks.gates.golden import DEFAULT, NAME, TEXT, GoldenPrompt, read_golden
from aprfmt.errors import FormatError
from aprfmt.inference.session import Session
from tests.checks.gates.faults import copied, other_template
from tests.cli.run import aprfmt

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
    "\n" * 7,
    "Paris" + "\n" * 31,
    "It is a truth that we all allow!!" + " " * 32,
    "\n" * 40 + "an answer",
    "1,000,000,000",
    "Use 255.255.255.255 as the broadcast address.",
    "| a | b | c | d |\n| --- | --- | --- | --- |\n| 1 | 2 | 3 | 4 |\n",
    "[0, 0, 0, 0, 0, 0, 0, 0]",
    "170 in binary is 10101010; 0xAAAA is 1010101010101010.",
    "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\n"
    "Life is but a dream.",
    "<ul><li><div><div><div>text</div></div></div></li></ul>\nThat closes all of them.",
    TEXT,
)
GIBBERISH = {
    "not ASCII": "это совсем не по-английски, нет",
    "in a row": "and the the the the the the",
    "'1.1.' stands": "1" + ".1" * 40,
    "', and the' stands 3 times": "It is a truth that we all allow, and the, and the, and the, and",
    "broken": "abc\ufffddef\ufffd ghi jkl",
    "%": "!!!!!!!!!!",
    "nothing but 8 blanks": "\n \t\n\r\n\n ",
    "the last 32 of 37 characters are blanks": "Paris" + "\n" * 32,
    "the last 32 of 64 characters are blanks": "It is a truth that we all allow." + " " * 32,
}


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_has_no_signal(text: str) -> None:
    assert gibberish_signals(text, "an English prompt") == []


@pytest.mark.parametrize("signal", GIBBERISH)
def test_each_signal_marks_its_kind_of_gibberish(signal: str) -> None:
    found = gibberish_signals(GIBBERISH[signal], "an English prompt")
    assert [sentence for sentence in found if signal in sentence], found


def test_another_script_is_no_gibberish_where_the_prompt_has_it() -> None:
    assert gibberish_signals("это совсем не по-английски, нет", "Как тебя зовут?") == []


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
    assert bool(gibberish_signals(text)) == wrong


LINE = "le Grand Croix de la Cité, "  # 28 bytes


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Paris est " + LINE * 4, True),
        ("Paris est " + LINE * 3, False),  # longer than a quarter of the answer
        (LINE * 4, True),
        (LINE * 3 + LINE[:-1], False),
        (LINE * 3 + "and then it went on with something else, as t", True),
        ("|" + ("-" * 30 + "|") * 5, False),  # the rule of a table
        ("|" + ("-" * 14 + "a|") * 5, True),
    ],
)
def test_a_long_fragment_is_up_to_a_quarter_of_the_answer(text: str, wrong: bool) -> None:
    assert [each for each in gibberish_signals(text) if "in a row" in each] == [] or wrong
    assert bool([each for each in gibberish_signals(text) if "in a row" in each]) == wrong


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(i) if 32 < i < 127 else f"<t{i}>" for i in ids)


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([5, 6, 7] * 4, True),  # twelve tokens, three of them at a time
        ([5, 6, 7] * 3, False),  # more than a quarter of all
        ([9] * 8, True),
        ([9] * 7, False),
        ([48] * 64, False),  # zeros of a number: one character
        ([1, 2, 3, 4, 5, 6, 7, 8] * 4, True),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 3 + [1, 2, 3, 4, 5, 6, 7, 9], True),
        ([1, 2, 3, 4, 5, 6, 7, 8] * 2 + [1, 2, 3, 4, 5, 6, 7, 9] * 2, False),
        (list(range(64)), False),
        ([49, *[44, 48, 48, 48] * 4], False),  # 1,000,000,000,000
        ([49, *[44, 48, 48, 48] * 8], True),
        ([*range(30), *[5, 6] * 6, *range(10)], False),  # in the midst of a longer answer
        ([*range(30), *[5, 6] * 6], True),
    ],
)
def test_a_loop_of_tokens_is_up_to_a_quarter_of_them(ids: list[int], wrong: bool) -> None:
    """Tokens without a text of their own, as skipped special ones, show in no fragment."""
    assert (
        gibberish_signals("", "", ids, spelled=lambda row: "".join(f"<t{i}>" for i in row))
        or not wrong
    )
    assert bool(gibberish_signals("", "", ids, spelled)) == wrong


@given(
    st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=9),
    st.integers(1, 5), st.lists(st.integers(0, 3), max_size=12),
)  # fmt: skip
def test_loops_are_those_that_a_plain_search_finds(
    before: list[int], fragment: list[int], times: int, after: list[int]
) -> None:
    """The oracle tries every place and every size."""
    row = bytes([*before, *fragment * times, *after])
    high = len(row) // 4
    found = list(_find_loops(row, 1, high))
    plain = {
        size
        for size in range(1, high + 1)
        for at in range(len(row) - 3 * size + 1)
        if row[at : at + 3 * size] == row[at : at + size] * 3
    }
    assert {size for _, size, _ in found} == plain
    for start, size, copies in found:
        assert row[start : start + size * copies] == row[start : start + size] * copies
        assert start == 0 or row[start - 1] != row[start - 1 + size]


class Endless:
    """As much of a tokenizer as judging an answer asks: it names no stop token."""

    stop_ids: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return spelled(ids)


def test_without_stop_tokens_an_end_is_not_asked() -> None:
    rows = judge_answer(GoldenPrompt("a", "Hello"), answered([1, 2], "Four", None), Endless())  # type: ignore[arg-type]
    said = {one.name: (one.outcome, one.found) for one in rows}
    assert said["a-end"] == ("NOT_RUN", "the model names no stop token")


def answered(ids: Sequence[int], text: str, stop: int | None) -> Generated:
    return Generated("Hello", (1,), tuple(ids), text, stop)


def test_an_end_is_a_stop_token_and_nothing_else(demo_model: Path) -> None:
    """At the limit nobody knows whether an end would have come: no PASS, and no FAIL."""
    with package.open(demo_model) as model:
        tokenizer = model.tokenizer
        stop = min(tokenizer.stop_ids)
        ids = tokenizer.encode("Four, he said.")
        ended = judge_answer(
            GoldenPrompt("a", "Hello"), answered([*ids, stop], "Four, he said.", stop), tokenizer
        )
        cut = judge_answer(
            GoldenPrompt("a", "Hello"), answered(ids, "Four, he said.", None), tokenizer
        )
    rows = {one.name: one for one in ended}
    assert rows["a-end"].outcome == "PASS"
    assert rows["a-end"].found.startswith(f"stop token {stop} ")
    assert rows["a-end"].found.endswith(f" after {len(ids)} tokens")
    rows = {one.name: one for one in cut}
    assert rows["a-end"].outcome == "NOT_RUN"
    assert rows["a-end"].found.startswith(f"no stop token in {len(ids)} tokens")


def test_a_loop_until_the_limit_fails_and_a_pass_says_what_was_seen(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = tmp_path / "golden.json"
    prompts = [{"name": "one", "prompt": "Once upon a time", "max_tokens": 48}]
    golden.write_text(json.dumps({"greedy": prompts}))
    options: dict[str, Any] = {"only": ("golden-output",), "golden": golden}
    sound = qa.run(demo_model, **options).gate("golden-output")
    assert sound.outcome == "PASS"
    said = {one.name: one.found for one in sound.checks}["golden-output"]
    ended = {one.name: one.outcome for one in sound.checks}["one-end"] == "PASS"
    assert said == (
        f"1 answer without gibberish, 0 of 1 as expected, {int(ended)} of 1 ended by a stop token"
    )
    with package.open(demo_model) as model:
        loop = model.tokenizer.encode(" the large cross of the city,")

    def looping(self: Any, ids: Any, sampler: Any, limit: int, stop: Any) -> Any:
        drawn = [loop[i % len(loop)] for i in range(limit)]
        sampler.drawn = drawn
        return iter(drawn)

    monkeypatch.setattr(Session, "generate", looping)
    report = qa.run(demo_model, **options).gate("golden-output")
    assert "one-readable" in {one.name for one in report.failed}
    assert "golden-output" not in {one.name for one in report.checks}


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
        read_golden(path)
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
    asked = GoldenPrompt("p", messages=messages, prompt=prompt)
    answer = Generated("other text", (1, 2), (3,), "Paris", None)
    names = [each.name for each in judge_answer(asked, answer, Endless())]  # type: ignore[arg-type]
    assert [name for name in names if name.endswith("-template")] == named


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("before", [0, 4])
def test_a_loop_of_tokens_is_said_by_its_text_and_its_times(before: int, size: int) -> None:
    fragment = list(range(1, size + 1))
    ids = [*range(20, 20 + before), *fragment * 8, 30]
    (said,) = [each for each in gibberish_signals("", "", ids, spelled) if "in a row" in each]
    many = "token" if size == 1 else "tokens"
    assert said == f"{size} {many} {spelled(fragment)!r} stand 8 times in a row"


@pytest.mark.parametrize("length", [SHOWN - 1, SHOWN, SHOWN + 1, SHOWN + 30])
def test_a_long_fragment_is_cut_to_what_is_shown(length: int) -> None:
    fragment = "".join(chr(ord("a") + i % 26) if i % 7 else str(i % 10) for i in range(length))
    (said,) = [each for each in gibberish_signals(fragment * 5) if "in a row" in each]
    shown = fragment if length <= SHOWN else fragment[:SHOWN] + "..."
    assert said == f"the fragment {shown!r} stands 5 times in a row"
