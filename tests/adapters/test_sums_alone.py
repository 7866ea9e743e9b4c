"""Where an adapter's pairs belong and what sums of changes give, each by itself."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aprfmt.arch.binding
from aprfmt.adapters import merge_answers, merge_faults, pair_placement, parameters
from aprfmt.adapters.merge_faults import Judged, Merge, OtherChange
from aprfmt.errors import ConversionError


def test_a_tensor_that_ends_alike_is_named_where_it_is_the_only_one() -> None:
    """The end has a layer's number, or is the whole name."""
    base: Any = dict.fromkeys(
        (
            "model.layers.0.mlp.up.weight",
            "model.layers.1.mlp.up.weight",
            "head.weight",
            "a.norm.weight",
            "b.norm.weight",
            "0.weight",
        )
    )
    found = pair_placement._same_end_text
    there = "; model.layers.1.mlp.up.weight is there"
    assert found("model.layers.1.mlp.up.weight", base) == there
    assert found("language.model.layers.1.mlp.up.weight", base) == there
    assert found("x.y.layers.1.mlp.up.weight", base) == there
    assert found("x.layers.2.mlp.up.weight", base) == ""
    assert found("x.mlp.up.weight", base) == ""  # of which layer nothing says
    assert found("mlp.up.weight", base) == ""  # of two layers
    assert found("norm.weight", base) == ""  # two names are no whole end
    assert found("y.0.weight", base) == ""
    assert found("a.0.weight", dict.fromkeys(("m.a.0.weight",))) == "; m.a.0.weight is there"  # type: ignore[arg-type]


def test_a_sum_of_changes_gives_all_but_rounding() -> None:
    """In a plain type half a step of the sum and of the product, in a packed one a share."""
    rng = np.random.default_rng(8)
    own, other = (1.99 * rng.choice([-1.0, 1.0], (64, 64)) for _ in range(2))
    plain = np.zeros((64, 64))
    found = Judged("x", 0.0, 1.0)

    def judged(theirs: Any, encoding: str = "BF16") -> Judged | None:
        merge = Merge(plain, own, theirs, encoding, "BF16", False)
        return merge_faults._summed_changes(
            merge, found, lambda: [OtherChange("o", other), OtherChange("z", 0 * other)]
        )

    for times, words in ((1, "o"), (2, "o (twice)"), (-1, "o (subtracted)"), (3, "o (3 times)")):
        for mine in (0, 1):
            exact = judged(mine * own + times * other)
            assert exact is not None and exact.found == merge_faults.ANOTHER
            how = "after its own" if mine else "in place of its own"
            assert exact.says == f"the change of {words} was added {how}"
            assert exact.source == ("o" if times == 1 and not mine else "")
    assert judged(own) is None and judged(4 * other) is None and judged(0.5 * other) is None
    spot = np.zeros((64, 64))
    for steps, within in ((2.9, True), (3.5, False), (9.0, False)):
        spot[3, 5] = steps * 2.0**-8
        assert (judged(other + spot) is not None) is within, steps
    rest = rng.normal(size=(64, 64)) * 1.99
    for share, within in ((0.2, True), (0.3, False)):
        assert (judged(other + share * rest, "Q8_0") is not None) is within, share


def test_pairs_of_single_experts_are_stacked_where_every_expert_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter: Any = SimpleNamespace(path=Path("adapter"))

    def refused(experts: Any, stored: tuple[str, ...], roles: tuple[str, ...] = ("up",)) -> bool:
        group = SimpleNamespace(roles=roles, stored=stored)
        monkeypatch.setattr(
            aprfmt.arch.binding, "bind_names", lambda *given: SimpleNamespace(groups=[group])
        )
        monkeypatch.setattr(
            parameters, "read_factors", lambda pair: (np.ones((2, 4)), np.ones((3, 2)))
        )
        base: Any = SimpleNamespace(
            spec=None,
            path=Path("base"),
            hyper={"n_experts": experts},
            roles={"up": SimpleNamespace(group=None)},
        )
        pairs: Any = {name: SimpleNamespace(scale=1.0) for name in stored}
        try:
            assert list(parameters.stacked_changes(adapter, base, pairs)) == []
        except ConversionError as error:
            assert f"{len(stored)} of {experts or 0} experts have a pair" in str(error)
            return True
        return False

    assert not refused(2, ("a", "b")) and not refused(1, ("a",))
    for experts, stored in ((3, ("a", "b")), (1, ("a", "b")), (0, ("a",)), (None, ("a",))):
        assert refused(experts, stored)
    assert refused(1, ("a",), ("up", "gate")) and refused(1, ("a",), ("elsewhere",))


def test_a_weight_that_a_mistake_makes_is_named_where_nothing_else_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of them that is B's to the rounding of its type."""
    rng = np.random.default_rng(9)
    plain, change, made = (rng.normal(size=(16, 16)) for _ in range(3))
    away = Judged(merge_faults.OTHERWISE, 0.5, 1.0, lost=0.25)

    def judged(theirs: Any, found: Judged = away, encoding: str = "F32", **more: Any) -> Judged:
        merge = Merge(plain, change, theirs, encoding, encoding, False)
        mistakes = [("first", plain + change), ("second", made), ("third", made)]
        return merge_faults.judge_otherwise(merge, found, mistakes, **more)

    assert judged(made) == away._replace(found=merge_faults.SCALED, says="second")
    assert judged(plain + change).says == "first"
    assert judged(made, word="other") == away._replace(found="other", says="second")
    assert judged(made * (1 + 2.0**-26)).says == "second"
    assert judged(made * (1 + 2.0**-19)) == away and judged(plain) == away
    for found in (merge_faults.ONCE, merge_faults.EITHER):
        known = Judged(found, 1.0, 0.0)
        assert judged(made, known) == known
    assert judged(made, encoding="Q8_0") == away
    monkeypatch.setattr(merge_faults, "_is_reproduced", lambda merge, times: times == 0)
    assert judged(made) == away


def test_only_weights_that_nothing_gives_are_judged_again_with_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each order of the ranks once, until every weight has an answer."""
    orders = [SimpleNamespace(says=f"order {i}") for i in range(3)]
    monkeypatch.setattr(merge_answers, "OTHER_ORDERS", orders)
    tried: list[str] = []
    right = {"one": "order 1", "two": "order 0", "never": ""}

    def merged(a: Any, adapter: Any, *, again: bool, order: Any) -> Any:
        tried.append(order.says)
        model = SimpleNamespace(find=lambda key: None if key == "lost" else (key, order.says))
        return model, nullcontext(), None

    def judge(values: Any) -> Any:
        (key, order), _, _ = values
        word = merge_faults.ONCE if right[key] == order else merge_faults.OTHERWISE
        return Judged(word, 0.0, 1.0)

    monkeypatch.setattr(merge_answers, "merge_adapter", merged)
    monkeypatch.setattr(
        merge_answers, "_merge_values", lambda mine, theirs, close: (mine, theirs, close)
    )
    monkeypatch.setattr(merge_answers, "judge_merge", judge)
    changed = lambda key, b, judged: SimpleNamespace(key=key, found=judged.found)  # noqa: E731
    monkeypatch.setattr(merge_answers, "_changed_weight", changed)
    base: Any = None
    other: Any = SimpleNamespace(find=lambda key: None if key == "gone" else key)

    def again(*keys: str, found: str = merge_faults.OTHERWISE) -> dict[str, str]:
        tried.clear()
        weights: Any = [SimpleNamespace(key=key, found=found) for key in keys]
        made = merge_answers._try_rank_orders(base, other, Path("adapter"), weights)
        return {one.key: one.found for one in made}

    odd = merge_faults.OTHERWISE
    assert again("one", "two") == {"one": "order 1", "two": "order 0"}
    assert tried == ["order 0", "order 1"]
    assert again("two", found=merge_faults.MORE) == {"two": "order 0"} and tried == ["order 0"]
    assert again("never", "two") == {"never": odd, "two": "order 0"} and len(tried) == 3
    assert again("lost", "gone", "one") == {"lost": odd, "gone": odd, "one": "order 1"}
    assert again("one", found=merge_faults.ONCE) == {"one": merge_faults.ONCE} and not tried
