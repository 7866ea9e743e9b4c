"""What a server may say and how long it may take: any other answer is one error of one line.

No server runs: answers come through a pair of sockets. Time is a counter. Seen red:
no deadline for a head, no least rate, a chunk of length -1 that is read without end, numbers of
5,000 digits, a date in the year 99999.
"""

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.errors import RemoteError
from aprfmt.remote import client
from aprfmt.remote.client import Client
from aprfmt.remote.ranges import RangeReader
from aprfmt.remote.timed_socket import LIMITS, ResponseLimits
from tests.cli.run import aprfmt as command
from tests.patience import PATIENCE

DATA = b"GGUF" + bytes(996)
HEAD = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-999/1000\r\nETag: "x"\r\n'
RIGHT = HEAD + b"Content-Length: 1000\r\n\r\n" + DATA
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def serving(
    pieces: Callable[[], Iterator[bytes]],
    pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
    **how: Any,
) -> Iterator[tuple[Client, list[str]]]:
    """Yield a client whose every connection finds these pieces, and then the end; and its log.

    The log has what it connects to, and for how long it waits.
    """
    threads: list[threading.Thread] = []
    log: list[str] = []

    def feed(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            for piece in pieces():
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass

    def dial(address: str, port: int) -> socket.socket:
        here, there = pair()
        there.settimeout(PATIENCE)
        threads.append(threading.Thread(target=feed, args=(there,)))
        threads[-1].start()
        log.append(address)
        return here

    asked = Client(
        resolver=lambda host, port: ["127.0.0.1"], dialer=dial,
        wait=lambda seconds: log.append(f"{seconds}"), **how,
    )  # fmt: skip
    try:
        yield asked, log
    finally:
        asked.close()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextmanager
def answering(answer: bytes) -> Iterator[Client]:
    """Yield a client whose every connection finds this answer."""
    with serving(lambda: iter([answer])) as (asked, _):
        yield asked


def read(monkeypatch: pytest.MonkeyPatch, asked: Client) -> bytes:
    monkeypatch.setattr(client, "CLIENT", asked)
    return RangeReader().first("http://one.example/x.gguf", "W", {})[1]


@pytest.mark.parametrize("answer", [
    RIGHT,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 5 + RIGHT,
    HEAD + b"\r\n" + DATA,
    CHUNKED + b"3e8\r\n" + DATA + b"\r\n0\r\n\r\n",
    CHUNKED + b"1F4 ;a=b\r\n" + DATA[:500] + b"\r\n001f4\n" + DATA[500:] + b"\n0\r\nA: b\r\n\r\n",
    HEAD + b"Content-Length: 1000\r\nContent-Length: 1000\r\n\r\n" + DATA,
], ids=["length", "1xx before it", "until the end", "chunk", "chunks", "two equal"])  # fmt: skip
def test_answers_that_are_right(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    with answering(answer) as asked:
        assert read(monkeypatch, asked) == DATA


NINES = b"9" * 5000
BAD = {
    "length of 5,000 digits": HEAD + b"Content-Length: " + NINES + b"\r\n\r\n",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n",
    "length +5": HEAD + b"Content-Length: +5\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1000\r\nContent-Length: 5\r\n\r\n" + DATA,
    "two ranges": HEAD + b"Content-Range: bytes 0-4/5\r\nContent-Length: 5\r\n\r\nGGUF!",
    "range of 5,000 digits": b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-" + NINES + b"/1\r\n\r\n",
    "status of 5,000 digits": b"HTTP/1.1 " + NINES + b" OK\r\n\r\n",
    "status of words": b"HTTP/1.1 two OK\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "nothing": b"",
    "chunk -1": CHUNKED + b"-1\r\n" + bytes(2 << 20),
    "chunk -5": CHUNKED + b"-5\r\nGGUF!\r\n0\r\n\r\n",
    "chunk +5": CHUNKED + b"+5\r\nGGUF!\r\n0\r\n\r\n",
    "chunk 0x5": CHUNKED + b"0x5\r\nGGUF!\r\n0\r\n\r\n",
    "chunk of 16 digits": CHUNKED + b"f" * 16 + b"\r\n" + DATA,
    "chunk of 5,000 digits": CHUNKED + b"f" * 5000 + b"\r\n" + DATA,
    "chunk without end": CHUNKED + b"5" * 5000,
    "chunk longer than it says": CHUNKED + b"1f4\r\n" + DATA + DATA + b"\r\n0\r\n\r\n",
    "chunk cut": CHUNKED + b"3e8\r\n" + DATA[:5],
    "lines without end behind the last chunk": CHUNKED + b"3e8\r\n" + DATA + b"\r\n0\r\n"
    + b"a: b\r\n" * 200,
    "another coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + DATA,
    "a header without end": HEAD + b"A: " + b"x" * 100_000,
    "headers without end": HEAD + b"A: b\r\n" * 500,
    "1xx without end": b"HTTP/1.1 100 Continue\r\n\r\n" * 60_000,
    "a redirect to half an address": b"HTTP/1.1 302 F\r\nLocation: http://[::1\r\n\r\n",
    "a redirect to a long host": b"HTTP/1.1 302 F\r\nLocation: http://" + b"a" * 300 + b"/\r\n\r\n",
    "a redirect to a port too large": b"HTTP/1.1 302 F\r\nLocation: http://a:99999/\r\n\r\n",
    "a redirect to a port of words": b"HTTP/1.1 302 F\r\nLocation: http://a:b/\r\n\r\n",
    "a redirect of 5,000 digits": b"HTTP/1.1 302 F\r\nLocation: /a\r\nContent-Length: " + NINES
    + b"\r\n\r\n",
    "a wait of 5,000 digits": b"HTTP/1.1 503 L\r\nRetry-After: " + NINES + b"\r\n\r\n",
    "a wait until the year 99999": b"HTTP/1.1 503 L\r\n"
    b"Retry-After: Fri, 31 Dec 99999 23:59:59 GMT\r\n\r\n",
    "a wait until no date": b"HTTP/1.1 503 L\r\nRetry-After: Fri, 99 Abc 9 99:99:99 +9\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_breaks_the_rules_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with answering(BAD[name]) as asked:
        monkeypatch.setattr(client, "CLIENT", asked)
        done = command("inspect", "http://one.example/x.gguf", "--allow-http")
    assert done.code == 2 and "Traceback" not in done.err
    assert done.err.startswith("aprfmt: http://one.example/x.gguf: "), done.err
    assert done.err.count("\n") == 1 and len(done.err) < 500


@given(st.data())
def test_no_change_of_an_answer_is_a_crash(data: st.DataObject) -> None:
    """Bytes of heads and chunks are replaced, removed, repeated: bytes come, or one clean error."""
    answer = bytearray(data.draw(st.sampled_from([
        RIGHT, CHUNKED + b"3e8\r\n" + DATA + b"\r\n0\r\n\r\n", BAD["a wait until the year 99999"],
        b"HTTP/1.1 302 F\r\nLocation: http://two.example/y\r\nContent-Length: 0\r\n\r\n",
    ])))  # fmt: skip
    end = answer.find(b"GGUF") if b"GGUF" in answer else len(answer)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        stop = data.draw(st.integers(at, min(end, at + 12)))
        answer[at:stop] = data.draw(st.sampled_from([
            b"", b"-", b"9" * 20, b"\x00", b"\xff", b"\r\n", b"[", b":", b"%", b"f" * 20, b"\t",
        ]) | st.binary(max_size=6))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, answering(bytes(answer)) as asked:
        patch.setattr("aprfmt.remote.address_policy.POLICY.plain_http", True)
        try:
            assert len(read(patch, asked)) <= 1000
        except RemoteError as error:
            assert len(str(error)) < 1000


# --- time ---------------------------------------------------------------------------------------


class Clock:
    """A time that goes on by `step` seconds whenever somebody asks for it."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def endless(first: bytes, then: bytes, count: int = 100_000) -> Iterator[bytes]:
    yield first
    for _ in range(count):
        yield then


@pytest.mark.parametrize(("first", "then", "said"), [
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n", "no whole headers of an answer came in 60 s"),
    (HEAD + b"X: ", b"x", "no whole headers of an answer came in 60 s"),
    (HEAD + b"Content-Length: 1000\r\n\r\n", b"x", "less than 4096 a second"),
    (CHUNKED, b"1\r\nx\r\n", "less than 4096 a second"),
], ids=["1xx", "a header", "a body", "chunks"])  # fmt: skip
def test_an_answer_that_drips_ends(
    monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes, said: str
) -> None:
    """It is asked for once: another answer of that server would take as long."""
    with serving(lambda: endless(first, then, 900), clock=Clock(20.0)) as (asked, log):
        with pytest.raises(RemoteError, match=said):
            read(monkeypatch, asked)
        assert log == ["127.0.0.1"]


class Metered(socket.socket):
    """A socket whose bytes come 2 KiB at a time, 1,100 a second of a clock."""

    clock: Clock

    def recv_into(self, buffer: Any, *rest: int) -> int:
        count = super().recv_into(memoryview(buffer)[:2048])
        self.clock.now += count / 1100
        return count


@pytest.mark.parametrize(("rate", "enough"), [(1000, True), (1200, False)])
def test_a_body_has_the_time_that_its_bytes_need(
    monkeypatch: pytest.MonkeyPatch, rate: int, enough: bool
) -> None:
    """Just above the least rate nothing is refused, however long all of it takes."""
    data = random.Random(0).randbytes(128 << 10)
    head = (b"HTTP/1.1 206 P\r\nContent-Range: bytes 0-131071/999999\r\nETag: \"x\"\r\n"
            b"Content-Length: 131072\r\n\r\n")  # fmt: skip
    clock = Clock(0.0)

    def pair() -> tuple[socket.socket, socket.socket]:
        here, there = socket.socketpair()
        metered = Metered(fileno=here.detach())
        metered.clock = clock
        return metered, there

    limits = ResponseLimits(rate=rate, grace=5.0)
    with serving(lambda: iter([head, data]), clock=clock, limits=limits, pair=pair) as (asked, _):
        if enough:
            assert read(monkeypatch, asked) == data
            assert clock.now > 60
            return
        with pytest.raises(RemoteError, match="less than 1200 a second"):
            read(monkeypatch, asked)


def test_a_silent_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()

    def nothing() -> Iterator[bytes]:
        done.wait(PATIENCE)
        yield b""

    with serving(nothing, limits=ResponseLimits(silence=0.01)) as (asked, log):
        try:
            with pytest.raises(RemoteError, match="no byte for 0 seconds"):
                read(monkeypatch, asked)
        finally:
            done.set()
        assert log.count("127.0.0.1") == client.ATTEMPTS
    assert LIMITS.silence > 1


def test_a_host_of_many_addresses_is_tried_at_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def dial(address: str, port: int) -> socket.socket:
        asked.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    many = Client(resolver=lambda h, p: [f"127.0.0.{i}" for i in range(1, 99)], dialer=dial)
    with pytest.raises(RemoteError, match="Connection refused"):
        read(monkeypatch, many)
    assert len(asked) == client.MAX_ADDRESSES
