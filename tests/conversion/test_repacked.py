"""Packed weights that `convert` puts into blocks of GGUF without decoding them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import aprfmt
from aprfmt.checks import validate
from aprfmt.conversion.options import Options
from aprfmt.conversion.repacking import find_repacks
from aprfmt.errors import CodecError, ConversionError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.formats.mapped_file import MappedFile
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_floats import nvfp4
from tests.conversion.dialect_folders import (
    FOLDERS,
    Array,
    Maker,
    packed,
    stored_row,
    write_folder,
    write_gpt_oss,
    write_mixture,
)
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.models import save_tiny

EXACT = {"compressed_packed_float": "MXFP4", "mlx": "Q4_1", "modelopt": "NVFP4"}
COUNTED = {"gptq": "Q4_1", "awq": "Q4_1", "compressed_packed": "Q4_0"}


@pytest.mark.parametrize("dialect", EXACT)
def test_an_exact_one_is_taken_and_every_value_is_equal(dialect: str, tmp_path: Path) -> None:
    expected = write_folder(tmp_path / "m", dialect)
    done = command("convert", tmp_path / "m", tmp_path / "m.gguf", "--json").json
    rows = [t for t in done["tensors"] if t["source_encoding"] == dialect.upper()]
    assert len(rows) == len(expected) and done["counts"]["lossy"] == 0
    for row in rows:
        assert (row["encoding"], row["how"], row["inexact"]) == (EXACT[dialect], "values", 0)
        assert row["groups"] > 0 and row["largest_error"] == 0
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == EXACT[dialect]
    with aprfmt.open(tmp_path / "m.gguf") as model:
        for name, values in expected.items():
            key = f"L{name.split('.')[2]}.{ROLES[name.split('.')[-2]]}.weight"
            np.testing.assert_array_equal(model.roles[key].numpy(), values)


ROLES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


@pytest.mark.parametrize("dialect", COUNTED)
def test_one_that_is_not_is_counted_and_needs_the_flag(dialect: str, tmp_path: Path) -> None:
    expected = write_folder(tmp_path / "m", dialect)
    said = command("convert", tmp_path / "m", tmp_path / "m.gguf")
    assert said.code == 2
    assert f"groups in {len(expected)} weights change when {dialect.upper()}" in said.err
    assert "--allow-inexact" in said.err and not (tmp_path / "m.gguf").exists()
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", allow_inexact=True)
    rows = [t for t in report.tensors if t.groups]
    assert {t.encoding for t in rows} == {COUNTED[dialect]} and not report.lossless
    with aprfmt.open(tmp_path / "m.gguf") as model:
        for name, values in expected.items():
            key = f"L{name.split('.')[2]}.{ROLES[name.split('.')[-2]]}.weight"
            found = model.roles[key].numpy().astype(np.float64)
            off = np.abs(found - values).reshape(-1, 32)
            row = next(t for t in rows if t.name == model.roles[key].names[0])
            assert row.largest_error == off.max() and row.inexact == off.any(axis=1).sum()
            assert off.max() < np.abs(values).max() * 1e-3


def _symmetric(make: Maker) -> Maker:
    """Return a maker whose zero points are all 8."""

    def made(shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
        parts, _ = make(shape, rng)
        kept = dict(parts)
        stored = 0x77777777 if "g_idx" in parts else 0x88888888 - (1 << 32)
        kept["qzeros"] = np.full_like(parts["qzeros"], stored)
        return kept, np.empty(shape, np.float32)

    return made


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_symmetric_ones_are_exact_as_q4_0(method: str, tmp_path: Path) -> None:
    make, key, section = FOLDERS[method]
    symmetric = _symmetric(make)
    write_mixture(tmp_path / "m", lambda n: symmetric if "_proj" in n else None, {key: section})
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    assert report.lossless and {t.encoding for t in report.tensors if t.groups} == {"Q4_0"}
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal


def test_asked_for_it_needs_no_flag(tmp_path: Path) -> None:
    """`--encoding` says that values may change; packed ones are still not searched again."""
    write_folder(tmp_path / "m", "gptq")
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", encoding="Q4_1")
    rows = [t for t in report.tensors if t.source_encoding == "GPTQ"]
    assert rows and all(t.groups and t.encoding == "Q4_1" for t in rows)
    one = aprfmt.convert(
        tmp_path / "m",
        tmp_path / "one.gguf",
        allow_inexact=True,
        tensor_encodings=[("ffn_up.weight", "F32")],
    )
    kinds = {t.name: (t.encoding, t.groups > 0) for t in one.tensors}
    assert kinds["blk.0.ffn_up.weight"] == ("F32", False)
    assert kinds["blk.0.ffn_down.weight"] == ("Q4_1", True)


def test_why_a_weight_is_not_repacked_is_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "gptq")
    rows = tensors_of(tmp_path / "m")
    for name in [n for n in rows if n.endswith("g_idx")]:
        kind, shape, raw = rows[name]
        rows[name] = kind, shape, np.frombuffer(raw, "<i4")[::-1].tobytes()
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    with pytest.raises(ConversionError, match="Q4_0: its inputs are grouped in another order"):
        aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", allow_inexact=True)


def test_a_scale_that_is_no_number_is_the_error_itself(tmp_path: Path) -> None:
    """Not that a format has no code for the encoding: no flag would help."""
    write_folder(tmp_path / "m", "modelopt")
    rows, name = tensors_of(tmp_path / "m"), "model.layers.0.mlp.up_proj.weight"
    kind, shape, raw = rows[f"{name}_scale"]
    rows[f"{name}_scale"] = kind, shape, b"\x7f" + raw[1:]
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    with pytest.raises(ConversionError) as stop:
        aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    expected = f"{name}: modelopt: part '.weight_scale' holds nan at [0, 0]"
    assert str(stop.value).startswith(expected) and "--encoding" not in str(stop.value)


def test_a_global_scale_stands_beside_the_blocks_and_goes_on(tmp_path: Path) -> None:
    """As llama.cpp names it, in F32; from there to other containers, and back to a float."""
    write_folder(tmp_path / "m", "modelopt")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    rows = tensors_of(tmp_path / "m")
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    second = rows["model.layers.1.mlp.up_proj.weight_scale_2"][2]
    assert reader["blk.1.ffn_up.scale"].data.tobytes() == second
    assert reader["blk.1.ffn_up.input_scale"].data.tolist() == [0.25]
    report = validate(tmp_path / "m.gguf", against=tmp_path / "m")
    assert [row.name for row in report.checks if row.outcome == "FAIL"] == []
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "again.gguf")
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "back.gguf")
    for name in ("again.gguf", "m.apr", "back.gguf"):
        assert aprfmt.diff(tmp_path / "m", tmp_path / name).equal
    back = {t.name: t for t in gguf.GGUFReader(tmp_path / "back.gguf").tensors}
    assert all(np.array_equal(back[n].data, t.data) for n, t in reader.items())
    with pytest.raises(ConversionError, match="safetensors has no code"):
        aprfmt.convert(tmp_path / "m.gguf", tmp_path / "hf", to="safetensors")
    done = aprfmt.convert(
        tmp_path / "m.gguf",
        tmp_path / "hf",
        to="safetensors",
        encoding="F32",
        drop=["*input_scale"],
    )
    assert done.lossless and aprfmt.diff(tmp_path / "m", tmp_path / "hf").equal


def test_gpt_oss_experts_are_blocks_of_gguf(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "m")
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    assert {t.encoding for t in report.tensors if t.groups} == {"MXFP4"} and report.lossless
    assert aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal


STACKS = "GPT-OSS-MXFP4"


@pytest.mark.parametrize("way", ["m.gguf", "m.apr"])
def test_gpt_oss_comes_back_from_blocks_byte_for_byte(way: str, tmp_path: Path) -> None:
    """Experts of a GGUF are gate, up and down; the folder's stacks interleave two of them."""
    write_gpt_oss(tmp_path / "m")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    wishes: dict[str, Any] = {"quantize": STACKS}
    if way == "m.apr":
        done = aprfmt.convert(tmp_path / "m.gguf", tmp_path / way, **wishes)
        assert done.lossless and {t.how for t in done.tensors if t.groups} == {"values"}
        wishes = {}
    aprfmt.convert(tmp_path / way, tmp_path / "back", to="safetensors", **wishes)
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")
    section = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "mxfp4" and "lm_head" in section["modules_to_not_convert"]


def test_transformers_loads_the_stacks_we_write(tmp_path: Path) -> None:
    import transformers

    library: Any = transformers
    save_tiny("gpt_oss", tmp_path / "m", "bfloat16", hidden_size=64, intermediate_size=32)
    report = aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize=STACKS)
    assert {t.how for t in report.tensors if t.encoding == "GPT_OSS"} == {"lossy"}
    theirs = library.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype="float32", quantization_config=library.Mxfp4Config(dequantize=True)
    ).state_dict()
    with aprfmt.open(tmp_path / "q") as model, aprfmt.open(tmp_path / "m") as before:
        names = [name for name, view in model.items() if view.parts]
        assert len(names) == 2 * int(model.hyper["n_layers"])
        for name in names:
            found = model[name].numpy().swapaxes(1, 2)
            np.testing.assert_array_equal(theirs[name].float().numpy(), found)
            off = np.abs(found - before[name].numpy())
            assert 0 < off.max() <= np.abs(before[name].numpy()).max() / 4


def test_blocks_that_would_be_cut_need_a_flag(tmp_path: Path) -> None:
    """A target that stores matrices turned: values were quantized a second time without a word."""
    write_gpt_oss(tmp_path / "m")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    with pytest.raises(ConversionError, match="8 tensors are stored otherwise there"):
        aprfmt.convert(tmp_path / "m.gguf", tmp_path / "m.apr")
    save_tiny("gpt2", tmp_path / "g", n_embd=64)
    aprfmt.convert(tmp_path / "g", tmp_path / "g.gguf", encoding="Q8_0")
    with pytest.raises(ConversionError, match=r"cut, decoded and quantized again: .*\(Q8_0\)"):
        aprfmt.convert(tmp_path / "g.gguf", tmp_path / "g.apr")
    done = aprfmt.convert(tmp_path / "g.gguf", tmp_path / "g.apr", allow_requantize=True)
    assert not done.lossless
    exact = aprfmt.convert(tmp_path / "g.gguf", tmp_path / "f.apr", encoding="F32")
    assert exact.lossless and aprfmt.diff(tmp_path / "g.gguf", tmp_path / "f.apr").equal


def test_stacks_are_for_one_architecture(tmp_path: Path) -> None:
    llama_folder(tmp_path / "m", "BF16")
    with pytest.raises(UsageError, match="is how gpt-oss is stored; the model is llama"):
        aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize=STACKS)


def test_experts_are_stacked_with_a_scale_each(tmp_path: Path) -> None:
    """One tensor an expert becomes one of all, with a scale for each in their order."""
    folder = tmp_path / "m"
    save_tiny("mixtral", folder, "bfloat16", hidden_size=64, intermediate_size=64)
    rng, rows = np.random.default_rng(0), {}
    for name, row in tensors_of(folder).items():
        if ".experts." not in name or len(row[1]) != 2:
            rows[name] = row
            continue
        parts, _ = nvfp4(row[1], rng)
        stem = name.removesuffix("weight")
        rows.update({stem + suffix: stored_row(held) for suffix, held in parts.items()})
    write_mixed(folder / "model.safetensors", rows)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "*self_attn*"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    seconds = [
        n for n in rows if n.startswith("model.layers.0") and n.endswith("w1.weight_scale_2")
    ]
    assert len(seconds) > 1
    report = aprfmt.convert(folder, tmp_path / "m.gguf")
    assert report.lossless and aprfmt.diff(folder, tmp_path / "m.gguf").equal
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    found = stored["blk.0.ffn_gate_exps.scale"].data.tobytes()
    assert found == b"".join(rows[name][2] for name in sorted(seconds))
    assert stored["blk.0.ffn_gate_exps.weight"].tensor_type.name == "NVFP4"


def test_a_scale_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "modelopt")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.apr", encoding="NVFP4")
    with aprfmt.open(tmp_path / "m.apr") as model:
        assert model["model.layers.0.mlp.up_proj.weight"].encoding == "NVFP4"
        assert len(model) == 21
    writer = gguf.GGUFWriter(tmp_path / "bad.gguf", "llama")
    writer.add_tensor(
        "blk.0.ffn_up.weight",
        np.zeros((2, 36), np.uint8),
        raw_dtype=gguf.GGMLQuantizationType.NVFP4,
    )
    writer.add_tensor("blk.0.ffn_up.scale", np.zeros(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CodecError, match=r"ffn_up.scale is F32 \[3\]; expected 1 numbers in F32"):
        aprfmt.open(tmp_path / "bad.gguf")


def test_a_dry_run_says_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "mlx")
    dry = command("convert", tmp_path / "m", tmp_path / "m.gguf", "--dry-run", "--json").json
    done = command("convert", tmp_path / "m", tmp_path / "m.gguf", "--json").json
    assert dry["tensors"] == done["tensors"] and dry["sizes"] == done["sizes"]
    config = json.loads(aprfmt.open(tmp_path / "m.gguf").metadata["aprfmt.hf_config"])
    assert "quantization" not in config


def test_integers_of_a_row_are_groups_of_it(tmp_path: Path) -> None:
    """compressed-tensors with a scale a row: as many blocks of Q4_0 have the same scale."""
    _, key, section = FOLDERS["compressed_packed"]

    def rows(shape: tuple[int, int], rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
        parts, _ = packed(shape, rng)
        scale = (rng.integers(1, 64, (shape[0], 1)) / 64).astype(np.float32)
        return {**parts, "weight_scale": scale}, np.empty(shape)

    said = json.loads(json.dumps(section))
    said["config_groups"]["group_0"]["weights"] |= {"strategy": "channel", "group_size": None}
    write_mixture(tmp_path / "m", lambda n: rows if "_proj" in n else None, {key: said})
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    assert report.lossless and aprfmt.diff(tmp_path / "m", tmp_path / "m.gguf").equal


@pytest.mark.parametrize("dialect", ["fp8_block", "compressed_plain"])
def test_fp8_as_bf16_has_a_way_back(dialect: str, tmp_path: Path) -> None:
    """Rounded to BF16, every code is still the nearest one under its scale, unless it overflows."""
    expected = write_folder(tmp_path / "m", dialect)
    done = command("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "BF16")
    assert "every code comes back" in done.out
    rows = tensors_of(tmp_path / "m")
    name = next(n for n in rows if n.endswith(("up_proj.weight_scale_inv", "up_proj.weight_scale")))
    kind, shape, raw = rows[name]
    rows[name] = kind, shape, (np.frombuffer(raw, "<f4") * np.float32(1e-41)).tobytes()
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    report = aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", encoding="BF16", force=True)
    lost = {t.name: t.lost_codes for t in report.tensors if t.lost_codes is not None}
    assert len(lost) == len(expected)
    assert [n for n, count in lost.items() if count] == ["blk.0.ffn_up.weight"]


def test_factors_of_inputs_are_part_of_the_values_and_not_of_blocks(tmp_path: Path) -> None:
    """NVFP4_AWQ: GGUF has no place for pre_quant_scale, and one that is lost is refused."""

    def make(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Any, Array]:
        parts, values = nvfp4(shape, rng)
        smooth = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
        return {**parts, "pre_quant_scale": smooth}, values * smooth

    section = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "group_size": 16}
    expected = write_mixture(tmp_path / "m", lambda name: make if "up_proj" in name else None,
                             {"quantization_config": section})  # fmt: skip
    done = command("convert", tmp_path / "m", tmp_path / "m.gguf")
    assert done.code == 2
    assert "(MODELOPT; NVFP4: part '.pre_quant_scale' multiplies its inputs)" in done.err
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf", encoding="F32", drop=["*input_scale"])
    with aprfmt.open(tmp_path / "m.gguf") as model:
        for name, values in expected.items():
            found = model.roles[f"L{name.split('.')[2]}.ffn_up.weight"].numpy()
            np.testing.assert_array_equal(found, values)
    rows = dict(tensors_of(tmp_path / "m"))
    for name in [name for name in rows if name.endswith("pre_quant_scale")]:
        encoding, shape, raw = rows[name]
        rows[name] = (encoding, shape, bytes(len(raw)))
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    done = command("convert", tmp_path / "m", tmp_path / "n.gguf", "--encoding", "F32",
                   "--drop", "*input_scale")  # fmt: skip
    assert done.code == 2 and "up_proj.weight: modelopt: part '.pre_quant_scale' is 0" in done.err


def test_a_plan_keeps_no_pages_of_the_weights_it_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m", "gptq")
    dropped: list[int] = []
    real = MappedFile.drop

    def drop(self: MappedFile, start: int, stop: int) -> None:
        dropped.append(start)
        real(self, start, stop)

    monkeypatch.setattr(MappedFile, "drop", drop)
    with aprfmt.open(tmp_path / "m") as model:
        parts = {part.info.offset for view in model.values() if view.parts
                 for part in view.stored[0].parts.values()}  # fmt: skip
        find_repacks(model, FORMATS["gguf"], Options(allow_inexact=True), copied=False)
    assert len(parts) > 20 and parts <= set(dropped)
