"""Gradients that were clipped by the norm of some of them, or with some counted several times.

A *part* is some of the step's gradients whose norm may have been taken in place of that of all:
those of one kind of parameters, of one stage of layers, or of one optimizer group.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.causes.row import Cause
from aprfmt.causes.training.clipping import SAME, clip_factor
from aprfmt.causes.training.optimizers import Recipe, changed
from aprfmt.causes.training.step_case import SIGMAS, StepCase, StepGuess, StepHypothesis
from aprfmt.causes.training.step_size import SLACK, measured_factor
from aprfmt.measure.verdicts import Certainty

CAUSE_ROWS = (
    Cause(
        "clip_by_part",
        "update",
        "bug",
        "Gradients were clipped by the norm of some of them, such as all but the experts, or by "
        "one in which some or all count several times, and not by the norm of all.",
        "The factor of the gradients is the bound over the norm of that part.",
        "The step of the gradients clipped so gives every weight, or the computed gradients every "
        "element.",
    ),
)


def _is_norm(role: str) -> bool:
    """Return whether a role is a weight or a bias of a norm."""
    return "norm" in role


def _is_bias(role: str) -> bool:
    """Return whether a role is a bias of a projection."""
    return role.endswith(".bias") and not _is_norm(role)


# Kinds of parameters that trainers hold apart: their name in a sentence, and the roles of them.
KINDS: Mapping[str, Callable[[str], bool]] = {
    "the experts": lambda role: "_exps." in role,
    "the routers": lambda role: role.startswith("ffn_gate_inp"),
    "the embedding": lambda role: role == TABLE,
    "the head": lambda role: role == HEAD,
    "embedding and head": lambda role: role in (TABLE, HEAD),
    "the norms": _is_norm,
    "the norms of queries and keys": lambda role: role.startswith(("attn_q_norm", "attn_k_norm")),
    "the biases": _is_bias,
    "norms and biases": lambda role: _is_norm(role) or _is_bias(role),
    "the factors A": lambda role: role.endswith(".lora_a"),
    "the factors B": lambda role: role.endswith(".lora_b"),
}
# How often a part may be counted in the norm of all: by each of so many ranks that hold all of it,
# or only by one of so many that hold a share each.
COUNTED = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
ALONE = " alone"  # how the names of parts of one kind end
AFTER_LAYERS = ("output",)  # how whole-model roles after the last layer begin
ROUNDED = 0.02  # of a norm: two that are so near are one where steps are in BF16 or F16


def part_norms(
    norms: Mapping[str, float], groups: Collection[Collection[str]] = ()
) -> dict[str, float]:
    """Return {name of a part of the gradients, as words of a sentence: L2 norm of that part}.

    `norms` are the norms of all gradients by key, `groups` the keys of each group of the optimizer.
    Parts are one kind of parameters, all but that kind, the stages that a model is cut into between
    two layers, and the groups. Of parts with the same gradients the first is there. A table that is
    the head as well, which has no gradient of its own, counts twice in one more norm.
    """
    every = frozenset(norms)
    parts: dict[frozenset[str], str] = {}
    for kind, has in KINDS.items():
        of_kind = frozenset(key for key in norms if has(split_key(key)[1]))
        parts.setdefault(every - of_kind, f"all but {kind}")
        parts.setdefault(of_kind, kind + ALONE)
    for first in range(1, 1 + max((split_key(key)[0] or 0 for key in norms), default=0)):
        later = frozenset(key for key in norms if _is_from_layer(key, first))
        parts.setdefault(later, f"layers from {first} on and what is after them")
        parts.setdefault(every - later, f"layers below {first} and what is before them")
    for number, keys in enumerate(groups):
        parts.setdefault(every & frozenset(keys), f"group {number} of the optimizer")
    found = {
        name: sum(norms[key] ** 2 for key in keys) ** 0.5
        for keys, name in parts.items()
        if keys and keys != every
    }
    if TABLE in norms and HEAD not in norms and len(norms) > 1:
        twice = sum(size**2 for size in norms.values()) + norms[TABLE] ** 2
        found["all, with the tied table counted twice"] = twice**0.5
    return found


def counted_norms(parts: Mapping[str, float], norm: float) -> dict[str, float]:
    """Return {what was counted how often, as words of a sentence: norm of all gradients so}.

    `parts` are `part_norms`, `norm` is that of all gradients. In the sum of squares one kind of
    parameters counts several times, as where each rank adds a copy of it, or in part. So do all,
    as where each of some ranks holds the averaged gradients and their norm is summed once more.
    """
    found = {}
    for times, how in _counts_of_ranks().items():
        found[f"all counted {times} times ({how})"] = times * norm**2
        found[f"1/{times} of all"] = norm**2 / times
    for name, size in parts.items():
        kind = name.removesuffix(ALONE)
        for times in COUNTED if kind != name and size else ():
            found[f"all with {kind} counted {times} times"] = norm**2 + (times - 1) * size**2
            found[f"all with 1/{times} of {kind}"] = norm**2 - (1 - 1 / times) * size**2
    return {name: max(square, 0.0) ** 0.5 for name, square in found.items()}


def _counts_of_ranks() -> dict[int, str]:
    """Return {how often the sum of squares is counted: what ranks with equal gradients do so}."""
    found = {
        ranks: f"as where {ranks} ranks of equal gradients add their squares" for ranks in COUNTED
    }
    for ranks in COUNTED:
        own = found.get(ranks**2)
        added = f"{ranks} their norms"
        found[ranks**2] = (
            f"{own}, or {added}"
            if own
            else f"as where {ranks} ranks of equal gradients add their norms"
        )
    return found


def _is_from_layer(key: str, first: int) -> bool:
    """Return whether a parameter is in layer `first`, in a later one, or after all layers."""
    layer, role = split_key(key)
    return role.startswith(AFTER_LAYERS) if layer is None else layer >= first


def _parts_with_equal_factor(
    parts: Mapping[str, float], size: float, bound: float, room: float
) -> list[str]:
    """Return the names of the parts whose norm `bound` clips by the same factor as `size`.

    `room` is by how much their factors may differ, relative to the factor.
    """
    wanted = clip_factor(bound, size)
    return [
        name
        for name, other in parts.items()
        if abs(clip_factor(bound, other) - wanted) <= room * wanted
    ]


def _clipping_sentence(names: Collection[str], size: float, bound: float, norm: float) -> str:
    """Return the sentence that gradients were clipped to `bound` by the norm of only some.

    `size` is that norm, `names` the parts that have it. `norm` is the norm of all gradients, which
    they should be clipped by.
    """
    return (
        f"the gradients were clipped by the norm of {', or of '.join(names)}, {size:.4g}, to "
        f"{bound:g}, and not by that of all, {norm:.4g}"
    )


def guess_clipping_by_part(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guesses that the stated bound clips all gradients by the norm of a part of them.

    Where several parts have that norm, the certainty is "explained" at most. Nothing where the
    recipe does not clip, no gradient is known, or the step does not depend on the gradient's
    size. Adam's first step shows it where the gradient is as small as epsilon.
    """
    yield from _guess_sizes(case, recipe, case.part_norms)


def guess_counted_parts(case: StepCase, recipe: Recipe) -> Iterator[StepGuess]:
    """Yield the guesses that a part counts several times, or in part, in the norm of all gradients.

    Nothing where steps are in BF16 or F16, which tell too few of these norms apart, and nothing
    where `guess_clipping_by_part` has nothing.
    """
    norm = case.others.get("norm")
    if norm is not None and not case.coarse:
        yield from _guess_sizes(case, recipe, counted_norms(case.part_norms, norm))


def _guess_sizes(case: StepCase, recipe: Recipe, sizes: Mapping[str, float]) -> Iterator[StepGuess]:
    """Yield the guesses that gradients were clipped by one of the norms `sizes`, by its name."""
    norm = case.others.get("norm")
    sized = case.signs or (recipe.row.sizes and "eps" not in recipe.row.settings)
    if recipe.clip is None or norm is None or case.gradient is None or sized:
        return
    factor, off = None, 0.0
    if not recipe.row.sizes:
        factor, off = measured_factor(case, changed(recipe, scale=1.0))
    right = clip_factor(recipe.clip, norm)
    for size in sizes.values():
        scale = clip_factor(recipe.clip, size)
        near = factor is None or abs(factor - scale) <= max(SLACK * scale, SIGMAS * off)
        if not near or scale == 1 or abs(scale - right) <= SLACK * right:
            continue
        names = _parts_with_equal_factor(sizes, size, recipe.clip, ROUNDED if case.coarse else SAME)
        most: Certainty = "confirmed" if len(names) == 1 else "explained"
        says = _clipping_sentence(names, size, recipe.clip, norm)
        yield StepGuess("clip_by_part", says, changed(recipe, scale=scale), most=most)


def clipping_by_part(
    parts: Mapping[str, float], factor: float, norm: float, bounds: Collection[float]
) -> tuple[str, bool] | None:
    """Return (a sentence, whether one part alone fits) of gradients clipped by a part's norm.

    `parts` and `norm` are norms of the computed gradients, `factor` is what the given ones are of
    them. None where no bound over the norm of a part is the factor.
    """
    for bound in bounds:
        for size in parts.values():
            if size > bound and abs(clip_factor(bound, size) - factor) <= SAME * factor:
                names = _parts_with_equal_factor(parts, size, bound, SAME)
                return _clipping_sentence(names, size, bound, norm), len(names) == 1
    return None


HYPOTHESES = (
    StepHypothesis(
        ("clip_by_part",), guess_clipping_by_part, 42, "norms of parts, after that of all"
    ),
    StepHypothesis(
        ("clip_by_part",), guess_counted_parts, 43, "a part and a count, after parts alone"
    ),
)
