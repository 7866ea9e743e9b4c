"""Files beside a model with hostile strings, one at a time: none of the strings is printed raw."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.fuzz import planted, side_seeds
from tests.fuzz.planted import NASTY
from tests.fuzz.test_planted import check, check_page
from tests.robustness.hostile import small_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("sides"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield where strings and keys of a JSON value stand."""
    if isinstance(value, str):
        yield "text", path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield "key", (*path, key)
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def variants(data: bytes) -> Iterator[bytes]:
    """Yield JSON with each string, and each key, replaced by NASTY in turn."""
    for kind, path in places(json.loads(data)):
        changed = inner = json.loads(data)
        for key in path[:-1]:
            inner = inner[key]
        if kind == "text":
            inner[path[-1]] = NASTY
        else:
            inner[NASTY] = inner.pop(path[-1])
        yield json.dumps(changed).encode()


LINES: dict[str, tuple[str, ...]] = {
    "golden": ("qa", "M", "--only", "golden-output", "--only", "loss", "--golden", "S"),
    "baseline": ("qa", "M", "--only", "metadata", "--only", "baseline", "--baseline", "S"),
    "calibration": ("parity", "M", "--between", "numpy", "numpy:cpu:float64", "--ids", "1",
                    "--thresholds", "S"),
    "manifest": ("hash", "M", "--check", "S"),
}  # fmt: skip


def look(line: list[object], page: Path | None = None) -> int:
    """Check what a command prints, and the page that it writes; return its exit code."""
    if page is not None:
        page.unlink(missing_ok=True)
    done = aprfmt(*line)
    check(done, line)
    if page is not None:
        assert page.exists() or (done.code == 2 and done.err), f"{line}: no page, no error"
        if page.exists():
            check_page(page.read_text())
    return done.code


@pytest.mark.parametrize("kind", LINES)
def test_strings_of_side_files_are_escaped(kind: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "side.json"
    words: dict[str, object] = {"M": model, "S": path}
    codes: list[int] = []
    for seed in getattr(side_seeds, kind)():
        for data in variants(seed):
            path.write_bytes(data)
            line = [words.get(word, word) for word in LINES[kind]]
            codes.append(look([*line, "--json"] if len(codes) % 4 == 0 else line))
    assert len(codes) > 10 and {2} < set(codes)  # some are refused, others are read


def test_strings_of_reproductions_are_escaped(tmp_path: Path) -> None:
    data = side_seeds.bundle()[0]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    inner = header["__metadata__"]["aprfmt.bundle"].encode()
    codes = set()
    for changed in variants(inner):
        held = {**header, "__metadata__": {"aprfmt.bundle": changed.decode()}}
        text = json.dumps(held).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        codes.add(look(["parity", "--replay", path]))
    assert codes == {0, 2}


READ = ("embd", "attn_norm-0", "blk.0.attn_q.weight", "MUL", "sum", "Qcur-0")
REFUSED = ("f32", "1.0000", "token_embd")  # a head without its type, a number, no first node


@pytest.mark.parametrize("word", READ + REFUSED)
def test_words_of_printed_text_are_escaped(word: str, model: Path, tmp_path: Path) -> None:
    text, page = side_seeds.eval_text()[0].decode(), tmp_path / "x.html"
    path = tmp_path / "x.txt"
    planted = NASTY.translate(dict.fromkeys(map(ord, "\0\r\n")))  # no line of a text has these
    path.write_text(text.replace(word, planted, 1))
    code = 0 if word in READ else 2
    assert look(["trace", "--load", path]) == code
    assert look(["trace", model, "--load", path, "--html", page], page) == code


def test_names_of_arrays_are_escaped(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    arrays: dict[str, Any] = {
        NASTY.replace("/", "").replace("\0", ""): np.ones((3, 8), np.float32),
        "model.layers.0": np.ones((1, 3, 8), np.float32),
        "__order__": np.array([NASTY]),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    assert look(["trace", "--load", tmp_path / "x.npz"]) == 0
    line = ["diagnose", model, tmp_path / "x.npz", "--ids", "1,2,3", "--html", page]
    assert look(line, page) == 1 and page.exists()


def test_messages_and_samples_are_escaped(model: Path, demo_model: Path, tmp_path: Path) -> None:
    messages = tmp_path / "m.json"
    messages.write_text(json.dumps([{"role": NASTY, "content": NASTY, NASTY: 1}]))
    assert look(["template", demo_model, "--messages", messages]) == 0
    assert look(["template", demo_model, "--messages", messages, "--json"]) == 0
    assert look(["template", model, "--messages", messages]) == 2  # carries none
    samples = tmp_path / "s.jsonl"
    for line, code in (({"text": NASTY}, 1), ({NASTY: 1}, 2)):  # the first has a high loss
        samples.write_text(json.dumps(line))
        assert look(["eval", model, "--samples", samples]) == code


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_gates_and_pages_of_a_planted_model(form: str, tmp_path: Path) -> None:
    if form == "folder":
        made = planted.folder(tmp_path)
    else:
        made = planted.gguf(tmp_path / f"{planted.FILE}.gguf")
    page = tmp_path / "x.html"
    assert look(["qa", made]) == (1 if form == "folder" else 2)
    runs = ["--between", "numpy", "numpy:cpu:float64"]
    runs_it = form == "folder"  # the GGUF's planted names fit no architecture
    code = look(["diagnose", made, made, "--ids", "1,2", "--html", page], page)
    assert code == 0 and page.exists()  # byte for byte the same file
    code = look(["parity", made, *runs, "--ids", "1,2", "--html", page], page)
    assert code == (0 if runs_it else 2) and page.exists() == runs_it
