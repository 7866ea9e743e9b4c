"""A section of a model that cannot be read is in the answer of every command that reads the model.

Seen red: two runs of one file whose unreadable section was equal to itself, a reference and a model
compared with whose sections nobody asked for.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aprfmt.errors import FormatError
from aprfmt.model.ledger import Item, _LedgerBuilder
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder

IDS = "1,2,3,4,5,6"
WHY = "nobody can read this"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two equal models, and a trace of the first."""
    folder = tmp_path_factory.mktemp("sections")
    for name in ("whole", "broken"):
        llama_folder(folder / name, "F32", hidden=32, layers=1)
    saved = ("--payload", "--ids", IDS, "-o", folder / "t.safetensors")
    assert command("trace", folder / "whole", *saved).code == 0
    return folder


COMMANDS = {
    "validate": "validate {broken}",
    "gates": "qa {broken} --only tensor-contract",
    "logits": "logits {broken} --ids {ids}",
    "parity": "parity {broken} --between numpy numpy:cpu:float64 --ids {ids}",
    "eval": "eval {broken} --ids {ids} --random-weights",
    "eval against": "eval {whole} --against {broken} --ids {ids} --random-weights",
    "a reference's trace": "trace {broken} --payload --ids {ids} --reference {trace}",
    "a reference's run": "trace {whole} --payload --ids {ids} --reference {broken}",
    "a reference of one file": "trace {broken} --payload --ids {ids} --reference {broken}@numpy",
    "two runs": "diagnose {broken}@numpy {broken}@numpy:cpu:float64 --ids {ids}",
    "a run and a trace": "diagnose {broken} {trace} --ids {ids}",
    "a trace and a run": "diagnose {trace} {broken} --ids {ids}",
    "two models": "diagnose {whole} {broken} --ids {ids}",
    "two models' runs": "diagnose {whole}@numpy {broken}@numpy:cpu:float64 --ids {ids}",
    "diff": "diff {whole} {broken}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_section_that_cannot_be_read_leaves_the_answer_open(
    name: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "whole": models / "whole",
        "broken": models / "broken",
        "trace": models / "t.safetensors",
        "ids": IDS,
    }
    args = COMMANDS[name].format(**places).split()
    before = command(*args, "--json")
    read = _LedgerBuilder.config_keys

    def unreadable(builder: _LedgerBuilder) -> Iterator[Item]:
        """Yield what is read of one model, and raise for the other."""
        if "broken" in builder.model.path.parts:
            raise FormatError(WHY)
        yield from read(builder)

    monkeypatch.setattr(_LedgerBuilder, "config_keys", unreadable)
    done = command(*args, "--json")
    said = done.json.get("pronounced", done.json)
    rows = [row for row in said["not_compared"] if row["why"] == WHY]
    assert done.code == (before.code or 2), (before, done)
    assert [row["state"] for row in rows] == ["unreadable"], said["not_compared"]
