"""Rules of recorded passes, each alone: shapes of raw files, requests, experts, points changed."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.base.dump_names import SHAPES_FILE
from aprfmt.errors import FormatError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.compressed_keys import rotate_last, rotate_last_back
from aprfmt.inference.engines import sequences
from aprfmt.inference.engines.captures import RAW, raw_shapes
from aprfmt.inference.engines.engine_modules import is_normed
from aprfmt.inference.engines.npz import NpzFile
from aprfmt.inference.parity import outcomes
from aprfmt.inference.parity.outcomes import compare_experts
from aprfmt.inference.replay.patched_model import STREAM, _Tapped
from aprfmt.inference.stream_weights import compressed_windows, stream_weights

# --- raw files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, *RAW])
def test_shapes_of_raw_files_are_lists_or_objects(dtype: str | None, tmp_path: Path) -> None:
    assert raw_shapes(tmp_path) == {}
    row: Any = [2, 0, 3] if dtype is None else {"shape": [2, 0, 3], "dtype": dtype}
    said = {"a.bin": row, "b": [], "c.bin": {"shape": [1]}}
    (tmp_path / SHAPES_FILE).write_text(json.dumps(said))
    plain = "float32"
    wanted = {"a": ([2, 0, 3], dtype or plain), "b": ([], plain), "c": ([1], plain)}
    assert raw_shapes(tmp_path) == wanted


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([1], "holds a list; expected names and shapes"), ({"a": 3}, "'a': '3'; expected a list"),
        ({"a": [2, -1]}, "expected a list of sizes"), ({"a": [True]}, "expected a list of sizes"),
        ({"a": [1.0]}, "expected a list"), ({"a": {"dtype": "float32"}}, "expected a list of"),
        ({"a": {"shape": [1], "dtype": "float31"}}, "dtype 'float31'; expected one of "),
    ],
)  # fmt: skip
def test_other_shapes_are_refused_by_the_file_s_name(said: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / SHAPES_FILE).write_text(json.dumps(said))
    with pytest.raises(FormatError) as caught:
        raw_shapes(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / SHAPES_FILE}: ") and says in str(caught.value)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("past", [0, 1])
def test_text_of_an_npz_file_is_unicode_to_its_last_character(
    order: str, past: int, tmp_path: Path
) -> None:
    codes = np.array([97, sys.maxunicode + past], f"{order}u4")
    np.savez(tmp_path / "x.npz", names=codes.view(f"{order}U2"))
    with ExitStack() as stack:
        file = NpzFile(tmp_path / "x.npz", stack)
        if past:
            with pytest.raises(FormatError, match="'names' holds text that is no Unicode"):
                file.read("names")
        else:
            assert file.read("names").tolist() == ["a" + chr(sys.maxunicode)]


# --- requests of a pass -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rids", "req_ids", "request_ids", "L0.rids", "meta.req_ids"])
def test_requests_have_the_names_that_engines_give_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "_batch_numbers", lambda one, what: None)
    one: Any = SimpleNamespace(texts={"prompts": ["p"], name: ["a", "b"]})
    assert sequences._request_names(one) == ["a", "b"]
    one.texts = {"prompts": ["p"], "rids.more": ["x"]}
    assert sequences._request_names(one) == []
    monkeypatch.setattr(sequences, "_batch_numbers", lambda one, what: [7] * (what == "requests"))
    assert sequences._request_names(one) == [7]


# --- experts ------------------------------------------------------------------------------------


class Run:
    """A trace that holds these values; `kept` are the positions of its tokens."""

    def __init__(self, values: dict[str, Any], kept: tuple[int, ...] = ()) -> None:
        self.values = {key: np.asarray(value) for key, value in values.items()}
        self.records = {
            key: SimpleNamespace(point=key.rpartition(".")[2], positions=kept) for key in values
        }

    def find_record(self, key: str) -> Any:
        return self.records.get(key)

    def recorded_values(self, key: str) -> Any:
        return self.values.get(key)


def test_a_token_that_went_to_other_experts_is_named_with_both() -> None:
    router = [[0.0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
    a = {"L2.experts": [[3, 2], [0, 1], [3, 2]], "L2.router": router, "L2.router_margin": [1, 1, 1]}
    b = {"L2.experts": [[2, 3], [0, 2], [3, 2]], "L2.router": router}
    (flip,) = compare_experts(Run(a, (5, 6, 9)), Run(b))  # type: ignore[arg-type]
    assert (flip.key, flip.position) == ("L2.experts", 6)
    assert (list(flip.gone), list(flip.came)) == ([1], [2])
    (late,) = compare_experts(Run(a), Run(b))  # type: ignore[arg-type]
    assert late.position == 1
    assert compare_experts(Run(a), Run(a)) == []  # type: ignore[arg-type]
    others: list[dict[str, Any]] = [
        {"L2.router": router}, {"L2.experts": [[2, 3], [0, 2]]}, {"L3.experts": b["L2.experts"]},
    ]  # fmt: skip
    for lacks in others:
        assert compare_experts(Run(a), Run(lacks)) == []  # type: ignore[arg-type]
    two, other = {"L0.experts": [[1]], "L0.out": [0], **a}, {"L0.experts": [[1, 0]], **b}
    (late,) = compare_experts(Run(two), Run(other))  # type: ignore[arg-type]
    assert late.key == "L2.experts", "a layer that cannot be compared hides no later one"


# The margins of a token that went from experts 0 and 1 to 2 and 3: scores of both runs, the
# router's own margin -> (the gap, the largest change, whether rounding closes it).
FLIPS: dict[str, tuple[Any, Any, float | None, tuple[float | None, float | None, bool]]] = {
    "as wide as two changes": ([2, 3, 1, 0], [2, 3, 1.5, 0], None, (1, 0.5, True)),
    "wider": ([2.25, 3, 1, 0], [2.25, 3, 1.5, 0], None, (1.25, 0.5, False)),
    "wider, a small margin": ([2.25, 3, 1, 0], [2.25, 3, 1.5, 0], 1.0, (1.25, 0.5, True)),
    "wider, a margin": ([2.25, 3, 1, 0], [2.25, 3, 1.5, 0], 1.125, (1.25, 0.5, False)),
    "not finite": ([2, 3, 1, 0], [2, 3, np.inf, 0], 0.0, (0.0, np.inf, False)),
    "other scores": ([2, 3, 1, 0], [2, 3, 1], 0.5, (0.5, None, False)),
    "no scores": (None, [2, 3, 1, 0], 0.5, (0.5, None, False)),
    "no scores of the other": ([2, 3, 1, 0], None, None, (None, None, False)),
}


@pytest.mark.parametrize("case", FLIPS)
def test_a_flip_is_explained_where_rounding_closes_its_margin(case: str) -> None:
    mine, other, own, wanted = FLIPS[case]
    routers = [None if row is None else np.array([[9.0] * len(row), row]) for row in (mine, other)]
    flip = outcomes._expert_flip("L0.experts", 7, 1, [0, 1], [2, 3], routers, own)
    assert (flip.gap, flip.largest, flip.explained) == wanted
    assert (flip.key, flip.position, flip.gone, flip.came) == ("L0.experts", 7, (0, 1), (2, 3))


# --- points that are changed --------------------------------------------------------------------


class Kept:
    """A recorder that wants one point, and keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def begin(self, facts: Any) -> None:
        self.seen.append(("begin", 0, facts))

    def wants(self, point: str, layer: int) -> bool:
        return (point, layer) == ("q", 1)

    def capture(self, point: str, layer: int, x: int) -> int:
        self.seen.append((point, layer, x))
        return x + 100


def test_a_changed_point_is_seen_by_the_recorder_and_by_later_changes() -> None:
    held: list[dict[str, Any]] = []

    def tap(patched: Any, layer: int, x: int, values: Any) -> int:
        held.append(dict(values))
        return 2 * x

    kept = Kept()
    tapped = _Tapped("model", kept, {"mid": (tap, tap)})  # type: ignore[arg-type]
    tapped.begin(3)
    assert [tapped.wants(*at) for at in (("mid", 0), ("q", 1), ("q", 0))] == [True, True, False]
    assert tapped.capture("embd", -1, 1) == 101
    assert tapped.capture("q", 0, 5) == 105 and tapped.capture("mid", 0, 7) == 128
    assert tapped.capture("out", 0, 9) == 109 and tapped.capture("mid", 1, 1) == 104
    assert kept.seen[0] == ("begin", 0, 3) and kept.seen[3] == ("mid", 0, 28)
    assert held[0] == held[1] == {STREAM: 101, "q": 105} and held[2] == {STREAM: 109}


# --- weights of streams -------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99))
def test_weights_of_streams_are_those_of_torch(n: int, iterations: int, seed: int) -> None:
    """Sigmoids of two parts, and a matrix of the third that is normalised again and again."""
    rng = np.random.default_rng(seed)
    x, products = rng.standard_normal((5, n * 8)), rng.standard_normal((5, 2 * n + n * n))
    scale, base = rng.standard_normal(3), rng.standard_normal(2 * n + n * n)
    how: dict[str, Any] = {"iterations": iterations, "eps": 1e-3, "norm_eps": 1e-2}
    found = stream_weights(x, products, scale, base, **how)
    t = torch.tensor(products) * torch.rsqrt(torch.tensor(x).pow(2).mean(-1, keepdim=True) + 1e-2)
    pre, post, comb = t[:, :n], t[:, n : 2 * n], t[:, 2 * n :]
    shift = [torch.tensor(part) for part in np.split(base, [n, 2 * n])]
    pre = torch.sigmoid(pre * scale[0] + shift[0]) + 1e-3
    post = 2 * torch.sigmoid(post * scale[1] + shift[1])
    square = torch.softmax((comb * scale[2] + shift[2]).reshape(-1, n, n), -1) + 1e-3
    for at in range(iterations):
        if at:
            square = square / (square.sum(-1, keepdim=True) + 1e-3)
        square = square / (square.sum(-2, keepdim=True) + 1e-3)
    wanted = torch.cat([pre, post, square.flatten(1)], -1).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    alone = stream_weights(x, products[:, :n], scale[:1], base[:n], **how)
    np.testing.assert_allclose(alone, wanted[:, :n], rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_windows_are_sums_by_softmax_without_slots_that_are_closed(
    windows: int, slots: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kv, gate = rng.standard_normal((2, windows, slots, 4))
    gate[:, 1:][rng.random((windows, slots - 1, 4)) < 0.3] = -np.inf
    wanted = (torch.tensor(kv) * torch.softmax(torch.tensor(gate), 1)).sum(1).numpy()
    np.testing.assert_allclose(compressed_windows(kv, gate), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("before", [0, 3])
def test_a_rotation_of_the_last_elements_is_undone(before: int) -> None:
    """Pairs are adjacent before and after; in between they stand in halves."""
    rng = np.random.default_rng(before)
    backend = BACKENDS["numpy"]("cpu", "float32")
    context: Any = SimpleNamespace(backend=backend, block=SimpleNamespace(rope_cast=False))
    x = rng.standard_normal((5, 2, before + 8)).astype(np.float32)
    angles = rng.standard_normal((5, 4)).astype(np.float32)
    table = np.cos(angles), np.sin(angles)
    turned = np.asarray(rotate_last(context, x, table))
    pairs = x[..., before:].reshape(5, 2, 4, 2)
    whole = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(turned[..., before : before + 4], whole.real, atol=1e-6)
    np.testing.assert_allclose(turned[..., before + 4 :], whole.imag, atol=1e-6)
    np.testing.assert_allclose(rotate_last_back(context, turned, table), x, atol=1e-6)


# --- the residual before a norm -----------------------------------------------------------------


def joined(values: np.ndarray, dtype: str = "float32") -> Any:
    return SimpleNamespace(tiles=None, read=lambda: values, shape=values.shape, dtype=dtype)


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 5), (1, 5), (5, 1)])
def test_a_norm_is_seen_from_two_rows_and_columns_on(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    y = rng.standard_normal(shape)
    weight = rng.uniform(0.5, 2, shape[1])
    x = y / np.sqrt(np.mean(y * y, 1, keepdims=True) + 1e-12) * weight
    assert is_normed(joined(x), joined(y)) == (min(shape) > 1)
    if min(shape) < 2:
        return
    noise = rng.standard_normal(shape)
    noise *= np.linalg.norm(x) / np.linalg.norm(noise) * 2.0**-8
    assert not is_normed(joined(x + noise), joined(y))
    assert is_normed(joined(x + noise, "bfloat16"), joined(y))
    assert not is_normed(joined(x + 8 * noise, "float16"), joined(y))
    for bad in (np.nan, np.inf):
        odd = x.copy()
        odd[-1, 0] = bad
        assert not is_normed(joined(odd), joined(y)) and not is_normed(joined(x), joined(odd))
    zeros = y.copy()
    zeros[0] = 0
    assert not is_normed(joined(x), joined(zeros)) and not is_normed(joined(0 * x), joined(y))
