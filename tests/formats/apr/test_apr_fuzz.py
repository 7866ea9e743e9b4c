"""Damage to APR files: every flipped bit is found, every mutation ends in data or one error."""

import random
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from aprfmt.base.text_escape import escape
from aprfmt.errors import FormatError
from aprfmt.formats.apr.parse import parse
from aprfmt.formats.apr.reader import open_source
from aprfmt.formats.apr.writer import open_sink
from tests.conftest import ROOT
from tests.formats.apr_cases import LEGAL, MALFORMED, WARNED
from tests.formats.apr_files import AprFile, sealed

GOLDEN = ROOT / "fixtures" / "golden"
SEEDS = [case.data for case in (*LEGAL, *WARNED, *MALFORMED)] + [
    (GOLDEN / name).read_bytes() for name in ("every.apr", "carried.apr", "set-00000-of-00002.apr")
]


def try_parse(data: bytes) -> bool:
    """Parse; whatever opens must have every tensor inside the file, and clean text in its notes.

    Returns whether the whole was read.
    """
    whole = True
    for partial in (False, True):
        try:
            parsed = parse(memoryview(data), "t.apr", partial=partial)
        except FormatError as error:
            assert "\n" not in escape(str(error))
            whole = whole and partial
            continue
        assert parsed.metadata is not None
        for info in parsed.infos.values():
            end = info.offset + info.nbytes
            assert partial or end <= len(parsed.buffer)
            assert parsed.buffer[info.offset : end].nbytes <= info.nbytes
    return whole


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_mutations_end_in_data_or_one_error(data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(["set", "insert", "delete", "number"]))
        if kind == "set" and at < len(raw):
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(max_size=9))
        elif kind == "delete":
            del raw[at : at + data.draw(st.integers(1, 40))]
        else:
            value = data.draw(st.sampled_from([0, 1, 255, 1 << 31, (1 << 63) - 1, (1 << 64) - 1]))
            raw[at : at + 8] = value.to_bytes(8, "little")
    event("read" if try_parse(bytes(raw)) else "refused")
    if len(raw) >= 68:
        try_parse(sealed(bytes(raw)))  # past the header's checksum


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_under_an_intact_header(tail: bytes) -> None:
    head = bytearray(AprFile().build()[:64])
    try_parse(sealed(bytes(head) + tail + bytes(4)))
    for flag in (1, 2):
        head[6] = flag
        try_parse(sealed(bytes(head) + tail + bytes(4)))


@pytest.mark.parametrize("name", ["every.apr", "carried.apr"])
def test_a_thousand_flipped_bits_are_all_found(name: str, tmp_path: Path) -> None:
    data = (GOLDEN / name).read_bytes()
    path = tmp_path / "x.apr"
    rng = random.Random(20260101)
    positions = rng.sample(range(len(data) * 8), 1000)
    opened = 0
    for position in positions:
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            with open_source(path) as source:
                assert source.footer_matches() is False, position
                opened += 1
        except FormatError:
            pass
    assert 0 < opened < len(positions)  # some in the data, some in the index


def test_damage_is_not_sealed_by_an_unchanged_rewrite(tmp_path: Path) -> None:
    """A copy of a damaged file is as damaged; a changed tensor gets a footer that fits."""
    data = bytearray((GOLDEN / "every.apr").read_bytes())
    sound, damaged, out = tmp_path / "s.apr", tmp_path / "d.apr", tmp_path / "o.apr"
    sound.write_bytes(data)
    data[-300] ^= 4
    damaged.write_bytes(data)
    for path in (sound, damaged):
        with open_source(path) as source:
            sink = open_sink(out, like=source, force=True)
            with sink:
                infos = sink.order([tensor.info for tensor in source.tensors.values()])
                sink.plan(source.metadata, infos)
                for info in infos:
                    sink.write(info.name, [source.tensors[info.name].raw()])
        assert out.read_bytes() == path.read_bytes()
    with open_source(sound) as source:
        sink = open_sink(out, like=source, force=True)
        with sink:
            infos = sink.order([tensor.info for tensor in source.tensors.values()])
            sink.plan(source.metadata, infos)
            for info in infos:
                sink.write(info.name, [memoryview(bytes(info.nbytes))])
    with open_source(out) as again:
        assert again.footer_matches() is True
        with open_source(sound) as source:
            assert again.metadata_raw == source.metadata_raw
