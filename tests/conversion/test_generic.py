"""A model of an architecture that nobody knows: shown, compared, checked, and copied as it is.

Seen red: vectors widened to F32 on the way to a GGUF, the architecture of the source kept.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import aprfmt
from aprfmt.errors import ArchError
from aprfmt.model import open_model
from tests.cli.run import aprfmt as run

CONFIG = {"model_type": "whoknows", "architectures": ["WhoKnowsModel"], "d_model": 8}


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """Return a folder of an architecture that no table has, in several dtypes."""
    import ml_dtypes

    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {
        "stem.kernel": rng.standard_normal((3, 5, 7)).astype(np.float16),
        "blocks.0.mixer.gain": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "blocks.0.mixer.in": rng.standard_normal((9, 11)).astype(ml_dtypes.bfloat16),
        "blocks.1.mixer.gain": rng.standard_normal(9).astype(np.float32),
        "steps": np.arange(6, dtype=np.int32),
    }
    folder = tmp_path / "unknown"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with open_model(path) as model:
        return {
            name: (view.encoding, view.shape, bytes(view.stored[0].raw()))
            for name, view in model.items()
        }


def test_it_is_shown_compared_hashed_and_checked(unknown: Path) -> None:
    shown = run("inspect", unknown, "--json").json
    assert shown["architecture"] is None and shown["tensor_count"] == 5
    assert "whoknows" in shown["architecture_error"] and "level" not in shown
    for command in (("diff", unknown, unknown), ("hash", unknown)):
        assert run(*command).code == 0, command
    assert run("validate", unknown).code == 2  # nothing says what its tensors are
    done = run("convert", unknown, unknown.parent / "x.gguf")
    assert done.code == 2 and "whoknows" in done.err


def test_names_and_bytes_go_round_the_containers(unknown: Path, tmp_path: Path) -> None:
    first, before = unknown, stored(unknown)
    for name in ("a.gguf", "b.apr", "c.gguf", "d.apr", "e"):
        target = tmp_path / name
        to = ("--to", "safetensors") if name == "e" else ()
        assert run("convert", first, target, "--generic", *to).code == 0
        assert stored(target) == before, name
        first = target
    with safe_open(tmp_path / "e" / "model.safetensors", "np") as file:
        assert set(file.keys()) == set(before)
        assert "aprfmt.generic" in file.metadata()
    assert not (tmp_path / "e" / "config.json").exists()


def test_no_loader_believes_more(demo_model: Path, tmp_path: Path) -> None:
    """A known model copied so is no model of its architecture any more."""
    target = tmp_path / "copy.gguf"
    aprfmt.convert(demo_model, target, generic=True)
    reader = gguf.GGUFReader(target)
    assert reader.get_field("general.architecture").contents() == "aprfmt-generic"  # type: ignore[union-attr]
    with open_model(target) as copy, pytest.raises(ArchError, match="'aprfmt-generic'"):
        _ = copy.spec
    done = run("run", target, "--ids", "1,2")
    assert done.code == 2 and "aprfmt-generic" in done.err
    marked = tmp_path / "copy.apr"
    aprfmt.convert(target, marked, generic=True)
    with open_model(marked) as copy:
        assert copy.metadata["architecture"] == "aprfmt-generic"
        assert "aprfmt.generic" in copy.metadata


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 4), (0,)])
def test_a_tensor_without_elements_is_stored_in_another_encoding(
    shape: tuple[int, ...], unknown: Path, tmp_path: Path
) -> None:
    save_file({"empty": np.zeros(shape, np.float32)}, unknown / "model.safetensors")
    assert (
        run("convert", unknown, tmp_path / "e", "--to", "safetensors", "--encoding", "BF16").code
        == 0
    )
    with safe_open(tmp_path / "e" / "model.safetensors", "np") as file:
        told = file.get_slice("empty")
        assert (told.get_dtype(), tuple(told.get_shape())) == ("BF16", shape)
