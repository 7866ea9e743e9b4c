"""What stands beside a tokenizer that is not read is compared all the same.

Seen red: a generation config on one side only was lost, and two models were "equal", exit 0.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.run import aprfmt

GENERATION, CONFIG = "generation_config.json", "tokenizer_config.json"
UNREAD = ('{"version": "1.0", "model": {"type": "NotKnown"}}', "{")


def lost(folder: Path) -> None:
    (folder / GENERATION).unlink()


def of_key(file: str, key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        held = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**held, key: value}))

    return change


CHANGES: dict[str, Callable[[Path], None]] = {
    "generation-lost": lost,
    "other-stop": of_key(GENERATION, "eos_token_id", 7),
    "other-begin": of_key(CONFIG, "bos_token", "<|other|>"),
    "other-length": of_key(CONFIG, "model_max_length", 17),
}


@pytest.mark.parametrize("text", UNREAD, ids=["kind", "no-json"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_differs_beside_it_is_said(
    name: str, text: str, demo_model: Path, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        shutil.copytree(demo_model, folder)
        (folder / "tokenizer.json").write_text(text)
    CHANGES[name](b)
    for pair in ((a, b), (b, a)):
        for command in ("diff", "diagnose"):
            told = aprfmt(command, *pair, "--json").json
            assert told["exit"] == 1, (command, told["says"])
