"""Every hand-made file of every format through the command line, under limits.

Malformed: exit 2, one line that says what is wrong, within 256 MiB; the readable parts are shown,
and `validate` reports the fault. Commands that run or convert a model refuse the file. Odd and
legal: opened by `inspect`, checked by `validate`; odd ones with a warning that says why.
"""

from pathlib import Path

import pytest

from aprfmt.formats import FORMATS
from tests.formats import apr_cases, gguf_cases, safetensors_cases
from tests.formats.fatal_cases import FATAL, NO_MODEL
from tests.robustness.jail import Done, Job, run
from tests.robustness.verdicts import assert_plain, assert_refused, assert_reported, assert_told
from tests.scope import selected

pytestmark = pytest.mark.xdist_group("files")
TABLES = {"gguf": gguf_cases, "safetensors": safetensors_cases, "apr": apr_cases}
# safetensors has no odd files: what its page does not allow is refused.
ROWS = [
    (kind, level, case)
    for kind, table in TABLES.items()
    for level in ("MALFORMED", "WARNED", "LEGAL")
    for case in getattr(table, level, ())
]
IDS = [f"{kind}-{level.lower()}-{case.id}" for kind, level, case in ROWS]


# The files other readers were compared on, and those of llama.cpp's own test, all have to be here.
COMPARED: dict[str, tuple[str, ...]] = {
    "gguf": (
        "HEADER_BAD_MAGIC", "HEADER_BAD_VERSION_0", "HEADER_BAD_VERSION_1",
        "HEADER_BAD_VERSION_FUTURE", "HEADER_BAD_N_TENSORS", "HEADER_BAD_N_KV", "KV_BAD_KEY_SIZE",
        "KV_BAD_TYPE", "KV_EMPTY_KEY", "KV_DUPLICATE_KEY", "KV_BAD_ALIGN", "KV_WRONG_TYPE_ALIGN",
        "TENSORS_BAD_NAME_SIZE", "TENSORS_BAD_N_DIMS", "TENSORS_BAD_SHAPE", "TENSORS_NE_TOO_BIG",
        "TENSORS_BAD_TYPE", "removed_type", "TENSORS_INCONSISTENT_ALIGN", "overlap", "hole",
        "trailing", "DATA_NOT_ENOUGH_DATA", "row_no_multiple_of_block", "arr_5_million_in_1_kb",
        "nested_16_deep", "bool_2", "TENSORS_ZERO_DIM", "TENSORS_DUPLICATE_NAME",
        "TENSORS_BAD_OFFSET", "TENSORS_NBYTES_TOO_BIG", "TENSORS_BAD_ALIGN", "HEADER_EMPTY",
        "KV_SUCCESS", "TENSORS_SUCCESS", "TENSORS_CUSTOM_ALIGN", "DATA_INCONSISTENT_ALIGN",
        "DATA_MEM_SIZE_OVERFLOW", "DATA_SUCCESS",
    ),
    "safetensors": (
        "too_small", "length_over_limit", "length_beyond", "not_utf8", "header_array", "not_json",
        "space_before", "duplicate", "duplicate_field", "unknown_field", "dtype_unknown",
        "shape_negative", "shape_wraps", "bits_wrap", "offsets_swapped", "size_small",
        "f4_misaligned", "hole_at_start", "hole_between", "overlap", "trunc_data", "trailing",
        "polyglot_zip", "deep", "padded_header", "zero_size", "scalar",
    ),
}  # fmt: skip


# What a command says of files that no format recognises: it has not come to a format's own reader.
UNKNOWN = f"expected {', '.join(FORMATS)} content"
OF_NO_FORMAT: dict[tuple[str, str], str] = {
    ("apr", "empty"): "is an empty file",
    ("apr", "magic_other"): UNKNOWN,
    ("gguf", "HEADER_BAD_MAGIC"): UNKNOWN,
    ("gguf", "empty_file"): "is an empty file",
    ("safetensors", "empty"): "is an empty file",
    ("safetensors", "too_small"): "is text that begins '<hey>'",
    ("safetensors", "length_only"): "is no file that was written: its first 8 bytes",
    ("safetensors", "header_array"): UNKNOWN,
    ("safetensors", "header_string"): UNKNOWN,
    ("safetensors", "bom"): UNKNOWN,
}
# Why `validate` exits 2 for files that are not malformed: of their tensors not all was looked at.
NO_TENSOR, UNDECODED = "it holds no tensor", "its bytes can be copied, not decoded"
UNSEEN: dict[tuple[str, str], str] = {
    ("apr", "no_tensors"): NO_TENSOR,
    ("gguf", "HEADER_EMPTY"): NO_TENSOR,
    ("gguf", "header_without_padding"): NO_TENSOR,
    ("safetensors", "no_tensors"): NO_TENSOR,
    ("safetensors", "metadata_only"): NO_TENSOR,
    ("gguf", "TENSORS_BAD_TYPE"): UNDECODED,
    ("gguf", "type_142"): UNDECODED,
    ("gguf", "removed_type"): "ggml removed this interleaved type",
}


def test_all_files_of_the_comparison_are_here() -> None:
    for kind, ids in COMPARED.items():
        assert set(ids) <= {case.id for other, _, case in ROWS if other == kind}


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Done]:
    asked = selected(request, "name")
    folder = tmp_path_factory.mktemp("files")
    (folder / "out").mkdir()
    jobs = []
    for name, (kind, level, case) in zip(IDS, ROWS, strict=True):
        if (name,) not in asked:
            continue
        path = folder / f"{name}.{kind}"
        path.write_bytes(case.data)
        jobs.append(Job(name, ("inspect", str(path))))
        jobs.append(Job(f"{name} validate", ("validate", "-v", str(path))))
        if level == "MALFORMED":
            out = folder / "out" / f"{name}.apr"
            jobs.append(Job(f"{name} merge", ("merge", str(path), str(out))))
    found = run(jobs)
    assert list((folder / "out").iterdir()) == [], "something was made of a malformed file"
    return found


@pytest.mark.parametrize("name", IDS)
def test_verdict(name: str, done: dict[str, Done]) -> None:
    kind, level, case = ROWS[IDS.index(name)]
    inspected, validated = done[name], done[f"{name} validate"]
    if level == "MALFORMED":
        says = OF_NO_FORMAT.get((kind, case.id), case.says)
        fatal = case.id in FATAL[kind]
        (assert_refused if fatal else assert_told)(inspected, says)
        assert fatal or inspected.out, "what can be read was not shown"
        assert_refused(done[f"{name} merge"], says)
        if case.id in NO_MODEL[kind]:
            assert_refused(validated, says)
        else:
            assert_reported(validated, says)
        return
    assert inspected.code == 0, inspected.err
    why = UNSEEN.get((kind, case.id), "")
    assert validated.code in ((2,) if why else (0, 1)), validated.out + validated.err
    assert why in validated.out
    for one in (inspected, validated):
        assert_plain(one)
    assert case.says in inspected.err


def test_what_is_not_recognised_is_said_by_its_bytes(tmp_path: Path) -> None:
    (case,) = (case for case in gguf_cases.MALFORMED if case.id == "HEADER_BAD_MAGIC")
    path = tmp_path / "x.gguf"
    path.write_bytes(case.data)
    (only,) = run([Job("x", ("inspect", str(path)))]).values()
    assert "starts with 46 55 47 47" in only.err
