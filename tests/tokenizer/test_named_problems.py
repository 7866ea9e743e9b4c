"""What single problems of a tokenizer are called, at the exact bounds of their rules."""

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.checks.file import template_tokens
from aprfmt.checks.records import NotRun
from aprfmt.tokenizer import template_marks
from aprfmt.tokenizer.keys import CONTROL, NORMAL, USER_DEFINED
from aprfmt.tokenizer.quick_checks import quick_warnings
from aprfmt.tokenizer.template_engines import EngineRendering, TemplateEngines, _make_rendering
from aprfmt.tokenizer.template_marks import CutMark, Mark, cut_marks, turn_end_of
from aprfmt.tokenizer.template_marks import template_marks as marks_of
from aprfmt.tokenizer.turn_ends import NOWHERE, UnstoppedTurn, added_ids, find_turn_end
from tests.tokenizer.fake import fake

GGUF = "tokenizer.ggml.eos_token_id"

# (stops, place) -> (a part of the sentence, the remedy, what `aprfmt set` is given).
# The turn ends with 7, "<e>".
TURNS: Mapping[tuple[tuple[int, ...], str], tuple[str, str, str]] = {
    ((9, 3), GGUF): (
        f"which is not in {GGUF} [9, 3]",
        "set tokenizer.ggml.eot_token_id to 7",
        "tokenizer.ggml.eot_token_id=7",
    ),
    ((9, 3), "generation_config.json: eos_token_id"): (
        "which is not in generation_config.json: eos_token_id [9, 3]",
        "in generation_config.json, set eos_token_id to [3, 7, 9]",
        "generation_config.json:eos_token_id=[3, 7, 9]",
    ),
    ((9,), "config.json: eos_token_id"): (
        "which is not in config.json: eos_token_id [9]",
        "in config.json, set eos_token_id to [7, 9]",
        "config.json:eos_token_id=[7, 9]",
    ),
    ((9,), "tokenizer_config.json: eos_token"): (
        "which is not in tokenizer_config.json: eos_token [9]",
        "in tokenizer_config.json, set eos_token to '<e>'",
        "tokenizer_config.json:eos_token=<e>",
    ),
    ((2,), NOWHERE): (
        f"{NOWHERE}, and transformers takes its class's 2; the chat template ends turns with",
        "in generation_config.json, set eos_token_id to [2, 7]",
        "config.json:eos_token_id=[2, 7]",
    ),
    ((), NOWHERE): (
        f"{NOWHERE}, and transformers stops nowhere; the chat template ends turns with",
        "in generation_config.json, set eos_token_id to [7]",
        "config.json:eos_token_id=[7]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS, ids=lambda case: f"{case[1]} {case[0]}")
def test_a_turn_that_nothing_stops_says_where_to_set_what(case: tuple[Any, str]) -> None:
    says, remedy, assignment = TURNS[case]
    found = UnstoppedTurn(7, "<e>", *case, False)
    assert says in found.says and "'<e>' (7)" in found.says
    assert (found.remedy, found.assignments) == (remedy, [assignment])


def test_a_reader_of_the_configuration_alone_stops_as_well() -> None:
    """Seen red: one file was set, and the ids of config.json ran on."""
    found = UnstoppedTurn(7, "<e>", (3,), "generation_config.json: eos_token_id", True, (2, 3))
    assert found.remedy == (
        "in generation_config.json, set eos_token_id to [3, 7], in config.json to [2, 3, 7]"
    )
    assert found.assignments == [
        "generation_config.json:eos_token_id=[3, 7]", "config.json:eos_token_id=[2, 3, 7]",
    ]  # fmt: skip
    assert replace(found, embedded=True).assignments == []  # no file that `set` changes


# --- what two engines rendered -----------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.text("ab", max_size=6), st.text("ab", max_size=6))
def test_two_texts_differ_from_their_first_other_character(one: str, other: str) -> None:
    found = _make_rendering("chat", ("ok", one), ("ok", other))
    assert (found.same, found.jinja2, found.llama_cpp) == (one == other, one, other)
    if one == other:
        assert found.at is None and found.text == "rendered alike"
        return
    at = found.at
    assert at is not None and one[:at] == other[:at] and one[at : at + 1] != other[at : at + 1]
    ends = (repr(text[at:]) if text[at:] else "its end" for text in (one, other))
    assert found.text == "from character {} on jinja2 has {}, llama.cpp {}".format(at, *ends)


REFUSED = {
    ("ok", "refused"): (False, "llama.cpp alone refuses it: theirs"),
    ("refused", "ok"): (False, "jinja2 alone refuses it: ours"),
    ("refused", "error"): (True, "refused by both"),
}


@pytest.mark.parametrize("ends", REFUSED)
def test_who_refuses_a_conversation_is_named(ends: tuple[str, str]) -> None:
    found = _make_rendering("chat", (ends[0], "ours"), (ends[1], "theirs"))
    assert (found.same, found.text) == REFUSED[ends] and found.at is None


def test_a_long_difference_is_shown_by_its_first_forty_characters() -> None:
    found = _make_rendering("chat", ("ok", "=" + "a" * 60), ("ok", "=" + "b" * 40))
    assert found.text == f"from character 1 on jinja2 has {'a' * 40!r}, llama.cpp {'b' * 40!r}"
    given_too = EngineRendering("chat", False, 1, "=a", "=b", given=("one", "two"))
    assert given_too.text.endswith("llama.cpp 'b': only llama.cpp sets one and two")


@pytest.mark.parametrize("differing", range(4))
def test_engines_are_counted_by_conversations(differing: int) -> None:
    rows = [_make_rendering(str(i), ("ok", "x"), ("ok", "xy"[i < differing])) for i in range(3)]
    found = TemplateEngines("llama.cpp 1", tuple(rows))
    assert [row.conversation for row in found.differing] == ["0", "1", "2"][:differing]
    assert found.text == (
        f"different: chat_template - llama.cpp 1 renders {differing} of 3 conversations otherwise "
        "than jinja2"
        if differing
        else "same: jinja2 and llama.cpp 1 render 3 conversations alike"
    )


# --- marks of a template ------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if tools %}[TOOLS]{% endif %}{# <never> #}"
)
TOKENS = ["a", "<|user|>", "<|assistant|>", "<end>", "[TOOLS]", "<never>", "<unused>"]


def side(types: list[int], template: str | None = TEMPLATE, **more: Any) -> Any:
    """Return a tokenizer of vocabulary lists with these types."""
    vocabulary = SimpleNamespace(tokens=TOKENS, types=types)
    parts: dict[str, Any] = dict(
        template=template, special_token_texts={}, uses_lists=True, encodes=True, added_tokens=[],
        vocabulary=vocabulary, carried=SimpleNamespace(where="m", model=None),
    )  # fmt: skip
    return SimpleNamespace(**parts | more)


WHOLE = [NORMAL, CONTROL, USER_DEFINED, NORMAL, NORMAL, CONTROL, NORMAL]


def test_marks_are_the_tokens_that_a_template_names() -> None:
    found = {mark.text: mark for mark in marks_of(side(WHOLE))}
    assert {text: mark.id for text, mark in found.items()} == {
        text: i for i, text in enumerate(TOKENS) if text not in ("a", "<unused>")
    }
    assert {text for text, mark in found.items() if not mark.written} == {"[TOOLS]", "<never>"}
    assert {text for text, mark in found.items() if mark.split_whole} == {
        "<|user|>", "<|assistant|>", "<never>",
    }  # fmt: skip
    added = side(WHOLE, uses_lists=False, added_tokens=[{"content": "<end>"}])
    assert [mark.text for mark in marks_of(added) if mark.split_whole] == ["<end>"]
    assert marks_of(side(WHOLE, None)) == [] == marks_of(side(WHOLE, "{% if %}"))


def test_the_end_of_a_turn_is_the_mark_behind_an_answer() -> None:
    one = side(WHOLE)
    named = marks_of(one)
    assert turn_end_of(one, named) == TOKENS.index("<end>")
    assert turn_end_of(one, [mark for mark in named if mark.text != "<end>"]) is None
    assert turn_end_of(one, []) is None and turn_end_of(side(WHOLE, None), named) is None
    assert turn_end_of(side(WHOLE, "{% if %}"), named) is None


class Engine:
    """Encodes `<end>` as two pieces, the second without a text, all else as itself."""

    def encode(self, text: str, bos: bool, special: bool) -> list[int]:
        assert (bos, special) == (False, True)
        return [0, 99] if text == "<end>" else [TOKENS.index(text)]

    def token(self, i: int) -> str | None:
        return TOKENS[i] if i < len(TOKENS) else None


def test_marks_that_are_cut_are_shown_with_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_marks, "engine_of_lists", lambda *of: Engine())
    one = side(WHOLE)
    (cut,) = cut_marks(one, marks_of(one))
    assert (cut.mark.text, cut.ids, cut.pieces) == ("<end>", (0, 99), ("a", "[99]"))
    assert cut.text == "'<end>' (3) is cut into 0 99 (a|[99])" and not cut.healed
    blind = side(WHOLE, encodes=False)
    unknown = list(cut_marks(blind, marks_of(blind)))
    assert [each.mark.text for each in unknown] == ["<end>", "[TOOLS]"]
    assert unknown[0].text == "'<end>' (3) is not split off whole" and unknown[0].ids == ()
    every = [mark for mark in marks_of(one) if mark.split_whole]
    assert list(cut_marks(one, every)) == []


@pytest.mark.parametrize("count", [8, 9])
def test_a_cut_mark_shows_eight_ids(count: int) -> None:
    mark = CutMark(Mark("<x>", 1, True, False), tuple(range(count)), ("p",), False)
    assert mark.text == "'<x>' (1) is cut into 0 1 2 3 4 5 6 7 (p)"


@pytest.mark.parametrize("text", ["<|im_end|>", "<nobody_knows>"])
def test_only_what_an_engine_takes_for_control_is_healed(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_marks, "engine_of_lists", lambda *of: None)
    (cut,) = cut_marks(side(WHOLE), [Mark(text, 3, True, False)])
    assert cut.healed == (text == "<|im_end|>")


# --- quick checks -------------------------------------------------------------------------------

CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def listed(types: list[int] | None, model: str = "gpt2", template: str = CHAT) -> Any:
    """Return a GGUF with three tokens and these types."""
    keys = {
        "tokenizer.ggml.model": model, "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": ["a", "b", "<|im_start|>"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template,
    }  # fmt: skip
    return fake("gguf", keys | ({} if types is None else {"tokenizer.ggml.token_type": types}))


@pytest.mark.parametrize(
    ("types", "says"),
    [
        (None, "is missing"), ([1, 1, 1], "has no control token"), ([1, 1, CONTROL], ""),
        ([1, 1, USER_DEFINED], ""),
    ],
)  # fmt: skip
def test_a_template_s_mark_needs_a_control_token(types: list[int] | None, says: str) -> None:
    found = [one for one in quick_warnings(listed(types).carried) if "token_type" in one]
    wanted = f"tokenizer.ggml.token_type {says}, though the chat template writes '<|im_start|>'"
    assert found == ([wanted] if says else [])
    plain = listed(types, template="{{ messages }}")
    assert not [one for one in quick_warnings(plain.carried) if "though the chat" in one]


def one_of_two_kinds(spm: bool) -> list[str]:
    """Return tokens whose spaces are spelled as SentencePiece does, or by bytes."""
    space = "\u2581" if spm else "\u0120"
    return [f"{space}{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]


@pytest.mark.parametrize("spm", [True, False])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_kind_that_the_pieces_contradict_is_said(spm: bool, model: str) -> None:
    tokens = one_of_two_kinds(spm)
    keys = {
        "tokenizer.ggml.model": model, "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.bos_token_id": 2,
    }  # fmt: skip
    found = [one for one in quick_warnings(fake("gguf", keys).carried) if "pieces" in one]
    assert bool(found) == (spm != (model == "llama"))
    assert all(one.startswith("tokenizer.ggml.model says ") for one in found)


def file(post: str = "", added: Any = (), rows: int = 10) -> Any:
    """Return what quick checks look at of a folder's tokenizer.json."""
    text = f'{{"added_tokens": {json.dumps(list(added))}{post}}}'
    return SimpleNamespace(
        list_length=lambda key: None, origin="tokenizer.json", tokenizer_json=lambda: text,
        tokenizer_config={}, vocab_size=lambda: rows, model=SimpleNamespace(key_style="hf"),
    )  # fmt: skip


def bert(i: int, lead: str = "") -> str:
    said = {"type": "BertProcessing", "sep": ["<s>", i], "cls": ["<c>", 4]}
    return f', "post_processor": {lead}{json.dumps(said)}'


ADDED = [{"content": "<s>", "id": 3}, {"content": "<c>", "id": 4}]
FILES: Mapping[str, tuple[Any, list[str]]] = {
    "right": (file(bert(3), ADDED), []),
    "wrong": (file(bert(5), ADDED), ["the post-processor puts 5 for '<s>', which is 3"]),
    "not added": (file(bert(5), ADDED[1:]), []),
    "no object": (file(bert(5, "[3], "), ADDED), []),
    "none": (file(', "post_processor": null, "x": {}', ADDED), []),
    "last row": (file("", [{"content": "<z>", "id": 9}]), []),
    "one behind": (
        file("", [{"content": "<z>", "id": 10}]),
        ["'<z>' have ids after the 10 rows of the embedding"],
    ),
    "two behind": (
        file("", [{"content": "<z>", "id": 11}, {"content": "<image>", "id": 10}]),
        ["'<z>' and 1 more have ids after the 10 rows of the embedding"],
    ),
    "pictures behind": (file("", [{"content": "<IMAGE_1>", "id": 12}]), []),
    "rows unknown": (file("", [{"content": "<z>", "id": 12}], None), []),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_s_ids_are_held_against_the_embedding(case: str) -> None:
    carried, wanted = FILES[case]
    assert list(quick_warnings(carried)) == wanted


def test_added_tokens_are_those_of_both_files() -> None:
    carried = file("", [{"content": "<a>", "id": 1}, {"content": "", "id": 2}, "x", {"id": 3}])
    carried.tokenizer_config = {
        "added_tokens_decoder": {
            "5": {"content": "<b>"}, "6": {"content": "<a>"}, "x": {"content": "<c>"},
            "123456789": {"content": "<d>"}, "1234567890": {"content": "<e>"}, "7": "no row",
            "\u0661": {"content": "<f>"},
        }
    }  # fmt: skip
    assert added_ids(carried) == {"<a>": 1, "<b>": 5, "<d>": 123456789}
    carried.tokenizer_json = lambda: '{"added_tokens": [{"content": "<a>"'
    assert added_ids(carried) == {"<b>": 5, "<a>": 6, "<d>": 123456789}


def test_the_end_of_an_answer_is_the_control_token_behind_it() -> None:
    template = "{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}"
    assert find_turn_end(listed([1, 1, CONTROL], template=template).carried) == 2
    assert find_turn_end(listed([1, 1, NORMAL], template=template).carried) is None
    assert find_turn_end(listed([1, 1, CONTROL], template="{{ messages }}").carried) is None


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("healed", [True, False])
def test_a_cut_mark_is_a_finding_with_its_place(
    lists: bool, written: bool, healed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark that no test conversation has, or that llama.cpp heals, is a warning."""
    cut = CutMark(Mark("<x>", 3, written, False), (1, 2), ("<", "x>"), healed)
    parts = SimpleNamespace(uses_lists=lists, data=None), [cut.mark, cut.mark]
    monkeypatch.setattr(template_tokens, "absent_types", lambda carried: None)
    monkeypatch.setattr(template_tokens, "_template_tokens", lambda ctx: parts)
    monkeypatch.setattr(template_tokens, "cut_marks", lambda side, found: iter([cut]))
    context: Any = SimpleNamespace(carried=SimpleNamespace(where="m"))
    result = template_tokens.check_token_types(context)
    (finding,) = result.findings
    place = "tokenizer.ggml.token_type" if lists else "added_tokens"
    assert finding.where == f"m: {place}"
    assert finding.level == ("fail" if written and not healed else "warning")
    assert cut.text in finding.found and ("llama.cpp overrides" in finding.found) == healed
    assert "2 marks of the chat template" in str(result)
    monkeypatch.setattr(template_tokens, "_template_tokens", lambda ctx: (None, []))
    with pytest.raises(NotRun):
        template_tokens.check_token_types(context)
