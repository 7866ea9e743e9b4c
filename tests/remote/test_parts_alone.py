"""Parts of remote files, each by itself."""

import hashlib
import io
import re
import stat
import sys
import threading
import time
import zlib
from collections import OrderedDict
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import BackendUnavailableError, RemoteError
from aprfmt.remote import buckets, read_ahead, remote_file, stream_hash, traffic
from aprfmt.remote.buckets import BucketSite
from aprfmt.remote.disk_cache import DiskCache
from aprfmt.remote.fsspec_sites import FsspecSite
from aprfmt.remote.hub import HubSite
from aprfmt.remote.paths import RemotePath
from aprfmt.remote.ranges import AccessDenied
from aprfmt.remote.read_ahead import ReadAhead
from aprfmt.remote.remote_file import AGAIN, GAP, WINDOW, RemoteObject, coalesce_ranges
from aprfmt.remote.response_body import ResponseBody
from aprfmt.remote.site import FileFacts
from aprfmt.remote.stream_hash import StreamHash
from aprfmt.remote.temporary_cache import TemporaryRanges


@pytest.mark.parametrize("proven", [False, True])
def test_so_many_early_answers_are_read_again(proven: bool) -> None:
    held: Any = SimpleNamespace(
        facts=SimpleNamespace(proven=proven), _cache_lock=threading.Lock(), _early=[],
        _unsure=False, mixed=False,
    )  # fmt: skip
    RemoteObject._note(held, 0, memoryview(b""))
    assert held._early == []
    for at in range(AGAIN + 5):
        RemoteObject._note(held, at, memoryview(bytes([at]) * (WINDOW + 1)))
        assert held.mixed == held._unsure == (at > 0 and not proven)
    expected = [] if proven else [(at, bytes([at]) * WINDOW) for at in range(AGAIN)]
    assert held._early == expected


def test_what_was_remembered_is_let_go() -> None:
    held = TemporaryRanges(4096)
    assert bytes(
        held.get(10, 20, lambda start, stop: memoryview(bytes(range(start, stop))))
    ) == bytes(range(10, 20))
    mapped, file = held._map, held._file
    assert mapped is not None and file is not None
    held.close()
    assert mapped.closed and file.closed and held._map is None


class Store:
    """obstore of one object, which answers a range as it is told to."""

    def __init__(self, data: bytes, **wrong: Any) -> None:
        self.data, self.wrong = data, wrong

    def get(self, store: object, inner: str, options: Any = None) -> Any:
        start, stop = options["range"] if options else (0, len(self.data))
        stop = min(stop, len(self.data))
        data = self.wrong.get("data", self.data)[start:stop]
        meta = {"e_tag": '"one"', "size": len(self.data), "last_modified": "now"}
        return SimpleNamespace(
            bytes=lambda: data, stream=lambda: iter([data]),
            meta={**meta, **self.wrong.get("meta", {})},
            range=self.wrong.get("range", (start, stop)),
        )  # fmt: skip


def bucket(monkeypatch: pytest.MonkeyPatch, store: Store) -> BucketSite:
    monkeypatch.setitem(sys.modules, "obstore", store)
    monkeypatch.setattr("aprfmt.remote.buckets._open_store", lambda root: None)
    return BucketSite(["s3:", "b"])


DATA = bytes(range(200))


def test_an_object_is_read_in_ranges_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    site = bucket(monkeypatch, Store(DATA))
    facts, head = site.first("m")
    assert (facts.size, head) == (len(DATA), DATA)
    assert bytes(site.fetch("m", facts, 3, 9)) == DATA[3:9]
    assert site.one_pass("m", facts) == hashlib.sha256(DATA).hexdigest()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"range": (2, 9)}, "bytes (2, 9) came; expected 3..9"),
        ({"data": DATA[:8]}, "expected 3..9"),
        ({"meta": {"size": 199}}, "its size"),
        ({"meta": {"e_tag": '"two"'}}, "its ETag"),
    ],
    ids=["another range", "fewer bytes", "another size", "another version"],
)
def test_another_answer_than_was_asked_for_is_refused(
    wrong: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(DATA)
    site = bucket(monkeypatch, store)
    facts, _ = site.first("m")
    store.wrong = wrong
    with pytest.raises(RemoteError, match=re.escape(said)):
        site.fetch("m", facts, 3, 9)
    if "meta" in wrong:
        with pytest.raises(RemoteError, match=re.escape(said)):
            site.one_pass("m", facts)


@pytest.mark.parametrize("code", ["", "GatedRepo"])
def test_a_denial_of_the_hub_says_what_would_help(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked of the repository: a range, or the whole file."""

    def denied(*of: object) -> Any:
        raise AccessDenied("401", {"x-error-code": code})

    monkeypatch.setattr(HubSite, "_find_row", lambda self, inner: None)
    monkeypatch.setattr(HubSite, "_url", lambda self, inner: "")
    site = HubSite(["hf:", "owner", "name"])
    site._ranges = SimpleNamespace(fetch=denied, one_pass=denied)  # type: ignore[assignment]
    said = "is gated" if code else "does not exist, or"
    with pytest.raises(RemoteError, match=said):
        site.fetch("m", FileFacts(9), 0, 9)
    with pytest.raises(RemoteError, match=said):
        site.one_pass("m", FileFacts(9))


def test_what_is_brought_is_brought_once() -> None:
    """Ranges that are kept, or held with the header, are not asked for again."""
    asked: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> memoryview:
        asked.append((start, stop))
        return memoryview(DATA)[start:stop]

    held: Any = SimpleNamespace(
        _held=memoryview(DATA)[:8], _pieces=OrderedDict(), _cache_lock=threading.Lock(), fetch=fetch
    )
    for name in ("_cached_bytes", "_cache_piece"):
        setattr(held, name, MethodType(getattr(RemoteObject, name), held))
    RemoteObject.bring(held, [(2, 8), (10, 20), (40, 50)])
    assert sorted(asked) == [(10, 20), (40, 50)]
    RemoteObject.bring(held, [(10, 20), (60, 70), (42, 50)])
    assert sorted(asked) == [(10, 20), (40, 50), (60, 70)]


@pytest.mark.parametrize("within", [(0, 90), (30, 90), (30, 60), (0, 60)])
def test_what_was_expected_already_is_not_expected_again(within: tuple[int, int]) -> None:
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    ahead.expect(0, 90)
    ahead.expect(*within)
    assert [(one.start, one.stop) for one in ahead._expected] == [(0, 90)]
    ahead.close()


@pytest.mark.parametrize("headers", [{}, {"content-length": "5"}])
def test_an_answer_without_a_body_has_ended(headers: dict[str, str]) -> None:
    """204 and 304, whatever length they say: what follows on the connection is the next answer."""
    file = io.BytesIO(b"HTTP/1.1 200 OK")
    answer: Any = SimpleNamespace(fp=file, chunked=False, length=0)
    body = ResponseBody(answer, headers)
    assert body.ended() and body.read(5) == b"" and file.tell() == 0
    answer.length = None if not headers else 5
    body = ResponseBody(answer, headers)
    assert not body.ended() and body.read(5) == b"HTTP/"
    assert body.ended() is bool(headers)


def test_seconds_are_those_in_which_a_request_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time count once, what lies between them not, and one that fails has ended too."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    held = traffic.Traffic()
    with held.request():
        now[0] = 2.0
        with held.request():
            now[0] = 3.0
        now[0] = 5.0
    now[0] = 50.0
    with pytest.raises(RemoteError), held.request():
        now[0] = 51.0
        raise RemoteError("lost")
    now[0] = 90.0
    with held.request():
        now[0] = 90.5
    assert (held.facts()["requests"], held.facts()["seconds"]) == (4, 6.5)


def test_one_run_keeps_half_of_the_cache_and_no_byte_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APRFMT_CACHE", str(tmp_path))
    monkeypatch.setenv("APRFMT_CACHE_SIZE", "300")
    cache = DiskCache()
    cache.put("x", 0, memoryview(DATA)[:100])
    cache.put("x", 100, memoryview(DATA)[100:150])
    cache.put("x", 150, memoryview(DATA)[150:151])
    cache.put("", 0, memoryview(b""))
    kept = [cache.get("x", *place) for place in ((0, 100), (100, 150), (150, 151), (0, 99))]
    assert [None if each is None else bytes(each) for each in kept] == [
        DATA[:100], DATA[100:150], None, None,
    ]  # fmt: skip


def test_what_comes_next_is_hashed_however_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit beside what waits is asked for again, and nothing else is."""
    monkeypatch.setattr(stream_hash, "HELD", 8)
    data, asked = bytes(range(32)), []

    def windows(start: int, stop: int) -> list[memoryview]:
        asked.append((start, stop))
        assert len(asked) < 9, asked
        return [memoryview(data)[start:stop]]

    file: Any = SimpleNamespace(
        size=32, path="x", sha256="", proven=True, windows=windows,
        observe=lambda take: None, head=lambda start: memoryview(b""),
    )  # fmt: skip
    stream = StreamHash(file)
    for start in (8, 16, 0):  # the second waits for room, the third is next
        stream.take(start, memoryview(data)[start : start + 8])
    assert stream.result() == hashlib.sha256(data).hexdigest() and asked == [(16, 32)]


@pytest.mark.parametrize(
    ("size", "tag", "says"),
    [(10, "then", ""), (10, "", ""), (11, "then", "its size"), (10, "later", "its date")],
)
def test_a_file_of_another_size_or_date_is_refused(size: int, tag: str, says: str) -> None:
    """A date may change while the first ranges stay: these are no proof of the others."""
    now = SimpleNamespace(size=size, tag=tag)
    held: Any = SimpleNamespace(
        facts=SimpleNamespace(size=10, tag="then"), where="x", _cache_lock=threading.Lock(),
        _early=[], _unsure=True, _inner="x", _site=SimpleNamespace(facts=lambda inner: now),
    )  # fmt: skip
    if not says:
        return RemoteObject.refuse_changed(held)
    with pytest.raises(RemoteError, match=says):
        RemoteObject.refuse_changed(held)
    return None


def test_a_site_whose_answers_prove_nothing_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ["https://a.b/x/y.gguf", "https://a.b/x/z.gguf", "https://c.d/q", "http://e.f:8/q"]
    known = {
        ("s", str(i)): SimpleNamespace(where=place, mixed=i != 2) for i, place in enumerate(places)
    }
    monkeypatch.setattr(remote_file, "_objects", known)
    found = remote_file.unproven_sites()
    assert [line.partition(":/ ")[0].split("/: ")[0] for line in found] == [
        "https://a.b",
        "http://e.f:8",
    ]


KEYS = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_SERVICE_ACCOUNT", "az": "AZURE_STORAGE_SAS_KEY"}


@pytest.mark.parametrize("scheme", KEYS)
@pytest.mark.parametrize("held", [*KEYS, None])
@pytest.mark.parametrize("plain", [False, True])
def test_a_bucket_is_read_without_keys_where_its_kind_has_none(
    scheme: str, held: str | None, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of another kind of bucket are none; without encryption only where that is allowed."""
    for names, _ in buckets._KEYS.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    if held is not None:
        monkeypatch.setenv(KEYS[held], "x")
    monkeypatch.setattr("aprfmt.remote.address_policy.POLICY.plain_http", plain)
    store = ModuleType("obstore.store")
    store.from_url = lambda url, **options: (url, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "obstore", ModuleType("obstore"))
    monkeypatch.setitem(sys.modules, "obstore.store", store)
    wanted: dict[str, Any] = {} if held == scheme else {"skip_signature": True}
    if plain:
        wanted["client_options"] = {"allow_http": True}
    assert buckets._open_store([f"{scheme}:", "weights"]) == (f"{scheme}://weights", wanted)


def test_an_environment_that_says_no_bucket_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **options: Any) -> Any:
        raise ValueError("no region: <Error>x</Error>\nsecond line")

    store = ModuleType("obstore.store")
    store.from_url = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "obstore.store", store)
    with pytest.raises(RemoteError, match=r"^s3://b: the environment .* read it: no region$"):
        buckets._open_store(["s3:", "b"])
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(BackendUnavailableError, match=r"^s3://b: reading buckets needs obstore"):
        buckets._open_store(["s3:", "b"])


class Broken(io.BytesIO):
    """A file that ends in an error after its first piece."""

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        if not piece:
            raise OSError("connection lost\nsecond line")
        return piece


@pytest.mark.parametrize(
    ("opened", "says"),
    [
        (lambda where, mode: io.BytesIO(b"abc"), None),
        (lambda where, mode: Broken(b"abc"), "connection lost"),
        (lambda where, mode: (_ for _ in ()).throw(PermissionError("not yours")), "not yours"),
        (lambda where, mode: (_ for _ in ()).throw(KeyError()), "KeyError"),
    ],
)
def test_a_pass_over_a_file_that_breaks_off_has_no_digest(opened: Any, says: str | None) -> None:
    site: Any = SimpleNamespace(
        _address=lambda inner: f"foo://h/{inner}", _files=SimpleNamespace(open=opened)
    )
    if says is None:
        assert FsspecSite.one_pass(site, "x", None) == hashlib.sha256(b"abc").hexdigest()  # type: ignore[arg-type]
        return
    with pytest.raises(RemoteError, match=f"^foo://h/x: cannot be read: {says}$"):
        FsspecSite.one_pass(site, "x", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, 10**12])
def test_a_remote_file_has_a_size_and_no_owner_or_date(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: Any = SimpleNamespace(
        facts=lambda inner: FileFacts(size, "tag") if inner == "m.gguf" else None
    )
    monkeypatch.setattr(RemotePath, "site", property(lambda self: there))
    found = RemotePath("https:", "h.org", "m.gguf").stat()
    assert (found.st_size, found.st_nlink, stat.S_ISREG(found.st_mode)) == (size, 1, True)
    assert stat.S_IMODE(found.st_mode) == 0o444
    dates = (found.st_atime, found.st_mtime, found.st_ctime)
    assert (found.st_ino, found.st_dev, found.st_uid, found.st_gid, *dates) == (0,) * 7
    with pytest.raises(FileNotFoundError, match=r"No such file: 'https://h.org/other.gguf'"):
        RemotePath("https:", "h.org", "other.gguf").stat()


@pytest.mark.parametrize("at", [0, 5, len(DATA)])
def test_no_bytes_are_nothing_to_expect(at: int) -> None:
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    ahead.expect(at, at)
    assert not ahead._expected and not ahead._parts
    ahead.expect(at, at + 1)
    assert [(one.start, one.stop) for one in ahead._expected] == [(at, at + 1)]
    ahead.close()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("reads", [[60], [30, 30], [30, 29], [1, 59], [20, 20, 20]])
def test_a_second_read_in_a_row_lets_the_next_bytes_be_fetched(
    reads: list[int], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty bytes by two reads or more, where nobody says what comes next."""
    monkeypatch.setattr(read_ahead, "STREAK", 60)
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    if told:
        ahead.expect(0, 1)
    at = 0
    for size in reads:
        assert bytes(ahead.get(at, at + size)) == DATA[at : at + size]
        at += size
    guessed = [(one.start, one.stop) for one in ahead._expected]
    right = len(reads) > 1 and at >= 60 and not told
    assert guessed == ([(at, len(DATA))] if right else [])
    ahead.close()


@pytest.mark.parametrize(("at", "short"), [(0, False), (1, False), (10, False), (11, True)])
def test_a_short_rest_of_what_was_read_in_part_is_kept(
    at: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges before a read are not read any more, but for fewer than LITTLE bytes at their end."""
    monkeypatch.setattr(read_ahead, "LITTLE", 10)
    monkeypatch.setattr(read_ahead, "NEXT", 1)
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    ahead.expect(0, 20)
    ahead.expect(40, 60)
    if at:
        ahead.get(0, at)
    ahead.get(40, 45)
    assert [one.start for one in ahead._expected] == ([0, 40] if short else [40])
    ahead.close()


@pytest.mark.parametrize(
    ("start", "stop", "joined"),
    [
        (20, 29, True), (20, 30, False), (24, 30, True), (25, 30, False), (19, 22, False),
        (20, 21, True), (24, 33, True), (24, 34, False),
    ],
)  # fmt: skip
def test_a_short_range_joins_the_one_just_before_it(
    start: int, stop: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fewer than LITTLE bytes, and fewer than NEXT behind it; a longer one is its own."""
    monkeypatch.setattr(read_ahead, "LITTLE", 10)
    monkeypatch.setattr(read_ahead, "NEXT", 5)
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    ahead.expect(0, 20)
    ahead.expect(start, stop)
    held = [(one.start, one.stop) for one in ahead._expected]
    assert held == ([(0, stop)] if joined else [(0, 20), (start, stop)])
    for begin, end in held:
        assert ahead.awaits(begin, end) and ahead.awaits(begin + 1, end - 1)
        assert not ahead.awaits(begin, end + 40) and not ahead.awaits(end + 40, end + 41)
    ahead.close()
    assert not ahead._expected and not ahead._parts and not ahead.awaits(0, 1)


@pytest.mark.parametrize(
    ("between", "joined"), [(-5, True), (0, True), (1, True), (GAP, True), (GAP + 1, False)]
)
def test_ranges_are_one_request_up_to_a_gap(between: int, joined: bool) -> None:
    ranges = [(10 + between + 100, 10 + between + 150), (10, 110)]
    found = coalesce_ranges(ranges)
    assert found == ([(10, 160 + between)] if joined else [ranges[1], ranges[0]])
    assert coalesce_ranges([(0, 100), (20, 50)]) == [(0, 100)]


@pytest.mark.parametrize(
    ("stop", "parts"),
    [
        (9, [(0, 9)]), (10, [(0, 10)]), (14, [(0, 14)]), (15, [(0, 10), (10, 15)]),
        (24, [(0, 10), (10, 24)]), (27, [(0, 10), (10, 20)]), (30, [(0, 10), (10, 20), (20, 30)]),
        (60, [(0, 10), (10, 20), (20, 30), (30, 40)]),
    ],
)  # fmt: skip
def test_parts_are_fetched_ahead_but_for_a_short_last_one_that_can_wait(
    stop: int, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at a time, of ten bytes; less than five at an end come with the part before them."""
    monkeypatch.setattr(read_ahead, "PART", 10)
    monkeypatch.setattr(read_ahead, "AHEAD", 4)
    ahead = ReadAhead(len(DATA), lambda start, stop: memoryview(DATA)[start:stop])
    ahead.expect(0, stop)
    assert [(begin, end) for begin, (end, _) in sorted(ahead._parts.items())] == parts
    assert bytes(ahead.get(0, parts[0][1])) == DATA[: parts[0][1]]
    held = {begin: end for begin, (end, _) in ahead._parts.items()}
    assert set(held.items()) >= set(parts[1:])
    assert stop != 27 or held[20] == 27, "the rest that waited comes when there is room"
    assert bytes(ahead.get(parts[0][1], stop)) == DATA[parts[0][1] : stop]
    ahead.close()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError("m.gguf"), None),
        (PermissionError("not yours"), "not yours"),
        (ConnectionError("connection lost\nsecond line"), "connection lost"),
        (KeyError(), "KeyError"),
    ],
)
def test_only_a_file_that_is_not_there_is_absent(error: Exception, says: str | None) -> None:
    """A file that may not be read, or whose site is silent, is no absent one: that is an error."""
    fsspec = pytest.importorskip("fsspec", reason="NOT-RUN: fsspec is not installed")
    site = FsspecSite(["memory:", "alone"])

    def info(address: str) -> Any:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec.filesystem("memory"), "info", info)
        if says is None:
            assert site.facts("m.gguf") is None and not site.is_folder("m.gguf")
            return
        for ask in (site.facts, site.is_folder):
            with pytest.raises(RemoteError, match=f"^memory://alone/m.gguf: .*read: {says}$"):
                ask("m.gguf")


@pytest.mark.parametrize("there", [[], ["a.gguf"], ["a.gguf", "b.gguf"]])
@pytest.mark.parametrize("here", [[], ["c.gguf"]])
def test_files_that_are_fetched_are_hashed_and_others_are_not(
    there: list[str], here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever stands beside them: a set may have files here and there."""
    monkeypatch.setattr(remote_file, "RemoteFile", lambda path: SimpleNamespace(path=path))
    monkeypatch.setattr(stream_hash, "StreamHash", lambda file: file.path)
    remote = [RemotePath("https:", "h.org", name) for name in there]
    found: Any = stream_hash.hash_fetched_files([*map(Path, here), *remote])
    assert found == {path: path for path in remote}


def test_bytes_wait_up_to_a_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may wait are taken without a question, one more is asked for again."""
    data = bytes(range(32))
    for held, expected in ((16, []), (15, [(16, 24)])):
        monkeypatch.setattr(stream_hash, "HELD", held)
        asked: list[tuple[int, int]] = []

        def windows(start: int, stop: int, asked: Any = asked) -> list[memoryview]:
            asked.append((start, stop))
            return [memoryview(data)[start:stop]]

        file: Any = SimpleNamespace(
            size=32,
            path="x",
            sha256="",
            proven=True,
            windows=windows,
            observe=lambda take: None,
            head=lambda start: memoryview(b""),
        )
        stream = StreamHash(file)
        for start, stop in ((24, 32), (16, 24), (4, 16), (0, 8)):
            stream.take(start, memoryview(data)[start:stop])
        stream.take(0, memoryview(data)[:16])  # again
        assert stream.result() == hashlib.sha256(data).hexdigest()
        assert asked == expected
        assert stream.crc == zlib.crc32(data) and stream.done


def test_windows_over_what_is_held_are_not_fetched_again() -> None:
    """The beginning of a file is in memory; windows end there, reach over it or lie behind it."""
    whole = bytes(range(64))
    for held in (0, 16, 20, 32, 64):
        asked: list[tuple[int, int]] = []

        def gather(start: int, stop: int, asked: Any = asked) -> memoryview:
            asked.append((start, stop))
            return memoryview(whole)[start:stop]

        found = SimpleNamespace(
            head=lambda stop, wish, held=held: memoryview(whole)[:held], gather=gather
        )
        file: Any = SimpleNamespace(size=48, _found=found)
        pieces = list(remote_file.RemoteFile.windows(file, 0, 60, 16))
        assert [bytes(piece) for piece in pieces] == [whole[at : at + 16] for at in (0, 16, 32)]
        assert all(held <= start < stop <= 48 for start, stop in asked)
        assert sum(stop - start for start, stop in asked) == max(48 - held, 0)


def test_what_is_remembered_is_not_fetched_again() -> None:
    whole, asked = bytes(range(100)), list[tuple[int, int]]()

    def fetch(start: int, stop: int) -> memoryview:
        asked.append((start, stop))
        return memoryview(whole)[start:stop]

    held = TemporaryRanges(100)
    for start, stop, came in (
        (10, 20, [(10, 20)]),
        (10, 20, []),
        (12, 18, []),
        (15, 30, [(20, 30)]),
        (5, 12, [(5, 10)]),
        (5, 30, []),
        (30, 31, [(30, 31)]),
        (40, 50, [(40, 50)]),
        (50, 50, []),
    ):
        asked.clear()
        assert bytes(held.get(start, stop, fetch)) == whole[start:stop]
        assert asked == came, (start, stop)
    held.close()


def test_a_range_that_is_held_is_not_fetched() -> None:
    whole = bytes(range(64))
    asked: list[tuple[int, int]] = []

    def fetch(start: int, stop: int) -> memoryview:
        asked.append((start, stop))
        return memoryview(whole)[start:stop]

    found = SimpleNamespace(head=lambda stop, wish: memoryview(whole)[:16], fetch=fetch)
    file: Any = SimpleNamespace(_found=found)
    for start, stop, fetched in ((0, 8, False), (8, 16, False), (8, 17, True), (16, 20, True)):
        asked.clear()
        piece = remote_file.RemoteFile._fetch_range(file, (start, stop))
        assert bytes(piece) == whole[start:stop] and asked == [(start, stop)] * fetched
