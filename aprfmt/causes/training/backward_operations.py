"""Operations whose forward value is right and whose backward is wrong."""

from collections.abc import Iterator, Sequence

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.number_ranges import number_ranges
from aprfmt.base.sequences import join_first
from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import (
    BackwardCase,
    BackwardGuess,
    BackwardHypothesis,
    backward_order,
)
from aprfmt.causes.training.batch_samples import NEAR, fit_factors, is_near
from aprfmt.inference.gradients.changes import (
    BackwardChange,
    Operation,
    SharedParts,
    ShareKind,
    WeighedShares,
)

_MADE = "The batch's gradients, computed with that backward, give every parameter's."
CAUSE_ROWS = (
    Cause(
        "backward_kv_group",
        "gradient",
        "bug",
        "Query heads share a key head, or the rotated part of all keys, and its gradient is not "
        "the sum over them.",
        "In the last wrong layer keys, values or both are wrong, queries and the output are right.",
        _MADE,
    ),
    Cause(
        "backward_rope",
        "gradient",
        "bug",
        "The backward of rope does not rotate back: it rotates forward, not at all, or is missing, "
        "or gradients of some heads, or of one element of each pair, are lost or scaled there.",
        "In the last wrong layer queries and keys are wrong or have no gradient, values are right.",
        _MADE,
    ),
    Cause(
        "backward_mask",
        "gradient",
        "bug",
        "The backward of attention computes its probabilities again, without the mask or without "
        "the window that the mask has.",
        "In the last wrong layer queries, keys and values are wrong, the output is right.",
        _MADE,
    ),
    Cause(
        "backward_norm",
        "gradient",
        "bug",
        "The backward of the norms takes the scale, or the mean, for a constant, or multiplies by "
        "another factor than the weight of the norm: without its 1, with a 1 too many, or by none.",
        "The head and the last norm are right, and all below the norm is wrong.",
        _MADE,
    ),
    Cause(
        "backward_router",
        "gradient",
        "bug",
        "In the backward the weights of the experts are constants, and routers learn nothing; "
        "or the sum that divides these weights is a constant, or the gate of a shared expert is.",
        "In the last wrong layer the router has no gradient or another, and the experts are right.",
        _MADE,
    ),
    Cause(
        "backward_recurrence",
        "gradient",
        "bug",
        "The backward of a gated delta net takes its decay, or its strength of writing, for a "
        "constant.",
        "In the last wrong layer what makes the decay or the strength has no gradient or another.",
        _MADE,
    ),
    Cause(
        "backward_detached",
        "gradient",
        "bug",
        "The result of a product is a constant in the backward, as where it is detached or made "
        "without gradients: what it is made of learns nothing and passes nothing on.",
        "Parameters of one branch have no gradient or one of zero, and those below it differ.",
        _MADE,
    ),
    Cause(
        "backward_operation",
        "gradient",
        "bug",
        "The backward of one operation is wrong.",
        "Backward from the loss, the gradient of what the operation reads is the first wrong one "
        "of the capture points, and those of all that is made of it are right.",
        "Nothing makes it again: the place is found, not what the operation does.",
        most="located",
    ),
)
# The last product of a branch, and those before it in the branch.
_BRANCHES = {
    "attn_output": ("attn_q", "attn_k", "attn_v", "attn_qkv"),
    "ffn_down": ("ffn_gate", "ffn_up", "ffn_gate_up"),
}
_INSIDE = ("attn_output", "ffn")  # reached before the inside of attention
MOST_SHARES = 8  # of heads, each of which costs a pass
NEAR_FACTOR = 2e-3  # from a factor that somebody wrote


def _guesses(cause: str, ways: tuple[tuple[Operation, str], ...]) -> Iterator[BackwardGuess]:
    """Yield a guess for each (changed operation, sentence) of `ways`, all of one cause."""
    for operation, says in ways:
        yield BackwardGuess(cause, says, BackwardChange(operation=operation))


def _in_attention(case: BackwardCase) -> bool:
    """Return whether the first wrong gradients are those inside the attention of a layer."""
    return case.first_layer is not None and case.right_at(*_INSIDE)


def guess_detached(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that products are constants whose weights have no gradient, or zeros.

    Of a branch without any gradient it is the last product, else each of those without one. Nothing
    where all parameters have a gradient, or no other gradient is wrong: then they may be frozen.
    """
    zero = {key for key in case.wrong if key in case.norms and _is_lost(*case.norms[key])}
    lost = case.missing | zero
    if not lost or not case.wrong - zero:
        return
    cut: set[str] = set()
    for layer in dict.fromkeys(split_key(key)[0] for key in sorted(lost, key=backward_order)):
        for last, before in _BRANCHES.items():
            ends = {f"L{layer}.{last}.weight"} & lost
            cut |= ends or {f"L{layer}.{role}.weight" for role in before} & lost
    if cut:
        names = [min(case.names[key]) for key in sorted(cut, key=backward_order)]
        many = len(names) > 1
        says = (
            f"the product{'s' * many} with {join_first(names, 3)} {'are' if many else 'is'} "
            f"{'constants' if many else 'a constant'} in the backward, as where "
            f"{'they are' if many else 'it is'} detached: no gradient goes through"
        )
        yield BackwardGuess("backward_detached", says, BackwardChange(cut=frozenset(cut)))


def _is_lost(given: float, computed: float) -> bool:
    """Return whether a gradient was given as zeros, though the one computed here is not zero."""
    return not given and bool(computed)


# What is said of the gradient of a key head, in place of the sum over its query heads.
GROUP_SUMS: tuple[tuple[Operation, str], ...] = (
    ("kv_first_head", "that of the first query head of each group, not the sum over the group"),
    ("kv_last_head", "that of the last query head of each group, not the sum over the group"),
    ("kv_mean", "the mean over the query heads of a group, not the sum"),
)


def _wrong_of_shared(case: BackwardCase) -> SharedParts:
    """Return which of keys and values are wrong in the first wrong layer: both, or one alone."""
    right = case.right_at("attn_k"), case.right_at("attn_v")
    if right[0] == right[1]:
        return "keys and values"
    return "values" if right[0] else "keys"


def guess_key_groups(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that the gradient of a key head is not the sum over its query heads."""
    if not _in_attention(case) or not case.right_at("attn_q"):
        return
    of = _wrong_of_shared(case)
    for operation, is_what in GROUP_SUMS:
        says = f"the gradient of {of} is {is_what}"
        change = BackwardChange(operation=operation, of_shared=of)
        yield BackwardGuess("backward_kv_group", says, change)


def guess_shares_of_keys(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that query heads do not count alike in the gradient of what they share.

    That is a key head with its values, one of them alone, or the rotated part of all keys. The
    factors are solved on one gradient, for equal shares of the heads.
    """
    of = _wrong_of_shared(case)
    key = _first_gradient(case, ("attn_v",) if of == "values" else ("attn_k", "attn_kv_a_mqa"))
    if not _in_attention(case) or not case.right_at("attn_q") or key is None:
        return
    sizes = case.case(key).sizes
    heads = sizes.get("n_heads", 0)
    latent = "attn_kv_a_mqa" in key
    if latent:
        of = "keys and values"
    group = heads if latent else heads // max(1, sizes.get("n_kv_heads", heads))
    count = _count_shares(group)
    if count < 2:
        return
    changes = [_weigh_sharing_heads(one, of) for one in _units(count)]
    factors = _solve_shares(case, key, changes)
    if factors is None:
        return
    if of != "keys and values" and len(set(factors)) == 1:
        return  # one factor of a whole gradient is no matter of shares
    which = _heads_text(factors, group, "query head")
    what = (
        f"of the rotated part of keys, which {group} heads share"
        if latent
        else f"of {of}, which {group} query heads share"
    )
    says = f"of the gradient {what}, {which}"
    yield BackwardGuess("backward_kv_group", says, _weigh_sharing_heads(factors, of))


def _weigh_sharing_heads(factors: tuple[float, ...], of: SharedParts) -> BackwardChange:
    """Return the mistake that query heads count `factors` times in the gradient of `of`."""
    return BackwardChange(shares=WeighedShares("sharing heads", keys=factors), of_shared=of)


def guess_shares_of_rope(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that shares of the heads, or of each pair of elements, lose their gradient.

    Or that it is scaled. It is that of queries or keys at their rotation; the factors are solved on
    one gradient of each.
    """
    if not _in_attention(case) or not case.right_at("attn_v"):
        return
    solved_on = {
        "queries": _first_gradient(case, ("attn_q", "attn_q_b")),
        "keys": _first_gradient(case, ("attn_k", "attn_kv_a_mqa")),
    }
    found = {part: key for part, key in solved_on.items() if key is not None}
    if not found:
        return
    kinds: tuple[tuple[ShareKind, str], ...] = (
        ("heads", ""),
        ("pairs given", "after the rotation"),
        ("pairs read", "before the rotation"),
    )
    for of, when in kinds:
        factors: dict[str, tuple[float, ...]] = {}
        says = []
        for part, key in found.items():
            sizes = case.case(key).sizes
            heads = sizes.get("n_heads" if part == "queries" else "n_kv_heads", 0)
            whole = heads if of == "heads" else 2
            count = _count_shares(whole)
            if count < 2 or ("mqa" in key and of == "heads"):
                break
            changes = [
                BackwardChange(shares=WeighedShares(of, **{part: one})) for one in _units(count)
            ]
            solved = _solve_shares(case, key, changes)
            if solved is None:
                break
            factors[part] = solved
            text = _pairs_text(solved, when) if when else _heads_text(solved, heads, "head")
            says.append(f"of the gradient of {part} {text}")
        else:
            if all(len(set(each)) == 1 for each in factors.values()):
                return  # one factor of a whole gradient is no matter of shares
            change = BackwardChange(shares=WeighedShares(of, **factors))
            yield BackwardGuess("backward_rope", f"at rope, {', '.join(says)}", change)
            return


def _first_gradient(case: BackwardCase, roles: tuple[str, ...]) -> str | None:
    """Return the first wrong gradient that is of a weight with one of these roles, or None."""
    weights = (f"{role}.weight" for role in roles)
    wanted = {f"L{case.first_layer}.{name}" for name in weights}
    return next((key for key in case.first if key in wanted and key in case.wrong), None)


def _count_shares(whole: int) -> int:
    """Return into how many equal shares `whole` heads are cut: MOST_SHARES or the next fewer."""
    return max((n for n in range(1, min(whole, MOST_SHARES) + 1) if whole % n == 0), default=1)


def _units(count: int) -> list[tuple[float, ...]]:
    """Return the factors of `count` shares of which one counts, for each of them."""
    return [tuple(float(i == j) for j in range(count)) for i in range(count)]


def _solve_shares(
    case: BackwardCase, key: str, changes: Sequence[BackwardChange]
) -> tuple[float, ...] | None:
    """Return the factors of shares with which their gradients add up to the given one, or None.

    Each change leaves one share alone. What no share changes, such as other rows of the weight, is
    in every gradient. None too where a share adds nothing, so that its factor is not seen.
    """
    alone = []
    for change in changes:
        made = case.recompute(change, case.names[key])
        if key not in made.keys:
            return None
        alone.append(made.gradient(key).astype(np.float64).reshape(-1))
    pair = case.case(key)
    right, given = pair.computed.reshape(-1), pair.given.reshape(-1)
    rest = (sum(alone) - right) / (len(alone) - 1)
    parts = np.stack([one - rest for one in alone], axis=1)
    if (np.linalg.norm(parts, axis=0) <= NEAR * np.linalg.norm(right)).any():
        return None
    solved, _ = fit_factors(parts, given - rest)
    if not is_near(case, key, rest + parts @ solved):
        return None
    factors = tuple(_written_factor(float(one)) for one in solved)
    return factors if any(one != 1 for one in factors) else None


def _written_factor(value: float) -> float:
    """Return a measured factor, or the simple one near it: 0, 1, a whole number or its inverse."""
    simple = (0.0, *(float(n) for n in range(1, 65)), *(1 / n for n in range(2, 65)))
    near = min(simple, key=lambda one: abs(one - value))
    return near if abs(near - value) <= NEAR_FACTOR * max(abs(near), 0.1) else value


def _heads_text(factors: Sequence[float], heads: int, name: str) -> str:
    """Return a clause on how much each share of the heads counts: "heads 2-3 of 4 are lost".

    Heads are counted from 0, `name` is what they are called. Shares are equal parts of them.
    """
    size = heads // len(factors)
    if len(set(factors)) == 1:
        return f"every {name} {_does(factors[0])}"
    says = []
    for value in (one for one in dict.fromkeys(factors) if one != 1):
        where = [i * size + j for i, one in enumerate(factors) if one == value for j in range(size)]
        many = len(where) > 1
        which = f"{name}{'s' * many} {number_ranges(where)} of {heads}"
        says.append(f"{which} {_does(value, many)}")
    return ", ".join(says)


def _pairs_text(factors: Sequence[float], when: str) -> str:
    """Return a clause on how much the elements of each rotated pair count, `when` says at what."""
    if len(set(factors)) == 1:
        return f"every element that is rotated {_does(factors[0])}"
    return ", ".join(
        f"the {name} element of each pair {_does(value)} {when}"
        for name, value in zip(("first", "second"), factors, strict=True)
        if value != 1
    )


def _does(factor: float, many: bool = False) -> str:
    """Return "is lost", or "counts 0.5 times"; of `many` things in the plural."""
    if not factor:
        return "are lost" if many else "is lost"
    return f"count{'' if many else 's'} {factor:.4g} times"


def guess_rope(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that rope does not rotate gradients back."""
    if _in_attention(case) and case.right_at("attn_v") and not case.right_at("attn_q", "attn_k"):
        yield from _guesses(
            "backward_rope",
            (
                ("rope_cut", "rope has no backward: queries and keys learn nothing"),
                ("rope_forward", "the backward of rope rotates forward, not back"),
                ("rope_unrotated", "the backward of rope does not rotate"),
            ),
        )


def guess_no_mask(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that attention is not masked in the backward, or without its window."""
    if _in_attention(case):
        says = "the probabilities that the backward of attention computes again are not masked"
        yield from _guesses("backward_mask", (("mask_left_out", says),))
        if case.windowed:
            says = "the backward of attention computes its probabilities again without the window"
            yield from _guesses("backward_mask", (("window_left_out", says),))


def guess_norms(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that the backward of norms lacks a term, or multiplies by another factor.

    Nothing unless gradients are wrong from the last layer on, its ffn_down's too: that is the first
    weight which the backward of the last norm reaches.
    """
    layers = [split_key(key)[0] for key in case.names]
    last = max((layer for layer in layers if layer is not None), default=None)
    if last is None or case.first_layer != last or case.right_at("ffn_down"):
        return
    term = "lacks the term of the"
    ways: list[tuple[Operation, str]] = [
        ("norm_scale_constant", f"the backward of the norms {term} root mean square"),
        ("norm_mean_constant", f"the backward of the norms {term} mean"),
        ("norm_constant", f"the backward of the norms {term} mean and that of the root"),
    ]
    multiplies = "the backward of the norms multiplies by"
    if case.norm_offset == 0:
        ways.append(("norm_offset_added", f"{multiplies} 1 + w, not by the weight w"))
    elif case.norm_offset == 1:
        ways.append(("norm_offset_left_out", f"{multiplies} the weight w, not by 1 + w"))
    ways.append(("norm_weight_left_out", "the backward of the norms leaves out their weight"))
    yield from _guesses("backward_norm", tuple(ways))


def guess_router_cut(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that weights of experts, the sum dividing them or a gate count as constants."""
    experts = ("ffn_down_exps", "ffn_up_exps", "ffn_gate_exps")
    if case.right_at("ffn_gate_inp") or not case.right_at(*experts):
        return
    if not case.right_at("ffn_gate_inp_shexp"):
        says = "the gate of the shared expert is a constant: it has no gradient and gives none on"
        yield from _guesses("backward_router", (("shared_gate_cut", says),))
    yield from _guesses(
        "backward_router",
        (
            ("router_cut", "the weights of the experts are constants: the router has no gradient"),
            (
                "router_sum_constant",
                "the sum that the weights of the experts are divided by is a constant",
            ),
        ),
    )


def guess_recurrence(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that a delta net's decay, or its strength of writing, counts as a constant."""
    if not case.right_at("ffn"):
        return
    ways: list[tuple[Operation, str]] = []
    if not case.right_at("ssm_alpha", "ssm_f_", "ssm_a.", "ssm_dt"):
        ways.append(("decay_cut", "the decay of the state is a constant: it has no backward"))
    if not case.right_at("ssm_beta"):
        ways.append(("strength_cut", "the strength of writing is a constant: it has no backward"))
    yield from _guesses("backward_recurrence", tuple(ways))


def guess_tied_part(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield guesses that a tied table's gradient is that of the embedding or of the head alone."""
    if any(not key.startswith("token_embd") for key in case.wrong) or not case.wrong:
        return
    if not case.case(next(iter(case.wrong))).sizes.get("tied_embeddings"):
        return
    says = "the table is tied, and only the {}'s part is in its gradient"
    yield from _guesses(
        "gradient_tied",
        (("head_cut", says.format("embedding")), ("embedding_cut", says.format("head"))),
    )


HYPOTHESES = (
    BackwardHypothesis(("gradient_tied",), guess_tied_part, 300, "one table, nothing else"),
    BackwardHypothesis(
        ("backward_detached",), guess_detached, 301, "parameters without a gradient say where"
    ),
    BackwardHypothesis(("backward_router",), guess_router_cut, 302, "begins at the router"),
    BackwardHypothesis(("backward_kv_group",), guess_key_groups, 304, "queries are right"),
    BackwardHypothesis(
        ("backward_kv_group",), guess_shares_of_keys, 305, "factors are solved: after whole sums"
    ),
    BackwardHypothesis(("backward_rope",), guess_rope, 306, "values are right"),
    BackwardHypothesis(
        ("backward_rope",), guess_shares_of_rope, 307, "factors are solved: after whole rotations"
    ),
    BackwardHypothesis(("backward_mask",), guess_no_mask, 308, "the output of attention is right"),
    BackwardHypothesis(
        ("backward_recurrence",), guess_recurrence, 309, "begins at the decay or the strength"
    ),
    BackwardHypothesis(("backward_norm",), guess_norms, 310, "the head is right"),
)
