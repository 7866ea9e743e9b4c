"""A special token that is empty, null or not named is another statement than a token.

Seen red: "equal" and exit 0 where transformers has no eos id, since config.json still has one.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aprfmt import convert
from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.model import open_model
from aprfmt.tokenizer.hf_json import transformers_stop_ids
from tests.cli.run import aprfmt as command
from tests.diagnosis.test_remedies import written

CONFIG, MAP, GENERATION = (
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
)  # fmt: skip
GONE = object()
END = "<|im_end|>"
# case -> the keys of A, those of B, each by file; and the roles of which B has no token.
Keys = Mapping[str, Mapping[str, Any]]
CASES: Mapping[str, tuple[Keys, Keys, tuple[str, ...]]] = {
    "eos empty": ({}, {CONFIG: {"eos_token": ""}}, ("eos",)),
    "eos null": ({}, {CONFIG: {"eos_token": None}}, ("eos",)),
    "pad empty": ({}, {CONFIG: {"pad_token": ""}}, ("pad",)),
    "pad null": ({}, {CONFIG: {"pad_token": None}}, ("pad",)),
    "bos": ({CONFIG: {"bos_token": END}}, {CONFIG: {"bos_token": ""}}, ("bos",)),
    "unk": ({CONFIG: {"unk_token": END}}, {CONFIG: {"unk_token": ""}}, ("unk",)),
    "sep": ({CONFIG: {"sep_token": END}}, {CONFIG: {"sep_token": None}}, ("sep",)),
    "cls": ({CONFIG: {"cls_token": END}}, {CONFIG: {"cls_token": ""}}, ("cls",)),
    "mask": ({CONFIG: {"mask_token": END}}, {CONFIG: {"mask_token": ""}}, ("mask",)),
    "two": ({}, {CONFIG: {"eos_token": "", "pad_token": None}}, ("eos", "pad")),
    "the map is empty": ({}, {MAP: {"eos_token": ""}}, ("eos",)),
    "the map alone": (
        {CONFIG: {"eos_token": GONE}, MAP: {"eos_token": END}},
        {CONFIG: {"eos_token": GONE}, MAP: {"eos_token": ""}},
        ("eos",),
    ),
}  # fmt: skip
INNOCENT: Mapping[str, tuple[Keys, Keys]] = {
    "null or empty": ({CONFIG: {"eos_token": ""}}, {CONFIG: {"eos_token": None}}),
    "null or not there": ({CONFIG: {"sep_token": GONE}}, {CONFIG: {"sep_token": None}}),
    "the map has it": ({}, {CONFIG: {"eos_token": ""}, MAP: {"eos_token": END}}),
    "an object": ({}, {MAP: {"eos_token": {"content": END, "special": True}}}),
}


def made(model: Path, there: Path, keys: Keys) -> Path:
    """Return a copy of a folder with keys of its files changed."""
    shutil.copytree(model, there)
    for file, values in keys.items():
        path = there / file
        held: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        held |= values
        path.write_text(json.dumps({key: v for key, v in held.items() if v is not GONE}))
    return there


def token_ids(folder: Path) -> dict[str, int | None]:
    """Return transformers' ids by role; None for none.

    An empty text is none: transformers gives such a token unk's id, and recurses where unk is one.
    """
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    roles = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    texts = {role: getattr(tokenizer, f"{role}_token") for role in roles}
    vocab = tokenizer.get_vocab()
    return {role: vocab[text] if text else None for role, text in texts.items()}


@pytest.mark.parametrize("case", CASES)
def test_no_token_is_another_statement_than_a_token(
    case: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way round, and the next command mends B where a key of tokenizer_config.json does."""
    left, right, roles = CASES[case]
    a, b = made(demo_model, tmp_path / "a", left), made(demo_model, tmp_path / "b", right)
    x, y = token_ids(a), token_ids(b)
    assert {role for role in x if x[role] != y[role]} == set(roles)
    for pair in ((a, b), (b, a)):
        report = compare_tokens(*map(open_model, pair))
        assert [row.name for row in report.findings] == [f"{role}_id" for role in roles]
        assert all("which is no token and has no id" in row.says for row in report.findings)
        for name in ("diff", "diagnose"):
            assert command(name, *pair).code == 1
        if MAP in right:
            continue
        (following,) = command("diagnose", *pair, "--json").json["next"]
        mended = written(following, pair[1], tmp_path / f"mended-{pair[1].name}", monkeypatch)
        assert command("diff", pair[0], mended).code == 0, following


def test_a_token_that_no_file_names_is_its_class_matter(demo_model: Path, tmp_path: Path) -> None:
    b = made(demo_model, tmp_path / "b", {CONFIG: {"eos_token": GONE}})
    assert token_ids(b)["eos"] != token_ids(demo_model)["eos"]  # the class's own
    (row,) = compare_tokens(open_model(demo_model), open_model(b)).findings
    assert row.name == "eos_id" and row.says.endswith("not stated, so that its class decides in B")
    assert command("diff", demo_model, b).code == 1


@pytest.mark.parametrize("case", INNOCENT)
def test_two_ways_to_say_the_same(case: str, demo_model: Path, tmp_path: Path) -> None:
    left, right = INNOCENT[case]
    a, b = made(demo_model, tmp_path / "a", left), made(demo_model, tmp_path / "b", right)
    assert token_ids(a) == token_ids(b)
    for pair in ((a, b), (b, a)):
        assert compare_tokens(*map(open_model, pair)).findings == ()


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [None, GONE], ids=["null", "not there"])
def test_a_generation_setting_without_an_id(
    key: str, value: Any, demo_model: Path, tmp_path: Path
) -> None:
    """transformers takes none of config.json's ids where generation_config.json is there."""
    b = made(demo_model, tmp_path / "b", {GENERATION: {key: value}})
    config = pytest.importorskip("transformers").GenerationConfig
    one, other = (getattr(config.from_pretrained(each), key) for each in (demo_model, b))
    assert one is not None and other is None
    for pair in ((demo_model, b), (b, demo_model)):
        (row,) = compare_tokens(*map(open_model, pair)).findings
        assert row.cause == "generation_config" and row.where == (f"{GENERATION}: {key}",)
        assert command("diff", *pair).code == command("diagnose", *pair).code == 1
    if key == "eos_token_id":
        assert transformers_stop_ids(open_model(b).carried) == frozenset()
        model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(b)
        assert model.config.eos_token_id is not None
        assert model.generation_config.eos_token_id is None


# An id in config.json of A that B's lacks -> (keys of both, the files that still state it in B).
CONFIGURED: Mapping[str, tuple[Keys, tuple[str, ...]]] = {
    "bos": ({}, (GENERATION,)),
    "eos": ({}, (GENERATION, CONFIG)),
    "pad": ({}, (GENERATION, CONFIG)),
    "bos, stated nowhere": ({GENERATION: {"bos_token_id": GONE}}, ()),
    "pad, of the tokenizer": ({GENERATION: {"pad_token_id": GONE}}, (CONFIG,)),
    "pad, stated nowhere": ({GENERATION: {"pad_token_id": GONE}, CONFIG: {"pad_token": None}}, ()),
    "bos, another in the file that counts": ({GENERATION: {"bos_token_id": 7}}, (GENERATION,)),
}


@pytest.mark.parametrize("case", CONFIGURED)
def test_an_id_of_one_config_alone(
    case: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a difference where no other file states it, and said where one does. Either way."""
    both, files = CONFIGURED[case]
    key = f"{case[:3]}_token_id"
    a = made(demo_model, tmp_path / "a", both)
    b = made(a, tmp_path / "b", {"config.json": {key: GONE if "," in case else None}})
    for pair in ((a, b), (b, a)):
        report = compare_tokens(*map(open_model, pair))
        (row,) = report.notes if files else report.findings
        assert row.name == f"config.{key}" and row.where == (f"config.json: {key}",)
        assert (row.a is None) is (pair[0] == b) and (row.b is None) is (pair[1] == b)
        if files:
            assert report.findings == () and report.remarks == (row.says,)
            assert row.says.endswith(f"still stated in {', '.join(files)}")
    answer = command("diagnose", a, b, "--json")
    assert answer.code == command("diff", a, b).code == (0 if files else 1)
    if files:
        assert row.says.partition(" is ")[0] in answer.json["sentence"]
        return
    (following,) = answer.json["next"]
    mended = written(following, b, tmp_path / "mended", monkeypatch)
    assert command("diff", a, mended).code == 0, following


def test_an_id_that_neither_config_has(demo_model: Path, tmp_path: Path) -> None:
    """null and no key are the same; so is a key that moved into the text's own settings."""
    held = json.loads((demo_model / "config.json").read_text())["bos_token_id"]
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"bos_token_id": None}, {"bos_token_id": GONE}),
        ({}, {"bos_token_id": None, "text_config": {"bos_token_id": held}}),
    ]
    for i, keys in enumerate(pairs):
        sides = [
            made(demo_model, tmp_path / f"{i}{j}", {"config.json": k}) for j, k in enumerate(keys)
        ]
        report = compare_tokens(*map(open_model, sides))
        assert (report.findings, report.notes, report.remarks) == ((), (), ())


@pytest.fixture(scope="module")
def gguf(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model as a GGUF."""
    path = tmp_path_factory.mktemp("keys") / "a.gguf"
    convert(demo_model, path)
    return path


@pytest.mark.parametrize("role", ["bos", "eos", "pad"])
def test_a_key_that_a_gguf_lost(
    role: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads it, and without it has no such token. Seen red: "equal", for bos and pad.

    llama.cpp puts this bos nowhere, and pads nothing.
    """
    key = f"tokenizer.ggml.{'padding' if role == 'pad' else role}_token_id"
    b = tmp_path / "b.gguf"
    assert command("set", gguf, "--remove", key, "-o", b).code == 0
    load = pytest.importorskip("transformers").AutoTokenizer.from_pretrained
    loaded = [load(each.parent, gguf_file=each.name) for each in (gguf, b)]
    ids = [getattr(each, f"{role}_token_id") for each in loaded]
    assert ids[0] is not None and ids[1] is None
    for pair in ((gguf, b), (b, gguf)):
        (row,) = compare_tokens(*map(open_model, pair)).findings
        assert (row.name, row.where[0]) == (f"{role}_id", key)
        assert f"transformers has no {role} token in {'AB'[pair[1] == b]}" in row.says
        assert command("diff", *pair).code == command("diagnose", *pair).code == 1
    (following,) = command("diagnose", gguf, b, "--json").json["next"]
    mended = written(following, b, tmp_path / "mended.gguf", monkeypatch)
    assert command("diff", gguf, mended).code == 0, following


@pytest.mark.parametrize("named", [True, False], ids=["an id in config.json", "none"])
def test_a_folder_that_says_none_beside_a_gguf(
    named: bool, gguf: Path, demo_model: Path, tmp_path: Path
) -> None:
    """A writer of GGUF takes config.json's id, so that the two agree; without one they do not."""
    ids = {} if named else {"config.json": {"pad_token_id": GONE}}
    folder = made(demo_model, tmp_path / "f", {CONFIG: {"pad_token": ""}, **ids})
    for pair in ((folder, gguf), (gguf, folder)):
        found = compare_tokens(*map(open_model, pair)).findings
        assert ["pad_id"] * (not named) == [row.name for row in found]
    convert(folder, tmp_path / "own.gguf")
    assert compare_tokens(open_model(folder), open_model(tmp_path / "own.gguf")).findings == ()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"eos_token": ""}, "the tokenizer has no eos id"),
        ({"pad_token": ""}, "the tokenizer has no pad id"),
        ({"eos_token": None}, None),
        ({"bos_token": None}, None),
    ],
)
def test_validate_says_a_token_that_is_empty(
    keys: Mapping[str, Any], said: str | None, demo_model: Path, tmp_path: Path
) -> None:
    b = made(demo_model, tmp_path / "b", {CONFIG: keys})
    found = command("validate", b, "--json").json["findings"]
    assert {row["check"] for row in found} == ({"special_ids"} if said else set())
    assert [said in row["found"] for row in found] == ([True] if said else [])
