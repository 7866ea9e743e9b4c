"""Metadata as the reference's serializer spells it."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.protocols import TypedValue
from aprfmt.errors import ConversionError
from aprfmt.formats.apr.metadata import (
    ALIASES,
    TYPED,
    canonical_metadata,
    float32_text,
    float64_text,
    metadata_json,
    type_mismatches,
)
from tests.formats.apr_writing import info, round_trip


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (1.0, "1.0"), (-1.5, "-1.5"), (10000.0, "10000.0"),
        (1000000.0, "1000000.0"), (1e-5, "0.00001"), (1e-6, "0.000001"), (1e-7, "1e-7"),
        (1e12, "1000000000000.0"), (1e13, "1e13"), (1.5e-6, "0.0000015"),
        (1.17549435e-38, "1.1754944e-38"), (3.4028235e38, "3.4028235e38"), (1e-45, "1e-45"),
        (16777216.0, "16777216.0"), (0.1, "0.1"), (1.2345678, "1.2345678"),
    ],
)  # fmt: skip
def test_float32_spelling(value: float, text: str) -> None:
    assert float32_text(value, "t", "k") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (9.999999974752427e-7, "9.999999974752427e-7"),
        (1e-5, "0.00001"), (1e-6, "1e-6"), (1.2e-5, "0.000012"), (1e15, "1000000000000000.0"),
        (1e16, "1e16"), (123456789012345680.0, "1.2345678901234568e17"), (5e-324, "5e-324"),
        (-2.0999999046325684, "-2.0999999046325684"), (1.7976931348623157e308,
        "1.7976931348623157e308"), (100.0, "100.0"), (1e300, "1e300"),
    ],
)  # fmt: skip
def test_float64_spelling(value: float, text: str) -> None:
    assert float64_text(value, "t", "k") == text


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_is_the_shortest_that_reads_back(value: float) -> None:
    text = float32_text(value, "t", "k")
    assert struct.pack("<f", float(text)) == struct.pack("<f", value)
    digits = text.lower().partition("e")[0].replace("-", "").replace(".", "").strip("0")
    shortest = np.format_float_scientific(np.float32(value), unique=True, trim="0")
    theirs = shortest.partition("e")[0].replace("-", "").replace(".", "").strip("0")
    assert len(digits) <= len(theirs)


def test_float32_powers_of_two_are_shortest_too() -> None:
    for power in range(-149, 128):
        value = math.ldexp(1.0, power)
        text = float32_text(value, "t", "k")
        assert struct.pack("<f", float(text)) == struct.pack("<f", value), power
        digits = text.partition("e")[0].replace(".", "").strip("0")
        theirs = np.format_float_scientific(np.float32(value), unique=True, trim="0")
        assert len(digits) == len(theirs.partition("e")[0].replace(".", "").strip("0")), power


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float64_reads_back(value: float) -> None:
    again = json.loads(float64_text(value, "t", "k"))
    assert struct.pack("<d", again) == struct.pack("<d", value)


def test_typed_keys_come_first_in_their_order_and_the_rest_as_given() -> None:
    given_order = {
        "zeta": 1,
        "rms_norm_eps": 1e-6,
        "alpha": [1.5, "x", True, None],
        "rope_theta": 10000,
        "name": "n",
        "special_tokens": {"eos_token": "</s>", "bos_token": "<s>"},
        "hidden_size": 8,
    }
    assert metadata_json(given_order, "t").decode() == (
        '{"model_type":"","name":"n","license":null,"data_source":null,"data_license":null,'
        '"total_size":0,"param_count":0,"special_tokens":{"bos_token":"<s>","eos_token":"</s>",'
        '"unk_token":null,"pad_token":null,"im_start_token":null,"im_end_token":null},'
        '"hidden_size":8,"rope_theta":10000.0,"rms_norm_eps":0.000001,'
        '"zeta":1,"alpha":[1.5,"x",true,null]}'
    )


def test_strings_are_escaped_as_the_reference_does() -> None:
    text = 'é日\U0001f600"\\/\b\t\n\f\r\x00\x1f\x7f'
    raw = metadata_json({"k": text}, "t").decode()
    assert raw.endswith('"k":"é日\U0001f600\\"\\\\/\\b\\t\\n\\f\\r\\u0000\\u001f\x7f"}')


def test_bytes_that_are_no_text_survive(tmp_path: Path) -> None:
    text = b"\xff\xfe broken \xc3".decode("utf-8", "surrogateescape") + "é"
    metadata = {"tokenizer.vocabulary": ["a", text], "k": text}
    read = round_trip(tmp_path / "x.apr", [info("a", (1,))], metadata)
    assert read["tokenizer.vocabulary"] == ["a", text] and read["k"] == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner,
                                                               max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), JSON))
def test_custom_values_read_back_equal(metadata: dict[str, Any]) -> None:
    fixed = {*(key.name for key in TYPED), *ALIASES}
    fixed |= {alias for group in ALIASES.values() for alias in group}
    metadata = {key: value for key, value in metadata.items() if key not in fixed}
    read = json.loads(metadata_json(canonical_metadata(metadata, "t"), "t"))
    assert json.dumps({key: read[key] for key in metadata}) == json.dumps(metadata)
    assert list(read)[-len(metadata) :] == list(metadata) or not metadata


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, -math.inf], {"a": math.nan}], ids=str)
def test_what_json_cannot_say_is_refused(value: Any) -> None:
    with pytest.raises(ConversionError, match="'k' holds"):
        metadata_json({"k": value}, "t")
    with pytest.raises(ConversionError, match="bytes"):
        metadata_json({"k": b"raw"}, "t")
    with pytest.raises(ConversionError, match="inf"):
        metadata_json({"rope_theta": 1e300}, "t")


def test_nesting_is_bounded() -> None:
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ConversionError, match="nests deeper"):
        metadata_json({"k": deep}, "t")


@pytest.mark.parametrize("field", ALIASES)
def test_one_name_a_field(field: str) -> None:
    alias = ALIASES[field][0]
    assert canonical_metadata({field: 4, alias: 4}, "t") == {field: 4}
    assert canonical_metadata({field: 4, alias: None}, "t") == {field: 4}
    assert canonical_metadata({field: None, alias: 4}, "t") == {alias: 4}
    with pytest.raises(ConversionError, match=f"{alias} = 5"):
        canonical_metadata({field: 4, alias: 5}, "t")


def test_typed_values_are_unwrapped() -> None:
    assert canonical_metadata({"hidden_size": TypedValue(4, "uint32")}, "t") == {"hidden_size": 4}


@pytest.mark.parametrize("key", TYPED, ids=lambda key: key.name)
def test_typed_keys_of_another_type_are_refused(key: Any) -> None:
    wrong = [1] if key.kind != "object" else "text"
    assert type_mismatches({key.name: wrong})
    assert not type_mismatches({key.name: None})
    with pytest.raises(ConversionError, match=key.name):
        canonical_metadata({key.name: wrong}, "t")
    if "integer" in key.kind:
        for value in (-1, True, 1.0, 1 << 64):
            assert type_mismatches({key.name: value})
