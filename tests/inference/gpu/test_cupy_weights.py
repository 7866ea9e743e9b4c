"""Weights that stay encoded in GPU memory: products, look-ups, panels, experts, streaming.

Seen red, each alone: every panel decoded from the first row, the absmax of the first block for
every row, the bias left out, a look-up that ignores its ids.
"""

from typing import Any

import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import codec, decode, encode
from aprfmt.inference.fast.cuda import DECODED, memory
from aprfmt.inference.fast.cuda import stored_weights as placed
from aprfmt.inference.fast.cupy_backend import CupyBackend
from aprfmt.inference.weights import Weight, Weights
from tests.inference.gpu.machine import on
from tests.inference.judge import rel

BOUND = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 6e-3, "float16": 1e-3}


class StoredArray:
    """Rows that are stored encoded: what an open file's tensor gives a Weight."""

    def __init__(self, encoding: str, x: np.ndarray, **options: Any) -> None:
        self.shape, self.encoding = tuple(x.shape), encoding
        self._parts = encode(encoding, x, options=options or None)
        self._values = decode(encoding, self._parts, x.shape)
        self._flat = ENCODINGS[encoding].flat
        self.nbytes = sum(len(part) for part in self._parts.values())
        self.by_rows = not self._flat

    def numpy(self) -> np.ndarray:
        return self._values

    def decode_rows(self, start: int, stop: int) -> np.ndarray:
        return self._values.reshape(-1, self.shape[-1])[start:stop]

    def encoded(self, start: int, stop: int) -> memoryview | None:
        if self._flat:
            return None
        row = ENCODINGS[self.encoding]
        size = self.shape[-1] // row.block_size * row.type_size
        return memoryview(self._parts[""])[start * size : stop * size]

    def coded(self) -> Any:
        reference: Any = codec(self.encoding)
        count = int(np.prod(self.shape))
        return reference.coded(self._parts, count) if self._flat else None

    def touch(self) -> None: ...

    def drop(self) -> None: ...


def weight(encoding: str, shape: tuple[int, ...], budget: int = 1 << 40, **options: Any) -> Weight:
    x = np.random.default_rng(len(encoding)).standard_normal(shape).astype(np.float32)
    return Weights({"w": StoredArray(encoding, x, **options)}, budget, "test")["w"]


def exact(w: Weight) -> np.ndarray:
    return w.numpy().astype(np.float64).reshape(w.n_rows, w.n_columns)


EVERY = [
    (encoding, dtype) for encoding in (*DECODED, "IQ4_NL", "MXFP4", "NF4", "FP4") for dtype in BOUND
]
FEW = [("Q4_K", "float32"), ("IQ4_NL", "float64"), ("NF4", "bfloat16"), ("BF16", "bfloat16")]


@on("case", FEW, EVERY)
def test_linear_and_embed(machine: Any, case: tuple[str, str], monkeypatch: Any) -> None:
    encoding, dtype = case
    monkeypatch.setattr(placed, "PANEL_BYTES", 20_000)  # several panels
    columns = max(256, ENCODINGS[encoding].block_size)
    w, b = weight(encoding, (37, columns)), CupyBackend("cuda", dtype)
    random = np.random.default_rng(1)
    for tokens in (1, 3, 4, 5, 70):
        x = b.array(random.standard_normal((tokens, columns)).astype(np.float32))
        wanted = b.to_numpy(x).astype(np.float64) @ exact(w).T
        assert rel(b.to_numpy(b.linear(x, w, None)), wanted) < BOUND[dtype]
    bias = b.array(random.standard_normal(37).astype(np.float32))
    wanted += b.to_numpy(bias)
    assert rel(b.to_numpy(b.linear(x, w, bias)), wanted) < BOUND[dtype]
    ids = np.array([36, 0, 17, 17, 5])
    rows = b.to_numpy(b.embed(w, ids))
    np.testing.assert_array_equal(rows, b.to_numpy(b.array(exact(w)[ids])))
    on_cpu = b.facts()["decoded_on_cpu"]
    assert on_cpu == ({encoding: 1} if encoding in ("IQ4_NL", "MXFP4") else {})


# Row lengths of models that no power of two divides.
ODD_COLUMNS = (10, 27, 40, 44, 80, 100, 131, 144, 160)
PLAIN = [(encoding, dtype) for encoding in ("F32", "BF16", "F16") for dtype in BOUND]


@on("case", [("BF16", "float32"), ("F16", "bfloat16")], PLAIN)
def test_rows_of_any_length(machine: Any, case: tuple[str, str], monkeypatch: Any) -> None:
    """Matrices, look-ups and the experts of a stack, from x that begins anywhere."""
    encoding, dtype = case
    monkeypatch.setattr(placed, "PANEL_BYTES", 1_500)
    random = np.random.default_rng(6)
    for columns in ODD_COLUMNS if machine.name == "gpu" else ODD_COLUMNS[1::3]:
        stack, b = weight(encoding, (3, 13, columns)), CupyBackend("cuda", dtype)
        for w in (weight(encoding, (13, columns)), stack.expert(2)):
            x = b.array(random.standard_normal((9, columns)).astype(np.float32))
            wanted = b.to_numpy(x).astype(np.float64) @ exact(w).T
            for start, stop in ((0, 9), (1, 2), (3, 6), (5, 9)):
                found = b.to_numpy(b.linear(x[start:stop], w, None))
                assert rel(found, wanted[start:stop]) < BOUND[dtype], (columns, start)
        ids = np.array([12, 0, 7, 7])
        rows = b.to_numpy(b.embed(weight(encoding, (13, columns)), ids))
        expected = b.to_numpy(b.array(exact(weight(encoding, (13, columns)))[ids]))
        np.testing.assert_array_equal(rows, expected)


@on("sizes", [(96, 64), (256, 512)], [(96, 64), (80, 64), (4096, 64), (256, 512)])
def test_4_bit_rows_that_do_not_begin_at_a_block(
    machine: Any, sizes: tuple[int, int], monkeypatch: Any
) -> None:
    columns, blocksize = sizes
    monkeypatch.setattr(placed, "PANEL_BYTES", 9_000)
    w = weight("NF4", (21, columns), blocksize=blocksize, double_quantization=columns == 4096)
    b = CupyBackend("cuda", "float32")
    x = np.random.default_rng(2).standard_normal((6, columns)).astype(np.float32)
    assert rel(b.to_numpy(b.linear(b.array(x), w, None)), x.astype(np.float64) @ exact(w).T) < 1e-6
    ids = np.array([20, 0, 7, 7])
    np.testing.assert_array_equal(b.to_numpy(b.embed(w, ids)), exact(w)[ids].astype(np.float32))


@on("encoding", ["Q4_K", "F32"], ["Q4_K", "Q8_0", "BF16", "F32"])
def test_experts_are_cut_from_their_stack(machine: Any, encoding: str) -> None:
    w, b = weight(encoding, (3, 9, 256)), CupyBackend("cuda", "float32")
    x = np.random.default_rng(3).standard_normal((2, 256)).astype(np.float32)
    for index in range(3):
        each = w.expert(index)
        wanted = x.astype(np.float64) @ exact(each).T
        assert rel(b.to_numpy(b.linear(b.array(x), each, None)), wanted) < 1e-6


@on("encoding", ["Q4_K", "NF4"], ["Q4_K", "NF4", "F32", "IQ4_NL"])
def test_what_does_not_fit_the_budget_is_placed_for_one_use(machine: Any, encoding: str) -> None:
    x = np.random.default_rng(4).standard_normal((2, 256)).astype(np.float32)
    results = []
    for budget in (0, 1 << 40):
        w, b = weight(encoding, (37, 256), budget), CupyBackend("cuda", "float32")
        results.append([b.to_numpy(b.linear(b.array(x), w, None)) for _ in range(2)])
        results[-1].append(b.to_numpy(b.embed(w, np.array([3, 30]))))
        assert (b.facts()["weights_streamed"] > 0) == (budget == 0)
    for streamed, held in zip(*results, strict=True):
        np.testing.assert_array_equal(streamed, held)


@pytest.mark.parametrize("rounded", [True, False])
@on("encoding", ["BF16"], ["F32", "BF16", "Q8_0"])
def test_a_router_keeps_float32_unless_it_is_rounded(
    machine: Any, encoding: str, rounded: bool
) -> None:
    w, b = weight(encoding, (6, 64)), CupyBackend("cuda", "bfloat16")
    x = b.array(np.random.default_rng(5).standard_normal((7, 64)).astype(np.float32))
    bias = b.array(np.ones(6, np.float32))
    found = b.to_numpy(b.router(x, w, bias, rounded=rounded))
    wanted = b.to_numpy(x).astype(np.float64) @ exact(w).T + 1
    assert rel(found, wanted) < (6e-3 if rounded else 1e-6)


def test_every_expert_of_a_stack_has_its_address(machine: Any) -> None:
    """They are those of the matrices that are held; a stack that is not held has none."""
    for experts in (1, 3):
        b = CupyBackend("cuda", "float32")
        stack = weight("F32", (experts, 8, 16))
        held = [b.matrix(stack.expert(each)) for each in range(experts)]
        found = b._expert_addresses(stack)
        assert found is not None and found.dtype == np.int64
        assert b.to_numpy(found).tolist() == [memory.pointer(each) for each in held]
        assert len({memory.pointer(each) for each in held}) == experts
        assert b._expert_addresses(stack) is found
        assert b._expert_addresses(weight("F32", (experts, 8, 16), budget=64)) is None
