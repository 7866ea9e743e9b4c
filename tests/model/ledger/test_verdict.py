"""The one function that pronounces a verdict, and what it is asked over.

Seen red: a section that cannot be read taken for equal, 2 before 1, an accepted item that is not
said, nothing compared called equal.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from aprfmt.checks import validate
from aprfmt.checks.gates import running as qa
from aprfmt.compare.diffs import DiffReport
from aprfmt.conversion import convert
from aprfmt.errors import FormatError, UsageError
from aprfmt.measure.records import FieldDiff
from aprfmt.measure.traces import TraceDiff
from aprfmt.model import open_model
from aprfmt.model.carried_files import SAFETENSORS
from aprfmt.model.ledger import (
    DIFFERING,
    KINDS,
    Item,
    Kind,
    Ledger,
    NotCompared,
    State,
    _key_reading,
    list_not_compared,
    make_ledger,
    one_sided_tensors,
)
from aprfmt.model.verdict import Compared, VerdictWords, acceptance_predicate, pronounce
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.conversion.test_partial_input_scales import LACKING, with_scales

WORDS = VerdictWords("equal", "different")
STATES: tuple[State, ...] = get_args(State)


def exit_by_the_table(differs: bool, states: tuple[State, ...], counted: int) -> int:
    """Return the exit code as the table of exit codes has it, written a second time."""
    if differs or not {"unequal", "only in A", "only in B"}.isdisjoint(states):
        return 1
    if not {"unreadable", "not reached"}.isdisjoint(states):
        return 2
    return 0 if counted or "equal" in states else 2


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.parametrize("counted", [0, 7])
def test_every_combination_has_the_exit_of_the_table(differs: bool, counted: int) -> None:
    for size in range(3):
        for states in itertools.combinations(STATES, size):
            left = tuple(NotCompared("file", f"f{i}", state) for i, state in enumerate(states))
            found = pronounce(WORDS, Compared(differs, {"tensors": (counted, 9)}, left))
            assert found.exit == exit_by_the_table(differs, states, counted), states
            word = {0: "equal", 1: "different", 2: "not decided"}[found.exit]
            assert found.word == word
            assert found.says.startswith(word), (states, found.says)
            agrees = found.exit == 1 and counted and not differs
            assert ("equal in what was compared" in found.says) == bool(agrees) or not found.exit
            for row in left:  # whatever decided the exit is named
                if row.state in DIFFERING or (
                    row.state in ("unreadable", "not reached") and found.exit == 2
                ):
                    assert row.text in found.says
                if row.state == "no counterpart" and found.exit == 0:
                    assert row.text in found.says


def test_what_is_accepted_is_said() -> None:
    left = (NotCompared("file", "x.bin", "only in A"), NotCompared("config key", "y", "unequal"))
    compared = Compared(False, {"tensors": (3, 3)}, left)
    assert pronounce(WORDS, compared).exit == 1
    assert pronounce(WORDS, compared, ["unread:x*"]).exit == 1
    found = pronounce(WORDS, compared, ["unread:x*", "unread:config key"])
    assert found.exit == 0 and not found.not_compared
    assert found.says.startswith("equal in what was compared: 3 tensors; accepted, not compared: ")
    assert pronounce(WORDS, compared, ["within"]).exit == 1


@pytest.mark.parametrize(
    ("pattern", "accepted"),
    [
        ("weight", []),  # seen red: every file and tensor with such a part
        ("bin", []),
        ("x", []),
        ("file x", []),
        ("x.bin", ["x.bin"]),
        ("file x.bin", ["x.bin"]),
        ("file", ["x.bin"]),
        ("x.*", ["x.bin"]),
        ("config", []),
        ("rope.a", ["rope.a"]),
        ("rope", ["rope.a"]),
        ("config key rope", ["rope.a"]),
        ("rop", []),
        ("m.1", ["m.1.weight"]),
        ("m", ["m.1.weight", "m.10.weight"]),
        ("tensor m.1", ["m.1.weight"]),
        ("1.weight", []),
        ("re:^m.*weight$", ["m.1.weight", "m.10.weight"]),
    ],
)
def test_a_pattern_accepts_what_it_names_and_what_is_below(
    pattern: str, accepted: list[str]
) -> None:
    rows = [
        NotCompared("file", "x.bin", "only in A"),
        NotCompared("config key", "rope.a", "unequal"),
        NotCompared("tensor", "m.1.weight", "only in B"),
        NotCompared("tensor", "m.10.weight", "only in B"),
    ]
    taken = acceptance_predicate([f"unread:{pattern}"])
    assert [row.name for row in rows if taken(row)] == accepted
    compared = Compared(False, {"tensors": (3, 3)}, tuple(rows))
    if not accepted:
        with pytest.raises(UsageError, match="no item that was not compared matches"):
            pronounce(WORDS, compared, [f"unread:{pattern}"])


@pytest.mark.parametrize(
    ("embedded", "state"),
    [
        ({"x.y": 3}, None),
        ({"x.y": 4}, "unequal"),  # seen red: taken for the source's key, whatever it held
        ({}, "only in A"),
        (FormatError("damaged"), "unreadable"),
    ],
)
def test_a_key_is_compared_with_what_the_other_side_embeds_of_its_source(
    embedded: Any, state: State | None
) -> None:
    def read() -> Any:
        if isinstance(embedded, FormatError):
            raise embedded
        return embedded

    mine = Ledger("a", (Item("metadata key", "x.y", "unread", "", 3),))
    theirs = Ledger("b", (), read_carried=read)
    for a, b, told in ((mine, theirs, state), (theirs, mine, (state or "").replace("A", "B"))):
        assert [row.state for row in list_not_compared(a, b)] == [told] * bool(state)


def test_a_section_that_cannot_be_read_is_named_whatever_is_compared() -> None:
    """Seen red: no item, as no kind was asked for of which it is."""
    kinds = ("section", "file", "tensor")
    lost = tuple(NotCompared(kind, "x", "unreadable") for kind in kinds)
    files: tuple[Kind, ...] = ("file",)
    rows = list_not_compared(Ledger("a", ()), Ledger("b", (), lost), files)
    assert [(row.kind, row.side) for row in rows] == [("section", "B"), ("file", "B")]


def test_a_weight_of_a_role_on_one_side_only_cannot_be_accepted(tmp_path: Path) -> None:
    """Seen red: `--accept unread:*` took a lost weight for an item that nothing reads."""
    folder = llama_folder(tmp_path / "m", "F32", layers=1)
    write_mixed(folder / "model.safetensors", {
        **tensors_of(folder), "model.extra.weight": ("F32", (2,), bytes(8))
    })  # fmt: skip
    with open_model(folder) as model:
        found = one_sided_tensors(model.source.tensors, "A", make_ledger(model))
    assert [(row.name, row.state) for row in found] == [("model.extra.weight", "only in A")]


@pytest.mark.parametrize(
    ("whys", "said"),
    [
        (["it is 0.0105 off", "it is 2e-3 off", "it is 3 off"], "(it is 0.0105 off)"),
        (["a"] * 4, "(a)"),
        (["no gradient", "it is 1 off", "it is 2 off"], "(2: it is 1 off; 1: no gradient)"),
        (["a", "b", "c", "d", "d"], "(2: d; 1: a; 1: b; 1 for other reasons)"),
        (["", "", ""], "..."),
        (["", "a", "a"], "(2: a)"),
    ],
)
def test_reasons_of_many_items_are_said_by_kind(whys: list[str], said: str) -> None:
    """Seen red: none said where two of them are not the same text."""
    left = tuple(
        NotCompared("parameter", f"p{number}", "unreadable", why) for number, why in enumerate(whys)
    )
    found = pronounce(WORDS, Compared(False, {"tensors": (1, 9)}, left))
    assert found.exit == 2 and found.says.endswith(said), found.says


def test_a_text_of_the_folder_that_cannot_be_read_is_not_equal(tmp_path: Path) -> None:
    a, b = (llama_folder(tmp_path / name, "F32", layers=1) for name in "ab")
    for name in ("generation_config.json", "tokenizer_config.json"):
        for folder in (a, b):
            (folder / name).write_text('{"eos_token_id": 2')
        for args in (("diff", a, b), ("diagnose", a, b)):
            done = command(*args)
            assert done.code == 2 and name in done.out, (args, done.out)
        write_mixed(b / "model.safetensors", {
            key: (kind, shape, bytes(len(data)) if key.endswith("o_proj.weight") else data)
            for key, (kind, shape, data) in tensors_of(b).items()
        })  # fmt: skip
        done = command("diff", a, b)
        assert done.code == 1 and name in done.out  # a difference beats what was not read
        shutil.copy(a / "model.safetensors", b)
        for folder in (a, b):
            (folder / name).unlink()


def _more_tokens(folder: Path, *, added: bool) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    if added:
        data["added_tokens"].append({**data["added_tokens"][0], "id": 1536, "content": "<far>"})
    else:
        data["model"]["vocab"]["<far>"] = 1537
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("added", [False, True])
def test_tokens_without_a_row_do_not_disappear(
    added: bool, demo_model: Path, tmp_path: Path
) -> None:
    more = Path(shutil.copytree(demo_model, tmp_path / "more"))
    _more_tokens(more, added=added)
    assert command("diff", demo_model, more).code == 1
    assert command("diff", more, more).code == 0
    convert(more, tmp_path / "more.gguf")
    done = command("diff", more, tmp_path / "more.gguf", "--json")
    assert done.code == 0  # GGUF's lists end with the embedding
    (row,) = done.json["not_compared"]
    assert row["state"] == "no counterpart" and "1 tokens without a row" in row["name"]
    assert "<far>" in done.json["says"]


def test_a_tokenizer_on_one_side_only_is_a_difference(demo_model: Path, tmp_path: Path) -> None:
    less = Path(shutil.copytree(demo_model, tmp_path / "less"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (less / name).unlink()
    for a, b, side in ((demo_model, less, "A"), (less, demo_model, "B")):
        done = command("diff", a, b)
        assert done.code == 1 and f"tokenizer only in {side}" in done.out
        assert command("diff", a, b, "--only", "tensors").code == 0


def test_a_field_of_an_accepted_item_does_not_count(demo_model: Path, tmp_path: Path) -> None:
    """One rule for the tokenizer, the generation config and keys; other fields count as before.

    Seen red: an accepted tokenizer that made the section differ all the same.
    """
    less = Path(shutil.copytree(demo_model, tmp_path / "less"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (less / name).unlink()
    only = ("diff", demo_model, less, "--only", "tokenizer")
    assert command(*only).code == 1
    parts = ("--accept", "unread:part tokenizer")
    said = command(*only, *parts, "--json").json
    assert [row["item"] for row in said["tokenizer"]] == ["part tokenizer"]
    left = DiffReport(
        "a",
        "b",
        (),
        (),
        (FieldDiff("tokenizer", 1, None, item="part tokenizer"),),
        (FieldDiff("k", 1, None, item="metadata key k"),),
        asked=("tokenizer", "metadata"),
        not_compared=(
            NotCompared("part", "tokenizer", "only in A"),
            NotCompared("metadata key", "k", "only in A"),
        ),
    )
    assert left.count_differing_fields() == {"tokenizer": 1, "metadata": 1}
    assert left.count_differing_fields(["unread:part tokenizer"]) == {"metadata": 1}
    assert left.count_differing_fields(["unread:metadata key"]) == {"tokenizer": 1}
    assert left.exit_code(["unread:tokenizer"]) == 1 and left.exit_code(["unread:*"]) == 0


def test_a_generation_config_on_one_side_only(demo_model: Path, tmp_path: Path) -> None:
    """A folder has a place for it; a GGUF of another writer has none, and says so."""
    less = Path(shutil.copytree(demo_model, tmp_path / "less"))
    (less / "generation_config.json").unlink()
    for a, b, side in ((demo_model, less, "A"), (less, demo_model, "B")):
        for name in ("diff", "diagnose"):
            done = command(name, a, b)
            assert done.code == 1 and f"generation config only in {side}" in done.out
        taken = command("diff", a, b, "--accept", "unread:generation config")
        assert taken.code == 0 and "accepted, not compared" in taken.out
    convert(less, tmp_path / "less.gguf")
    done = command("diff", demo_model, tmp_path / "less.gguf", "--json")
    (row,) = done.json["not_compared"]
    assert (done.code, row["state"], row["side"]) == (0, "no counterpart", "A")
    assert done.json["says"].startswith("equal in what was compared: 50 tensors; not compared: ")


def test_a_section_that_cannot_be_read_leaves_the_gates_open(
    demo_model: Path, tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(demo_model, tmp_path / "bad"))
    args = ("qa", bad, "--only", "tensor-contract")
    assert command(*args).code == 0
    (bad / "generation_config.json").write_text('{"eos_token_id": 2')
    done = command(*args, "--json")
    assert (done.code, done.json["pronounced"]["word"]) == (2, "not decided")
    assert "generation_config.json" in done.json["pronounced"]["says"]
    (row,) = done.json["ledger"]["unreadable"]
    assert (row["kind"], row["name"]) == ("generation setting", "generation_config.json")


@pytest.mark.parametrize("name", ["generation_config", "tokenizer"])
def test_a_part_that_cannot_be_read_is_one_failure(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: 3 checks and 4 gates failed for one file; two errors of two readers of one."""
    bad = Path(shutil.copytree(demo_model, tmp_path / "bad"))
    (bad / f"{name}.json").write_text('{"eos_token_id": 2')
    report = qa.run(bad, only=("metadata", "loss"))
    assert (report.gate("metadata").outcome, report.exit_code) == ("FAIL", 1)
    assert report.gate("loss").why.startswith("it needs what metadata failed for: ")
    assert qa.run(bad, only=("loss",)).gate("loss").outcome == "FAIL"
    with (bad / "model.safetensors").open("ab") as file:
        file.write(b"more")
    found = validate(bad)
    broken = [one.check for one in found.findings if name in str(one.finding)]
    assert broken == ["unread", "tokenizer"], found.findings  # the first is a warning
    failed = [one.name for one in found.answers if one.outcome == "FAIL"]
    assert failed == ["layout", "tokenizer"]  # another fault stays one of its own


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_scale_of_activations_on_one_side_only(side: str, tmp_path: Path) -> None:
    """No value of a weight depends on it, and what an engine computes does."""
    with_scales(tmp_path / "all", "modelopt", ())
    names = with_scales(tmp_path / "less", "modelopt", LACKING)
    a, b = (tmp_path / name for name in (("all", "less") if side == "A" else ("less", "all")))
    done = command("diff", a, b, "--json")
    assert done.code == 1
    assert done.json["says"].startswith("different, though equal in what was compared: ")
    rows = [row for row in done.json["not_compared"] if row["kind"] == "scale of activations"]
    assert len(rows) == len(names) and {row["state"] for row in rows} == {f"only in {side}"}
    assert f"{len(names)} scales of activations only in {side}: " in done.json["says"]
    assert command("diagnose", a, b).code == 1
    assert command("diff", b, b).code == 0


def test_two_traces_without_a_common_point_are_not_equal() -> None:
    found = TraceDiff((), None, ("L0.q",), ("L1.q",))
    assert (found.exit_code, found.pronounced.word) == (2, "no verdict")


def _integers(path: Path, kind: str, data: bytes) -> Path:
    size = {"U8": 1, "BOOL": 1, "I32": 4, "I64": 8}[kind]
    write_mixed(path, {"w": (kind, (len(data) // size,), data)})
    return path


@pytest.mark.parametrize(
    ("kind", "change"),
    [("U8", lambda d: d[:5] + bytes([d[5] ^ 16]) + d[6:]),
     ("BOOL", lambda d: d[:3] + b"\0" + d[4:]),
     ("I32", lambda d: d[:6] + bytes([d[6] ^ 16]) + d[7:]),
     ("I64", lambda d: d[:8] + bytes([d[8] ^ 1]) + d[9:])],
)  # fmt: skip
def test_integers_that_differ_are_different(
    kind: str, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """The last is one in 2**60, which no float64 shows."""
    data = bytes([1]) * 16 if kind == "BOOL" else bytes(range(16, 32))
    a = _integers(tmp_path / "a.safetensors", kind, data)
    b = _integers(tmp_path / "b.safetensors", kind, change(data))
    done = command("diff", a, b, "--json")
    (row,) = done.json["tensors"]
    assert (row["verdict"], row["stats"]["changed"], done.code) == ("DIFFERENT", 1, 1)
    assert row["stats"]["max_abs_diff"] == {"U8": 16, "BOOL": 1, "I32": 16 << 16, "I64": 1}[kind]


def test_arrays_of_which_none_maps_are_no_trace(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "logprobs.npy", np.zeros(11, np.float32))
    saved = tmp_path / "trace.safetensors"
    args = ("trace", demo_model, "--map", tmp_path / "arrays", "--ids", "1417,362,258")
    done = command(*args, "-o", saved)
    assert done.code == 2 and "none of its 1 arrays is a point" in done.err
    assert "logprobs of shape [11]; no point of the model has as many values" in done.err
    assert "nearest is " in done.err and not saved.exists()
    assert (tmp_path / "trace.map.json").is_file()  # the proposal, to be corrected


def test_a_damaged_record_of_the_sources_keys_is_not_read(tmp_path: Path) -> None:
    """A key that one side lacks may be in its record: it is not said to be missing."""
    folder = llama_folder(tmp_path / "m", "F32", layers=1)
    write_mixed(folder / "model.safetensors", tensors_of(folder), {"note": "kept"})
    whole, broken = tmp_path / "m.gguf", tmp_path / "broken.gguf"
    convert(folder, whole)
    record = f"{SAFETENSORS}=[1"
    assert command("set", whole, record, "-o", broken).code == 0
    names = [row["name"] for row in command("diff", folder, whole, "--json").json["not_compared"]]
    assert "note" not in names
    for sides, side in (((folder, broken), "B"), ((broken, folder), "A")):
        done = command("diff", *sides, "--json")
        found = [row for row in done.json["not_compared"] if row["name"] == "note"]
        assert done.code == 2 and [(row["state"], row["side"]) for row in found] == [
            ("unreadable", side)
        ]
        assert SAFETENSORS in found[0]["why"]


def test_readings_of_a_key_by_the_report_of_an_architecture() -> None:
    report: Any = SimpleNamespace(
        contradicted={"a": "twice"}, read={"b": "rule"}, unknown=("c", "d.e"), ignored=()
    )
    expected = {
        "a": ("contradicted", "twice"), "b": ("hyperparameter", "rule"), "c": ("unread", ""),
        "c.x": ("unread", ""), "d.e": ("unread", ""), "d": None, "cx": None, "z": None,
    }  # fmt: skip
    assert {key: _key_reading(report, key, None, "hf", "") for key in expected} == expected
    assert _key_reading(None, "llama.x", None, "gguf", "llama.") == ("unread", "")
    assert _key_reading(None, "general.x", None, "gguf", "llama.") is None
    assert _key_reading(None, "x", None, "hf", "") is None


def test_a_list_of_modules_that_cannot_be_read_is_not_equal(
    demo_model: Path, tmp_path: Path
) -> None:
    """What it says of subfolders is not known then, whatever they hold."""
    for name in "ab":
        shutil.copytree(demo_model, tmp_path / name)
        (tmp_path / name / "modules.json").write_text("[{")
        (tmp_path / name / "1_Dense").mkdir()
    done = command("diff", tmp_path / "a", tmp_path / "b", "--json")
    rows = [row for row in done.json["not_compared"] if row["name"] == "modules.json"]
    assert done.code == 2 and {row["state"] for row in rows} == {"unreadable"}, done.json["says"]


def test_what_was_not_compared_has_one_order(demo_model: Path, tmp_path: Path) -> None:
    """Whatever the order of the kinds that are asked for, which may be a set's."""
    other = tmp_path / "b"
    shutil.copytree(demo_model, other)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        value = json.loads((other / name).read_text())
        (other / name).write_text(json.dumps(value | {"read_by": "nobody"}))
    (other / "notes.xyz").write_text("nobody reads this")
    with open_model(demo_model) as a, open_model(other) as b:
        sides = make_ledger(a), make_ledger(b)
    rows = list_not_compared(*sides)
    assert len({row.kind for row in rows}) == 4
    assert list_not_compared(*sides, KINDS[::-1]) == rows


@pytest.mark.parametrize("container", ["", "gguf"])
@pytest.mark.parametrize("both", [False, True])
def test_another_architecture_that_is_not_known_is_not_equal(
    both: bool, container: str, demo_model: Path, tmp_path: Path
) -> None:
    """The loader that a file asks for carries meaning. Seen red: equal, with exit 0."""
    a, b = (Path(shutil.copytree(demo_model, tmp_path / name)) for name in "ab")
    for folder, name in ((a, "nobody"), (b, "somebody")):
        config = json.loads((folder / "config.json").read_text())
        if both or folder == b:
            config["model_type"], config["architectures"] = name, [f"{name.title()}Model"]
        (folder / "config.json").write_text(json.dumps(config))
    key = "model_type"
    if container:
        key = "general.architecture"
        whole, a, b = (tmp_path / f"{name}.gguf" for name in "wab")
        assert command("convert", demo_model, whole, "--no-carry").code == 0
        for path, name in ((a, "nobody" if both else "qwen2"), (b, "somebody")):
            args = (f"{key}={name}", "--remove", "aprfmt.hf_config", "-o", path)
            assert command("set", whole, *args).code == 0
    done = command("diff", a, b, "--json")
    rows = [row for row in done.json["not_compared"] if row["name"] == key]
    assert done.code == 1 and [row["state"] for row in rows] == ["unequal"], done.json["says"]
    assert command("diff", b, b).code == 0
    told = command("diagnose", a, b)  # seen red: not comparable, with exit 2
    assert told.code == 1 and key in told.out, told.out
