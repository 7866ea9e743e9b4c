"""Rows of the table needed only by pairs with two encodings or two shapes; and that each is needed.

Seen red: each of these rows taken out, as a test.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import (
    arithmetic,
    block_fields,
    block_order,
    block_signs,
    byte_shifts,
    coarse_groups,
    coarse_rounding,
    code_orders,
    factor_of_copies,
    flat_shards,
    lost_bits,
    misread_codes,
    misread_scales,
    misread_tiles,
    misread_types,
    other_tensors,
    outliers,
    packed_damage,
    packed_faults,
    part_rows,
    rearrangements,
    recoded_parts,
    recoded_scales,
    recurrent_layers,
    repacked_rows,
    resized_grids,
    scale_fields,
    stored_shapes,
    table,
    value_functions,
)
from aprfmt.compare import diff
from tests.causes import faults
from tests.causes.hypotheses import load_function
from tests.causes.tensor_faults import FAULTS
from tests.causes.test_explain import said
from tests.compare.test_verdicts import edited
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder
from tests.diagnosis.faults import FAULTS as SEEDED


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(
        tmp_path_factory.mktemp("rows") / "source",
        "BF16",
        hidden=faults.HIDDEN,
        layers=faults.LAYERS,
        vocab=faults.VOCAB,
        heads=faults.HEADS,
        kv_heads=faults.KV,
    )


def stored(name: str, edit: Callable[[bytes], bytes]) -> Callable[[dict[str, bytes]], None]:
    """Return a change of a stored tensor's bytes."""
    return lambda data: data.update({name: edit(data[name])})


def seen_through_q8(source: Path, folder: Path) -> tuple[Path, Path]:
    """Every row one value late in BF16, compared with a Q8_0 copy: no byte of the two is alike."""

    def late(data: bytes) -> bytes:
        rows = np.frombuffer(data, np.uint16).reshape(-1, faults.HIDDEN)
        return np.concatenate([rows[:, 5:6], rows[:, :-1]], axis=1).tobytes()

    broken = edited(source, folder / "b", stored(faults.Q, late))
    aprfmt.convert(broken, folder / "q.gguf", encoding="Q8_0")
    return source, folder / "q.gguf"


def bit_of_a_value(source: Path, folder: Path) -> tuple[Path, Path]:
    """One bit of a BF16 value, compared with a Q8_0 copy of what it was."""
    aprfmt.convert(source, folder / "clean.gguf", encoding="Q8_0")
    return edited(
        source, folder / "b", stored(faults.UP, faults.flipped(1, 6))
    ), folder / "clean.gguf"


def other_rows(source: Path, folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """Copy a folder, one tensor with another number of rows."""
    rows = tensors_of(source)
    kind, shape, raw = rows[name]
    new = np.ascontiguousarray(change(np.frombuffer(raw, np.uint16).reshape(shape)))
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_mixed(folder / "model.safetensors", rows | {name: (kind, new.shape, new.tobytes())})
    return folder


def heads_twice(source: Path, folder: Path) -> tuple[Path, Path]:
    """Every key head stored twice."""
    return source, other_rows(
        source,
        folder / "b",
        faults.K,
        lambda x: x.reshape(len(x) // faults.SIZE, -1).repeat(2, 0).reshape(-1, faults.HIDDEN),
    )


def some_rows(source: Path, folder: Path) -> tuple[Path, Path]:
    """An MLP cut to rows 8 to 39."""
    return source, other_rows(source, folder / "b", faults.UP, lambda x: x[8:40])


def bias_zeroed(source: Path, folder: Path) -> tuple[Path, Path]:
    """A model with biases, and the same with one of them at zero."""
    a = files.copy(tiny_folder("qwen2"), "bias-there")
    key = "model.layers.1.self_attn.k_proj.bias"
    return a, files.copy(a, "bias-zeroed", tensors=files.edit(key, np.zeros_like))


def vector_cut(source: Path, folder: Path) -> tuple[Path, Path]:
    """A norm of which only the first values are there."""
    rows = tensors_of(source)
    kind, _, raw = rows[faults.NORM]
    (folder / "b").mkdir()
    (folder / "b" / "config.json").write_text((source / "config.json").read_text())
    write_mixed(folder / "b" / "model.safetensors", rows | {faults.NORM: (kind, (40,), raw[:80])})
    return source, folder / "b"


# Row: the function that finds it, a pair that needs it, the tensor, the cause, words of evidence.
PAIRS: dict[
    str, tuple[Callable[..., Any], Callable[[Path, Path], tuple[Path, Path]], str, str, str]
] = {
    "value_offset": (
        rearrangements.guess_value_offset,
        seen_through_q8,
        "L1.attn_q.weight",
        "byte_offset",
        "value i of B is value i-1 of A",
    ),
    "outliers": (
        outliers.explain_outliers,
        bit_of_a_value,
        "L1.ffn_up.weight",
        "bit_rot",
        "flipping bit",
    ),
    "repeated": (
        rearrangements.guess_repeated_heads,
        heads_twice,
        "L1.attn_k.weight",
        "gqa_mapping",
        "2 heads 2 times, in a row",
    ),
    "window": (
        rearrangements.guess_row_range,
        some_rows,
        "L1.ffn_up.weight",
        "row_offset",
        "rows are rows 8 to 39 of A",
    ),
    "prefix": (
        value_functions.guess_prefix,
        vector_cut,
        "L1.attn_norm.weight",
        "row_offset",
        "B's values are the first 40 of A's 64",
    ),
    "zeroed_bias": (
        other_tensors.guess_zero_bias,
        bias_zeroed,
        "L1.attn_k.bias",
        "missing_bias",
        "B's bias is zero everywhere",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_row_for_two_encodings_or_shapes_does_its_own_work(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, make, key, cause, words = PAIRS[name]
    a, b = make(source, tmp_path)
    (row,) = [row for row in diff(a, b).tensors if row.key == key]
    assert row.explanation is not None and row.explanation.confirmed
    assert row.cause == cause and words in said(row)
    rows = tuple(entry for entry in table.TABLE if load_function(entry.find) is not find)
    assert len(rows) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rows)
    (left,) = [row for row in diff(a, b).tensors if row.key == key]
    assert left.explanation is None or words not in said(left)
    assert left.cause != cause


# Rows for packed encodings and delta nets: the fault of tests/diagnosis that only they explain.
MADE: dict[Callable[..., Any], str] = {
    packed_faults.explain_packed_faults: "zero-of-one",
    packed_faults.explain_output_order: "awq-order-decoded",
    packed_faults.explain_unrelated_scales: "scales-of-others",
    packed_faults.explain_quantization: "gptq-decoded",
    block_order.guess_block_layout: "q4-1-fields",
    block_order.guess_late_blocks: "q4-0-bytes-late",
    byte_shifts.guess_flat_offset: "q8-0-late",
    recurrent_layers.guess_value_head_order: "value-heads",
    recurrent_layers.guess_tap_order: "taps-reversed",
}


@pytest.mark.parametrize("find", MADE, ids=lambda find: find.__name__)
def test_a_row_for_made_models_does_its_own_work(
    find: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = map(str, SEEDED[MADE[find]].make())

    def confirmed() -> set[tuple[str, str]]:
        rows = diff(a, b).tensors
        return {(row.key, row.cause) for row in rows if row.explanation is not None}

    whole = confirmed()
    rows = tuple(entry for entry in table.TABLE if load_function(entry.find) is not find)
    assert whole and len(rows) == len(table.TABLE) - 1
    monkeypatch.setattr(table, "TABLE", rows)
    assert confirmed() != whole


def test_every_row_of_the_table_is_taken_out_once() -> None:
    tried = {fault.find for fault in FAULTS} | {find for find, *_ in PAIRS.values()} | set(MADE)
    tried.add(packed_damage.explain_damaged_parts)  # by tests/causes/tensor/test_packed_damage.py
    tried |= {
        byte_shifts.explain_overwritten_by_wrapped,
        byte_shifts.explain_wrapped_offset,
        other_tensors.explain_constant_side,
    }  # by tests/measure/test_numbers.py
    tried.add(arithmetic.explain_sum_rounding)  # by tests/compare/test_rounding.py
    tried.add(lost_bits.explain_lost_bits)  # by tests/compare/test_block_types.py
    tried.add(lost_bits.explain_turned_bits)  # by tests/causes/tensor/test_turned_bits.py
    tried.add(resized_grids.explain_resized_table)  # by tests/causes/tensor/test_resized_grids.py
    # By tests/causes/tensor/test_unconverted_rates.py.
    tried.add(recurrent_layers.explain_unconverted_rates)
    tried.add(recurrent_layers.explain_initial_rates)  # by tests/diagnosis/test_faults.py
    tried.add(
        recoded_parts.explain_recoded_zero_points
    )  # by tests/causes/tensor/test_recoded_parts.py
    tried.add(
        recoded_scales.explain_recoded_scales
    )  # by tests/causes/tensor/test_recoded_scales.py
    tried.add(
        coarse_rounding.explain_coarse_rounding
    )  # by tests/compare/test_types_without_encoder.py
    tried.add(code_orders.guess_code_order)  # by tests/causes/tensor/test_code_orders.py
    # by tests/causes/tensor/test_block_signs.py
    tried |= {block_signs.guess_block_signs, block_signs.guess_lost_signs}
    tried.add(repacked_rows.guess_repacked_rows)  # by tests/causes/tensor/test_repacked_rows.py
    tried.add(block_fields.guess_block_fields)  # by tests/causes/test_block_fields.py
    tried.add(coarse_groups.explain_coarse_groups)  # by tests/measure/test_coarse_steps.py
    tried.add(coarse_groups.explain_far_runs)  # by tests/compare/test_block_types.py
    # by tests/causes/tensor/test_factor_of_copies.py
    tried.add(factor_of_copies.explain_factor_of_copy)
    tried.add(flat_shards.explain_flat_shard)  # by tests/causes/tensor/test_flat_shards.py
    tried.add(stored_shapes.explain_stored_shape)  # by tests/model/relations/test_kernels.py
    # by tests/causes/tensor/test_misread_codes.py
    tried |= {
        misread_codes.explain_misread_codes,
        misread_codes.explain_whole_bytes,
        misread_codes.explain_words_as_values,
    }
    # by tests/causes/tensor/test_misread_scales.py
    tried |= {misread_scales.explain_misread_scales, misread_scales.explain_misread_exponents}
    tried.add(part_rows.explain_moved_codes)  # by tests/causes/tensor/test_part_rows.py
    tried.add(misread_types.explain_misread_type)  # by tests/causes/tensor/test_misread_types.py
    tried.add(misread_tiles.explain_misread_tiles)  # by tests/causes/tensor/test_misread_tiles.py
    # by tests/causes/test_scale_fields.py
    tried |= {scale_fields.explain_rewritten_scales, scale_fields.explain_other_scales}
    assert tried == {load_function(row.find) for row in table.TABLE}
