"""What no table lists is named and counted by every command that pronounces a verdict.

Seen red: a command that says PASS or equal by itself, one whose ledger leaves out tensors, a
capture's file taken for read, an unread tensor of an adapter taken for merged.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.model.ledger import OF_A_PASS
from tests.adapters.golden import write as adapter_of
from tests.cli.run import Done
from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of, write_mixed
from tests.model.ledger.planted import CASES, MANY

IDS = "1,2,3,4,5,6"
OF_TENSORS = [case for case in CASES if case.endswith("tensors")]


def unread_of(done: Done, kind: str) -> list[Any]:
    """Return the items of a kind that a verdict names; the sentence counts them and shows two."""
    said = done.json["pronounced"]
    assert said["exit"] == done.code, said
    rows = [row for row in said["not_compared"] if row["kind"] == kind]
    if len(rows) > 2:
        assert f"{len(rows)} " in said["says"] and rows[0]["name"] in said["says"], said["says"]
        assert rows[2]["name"] not in said["says"]
    return rows


@pytest.mark.parametrize("case", CASES)
def test_one_model(case: str, tmp_path: Path) -> None:
    make, plant, kind = CASES[case]
    path = make(tmp_path / "m")
    clean = {args[0]: command(*args, "--json") for args in _of_one_model(path, tmp_path / "clean")}
    plant(path, 1)
    for args in _of_one_model(path, tmp_path / "planted"):
        done = command(*args, "--json")
        before = clean[args[0]]
        assert unread_of(before, kind) == []
        whole = args[0] in ("validate", "qa") or kind in OF_A_PASS
        if args[0] == "scan":
            (row,) = unread_of(done, "model")
            assert row["why"].startswith(f"{MANY} items of it")
            if kind == "tensor":
                assert done.code == 2  # seen red: PASS
                assert command(*args, "--accept", f"unread:{path}").code == before.code
            continue
        rows = unread_of(done, kind)
        assert len(rows) == (MANY if whole else 0), (args, done.json["pronounced"])
        assert {row["state"] for row in rows} <= {"unread"}
        code = before.code
        if kind == "tensor":  # of no role: it fails its gate of qa, and leaves every other open
            code = code or (1 if args[0] == "qa" else 2)
        assert done.code == code, args  # seen red: all but qa of such a model were a PASS
        if whole:  # seen red: no such option of logits and parity
            taken = command(*args, "--accept", "unread:re:planted", "--json")
            assert taken.code == before.code
            assert f"accepted, not compared: {MANY} " in taken.json["pronounced"]["says"]


def _of_one_model(path: Path, folder: Path) -> list[tuple[object, ...]]:
    folder.mkdir(exist_ok=True)
    return [
        ("validate", path),
        ("qa", path, "--only", "tensor-contract"),
        ("scan", path, "-o", folder / "rows.jsonl", "--jobs", 1),
        ("logits", path, "--ids", IDS),
        ("eval", path, "--ids", IDS, "--random-weights"),
        ("parity", path, "--between", "numpy", "numpy:cpu:float64", "--ids", IDS),
    ]


@pytest.mark.parametrize("case", CASES)
def test_a_strict_validation_takes_what_is_accepted(case: str, tmp_path: Path) -> None:
    make, plant, _ = CASES[case]
    path = make(tmp_path / "m")
    before = command("validate", path, "--strict")
    plant(path, 1)
    assert command("validate", path, "--strict").code == 1
    done = command("validate", path, "--strict", "--accept", "unread:re:planted")
    assert done.code == before.code and f"accepted, not compared: {MANY} " in done.out


@pytest.mark.parametrize("case", [case for case in CASES if "pytorch" not in case])
def test_a_conversion(case: str, tmp_path: Path) -> None:
    """1 where the copy has not all of it; what is accepted is said, and 0."""
    make, plant, kind = CASES[case]
    path = make(tmp_path / "m")
    plant(path, 1)
    first = tmp_path / "first.apr"
    done = command("convert", path, first, "--json")
    if not done.json.get("pronounced"):
        assert done.code == 2 and kind == "tensor"  # the other names have no place for it
        return
    lost = {row["name"] for row in unread_of(done, kind)}
    told = command("diff", path, first, "--json")
    assert (done.code, told.code) == (int(bool(lost)),) * 2, told.json["says"]
    assert done.json["pronounced"]["says"].startswith("verified by reading back")
    if lost:
        assert len(lost) == MANY
        line = command("convert", path, tmp_path / "second.apr")
        assert "--accept unread:PATTERN" in line.out
        taken = command("convert", path, tmp_path / "third.apr", "--accept", "unread:re:planted")
        assert taken.code == 0 and "accepted, not compared: " in taken.out


# --- --accept: the same patterns of the same items everywhere -----------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("only_in", ["A", "B"])
def test_diff_and_diagnose_accept_the_same(case: str, only_in: str, tmp_path: Path) -> None:
    """Seen red: `diff` that counted a tensor of no table as a difference, whatever was accepted."""
    make, plant, kind = CASES[case]
    pair = [make(tmp_path / name) for name in ("planted", "clean")]
    plant(pair[0], 1)
    pair = pair if only_in == "A" else pair[::-1]
    for name in ("diff", "diagnose"):
        before = command(name, *pair, "--json")
        rows = before.json["pronounced"]["not_compared"]
        assert (before.code, [row["kind"] for row in rows]) == (1, [kind] * MANY)
        assert {row["state"] for row in rows} == {f"only in {only_in}"}
        for pattern in ("re:planted", kind, f"re:^{kind} .*planted"):
            done = command(name, *pair, "--accept", f"unread:{pattern}", "--json")
            said = done.json["pronounced"]
            assert (done.code, said["exit"], said["not_compared"]) == (0, 0, []), (name, pattern)
            assert f"accepted, not compared: {MANY} " in said["says"]
        part = command(name, *pair, "--accept", f"unread:{rows[0]['name']}", "--json")
        left = part.json["pronounced"]["not_compared"]
        assert part.code == 1 and rows[0] not in left and left


def test_a_report_for_ci_takes_what_is_accepted(tmp_path: Path) -> None:
    make, plant, _ = CASES["folder tensors"]
    a, b = (make(tmp_path / name) for name in "ab")
    plant(b, 1)
    for more, failures in (((), MANY + 1), (("--accept", "unread:planted"), 0)):
        done = command("diff", a, b, *more, "--format", "junit")
        assert done.out.count("<failure") == failures and done.code == bool(failures)


UNMATCHED = ("--accept", "unread:of-no-item")


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize(
    "args",
    ["diff {a} {b}", "diagnose {a} {b}", "validate {b}", "qa {b} --only tensor-contract",
     "convert {b} {out}/c.apr", "import {b} -o {out}/i.apr",
     "export {g} -o {out}/e --to safetensors",
     "quantize {b} {out}/q.gguf --type Q8_0", "split {b} {out}/s --max-shard-size 3M",
     "merge {g} {out}/m.gguf", "set {g} general.name=x -o {out}/s.gguf",
     "step {a} --after {b} --optimizer sgd:lr=0.1", "logits {b} --ids 1,2",
     "eval {b} --ids 1,2", "parity {b} --between numpy numpy:cpu:float64 --ids 1,2",
     "attest {g} --from {a}", "hash {g} --check {h}",
     "trace {b} --payload --ids 1,2 --reference {b}"],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_an_error(
    args: str, planted: bool, demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: a misspelt pattern that was silently without effect."""
    b, g = tmp_path / "b", tmp_path / "g.gguf"
    shutil.copytree(demo_model, b)
    assert command("convert", demo_model, g, "--no-verify").code == 0
    if planted:
        (b / "planted.bin").write_bytes(b"x")
    if "{h}" in args:
        assert command("hash", g, "--write").code == 0
    h = f"{g}.aprfmt-hash.json"
    place = {"a": demo_model, "b": b, "g": g, "h": h, "out": tmp_path}
    done = command(*args.replace("", "").format(**place).split(), *UNMATCHED)
    assert (done.code, done.err.count("--accept unread:of-no-item: no item")) == (2, 1), done
    if planted and args.startswith(("diff", "diagnose", "validate")):
        assert "near names: " in done.err and "planted.bin" in done.err


@pytest.mark.parametrize("case", ["gguf keys", "gguf tensors"])
def test_shards_and_back(case: str, tmp_path: Path) -> None:
    make, plant, _ = CASES[case]
    path = make(tmp_path / "m")
    plant(path, 1)
    done = command("split", path, tmp_path / "part.gguf", "--max-shard-size", "20k", "--json")
    assert (done.code, done.json["pronounced"]["not_compared"]) == (0, [])
    first = next(tmp_path.glob("part-00001*"))
    done = command("merge", first, tmp_path / "whole.gguf", "--json")
    assert (done.code, done.json["pronounced"]["not_compared"]) == (0, [])
    assert command("diff", path, tmp_path / "whole.gguf").code == 0


@pytest.mark.parametrize("name", ["hash", "attest"])
def test_what_a_budget_left_is_accepted_by_no_name(name: str, tmp_path: Path) -> None:
    make, _, _ = CASES["folder tensors"]
    path, copy = make(tmp_path / "m"), tmp_path / "m.gguf"
    assert command("quantize", path, copy, "--type", "Q8_0").code == 0
    assert command("hash", copy, "--write").code == 0
    args = {
        "hash": ("hash", copy, "--check", f"{copy}.aprfmt-hash.json", "--budget", "1K"),
        "attest": ("attest", copy, "--from", path, "--budget", "1K"),
    }[name]
    before = command(*args, "--json")
    said = before.json.get("pronounced", before.json)
    left = said["not_compared"]
    assert before.code == 2 and {row["state"] for row in left} == {"not reached"}
    for patterns in (["re:."], [row["name"] for row in left]):
        more = [word for each in patterns for word in ("--accept", f"unread:{each}")]
        done = command(*args, *more, "--json")
        said = done.json.get("pronounced", done.json)
        assert done.code == 2 and said["not_compared"] == left


def test_a_manifest_and_ranges(tmp_path: Path) -> None:
    make, plant, kind = CASES["folder files"]
    path = make(tmp_path / "m")
    assert command("hash", path, "--write").code == 0
    manifest = path / "model.safetensors.aprfmt-hash.json"
    rows = dict(tensors_of(path))
    plant(path, 1)
    done = command("hash", path, "--check", manifest, "--json")
    assert (done.code, len(unread_of(done, kind))) == (0, MANY)
    name = next(iter(rows))
    rows[name] = (*rows[name][:2], bytes(len(rows[name][2])))
    write_mixed(path / "model.safetensors", rows)
    assert command("hash", path, "--check", manifest).code == 1
    done = command("diff", path, path, "--sample", "1M", "--json")  # every range, and yet not all
    assert done.code == 2 and done.json["pronounced"]["word"] == "not shown to be equal"


def test_an_adapter(tmp_path: Path) -> None:
    base, adapter, merged = adapter_of(tmp_path, "plain")
    rows = dict(tensors_of(base))
    for name, values in merged.items():
        rows[name] = (*rows[name][:2], values.tobytes())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes((base / "config.json").read_bytes())
    write_mixed(tmp_path / "b" / "model.safetensors", rows)
    args = ("diff", base, tmp_path / "b", "--adapter", adapter)
    assert command(*args).code == 0
    for i in range(MANY):
        (tmp_path / "b" / f"planted-{i}.bin").write_bytes(b"x")
    done = command(*args, "--json")
    assert done.code == 1 and done.json["adapter"]["merged"] is True
    assert len(unread_of(done, "file")) == MANY
    assert command(*args, "--accept", "unread:planted*").code == 0


def test_one_adapter(tmp_path: Path) -> None:
    """Seen red: PASS of an adapter with a tensor that no merge reads."""
    _, adapter, _ = adapter_of(tmp_path, "plain")
    args = ("validate", adapter)
    assert command(*args).code == 0
    rows = dict(tensors_of(adapter))
    write_mixed(adapter / "adapter_model.safetensors", rows | {"planted": ("F32", (1,), bytes(4))})
    done = command(*args, "--json")
    assert [row["name"] for row in unread_of(done, "adapter tensor")] == ["planted"]
    assert done.code == 2 and command("scan", adapter, "-o", tmp_path / "rows.jsonl").code == 2
    assert command(*args, "--accept", "unread:planted").code == 0


# --- captures and batches -------------------------------------------------------------------------


def _arrays(folder: Path) -> Mapping[str, Any]:
    make, _, _ = CASES["folder tensors"]
    model = make(folder / "m")
    saved = folder / "t.safetensors"
    done = command("trace", model, "--payload", "--points", "all", "--ids", IDS, "-o", saved)
    assert done.code == 0, done.err
    from aprfmt.inference.trace_file import load_trace

    with load_trace(saved) as found:
        return {key: np.array(found.recorded_values(key)) for key in found.records}


def _folder_of(path: Path, arrays: Mapping[str, Any], *, files: bool) -> Path:
    path.mkdir()
    for name, values in arrays.items():
        np.save(path / f"{name}.npy", values)
    for i in range(MANY):
        if files:
            (path / f"planted-{i}.pkl").write_bytes(b"x")
        else:
            np.save(path / f"planted-{i}.npy", np.full(7, float(i), np.float32))
    return path


@pytest.mark.parametrize("form", ["arrays", "files", "npz"])
def test_captured_arrays(form: str, tmp_path: Path) -> None:
    arrays = _arrays(tmp_path)
    if form == "npz":
        more = {f"planted-{i}": np.full(7, float(i), np.float32) for i in range(MANY)}
        np.savez(tmp_path / "d.npz", **{**arrays, **more})
        place = tmp_path / "d.npz"
    else:
        place = _folder_of(tmp_path / "d", arrays, files=form == "files")
    model = tmp_path / "m"
    done = command("trace", model, "--map", place, "--ids", IDS, "--json")
    assert done.code == 0 and len(unread_of(done, "captured array")) == MANY
    assert done.json["pronounced"]["says"].startswith("mapped, ")
    saved = tmp_path / "t.safetensors"
    done = command("trace", model, "--map", place, "--ids", IDS, "--reference", saved, "--json")
    assert done.code == 0 and len(unread_of(done, "captured array")) == MANY
    done = command("diagnose", model, place, "--ids", IDS, "--json")
    rows = [row for row in done.json["not_compared"] if row["name"].startswith("planted")]
    assert (done.code, len(rows)) == (0, MANY), done.json["sentence"]
    if form != "npz":  # by its names alone
        shown = command("diagnose", model, place, "--ids", IDS).out
        assert f"not compared: {MANY} captured arrays: planted-0" in shown


def test_arrays_beside_the_records_of_a_trace(tmp_path: Path) -> None:
    """In a trace of aprfmt's own. Seen red: "same", and no word of any."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    arrays, model = _arrays(tmp_path), tmp_path / "m"
    saved, more = tmp_path / "t.safetensors", tmp_path / "more.safetensors"
    with safe_open(saved, "np") as opened:
        header = opened.metadata()
    planted = {f"planted-{i}": np.full(7, float(i), np.float32) for i in range(MANY)}
    save_file({**arrays, **planted}, more, header)
    for args in (
        ("diagnose", model, more),
        ("diagnose", saved, more, "--model", model),
        ("trace", model, "--payload", "--points", "all", "--ids", IDS, "--reference", more),
    ):
        done = command(*args, "--json")
        said = done.json.get("pronounced", done.json)["not_compared"]
        rows = [row for row in said if row["kind"] == "captured array"]
        assert (done.code, len(rows)) == (0, MANY), args
    assert command("diagnose", model, saved, "--json").json["not_compared"] == []


def test_arrays_of_a_batch(tmp_path: Path) -> None:
    make, _, _ = CASES["folder tensors"]
    model = make(tmp_path / "m")
    ids = np.arange(1, 9).reshape(1, 8)
    more = {f"planted_{i}": np.zeros(3) for i in range(MANY)}
    for name, arrays in (("clean", {}), ("planted", more)):
        np.savez(tmp_path / f"{name}.npz", input_ids=ids, **cast(Any, arrays))
    clean, done = (
        command("eval", model, "--batch", tmp_path / f"{name}.npz", "--json")
        for name in ("clean", "planted")
    )
    assert unread_of(clean, "batch array") == [] and clean.code == done.code
    assert len(unread_of(done, "batch array")) == MANY
    assert done.json["batch"]["unread"] == sorted(more)
    assert json.dumps(done.json["pronounced"]).count("batch array") >= MANY
