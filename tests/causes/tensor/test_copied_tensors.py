"""One tensor copied over another: no exchange, and a tied head where these are head and table.

Seen red: "swapped_tensors" of tensors that another overwrote, where nothing was exchanged.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.causes.faults import EMBEDDING, GATE, HEAD, UP, K, Q
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

SIZES: dict[str, Any] = {"hidden": 64, "layers": 2, "ffn": 96, "heads": 4, "kv_heads": 2}
V = K.replace("k_proj", "v_proj")
COPIED = "one was copied over the other, not exchanged"


def pair(folder: Path, changed: dict[str, str], *, known: bool = True) -> tuple[Path, Path]:
    """Return a model, and one whose tensors hold others' values, {name: whose}.

    Without `known`, their architecture has no table.
    """
    a = llama_folder(folder / "a", "F32", **SIZES)
    b = llama_folder(folder / "b", "F32", **SIZES)
    rows = tensors_of(a)
    write_mixed(b / "model.safetensors", {**rows, **{k: rows[v] for k, v in changed.items()}})
    for one in (a, b) if not known else ():
        config = json.loads((one / "config.json").read_text())
        config |= {"model_type": "unheard_of", "architectures": ["UnheardOf"]}
        (one / "config.json").write_text(json.dumps(config))
    return a, b


def causes(a: Path, b: Path) -> list[tuple[str, str]]:
    found = aprfmt("diff", a, b, "--json").json["causes"]
    return [(row["cause"], row["says"]) for row in found]


@pytest.mark.parametrize("known", [True, False])
def test_a_head_overwritten_by_the_embedding_is_tied(known: bool, tmp_path: Path) -> None:
    ((cause, says),) = causes(*pair(tmp_path, {HEAD: EMBEDDING}, known=known))
    assert cause == "tied_embedding" and COPIED in says


@pytest.mark.parametrize(("to", "of"), [(UP, GATE), (V, K)])
def test_a_copy_is_called_no_exchange(to: str, of: str, tmp_path: Path) -> None:
    ((cause, says),) = causes(*pair(tmp_path, {to: of}))
    assert cause == "copied_tensor" and COPIED in says and "are exchanged" not in says


def test_two_that_are_exchanged_are_called_so(tmp_path: Path) -> None:
    ((cause, says),) = causes(*pair(tmp_path, {UP: GATE, GATE: UP}))
    assert cause == "swapped_tensors" and "are exchanged" in says and COPIED not in says


def test_equal_models_have_no_cause(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {})
    assert causes(a, b) == [] and Q in tensors_of(b)
