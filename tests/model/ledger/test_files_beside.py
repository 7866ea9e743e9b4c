"""Files and folders beside the weights: what they are read for, and when two of them are equal."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from aprfmt.model import open_model
from aprfmt.model.ledger import Ledger, list_not_compared, make_ledger, same_content
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

MODELS = "sentence_transformers.models"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "m", "F32", hidden=16, layers=1, ffn=24, vocab=16)


def ledger_of(folder: Path) -> Ledger:
    with open_model(folder) as model:
        return make_ledger(model)


def items_of(folder: Path) -> dict[str, tuple[str, str]]:
    return {
        item.name: (item.reading, item.of)
        for item in ledger_of(folder).items
        if item.kind == "file"
    }


def test_folders_of_modules_are_read_by_their_type(folder: Path) -> None:
    modules = [
        {"path": "1_Pooling", "type": f"{MODELS}.Pooling"},
        {"path": "2_Normalize", "type": f"{MODELS}.Normalize"},
        {"path": "3_Dense", "type": f"{MODELS}.Dense"},
        {"path": "4_Odd"},
        {"path": "", "type": f"{MODELS}.Pooling"},
        "no row",
    ]
    for name in ("1_Pooling", "2_Normalize", "3_Dense", "4_Odd", "5_Other"):
        (folder / name).mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    found = items_of(folder)
    assert found["1_Pooling"] == ("hyperparameter", "how a text's rows become one")
    assert found["2_Normalize"] == ("without effect", "Normalize has no weights")
    assert found["3_Dense"] == ("unread", "modules.json: Dense")
    assert found["4_Odd"] == ("unread", "modules.json: a module")
    other = found["5_Other"]
    assert "modules.json" not in other[1]
    for said in ({"path": "2_Normalize"}, 7):
        (folder / "modules.json").write_text(json.dumps(said))
        assert items_of(folder)["2_Normalize"] == other
    (folder / "modules.json").write_text("[")
    made = ledger_of(folder)
    assert [item.name for item in made.unreadable] == ["modules.json"]


def test_a_folder_of_an_adapter_is_no_part_of_the_model(folder: Path) -> None:
    """Nor are adapters deeper in a folder; weights beside them may be read."""
    own, more, mixed = folder / "lora_adapter", folder / "adapters" / "one", folder / "mixed" / "a"
    for place in (own, more, mixed):
        place.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
            (place / name).write_text("{}")
    (folder / "mixed" / "model.safetensors").write_text("")
    (folder / "weights").mkdir()
    (folder / "weights" / "adapter_model.safetensors").write_text("")
    found = items_of(folder)
    assert found["lora_adapter"] == found["adapters"]
    assert found["adapters"][0] == "without effect" and "an adapter" in found["adapters"][1]
    assert found["mixed"][0] == found["weights"][0] == "unread"


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Return what puts something else in the place of a.txt."""

    def change(folder: Path) -> None:
        (folder / "a.txt").unlink()
        make(folder / "a.txt")

    return change


Change = Callable[[Path], object]
# What makes another folder of an equal one.
CHANGES: dict[str, Change] = {
    "a byte": lambda f: (f / "a.txt").write_bytes(b"onE"),
    "a size": lambda f: (f / "a.txt").write_bytes(b"one "),
    "a byte below": lambda f: (f / "d" / "b.txt").write_bytes(b"tvo"),
    "a file more": lambda f: (f / "d" / "c.txt").write_bytes(b""),
    "a file less": lambda f: (f / "d" / "b.txt").rename(f / "b.txt"),
    "another name": lambda f: (f / "a.txt").rename(f / "A.txt"),
    "a folder for a file": replaced(os.mkdir),
}
NO_FILES: dict[str, Change] = {
    "a broken link": partial(os.symlink, "none"),
    "a pipe": os.mkfifo,
    "a device": partial(os.symlink, "/dev/zero"),
}


@pytest.mark.parametrize("change", ["", *CHANGES])
def test_folders_are_equal_by_names_and_bytes(change: str, tmp_path: Path) -> None:
    sides = tmp_path / "x", tmp_path / "y"
    for side in sides:
        (side / "d").mkdir(parents=True)
        (side / "a.txt").write_bytes(b"one")
        (side / "d" / "b.txt").write_bytes(b"two")
    if change:
        CHANGES[change](sides[1])
    for x, y in (sides, sides[::-1]):
        assert same_content(x, y) == (not change)
        assert same_content(x, x)
        assert not same_content(x, y / "d" / "b.txt") and not same_content(y / "d", x)


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_neither_equal_nor_unequal(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: a wait without end, two devices that were equal, a lost link to config.json."""
    spoilt = (
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "tekken.json",
        "preprocessor_config.json",
        "planted.bin",
    )
    sides = [Path(shutil.copytree(demo_model, tmp_path / side)) for side in "ab"]
    for side in sides:
        for each in spoilt:
            (side / each).unlink(missing_ok=True)
            NO_FILES[name](side / each)
    done = command("diff", *sides, "--json")
    said = {row["name"]: row["state"] for row in done.json["not_compared"]}
    assert (done.code, said) == (2, dict.fromkeys(spoilt, "unreadable"))
    with pytest.raises(OSError, match=r".+"):
        same_content(sides[0] / "planted.bin", sides[1] / "planted.bin")


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_link_to_nothing_is_said_of_one_model(
    file: str, demo_model: Path, tmp_path: Path
) -> None:
    """As a pruned cache leaves it. Seen red: PASS, and "verified" of a copy without a tokenizer."""
    b = Path(shutil.copytree(demo_model, tmp_path / "b"))
    (b / file).unlink()
    (b / file).symlink_to("../blobs/none")
    assert command("diff", demo_model, b).code and command("diagnose", demo_model, b).code
    for args in (("validate", b), ("convert", b, tmp_path / "b.apr")):
        done = command(*args)
        assert done.code == 2, done.out
        assert file == "config.json" or f"{file} (it is a link to nothing)" in done.out


def test_settings_that_loaders_read_are_compared_by_what_they_hold(
    demo_model: Path, tmp_path: Path
) -> None:
    """Nothing here reads them by meaning. Seen red: "equal", whatever they held."""
    held = {"image_mean": [0.5, 0.5, 0.5], "transformers_version": "5.0"}
    a, b = (Path(shutil.copytree(demo_model, tmp_path / side)) for side in "ab")
    (a / "preprocessor_config.json").write_text(json.dumps(held))
    told = {
        json.dumps(held | {"transformers_version": "5.1"}, indent=2): 0,
        json.dumps(held | {"image_mean": [0.4, 0.5, 0.5]}): 1,
        "{": 1,
    }
    for text, code in told.items():
        (b / "preprocessor_config.json").write_text(text)
        assert command("diff", a, b).code == command("diff", b, a).code == code, text
    (b / "preprocessor_config.json").unlink()
    assert command("diff", a, b).code == command("diff", b, a).code == 1
    (a / "modules.json").write_text("[]")  # for which a single file has no place
    for made in (tmp_path / "a.gguf", tmp_path / "a.apr"):
        assert command("convert", a, made).code == command("diff", a, made).code == 0


# Files that one of the usual loaders reads: two contents, and whether one side alone is enough.
BESIDE: dict[str, tuple[str, str, bool]] = {
    "tokenizer.model": ("a", "b", False),
    "vocab.json": ('{"a": 0, "b": 1}', '{"a": 1, "b": 0}', False),
    "merges.txt": ("a b\n", "b a\n", False),
    "added_tokens.json": ('{"<x>": 5}', '{"<x>": 6}', False),
    "special_tokens_map.json": ('{"pad_token": "<a>"}', '{"pad_token": "<b>"}', False),
    "params.json": ('{"dim": 1}', '{"dim": 2}', False),
    "modeling_x.py": ("a", "b", False),
    "hf_quant_config.json": (
        '{"quantization": {"quant_algo": "FP8"}}',
        '{"quantization": {"quant_algo": "NVFP4"}}',
        True,
    ),
    "modules.json": ("[]", "[1]", True),
    "2_Dense/config.json": ("{}", '{"a": 1}', True),
    "speech/a/b.bin": ("a", "b", True),
}
# The same, as another writer has it.
REWRITTEN = {
    "vocab.json": '{"b": 1,\n"a": 0}',
    "merges.txt": "#version: 0.2\na b",
    "special_tokens_map.json": '{"pad_token": {"content": "<a>", "lstrip": true}}',
    "hf_quant_config.json": '{"producer": {}, "quantization": {"quant_algo": "FP8"}}',
}


@pytest.mark.parametrize("name", BESIDE)
def test_no_file_that_loaders_read_is_equal_unseen(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: "equal" of two folders whose tokenizer.model, claim or module differs."""
    x, y, alone = BESIDE[name]
    with open_model(demo_model) as model:
        plain = make_ledger(model)
    made = []
    for side, text in (("a", x), ("b", y), ("c", REWRITTEN.get(name, x))):
        path = Path(shutil.copytree(demo_model, tmp_path / side)) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        made.append(ledger_of(tmp_path / side))
    a, b, c = made
    assert [row.state for row in list_not_compared(a, b)] == ["unequal"]
    assert {row.state for row in list_not_compared(a, c)} <= {"equal"}
    assert [row.state for row in list_not_compared(a, plain)] == ["only in A"] * alone


def test_folders_of_other_runtimes_and_texts_are_no_parts(demo_model: Path, tmp_path: Path) -> None:
    with open_model(demo_model) as model:
        plain = make_ledger(model)
    a = Path(shutil.copytree(demo_model, tmp_path / "a"))
    for name in ("onnx/model.onnx", "checkpoint-500/model.safetensors", "figures/x/a.png", ".c/d"):
        (a / name).parent.mkdir(parents=True)
        (a / name).write_text("x")
    assert list_not_compared(ledger_of(a), plain) == ()


def test_a_file_is_equal_to_its_text(tmp_path: Path) -> None:
    """As a container embeds it; what is read on demand is read first."""
    path = tmp_path / "x.txt"
    path.write_text("é\n")
    for text, equal in (("é\n", True), ("é", False), (["é\n"], False), (None, False)):
        assert same_content(path, text) == same_content(text, path) == equal
        assert same_content(partial(str, "é\n"), path)
    assert not same_content(tmp_path / "none", "é\n") and not same_content(tmp_path, "")
    assert same_content([1, "a"], [1, "a"]) and not same_content([1, "a"], [1, "b"])
