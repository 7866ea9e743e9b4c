"""`aprfmt set`: misspelt keys, what changed, removal, and every type a GGUF value can have."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import aprfmt as package
from aprfmt.cli import set_
from aprfmt.cli.commands import COMMANDS
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("set")
    found = {"folder": llama_folder(folder / "m", "BF16")}
    for name in ("gguf", "apr"):
        found[name] = folder / f"m.{name}"
        assert aprfmt("convert", found["folder"], found[name]).code == 0
    return found


def stored(path: Path) -> dict[str, tuple[list[str], Any]]:
    """Return types and value of every key, as gguf-py reads them."""
    fields = gguf.GGUFReader(path).fields
    return {
        key: ([t.name.lower() for t in field.types], field.contents())
        for key, field in fields.items()
    }


@pytest.mark.parametrize(
    ("change", "near"),
    [
        ("general.nam=x", "general.name"),
        ("llama.rope.freq_bass=1", "llama.rope.freq_base"),
        ("qwen2.context_length=5", "llama.context_length"),
        ("tokenizer.chat_templat=x", "tokenizer.chat_template"),
        ("general.licence=mit", "general.license"),
        ("something.of.my.own=1", ""),
    ],
)
def test_a_key_nobody_knows_is_warned_of(
    change: str, near: str, files: dict[str, Path], tmp_path: Path
) -> None:
    done = aprfmt("set", files["gguf"], change, "-o", tmp_path / "x.gguf")
    assert done.code == 0 and done.err.count("\n") == 1
    assert done.err.startswith("warning: ") and f" {change.partition('=')[0]}: " in done.err
    assert f"near names: {near}" in done.err
    assert change.partition("=")[0] in stored(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "change",
    ["general.author=me", "general.base_model.0.name=x", "tokenizer.chat_template.tool_use=x",
     "llama.attention.scale=0.5", "general.name=y"],
)  # fmt: skip
def test_a_known_key_is_not(change: str, files: dict[str, Path], tmp_path: Path) -> None:
    assert aprfmt("set", files["gguf"], change, "-o", tmp_path / "x.gguf").err == ""


def test_known_keys_are_those_of_upstream() -> None:
    """Every key of gguf-py except those of splits and of files that are not models."""
    from fnmatch import fnmatchcase

    from aprfmt.formats import FORMATS

    every: set[str] = set()

    def walk(space: Any) -> None:
        for name, value in vars(space).items():
            if isinstance(value, str) and not name.startswith("_"):
                every.add(value)
            elif isinstance(value, type) and name != "__class__":
                walk(value)

    walk(gguf.constants.Keys)
    keys = [key.format(arch="llama", id=0, name="x", dense="dense") for key in every]
    keys = [key for key in keys if not key.startswith(("adapter.", "imatrix.", "split."))]
    known = FORMATS["gguf"].values.keys(["llama"])
    lacking = [key for key in keys if not any(fnmatchcase(key, each) for each in known)]
    assert len(keys) > 200 and set(lacking) == {"llama.dense_feat_in", "llama.dense_feat_out"}


def test_old_and_new_are_said(files: dict[str, Path], tmp_path: Path) -> None:
    args = (
        "llama.context_length=64",
        "general.author=me",
        "general.name=x",
        "--remove",
        "general.file_type",
    )
    done = aprfmt("set", files["gguf"], *args, "-o", tmp_path / "x.gguf")
    lines = [line.strip() for line in done.out.splitlines()]
    assert done.err == ""
    for line in (
        "llama.context_length: 128 -> 64",
        "general.author: (new) -> me (string)",
        "general.file_type: 32 = BF16 -> (removed)",
    ):
        assert line in lines, done.out
    changes = aprfmt("set", files["gguf"], *args, "-o", tmp_path / "y.gguf", "--json").json
    rows = {row["key"]: row for row in changes["changes"]}
    assert rows["llama.context_length"] == {
        "key": "llama.context_length",
        "how": "set",
        "old": 128,
        "new": 64,
        "old_type": "uint32",
        "new_type": "uint32",
    }
    assert rows["general.author"]["how"] == "added" and rows["general.author"]["old"] is None
    removed = rows["general.file_type"]
    assert (removed["how"], removed["old"], removed["new"]) == ("removed", 32, None)
    # A long text, and an escape sequence of a file, do not flood or steer the terminal.
    text = aprfmt(
        "set", files["gguf"], "general.name=\x1b[31m" + "x" * 5000, "-o", tmp_path / "z.gguf"
    ).out
    assert "\x1b" not in text and max(map(len, text.splitlines())) < 400


@pytest.mark.parametrize("form", ["gguf", "apr"])
def test_every_key_of_ours_can_be_taken_away(form: str, demo_model: Path, tmp_path: Path) -> None:
    """The small files go with their key: no loss, and the template stays as the file's own."""
    source, target = tmp_path / f"a.{form}", tmp_path / f"b.{form}"
    assert aprfmt("convert", demo_model, source).code == 0
    with package.open(source) as model:
        keys = [key for key in model.metadata if key.startswith("aprfmt.")]
    assert "aprfmt.files" in keys
    done = aprfmt("set", source, *(f"--remove={key}" for key in keys), "-o", target)
    assert done.code == 0 and "1 dropped" in done.out, done.err
    with package.open(target) as model:
        assert not [key for key in model.metadata if key.startswith("aprfmt.")]


def test_remove_takes_a_key_away_and_nothing_else(files: dict[str, Path], tmp_path: Path) -> None:
    for form in ("gguf", "apr"):
        key = {"gguf": "general.name", "apr": "name"}[form]
        target = tmp_path / f"x.{form}"
        done = aprfmt("set", files[form], "--remove", key, "-o", target)
        assert (done.code, done.err) == (0, ""), done.err
        with package.open(files[form]) as a, package.open(target) as b:
            assert set(a.metadata) - set(b.metadata) == {key}
            assert {k: bytes(t.raw()) for k, t in a.items()} == {
                k: bytes(t.raw()) for k, t in b.items()
            }
        refused = aprfmt("set", files[form], "--remove", key[:-1], "-o", tmp_path / f"y.{form}")
        assert refused.code == 2 and f"near names: {key}" in refused.err
        assert not (tmp_path / f"y.{form}").exists()


@pytest.mark.parametrize(
    "args", [("--remove", "llama.attention.head_count"), ("general.architecture=lama",)]
)
def test_a_file_that_is_no_model_any_more_is_said(
    args: tuple[str, ...], files: dict[str, Path], tmp_path: Path
) -> None:
    """For a file without the config.json that our files carry."""
    bare = ("--remove", "aprfmt.hf_config")
    assert aprfmt("set", files["gguf"], *bare, "-o", tmp_path / "y.gguf").err == ""
    done = aprfmt("set", files["gguf"], *bare, *args, "-o", tmp_path / "x.gguf")
    assert done.code == 0
    assert sum("cannot be read as a model any more" in line for line in done.err.splitlines()) == 1


SCALARS: dict[str, tuple[str, Any]] = {
    "uint8": ("255", 255), "int8": ("-128", -128), "uint16": ("65535", 65535),
    "int16": ("-32768", -32768), "uint32": ("4294967295", 2**32 - 1),
    "int32": ("-2147483648", -(2**31)), "uint64": ("18446744073709551615", 2**64 - 1),
    "int64": ("-9223372036854775808", -(2**63)), "float32": ("0.1", float(np.float32(0.1))),
    "float64": ("0.1", 0.1), "bool": ("true", True), "string": ("a, b", "a, b"),
}  # fmt: skip
LISTS: dict[str, tuple[str, list[Any]]] = {
    name: (f"{text},{text}", [value, value])
    for name, (text, value) in SCALARS.items()
    if name != "string"
} | {"string": ('["a, b","","é"]', ["a, b", "", "é"])}


def short(name: str) -> str:
    """Return the short spelling of a type: u32, f64, bool, str."""
    return {"string": "str"}.get(name) or re.sub(r"^([uif])[a-z]*(\d+)$", r"\1\2", name)


def test_every_type_is_here() -> None:
    names = {kind.name.lower() for kind in gguf.GGUFValueType}
    assert set(SCALARS) == set(LISTS) == names - {"array"}
    assert {short(name) for name in SCALARS} >= {"u8", "i64", "f32", "bool", "str"}
    help_text = aprfmt("set", "--help").out
    assert all(f" {short(name)}" in help_text.replace("\n", " ") for name in SCALARS)


@pytest.mark.parametrize("spelling", [short, str])
@pytest.mark.parametrize("name", SCALARS)
def test_every_type_can_be_given_and_reads_back(
    name: str, spelling: Any, files: dict[str, Path], tmp_path: Path
) -> None:
    """One value, a list, an empty list and lists in a list, as gguf-py reads them."""
    target, kind = tmp_path / "x.gguf", spelling(name)
    text, value = SCALARS[name]
    many, values = LISTS[name]
    json = many if many.startswith("[") else f"[{many}]"
    changes = (
        f"one:{kind}={text}",
        f"list:{kind}[]={many}",
        f"json:{kind}[]={json}",
        f"none:{kind}[]=[]",
        f"nested:{kind}[][]=[{json},[]]",
    )
    done = aprfmt("set", files["gguf"], *changes, "-o", target)
    assert done.code == 0, done.err
    found = stored(target)
    assert found["one"] == ([name], value)
    assert found["list"] == found["json"] == (["array", name], values)
    with package.open(target) as model:
        assert model.source.types["none"] == f"array:{name}" and len(model.metadata["none"]) == 0
        assert model.source.types["nested"] == f"array:array:{name}"
        assert [list(row) for row in model.metadata["nested"]] == [values, []]
    # The key keeps its type when it is set again without one.
    again = tmp_path / "y.gguf"
    assert aprfmt("set", target, f"list={many}", f"one={text}", "-o", again).code == 0
    assert stored(again)["list"] == found["list"] and stored(again)["one"] == found["one"]


def test_a_type_can_be_changed_and_is_said(files: dict[str, Path], tmp_path: Path) -> None:
    done = aprfmt("set", files["gguf"], "llama.context_length:u64=5", "-o", tmp_path / "x.gguf")
    assert "llama.context_length: 128 -> 5 (uint32 -> uint64)" in done.out
    assert stored(tmp_path / "x.gguf")["llama.context_length"] == (["uint64"], 5)


def test_numbers_under_a_key_of_text_are_text(files: dict[str, Path], tmp_path: Path) -> None:
    done = aprfmt("set", files["gguf"], "general.version=1.0", "-o", tmp_path / "x.gguf")
    assert done.code == 0 and stored(tmp_path / "x.gguf")["general.version"] == (["string"], "1.0")
    done = aprfmt(
        "set", files["folder"] / "model.safetensors", "format=1", "-o", tmp_path / "x.safetensors"
    )
    with package.open(tmp_path / "x.safetensors") as model:
        assert model.metadata["format"] == "1"


def test_apr_takes_json(files: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "x.apr"
    done = aprfmt("set", files["apr"], "rows=[1,2]", "rope_theta=5e3", "-o", target)
    assert done.code == 0 and "rows" in done.err and "rope_theta" not in done.err
    with package.open(target) as model:
        assert list(model.metadata["rows"]) == [1, 2] and model.metadata["rope_theta"] == 5000


def test_a_folder_is_written_as_a_folder(files: dict[str, Path], tmp_path: Path) -> None:
    done = aprfmt("set", files["folder"], "format=pt", "-o", tmp_path / "copy")
    assert done.code == 0, done.err
    assert aprfmt("diff", files["folder"], tmp_path / "copy").code == 0


WRONG = [
    ("gguf", ("llama.context_length=many",), "'many' is not of type uint32"),
    ("gguf", ("llama.context_length=99999999999",), "4294967295"),
    ("gguf", ("llama.context_length=-1",), "4294967295"),
    ("gguf", ("llama.context_length=1.5",), "'1.5' is not of type uint32"),
    ("gguf", ("llama.context_length=true",), "'true' is not of type uint32"),
    ("gguf", ("llama.rope.freq_base=1e39",), "float32"),
    ("gguf", ("x:u8[]=1,300",), "'300' is not of type uint8"),
    ("gguf", ("x:u8[]=[1,[2]]",), "is not of type uint8"),
    ("gguf", ("x:u8[][]=1,2",), "JSON"),
    ("gguf", ("x:bool=1",), "true or false"),
    ("gguf", ("x:u77=1",), "there is no type 'u77'; gguf has u8, i8"),
    ("gguf", ("x:u8=",), "x:u8[]=[]"),
    ("gguf", ("x=[]",), "x:TYPE[]=[]"),
    ("gguf", ('x=[1,"a"]',), "one type"),
    ("gguf", ('x={"a":1}',), "object"),
    ("gguf", ("x=null",), "null"),
    ("gguf", ("x=1", "x=2"), "twice"),
    ("gguf", ("general.name=1", "--remove", "general.name"), "twice"),
    ("gguf", ("--remove", "general.name", "--remove", "general.name"), "twice"),
    ("gguf", ("novalue",), "KEY=VALUE"),
    ("gguf", (), "--remove"),
    ("gguf", ("x=@/no/such/file",), "/no/such/file: cannot be opened"),
    ("gguf", ("split.no=1",), "split"),
    ("apr", ("x:u32[]=1,2",), "JSON"),
    ("apr", ("hidden_size=many",), "a number"),
]


@pytest.mark.parametrize(("form", "args", "says"), WRONG)
def test_what_cannot_be_set_is_one_line(
    form: str, args: tuple[str, ...], says: str, files: dict[str, Path], tmp_path: Path
) -> None:
    done = aprfmt("set", files[form], *args, "-o", tmp_path / f"x.{form}")
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1, done.err
    assert "Typed" not in done.err and not list(tmp_path.iterdir())
    check_options("set", done.err)


def check_options(command: str, text: str) -> None:
    """Every option a message names is one of its command."""
    params = import_module(f"aprfmt.cli.{COMMANDS[command].module}").command.params
    known = {name for param in params for name in param.opts} | {"--help"}
    assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) <= known, text


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("set", ("{gguf}", "x=1", "-o", "{out}/x")),
        ("set", ("{gguf}", "x=1", "-o", "{out}/x.apr")),
        ("set", ("{gguf}", "x=1", "-o", "{out}/no/x.gguf")),
        ("set", ("{gguf}", "x=1", "-o", "{gguf}")),
        ("set", ("{gguf}", "x=1")),
        ("split", ("{gguf}", "{out}/x", "--max-shard-size", "1M")),
        ("merge", ("{gguf}", "{out}/x")),
        ("merge", ("{gguf}", "{gguf}")),
        ("convert", ("{gguf}", "{out}/x")),
        ("convert", ("{gguf}", "{out}/x.apr", "--to", "gguf")),
        ("quantize", ("{gguf}", "{out}/x", "--type", "Q8_0")),
        ("import", ("{gguf}", "-o", "{out}/x.gguf")),
    ],
)
def test_messages_name_options_that_exist(
    command: str, args: tuple[str, ...], files: dict[str, Path], tmp_path: Path
) -> None:
    done = aprfmt(command, *(word.format(**files, out=tmp_path) for word in args))
    assert done.code == 2 and done.err.count("\n") == 1 and not list(tmp_path.iterdir())
    text = done.err.replace(str(tmp_path), "").replace(str(files["gguf"]), "")
    check_options(command, text)


@pytest.mark.parametrize("form", ["gguf", "apr", "safetensors", "folder"])
def test_a_key_that_nothing_reads_is_changed_and_taken_away_as_asked(
    form: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """What was asked for is no difference; what else changes or goes is one."""
    folder = form == "folder"
    key = {"safetensors": "__metadata__:mine", "folder": "config.json:mine"}.get(form, "mine")
    suffix = "" if folder else f".{form}"
    first, second, third = (tmp_path / f"{name}{suffix}" for name in "abc")
    source = next(files[one] for one in (form, "folder") if one in files)
    made = aprfmt("set", source, f"{key}=1", f"{key}2=1", "-o", first)
    assert made.code == 0, made.err
    changed = aprfmt("set", first, f"{key}=2", "-o", second)
    assert changed.code == 0 and "not compared" not in changed.out, changed.out
    removed = aprfmt("set", second, "--remove", key, "-o", third)
    assert removed.code == 0 and "not compared" not in removed.out, removed.out
    other = aprfmt("diff", first, second, "--json").json["not_compared"]
    assert [(row["name"], row["state"]) for row in other if row["name"].startswith("mine")] == [
        ("mine", "unequal"), ("mine2", "equal"),
    ]  # fmt: skip


def test_elements_of_a_new_array_have_one_type(files: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    values = {"ints": "[1,2]", "floats": "[1,2.5]", "texts": '["a","b"]'}
    done = aprfmt("set", files["gguf"], *(f"{k}={v}" for k, v in values.items()), "-o", target)
    assert done.code == 0, done.err
    found = stored(target)
    assert found["ints"][1] == [1, 2] and "float" not in found["ints"][0][1]
    assert found["floats"][1] == [1.0, 2.5] and "float" in found["floats"][0][1]
    assert found["texts"] == (["array", "string"], ["a", "b"])
    done = aprfmt("set", files["gguf"], 'mixed=[1,"a"]', "-o", tmp_path / "y.gguf")
    assert done.code == 2 and "the elements of an array have one type" in done.err


@pytest.mark.parametrize("template", [False, True])
def test_a_change_runs_the_checks_of_stated_values_and_that_of_a_template_if_asked(
    template: bool, files: dict[str, Path]
) -> None:
    """Others would read the weights, or render a template that nobody changed."""
    with package.open(files["folder"]) as opened:
        found = set_.check_metadata_values(opened, template)
    names = {"names of the architecture", "names of the tokenizer"}
    wanted = {*set_.DOUBTS, *names, *([set_.TEMPLATE] if template else [])}
    assert set(found) == wanted


DOUBTFUL = {
    "temperature=-1": "temperature", "top_p=7": "top_p", "top_k=-5": "top_k",
    "repetition_penalty=0": "repetition_penalty", "max_new_tokens=0": "max_new_tokens",
    "dtype=float77": "dtype", "bos_token_id=-1": "bos_token_id", "rms_norm_eps=5": "rms_norm_eps",
    "rope_theta=0.5": "rope_theta", "model_max_length=-1": "model_max_length",
    "padding_side=up": "padding_side",
}  # fmt: skip
USUAL = ("temperature=0.7", "temperature=0", "top_p=1.0", "top_k=-1", "dtype=float32",
         "pad_token_id=-1", "rms_norm_eps=1e-5", "padding_side=left")  # fmt: skip
DOUBTFUL_GGUF = {
    "general.file_type=99": "file_type", "general.sampling.temp=-1": "temp",
    "general.sampling.top_p=3.5": "top_p",
}  # fmt: skip


@pytest.mark.parametrize("change", [*DOUBTFUL, *DOUBTFUL_GGUF])
def test_a_value_outside_its_range_warns(change: str, demo_model: Path, tmp_path: Path) -> None:
    """Seen red: values that every reader refuses were written without a word."""
    model, out = demo_model, tmp_path / "out"
    if change in DOUBTFUL_GGUF:
        model, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
        assert aprfmt("convert", demo_model, model).code == 0
    done = aprfmt("set", model, change, "-o", out)
    warned = [line for line in done.err.splitlines() if "doubtful_value" in line]
    assert done.code == 0 and warned, done.err
    assert all((DOUBTFUL | DOUBTFUL_GGUF)[change] in line for line in warned), warned
    again = aprfmt("set", out, "general.name=x" if model != demo_model else "use_cache=false",
                   "-o", tmp_path / f"again{out.suffix}")  # fmt: skip
    assert "doubtful_value" not in again.err, "it was so before"


@pytest.mark.parametrize("change", USUAL)
def test_a_usual_value_does_not(change: str, demo_model: Path, tmp_path: Path) -> None:
    done = aprfmt("set", demo_model, change, "-o", tmp_path / "out")
    warned = [line for line in done.err.splitlines() if "doubtful_value" in line]
    assert done.code == 0
    assert bool(warned) == (change == "dtype=float32"), warned  # the weights are of another
