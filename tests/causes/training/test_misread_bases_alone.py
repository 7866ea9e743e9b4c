"""Which wrong decoding of a 4-bit base is guessed, and that none is where none gives the gradients.

Seen red, each alone: a decoding that leaves half of the difference; a guess without a base of 4
bits; the first decoding of the table in place of the nearest.
"""

from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from aprfmt.causes.training.misread_bases import guess_misread_base
from aprfmt.inference.gradients.changes import BackwardChange, Misreading, QuantizedBase

KEYS = ("L1.attn_q.weight.lora_a", "L1.attn_q.weight.lora_b")
WAYS: tuple[Misreading, ...] = get_args(Misreading)


def case_of(left: dict[Misreading, float], **more: Any) -> Any:
    """Return a case of one pair, 1.0 off the right pass and `left` off that with a misreading."""

    def recompute(change: BackwardChange, names: Any) -> Any:
        assert change.misread is not None
        off = left.get(change.misread, 0.9)
        return SimpleNamespace(keys=KEYS, gradient=lambda key: np.full((4, 4), 1 + off))

    pair = SimpleNamespace(given=np.ones((4, 4)), computed=np.full((4, 4), 2.0))
    known: dict[str, Any] = {
        "base": QuantizedBase("NF4", 64, False), "names": {key: (key,) for key in KEYS},
        "wrong": frozenset(KEYS), "right": frozenset(), "open": frozenset(),
        "missing": frozenset(), "case": lambda key: pair, "recompute": recompute,
    }  # fmt: skip
    return SimpleNamespace(**{**known, **more})


@pytest.mark.parametrize("way", WAYS)
def test_the_decoding_that_leaves_nothing_is_guessed(way: Misreading) -> None:
    sure, explained = guess_misread_base(case_of({way: 0.001}))
    assert sure.change is not None and sure.change.misread == way
    assert (sure.most, explained.most, explained.change) == ("confirmed", "explained", None)
    assert sure.says.startswith("the backward decodes the NF4 base")
    assert "backward from the loss it begins" in explained.says


def test_a_decoding_that_leaves_a_part_is_none() -> None:
    for left in (0.5, 0.02):
        assert not list(guess_misread_base(case_of(dict.fromkeys(WAYS, left))))


def test_nothing_is_guessed_without_a_base_of_4_bits_or_a_wrong_gradient() -> None:
    near: dict[Misreading, float] = {WAYS[0]: 0.0}
    absences: list[dict[str, object]] = [
        {"base": None},
        {"missing": frozenset(KEYS[:1])},
        {"wrong": frozenset()},
    ]
    for without in absences:
        assert not list(guess_misread_base(case_of(near, **without)))
