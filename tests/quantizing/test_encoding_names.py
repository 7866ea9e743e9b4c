"""Names of types, encodings and dtypes as the field spells them, and what is said of wrong ones."""

from pathlib import Path
from typing import Any

import gguf
import pytest

import aprfmt as package
from aprfmt.base.encoding_names import (
    ALIASES,
    TYPE_ALIASES,
    encoding_name,
    find_name,
    fold_name,
    nearest_names,
    unknown_name_message,
)
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import encodable_names
from aprfmt.conversion.options import Options
from aprfmt.inference.device import DTYPES, dtype_name, parse_run
from aprfmt.quantizing.mixture import SCHEMES, offered_schemes, scheme_of, type_name
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("names") / "m", "BF16")


def spellings(name: str) -> list[str]:
    return [
        name,
        name.lower(),
        name.title(),
        name.replace("_", "-"),
        name.replace("-", "_").lower(),
        f" {name} ",
        *([] if fold_name(name) == "q8kr8" else [name.replace("_", "").replace("-", "")]),
    ]


@pytest.mark.parametrize("name", ENCODINGS)
def test_an_encoding_is_taken_in_any_case(name: str) -> None:
    assert {encoding_name(each) for each in spellings(name)} == {name}


@pytest.mark.parametrize("name", SCHEMES)
def test_a_type_is_taken_in_any_case(name: str) -> None:
    assert {type_name(each) for each in spellings(name)} == {name}


def test_no_two_names_are_one_when_folded() -> None:
    """Only ik_llama.cpp has two types that differ by a separator; that one is then needed."""
    for names, alike in ((list(ENCODINGS), 1), ([*SCHEMES, *offered_schemes()], 0)):
        assert len({fold_name(name) for name in names}) == len(names) - alike
    assert find_name("q8-kr8", ENCODINGS) == "Q8_KR8" and find_name("q8kr8", ENCODINGS) is None


def test_an_alias_is_no_other_name_and_means_one_that_exists() -> None:
    assert all(fold_name(alias) == alias for alias in (*ALIASES, *TYPE_ALIASES))
    assert not set(ALIASES) & {fold_name(name) for name in ENCODINGS}
    assert not set(TYPE_ALIASES) & {fold_name(name) for name in SCHEMES}
    assert set(ALIASES.values()) <= set(ENCODINGS) and set(TYPE_ALIASES.values()) <= set(SCHEMES)


def test_dtypes_of_torch_and_numpy_are_the_encoding_of_that_dtype() -> None:
    """The oracle is each library: what it calls a type of so many bytes and bits of mantissa."""
    import ml_dtypes
    import numpy as np
    import torch

    finfo: Any = ml_dtypes.finfo
    for text in ("half", "float16", "bfloat16", "float", "float32", "double", "float64",
                 "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"):  # fmt: skip
        theirs = torch.finfo(getattr(torch, text))
        for spelled in (text, f"torch.{text}", text.upper()):
            ours: Any = finfo(np.dtype(ENCODINGS[encoding_name(spelled)].numpy))
            assert (ours.bits, float(ours.max), float(ours.eps)) == (
                theirs.bits, theirs.max, theirs.eps,
            )  # fmt: skip
    for text in ("half", "single", "double"):
        assert np.dtype(ENCODINGS[encoding_name(text)].numpy) == np.dtype(text)


@pytest.mark.parametrize(
    "name", [t.name.split("_", 1)[1] for t in gguf.LlamaFileType if t.name != "GUESSED"]
)
def test_every_type_of_llama_cpp_is_taken_or_said_not_to_be_offered(name: str) -> None:
    for spelled in (name, name.lower(), f"MOSTLY_{name}"):
        if type_name(spelled) in SCHEMES:
            continue
        says = unknown_name_message(spelled, SCHEMES)
        assert "a type of llama-quantize, not offered here" in says
        assert len(says.rpartition("near names: ")[2].split(", ")) == 3


@pytest.mark.parametrize("name", [t.name for t in gguf.GGMLQuantizationType])
def test_every_tensor_type_of_ggml_is_taken_or_said_not_to_be_written(
    name: str, source: Path, tmp_path: Path
) -> None:
    assert encoding_name(name.lower()) == name
    if name in encodable_names():
        return
    done = aprfmt("convert", source, tmp_path / "a.apr", "--encoding", name.lower())
    plain = name in ("I8", "I16", "I32", "I64")
    assert done.code == 2 and done.err.count("\n") == 1
    assert plain or "not written here; near names: " in done.err
    assert not (tmp_path / "a.apr").exists()


@pytest.mark.parametrize("alias", TYPE_ALIASES)
def test_a_bare_k_quant_is_what_llama_quantize_takes_it_for(alias: str) -> None:
    number = scheme_of(type_name(alias)).file_type
    assert number is not None
    assert gguf.LlamaFileType(number).name == f"MOSTLY_{TYPE_ALIASES[alias]}"
    assert type_name(TYPE_ALIASES[alias].rpartition("_")[0]) == TYPE_ALIASES[alias]


@pytest.mark.parametrize(
    ("text", "near"),
    [("Q4_K_X", "Q4_K_M"), ("awq", "AWQ-g128"), ("gptq", "GPTQ-g32"), ("fp8", "COMPRESSED-FP8"),
     ("mlx", "MLX-4bit-g64"), ("q5km_", "Q5_K_M"), ("mxfp4", "GPT-OSS-MXFP4")],
)  # fmt: skip
def test_near_names_hold_what_was_meant(text: str, near: str) -> None:
    found = nearest_names(text, SCHEMES)
    assert (near in found and len(found) == 3) or type_name(text) == near


def test_commands_take_the_spellings(source: Path, tmp_path: Path) -> None:
    encoding = "blk.0.ffn_up.weight"
    for number, (args, wanted) in enumerate(
        [
            (["convert", "--encoding", "fp16"], "F16"),
            (["convert", "--encoding", "torch.float32"], "F32"),
            (["convert", "--tensor", "*ffn_up*=half"], "F16"),
            (["convert", "--quantize", "q8_0"], "Q8_0"),
            (["quantize", "--type", "f16"], "F16"),
            (["quantize", "--type", "q8-0"], "Q8_0"),
        ]
    ):
        out = tmp_path / f"{number}.gguf"
        done = aprfmt(args[0], source, out, *args[1:])
        assert done.code == 0, done.err
        with package.open(out) as model:
            assert model[encoding].encoding == wanted


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["quantize", "--type", "IQ3_M"], "--type IQ3_M: is a type of llama-quantize, not offered"),
        (["quantize", "--type", "q4_k_x"], "--type q4_k_x: is not known; near names: "),
        (["quantize", "--type", "awq"], "--type awq: names several; near names: AWQ-g32, AWQ-g128"),
        (["convert", "--encoding", "f19"], "f19: is not known; near names: "),
        (["convert", "--encoding", "Q4KM"], "is a mixture of several encodings"),
        (["convert", "--tensor", "blk=MXFP4_MOE"], "is a type of llama-quantize, not offered"),
        (["convert", "--encoding", "iq2_xxs"], "IQ2_XXS is read and copied, not written here"),
    ],
)
def test_a_wrong_name_is_one_line(args: list[str], says: str, source: Path, tmp_path: Path) -> None:
    done = aprfmt(args[0], source, tmp_path / "a.gguf", *args[1:])
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "a.gguf").exists()


def test_the_python_options_take_them_too() -> None:
    made = Options(encoding="half", tensor_encodings=[("a", "bf16")], quantize="q4_k")
    assert (made.encoding, list(made.tensor_encodings), made.quantize) == (
        "F16", [("a", "BF16")], "Q4_K_M",
    )  # fmt: skip
    assert Options(encoding="nonsense").encoding == "nonsense"  # refused with the model's name


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_a_run_are_taken_as_the_field_spells_them(dtype: str) -> None:
    (name,) = [name for name in ("F32", "F64", "BF16", "F16") if ENCODINGS[name].numpy == dtype]
    words = [name, name.lower(), dtype.upper(), f"torch.{dtype}"]
    words += [alias for alias, meant in ALIASES.items() if meant == name]
    assert {dtype_name(word) for word in words} == {dtype}
    assert {parse_run(f"numpy:cpu:{word}").dtype for word in words} == {dtype}
    assert find_name(dtype, ["F8_E4M3"]) is None


@pytest.mark.parametrize("text", ["fp16", "HALF", "q4_k_m", "Q4KM", "nf4", "bf16"])
def test_explain_takes_them(text: str) -> None:
    done = aprfmt("explain", text)
    assert done.code == 0 and ("(encoding)" in done.out or "(type)" in done.out)


def test_parity_takes_them_too(source: Path) -> None:
    line = ("parity", source, "--between", "numpy", "numpy:fp64", "--ids", "1,2", "--through")
    done = aprfmt(*line, "half", "--json")
    assert done.code in (0, 1) and '"through": "F16"' in done.out
    wrong = aprfmt(*line, "IQ3_M")
    assert wrong.code == 2 and "--through IQ3_M: is a type of llama-quantize" in wrong.err


def test_whole_numbers_are_no_encoding_of_weights() -> None:
    kinds = {ENCODINGS[name].numpy.rstrip("0123456789") for name in encodable_names()}
    assert not kinds & {"int", "uint", "bool", "complex"}
    assert {"F32", "Q8_0"} <= set(encodable_names())


OFFERED = ["Q4_K", "Q4_0", "Q8_0", "F16"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("q4", "names several; near names: "), ("Q8", "is not known; near names: "),
        ("IQ3_M", "is a type of llama-quantize, not offered here; near names: "),
        ("iq3m", "is a type of llama-quantize, not offered here; near names: "),
        ("F8_E4M3", "is an encoding that is read, not offered here; near names: "),
        ("torch.float64", "is F64, an encoding that is read, not offered here; near names: "),
        ("Z9", "is not known; near names: "),
    ],
)  # fmt: skip
def test_a_name_that_is_not_offered_says_why(text: str, says: str) -> None:
    assert unknown_name_message(text, OFFERED).startswith(says)
