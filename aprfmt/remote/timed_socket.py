"""How long an answer may take: a socket that ends one whose head or body comes too slowly.

A server that sends a byte now and then never lets a timeout of the socket pass. So the head of an
answer, with any number of `100 Continue` before it, has a deadline and a length, and a body has a
least rate, which is a deadline for its whole length too.
"""

import io
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BUFFER = 64 << 10  # bytes that are received at a time where fewer are asked for


class BadAnswer(Exception):
    """An answer that breaks a rule of HTTP or a limit; asking again would not help."""


@dataclass(frozen=True)
class ResponseLimits:
    """Seconds and bytes that a server may take.

    `rate` is what a body has to bring a second on average, counted from `grace` seconds after its
    head: low enough for sixteen answers at a time through a line of a megabit.
    """

    silence: float = 30.0  # seconds without a byte
    head: float = 60.0  # seconds for status and headers, all answers before it (1xx) included
    head_bytes: int = 1 << 20
    grace: float = 30.0
    rate: int = 4 << 10


LIMITS = ResponseLimits()


class TimedSocket:
    """A connected socket as http.client uses it, with limits on the answer that it receives."""

    def __init__(
        self, sock: socket.socket, limits: ResponseLimits, clock: Callable[[], float]
    ) -> None:
        self._sock, self._limits, self._clock = sock, limits, clock
        self.begin()

    def begin(self) -> None:
        """Begin to count for the head of an answer."""
        self._since, self._came, self._head = self._clock(), 0, True

    def begin_body(self) -> None:
        """Begin to count for the body of the answer."""
        self._since, self._came, self._head = self._clock(), 0, False

    def receive(self, buffer: "WriteableBuffer") -> int:
        """Receive into a buffer; return how many bytes came, 0 at the end.

        Raises BadAnswer where a limit is reached, TimeoutError after too long a silence.
        """
        limits, left = self._limits, self._left()
        self._sock.settimeout(min(limits.silence, left))
        try:
            count = self._sock.recv_into(buffer)
        except TimeoutError:
            self._left()
            raise
        self._came += count
        if self._head and self._came > limits.head_bytes:
            raise BadAnswer(f"the headers of the answer are longer than {limits.head_bytes} bytes")
        return count

    def _left(self) -> float:
        """Return the seconds that are left for what has come. Raises BadAnswer for none."""
        limits, took = self._limits, self._clock() - self._since
        if self._head:
            left = limits.head - took
            said = f"no whole headers of an answer came in {limits.head:.0f} s"
        else:
            left = limits.grace + self._came / limits.rate - took
            said = f"{self._came} bytes came in {took:.0f} s, less than {limits.rate} a second"
        if left <= 0:
            raise BadAnswer(said)
        return left

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what the answer is read from."""
        return io.BufferedReader(_Incoming(self), _BUFFER)

    def sendall(self, data: bytes) -> None:
        """Send a request."""
        self._sock.settimeout(self._limits.silence)
        self._sock.sendall(data)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class _Incoming(io.RawIOBase):
    """The bytes that a socket receives; closing it leaves the socket open, for the next answer."""

    def __init__(self, sock: TimedSocket) -> None:
        self._timed = sock

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Receive bytes."""
        return self._timed.receive(buffer)
