"""What the tables call an order is done to right codes, and the row's order puts them right.

Seen red: "undone twice" and "taken for GPTQ's" exchanged, "halves where neighbours belong" of its
opposite; and a side called wrong of two that have the same codes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor.code_orders import _named_orders
from aprfmt.causes.tensor.packed_codes import _known_orders
from aprfmt.causes.tensor.packed_parts import _ORDERS
from tests.diagnosis import packing
from tests.diagnosis.faults_packed import SIZES, source

Array = Any
Move = Callable[[Array], Array]
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ: nibble k of a word is that of output AWQ[k]


def awq_packed(codes: Array) -> Array:
    """Return eight codes in the order of AWQ's nibbles."""
    return codes[AWQ]


def awq_unpacked(nibbles: Array) -> Array:
    """Return the codes in the order of the outputs, of nibbles in AWQ's."""
    codes = np.empty_like(nibbles)
    codes[AWQ] = nibbles
    return codes


def lows_first(codes: Array) -> Array:
    """Return neighbours as bytes hold them, with all low halves before the high ones."""
    return np.concatenate([codes[0::2], codes[1::2]])


def alternating(codes: Array) -> Array:
    """Return codes whose first half is the low halves of bytes, byte by byte."""
    return np.stack(np.split(codes, 2), 1).reshape(-1)


# Of decoded values: what a reader made of right ones.
KNOWN: dict[str, list[Move]] = {
    "was not undone": [awq_packed],
    "undone twice, or where codes stand in plain order": [
        awq_unpacked, lambda right: awq_unpacked(awq_unpacked(awq_packed(right)))
    ],
    "the two halves of each byte are exchanged": [lambda right: right[::-1]],
    "the codes of a word stand in reverse": [lambda right: right[::-1]],
    "are one run, not every second value": [lows_first],
    "are every second value, not one run": [alternating],
}  # fmt: skip


@pytest.mark.parametrize("row", _known_orders(), ids=lambda row: row[0][:60])
def test_orders_of_decoded_values(row: tuple[str, tuple[int, ...]]) -> None:
    text, order = row
    (moves,) = (moves for end, moves in KNOWN.items() if text.endswith(end))
    right = np.arange(len(order))
    for move in moves:
        assert move(right)[list(order)].tolist() == right.tolist()


# Of stored codes: what stands there, of what belongs there. The reader wants plain order, or what
# the second half of the text says.
NAMED: dict[str, tuple[Move, Move]] = {
    "the codes of each byte stand in reverse, the high one first": (lambda x: x[::-1], np.copy),
    "all stand in reverse": (lambda x: x[::-1], np.copy),
    "AWQ's order of eight codes in a word, where plain order belongs": (awq_packed, np.copy),
    "plain order, where AWQ's order of eight codes in a word belongs": (np.copy, awq_packed),
    "the bytes of each word stand in reverse": (
        lambda x: x.reshape(-1, 2)[::-1].reshape(-1), np.copy
    ),
    "the two halves are exchanged": (lambda x: np.roll(x, len(x) // 2), np.copy),
    "neighbours where halves belong": (np.copy, alternating),
    "halves where neighbours belong": (alternating, np.copy),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 8, 16, 32])
def test_orders_of_stored_codes(size: int) -> None:
    codes = np.arange(size)
    rows = list(_named_orders(size, 4))
    assert rows and {text for text, _ in rows} <= set(NAMED)
    for text, order in rows:
        stored, right = (move(codes) for move in NAMED[text])
        assert stored[order].tolist() == right.tolist(), text


# Of nibbles of words: what stands there; AWQ's reader wants AWQ's order, the others plain.
WORDS: dict[str, Move] = {
    "plain order (0 to 7), where AWQ's (0, 2, 4, 6, 1, 3, 5, 7) is read": np.copy,
    "AWQ's order (0, 2, 4, 6, 1, 3, 5, 7), where plain order is read": awq_packed,
    "AWQ's order, applied twice": lambda codes: awq_packed(awq_packed(codes)),
    "the inverse of AWQ's order (0, 4, 1, 5, 2, 6, 3, 7), where plain order is read": awq_unpacked,
}


@pytest.mark.parametrize("row", _ORDERS[:-1], ids=lambda row: row[0][:40])
def test_orders_of_nibbles(row: tuple[str, tuple[int, ...], bool | None]) -> None:
    text, order, awq = row
    codes = np.arange(8)
    right = awq_packed(codes) if awq else codes
    assert WORDS[text](codes)[list(order)].tolist() == right.tolist()
    assert _ORDERS[-1][0] == "reverse order" and len(_ORDERS) == len(WORDS) + 1


def decoded_as(order: list[int]) -> Path:
    """Return an AWQ copy decoded to float16 by a reader for which nibble k is output order[k]."""
    right = source("llama", SIZES)
    folder = Path(packing.folder(
        right, f"read-{order}", None,
        lambda prefix, values: decoded(prefix, packing.nearest(values), order),
    ))  # fmt: skip
    return folder


def decoded(prefix: str, packed: packing.Packed, order: list[int]) -> packing.Rows:
    """Return a weight decoded with the outputs of each word in the wrong places."""
    nibbles = awq_packed(np.arange(8))
    back = [int(nibbles[order.index(at)]) for at in range(8)]
    rows = np.arange(len(packed.codes)).reshape(-1, 8)[:, back].reshape(-1)
    codes, zeros = packed.codes[rows], packed.zeros[rows]
    values = (codes - zeros[:, packed.group]) * packed.scales[:, packed.group]
    return {f"{prefix}.weight": packing.row(values.astype(np.float16))}


def awq_copy(right: Path, order: tuple[int, ...]) -> Path:
    """Return an AWQ copy whose nibble k is output order[k]."""

    def write(prefix: str, values: Array) -> packing.Rows:
        return packing.awq(prefix, packing.nearest(values), order=order)

    return Path(packing.folder(right, f"packed-{order}", packing.awq_section(), write))


def test_two_with_the_same_codes_do_not_say_which_side_is_wrong() -> None:
    """With the float original it is said."""
    right = source("llama", SIZES)
    good, bad = (awq_copy(right, tuple(AWQ)), awq_copy(right, tuple(range(8))))
    wrong = decoded_as(list(range(8)))

    def said(a: Path, b: Path) -> str:
        found = [one for one in aprfmt.diff(a, b).findings if one.cause == "packing_order"]
        assert found, aprfmt.diff(a, b).findings
        assert found[0].leaves_side_open is ("do not say whose" in found[0].says)
        return found[0].says

    assert "do not say whose order is right" in said(good, wrong)
    assert "B's codes" in said(right, wrong) and "was not undone" in said(right, wrong)
    assert "B's words hold" in said(right, bad) and "do not say" not in said(right, bad)
