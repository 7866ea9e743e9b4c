"""What a merge did to a weight: innocents in every type, and each usual mistake by its name.

The merged values are made here, with ml_dtypes' rounding, in the way that PEFT and others make
them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.adapters.merge_faults import (
    EITHER,
    MORE,
    ONCE,
    Judged,
    Merge,
    OtherChange,
    judge_merge,
    scale_factors,
)

Array = np.ndarray[Any, Any]
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SIZE = 64
RANK, ALPHA = 4, 12.0
SCALE = ALPHA / RANK


def stored(values: Array, encoding: str) -> Array:
    return values.astype(TYPES[encoding]).astype(np.float64)


def parts(size: float, encoding: str, seed: int = 0) -> tuple[Array, Array]:
    """Return a base as it is stored, and B @ A of that size beside it."""
    rng = np.random.default_rng(seed)
    base = stored(rng.normal(0, 0.02, (SIZE, SIZE)), encoding)
    product = rng.normal(0, 1, (SIZE, RANK)) @ rng.normal(0, 1, (RANK, SIZE))
    return base, product * (size * 0.02 / np.sqrt(RANK))


def judged(
    base: Array, product: Array, merged: Array, encoding: str, others: Any = (), **more: Any
) -> Judged:
    said = {"rank_stabilised": False, "alpha": ALPHA, "r": RANK} | more
    merge = Merge(base, SCALE * product, merged, encoding, encoding, False)
    return judge_merge(merge, scale_factors(SCALE, RANK, **said), lambda: others)


@pytest.mark.parametrize("encoding", TYPES)
@pytest.mark.parametrize("size", [1.0, 1e-2, 3e-4])
def test_a_merge_in_any_type_is_once(encoding: str, size: float) -> None:
    """A change that the type takes nearly whole is once too; its loss is counted."""
    base, product = parts(size, encoding)
    product[0, 0] = 0.1  # of which something is left in every type
    merged = stored(base + SCALE * product, encoding)
    found = judged(base, product, merged, encoding)
    assert found.found == ONCE, found
    lost = np.linalg.norm(merged - base - SCALE * product) / np.linalg.norm(SCALE * product)
    assert found.lost == pytest.approx(lost)
    assert judged(base, product, base, encoding).found == "not at all"


def test_a_type_that_holds_none_of_the_change_decides_nothing() -> None:
    base, product = parts(1e-6, "BF16")
    found = judged(base, product, stored(base + SCALE * product, "BF16"), "BF16")
    assert (found.found, found.lost) == (EITHER, 1.0)


def as_nf4(base: Array, bits: int = 0) -> Array:
    """Return a base through NF4; with `bits`, its scales were stored in as many."""
    from aprfmt.codecs import nf4

    code = np.asarray(nf4.CODE)
    blocks = base.reshape(-1, 64)
    scale = np.abs(blocks).max(1, keepdims=True)
    values = code[np.abs(blocks / scale - code[:, None, None]).argmin(0)]
    if bits:
        scale = np.round(scale / scale.max() * 2**bits) * scale.max() / 2**bits
    return np.asarray((values * scale).reshape(base.shape))


def as_q8(base: Array) -> Array:
    blocks = base.reshape(-1, 32)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    return np.asarray((np.round(blocks / scale) * scale).reshape(base.shape))


BASES: dict[str, tuple[Callable[[Array], Array], str]] = {
    "nf4": (as_nf4, "decoded from NF4"),
    "nf4 with quantized scales": (partial(as_nf4, bits=8), "decoded from NF4"),
    "int8": (as_q8, "decoded from Q8_0"),
}


@pytest.mark.parametrize("encoding", TYPES)
@pytest.mark.parametrize("state", BASES)
def test_a_merge_into_the_quantized_base_is_once(encoding: str, state: str) -> None:
    base, product = parts(0.1, encoding)
    made, says = BASES[state]
    merged = stored(made(base) + SCALE * product, encoding)
    found = judged(base, product, merged, encoding)
    assert found.found == ONCE and says in found.says, found
    merged[3, 5] += 0.05
    assert judged(base, product, merged, encoding).found != ONCE


@pytest.mark.parametrize("encoding", ["F16", "BF16"])
def test_a_merge_before_the_base_was_rounded_is_once(encoding: str) -> None:
    rng = np.random.default_rng(3)
    exact = rng.normal(0, 0.02, (SIZE, SIZE))
    _, product = parts(0.1, encoding)
    merged = stored(exact + SCALE * product, encoding)
    found = judged(stored(exact, encoding), product, merged, encoding)
    assert found.found == ONCE and "before it was rounded" in found.says, found
    merged[3, 5] += 0.01
    assert judged(stored(exact, encoding), product, merged, encoding).found != ONCE


WRONG: dict[str, tuple[float, dict[str, Any], str, str]] = {
    "twice": (2.0, {}, "twice", ""),
    "subtracted": (-1.0, {}, "subtracted", ""),
    "alpha for the scale": (ALPHA / SCALE, {}, "scaled otherwise", "alpha is taken as the scale"),
    "no scale": (1 / SCALE, {}, "scaled otherwise", "the scale is left out"),
    "turned over": (1 / SCALE**2, {}, "scaled otherwise", "r / alpha"),
    "rsLoRA unasked": (np.sqrt(RANK), {}, "twice", "rsLoRA"),
    "rsLoRA ignored": (
        1 / np.sqrt(RANK),
        {"rank_stabilised": True},
        "scaled otherwise",
        "use_rslora is ignored",
    ),
    "alpha_pattern ignored": (2 / 3, {"alpha": 8.0}, "scaled otherwise", "alpha_pattern"),
    "rank_pattern ignored": (1 / 4, {"r": 16}, "scaled otherwise", "rank_pattern"),
}


@pytest.mark.parametrize("encoding", TYPES)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_factor_is_named(encoding: str, case: str) -> None:
    base, product = parts(0.3, encoding)
    times, more, word, says = WRONG[case]
    merged = stored(base + times * SCALE * product, encoding)
    found = judged(base, product, merged, encoding, **more)
    assert found.found == word and says in found.says, found
    assert found.times == pytest.approx(times, rel=0.05) and found.rest < 0.02


@pytest.mark.parametrize(
    ("alpha", "r", "says"),
    [
        (8.0, RANK, "alpha_pattern is ignored: the alpha of all others is taken"),
        (ALPHA, 16, "rank_pattern is ignored: the rank of all others divides"),
        (8.0, 16, "alpha_pattern and rank_pattern are ignored: what all others have is taken"),
    ],
)
def test_the_patterns_that_are_ignored_are_said_once(alpha: float, r: int, says: str) -> None:
    """Seen red: "alpha_pattern or rank_pattern is ignored or alpha_pattern is ignored"."""
    factors = scale_factors(SCALE, RANK, rank_stabilised=False, alpha=alpha, r=r)
    wanted = alpha / r / SCALE
    (found,) = [each for each in factors if each.times == pytest.approx(wanted)]
    assert found.says == f"{says} ({wanted:.4g} times)"


@pytest.mark.parametrize("encoding", TYPES)
def test_a_change_in_the_wrong_place_is_named(encoding: str) -> None:
    base, product = parts(0.3, encoding)
    _, up = parts(0.3, encoding, seed=7)
    others = [OtherChange("L0.ffn_up.weight", SCALE * up)]
    turned = stored(base + SCALE * product.T, encoding)
    assert judged(base, product, turned, encoding, others).found == "transposed"
    for own, word in ((1, "after its own"), (0, "in place of its own")):
        merged = stored(base + SCALE * (own * product + up), encoding)
        found = judged(base, product, merged, encoding, others)
        assert found.found == "another weight's change" and word in found.says
        assert "L0.ffn_up.weight" in found.says


# what is added, and in which order: multiples of (the own change, ffn_up's, attn_k's)
SUMS: dict[str, tuple[tuple[int, int, int], str]] = {
    # https://github.com/thinking-machines-lab/tinker-cookbook/pull/459
    "own, then another's": ((1, 1, 0), "the change of ffn_up was added after its own"),
    "two others": ((1, 1, 1), "the change of ffn_up and that of attn_k was added after its own"),
    "two others alone": ((0, 1, 1), "ffn_up and that of attn_k was added in place of its own"),
    "another's twice": ((1, 2, 0), "the change of ffn_up (twice) was added after its own"),
}


@pytest.mark.parametrize("encoding", [*TYPES, "Q8_0"])
@pytest.mark.parametrize("case", SUMS)
def test_changes_added_one_after_the_other_are_named(encoding: str, case: str) -> None:
    """Each sum is stored before the next. Seen red: rounded once, and one other change only."""
    times, says = SUMS[case]
    plain = "F32" if encoding == "Q8_0" else encoding
    base, _ = parts(0.3, plain)
    changes = [SCALE * parts(0.3, plain, seed)[1] for seed in (0, 7, 9)]
    merged = base
    for count, change in zip(times, changes, strict=True):
        for _ in range(count):
            merged = stored(merged + change, plain)
    if encoding == "Q8_0":
        merged = as_q8(merged)
    others = [OtherChange("ffn_up", changes[1]), OtherChange("attn_k", changes[2])]
    noise = 0.0 if encoding in TYPES else 0.01
    merge = Merge(base, changes[0], merged, encoding, plain, False, noise)
    found = judge_merge(merge, (), lambda: others)
    assert found.found == "another weight's change" and says in found.says, found
    trained = merged + np.random.default_rng(5).normal(0, 0.3 * changes[0].std(), base.shape)
    trained = as_q8(trained) if encoding == "Q8_0" else stored(trained, plain)
    again = judge_merge(replace(merge, theirs=trained), (), lambda: others)
    assert again.found != "another weight's change", again


@pytest.mark.parametrize("encoding", TYPES)
def test_what_no_sum_gives_is_not_once(encoding: str) -> None:
    base, product = parts(0.3, encoding)
    rng = np.random.default_rng(5)
    trained = stored(base + SCALE * product + rng.normal(0, 0.002, base.shape), encoding)
    others = [OtherChange("L0.ffn_up.weight", SCALE * parts(0.3, encoding, seed=7)[1])]
    found = judged(base, product, trained, encoding, others)
    assert found.found == MORE and "or B was changed in addition" in found.says, found
    merged = stored(base + SCALE * product, encoding)
    merged[3, 5] += 0.01
    found = judged(base, product, merged, encoding)
    assert found.found == "otherwise" and "once but for 1 of 4096 values" in found.says


@pytest.mark.parametrize("encoding", TYPES)
def test_each_expert_has_its_own_answer(encoding: str) -> None:
    pairs = [parts(0.3, encoding, seed) for seed in range(4)]
    base, product = (np.stack(each) for each in zip(*pairs, strict=True))
    merged = base.copy()
    merged[0] = stored(base[0] + SCALE * product[0], encoding)
    found = judged(base, product, merged, encoding)
    assert found.found == "in some experts"
    assert found.says == "expert 0 once; experts 1 to 3 not at all"
    for at in range(4):
        merged[at] = stored(base[at] + SCALE * product[at - 1], encoding)
    found = judged(base, product, merged, encoding)
    assert found.found == "another weight's change" and "the change of expert 3" in found.says


def test_an_expert_may_have_another_stacks_change_of_the_same_expert() -> None:
    """Of a stack, expert by expert; of a single matrix, as it is, in whichever expert it lies."""
    rng = np.random.default_rng(1)
    base, product, stack = (rng.normal(0, 0.02, (4, SIZE, SIZE)) for _ in range(3))
    single = rng.normal(0, 0.02, (SIZE, SIZE))
    others = [OtherChange("a stack", SCALE * stack), OtherChange("a matrix", SCALE * single)]
    added = np.stack([product[0], stack[1], single, product[3]])
    found = judged(base, product, base + SCALE * added, "F32", others)
    assert found.found == "in some experts"
    assert "expert 1 another weight's change: " in found.says and "a stack" in found.says
    assert "expert 2 another weight's change: " in found.says and "a matrix" in found.says


@pytest.mark.parametrize("encoding", TYPES)
@pytest.mark.parametrize("times", [0.25, 0.3, 5.5, -0.5])
def test_a_multiple_that_no_mistake_gives_is_a_scale(encoding: str, times: float) -> None:
    """Nothing is left unexplained. Seen red: "otherwise", 0.25 times and 1e-07 unexplained."""
    base, product = parts(0.3, encoding)
    merged = stored(base + times * SCALE * product, encoding)
    found = judged(base, product, merged, encoding)
    assert found.found == "scaled otherwise"
    assert found.says.endswith(" times the change, which no number of the adapter gives")
    assert abs(found.times - times) < 0.01
    rng = np.random.default_rng(5)
    beside = stored(merged + rng.normal(0, 0.002, base.shape), encoding)
    assert judged(base, product, beside, encoding).found != "scaled otherwise"
    once = stored(base + SCALE * product, encoding)
    assert judged(base, product, once, encoding).found == "once"
