"""What no table lists is unread, and no command says equal over it.

Seen red: a kind of item that the ledger leaves out, a namespace taken for known as a whole, unread
items left out of the verdict, one on one side only taken for equal.
"""

import json
import shutil
from pathlib import Path

import pytest

from aprfmt.checks import validate
from aprfmt.conversion import convert
from aprfmt.model import open_model
from aprfmt.model.ledger import READINGS, make_ledger
from tests.cli.run import aprfmt as command
from tests.model.ledger.planted import CASES, MANY


@pytest.mark.parametrize("case", CASES)
def test_fifty_planted_are_fifty_unread(case: str, tmp_path: Path) -> None:
    make, plant, kind = CASES[case]
    clean = make(tmp_path / "clean")
    with open_model(clean) as model:
        before = make_ledger(model)
    assert before.unread == () and before.unreadable == ()
    a, same, other = (make(tmp_path / name) for name in ("a", "b", "c"))
    for path, seed in ((a, 1), (same, 1), (other, 2)):
        plant(path, seed)
    with open_model(a) as model:
        found = make_ledger(model)
    assert [item.kind for item in found.unread] == [kind] * MANY
    assert sum(found.counts.values()) == len(found.items) == len({*map(repr, found.items)})
    assert len(found.items) >= len(before.items) + MANY

    done = command("diff", a, same, "--json")
    assert (done.code, done.json["equal"]) == (0, True), done.json["says"]
    if kind != "tensor":  # those are compared one by one, as any other tensor
        states = [row["state"] for row in done.json["not_compared"]]
        assert states == ["equal"] * MANY and "not read here" in done.json["says"]
    for left, right in ((a, clean), (clean, a), (a, other)):
        done = command("diff", left, right, "--json")
        assert (done.code, done.json["equal"]) == (1, False), done.json["says"]
    if kind != "tensor":
        states = [row["state"] for row in done.json["not_compared"]]
        assert states == ["unequal"] * MANY
    taken = command("diff", a, clean, "--accept", "unread:re:planted", "--json")
    assert taken.code == 0 and taken.json["pronounced"]["exit"] == 0 and taken.json["equal"]
    assert f"accepted, not compared: {MANY} " in taken.json["says"]


@pytest.mark.parametrize("case", ["folder files", "folder config", "folder generation"])
def test_diagnose_says_same_of_what_it_compared(case: str, tmp_path: Path) -> None:
    make, plant, _ = CASES[case]
    a, same, clean = (make(tmp_path / name) for name in "abc")
    for path in (a, same):
        plant(path, 1)
    done = command("diagnose", a, same, "--json")
    assert (done.code, done.json["verdict"]) == (0, "same")
    done = command("diagnose", a, clean, "--json")
    assert (done.code, done.json["class"], done.json["cause"]) == (1, "not_exercised", None)
    assert len(done.json["not_compared"]) == done.json["ledger"]["a"]["counts"]["unread"] == MANY
    assert "same in what was compared; not compared: " in done.json["sentence"]
    done = command("diagnose", a, clean, "--accept", "unread:*planted*")
    assert done.code == 0 and "accepted, not compared" in done.out


@pytest.mark.parametrize("case", CASES)
def test_inspect_and_validate_name_them(case: str, tmp_path: Path) -> None:
    make, plant, kind = CASES[case]
    path = make(tmp_path / "m")
    plant(path, 1)
    done = command("inspect", path, "--account", "--json")
    account = done.json["account"]
    assert len(account["unread"]) == account["counts"]["unread"] == MANY
    assert {"reading": "unread", "kind": kind, "items": MANY} in account["kinds"]
    assert set(account["counts"]) == set(READINGS)
    shown = command("inspect", path, "--account").out
    assert shown.count("  unread: ") == MANY
    report = validate(path)
    checked = [one for one in report.warnings if one.check in ("unread", "unexpected")]
    left = "could not be compared" if kind == "tensor" else "not read here"
    assert len(checked) == MANY and f"; {left}: {MANY} " in report.pronounced.says
    assert validate(path, strict=True).exit_code == 1


@pytest.mark.parametrize("case", [case for case in CASES if "files" in case or "keys" in case])
def test_a_conversion_accounts_for_what_nothing_reads(case: str, tmp_path: Path) -> None:
    """A key that the other container has a place for is kept; a file that nothing reads is not."""
    make, plant, kind = CASES[case]
    path = make(tmp_path / "m")
    plant(path, 1)
    for name in ("copy.gguf", "copy.apr"):
        done = convert(path, tmp_path / name)
        assert done.accounted is not None
        entries = [one for one in done.accounted.entries if one.kind == f"unread {kind}"]
        assert len(entries) == MANY
        told = command("diff", path, tmp_path / name, "--json")
        fates = {one.fate for one in entries}
        assert told.code == (0 if fates == {"copied"} else 1), (fates, told.json["says"])
        if case == "folder files":
            assert fates == {"dropped"}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_an_empty_object_hides_no_key_behind_it(
    name: str, demo_model: Path, tmp_path: Path
) -> None:
    """Before all keys, below one of them, and beside keys that nothing reads."""
    copy = tmp_path / "m"
    shutil.copytree(demo_model, copy)
    keys = {**json.loads((copy / name).read_text()), "planted_last": 1}
    (copy / name).write_text(json.dumps(keys))
    with open_model(copy) as model:
        before = make_ledger(model)
    (copy / name).write_text(json.dumps({"planted_first": {}, "planted": {"deep": {}}, **keys}))
    with open_model(copy) as model:
        found = make_ledger(model)
    assert "planted_last" in " ".join(item.name for item in before.unread)
    lost = {(item.kind, item.name, item.reading) for item in before.items} - {
        (item.kind, item.name, item.reading) for item in found.items
    }
    assert not lost and len(found.items) >= len(before.items)
