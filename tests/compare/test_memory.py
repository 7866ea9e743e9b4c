"""`diff` releases mapped pages: only a window of the two files is resident, not the files.

Mapped pages count as resident memory; the system says how many of them a process holds.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aprfmt.attestation.rederive import _first_difference, _tensor_digest
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.initial_values import _are_untrained
from aprfmt.causes.tensor.unwritten_tail import _first_zero, _is_cut
from aprfmt.causes.tensor.vocabulary_padding import _explain_tables
from aprfmt.codecs.base import Array
from aprfmt.compare import diff_models
from aprfmt.measure import prefetch
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.numbers import CHUNK, PairSums
from aprfmt.model import Model, open_model
from aprfmt.tensors.companions import JoinedTensor, constant_codes
from tests.cli.run import aprfmt
from tests.conftest import not_run
from tests.conversion.folders import llama_folder, write_safetensors

if TYPE_CHECKING:
    from aprfmt.measure.numbers import Steps

HUGE = 2 << 20  # a touch can map this much around it
SLACK = 6 * HUGE  # of two files: a window each, mapped twice, and what lies around their ends
ELEMENTS = 8 * CHUNK


def resident(*models: Model) -> int:
    """Return the bytes of the models' files that lie in this process's memory."""
    paths = {str(path) for model in models for path in model.source.files}
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, tail = line.partition(":")
        if head == "Rss" and inside:
            found += int(tail.split()[0]) << 10
        elif "-" in head.split(" ")[0]:
            inside = line.split(maxsplit=5)[-1] in paths
    return found


@pytest.fixture(autouse=True)
def linux() -> None:
    if sys.platform != "linux":
        not_run("only Linux says which pages of a file are resident")


def test_resident_pages_are_counted(tmp_path: Path) -> None:
    raw = bytes(16 << 20)
    write_safetensors(tmp_path / "a.safetensors", {"a": (4 << 20,)}, {"a": raw}, "F32")
    with open_model(tmp_path / "a.safetensors") as model:
        assert resident(model) < SLACK
        assert sum(model["a"].raw()[:: 4 << 10]) == 0
        assert resident(model) >= len(raw)
        model["a"].drop()
        assert resident(model) < SLACK


def test_windows_leave_nothing_behind(tmp_path: Path) -> None:
    """A touch maps what lies around it, also what was dropped just before."""
    size, step = 32 << 20, 800_000
    write_safetensors(tmp_path / "a.safetensors", {"a": (size // 4,)}, {"a": bytes(size)}, "F32")
    with (tmp_path / "a.safetensors").open("r+b") as file:  # read again, in large folios
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open_model(tmp_path / "a.safetensors") as model:
        tensor, left = model["a"].stored[0], []
        for start in range(0, size - step, step):
            assert sum(tensor.raw(start, start + step)[:: 4 << 10]) == 0
            tensor.drop(start, start + step)
            left.append(resident(model))
        assert max(left) <= HUGE // 8, left


def test_equal_tensors_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another format, whose heads are permuted: many runs of one tensor against another's.

    Another thread compares what comes next meanwhile: each of the two has a span of both files.
    """
    monkeypatch.setattr(prefetch, "SPAN", HUGE)
    monkeypatch.setattr(prefetch, "MOST", 1)
    spans = 2 * 2 * 3 * HUGE  # with what lies around them; the files are 130 MB
    folder = llama_folder(tmp_path / "hf", "F32", hidden=512, layers=2, ffn=2048, vocab=8192)
    assert aprfmt("convert", folder, tmp_path / "x.gguf", "--no-verify").code == 0
    with open_model(folder) as a, open_model(tmp_path / "x.gguf") as b:
        seen = []
        report = diff_models(a, b, progress=lambda done, total: seen.append(resident(a, b)))
        assert report.equal and len(seen) == len(report.tensors)
        assert max(seen) < spans and seen[-1] < SLACK, seen


@pytest.fixture
def differing(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of one matrix of several chunks, all of whose values differ."""
    values = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32)
    shape = {"w": (ELEMENTS // 1024, 1024)}
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path, factor in zip(paths, (1.0, 1.0009), strict=True):
        data = (values * np.float32(factor)).tobytes()
        write_safetensors(path, shape, {"w": data}, "F32")
    return paths


def test_decoded_chunks_leave_nothing_behind(
    differing: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = PairSums.add
    seen: list[int] = []
    with open_model(differing[0]) as a, open_model(differing[1]) as b:

        def watched(self: PairSums, x: Array, y: Array, steps: "Steps | None") -> None:
            seen.append(resident(a, b))
            add(self, x, y, steps)

        monkeypatch.setattr(PairSums, "add", watched)
        report = diff_models(a, b, explain=False)
        assert report.counts["DIFFERENT"] == 1 and len(seen) == 8
        assert max(seen) <= 2 * 4 * CHUNK + SLACK, seen
        assert resident(a, b) < SLACK


def test_explaining_leaves_nothing_behind(
    differing: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.causes.tensor.differing_pair import WINDOW, DifferingPair

    seen: list[int] = []
    with open_model(differing[0]) as a, open_model(differing[1]) as b:
        windows = DifferingPair.windows

        def watched(self: DifferingPair, rows: Array | None) -> object:
            for window in windows(self, rows):
                seen.append(resident(a, b))
                yield window

        monkeypatch.setattr(DifferingPair, "windows", watched)
        report = diff_models(a, b)
        assert report.tensors[0].explanation is not None
        assert len(seen) > 4, "nothing was read whole"
        # Before the first window stands what the samples touched, a few rows everywhere.
        assert max(seen[1:]) <= 2 * 4 * WINDOW + SLACK, seen
        assert resident(a, b) < SLACK


ROWS = (16 << 20) // (4 * 1024)  # of the shorter table; both hold 16 MiB and more


def padded(a: Model, b: Model) -> bool:
    """Explain a table of tokens that one side has longer."""
    pair = TensorPair("token_embd.weight", a["w"], b["w"])
    return list(_explain_tables(PairContext(a, b), [pair])) == [pair.key]


def derived(a: Model, b: Model) -> bool:
    """Compare bytes that were made with those of a stored tensor, up to a missing one's place."""
    stored = a["w"].stored[0]
    whole = bytearray(stored.info.nbytes)
    cuts = range(0, len(whole), 1 << 20)
    stored.drop()
    found = _first_difference((memoryview(whole)[i : i + (1 << 20)] for i in cuts), stored)
    return found is not None and found.byte == 0


def constant(a: Model, b: Model) -> bool:
    """Look through codes that are one byte throughout."""
    parts = {"": b["zeros"].stored[0], ".scale": a["few"].stored[0]}
    return constant_codes(JoinedTensor(b["zeros"].stored[0].info, parts)) == 0


def not_constant(a: Model, b: Model) -> bool:
    """Look through codes of which the last byte differs."""
    parts = {"": a["zeros"].stored[0], ".scale": a["few"].stored[0]}
    return constant_codes(JoinedTensor(a["zeros"].stored[0].info, parts)) is None


def hashed(a: Model, b: Model) -> bool:
    """Hash the stored bytes of a tensor, for a statement of what a file was made of."""
    wanted = hashlib.sha256(a["w"].raw()).hexdigest()
    a["w"].drop()
    return _tensor_digest(a["w"].stored[0]) == wanted


def unwritten(a: Model, b: Model) -> bool:
    """Look for the place from which a file is zero: through all of it, and up to its last byte."""
    ends = [b["zeros"].stored[0]], [a["zeros"].stored[0]]
    return [_first_zero(held) for held in ends] == [None, None]


def cut(a: Model, b: Model) -> bool:
    """Compare what was written of a tensor before the rest was cut off."""
    mine, other = b["zeros"].stored[0], a["zeros"].stored[0]
    stop = mine.info.offset + mine.info.nbytes
    return _is_cut(mine, other, stop - 1) and not _is_cut(mine, other, stop)


def searched(a: Model, b: Model) -> bool:
    """Look through all tensors of both files for bytes that stand in the place of others."""
    (row,) = diff_models(a, b, tensors=["part"]).tensors
    said = "" if row.explanation is None else " ".join(row.explanation.evidence)
    return "bytes of B's w at " in said


def untrained(a: Model, b: Model) -> bool:
    """Look at rows all over an equal matrix, whether an initialisation made them."""
    pairs = {"w": TensorPair("w", a["w"], b["w"])}
    rows: Any = {"w": SimpleNamespace(verdict="SAME_BYTES")}
    return _are_untrained(pairs, rows)


READERS = [padded, derived, constant, not_constant, hashed, unwritten, cut, searched, untrained]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two files of 32 MiB, a table of tokens longer in one, bytes of it among another tensor's."""
    folder = tmp_path_factory.mktemp("two")
    values = np.random.default_rng(0).standard_normal((ROWS + 64, 1024), np.float32)
    part = values[:4].tobytes()
    for name, more, last in (("a", 0, 1), ("b", 64, 0)):
        shapes = {"few": (1,), "part": (16, 256), "w": (ROWS + more, 1024), "zeros": (4 << 20,)}
        held = {"few": bytes(4), "part": part, "w": values[: ROWS + more].tobytes(),
                "zeros": bytes((16 << 20) - 1) + bytes([last])}  # fmt: skip
        write_safetensors(folder / f"{name}.safetensors", shapes, held, "F32")
        part = part[:700] + values[ROWS - 1].tobytes()[300:1300] + part[1700:]
    return folder / "a.safetensors", folder / "b.safetensors"


@pytest.mark.parametrize("read", READERS)
def test_what_reads_a_tensor_whole_leaves_nothing_behind(
    read: Callable[[Model, Model], bool], two: tuple[Path, Path]
) -> None:
    with open_model(two[0]) as a, open_model(two[1]) as b:
        assert read(a, b)
        assert resident(a, b) < SLACK
