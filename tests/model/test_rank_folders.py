"""A model's folder whose weights are files of ranks, as xai-org/grok-2 is published.

`-TP-000` to `-TP-003` hold a part of each divided tensor, `-TP-common` the tensors that all ranks
share; config.json is the whole model's.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aprfmt.model.hf_folder import holds_rank_files, rank_files
from tests.causes.tensor.test_rank_parts import SIZES, Stored, cut
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

RANKS = 4


def divided(folder: Path, ranks: int = RANKS) -> tuple[Path, Path]:
    """Return a model's folder, and the folder of its MLPs divided among ranks."""
    whole, parts = folder / "whole", folder / "parts"
    for each in (whole, parts):
        llama_folder(each, "F32", **SIZES)
    (parts / "model.safetensors").unlink()
    stored: Stored = tensors_of(whole)
    common = {name: row for name, row in stored.items() if "mlp" not in name}
    write_mixed(parts / "model-1-TP-common.safetensors", common)
    for rank in range(ranks):
        own: Mapping[str, Any] = cut(stored, rank, ranks, "mlp")
        write_mixed(
            parts / f"model-0-TP-{rank:03d}.safetensors",
            {name: row for name, row in own.items() if "mlp" in name},
        )
    return whole, parts


def test_the_parts_are_put_together(tmp_path: Path) -> None:
    whole, parts = divided(tmp_path)
    told = aprfmt("diff", whole, parts, "--json").json
    assert (told["exit"], told["equal"]) == (0, True)
    assert told["counts"]["SAME_BYTES"] == sum(told["counts"].values()) == len(tensors_of(whole))


def test_the_folder_s_own_configuration_is_compared(tmp_path: Path) -> None:
    whole, parts = divided(tmp_path)
    path = parts / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 0.25}))
    told = aprfmt("diff", whole, parts, "--json").json
    assert (told["exit"], told["equal"]) == (1, False)
    (row,) = told["hyperparameters"]
    assert (row["name"], row["b"]) == ("norm_eps", 0.25)


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    whole, parts = divided(tmp_path)
    (parts / "model-0-TP-001.safetensors").unlink()
    told = aprfmt("diff", whole, parts)
    assert told.code == 2 and "rank 1 is missing" in told.err


def test_a_lost_common_file_leaves_its_tensors_open(tmp_path: Path) -> None:
    whole, parts = divided(tmp_path)
    (parts / "model-1-TP-common.safetensors").unlink()
    told = aprfmt("diff", whole, parts, "--json").json
    assert told["exit"] == 1
    assert {row["key"] for row in told["tensors"] if row["verdict"] == "ONLY_IN_A"} >= {
        "token_embd.weight",
        "L0.attn_q.weight",
    }


@pytest.mark.parametrize("damage", ["a name of the ranks", "cut short"])
def test_a_file_that_is_no_common_one_is_said_not_to_be_read(damage: str, tmp_path: Path) -> None:
    whole, parts = divided(tmp_path)
    common = parts / "model-1-TP-common.safetensors"
    if damage == "cut short":
        common.write_bytes(common.read_bytes()[:40])
    else:
        write_mixed(common, tensors_of(whole))
    told = aprfmt("diff", whole, parts)
    assert told.code == 1
    assert "model-1-TP-common.safetensors: not read" in told.err


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_what_reads_one_model_says_what_the_files_are(command: str, tmp_path: Path) -> None:
    _, parts = divided(tmp_path)
    told = aprfmt(command, parts)
    assert told.code == 2
    assert "holds files of 4 ranks (model-0-TP-000.safetensors, " in told.err
    assert f"aprfmt diff MODEL {parts}" in told.err


def test_one_name_with_a_rank_is_a_model_s(tmp_path: Path) -> None:
    names = ["a-TP-000.safetensors", "b.safetensors", "c-rank-1.safetensors"]
    paths = [tmp_path / name for name in names]
    assert rank_files(paths) == [paths[0], paths[2]]
    assert rank_files(paths[:2]) == []
    for path in paths:
        path.touch()
    assert holds_rank_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not holds_rank_files(tmp_path) and not holds_rank_files(paths[0])
