"""What is fetched ahead changes when bytes come, never which: against the bytes themselves."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from aprfmt.formats.mapped_file import open_bytes
from aprfmt.remote import read_ahead
from aprfmt.remote.paths import parse_location
from aprfmt.remote.read_ahead import ReadAhead
from tests.cli.run import aprfmt as command
from tests.conftest import ROOT
from tests.patience import PATIENCE
from tests.remote.conftest import forget
from tests.remote.server import RangeServer

SIZE = 100_000
DATA = random.Random(7).randbytes(SIZE)
PLACES = st.tuples(st.integers(0, SIZE), st.integers(0, 9000)).map(
    lambda pair: (pair[0], min(SIZE, pair[0] + pair[1]))
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = {"LARGE": 5000, "PART": 1000, "STREAK": 3000, "NEXT": 50, "LITTLE": 300}
    for name, value in scaled.items():
        monkeypatch.setattr(read_ahead, name, value)


class Source:
    def __init__(self) -> None:
        self.lock, self.fetched = threading.Lock(), 0

    def fetch(self, start: int, stop: int) -> memoryview:
        assert 0 <= start < stop <= SIZE
        with self.lock:
            self.fetched += stop - start
        return memoryview(DATA)[start:stop]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(["get", "expect", "walk"]), PLACES), max_size=25))
def test_every_read_gives_the_bytes(steps: list[tuple[str, tuple[int, int]]]) -> None:
    source = Source()
    found = ReadAhead(SIZE, source.fetch)
    for what, (start, stop) in steps:
        if what == "expect":
            found.expect(start, stop)
        else:
            step = 700 if what == "walk" else max(1, stop - start)
            for at in range(start, stop, step):
                end = min(at + step, stop)
                assert bytes(found.get(at, end)) == DATA[at:end]
    found.close()


@pytest.mark.parametrize("step", [1000, 1600, 330])
def test_what_is_expected_is_fetched_once(step: int) -> None:
    source = Source()
    found = ReadAhead(SIZE, source.fetch)
    tensors = [(at, at + 4700) for at in range(0, SIZE - 4700, 4700)]
    random.Random(step).shuffle(tensors)
    for number, (start, stop) in enumerate(tensors):
        for soon in tensors[number : number + 5]:
            found.expect(*soon)
        for at in range(start, stop, step):
            end = min(at + step, stop)
            assert bytes(found.get(at, end)) == DATA[at:end]
    found.close()
    assert source.fetched == sum(stop - start for start, stop in tensors)


def test_a_little_behind_what_is_expected_comes_with_it() -> None:
    """Norms between weights: none waits for a request of its own when it is read."""
    source = Source()
    found = ReadAhead(SIZE, source.fetch)
    ends = [at + size for at in range(0, SIZE - 4800, 4800) for size in (4700, 4800)]
    tensors = list(zip([0, *ends], ends, strict=False))
    for number, (start, stop) in enumerate(tensors):
        for soon in tensors[number : number + 5]:
            found.expect(*soon)
        assert found.awaits(start, stop)
        assert bytes(found.get(start, stop)) == DATA[start:stop]
    assert not found.awaits(SIZE - 10, SIZE)
    found.close()
    assert source.fetched == ends[-1]


def test_many_little_ones_are_few_requests() -> None:
    source, asked = Source(), []

    def fetch(start: int, stop: int) -> memoryview:
        asked.append(start)
        return source.fetch(start, stop)

    found = ReadAhead(SIZE, fetch)
    tensors = [(0, 9500), *((at, at + 20) for at in range(9500, 10_500, 20))]
    for tensor in tensors:
        found.expect(*tensor)
    for start, stop in tensors:
        assert bytes(found.get(start, stop)) == DATA[start:stop]
    found.close()
    assert len(asked) <= 13 and source.fetched == 10_500


def test_an_announced_norm_is_read_with_what_is_before_it(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece around it would reach to the end of the file."""
    monkeypatch.undo()
    data = server.files["/x"] = random.Random(1).randbytes(600_000)
    source = open_bytes(parse_location(f"{server.url}/x"))
    source.expect(140_000, 590_000)
    source.expect(590_000, 591_000)
    for start, stop in ((140_000, 590_000), (590_000, 591_000)):
        assert bytes(source.view[start:stop]) == data[start:stop]
    source.close()
    assert not [asked for _, asked, *_ in server.log if asked and asked.endswith("-599999")]


def test_reads_that_follow_one_another_are_fetched_once() -> None:
    source = Source()
    found = ReadAhead(SIZE, source.fetch)
    for at in range(0, SIZE, 800):
        assert bytes(found.get(at, min(at + 800, SIZE))) == DATA[at : at + 800]
    assert source.fetched == SIZE


def test_an_error_of_a_part_is_the_readers() -> None:
    def fetch(start: int, stop: int) -> memoryview:
        if start >= 5000:
            raise RuntimeError("lost")
        return memoryview(DATA)[start:stop]

    found = ReadAhead(SIZE, fetch)
    found.expect(0, SIZE)
    assert bytes(found.get(0, 1000)) == DATA[:1000]
    with pytest.raises(RuntimeError, match="lost"):
        found.get(4000, 7000)


def test_a_server_that_hangs_does_not_keep_a_program_that_is_done(server: RangeServer) -> None:
    """Seen red: threads of an executor, which the interpreter waits for."""
    server.files["/x"] = bytes(40 << 20)
    server.stuck = threading.Event()
    code = (
        "from aprfmt.remote import client\nfrom aprfmt.remote.timed_socket import ResponseLimits\n"
        "client.CLIENT.limits = ResponseLimits(silence=1e6, head=1e6)\n"
        "from aprfmt.remote.paths import parse_location\n"
        "from aprfmt.formats.mapped_file import open_bytes\n"
        f"source = open_bytes(parse_location('{server.url}/x'))\nsource.expect(0, source.size)\n"
        "print('done')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
        cwd=ROOT,
        env={**os.environ, "APRFMT_CACHE_SIZE": "0"},
    )
    assert done.stdout == "done\n" and not server.stuck.is_set()
    server.stuck.set()


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Two equal models whose tensors do not lie in the order of their numbers, and another."""
    folder: Path = tmp_path_factory.mktemp("twins")
    tensors = {f"l.{i}.w": np.random.default_rng(i).random((512, 512), "<f4") for i in range(24)}
    save_file(tensors, folder / "a")
    tensors["l.13.w"] = tensors["l.13.w"].copy()
    tensors["l.13.w"][5, 6] += 1
    save_file(tensors, folder / "c")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**found, "b": found["a"]}


def test_a_diff_moves_every_byte_once(
    server: RangeServer, twins: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    server.files = {f"/{name}.safetensors": data for name, data in twins.items()}
    a, b, c = (f"{server.url}/{name}.safetensors" for name in "abc")
    assert command("diff", a, b, "--only", "tensors").code == 0
    assert server.sent() <= 2 * (len(twins["a"]) + (128 << 10))
    forget()
    done = command("diff", a, c, "--only", "tensors", "--json")
    assert done.code == 1
    assert [row["key"] for row in done.json["tensors"] if row["verdict"] == "DIFFERENT"] == [
        "l.13.w"
    ]


def asked_of(tensors: list[tuple[int, int]], ahead: int) -> list[tuple[int, int]]:
    """Return the requests that reading announced tensors in order makes."""
    source, asked = Source(), []

    def fetch(start: int, stop: int) -> memoryview:
        with source.lock:
            asked.append((start, stop))
        return memoryview(DATA)[start:stop]

    found = ReadAhead(SIZE, fetch)
    for number, (start, stop) in enumerate(tensors):
        for soon in tensors[number : number + ahead]:
            found.expect(*soon)
        for at in range(start, stop, 1000):
            end = min(at + 1000, stop)
            assert bytes(found.get(at, end)) == DATA[at:end]
    found.close()
    return sorted(asked)


def test_norms_between_weights_come_with_them() -> None:
    """A weight's short end waits for the norm behind it, so that neither asks by itself."""
    ends = [at + size for at in range(0, SIZE - 4800, 4800) for size in (4700, 4800)]
    tensors = list(zip([0, *ends], ends, strict=False))
    asked = asked_of(tensors, 9)
    alone = [one for one in asked if one[1] - one[0] <= 100]
    assert len(alone) <= 2  # the first ones: nothing else is under way to wait for
    assert sum(stop - start for start, stop in asked) == ends[-1]


def test_a_short_rest_is_no_request_of_its_own() -> None:
    assert asked_of([(0, 4400)], 1) == [(0, 1000), (1000, 2000), (2000, 3000), (3000, 4400)]
    assert asked_of([(0, 2600)], 1) == [(0, 1000), (1000, 2000), (2000, 2600)]


def test_parts_that_wait_to_be_read_hold_no_other_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts are asked for than are under way at a time: one that is late stops none."""
    late, others = threading.Event(), threading.Semaphore(0)

    def fetch(start: int, stop: int) -> memoryview:
        if start == 0:
            assert late.wait(PATIENCE)
        else:
            others.release()
        return memoryview(DATA)[start:stop]

    found = ReadAhead(SIZE, fetch)
    for at in range(0, 40_000, 10_000):
        found.expect(at, at + 10_000)
    for _ in range(read_ahead.AHEAD - 1):
        assert others.acquire(timeout=PATIENCE)
    assert read_ahead.AHEAD >= read_ahead._THREADS
    late.set()
    assert bytes(found.get(0, 1000)) == DATA[:1000]
    found.close()
