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


def look(line: list[object], page: Path | None = None) -> None:
    check(aprfmt(*line), line)
    if page is not None and page.exists():
        check_page(page.read_text())


@pytest.mark.parametrize("kind", LINES)
def test_strings_of_side_files_are_escaped(kind: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "side.json"
    words: dict[str, object] = {"M": model, "S": path}
    count = 0
    for seed in getattr(side_seeds, kind)():
        for data in variants(seed):
            path.write_bytes(data)
            line = [words.get(word, word) for word in LINES[kind]]
            look([*line, "--json"] if count % 4 == 0 else line)
            count += 1
    assert count > 10


def test_strings_of_reproductions_are_escaped(tmp_path: Path) -> None:
    data = side_seeds.bundle()[0]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    inner = header["__metadata__"]["aprfmt.bundle"].encode()
    for changed in variants(inner):
        held = {**header, "__metadata__": {"aprfmt.bundle": changed.decode()}}
        text = json.dumps(held).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
        look(["parity", "--replay", path])


@pytest.mark.parametrize(
    "word", ["embd", "attn_norm-0", "blk.0.attn_q.weight", "f32", "MUL", "1.0000", "sum", "Qcur-0"]
)
def test_words_of_printed_text_are_escaped(word: str, model: Path, tmp_path: Path) -> None:
    text, page = side_seeds.eval_text()[0].decode(), tmp_path / "x.html"
    path = tmp_path / "x.txt"
    path.write_text(text.replace(word, NASTY.replace("\n", ""), 1))
    look(["trace", "--load", path])
    look(["trace", model, "--load", path, "--html", page], page)


def test_names_of_arrays_messages_and_samples_are_escaped(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    arrays: dict[str, Any] = {
        NASTY.replace("/", "").replace("\0", ""): np.ones((3, 8), np.float32),
        "model.layers.0": np.ones((1, 3, 8), np.float32),
        "__order__": np.array([NASTY]),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    look(["trace", "--load", tmp_path / "x.npz"])
    look(["diagnose", model, tmp_path / "x.npz", "--html", page], page)
    (tmp_path / "m.json").write_text(json.dumps([{"role": NASTY, "content": NASTY, NASTY: 1}]))
    look(["template", model, "--messages", tmp_path / "m.json"])
    lines = [json.dumps({"text": NASTY}), json.dumps({NASTY: 1})]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    look(["eval", model, "--samples", tmp_path / "s.jsonl"])


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_gates_and_pages_of_a_planted_model(form: str, tmp_path: Path) -> None:
    if form == "folder":
        made = planted.folder(tmp_path)
    else:
        made = planted.gguf(tmp_path / f"{planted.FILE}.gguf")
    page = tmp_path / "x.html"
    look(["qa", made])
    look(["diagnose", made, made, "--ids", "1,2", "--html", page], page)
    look(
        [
            "parity",
            made,
            "--between",
            "numpy",
            "numpy:cpu:bfloat16",
            "--ids",
            "1,2",
            "--html",
            page,
            "--force",
        ],
        page,
    )
