"""Chat templates and generation configs of two sides, as a person reads what differs."""

import difflib
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.compare import diff
from aprfmt.measure.texts import SideVerdicts, TokensReport, compare_equal_tokenizers, compare_texts
from aprfmt.model import Model, open_model
from aprfmt.tokenizer.keys import READ_CONFIG_KEYS, READ_FILES
from tests.cli.run import aprfmt


@pytest.fixture
def edited(demo_model: Path, tmp_path: Path) -> Path:
    """The demo model with a line of its template and two keys of its generation config changed."""
    shutil.copytree(demo_model, tmp_path / "b")
    place = tmp_path / "b" / "chat_template.jinja"
    place.write_text(place.read_text().replace("assistant", "bot\x1b[31m"))
    config = tmp_path / "b" / "generation_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"temperature": 0.3, "transformers_version": "0"}))
    return tmp_path / "b"


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_what_differs_is_shown_line_by_line_and_key_by_key(
    demo_model: Path, edited: Path, tmp_path: Path, form: str
) -> None:
    side = edited
    if form == "gguf":
        side = tmp_path / "b.gguf"
        assert aprfmt("convert", edited, side, "--quiet").code == 0
    done = aprfmt("diff", demo_model, side, "--json")
    assert done.code == 1
    before = (demo_model / "chat_template.jinja").read_text().splitlines()
    after = (edited / "chat_template.jinja").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ")]
    shown = [line for line in done.json["template"] if line[:3] not in ("---", "+++")]
    assert sorted(line[1:] for line in shown if line[:1] in "+-") == sorted(
        line[2:] for line in changed
    )
    rows = {row["name"]: row for row in done.json["generation"]}
    assert rows["temperature"]["b"] == 0.3
    assert rows["temperature"]["effect"] == "how evenly tokens are drawn"
    assert "transformers_version" not in rows
    text = aprfmt("diff", demo_model, side, "-v").out
    assert "chat template" in text and "\x1b[31m" not in text
    assert "temperature: - | 0.3 (how evenly tokens are drawn)" in text


def test_equal_texts_are_not_shown(demo_model: Path, tmp_path: Path) -> None:
    assert aprfmt("convert", demo_model, tmp_path / "c.gguf", "--quiet").code == 0
    found = aprfmt("diff", demo_model, tmp_path / "c.gguf", "--json").json
    assert (found["template"], found["generation"]) == ([], [])


def test_a_verdict_says_how_much_of_it_differs(demo_model: Path, edited: Path) -> None:
    place = edited / "tokenizer.json"
    said = json.loads(place.read_text())
    vocab, merges = said["model"]["vocab"], said["model"]["merges"]
    names = list(vocab)
    vocab[names[300]], vocab[names[301]] = vocab[names[301]], vocab[names[300]]
    merges[10:13] = [merges[12], *merges[10:12]]  # one moved, two behind it in their order
    del merges[-1]
    place.write_text(json.dumps(said))
    counts = {
        "tokens_changed": 2,
        "merges_only_in_a": 1,
        "merges_moved": 1,
        "lines_only_in_a": 1,
        "lines_only_in_b": 1,
        "keys_changed": 1,
    }
    done = aprfmt("diff", demo_model, edited, "--only", "tokenizer")
    assert (
        "tokenizer different (2 tokens changed, 1 merges only in A, 1 merges moved); "
        "chat template different (1 lines only in A, 1 lines only in B); "
        "generation config different (1 keys changed)"
    ) in done.out
    assert found(demo_model, edited) == SideVerdicts("different", "different", "different", counts)


def found(a: Path, b: Path) -> SideVerdicts:
    made = diff(a, b, only=["tokenizer"]).beside
    assert made is not None
    return made


def test_what_one_side_lacks_is_said(demo_model: Path, tmp_path: Path) -> None:
    done = aprfmt("diff", demo_model, demo_model, "--only", "tokenizer", "--json")
    equal = {"tokenizer": "equal", "template": "equal", "generation": "equal", "counts": {}}
    assert done.json["beside"] == equal and found(demo_model, demo_model).text == ""
    shutil.copytree(demo_model, tmp_path / "b")
    for name in ("chat_template.jinja", "generation_config.json"):
        (tmp_path / "b" / name).unlink()
    for a, b, word in ((demo_model, tmp_path / "b", "A"), (tmp_path / "b", demo_model, "B")):
        assert found(a, b) == SideVerdicts("equal", f"only in {word}", f"only in {word}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "b" / name).unlink()
    assert found(tmp_path / "b", demo_model).tokenizer == "only in B"
    assert found(tmp_path / "b", tmp_path / "b") == SideVerdicts("none", "none", "none")
    assert diff(demo_model, demo_model, only=["tensors"]).beside is None


def test_pieces_of_a_wordpiece_are_compared_in_one_spelling(
    demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "tokenizer different (1533 tokens changed)" below `equal`, exit 0."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    source = tmp_path / "source"
    shutil.copytree(demo_model, source, ignore=shutil.ignore_patterns("__*", "tokenizer*"))
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps({**config, "bos_token_id": 1, "eos_token_id": 2})
    )
    words = [f"w{i}" for i in range(config["vocab_size"])]
    pieces = ["[UNK]", "[CLS]", "[SEP]", *(each for word in words for each in (word, f"##{word}"))]
    rows = {piece: i for i, piece in enumerate(pieces[: len(words)])}
    made = Tokenizer(models.WordPiece(rows, unk_token="[UNK]"))
    made.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.save(str(source / "tokenizer.json"))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (source / "tokenizer_config.json").write_text(json.dumps(names))
    assert aprfmt("convert", source, tmp_path / "copy.gguf").code == 0
    told = found(source, tmp_path / "copy.gguf")
    assert (told.tokenizer, told.counts) == ("equal", {})


def test_lists_that_differ_without_an_effect_are_no_difference(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = TokensReport(checked=("tokenizer",), counts={"merges_moved": 3})
    with open_model(demo_model) as model:
        made = compare_texts(model, model, report)
    assert made.text == "tokenizer stored otherwise (3 merges moved)"
    assert not made.differing


# --- tokenizers that are read from equal texts -----------------------------------------------


def copy_of(folder: Path, tmp_path: Path, file: str = "", text: str | None = None) -> Path:
    """Return a copy of a folder, with another text in one file, or without it for None."""
    made = shutil.copytree(folder, tmp_path / "copy")
    if file and text is None:
        (made / file).unlink()
    elif text is not None:
        (made / file).write_text(text)
    return made


class Watched(dict[str, Any]):
    """What a file holds; `asked` are the keys that were looked for."""

    def __init__(self, held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


def watched(folder: Path) -> tuple[Model, Watched, Watched]:
    """Return (the model of a folder, its config.json, its text files), of which keys are noted."""
    model = open_model(folder)
    assert model.roles and model.folder is not None and model.folder.config is not None
    config, texts = Watched(model.folder.config), Watched(model.folder.texts)
    del model.config  # which is kept after the first look
    model.folder = replace(model.folder, config=config, texts=texts)
    return model, config, texts


@pytest.mark.parametrize("eps", [None, 1e-3])
def test_tokenizers_of_equal_texts_are_compared_as_others(
    eps: float | None, demo_model: Path, tmp_path: Path
) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    text = json.dumps(config | ({} if eps is None else {"rms_norm_eps": eps}))
    a, b = open_model(demo_model), open_model(copy_of(demo_model, tmp_path, "config.json", text))
    found = compare_equal_tokenizers(a, b)
    assert found is not None and found == compare_tokens(a, b)
    assert found.checked and found.added


@pytest.mark.parametrize("file", READ_FILES)
def test_a_file_that_differs_is_compared_part_by_part(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    there = (demo_model / file).is_file()
    text = (demo_model / file).read_text() + " " if there else '{"chat_template": "x"}'
    other = open_model(copy_of(demo_model, tmp_path, file, text))
    assert compare_equal_tokenizers(open_model(demo_model), other) is None


@pytest.mark.parametrize("key", READ_CONFIG_KEYS)
def test_a_key_that_differs_is_compared_part_by_part(
    key: str, demo_model: Path, tmp_path: Path
) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    other = {"vocab_size": 1000, "model_type": "qwen3", "text_config": {"eos_token_id": 1}}
    text = json.dumps({**config, key: other.get(key, [7])})
    models = open_model(demo_model), open_model(copy_of(demo_model, tmp_path, "config.json", text))
    assert compare_equal_tokenizers(*models) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.json", "generation_config.json"])
def test_equal_texts_that_cannot_be_read_are_not_equal(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: without a look at the template and the ends."""
    broken = copy_of(demo_model, tmp_path, file, "{")
    (broken / "chat_template.jinja").unlink()
    again = shutil.copytree(broken, tmp_path / "again")
    assert compare_equal_tokenizers(open_model(broken), open_model(again)) is None
    assert aprfmt("diff", broken, again).code == 2


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json", "config.json"])
def test_a_comparison_reads_no_other_file_or_key(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    """What a tokenizer is read from is listed. Seen red: `special_tokens_map.json` left out."""
    said = json.loads((demo_model / file).read_text())
    said |= {"eos_token_id": 5, "normalizer": {"type": "Lowercase"}}
    text = json.dumps(said)
    sides = watched(demo_model), watched(copy_of(demo_model, tmp_path, file, text))
    assert compare_tokens(sides[0][0], sides[1][0]).findings
    for _, config, texts in sides:
        assert config.asked <= {*READ_CONFIG_KEYS} and texts.asked <= {*READ_FILES}
        assert "eos_token_id" in config.asked and "special_tokens_map.json" in texts.asked
