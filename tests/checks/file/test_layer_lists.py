"""Lists of config.json with an entry for each layer, and models of another number of layers.

Seen red: without the check a pruned model passes, which transformers refuses.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from aprfmt import validate
from tests.diagnosis.engines import tiny_folder
from tests.field import hf

# architecture -> the list of config.json whose entries are cut to the layers or go on behind them.
LISTS = {"gemma3": "layer_types", "qwen3_next": "layer_types", "llama": "mlp_layer_types"}


def changed(arch: str, tmp_path: Path, more: int, **others: Any) -> list[str]:
    """Return what `validate` fails of a model whose list has so many entries more than layers."""
    folder = hf.copy(tiny_folder(arch), str(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    listed = config.get(LISTS[arch]) or ["dense"] * layers
    config[LISTS[arch]] = (listed * 3)[: layers + more]
    (folder / "config.json").write_text(json.dumps(config | others))
    report = validate(folder)
    return [check.found for check in report.checks if check.outcome == "FAIL"]


@pytest.mark.parametrize("arch", LISTS)
def test_a_list_for_more_layers_than_there_are_is_a_failure(arch: str, tmp_path: Path) -> None:
    (found,) = changed(arch, tmp_path, 2)
    assert LISTS[arch] in found and "num_hidden_layers" in found


@pytest.mark.parametrize("arch", LISTS)
def test_a_list_of_the_layers_is_none(arch: str, tmp_path: Path) -> None:
    assert changed(arch, tmp_path, 0) == []


def test_layers_of_a_draft_head_may_be_listed(tmp_path: Path) -> None:
    assert changed("gemma3", tmp_path, 1, num_nextn_predict_layers=1) == []


def test_the_layers_that_are_stored_count_where_the_number_is_wrong(tmp_path: Path) -> None:
    """One key is wrong, and the list agrees with the tensors: the key alone is accused."""
    (found,) = changed("gemma3", tmp_path, 0, num_hidden_layers=1)
    assert "layer_types" not in found
