"""Parts of gradients by themselves: losses of routers, and how many directions are looked along."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.gradients import differences
from aprfmt.inference.gradients.changes import BackwardChange, Operation, RouterFactors, SharedParts
from aprfmt.inference.parity import verdict as gates
from aprfmt.inference.parity.parity_records import Outcomes
from aprfmt.measure.tolerances import MAX_LOGITS, loss_bound

torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")


class Inner:
    """A recorder that wants one point, and doubles it."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def begin(self, facts: Any) -> None:
        self.begun.append(facts)

    def wants(self, point: str, layer: int) -> bool:
        return (point, layer) in (("q", 1), ("router", 1))

    def capture(self, point: str, layer: int, x: Any) -> Any:
        return 2 * x


def test_routers_are_counted_over_passes_and_their_losses_are_those_of_their_sources() -> None:
    from aprfmt.inference.gradients.router_loss import RouterCounts, RouterTerms

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    counts = RouterCounts(2)
    for part in (slice(0, 3), slice(3, 7)):
        counts.begin(SimpleNamespace(ids=range(7)[part]))  # type: ignore[arg-type]
        for layer in (0, 1):
            assert counts.wants("router", layer) and not counts.wants("experts", layer)
            assert counts.capture("router", layer, logits[layer, part]) is not None
    assert counts.tokens == 7 and set(counts.counts) == {"L0.router", "L1.router"}
    chosen = [np.argsort(-logits[layer].numpy(), 1)[:, :2] for layer in (0, 1)]
    for layer in (0, 1):
        held = counts.counts[f"L{layer}.router"].tolist()
        assert held == np.bincount(chosen[layer].ravel(), minlength=4).tolist()
    few = RouterCounts(9)
    few.capture("router", 0, logits[0])
    assert few.counts["L0.router"].tolist() == [7] * 4  # no more than there are
    p = torch.softmax(logits, -1).numpy()
    share = np.stack([np.bincount(one.ravel(), minlength=4) / 7 for one in chosen])
    joint = 4 * (share.mean(0) * p.mean((0, 1))).sum()
    own = np.mean([4 * (share[layer] * p[layer].mean(0)).sum() for layer in (0, 1)])
    z = np.square(np.log(np.exp(logits.numpy()).sum(-1))).mean()
    for factors, expected in (
        ((0.5, 0.0, 0.0), 0.5 * joint),
        ((0.0, 0.5, 0.0), 0.5 * own),
        ((0.0, 0.0, 3.0), 3 * z),
        ((0.5, 0.25, 2.0), 0.5 * joint + 0.25 * own + 2 * z),
    ):
        given = dict(zip(("balance", "by_layer", "z"), factors, strict=True))
        terms = RouterTerms(RouterFactors(**given), counts)
        terms.begin(SimpleNamespace(ids=()))  # type: ignore[arg-type]
        assert terms.taken() is None
        for part in (slice(0, 3), slice(3, 7)):
            for layer in (0, 1):
                x = logits[layer, part]
                assert terms.capture("router", layer, x) is x
                assert terms.capture("q", layer, x) is x
        found = terms.taken()
        assert found is not None and float(found) == pytest.approx(expected)
        assert terms.taken() is None


def test_a_recorder_inside_begins_with_the_pass_and_changes_what_is_counted() -> None:
    from aprfmt.inference.gradients.router_loss import RouterCounts, RouterTerms

    counts = RouterCounts(1)
    x = torch.ones(3, 2, dtype=torch.float64)
    counts.begin(SimpleNamespace(ids=range(3)))  # type: ignore[arg-type]
    counts.capture("router", 0, x)
    counts.capture("router", 1, x)
    inner = Inner()
    terms = RouterTerms(RouterFactors(z=1.0), counts, inner)
    facts: Any = object()
    terms.begin(facts)
    assert inner.begun == [facts]
    for point, layer, wanted in (
        ("router", 0, True),
        ("router", 1, True),
        ("q", 1, True),
        ("q", 0, False),
        ("k", 1, False),
    ):
        assert terms.wants(point, layer) is wanted
        assert RouterTerms(RouterFactors(), counts).wants(point, layer) is (point == "router")
    assert terms.capture("q", 1, x).tolist() == (2 * x).tolist() and not terms.terms
    assert terms.capture("router", 1, x).tolist() == (2 * x).tolist()
    with torch.no_grad():
        assert terms.capture("router", 0, x) is x
    (one,) = terms.terms  # of the doubled logits, and none without a gradient
    assert float(one) == pytest.approx((2 + np.log(2)) ** 2 / 2)


def test_as_many_directions_are_taken_as_say_the_side_of_a_bound() -> None:
    """Surely below or above after few, else after more; on the bound itself it is known."""
    at: list[int] = []
    bound = 2.0**-10
    for share, count in (
        (1 / 4, 3),
        (1 / 2, 12),
        (3 / 4, 12),
        (1.0, 48),
        (3 / 2, 48),
        (2.0, 12),
        (3.0, 3),
        (4.0, 3),
    ):
        at.clear()

        def along(role: str, line: Any, step: float, value: float = share * bound) -> float:
            at.append(line.size)
            assert (role, step) == ("w", 0.5)
            return float(line.sum()) + value

        loss: Any = SimpleNamespace(along=along)
        rng = np.random.default_rng(1)
        found = differences._left_over(loss, "w", np.ones((2, 3)), 0.5, bound, rng)
        assert found == pytest.approx(share * bound, rel=1e-9)
        assert len(at) == count or share in (3 / 4, 3.0), share

    for share, most in ((0.75, 12), (3.0, 3)):
        at.clear()
        rest = share * bound

        def constant(role: str, line: Any, step: float, rest: float = rest) -> float:
            at.append(line.size)
            return rest

        loss = SimpleNamespace(along=constant)
        rng = np.random.default_rng(1)
        assert differences._left_over(loss, "w", np.zeros((2, 3)), 0.5, bound, rng) == rest
        assert len(at) == most


# --- gates of predictions -----------------------------------------------------------------------


def judged(**more: Any) -> Outcomes:
    given: dict[str, Any] = {
        "rows": None,
        "rel_l2": 0.01,
        "reference": 2.0,
        "forward": 2.0,
        "labels": 16,
        "size": 3.0,
        "tolerance": 0.25,
    }
    return Outcomes(**given | more)


def test_a_run_is_not_worse_than_guessing_where_its_reference_is_not() -> None:
    limit = float(np.log(8))
    gate = gates._Gate("here")

    def outcome(text: bool = True, bound: float = 0.25, **more: Any) -> Any:
        return gates._check_bounded(gate, judged(**more), text, 8, bound)

    assert outcome().outcome == "PASS" and outcome(forward=np.nextafter(limit, 0)).outcome == "PASS"
    worse = outcome(forward=limit, bound=0.05)
    assert (worse.outcome, worse.where) == ("FAIL", "here") and "guessing" in worse.todo
    for reference, bound, told in (
        (2.0, 0.25, "NOT_RUN"),
        (2.0, 0.2, "FAIL"),
        (4.0, 0.2, "NOT_RUN"),
    ):
        assert outcome(forward=2.25, reference=reference, bound=bound).outcome == told
    for text, labels, why in ((True, 15, "15 labels"), (False, 99, "not known to be text")):
        found = outcome(text, labels=labels)
        assert found.outcome == "NOT_RUN" and why in found.found
        assert found.expected == "a text of at least 16 labels"


def test_logits_and_losses_of_quantized_weights_are_held_to_their_tolerances() -> None:
    gate = gates._Gate("here")
    most = max(MAX_LOGITS, 0.25)

    def outcomes(**more: Any) -> list[str]:
        return [one.outcome for one in gates._check_quantized(gate, judged(**more), True, 1000)]

    assert outcomes() == ["PASS"] * 3
    assert outcomes(rel_l2=most)[0] == "PASS" and outcomes(rel_l2=most * 1.01)[0] == "FAIL"
    assert outcomes(rel_l2=None)[0] == "NOT_RUN"
    bound = loss_bound(0.25, 3.0)
    for apart, told in ((0.99, "PASS"), (-0.99, "PASS"), (1.01, "FAIL"), (-1.01, "FAIL")):
        assert outcomes(forward=2.0 + apart * bound)[1] == told
    for none in ({"reference": None}, {"forward": None}):
        assert outcomes(**none) == ["PASS", "NOT_RUN"]
    for rows, text in ((None, "over all rows"), (7, "over the first 7 rows")):
        found = gates._check_quantized(gate, judged(rows=rows), True, 1000)
        assert found[0].expected.endswith(text) and text in found[1].expected


# --- backwards of operations that are changed ---------------------------------------------------


def gradients(operation: Any, run: Any, *shapes: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """Return (value, gradients of the inputs) of an operation with this mistake in its backward.

    `operation` is the name of the mistake, the factors of shares of heads, or the whole change.
    """
    from aprfmt.inference.gradients.changed_backend import ChangedBackend
    from aprfmt.inference.gradients.changes import WeighedShares

    generator = torch.Generator().manual_seed(3)
    given = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
    shares = isinstance(operation, WeighedShares)
    change = (
        operation
        if isinstance(operation, BackwardChange)
        else BackwardChange(**{"shares" if shares else "operation": operation})
    )
    changed = ChangedBackend("cpu", "float64", change)
    value = run(changed, *given)
    weights = torch.arange(value.numel(), dtype=torch.float64).reshape(value.shape).cos()
    (value * weights).sum().backward()
    return value.detach(), [each.grad for each in given]


def expected(run: Any, *shapes: tuple[int, ...]) -> list[Any]:
    """Return the gradients of a function of tensors of the same numbers."""
    return gradients(None, lambda backend, *given: run(*given), *shapes)[1]


def alike(mine: list[Any], others: list[Any]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b))
        for a, b in zip(mine, others, strict=True)
    )


def test_the_scale_or_mean_of_a_norm_is_a_constant_in_a_changed_backward() -> None:
    shapes = (3, 6), (6,)

    def rms(backend: Any, x: Any, w: Any) -> Any:
        return backend.rms_norm(x, w, eps=0.25, offset=1, cast="float32")

    def layer(backend: Any, x: Any, w: Any) -> Any:
        return backend.layer_norm(x, w, None, eps=0.25)

    def biased(backend: Any, x: Any, w: Any) -> Any:
        return backend.layer_norm(x, w, w + 1, eps=0.25)

    right = {run: gradients(None, run, *shapes) for run in (rms, layer, biased)}

    def rms_constant(x: Any, w: Any) -> Any:
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 0.25).detach() * (1 + w)

    def centred(mean: bool, scale: bool, bias: bool) -> Any:
        def run(x: Any, w: Any) -> Any:
            center = x.mean(-1, keepdim=True)
            size = torch.rsqrt(((x - center) ** 2).mean(-1, keepdim=True) + 0.25)
            y = (x - (center.detach() if mean else center)) * (size.detach() if scale else size)
            return y * w + (w + 1 if bias else 0)

        return run

    for operation, mean, scale in (
        ("norm_scale_constant", False, True),
        ("norm_mean_constant", True, False),
        ("norm_constant", True, True),
        (None, False, False),
    ):
        value, found = gradients(operation, rms, *shapes)
        assert torch.allclose(value, right[rms][0])
        wanted = expected(rms_constant, *shapes) if scale else right[rms][1]
        assert alike(found, wanted), operation
        for run in (layer, biased):
            value, found = gradients(operation, run, *shapes)
            assert torch.allclose(value, right[run][0])
            assert alike(found, expected(centred(mean, scale, run is biased), *shapes)), operation


def test_a_norm_multiplies_by_another_factor_in_a_changed_backward() -> None:
    shapes = (3, 6), (6,)
    right: Any
    for offset, operation, other in (
        (1, "norm_offset_left_out", lambda w: w),
        (0, "norm_offset_added", lambda w: 1 + w),
        (1, "norm_weight_left_out", torch.ones_like),
        (0, "norm_weight_left_out", torch.ones_like),
    ):

        def rms(backend: Any, x: Any, w: Any, offset: int = offset) -> Any:
            return backend.rms_norm(x, w, eps=0.25, offset=offset, cast="float32")

        def scaled(x: Any, w: Any, other: Any = other) -> Any:
            return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 0.25) * other(w)

        value, right = gradients(None, rms, *shapes)
        found, (of_x, of_w) = gradients(operation, rms, *shapes)
        assert torch.allclose(found, value) and torch.allclose(of_w, right[1]), operation
        assert alike([of_x], expected(scaled, *shapes)[:1]) and not alike([of_x], right[:1])

    def layer(backend: Any, x: Any, w: Any) -> Any:
        return backend.layer_norm(x, w, w + 1, eps=0.25)

    def unweighted(x: Any, w: Any) -> Any:
        center = x - x.mean(-1, keepdim=True)
        return center * torch.rsqrt((center**2).mean(-1, keepdim=True) + 0.25)

    value, right = gradients(None, layer, *shapes)
    found, (of_x, of_w) = gradients("norm_weight_left_out", layer, *shapes)
    assert torch.allclose(found, value) and torch.allclose(of_w, right[1])
    assert alike([of_x], expected(unweighted, *shapes)[:1]) and not alike([of_x], right[:1])


def test_a_router_a_rotation_or_a_group_of_keys_is_cut_in_a_changed_backward() -> None:
    from aprfmt.inference.backends.base import Heads

    angles = torch.linspace(0.1, 1.2, 6, dtype=torch.float64).reshape(3, 2)

    def rope(backend: Any, x: Any) -> Any:
        table = angles.cos(), angles.sin()
        return backend.rope(x, table, style="half", cast="float32")

    def turned(sign: float) -> Any:
        cos, sin = angles.cos()[:, None], sign * angles.sin()[:, None]

        def run(x: Any) -> Any:
            a, b = x[..., :2], x[..., 2:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return run

    value, right = gradients(None, rope, (3, 2, 4))
    for operation, wanted in (
        ("rope_forward", expected(turned(-1.0), (3, 2, 4))),
        ("rope_unrotated", expected(lambda x: 1 * x, (3, 2, 4))),
        ("kv_mean", right),
        (None, expected(turned(1.0), (3, 2, 4))),
    ):
        found, own = gradients(operation, rope, (3, 2, 4))
        assert torch.allclose(found, value) and alike(own, wanted), operation
    mask = np.tri(3, dtype=bool)

    def attend(backend: Any, q: Any, k: Any, v: Any) -> Any:
        return backend.attention(q, k, v, Heads(mask, 0.5, None, None, "float32"))

    shapes = (3, 4, 2), (3, 2, 2), (3, 2, 2)
    value, (of_q, of_k, of_v) = gradients(None, attend, *shapes)
    parts = []
    for operation in ("kv_first_head", "kv_last_head", "kv_mean"):
        found, (q, k, v) = gradients(operation, attend, *shapes)
        assert torch.allclose(found, value) and torch.allclose(q, of_q)
        parts.append((k, v))
    for at, whole in ((0, of_k), (1, of_v)):
        first, last, mean = (part[at] for part in parts)
        assert torch.allclose(first + last, whole) and not torch.allclose(first, last)
        assert torch.allclose(2 * mean, whole)
    apart: dict[SharedParts, tuple[bool, bool]] = {"keys": (False, True), "values": (True, False)}
    mistakes: tuple[Operation, ...] = ("kv_first_head", "kv_mean")
    for of, right_of in apart.items():
        for mistake in mistakes:
            change = BackwardChange(operation=mistake, of_shared=of)
            found, (q, k, v) = gradients(change, attend, *shapes)
            assert torch.allclose(found, value) and torch.allclose(q, of_q)
            assert (torch.allclose(k, of_k), torch.allclose(v, of_v)) == right_of
    found, (q, k, v) = gradients("mask_left_out", attend, *shapes)
    every = [q, k, v]
    mask = np.ones((3, 3), bool)
    whole = gradients(None, attend, *shapes)[1]
    assert torch.allclose(found, value) and alike(every, whole) and not torch.allclose(q, of_q)


def test_shares_of_heads_and_of_pairs_weigh_otherwise_in_a_changed_backward() -> None:
    from aprfmt.inference.backends.base import Heads
    from aprfmt.inference.gradients.changes import WeighedShares

    angles = torch.linspace(0.1, 1.2, 6, dtype=torch.float64).reshape(3, 2)
    heads = Heads(np.tri(3, dtype=bool), 0.5, None, None, "float32")

    def attend(backend: Any, q: Any, k: Any, v: Any) -> Any:
        return backend.attention(q, k, v, heads)

    # Two shares of the four query heads of each of two keys: they add up to the whole gradient.
    shapes = (3, 8, 2), (3, 2, 2), (3, 2, 2)
    value, whole = gradients(None, attend, *shapes)
    first, second, scaled = (
        gradients(WeighedShares("sharing heads", keys=keys), attend, *shapes)
        for keys in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.5))
    )
    for at in (1, 2):
        parts = first[1][at], second[1][at]
        assert torch.allclose(parts[0] + parts[1], whole[at]) and not torch.allclose(*parts)
        assert torch.allclose(parts[0] + parts[1] / 2, scaled[1][at])
    assert torch.allclose(scaled[0], value) and torch.allclose(scaled[1][0], whole[0])

    # The one key of four heads, and one that three shares do not divide.
    def repeat(backend: Any, x: Any) -> Any:
        return backend.repeat_heads(x, 4)

    for keys, counts in (((1.0, 0.0), (1, 1, 0, 0)), ((1.0, 0.0, 1.0), (1, 1, 1, 1))):
        found = gradients(WeighedShares("sharing heads", keys=keys), repeat, (3, 1, 2))
        factors = torch.tensor(counts, dtype=torch.float64)[None, :, None]
        wanted = expected(lambda x, factors=factors: x.expand(-1, 4, -1) * factors, (3, 1, 2))
        assert alike(found[1], wanted), keys

    # Queries and keys at their rotation, together and each alone.
    table = angles.cos(), angles.sin()
    for style in ("half", "interleaved"):

        def turn(backend: Any, q: Any, k: Any, style: Any = style) -> Any:
            return torch.cat(backend.ropes([q, k], table, style=style, cast="float32"), 1)

        def lone(backend: Any, q: Any, k: Any, style: Any = style) -> Any:
            turned = (backend.rope(x, table, style=style, cast="float32") for x in (q, k))
            return torch.cat([*turned], 1)

        firsts = torch.tensor([1, 1, 0, 0] if style == "half" else [1, 0, 1, 0])
        sizes = (3, 4, 6), (3, 1, 6)  # of six elements four are rotated
        value, right = gradients(None, turn, *sizes)
        for run in (turn, lone):
            of_heads = WeighedShares("heads", (1.0, 0.0))
            found, (q, k) = gradients(of_heads, run, *sizes)
            assert torch.allclose(found, value) and torch.allclose(k, right[1])
            assert torch.allclose(q[:, :2], right[0][:, :2]) and not q[:, 2:].any()
            read = WeighedShares("pairs read", (), (1.0, 0.0))
            found, (q, k) = gradients(read, run, *sizes)
            assert torch.allclose(found, value) and torch.allclose(q, right[0])
            assert torch.allclose(k[..., :4], right[1][..., :4] * firsts)
            assert torch.allclose(k[..., 4:], right[1][..., 4:])
            halves = [
                gradients(WeighedShares("pairs given", one, one), run, *sizes)[1]
                for one in ((1.0, 0.0), (0.0, 1.0))
            ]
            for at in (0, 1):
                both = halves[0][at] + halves[1][at]
                assert torch.allclose(both[..., :4], right[at][..., :4])
                assert all(torch.allclose(x[at][..., 4:], right[at][..., 4:]) for x in halves)
                assert all(x[at][..., :4].any(1).all() for x in halves)  # both give both elements


def test_a_router_or_a_table_is_cut_from_the_graph() -> None:
    from aprfmt.inference.gradients.backend import TABLE, GradientBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBackend, "router", lambda self, x, w, bias, rounded: 2 * x)
        patch.setattr(GradientBackend, "embed", lambda self, table, ids: 3 * ids)
        table, other = (SimpleNamespace(key=key) for key in (TABLE, "other"))
        for operation, cut in (("router_cut", 0), ("embedding_cut", 1), (None, None)):
            for at, run in enumerate(
                (
                    lambda backend, x: backend.router(x, None, None, rounded=True) + 0 * x,
                    lambda backend, x: backend.embed(table, x) + 0 * x,
                    lambda backend, x: backend.embed(other, x) + 0 * x,
                )
            ):
                value, (found,) = gradients(operation, run, (2, 2))
                assert bool(found.any()) is (at != cut), (operation, at)
                assert value.any()


def test_parts_are_right_within_rounding_and_the_first_wrong_direction_ends_one() -> None:
    right = np.arange(1.0, 9.0).reshape(2, 4)
    tried: list[Any] = []

    def along(role: str, line: Any) -> float:
        tried.append(line)
        return float(np.vdot(right, line))

    masks = {"first": np.zeros((2, 4), bool), "second": np.zeros((2, 4), bool)}
    masks["first"][0] = masks["second"][1] = True

    def parts(given: Any, noise: float, tolerance: float = 1e-9) -> Any:
        tried.clear()
        loss: Any = SimpleNamespace(along=along, rounding=lambda role, line: noise)
        drawn = np.random.default_rng(2)
        return differences._check_parts(loss, "w", given, masks, tolerance, drawn)

    for noise in (0.0, 1e-6):
        found = parts(right, noise)
        assert [(one.part, one.agrees, one.seen) for one in found] == [
            ("first", True, True),
            ("second", True, True),
        ]
        assert len(tried) == 2 * differences.INSIDE
        assert all(not line[1].any() for line in tried[: differences.INSIDE])
    wrong = right.copy()
    wrong[1] *= 2
    found = parts(wrong, 0.0)
    assert [one.agrees for one in found] == [True, False] and len(tried) == differences.INSIDE + 1
    near = right.copy()
    near[1] *= 1 + 1e-4
    for noise, tolerance, agrees in ((0.0, 1e-9, False), (1.0, 1e-9, True), (0.0, 1e-2, True)):
        assert parts(near, noise, tolerance)[1].agrees is agrees
    assert [one.seen for one in parts(right, 1e9)] == [False, False]  # less than its rounding
