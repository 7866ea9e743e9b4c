"""Names of arrays in the files of a dump: with the file's name only where they need it.

Seen red: `acts.logits` of `chunk0/acts.safetensors` was "not a capture point".
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from aprfmt.inference.engines.captured_arrays import ArrayFiles
from aprfmt.inference.engines.dump_folders import _gather_arrays
from tests.conversion.folders import write_mixed

LAYERS = [f"model.layers.{at}.mlp" for at in range(3)]
WHOLE = ["input_ids", "logits", "model.embed_tokens", "model.norm", *LAYERS]


def names_in(folder: Path, files: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the names of the arrays of each file in turn, in the order of their paths."""
    for below, names in files.items():
        path = folder / below
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.arange(6, dtype=np.float32).tobytes()
        write_mixed(path, {name: ("F32", (2, 3), values) for name in names})
    with ExitStack() as stack:
        found, *_ = _gather_arrays(folder, ArrayFiles(stack))
    many = {below: len(names) for below, names in files.items()}
    left, made = [one.name for _, one in found], []
    for below in sorted(many):
        made.append(sorted(left[: many[below]]))
        left = left[many[below] :]
    return made


@pytest.mark.parametrize("stem", ["acts", "activations", "dump", "hooks_out"])
def test_a_pass_in_one_file_has_the_arrays_own_names(stem: str, tmp_path: Path) -> None:
    found = names_in(tmp_path, {f"chunk{at}/{stem}.safetensors": WHOLE for at in range(2)})
    whole = sorted(set(WHOLE) - {"input_ids"})  # its last part alone says what it is
    assert [[name for name in one if "input_ids" not in name] for one in found] == [whole] * 2


def test_names_that_need_the_files_name_keep_it(tmp_path: Path) -> None:
    """Parts of a module whose name is the file's, and arrays that are no points either way."""
    parts = {"step0/model.layers.0.mlp.safetensors": ["gate_proj", "down_proj"]}
    (found,) = names_in(tmp_path / "parts", parts)
    assert found == ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]
    (found,) = names_in(tmp_path / "own", {"step0/probe.safetensors": ["mine", "other"]})
    assert found == ["probe.mine", "probe.other"]


def test_files_of_one_pass_with_the_same_arrays_keep_their_names(tmp_path: Path) -> None:
    files = {"step0/draft.safetensors": ["logits"], "step0/target.safetensors": ["logits"]}
    assert names_in(tmp_path, files) == [["draft.logits"], ["target.logits"]]
