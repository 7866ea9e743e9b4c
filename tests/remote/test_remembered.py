"""What reads a model again and again fetches it once: what came is remembered in a temporary file.

Seen red: nothing remembered, what is on its way asked for again, a room without a limit, bytes of a
place where nothing was written, a file that stays when the model is closed.
"""

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import aprfmt
from aprfmt.remote.temporary_cache import ROOM, SHARE, TemporaryRanges
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder
from tests.patience import PATIENCE
from tests.remote.server import RangeServer

COUNT = 1 << 16
DATA = random.Random(7).randbytes(COUNT)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of 4 MB."""
    folder = tmp_path_factory.mktemp("remembered") / "m"
    return llama_folder(folder, "BF16", hidden=384, ffn=1024, layers=4, vocab=1000)


@pytest.fixture
def there(here: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "0")
    server.files = {f"/m/{path.name}": path.read_bytes() for path in here.iterdir()}
    yield f"{server.url}/m/"
    assert ROOM.taken == 0


@pytest.mark.parametrize("line", [
    "qa SRC --random-weights", "hash SRC", "trace SRC --payload --ids 1,2,3 --memory 1M",
    "run SRC --ids 1,2,3 --max-tokens 9 --memory 1M", "diagnose SRC BAD",
    "eval SRC --ids 1,2,3,4,5,6,7,8 --max-seq-len 4 --random-weights --memory 1M",
    "parity SRC --ids 1,2,3 --between numpy numpy::float64",
])  # fmt: skip
def test_every_byte_comes_once(
    there: str, here: Path, server: RangeServer, tmp_path: Path, line: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(here, bad)
    data = bytearray((bad / "model.safetensors").read_bytes())
    data[-4000:-2000] = bytes(2000)
    (bad / "model.safetensors").write_bytes(data)
    done = command(*line.replace("SRC", there).replace("BAD", str(bad)).split())
    assert done.code in (0, 1), done.err
    assert len(data) * 0.9 <= server.sent() <= len(data) * 1.1


def test_what_finds_no_room_comes_again(
    there: str, server: RangeServer, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = command("hash", there).out
    once = server.sent()
    room = SimpleNamespace(free=(SHARE - 1) << 20)
    monkeypatch.setattr("aprfmt.remote.temporary_cache.shutil.disk_usage", lambda _: room)
    with aprfmt.open(there) as model:
        model.cache_remote_reads()
        for name in model:
            bytes(model[name].raw())
        assert 0 < ROOM.taken <= 1 << 20
    assert command("hash", there).out == expected
    assert server.sent() > 3.5 * once


class Site:
    """Who brings the bytes, and which were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.wait: threading.Event | None = None
        self.arrived = threading.Event()

    def __call__(self, start: int, stop: int) -> memoryview:
        self.asked.append((start, stop))
        self.arrived.set()
        if self.wait is not None:
            assert self.wait.wait(PATIENCE)
        return memoryview(DATA[start:stop])


def test_ranges_of_every_kind_are_the_files() -> None:
    site, remembered, chance = Site(), TemporaryRanges(COUNT), random.Random(3)
    for _ in range(400):
        start = chance.randrange(COUNT)
        stop = min(COUNT, start + chance.choice((0, 1, 100, 5000)))
        assert remembered.get(start, stop, site) == DATA[start:stop]
    before = len(site.asked)
    remembered.get(0, COUNT, site)
    assert len(site.asked) <= before + 1
    for start in range(0, COUNT, 999):
        assert remembered.get(start, min(COUNT, start + 2000), site) == DATA[start : start + 2000]
    assert len(site.asked) <= before + 1
    remembered.close()
    assert ROOM.taken == 0


def test_what_is_on_its_way_is_awaited() -> None:
    site, remembered = Site(), TemporaryRanges(COUNT)
    site.wait = threading.Event()
    found: list[memoryview] = []

    def read(start: int, stop: int) -> None:
        found.append(remembered.get(start, stop, site))

    first = threading.Thread(target=read, args=(0, 900))
    first.start()
    assert site.arrived.wait(PATIENCE)
    second = threading.Thread(target=read, args=(100, 800))
    second.start()
    assert not len(remembered.get(900, 900, site))  # what lies beside it is not waited for
    site.wait.set()
    for thread in (first, second):
        thread.join(PATIENCE)
    assert sorted(map(len, found)) == [700, 900] and site.asked == [(0, 900)]
    remembered.close()


def test_a_request_that_fails_is_made_again() -> None:
    site, remembered = Site(), TemporaryRanges(COUNT)

    def broken(start: int, stop: int) -> memoryview:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        remembered.get(5, 50, broken)
    assert remembered.get(0, 60, site) == DATA[:60]
    remembered.close()
    assert remembered.get(10, 20, site) == DATA[10:20]
    assert site.asked == [(0, 60), (10, 20)] and ROOM.taken == 0


def test_closing_lets_go_of_the_file_and_its_map() -> None:
    kept = TemporaryRanges(COUNT)
    assert bytes(kept.get(0, 9, lambda b, e: memoryview(DATA)[b:e])) == DATA[:9]
    mapped, file = kept._map, kept._file
    assert mapped is not None and file is not None
    kept.close()
    assert mapped.closed and file.closed and ROOM.taken == 0
