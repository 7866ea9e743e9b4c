"""Packed weights that are wrong: one line with the tensor, what is claimed and what is there."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFReader

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import (
    of_inputs,
    stored_row,
    write_folder,
    write_gpt_oss,
    write_mixture,
)
from tests.conversion.folders import tensors_of, write_mixed

AT = "model.layers.0.self_attn.q_proj."
Rows = dict[str, tuple[str, tuple[int, ...], bytes]]
Change = Callable[[Rows], None]


def without(suffix: str) -> Change:
    def change(rows: Rows) -> None:
        del rows[AT + suffix]

    return change


def turned(suffix: str) -> Change:
    def change(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + suffix]
        rows[AT + suffix] = (encoding, shape[::-1], raw)

    return change


def filled(suffix: str, value: float) -> Change:
    """Return a change of one scale."""

    def change(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + suffix]
        kind: Any = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": np.float32,
                     "F16": np.float16}[encoding]  # fmt: skip
        values = np.frombuffer(raw, kind).copy()
        values[-1] = value
        rows[AT + suffix] = (encoding, shape, values.tobytes())

    return change


def zeros(suffix: str) -> Change:
    """Return a change to scales that were never filled."""

    def change(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + suffix]
        rows[AT + suffix] = (encoding, shape, bytes(len(raw)))

    return change


def halved(suffix: str) -> Change:
    """Return a change to groups of twice as many inputs."""

    def change(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + suffix]
        rows[AT + suffix] = (encoding, (*shape[:-1], shape[-1] // 2), raw[: len(raw) // 2])

    return change


def doubled(suffix: str) -> Change:
    """Return a change to twice as many scales, each of them twice."""

    def change(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + suffix]
        values = np.frombuffer(raw, np.float32).repeat(2)
        rows[AT + suffix] = (encoding, (*shape[:-1], shape[-1] * 2), values.tobytes())

    return change


def relabelled(suffix: str, encoding: str) -> Change:
    def change(rows: Rows) -> None:
        rows[AT + suffix] = (encoding, *rows[AT + suffix][1:])

    return change


def plain(rows: Rows) -> None:
    """Put an unpacked FP8 weight in the place of the packed one, its scales left."""
    rows[AT + "weight"] = stored_row(np.ones((64, 64), ml_dtypes.float8_e4m3fn))


def said(**keys: Any) -> Mapping[str, Any]:
    return keys


def weights(**keys: Any) -> Mapping[str, Any]:
    """Return a section's groups with one whose weights are of 4 bits but for what `keys` say."""
    stated = {"symmetric": True, "num_bits": keys.pop("num_bits", 4)} | keys
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": stated}}}


_ASYMMETRIC = {"group_0": {"targets": ["Linear"], "weights": {
    "symmetric": False, "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
}}}  # fmt: skip
# dialect, change of the stored tensors, keys changed in config.json, what the line says
FAULTS: list[tuple[str, Change | None, Mapping[str, Any], str]] = [
    ("modelopt", without("weight_scale"), {}, "modelopt weight without .*weight_scale;"),
    ("modelopt", without("weight_scale_2"), {}, "'.weight_scale_2' is missing"),
    ("modelopt", turned("weight_scale"), {}, r"shape \[4, 64\], expected \[64, 4\]"),
    ("modelopt", halved("weight_scale"), {},
     r"config says NVFP4, group_size 16: .* shape \[64, 2\], expected \[64, 4\]"),
    ("modelopt", filled("weight_scale", np.nan), {}, r"holds nan at \[63, 3\]"),
    ("modelopt", filled("weight_scale", -1), {}, r"holds -1.0 at \[63, 3\]"),
    ("modelopt", filled("weight_scale_2", np.inf), {}, "'.weight_scale_2' holds inf"),
    ("modelopt", relabelled("weight_scale", "U8"), {}, "is U8, expected F8_E4M3"),
    ("modelopt", plain, {}, "config says NVFP4, part '.weight' is F8_E4M3, expected U8"),
    ("modelopt", None, said(quant_algo="FP8"), "config says FP8, part '.weight' is U8"),
    ("modelopt", None, said(group_size=32), "config says group_size 32, expected"),
    ("modelopt", None, said(quant_algo="W4A16_AWQ", group_size=48),
     "config says W4A16_AWQ, group_size 48: part '.weight' has rows of 32, no whole groups"),
    ("modelopt", None, said(quant_algo="MXFP8"), "config says group_size 16"),
    ("modelopt", None, said(exclude_modules="lm_head"), "expected a list of names"),
    ("modelopt", None, said(quant_algo="MIXED_PRECISION"), "quantized_layers"),
    ("fp8_block", without("weight_scale_inv"), {}, "fp8_block weight without .*weight_scale_inv"),
    ("fp8_block", filled("weight_scale_inv", np.nan), {}, "holds nan"),
    ("fp8_block", filled("weight_scale_inv", -2), {}, "holds -2.0"),
    ("fp8_block", None, said(weight_block_size=[0, 1]), "expected two numbers"),
    ("mlx", without("scales"), {}, "mlx weight without .*scales;"),
    ("mlx", filled("scales", np.nan), {}, "holds nan"),
    ("compressed_packed_float", without("weight_scale"), {}, "without .*weight_scale"),
    ("compressed_packed_float", turned("weight_scale"), {}, r"shape \[2, 64\], expected \[64, 2\]"),
    ("compressed_packed_float", None, said(format="nvfp4-pack-quantized"), r"expected \[64, 4\]"),
    ("compressed_packed_float", None, said(format="pack-quantized"), "without .*weight_shape"),
    ("compressed_packed_float", None, said(format="float-quantized"), "it is compressed_plain"),
    ("compressed_packed", halved("weight_scale"), {}, r"group_size 32, .*shape \[64, 1\]"),
    ("compressed_packed", None, said(format="mxfp4-pack-quantized"), "expected U8"),
    ("compressed_packed", None, said(ignore=["re:.*q_proj"]), "left as it is"),
    ("compressed_packed", None, said(ignore=["re:(a"]), "no regular expression"),
    ("compressed_packed", None, said(config_groups=[]), "config_groups"),
    ("compressed_plain", filled("weight_scale", np.nan), {}, "holds nan"),
    ("compressed_plain", without("weight_scale"), {}, "without .*weight_scale"),
    ("compressed_plain", relabelled("weight", "I8"), {}, "config says type 'float', .* is I8"),
    ("compressed_plain", doubled("weight_scale"), {}, r"strategy 'channel', .*shape \[64, 2\]"),
    ("compressed_packed", None, said(config_groups=_ASYMMETRIC),
     "config says symmetric false: part '.weight_zero_point' is missing"),
    ("compressed_packed", None, weights(strategy="tensor"),
     r"config says strategy 'tensor', .* shape \[64, 2\]; expected \[1\]"),
    ("compressed_packed", None, weights(strategy="group", group_size=-1),
     r"config says group_size -1, .* shape \[64, 2\]; expected \[64, 1\]"),
    ("compressed_packed", None, weights(type="float"), "config says type 'float', part .* 'int'"),
    ("compressed_packed_float", None, weights(num_bits=8), "config says num_bits 8, .* has 4"),
    ("compressed_packed_float", None, weights(type="int"), "config says type 'int', .* 'float'"),
    ("compressed_packed_float", None, weights(group_size=16), "config says group_size 16, .* 32"),
    ("compressed_plain", None, weights(num_bits=4), "config says num_bits 4, F8_E4M3 .* has 8"),
    ("awq", None, said(group_size=48), "group_size 48, part '.qweight' has 64 inputs"),
    ("gptq", None, said(checkpoint_format="marlin"), "'marlin' is not one we decode"),
    ("gptq", halved("scales"), {}, r"'.scales' has shape"),
    ("gptq", filled("scales", np.nan), {}, r"holds nan at \[1, 63\], expected scales .* finite"),
    ("gptq", None, said(group_size=64), "says group_size 64, part '.scales' has 2 groups; exp"),
    ("awq", filled("scales", np.inf), {}, r"'.scales' holds inf at \[1, 63\]"),
    ("compressed_packed", filled("weight_scale", np.nan), {}, r"holds nan at \[63, 1\]"),
    ("awq", turned("scales"), {}, r"'.scales' has shape"),
    ("gptq", zeros("scales"), {}, "'.scales' is 0 everywhere, and the codes in '.qweight' differ"),
    ("awq", zeros("scales"), {}, "'.scales' is 0 everywhere"),
    ("fp8_block", zeros("weight_scale_inv"), {}, "'.weight_scale_inv' is 0 everywhere"),
    ("mlx", zeros("scales"), {}, "'.scales' is 0 everywhere"),
    ("compressed_packed", zeros("weight_scale"), {}, "'.weight_scale' is 0 everywhere"),
    ("compressed_packed_float", zeros("weight_scale"), {}, "'.weight_scale' is 0 everywhere"),
    ("compressed_plain", zeros("weight_scale"), {}, "'.weight_scale' is 0 everywhere"),
    ("modelopt", zeros("weight_scale"), {}, "'.weight_scale' is 0 everywhere"),
    ("modelopt", zeros("weight_scale_2"), {}, "'.weight_scale_2' is 0 everywhere"),
    ("compressed_packed", None, weights(strategy="rows", group_size=32),
     r"config says strategy 'rows', the scales have shape \[64, 2\]; expected tensor or channel"),
    ("compressed_plain", None, weights(num_bits=8, strategy="token"), "says strategy 'token', the"),
    ("compressed_packed_float", None, weights(strategy="channel"), "says strategy 'channel', the"),
]  # fmt: skip


def broken(folder: Path, dialect: str, change: Change | None, keys: Mapping[str, Any]) -> None:
    write_folder(folder, dialect)
    if change is not None:
        rows = dict(tensors_of(folder))
        change(rows)
        write_mixed(folder / "model.safetensors", rows)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("quantization_config", {}).update(keys) if keys else None
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("dialect", "change", "keys", "says"), FAULTS, ids=[f"{f[0]}-{f[3]}" for f in FAULTS]
)
def test_converting_names_tensor_claim_and_fact(
    dialect: str, change: Change | None, keys: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    broken(tmp_path / "m", dialect, change, keys)
    gone = [f"--drop={each}" for each in of_inputs(tmp_path / "m")]
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32", *gone)
    assert done.code == 2 and not done.out, done.out
    assert re.search(says, done.err), done.err
    assert len(done.err.strip().splitlines()) == 1
    whole = (
        "config" in says
        or "strategy" in says
        or "list" in says
        or "layers" in says
        or "regular" in says
    )
    assert whole or "_proj." in done.err
    assert not (tmp_path / "m.gguf").exists()


CAUSES = {
    "without": "scales_missing", "turned": "scales_shape", "halved": "scales_shape",
    "filled": "scales_invalid", "zeros": "scales_invalid", "doubled": "scales_shape",
}  # fmt: skip


@pytest.mark.parametrize(
    ("dialect", "change", "keys", "says"), FAULTS, ids=[f"{f[0]}-{f[3]}" for f in FAULTS]
)
def test_a_good_copy_tells_which_part_or_claim_is_wrong(
    dialect: str, change: Change | None, keys: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "good", dialect)
    broken(tmp_path / "m", dialect, change, keys)
    kind = "" if change is None else change.__qualname__.partition(".")[0]
    for sides in (("good", "m"), ("m", "good")):
        found = diagnose(*(str(tmp_path / side) for side in sides), ids=(1, 2, 3))
        assert (found.verdict, found.exit_code) == ("bug", 1)
        assert found.cause == CAUSES.get(kind, "packing_claim")
        other_codes = change is plain or "is I8" in says  # what they were is in no copy
        assert found.confidence == ("unconfirmed" if other_codes else "confirmed")
        assert {row.side for row in found.findings} == {"AB"[sides.index("m")]}


@pytest.mark.parametrize(
    ("dialect", "change", "keys"),
    [("awq", turned("scales"), {}), ("modelopt", relabelled("weight_scale", "U8"), {}),
     ("gptq", None, {"checkpoint_format": "marlin"})],
)  # fmt: skip
def test_equal_bytes_that_do_not_decode_are_not_the_same(
    dialect: str, change: Change | None, keys: Mapping[str, Any], tmp_path: Path
) -> None:
    write_folder(tmp_path / "good", dialect)
    broken(tmp_path / "m", dialect, change, keys)
    done = aprfmt("diff", tmp_path / "good", tmp_path / "m")
    assert done.code == 2 and "UNREADABLE" in done.out


@pytest.mark.parametrize(
    ("dialect", "change", "keys", "says"), FAULTS[:3], ids=[f[3] for f in FAULTS[:3]]
)
def test_inspect_shows_the_rest(
    dialect: str, change: Change | None, keys: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    broken(tmp_path / "m", dialect, change, keys)
    found = aprfmt("inspect", tmp_path / "m", "--json").json
    assert "q_proj" in json.dumps(found["damage"])
    assert found["encodings"]["MODELOPT"]["tensors"] == 13


def test_a_weight_of_zeros_may_have_scales_of_zero(tmp_path: Path) -> None:
    """And groups of zeros, beside others; no scale of a part of the weight is held to be lost."""

    def none(rows: Rows) -> None:
        for suffix in ("weight", "weight_scale", "weight_scale_2"):
            zeros(suffix)(rows)

    def half(rows: Rows) -> None:
        encoding, shape, raw = rows[AT + "weight_scale"]
        rows[AT + "weight_scale"] = (encoding, shape, bytes(len(raw) // 2) + raw[len(raw) // 2 :])

    for name, change in (("none", none), ("half", half)):
        broken(tmp_path / name, "modelopt", change, {})
        assert aprfmt("convert", tmp_path / name, tmp_path / f"{name}.gguf").code == 0
        done = aprfmt("convert", tmp_path / name, tmp_path / f"{name}.apr", "--encoding", "F32",
                      "--drop", "*input_scale")  # fmt: skip
        assert done.code == 0, done.err


def inputs_in(path: Path) -> list[str]:
    """Return the names of the scales of activations that a GGUF file holds."""
    return [each.name for each in GGUFReader(path).tensors if each.name.endswith("input_scale")]


@pytest.mark.parametrize("value", [-0.25, np.nan, np.inf])
def test_a_scale_of_activations_that_nothing_is_divided_by(value: float, tmp_path: Path) -> None:
    write_folder(tmp_path / "good", "modelopt")
    broken(tmp_path / "m", "modelopt", filled("input_scale", value), {})
    name = f"{AT}input_scale"
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf")
    assert done.code == 2
    assert f"{AT}weight: part '.input_scale' holds {value} at []" in done.err
    assert f"--drop {name}" in done.err
    found = aprfmt("validate", tmp_path / "m")
    assert found.code == 1 and f"'.input_scale' holds {value}" in found.out
    judged = diagnose(str(tmp_path / "good"), str(tmp_path / "m"), ids=(1, 2, 3))
    assert (judged.cause, judged.confidence) == ("scales_invalid", "confirmed")
    for more in ([], ["--encoding", "F32"]):  # what depends on it is left out
        out = tmp_path / "m.gguf"
        assert aprfmt("convert", tmp_path / "m", out, "--drop", "*input_scale", *more).code == 0
        assert not inputs_in(out)
        out.unlink()


def test_scales_of_activations_are_dropped_where_asked(tmp_path: Path) -> None:
    """Before, `--drop` was recorded, and GGUF had them all the same."""
    write_folder(tmp_path / "m", "modelopt")
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--json",
                  "--drop", "model.layers.0.*input_scale")  # fmt: skip
    fates = {row["name"]: row["fate"] for row in done.json["accounted"]["entries"]}
    for layer, fate in ((0, "dropped"), (1, "copied")):
        name = f"model.layers.{layer}.self_attn.q_proj.input_scale"
        assert fates[name] == fate
    inputs = inputs_in(tmp_path / "m.gguf")
    assert len(inputs) == 7 and all(name.startswith("blk.1.") for name in inputs)


def test_a_scale_of_two_experts_fits_no_single_weight(tmp_path: Path) -> None:
    def make(shape: tuple[int, int], rng: np.random.Generator) -> Any:
        codes = np.zeros((shape[0], shape[1] // 2), np.uint8)
        scale = np.ones((shape[0], shape[1] // 16), ml_dtypes.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale,
                "weight_scale_2": np.ones(2, np.float32)}, codes  # fmt: skip

    section = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    write_mixture(tmp_path / "m", lambda name: make if "_proj" in name else None,
                  {"quantization_config": section})  # fmt: skip
    done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32")
    assert done.code == 2 and "'.weight_scale_2' has shape [2]" in done.err


@pytest.mark.parametrize(
    ("dialect", "section", "says"),
    [
        ("gptq", None, r"nothing of quantization, .*14 weights in 56 tensors \(\S+\.g_idx I32 "),
        ("compressed_packed", None, r"nothing of quantization, .*14 weights in 42 tensors"),
        ("mlx", None, r"nothing of quantization, .*14 weights in 42 tensors \(\S+\.biases F16 "),
        ("modelopt", None, r"nothing of quantization, .*14 weights in 56 tensors"),
        ("fp8_block", None, r"nothing of quantization, .*14 weights in 28 tensors \(\S+ F8_E4M3"),
        ("fp8_block", {"quant_method": "gptq", "bits": 4, "group_size": 32},
         r"'gptq' of config.json is not decoded here \(none of them is a tensor of gptq"),
    ],
)  # fmt: skip
def test_packed_weights_that_no_claim_is_about_are_named(
    dialect: str, section: Mapping[str, Any] | None, says: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "m", dialect)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    config |= {} if section is None else {"quantization_config": section}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    for out in (["m.gguf"], ["f32", "--to", "safetensors"]):
        done = aprfmt("convert", tmp_path / "m", tmp_path / out[0], *out[1:], "--encoding", "F32")
        assert done.code == 2 and re.search(says, done.err), done.err
        assert len(done.err.strip().splitlines()) == 1
    for command in (["logits", tmp_path / "m", "--ids", "1,2"], ["validate", tmp_path / "m"]):
        assert aprfmt(*command).code in (1, 2)
    found = aprfmt("inspect", tmp_path / "m")
    said = found.out + found.err
    assert "missing" not in said and "no role" not in said
    assert said.index("14 weights packed ") < said.index(": 14 weights in ")
    config |= {"model_type": "zork", "architectures": ["ZorkForCausalLM"]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    done = aprfmt("convert", tmp_path / "m", tmp_path / "g", "--to", "safetensors",
                  "--encoding", "F32")  # fmt: skip
    assert done.code == 2 and re.search(says, done.err), done.err


def test_an_exponent_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "m")
    rows = dict(tensors_of(tmp_path / "m"))
    name = "model.layers.0.mlp.experts.down_proj_scales"
    encoding, shape, raw = rows[name]
    rows[name] = (encoding, shape, raw[:-1] + b"\xff")
    write_mixed(tmp_path / "m" / "model.safetensors", rows)
    for more in ([], ["--encoding", "F32"]):
        done = aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", *more)
        assert done.code == 2 and re.search(r"'_scales' holds nan at \[5, 63, 0\]", done.err)


@pytest.mark.parametrize("dialect", ["gptq", "awq", "mlx"])
def test_scales_of_whole_numbers_may_be_negative(dialect: str, tmp_path: Path) -> None:
    """As MLX's are where the largest magnitude is negative, AutoRound's and those of Q4_0."""
    broken(tmp_path / "m", dialect, filled("scales", -1), {})
    assert aprfmt("convert", tmp_path / "m", tmp_path / "m.gguf", "--encoding", "F32").code == 0
