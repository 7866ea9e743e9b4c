"""llama.cpp's libraries: which folder is taken, and which layout of its structs is believed.

Seen red: a callback written where a struct of another version has its batch sizes.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.engines.llama_library import (
    AUTO,
    WORDS,
    Fields,
    Library,
    ParamBlock,
    context_fields,
)
from tests.cli.run import aprfmt
from tests.inference.judge import rel
from tests.llama import needs_llama
from tests.models import IDS

ONE, MINUS_ONE, THIRTY_TWO = 0x3F800000, 0xBF800000, 0x42000000
POINTERS = [0] * 4
# Default words of three versions, as the library gave them or as llama.h documents them.
NOW = [512, 2048, 512, 1, 0, 0, 1, 4, 4, 0, *[AUTO] * 4, 0, 0, *[MINUS_ONE] * 4, 0, MINUS_ONE,
       *POINTERS, 1, 1, *POINTERS, 0x01010100, 1]  # fmt: skip
WITH_ONES = [512, 2048, 512, 1, 4, 4, *[AUTO] * 4, 0, 0, MINUS_ONE, ONE, THIRTY_TWO, ONE, 0,
             MINUS_ONE, *POINTERS, 1, 1, *POINTERS, 0x00010100]  # fmt: skip
WITHOUT_FLASH = [512, 2048, 512, 1, 4, 4, *[AUTO] * 3, 0, 0, MINUS_ONE, ONE, THIRTY_TWO, ONE, 0,
                 MINUS_ONE, 0, *POINTERS, 1, 1, *POINTERS, 0x00010100]  # fmt: skip


def filled(words: list[int]) -> list[int]:
    return words + [0] * (WORDS - len(words))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (NOW, Fields(13, 22, 26)),
        (WITH_ONES, Fields(9, 18, 22)),
        (WITHOUT_FLASH, Fields(None, 18, 22)),
    ],
)
def test_fields_are_found_by_the_documented_defaults(words: list[int], fields: Fields) -> None:
    assert context_fields(filled(words)) == fields


def changed(at: int, word: int) -> Callable[[list[int]], None]:
    def change(words: list[int]) -> None:
        words[at] = word

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(0, 1024), changed(3, 0), changed(11, 0), changed(14, ONE), changed(16, 0),
        changed(18, ONE), changed(20, 7), changed(21, 7), changed(23, 9), changed(26, 0),
        changed(27, 2), changed(28, 1), lambda words: words.insert(22, 5),
        lambda words: words.__setitem__(slice(40, 64), words[8:32]),  # two places that fit
    ],
)  # fmt: skip
def test_another_layout_is_not_believed(change: Callable[[list[int]], None]) -> None:
    words = filled(NOW)
    change(words)
    assert context_fields(words) is None


class Altered:
    """A libllama whose defaults stand elsewhere."""

    @staticmethod
    def llama_context_default_params() -> ParamBlock:
        return ParamBlock((ctypes.c_uint32 * WORDS)(*filled([7, *NOW])))


def test_a_library_with_another_layout_is_refused_in_one_line() -> None:
    library = object.__new__(Library)
    library.folder, library.llama = Path("lib"), Altered()
    with pytest.raises(BackendUnavailableError, match=r"^engine 'llama.cpp': lib: .*use another"):
        library._checked_fields()


@pytest.mark.parametrize(
    ("tokens", "exact", "sizes"),
    [
        (700, True, [700, 700, 700]),
        (4, True, [32, 32, 32]),
        (700, False, [700, 2048, 512]),  # the library's own
        (4, False, [32, 2048, 512]),
    ],
)
def test_an_exact_pass_is_one_batch_of_its_tokens(
    tokens: int, exact: bool, sizes: list[int]
) -> None:
    made: list[list[int]] = []

    def init(model: int, params: ParamBlock) -> int:
        made.append(list(params.words[:3]))
        return 1

    library = object.__new__(Library)
    library.folder, library.fields = Path("lib"), Fields(13, 22, 26)
    library.llama = SimpleNamespace(
        llama_context_default_params=lambda: ParamBlock((ctypes.c_uint32 * WORDS)(*filled(NOW))),
        llama_init_from_model=init, llama_n_ctx=lambda made: sizes[0],
        llama_n_ubatch=lambda made: min(sizes[2], sizes[0]),
        llama_set_n_threads=lambda *given: None, llama_free=lambda made: None,
    )  # fmt: skip
    with library.context(1, tokens, 1, exact=exact):
        assert made == [sizes]


# The CPU libraries of a folder -> whether ggml has to choose and load one of them.
CPUS: dict[str, tuple[tuple[str, ...], bool]] = {
    "one": (("libggml-cpu.so",), False),
    "one, of macOS": (("libggml-cpu.dylib",), False),
    "one, of Windows": (("ggml-cpu.dll",), False),
    "one a processor": (("libggml-cpu-haswell.so", "libggml-cpu-x64.so"), True),
    "one a processor, of Windows": (("ggml-cpu-alderlake.dll", "ggml-cpu-x64.dll"), True),
}


@pytest.mark.parametrize("cpus", CPUS)
def test_of_several_libraries_of_processors_ggml_loads_one(
    cpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one no model is loaded: it is there before libllama is asked for anything."""
    names, chosen = CPUS[cpus]
    for name in ("libggml-base.so", "libggml.so", "libllama.so", *names):
        (tmp_path / name).touch()
    called: list[tuple[Any, ...]] = []

    class Loaded:
        """A shared library that writes down what is called."""

        def __init__(self, path: str, mode: int = 0) -> None:
            called.append(("load", Path(path).name))

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                called.append((name, *args))
                return ParamBlock((ctypes.c_uint32 * WORDS)(*filled(NOW)))

            setattr(self, name, call)
            return call

    monkeypatch.setattr(ctypes, "CDLL", Loaded)
    library = Library(tmp_path)
    asked = [row for row in called if row[0] == "ggml_backend_load_all_from_path"]
    assert asked == [("ggml_backend_load_all_from_path", str(tmp_path).encode())] * chosen
    order = [row[0] if row[0] != "load" else row[1] for row in called]
    steps = ["libggml-base.so", "ggml_log_set", "libggml.so",
             *["ggml_backend_load_all_from_path"] * chosen, "libllama.so", "llama_log_set",
             "llama_backend_init"]  # fmt: skip
    assert order[: len(steps)] == steps and library.folder == tmp_path
    assert library.fields == Fields(13, 22, 26)


def test_doctor_says_why_there_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("APRFMT_LLAMA_CPP", str(tmp_path))
    done = aprfmt("doctor", "--json")
    assert done.code == 0 and done.json["llama_cpp"]["folder"] == str(tmp_path)
    assert done.json["llama_cpp"]["why"].startswith(f"engine 'llama.cpp': {tmp_path} holds no lib")
    (tmp_path / "libggml-base.so").write_text("no library")
    found = aprfmt("doctor", "--json").json["llama_cpp"]
    assert found["version"] is None and "no library that works here" in found["why"]
    monkeypatch.setenv("APRFMT_LLAMA_CPP", str(tmp_path / "absent"))
    assert "no library that works here" in aprfmt("doctor", "--json").json["llama_cpp"]["why"]
    monkeypatch.delenv("APRFMT_LLAMA_CPP")
    monkeypatch.setattr("aprfmt.inference.engines.llama_library.find_spec", lambda name: None)
    found = aprfmt("doctor", "--json").json["llama_cpp"]
    assert found["folder"] is None and "set APRFMT_LLAMA_CPP" in found["why"]
    assert "set APRFMT_LLAMA_CPP" in aprfmt("doctor").out


@needs_llama
def test_the_library_of_this_machine_is_known(demo_model: Path, tmp_path: Path) -> None:
    found = aprfmt("doctor", "--json").json["llama_cpp"]
    assert found["why"] == "" and "llama" in found["version"]
    done = aprfmt(
        "trace",
        f"{demo_model}@llama.cpp",
        "--payload",
        "--ids",
        "5,6,7",
        "--json",
        "--reference",
        demo_model,
    )
    assert done.code == 0 and done.json["reference"]["first"] is None
    library = Library.open()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ArchError, match=r"llama\.cpp does not load it"):
        with library.model(broken):
            pass


@needs_llama
def test_logits_of_a_plain_context_are_transformers(demo_model: Path, tmp_path: Path) -> None:
    """The way that speeds and losses take: no callback, and for speeds the library's own cache."""
    import torch
    import transformers

    target = tmp_path / "m.gguf"
    assert aprfmt("convert", demo_model, target, "--no-verify", "--encoding", "F32").code == 0
    loader: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        judge = loader.from_pretrained(demo_model, dtype=torch.float32)
        expected = judge(torch.tensor([IDS])).logits[0].numpy()
    library = Library.open()
    for exact, bound in ((True, 3e-6), (False, 3e-3)):
        with library.model(target) as model:
            vocab = library.vocab_size(model)
            with library.context(model, len(IDS), 1, exact=exact) as context:
                assert library.decode(context, IDS) == 0
                found = [library.logits(context, row, vocab) for row in range(len(IDS))]
        assert rel(found, expected) < bound
