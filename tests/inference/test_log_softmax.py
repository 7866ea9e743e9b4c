"""Logits that an engine gave as log-probabilities: recognised, and compared up to a row's constant.

The oracle of the normalisation is torch's log_softmax.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.measure.log_softmax import is_log_softmax, shift_logits_onto
from tests.cli.run import Done, aprfmt
from tests.diagnosis.engines import tiny_folder, trace
from tests.inference.engines.test_captures import own
from tests.models import IDS

torch = pytest.importorskip("torch")


def log_softmax(logits: Any, kind: Any = None) -> Any:
    found = torch.log_softmax(torch.tensor(np.asarray(logits)).float(), -1)
    return found.numpy() if kind is None else found.to(kind).float().numpy()


@given(
    st.integers(2, 40), st.integers(1, 5), st.floats(0.01, 30), st.floats(-50, 50),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_only_normalised_rows_are_recognised(
    width: int, rows: int, scale: float, shift: float, seed: int
) -> None:
    x = np.random.default_rng(seed).normal(0, scale, (rows, width)) + shift
    made = log_softmax(x)
    assert is_log_softmax(made)
    assert not is_log_softmax(made + 0.1) and not is_log_softmax(made - 0.1)
    assert not is_log_softmax(np.exp(made)) and not is_log_softmax(made[:, :-1] - 0.1)
    np.testing.assert_allclose(shift_logits_onto(x, made), made, atol=1e-4)


SHAPES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: log_softmax(x),
    "batch axis": lambda x: log_softmax(x)[None],
    "bfloat16": lambda x: log_softmax(x, torch.bfloat16),
    "last row": lambda x: log_softmax(x)[-1:],
}


def _mapped(folder: Path, model: Path, arrays: Any, name: str = "logprobs") -> Path:
    folder.mkdir()
    np.save(folder / f"{name}.npy", arrays)
    np.save(folder / "input_ids.npy", np.array([IDS]))
    out = folder.with_suffix(".safetensors")
    done = aprfmt("trace", model, "--map", folder, "-o", out, "--json")
    assert done.code == 0, done.err
    (row,) = [row for row in done.json["mapping"]["names"] if row["name"] == name]
    assert row["key"] == "logits" and "log-probabilities" in row["why"], row
    return out


def _diagnosed(model: Path, saved: Path) -> Done:
    return aprfmt("diagnose", model, saved, "--json")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sound_run_is_no_fault(shape: str, tmp_path: Path) -> None:
    model = tiny_folder("llama")
    saved = _mapped(tmp_path / "d", model, SHAPES[shape](own()["logits"]))
    done = _diagnosed(model, saved)
    assert done.code == 0 and done.json["verdict"] in ("same", "precision"), done.out


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_theta": ("qwen2", {"rope_theta": 1e4}),
    "norm_eps": ("llama", {"norm_eps": 0.5}),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_named_as_with_the_logits_themselves(cause: str, tmp_path: Path) -> None:
    base, changed = FAULTS[cause]
    model = tiny_folder(base)
    logits = own(base, hp=changed)["logits"]
    found = []
    for name, values in (("plain", logits), ("normalised", log_softmax(logits))):
        folder = tmp_path / name
        if name == "plain":
            folder.mkdir()
            np.save(folder / "logits.npy", values)
            np.save(folder / "input_ids.npy", np.array([IDS]))
            saved = tmp_path / "plain.safetensors"
            assert aprfmt("trace", model, "--map", folder, "-o", saved).code == 0
        else:
            saved = _mapped(folder, model, values)
        done = _diagnosed(model, saved)
        found.append((done.code, [one["cause"] for one in done.json["causes"]][:1]))
    assert found[0] == found[1] and found[0][0] == 1, (found, done.out[:3000])


def test_temperature_is_no_constant(tmp_path: Path) -> None:
    """log_softmax(logits / 2) is not log_softmax(logits) up to a constant."""
    model = tiny_folder("llama")
    saved = _mapped(tmp_path / "d", model, log_softmax(own()["logits"] / 2))
    done = _diagnosed(model, saved)
    assert done.code == 1 and done.json["verdict"] not in ("same", "precision"), done.out


def test_two_runs_of_which_one_is_normalised(tmp_path: Path) -> None:
    model = tiny_folder("llama")
    saved = _mapped(tmp_path / "d", model, log_softmax(own()["logits"]))
    plain = trace(model, "log-softmax-plain")
    text = ",".join(map(str, IDS))
    done = aprfmt("trace", model, "--payload", "--ids", text, "--reference", saved, "--json")
    rows = [row for row in done.json["reference"]["points"] if row["key"] == "logits"]
    assert done.code == 0 and "log-probabilities" in rows[0]["rows"], done.out or done.err
    assert aprfmt("diagnose", plain, saved, "--json").code == 0
