"""Random damage gives a FormatError, or a file whose copy is equal, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from aprfmt.errors import ConversionError, FormatError, UnsupportedError
from aprfmt.formats.gguf.parse import parse
from aprfmt.formats.gguf.reader import open_source
from tests.formats.gguf_cases import LEGAL, MALFORMED, WARNED
from tests.formats.gguf_files import ARR, DATA, STR, File
from tests.formats.gguf_writing import plain, read, rewrite


def seed(order: str) -> bytes:
    """Return a small file with one of everything."""
    file = File(order=order).key("general.architecture", STR, "llama")
    for kind in (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12):
        file.key(f"k{kind}", kind, 1).raw_key(f"a{kind}", ARR, file.array(kind, [0, 1]))
    file.raw_key("s", ARR, file.array(STR, ["a", "", "bc"])).key("general.alignment", 4, 32)
    file.raw_key("n", ARR, file.array(ARR, [file.array(STR, ["x"]), file.array(2, [7])]))
    file.tensor("a", [8]).tensor("b", [32, 2], "Q4_0", 32).tensor("z", [0, 3], "F16", 96)
    file.tensor("u", [5], 142, 96).data = DATA[:160]
    return file.build()


# Long values only slow this down; their own tests have them.
OPENING = [case.data for case in (*LEGAL, *WARNED) if len(case.data) < 2000] + [seed("<")] * 20
SEEDS = OPENING + [case.data for case in MALFORMED if len(case.data) < 2000] + [seed(">")] * 10
NUMBERS = st.sampled_from([0, 1, 2, 8, 9, 12, 13, 31, 32, 63, 64, 127, 128, 255]) | st.integers(
    0, 255
)


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes], most: int) -> bytes:
    """Return a file with at most so many places changed, and sometimes cut or grown."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        width = draw(st.sampled_from([1, 1, 1, 4, 8]))
        data[at : at + width] = bytes(draw(NUMBERS) for _ in range(min(width, len(data) - at)))
    if draw(st.integers(0, 5)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data[at:at] = draw(st.binary(max_size=40))
    return bytes(data)


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=200).map(lambda tail: b"GGUF\3\0\0\0" + tail) | damaged(SEEDS, 4),
    st.booleans(),
)
def test_parsing_raises_nothing_but_format_errors(data: bytes, partial: bool) -> None:
    try:
        parsed = parse(memoryview(data), "x.gguf", partial=partial)
    except FormatError as error:
        event(type(error).__name__)
        assert len(str(error)) < 600
        return
    event("opens")
    for key in parsed.metadata:
        plain(parsed.metadata[key])
    for info in parsed.infos.values():
        assert partial or info.nbytes == 0 or info.offset + info.nbytes <= len(data)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(damaged(OPENING, 1))
def test_what_opens_can_be_copied(tmp_path: Path, data: bytes) -> None:
    path, copy = tmp_path / "x.gguf", tmp_path / "copy.gguf"
    path.write_bytes(data)
    try:
        with open_source(path) as source:
            rewrite(source, copy, force=True)
        before = read(path)
    except UnsupportedError:
        event("refused: big-endian data of unknown layout, or another version")
        return
    except FormatError:
        event("refused")
        return
    except ConversionError as error:
        assert "GGUF names have at most 63" in str(error)
        return
    event("copied")
    after = read(copy)
    for split_key in ("split.no", "split.count", "split.tensors.count"):
        before[0].pop(split_key, None)
    assert repr(after[0]) == repr(before[0])  # as text: NaN is not equal to itself
    assert (list(after[2]), after[2]) == (list(before[2]), before[2])
