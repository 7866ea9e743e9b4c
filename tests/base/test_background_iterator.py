"""Pieces made on another thread: all of them, in order; what goes wrong there is raised here."""

import threading
from collections.abc import Iterator

import pytest

from aprfmt.base.background_iterator import iterate_ahead


def test_pieces_come_in_order_from_one_other_thread() -> None:
    threads = set()

    def made() -> Iterator[int]:
        for piece in range(100):
            threads.add(threading.get_ident())
            yield piece

    assert list(iterate_ahead(made())) == list(range(100))
    assert len(threads) == 1 and threads != {threading.get_ident()}
    assert list(iterate_ahead(iter(()))) == []


def test_one_piece_is_made_while_one_is_used() -> None:
    made: list[int] = []
    third = threading.Event()

    def pieces() -> Iterator[int]:
        for piece in range(5):
            made.append(piece)
            if piece == 2:
                third.set()
            yield piece

    found = iterate_ahead(pieces())
    assert [next(found), next(found)] == [0, 1]
    assert third.wait(60), "nobody asked for it yet"
    assert made == [0, 1, 2]
    found.close()


def test_what_goes_wrong_there_is_raised_here() -> None:
    def made() -> Iterator[int]:
        yield 1
        raise ValueError("no second one")

    found = iterate_ahead(made())
    assert next(found) == 1
    with pytest.raises(ValueError, match="no second one"):
        next(found)
