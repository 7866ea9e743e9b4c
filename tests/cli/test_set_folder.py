"""`aprfmt set` of a folder changes what readers read; GGUF and APR take names of elsewhere.

transformers is the judge of what is read: its own configuration, generation and tokenizer classes
open the folder that was written.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors import safe_open

import aprfmt as package
from aprfmt.conversion.folder_edits import _dump_like
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "m"
    assert aprfmt("demo", "--into", folder).code == 0
    return folder


@pytest.fixture(scope="module")
def files(demo: Path) -> dict[str, Path]:
    found = {"folder": demo}
    for name in ("gguf", "apr"):
        found[name] = demo.parent / f"m.{name}"
        assert aprfmt("convert", demo, found[name]).code == 0
    return found


def seen(folder: Path) -> dict[str, Any]:
    """Return what transformers takes from a folder."""
    config = transformers.AutoConfig.from_pretrained(folder)
    generates = transformers.GenerationConfig.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "eos_token_id": config.eos_token_id,
        "stops": generates.eos_token_id,
        "temperature": generates.temperature,
        "do_sample": generates.do_sample,
        "model_max_length": tokenizer.model_max_length,
        "chat_template": tokenizer.chat_template,
    }


CHANGES = [
    ("rope_theta=5000", {"rope_theta": 5000}),
    ("qwen2.rope.freq_base=7000", {"rope_theta": 7000}),
    ("rope_parameters.rope_theta=9000", {"rope_theta": 9000}),
    ("max_position_embeddings=99", {"max_position_embeddings": 99}),
    ("context_length=98", {"max_position_embeddings": 98}),
    ("norm_eps=1e-3", {"rms_norm_eps": 1e-3}),
    ("config.json:rms_norm_eps=2e-3", {"rms_norm_eps": 2e-3}),
    ("eos_token_id=5", {"eos_token_id": 5, "stops": 5}),
    ("eos_token_id=[5,6]", {"eos_token_id": [5, 6], "stops": [5, 6]}),
    ("tokenizer.ggml.eos_token_id=7", {"eos_token_id": 7, "stops": 7}),
    ("generation_config.json:eos_token_id=8", {"stops": 8}),
    ("temperature=0.25", {"temperature": 0.25}),
    ("do_sample=true", {"do_sample": True}),
    ("model_max_length=77", {"model_max_length": 77}),
    ("chat_template={{ messages }}", {"chat_template": "{{ messages }}"}),
    ("tokenizer.chat_template=x", {"chat_template": "x"}),
]


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ("rope_theta=5000", 5000.0),
        ("rms_norm_eps=1", 1.0),
        ("max_position_embeddings=2048.0", 2048),
        ("max_position_embeddings=2e3", 2000),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "apr"])
def test_a_number_keeps_its_type(
    kind: str, change: str, written: float, files: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / files[kind].name
    assert aprfmt("set", files[kind], change, "-o", out).code == 0
    key, where = change.split("=")[0], out / "config.json" if kind == "folder" else None
    config = json.loads(where.read_text()) if where else package.open(out).metadata
    found = config[key] if key in config else config["rope_parameters"][key]
    assert (type(found), found) == (type(written), written)


@pytest.mark.parametrize(("change", "wanted"), CHANGES)
def test_transformers_reads_what_was_set(
    change: str, wanted: dict[str, Any], demo: Path, tmp_path: Path
) -> None:
    before = seen(demo)
    assert all(before[key] != value for key, value in wanted.items())
    done = aprfmt("set", demo, change, "-o", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert seen(tmp_path / "out") == before | wanted
    said = {row["key"].partition(": ")[0] for row in done.json["changes"]}
    changed = {
        path.name for path in demo.iterdir()
        if path.is_file() and (tmp_path / "out" / path.name).is_file()
        and path.read_bytes() != (tmp_path / "out" / path.name).read_bytes()
    }  # fmt: skip
    assert changed == said


@pytest.mark.parametrize(("change", "wanted"), CHANGES)
def test_in_place_only_the_named_files_change(
    change: str, wanted: dict[str, Any], demo: Path, tmp_path: Path
) -> None:
    assert aprfmt("demo", "--into", tmp_path / "Demo-0.5B").code == 0
    folder = tmp_path / "Demo-0.5B"
    before, old = seen(folder), {path: path.read_bytes() for path in folder.iterdir()}
    done = aprfmt("set", folder, change, "--in-place", "--json")
    assert done.code == 0, done.err
    assert seen(folder) == before | wanted
    changed = {path.name for path in folder.iterdir() if old[path] != path.read_bytes()}
    assert changed == {row["key"].partition(": ")[0] for row in done.json["changes"]}
    assert done.json["in_place"] and done.json["patched_bytes"] == sum(
        (folder / name).stat().st_size for name in changed
    )


@pytest.mark.parametrize(
    ("change", "gguf", "apr"),
    [
        ("rope_theta=5000", "qwen2.rope.freq_base", "rope_theta"),
        ("norm_eps=0.5", "qwen2.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rms_norm_eps=0.5", "qwen2.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("max_position_embeddings=99", "qwen2.context_length", "max_position_embeddings"),
        ("eos_token_id=3", "tokenizer.ggml.eos_token_id", "tokenizer.eos_token_id"),
        ("chat_template=x", "tokenizer.chat_template", "chat_template"),
        ("add_bos_token=true", "tokenizer.ggml.add_bos_token", "tokenizer.add_bos_token"),
    ],
)
def test_a_name_of_elsewhere_is_the_files_own_key(
    change: str, gguf: str, apr: str, files: dict[str, Path], tmp_path: Path
) -> None:
    for name, key in (("gguf", gguf), ("apr", apr)):
        done = aprfmt("set", files[name], change, "-o", tmp_path / f"x.{name}", "--json")
        assert done.code == 0, done.err
        assert [row["key"] for row in done.json["changes"]] == [key]
        with package.open(tmp_path / f"x.{name}") as model, package.open(files[name]) as old:
            text = change.partition("=")[2]
            assert model.metadata[key] == (text if text == "x" else json.loads(text))
            assert set(model.metadata) - set(old.metadata) <= {key}


def test_the_weights_metadata_is_changed_where_it_is_named(demo: Path, tmp_path: Path) -> None:
    done = aprfmt("set", demo, "__metadata__:note=x", "format=flax", "-o", tmp_path / "o")
    assert done.code == 0, done.err
    with safe_open(tmp_path / "o" / "model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "flax", "note": "x"}
    for path in demo.glob("*.json"):
        assert not (tmp_path / "o" / path.name).is_file() or (
            (tmp_path / "o" / path.name).read_bytes() == path.read_bytes()
        )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense=1"], "nonsense: stands in no file of "),
        (["rope_thta=1"], "near names: rope_theta"),
        (["eos_token=1", "eos_token=2"], "is named twice"),
        (["rms_norm_eps=abc"], "is a number in the file, 'abc' is text"),
        (["tie_word_embeddings=5"], "is a truth value in the file"),
        (["hidden_size.x=5", "config.json:hidden_size.x=5"], "hidden_size.x: stands in no file"),
        (["config.json:hidden_size.x=5"], "hidden_size holds no keys"),
        (["rope_theta="], "has no value"),
        (["--remove", "nonsense"], "nonsense: stands in no file of "),
        (["--remove", "temperature"], "has no key 'temperature' to remove"),
        (["--remove", "chat_template"], "a file is not removed by set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", ["copy", "in place"])
def test_what_cannot_be_is_one_line_and_changes_nothing(
    args: list[str], says: str, way: str, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    assert aprfmt("demo", "--into", folder).code == 0
    old = {path: path.read_bytes() for path in folder.iterdir()}
    target = ["-o", str(tmp_path / "o")] if way == "copy" else ["--in-place"]
    done = aprfmt("set", folder, *args, *target)
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1, done.err
    assert {path: path.read_bytes() for path in folder.iterdir()} == old
    assert os.listdir(tmp_path) == ["m"]


def test_weights_and_files_are_not_changed_in_place_at_once(tmp_path: Path) -> None:
    assert aprfmt("demo", "--into", tmp_path / "m").code == 0
    args = ("rope_theta=5", "__metadata__:a=b")
    done = aprfmt("set", tmp_path / "m", *args, "--in-place")
    assert done.code == 2 and "change them in two commands" in done.err
    assert aprfmt("set", tmp_path / "m", *args, "-o", tmp_path / "o").code == 0


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    assert aprfmt("demo", "--into", tmp_path / "m").code == 0
    (tmp_path / "m" / "config.json").rename(tmp_path / "kept.json")
    (tmp_path / "m" / "config.json").symlink_to(tmp_path / "kept.json")
    before = (tmp_path / "kept.json").read_bytes()
    done = aprfmt("set", tmp_path / "m", "rope_theta=5", "--in-place")
    assert done.code == 2 and "is a link" in done.err
    assert (tmp_path / "kept.json").read_bytes() == before
    assert (tmp_path / "m" / "config.json").is_symlink()


def test_a_key_is_removed_from_every_file_that_has_it(demo: Path, tmp_path: Path) -> None:
    done = aprfmt("set", demo, "--remove", "pad_token_id", "-o", tmp_path / "o", "--json")
    assert done.code == 0, done.err
    for name in ("config.json", "generation_config.json"):
        old, new = (json.loads((folder / name).read_text()) for folder in (demo, tmp_path / "o"))
        assert {key: old[key] for key in old if key != "pad_token_id"} == new
    assert [row["how"] for row in done.json["changes"]] == ["removed", "removed"]


def test_what_was_there_is_set_and_what_was_not_is_added(demo: Path, tmp_path: Path) -> None:
    words = ("rope_theta=5", "config.json:own_key=1", "--remove", "pad_token_id")
    done = aprfmt("set", demo, *words, "-o", tmp_path / "o", "--json")
    rows = {row["key"]: row for row in done.json["changes"]}
    said = {re.split("[:. ]+", key)[-1]: row["how"] for key, row in rows.items()}
    assert said == {"rope_theta": "set", "own_key": "added", "pad_token_id": "removed"}
    for row in rows.values():
        assert (row["old"] is None) == (row["how"] == "added")
        assert (row["new"] is None) == (row["how"] == "removed")
    shown = aprfmt("set", demo, *words, "-o", tmp_path / "p").out
    assert "own_key: (new) -> 1" in shown and "pad_token_id: " in shown and "(removed)" in shown


def test_a_template_inside_tokenizer_config_is_changed_there(tmp_path: Path) -> None:
    assert aprfmt("demo", "--into", tmp_path / "m").code == 0
    file = tmp_path / "m" / "tokenizer_config.json"
    held = json.loads(file.read_text())
    held["chat_template"] = (tmp_path / "m" / "chat_template.jinja").read_text()
    file.write_text(json.dumps(held, indent=2))
    (tmp_path / "m" / "chat_template.jinja").unlink()
    (tmp_path / "t").write_text("{{ 'é' }}\n")
    done = aprfmt("set", tmp_path / "m", f"chat_template=@{tmp_path / 't'}", "--in-place")
    assert done.code == 0, done.err
    assert not (tmp_path / "m" / "chat_template.jinja").exists()
    assert seen(tmp_path / "m")["chat_template"] == "{{ 'é' }}\n"


@pytest.mark.parametrize("form", ["folder", "gguf", "apr"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("eos_token_id=99999999", "id 99999999; expected an id below 1536"),
        ("hidden_size=255", "the tensors say 256"),
        ("general.architecture=llama", ""),
    ],
)
def test_a_value_out_of_its_range_is_warned_of(
    form: str, change: str, says: str, files: dict[str, Path], tmp_path: Path
) -> None:
    if change.startswith("general") and form == "apr":
        change = "architecture=llama"
    out = tmp_path / ("o" if form == "folder" else f"o.{form}")
    done = aprfmt("set", files[form], change, "-o", out)
    assert done.code == 0 and out.exists()
    assert done.err.startswith("warning: ") and says in done.err
    assert "doubtful_value" in done.err or "unreadable_output" in done.err
    assert done.err.count("\n") <= 8


@pytest.mark.parametrize("form", ["folder", "gguf", "apr"])
def test_what_was_doubtful_before_is_not_said_again(
    form: str, files: dict[str, Path], tmp_path: Path
) -> None:
    first = tmp_path / ("o" if form == "folder" else f"o.{form}")
    last = tmp_path / ("p" if form == "folder" else f"p.{form}")
    assert aprfmt("set", files[form], "eos_token_id=99999999", "-o", first).err
    done = aprfmt("set", first, "add_bos_token=true", "-o", last)
    assert done.code == 0 and done.err == ""


def test_bare_weights_take_only_what_is_meant_for_them(demo: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((demo / "model.safetensors").read_bytes())
    for change in ("rope_theta=5", "note=x", "chat_template=x"):
        done = aprfmt("set", bare, change, "-o", tmp_path / "o.safetensors")
        assert done.code == 2 and "has no config.json; __metadata__:" in done.err
    done = aprfmt("set", bare, "__metadata__:note=x", "format=np", "-o", tmp_path / "o.safetensors")
    assert done.code == 0, done.err
    with safe_open(tmp_path / "o.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "np", "note": "x"}
    assert sorted(os.listdir(tmp_path)) == ["bare.safetensors", "o.safetensors"]


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
@pytest.mark.parametrize("note", ["plain", "\u00e9"])
def test_a_file_of_json_keeps_its_form(
    end: str, indent: int | str | None, note: str, demo: Path, tmp_path: Path
) -> None:
    """Indentation, the newline at the end, and whether other letters than ASCII are escaped."""
    folder = shutil.copytree(demo, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())

    def text(**more: Any) -> str:
        return json.dumps({**config, "note": note, **more}, indent=indent, ensure_ascii=False) + end

    (folder / "config.json").write_text(text())
    assert aprfmt("set", folder, "rms_norm_eps=0.25", "-o", tmp_path / "o").code == 0
    assert (tmp_path / "o" / "config.json").read_text() == text(rms_norm_eps=0.25)


def test_a_new_file_of_json_ends_with_a_newline() -> None:
    assert _dump_like({"a": 1}, "") == '{\n  "a": 1\n}\n'


def test_a_list_of_a_folder_is_said_in_full_up_to_sixteen(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", "BF16")
    for count in (0, 1, 15, 16, 17, 40):
        wanted, copy = list(range(count)), tmp_path / str(count)
        done = aprfmt("set", folder, f"config.json:numbers={wanted}", "-o", copy, "--json")
        assert done.code == 0, done.err
        text = json.dumps(wanted if count <= 16 else f"array of {count}")
        assert text in json.dumps(done.json), done.json
        assert json.loads((copy / "config.json").read_text())["numbers"] == wanted
