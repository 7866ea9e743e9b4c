"""Imports of a pickle that no value needs: the file is not read, or the checks name them.

Seen red: names of the standard library allowed, names that nothing is made of allowed, a name that
leads through another module allowed, Python 2's names not mapped, bytes behind the pickle unread,
a file read that imports such a name and never calls it, one refused for a dict's own attributes.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.formats import open_source
from aprfmt.formats.pytorch.pickle_imports import hidden_imports
from tests.cli.run import aprfmt
from tests.formats import pytorch_files as files
from tests.formats.hostile_pickles import name, tensor, text
from tests.formats.pytorch.test_pytorch_hostile import zipped

DROP = b"0"  # POP
WEIGHT = b"}" + text("w") + tensor() + b"s"


def short(value: str) -> bytes:
    """Return the opcode of a text of protocol 4."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def of_stack(module: str, attribute: str) -> bytes:
    return short(module) + short(attribute) + b"\x93"


def parts_of_stack(module: bytes, attribute: bytes) -> bytes:
    """A global whose texts come from the memo, where other values left them."""
    return module + b"q\x05" + DROP + attribute + b"q\x06" + DROP + b"h\x05h\x06\x93"


# What stands before the value and is dropped, or in it -> what is said of it.
IMPORTED: dict[str, tuple[bytes, str]] = {
    "popped": (
        name("os", "system") + DROP + WEIGHT, r"opcode GLOBAL at byte \d+ imports os\.system"
    ),
    "memo": (name("os", "system") + b"q\x63" + DROP + WEIGHT, r"imports os\.system"),
    "under-a-mark": (b"(" + name("posix", "system") + b"1" + WEIGHT, r"imports posix\.system"),
    "stack": (
        of_stack("subprocess", "Popen") + DROP + WEIGHT,
        r"STACK_GLOBAL at byte \d+ imports subprocess\.Popen",
    ),
    "stack-of-memo": (
        parts_of_stack(text("os"), short("system")) + DROP + WEIGHT, r"imports os\.system"
    ),
    "value": (b"}" + text("f") + name("os", "system") + b"s" + text("w") + tensor() + b"s",
              r"imports os\.system"),
    "key": (b"}" + name("os", "system") + tensor() + b"s", r"imports os\.system"),
    "argument": (
        b"}" + text("x") + name("collections", "OrderedDict") + b"]" + text("k")
        + name("nt", "system") + b"\x86a\x85R" + b"s" + text("w") + tensor() + b"s",
        r"imports nt\.system",
    ),
    "hooks": (
        b"}" + text("w")
        + tensor().replace(
            name("collections", "OrderedDict") + b")R", name("builtins", "exec")
        ) + b"s",
        r"imports builtins\.exec",
    ),
    "persistent-place": (
        b"}" + text("w")
        + tensor(b"(" + text("storage") + name("torch", "FloatStorage") + text("0")
                 + name("sys", "exit") + b"K\x04tQ") + b"s",
        r"imports sys\.exit",
    ),
    "persistent-module": (
        b"(" + text("module") + name("runpy", "run_path") + text("a") + text("b") + b"tQ" + DROP
        + WEIGHT,
        r"imports runpy\.run_path",
    ),
    "python-2": (name("commands", "getoutput") + DROP + WEIGHT, r"subprocess\.getoutput"),
    "python-2-value": (
        b"}" + text("f") + name("commands", "getoutput") + b"s" + text("w") + tensor() + b"s",
        r"subprocess\.getoutput",
    ),
    "python-2-builtin": (name("__builtin__", "execfile") + DROP + WEIGHT, r"builtins\.execfile"),
    "through-torch": (
        b"}" + text("f") + of_stack("torch", "os.system") + b"s" + text("w") + tensor() + b"s",
        r"STACK_GLOBAL at byte \d+ imports torch\.os\.system, which leads out",
    ),
    "module-in-torch": (
        b"}" + text("f") + name("torch.serialization", "os") + b"s" + text("w") + tensor() + b"s",
        r"torch\.serialization\.os",
    ),
    "unused-package": (
        name("planted_by_a_test", "run") + DROP + WEIGHT,
        r"planted_by_a_test\.run, of which nothing is made",
    ),
    "unused-torch": (name("torch.hub", "load") + DROP + WEIGHT, r"torch\.hub\.load"),
    "unused-plain": (name("datetime", "date") + DROP + WEIGHT, r"datetime\.date"),
    "behind-the-pickle": (WEIGHT + b"." + name("os", "system") + b")R", "what follows .* os.sys"),
}  # fmt: skip

# What stands in another record of the archive -> what is said of it.
RECORDS: dict[str, tuple[str, bytes, str]] = {
    "pickle": ("x/extra.pkl", b"\x80\x02" + name("os", "system") + b".", "extra.pkl.* os.system"),
    "no-suffix": ("x/notes", b"\x80\x02" + name("os", "system") + b".", "x/notes.* os.system"),
    "protocol-0": ("x/extra", b"cos\nsystem\n(S'x'\ntR.", "os.system"),
    "inst": ("x/extra", b"(S'x'\nios\nsystem\n.", "os.system"),
    "obj": ("x/extra", b"(cos\nsystem\nS'x'\no.", "os.system"),
    "stack": ("x/extra", b"\x80\x04" + of_stack("os", "system") + b")R.", "os.system"),
    "cut": ("x/extra", b"\x80\x04" + of_stack("os", "system") + b")", "os.system"),
    "of-a-storage": ("x/data/7", b"\x80\x02" + name("os", "system") + b".", "data/7.* os.system"),
    "elsewhere": ("y/data.txt", b"\x80\x02" + name("os", "system") + b".", "os.system"),
}


# Kinds of IMPORTED whose names stand for values, or are in bytes that loading does not reach.
READ = ("unused-plain", "behind-the-pickle")


def said_of(path: Path) -> str:
    """Return why a file is not read, or what the check of imports finds wrong with it."""
    try:
        source = open_source(path)
    except UnsupportedError as error:
        if " imports " not in str(error):
            raise
        return str(error)
    with source:
        return "\n".join(line for one in source.shards for line in one.unfit_imports())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", IMPORTED)
def test_an_import_that_makes_no_value_is_named(kind: str, tmp_path: Path) -> None:
    body, expected = IMPORTED[kind]
    path = zipped(tmp_path / "x.pt", body)
    if kind in READ:
        with open_source(path) as source:
            assert "w" in source.tensors
    else:
        with pytest.raises(UnsupportedError, match=r"x\.pt: opcode \w+ at byte \d+ imports "):
            open_source(path)
    found = said_of(path)
    assert re.search(expected, found), found
    assert len(found.splitlines()) == 1, found


def test_names_in_a_dicts_own_attributes_are_read(tmp_path: Path) -> None:
    """A state_dict is an OrderedDict with attributes, which may name classes."""
    state = torch.nn.Linear(2, 2).state_dict()
    state.kind = torch.nn.Linear  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "x.pt")
    assert said_of(tmp_path / "x.pt") == ""


def test_the_first_of_several_names_is_said_with_their_number(tmp_path: Path) -> None:
    body = name("os", "system") + DROP + name("shutil", "rmtree") + DROP + WEIGHT
    with pytest.raises(UnsupportedError, match=r"os\.system, .*, and 1 more such names; expected"):
        open_source(zipped(tmp_path / "x.pt", body))


@pytest.mark.parametrize("kind", RECORDS)
def test_a_second_pickle_of_the_archive_is_named(kind: str, tmp_path: Path) -> None:
    record, data, expected = RECORDS[kind]
    path = zipped(tmp_path / "x.pt", WEIGHT)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(record, data)
    found = said_of(path)
    assert re.search(expected, found), found


@pytest.mark.parametrize("data", [b"", b"config\nfoo\n", b"hello", bytes(64), b"\x80", b"}"])
def test_bytes_that_are_no_pickle_import_nothing(data: bytes) -> None:
    assert hidden_imports(data) == ()


def legacy(path: Path, *, inside: bytes = b"", behind: bytes = b"") -> Path:
    """Write the form before zip files, with opcodes before its value and bytes at its end."""
    torch.save({"w": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    at = data.rindex(b"\x80\x02", 0, data.index(b"X\x01\x00\x00\x00w")) + 2
    path.write_bytes(data[:at] + inside + data[at:] + behind)
    return path


@pytest.mark.parametrize(
    "how, expected",
    [
        ({"inside": name("os", "system") + DROP}, r"imports os\.system"),
        ({"behind": b"\x80\x02" + name("os", "system") + b"."}, "follows the last storage.*os.sys"),
    ],
)
def test_the_old_form_is_searched_too(how: dict[str, bytes], expected: str, tmp_path: Path) -> None:
    found = said_of(legacy(tmp_path / "pytorch_model.bin", **how))
    assert re.search(expected, found), found
    assert said_of(legacy(tmp_path / "sound.bin")) == ""


@pytest.mark.parametrize(
    "code", [b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\0\0\0", b"(ios\nsystem\n", b"(cos\nsystem\no"]
)
def test_opcodes_of_other_pickles_are_refused(code: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="opcode"):
        open_source(zipped(tmp_path / "x.pt", code + DROP + WEIGHT))


def _namespace() -> Any:
    options = SimpleNamespace(act=torch.nn.functional.relu, kind=int, dtype=torch.float16)
    return {"options": options, "w": torch.ones(2)}


# Values with names of functions and types in them, as whole models and their options have.
NAMED: dict[str, Callable[[], Any]] = {
    "namespace": _namespace,
    "whole-layer": lambda: torch.nn.TransformerEncoderLayer(8, 2, 8),
    "function-in-a-list": lambda: [torch.ones(2), (torch.nn.functional.gelu, {"k": torch.relu})],
}
SOUND: dict[str, tuple[Callable[[], Any], str, int]] = {
    f"{kind}-{form}-{protocol}": (make, form, protocol)
    for kind, make in {**files.VIEWS, **files.OTHERS, **NAMED}.items()
    for form in files.FORMS
    for protocol in (2, 4)
    if not kind.startswith("transposed-fp8")
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SOUND)
def test_what_torch_writes_passes(kind: str, tmp_path: Path) -> None:
    make, form, protocol = SOUND[kind]
    try:
        path = files.save(make(), tmp_path / "x.pt", form, protocol)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch does not write this in the old form")
    try:
        found = said_of(path)
    except FormatError:
        pytest.skip("refused as a whole, which other tests hold")
    assert not found


@pytest.mark.parametrize("words", [("validate",), ("scan",), ("qa", "--only", "tensor-contract")])
@pytest.mark.parametrize("hostile", [False, True])
def test_commands_that_judge_a_file_fail(
    words: tuple[str, ...], hostile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole model saved by torch, and the same with an import that nothing needs."""
    from tests.diagnosis.engines import tiny_folder

    monkeypatch.chdir(tmp_path)  # scan writes its answers here
    folder = tmp_path / "model"
    folder.mkdir()
    source = tiny_folder("llama")
    for path in source.iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            (folder / path.name).write_bytes(path.read_bytes())
    with open_source(next(source.glob("*.safetensors"))) as opened:
        state = {
            key: torch.frombuffer(bytearray(one.raw()), dtype=torch.float32).reshape(one.info.shape)
            for key, one in opened.tensors.items()
        }
    path = folder / "pytorch_model.bin"
    torch.save(state, path)
    if hostile:
        with zipfile.ZipFile(path) as archive:
            held = {one: archive.read(one) for one in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for record, data in held.items():
                if record.endswith("/data.pkl"):
                    data = data[:2] + name("os", "system") + DROP + data[2:]
                archive.writestr(record, data)
    done = aprfmt(words[0], folder, *words[1:], "--json")
    said = json.dumps(json.loads(done.out)) if done.out.strip() else done.err
    assert ("imports os.system" in said) == hostile, said[:2000]
    if hostile:  # the file is not read
        assert done.code == 2, said[:2000]


def test_place_is_that_of_the_opcode(tmp_path: Path) -> None:
    """The byte that is named is where the opcode stands in the file."""
    path = zipped(tmp_path / "x.pt", name("os", "system") + DROP + WEIGHT)
    data = path.read_bytes()
    at = data.index(b"cos\nsystem\n")
    assert f"at byte {at} imports" in said_of(path)
