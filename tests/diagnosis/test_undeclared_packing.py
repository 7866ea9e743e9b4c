"""A folder whose config.json lost what it says of packing: named beside a good one, both ways.

Seen red: the other side's claim not put there, one file taken for one model.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from aprfmt.causes import CAUSES
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.model_comparison import read_with_claim_of
from aprfmt.model import open_model
from aprfmt.model.completeness import ANY
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import tensors_of, write_mixed

TYPES = ("MODELOPT-NVFP4", "COMPRESSED-INT4-g32", "GPTQ-g32", "AWQ-g32", "MLX-4bit-g32")
KEYS = ("quantization_config", "quantization")


@pytest.fixture(scope="module", params=TYPES)
def folders(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Return a packed folder, and one of the same weights by links, without the claim."""
    folder = tmp_path_factory.mktemp("unclaimed")
    good, bad = folder / "good", folder / "bad"
    assert aprfmt("quantize", demo_model, good, "--type", request.param, "--quiet").code == 0
    bad.mkdir()
    for file in good.iterdir():
        if file.name not in ("config.json", "hf_quant_config.json"):
            os.symlink(file, bad / file.name)
    config = json.loads((good / "config.json").read_text())
    assert config.keys() & set(KEYS)
    (bad / "config.json").write_text(json.dumps({k: config[k] for k in config if k not in KEYS}))
    return good, bad


@pytest.mark.parametrize("turned", [False, True], ids=["B", "A"])
def test_a_claim_that_is_gone_is_the_cause(folders: tuple[Path, Path], turned: bool) -> None:
    pair = folders[::-1] if turned else folders
    found = diagnose(*map(str, pair)).findings
    assert [one.cause for one in found] == ["packing_claim"]
    assert (found[0].side, found[0].confidence) == ("A" if turned else "B", "confirmed")
    assert found[0].residual_after == 0 and found[0].verdict == CAUSES["packing_claim"].verdict


def test_a_folder_beside_itself_is_the_same(folders: tuple[Path, Path]) -> None:
    assert diagnose(str(folders[0]), str(folders[0])).findings == ()


def test_weights_by_links_do_not_make_one_model_of_two_folders(
    demo_model: Path, tmp_path: Path
) -> None:
    for file in demo_model.iterdir():
        if file.name != "config.json":
            os.symlink(file, tmp_path / file.name)
    config = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    found = diagnose(str(demo_model), str(tmp_path)).findings
    assert [one.cause for one in found] == ["norm_eps"]


@pytest.mark.parametrize(
    ("dialect", "keys", "says"),
    [
        ("gptq", {"bits": 8}, "bits 8, expected 4"),
        ("gptq", {"quant_method": "awq"}, "quant_method 'awq', expected 'gptq'"),
        ("awq", {"quant_method": "gptq"}, "quant_method 'gptq', expected 'awq'"),
        ("gptq", {"quant_method": "gptq_marlin"}, "'gptq_marlin' of config.json is not decoded"),
        ("awq", {"version": "gemv"}, "the layout 'gemv' is not one we decode"),
        ("compressed_plain", {"quant_method": "fbgemm_fp8"}, "'fbgemm_fp8' of config.json is not"),
        ("compressed_packed", {"format": "marlin-24"}, "(format 'marlin-24')"),
        ("compressed_packed", {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
         "config_groups.group_0.weights.num_bits 8, expected 4"),
    ],
)  # fmt: skip
def test_another_claim_of_the_same_bytes_is_the_cause(
    dialect: str, keys: dict[str, object], says: str, tmp_path: Path
) -> None:
    """Claims by which a weight has another shape, and methods that are not decoded here.

    Before, the first were called a stale tensor, the others not comparable.
    """
    for side in ("good", "bad"):
        write_folder(tmp_path / side, dialect)
    path = tmp_path / "bad" / "config.json"
    config = json.loads(path.read_text())
    said = config["quantization_config"]
    if "config_groups" in keys:
        said["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    else:
        said |= keys
    path.write_text(json.dumps(config))
    for sides in (("good", "bad"), ("bad", "good")):
        found = diagnose(*(str(tmp_path / side) for side in sides), ids=(1, 2, 3))
        assert (found.cause, found.confidence) == ("packing_claim", "confirmed")
        assert says in found.findings[0].says


def test_a_claim_that_leaves_the_weights_out_is_no_missing_claim(tmp_path: Path) -> None:
    """It says how they are read, if wrongly: what it says is named, key by key."""
    for side in ("good", "bad"):
        write_folder(tmp_path / side, "compressed_packed")
    path = tmp_path / "bad" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["re:.*"]
    path.write_text(json.dumps(config))
    with (
        open_model(tmp_path / "good") as good,
        open_model(tmp_path / "bad", allow_missing=ANY, damaged=True) as bad,
    ):
        assert read_with_claim_of(good, bad, "B") is None


@pytest.mark.parametrize(
    ("factor", "sure"), [(1.0, True), (0.75, True), (0.5, False), (0.25, False)]
)
def test_a_claim_is_proven_by_weights_less_than_half_away(
    factor: float, sure: bool, tmp_path: Path
) -> None:
    """Scales times a factor put every weight as far away as that leaves of it."""
    write_folder(tmp_path / "good", "gptq")
    config = json.loads((tmp_path / "good" / "config.json").read_text())
    (tmp_path / "bad").mkdir()
    bare = {key: value for key, value in config.items() if key not in KEYS}
    (tmp_path / "bad" / "config.json").write_text(json.dumps(bare))
    held = tensors_of(tmp_path / "good")
    for name, (kind, shape, raw) in held.items():
        if name.endswith(".scales"):
            scales = (np.frombuffer(raw, np.float16) * np.float16(factor)).tobytes()
            held[name] = kind, shape, scales
    write_mixed(tmp_path / "bad" / "model.safetensors", held)
    with (
        open_model(tmp_path / "good") as good,
        open_model(tmp_path / "bad", allow_missing=ANY) as bad,
    ):
        answer = read_with_claim_of(good, bad, "B")
    assert answer is not None
    _, finding, _ = answer
    assert finding.confirmed == sure and (finding.proof is not None) == sure
    assert finding.residual_after == pytest.approx(1 - factor, rel=1e-3)
