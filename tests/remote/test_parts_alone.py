"""Parts of remote files, each by itself."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.remote.remote_file import AGAIN, WINDOW, RemoteObject
from aprfmt.remote.temporary_cache import TemporaryRanges


@pytest.mark.parametrize("proven", [False, True])
def test_so_many_early_answers_are_read_again(proven: bool) -> None:
    held: Any = SimpleNamespace(
        facts=SimpleNamespace(proven=proven), _shelf=threading.Lock(), _early=[], _unsure=False,
        mixed=False,
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
