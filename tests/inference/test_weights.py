"""Handles: decoded under a budget, by panels, per expert; the encoded product; overlays.

Seen red: an expert's rows taken from the first, a panel's offset lost, the budget ignored, pages
not let go of, the encoded product of another expert's rows.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.codecs import decode, encode, native_kernels
from aprfmt.errors import ArchError, TensorNotFoundError
from aprfmt.inference.backends.base import ROWS, Backend
from aprfmt.inference.backends.tiles import panel_rows
from aprfmt.inference.fast.encoded import ENCODED_ROWS, MOVE_AT, EncodedProducts
from aprfmt.inference.rows import ArrayRows
from aprfmt.inference.session import Session
from aprfmt.inference.weights import Weights, array_weights, free_budget, model_weights
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel, run
from tests.models import IDS

RANDOM = np.random.default_rng(0)


class EncodedRows(ArrayRows):
    """An encoded matrix or stack of experts that counts how often rows were decoded."""

    def __init__(self, values: np.ndarray, encoding: str) -> None:
        super().__init__(values)
        self.raw = bytes(encode(encoding, values)[""])
        self.encoding = encoding
        self.decoded = 0
        self.dropped = 0

    def numpy(self) -> np.ndarray:
        self.decoded += 1
        return decode(self.encoding, self.raw, self.shape)

    def decode_rows(self, start: int, stop: int) -> np.ndarray:
        self.decoded += 1
        return decode(self.encoding, self.raw, self.shape).reshape(-1, self.shape[-1])[start:stop]

    def encoded(self, start: int, stop: int) -> memoryview:
        size = len(self.raw) // math.prod(self.shape[:-1])
        return memoryview(self.raw)[start * size : stop * size]

    def drop(self) -> None:
        self.dropped += 1


def single(rows: ArrayRows, budget: int = 1 << 30) -> Weights:
    return Weights({"w": rows}, budget, "test")


@pytest.mark.parametrize("run_", ["numpy:float32", "numpy:float64", "torch:float32"])
@pytest.mark.parametrize("budget", [0, 1 << 30], ids=["per-use", "held"])
def test_a_product_is_the_same_held_and_decoded_per_use(
    run_: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows enough for several panels."""
    monkeypatch.setattr("aprfmt.inference.backends.tiles.PANEL_BYTES", 64 * 4 * ROWS)
    b = backend(run_)
    values = RANDOM.standard_normal((300, 64)).astype(np.float32)
    x = RANDOM.standard_normal((ENCODED_ROWS + 5, 64)).astype(np.float32)
    rows = EncodedRows(values, "Q8_0")
    assert panel_rows(64) == ROWS
    weights = single(rows, budget)
    for _ in range(2):
        y = b.to_numpy(b.linear(b.array(x), weights["w"], None))
    expected = x.astype(np.float64) @ rows.numpy().astype(np.float64).T
    assert rel(y, expected) < 1e-6
    assert rows.decoded == (2 if budget else 1 + 2 * math.ceil(300 / ROWS))
    assert weights.holder.used == (300 * 64 * b.itemsize if budget else 0)
    assert rows.dropped == (1 if budget else 0)


@pytest.mark.parametrize("encoding", ["Q4_K", "Q8_0", "BF16"])
def test_few_rows_are_multiplied_encoded(encoding: str) -> None:
    if native_kernels() is None:
        pytest.skip("NOT-RUN: the extension is not built")
    values = RANDOM.standard_normal((96, 256)).astype(np.float32)
    rows = EncodedRows(values, encoding)
    w = single(rows)["w"]
    x = RANDOM.standard_normal((ENCODED_ROWS + 1, 256)).astype(np.float32)
    encoded = EncodedProducts(2)
    assert encoded.multiply(x, w) is None
    y = encoded.multiply(x[:1], w)
    assert y is not None and rows.decoded == 0
    expected = x[:1].astype(np.float64) @ rows.numpy().astype(np.float64).T
    assert rel(y, expected) < 1e-6


@pytest.mark.parametrize("encoding", ["Q8_0", "F32"])
def test_an_expert_is_its_own_rows(encoding: str) -> None:
    values = RANDOM.standard_normal((4, 6, 32)).astype(np.float32)
    rows = EncodedRows(values, encoding) if encoding != "F32" else ArrayRows(values)
    stack = single(rows)["w"]
    whole = rows.numpy()
    for index in range(4):
        expert = stack.expert(index)
        assert expert.shape == (6, 32)
        np.testing.assert_array_equal(expert.numpy(), whole[index])
        np.testing.assert_array_equal(expert.rows(2, 5), whole[index][2:5])
        if native_kernels() is not None:
            product = EncodedProducts(1).multiply(np.ones((1, 32), np.float32), expert)
            assert (product is None) == (encoding == "F32")
            assert product is None or rel(product[0], whole[index].sum(-1)) < 1e-6
    np.testing.assert_array_equal(single(ArrayRows(values[0]))["w"].expert(3).numpy(), values[0][3])
    with pytest.raises(ArchError, match="has no expert 4"):
        stack.expert(4)


def test_an_unknown_role_names_near_ones() -> None:
    weights = array_weights({"L0.attn_q.weight": np.zeros((2, 2))})
    with pytest.raises(TensorNotFoundError, match=r"near roles: L0\.attn_q\.weight"):
        weights["L0.attn_qq.weight"]
    assert weights.get_role(0, "attn_q.bias") is None


def test_a_weight_that_may_be_absent_is_asked_for_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: the near names of every absent weight were a third of a diagnosis."""
    held = array_weights({"L0.attn_q.weight": np.ones((2, 2))})
    monkeypatch.setattr("aprfmt.inference.weights.similar_names", None)  # no error may be built
    assert held.get("L0.attn_k.weight") is None and held.get("L0.attn_k.weight", 3) == 3
    assert held.get("L0.attn_q.weight") is held["L0.attn_q.weight"]


def quantized(tmp_path: Path) -> Path:
    """Return a GGUF whose matrices are Q8_0."""
    folder, target = tmp_path / "model", tmp_path / "model.gguf"
    from tests.models import save_tiny

    save_tiny("llama", folder, hidden_size=64, intermediate_size=96)
    aprfmt.convert(folder, target, quantize="Q8_0")
    return target


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32"])
def test_any_budget_gives_the_same_logits(run_: str, tmp_path: Path) -> None:
    target = quantized(tmp_path)
    found: dict[int, Any] = {}
    with open_model(target) as model:
        encodings = {tensor.encoding for tensor in model.roles.values()}
        assert "Q8_0" in encodings
        for budget in (0, 40_000, 1 << 30):
            with Session.open(model, backend(run_), memory=budget) as session:
                found[budget] = session.logits(IDS)
                assert session.weights.holder.used <= budget
                assert rel(session.prefill(IDS[:9])[-1], found[budget][8]) < 5e-6
                assert rel(session.step(IDS[9]), found[budget][9]) < 5e-6
    assert rel(found[0], found[1 << 30]) < 5e-6
    assert rel(found[40_000], found[1 << 30]) < 5e-6


def test_a_model_larger_than_the_budget_is_read_ahead_and_let_go(tmp_path: Path) -> None:
    target = quantized(tmp_path)
    with open_model(target) as model:
        weights = model_weights(model, budget=10)
        events: list[str] = []
        for key, rows in weights._rows.items():
            _watch(rows, key, events)
        with weights.using_layer(0):
            assert not any(event.startswith("drop") for event in events)
        weights.close()
    assert {"touch L1.attn_q.weight", "drop L0.attn_q.weight"} <= set(events)
    assert "touch L2.attn_q.weight" not in events and "drop L1.attn_q.weight" not in events


def _watch(rows: Any, key: str, events: list[str]) -> None:
    def noted(name: str) -> Callable[[], None]:
        original = getattr(rows, name)

        def call() -> None:
            events.append(f"{name} {key}")
            original()

        return call

    for name in ("touch", "drop"):
        setattr(rows, name, noted(name))


def test_overlaid_weights_replace_one_tensor_and_share_nothing() -> None:
    b: Backend = backend("numpy:float64")
    with open_model(judged("llama").folder) as model:
        weights = model_weights(model)
        key = "L1.attn_norm.weight"
        overlay: Mapping[str, np.ndarray] = {key: 2 * weights[key].numpy()}
        session = Session(model.spec, model.hyper, weights.with_arrays(overlay), b)
        changed = session.logits(IDS)
        np.testing.assert_array_equal(weights[key].numpy() * 2, session.weights[key].numpy())
    assert rel(changed, run("llama", b)) > 1e-3


@pytest.mark.skipif(native_kernels() is None, reason="NOT-RUN: no native kernels")
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_vocabulary_that_streams_is_multiplied_piece_by_piece(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are let go of after every piece: one mapped whole was most of a run's memory."""
    monkeypatch.setattr("aprfmt.inference.fast.encoded.PIECE_BYTES", 1)
    values = RANDOM.standard_normal((300, 64)).astype(np.float32)
    x = RANDOM.standard_normal((tokens, 64)).astype(np.float32)
    whole, pieces = EncodedRows(values, "Q8_0"), EncodedRows(values, "Q8_0")
    held = Weights({"token_embd.weight": whole}, 1 << 30, "test")["token_embd.weight"]
    streamed = Weights({"token_embd.weight": pieces}, 0, "test")["token_embd.weight"]
    encoded = EncodedProducts(1)
    np.testing.assert_array_equal(
        encoded.multiply(x, streamed), encoded.multiply(x, held), strict=True
    )
    assert (whole.dropped, pieces.dropped) == (0, 5)  # 300 rows, 64 at a time
    streamed.rows(7, 8)
    assert pieces.dropped == 6
    layered = Weights({"L0.ffn_up.weight": pieces}, 0, "test")["L0.ffn_up.weight"]
    encoded.multiply(x, layered)
    assert pieces.dropped == 6  # a layer's are let go of when the layer is done


def test_the_default_budget_is_a_part_of_free_memory() -> None:
    assert 1 << 20 < free_budget() < 1 << 50


def test_a_weight_multiplied_often_moves_to_huge_pages() -> None:
    if native_kernels() is None:
        pytest.skip("NOT-RUN: the extension is not built")
    values = RANDOM.standard_normal((96, 256)).astype(np.float32)
    x = RANDOM.standard_normal((1, 256)).astype(np.float32)
    for budget in (1 << 20, 0):
        rows = EncodedRows(values, "Q8_0")
        weights = Weights({"w": rows}, budget, "test")
        w = weights["w"]
        encoded = EncodedProducts(1)
        first = encoded.multiply(x, w)
        places = set()
        for _ in range(MOVE_AT):
            y, again = encoded.multiply(x, w), encoded.multiply_each(x, [w])
            assert y is not None and first is not None and again is not None
            assert y.tobytes() == again[0].tobytes() == first.tobytes()
            places.add(np.frombuffer(w.notes[encoded].rows, np.uint8).ctypes.data)
        assert len(places) == (2 if budget else 1)
        assert weights.holder.used == (96 * 256 // 32 * 34 if budget else 0)
        assert rows.dropped == (1 if budget else 0)  # the mapped file's pages may go


def test_pages_hand_out_zeros_that_do_not_overlap() -> None:
    from aprfmt.inference.fast.pages import LINE, SEGMENT, Pages

    pages = Pages()
    views = [pages.allocate(size) for size in (1, 100, SEGMENT - 50, 0, 7, SEGMENT + 3)]
    for i, view in enumerate(views):
        assert not any(view[:200]) and not any(view[-200:])
        view[:] = bytes([i + 1]) * len(view)
    for i, view in enumerate(views):
        assert set(view[:200]) | set(view[-200:]) <= {i + 1}
        assert not len(view) or np.frombuffer(view, np.uint8).ctypes.data % LINE == 0
    assert bytes(pages.copy_bytes(b"abc")) == b"abc"
