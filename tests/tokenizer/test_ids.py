"""Equal ids, whichever format the tokenizer came from; transformers is the judge."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.errors import UsageError
from aprfmt.model import Model, open_model
from aprfmt.tokenizer.base import Tokenizer
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.loading import load_tokenizer
from tests.tokenizer.fake import fake, folder_model, without_json, write_gguf
from tests.tokenizer.strings import STRINGS

RECORDED = Path(__file__).with_name("recorded.json")
ROUTES = ("folder", "gguf", "gguf-table", "apr", "apr-table", "gguf-apr-gguf", "table-folder")


@pytest.fixture(scope="session")
def oracle(demo_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="session")
def routes(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """The demo model's tokenizer by every way it can travel."""
    source = folder_model(demo_model)
    gguf, apr = to_gguf(source), to_apr(source)
    table = fake("gguf", without_json(gguf))
    folder = tmp_path_factory.mktemp("built")
    for name, text in to_hf(table).items():
        (folder / name).write_text(text)
    written = write_gguf(tmp_path_factory.mktemp("gguf") / "demo.gguf", gguf)
    return {
        "folder": source,
        "gguf": open_model(written),
        "gguf-table": table,
        "apr": fake("apr", apr),
        "apr-table": fake("apr", without_json(apr)),
        "gguf-apr-gguf": fake("gguf", to_gguf(fake("apr", to_apr(table)))),
        "table-folder": folder_model(folder),
    }


@pytest.mark.parametrize("route", ROUTES)
def test_demo_ids(route: str, routes: dict[str, Model], oracle: Any) -> None:
    ours = load_tokenizer(routes[route])
    for name, text in STRINGS.items():
        wanted = oracle.encode(text)
        assert ours.encode(text) == wanted, name
        assert ours.decode(wanted) == oracle.decode(wanted), name
        shown = ours.decode(wanted, skip_special=True)
        assert shown == oracle.decode(wanted, skip_special_tokens=True), name


@pytest.mark.parametrize("route", ROUTES)
def test_demo_special_tokens(route: str, routes: dict[str, Model], oracle: Any) -> None:
    ours = load_tokenizer(routes[route])
    assert (ours.eos_id, ours.pad_id) == (oracle.eos_token_id, oracle.pad_token_id)
    assert ours.vocab_size == len(oracle)
    assert {ours.eos_id, ours.pad_id} <= ours.stop_ids
    assert ours.token(ours.stop_ids.__iter__().__next__()).startswith("<|")
    plain = ours.encode("<|im_end|>", parse_special=False)
    assert ours.eos_id not in plain and ours.decode(plain) == "<|im_end|>"


@pytest.mark.parametrize("route", ROUTES)
def test_demo_chat(route: str, routes: dict[str, Model], oracle: Any) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "Hello  there"}]
    wanted = oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    ours = load_tokenizer(routes[route])
    assert ours.chat(messages)[1] == list(wanted)
    text = ours.apply_chat_template(messages, add_generation_prompt=False)
    assert text == oracle.apply_chat_template(messages, tokenize=False)


def test_special_tokens_stand_once(routes: dict[str, Model]) -> None:
    """A template that writes bos, for a model that wants one: once, and never twice."""
    metadata = {**routes["gguf-table"].metadata, "tokenizer.ggml.add_bos_token": True}
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    ours = load_tokenizer(fake("gguf", metadata))
    assert ours.encode("x")[0] == ours.bos_id
    _, ids = ours.chat([{"role": "user", "content": "x"}])
    assert ids == ours.encode("x") and ids.count(ours.bos_id or -1) == 1


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_demo_on_any_text(demo_model: Path, text: str) -> None:
    ours, table = _pair(demo_model)
    ids = ours.encode(text)
    assert table.encode(text) == ids
    import unicodedata

    assert ours.decode(ids) == unicodedata.normalize("NFC", text)


_PAIR: list[Tokenizer] = []


def _pair(demo_model: Path) -> list[Tokenizer]:
    if not _PAIR:
        source = folder_model(demo_model)
        _PAIR.extend(
            (load_tokenizer(source), load_tokenizer(fake("gguf", without_json(to_gguf(source)))))
        )
    return _PAIR


@pytest.mark.parametrize("name", ["gemma", "smollm2"])
def test_foreign_gguf(name: str, request: pytest.FixtureRequest) -> None:
    """Ids recorded from transformers 5.23, `AutoTokenizer.from_pretrained(folder, gguf_file=...)`.

    For SmolLM2 its splitting was replaced by the checkpoint's own, `Digits(individual_digits=True)`
    before `ByteLevel`: transformers splits every GGUF it has no rule for as GPT-2 does.
    """
    path = request.getfixturevalue(name)
    wanted = json.loads(RECORDED.read_text())[name]
    with open_model(path) as model:
        ours = load_tokenizer(model)
        assert set(wanted) == set(STRINGS)
        for key, text in STRINGS.items():
            assert ours.encode(text, add_special=False) == wanted[key], key
        bos = [ours.bos_id] if name == "gemma" else []
        assert ours.encode("x") == [*bos, *ours.encode("x", add_special=False)]


def test_smollm2_by_way_of_all_formats(smollm2: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    with open_model(smollm2) as model:
        ours = load_tokenizer(model)
        apr = load_tokenizer(fake("apr", to_apr(model)))
        for name, text in to_hf(model).items():
            (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 49152}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    again = load_tokenizer(folder_model(tmp_path))
    for key, text in STRINGS.items():
        ids = ours.encode(text)
        assert apr.encode(text) == again.encode(text) == ids == theirs.encode(text), key
        assert theirs.decode(ids) == ours.decode(ids), key
    messages = [{"role": "user", "content": "hi"}]
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.chat(messages)[1] == again.chat(messages)[1] == list(wanted)


def test_text_that_is_no_unicode(demo_model: Path) -> None:
    with pytest.raises(UsageError, match="character 1"):
        load_tokenizer(folder_model(demo_model)).encode("a\udce9")


def test_ids_beyond_the_vocabulary(demo_model: Path) -> None:
    ours = load_tokenizer(folder_model(demo_model))
    assert ours.token(10**12) == "[PAD1000000000000]"
    assert ours.decode([10**12, -1]) == ""
    with pytest.raises(UsageError, match="-1"):
        ours.token(-1)
