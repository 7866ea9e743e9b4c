"""Reproductions that lie, or that are asked what they cannot say."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from aprfmt.errors import BackendUnavailableError, FormatError, UsageError
from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.bundle import (
    HEADER,
    choose_bundle,
    load_bundle,
    replay_bundle,
    save_bundle,
)
from tests.inference.crooked import compared
from tests.inference.crooked import crooked_backends as crooked_backends


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    runs = ["numpy", "wrong-eps"]
    bundle = choose_bundle(compared("qwen2", runs), runs)
    assert bundle is not None
    path = tmp_path / "b.safetensors"
    save_bundle(path, bundle, [])
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "numpy") as file:
        header = json.loads(file.metadata()[HEADER])
    assert load_bundle(path).cell.inputs.keys() == {"embd"}
    for change in ("hyper", "roles", "weights", "runs", "key"):
        less = {name: value for name, value in header.items() if name != change}
        safetensors.numpy.save_file(tensors, path, {HEADER: json.dumps(less)})
        with pytest.raises(FormatError, match="is not complete"):
            load_bundle(path)
    safetensors.numpy.save_file(tensors, path, {HEADER: json.dumps(header | {"schema": 9})})
    with pytest.raises(FormatError, match="schema 9; expected 1"):
        load_bundle(path)
    fewer = {name: x for name, x in tensors.items() if name != "expected"}
    safetensors.numpy.save_file(fewer, path, {HEADER: json.dumps(header)})
    with pytest.raises(FormatError, match="is not complete"):
        load_bundle(path)
    safetensors.numpy.save_file(tensors, path, {"x": "y"})
    with pytest.raises(FormatError, match="expected a file of parity --bundle"):
        replay_bundle(path)


def test_a_replay_on_an_engine_needs_its_recorded_value(tmp_path: Path) -> None:
    runs = ["numpy", "wrong-eps"]
    bundle = choose_bundle(compared("qwen2", runs), runs)
    assert bundle is not None
    path = tmp_path / "b.safetensors"
    save_bundle(path, bundle, [])
    with pytest.raises(BackendUnavailableError, match="computes no single operation"):
        replay_bundle(path, ["numpy", "transformers"])
    with pytest.raises(UsageError, match="is of two runs"):
        replay_bundle(path, ["numpy"])


@pytest.mark.parametrize(
    "between", [(), ("numpy", "wrong-eps"), ("wrong-eps", "numpy"), ("wrong-eps", "wrong-eps"),
                ("numpy", "numpy:cpu:float64")]
)  # fmt: skip
def test_a_replay_names_its_runs_and_measures_each_against_its_own(
    between: tuple[str, ...], tmp_path: Path
) -> None:
    """The first run is held to what the first gave, the second to what the second gave."""
    runs = ["numpy", "wrong-eps"]
    bundle = choose_bundle(compared("qwen2", runs), runs)
    assert bundle is not None
    path = tmp_path / "b.safetensors"
    save_bundle(path, bundle, [])
    found = replay_bundle(path, between)
    names = between or bundle.runs
    assert found.runs == tuple(str(parse_run(name)) for name in names)
    ran = [name.partition(":")[0] for name in names]
    assert found.other is not None
    assert (found.reference < 1e-6) is (ran[0] == "numpy")
    assert (found.other < 1e-6) is (ran[1] == "wrong-eps")
    assert (found.distance < 1e-6) is (ran[0] == ran[1]) is not found.reproduced
    inside = zip(found.at, bundle.expected.shape, strict=True)
    assert all(0 <= index < size for index, size in inside)
    if ran == [name.partition(":")[0] for name in bundle.runs]:
        apart = np.abs(bundle.found.astype(np.float64) - bundle.expected)
        assert found.largest == pytest.approx(apart.max(), rel=1e-3)
        assert apart[found.at] == pytest.approx(apart.max(), rel=1e-3)
    for other in (("numpy",), ("numpy",) * 3):
        with pytest.raises(UsageError, match=f"found {len(other)} to replay it on"):
            replay_bundle(path, other)
