"""A socket that ends an answer whose head or body comes too slowly.

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
    """Raised for an answer that breaks a rule of HTTP or a limit; trying again is useless."""


@dataclass(frozen=True)
class ResponseLimits:
    """The time and bytes that a server may take for an answer.

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
    """A connected socket for http.client, with limits on the answer that it receives."""

    def __init__(
        self, sock: socket.socket, limits: ResponseLimits, clock: Callable[[], float]
    ) -> None:
        """Start the limits for the head of an answer; `clock` returns seconds."""
        self._sock, self._limits, self._clock = sock, limits, clock
        self.begin()

    def begin(self) -> None:
        """Start the time limit for the head of an answer."""
        self._since, self._came, self._head = self._clock(), 0, True

    def begin_body(self) -> None:
        """Start the rate limit for the body of an answer."""
        self._since, self._came, self._head = self._clock(), 0, False

    def receive(self, buffer: "WriteableBuffer") -> int:
        """Receive into a buffer, and return the number of bytes, 0 at the end.

        Raises BadAnswer where a limit is reached, TimeoutError after too long a silence.
        """
        limits, left = self._limits, self._seconds_left()
        self._sock.settimeout(min(limits.silence, left))
        try:
            count = self._sock.recv_into(buffer)
        except TimeoutError:
            self._seconds_left()
            raise
        self._came += count
        if self._head and self._came > limits.head_bytes:
            raise BadAnswer(f"the headers of the answer are longer than {limits.head_bytes} bytes")
        return count

    def _seconds_left(self) -> float:
        """Return the seconds left until a limit is reached; BadAnswer for none."""
        limits, took = self._limits, self._clock() - self._since
        if self._head:
            left = limits.head - took
            broken = f"no whole headers of an answer came in {limits.head:.0f} s"
        else:
            left = limits.grace + self._came / limits.rate - took
            broken = f"{self._came} bytes came in {took:.0f} s, less than {limits.rate} a second"
        if left <= 0:
            raise BadAnswer(broken)
        return left

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a buffered reader of the answer; `mode` is not used (http.client passes "rb")."""
        return io.BufferedReader(_Incoming(self), _BUFFER)

    def sendall(self, data: bytes) -> None:
        """Send all bytes of a request."""
        self._sock.settimeout(self._limits.silence)
        self._sock.sendall(data)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


class _Incoming(io.RawIOBase):
    """The bytes that a socket receives; closing it leaves the socket open for the next answer."""

    def __init__(self, sock: TimedSocket) -> None:
        """Take the socket whose bytes are read."""
        self._timed = sock

    def readable(self) -> bool:
        """Return True, as io.RawIOBase asks."""
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Receive into a buffer, and return the number of bytes."""
        return self._timed.receive(buffer)
