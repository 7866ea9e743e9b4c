"""A state dict that a training loop nested: what is wrong with its values goes before its names.

Neither the names of a nested state dict nor those of a model are wrong. Seen red: the nesting as
the first cause of a turned sign, and a lost head as an unknown difference.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder

torch = pytest.importorskip("torch")
State = dict[str, Any]
QUERY, HEAD = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama as a folder `hf` and as a flat state dict `flat.pt`."""
    folder = tmp_path_factory.mktemp("nested")
    llama_folder(folder / "hf", "F32")
    torch.save(state(folder), folder / "flat.pt")
    return folder


def state(folder: Path) -> State:
    """Return the tensors of the folder `hf`."""
    held = load_file(folder / "hf" / "model.safetensors")
    return {name: torch.tensor(values) for name, values in held.items()}


def rolled(held: State) -> None:
    held[QUERY] = torch.roll(held[QUERY], 1, 0)


def turned(held: State) -> None:
    held[QUERY] = -held[QUERY]


def foreign(held: State) -> None:
    drawn = np.random.default_rng(5).standard_normal(held[QUERY].shape)
    held[QUERY] = torch.tensor(drawn.astype(np.float32))


def without_head(held: State) -> None:
    del held[HEAD]


FAULTS: dict[str, Callable[[State], None]] = {
    "row_offset": rolled, "scale": turned, "stale_tensor": foreign,
    "missing_tensors": without_head,
}  # fmt: skip


@pytest.mark.parametrize("key", ["model", "state_dict", "module"])
@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_goes_before_the_nesting(cause: str, key: str, model: Path, tmp_path: Path) -> None:
    held = state(model)
    FAULTS[cause](held)
    torch.save({key: held}, tmp_path / "b.pt")
    for verb in ("diff", "diagnose"):
        for a in ("hf", "flat.pt"):
            found = aprfmt(verb, model / a, tmp_path / "b.pt", "--json").json
            named = [one["cause"] for one in found["causes"]]
            assert named[0] == cause and set(named) <= {cause, "tensor_names"}, (verb, a, named)
            assert (HEAD if cause == "missing_tensors" else QUERY) in " ".join(
                found["causes"][0]["where"]
            )


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_a_nesting_alone_is_what_differs(key: str, model: Path, tmp_path: Path) -> None:
    torch.save({key: state(model)}, tmp_path / "b.pt")
    for verb in ("diff", "diagnose"):
        found = aprfmt(verb, model / "hf", tmp_path / "b.pt", "--json").json
        assert [one["cause"] for one in found["causes"]] == ["tensor_names"]


def test_rounding_stands_behind_the_nesting(model: Path, tmp_path: Path) -> None:
    held = state(model)
    held[QUERY] = torch.nextafter(held[QUERY], torch.zeros(()))
    torch.save({"model": held}, tmp_path / "b.pt")
    found = aprfmt("diff", model / "hf", tmp_path / "b.pt", "--json").json
    assert [one["cause"] for one in found["causes"]] == ["tensor_names", "rounding"]


def test_a_prefix_that_no_reader_takes_off_stays_first(model: Path, tmp_path: Path) -> None:
    """Names under which a model's own loader finds nothing are a fault of that file."""
    from tests.conversion.folders import tensors_of, write_mixed

    rows = tensors_of(model / "hf")
    b = tmp_path / "b"
    b.mkdir()
    (b / "config.json").write_text((model / "hf" / "config.json").read_text())
    write_mixed(b / "model.safetensors", {f"_orig_mod.{n}": row for n, row in rows.items()})
    found = aprfmt("diagnose", model / "hf", b, "--json").json
    assert [one["cause"] for one in found["causes"]] == ["tensor_names"]
