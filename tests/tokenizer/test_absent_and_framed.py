"""What is taken where a file says nothing, what stands around a text, and the kind of the pieces.

Each rule is held by relatives of one fault, and by innocents that look like it.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.checks.file.vocabulary import _find_stale_ids
from aprfmt.measure.texts import TokensReport
from aprfmt.model import Model
from aprfmt.tokenizer.absent_keys import absent_ids, absent_types
from aprfmt.tokenizer.carriers import to_gguf
from aprfmt.tokenizer.engine_defaults import default_ids, kind_of_pieces
from aprfmt.tokenizer.loading import load_tokenizer
from aprfmt.tokenizer.quick_checks import quick_warnings
from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts
from tests.cli.run import aprfmt
from tests.diagnosis.token_edits import GGML, Keys, lose, put, scored, typed
from tests.tokenizer.fake import fake, folder_model, without_json

TEXT_END, START, END = 1533, 1534, 1535  # <|endoftext|>, <|im_start|>, <|im_end|>
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json",
         "generation_config.json")  # fmt: skip
Change = Callable[[Keys], object]


@pytest.fixture(scope="module")
def lists(demo_model: Path) -> Keys:
    """The demo model's tokenizer as another program's GGUF has it."""
    made = without_json(to_gguf(folder_model(demo_model)))
    made.pop("aprfmt.files", None)
    return {key: getattr(value, "value", value) for key, value in made.items()}


def changed(lists: Keys, *changes: Change) -> Model:
    """Return a GGUF with changed keys."""
    keys = {key: list(v) if isinstance(v, list) else v for key, v in lists.items()}
    for change in changes:
        change(keys)
    return fake("gguf", keys)


def causes(report: TokensReport) -> list[str]:
    """Return the causes, none of which went without its probes."""
    assert report.checked and not report.not_checked
    return [row.cause for row in report.findings]


# --- keys that are absent ------------------------------------------------------------------------

with_bos = put(bos_token_id=TEXT_END, add_bos_token=True)
bos_lost = lose(GGML + "bos_token_id")
eos_lost = lose(GGML + "eos_token_id")
spm_end = put(eos_token_id=270)
template_bos = put(bos_token_id=TEXT_END)


def writes_bos(keys: Keys) -> None:
    keys["tokenizer.chat_template"] = "{{ bos_token }}" + keys["tokenizer.chat_template"]


# before both -> what B loses besides, the role, the id that llama.cpp takes.
LOST: Mapping[str, tuple[tuple[Change, ...], Change, str, int]] = {
    "the end": ((), eos_lost, "eos", 11),
    "bos, put before texts": ((with_bos,), bos_lost, "bos", 11),
    "bos, written by the template": ((template_bos, writes_bos), bos_lost, "bos", 11),
    "the end of SentencePiece": ((scored, spm_end), eos_lost, "eos", 2),
}


@pytest.mark.parametrize("case", LOST)
def test_an_absent_id_is_the_engines(case: str, lists: Keys) -> None:
    before, change, role, taken = LOST[case]
    a, b = changed(lists, *before), changed(lists, *before, change)
    report = compare_tokens(a, b)
    assert causes(report) == ["special_ids"]
    (row,) = report.findings
    key = f"tokenizer.ggml.{role}_token_id"
    assert row.shown and row.where[0] == key
    assert f"llama.cpp takes {taken} (" in row.says
    assert row.mend == (f"{key}={a.metadata[key]}",)
    if case == "the end":
        assert (
            taken in load_tokenizer(b).stop_ids
            and load_tokenizer(a).stop_ids < load_tokenizer(b).stop_ids
        )
    if role == "bos" and "texts" in case:
        assert load_tokenizer(b).encode("x")[0] == taken


@pytest.mark.parametrize("case", LOST)
def test_an_absent_id_is_seen_in_one_file(case: str, lists: Keys) -> None:
    before, change, role, taken = LOST[case]
    assert absent_ids(changed(lists, *before).carried) == []
    broken = changed(lists, *before, change)
    found = absent_ids(broken.carried)
    if case == "the end of SentencePiece":  # token 2 is </s>, a control token
        assert found == []
        return
    (one,) = found
    assert one.key == f"tokenizer.ggml.{role}_token_id" and f"takes {taken} (" in one.says
    wanted = END if role == "eos" else TEXT_END
    assert f"{one.key}={wanted} -o fake-fixed.gguf" in one.todo
    assert one.says in list(quick_warnings(broken.carried))


INNOCENT: Mapping[str, tuple[tuple[Change, ...], Change]] = {
    "the end that SentencePiece has by default": ((scored,), eos_lost),
    "bos that SentencePiece has by default": ((scored,), bos_lost),
}


@pytest.mark.parametrize("case", INNOCENT)
def test_what_changes_nothing_is_none(case: str, lists: Keys) -> None:
    before, change = INNOCENT[case]
    report = compare_tokens(changed(lists, *before), changed(lists, *before, change))
    assert causes(report) == []


def test_an_end_that_both_lack_was_not_lost(lists: Keys, demo_model: Path, tmp_path: Path) -> None:
    one, other = changed(lists, eos_lost), changed(lists, eos_lost)
    assert causes(compare_tokens(one, other)) == []
    assert absent_ids(one.carried)

    def endless(texts: dict[str, Any]) -> None:
        del texts["generation_config.json"], texts["config.json"]["eos_token_id"]
        del texts["tokenizer_config.json"]["eos_token"]

    assert causes(compare_tokens(edited(demo_model, tmp_path, endless), one)) == []


def test_defaults_of_each_model_of_a_vocabulary() -> None:
    assert default_ids("gpt2", "qwen2", 100) == {"bos": 11, "eos": 11}
    assert default_ids("gpt2", "glm4", 100) == {"eos": 11}
    assert default_ids("gpt2", "qwen2", 11) == {}  # behind the tokens there is none
    assert default_ids("llama", "default", 100) == {"bos": 1, "eos": 2, "unk": 0}
    assert default_ids("t5", "", 100) == {"eos": 1, "unk": 2, "pad": 0}
    assert default_ids("bert", "", 200)["sep"] == 102
    assert default_ids("gemma4", "", 100) == default_ids("rwkv", "", 100) == {}


# --- token types ---------------------------------------------------------------------------------

UNTYPED: Mapping[str, Change] = {
    "no types": lose(GGML + "token_type"),
    "normal": typed(1, "<|"),
    "unused": typed(5, "<|im_start|>"),
    "bytes": typed(6, "<|im_start|>"),
}


@pytest.mark.parametrize("against", ["folder", "lists"])
@pytest.mark.parametrize("case", UNTYPED)
def test_a_mark_of_another_type_is_cut(
    case: str, against: str, lists: Keys, demo_model: Path
) -> None:
    a = folder_model(demo_model) if against == "folder" else changed(lists)
    b = changed(lists, UNTYPED[case])
    report = compare_tokens(a, b)
    assert causes(report) == ["token_types"]
    (row,) = report.findings
    assert row.shown and "'<|im_start|>'" in row.example[0] + row.says
    assert ("the key is missing" in row.says) == (case == "no types")
    overridden = "; 2 more as stored, of which llama.cpp overrides the type"
    assert (overridden in row.says) == (case == "normal"), row.says
    assert (absent_types(b.carried) is not None) == (case == "no types")
    assert START not in load_tokenizer(b).encode("<|im_start|>user")


@pytest.mark.parametrize("against", ["folder", "lists"])
@pytest.mark.parametrize("kind", [1, 5])
def test_a_type_that_one_engine_overrides_is_another_all_the_same(
    kind: int, against: str, lists: Keys, demo_model: Path
) -> None:
    """Seen red: "same", since llama.cpp repairs it, though other engines cut the token."""
    a = folder_model(demo_model) if against == "folder" else changed(lists)
    b = changed(lists, typed(kind, "<|im_end|>"))
    for pair in ((a, b), (b, a)):
        report = compare_tokens(*pair)
        assert causes(report) == ["token_types"]
        (row,) = report.findings
        assert not row.shown and "'<|im_end|>'" in row.says and "other engines do not" in row.says
    assert causes(compare_tokens(b, changed(lists, typed(kind, "<|im_end|>")))) == []


# --- what stands around a text -------------------------------------------------------------------


def edited(demo: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Model:
    """Return a copy of the demo folder's small files after `change` of these, by name."""
    made = folder / f"copy{sum(1 for _ in folder.iterdir())}"
    made.mkdir()
    for name in FILES:
        shutil.copy(demo / name, made)
    texts = {name: json.loads((made / name).read_text()) for name in FILES if name[-1] == "n"}
    change(texts)
    for name in FILES:
        if name in texts:
            (made / name).write_text(json.dumps(texts[name]))
        elif name[-1] == "n":
            (made / name).unlink()
    return folder_model(made)


def template(before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return a post-processor that puts <|endoftext|>, with some ids, around a text."""
    entries: dict[str, Any] = {}

    def special(ids: tuple[int, ...]) -> list[dict[str, Any]]:
        pieces = []
        for i in ids:
            name = f"s{i}"
            entries[name] = {"id": name, "ids": [i], "tokens": ["<|endoftext|>"]}
            pieces.append({"SpecialToken": {"id": name, "type_id": 0}})
        return pieces

    single = [*special(before), {"Sequence": {"id": "A", "type_id": 0}}, *special(after)]
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {"type": "TemplateProcessing", "single": single, "pair": pair,
            "special_tokens": entries}  # fmt: skip


def roberta(before: int, after: int) -> dict[str, Any]:
    """Return the processor that has its two ids as [text, id]."""
    text = "<|endoftext|>"
    return {"type": "RobertaProcessing", "sep": [text, after], "cls": [text, before],
            "trim_offsets": True, "add_prefix_space": False}  # fmt: skip


def in_sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
    }  # fmt: skip
    return {"type": "Sequence", "processors": [byte_level, *steps]}


def processed(node: dict[str, Any] | None) -> Callable[[dict[str, Any]], object]:
    return lambda texts: texts["tokenizer.json"].update(post_processor=node)


FRAMED: Mapping[str, tuple[dict[str, Any] | None, dict[str, Any] | None, str]] = {
    "another token's id": (template((TEXT_END,)), template((101,)), "before a text is 1533"),
    "an id where there was none": (None, template((101,)), "is nothing in A, 101"),
    "another id behind": (template((), (TEXT_END,)), template((), (102,)), "after a text is"),
    "one twice": (template((TEXT_END,)), template((TEXT_END, TEXT_END)), "B puts 1533 2 times"),
    "one of two lost": (template((TEXT_END, START)), template((TEXT_END,)), "in B"),
    "Roberta's, with a stale id": (roberta(TEXT_END, 1535), roberta(TEXT_END, 102), "102"),
}


@pytest.mark.parametrize("case", FRAMED)
def test_frames_are_compared_by_their_ids(case: str, demo_model: Path, tmp_path: Path) -> None:
    left, right, says = FRAMED[case]
    a, b = (edited(demo_model, tmp_path, processed(node)) for node in (left, right))
    report = compare_tokens(a, b)
    assert causes(report) == ["frame"]
    (row,) = report.findings
    assert row.shown and says in row.says
    assert row.where[0] == "tokenizer.json: post_processor"
    own = read_tokenizer_parts(b)
    assert own is not None
    before, after = own.frame
    assert [*before, *load_tokenizer(b).encode("x", add_special=False), *after] == load_tokenizer(
        b
    ).encode("x")


SAME: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a template and Roberta's": (template((TEXT_END,), (END,)), roberta(TEXT_END, END)),
    "alone and in a sequence": (template((TEXT_END,)), in_sequence(template((TEXT_END,)))),
    "one template and two, of which the first counts": (
        template((TEXT_END,)), in_sequence(template((TEXT_END,)), template((START,)))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAME)
def test_two_spellings_of_one_frame_are_equal(case: str, demo_model: Path, tmp_path: Path) -> None:
    a, b = (edited(demo_model, tmp_path, processed(node)) for node in SAME[case])
    assert load_tokenizer(a).encode("x y") == load_tokenizer(b).encode("x y")
    assert causes(compare_tokens(a, b)) == []


def test_a_generation_that_nothing_ends(demo_model: Path, tmp_path: Path) -> None:
    def endless(texts: dict[str, Any]) -> None:
        del texts["generation_config.json"], texts["config.json"]["eos_token_id"]

    def null(texts: dict[str, Any]) -> None:
        del texts["generation_config.json"]
        texts["config.json"].update(eos_token_id=None, model_type="llama")

    for change in (endless, null):
        report = compare_tokens(folder_model(demo_model), edited(demo_model, tmp_path, change))
        assert causes(report) == ["generation_config"]
        assert "never ends" in report.findings[0].says and report.findings[0].shown

    def by_class(texts: dict[str, Any]) -> None:
        endless(texts)
        texts["config.json"]["model_type"] = "llama"

    side = read_tokenizer_parts(edited(demo_model, tmp_path, by_class))
    assert side is not None and side.stop_ids == frozenset({2})


# --- the kind of the pieces ----------------------------------------------------------------------


def as_spm(keys: Keys) -> None:
    put(model="llama", pre="default")(keys)


def scoreless(keys: Keys) -> None:
    as_spm(keys)
    put(scores=[0.0] * len(keys[GGML + "tokens"]))(keys)
    del keys[GGML + "merges"]


def spm_with_merges(keys: Keys) -> None:
    """SentencePiece's pieces, joined by merges that make the same ids."""
    scored(keys)
    words = [t for t, kind in zip(keys[GGML + "tokens"], keys[GGML + "token_type"], strict=True)
             if kind == 1 and len(t) > 1]  # fmt: skip
    known = set(keys[GGML + "tokens"])
    put(
        merges=[f"{w[:n]} {w[n:]}" for w in words for n in range(1, len(w))
                if w[:n] in known and w[n:] in known]
    )(keys)  # fmt: skip


def as_bpe(keys: Keys) -> None:
    spm_with_merges(keys)
    put(model="gpt2", pre="gpt-2")(keys)


KINDS: Mapping[str, tuple[Change, Change, str]] = {
    "byte-level pieces under llama, merges kept": (lambda keys: None, as_spm, "byte-level BPE"),
    "byte-level pieces under llama, scores of zero": (
        lambda keys: None, scoreless, "byte-level BPE"
    ),
    "SentencePiece's under gpt2": (spm_with_merges, as_bpe, "SentencePiece"),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_the_kind_is_judged_by_the_pieces(case: str, lists: Keys) -> None:
    before, change, pieces = KINDS[case]
    good, bad = changed(lists, before), changed(lists, change)
    report = compare_tokens(good, bad)
    assert causes(report)[0] == "tokenizer_model"
    row = report.findings[0]
    assert row.probed and row.shown and row.example
    assert f"though B's pieces are those of {pieces}" in row.says
    assert row.mend[0].startswith("tokenizer.ggml.model=")
    (doubt,) = quick_warnings(bad.carried)
    assert doubt.endswith(f"the pieces are those of {pieces}")
    assert list(quick_warnings(good.carried)) == []


def test_a_wrong_kind_is_placed_and_mended_where_its_file_says_it(
    demo_model: Path, tmp_path: Path
) -> None:
    """A GGUF by the key that its command changes, a tokenizer.json by its own name and source."""
    whole, bad = tmp_path / "whole.gguf", tmp_path / "bad.gguf"
    assert aprfmt("convert", demo_model, whole, "--no-verify").code == 0
    keys = ("tokenizer.ggml.model=llama", "tokenizer.ggml.pre=default")
    bare = ("--remove", "tokenizer.huggingface.json")
    assert aprfmt("set", whole, *keys, *bare, "-o", bad).code == 0
    (row,) = (each for each in aprfmt("validate", bad, "--json").json["findings"]
              if "its pieces are those of" in each["found"])  # fmt: skip
    assert row["where"] == f"{bad}: tokenizer.ggml.model"
    mend, _, more = row["todo"].partition(", and ")
    assert more == "tokenizer.ggml.pre to the source's"
    words = shlex.split(mend)
    good = tmp_path / words.pop()
    assert aprfmt(*words[1:-1], "tokenizer.ggml.pre=qwen2", "-o", good).code == 0
    assert aprfmt("validate", good).code == 0

    folder = tmp_path / "spaced"
    shutil.copytree(demo_model, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581",
                             "prepend_scheme": "never", "split": False}  # fmt: skip
    data["decoder"] = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    rows = aprfmt("validate", folder, "--json").json["findings"]
    (row,) = (each for each in rows if "its pieces are those of" in each["found"])
    assert row["where"] == f"{folder / 'tokenizer.json'}: model"
    assert row["todo"] == "use the tokenizer.json of the source"


def test_pieces_that_show_no_kind_are_of_none() -> None:
    letters = [chr(c) for c in range(33, 127)]
    assert kind_of_pieces(letters, [1] * len(letters)) == ""
    byte_level = [*letters, "\u0120a", "\u0120b", "\u0120c", "\u0120d"]
    assert kind_of_pieces(byte_level, [1] * len(byte_level)) == "bpe"
    maltese = ["\u2581" + letter for letter in letters] + ["\u0120"]
    assert kind_of_pieces(maltese, [1] * len(maltese)) == "spm"
    mixed = [*byte_level, *maltese]
    assert kind_of_pieces(mixed, [1] * len(mixed)) == ""


def test_a_kind_is_placed_where_two_files_of_one_model_type_differ(
    demo_model: Path, tmp_path: Path
) -> None:
    """A Metaspace over byte-level pieces: model.type is BPE on both sides and innocent."""

    def spaced(data: dict[str, Any]) -> None:
        data["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "\u2581",
            "prepend_scheme": "never",
            "split": False,
        }
        data["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }

    bad = tmp_path / "spaced"
    shutil.copytree(demo_model, bad)
    data = json.loads((bad / "tokenizer.json").read_text())
    spaced(data)
    (bad / "tokenizer.json").write_text(json.dumps(data))
    row = compare_tokens(folder_model(demo_model), folder_model(bad)).findings[0]
    assert row.cause == "tokenizer_model"
    assert set(row.where) == {"tokenizer.json: pre_tokenizer", "tokenizer.json: decoder"}


@pytest.mark.parametrize("plain", [94, 400, 401, 500, 1000])
@pytest.mark.parametrize(("blank", "kind"), [("\u0120", "bpe"), ("\u2581", "spm")])
def test_a_kind_shows_from_four_blanks_or_one_piece_in_a_hundred_on(
    blank: str, kind: str, plain: int
) -> None:
    enough = max(4, plain // 100)
    for count in (enough - 1, enough):
        pieces = [f"{blank}{i}" for i in range(count)] + [f"p{i}" for i in range(plain - count)]
        assert kind_of_pieces(pieces, [1] * plain) == (kind if count == enough else "")
        # Control tokens and bytes are no pieces: they count on neither side.
        assert kind_of_pieces([f"{blank}x"] * 9 + pieces, [3] * 9 + [1] * plain) == (
            kind if count == enough else ""
        )


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_a_stale_id_of_a_frame_is_said_with_what_it_is(size: int) -> None:
    """Ids below, at and beyond the end of the vocabulary."""
    for i in range(size + 2):
        if i == 0 and size:
            continue  # it is the token's own
        tokens = [f"t{n}" for n in range(size)]
        node = template((i,))
        node["special_tokens"][f"s{i}"]["tokens"] = ["t0"]
        stated = SimpleNamespace(
            uses_lists=False, data={"post_processor": node}, added_tokens=[],
            vocabulary=SimpleNamespace(tokens=tokens),
        )  # fmt: skip
        ctx: Any = SimpleNamespace(
            readable=stated, carried=SimpleNamespace(origin="tokenizer.json")
        )
        (finding,) = _find_stale_ids(ctx)
        held = repr(tokens[i]) if i < size else "no token"
        own = "is 0" if size else "has no id"
        assert finding.found == f"puts {i} ({held}) around a text for 't0', which {own}"


@pytest.mark.parametrize(
    ("text", "wanted"), [("<|im_end|>", END), ("<e>", END), ("[e]", END), ("<|", 0), ("(end)", 0)]
)
def test_the_end_of_an_answer_is_named_for_an_absent_id(
    text: str, wanted: int, lists: Keys
) -> None:
    """What looks like a mark and is more than its beginning; else a token of a known text."""

    def marked(keys: Keys) -> None:
        keys[GGML + "tokens"][END] = text if text != "<|" else "<|other|>"
        keys["tokenizer.chat_template"] = keys["tokenizer.chat_template"].replace(
            "<|im_end|>", text
        )

    assert lists[GGML + "tokens"].index("<|") < START
    (one,) = absent_ids(changed(lists, marked, eos_lost).carried)
    assert f"eos_token_id={wanted or TEXT_END} -o" in one.todo
