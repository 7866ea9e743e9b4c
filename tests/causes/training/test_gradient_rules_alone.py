"""Rules on gradients, each by itself: orders, missing parts, factors, exchanges, operations."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training import backward_operations, exchanged_gradients, gradient_scale
from aprfmt.causes.training import gradient_layout as layout
from aprfmt.causes.training.backward_case import BackwardCase
from aprfmt.causes.training.earlier_gradients import guess_earlier_gradient
from aprfmt.causes.training.gradient_case import GradientCase

RNG = np.random.default_rng(3)
RIGHT = RNG.standard_normal((24, 6))
HEADS = {"n_heads": 4, "n_kv_heads": 3, "n_experts": 0}


def case_of(given: Any, computed: Any = RIGHT, key: str = "L0.attn_q.weight", **more: Any) -> Any:
    return GradientCase(key, np.asarray(given), np.asarray(computed), **{"sizes": HEADS} | more)


def said(find: Callable[..., Iterable[Any]], case: Any) -> list[str]:
    """Return what the guesses say that make the given gradient."""
    return [guess.says for guess in find(case) if guess.right(case)]


# --- orders and parts of one gradient -----------------------------------------------------------


def test_a_transposed_gradient_has_the_weights_shape() -> None:
    guess = layout.guess_transposed
    assert said(guess, case_of(RIGHT.T.reshape(24, 6))) == ["the gradient is transposed"]
    assert not said(guess, case_of(RIGHT))
    for shape in ((1, 9), (9, 1)):
        vector = np.ones(shape)
        assert not list(guess(case_of(vector, vector)))


def test_blocks_of_rows_or_columns_stand_in_another_order() -> None:
    """The last two are halves and pairs of each of four heads, of which three would be whole."""
    pairs = np.arange(24).reshape(4, 3, 2).swapaxes(1, 2).reshape(-1)
    halves = np.arange(24).reshape(4, 2, 3).swapaxes(1, 2).reshape(-1)
    for given, text in (
        (np.roll(RIGHT, 12, 0), "2 equal blocks of rows stand in the order 1, 0"),
        (np.roll(RIGHT, 8, 0), "3 equal blocks of rows stand in the order 2, 0, 1"),
        (np.roll(RIGHT, 2, 1), "3 equal blocks of columns stand in the order 2, 0, 1"),
        (RIGHT[pairs], "rows of each head that rope turns together stand half a head apart"),
        (RIGHT[halves], "rows of each head that rope turns together stand side by side"),
    ):
        assert text in said(layout.guess_block_order, case_of(given)), text
    for given in (RIGHT, RIGHT[::-1], RNG.standard_normal((24, 6))):
        assert not said(layout.guess_block_order, case_of(given))
    assert layout._block_order(RIGHT, RIGHT, 4) is None
    twice = np.concatenate([RIGHT[:6], RIGHT[:6], RIGHT[12:]])
    assert layout._block_order(twice, RIGHT, 4) is None  # two are nearest to the same one
    odd = np.roll(RIGHT, 6, 0) + 0.2 * RNG.standard_normal((24, 6))
    assert layout._block_order(odd, RIGHT, 4) is None  # and one is near none
    found = layout._block_order(np.roll(RIGHT, 6, 0), RIGHT, 4)
    assert found is not None and found.tolist() == [3, 0, 1, 2]


def blocks(factors: Any, across: bool = False) -> Any:
    right = RIGHT.T if across else RIGHT
    made = (right.reshape(len(factors), -1) * np.array(factors)[:, None]).reshape(right.shape)
    return made.T if across else made


def test_heads_and_experts_are_missing_or_scaled() -> None:
    for factors, key, sizes, text in (
        ([1, 1, 0, 1], "L0.attn_q.weight", HEADS, "head 2: none"),
        ([1, 1, 0.0004, 1], "L0.attn_q.weight", HEADS, "head 2: none"),
        ([1, 3, 0, 1], "L0.attn_q.weight", HEADS, "head 1: 3 times, head 2: none"),
        ([1, 0.5, 1], "L0.attn_k.weight", HEADS, "key and value head 1: 0.5 times"),
        ([2, 1, 1, 1], "L0.ffn_up_exps.weight", {"n_experts": 4}, "expert 0: 2 times"),
    ):
        case = case_of(blocks(factors), key=key, sizes=sizes)
        says = f"the gradient of some blocks is another one: {text}"
        assert said(layout.guess_wrong_blocks, case) == [says]
        other = "L0.attn_output.weight"
        assert not list(layout.guess_wrong_blocks(replace(case, key=other, sizes={"n_heads": 5})))
    across = case_of(blocks([1, 1, 0], True), key="L0.attn_output.weight", sizes={"n_heads": 3})
    assert said(layout.guess_wrong_blocks, across) == [
        "the gradient of some blocks is another one: head 2: none"
    ]
    assert not list(layout.guess_wrong_blocks(replace(across, key="L0.attn_q.weight")))
    for factors in ([1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1.009]):  # right, most wrong, rounding
        case = case_of(blocks(factors), sizes={"n_heads": 4})
        assert not list(layout.guess_wrong_blocks(case))
    half = case_of(blocks([1, 1, 0, 0]), sizes={"n_heads": 4})
    assert len(said(layout.guess_wrong_blocks, half)) == 1
    experts = case_of(blocks([0, 1, 1, 1]), sizes={"n_experts": 4})
    assert not list(layout.guess_wrong_blocks(experts))  # of a weight that no expert has
    nothing = np.zeros((24, 6))
    assert not list(layout.guess_wrong_blocks(case_of(RIGHT, nothing)))


def test_rows_without_a_gradient_are_named_unless_they_are_whole_heads() -> None:
    lost = RIGHT.copy()
    lost[[1, 5, 6, 7, 20]] = 0
    assert said(layout.guess_missing_rows, case_of(lost)) == [
        "5 rows have no gradient: 1, 5, 6, 7, ..."
    ]
    small = case_of(lost * 1e-3, RIGHT * 1e-3)
    assert len(said(layout.guess_missing_rows, small)) == 1
    assert not said(layout.guess_missing_rows, case_of(lost * 2))
    for given, computed in (
        (RIGHT, RIGHT),
        (0 * RIGHT, RIGHT),
        (blocks([1, 0, 1, 1]), RIGHT),
        (lost, lost),
        (lost[:1] * 0, RIGHT[:1]),
    ):
        assert not list(layout.guess_missing_rows(case_of(given, computed)))


def table(given: Any, **more: Any) -> Any:
    return case_of(given, key="token_embd.weight", **more)


def test_rows_of_tokens_that_occur_several_times_are_not_added_up() -> None:
    used, twice = frozenset(range(10)), frozenset({2, 4, 7, 9, 24, 99})
    right = RIGHT.copy()
    right[10:] = 0
    given = right.copy()
    given[[2, 4, 7, 9]] *= 0.5
    more: Any = {"computed": right, "tokens": used, "repeated": twice}
    text = (
        "4 rows are wrong, all of tokens that occur more than once: their occurrences are not "
        "added up"
    )
    assert said(layout.guess_repeated_rows, table(given, **more)) == [text]
    most = given.copy()
    most[9] = right[9]  # three of four are fewer than most
    other = given.copy()
    other[3] *= 2
    for case in (
        table(most, **more),
        table(other, **more),
        table(right, **more),
        table(given, **more | {"repeated": frozenset()}),
        case_of(given, **more),
        table(given, **more | {"repeated": used}),
    ):
        assert not list(layout.guess_repeated_rows(case))
    five = given.copy()
    five[1], repeated = right[1], frozenset({1, 2, 4, 7, 9})
    assert said(layout.guess_repeated_rows, table(five, **more | {"repeated": repeated}))


def test_a_tied_table_has_one_of_its_two_parts() -> None:
    used = frozenset({0, 1, 2, 24, 99})
    head = RIGHT.copy()
    head[:3] = 2.0
    rows = RIGHT.copy()
    rows[3:] = 0
    tied: Any = {"tokens": used, "sizes": {"tied_embeddings": 1}}
    for given, which in ((rows, "embedding"), (head, "head")):
        text = f"the table is tied, and only the {which}'s part is in its gradient"
        assert said(layout.guess_tied_part, table(given, **tied)) == [text]
        others: Any = ({"sizes": {}}, {"tokens": frozenset()}, {"tokens": frozenset(range(24))})
        for other in others:
            assert not list(layout.guess_tied_part(table(given, **tied | other)))
        assert not list(layout.guess_tied_part(case_of(given, **tied)))
    both = RIGHT * 2
    assert not list(layout.guess_tied_part(table(both, **tied)))


# --- one factor, a sign, the step before --------------------------------------------------------


def test_a_factor_is_named_by_what_makes_it() -> None:
    for factor, counts, says in (
        (8.0, {}, "8 times the right one: summed, not averaged"),
        (1 / 8, {}, "1/8 of the right one: divided by 8 once too often"),
        (1024.0, {}, "1024 times the right one: a loss scale, 2^k"),
        (64.0, {}, "64 times the right one: summed, not averaged"),
        (0.7, {}, "0.7 times the right one"),
        (12.5, {"labels / rows": 12.5}, "12.5 times the right one: labels / rows"),
        (1 / 12.5, {"labels / rows": 12.5}, "0.08 times the right one: 1 / (labels / rows)"),
        (1 / 30.5, {"rate": 30.5}, "0.03279 times the right one: 1 / rate"),
        (8.0, {"ranks": 8.0}, "8 times the right one: ranks, or summed, not averaged"),
        (1.004, {}, "1.004 times the right one"),
    ):
        guess = gradient_scale.factor_guess(factor, 1e-6, counts)
        assert guess.says == f"the gradient is {says}"
        assert guess.most == ("explained" if ", or " in says else "confirmed")
        case = case_of(RIGHT * factor)
        assert guess.right(case) and guess.factor == (factor, 1e-6) and guess.free == 1
    assert gradient_scale._readings(1.0, 1e-6, {"ranks": 1.0, "none": 0.0}) == []
    for times, found in ((3.0, 1), (-3.0, 0)):
        assert len(said(gradient_scale.guess_factor, case_of(RIGHT * times))) == found
    noise = RNG.standard_normal((24, 6))
    assert not list(gradient_scale.guess_factor(case_of(noise)))
    assert not list(gradient_scale.guess_factor(case_of(RIGHT, 0 * RIGHT)))


def test_factors_that_may_be_one_are_joined_and_the_most_come_first() -> None:
    joined = gradient_scale.joined_factors(
        {"a": (2.0, 0.001), "b": (2.0015, 0.001), "c": (4.0, 0.01), "d": (2.1, 0.001)}, {}
    )
    assert [keys for _, keys in joined] == [("b", "a"), ("d",), ("c",)]
    assert [guess.factor for guess, _ in joined] == [(2.0015, 0.001), (2.1, 0.001), (4.0, 0.01)]
    three = {"a": (3.0, 0.02), "b": (3.01, 0.01), "c": (3.0, 0.01)}
    ((guess, keys),) = gradient_scale.joined_factors(three, {})
    assert keys == ("b", "c", "a") and guess.factor is not None  # in b and a, by their rooms
    assert guess.factor[0] == pytest.approx((3.01 / 1e-4 + 3.0 / 4e-4) / (1 / 1e-4 + 1 / 4e-4))
    assert gradient_scale.joined_factors({}, {}) == []


def test_a_sign_and_nothing_are_gradients_of_no_factor() -> None:
    assert said(gradient_scale.guess_sign, case_of(-RIGHT)) == ["the gradient has the other sign"]
    assert not said(gradient_scale.guess_sign, case_of(RIGHT))
    assert len(said(gradient_scale.guess_zero, case_of(0 * RIGHT))) == 1
    assert not list(gradient_scale.guess_zero(case_of(RIGHT)))
    assert not list(gradient_scale.guess_zero(case_of(0 * RIGHT, 0 * RIGHT)))


def test_the_gradient_of_the_step_before_is_alone_or_added() -> None:
    earlier = RNG.standard_normal((24, 6))
    for given, cause in ((earlier, "gradient_stale"), (RIGHT + earlier, "gradient_not_zeroed")):
        case = case_of(given, earlier=earlier)
        assert [one.cause for one in guess_earlier_gradient(case) if one.right(case)] == [cause]
    for none in (None, 0 * earlier):
        assert not list(guess_earlier_gradient(case_of(earlier, earlier=none)))


# --- gradients under other names, and operations ------------------------------------------------


def all_of(given: dict[str, Any], computed: dict[str, Any], wrong: Iterable[str]) -> BackwardCase:
    cases = {key: case_of(given[key], computed[key], key=key) for key in given}

    def norm(x: Any) -> float:
        return float(np.linalg.norm(x))

    none: Any = None
    norms = {key: (norm(given[key]), norm(computed[key])) for key in given}
    return BackwardCase(
        cases.__getitem__,
        {key: (key,) for key in given},
        frozenset(given) - frozenset(wrong),
        frozenset(wrong),
        frozenset(),
        norms,
        none,
    )


def test_gradients_of_other_parameters_are_told_in_both_directions() -> None:
    keys = [f"L0.{name}.weight" for name in ("attn_k", "attn_q", "attn_v")]
    computed = {key: RNG.standard_normal((6, 4)) for key in keys}
    a, b, c = keys
    swapped = {a: computed[b], b: computed[a], c: computed[c]}
    find = exchanged_gradients.guess_exchanged
    (guess,) = find(all_of(swapped, computed, (a, b)))
    assert guess.source == {a: b, b: a}
    assert guess.says.startswith("2 gradients are exchanged: ") and not guess.says.endswith("...")
    turned = {a: computed[b], b: computed[c], c: computed[a]}
    (guess,) = find(all_of(turned, computed, keys))
    assert guess.source == {a: b, b: c, c: a} and guess.says.endswith(", ...")
    for given, wrong in (
        ({a: computed[b], b: computed[b] * 0, c: computed[c]}, (a, b)),
        ({a: computed[b], b: RNG.standard_normal((6, 4)), c: computed[c]}, (a, b)),
        ({a: computed[b], b: computed[a] * 1.1, c: computed[c]}, (a, b)),
    ):
        assert not list(find(all_of(given, computed, wrong)))
    shaped = {a: computed[b].T.reshape(4, 6), b: computed[a], c: computed[c]}
    held = {a: computed[a].reshape(4, 6), b: computed[b], c: computed[c]}
    assert not list(find(all_of(shaped, held, (a, b))))


@pytest.mark.parametrize("missing", [False, True])
def test_an_operation_is_named_by_the_weights_that_are_wrong_beside_it(missing: bool) -> None:
    """In the last layer that is wrong: which of its weights are, and which are right."""
    roles = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down", "ffn_gate_inp", "ffn_up_exps")
    names: Any = {f"L{i}.{role}.weight": () for i in (0, 1) for role in roles}
    names |= {"token_embd.weight": (), "output.weight": ()}
    none: Any = None

    def causes(*wrong: str) -> set[str]:
        keys = frozenset(f"{key}.weight" for key in wrong)
        halves = (frozenset(), keys) if missing else (keys, frozenset())
        case = BackwardCase(none, names, frozenset(names) - keys, *halves, {}, none)
        asking = ("guess_tied_part", "guess_shares_of_keys", "guess_shares_of_rope")
        rows = [row for row in backward_operations.HYPOTHESES if row.find.__name__ not in asking]
        return {guess.cause for row in rows for guess in row.find(case)}

    mask = "backward_mask"
    assert causes("L1.attn_q", "L1.attn_k") == {mask, "backward_rope"}
    assert causes("L0.attn_q", "token_embd") == {mask, "backward_rope"}
    assert causes("L1.attn_k") == {mask, "backward_rope", "backward_kv_group"}
    assert causes("L1.attn_k", "L1.attn_v") == {mask, "backward_kv_group"}
    assert causes("L1.attn_q", "L1.attn_k", "L1.attn_v") == {mask}
    assert causes("L1.attn_v", "L0.attn_output", "L0.ffn_down") == {mask, "backward_kv_group"}
    assert causes("L1.attn_output", "L1.attn_q") == set()
    assert causes("L1.ffn_down", "L1.attn_q") == {"backward_norm"}
    assert causes("L0.ffn_down") == set()
    assert causes("L1.ffn_gate_inp") == {"backward_router"}
    assert causes("L1.ffn_gate_inp", "L1.ffn_up_exps") == set()
    assert causes("token_embd") == causes("output") == causes() == set()


def test_the_factor_of_norms_that_is_tried_is_not_the_one_that_the_model_has() -> None:
    none: Any = None
    keys = frozenset({"L1.ffn_down.weight"})
    names = {key: (key,) for key in (*keys, "output_norm.weight", "L0.ffn_down.weight")}
    for offset, tried in (
        (0, {"norm_offset_added"}),
        (1, {"norm_offset_left_out"}),
        (None, set[str]()),
    ):
        case = BackwardCase(
            none, names, frozenset(names) - keys, keys, frozenset(), {}, none, norm_offset=offset
        )
        found = [guess.change for guess in backward_operations.guess_norms(case)]
        operations = {change.operation for change in found if change is not None}
        factors = {one for one in operations if one and "offset" in one}
        assert factors == tried and "norm_weight_left_out" in operations


def test_a_tied_table_alone_has_lost_one_of_its_uses() -> None:
    none: Any = None
    for wrong, tied, found in (
        (("token_embd.weight",), 1, ["head_cut", "embedding_cut"]),
        (("token_embd.weight",), 0, []),
        (("token_embd.weight", "L0.attn_q.weight"), 1, []),
        ((), 1, []),
    ):
        sizes: Any = SimpleNamespace(sizes={"tied_embeddings": tied})
        held: Any = dict.fromkeys(wrong, sizes)
        case = BackwardCase(
            held.__getitem__, {}, frozenset(), frozenset(wrong), frozenset(), {}, none
        )
        ways = list(backward_operations.guess_tied_part(case))
        assert [guess.change.operation for guess in ways if guess.change] == found
        parts = [guess.says.rpartition("only the ")[2].partition("'")[0] for guess in ways]
        assert parts == ["embedding", "head"][: len(found)]


# --- shares of heads and of pairs ----------------------------------------------------------------

PARTS = RNG.standard_normal((8, 24, 6))  # what each of up to eight shares adds to a gradient
REST = RNG.standard_normal((24, 6))  # and what all of them leave alone


def shares_of(
    factors: dict[str, Any], kind: str, sizes: dict[str, int], wrong: Iterable[str]
) -> list[tuple[str, str]]:
    """Return [(cause, sentence)] of the guesses about shares of a batch's gradients.

    `factors` are those of the shares of each wrong key, `kind` is what the shares are of.
    """

    def made(key: str, counts: Any) -> Any:
        return REST + np.tensordot(np.asarray(counts), PARTS[: len(counts)], 1)

    def computed(key: str) -> Any:
        return made(key, np.ones(len(factors[key])))

    def recompute(change: Any, stored: Any) -> Any:
        shares, (key,) = change.shares, stored
        counts = shares.queries if "attn_q" in key else shares.keys
        same = shares.of == kind and len(counts) == len(factors[key])
        value = made(key, counts) if same else computed(key)
        return SimpleNamespace(keys=[key], gradient=lambda asked: value)

    wrong = frozenset(wrong)
    every = {"L1.attn_output.weight", "L1.attn_q.weight", "L1.attn_v.weight", *wrong}
    case: Any = BackwardCase(
        lambda key: case_of(made(key, factors[key]), computed(key), key, sizes=sizes),
        {key: (key,) for key in every}, frozenset(every - wrong), wrong, frozenset(), {},
        recompute,
    )  # fmt: skip
    rules = backward_operations.guess_shares_of_keys, backward_operations.guess_shares_of_rope
    return [(guess.cause, guess.says) for rule in rules for guess in rule(case)]


Q, K, LATENT = "L1.attn_q.weight", "L1.attn_k.weight", "L1.attn_kv_a_mqa.weight"


def test_query_heads_that_share_a_key_do_not_count_alike() -> None:
    one, group = {"n_heads": 4, "n_kv_heads": 4}, {"n_heads": 8, "n_kv_heads": 2}
    latent = "of the gradient of the rotated part of keys, which {} heads share, "
    grouped = "of the gradient of keys, which 4 query heads share, "
    for key, sizes, factors, text in (
        (LATENT, one, (1, 1, 0, 0), latent.format(4) + "query heads 2-3 of 4 are lost"),
        (LATENT, one, (0.25,) * 4, latent.format(4) + "every query head counts 0.25 times"),
        (LATENT, {"n_heads": 16}, (1, 1, 1, 1, 1, 1, 0, 1),
         latent.format(16) + "query heads 12-13 of 16 are lost"),
        (K, group, (1, 0.5, 1, 1), grouped + "query head 1 of 4 counts 0.5 times"),
        (K, group, (0, 1.37, 1, 0),
         grouped + "query heads 0, 3 of 4 are lost, query head 1 of 4 counts 1.37 times"),
    ):  # fmt: skip
        found = shares_of({key: factors}, "sharing heads", sizes, [key])
        assert found == [("backward_kv_group", text)]
    assert not shares_of({K: (2, 2, 2, 2)}, "sharing heads", group, [K])
    right = {LATENT: (1, 1, 1, 1)}
    assert not shares_of(right, "sharing heads", one, [LATENT])  # it is wrong by rounding alone
    assert not shares_of({K: (1, 0)}, "sharing heads", {"n_heads": 4, "n_kv_heads": 4}, [K])
    both = {K: (1, 1, 0, 0), Q: (1, 1, 0, 0)}  # queries are wrong too
    assert not shares_of(both, "sharing heads", group, [K, Q])


def test_rope_hands_on_the_gradient_of_some_heads_or_of_one_element_of_each_pair() -> None:
    sizes = {"n_heads": 4, "n_kv_heads": 2}
    for kind, factors, text in (
        ("heads", {Q: (1, 1, 0, 0), K: (1, 0)},
         "queries heads 2-3 of 4 are lost, of the gradient of keys head 1 of 2 is lost"),
        ("heads", {Q: (1, 0.5, 1, 1)}, "queries head 1 of 4 counts 0.5 times"),
        ("pairs given", {Q: (1, 0), K: (0.5, 1)},
         "queries the second element of each pair is lost after the rotation, of the gradient of "
         "keys the first element of each pair counts 0.5 times after the rotation"),
        ("pairs read", {K: (0, 1)},
         "keys the first element of each pair is lost before the rotation"),
    ):  # fmt: skip
        found = shares_of(factors, kind, sizes, factors)
        assert found == [("backward_rope", f"at rope, of the gradient of {text}")], kind
    assert not shares_of({Q: (1, 1, 1, 1)}, "heads", sizes, [Q])
    assert not shares_of({Q: (2, 2)}, "pairs given", sizes, [Q])  # one factor of all says no place
    values = "L1.attn_v.weight"
    assert not shares_of({Q: (1, 1, 0, 0), values: (1, 1)}, "heads", sizes, [Q, values])
