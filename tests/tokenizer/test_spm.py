"""SentencePiece BPE from scores, against sentencepiece itself and against `tokenizers`."""

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.protocols import TypedValue
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.loading import load_tokenizer
from tests.tokenizer.fake import fake, folder_model, without_json
from tests.tokenizer.strings import STRINGS

TEXTS = [*(text for text in STRINGS.values() if text.strip()), "the cat sat on the mat " * 3] * 3


@lru_cache
def trained(prefix: bool, byte_fallback: bool = True) -> Any:
    """Return a small model trained by sentencepiece."""
    import sentencepiece

    model = io.BytesIO()
    lines = [line for text in TEXTS for line in text.split("\n") if line and "\0" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        num_threads=1,
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        character_coverage=0.98,
        max_sentence_length=9999,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def keys(prefix: bool, byte_fallback: bool = True, **more: Any) -> dict[str, Any]:
    """Return the GGUF keys llama.cpp's converter makes of it."""
    sp = trained(prefix, byte_fallback)
    every = range(sp.get_piece_size())
    types = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
        for i in every
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": TypedValue([sp.id_to_piece(i) for i in every], "array:string"),
        "tokenizer.ggml.scores": TypedValue([sp.get_score(i) for i in every], "array:float32"),
        "tokenizer.ggml.token_type": TypedValue(types, "array:int32"),
        "tokenizer.ggml.bos_token_id": TypedValue(1, "uint32"),
        "tokenizer.ggml.eos_token_id": TypedValue(2, "uint32"),
        "tokenizer.ggml.unknown_token_id": TypedValue(0, "uint32"),
        "tokenizer.ggml.add_space_prefix": TypedValue(prefix, "bool"),
        **more,
    }


@pytest.mark.parametrize("byte_fallback", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_ids_of_sentencepiece(prefix: bool, byte_fallback: bool) -> None:
    sp = trained(prefix, byte_fallback)
    ours = load_tokenizer(fake("gguf", keys(prefix, byte_fallback)))
    for name, text in STRINGS.items():
        wanted = sp.encode(text)
        got = ours.encode(text, add_special=False, parse_special=False)
        assert got == wanted, name
        assert ours.encode(text, parse_special=False) == [1, *wanted], name
        if byte_fallback and "\0" not in text:
            shown = ours.decode(wanted)
            assert shown == sp.decode(wanted) or not prefix, name
            assert shown == text.replace("\u2581", " "), name


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from(" the catson\u2581é你🚀\n\t1"), max_size=40))
def test_any_text(text: str) -> None:
    ours = load_tokenizer(fake("gguf", keys(True)))
    assert ours.encode(text, add_special=False) == trained(True).encode(text)


@pytest.mark.parametrize("byte_fallback", [True, False], ids=["bytes", "unknown"])
@pytest.mark.parametrize("prefix", [True, False], ids=["prefix", "no-prefix"])
def test_built_folder_gives_the_same_ids(prefix: bool, byte_fallback: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    user = {
        700: ("<sep>", 4),
        701: ("\u2581\u2581", 4),
        702: ("\u2581\u2581\u2581", 4),
        703: ("<q", 4),
        704: ("<q>", 4),
    }
    metadata = keys(prefix, byte_fallback)
    size = len(metadata["tokenizer.ggml.tokens"].value)
    for token, kind in user.values():
        spelled = token.replace("\u2581", " ")  # as llama.cpp's converter writes them
        if token not in metadata["tokenizer.ggml.tokens"].value:
            metadata["tokenizer.ggml.tokens"].value.append(spelled)
            metadata["tokenizer.ggml.scores"].value.append(-1000.0)
            metadata["tokenizer.ggml.token_type"].value.append(kind)
    assert len(metadata["tokenizer.ggml.tokens"].value) > size
    source = fake("gguf", metadata)
    for name, text in to_hf(source).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours, again = load_tokenizer(source), load_tokenizer(folder_model(tmp_path))
    more = {"user": "a<sep>b  c   d<s>e", "runs": " " * 9 + "x", "longest": "a<q>b<qc<q>>"}
    for name, text in {**STRINGS, **more}.items():
        ids = ours.encode(text)
        assert theirs.encode(text) == ids == again.encode(text), name
        assert ours.decode(ids) == theirs.decode(ids), name
        plain = ours.encode(text, add_special=False, parse_special=False)
        assert plain == again.encode(text, add_special=False, parse_special=False), name
    written = to_gguf(folder_model(tmp_path))
    scores = dict(
        zip(*(written[f"tokenizer.ggml.{key}"].value for key in ("tokens", "scores")), strict=True)
    )
    assert {scores[token] for token in ("<sep>", "<q", "<q>")} == {-1000.0}  # as llama.cpp's


def test_every_way_back(tmp_path: Path) -> None:
    source = fake("gguf", keys(True))
    for name, text in to_hf(source).items():
        (tmp_path / name).write_text(text)
    folder = folder_model(tmp_path)
    back = to_gguf(folder)
    models = {
        "apr": fake("apr", to_apr(source)),
        "gguf-apr-gguf": fake("gguf", to_gguf(fake("apr", to_apr(source)))),
        "folder-gguf": fake("gguf", back),
        "scores of merges": fake("gguf", without_json(back)),
        "folder-apr": fake("apr", without_json(to_apr(folder))),
    }
    assert back["tokenizer.ggml.model"] == "llama" and back["tokenizer.ggml.pre"] == "default"
    ours, facts_of = load_tokenizer(source), tokenizer_facts(source)
    for way, model in models.items():
        other, there = load_tokenizer(model), tokenizer_facts(model)
        for name, text in STRINGS.items():
            assert other.encode(text) == ours.encode(text), (way, name)
        assert {k: there[k] for k in there if k in facts_of} == dict(facts_of), way


def test_phi3_tokens_swallow_the_blanks_behind_them(tmp_path: Path) -> None:
    """As its tokenizer.json has it (`rstrip`), which GGUF cannot say."""
    metadata = {**keys(True), "general.architecture": "phi3"}
    metadata["tokenizer.ggml.tokens"].value.append("<|user|>")
    metadata["tokenizer.ggml.scores"].value.append(-1000.0)
    metadata["tokenizer.ggml.token_type"].value.append(3)
    source = fake("gguf", metadata)
    user = len(metadata["tokenizer.ggml.tokens"].value) - 1
    ours = load_tokenizer(source)
    for name, text in to_hf(source).items():
        (tmp_path / name).write_text(text)
    built = load_tokenizer(folder_model(tmp_path))
    bare, tail = (ours.encode(text, add_special=False) for text in ("the", " the"))
    for blank in ("", " ", "\n", " \t\u3000\n  ", "\x1c"):
        ids = ours.encode(f"<|user|>{blank}the<s> the", add_special=False)
        assert built.encode(f"<|user|>{blank}the<s> the", add_special=False) == ids
        assert (ids[: 1 + len(bare)] == [user, *bare]) is (blank != "\x1c")
        assert ids[-len(tail) :] == tail != bare  # <s> leaves the blank


def test_control_tokens_are_never_made_from_text() -> None:
    ours = load_tokenizer(fake("gguf", keys(False)))
    assert ours.encode("<s></s>", add_special=False) == [1, 2]
    plain = ours.encode("<s></s>", add_special=False, parse_special=False)
    assert not {1, 2} & set(plain) and ours.decode(plain) == "<s></s>"


def test_broken_bytes_become_replacement_characters() -> None:
    ours = load_tokenizer(fake("gguf", keys(False)))
    ids = ours.encode("\U0001f9ff", add_special=False)  # in no piece: four byte tokens
    assert len(ids) == 4 and ours.decode(ids) == "\U0001f9ff"
    assert ours.decode(ids[:3]) == "\ufffd" * 3
