"""Parts of the tokenizers, each by itself."""

import io
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.tokenizer import (
    engine_server,
    isolated,
    keys,
    llama_server,
    render_child,
    stored_parts,
    template,
    template_engines,
)
from aprfmt.tokenizer import tokenizer_cost as expense
from aprfmt.tokenizer.build import tokenizer_json
from aprfmt.tokenizer.carriers import scores_from_merges
from aprfmt.tokenizer.conversations import ENGINE_CONVERSATIONS
from aprfmt.tokenizer.hf_engine import HfEngine
from aprfmt.tokenizer.hf_json import FLAGS, config_added_tokens
from aprfmt.tokenizer.limits import REASON
from aprfmt.tokenizer.loading import _metadata_special_texts
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.stored_tokenizer import _plain_vocabulary
from aprfmt.tokenizer.template import render_several
from aprfmt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.fake import fake


def test_scores_fall_in_the_order_of_merges_then_of_ids() -> None:
    tokens = ["zz", "ab", "y", "abc", "x"]
    found = scores_from_merges(
        Vocabulary("bpe", tokens, [keys.NORMAL] * len(tokens), merges=["a b", "ab c", "q q"])
    )
    ordered = sorted(zip(found, tokens, strict=True), reverse=True)
    assert [token for _, token in ordered] == ["ab", "abc", "zz", "y", "x"]
    assert len(set(found)) == len(found)


def test_the_named_template_that_is_a_text_counts() -> None:
    rows = [
        {"name": "tool_use"}, {"template": "nameless"}, {"name": 3, "template": "x"}, "text",
        {"name": "rag", "template": ["no text"]}, {"name": "other", "template": "other's"},
        {"name": "default", "template": "default's"},
    ]  # fmt: skip
    for last, expected in ((7, "default's"), (6, "other's"), (5, None)):
        carried: Any = SimpleNamespace(
            where="m", _stored_templates=lambda n=last: iter([(rows[:n], "f")])
        )
        assert Carried.template_and_origin(carried)[0] == expected


def test_the_process_of_an_engine_that_ended_is_waited_for() -> None:
    engine = isolated.IsolatedEngine(
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "t", "why"
    )
    child = engine._child
    child.kill()
    with pytest.raises(FormatError, match=r"t: the tokenizer needs more than .* \(why\)"):
        engine.encode("text", False, False)
    assert child.returncode is not None, "left as a zombie"
    assert child.stdin is not None and child.stdin.closed


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_an_answer_may_be_as_long_as_its_limit(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's answer of as many bytes as are allowed is given, one more is not."""
    wanted = json.dumps(["ok", "x" * 50]).encode()
    out = io.BytesIO()
    given = SimpleNamespace(buffer=io.BytesIO(b'["decode", [[1], false]]\n'))
    monkeypatch.setattr("sys.stdin", given)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=out))
    for name in ("limit_resources", "limit_cpu"):
        monkeypatch.setattr(engine_server, name, lambda *of, **named: None)
    engine = SimpleNamespace(decode=lambda ids, skip: "x" * 50)
    monkeypatch.setattr(HfEngine, "from_text", lambda text, where: engine)
    limits = {"cpu_seconds": 1, "memory": 1, "output": len(wanted) + room}
    engine_server.serve({"limits": limits, "text": "", "where": ""})
    first, second = out.getvalue().splitlines()
    assert json.loads(first) == ["ok", None]
    assert second == (wanted if room >= 0 else b'["output", ""]')


LIMIT = 40  # bytes that the templates below may write
ENDS = {  # template -> how it ends
    "{{ messages }}": ("ok", "hello"),
    "{{ 'é' * 20 }}": ("ok", "é" * 20),
    "{{ 'é' * 20 }}!": ("output", ""),  # counted are bytes
    "{{ 'x' * 2 ** 62 }}": ("memory", ""),
    "{{ {'b': 1, 'a': '<é>'} | tojson }}": ("ok", '{"b": 1, "a": "<é>"}'),  # no order of its own
    "{% if %}": ("syntax", "line 1: Expected an expression, got 'end of statement block'"),
    "{{ raise_exception('no system role') }}": ("refused", "no system role"),
    "{{ messages.__class__.mro() }}": ("unsafe", ""),
    "{{ 1 // 0 }}": ("error", "ZeroDivisionError: "),
}


@pytest.mark.parametrize("template", ENDS)
@pytest.mark.parametrize("task", ["render", "several"])
def test_each_end_of_a_template_has_its_word(template: str, task: str) -> None:
    """One context is rendered, or several: what a message says goes by the word."""
    context = {"messages": "hello"}
    request = {"task": task, "template": template, "context": context, "contexts": [context]}
    status, text = render_child.answer_request(request, LIMIT)
    wanted = ENDS[template]
    if task == "several" and wanted[0] not in ("output", "memory", "syntax"):
        assert status == "ok"
        ((status, text),) = json.loads(text)
    assert status == wanted[0] and text.startswith(wanted[1])


@pytest.mark.parametrize("text", ["x" * 21, "é" * 11])
def test_several_texts_together_have_the_limit_in_bytes(text: str) -> None:
    contexts = [{"messages": text}, {"messages": text}]
    request = {"task": "several", "template": "{{ messages }}", "contexts": contexts}
    assert render_child.answer_request(request, 2 * len(text.encode()))[0] == "ok"
    assert render_child.answer_request(request, 2 * len(text.encode()) - 1) == ("output", "")


class Engine:
    """What an engine may do when it is asked."""

    names = frozenset({"b", "a"})

    def encode(self, how: str) -> list[int]:
        raise {"memory": MemoryError(), "ours": FormatError("t: no such token")}[how]


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        ("names", [], ("ok", ["a", "b"])),
        ("encode", ["memory"], ("memory", "")),
        ("encode", ["ours"], ("error", "t: no such token")),
    ],
)
def test_each_end_of_a_call_of_an_engine_has_its_word(
    call: str, arguments: list[str], expected: tuple[str, Any]
) -> None:
    assert engine_server.answer_call(Engine(), call, arguments) == expected


def test_tokenizer_config_adds_what_is_new_and_changes_what_has_other_flags() -> None:
    flags = dict.fromkeys(FLAGS, False)
    special = {**flags, "special": True}
    decoder = {
        "10": {"content": "<new>", **special}, "9": {"content": "<changed>", **special},
        "2": {"content": "<same>", **flags}, "11": {"content": "<new>", **special},
    }  # fmt: skip
    carried: Any = SimpleNamespace(
        where="m", parse_file=lambda name: {},
        tokenizer_config={
            "added_tokens_decoder": decoder, "eos_token": "<eos>", "bos_token": "<same>",
        },
    )  # fmt: skip
    known = {"<same>": flags, "<changed>": flags, "<other>": flags}
    found = [(row["content"], {flag: row[flag] for flag in FLAGS})
             for row in config_added_tokens(carried, known)]  # fmt: skip
    assert found == [("<changed>", special), ("<new>", special), ("<eos>", special)]


def test_an_id_beyond_the_tokens_has_no_text() -> None:
    carried: Any = SimpleNamespace(
        metadata_value=lambda key: ["a", "b", 3],
        token_ids=lambda: {"bos": 0, "eos": 1, "pad": 2, "unk": 3},
    )
    assert _metadata_special_texts(carried) == {"bos": "a", "eos": "b"}
    carried.metadata_value = lambda key: "ab"
    assert _metadata_special_texts(carried) == {}


@pytest.mark.parametrize("bytes_too", [False, True])
@pytest.mark.parametrize(("text", "unknown"), [("a?b", 1), ("a??b", 1), ("a?b??", 2)])
def test_unknown_characters_in_a_row_are_one_token_of_sentencepiece(
    text: str, unknown: int, bytes_too: bool
) -> None:
    """As LlamaTokenizer has it; with tokens for bytes there are no unknown characters."""
    tokenizers = pytest.importorskip("tokenizers", reason="NOT-RUN: tokenizers is not installed")
    extra = [f"<0x{i:02X}>" for i in range(256)] if bytes_too else []
    tokens = ["<unk>", "a", "b", "\u2581", *extra]
    types = [2, 1, 1, 1, *(6 for _ in extra)]
    vocabulary = Vocabulary("spm", tokens, types, merges=[], ids={"unk": 0})
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(vocabulary, "m")))
    ids = made.encode(text, add_special_tokens=False).ids
    assert ids.count(0) == (0 if bytes_too else unknown)
    assert ids.count(tokens.index("a")) == ids.count(tokens.index("b")) == 1
    assert sum(i > 3 for i in ids) == (text.count("?") if bytes_too else 0)


@pytest.mark.parametrize("eos", [0, 3, 4, 9])
def test_an_id_that_no_token_has_is_no_special_one(eos: int) -> None:
    """Of a kind of vocabulary that is not encoded with here, too."""
    metadata = {
        "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
        "tokenizer.ggml.eos_token_id": eos,
    }  # fmt: skip
    words = _plain_vocabulary(fake("gguf", metadata).carried, "rwkv")
    assert list(words.tokens) == ["a", "b", "c", "d"] and len(words.types) == 4
    assert dict(words.ids) == ({"eos": eos} if eos < 4 else {})
    assert "eos" not in words.engine_defaults  # a stated id is not replaced by an engine's default


@pytest.mark.parametrize("over", [0, 1])
def test_steps_of_a_tokenizer_are_bounded(over: int) -> None:
    steps = [{"type": "Strip"}] * (expense.MOST_STEPS + over)
    parts = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    found = list(expense._unbounded_reasons(parts))
    assert found == ([f"normalizer has {expense.MOST_STEPS + 1} steps"] if over else [])
    token = {"content": "x" * (expense.MOST_TOKEN + over)}
    assert len(list(expense._unbounded_reasons({"added_tokens": [token]}))) == over


@pytest.mark.parametrize(
    ("held", "kind", "says"),
    [
        (None, str, None),
        ([], str, None),
        (["a", "b"], str, None),
        (["a", 1], str, "holds int; the file is damaged"),
        ([1, 2.5], (float, int), None),
        ([1, True], (float, int), "holds bool; the file is damaged"),
        ([1, "a", None], (float, int), "holds NoneType, str; the file is damaged"),
        ("ab", str, "is str; expected a list"),
        (7, int, "is int; expected a list"),
    ],
)
@pytest.mark.parametrize("form", ["gguf", "apr"])
def test_a_list_holds_what_is_asked_of_it(form: str, held: Any, kind: Any, says: Any) -> None:
    """A token that is a number, or a type that is a boolean, is damage and no token."""
    key = keys.TOKENS
    name = key.gguf if form == "gguf" else key.apr
    model = fake(form, {} if held is None else {name: held})
    if says is None:
        assert model.carried.list_value(key, kind) == held
        return
    with pytest.raises(FormatError, match=f"{name}: {says}"):
        model.carried.list_value(key, kind)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_list_may_be_as_long_as_its_limit(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_parts, "MAX_TOKENS", 3)
    held = ["a"] * (3 + more)
    carried = fake("gguf", {keys.TOKENS.gguf: held}).carried
    if more <= 0:
        assert carried.list_value(keys.TOKENS, str) == held
        return
    with pytest.raises(FormatError, match="4 elements, the limit is 3"):
        carried.list_value(keys.TOKENS, str)


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("{{ messages[-1].role }}", ()),
        ("{{ messages[-1].role }}{{ enable_thinking }}", ("enable_thinking",)),
        ("{{ messages[-1].role }}{{ date_string }}", ("date_string",)),
        ("{{ date_string }}{{ enable_thinking }}", ("date_string", "enable_thinking")),
        ("{{ date_string }}{{ own }}", ()),
    ],
)
def test_what_llama_cpp_alone_gives_a_template_is_named_where_it_explains(
    template: str, given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that gives a template the same variables, and `own`, which nothing here knows."""

    def rendered(
        template: str, variables: Any, conversations: Sequence[Any], where: str
    ) -> tuple[str, Any]:
        theirs = {**template_engines._llama_cpp_variables(), "own": "its own"}
        told = [{**theirs, **one} for one in conversations]
        return "llama.cpp", render_several(template, told, variables, where)

    monkeypatch.setattr(template_engines, "render_by_llama_cpp", rendered)
    found = template_engines.compare_engines(template, {}, "test")
    assert bool(found.differing) is ("date_string" in template or "thinking" in template)
    for row in found.differing:
        stated = ENGINE_CONVERSATIONS[row.conversation]
        assert set(row.given) == set(given) - set(stated)


def test_trees_of_templates_are_equal_where_they_render_alike() -> None:
    """Comments, quotes and the control of whitespace are gone; texts around a comment are one."""

    def trees(*templates: str) -> list[Any]:
        status, text = render_child.answer_request({"task": "trees", "templates": templates}, 0)
        assert status == "ok"
        found: list[Any] = json.loads(text)
        assert len(found) == len(templates)
        return found

    alike = ["{{ a['b'] }}\nx", '{{a["b"]}}\nx', "{{ a['b'] }}{# why #}{# no #}\n\nx"]
    one, *others = trees(*alike)
    assert others == [one, one]
    assert trees("y{# c #}z") == trees("yz") != trees("y{{ c }}z")
    for other in ("{{ a['c'] }}\nx", "{{ a['b'] }} x", "{{ a['b'] -}}\nx", "{{ a.b }}\nx", ""):
        assert trees(other) != [one], other
    given = {"task": "trees", "templates": ["{% if %}"]}
    assert render_child.answer_request(given, 0)[0] == "syntax"


@pytest.mark.parametrize("asked", [None, False, True])
def test_a_server_is_asked_for_the_conversation_that_a_template_gets(asked: bool | None) -> None:
    """Without the word for it the model's turn is not begun, as transformers has it."""
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if asked is not None:
        given["add_generation_prompt"] = asked
    assert llama_server._request_body(given) == {
        "add_generation_prompt": bool(asked), "messages": given["messages"]
    }  # fmt: skip
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    told = {"role": "assistant", "content": "", "tool_calls": [call]}
    found = llama_server._request_body({"messages": [told], "tools": [], "thinking": True})
    assert found["messages"][0]["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
    assert found["chat_template_kwargs"] == {"thinking": True} and "tools" not in found


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_templates_own_error_is_shown_up_to_its_limit(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = SimpleNamespace(kill=lambda: None, wait=lambda: 0)
    monkeypatch.setattr(template, "start_library_child", lambda kind: child)
    text = "x" * (REASON + more)
    answer = f"error\n{text}".encode()
    monkeypatch.setattr(template, "_exchange_with_child", lambda child, payload: answer)
    with pytest.raises(FormatError) as caught:
        template._run_child("render", {}, "here")
    assert str(caught.value).endswith(": " + "x" * min(REASON, REASON + more))
