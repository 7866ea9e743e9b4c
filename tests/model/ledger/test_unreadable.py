"""What cannot be read, is in no table, or contradicts itself is said by `validate` and `inspect`.

Seen red: files that cannot be read left out of `validate`, and the line of counts of `inspect
--account`; a reading taken for another.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aprfmt.checks import validate
from aprfmt.model import open_model
from aprfmt.model.ledger import make_ledger
from tests.cli.run import aprfmt as command
from tests.conversion.folders import write_mixed

Spoil = Callable[[Path], object]
# What is done to a folder -> the place it is said at, how bad it is, and a part of the sentence.
CASES: dict[str, tuple[Spoil, str, str, str]] = {
    "generation settings": (
        lambda folder: (folder / "generation_config.json").write_text("{"),
        "generation setting generation_config.json", "warning", "not JSON at byte 1",
    ),
    "tokenizer settings": (
        lambda folder: (folder / "tokenizer_config.json").write_text("["),
        "tokenizer part tokenizer_config.json", "warning", "not JSON at byte 1",
    ),
    "special tokens": (
        lambda folder: (folder / "special_tokens_map.json").write_text('"a"'),
        "tokenizer part special_tokens_map.json", "warning", "",
    ),
    "a file of no table": (
        lambda folder: (folder / "planted.bin").write_bytes(b"x"),
        "file planted.bin", "warning", "",
    ),
    "weights that no index names": (
        lambda folder: write_mixed(
            folder / "more.safetensors", {name: ("F32", (1,), bytes(4)) for name in "abcd"}
        ),
        "file more.safetensors", "warning", "4 tensors that no index names: a, b, c, ...",
    ),
    "weights that cannot be read": (
        lambda folder: (folder / "more.safetensors").write_bytes(b"x" * 9),
        "file more.safetensors", "warning", "no index names it",
    ),
    "a key of no table": (
        lambda folder: (folder / "generation_config.json").write_text('{"planted": 1}'),
        "generation setting generation_config.json: planted", "warning", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("label", CASES)
def test_what_is_not_read_is_a_finding_of_validate(
    label: str, demo_model: Path, tmp_path: Path
) -> None:
    spoil, where, level, says = CASES[label]
    folder = tmp_path / "m"
    shutil.copytree(demo_model, folder)
    assert "unread" not in {one.check for one in validate(folder).findings}
    spoil(folder)
    found = [one.finding for one in validate(folder).findings if one.check == "unread"]
    (said,) = (one for one in found if one.where == where)
    assert said.level == level and said.found and says in said.found


@pytest.mark.parametrize("label", CASES)
def test_the_account_counts_every_item_and_names_what_is_not_read(
    label: str, demo_model: Path, tmp_path: Path
) -> None:
    spoil, where, _, _ = CASES[label]
    folder = tmp_path / "m"
    shutil.copytree(demo_model, folder)
    spoil(folder)
    with open_model(folder) as model:
        ledger = make_ledger(model)
    done = command("inspect", folder, "--account", "--format", "agent")
    counted = next(row for row in done.out.splitlines() if f"  {len(ledger.items)} items: " in row)
    rows = [part.split(" ", 1) for part in counted.partition(": ")[2].split(", ")]
    assert sum(int(count) for count, _ in rows) == len(ledger.items)
    assert {name for _, name in rows} == {f"{item.kind} {item.reading}" for item in ledger.items}
    assert where in done.out
    said = json.loads(command("inspect", folder, "--account", "--json").out)["account"]
    assert said["items"] == len(ledger.items)
    assert len(said["unreadable"]) == len(ledger.unreadable)
    assert len(said["unread"]) == len(ledger.unread)
