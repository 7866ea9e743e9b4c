"""Two tokenizers compared: correct copies of every kind are equal, what differs is shown.

Copies are made with gguf-py's own SpecialVocab by the conventions of llama.cpp's converter.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.protocols import TypedValue
from aprfmt.causes.tokenizer import probe_effects as measuring
from aprfmt.causes.tokenizer.comparison import compare_tokenizers, compare_tokens
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.vocabulary import check_merges
from aprfmt.checks.records import NotRun
from aprfmt.measure.texts import TokensReport
from aprfmt.model import Model, open_model
from aprfmt.tokenizer.carriers import to_gguf, to_hf
from aprfmt.tokenizer.conversations import named_tokens, unknown_tokens
from aprfmt.tokenizer.loading import load_tokenizer
from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts
from tests.cli.run import aprfmt as command
from tests.tokenizer.fake import fake, folder_model, without_json

README = Path(__file__).resolve().parents[3] / "README.md"
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer: its name in GGUF, the pre-tokenizer's, and how it is trained."""

    model: str
    pre: str
    make: Callable[[], tuple[Any, Any]]


def byte_level() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return made, trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )


def llama3() -> tuple[Any, Any]:
    from tokenizers import Regex, pre_tokenizers

    from aprfmt.tokenizer.pre_tokenizers import LLAMA3

    made, trainer = byte_level()
    steps = [
        pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return made, trainer


def sentencepiece() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, normalizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    made.normalizer = normalizers.Sequence(steps)
    whole = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    return made, trainers.BpeTrainer(vocab_size=700, special_tokens=whole, show_progress=False)


def unigram() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made, trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )


def wordpiece() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return made, trainers.WordPieceTrainer(
        vocab_size=500, special_tokens=SPECIAL, show_progress=False
    )


KINDS = {
    "byte-level": Kind("gpt2", "gpt-2", byte_level),
    "llama3": Kind("gpt2", "llama-bpe", llama3),
    "sentencepiece": Kind("llama", "default", sentencepiece),
    "unigram": Kind("t5", "default", unigram),
    "wordpiece": Kind("bert", "default", wordpiece),
}


def trained(kind: Kind, folder: Path) -> tuple[Path, Any]:
    """Train a tokenizer on the README and save it as transformers does."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    made, trainer = kind.make()
    made.train_from_iterator([README.read_text()], trainer)
    # llama.cpp puts EOS behind a text of t5's kind, SEP behind one of bert's.
    end = " </s>" if kind.model in ("t5", "bert") else ""
    made.post_processor = processors.TemplateProcessing(
        single=f"<s> $A{end}", pair=f"<s> $A $B{end}",
        special_tokens=[(text, made.token_to_id(text)) for text in ("<s>", "</s>")],
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        sep_token="</s>" if kind.model == "bert" else None,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<tool>", "\n\n\n"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "llama",
        "vocab_size": len(tokenizer) + 13,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tokenizer


def converted(kind: Kind, folder: Path, tokenizer: Any) -> Model:
    """Return the lists that llama.cpp's converter writes for a folder."""
    from gguf.vocab import SpecialVocab

    data = json.loads((folder / "tokenizer.json").read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    names = {i: token for token, i in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens = [names.get(i, f"[PAD{i}]") for i in range(size)]
    types = [_type(kind, i, token, names, added) for i, token in enumerate(tokens)]
    special = SpecialVocab(folder, load_merges=kind.model == "gpt2")
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": kind.model,
        "tokenizer.ggml.pre": kind.pre,
        "tokenizer.ggml.tokens": [_phantom(t) if kind.model == "bert" else t for t in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": special.chat_template,
    }
    if kind.model == "gpt2":
        keys["tokenizer.ggml.merges"] = special.merges
    elif kind.model == "llama":
        ranks = {"".join(pair): -float(i) for i, pair in enumerate(data["model"]["merges"])}
        keys["tokenizer.ggml.scores"] = [ranks.get(token, -1e4) for token in tokens]
    elif kind.model == "t5":
        known = dict(map(tuple, data["model"]["vocab"]))
        keys["tokenizer.ggml.scores"] = [float(known.get(token, -1000.0)) for token in tokens]
    roles = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
    for role, i in special.special_token_ids.items():
        keys[f"tokenizer.ggml.{roles.get(role, role)}_token_id"] = i
    for role, flag in special.add_special_token.items():
        keys[f"tokenizer.ggml.add_{role}_token"] = flag
    return fake("gguf", keys)


def _type(kind: Kind, i: int, token: str, names: dict[int, str], added: Any) -> int:
    if i not in names:
        return 5
    if i in added:
        return 3 if added[i].special else 4
    return 6 if kind.model == "llama" and token.startswith("<0x") else 1


def _phantom(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else "\u2581" + token


def compared(a: Model, b: Model) -> TokensReport:
    mine, theirs = read_tokenizer_parts(a), read_tokenizer_parts(b)
    assert mine is not None and theirs is not None
    return compare_tokenizers(mine, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_a_converted_copy_of_every_kind_is_equal(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    folder, tokenizer = trained(kind, tmp_path)
    there, back = folder_model(folder), converted(kind, folder, tokenizer)
    for a, b in ((there, back), (back, there)):
        report = compared(a, b)
        assert [found.says for found in report.findings] == []
        assert report.remarks == ()
    for model in (there, back):
        with suppress(NotRun):  # a kind without merges
            assert check_merges(CheckContext(model)).findings == []


@pytest.mark.parametrize("name", KINDS)
def test_one_exchanged_piece_is_found_in_every_kind(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    folder, tokenizer = trained(kind, tmp_path)
    back = converted(kind, folder, tokenizer)
    tokens = back.metadata["tokenizer.ggml.tokens"]
    tokens[300], tokens[301] = tokens[301], tokens[300]
    report = compared(folder_model(folder), back)
    assert [found.cause for found in report.findings][:1] == ["tokenizer_pieces"]
    first = report.findings[0]
    assert "id 300" in first.where and "exchanged" in first.says
    assert first.shown is (kind.model in ("gpt2", "llama"))


def test_a_real_byte_level_model_is_its_own_folders_equal(smollm2: Path, tmp_path: Path) -> None:
    _real(smollm2, tmp_path)


def test_a_real_sentencepiece_model_is_its_own_folders_equal(gemma: Path, tmp_path: Path) -> None:
    _real(gemma, tmp_path)


def _real(path: Path, folder: Path) -> None:
    with open_model(path) as model:
        for name, text in to_hf(model).items():
            (folder / name).write_text(text)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        assert [f.says for f in compared(folder_model(folder), model).findings] == []
        assert compare_tokens(model, model).findings == ()


def test_what_cannot_be_compared_is_said(demo_model: Path, tmp_path: Path) -> None:
    there = folder_model(demo_model)
    none = fake("gguf", {"general.architecture": "llama"})
    assert compare_tokens(there, none).not_checked == ("tokenizer: B carries none; not compared",)
    assert compare_tokens(none, none).not_checked == (
        "tokenizer: A and B carry none; not compared",
    )
    keys: dict[str, Any] = dict(without_json(to_gguf(there)))
    keys["tokenizer.ggml.eos_token_id"] = "two"
    report = compare_tokens(there, fake("gguf", keys))
    assert report.findings == () and "cannot be read" in report.not_checked[0]


def test_a_role_that_moves_between_tokens_of_one_text_is_shown(demo_model: Path) -> None:
    """Files of the field hold a filler more than once: the id says more than its text."""
    keys: dict[str, Any] = dict(without_json(to_gguf(folder_model(demo_model))))
    tokens = [*keys["tokenizer.ggml.tokens"].value[:-2], "[PAD]", "[PAD]"]
    keys["tokenizer.ggml.tokens"] = TypedValue(tokens, "array:string")
    sides = [
        fake("gguf", {**keys, "tokenizer.ggml.padding_token_id": len(tokens) - back})
        for back in (2, 1)
    ]
    [found] = compared(*sides).findings
    assert found.says == "pad is 1534 ([PAD]) in A, 1535 ([PAD]) in B" and found.shown


def template(single: str, pair: str) -> dict[str, Any]:
    """Return a TemplateProcessing: letters are texts, "<" and ">" special tokens."""
    tokens = {"<": 1533, ">": 1534}
    return {
        "type": "TemplateProcessing",
        "special_tokens": {k: {"id": k, "ids": [i], "tokens": [k]} for k, i in tokens.items()},
        **{
            name: [
                {"SpecialToken" if each in tokens else "Sequence": {"id": each, "type_id": 0}}
                for each in row
            ]
            for name, row in (("single", single), ("pair", pair))
        },
    }


FRAMED = template("<A>", "<A>B>")
PROCESSORS = {
    "text twice": template("<AA>", "<A>B>"),
    "text dropped": template("<>", "<A>B>"),
    "text ten times": template("<" + "A" * 10 + ">", "<A>B>"),
    "begin lost": template("A>", "A>B>"),
    "only two texts": template("<A>", "<A>>B>"),
    "texts exchanged": template("<A>", "<B>A>"),
    "second text lost": template("<A>", "<A>"),
    "as bert": {"type": "BertProcessing", "cls": ["<", 1533], "sep": [">", 1534]},
    "as roberta": {
        "type": "RobertaProcessing", "cls": ["<", 1533], "sep": [">", 1534],
        "trim_offsets": True, "add_prefix_space": False,
    },
    "nothing": None,
    "offsets": {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False,
             "use_regex": True},
            FRAMED,
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["Qwen2ForCausalLM", "Qwen2ForSequenceClassification"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_post_processors_differ_where_the_library_makes_other_ids(
    name: str, kind: str, demo_model: Path, tmp_path: Path
) -> None:
    """Of one text; and of two, where the model is one that is given two."""
    from tokenizers import Tokenizer

    models: list[Model] = []
    ids: list[list[list[int]]] = []
    for side, processor in (("a", FRAMED), ("b", PROCESSORS[name])):
        shutil.copytree(demo_model, tmp_path / side)
        file = tmp_path / side / "tokenizer.json"
        text = json.dumps(json.loads(file.read_text()) | {"post_processor": processor})
        file.write_text(text)
        made = Tokenizer.from_str(text)
        ids.append([made.encode("Elinor").ids])
        if kind.endswith("Classification"):
            ids[-1].append(made.encode("Elinor", "Marianne").ids)
        config = tmp_path / side / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [kind]}))
        models.append(folder_model(tmp_path / side))
    report = compared(*models)
    assert bool(report.findings) == (ids[0] != ids[1]), ids
    assert all(found.shown and found.where for found in report.findings)


def test_of_many_ids_the_first_eight_are_shown() -> None:
    assert measuring._short_ids(range(8)) == "0 1 2 3 4 5 6 7"
    assert measuring._short_ids(range(9)) == "0 1 2 3 4 5 6 7 ..."


def test_commands_agree_on_a_template_that_names_unknown_tokens(
    demo_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo_model, other)
    (other / "chat_template.jinja").write_text(
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}<|eot_id|>{% endfor %}"
    )
    assert command("diff", demo_model, other).code == 1
    found = command("diagnose", demo_model, other, "--json")
    assert (found.code, found.json["cause"]) == (1, "chat_template")
    assert any("<|eot_id|>" in row["says"] for row in found.json["evidence"])
    for name in ("validate", "qa"):
        checked = command(name, other)
        assert checked.code == 1 and "writes '<|eot_id|>'" in checked.out, name
    assert "FAIL" not in command("validate", demo_model).out


def test_roles_written_as_text_are_no_unknown_tokens() -> None:
    """Zephyr's template marks roles in words that its vocabulary has no token for."""
    zephyr = {"one question": ("ok", "<|user|>\nhi</s>\n<|assistant|>\n")}
    assert unknown_tokens(named_tokens(zephyr), {"</s>"}) == []
    assert unknown_tokens(named_tokens(zephyr), {"x"}) == ["<|user|>", "<|assistant|>", "</s>"]
    assert unknown_tokens(["<|im_end|>"], {"\u2581<|im_end|>"}) == []


def test_the_first_text_that_splits_differently_is_shown(demo_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(demo_model, other)
    data = json.loads((other / "tokenizer.json").read_text())
    data["model"]["merges"] = data["model"]["merges"][:900]
    (other / "tokenizer.json").write_text(json.dumps(data))
    done = command("diff", demo_model, other, "--json")
    rows = {row["name"]: row for row in done.json["tokenizer"]}
    assert (rows["merges"]["a"], rows["merges"]["b"]) == (1277, 900)
    shown = rows["merges: shown by"]
    assert shown["a"].endswith("is by (1 ids: 1167)") and "b|y" in shown["b"]
    found = command("diagnose", demo_model, other)
    assert "the merges of A cut to the first 900 of 1277" in found.out


# --- keys that a GGUF lacks: what each side does counts, not what it states -------------------

FRAMES = {"nothing": "$A", "bos": "<s> $A", "eos": "$A </s>", "both": "<s> $A </s>"}
LOST = {
    "add_bos_token": "add_bos",
    "add_eos_token": "add_eos",
    "add_space_prefix": "space_prefix",
    "pre": "pre_tokenizer",
    "nothing": "",
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("name", ["sentencepiece", "byte-level", "llama3"])
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("lists_first", [False, True], ids=["folder first", "lists first"])
def test_what_tokenizes_differently_is_never_equal(
    frame: str, name: str, lost: str, lists_first: bool, tmp_path: Path
) -> None:
    """The ids of a text by both sides decide; of the folder, those of the tokenizers library."""
    from tokenizers import Tokenizer, normalizers, processors

    folder, tokenizer = trained(KINDS[name], tmp_path)
    back = converted(KINDS[name], folder, tokenizer)
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single=FRAMES[frame], pair=FRAMES[frame] + " $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    if name == "sentencepiece" and lost == "add_space_prefix":
        library.normalizer = normalizers.Replace(" ", "\u2581")
    library.save(str(folder / "tokenizer.json"))
    keys = dict(back.metadata)
    for key in ("bos", "eos"):
        keys[f"tokenizer.ggml.add_{key}_token"] = frame in (key, "both")
    if name == "sentencepiece":
        keys["tokenizer.ggml.add_space_prefix"] = lost != "add_space_prefix"
    keys.pop(f"tokenizer.ggml.{lost}", None)
    back = fake("gguf", keys)
    text = "Once upon 12345 times"
    engine = fake("gguf", {"tokenizer.ggml.pre": "default", **keys})  # llama.cpp's, of no name
    own = load_tokenizer(engine).encode(text)
    report = compared(
        *((back, folder_model(folder)) if lists_first else (folder_model(folder), back))
    )
    differ = library.encode(text).ids != own
    assert bool(report.findings) >= differ
    assert {row.cause for row in report.findings} <= {LOST[lost]}
    if lost in ("add_bos_token", "add_eos_token", "nothing"):
        assert bool(report.findings) == differ
    if report.findings and lost.endswith("_token"):
        (row,) = report.findings
        assert row.shown and f"has no tokenizer.ggml.{lost}, so that llama.cpp's" in row.says
        assert bool(row.mend) == (not lists_first)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_frame_is_shown_where_lists_have_an_unknown_token(name: str, tmp_path: Path) -> None:
    """Lists say "unknown" of a token that files call special. Seen red: "no probe text"."""
    folder, tokenizer = trained(KINDS["byte-level"], tmp_path)
    back = converted(KINDS["byte-level"], folder, tokenizer)
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    unknown = {"id": 0, "content": "<unk>", **flags, "special": True}
    rest = [row for row in data["added_tokens"] if row["id"]]
    file.write_text(json.dumps(data | {"added_tokens": [unknown, *rest], "post_processor": None}))
    keys = dict(back.metadata)
    types = [2, *list(keys["tokenizer.ggml.token_type"])[1:]]
    keys |= {"tokenizer.ggml.token_type": types}
    keys |= {f"tokenizer.ggml.add_{role}_token": role == name for role in ("bos", "eos")}
    (row,) = compared(folder_model(folder), fake("gguf", keys)).findings
    assert (row.cause, row.shown, row.after) == (f"add_{name}", True, 0.0)


# --- what ids become, and what a pair of texts gets ------------------------------------------


def file_pair(kind: str, tmp_path: Path, change: Callable[[Any], None], **config: Any) -> Any:
    """Return the folders of a trained tokenizer and of a copy whose tokenizer.json is changed."""
    folder, _ = trained(KINDS[kind], tmp_path / "a")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    shutil.copytree(folder, tmp_path / "b")
    file = tmp_path / "b" / "tokenizer.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return folder_model(folder), folder_model(tmp_path / "b")


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
              "use_regex": True}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "decoder"),
    [
        ("byte-level", None),
        ("llama3", {"type": "Fuse"}),
        ("sentencepiece", {"type": "ByteFallback"}),
        ("wordpiece", {"type": "WordPiece", "prefix": "##", "cleanup": True}),
        ("unigram", BYTE_LEVEL),
    ],
)
def test_another_decoder_is_shown_by_a_text_that_comes_back(
    kind: str, decoder: Any, tmp_path: Path
) -> None:
    """Seen red: without the readings of decoded texts it has no effect."""
    a, b = file_pair(kind, tmp_path, lambda data: data.update(decoder=decoder))
    for pair in ((a, b), (b, a)):
        (found,) = compared(*pair).findings
        assert (found.cause, found.shown, found.after) == ("decoder", True, 0.0)
        assert "decoded again, is " in found.example[0] and found.example[0] != found.example[1]


def test_flags_of_a_decoder_without_effect_are_a_note(tmp_path: Path) -> None:
    idle = {**BYTE_LEVEL, "trim_offsets": False}
    a, b = file_pair("byte-level", tmp_path, lambda data: data.update(decoder=idle))
    assert a.carried.parse_tokenizer_json() != b.carried.parse_tokenizer_json()
    report = compared(a, b)
    assert (report.findings, [row.name for row in report.notes]) == ((), ["decoder"])


def with_types(first: int, second: int) -> dict[str, Any]:
    """Return a TemplateProcessing of a pair that gives its texts these token types."""
    made = template("<A>", "<A>B>")
    for row in made["pair"]:
        part = row.get("Sequence") or row["SpecialToken"]
        part["type_id"] = first
    made["pair"][3]["Sequence"]["type_id"] = second
    made["pair"][4]["SpecialToken"]["type_id"] = second
    return made


SEGMENTED = {
    "zeros": with_types(0, 0),
    "as bert": with_types(0, 1),
    "exchanged": with_types(1, 0),
    "BertProcessing": PROCESSORS["as bert"],
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", SEGMENTED)
def test_token_types_differ_where_the_library_gives_others(
    name: str, count: int, demo_model: Path, tmp_path: Path
) -> None:
    """They count where the model has a table of them."""
    from tokenizers import Tokenizer

    models, given = [], []
    for side, processor in (("a", with_types(0, 1)), ("b", SEGMENTED[name])):
        shutil.copytree(demo_model, tmp_path / side)
        file = tmp_path / side / "tokenizer.json"
        text = json.dumps(json.loads(file.read_text()) | {"post_processor": processor})
        file.write_text(text)
        given.append(Tokenizer.from_str(text).encode("Elinor", "Marianne").type_ids)
        config = tmp_path / side / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"type_vocab_size": count}))
        models.append(folder_model(tmp_path / side))
    found = compared(*models).findings
    assert [row.cause for row in found] == ["segments"] * (given[0] != given[1] and count > 1)
    assert all(row.shown for row in found)


def test_lists_that_no_engine_takes_differ_all_the_same(demo_model: Path) -> None:
    """Blanks in place of the byte-level letter: the merges then join nothing."""
    keys: dict[str, Any] = dict(without_json(to_gguf(folder_model(demo_model))))
    tokens = keys["tokenizer.ggml.tokens"].value
    spelled = [token.replace("\u0120", " ") for token in tokens]
    damaged = {**keys, "tokenizer.ggml.tokens": TypedValue(spelled, "array:string")}
    report = compared(fake("gguf", keys), fake("gguf", damaged))
    assert [(row.cause, row.probed, row.shown) for row in report.findings] == [
        ("tokenizer_pieces", False, False)
    ]
    assert "blanks in place of the byte-level" in report.findings[0].says
    assert "does not join two tokens" in report.not_checked[0]


def wordpiece_keys(**more: Any) -> dict[str, Any]:
    """Return the lists of a WordPiece GGUF, with other values of some keys."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"\u2581w{i}" for i in range(40)), "s"]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * 41,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 3,
    } | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def test_a_wordpiece_vocabulary_is_known_under_another_kind() -> None:
    """What is put around a text follows from the kind."""
    sound = fake("gguf", wordpiece_keys())
    assert compared(sound, fake("gguf", wordpiece_keys())).findings == ()
    for kind in ("gpt2", "llama"):
        (found,) = compared(sound, fake("gguf", wordpiece_keys(model=kind))).findings
        assert found.mend == ("tokenizer.ggml.model=bert",)
        assert found.says.endswith("though B's pieces are those of WordPiece")


@pytest.mark.parametrize("role", ["seperator", "bos"])
def test_an_id_put_around_every_text_is_told_by_its_role(role: str) -> None:
    """One key is one difference, which the ids around a text show."""
    changed = fake("gguf", wordpiece_keys(**{f"{role}_token_id": 4}))
    (found,) = compared(fake("gguf", wordpiece_keys()), changed).findings
    assert (found.cause, found.shown) == ("special_ids", True)
    assert len(found.mend) == 1


@pytest.mark.parametrize("at", [20, 100, 200])
def test_a_changed_score_of_a_unigram_file_is_shown_by_the_piece(at: int, tmp_path: Path) -> None:
    """Its vocabulary holds each piece with its score."""

    def ruin(data: Any) -> None:
        data["model"]["vocab"][at][1] = -99.0

    (found,) = compared(*file_pair("unigram", tmp_path, ruin)).findings
    assert (found.cause, found.shown, found.after) == ("tokenizer_scores", True, 0.0)
