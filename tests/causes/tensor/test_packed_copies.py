"""Packed copies by the libraries that make them: right ones are within their bound."""

import importlib
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import lattices
from aprfmt.codecs.lattice import Lattice
from aprfmt.compare import diff
from aprfmt.measure import bounds
from aprfmt.measure.bounds import fit_errors
from tests.causes.packed_source import (
    FFN,
    HIDDEN,
    KEY,
    UP,
    Array,
    copied,
    judged,
    plain,
    source,
    values,
)
from tests.causes.test_remedies import check_commands
from tests.cli.run import aprfmt as command
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_mixed
from tests.diagnosis import packing

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

__all__ = ["source", "values"]


# --- by the libraries -----------------------------------------------------------------------------


def compressed(values: Array, **how: Any) -> tuple[Any, Any, Any, Any]:
    """Return codes, scale, zero point and decoded values by compressed-tensors."""
    library: Any = pytest.importorskip("compressed_tensors.quantization")
    quantize, dequantize = (
        getattr(importlib.import_module(f"{library.__name__}.lifecycle.forward"), name)
        for name in ("quantize", "dequantize")
    )
    utils: Any = importlib.import_module(f"{library.__name__}.utils")

    args = library.QuantizationArgs(**how)
    x = torch.from_numpy(values)
    groups = x.reshape(len(x), -1, how.get("group_size") or x.shape[1])
    if how["strategy"] == "tensor":
        groups = x.reshape(1, 1, -1)
    scale, zero = utils.calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if how["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    codes = quantize(x, scale, zero, args, dtype=args.pytorch_dtype())
    return codes, scale, zero, dequantize(codes, scale, zero, args, dtype=torch.float32)


SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4 asymmetric": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                        "symmetric": False},
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 of the tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_compressed_tensors_decodes_is_a_copy(
    scheme: str, dtype: str, values: Array, source: Path, tmp_path: Path
) -> None:
    decoded = compressed(values, **SCHEMES[scheme])[3]
    row = judged(source, copied(source, tmp_path / "b", plain(decoded, dtype)))
    assert row.explanation is not None, row
    assert (row.explanation.cause, row.explanation.confirmed) == ("quantisation", True)
    assert "decoded again" in row.explanation.evidence[0]


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_what_compressed_tensors_stores_is_within(
    scheme: str, values: Array, source: Path, tmp_path: Path
) -> None:
    codes, scale, _, decoded = compressed(values, **SCHEMES[scheme])
    raw, label = codes.view(torch.uint8).numpy().tobytes(), "I8" if scheme == "int8" else "F8_E4M3"
    rows = {
        f"{UP}.weight": (label, (FFN, HIDDEN), raw),
        f"{UP}.weight_scale": packing.row(scale.float().numpy()),
    }
    form = f"{SCHEMES[scheme]['type']}-quantized"
    section = packing.compressed_section(form, **SCHEMES[scheme], symmetric=True)
    there = copied(source, tmp_path / "b", rows, section)
    with aprfmt.open(there) as model:
        assert np.array_equal(model.roles[KEY].numpy(), decoded.numpy())
    row = judged(source, there)
    assert row.verdict == "WITHIN" and "rounded to the nearest" in row.cause, row


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_bitsandbytes_decodes_is_a_copy(
    kind: str, nested: bool, values: Array, source: Path, tmp_path: Path
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(
        torch.from_numpy(values), blocksize=64, quant_type=kind, compress_statistics=nested
    )
    # The library's path for matrices on a CPU mistakes rows that are no whole number of blocks.
    state.shape = torch.Size([values.size])
    decoded = functional.dequantize_4bit(packed, state).reshape(values.shape)
    row = judged(source, copied(source, tmp_path / "b", plain(decoded)))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause == "quantisation"
    if nested:
        state.offset = torch.zeros_like(state.offset)
        lost = functional.dequantize_4bit(packed, state).reshape(values.shape)
        row = judged(source, copied(source, tmp_path / "lost", plain(lost)))
        assert row.explanation is not None and row.explanation.confirmed, row
        assert row.explanation.cause == "nested_offset", row.explanation


@pytest.mark.parametrize("of", ["source", "copy"])
@pytest.mark.parametrize("added", [-0.45, -0.1, 0.05, 0.3])
def test_another_offset_of_nested_scales_is_no_factor(
    added: float, of: str, wide: Path, tmp_path: Path
) -> None:
    """Seen red: an offset too large was one factor, confirmed, while the ratio ran on to twice it.

    The scales of a model's matrix hardly vary, and those of this one do by a factor of two.
    """
    _quantized(wide, tmp_path / "a", "NF4")
    a = wide if of == "source" else tmp_path / "a"
    groups = _decoded_groups(tmp_path / "a")
    largest = np.abs(groups).max(1, keepdims=True)
    held = groups * (largest + added) / largest
    row = judged(a, copied(wide, tmp_path / "b", plain(torch.from_numpy(held.reshape(256, 256)))))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause == "nested_offset", row.explanation
    said = float(row.explanation.evidence[1].split()[1])
    assert said == pytest.approx(abs(added), rel=0.05), row.explanation


@pytest.mark.parametrize("of", ["source", "copy"])
def test_one_factor_on_all_scales_is_no_offset(of: str, wide: Path, tmp_path: Path) -> None:
    """The innocent of another offset: every value is the right one times one number."""
    _quantized(wide, tmp_path / "a", "NF4")
    a = wide if of == "source" else tmp_path / "a"
    held = 1.7 * _decoded_groups(tmp_path / "a").reshape(256, 256)
    row = judged(a, copied(wide, tmp_path / "b", plain(torch.from_numpy(held))))
    assert row.explanation is not None
    assert row.explanation.cause in ("quant_scale", "scale"), row.explanation


@pytest.mark.parametrize("of", ["source", "copy"])
def test_factors_that_vary_are_not_one(of: str, wide: Path, tmp_path: Path) -> None:
    """Seen red: the middle one of the groups' factors, confirmed for all."""
    _quantized(wide, tmp_path / "a", "NF4")
    a = wide if of == "source" else tmp_path / "a"
    groups = _decoded_groups(tmp_path / "a")
    factors = np.random.default_rng(3).uniform(1.5, 2.1, (len(groups), 1))
    held = (groups * factors).reshape(256, 256)
    row = judged(a, copied(wide, tmp_path / "b", plain(torch.from_numpy(held))))
    said = "" if row.explanation is None else " ".join(row.explanation.evidence)
    assert "times" not in said, row.explanation


def _decoded_groups(folder: Path) -> Array:
    """Return the values of the first up projection in groups of 64, [groups, 64]."""
    with aprfmt.open(folder) as model:
        return np.asarray(model.roles["L0.ffn_up.weight"].numpy(), np.float32).reshape(-1, 64)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first up projection has enough groups that scales occur more than once."""
    drawn = (np.random.default_rng(4).standard_normal((256, 256)) / 12).astype(np.float32)
    folder = tmp_path_factory.mktemp("wide") / "source"
    replaced = {f"{UP}.weight": float_bytes(drawn, "F32")}
    return llama_folder(folder, "F32", hidden=256, layers=1, heads=4, replaced=replaced)


@pytest.mark.parametrize("most", [0.012, 0.02, 0.04])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_scales_of_values_that_hardly_changed_are_not_wrong(
    share: float, most: float, wide: Path, tmp_path: Path
) -> None:
    """A merged adapter that no code shows moves the scales of NF4 by a few percent."""
    _quantized(wide, tmp_path / "a", "NF4")
    rows = tensors_of(tmp_path / "a")
    kind, shape, raw = rows[f"{UP}.weight.absmax"]
    rng = np.random.default_rng(8)
    scales = np.frombuffer(raw, np.float32)
    moved = 1 + rng.uniform(0, most, scales.size) * (rng.uniform(size=scales.size) < share)
    for name, those in (("a", scales), ("b", scales * moved)):
        coarse: Array = np.round(those * 500)  # so that some occur often
        held = (coarse / 500).astype(np.float32).tobytes()
        folder = tmp_path / f"{name}-edited"
        shutil.copytree(tmp_path / "a", folder)
        edited = rows | {f"{UP}.weight.absmax": (kind, shape, held)}
        write_mixed(folder / "model.safetensors", edited)
    row = judged(tmp_path / "a-edited", tmp_path / "b-edited")
    assert row.verdict == "DIFFERENT" and row.explanation is not None
    assert row.explanation.cause == "quantisation" and row.explanation.certainty == "explained"


def _quantized(source: Path, into: Path, kind: str) -> None:
    done = command("quantize", source, into, "--to", "safetensors", "--type", kind)
    assert done.code == 0, done.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0"])
def test_what_gguf_py_decodes_is_a_copy(
    name: str, dtype: str, values: Array, source: Path, tmp_path: Path
) -> None:
    kind = gguf.GGMLQuantizationType[name]
    decoded = gguf.dequantize(gguf.quantize(values, kind), kind)
    row = judged(source, copied(source, tmp_path / "b", plain(decoded, dtype)))
    assert row.explanation is not None and row.explanation.confirmed, row
    assert row.explanation.cause == "quantisation"


# --- the bound ------------------------------------------------------------------------------------


def lattice(p: packing.Packed) -> Lattice:
    """Return the values that a packed weight could have had."""
    step = p.scales[:, p.group]
    low = -p.zeros[:, p.group] * step
    return Lattice(step, low, low + step * (2**p.bits - 1))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_error_feedback_is_within_and_its_faults_are_not(
    bits: int, symmetric: bool, act_order: bool, values: Array
) -> None:
    p = packing.fed_back(values, bits, symmetric=symmetric, act_order=act_order)
    assert "GPTQ" in fit_errors(values, p.values(), lattice(p)).how
    factor = {2: 2.0, 3: 1.4, 4: 1.15, 8: 1.02}[bits]
    for wrong in (p.values() + lattice(p).step, factor * p.values()):
        assert not fit_errors(values, wrong, lattice(p)).how


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits, size", [(3, 32), (4, 16), (4, 32), (4, 96)])
def test_large_errors_of_dependent_inputs_are_within_and_faults_are_not(
    bits: int, size: int, act_order: bool, values: Array
) -> None:
    """Seen red: what a calibration makes up for was another tensor, or had wrong scales."""

    def fit(source: Array, factor: float | Array = 1.0) -> bounds.Fit:
        """Return the errors of a copy of `source`, its scales multiplied by `factor`."""
        p = packing.fed_back(source, bits, size, act_order=act_order, dependent=True)
        p = replace(p, scales=p.scales * factor)
        return fit_errors(values, p.values(), lattice(p))

    sound = fit(values)
    assert "GPTQ" in sound.how and sound.made_up and sound.rms > bounds.FED_BACK_RMS / 1.2
    other = np.random.default_rng(7).standard_normal(values.shape) * values.std()
    assert not fit(np.asarray(values + other / 6, np.float32)).how  # trained further
    assert not fit(np.asarray(values[::-1])).how  # rows of another place
    assert not fit(values, 1.3).how
    groups = values.shape[1] // size
    lost = np.ones((len(values), groups))
    lost[11, groups // 2] = 4
    assert not fit(values, lost).how  # one group alone


@pytest.mark.parametrize("clip", [1.0, 0.8])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_rounding_to_the_nearest_is_within_and_one_value_more_is_not(
    bits: int, clip: float, values: Array
) -> None:
    p = packing.nearest(values, bits, clip=clip)
    assert fit_errors(values, p.values(), lattice(p)).how == "rounded to the nearest"
    wrong = p.values().copy()
    inner = (p.codes > 2) & (p.codes < 2**bits - 3)
    at = tuple(np.argwhere(inner)[7])
    wrong[at] += 2 * lattice(p).step[at]
    assert not fit_errors(values, wrong, lattice(p)).how


@pytest.mark.parametrize(("off", "how"), [(0.5, True), (0.5 + 2**-10, False), (-0.5, True)])
def test_values_in_the_middle_of_steps_are_rounded_to_the_nearest(off: float, how: bool) -> None:
    """Every error is half a step, up and down in turn: as far as rounding goes, and no further."""
    codes = np.random.default_rng(4).integers(-90, 90, (32, 128)).astype(np.float64)
    side = np.where(np.arange(128) % 2, 1.0, -1.0)
    step = np.full(codes.shape, 0.25)
    found = fit_errors((codes + off * side) * step, codes * step, Lattice(step, -32.0 + 0 * step,
                       31.75 + 0 * step))  # fmt: skip
    assert found.rms == abs(off) and (found.how == "rounded to the nearest") is how


LIMITS: dict[str, float] = {  # of a copy with errors made up for: what each may be, at the most
    "ends": bounds.MOST_ENDS, "far": bounds.MOST_FAR, "run_mean": bounds.RUN_MEAN,
    "run_rms": bounds.RUN_RMS, "beyond": bounds.FED_BACK_SHARE, "rms": bounds.FED_BACK_RMS,
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_number_at_its_limit_is_still_a_rounding_and_the_next_is_not(name: str) -> None:
    fit = bounds.Fit(10_000, 0.9, 0.01, 1.5, 0.0, 0.4, 0.1, 0.5, 0.0, 0.01, 0.02)
    assert "as GPTQ does" in fit.how
    for value, within in ((LIMITS[name], True), (float(np.nextafter(LIMITS[name], 9)), False)):
        changed: dict[str, Any] = {name: value}
        assert bool(replace(fit, **changed).how) is within


def test_a_scale_of_127_for_128_is_seen_in_eight_bits(values: Array) -> None:
    p = packing.nearest(values, 8, symmetric=True)
    made = lattice(p)
    other = made.map_parts(lambda part: part * 128 / 127)
    assert fit_errors(values, p.values(), made).how
    assert not fit_errors(values, p.values() * 128 / 127, other).how


# What is wrong with integer codes or zero points -> the words of the one finding that says so.
MISREAD: dict[str, tuple[Callable[[packing.Packed], packing.Packed], str]] = {
    "signed": (lambda p: replace(p, codes=p.codes ^ 1 << p.bits - 1),
               "codes are signed where they have an offset of {half}, or reverse"),
    "all zero points": (lambda p: replace(p, zeros=p.zeros + 1),
                        "zero points are one too high: every value is one step too small"),
    "other groups": (lambda p: replace(p, zeros=p.zeros[:, ::-1]),
                     "zero points are those of other groups, or other numbers"),
    "half of the rows signed": (lambda p: replace(p, codes=np.where(
        np.arange(len(p.codes))[:, None] % 2, p.codes, p.codes ^ 1 << p.bits - 1)), ""),
    "nothing": (lambda p: p, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", MISREAD)
@pytest.mark.parametrize("bits", [4, 3, 8])
def test_each_way_to_misread_codes_is_told_from_the_others(
    bits: int, what: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """Decoded by a program that has it wrong; the codes of half of the rows are no such thing."""
    change, says = MISREAD[what]
    shifted = values + np.linspace(-0.1, 0.1, HIDDEN, dtype=np.float32)  # zero points that differ
    start = copied(source, tmp_path / "a", plain(shifted, "float32"))
    p = packing.nearest(shifted, bits)
    found = judged(start, copied(source, tmp_path / "b", plain(change(p).values(), "float32")))
    said = "" if found.explanation is None else " / ".join(found.explanation.evidence)
    words = [each for _, each in MISREAD.values() if each]
    named = [each for each in words if each.format(half=1 << bits - 1) in said]
    assert named == [says] * bool(says), said
    assert not says or found.cause == "zero_point"


@pytest.mark.parametrize(
    ("off", "says"), [(1, "GPTQ's first format stores"), (2, ""), (8, "the middle of the codes")]
)
def test_why_zero_points_are_off_is_said_where_the_number_tells(
    off: int, says: str, values: Array, source: Path, tmp_path: Path
) -> None:
    p = packing.nearest(values, 4, symmetric=True)
    rows = plain(replace(p, zeros=p.zeros + off).values())
    found = judged(source, copied(source, tmp_path / "b", rows)).explanation
    assert found is not None and found.cause == "zero_point"
    assert found.evidence[0].startswith(f"B's zero points are {'one' if off == 1 else off} too ")
    hints = ("GPTQ's first format stores", "the middle of the codes")
    assert [hint for hint in hints if hint in found.evidence[1]] == [says] * bool(says)


def test_plain_values_betray_no_scheme(values: Array) -> None:
    rng = np.random.default_rng(2)
    assert lattices.find_scheme(values, "BF16") is None
    noisy = (values + 0.002 * rng.standard_normal(values.shape)).astype(ml_dtypes.bfloat16)
    assert lattices.find_scheme(noisy.astype(np.float32), "BF16") is None
    assert lattices.find_scheme(values + 1e-3 * rng.standard_normal(values.shape), "F32") is None


@pytest.mark.parametrize(
    ("wrong", "where", "looked_at"),
    [
        *((wrong, where, 72) for wrong in (0, 1, 2) for where in ("first", "last")),
        (3, "first", 16),
        (40, "first", 16),
        (3, "last", 72),
        (40, "last", 64),
    ],
)
def test_cells_are_fitted_until_too_many_fit_not(
    wrong: int, where: str, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 72 cells two may be off; with more no cells are fitted once that shows.

    Seen red, each alone: all cells fitted at once; two cells off no longer a scheme.
    """
    rng = np.random.default_rng(3)
    cells = rng.integers(-7, 8, (72, 64)) * 0.25
    cells[:, 0] = 7 * 0.25
    off = slice(0, wrong) if where == "first" else slice(72 - wrong, 72)
    cells[off] = rng.standard_normal((wrong, 64))
    code = next(one for one in lattices.code_books() if one.name == "codes of 4 bits")
    unit = lattices.StorageUnit.of_encoding("F32")
    fitted: list[int] = []
    fit = lattices._fit_cell_scales

    def counted(part: Array, *how: Any) -> tuple[Array, Array]:
        fitted.append(len(part))
        return fit(part, *how)

    monkeypatch.setattr(lattices, "_fit_cell_scales", counted)
    found = lattices.fit_scheme(cells, code, lattices.Grouping(1, 0), unit)
    assert (found is not None) == (wrong <= 2)
    if found is not None:
        scales, bits = fit(cells, code, unit)
        told = np.isfinite(bits)
        assert np.array_equal(found.scales.reshape(-1)[told], scales[told])
        assert found.bits == bits[told].sum()
    assert sum(fitted) == looked_at


def test_zeros_betray_no_scheme(values: Array) -> None:
    """Seen red: values clipped to zero were five bits above a minimum."""
    clipped = np.maximum(values[:16], 0).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert lattices.find_scheme(clipped, "BF16") is None


# --- codes cut at the ends of a smaller type ---


def folded(p: packing.Packed) -> packing.Packed:
    """Take zero points away from the codes, which signed codes of as many bits hold in part."""
    half = 1 << p.bits - 1
    codes = np.clip(p.codes - p.zeros[:, p.group], -half, half - 1) + half
    return replace(p, codes=codes, zeros=np.full_like(p.zeros, half))


def again(p: packing.Packed, **how: Any) -> packing.Packed:
    """Quantize the decoded values once more, with zero points in the middle."""
    return packing.nearest(p.values(), symmetric=True, **how)


def refitted(p: packing.Packed, by: float, every: int) -> packing.Packed:
    """Quantize the decoded values once more; of `every` groups one has its steps times `by`."""
    scales = p.scales.copy()
    scales.reshape(-1)[::every] *= np.float32(by)
    codes = np.round(p.values() / scales[:, p.group] + p.zeros[:, p.group])
    return replace(p, scales=scales, codes=np.clip(codes, 0, (1 << p.bits) - 1).astype(np.uint8))


AWQ, GPTQ = packing.awq_section(), packing.gptq_section()
CARRIED: dict[str, tuple[Callable[[packing.Packed], packing.Packed], bool, str]] = {
    "folded": (folded, True, "clipped_codes"),
    "folded, from its decoded values": (folded, False, "clipped_codes"),
    "quantized again": (again, True, "quantisation"),
    "quantized again and clipped": (lambda p: again(p, clip=0.95), False, "quantisation"),
    "carried over": (lambda p: p, True, ""),
    "smaller steps of a group in 10": (lambda p: refitted(p, 0.9, 10), True, "quantisation"),
    "smaller steps of a group in 16": (lambda p: refitted(p, 0.85, 16), True, "quantisation"),
    "smaller steps, from decoded values": (lambda p: refitted(p, 0.9, 10), False, "quantisation"),
    "hardly smaller steps": (lambda p: refitted(p, 0.94, 7), True, "quantisation"),
}


@pytest.mark.parametrize("name", CARRIED)
def test_codes_that_a_type_cannot_hold_are_cut_and_no_rounding(
    name: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: zero points folded into signed codes were the same computation, rounded.

    Codes rounded again, to the smaller steps of a few groups, were cut ones in the same steps.
    """
    change, packed, cause = CARRIED[name]
    p = packing.nearest(np.asarray(values + 0.05, np.float32))
    rows, section = (packing.awq(UP, p), AWQ) if packed else (plain(p.values()), None)
    a = copied(source, tmp_path / "a", rows, section)
    row = judged(a, copied(source, tmp_path / "b", packing.gptq(UP, change(p)), GPTQ))
    if cause != "clipped_codes":
        assert row.verdict in ("WITHIN", "SAME_VALUES") or row.explanation is not None
        assert row.explanation is None or row.explanation.cause == cause
        return
    assert row.verdict == "DIFFERENT" and row.explanation is not None
    assert (row.explanation.cause, row.explanation.confirmed) == (cause, True)
    cut = int((folded(p).values() != p.values()).sum())
    assert f"{cut} of {values.size} values" in str(row.explanation.evidence)


@pytest.mark.parametrize(("clip", "side"), [(0.45, "A"), (0.45, "B"), (0.8, "")])
def test_scales_too_small_are_wrong_and_clipping_is_a_choice(
    clip: float, side: str, values: Array, source: Path, tmp_path: Path
) -> None:
    """Seen red: a third of all values saturated were within the rounding, and B was accused."""
    sound, small = (
        copied(source, tmp_path / name, packing.gptq(UP, packing.nearest(values, clip=by)), GPTQ)
        for name, by in (("sound", 1.0), ("small", clip))
    )
    row = judged(source, small)
    if not side:
        assert row.verdict == "WITHIN" and row.steps_off is not None and row.steps_off > 1
        return
    a, b = (small, sound) if side == "A" else (sound, small)
    for found in (row, judged(a, b)):
        assert found.verdict == "DIFFERENT" and found.explanation is not None
        assert (found.explanation.cause, found.explanation.confirmed) == ("clipped_codes", True)
    assert found.explanation is not None and found.explanation.side == side


def test_cut_codes_are_written_again(
    values: Array, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A is packed too: the command that is printed copies it."""
    a, b = (
        copied(source, tmp_path / name, packing.gptq(UP, packing.nearest(values, clip=by)), GPTQ)
        for name, by in (("sound", 1.0), ("small", 0.45))
    )
    check_commands("clipped_codes", (a, b), tmp_path, monkeypatch)


# --- requantizing the base ------------------------------------------------------------------------

Write = Callable[[str, Array], packing.Rows]
TILES = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PACKED: dict[str, tuple[dict[str, Any], Write]] = {
    "gptq": (packing.gptq_section(), lambda n, x: packing.gptq(n, packing.fed_back(x))),
    "awq": (packing.awq_section(), lambda n, x: packing.awq(n, packing.nearest(x))),
    "fp8": (TILES, lambda n, x: packing.fp8(n, x, per="tile", suffix=".weight_scale_inv")),
}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_copy_derives_from_its_base(
    name: str, values: Array, source: Path, tmp_path: Path
) -> None:
    section, write = PACKED[name]
    there = copied(source, tmp_path / "b", write(UP, values), section)
    (row,) = diff(source, there, tensors=[KEY], base=source).tensors
    (one,) = row.derivations
    assert row.verdict == "WITHIN" and one.derives is True
    assert "codes are the base's under its own scales" in one.text
    moved = values.copy()
    moved[3, 5] += 0.4
    there = copied(source, tmp_path / "c", write(UP, moved), section)
    (row,) = diff(there, there, tensors=[KEY], base=source).tensors
    one = row.derivations[-1]
    assert one.derives is False and "bitsandbytes" not in one.text
    assert one.text.startswith("row 3, element 5") or name != "awq", one.text


# --- scales of another type than the codes were made with -----------------------------------------

POWERS = 2.0 ** np.arange(-60, 20)
E5M2 = np.arange(1, 0x7C, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
WAYS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "up": lambda s, low, high: high,
    "down": lambda s, low, high: low,
    "to the nearest": lambda s, low, high: np.where(s - low < high - s, low, high),
}


@pytest.mark.parametrize(
    ("kind", "held", "tile"),
    [
        ("a power of two", POWERS, (32, 32)),
        ("a power of two", POWERS, (160, 32)),
        ("a power of two", POWERS, (160, 96)),
        ("F8_E5M2", E5M2, (32, 32)),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_scales_rounded_after_the_codes_were_made_are_one_cause(
    way: str,
    kind: str,
    held: Array,
    tile: tuple[int, int],
    values: Array,
    source: Path,
    tmp_path: Path,
) -> None:
    """Few tiles or many: never "shared", "a factor a row" or a fold of norms."""
    (tall, wide), made = tile, plain(values * 52)  # scales that E5M2 holds as normal numbers
    start = copied(source, tmp_path / "a", made)
    x = (values * 52).astype(ml_dtypes.bfloat16).astype(np.float32)
    cells = x.reshape(FFN // tall, tall, HIDDEN // wide, wide)
    scales = np.abs(cells).max((1, 3)) / 448
    codes = (cells / scales[:, None, :, None]).reshape(x.shape).astype(ml_dtypes.float8_e4m3fn)
    above = np.searchsorted(held, scales)
    stored = WAYS[way](scales, held[above - 1], held[above]).astype(np.float32)
    rows = {f"{UP}.weight": packing.row(codes), f"{UP}.weight_scale_inv": packing.row(stored)}
    section = {"quant_method": "fp8", "weight_block_size": list(tile)}
    found = judged(start, copied(source, tmp_path / "b", rows, section)).explanation
    assert found is not None and (found.cause, found.certainty) == ("quant_scale", "confirmed")
    assert f"each was rounded to {kind}" in found.says


def test_scales_that_are_powers_of_two_of_their_own_are_right(
    values: Array, source: Path, tmp_path: Path
) -> None:
    """Scales rounded before the codes are made are no fault, and a shared one is not "rounded"."""
    cells = values.reshape(5, 32, 3, 32)
    right = np.exp2(np.ceil(np.log2(np.abs(cells).max((1, 3)) / 448))).astype(np.float32)
    codes = (cells / right[:, None, :, None]).reshape(values.shape).astype(ml_dtypes.float8_e4m3fn)
    section = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    for folder, stored in (("b", right), ("c", np.roll(right, 1, 1))):
        rows = {f"{UP}.weight": packing.row(codes), f"{UP}.weight_scale_inv": packing.row(stored)}
        found = judged(source, copied(source, tmp_path / folder, rows, section)).explanation
        assert found is None or "was rounded" not in found.says


def test_errors_in_steps_do_not_depend_on_the_unit(values: Array) -> None:
    """A matrix, its copy and the copy's steps in another unit: the same numbers, bit for bit."""
    p = packing.nearest(values, 4)
    made = lattice(p)
    rng = np.random.default_rng(1)
    for noise in (0.0, 0.3, 0.7, 2.0):
        copy = p.values() + noise * rng.normal(size=values.shape) * made.step
        found = fit_errors(values, copy, made)
        for factor in (2.0**-9, 4.0, 2.0**7):
            other = made.map_parts(partial(np.multiply, factor))
            assert fit_errors(factor * values, factor * copy, other) == found


def test_a_sample_stands_for_rows_that_are_as_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large tensor some rows are made again: explained, never confirmed nor only located."""
    from safetensors.numpy import save_file

    from aprfmt.causes.tensor import packed_copies

    monkeypatch.setattr(packed_copies, "MOST", 1 << 15)
    drawn = np.random.default_rng(1).normal(size=(512, 256)).astype(np.float32)
    scale = np.abs(drawn).max() / np.float32(448)
    again = (drawn / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    save_file({"w": drawn}, tmp_path / "a.safetensors")
    for name, row, level in (("b", None, "explained"), ("c", 300, "located")):
        made = again.copy()
        if row is not None:  # outside of the sample
            made[row] *= 3
        save_file({"w": made}, tmp_path / f"{name}.safetensors")
        sides = tmp_path / "a.safetensors", tmp_path / f"{name}.safetensors"
        found = [(one.cause, one.level) for one in diff(*sides).causes]
        assert found == [("quantisation", level)]
