"""Untrusted files beside a model: matrices, traces, ids, messages, manifests."""

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.formats.gguf_cases import MALFORMED as GGUF
from tests.formats.safetensors_cases import MALFORMED as SAFETENSORS
from tests.formats.safetensors_cases import entry, file
from tests.robustness.hostile import _Canary, small_llama
from tests.robustness.jail import Done, Job, run
from tests.robustness.verdicts import assert_plain
from tests.scope import selected

pytestmark = pytest.mark.xdist_group("side")
# What is given a file: M is a good model, S the file, O a name in an empty folder.
TAKERS: dict[str, tuple[str, ...]] = {
    "imatrix": ("quantize", "M", "O.gguf", "--type", "Q4_0", "--imatrix", "S"),
    "manifest": ("hash", "M", "--check", "S"),
    "messages": ("template", "M", "--messages", "S"),
    "trace": ("trace", "--load", "S"),
    "trace_npz": ("trace", "--load", "S.npz"),
    "reference": ("trace", "M", "--payload", "--ids", "1,2", "--reference", "S"),
    "base": ("diff", "M", "M", "--base", "S"),
    "diff_imatrix": ("diff", "M", "M", "--base", "M", "--imatrix", "S"),
    "thresholds": ("parity", "M", "--between", "numpy", "numpy", "--ids", "1", "--thresholds", "S"),
    "bundle": ("parity", "--replay", "S"),
    "ids": ("logits", "M", "--ids", "S.npy", "--out", "O.npy"),
    "text": ("eval", "M", "--text", "S"),
    "samples": ("eval", "M", "--samples", "S"),
    "golden": ("qa", "M", "--only", "golden-output", "--golden", "S"),
    "baseline": ("qa", "M", "--only", "metadata", "--only", "baseline", "--baseline", "S"),
    "copy": ("qa", "M", "--only", "format-parity", "--against", "S"),
    "other": ("eval", "M", "--ids", "1,2", "--against", "S"),
    "diagnose": ("diagnose", "S", "S", "--model", "M", "--html", "O.html"),
    "page": ("trace", "--load", "S", "--html", "O.html"),
    "value": ("set", "M", "format=@S", "-o", "O.safetensors"),
    "model": ("inspect", "S"),
}


def _npy(array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _npz() -> bytes:
    """An archive with an array of objects, and one that unpacks to much more than it takes."""
    buffer = io.BytesIO()
    canary = np.array([_Canary()], dtype=object)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", _npy(canary))
        archive.writestr("model.layers.0.npy", _npy(np.zeros(1 << 22)))
    return buffer.getvalue()


def _npy_head(shape: str, descr: str = "'<i8'") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(16)


def _legacy_imatrix(entries: int, length: int = 4) -> bytes:
    return struct.pack("<ii", entries, length) + b"name" + struct.pack("<ii", 1, 1 << 30)


_TRACE = '{"schema": 1, "records": %s, "run": {}, "aliases": {}}'


def _trace(records: str) -> bytes:
    header = {"__metadata__": {"aprfmt.trace": _TRACE % records}, "L0.out": entry()}
    return file(header, bytes(16))


FILES: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(4096),
    "random": np.random.default_rng(5).bytes(4096),
    "control": b"\x1b[2J\x1b]0;x\x07\xff\xfe",
    "not_utf8": b'{"a": "\xff"}',
    "deep": b"[" * 100_000,
    "deep_object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "many": b"[" + b"0," * 6_000_000 + b"0]",
    "list": b"[1, [2], {}]",
    "object": b'{"schema": "aprfmt.hash-manifest/1", "tensors": {}, "files": null}',
    "numbers": b"[1e999, NaN, -1]",
    "pickle": pickle.dumps(_Canary()),
    "npz": _npz(),
    "npz_cut": _npz()[:-30],
    "npy_objects": _npy(np.array([_Canary()], dtype=object)),
    "npy_huge": _npy_head("(1000000000000,)"),
    "npy_negative": _npy_head("(-1,)"),
    "npy_code": _npy_head("__import__('os').system('touch CANARY')"),
    "npy_floats": _npy(np.array([1.5, np.nan])),
    "npy_far": _npy(np.array([1 << 40, -5])),
    "npy_minus": _npy(np.array([-1])),
    "npy_cut": _npy(np.arange(1000))[:200],
    "imatrix_count": _legacy_imatrix((1 << 31) - 1),
    "imatrix_values": _legacy_imatrix(1),
    "imatrix_length": _legacy_imatrix(1, -7),
    "aprt_count": b"APRT" + struct.pack("<II", 0, 0xFFFFFFFF) + bytes(8),
    "trace_records": _trace('[{"point": "\\u001b[2J", "layer": -5, "shape": [1e300]}]'),
    "trace_deep": _trace("[" * 5000 + "]" * 5000),
    "trace_list": _trace("[[]]"),
    "gguf": next(case.data for case in GGUF if case.id == "DATA_MEM_SIZE_OVERFLOW"),
    "safetensors": next(case.data for case in SAFETENSORS if case.id == "overlap_amplify"),
}


def _sparse(path: Path) -> None:
    path.write_bytes(b'{"schema": [')
    os.truncate(path, 8 << 30)


# Not a file, or a file beyond every limit: commands neither wait for it nor read all of it.
KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "nowhere": lambda path: path.symlink_to("absent"),
    "loop": lambda path: path.symlink_to(path.name),
    "sparse_8_gib": _sparse,
}
# Tokenizing megabytes of anything measures the tokenizer's library.
LONG = [("text", "many"), ("text", "deep_object")]
PAIRS = [(t, name) for t in TAKERS for name in (*FILES, *KINDS) if (t, name) not in LONG]
# These exit 2 with an answer on stdout: no trace with comparable points, no text with a loss.
ANSWERS = ("copy", "diagnose", "text", "samples")
# One array of this archive can be read: the trace is held against it, and the other is named.
ANSWERED = {("reference", "npz"): "captured array a (holds '|O'"}
# Nothing of this file can be read: that is the answer, and its page is written.
PAGES = {("diagnose", "gguf"): ["O.html"]}


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Done]]:
    folder = tmp_path_factory.mktemp("side")
    model = small_llama(folder)
    for name, data in FILES.items():
        for suffix in ("", ".npy", ".npz"):
            (folder / f"{name}{suffix}").write_bytes(data)
    for name, make in KINDS.items():
        for suffix in ("", ".npy", ".npz"):
            make(folder / f"{name}{suffix}")
    (folder / "good.npy").write_bytes(_npy(np.array([1, 2])))

    def line(taker: str, name: str, out: Path) -> tuple[str, ...]:
        out.mkdir()
        given = []
        for word in TAKERS[taker]:
            head, _, tail = word.rpartition("@")
            if tail[:1] == "S" and tail[1:] in ("", ".npy", ".npz"):
                word = f"{head}{'@' * bool(head)}{folder / name}{tail[1:]}"
            elif word.startswith("O."):
                word = f"{out}/{word}"
            given.append(str(model) if word == "M" else word)
        return tuple(given)

    warm = [line(taker, "list", folder / f"warm-{taker}") for taker in TAKERS]
    jobs = [
        Job(f"{taker} {name}", line(taker, name, folder / f"out-{taker}-{name}"))
        for taker, name in sorted(selected(request, "taker", "name"))
    ]
    good = line("ids", "good", folder / "out-good")
    return folder, run([*jobs, Job("good ids", good)], warm)


def test_a_good_file_is_taken(done: tuple[Path, dict[str, Done]]) -> None:
    good = done[1]["good ids"]
    for name in FILES:
        if f"ids {name}" in done[1]:
            assert done[1][f"ids {name}"].code == 2
    assert good.code in (0, 1) and not good.err  # 1: random weights fail the judgement of logits


@pytest.mark.parametrize("taker", TAKERS)
def test_every_command_came_to_read_its_file(
    taker: str, done: tuple[Path, dict[str, Done]]
) -> None:
    """A line that fails for another reason would prove nothing about the files."""
    folder, found = done
    said = [
        found[f"{taker} {name}"].err
        for name in FILES
        if (taker, name) in PAIRS and f"{taker} {name}" in found
    ]
    if not said:
        pytest.skip("NOT-RUN: none of its files was tried: only this test was chosen")
    least = len(said) // 2 if len(said) > len(FILES) // 2 else 0  # of a part, one that came so far
    assert sum(str(folder) in text for text in said) > least or taker in ANSWERS, said[:3]


def test_a_huge_text_beside_a_model_is_not_hashed(tmp_path: Path) -> None:
    model = small_llama(tmp_path)
    _sparse(model / "merges.txt")
    done = aprfmt("hash", model, "--write")
    assert done.code == 2 and "merges.txt: 8589934592 bytes; expected at most" in done.err


@pytest.mark.parametrize(("taker", "name"), PAIRS, ids=str)
def test_side_input(taker: str, name: str, done: tuple[Path, dict[str, Done]]) -> None:
    folder, found = done
    one = found[f"{taker} {name}"]
    assert_plain(one)
    assert one.code in (0, 1, 2), one.err
    if (taker, name) == ("ids", "npy_minus"):
        assert "token id -1" in one.err
    if one.code == 2:
        lines = [line for line in one.err.splitlines() if not line.startswith("warning: ")]
        if (taker, name) in ANSWERED:
            assert not lines and ANSWERED[taker, name] in one.out
        elif taker not in ANSWERS or lines:
            assert len(lines) == 1 and lines[0].startswith("aprfmt: "), one.err[:500]
        made = sorted(path.name for path in (folder / f"out-{taker}-{name}").iterdir())
        assert made == PAGES.get((taker, name), [])
    assert not list(folder.rglob("CANARY"))
