"""Parts of runs, losses and engines, each by itself."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates.forward import judge_loss
from aprfmt.checks.gates.golden import GoldenText
from aprfmt.cli.parity.output import worst_points
from aprfmt.codecs import native_kernels
from aprfmt.inference.backends.base import Heads
from aprfmt.inference.batch import _aligned
from aprfmt.inference.device import parse_run
from aprfmt.inference.dry.backend import DryBackend
from aprfmt.inference.engines.graph import GraphReader
from aprfmt.inference.evaluation import Sample, without_label
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cuda.attend import Attention
from aprfmt.inference.fast.cuda.brought import Brought
from aprfmt.inference.fast.dry_host import Products
from aprfmt.inference.fast.encoded import ENCODED_ROWS, EncodedProducts
from aprfmt.inference.fast.graphs import NotRecordable, PassInputs
from aprfmt.inference.loss import MeanLoss
from aprfmt.inference.parity.matched import ThroughRows
from aprfmt.inference.rows import StoredRows
from aprfmt.measure.traces import PointDiff
from aprfmt.model import open_model
from tests.conftest import not_run
from tests.inference.judge import backend
from tests.models import IDS, save_tiny


def test_rows_through_an_encoding_take_what_their_numbers_take() -> None:
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    rows = ThroughRows(SimpleNamespace(shape=values.shape, numpy=lambda: values), "Q8_0")  # type: ignore[arg-type]
    found = rows.numpy()
    assert rows.nbytes == found.nbytes and found.shape == values.shape
    assert 0 < np.abs(found - values).max() < 0.02


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_labels_stand_against_the_tokens_they_are(shift: int) -> None:
    """The mask of the first token is kept where labels are the ids; no row predicts it."""
    ids = np.array([[5, 6, 7, 8]])
    labels = {0: ids, 1: np.array([[6, 7, 8, 9]]), -1: np.array([[4, 5, 6, 7]])}[shift]
    longer, label = _aligned(ids, labels, np.ones(ids.shape, bool), shift)
    assert longer.tolist() == [[5, 6, 7, 8, 9 if shift == 1 else -1]]
    expected = {0: [1, 1, 1, 1, 0], 1: [0, 1, 1, 1, 1], -1: [0, 1, 1, 0, 0]}[shift]
    assert label.astype(int).tolist() == [expected]


def test_why_a_sample_has_no_loss_token() -> None:
    def said(count: int, prompt: int, cut: bool) -> str:
        return without_label(Sample("s", tuple(range(count)), prompt=prompt, cut=cut), 8, "windows")

    assert said(1, 0, False) == "1 tokens leave no loss token; give a longer text"
    assert said(2, 0, False).startswith("2 tokens fill no window of 8")
    assert said(3, 3, True) == "3 tokens leave no loss token; give a response"
    assert said(30, 9, True).startswith("its prompt of 9 tokens fills the window of 8")


@pytest.mark.parametrize("off", [0.0, 0.25, 0.25000001])
def test_a_stated_loss_may_be_as_far_off_as_is_allowed(off: float) -> None:
    found = MeanLoss(2.0, 10, 100, 1)
    checks = judge_loss(
        GoldenText("t", "x", nats=2.0 + off), found, (3.0, 2.0, 3.0), "trained", 0.25
    )
    (one,) = [each for each in checks if each.name == "loss-as-stated"]
    assert one.outcome == ("PASS" if off <= 0.25 else "FAIL")
    assert math.isclose(found.uniform, math.log(100))


@pytest.mark.parametrize("point", ["experts", "expert_w", "attn_out"])
@pytest.mark.parametrize("masked", [False, True])
def test_only_whole_values_of_experts_are_routed(point: str, masked: bool) -> None:
    put: list[str] = []
    reader: Any = SimpleNamespace(
        _scales_q=lambda node: None,
        places=lambda node: [SimpleNamespace(point=point, layer=0, columns=None)],
        _add_routed=lambda place, values: put.append("routed"),
        _put=lambda place, cut, mask: put.append("put"),
    )
    seen = np.ones(2, bool) if masked else None
    GraphReader.add(reader, SimpleNamespace(scale=None), np.zeros(2, np.float32), seen)  # type: ignore[arg-type]
    assert put == ["routed" if point.startswith("expert") and not masked else "put"]


def test_all_points_beyond_are_shown_up_to_a_screenful_and_the_worst_of_each_kind() -> None:
    """Twenty points beyond, whatever their kind; of the others the largest of each."""
    points = [PointDiff(f"L{i}.q", 0.1 * i, 0.0, None, 1.0, True) for i in range(30)]
    points += [PointDiff(f"L{i}.k", 0.1 * i, 0.0, None, 1.0, False) for i in range(3)]
    points += [PointDiff("L0.v", None, None, None, 1.0, False, why="absent")]
    shown = [point.key for point in worst_points(points)]
    assert shown == [*(f"L{i}.q" for i in range(20)), "L29.q", "L2.k", "L0.v"]


@pytest.mark.parametrize("bias", [False, True])
def test_a_time_step_is_the_same_on_torch_and_numpy(bias: bool) -> None:
    """Softplus of input and bias, within its limits; deterministic on torch too."""
    rng = np.random.default_rng(2)
    raw, more = rng.normal(size=(3, 5)), rng.normal(size=5) if bias else None
    plain = np.clip(np.log1p(np.exp(raw + (0 if more is None else more))), 0.1, 1.5)
    for name, exact in (("numpy", False), ("torch", False), ("torch", True)):
        run: Any = backend(f"{name}:float64", deterministic=exact)
        of = None if more is None else run.array(more)
        found = run.to_numpy(run.time_step(run.array(raw), of, 0.1, 1.5))
        assert np.allclose(found, plain, rtol=1e-12), (name, exact)


@pytest.mark.parametrize("size", [64, 4096])
def test_a_cap_takes_two_arrays_beside_its_result(size: int) -> None:
    run = DryBackend("cpu", "float32")
    x = run.new((size, 8))
    before = run.account.peak
    run.softcap(x, 30.0)
    assert run.account.peak - before == 2 * x.nbytes


def test_rows_of_several_tensors_have_no_coded_form() -> None:
    tensor: Any = SimpleNamespace(shape=(2, 2), encoding="F32", stored=(), whole=None)
    assert StoredRows(tensor).coded() is None
    tensor.whole = SimpleNamespace(parts={})
    assert StoredRows(tensor).coded() is None


@pytest.mark.parametrize("threads", [None, 1])
def test_transformers_gives_torchs_threads_back(threads: int | None, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    from aprfmt.inference.engines import transformers

    save_tiny("llama", tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with open_model(tmp_path) as model:
            run = transformers.run(model, IDS[:3], parse_run("transformers"), threads=threads)
            with run as trace:
                assert torch.get_num_threads() == (threads or 3)
                assert "logits" in trace.records
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(4, 64), (2, 4, 64)], ids=["matrix", "experts"])
@pytest.mark.parametrize("encoding", ["Q4_K", "Q8_0", "BF16", "F32", "I32", "F64"])
def test_what_a_dry_run_multiplies_as_it_is_stored_a_run_does(
    encoding: str, shape: tuple[int, ...]
) -> None:
    """Matrices of an encoding with a kernel; what decoding costs nothing is not copied."""
    if native_kernels() is None:
        not_run("no C kernels here")
    stored = np.zeros(64, np.uint8)
    ghost = SimpleNamespace(memory=SimpleNamespace(nbytes=64), nbytes=64)

    def weight(raw: Any) -> Any:
        return SimpleNamespace(
            encoding=encoding, shape=shape, notes={}, part=None, n_rows=4, piecewise=False,
            stored=lambda: raw,
        )  # fmt: skip

    real = EncodedProducts(1)._look(weight(stored))
    dry = Products([])
    assert dry.covers(1, weight(ghost)) is (real is not None)
    assert (real is not None) is (encoding in ("Q4_K", "Q8_0", "BF16") and len(shape) == 2)
    assert not dry.covers(ENCODED_ROWS + 1, weight(ghost))


def test_a_recorded_pass_brings_nothing_new_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would read what the host had when it was recorded."""
    monkeypatch.setattr(memory, "put", lambda x: ("put", x.tobytes()))
    monkeypatch.setattr(memory, "is_device", lambda x: isinstance(x, tuple))
    brought = Brought()
    known, ids = np.array([1.0, 2.0]), np.arange(3)
    first = brought.constant(known, "float32")
    inputs = PassInputs(ids, ids.copy(), np.arange(10, 16), cached=None)
    brought.recording = inputs
    assert brought.constant(known, "float32") is first
    assert np.array_equal(brought.rows(ids), [10, 11, 12])
    news: tuple[Callable[[], Any], ...] = (
        lambda: brought.constant(np.array([3.0]), "float32"),
        lambda: brought.rows(np.array([2, 1, 0])),
        lambda: brought.needs_host("x"),
    )
    for new in news:
        with pytest.raises(NotRecordable):
            new()
    attention = Attention(None, brought, "float32", deterministic=False, tf32=False)  # type: ignore[arg-type]
    heads = Heads(np.tri(3, dtype=bool), 1.0, None, None, "float32")
    mask = attention.mask(heads)
    assert mask == ("put", heads.mask.tobytes())
    inputs.after = []  # from here on it is recorded
    assert attention.mask(heads) is mask
    with pytest.raises(NotRecordable, match="mask"):
        attention.mask(Heads(~heads.mask, 1.0, None, None, "float32"))
