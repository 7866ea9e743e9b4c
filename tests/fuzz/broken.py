"""A parser that breaks its promise on some inputs: the engine must find one of them."""

from aprfmt.errors import FormatError
from tests.fuzz.contract import Target


def _use(data: bytes) -> None:
    if not data.startswith(b"{"):
        raise FormatError("starts otherwise")
    if data[-1:] == b"}" and len(data) > 3:
        raise KeyError(data)


BROKEN = Target("broken", _use, lambda: [b"{ab"])
