"""Weights on the GPU as the file has them: decoded bit for bit, multiplied, streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aprfmt
from aprfmt.conversion.options import ConvertOptions
from aprfmt.inference.fast.gpu_encodings import stays_encoded
from aprfmt.inference.fast.torch_products import TorchProducts
from aprfmt.inference.fast.torch_weights import BlocksOnTorch, Bnb4OnTorch
from aprfmt.inference.session import Session
from aprfmt.inference.weights import Weights
from aprfmt.model import open_model
from tests.inference.gpu.on_gpu import cuda, need
from tests.inference.judge import backend, rel
from tests.inference.test_weights import EncodedRows

pytestmark = pytest.mark.gpu
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16")
PROMPT = [5, 900, 17, 333, 1200, 64, 8, 77, 4, 4, 901]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    need()
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def models(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo in F32, BF16, Q8_0, Q4_K and NF4."""
    need()
    folder = tmp_path_factory.mktemp("encoded")
    found = {"BF16": demo_model}
    forms: dict[str, ConvertOptions] = {
        "F32": {"encoding": "F32"},
        "Q8_0": {"quantize": "Q8_0"},
        "Q4_K": {"quantize": "Q4_K_M"},
        "NF4": {"quantize": "NF4"},
    }
    for name, options in forms.items():
        suffix = "safetensors" if name in ("NF4", "F32") else "gguf"
        target = folder / name / f"demo.{suffix}"
        target.parent.mkdir()
        aprfmt.convert(demo_model, target, **options)
        found[name] = target
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_encoded_weights_stay_encoded_and_decode_exactly(kind: str, dtype: str) -> None:
    random = np.random.default_rng(4)
    values = random.standard_normal((70, 512)).astype(np.float32)
    rows = EncodedRows(values, kind)
    w = Weights({"w": rows}, 1 << 30, "test")["w"]
    b = cuda(dtype)
    assert isinstance(b, TorchProducts)
    for tokens in (1, 3, 9):
        x = random.standard_normal((tokens, 512)).astype(np.float32)
        found = b.to_numpy(b.linear(b.array(x), w, None))
        y = b.to_numpy(b.array(x)).astype(np.float64) @ rows.numpy().astype(np.float64).T
        assert rel(found, y) < {"float32": 2e-6, "float64": 1e-12, "bfloat16": 1e-2}[dtype]
    kept = b._encoded_weight(w)
    if not stays_encoded(kind, dtype):
        assert kept is None
        return
    assert isinstance(kept, BlocksOnTorch)
    out = torch.full((70, 512), torch.nan, dtype=b._type, device="cuda")
    for start, panel in b._decode_panels(w, kept):
        out[start : start + len(panel)] = panel
    assert torch.equal(out.cpu(), torch.from_numpy(rows.numpy()).to(b._type))
    ids = np.array([3, 69, 0, 3])
    np.testing.assert_array_equal(b.to_numpy(b.embed(w, ids)), b.to_numpy(out[ids]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("kind", ["F32", "BF16", "F16", "Q8_0"])
def test_rows_of_any_length(kind: str, dtype: str) -> None:
    """Matrices, look-ups and the experts of a stack, from x that begins anywhere."""
    random, b = np.random.default_rng(6), cuda(dtype)
    limit = {"float32": 2e-6, "float64": 1e-12, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    for columns in (32, 96, 160) if kind == "Q8_0" else (10, 27, 40, 44, 80, 100, 131, 144, 160):
        values = random.standard_normal((3, 13, columns)).astype(np.float32)
        stack, rows = EncodedRows(values, kind), EncodedRows(values[0], kind)
        weights = Weights({"stack": stack, "w": rows}, 1 << 30, "test")
        x = b.array(random.standard_normal((9, columns)).astype(np.float32))
        wide = b.to_numpy(x).astype(np.float64)
        for w, numbers in (
            (weights["w"], rows.numpy()),
            (weights["stack"].expert(2), stack.numpy()[2]),
        ):
            wanted = wide @ numbers.astype(np.float64).T
            for start, stop in ((0, 9), (1, 2), (3, 6), (5, 9)):
                found = b.to_numpy(b.linear(x[start:stop], w, None))
                assert rel(found, wanted[start:stop]) < limit, (columns, start)
        ids = np.array([12, 0, 7, 7])
        expected = b.to_numpy(b.array(rows.numpy()[ids]))
        np.testing.assert_array_equal(b.to_numpy(b.embed(weights["w"], ids)), expected)


def test_experts_of_an_encoded_stack() -> None:
    values = np.random.default_rng(9).standard_normal((5, 33, 256)).astype(np.float32)
    rows = EncodedRows(values, "Q4_K")
    stack = Weights({"w": rows}, 1 << 30, "test")["w"]
    b = cuda()
    x = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    for expert in (0, 3, 4):
        found = b.to_numpy(b.linear(b.array(x), stack.expert(expert), None))
        assert rel(found, x.astype(np.float64) @ rows.numpy()[expert].astype(np.float64).T) < 2e-6


def test_a_weight_larger_than_the_scratch_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.inference.fast.torch_products.SCRATCH", 40 * 256 * 4)
    values = np.random.default_rng(2).standard_normal((130, 256)).astype(np.float32)
    rows = EncodedRows(values, "Q6_K")
    w = Weights({"w": rows}, 1 << 30, "test")["w"]
    x = np.random.default_rng(3).standard_normal((9, 256)).astype(np.float32)
    b = cuda()
    assert rel(b.to_numpy(b.linear(b.array(x), w, None)), x @ rows.numpy().T) < 2e-6
    assert [start for start, _ in b._decode_panels(w, b._encoded_weight(w))] == [0, 40, 80, 120]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K", "NF4"])
def test_models_of_every_encoding(kind: str, dtype: str, models: dict[str, Path]) -> None:
    """Prefill, recorded steps, and a budget that nothing fits: all as numpy in float64."""
    limit = 2e-5 if dtype == "float32" else 8e-2
    with open_model(models[kind]) as model:
        with Session.open(model, backend("numpy:float64")) as reference:
            expected = reference.logits(PROMPT)
        for memory in (None, 200_000):
            b = cuda(dtype)
            with Session.open(model, b, memory=memory) as session:
                whole = [session.logits(PROMPT) for _ in range(3)][-1]
                session.prefill(PROMPT[:4])
                steps = np.stack([session.step(token) for token in PROMPT[4:]])
                used = session.weights.holder.used
            assert rel(whole, expected) < limit
            assert rel(steps, expected[4:]) < limit
            if dtype == "float32":
                np.testing.assert_array_equal(whole.argmax(-1), expected.argmax(-1))
            assert memory is None or used <= memory
            if memory is None and kind == "NF4":
                w = session.weights["L0.ffn_up.weight"]
                assert isinstance(w.encoded_on(b), Bnb4OnTorch)


def test_memory_on_the_gpu_is_what_the_file_takes(models: dict[str, Path]) -> None:
    """Encoded weights are never held decoded."""
    b: Any = cuda()
    with open_model(models["Q4_K"]) as model, Session.open(model, b) as session:
        session.logits(PROMPT)
        stored = sum(rows.nbytes for rows in session.weights._rows.values())
        assert session.weights.holder.used < 1.2 * stored
