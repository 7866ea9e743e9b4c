"""What `doctor`, a calibration and an evaluation say of facts made for them."""

import os
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.cli import doctor, options, render, run_options
from aprfmt.cli.eval import windows
from aprfmt.cli.parity import output as parity_output
from aprfmt.errors import BackendUnavailableError, FormatError
from aprfmt.inference import evaluation, loss
from aprfmt.inference.engines import llama_library
from aprfmt.inference.parity.calibrate import Calibration
from aprfmt.measure.tolerances import CalibratedBound
from aprfmt.tokenizer import loading

# --- doctor -------------------------------------------------------------------------------------


def test_processors_are_those_that_may_be_used_where_the_system_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("native_kernels", "gpu_devices", "llama_cpp_library"):
        monkeypatch.setattr(doctor, name, lambda name=name: name)
    monkeypatch.setattr(doctor, "installed_version", lambda name: f"version of {name}")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    facts: Any = doctor.collect_facts()
    assert facts["cpus"] == 3
    assert [facts[key] for key in ("native", "devices", "llama_cpp")] == [
        "native_kernels",
        "gpu_devices",
        "llama_cpp_library",
    ]
    assert [(row["name"], row["version"], row["for"]) for row in facts["packages"]] == [
        (name, f"version of {name}", what) for name, what, _ in doctor.PACKAGES
    ]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert doctor.collect_facts()["cpus"] == 64


def test_a_version_is_that_of_the_first_distribution_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there: dict[str, str] = {}
    found: set[str] = set()

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name in found else None)
    of = doctor.installed_version
    assert of("cupy") is None and of("torch") is None
    found |= {"cupy", "torch"}
    assert of("cupy") == of("torch") == "unknown"
    there |= {"cupy": "1", "torch": "2"}
    assert (of("cupy"), of("torch")) == ("1", "2")
    there["cupy-cuda12x"] = "3"
    assert of("cupy") == "3"
    there["cupy-cuda13x"] = "4"
    assert of("cupy") == "4"
    hint = doctor.install_hint
    assert hint("torch", ()) == "pip install torch"
    both = hint("cupy", ("cuda12", "cuda13"))
    assert both == f"{hint('', ('cuda12',))} or {hint('', ('cuda13',))}"
    shown = {"torch": "2", "zstandard": None}
    monkeypatch.setattr(doctor, "installed_version", shown.get)
    kernels: dict[str, Any] = {"built": True, "cpu": "own"}
    monkeypatch.setattr(doctor, "native_kernels", lambda: kernels)
    assert doctor.version_line().endswith(" (native kernels (own), torch 2)")
    kernels["built"] = False
    assert doctor.version_line().endswith(" (numpy kernels, torch 2)")


def test_a_library_that_does_not_load_is_told_with_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing: list[str] = []

    def part(name: str, value: Any) -> Any:
        if name in missing:
            raise BackendUnavailableError(f"no {name}")
        return value

    library = SimpleNamespace(version=lambda: part("version", "b7"))
    opened = SimpleNamespace(open=lambda: part("library", library))
    monkeypatch.setattr(llama_library, "library_folder", lambda: part("folder", Path("/lib")))
    monkeypatch.setattr(llama_library, "Library", opened)
    said = doctor.llama_cpp_library
    assert said() == {"folder": "/lib", "version": "b7", "why": ""}
    for name, folder in (("version", "/lib"), ("library", "/lib"), ("folder", None)):
        missing.append(name)
        assert said() == {"folder": folder, "version": None, "why": f"no {name}"}


# --- a calibration ------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [None, "t.json"])
@pytest.mark.parametrize("beyond", [0, 8, 9])
def test_a_calibration_says_its_bounds_and_where_they_are(
    beyond: int, written: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(render, "say", lambda text, style="": told.append((text, style)))
    monkeypatch.setattr(render, "table", lambda *given: told.append(given))
    row = CalibratedBound(("a", "b"), "F32", "q", "bfloat16", 0.25, 0.5, 0.125, 7, "seen")
    texts = tuple(f"L{at}.q" for at in range(beyond))
    parity_output.show_calibration(Calibration((row,), texts, 3), written)
    (rows, headers, alignments), *rest = told
    assert rows == [("a/b", "F32", "q", "bfloat16", "0.25", "0.5", "0.125", 7)]
    assert len(headers) == len(alignments) == len(rows[0])
    said = [(f"beyond what a tolerance may excuse: L{at}.q", "bad") for at in range(min(beyond, 8))]
    assert rest == said + [("wrote t.json", "")] * (written is not None)


# --- texts of an evaluation ---------------------------------------------------------------------


def test_a_text_may_be_as_large_as_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MAX_TEXT", 4)
    path = tmp_path / "t.txt"
    for text in ("", "abcd", "éé"):
        path.write_text(text)
        assert windows.read_text(path) == text
    path.write_text("abcde")
    with pytest.raises(FormatError, match="5 bytes; a text of at most 4 is read"):
        windows.read_text(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(FormatError, match="byte 0xff at 2 is no UTF-8"):
        windows.read_text(path)
    monkeypatch.setattr(options, "read_stdin", lambda option: f"stdin of {option}")
    assert windows.read_text(Path("-"), "--own") == "stdin of --own"


class Tokenizer:
    """Two ids for every word, after a token that begins a text."""

    prefix_ids = (1,)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        words = text.split()
        return [1] * add_special + [10 + at for at in range(2 * len(words))]

    def token(self, i: int) -> str:
        return f"<{i}>"


def model(**more: Any) -> Any:
    return SimpleNamespace(
        **{"tokenizer": Tokenizer(), "hyper": {"context_length": 16}, "path": "m"} | more
    )


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(render, "warn", lambda text, kind: found.append((text, kind)))
    monkeypatch.setattr(loading, "try_load_tokenizer", lambda model: model.tokenizer)
    monkeypatch.setattr(run_options, "check_ids", lambda model, ids: [*ids] if ids else 1 / 0)
    return found


def test_a_sample_says_which_of_its_tokens_begin_a_window(warned: Any) -> None:
    whole = windows.whole_text_sample
    found = whole(model(), "t", [1, 10])
    assert (found.name, list(found.ids), found.prefix) == ("t", [1, 10], 1) and not warned
    assert whole(model(), "t", []).prefix == 0 and not warned
    assert whole(model(tokenizer=None), "t", [10]).prefix == 0 and not warned
    assert whole(model(), "t", [10]).prefix == 0
    says = "t: does not begin with <1>, which the model puts before a text; no window does"
    assert warned == [(says, "no_bos")]


def test_lines_of_samples_are_texts_or_answers_to_prompts(
    tmp_path: Path, warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(
        '{"text": "a b"}\n\n  \n{"prompt": "a", "response": "b c", "more": 1}\n{"text": ""}'
    )
    first, second, third = windows.read_jsonl_samples(model(), path)
    assert (first.name, list(first.ids)) == (f"{path}: line 1", [1, 10, 11, 12, 13])
    assert (second.name, list(second.ids)) == (f"{path}: line 4", [1, 10, 11, 10, 11, 12, 13])
    assert (second.prompt, second.cut, first.cut) == (3, True, False)
    assert list(third.ids) == [1]
    for line, says in (
        ("[1]", "has no"),
        ('{"prompt": "a"}', "has no"),
        ('{"response": "a"}', "has no"),
        ('{"text": 1}', "a value is no string"),
        ('{"prompt": "a", "response": null}', "a value is no string"),
    ):
        path.write_text(line)
        with pytest.raises(FormatError, match=f"line 1: {says}"):
            list(windows.read_jsonl_samples(model(), path))
    text = tmp_path / "t.txt"
    text.write_text("a")
    path.write_text('{"text": "b c"}')
    monkeypatch.setattr(run_options, "parse_ids", lambda text: [1, 5])
    for samples, ids, expected in (
        (None, None, [3]),
        (path, None, [3, 5]),
        (None, "x", [3, 2]),
        (path, "x", [3, 5, 2]),
    ):
        found = windows.read_samples(model(), (text,), samples, ids)
        assert [len(one.ids) for one in found] == expected


def test_windows_are_said_with_what_begins_them(
    warned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "window_size", lambda context, convention: context // 2)
    size = windows.window_tokens
    assert (size(model(), None, "c"), size(model(), 16, "c")) == (8, 16) and not warned
    assert size(model(), 17, "c") == 17
    says = "m: windows of 17 tokens; the model was made for 16"
    assert warned == [(says, "context_length")]
    with_bos, without = (evaluation.Sample("t", [1, 10, 11], prefix=count) for count in (1, 0))
    name = next(iter(loss.CONVENTIONS))
    for planned, ids, behind in (
        ([(without, [0])], [], 0),
        ([(without, [0]), (with_bos, [0, 1])], [1], 2),
        ([(with_bos, [0]), (with_bos, [0, 1])], [1], 3),
    ):
        held: Any = planned
        body = windows.windows_to_json(model(), held, 8, 2, name)
        count = sum(len(each) for _, each in planned)
        assert body == {
            "convention": name,
            "max_seq_len": 8,
            "overlap": 2,
            "windows": count,
            "bos": {"ids": ids, "tokens": [f"<{i}>" for i in ids], "windows": behind},
        }
        (_, cut), (_, bos) = windows.window_rows(body)
        assert cut.startswith(f"{count} of at most 8 tokens, overlap 2, {name}: ")
        assert bos == (f"<1> (1) before {behind} of {count} windows" if ids else "none")
