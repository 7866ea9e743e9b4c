"""What is said of values that are not finite, of facts made for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.base.protocols import TensorInfo
from aprfmt.checks.file import values
from aprfmt.checks.file.value_pass import TensorScan
from aprfmt.checks.records import NotRun
from aprfmt.tensors.stats import Stats


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


def checked(monkeypatch: pytest.MonkeyPatch, **census: TensorScan) -> Any:
    monkeypatch.setattr(values, "_buffer_names", lambda ctx: frozenset({"mask"}))
    zeros = SimpleNamespace(text="", expected="")
    monkeypatch.setattr(values, "find_zero_pairs", lambda model: zeros)
    ctx: Any = SimpleNamespace(census=census, model={}, where="m", told_parts=frozenset())
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
            result = checked(monkeypatch, **{name: scan(nan=nan, inf=inf), "good": scan()})
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


def test_codes_of_the_whole_range_need_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights cast without a scale are small; those of one axis are no matrix."""
    full: Any = {"encoding": "F8_E4M3", "absmax": 448.0}
    for l2, shape, expected in (
        (4.0, (2, 8), 0),
        (4.1, (2, 8), 1),
        (4.1, (16,), 0),
        (1600.0, (2, 8), 1),
    ):
        result = checked(monkeypatch, w=scan(l2=l2, shape=shape, **full))
        assert [one.found.startswith("F8_E4M3 values up to 448") for one in result.findings] == (
            [True] * expected
        )
    assert not checked(monkeypatch, w=scan(l2=99.0, encoding="F8_E4M3", absmax=447.0)).findings
    assert not checked(monkeypatch, w=scan(l2=99.0, encoding="F32", absmax=448.0)).findings
