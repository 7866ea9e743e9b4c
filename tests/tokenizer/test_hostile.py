"""Damaged vocabularies: one of our errors, never another one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.errors import AprfmtError, FormatError, UnsupportedError
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.loading import load_tokenizer
from tests.tokenizer.fake import fake, folder_model

BPE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
}
SPM: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -2.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
}

DAMAGE: dict[str, tuple[dict[str, Any], type[AprfmtError], str]] = {
    "no model": ({"tokenizer.ggml.model": None}, FormatError, "missing next to the tokens"),
    "model number": ({"tokenizer.ggml.model": 3}, FormatError, "expected a string"),
    "wordpiece": ({"tokenizer.ggml.model": "bert"}, UnsupportedError, "bert"),
    "unigram": ({"tokenizer.ggml.model": "t5"}, UnsupportedError, "t5"),
    "no pre": ({"tokenizer.ggml.pre": None}, UnsupportedError, "how its text is split"),
    "unknown pre": ({"tokenizer.ggml.pre": "nope"}, UnsupportedError, "'nope' is not known"),
    "tokens text": ({"tokenizer.ggml.tokens": "abc"}, FormatError, "expected a list"),
    "tokens numbers": ({"tokenizer.ggml.tokens": ["a", 2, "ab", "x"]}, FormatError, "holds int"),
    "few types": ({"tokenizer.ggml.token_type": [1]}, FormatError, "1 elements for 4 tokens"),
    "types text": ({"tokenizer.ggml.token_type": ["1"] * 4}, FormatError, "holds str"),
    "no merges": ({"tokenizer.ggml.merges": None}, FormatError, "without merges"),
    "merge of one": ({"tokenizer.ggml.merges": ["ab"]}, FormatError, "does not join"),
    "merge to nowhere": ({"tokenizer.ggml.merges": ["b a"]}, FormatError, "does not join"),
    "bos text": ({"tokenizer.ggml.bos_token_id": "x"}, FormatError, "expected a token id"),
    "bos negative": ({"tokenizer.ggml.bos_token_id": -1}, FormatError, "expected a token id"),
    "not UTF-8": ({"tokenizer.ggml.tokens": ["a", "b", "ab", "\udc80"]}, FormatError, "surrogate"),
    "template": ({"tokenizer.chat_template": 5}, FormatError, "expected a string"),
    "long template": ({"tokenizer.chat_template": "x" * (2 << 20)}, FormatError, "the limit is"),
    "files": ({"aprfmt.files": "["}, FormatError, "not JSON"),
    "json": ({"tokenizer.huggingface.json": "{"}, FormatError, "not a tokenizer"),
    "json list": ({"tokenizer.huggingface.json": "[]"}, FormatError, "not a tokenizer"),
    "json number": ({"tokenizer.huggingface.json": 7}, FormatError, "expected a string"),
    "json deep": ({"tokenizer.huggingface.json": "[" * 9999}, FormatError, "not a tokenizer"),
}


def changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    changes, kind, message = DAMAGE[name]
    with pytest.raises(kind, match=message):
        load_tokenizer(fake("gguf", changed(BPE, changes)))


@pytest.mark.parametrize("key", ["tokenizer.ggml.scores", "tokenizer.ggml.token_type"])
def test_spm_lists_too_short(key: str) -> None:
    with pytest.raises(FormatError, match="2 elements for 6 tokens"):
        load_tokenizer(fake("gguf", changed(SPM, {key: SPM[key][:2]})))


def test_spm_without_scores() -> None:
    with pytest.raises(FormatError, match="without scores or merges"):
        load_tokenizer(fake("gguf", changed(SPM, {"tokenizer.ggml.scores": None})))


def test_ids_beyond_the_vocabulary_do_not_count() -> None:
    model = fake("gguf", changed(BPE, {"tokenizer.ggml.eos_token_id": 99}))
    assert load_tokenizer(model).eos_id is None and "eos_id" not in tokenizer_facts(model)


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 9), st.floats(), st.text(max_size=4),
    st.lists(st.one_of(st.text(max_size=3), st.integers(-3, 9), st.floats()), max_size=6),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([BPE, SPM]),
    st.dictionaries(
        st.sampled_from([*BPE, *SPM, "tokenizer.ggml.add_bos_token", "aprfmt.files"]),
        ANY,
        max_size=3,
    ),
)
def test_any_metadata(base: dict[str, Any], changes: dict[str, Any]) -> None:
    model = fake("gguf", changed(base, changes))
    for use in (
        tokenizer_facts,
        to_gguf,
        to_hf,
        to_apr,
        lambda m: load_tokenizer(m).encode("a <s>b"),
    ):
        try:
            use(model)
        except AprfmtError as error:
            assert "\n" not in str(error)


JSON: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 3,
            "content": "<s>",
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    },
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_tokenizer_json(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    value: Any = json.loads(json.dumps(JSON))
    parts = [value, value["model"], value["added_tokens"][0], value["post_processor"]]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.sampled_from(list(part)))] = data.draw(ANY)
    folder = _folder(tmp_path_factory, value)
    for use in (tokenizer_facts, to_gguf, to_apr, to_hf):
        try:
            use(folder_model(folder))
        except AprfmtError as error:
            assert "\n" not in str(error)


def _folder(factory: pytest.TempPathFactory, value: Any) -> Path:
    folder = factory.getbasetemp() / "any-json"
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", '{"eos_token_id": [1, null, "x"]}', "null"])
def test_damaged_companions(tmp_path: Path, name: str, text: str) -> None:
    _write(tmp_path, name, text)
    try:
        load_tokenizer(folder_model(tmp_path))
    except FormatError as error:
        assert name in str(error)


def _write(folder: Path, name: str, text: str) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(JSON))
    (folder / name).write_text(text)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<x>"}, "7": {"content": "<y>"}}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"1": 5}},
        {"extra_special_tokens": [1, {"content": "<z>"}], "bos_token": {"content": 3}},
        {"additional_special_tokens": "<q>", "chat_template": [{"name": 1}, {}]},
        {"chat_template": {"a": 1}},
    ],
)
def test_odd_tokenizer_configs(tmp_path: Path, config: dict[str, Any]) -> None:
    _write(tmp_path, "tokenizer_config.json", json.dumps(config))
    for use in (tokenizer_facts, to_gguf, lambda m: load_tokenizer(m).encode("a<s><y>")):
        try:
            use(folder_model(tmp_path))
        except AprfmtError as error:
            assert "\n" not in str(error)
