"""A key that gives layers other kinds than their tensors are of is a bug, not another model.

Seen red: "not comparable: other sizes or kinds of block", "it is another model than A".
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder

LOST: Any = None


def copy_with(source: Path, folder: Path, keys: Mapping[str, Any]) -> Path:
    """Return a copy of a model whose config.json has other values; LOST for a key that is gone."""
    made = folder / "b"
    shutil.copytree(source, made)
    path = made / "config.json"
    config = json.loads(path.read_text()) | dict(keys)
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not LOST}))
    return made


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        ("qwen3_5", "layer_types", LOST),
        ("deepseek_v3", "first_k_dense_replace", 0),
        ("deepseek_v3", "n_shared_experts", LOST),
        ("glm4_moe", "first_k_dense_replace", 2),
    ],
)
def test_the_key_is_named_with_the_command_that_sets_it(
    arch: str, key: str, value: Any, tmp_path: Path
) -> None:
    good = tiny_folder(arch)
    bad = copy_with(good, tmp_path, {key: value})
    for a, b, label in ((good, bad, "B"), (bad, good, "A")):
        found = diagnose(str(a), str(b))
        assert [(one.cause, one.where, one.confirmed) for one in found.findings] == [
            ("config_sizes", (key,), True)
        ], found.sentence
        assert f"{label}'s configuration does not fit its tensors: {key} is " in found.sentence
    repaired = tmp_path / "repaired"
    own = json.loads((good / "config.json").read_text())[key]
    aprfmt("set", bad, f"config.json:{key}={json.dumps(own)}", "-o", repaired)
    assert diagnose(str(good), str(repaired)).verdict == "same"


def test_layers_of_other_kinds_that_are_there_are_another_model() -> None:
    """Their tensors are what the configuration asks for: no key of it is wrong."""
    found = diagnose(
        str(tiny_folder("deepseek_v3")), str(tiny_folder("deepseek_v3", first_k_dense_replace=2))
    )
    assert found.verdict == "not_comparable" and "config_sizes" not in found.sentence


def test_lost_tensors_are_named_beside_the_key(tmp_path: Path) -> None:
    """A model that lost a key and one layer's tensors has two faults."""
    from safetensors.numpy import load_file, save_file

    good = tiny_folder("deepseek_v3")
    bad = copy_with(good, tmp_path, {"n_shared_experts": LOST})
    tensors = load_file(bad / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if "layers.1.mlp.shared" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, bad / "model.safetensors", {"format": "pt"})
    found = diagnose(str(good), str(bad))
    assert [one.cause for one in found.findings] == ["config_sizes", "missing_tensors"]
