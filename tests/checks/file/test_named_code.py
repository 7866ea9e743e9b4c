"""The code that a folder's configurations name: there, missing, of another repository, imported."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

AUTO_MAP = {
    "AutoConfig": "configuration_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
CODE = {
    "configuration_own.py": "class OwnConfig: ...\n",
    "modeling_own.py": "from .configuration_own import OwnConfig\nfrom .rotary import x\n",
    "rotary.py": "x = 1\n",
}


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """Return the folder of a model of a known architecture that names its own code."""
    folder = tmp_path / "known"
    assert aprfmt("demo", "--into", folder).code == 0
    return with_code(folder, AUTO_MAP)


def with_code(folder: Path, auto_map: Any) -> Path:
    """Return a folder whose config.json has an `auto_map`, with the code that CODE has."""
    target = folder / "config.json"
    config = json.loads(target.read_text()) if target.is_file() else {"model_type": "own"}
    target.write_text(json.dumps(config | {"auto_map": auto_map}))
    for name, text in CODE.items():
        (folder / name).write_text(text)
    return folder


def without(folder: Path, *names: str) -> Path:
    """Return a copy of a folder without some files."""
    other = folder.parent / f"without-{'-'.join(names)}"
    shutil.copytree(folder, other)
    for name in names:
        (other / name).unlink()
    return other


def code_findings(folder: Path) -> dict[str, str]:
    """Return {file: level} of what the check of named code finds."""
    told = aprfmt("validate", folder, "--json").json
    return {row["where"]: row["level"] for row in told["findings"] if row["check"] == "code"}


@pytest.mark.parametrize("lost", sorted(CODE))
def test_a_named_or_imported_module_that_is_missing_is_said(known: Path, lost: str) -> None:
    folder = without(known, lost)
    assert code_findings(known) == {}
    assert code_findings(folder) == {lost: "warning"}
    for pair, side in (((known, folder), "A"), ((folder, known), "B")):
        done = aprfmt("diff", *pair)
        assert done.code == 1 and f"file {lost} only in {side} (code that" in done.out


def test_a_model_that_only_its_code_can_load_fails_without_it(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    save_file({"w": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    with_code(folder, AUTO_MAP)
    assert code_findings(folder) == {}
    assert code_findings(without(folder, "modeling_own.py")) == {"modeling_own.py": "fail"}


@pytest.mark.parametrize(
    "auto_map",
    [
        {"AutoModel": "someone/repository--modeling_far.Far"},
        {"AutoTokenizer": [None, None]},
        {},
        [],
    ],
)
def test_code_of_other_repositories_is_not_asked_for(known: Path, auto_map: Any) -> None:
    assert code_findings(without(with_code(known, auto_map), "modeling_own.py")) == {}


def test_code_that_nothing_names_is_no_difference(known: Path) -> None:
    (known / "helper.py").write_text("y = 2\n")
    assert aprfmt("diff", known, without(known, "helper.py")).code == 0


def test_a_copy_has_the_code_that_its_configuration_names(known: Path) -> None:
    copy = known.parent / "copy"
    assert aprfmt("convert", known, copy).code == 0
    assert {name: (copy / name).read_text() for name in CODE} == CODE
    assert aprfmt("diff", known, copy).code == 0
    gguf = known.parent / "copy.gguf"
    assert aprfmt("convert", known, gguf).code == 0
    assert "code that" not in aprfmt("diff", known, gguf).out
