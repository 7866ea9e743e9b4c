"""One row for every fault that other readers had: the file that showed it, and what we do with it.

Sources: the advisories named by their ids, the trackers of llama.cpp and aprender, the audit report
and the attack notes of safetensors. The five ids of February 2024 are TALOS-2024-1912 to 1916.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conversion.folders import llama_folder
from tests.formats import apr_cases, gguf_cases, safetensors_cases
from tests.formats.fatal_cases import FATAL
from tests.formats.gguf_files import aligned
from tests.robustness.jail import Done, Job, run
from tests.robustness.verdicts import assert_plain, assert_refused, assert_told

pytestmark = pytest.mark.xdist_group("history")
_CASES = {
    kind: {case.id: case for case in (*table.MALFORMED, *table.LEGAL)}
    for kind, table in (
        ("gguf", gguf_cases), ("safetensors", safetensors_cases), ("apr", apr_cases),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A file of one fault; `says` None: it is valid and must open."""

    id: str
    make: Callable[[Path], tuple[str, ...]]
    says: str | None


@dataclass(frozen=True)
class Row:
    """One entry of the history: ids, what went wrong, and examples of it."""

    id: str
    fault: str
    examples: Sequence[Example]

    def __str__(self) -> str:
        return self.id


def _file(kind: str, id: str) -> Example:
    case = _CASES[kind][id]

    def make(folder: Path) -> tuple[str, ...]:
        path = folder / f"{id}.{kind}"
        path.write_bytes(case.data)
        return "inspect", str(path)

    return Example(f"{kind}/{id}", make, None if case.error is None else case.says)


def _gguf(*ids: str) -> list[Example]:
    return [_file("gguf", id) for id in ids]


def _safetensors(*ids: str) -> list[Example]:
    return [_file("safetensors", id) for id in ids]


def _align_2g() -> Example:
    def make(folder: Path) -> tuple[str, ...]:
        path = folder / "align.gguf"
        path.write_bytes(aligned(1 << 31).build())
        return "inspect", str(path)

    return Example("gguf/any_align_2g", make, "power of two up to 1048576")


def _template(id: str, text: str, says: str) -> Example:
    """A chat template that would write CANARY if it could run Python."""

    def make(folder: Path) -> tuple[str, ...]:
        model = llama_folder(folder / id, "F32", hidden=8, layers=1)
        vocab = {"a": 0, "b": 1}
        tokenizer = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        canary = str(folder / "CANARY")
        (model / "chat_template.jinja").write_text(text.replace("CANARY", canary))
        return "template", str(model), "--user", "hello"

    return Example(f"template/{id}", make, says)


def _apr_cut(at: int) -> Example:
    def make(folder: Path) -> tuple[str, ...]:
        path = folder / f"cut{at}.apr"
        path.write_bytes(apr_cases._WHOLE[:at])
        return "tensors", str(path)

    return Example(f"apr/trunc_{at}", make, "")


_RUN = "__import__('os').system('touch CANARY')"
_GLOBALS = "{{ self.__init__.__globals__.__builtins__." + _RUN + " }}"
_LIPSUM = "{{ lipsum.__globals__['os'].system('touch CANARY') }}"
_BOUND = "{% set f = '{0.__init__.__globals__}'.format %}{{ f(cycler) }}"
_INDIRECT = (
    "{{ ['{0.__class__.__mro__[1].__subclasses__}'.format] | map('call') | list }}"
    "{{ ('{0.__class__.__init__.__globals__}' | attr('format'))(namespace) }}"
)

HISTORY: tuple[Row, ...] = (
    Row("CVE-2024-23605", "the key count sizes an allocation",
        _gguf("HEADER_BAD_N_KV", "n_keys_beyond_file")),
    Row("CVE-2024-23496", "a string's length plus one wraps",
        _gguf("KV_BAD_KEY_SIZE", "string_of_2_63", "string_longer_than_file")),
    Row("CVE-2024-21825", "an array's count times its element size wraps",
        _gguf("arr_count_wraps", "arr_u8_2p32", "arr_string_of_2_63")),
    Row("CVE-2024-21802", "more dimensions than the array of them has room for",
        _gguf("TENSORS_BAD_N_DIMS", "n_dims_max")),
    Row("CVE-2024-21836", "the tensor count sizes an allocation",
        _gguf("HEADER_BAD_N_TENSORS", "n_tensors_beyond_file")),
    Row("CVE-2025-53630", "the sum of tensor sizes wraps", _gguf("DATA_MEM_SIZE_OVERFLOW")),
    Row("CVE-2026-27940", "the sum plus the context's overhead wraps",
        [*_gguf("DATA_MEM_SIZE_OVERFLOW"), _align_2g()]),
    Row("CVE-2026-33298", "a tensor's bytes wrap: a small buffer behind a huge tensor",
        _gguf("dims_wrap_to_8", "TENSORS_NBYTES_TOO_BIG", "TENSORS_NE_TOO_BIG")),
    Row("CVE-2026-7482", "declared dimensions are believed beyond the data",
        _gguf("data_bigger_than_file", "dims_2p32x2p32")),
    Row("CVE-2025-62609", "dimensions cut to 32 bits",
        _gguf("dims_2p32x2p32", "TENSORS_NE_TOO_BIG")),
    Row("CVE-2026-53923", "kernels read what dimensions promise",
        _gguf("data_bigger_than_file", "row_no_multiple_of_block")),
    Row("llama.cpp 25378", "the Python reader lacks the limits of the C reader",
        _gguf("n_dims_max", "arr_u8_2p32", "arr_5_million_in_1_kb")),
    Row("llama.cpp alignment", "an alignment of another type aborts the program",
        _gguf("KV_WRONG_TYPE_ALIGN", "align_string", "align_0", "KV_BAD_ALIGN")),
    Row("safetensors audit 2023", "polyglot files, duplicate keys, unused bytes",
        _safetensors("polyglot_zip", "duplicate", "duplicate_escaped", "hole_at_start",
                     "hole_between", "trailing")),
    Row("safetensors overlap", "many tensors over the same bytes", _safetensors("overlap_amplify")),
    Row("safetensors zero size", "an empty tensor shares an offset: valid, must be accepted",
        _safetensors("zero_in_middle", "zero_first")),
    Row("CVE-2024-34359", "a chat template is rendered without a sandbox",
        [_template("globals_self", _GLOBALS, "chat template"),
         _template("globals_lipsum", _LIPSUM, "chat template")]),
    Row("CVE-2026-5760", "a chat template is rendered without a sandbox in another server",
        [_template("globals_cycler", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
                   "chat template")]),
    Row("CVE-2024-56326", "the sandbox is left through a stored reference to str.format",
        [_template("format_bound", _BOUND, "chat template")]),
    Row("CVE-2025-27516", "the sandbox is left through the attr filter",
        [_template("format_indirect", _INDIRECT, "chat template")]),
    Row("aprender 2569, 2612", "a truncated APR is listed and validated as good",
        [_apr_cut(len(apr_cases._WHOLE) - 5), _apr_cut(len(apr_cases._WHOLE) - 70), _apr_cut(63),
         _apr_cut(200), _file("apr", "count_forged")]),
)  # fmt: skip

ROWS = [(row, example) for row in HISTORY for example in row.examples]
NAMES = [f"{row.id} - {example.id}" for row, example in ROWS]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Done]]:
    folder = tmp_path_factory.mktemp("history")
    jobs = []
    for number, (name, (_, example)) in enumerate(zip(NAMES, ROWS, strict=True)):
        place = folder / str(number)
        place.mkdir()
        jobs.append(Job(name, example.make(place)))
    return folder, run(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_history(name: str, done: tuple[Path, dict[str, Done]]) -> None:
    folder, found = done
    _, example = ROWS[NAMES.index(name)]
    if example.says is None:
        assert found[name].code == 0, found[name].err
        assert_plain(found[name])
    else:
        kind, _, case = example.id.partition("/")
        shown = case not in FATAL.get(kind, {case})  # what the fault leaves readable is shown
        (assert_told if shown else assert_refused)(found[name], says=example.says)
    assert not list(folder.rglob("CANARY")), "code from a file ran"


def test_a_plain_template_does_render(tmp_path: Path) -> None:
    """The commands above get as far as rendering; what stops them is the template itself."""
    example = _template("plain", "<{{ messages[0].content }}>", "")
    (only,) = run([Job("plain", example.make(tmp_path))]).values()
    assert only.code == 0 and only.out.startswith("<hello>\n"), only.err


def test_ids_are_unique() -> None:
    assert len({row.id for row in HISTORY}) == len(HISTORY)
    assert len(set(NAMES)) == len(NAMES)
