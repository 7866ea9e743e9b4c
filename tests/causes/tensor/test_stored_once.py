"""A shared tensor that one file stores once, and an embedding that only the head's name has.

Seen red: "no cause of the table fits" of both, and a command that sets config.json's keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def saved(folder: Path, values: Mapping[str, Any]) -> Path:
    folder.mkdir()
    save_file(dict(values), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "mobilellm"}))
    return folder


def weights() -> dict[str, Any]:
    drawn = np.random.default_rng(4)
    names = [TABLE, *(f"model.layers.{i}.fc.weight" for i in range(4))]
    made = {name: drawn.standard_normal((24, 16)).astype(np.float32) for name in names}
    return made | {HEAD: made[TABLE].copy()}


def without(name: str) -> dict[str, Any]:
    return {key: values for key, values in weights().items() if key != name}


def test_a_table_under_the_heads_name_alone_is_named_and_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = saved(tmp_path / "a", weights()), saved(tmp_path / "b", without(TABLE))
    told = aprfmt("diagnose", a, b, "--json").json
    (row,) = told["causes"]
    assert (told["verdict"], row["cause"], row["level"]) == ("bug", "table_under_head", "confirmed")
    assert f"B's {HEAD} equals A's {TABLE}" in row["says"]
    command = row["remedy"]["command"].split()
    assert command == ["aprfmt", "convert", str(b), "b-fixed", "--rename", f"{HEAD}={TABLE}"]
    assert aprfmt(*command[1:]).code == 0
    again = aprfmt("diagnose", a, tmp_path / "b-fixed", "--json").json
    assert [one["cause"] for one in again["causes"]] == ["stored_once"]
    # The other way round A lacks it: no command gives B anything.
    (other,) = aprfmt("diagnose", b, a, "--json").json["causes"]
    assert other["cause"] == "table_under_head" and other["remedy"] is None


@pytest.mark.parametrize("swapped", [False, True])
def test_a_shared_tensor_may_be_stored_once(swapped: bool, tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", weights()), saved(tmp_path / "b", without(HEAD))
    told = aprfmt("diagnose", *((b, a) if swapped else (a, b)), "--json").json
    (row,) = told["causes"]
    assert (row["cause"], row["level"], row["remedy"]) == ("stored_once", "confirmed", None)
    label, other = "BA" if swapped else "AB"
    assert f"{label} stores one tensor under two names, {other} under one" in row["says"]


def test_a_head_of_its_own_stands_for_no_table(tmp_path: Path) -> None:
    """It is equal in both files, and is not the embedding."""
    values = weights()
    values[HEAD][0, 0] += 1
    lost = {key: one for key, one in values.items() if key != TABLE}
    told = aprfmt(
        "diagnose", saved(tmp_path / "a", values), saved(tmp_path / "b", lost), "--json"
    ).json
    assert not {"table_under_head", "stored_once"} & {one["cause"] for one in told["causes"]}
    assert told["exit"] == 1
