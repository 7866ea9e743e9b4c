"""Guesses about an adapter's passes: which are tried, of which shapes, and what is said of ties."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.adapter_passes import (
    guess_factor_order,
    guess_merged,
    guess_quantized_base,
)
from aprfmt.inference.gradients.changes import BackwardChange, QuantizedBase

KEYS = ("L1.attn_q.weight.lora_a", "L1.attn_q.weight.lora_b")
FIRST = QuantizedBase("NF4", 64, True)
WITH_HEAD = QuantizedBase("NF4", 64, True, "layers and head")
Values = dict[QuantizedBase | None, float]


def case_of(
    a: tuple[int, int] = (4, 8),
    b: tuple[int, int] = (8, 4),
    keys: tuple[str, ...] = KEYS,
    right: tuple[str, ...] = (),
    missing: tuple[str, ...] = (),
    adapter: tuple[float, int] | None = (2.0, 16),
    off: Values | None = None,
    base: QuantizedBase | None = None,
) -> Any:
    """Return a case of one pair; `off` are the distances of its gradients beside each base.

    `base` is the quantization that the given base shows. `tried` of the case lists the bases that
    gradients were computed beside.
    """
    shapes = dict(zip(keys, (a, b), strict=False))
    far: Values = {None: 1.0, **(off or {})}

    tried: list[QuantizedBase | None] = []

    def recompute(change: BackwardChange, names: Any) -> Any:
        tried.append(change.base)
        distance = far.get(change.base, 0.9)
        return SimpleNamespace(keys=keys, gradient=lambda key: np.full(shapes[key], 1 - distance))

    return SimpleNamespace(
        names={key: (key,) for key in keys},
        wrong=frozenset(keys) - {*right, *missing},
        right=frozenset(right),
        open=frozenset(),
        missing=frozenset(missing),
        adapter=adapter,
        case=lambda key: SimpleNamespace(
            given=np.ones(shapes[key]), computed=np.full(shapes[key], 1 + far[None])
        ),
        recompute=recompute,
        base=base,
        tried=tried,
    )


@pytest.mark.parametrize("find", [guess_merged, guess_factor_order, guess_quantized_base])
def test_nothing_is_guessed_of_a_whole_model_or_where_most_gradients_agree(find: Any) -> None:
    off: Values = {FIRST: 0.0}
    square: dict[str, Any] = {"a": (8, 8), "b": (8, 8), "off": off}
    assert list(find(case_of(**square)))
    assert not list(find(case_of(keys=("L1.attn_q.weight", "L1.attn_v.weight"), **square)))
    assert not list(find(case_of(right=KEYS, **square)))


def test_a_merged_product_has_every_scale_once_on_both_sides() -> None:
    found = list(guess_merged(case_of(adapter=(3.0, 16))))
    times = [guess.change.merged for guess in found if guess.change is not None]
    assert sorted(times) == pytest.approx(
        sorted(sign * each / 3 for each in (0.1875, 0.75, 1, 3, 6, 9, 12, 48) for sign in (1, -1))
    )
    says = {round(guess.change.merged, 6): guess.says for guess in found if guess.change}
    assert "counts twice" in says[1.0] and "given has the adapter merged" in says[-1.0]
    assert "merged by the factor 48: the stated 3 times r" in says[16.0]
    of_one = {guess.says for guess in guess_merged(case_of(adapter=(2.0, 4)))}
    assert any("the factor 4: the stated 2 twice, or times the root" in one for one in of_one)
    assert len(list(guess_merged(case_of(adapter=None)))) == 2, "no scale of all pairs"


def test_factors_are_taken_otherwise_only_as_their_shapes_allow() -> None:
    def ways(*shapes: Any, **more: Any) -> list[Any]:
        case = case_of(*shapes, **more)
        return [one.change.factors for one in guess_factor_order(case) if one.change]

    assert ways((8, 8), (8, 8)) == ["exchanged", "exchanged, gradients by name", "transposed"]
    assert ways((4, 8), (8, 4)) == ["transposed"]
    assert ways((4, 8), (6, 4)) == []
    assert ways((8, 8), (8, 8), missing=KEYS[1:]) == []


def test_bases_that_the_gradients_do_not_tell_apart_are_all_named() -> None:
    plain = QuantizedBase("NF4", 64, False)
    (one,) = guess_quantized_base(case_of(off={FIRST: 0.01, plain: 0.05}))
    assert one.change is not None and (one.change.base, one.most) == (FIRST, "confirmed")
    assert one.says.endswith("NF4 in blocks of 64, scales quantized too (double quantization)")
    (both,) = guess_quantized_base(case_of(off={FIRST: 0.018, plain: 0.01}))
    assert both.change is not None and (both.change.base, both.most) == (plain, "explained")
    assert both.says.endswith("scales in float32, or NF4 in blocks of 64, scales quantized too "
                              "(double quantization)")  # fmt: skip
    (head,) = guess_quantized_base(case_of(off={FIRST: 0.4, WITH_HEAD: 0.01}))
    assert head.change is not None and (head.change.base, head.most) == (WITH_HEAD, "confirmed")
    assert "NF4 in blocks of 64, of the head too" in head.says
    (alike,) = guess_quantized_base(case_of(off={FIRST: 0.3, WITH_HEAD: 0.3}))
    assert alike.change is not None and alike.change.base == FIRST, "no head of its own"
    assert alike.most == "confirmed" and "head" not in alike.says
    far = QuantizedBase("FP4", 4096, True)
    (last,) = guess_quantized_base(case_of(off={far: 0.3}))
    assert last.change is not None and last.change.base == far
    assert not list(guess_quantized_base(case_of(off={FIRST: 0.6})))


def test_a_quantized_head_is_found_beside_layers_of_any_encoding() -> None:
    """Seen red, each: heads tried only beside the nearest layers, or only in blocks of 64."""
    nearer = QuantizedBase("FP4", 64)
    case = case_of(off={FIRST: 0.6, nearer: 0.4, WITH_HEAD: 0.01})
    (first,) = guess_quantized_base(case)
    assert first.change is not None and (first.change.base, first.most) == (WITH_HEAD, "confirmed")
    assert nearer not in case.tried, "nothing is tried once a base leaves next to nothing"
    layers, head = (QuantizedBase("NF4", 128, True, part) for part in ("layers", "layers and head"))
    (other,) = guess_quantized_base(case_of(off={layers: 0.4, head: 0.01}))
    assert other.change is not None and (other.change.base, other.most) == (head, "confirmed")
    assert "NF4 in blocks of 128, of the head too" in other.says


def test_a_base_that_is_quantized_is_not_quantized_in_other_ways() -> None:
    """Seen red: all sizes of blocks tried beside a base of 4 bits."""
    given, own = QuantizedBase("FP4", 128), QuantizedBase("FP4", 128, True)
    case = case_of(base=given)
    assert not list(guess_quantized_base(case))
    heads = {QuantizedBase("FP4", 128, nested, "head") for nested in (False, True)}
    assert {*case.tried} == {own, *heads}
    (one,) = guess_quantized_base(case_of(base=given, off={own: 0.01}))
    assert one.change is not None and (one.change.base, one.most) == (own, "confirmed")


@pytest.mark.parametrize("distance", [20.0, 0.97])
def test_the_search_ends_where_4_bits_move_gradients_much_further_or_less(distance: float) -> None:
    """Seen red: 32 passes beside gradients that differ by another order of size."""
    first, other = QuantizedBase("NF4", 64), QuantizedBase("FP4", 64)
    near: Values = {None: -1.0, first: 1 - 2 / 20}  # moves by a tenth of the differences
    far: Values = {first: distance}
    case = case_of(off={**(far if distance > 1 else near), other: 0.0})
    assert not list(guess_quantized_base(case))
    assert {*case.tried} == {first}
