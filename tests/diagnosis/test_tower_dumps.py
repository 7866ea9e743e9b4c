"""A dump of a vision tower, of which no forward pass is known: the reason, and no token ids.

Seen red: "the trace does not say its token ids; give --ids", and with them "token id 3; A's
embedding has 0 rows".
"""

from pathlib import Path

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.conversion.folders import write_mixed
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO


def dump(path: Path) -> Path:
    """Write arrays that a hook took, without token ids."""
    values = np.ones((1, 5, 64), np.float32)
    write_mixed(path, {"model.layers.0.mlp": ("F32", values.shape, values.tobytes())})
    return path


@pytest.mark.parametrize("ids", [None, [1, 2, 3]])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_tower_is_known_by_names_alone(
    swapped: bool, ids: list[int] | None, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    transformers = pytest.importorskip("transformers", reason="NOT-RUN: no transformers")
    torch.manual_seed(0)
    config = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, projection_dim=64, num_hidden_layers=2,
        num_attention_heads=4, image_size=32, patch_size=8,
    )  # fmt: skip
    transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "tower")
    sides = [tmp_path / "tower", dump(tmp_path / "dump.safetensors")]
    report = diagnose(*map(str, reversed(sides) if swapped else sides), ids=ids)
    assert "known by its names and shapes only" in report.reason and not report.way_on
    assert not report.findings and "--ids" not in report.reason


def test_ids_are_asked_for_where_the_model_runs(tmp_path: Path) -> None:
    report = diagnose(str(files.copy(DEMO, "runs")), str(dump(tmp_path / "dump.safetensors")))
    assert "names and shapes only" not in report.reason and "--ids" in report.way_on
