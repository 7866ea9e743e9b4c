"""The re-quantization oracle: which arithmetic made a file, and which block it did not make."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import aprfmt
from aprfmt.compare import diff
from aprfmt.errors import UsageError
from aprfmt.measure.records import DerivationResult, TensorDiff
from tests.cli.run import aprfmt as command
from tests.codecs.data import tie_of_q4_0
from tests.conversion.folders import float_bytes, llama_folder, tensors_of
from tests.quantizing.test_imatrix import sums, write_gguf

UP = "model.layers.0.mlp.up_proj.weight"


def folder(path: Path, values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> Path:
    """Write a llama folder whose first up projection [512, 256] is given."""
    return llama_folder(
        path,
        "F32",
        hidden=256,
        layers=1,
        ffn=512,
        vocab=32,
        replaced={UP: float_bytes(values, "F32")},
    )


@pytest.fixture(scope="module")
def values() -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Numbers with a block of Q4_0 that the two arithmetics encode differently."""
    found = np.random.default_rng(9).standard_normal((512, 256)).astype(np.float32)
    found[3, 32:64] = tie_of_q4_0()[0]
    return found


@pytest.fixture(scope="module")
def source(
    values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The float model."""
    return folder(tmp_path_factory.mktemp("requant") / "source", values)


def derived(
    a: Path, b: Path, base: Path, imatrix: Path | None = None
) -> tuple[TensorDiff, DerivationResult]:
    """Return the record of the up projection, and what it says about side B."""
    report = diff(a, b, tensors=["L0.ffn_up.weight"], base=base, imatrix=imatrix)
    (row,) = report.tensors
    return row, next(one for one in row.derivations if one.side == "b")


@pytest.mark.parametrize("fma", ["fused", "strict"])
def test_the_arithmetic_is_named(
    fma: Literal["fused", "strict"], source: Path, tmp_path: Path
) -> None:
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q4_0", fma=fma)
    row, one = derived(source, tmp_path / "q.gguf", source)
    assert (row.verdict, row.cause) == ("WITHIN", f"requantized from base, {fma}")
    assert (one.derives, one.mode) == (True, fma)


def test_where_the_arithmetic_makes_no_difference_fused_is_named(
    source: Path, tmp_path: Path
) -> None:
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q8_0", fma="strict")
    _, one = derived(source, tmp_path / "q.gguf", source)
    assert (one.derives, one.mode) == (True, "fused")


@pytest.mark.parametrize("scheme", ["Q4_K_M", "Q6_K", "Q8_0", "Q2_K", "IQ4_XS"])
def test_one_moved_weight_is_one_block(
    scheme: str,
    source: Path,
    values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]",
    tmp_path: Path,
) -> None:
    moved = values.copy()
    moved[7, 40] += 1.5
    aprfmt.convert(folder(tmp_path / "m", moved), tmp_path / "q.gguf", quantize=scheme)
    row, one = derived(source, tmp_path / "q.gguf", source)
    size = 32 if scheme == "Q8_0" else 256
    block, element = 7 * 256 // size + 40 // size, 40 // size * size
    assert (one.derives, one.block, one.row, one.element) == (False, block, 7, element)
    assert row.verdict == "DIFFERENT"
    expected = f"block {block} (row 7, elements {element}-{element + size - 1}) does not derive"
    assert row.cause.startswith(expected) and "at least 1 blocks" in row.cause


def test_a_file_made_through_f16_is_explained(source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "f16.gguf", encoding="F16")
    aprfmt.convert(tmp_path / "f16.gguf", tmp_path / "q.gguf", quantize="Q6_K")
    _, one = derived(source, tmp_path / "q.gguf", source)
    assert one.derives and one.mode.endswith(", through F16")


def test_an_importance_matrix_has_to_be_named(source: Path, tmp_path: Path) -> None:
    matrix = write_gguf(tmp_path / "m.gguf", sums(1))
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q4_K_M", imatrix=matrix)
    _, one = derived(source, tmp_path / "q.gguf", source)
    assert one.derives is None and "--imatrix" in one.text
    row, one = derived(source, tmp_path / "q.gguf", source, matrix)
    assert one.derives and row.cause.endswith("with its importance matrix")
    with pytest.raises(UsageError, match="--base"):
        diff(source, tmp_path / "q.gguf", imatrix=matrix)


def test_permuted_rows_and_stacked_formats_derive_too(source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q4_K_M")
    aprfmt.convert(source, tmp_path / "q.apr", quantize="Q4_K_M")
    for name in ("q.gguf", "q.apr"):
        report = diff(source, tmp_path / name, base=source)
        found = [one for row in report.tensors for one in row.derivations]
        assert len(found) == 9 and all(one.derives for one in found), name
        assert report.exit_code(["within"]) == 0


def test_nf4_derives_with_its_own_options(
    source: Path, values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", tmp_path: Path
) -> None:
    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize="NF4-double")
    row, one = derived(source, tmp_path / "q", source)
    assert one.derives and row.verdict == "WITHIN"
    moved = values.copy()
    moved[7, 70] = 0.1 if values[7, 70] < 0 else -0.1
    other = folder(tmp_path / "m", moved)
    row, one = derived(source, tmp_path / "q", other)
    assert (one.derives, one.block, one.row, one.element) == (False, 7 * 4 + 1, 7, 64)


def test_another_quant_state_does_not_derive(source: Path, tmp_path: Path) -> None:
    """The codes and their scales are the base's; what the scales are added to is not."""
    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize="NF4-double")
    state = tensors_of(tmp_path / "q")[f"{UP}.quant_state.bitsandbytes__nf4"][2]
    head, key, offset = state.partition(b'"nested_offset": ')
    weights = tmp_path / "q" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(state, head + key + b"9" + offset[1:]))
    row, one = derived(source, tmp_path / "q", source)
    assert one.derives is False and row.verdict == "DIFFERENT"
    assert row.cause == one.text == "its quant state does not derive from the base"


def test_a_quantized_base_proves_nothing(source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "q.gguf", quantize="Q8_0")
    _, one = derived(source, tmp_path / "q.gguf", tmp_path / "q.gguf")
    assert one.derives is None and "Q8_0 itself" in one.text


def test_the_command(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    done = command("quantize", source, target, "--type", "Q4_K_S", "--json")
    assert done.code == 0 and done.json["schema"] == "aprfmt.quantize/1"
    done = command("diff", source, target, "--base", source, "--accept", "within")
    assert done.code == 0 and "B: 9 tensors requantized from base, fused" in done.out
    same = tmp_path / "same.gguf"
    assert command("convert", source, same, "--quantize", "Q4_K_S").code == 0
    assert same.read_bytes() == target.read_bytes()
    planned = command(
        "quantize", source, tmp_path / "p.gguf", "--type", "Q4_K_S", "--dry-run", "--json"
    )
    assert not (tmp_path / "p.gguf").exists()
    with aprfmt.open(target) as model:
        sizes = {name: tensor.nbytes for name, tensor in model.items()}
    assert {t["name"]: t["nbytes"] for t in planned.json["tensors"]} == sizes
    wrong = command("quantize", source, tmp_path / "p.gguf", "--type", "Q9")
    assert wrong.code == 2 and "near names: Q8_0" in wrong.err
