"""A head that is stored though a key ties it: a copy of the embedding contradicts nothing.

Every reader computes the same from either tensor. Another head is a contradiction, which `inspect`
and what runs the model say.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.cli.inspect.facts import architecture_facts
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed


def tied_folder(folder: Path, *, copied: bool) -> Path:
    """Return a model whose config.json ties the head, with a head: a copy, or one value apart."""
    llama_folder(folder, "F32", tied=True)
    rows: dict[str, Any] = tensors_of(folder)
    kind, shape, raw = rows["model.embed_tokens.weight"]
    head = np.frombuffer(raw, np.float32).copy()
    head[-1] += 0 if copied else 1
    write_mixed(
        folder / "model.safetensors", rows | {"lm_head.weight": (kind, shape, head.tobytes())}
    )
    return folder


@pytest.mark.parametrize("copied", [True, False])
def test_only_another_head_contradicts_a_tie(copied: bool, tmp_path: Path) -> None:
    model = tied_folder(tmp_path / "m", copied=copied)
    inspected = aprfmt("inspect", model)
    assert inspected.code == 0
    assert ("1 contradiction" in inspected.out) != copied
    traced = aprfmt("trace", model, "--payload", "--ids", "1,2")
    assert traced.code == 0
    assert ("tie_word_embeddings says tied_embeddings = True" in traced.err) != copied


def test_a_model_elsewhere_is_not_read_for_it(tmp_path: Path) -> None:
    with open_model(tied_folder(tmp_path / "m", copied=True)) as model:
        said = [
            architecture_facts(model.resolution, is_local=local)["conflicts"]
            for local in (True, False)
        ]
    assert said[0] == [] and "tied_embeddings" in said[1][0]
