"""`diff`: one changed bit, tag, row or shape at a time, in files of every format."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import aprfmt
from tests.conversion.folders import float_bytes, llama_folder, tensors_of, write_safetensors

Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


def edited(source: Path, folder: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """Copy a folder with raw tensor bytes changed."""
    folder.mkdir()
    rows = tensors_of(source)
    data = {name: raw for name, (_, _, raw) in rows.items()}
    change(data)
    (folder / "config.json").write_text((source / "config.json").read_text())
    write_safetensors(
        folder / "model.safetensors",
        {n: s for n, (_, s, _) in rows.items()},
        data,
        next(iter(rows.values()))[0],
    )
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "source", "BF16")


@pytest.mark.parametrize("target", ["m.apr", "m.gguf", "hf"])
def test_one_flipped_bit_is_one_tensor_and_one_element(
    target: str, source: Path, tmp_path: Path
) -> None:
    def flip(data: dict[str, bytes]) -> None:
        raw = bytearray(data[Q])
        raw[2 * (17 * 64 + 5)] ^= 0x10
        data[Q] = bytes(raw)

    broken = edited(source, tmp_path / "broken", flip)
    there = tmp_path / target
    aprfmt.convert(broken, there, to="safetensors" if target == "hf" else None)
    report = aprfmt.diff(source, there)
    assert report.exit_code() == 1
    different = [t for t in report.tensors if t.verdict == "DIFFERENT"]
    assert [t.key for t in different] == ["L1.attn_q.weight"]
    stats = different[0].stats
    assert stats is not None
    assert (stats.changed, stats.max_at) == (1, (17, 5))
    assert different[0].first_byte == 2 * (17 * 64 + 5)
    assert report.counts["DIFFERENT"] == 1
    assert sum(report.counts.values()) == len(tensors_of(source))


def test_bf16_bytes_tagged_f16_are_named(source: Path, tmp_path: Path) -> None:
    """The bug this project was born from: equal bytes, another label."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    rows = tensors_of(source)
    write_safetensors(
        broken / "model.safetensors",
        {n: s for n, (_, s, _) in rows.items()},
        {n: raw for n, (_, _, raw) in rows.items()},
        "F16",
    )
    report = aprfmt.diff(source, broken)
    assert {t.verdict for t in report.tensors} == {"DIFFERENT"}
    assert {t.cause for t in report.tensors} == {"dtype_mislabel"}
    assert report.exit_code(["within"]) == 1


def test_zeros_under_two_labels_are_the_same_values(tmp_path: Path) -> None:
    zeros = {UP: bytes(2 * 64 * 64)}
    a = llama_folder(tmp_path / "a", "BF16", replaced=zeros)
    b = llama_folder(tmp_path / "b", "F16", replaced=zeros)
    report = aprfmt.diff(a, b, tensors=[UP])
    assert report.tensors[0].verdict == "SAME_VALUES"


def test_layout_only_differences_are_equal_and_named(source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "m.gguf")
    report = aprfmt.diff(source, tmp_path / "m.gguf")
    assert report.exit_code() == 0
    by_key = {t.key: t for t in report.tensors}
    assert "RowsPermuted" in " ".join(by_key["L0.attn_q.weight"].layout)
    assert by_key["L0.attn_q.weight"].verdict == "SAME_VALUES"
    assert by_key["L0.attn_v.weight"].verdict == "SAME_BYTES"
    assert by_key["L0.attn_norm.weight"].layout == ("BF16 and F32",)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "F16"])
def test_clean_quantization_is_within_and_one_moved_weight_is_not(
    encoding: str, tmp_path: Path
) -> None:
    source = llama_folder(tmp_path / "source", "F32")
    aprfmt.convert(source, tmp_path / "q.gguf", encoding=encoding)
    clean = aprfmt.diff(source, tmp_path / "q.gguf")
    assert clean.counts["DIFFERENT"] == 0
    assert clean.counts["WITHIN"] > 10
    assert (clean.exit_code(), clean.exit_code(["within"])) == (1, 0)

    def move(data: dict[str, bytes]) -> None:
        values = np.frombuffer(data[UP], np.float32).copy()
        values[1234] += 1.0
        data[UP] = values.tobytes()

    moved = aprfmt.diff(edited(source, tmp_path / "moved", move), tmp_path / "q.gguf")
    assert [t.key for t in moved.tensors if t.verdict == "DIFFERENT"] == ["L0.ffn_up.weight"]


def test_nan_on_one_side_is_different_and_counted(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "F32")

    def poison(data: dict[str, bytes]) -> None:
        values = np.frombuffer(data[UP], np.float32).copy()
        values[7] = np.nan
        data[UP] = values.tobytes()

    report = aprfmt.diff(source, edited(source, tmp_path / "nan", poison))
    (row,) = [t for t in report.tensors if t.verdict == "DIFFERENT"]
    assert row.stats is not None
    assert (row.stats.nan_a, row.stats.nan_b, row.stats.changed) == (0, 1, 1)
    assert row.stats.max_abs_diff == float("inf")


def test_missing_and_misshapen_tensors_stay_in_the_count(source: Path, tmp_path: Path) -> None:
    rows = tensors_of(source)
    shapes = {n: s for n, (_, s, _) in rows.items()}
    data = {n: raw for n, (_, _, raw) in rows.items()}
    del shapes[UP], data[UP]
    name = "model.layers.0.mlp.gate_proj.weight"
    shapes[name] = (32, 128)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    write_safetensors(broken / "model.safetensors", shapes, data, "BF16")
    report = aprfmt.diff(source, broken)
    assert {t.key: t.verdict for t in report.tensors if t.verdict != "SAME_BYTES"} == {
        "L0.ffn_up.weight": "ONLY_IN_A",
        "L0.ffn_gate.weight": "SHAPE_DIFFERS",
    }
    assert len(report.tensors) == len(rows)


def test_a_hyperparameter_that_changes_the_forward_pass_is_a_difference(
    source: Path, tmp_path: Path
) -> None:
    other = edited(source, tmp_path / "other", lambda data: None)
    text = (other / "config.json").read_text().replace("1e-05", "1e-06")
    (other / "config.json").write_text(text)
    report = aprfmt.diff(source, other)
    assert [(f.name, f.a, f.b) for f in report.hyperparameters] == [("norm_eps", 1e-5, 1e-6)]
    assert report.exit_code() == 1


@pytest.mark.parametrize(
    "pattern",
    ["blk.1.ffn_gate", "model.layers.1.mlp.gate_proj", "L1.ffn_gate", "blk.1.ffn_gate.*",
     "re:^L1\\.ffn_gate"],
)  # fmt: skip
def test_a_tensor_is_found_in_any_spelling(pattern: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / "m.apr")
    aprfmt.convert(source, tmp_path / "m.gguf")
    report = aprfmt.diff(tmp_path / "m.apr", tmp_path / "m.gguf", tensors=[pattern])
    assert [t.key for t in report.tensors] == ["L1.ffn_gate.weight"]


def test_f16_rounding_is_within_exactly_half_a_unit(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((64, 64)).astype(np.float32)
    source = llama_folder(tmp_path / "a", "F32", replaced={UP: float_bytes(values, "F32")})
    aprfmt.convert(source, tmp_path / "b", to="safetensors", encoding="F16")
    report = aprfmt.diff(source, tmp_path / "b", tensors=[UP])
    assert report.tensors[0].verdict == "WITHIN"
    assert report.tensors[0].steps_off is not None and report.tensors[0].steps_off <= 1.0
