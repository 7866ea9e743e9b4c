"""A tokenizer.json that may need any memory or time ends in a child, and its end is one line.

The oracle for what a step may make of a text is the library itself.
"""

import gc
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.errors import FormatError
from aprfmt.tokenizer import isolated
from aprfmt.tokenizer import pre_tokenizers as pre
from aprfmt.tokenizer.isolated import IsolatedEngine, engine_of_data, engine_of_text
from aprfmt.tokenizer.tokenizer_cost import (
    MOST_GROWTH,
    MOST_REPEATS,
    _growth_factor,
    costly_reason,
    unbounded_reason,
)
from tests.checks.gates.faults import copied
from tests.cli.run import Done, process

CHAIN = [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 100}] * 8
BOMB = {"type": "Sequence", "normalizers": CHAIN}


@pytest.fixture(autouse=True)
def nothing_ended_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_ended", set())


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(depth):
        inner = {"type": "Sequence", "normalizers": [inner, inner]}
    return inner


def tokenizer(**parts: Any) -> str:
    model = {"type": "BPE", "vocab": {"b": 0, "e": 1, "c": 2}, "merges": []}
    empty = dict.fromkeys(
        ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    )
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model, **parts})


def token(content: str, normalized: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    return {"id": 1, "content": content, "normalized": normalized, **flags}


def split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
    "pair": [],
    "special_tokens": {},
}
LONG_TOKEN = {
    **TEMPLATE,
    "single": [{"SpecialToken": {"id": "b", "type_id": 0}}] * 10,
    "special_tokens": {"b": {"id": "b", "ids": [0] * 5_000, "tokens": ["b"] * 5_000}},
}
# What of each is not bounded.
HOSTILE: Mapping[str, tuple[dict[str, Any], str]] = {
    "a chain of Replace": ({"normalizer": BOMB}, "normalizer may make a text"),
    "a chain inside a sequence": (
        {"normalizer": {"type": "Sequence", "normalizers": [BOMB]}}, "normalizer may make a text",
    ),
    "a chain met at loading": ({"normalizer": BOMB, "added_tokens": [token("e")]}, "normalizer"),
    "a chain of the decoder": (
        {"decoder": {"type": "Sequence", "decoders": CHAIN}}, "decoder may make a text",
    ),
    "Replace of nothing": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "x" * 999}},
        "1,000 times",
    ),
    "a nested repeat": ({"pre_tokenizer": split("(e+)+$")}, "repeats what has a repeat"),
    "a nested repeat of the normalizer": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "(e+)+$"}, "content": ""}},
        "normalizer: a regex",
    ),
    "sequences of sequences": ({"normalizer": nested(8)}, "steps"),
    "a template of many texts": ({"post_processor": TEMPLATE}, "post_processor may make a text"),
    "a template of a token of many ids": ({"post_processor": LONG_TOKEN}, "781 times as long"),
    "a huge added token": ({"added_tokens": [token("x" * 20_000)]}, "20,000 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_bounded_runs_in_a_child(name: str) -> None:
    parts, why = HOSTILE[name]
    text = tokenizer(**parts)
    assert why in unbounded_reason(text)
    try:
        engine = engine_of_text(text, "here")
        assert isinstance(engine, IsolatedEngine)
        engine.encode("b" + "e" * 40 + "b", True, True)
        engine.decode([1, 0], True)
    except FormatError as error:
        assert str(error).startswith("here: ") and "\n" not in str(error)


@pytest.mark.parametrize("name", ["a chain of Replace", "a chain of the decoder"])
def test_the_end_of_the_child_is_an_error_and_stays_one(name: str) -> None:
    engine = engine_of_text(tokenizer(**HOSTILE[name][0]), "here")
    assert engine.size == 3
    for _ in range(2):
        with pytest.raises(FormatError, match="here: the tokenizer needs more than 1024 MiB"):
            if "decoder" in name:
                engine.decode([1], False)
            else:
                engine.encode("e", False, True)


def test_a_tokenizer_that_ended_a_child_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of each check would cost the whole limit; what is cheap is still answered."""
    text = tokenizer(normalizer=BOMB, added_tokens=[token("c")])
    first, again, other = (engine_of_text(t, "here") for t in (text, text, text + " "))
    with pytest.raises(FormatError, match="needs more than"):
        first.encode("e", False, True)
    assert other.encode("b", False, True) == [0], "another file is another tokenizer"
    assert again.size == 3 and again.token(0) == "b" and again.token(9) is None
    assert again.special_ids == frozenset() and set(again.added_token_flags()) == {"c"}
    monkeypatch.setattr(
        IsolatedEngine, "_send_request", lambda *of: pytest.fail("the child was asked")
    )
    for call in (lambda: again.encode("b", False, True), lambda: again.decode([0], True)):
        with pytest.raises(FormatError, match="here: the tokenizer needs more than"):
            call()
    assert again.token(0) == "b" and again.token(9) is None, "asked once"


def test_an_error_of_the_library_is_not_an_end() -> None:
    replaced = {"type": "Replace", "pattern": {"Regex": "(e+)+$"}, "content": ""}
    engine = engine_of_text(tokenizer(normalizer=replaced), "here")
    with pytest.raises(FormatError, match="cannot encode"):
        engine.encode("e" * 60 + "b", False, True)
    assert engine.encode("b", False, True) == [0]


def test_parts_that_files_bring_to_a_vocabulary_are_judged_too() -> None:
    data = json.loads(tokenizer(normalizer=BOMB))
    assert isinstance(engine_of_data(data, "here"), IsolatedEngine)
    assert not isinstance(engine_of_data(json.loads(tokenizer()), "here"), IsolatedEngine)


@pytest.mark.parametrize(
    "spelled",
    [
        lambda text: text.replace('"normalizer"', '"norm\\u0061lizer"'),
        lambda text: text.replace('"Replace"', '"Repl\\u0061ce"'),
        lambda text: text[:-1] + ', "normalizer" : ' + json.dumps(BOMB) + "}",
        lambda text: "\n " + text.replace(": ", " :\n\t"),
        lambda text: '{"model": ' + text.split('"model": ')[1][:-1]
        + ', "norm\\u0061lizer": ' + json.dumps(BOMB) + ', "version": "1.0"}',
    ],
)  # fmt: skip
def test_no_spelling_hides_a_part(spelled: Any) -> None:
    assert unbounded_reason(spelled(tokenizer(normalizer=BOMB)))


def test_what_the_library_cannot_read_has_its_own_error() -> None:
    for text in ("", "[]", "{", '{"model": 3}', "null", '{"normalizer" 3}'):
        with pytest.raises(FormatError, match="here: not a tokenizer"):
            engine_of_text(text, "here")


def test_tokenizers_in_use_need_no_child(demo_model: Path) -> None:
    assert unbounded_reason((demo_model / "tokenizer.json").read_text("utf-8")) == ""
    for name in pre.PRE_TOKENIZERS:
        for kind, argument in pre.PRE_TOKENIZERS[name].steps:
            if kind == "split":
                assert unbounded_reason(tokenizer(pre_tokenizer=split(str(argument)))) == "", name
    spm = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    t5 = [
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"},
    ]
    for rows in (spm, t5):
        assert (
            unbounded_reason(tokenizer(normalizer={"type": "Sequence", "normalizers": rows})) == ""
        )


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("(a+)+$", True), ("(?:x+x+)+y", True), ("((ab)+c)*", True), ("(a|a)*b", True),
        ("(?:a{2,})*", True), ("([a-z]{1,30}){20}", True), (r"(a)\1", True), (r"\g<1>(a)", True),
        ("a*" * MOST_REPEATS, False), ("a*" * (MOST_REPEATS + 1), True), ("(a|b)?c+", False),
        (r"\(a+\)+", False), ("[(a+)]+", False), ("[[a+]b]+c", False), ("a{3}+", False),
        ("a?+b++(c|d)*+", True), ("a?+b++c*+", False), ("(a|b)?+c", False),
        ("(?:ab){1,3}|c+|d+|e+|f+|g+", False), ("(a{1,15}){2}", False), ("x" * 30_000, True),
    ],
)  # fmt: skip
def test_costly_regexes_are_those_that_repeat_a_repeat(pattern: str, found: bool) -> None:
    assert bool(costly_reason(pattern)) == found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["e", "ab", "é"]), st.text("eabé", max_size=6)), max_size=4),
    st.text("eabé ", min_size=1, max_size=20),
)
def test_no_chain_makes_more_than_the_bound(steps: list[tuple[str, str]], text: str) -> None:
    from tokenizers import Tokenizer

    rows = [{"type": "Replace", "pattern": {"String": a}, "content": b} for a, b in steps]
    made = Tokenizer.from_str(tokenizer(normalizer={"type": "Sequence", "normalizers": rows}))
    grown = made.normalizer.normalize_str(text)
    bound = 1
    for row in rows:
        bound *= _growth_factor(row)
    assert len(grown.encode()) <= bound * len(text.encode())


def test_the_bound_of_every_step_holds_for_every_character() -> None:
    """Unicode's largest expansions, by the library's own normalizers."""
    from tokenizers import normalizers

    for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        step = getattr(normalizers, kind)()
        most = max(
            len(step.normalize_str(chr(i)).encode()) / len(chr(i).encode())
            for i in range(0x20000)
            if not 0xD800 <= i < 0xE000
        )
        assert most <= _growth_factor({"type": kind}) <= MOST_GROWTH


def test_no_child_is_left() -> None:
    engine = engine_of_text(tokenizer(normalizer=BOMB), "here")
    assert isinstance(engine, IsolatedEngine)
    child: subprocess.Popen[bytes] = engine._child
    assert child.poll() is None
    del engine
    gc.collect()
    assert child.poll() is not None


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    folder = copied(demo_model, tmp_path_factory.mktemp("hostile") / "model")
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    data["normalizer"] = BOMB
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("codes", "args"),
    [
        ((2,), ["tokenize", "M", "here"]),
        ((2,), ["trace", "M", "--payload", "--prompt", "here"]),
        ((1,), ["qa", "M", "--only", "loss", "--only", "golden-output"]),
        ((0, 1), ["diff", "M", "N"]),
        ((0, 1), ["diff", "M", "N", "--only", "tokenizer"]),
        ((0, 1), ["diagnose", "M", "N"]),
        ((2,), ["eval", "M", "--text", "T"]),
        ((2,), ["run", "M", "--prompt", "here", "--max-tokens", "1"]),
    ],
)
def test_no_command_ends_without_a_word(
    codes: tuple[int, ...], args: list[str], hostile_model: Path, demo_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("here we are, once more")
    inputs = {"M": hostile_model, "N": demo_model, "T": tmp_path / "t.txt"}
    done: Done = process(*(inputs.get(arg, arg) for arg in args))
    assert done.code in codes, (done.code, done.err)
    assert done.out or done.err
    assert "Traceback" not in done.err and "aprfmt: bug" not in done.err
    if done.code == 2:
        assert len(done.err.splitlines()) == 1
        assert "tokenizer" in done.err


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"single": [], "pair": LONG_TOKEN["single"]},
        {"single": TEMPLATE["single"], "pair": LONG_TOKEN["single"]},
    ],
    ids=["of one text", "of a pair", "beside texts"],
)
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in a sequence"])
@pytest.mark.parametrize(
    "args", [["diff", "M", "N"], ["convert", "M", "T"], ["validate", "M"], ["tokenize", "M", "e"]]
)
def test_tokens_that_a_template_repeats_are_counted_before_they_are_listed(
    args: list[str], nested: bool, changes: dict[str, Any], demo_model: Path, tmp_path: Path
) -> None:
    folder = copied(demo_model, tmp_path / "model")
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    step = {**LONG_TOKEN, **changes}
    data["post_processor"] = {"type": "Sequence", "processors": [step]} if nested else step
    (folder / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    inputs = {"M": folder, "N": demo_model, "T": tmp_path / "t.gguf"}
    done: Done = process(*(inputs.get(arg, arg) for arg in args))
    assert done.code == (1 if args[0] == "validate" else 2)
    assert "puts 50,000 tokens around a text; the limit is 4,096" in done.err + done.out


def test_a_child_that_ended_is_reaped_before_its_end_is_told() -> None:
    engine = engine_of_text(tokenizer(normalizer=BOMB), "here")
    assert isinstance(engine, IsolatedEngine)
    with pytest.raises(FormatError, match="broken or hostile"):
        engine.encode("e" * 50_000, False, False)
    assert engine._child.returncode is not None
    assert all(pipe is None or pipe.closed for pipe in (engine._child.stdin, engine._child.stdout))
