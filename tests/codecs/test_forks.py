"""Types of ik_llama.cpp: bit-equal to what its own functions decode, and told from their rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.fork_types import CONTESTED, DECODED, MEASURED
from aprfmt.codecs import CODECS, codec, decode, decode_chunked
from aprfmt.codecs.row_codec import RowCodec
from aprfmt.errors import CodecError, UnsupportedError
from tests.codecs.data import FORKED, assert_same_numbers

FILE = Path(__file__).resolve().parents[2] / "fixtures" / "forks" / "ik_llama.safetensors"
HEADED = [name for name, *_, head in DECODED if head]


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    return dict(load_file(FILE))


def test_the_file_has_every_type_and_the_commit_it_is_of(judged: dict[str, Any]) -> None:
    assert set(judged) == {*FORKED, *(f"{name}|=" for name in FORKED)}
    raw = FILE.read_bytes()
    said = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    assert said["library"] == "ik_llama.cpp" and len(said["version"]) == 40


@pytest.mark.parametrize("name", FORKED)
def test_decoded_as_the_fork_decodes(name: str, judged: dict[str, Any]) -> None:
    raw, expected = judged[name], judged[f"{name}|="]
    row_bytes = ENCODINGS[name].row_bytes(expected.shape)
    assert raw.shape == (len(expected), row_bytes)
    assert ENCODINGS[name].nbytes(expected.shape) == raw.size
    found = decode(name, raw.tobytes(), expected.shape, row_bytes=row_bytes)
    assert_same_numbers(found, expected)
    # Without the columns they follow from the headers; one row alone decodes as in the whole.
    assert_same_numbers(decode(name, raw[1].tobytes(), expected[1].shape), expected[1])


@pytest.mark.parametrize("name", HEADED)
def test_rows_come_one_by_one(name: str, judged: dict[str, Any]) -> None:
    raw, expected = judged[name], judged[f"{name}|="]
    out = np.empty(expected.shape[1], np.float32)
    rows = [row.copy() for row in decode_chunked(name, raw.tobytes(), expected.shape, out)]
    assert len(rows) == len(expected)
    assert_same_numbers(np.stack(rows), expected)
    with pytest.raises(CodecError, match=f"output holds {out.size - 1} elements"):
        list(decode_chunked(name, raw.tobytes(), expected.shape, out[:-1].copy()))


@pytest.mark.parametrize("name", HEADED)
def test_bytes_without_headers_are_refused(name: str, judged: dict[str, Any]) -> None:
    raw, expected = judged[name], judged[f"{name}|="]
    bare = raw[:, ENCODINGS[name].row_header :].tobytes()
    with pytest.raises(CodecError, match=rf"{name}: found {len(bare)} bytes, expected {raw.size}"):
        decode(name, bare, expected.shape)


@pytest.mark.parametrize(
    "name", [n for n in FORKED if n not in ("IQ2_KL", "IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT")]
)
def test_a_step_is_no_less_than_the_gaps_of_its_block(name: str, judged: dict[str, Any]) -> None:
    """Of each row the widest gap between values that are there: no table is denser than it says."""
    raw, expected = judged[name], judged[f"{name}|="]
    found = CODECS[name]
    bound = found if not isinstance(found, RowCodec) else found.of_rows(expected.shape[1])
    steps = bound.steps({"": raw.tobytes()}, expected.size)
    assert steps is not None and steps.shape == (expected.size,) and (steps > 0).all()
    alone = [bound.steps({"": row.tobytes()}, expected.shape[1]) for row in raw]
    np.testing.assert_array_equal(steps.reshape(expected.shape), alone)
    for values, step in zip(expected, steps.reshape(expected.shape), strict=True):
        block = ENCODINGS[name].block_size
        for start in range(0, len(values), block):
            here = values[start : start + block].reshape(-1, 16)
            gaps = [np.diff(np.unique(part)).min(initial=np.inf) for part in here]
            assert min(gaps) <= step[start] * 1.0001


@pytest.mark.parametrize(("name", "measure"), [(row[0], row[2]) for row in MEASURED])
def test_what_is_not_decoded_says_its_measures(name: str, measure: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"copied, not decoded: ik_llama\.cpp") as caught:
        codec(name)
    assert str(measure) in str(caught.value)


def test_ids_and_names_are_given_once() -> None:
    ids = [row.ggml for row in ENCODINGS.values() if row.ggml is not None]
    assert len(ids) == len(set(ids))
    for number, claims in CONTESTED.items():
        assert claims and all(claim.measure.nbytes((1, 1024)) for claim in claims), number
