"""The types values are written as: by table, by Python's type, as asked; and what is refused."""

import inspect
import math
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ConversionError
from aprfmt.formats.gguf.layout import TYPE_BY_ID, TYPE_BY_NAME
from aprfmt.formats.gguf.value_encoding import encode_key, encode_value, type_of
from tests.formats.gguf_writing import read, write

SAMPLES: dict[str, Any] = {
    "int": 8, "float": 0.5, "bool": True, "str": "s", "Sequence[int]": [1, 2],
    "Sequence[float]": [0.5, 1.0], "Sequence[str]": ["a"], "Sequence[bool]": [True, False],
    "int | Sequence[int]": 7, "int | Sequence[bool]": 7, "bytes": b"ab",
    "Sequence[str] | Sequence[bytes] | Sequence[bytearray]": ["a"],
    "Sequence[TokenType] | Sequence[int]": [gguf.TokenType.NORMAL, 2],
    "ExpertGatingFuncType": gguf.ExpertGatingFuncType.SIGMOID,
    "PoolingType": gguf.PoolingType.MEAN, "RopeScalingType": gguf.RopeScalingType.YARN,
    "str | Sequence[Mapping[str, str]]": "s",
}  # fmt: skip
GENERIC = {f"add_{kind.name.lower()}" for kind in GGUFValueType} | {
    "add_key_value", "add_tensor", "add_tensor_info", "add_shard_kv_data",
}  # fmt: skip
ADDERS = [
    name
    for name, _ in inspect.getmembers(GGUFWriter, inspect.isfunction)
    if name.startswith("add_") and name not in GENERIC
]


@pytest.mark.parametrize("adder", ADDERS)
def test_well_known_keys_have_the_types_of_upstreams_writer(adder: str) -> None:
    writer = GGUFWriter(None, "llama")
    writer.kv_data[0].clear()
    method = getattr(writer, adder)
    method(*(SAMPLES[p.annotation] for p in inspect.signature(method).parameters.values()))
    assert writer.kv_data[0]
    for key, stored in writer.kv_data[0].items():
        expected = stored.type.name.lower()
        if stored.type is GGUFValueType.ARRAY:
            element = stored.sub_type or (
                GGUFValueType.UINT8
                if isinstance(stored.value, bytes)
                else GGUFValueType.get_type(stored.value[0])
            )
            expected = f"array:{element.name.lower()}"
        assert (key, type_of(key, stored.value)) == (key, expected)
        if stored.type is GGUFValueType.FLOAT32:  # configurations say 10000 and mean 10000.0
            assert type_of(key, 10_000) == "float32"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "bool"), (0, "uint32"), (2**32 - 1, "uint32"), (2**32, "uint64"),
        (2**64 - 1, "uint64"), (-1, "int32"), (-(2**31), "int32"), (-(2**31) - 1, "int64"),
        (0.1, "float32"), ("", "string"), (b"\0", "array:uint8"), ([True], "array:bool"),
        ([1, -1], "array:int32"), ((2**31,), "array:uint32"), ([-1, 2**31], "array:int64"),
        ([2**63], "array:uint64"), ([1, 0.5], "array:float32"), (["a", "b"], "array:string"),
        ([b"a", "b"], "array:string"), ([[1], [2]], "array:array:int32"),
        ([[1], ["a"]], "array:array"), ([[[0.5]]], "array:array:array:float32"),
    ],
)  # fmt: skip
def test_types_of_plain_values(value: Any, expected: str) -> None:
    assert type_of("my.key", value) == expected


def test_tokenizer_scores_and_empty_lists() -> None:
    assert type_of("tokenizer.ggml.scores", [0, -1]) == "array:float32"
    assert type_of("tokenizer.ggml.merges", []) == "array:string"
    assert type_of("xx.attention.head_count", [4, 8]) == "array:int32"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "no type for NoneType"),
        ({"a": 1}, "no type for dict"),
        ([], "an empty list does not say what it is a list of"),
        ([1, "a"], "elements of one type, found int32, string"),
        ([True, 1], "elements of one type, found bool, int32"),
        ([[1], 1], "elements of one type"),
        (2**64, "18446744073709551616 to 18446744073709551616 fits none of uint32, uint64"),
        (1e300, "is not a float32: .*give a Typed value"),
        ("\ud800", "character 0 is a lone surrogate"),
        (TypedValue(256, "uint8"), "256 is not a uint8"),
        (TypedValue(-1, "uint32"), "-1 is not a uint32"),
        (TypedValue(1.5, "int32"), "1.5 is not a int32"),
        (TypedValue(1, "bool"), r"is 1 \(int\), its type is bool"),
        (TypedValue(True, "uint8"), r"is True \(bool\), its type is uint8"),
        (TypedValue("1", "float32"), "1 is not a float32"),
        (TypedValue(1, "string"), "is int, its type is string"),
        (TypedValue("abc", "array:string"), "is str, its type array:string"),
        (TypedValue(1, "array:int32"), "is int, its type array:int32"),
        (TypedValue([1, 300], "array:uint8"), "a value of the list is not a uint8"),
        (TypedValue([1], "array:f32"), "no element type 'f32'"),
        (TypedValue([1], "array"), "no element type ''"),
        (TypedValue(1, "uint128"), "no type 'uint128'"),
        (TypedValue(1, "int8:int8"), "no type 'int8:int8'"),
        (TypedValue([[1]], "array:array:uint8:x"), "no element type 'uint8:x'"),
    ],
    ids=str,
)
def test_refuses(value: Any, says: str) -> None:
    with pytest.raises(ConversionError, match=f"key 'my.key': .*{says}"):
        encode_value("my.key", value)


def test_lists_in_lists_have_an_end() -> None:
    deep: list[Any] = [1]
    for _ in range(15):
        deep = [deep]
    assert encode_value("k", deep)
    for value in ([deep], TypedValue([deep], "array:" * 17 + "int32")):
        with pytest.raises(ConversionError, match="deeper than 16"):
            encode_value("k", value)


@pytest.mark.parametrize("key", ["", "k" * 65_536, "\udc80"], ids=["empty", "long", "surrogate"])
def test_refuses_keys(key: str) -> None:
    with pytest.raises(ConversionError, match="key"):
        encode_key(key)


def bounds(name: str, bits: int) -> tuple[int, int]:
    return (0, 2**bits - 1) if name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    name: st.integers(*bounds(name, 8 * row.size))
    for name, row in TYPE_BY_NAME.items()
    if row.letter in tuple("BbHhIiQq")
} | {
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.binary(max_size=12).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
}
SCALARS = st.one_of(*(st.builds(TypedValue, v, st.just(name)) for name, v in NUMBERS.items()))
ARRAYS = st.one_of(
    *(
        st.builds(TypedValue, st.lists(values, max_size=70), st.just(f"array:{name}"))
        for name, values in NUMBERS.items()
    )
)
NESTED = st.lists(st.lists(NUMBERS["int16"], max_size=3), min_size=1, max_size=70).map(
    lambda v: TypedValue(v, "array:array:int16")
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None
)
@given(st.dictionaries(KEYS, SCALARS | ARRAYS | NESTED, max_size=6))
@example(
    {"k": TypedValue(-0.0, "float64"), "inf": TypedValue([math.inf, -math.inf], "array:float32")}
)
def test_values_come_back(tmp_path: Path, metadata: dict[str, TypedValue]) -> None:
    metadata.pop("general.alignment", None)
    path = tmp_path / "x.gguf"
    write(path, metadata, {}, force=True)
    found, types, _ = read(path)
    assert list(found.items()) == [(key, value.value) for key, value in metadata.items()]
    assert types == {key: value.type for key, value in metadata.items()}


def test_value_types_are_those_of_gguf() -> None:
    assert {row.id: row.name for row in TYPE_BY_ID.values()} == {
        kind.value: kind.name.lower() for kind in GGUFValueType
    }
