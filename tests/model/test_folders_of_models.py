"""A folder without weights whose subfolders are models.

Seen red: "holds no model; expected model.safetensors", and nothing of the models in it.
"""

import shutil
from pathlib import Path

import pytest

from aprfmt.errors import UsageError
from aprfmt.model import open_model


@pytest.mark.parametrize("parts", [["0_Transformer"], ["checkpoint-500", "checkpoint-1000"]])
def test_the_models_in_a_folder_are_named(
    parts: list[str], demo_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    for part in (*parts, ".hidden"):
        shutil.copytree(demo_model, folder / part)
    (folder / "1_Pooling").mkdir()
    (folder / "modules.json").write_text("[]")
    with pytest.raises(UsageError, match="holds no model, but its folders do") as error:
        open_model(folder)
    named = str(error.value).partition("name one: ")[2]
    assert named == ", ".join(str(folder / part) for part in sorted(parts))
