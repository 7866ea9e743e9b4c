"""What is said of values that are not finite, of facts made for it."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aprfmt.base.protocols import TensorInfo
from aprfmt.checks import bounds
from aprfmt.checks.file import architecture_checks, values
from aprfmt.checks.file.value_pass import TensorScan
from aprfmt.checks.records import NotRun
from aprfmt.tensors.stats import Stats


class Views(dict[str, Any]):
    """The tensors of a model of which all is decoded."""

    unread: Any = None
    lone_codes: ClassVar[dict[str, Any]] = {}


def scan(
    *,
    nan: int = 0,
    inf: int = 0,
    encoding: str = "F32",
    shape: tuple[int, ...] = (2, 8),
    absmax: float = 1.0,
    l2: float = 1.0,
    **more: str,
) -> TensorScan:
    """What the pass over a tensor of sixteen values found."""
    stats = Stats(16, 0.0, 1.0, -absmax, absmax, absmax, l2, nan, inf, 0)
    return TensorScan(TensorInfo("x", shape, encoding, 0, 64, 0), stats, **more)


def checked(
    monkeypatch: pytest.MonkeyPatch, reported: tuple[str, ...] = (), **census: TensorScan
) -> Any:
    monkeypatch.setattr(values, "_buffer_names", lambda ctx: frozenset({"mask"}))
    zeros = SimpleNamespace(text="", expected="")
    monkeypatch.setattr(values, "find_zero_pairs", lambda model: zeros)
    ctx: Any = SimpleNamespace(census=census, model=Views(), where="m", reported_parts=reported)
    return values.check_values(ctx)


# what was found -> (level, words) for a weight, and for a computed buffer
FOUND = {
    (0, 0): (None, None),
    (1, 0): (("fail", "1 NaN and 0 infinite of 16 F32 values"),) * 2,
    (0, 3): (
        ("fail", "0 NaN and 3 infinite of 16 F32 values"),
        ("warning", "3 infinite values in a computed buffer"),
    ),
    (2, 1): (("fail", "2 NaN and 1 infinite of 16 F32 values"),) * 2,
}


def test_weights_are_finite_and_buffers_may_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    for (nan, inf), expected in FOUND.items():
        for name, wanted in zip(("w", "mask"), expected, strict=True):
            result = checked(monkeypatch, (), **{name: scan(nan=nan, inf=inf), "good": scan()})
            said = [(one.where, one.level, one.found) for one in result.findings]
            assert said == ([] if wanted is None else [(name, *wanted)])
            assert result.found == "2 tensors"


def test_what_is_not_decoded_or_said_elsewhere_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = scan(nan=1)
    assert not checked(monkeypatch, w=scan(nan=1, scale="block 0 has NaN")).findings
    (odd,) = checked(monkeypatch, w=TensorScan(bad.info, None, odd="2 at 3")).findings
    assert (odd.level, odd.found, odd.expected) == ("fail", "2 at 3", "0 or 1 in a BOOL tensor")
    with pytest.raises(NotRun, match=r"^1 of 3 tensors could be decoded; v: why$") as stopped:
        unread = TensorScan(bad.info, unread="why")
        checked(monkeypatch, w=bad, v=unread, u=TensorScan(bad.info, unread="also"))
    assert [one.where for one in stopped.value.findings] == ["w"]
    with pytest.raises(NotRun, match=r"^the file holds no tensors$"):
        checked(monkeypatch)


def test_codes_without_a_scale_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stored tensor once: what another check reports is left out."""
    codes = {"w": SimpleNamespace(text="codes"), "told": SimpleNamespace(text="codes")}
    monkeypatch.setattr(Views, "lone_codes", codes)
    (found,) = checked(monkeypatch, reported=("told",), w=scan(), told=scan()).findings
    assert (found.where, found.level, found.found) == ("w", "fail", "codes")


def role_bounds(
    monkeypatch: pytest.MonkeyPatch,
    roles: dict[str, Any],
    sizes: dict[str, float | None],
    whole: dict[str, float] | None = None,
) -> Any:
    """Check (smallest value, standard deviation, root mean square) of roles; None: not read."""
    views = {
        key: SimpleNamespace(
            key=key, shape=(64, 64), stored=[SimpleNamespace(info=SimpleNamespace(name=f"t.{key}"))]
        )
        for key in roles
    }

    def stats(ctx: Any, view: Any) -> Any:
        row = roles[view.key]
        return row and SimpleNamespace(min=row[0], std=row[1], rms=row[2])

    for name, made in (
        ("_stored_stats", stats),
        ("_matrix_size", lambda ctx, view: sizes[view.key]),
        ("_least_whole_number", lambda ctx, view: (whole or {}).get(view.key)),
        ("_norm_offset", lambda view, spec: 0.0),
        ("_reread_text", lambda view: ""),
        ("_far_matrices", lambda resolution, far: f"far {sorted(far)}"),
        ("_whole_matrices", lambda resolution, found: f"whole {sorted(found)}"),
    ):
        monkeypatch.setattr(architecture_checks, name, made)
    monkeypatch.setattr(
        bounds, "bounded_numbers", lambda stats, offset: {"std": stats.std, "rms": stats.rms}
    )
    spec = SimpleNamespace(name="llama")
    context: Any = SimpleNamespace(resolution=SimpleNamespace(spec=spec, roles=views))
    return architecture_checks.check_role_bounds(context)


def test_sizes_of_embeddings_norms_and_matrices_are_held_to_their_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A little beyond is a warning, far beyond a failure; of matrices only what is far."""
    table, norm, q = "token_embd.weight", "output_norm.weight", "L0.attn_q.weight"
    good = {table: (-1.0, 0.02, 0.02), norm: (0.1, 0.3, 1.0), q: (-1.0, 0.02, 0.02)}
    found = role_bounds(monkeypatch, good, {q: 0.02})
    assert found.found == "3 tensors" and not found.findings
    for gone, size in ((table, 0.02), (norm, 0.02), (q, None)):
        found = role_bounds(monkeypatch, good | {gone: None}, {q: size})
        assert found.found == "2 tensors" and not found.findings
    with pytest.raises(NotRun, match="can be read as numbers"):
        role_bounds(monkeypatch, {q: None}, {q: None})
    bound = bounds.tensor_bounds("llama", table, (64, 64))["std"]
    for factor, level in ((1.1, "warning"), (1.1 * architecture_checks.FAR, "fail")):
        row = (-1.0, bound.high * factor, 1.0)
        (one,) = role_bounds(monkeypatch, good | {table: row}, {q: 0.02}).findings
        assert one.level == level and one.where == f"{table} (t.{table})"
        assert one.found.startswith("standard deviation ")
    limit = bounds.tensor_bounds("llama", "attn_q.weight", (64, 64))["std"].high
    assert not role_bounds(monkeypatch, good, {q: limit * 2}).findings
    far = role_bounds(monkeypatch, good, {q: limit * 1.1 * architecture_checks.FAR})
    assert far.findings == [f"far {[q]}"]


def test_matrices_without_a_negative_value_are_named_unless_they_are_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k = "L0.attn_q.weight", "L0.attn_k.weight"
    for least, spread, named in (
        (0.0, 0.02, True),
        (1e-9, 0.02, True),
        (-1e-9, 0.02, False),
        (0.0, 0.0, False),
    ):
        found = role_bounds(monkeypatch, {q: (least, spread, 0.02)}, {q: 0.02})
        assert [one.found for one in found.findings] == ["no negative value"] * named
    both = {q: (0.0, 0.02, 0.02), k: (0.0, 0.02, 0.02)}
    (one,) = role_bounds(monkeypatch, both, {q: 0.02, k: 0.02}).findings
    assert one.where.startswith(f"{q} (t.{q})") and one.where != f"{q} (t.{q})"
    codes, one = role_bounds(monkeypatch, both, {q: 0.02, k: 0.02}, {q: 0.0}).findings
    assert codes == f"whole {[q]}" and one.where == f"{k} (t.{k})"
    assert role_bounds(monkeypatch, both, {q: 1, k: 1}, {q: 0.0, k: 0.0}).findings == [
        f"whole {[k, q]}"
    ]
