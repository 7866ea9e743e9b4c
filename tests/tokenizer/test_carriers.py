"""The parts of a tokenizer that each format gets, and the facts that can be read back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ConversionError, FormatError, UnsupportedError
from aprfmt.model import Model
from aprfmt.tokenizer import keys
from aprfmt.tokenizer.carriers import scores_from_merges, to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.loading import load_tokenizer
from aprfmt.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.fake import (
    added_ids,
    byte_level,
    fake,
    folder_model,
    gguf_vocabulary,
    without_json,
    write_gguf,
)


def copied(demo_model: Path, tmp_path: Path, **changes: Any) -> Path:
    """Copy the demo folder's texts; `changes` replace keys of config.json."""
    for path in demo_model.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "golden.json":
            (tmp_path / path.name).write_text(path.read_text())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path


def values(metadata: dict[str, Any]) -> dict[str, Any]:
    return {k: v.value if isinstance(v, TypedValue) else v for k, v in metadata.items()}


def test_key_names_are_those_of_gguf() -> None:
    from gguf import Keys

    known = {value for name, value in vars(Keys.Tokenizer).items() if not name.startswith("_")}
    assert {key.gguf for key in keys.KEYS} <= known


def test_types_are_those_of_the_writer(demo_model: Path) -> None:
    from aprfmt.formats.gguf.known_keys import known_type

    for key in keys.KEYS:
        if key.type != "string" and key.type != "array:string":
            assert known_type(key.gguf, key.type.startswith("array")) == key.type, key


def test_gguf_read_by_the_gguf_package(demo_model: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader, TokenType

    reader = GGUFReader(write_gguf(tmp_path / "x.gguf", to_gguf(folder_model(demo_model))))
    found = {name: field.contents() for name, field in reader.fields.items()}
    data = json.loads((demo_model / "tokenizer.json").read_text())
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == "qwen2"
    assert found["tokenizer.ggml.merges"] == [" ".join(m) for m in data["model"]["merges"]]
    tokens, vocab = found["tokenizer.ggml.tokens"], data["model"]["vocab"]
    added = added_ids(demo_model)
    assert {token: i for i, token in enumerate(tokens)} == {**vocab, **added}
    wanted = [TokenType.NORMAL] * len(vocab) + [TokenType.CONTROL] * len(added)
    assert found["tokenizer.ggml.token_type"] == wanted
    assert found["tokenizer.ggml.eos_token_id"] == added["<|im_end|>"]
    assert found["tokenizer.huggingface.json"] == (demo_model / "tokenizer.json").read_text()
    template = (demo_model / "chat_template.jinja").read_text()
    assert found["tokenizer.chat_template"] == template


def test_tokens_fill_the_embedding(demo_model: Path, tmp_path: Path) -> None:
    size = max(added_ids(demo_model).values()) + 1
    source = folder_model(copied(demo_model, tmp_path, vocab_size=size + 4))
    found = values(to_gguf(source))
    tail = found["tokenizer.ggml.tokens"][size:]
    assert tail == [f"[PAD{i}]" for i in range(size, size + 4)]
    assert found["tokenizer.ggml.token_type"][size - 1 :] == [3, 5, 5, 5, 5]
    padded = fake("gguf", without_json(to_gguf(source)))
    assert load_tokenizer(padded).vocab_size == size
    assert tokenizer_facts(padded) == tokenizer_facts(source)


def test_tokens_beyond_the_embedding_are_cut(demo_model: Path, tmp_path: Path) -> None:
    last = added_ids(demo_model)["<|im_end|>"]
    source = folder_model(copied(demo_model, tmp_path, vocab_size=last))
    found = values(to_gguf(source))
    assert len(found["tokenizer.ggml.tokens"]) == len(found["tokenizer.ggml.token_type"]) == last
    ids = [value for key, value in found.items() if key.endswith("_token_id")]
    assert ids and max(ids) < last


def test_verbatim_through_gguf_and_apr(demo_model: Path) -> None:
    """GGUF -> APR -> GGUF keeps every key, value and type, also keys APR has no name for."""
    first = without_json(to_gguf(folder_model(demo_model)))
    first = {
        **first,
        "tokenizer.ggml.token_type": TypedValue(
            first["tokenizer.ggml.token_type"].value, "array:uint32"
        ),
        "tokenizer.ggml.bos_token_id": TypedValue(7, "int64"),
        "tokenizer.ggml.fim_pre_token_id": TypedValue(9, "uint32"),
        "tokenizer.ggml.precompiled_charsmap": TypedValue([0, 255], "array:uint8"),
        "tokenizer.chat_template.tool_use": TypedValue("{{ 1 }}", "string"),
    }
    first = {
        key: v
        if isinstance(v, TypedValue)
        else TypedValue(v, "bool" if isinstance(v, bool) else "string")
        for key, v in first.items()
    }
    apr = to_apr(fake("gguf", first))
    assert apr["tokenizer.bos_token_id"] == 7 and "chat_template" in apr
    again = to_gguf(fake("apr", json.loads(json.dumps(apr))))
    assert again == first


def test_apr_from_a_folder(demo_model: Path) -> None:
    found = to_apr(folder_model(demo_model))
    assert found["tokenizer.model_type"] == "BPE" and found["tokenizer.pre_type"] == "qwen2"
    size = max(added_ids(demo_model).values()) + 1
    assert len(found["tokenizer.vocabulary"]) == found["tokenizer.vocab_size"] == size
    assert found["tokenizer.merges"] == [" ".join(pair) for pair in byte_level(demo_model)[1]]
    assert found["special_tokens"]["eos_token"] == "<|im_end|>"
    assert found["chat_template"] == found["tokenizer.chat_template"]
    assert found["tokenizer.huggingface.json"] == (demo_model / "tokenizer.json").read_text()


def test_apr_without_pre_or_types_is_read_by_its_architecture(demo_model: Path) -> None:
    """The reference importer writes neither for older files."""
    found = to_apr(folder_model(demo_model))
    bare = {
        key: found[key]
        for key in (
            "tokenizer.vocabulary",
            "tokenizer.merges",
            "tokenizer.model_type",
            "tokenizer.bos_token_id",
            "tokenizer.eos_token_id",
        )
    }
    model = fake("apr", {**bare, "architecture": "qwen2"})
    ours, source = load_tokenizer(model), load_tokenizer(folder_model(demo_model))
    for text in ("I'm 12 <|im_end|>\n", "Cafe\u0301"):
        assert ours.encode(text) == source.encode(text)
    with pytest.raises(UnsupportedError, match="does not say how its text is split"):
        load_tokenizer(fake("apr", {**bare, "architecture": "llama"}))
    with pytest.raises(ConversionError, match="pre_type: missing"):
        to_gguf(fake("apr", {**bare, "architecture": "llama"}))


def test_folder_files_come_back_verbatim(demo_model: Path) -> None:
    gguf = values(to_gguf(folder_model(demo_model)))
    names = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    texts = {name: (demo_model / name).read_text() for name in names}
    gguf["aprfmt.files"] = json.dumps(texts)
    found = to_hf(fake("gguf", gguf))
    assert found == {**texts, "tokenizer.json": (demo_model / "tokenizer.json").read_text()}


def test_a_changed_key_wins_over_the_carried_file(demo_model: Path) -> None:
    gguf = values(to_gguf(folder_model(demo_model)))
    texts = {"chat_template.jinja": "{{ 'old' }}"}
    gguf.update({"aprfmt.files": json.dumps(texts), "tokenizer.chat_template": "{{ 'new' }}"})
    start = added_ids(demo_model)["<|im_start|>"]
    gguf.update({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": start})
    model = fake("gguf", gguf)
    ours = load_tokenizer(model)
    assert ours.chat_template == to_hf(model)["chat_template.jinja"] == "{{ 'new' }}"
    assert ours.encode("") == [added_ids(demo_model)["<|endoftext|>"]]
    assert ours.eos_id == start and start in ours.stop_ids


def test_facts_agree_between_formats(demo_model: Path) -> None:
    source = folder_model(demo_model)
    wanted = tokenizer_facts(source)
    vocab, merges = byte_level(demo_model)
    added = added_ids(demo_model)
    assert wanted["vocab_size"] == len(vocab) + len(added) and wanted["merges"] == len(merges)
    assert wanted["added_tokens"] == len(added) and wanted["eos_id"] == added["<|im_end|>"]
    for form, made in (("gguf", to_gguf), ("apr", to_apr)):
        metadata: dict[str, Any] = made(source)
        assert tokenizer_facts(fake(form, metadata)) == wanted
        assert tokenizer_facts(fake(form, without_json(metadata))) == wanted


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("tokenizer.ggml.tokens", None, "tokens_sha256"),
        ("tokenizer.ggml.merges", None, "merges_sha256"),
        ("tokenizer.ggml.eos_token_id", 3, "eos_id"),
        ("tokenizer.ggml.bos_token_id", 3, "bos_id"),
        ("tokenizer.ggml.padding_token_id", 3, "pad_id"),
        ("tokenizer.ggml.add_bos_token", True, "add_bos"),
        ("tokenizer.ggml.add_eos_token", True, "add_eos"),
        ("tokenizer.ggml.pre", "gpt-2", "pre"),
        ("tokenizer.ggml.token_type", [1] * (1 << 16), "added_tokens_sha256"),
        ("tokenizer.chat_template", "x", "chat_template"),
    ],
)
def test_facts_see_a_change(demo_model: Path, key: str, value: Any, fact: str) -> None:
    metadata = values(without_json(to_gguf(folder_model(demo_model))))
    before = tokenizer_facts(fake("gguf", metadata))
    if value is None:
        value = list(metadata[key])
        value[10], value[11] = value[11], value[10]
    after = tokenizer_facts(fake("gguf", {**metadata, key: value}))
    assert before.get(fact) != after[fact]


class Untouchable(list[str]):
    """A list whose length may be asked for, and nothing else."""

    def __iter__(self) -> Any:
        raise AssertionError("read")

    def __getitem__(self, at: Any) -> Any:
        raise AssertionError("read")


def test_quick_facts_read_no_list() -> None:
    model = fake(
        "gguf",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": Untouchable("abc"),
            "tokenizer.ggml.merges": Untouchable("ab"),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.huggingface.json": "{no JSON",
            "tokenizer.chat_template": "{{ messages.__class__ }}",
        },
    )
    found = tokenizer_facts(model, quick=True)
    assert (found["model"], found["pre"], found["entries"], found["merges"]) == (
        "gpt2",
        "qwen2",
        3,
        2,
    )
    assert found["bos_id"] == 1 and "__class__" in found["chat_template_scan"]


@pytest.mark.parametrize("form", ["gguf", "apr", "safetensors"])
def test_no_tokenizer(form: str, tmp_path: Path) -> None:
    model: Model = fake(form, {}, tmp_path if form == "safetensors" else None)
    assert (
        tokenizer_facts(model)
        == tokenizer_facts(model, quick=True)
        == to_gguf(model)
        == to_apr(model)
        == {}
    )
    assert to_hf(model) == {}
    with pytest.raises(FormatError, match="carries no tokenizer; looked for"):
        load_tokenizer(model)


def test_names_that_split_alike_are_one_fact(demo_model: Path) -> None:
    one, other = (
        tokenizer_facts(fake("gguf", gguf_vocabulary(demo_model, name)))
        for name in ("smollm", "starcoder")
    )
    assert one == other and one["pre"] == "smollm"


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FormatError, match=r"found tokenizer\.model, which transformers can save"):
        load_tokenizer(folder_model(tmp_path))


def test_a_model_without_vocabulary() -> None:
    metadata = {"tokenizer.ggml.model": "none"}
    assert (
        tokenizer_facts(fake("gguf", metadata)) == {}
        and to_gguf(fake("gguf", metadata)) == metadata
    )


def test_wordpiece_and_unigram_are_carried_and_gguf_has_a_word_for_one(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    for name, made in (
        ("wordpiece", models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]")),
        ("unigram", models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0)),
    ):
        Tokenizer(made).save(str(tmp_path / "tokenizer.json"))
        model = folder_model(tmp_path)
        assert tokenizer_facts(model)["kind"] == name and load_tokenizer(model).encode("ab") == [
            1,
            2,
        ]
        assert load_tokenizer(fake("apr", to_apr(model))).encode("ab") == [1, 2]
        if name == "unigram":
            with pytest.raises(ConversionError, match=name):
                to_gguf(model)
            continue
        found = to_gguf(model)
        assert found["tokenizer.ggml.model"] == "bert"
        tokens = found["tokenizer.ggml.tokens"]
        assert isinstance(tokens, TypedValue) and tokens.value == ["[UNK]", "\u2581a", "b"]


def test_inspecting_imports_neither_library() -> None:
    import subprocess

    code = (
        "import sys; from types import SimpleNamespace as S; from pathlib import Path\n"
        "from aprfmt.tokenizer.identity import tokenizer_facts\n"
        "from aprfmt.tokenizer.stored_parts import Carried\n"
        "keys = {'tokenizer.ggml.tokens': ['a'], 'tokenizer.chat_template': '{{ 1 }}'}\n"
        "m = S(format='gguf', key_style='gguf', metadata=keys, folder=None, config=None,"
        " path=Path('x'), embedded_files={})\n"
        "m.carried = Carried(m)\n"
        "assert tokenizer_facts(m, quick=True)['chat_template_scan'] == 'nothing suspicious'\n"
        "assert not {'tokenizers', 'jinja2', 'numpy', 'click'} & set(sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_pieces_that_no_merge_makes_come_last_in_the_order_of_their_ids() -> None:
    """Seen red: the scores of such pieces rose with their ids, above those that merges make."""
    tokens = ["x", "ab", "y", "abc", "z"]
    made = Vocabulary("bpe", tokens, [keys.NORMAL] * 5, merges=["ab c", "a b"])
    assert scores_from_merges(made) == [-2.0, -1.0, -4.0, 0.0, -6.0]


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("lists", [True, False])
def test_a_folder_has_its_own_settings_or_those_of_the_lists(
    lists: bool, config: bool, demo_model: Path, tmp_path: Path
) -> None:
    """Lists are read where a file is missing, and then they say which tokens begin and end.

    With both files there, lists that are damaged cost nothing.
    """
    folder = copied(demo_model, tmp_path)
    before = (folder / "tokenizer_config.json").read_text()
    metadata: dict[str, Any] = to_apr(folder_model(folder))
    if config:
        metadata["aprfmt.files"] = json.dumps({"tokenizer_config.json": before})
    if not lists:
        metadata[keys.TOKENS.apr] = [1, 2, 3]
    model = fake("apr", metadata)
    if not config and not lists:
        with pytest.raises(FormatError, match="holds int; the file is damaged"):
            to_hf(model)
        return
    found = to_hf(model)
    assert found["tokenizer.json"] == (folder / "tokenizer.json").read_text()
    if config:
        assert found["tokenizer_config.json"] == before
        return
    told, own = json.loads(found["tokenizer_config.json"]), json.loads(before)
    assert told["eos_token"] == own["eos_token"]
