"""Folders in the dialects of other libraries: what is packed, what is left, what is said of it.

Seen red: a tied head that config.json does not leave out, a GGUF's scale of scales written beside
the weight that has it already, a mixture that loses it, floats counted among kept codes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.codecs.writer import Settings
from aprfmt.codecs.writers import WRITERS
from aprfmt.conversion import dialects
from aprfmt.conversion.dialects import convert_codes
from aprfmt.errors import ConversionError
from aprfmt.measure.records import EQUAL
from aprfmt.quantizing.mixture import SCHEMES
from tests.cli.run import aprfmt as command
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import llama_folder, tensors_of
from tests.models import save_tiny

DIALECTS = [name for name, row in SCHEMES.items() if row.dialect and not row.arch]
SMALL = [name for name in DIALECTS if not name.endswith(("-g128", "v2-g32"))]
FLOATS = {"F32", "F16", "BF16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama folder whose matrices have whole groups."""
    folder = tmp_path_factory.mktemp("dialects") / "source"
    return llama_folder(folder, "BF16", hidden=128, ffn=256, vocab=64)


def said(folder: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    section: Mapping[str, Any] = found["quantization_config"]
    return section


def left_out(section: Mapping[str, Any]) -> list[str] | None:
    """Return the modules that a section leaves as they are; None where it has no such list."""
    if section.get("quant_method") == "gptq":
        assert section["lm_head"] is False
        return ["lm_head"]
    return next(
        (section[key] for key in ("ignore", "modules_to_not_convert") if key in section), None
    )


def joined(name: str) -> list[str]:
    """Return the names of the weights of which engines make one matrix with this one."""
    for parts in ("qkv", ("gate", "up")):
        for part in parts:
            if f".{part}_proj." in name:
                return [name.replace(f".{part}_", f".{other}_") for other in parts]
    return [name]


@pytest.mark.parametrize("scheme", DIALECTS)
def test_matrices_are_rounded_and_the_rest_is_as_it_was(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    report = aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize=scheme)
    row = SCHEMES[scheme].options
    writer = WRITERS[row["writer"]]
    rows, plain = tensors_of(tmp_path / "q"), tensors_of(source)
    packed = [t for t in report.tensors if t.encoding == writer.encoding]
    assert len(packed) == 14 and all(t.how == "lossy" and t.changed for t in packed)
    assert sum(t.nbytes for t in report.tensors) == sum(len(raw) for _, _, raw in rows.values())
    names = {tensor.name for tensor in packed}
    for name in set(plain) - names:
        assert rows[name] == plain[name]
    assert not any("_proj" in name for name in set(plain) - names)
    assert left_out(said(tmp_path / "q")) in (["lm_head"], None)
    with aprfmt.open(source) as before, aprfmt.open(tmp_path / "q") as after:
        for name in names:
            values = before[name].numpy()
            how = Settings(row["size"] or values.shape[1], writer.scales or "BF16", row["version"])
            if "NVFP4" in scheme:  # one factor for what engines join
                how = how._replace(most=max(np.abs(before[n].numpy()).max() for n in joined(name)))
            expected = writer.quantize(values, how).values(0, len(values))
            np.testing.assert_array_equal(after[name].numpy(), expected)
    assert command("validate", tmp_path / "q").code == 0
    assert command("diff", source, tmp_path / "q", "--accept", "within").code == 0


@pytest.mark.parametrize("scheme", SMALL)
def test_a_dry_run_gives_the_exact_sizes(scheme: str, source: Path, tmp_path: Path) -> None:
    wishes: dict[str, Any] = {"to": "safetensors", "quantize": scheme}
    planned = aprfmt.convert(source, tmp_path / "q", dry_run=True, **wishes)
    assert not (tmp_path / "q").exists()
    written = aprfmt.convert(source, tmp_path / "q", **wishes)
    assert planned.sizes == written.sizes
    assert [(t.name, t.nbytes) for t in planned.tensors] == [
        (t.name, t.nbytes) for t in written.tensors
    ]


@pytest.mark.parametrize("scheme", SMALL)
def test_other_containers_and_threads_change_no_byte(
    scheme: str, source: Path, tmp_path: Path
) -> None:
    """From a GGUF in its own order of rows; through APR and back."""
    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize=scheme)
    aprfmt.convert(source, tmp_path / "f.gguf")
    aprfmt.convert(tmp_path / "f.gguf", tmp_path / "g", to="safetensors", quantize=scheme)
    aprfmt.convert(source, tmp_path / "q.apr", quantize=scheme)
    aprfmt.convert(tmp_path / "q.apr", tmp_path / "a", to="safetensors")
    expected = tensors_of(tmp_path / "q")
    for name in ("g", "a"):
        assert tensors_of(tmp_path / name) == expected, name
        assert said(tmp_path / name) == said(tmp_path / "q")
    if scheme == "MODELOPT-NVFP4":
        texts = [(tmp_path / n / "hf_quant_config.json").read_text() for n in ("q", "g", "a")]
        assert texts[0] == texts[1] == texts[2]
        held = json.loads(texts[0])["quantization"]
        assert (held["quant_algo"], held["exclude_modules"]) == ("W4A16_NVFP4", ["lm_head"])


def test_a_tied_head_is_left_out_by_name(demo_model: Path, tmp_path: Path) -> None:
    """A module of its own in the library, which has no tensor in the file."""
    aprfmt.convert(demo_model, tmp_path / "q", to="safetensors", quantize="COMPRESSED-FP8")
    assert "lm_head.weight" not in tensors_of(tmp_path / "q")
    assert said(tmp_path / "q")["ignore"] == ["lm_head"]


def test_experts_are_packed_one_by_one_and_routers_are_not(tmp_path: Path) -> None:
    save_tiny("mixtral", tmp_path / "m", "bfloat16", hidden_size=64, intermediate_size=64)
    aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize="COMPRESSED-NVFP4")
    rows = tensors_of(tmp_path / "q")
    experts = [n for n in rows if ".experts." in n and n.endswith("weight_packed")]
    assert experts and not any(n.endswith(".gate.weight_packed") for n in rows)
    gates = [n.removesuffix(".weight") for n in rows if n.endswith(".gate.weight")]
    assert set(said(tmp_path / "q")["ignore"]) == {"lm_head", *gates}
    assert aprfmt.diff(tmp_path / "m", tmp_path / "q").counts["DIFFERENT"] == 0


def test_what_has_no_whole_groups_is_left_as_it_is(tmp_path: Path) -> None:
    llama_folder(tmp_path / "m", "F16", hidden=64, ffn=96, vocab=64)
    aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize="MLX-4bit-g64")
    rows = tensors_of(tmp_path / "q")
    assert rows["model.layers.0.mlp.down_proj.weight"][0] == "F16"  # of 96 inputs
    assert rows["model.layers.0.mlp.up_proj.weight"][0] == "U32"
    done = command(
        "quantize",
        tmp_path / "m",
        tmp_path / "p",
        "--to",
        "safetensors",
        "--type",
        "AWQ-g32",
        "--tensor",
        "ffn_up.weight=F16",
    )
    assert done.code == 0
    found = said(tmp_path / "p")["modules_to_not_convert"]
    assert set(found) == {"lm_head", *(f"model.layers.{i}.mlp.up_proj" for i in range(2))}


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"quantize": "GPTQ-g32", "to": "gguf"}, "gguf has no code .*GPTQ.*dialects"),
        ({"quantize": "GPTQ-g32", "tensor_encodings": [("lm_head.weight", "NF4")]},
         "NF4 with GPTQ-g32 is a folder that no library loads"),
        ({"tensor_encodings": [("lm_head.weight", "GPTQ")]}, "GPTQ is not written here.*--type"),
    ],
)  # fmt: skip
def test_what_is_refused(wishes: dict[str, Any], says: str, source: Path, tmp_path: Path) -> None:
    to = wishes.pop("to", "safetensors")
    target = tmp_path / ("q.gguf" if to == "gguf" else "q")
    with pytest.raises(ConversionError, match=says):
        aprfmt.convert(source, target, to=to, **wishes)
    assert not target.exists()


def test_packed_weights_are_not_packed_again(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "mlx")
    with pytest.raises(ConversionError, match=r"quantized already.*MLX.*--allow-requantize"):
        aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize="GPTQ-g32")
    with pytest.raises(ConversionError, match="is packed as MLX already and would stay so"):
        aprfmt.convert(tmp_path / "m", tmp_path / "q", to="safetensors", quantize="MLX-4bit-g32")
    report = aprfmt.convert(
        tmp_path / "m", tmp_path / "q", to="safetensors", quantize="GPTQ-g32", allow_requantize=True
    )
    assert {t.encoding for t in report.tensors} == {"GPTQ", "F16"}
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert "quantization" not in config and said(tmp_path / "q")["quant_method"] == "gptq"


@pytest.mark.parametrize(
    "scheme", ["COMPRESSED-INT4-g32", "GPTQ-g32", "GPTQ-v2-g32", "AWQ-g32", "MLX-4bit-g32"]
)
def test_blocks_of_a_gguf_keep_their_codes(scheme: str, source: Path, tmp_path: Path) -> None:
    aprfmt.convert(
        source,
        tmp_path / "q4.gguf",
        quantize="Q4_0",
        pure=True,
        tensor_encodings=[("output", "F16"), ("token_embd", "F16")],
    )
    report = aprfmt.convert(tmp_path / "q4.gguf", tmp_path / "q", to="safetensors", quantize=scheme)
    rows = [t for t in report.tensors if t.groups]
    assert len(rows) == 14 and report.lossless
    assert all((t.how, t.inexact, t.source_encoding) == ("values", 0, "Q4_0") for t in rows)
    assert aprfmt.diff(tmp_path / "q4.gguf", tmp_path / "q").equal
    with pytest.raises(ConversionError, match="Q4_0; its groups are of 32 inputs, expected 128"):
        aprfmt.convert(
            tmp_path / "q4.gguf",
            tmp_path / "other",
            to="safetensors",
            quantize="COMPRESSED-INT4-g128",
        )


def test_nvfp4_goes_to_a_gguf_and_comes_back_byte_for_byte(tmp_path: Path) -> None:
    """ModelOpt's, with the scales of inputs, through every container."""
    write_folder(tmp_path / "m", "modelopt")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    wishes: dict[str, Any] = {"to": "safetensors", "quantize": "MODELOPT-NVFP4"}
    report = aprfmt.convert(tmp_path / "m.gguf", tmp_path / "back", **wishes)
    assert report.lossless and tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")
    assert said(tmp_path / "back")["quant_algo"] == "NVFP4"  # the scales of inputs are known
    assert aprfmt.diff(tmp_path / "m", tmp_path / "back").equal
    aprfmt.convert(tmp_path / "m.gguf", tmp_path / "m.apr")
    aprfmt.convert(tmp_path / "m.apr", tmp_path / "from_apr", **wishes)
    assert tensors_of(tmp_path / "from_apr") == tensors_of(tmp_path / "m")
    with pytest.raises(
        ConversionError, match=r"of 2304 groups in 11 weights change when their codes are kept"
    ):
        aprfmt.convert(
            tmp_path / "m.gguf", tmp_path / "c", to="safetensors", quantize="COMPRESSED-NVFP4"
        )
    counted = aprfmt.convert(
        tmp_path / "m.gguf",
        tmp_path / "c",
        to="safetensors",
        quantize="COMPRESSED-NVFP4",
        allow_inexact=True,
        drop=["*input_scale"],
    )
    assert sum(t.inexact for t in counted.tensors) > 0
    assert max(t.largest_error for t in counted.tensors) < 1e-5
    direct = aprfmt.convert(
        tmp_path / "m",
        tmp_path / "d",
        to="safetensors",
        quantize="COMPRESSED-NVFP4",
        allow_inexact=True,
        drop=["*input_scale"],
    )
    found = [{t.name: t.inexact for t in report.tensors} for report in (direct, counted)]
    assert found[0] == found[1]
    assert tensors_of(tmp_path / "d") == tensors_of(tmp_path / "c")


def test_what_is_left_as_floats_keeps_no_codes(tmp_path: Path) -> None:
    """Where weights that would change are decoded, nothing is inexact, and no flag is needed."""
    write_folder(tmp_path / "m", "modelopt")
    wishes: dict[str, Any] = {
        "to": "safetensors",
        "quantize": "COMPRESSED-NVFP4",
        "drop": ["*input_scale"],
    }
    counted = aprfmt.convert(tmp_path / "m", tmp_path / "c", allow_inexact=True, **wishes)
    changed = {tensor.name for tensor in counted.tensors if tensor.inexact}
    left = [(name, "F32") for name in sorted(changed)]
    report = aprfmt.convert(tmp_path / "m", tmp_path / "d", tensor_encodings=left, **wishes)
    found = {tensor.name: tensor for tensor in report.tensors}
    assert changed and {found[name].encoding for name in changed} == {"F32"}
    assert "COMPRESSED_PACKED_FLOAT" in {tensor.encoding for tensor in report.tensors}
    assert not any(tensor.inexact for tensor in report.tensors)
    compared = aprfmt.diff(tmp_path / "m", tmp_path / "d")
    assert {tensor.verdict for tensor in compared.tensors} <= EQUAL
    assert compared.exit_code() == 1  # the scales of activations that were dropped


def test_a_mixture_keeps_the_scale_beside_nvfp4_blocks(tmp_path: Path) -> None:
    """Quantized again, the values are those with their scale, which stands beside nothing then."""
    write_folder(tmp_path / "m", "modelopt")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    aprfmt.convert(
        tmp_path / "m.gguf",
        tmp_path / "q8.apr",
        quantize="Q8_0",
        allow_requantize=True,
        drop=["*input_scale"],
    )
    with aprfmt.open(tmp_path / "m") as before, aprfmt.open(tmp_path / "q8.apr") as after:
        assert not any(name.endswith(".scale") for name in after.source.tensors)
        for role, view in before.roles.items():
            if view.encoding == "MODELOPT":
                values = view.numpy()
                off = np.linalg.norm(after.roles[role].numpy() - values)
                assert off < 0.01 * np.linalg.norm(values), role


def test_mxfp4_of_a_gguf_goes_back_to_a_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "compressed_packed_float")
    aprfmt.convert(tmp_path / "m", tmp_path / "m.gguf")
    report = aprfmt.convert(
        tmp_path / "m.gguf", tmp_path / "back", to="safetensors", quantize="COMPRESSED-MXFP4"
    )
    assert report.lossless and tensors_of(tmp_path / "back") == tensors_of(tmp_path / "m")


def odd_source(folder: Path, hidden: int, ffn: int) -> Path:
    return llama_folder(folder, "BF16", hidden=hidden, ffn=ffn, vocab=64)


@pytest.mark.parametrize(
    ("scheme", "fitting"),
    [("AWQ-g128", "AWQ-g32"), ("MLX-4bit-g128", "MLX-4bit-g64"), ("GPTQ-v2-g128", "GPTQ-v2-g32")],
)
def test_groups_that_fit_hardly_any_matrix_are_refused_with_those_that_do(
    scheme: str, fitting: str, tmp_path: Path
) -> None:
    """Hidden size 192 is no multiple of 128: of seven matrices a layer only down is packed."""
    source = odd_source(tmp_path / "source", 192, 256)
    done = command("quantize", source, tmp_path / "q", "--to", "safetensors", "--type", scheme)
    assert done.code == 2 and not (tmp_path / "q").exists()
    layers = sum("down_proj.weight" in name for name in tensors_of(source))
    assert f"{scheme} packs {layers} of {7 * layers} matrices: {6 * layers} are not" in done.err
    assert f"{fitting} fits all" in done.err and len(done.err.splitlines()) == 1
    done = command("quantize", source, tmp_path / "q", "--to", "safetensors", "--type", fitting)
    assert (done.code, done.err) == (0, "")
    named = [f"--tensor={part}.weight=BF16" for part in ("*_proj",)]
    done = command(
        "quantize", source, tmp_path / "n", "--to", "safetensors", "--type", scheme, *named
    )
    assert (done.code, done.err) == (0, "")  # the user said so


@pytest.mark.parametrize("kept", ["Q8_0", "Q4_0"])
def test_groups_that_do_not_fit_are_the_reason_of_a_quantized_source_too(
    kept: str, tmp_path: Path
) -> None:
    """What stays has an encoding that safetensors has no code for: the groups are why it stays."""
    source = odd_source(tmp_path / "source", 192, 256)
    aprfmt.convert(source, tmp_path / "m.gguf", encoding=kept)
    done = command(
        "quantize", tmp_path / "m.gguf", tmp_path / "q", "--to", "safetensors", "--type",
        "AWQ-g128", "--allow-requantize",
    )  # fmt: skip
    assert done.code == 2 and "AWQ-g32 fits all" in done.err and done.err.count("\n") == 1


def test_few_matrices_that_do_not_fit_are_counted_in_a_warning(tmp_path: Path) -> None:
    source = odd_source(tmp_path / "source", 128, 96)
    done = command("quantize", source, tmp_path / "q", "--to", "safetensors", "--type", "AWQ-g128")
    layers = sum("down_proj.weight" in name for name in tensors_of(source))
    assert done.code == 0
    assert f"AWQ-g128 packs {6 * layers} of {7 * layers} matrices: {layers} are not" in done.err
    assert "AWQ-g32 fits all" in done.err


@pytest.mark.parametrize("scheme", DIALECTS)
def test_what_is_written_says_how_it_was_rounded(scheme: str, source: Path, tmp_path: Path) -> None:
    from aprfmt.conversion.quantize_options import NEAREST

    aprfmt.convert(source, tmp_path / "q", to="safetensors", quantize=scheme)
    with aprfmt.open(tmp_path / "q") as model:
        assert model.metadata["aprfmt.quantize.rounding"] == NEAREST
        assert model.metadata["aprfmt.quantize.type"] == scheme


def test_help_says_first_that_nothing_is_calibrated() -> None:
    first = command("quantize", "--help").out.split("\n\n")[1]
    assert "GPTQ, AWQ" in first and "nearest" in first and "uncalibrated" in first


@pytest.mark.parametrize("name", sorted({row.base for row in SCHEMES.values() if row.dialect}))
def test_explain_says_of_an_encoding_what_writes_it(name: str) -> None:
    rows = command("explain", name, "--json").json["found"]
    text = next(row["text"] for row in rows if row["section"] == "encoding")
    assert "never written" not in text
    types = [kind for kind, row in SCHEMES.items() if row.dialect and row.base == name]
    assert text.endswith(f"written by `quantize --type` {', '.join(types)}.")


def test_codes_are_kept_only_of_one_packed_tensor_whose_rows_stay(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def kept(output: Any, writer: Any, settings: Any) -> Any:
        found = convert_codes(output, writer, settings)
        if isinstance(found, str):
            asked.append(found)
            return found
        shape, (one,) = output.info.shape, output.sources
        for changes in (
            {"steps": ("a step",)},
            {"info": replace(output.info, shape=(1, *shape))},
            {"info": replace(output.info, shape=(1, *shape)), "steps": ("a step",)},
            {"sources": ()},
            {"sources": (one, one)},
            {"sources": (SimpleNamespace(info=output.info, packed=None),)},
        ):
            asked.append(convert_codes(replace(output, **changes), writer, settings))
        return found

    monkeypatch.setattr(dialects, "convert_codes", kept)
    aprfmt.convert(source, tmp_path / "gptq", to="safetensors", quantize="GPTQ-g32")
    assert set(asked) == {""}, "floats have no codes"
    asked.clear()
    aprfmt.convert(tmp_path / "gptq", tmp_path / "awq", to="safetensors", quantize="AWQ-g32")
    assert set(asked) == {"its rows are laid out anew"}
