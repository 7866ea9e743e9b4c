"""Wrong conversions that tools accepted, by number in the upstream tracker; `diff` shows each.

The faults are made by hand as the broken tools made them, without this package's writers.
"""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.compare import diff
from tests.causes.faults import rounded
from tests.cli.run import aprfmt as command
from tests.compare.damage import patched
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

UP = "model.layers.0.mlp.up_proj.weight"
KEY = "L0.ffn_up.weight"


def values(folder: Path, name: str = UP) -> Any:
    dtype, shape, raw = tensors_of(folder)[name]
    assert dtype == "F32"
    return np.frombuffer(raw, np.float32).reshape(shape)


def rewritten(
    source: Path, target: Path, rows: Mapping[str, tuple[str, tuple[int, ...], bytes]]
) -> Path:
    """Write a folder with `rows` in place of the source's tensors of those names."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    write_mixed(target / "model.safetensors", tensors_of(source) | dict(rows))
    return target


def shown(a: Path, b: Path, code: int = 1) -> tuple[str, Any]:
    """Return what one command prints, and the record of the up projection."""
    human = command("diff", a, b, "-v")
    assert human.code == code, human.err
    rows = {row["key"]: row for row in command("diff", a, b, "--json").json["tensors"]}
    return human.out, rows.get(KEY)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("upstream") / "a", "F32", ffn=96)


def test_194_a_conversion_that_kept_a_third_of_the_tensors(source: Path, tmp_path: Path) -> None:
    kept = {n: row for n, row in tensors_of(source).items() if "layers" in n and "norm" not in n}
    broken = tmp_path / "b"
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    write_mixed(broken / "model.safetensors", kept)
    out, _ = shown(source, broken)
    assert "21 tensors: 7 ONLY_IN_A, 14 SAME_BYTES" in out


@pytest.mark.parametrize("moved", [True, False])
def test_203_shapes_reversed_with_and_without_the_data(
    moved: bool, source: Path, tmp_path: Path
) -> None:
    x = values(source)
    raw = np.ascontiguousarray(x.T).tobytes() if moved else x.tobytes()
    out, row = shown(source, rewritten(source, tmp_path / "b", {UP: ("F32", x.shape[::-1], raw)}))
    assert (row["verdict"], row["cause"]) == ("SHAPE_DIFFERS", "transpose")
    assert ("only the shape" in out) != moved


def test_273_a_gguf_name_on_safetensors_content_is_read_as_what_it_is(
    source: Path, tmp_path: Path
) -> None:
    named = tmp_path / "x.gguf"
    named.write_bytes((source / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    out, row = shown(source, named, 0)
    assert row["verdict"] == "SAME_BYTES" and "equal" in out


def test_1601_bf16_under_the_label_f16(tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "a", "BF16")
    rows = tensors_of(source)
    out, row = shown(
        source, rewritten(source, tmp_path / "b", {UP: ("F16", rows[UP][1], rows[UP][2])})
    )
    assert row["cause"] == "dtype_mislabel"
    assert "B's bytes read as BF16 instead of F16 are A's values" in out
    wide = np.frombuffer(rows[UP][2], np.float16).astype(np.float32).tobytes()
    out, row = shown(source, rewritten(source, tmp_path / "c", {UP: ("F32", rows[UP][1], wide)}))
    assert row["cause"] == "dtype_mislabel" and "BF16 bits read as F16" in out


def _order(block: int) -> Any:
    """Return the order of values when nibbles are taken pair by pair and not by halves."""
    return np.arange(block).reshape(2, -1).T.reshape(-1)


def test_1621_nibbles_of_a_block_in_the_wrong_order(source: Path, tmp_path: Path) -> None:
    x = values(source)
    wrong = x.reshape(-1, 32)[:, _order(32)].reshape(x.shape)
    out, row = shown(
        source, rewritten(source, tmp_path / "b", {UP: ("F32", x.shape, wrong.tobytes())})
    )
    assert row["explanation"]["confirmed"] and row["cause"] == "endianness"
    assert "every block of 32 stand in another order" in out and "0, 2, 4, 6" in out


@pytest.mark.parametrize("role", ["q", "k"])
def test_nibbles_of_rotated_weights_are_no_pairs_of_a_head(
    role: str, source: Path, tmp_path: Path
) -> None:
    """Seen red: `gqa_mapping`, as blocks of the inputs were taken for heads of 32."""
    name = f"model.layers.0.self_attn.{role}_proj.weight"
    x = values(source, name)
    wrong = x.reshape(-1, 32)[:, _order(32)].reshape(x.shape)
    b = rewritten(source, tmp_path / "b", {name: ("F32", x.shape, wrong.tobytes())})
    (row,) = diff(source, b, tensors=[f"L0.attn_{role}.weight"]).tensors
    assert (row.cause, row.explanation and row.explanation.certainty) == ("endianness", "confirmed")


def cut_bf16(x: Any) -> Any:
    return (x.view(np.uint32) >> 16).astype("<u2").tobytes()


def cut_f16(x: Any) -> Any:
    toward = x.astype(np.float16)
    over = np.abs(toward.astype(np.float32)) > np.abs(x)
    bits = toward.view(np.uint16)
    return np.where(over, bits - 1, bits).astype("<u2").tobytes()


def flushed_f16(x: Any) -> Any:
    found = x.astype(np.float16)
    return np.where(np.abs(found) < 2.0**-14, np.float16(0), found).astype("<f2").tobytes()


def halved_f16(x: Any) -> Any:
    found = x.astype(np.float16).astype(np.float32)
    return np.where(np.abs(found) < 2.0**-14, found / 2, found).astype("<f4").tobytes()


@pytest.mark.parametrize(
    ("number", "encode", "dtype", "words"),
    [
        (2144, cut_bf16, "BF16", "cut to BF16 instead of rounded"),
        (2193, cut_f16, "F16", "cut to F16 instead of rounded"),
        (2193, flushed_f16, "F16", "subnormals flushed to zero"),
        (2129, halved_f16, "F32", "subnormals read at half their size"),
    ],
)
def test_roundings_that_are_not_to_nearest(
    number: int, encode: Callable[[Any], bytes], dtype: str, words: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(number)
    x = (rng.standard_normal((96, 64)) * 10.0 ** rng.uniform(-7, 0, (96, 64))).astype(np.float32)
    source = llama_folder(tmp_path / "a", "F32", ffn=96, replaced={UP: x.tobytes()})
    out, row = shown(source, rewritten(source, tmp_path / "b", {UP: (dtype, x.shape, encode(x))}))
    assert row["verdict"] == "DIFFERENT" and row["cause"] == "rounding"
    assert row["explanation"]["confirmed"] and words in out


def test_a_rounding_to_nearest_is_no_finding(source: Path, tmp_path: Path) -> None:
    x = values(source)
    _, row = shown(source, rewritten(source, tmp_path / "b", {UP: ("BF16", x.shape, rounded(x))}))
    assert row["verdict"] == "WITHIN" and row["explanation"] is None


def test_2392_a_conversion_that_dropped_the_tokenizer(demo_model: Path, tmp_path: Path) -> None:
    aprfmt.convert(demo_model, tmp_path / "m.apr")
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((demo_model / name).read_bytes())
    done = command("diff", tmp_path / "m.apr", bare, "--json")
    (row,) = done.json["tokenizer"]
    assert (row["name"], row["a"], row["b"]) == ("tokenizer", "present", "absent")
    assert "tokenizer: present | absent" in command("diff", tmp_path / "m.apr", bare, "-v").out


def test_2382_an_infinite_difference_is_not_equal(source: Path, tmp_path: Path) -> None:
    x = values(source).copy()
    x[3, 5] = np.inf
    out, row = shown(source, rewritten(source, tmp_path / "b", {UP: ("F32", x.shape, x.tobytes())}))
    assert row["verdict"] == "DIFFERENT" and row["stats"]["max_abs_diff"] == "Infinity"
    assert "all other bytes are equal" in out


def test_2394_a_dropped_tensor_stays_in_the_count(source: Path, tmp_path: Path) -> None:
    rows = tensors_of(source)
    del rows[UP]
    broken = tmp_path / "b"
    broken.mkdir()
    (broken / "config.json").write_text((source / "config.json").read_text())
    write_mixed(broken / "model.safetensors", rows)
    out, row = shown(source, broken)
    assert row["verdict"] == "ONLY_IN_A" and "21 tensors: 1 ONLY_IN_A, 20 SAME_BYTES" in out


@pytest.mark.parametrize("name", ["m.gguf", "m.apr"])
def test_2612_a_truncated_file_is_refused(name: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert(source, tmp_path / name)
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) // 20])
    done = command("diff", source, tmp_path / name)
    assert done.code == 2 and name in done.err


def test_1466_same_bytes_under_swapped_shapes_in_an_apr(source: Path, tmp_path: Path) -> None:
    """Only FFN tensors, only through one importer: equal bytes, both axes exchanged."""
    rows = tensors_of(source)
    names = [n for n in rows if ".mlp." in n]
    swapped = {n: (rows[n][0], rows[n][1][::-1], rows[n][2]) for n in names}
    broken = rewritten(source, tmp_path / "b", swapped)
    report = aprfmt.diff(source, broken)
    (finding,) = report.findings
    assert finding.cause == "transpose" and len(finding.keys) == len(names) == 6
    assert "only the shape" in finding.says and "in layers 0-1" in finding.says


def test_1922_a_native_payload_under_the_q8_0_label_is_not_called_equal(
    source: Path, tmp_path: Path
) -> None:
    """One scale for the whole tensor in front of the bytes, tagged as blocks with a scale each."""
    aprfmt.convert(source, tmp_path / "clean.gguf", encoding="Q8_0")

    def change(data: dict[str, bytes]) -> None:
        name = "blk.0.ffn_up.weight"
        x = values(source)
        scale = float(np.abs(x).max()) / 127
        flat = np.round(x / scale).astype(np.int8).tobytes()
        raw = struct.pack("<f", scale) + flat
        data[name] = (raw + bytes(len(data[name])))[: len(data[name])]

    broken = patched(tmp_path / "clean.gguf", tmp_path / "b.gguf", change)
    _, row = shown(source, broken)
    assert row["verdict"] == "DIFFERENT"
    assert row["explanation"] is None or not row["explanation"]["confirmed"]


def test_a_renamed_tensor_is_found_again(tmp_path: Path) -> None:
    """Names that no table maps: the union has both, and the values say that they are one."""
    rng = np.random.default_rng(0)
    x = {name: rng.standard_normal((8, 40)).astype(np.float32) for name in ("one", "two", "same")}
    for label, names in (("a", ("one", "two")), ("b", ("uno", "due"))):
        folder = tmp_path / label
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "no_such_model"}')
        data = {new: x[old] for old, new in zip(("one", "two"), names, strict=True)}
        data["same"] = x["same"]
        rows = {name: ("F32", v.shape, v.tobytes()) for name, v in data.items()}
        write_mixed(folder / "model.safetensors", rows)
    report = aprfmt.diff(tmp_path / "a", tmp_path / "b")
    pairs = {t.key: t.explanation.where[1] for t in report.tensors if t.explanation is not None}
    assert pairs == {"one": "uno", "two": "due", "uno": "one", "due": "two"}
    assert report.exit_code() == 1
