"""A run with one part of another checkpoint: the part is named, and no other.

Seen red: the first part taken without asking whether the run agrees with it.
"""

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.model import open_model
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder, trace
from tests.diagnosis.faults_files import trained

PARTS = {
    "head": ("lm_head",),
    "embedding": ("embed_tokens",),
    "norm": ("model.norm",),
    "layer": ("layers.1.",),
}


@pytest.fixture(scope="module")
def older() -> str:
    """Return the folder of an earlier state: all weights a little different."""
    return str(files.copy(tiny_folder("llama"), "mixed-older", tensors=trained("weight")))


def answer(name: str, words: tuple[str, ...], older: str) -> Diagnosis:
    """Return what is said of a run that has the older weights of these names."""
    with open_model(older) as model:
        old = {each: np.array(model[each].numpy()) for each in model}

    def mixed(rows: files.Rows) -> None:
        for each in [each for each in rows if any(word in each for word in words)]:
            files.edit(each, lambda x, each=each: old[each])(rows)  # type: ignore[misc]

    ran = files.copy(tiny_folder("llama"), f"mixed-{name}", tensors=mixed)
    saved = trace(ran, f"mixed-{name}", points=frozenset({"logits"}))
    return diagnose(str(tiny_folder("llama")), str(saved), model=older)


@pytest.mark.parametrize("name", PARTS)
def test_the_part_is_named(name: str, older: str) -> None:
    found = answer(name, PARTS[name], older)
    assert (found.cause, found.confidence, found.exit_code) == ("stale_tensor", "confirmed", 1)
    with open_model(tiny_folder("llama")) as model:
        wanted = {
            key for key, view in model.roles.items()
            if any(word in one for one in view.names for word in PARTS[name])
        }  # fmt: skip
    assert found.lead is not None and set(found.lead.where) == wanted
    assert older in found.sentence and found.lead.certainty == "confirmed"


@pytest.mark.parametrize("words", [("nothing",), ("weight",), ("lm_head", "layers.1.")])
def test_no_part_is_named_of_a_whole_run_or_of_two_parts(
    words: tuple[str, ...], older: str
) -> None:
    found = answer("-".join(words), words, older)
    assert "brought up to date" not in found.sentence
