"""A part of packed weights under a name that no packing has: one relation, and its rename.

Seen red: two or three parts at once had no command; codes under another name were missing tensors,
to be written again from A; MLX's biases were scales that are invalid; a second scale of NVFP4 had
no cause; `diff` sent to `validate`, which knows no other side.
"""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis.test_remedies import written

# type of `quantize`, parts that have another name, and whether A is packed as well
CASES = [
    ("NF4", ("absmax",), False),
    ("NF4", ("quant_map",), True),
    ("NF4", ("quant_state.bitsandbytes__nf4",), True),
    ("NF4", ("absmax", "quant_map"), False),
    ("GPTQ-g32", ("qzeros",), False),
    ("GPTQ-g32", ("scales",), True),
    ("GPTQ-g32", ("qweight",), False),
    ("GPTQ-g32", ("g_idx",), True),
    ("GPTQ-g32", ("g_idx",), False),
    ("GPTQ-g32", ("qzeros", "scales"), True),
    ("GPTQ-g32", ("qzeros", "scales", "g_idx"), True),
    ("GPTQ-g32", ("qweight", "qzeros", "scales"), False),
    ("AWQ-g32", ("qweight", "qzeros", "scales"), False),
    ("NF4", ("absmax", "quant_map", "quant_state.bitsandbytes__nf4"), False),
    ("COMPRESSED-NVFP4", ("weight_packed", "weight_scale", "weight_global_scale"), True),
    ("AWQ-g32", ("qweight",), True),
    ("AWQ-g32", ("qzeros", "scales"), False),
    ("COMPRESSED-FP8", ("weight_scale",), False),
    ("COMPRESSED-INT4-g32", ("weight_packed",), True),
    ("COMPRESSED-INT4-g32", ("weight_scale", "weight_shape"), False),
    ("COMPRESSED-NVFP4", ("weight_global_scale",), False),
    ("MODELOPT-NVFP4", ("weight_scale_2",), False),
    ("MLX-4bit-g32", ("biases",), False),
    ("MLX-4bit-g32", ("scales", "biases"), True),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the float model `a` and of its packed copies, named by their type."""
    root = tmp_path_factory.mktemp("parts")
    llama_folder(root / "a", "F32", hidden=128, layers=1, ffn=128, heads=4, kv_heads=2)
    for kind in dict.fromkeys(kind for kind, _, _ in CASES):
        assert command("quantize", root / "a", root / kind, "--type", kind).code == 0
    return root


def renamed(good: Path, b: Path, parts: tuple[str, ...], suffix: str = "_x") -> Path:
    shutil.copytree(good, b)
    ends = tuple(f".{part}" for part in parts)
    rows = tensors_of(good)
    moved = {f"{name}{suffix}" if name.endswith(ends) else name: row for name, row in rows.items()}
    assert moved.keys() != rows.keys()
    write_mixed(b / "model.safetensors", moved)
    return b


@pytest.mark.parametrize(("kind", "parts", "packed"), CASES)
def test_parts_get_their_names_back(
    kind: str,
    parts: tuple[str, ...],
    packed: bool,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = models / (kind if packed else "a"), renamed(models / kind, tmp_path / "b", parts)
    found = diagnose(str(a), str(b))
    assert [one.cause for one in found.findings if one.verdict == "bug"] == ["tensor_names"]
    assert found.exit_code == 1 and not found.unrepaired_text
    (told,) = found.next
    assert shlex.split(told).count("--rename") == len(parts)
    assert command("diff", a, b, "--json").json["next"][0].startswith("aprfmt diagnose ")
    mended = written(told, b, tmp_path / "run", monkeypatch)
    assert tensors_of(mended) == tensors_of(models / kind)
    again = diagnose(str(a), str(mended))
    assert again.verdict == ("same" if packed else "precision"), again.sentence


# type of `quantize`, its part, and the name that it has: of another packing
OTHERS = [
    ("COMPRESSED-FP8", "weight_scale", "scale_weight"),
    ("COMPRESSED-FP8", "weight_scale", "weight_scale_inv"),
    ("COMPRESSED-INT4-g32", "weight_scale", "scales"),
    ("GPTQ-g32", "scales", "weight_scale"),
    ("AWQ-g32", "qzeros", "biases"),
    ("MLX-4bit-g32", "scales", "weight_scale"),
]


@pytest.mark.parametrize("of", ["", "up_proj"])
@pytest.mark.parametrize(("kind", "part", "called"), OTHERS)
def test_a_name_of_another_packing_is_no_name_of_this_one(
    kind: str, part: str, called: str, of: str, models: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In all weights, or in one: the scale is there, so that nothing is lost."""
    b = tmp_path / "b"
    shutil.copytree(models / kind, b)
    old, new = f"{of}.{part}", f"{of}.{called}"
    rows = tensors_of(models / kind)
    moved = {n.removesuffix(old) + new if n.endswith(old) else n: rows[n] for n in rows}
    assert moved.keys() != rows.keys()
    write_mixed(b / "model.safetensors", moved)
    found = diagnose(str(models / "a"), str(b))
    assert [one.cause for one in found.findings if one.verdict == "bug"] == ["tensor_names"]
    (told,) = found.next
    assert f"--rename {called}={part}" in told
    assert tensors_of(written(told, b, tmp_path / "run", monkeypatch)) == rows
    for one in command("diff", models / "a", b, "--json").json["causes"]:
        assert one["cause"] != "scales_missing" or f".{called} may be it" in one["says"], one


def test_the_accused_side_alone_is_renamed(models: Path, tmp_path: Path) -> None:
    b = renamed(models / "NF4", tmp_path / "b", ("absmax",))
    assert not any("--rename" in one for one in diagnose(str(b), str(models / "NF4")).next)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decoy", ["other numbers", "nothing"])
def test_what_does_not_decode_to_as_values_is_no_part(
    decoy: str, packed: bool, models: Path, tmp_path: Path
) -> None:
    """A tensor of the part's size beside the codes, and a part that is not there at all."""
    b = renamed(models / "NF4", tmp_path / "b", ("absmax",))
    rows = {}
    for name, (kind, shape, raw) in tensors_of(b).items():
        if not name.endswith("absmax_x"):
            rows[name] = (kind, shape, raw)
        elif decoy == "other numbers":
            rows[name] = (kind, shape, np.full(len(raw) // 4, 100, np.float32).tobytes())
    write_mixed(b / "model.safetensors", rows)
    found = diagnose(str(models / ("NF4" if packed else "a")), str(b))
    assert found.cause == "scales_missing" and found.unrepaired_text
    assert not any("--rename" in one for one in found.next)


def test_a_tensor_that_changes_nothing_is_no_part(models: Path, tmp_path: Path) -> None:
    """Many an optional part, such as a scale of inputs, leaves the weights as they are."""
    b = tmp_path / "b"
    shutil.copytree(models / "GPTQ-g32", b)
    rows = dict(tensors_of(b))
    for name in [name for name in rows if name.endswith(".qweight")]:
        one = np.ones(1, np.float32).tobytes()
        rows[f"{name.removesuffix('qweight')}input_scal"] = ("F32", (1,), one)
    write_mixed(b / "model.safetensors", rows)
    for a in ("a", "GPTQ-g32"):
        found = diagnose(str(models / a), str(b))
        assert "tensor_names" not in {one.cause for one in found.findings}
        assert found.exit_code == 1
    assert aprfmt.diff(models / "GPTQ-g32", b).exit_code() == 1
