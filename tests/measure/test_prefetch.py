"""Bytes compared ahead, on other threads: the same verdicts, places and errors as one by one.

Seen red: a place counted from the span, the later of two differing spans kept, a small pair that
waited until every large one was compared, a fault in a thread that nobody heard of.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from aprfmt.compare import diff_models
from aprfmt.formats.mapped_file import StoredTensor
from aprfmt.measure import prefetch
from aprfmt.measure.alignment import TensorPair, align_models
from aprfmt.measure.prefetch import BytePrefetch
from aprfmt.model import open_model
from aprfmt.tensors.runs import RunBytes, difference_offset
from tests.conversion.folders import write_safetensors
from tests.patience import PATIENCE

SIZE = 3000
SHAPES = {"a": (SIZE // 4,), "b small": (2,), "c": (SIZE // 4,), "d": (SIZE // 4,)}
PLACES = ((), (0,), (SIZE - 1,), (257, 1999), (1999, 256))


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans so small that every tensor has many."""
    monkeypatch.setattr(prefetch, "LARGE", 64)
    monkeypatch.setattr(prefetch, "SPAN", 256)


def written(path: Path, wrong: tuple[int, ...] = ()) -> Path:
    data = {name: bytearray(range(1, 5)) * shape[0] for name, shape in SHAPES.items()}
    for at in wrong:
        data["c"][at] ^= 1
    write_safetensors(path, SHAPES, {name: bytes(raw) for name, raw in data.items()}, "F32")
    return path


@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("wrong", PLACES)
def test_the_first_byte_that_differs_is_found(
    wrong: tuple[int, ...], threads: int, tmp_path: Path
) -> None:
    paths = written(tmp_path / "a.safetensors"), written(tmp_path / "b.safetensors", wrong)
    with open_model(paths[0]) as a, open_model(paths[1]) as b:
        pairs = align_models(a, b).pairs
        with BytePrefetch(pairs, threads) as bytes_of:
            found = {}
            for number, pair in enumerate(pairs):
                assert pair.a is not None and pair.b is not None
                runs = pair.a.stored_runs(), pair.b.stored_runs()
                found[pair.key] = bytes_of.comparer(number)(*runs)
    expected = dict.fromkeys(SHAPES, None) | {"c": min(wrong, default=None)}
    assert found == expected


def test_what_is_not_asked_for_is_given_up(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors")
    with open_model(path) as a, open_model(path) as b:
        with BytePrefetch(align_models(a, b).pairs, 2) as bytes_of:
            threads = list(bytes_of._threads)
        assert not any(thread.is_alive() for thread in threads)
        assert not bytes_of._compare_next_span()


def test_no_thread_reads_on_when_the_comparison_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is in the middle of a span: the files may be closed then."""
    path = written(tmp_path / "a.safetensors")
    begun, go_on = threading.Event(), threading.Event()

    def held(*sides: Any) -> int | None:
        begun.set()
        go_on.wait(PATIENCE)
        return difference_offset(*sides)

    monkeypatch.setattr(prefetch, "difference_offset", held)
    with open_model(path) as a, open_model(path) as b:
        with BytePrefetch(align_models(a, b).pairs, 2) as bytes_of:
            threads = list(bytes_of._threads)
            assert begun.wait(PATIENCE) and len(threads) == 2
            timer = threading.Timer(0.05, go_on.set)
            timer.start()
        assert go_on.is_set() and not any(thread.is_alive() for thread in threads)
        timer.join()


def test_a_small_pair_waits_for_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.safetensors")
    done: list[int] = []

    def counted(*sides: Any) -> int | None:
        done.append(1)
        return difference_offset(*sides)

    monkeypatch.setattr(prefetch, "difference_offset", counted)
    with open_model(path) as a, open_model(path) as b:
        pairs = align_models(a, b).pairs
        small = next(n for n, pair in enumerate(pairs) if pair.key == "b small")
        before = sum(-(-SIZE // 256) for pair in pairs[:small])
        with BytePrefetch(pairs, 0) as bytes_of:
            pair = pairs[small]
            assert pair.a is not None and pair.b is not None
            assert bytes_of.comparer(small)(pair.a.stored_runs(), pair.b.stored_runs()) is None
    assert len(done) <= before + 1


def test_a_fault_of_a_thread_reaches_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.safetensors")

    def broken(self: RunBytes, start: int, stop: int) -> bytes:
        raise MemoryError("no more")

    monkeypatch.setattr(RunBytes, "window", broken)
    with open_model(path) as a, open_model(path) as b:
        with BytePrefetch(align_models(a, b).pairs, 2) as bytes_of:
            with pytest.raises(MemoryError, match="no more"):
                bytes_of.comparer(0)((), ())
        with pytest.raises(MemoryError, match="no more"):
            diff_models(a, b)


def test_only_what_is_mapped_is_read_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.safetensors")
    monkeypatch.setattr(StoredTensor, "location", lambda self, start=0: None)
    with open_model(path) as a, open_model(path) as b:
        pairs: tuple[TensorPair, ...] = align_models(a, b).pairs
        assert [prefetch._plain_bytes_of_pair(pair) for pair in pairs] == [None] * len(pairs)
        assert diff_models(a, b).equal
