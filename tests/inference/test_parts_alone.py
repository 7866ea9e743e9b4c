"""Parts of runs, losses and engines, each by itself."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aprfmt.arch.grouped_rows import Tiled
from aprfmt.causes.training.optimizers import parse_recipe
from aprfmt.checks.gates.forward import judge_loss
from aprfmt.checks.gates.golden import GoldenText
from aprfmt.cli.parity.output import worst_points
from aprfmt.codecs import native_kernels
from aprfmt.errors import (
    ArchError,
    BackendUnavailableError,
    CodecError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from aprfmt.formats.mapped_file import StoredTensor
from aprfmt.inference import capture, forward
from aprfmt.inference import reported_loss as reported
from aprfmt.inference.aprt import load_aprt
from aprfmt.inference.backends.base import Heads
from aprfmt.inference.batch import _align_labels, read_batch
from aprfmt.inference.device import parse_run
from aprfmt.inference.engines import (
    captures,
    dump_folders,
    dumps,
    mapping_proposal,
    modules,
    parts,
    sequences,
    statistics,
    stored_arrays,
)
from aprfmt.inference.engines.captures import Captures
from aprfmt.inference.engines.graph import GraphReader, NodePoint, stored_roles
from aprfmt.inference.engines.npz import NpzFile
from aprfmt.inference.engines.rank_dims import Division
from aprfmt.inference.engines.rank_joining import JoinedArray, _join_by_dims
from aprfmt.inference.engines.record_collector import split_heads
from aprfmt.inference.evaluation import Sample, no_label_reason, plan_windows
from aprfmt.inference.fast.cuda import loader, memory
from aprfmt.inference.fast.cuda.attend import Attention
from aprfmt.inference.fast.cuda.host_uploads import HostUploads
from aprfmt.inference.fast.encoded import EncodedProducts
from aprfmt.inference.fast.graphs import NotRecordable, PassInputs
from aprfmt.inference.loss import MeanLoss
from aprfmt.inference.micro_batches import micro_batches
from aprfmt.inference.parity import operations, outcomes, run_comparison
from aprfmt.inference.parity import verdict as outer
from aprfmt.inference.parity.bundle import HEADER, choose_bundle, parse_bundle, run_cell
from aprfmt.inference.parity.matched_weights import ThroughRows
from aprfmt.inference.parity.outcomes import compare_logits
from aprfmt.inference.record import Record
from aprfmt.inference.replay import patched_model, shadow
from aprfmt.inference.replay.recorded_trace import RecordedTrace, layer_keys
from aprfmt.inference.rows import ArrayRows, StoredRows
from aprfmt.inference.trace import Trace
from aprfmt.inference.weights import Weights
from aprfmt.measure import tolerances
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
    longer, label = _align_labels(ids, labels, np.ones(ids.shape, bool), shift)
    assert longer.tolist() == [[5, 6, 7, 8, 9 if shift == 1 else -1]]
    expected = {0: [1, 1, 1, 1, 0], 1: [0, 1, 1, 1, 1], -1: [0, 1, 1, 0, 0]}[shift]
    assert label.astype(int).tolist() == [expected]


def test_why_a_sample_has_no_loss_token() -> None:
    def said(count: int, prompt: int, cut: bool) -> str:
        return no_label_reason(
            Sample("s", tuple(range(count)), prompt=prompt, cut=cut), 8, "windows"
        )

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
    assert math.isclose(found.uniform_loss, math.log(100))


@pytest.mark.parametrize("point", ["experts", "expert_w", "attn_out"])
@pytest.mark.parametrize("masked", [False, True])
def test_only_whole_values_of_experts_are_routed(point: str, masked: bool) -> None:
    put: list[str] = []
    reader: Any = SimpleNamespace(
        _layer_of_query_scale=lambda node: None,
        points_of_node=lambda node: [SimpleNamespace(point=point, layer=0, columns=None)],
        _add_routed=lambda place, values: put.append("routed"),
        _record=lambda place, cut, mask: put.append("put"),
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
            run = transformers.run_transformers(
                model, IDS[:3], parse_run("transformers"), threads=threads
            )
            with run as trace:
                assert torch.get_num_threads() == (threads or 3)
                assert "logits" in trace.records
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(4, 64), (2, 4, 64)], ids=["matrix", "experts"])
@pytest.mark.parametrize("encoding", ["Q4_K", "Q8_0", "BF16", "F32", "I32", "F64"])
def test_what_is_multiplied_as_it_is_stored(encoding: str, shape: tuple[int, ...]) -> None:
    """Matrices of an encoding with a kernel; what decoding costs nothing is not copied."""
    if native_kernels() is None:
        not_run("no C kernels here")
    weight: Any = SimpleNamespace(
        encoding=encoding,
        shape=shape,
        notes={},
        part=None,
        n_rows=4,
        piecewise=False,
        stored_bytes=lambda: np.zeros(64, np.uint8),
    )
    found = EncodedProducts(1)._find_stored(weight)
    assert (found is not None) is (encoding in ("Q4_K", "Q8_0", "BF16") and len(shape) == 2)


def test_a_recorded_pass_brings_nothing_new_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would read what the host had when it was recorded."""
    monkeypatch.setattr(memory, "copy_to_gpu", lambda x: ("put", x.tobytes()))
    monkeypatch.setattr(memory, "is_on_gpu", lambda x: isinstance(x, tuple))
    uploads = HostUploads()
    known, ids = np.array([1.0, 2.0]), np.arange(3)
    first = uploads.constant(known, "float32")
    inputs = PassInputs(ids, ids.copy(), np.arange(10, 16), cached=None)
    uploads.recording = inputs
    assert uploads.constant(known, "float32") is first
    assert np.array_equal(uploads.row_numbers(ids), [10, 11, 12])
    news: tuple[Callable[[], Any], ...] = (
        lambda: uploads.constant(np.array([3.0]), "float32"),
        lambda: uploads.row_numbers(np.array([2, 1, 0])),
        lambda: uploads.refuse_in_recording("x"),
    )
    for new in news:
        with pytest.raises(NotRecordable):
            new()
    attention = Attention(None, uploads, "float32", deterministic=False, tf32=False)  # type: ignore[arg-type]
    heads = Heads(np.tri(3, dtype=bool), 1.0, None, None, "float32")
    mask = attention.mask(heads)
    assert mask == ("put", heads.mask.tobytes())
    inputs.after = []  # from here on it is recorded
    assert attention.mask(heads) is mask
    with pytest.raises(NotRecordable, match="mask"):
        attention.mask(Heads(~heads.mask, 1.0, None, None, "float32"))


@pytest.mark.parametrize("memory", [None, 0, 12345])
@pytest.mark.parametrize("through", [None, "Q8_0"])
def test_operations_are_judged_within_the_memory_that_is_given(
    memory: int | None, through: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number, in what is free here."""
    asked: list[Any] = []
    given: Any = SimpleNamespace(through=through, memory=memory, ids=(1, 2))

    class Stop(Exception):
        pass

    def weights(model: object, *of: Any) -> None:
        asked.append(of)
        raise Stop

    monkeypatch.setattr(operations, "free_budget", lambda: 777)
    monkeypatch.setattr(operations, "model_weights", weights)
    monkeypatch.setattr(operations, "weights_through_encoding", weights)
    nothing: Any = None
    with pytest.raises(Stop):
        operations.judge_operations(nothing, nothing, nothing, nothing, given)
    free = 777 if memory is None else memory
    assert asked == [(through, memory) if through else (free,)]


def test_a_reproduction_is_of_an_operation_that_was_taken_apart() -> None:
    """Pairs without a cell, or whose cell is of no operation that was judged, have none."""
    ran: list[str] = []
    cell: Any = SimpleNamespace(key="L0.q", run=lambda run: ran.append(str(run)))

    def pair(cell: Any, *keys: str, first: str | None = None) -> Any:
        operations = [
            SimpleNamespace(key=key, shadow=False, residual=0.5, bound=0.1) for key in keys
        ]
        return SimpleNamespace(
            cell=cell, operations=operations, first_operation=first, a=0, b=1, first="L0.q",
            cause="", recorded=None,
        )  # fmt: skip

    runs = [SimpleNamespace(backend={}), SimpleNamespace(backend={})]
    found: Any = SimpleNamespace(runs=runs, model="m", ids=(1,), through=None, pairs=())
    for pairs in ([], [pair(None, "L0.q")], [pair(cell, "L0.k")], [pair(cell), pair(None)]):
        found.pairs = pairs
        assert choose_bundle(found, ("numpy", "numpy:float64")) is None and ran == []
    found.pairs = [pair(cell, "L0.k"), pair(cell, "L0.k", "L0.q"), pair(cell, "L0.q", first="L0.q")]
    made = choose_bundle(found, ("numpy", "numpy:float64"))
    assert made is not None and (made.residual, made.bound, made.runs) == (
        0.5,
        0.1,
        ("numpy", "numpy:float64"),
    )
    assert len(ran) == 2


@pytest.mark.parametrize("room", [0, 1])
def test_a_member_may_be_as_large_as_its_limit(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    path = tmp_path / "x.npz"
    np.savez(path, a=values)
    size = 1000 + 128  # the header of a .npy file
    for name in ("MAX_MEMBER", "MAX_TOTAL"):
        monkeypatch.setattr(f"aprfmt.inference.engines.npz.{name}", size)
    with ExitStack() as stack:
        assert NpzFile(path, stack).arrays["a"][0] == (1000,)
    monkeypatch.setattr("aprfmt.inference.engines.npz.MAX_MEMBER", size - 1)
    with ExitStack() as stack, pytest.raises(FormatError, match="declares 1128 bytes"):
        NpzFile(path, stack)


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        ("version", UnsupportedError, "zip file version 9.9"),
        ("text", FormatError, "is not an .npz file: "),
        ("cut", TruncatedError, "no zip directory at its end; the archive is cut"),
        ("empty", FormatError, "is not an .npz file: "),
    ],
)
def test_an_archive_that_cannot_be_listed_is_one_line(
    damage: str, error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(4))
    data = bytearray(path.read_bytes())
    if damage == "version":  # that its reader needs, in the central directory
        data[data.index(b"PK\x01\x02") + 6] = 99
    contents: dict[str, bytes] = {"text": b"no archive", "cut": bytes(data[:-30]), "empty": b""}
    path.write_bytes(contents.get(damage, bytes(data)))
    with ExitStack() as stack, pytest.raises(error, match=f"x.npz: .*{says}|x.npz: {says}"):
        NpzFile(path, stack)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_an_archive_may_have_as_many_members_as_are_read(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.zeros(4), b=np.zeros(2))
    monkeypatch.setattr("aprfmt.inference.engines.npz.MAX_MEMBERS", most)
    with ExitStack() as stack:
        if most < 2:
            with pytest.raises(FormatError, match=f"x.npz: 2 members; at most {most} are read"):
                NpzFile(path, stack)
        else:
            assert sorted(NpzFile(path, stack).arrays) == ["a", "b"]


@pytest.mark.parametrize(
    ("run_", "sinks", "size"),
    [
        ("numpy:float64", None, 60.0),
        ("numpy:float64", (3.0, -100.0, 90.0), 1.0),
        ("torch:float64", None, 1.0),
        ("torch:float64", (3.0, -100.0, 90.0), 60.0),
    ],
)
def test_a_deterministic_softmax_is_the_softmax(
    run_: str, sinks: tuple[float, ...] | None, size: float
) -> None:
    """Over more keys than a tile, of scores whose exponentials alone overflow, and with sinks."""
    import torch

    rng = np.random.default_rng(4)
    scores = rng.normal(size=(3, 5, 70)) * size + 800
    mask = np.arange(70)[None] <= np.arange(5)[:, None] * 17
    rows = None if sinks is None else np.asarray(sinks) + 800
    hidden = torch.tensor(np.where(mask, scores, -np.inf))
    if rows is not None:
        hidden = torch.cat([hidden, torch.tensor(rows)[:, None, None].expand(3, 5, 1)], -1)
    expected = torch.softmax(hidden, -1)[..., :70].numpy()
    for deterministic in (False, True):
        b = backend(run_, deterministic=deterministic)
        heads = Heads(mask, 1.0, None, None if rows is None else b.array(rows), "input")
        found = np.asarray(b.probs(b.array(scores.copy()), heads))
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_chunks_from_both_ends_come_back_in_order(ranks: int, axis: int) -> None:
    """Context parallelism that gives rank i of n the chunks i and 2n-1-i of 2n."""
    whole = np.arange(144.0).reshape(12, 12)
    chunks = np.split(whole, 2 * ranks, axis=axis)
    parts = []
    for rank in range(ranks):
        held = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]], axis=axis)
        parts.append(JoinedArray("x", held.shape, "float64", partial(np.copy, held)))
    joined = _join_by_dims("x", parts, Division("cp", axis, "zigzag"))
    assert joined.shape == whole.shape and joined.how == "zigzag"
    assert np.array_equal(joined.read(), whole)


def test_points_of_a_layer_are_those_of_the_first_layer_too() -> None:
    for layer in (0, 3):
        found = layer_keys(layer)
        assert f"L{layer}.k" in found and all(key.startswith(f"L{layer}.") for key in found)
    assert {"embd", "logits"} <= set(layer_keys(-1))


def test_a_missing_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailableError, match=r"cupy cannot be imported .*install"):
        loader.load_cupy.__wrapped__()


@pytest.mark.parametrize("fault", ["encrypted", "method"])
def test_a_member_that_zipfile_cannot_read_is_named(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.arange(6.0))
    data = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(mark) + flags
        if fault == "encrypted":
            data[at] |= 1
        else:
            data[at + 2 : at + 4] = (97).to_bytes(2, "little")
    path.write_bytes(data)
    with ExitStack() as stack, pytest.raises(UnsupportedError) as caught:
        NpzFile(path, stack).read("a")
    assert str(caught.value).startswith(f"{path}: 'a")


@pytest.mark.parametrize("first", ["experts", "expert_w"])
@pytest.mark.parametrize("width", [1, 2])
def test_chosen_experts_are_recorded_with_their_weights_by_size(first: str, width: int) -> None:
    """Neither alone, whichever node comes first; weights of another shape are not theirs."""
    given: list[tuple[Any, ...]] = []
    reader: Any = SimpleNamespace(
        _routed={}, _to_point_shape=lambda point, layer, values: values,
        collector=SimpleNamespace(
            add=lambda *at, rank: given.append((*at[:2], at[2].tolist(), rank))
        ),
    )  # fmt: skip
    values = {
        "experts": np.array([[7, 3], [1, 2]]),
        "expert_w": np.array([[0.25, 0.75], [0.5, 0.5]])[:, :width],
    }
    for at, point in enumerate((first, *({"experts", "expert_w"} - {first}))):
        GraphReader._add_routed(reader, NodePoint(point, 4, 2), values[point])
        assert bool(given) == (at == 1 and width == 2)
    if width == 2:  # the first of equal ones stays first
        assert given == [
            ("experts", 4, [[3, 7], [1, 2]], 0),
            ("expert_w", 4, [[0.75, 0.25], [0.5, 0.5]], 2),
        ]


@pytest.mark.parametrize(
    ("layout", "columns"),
    [
        ((Tiled("1"),), [0, 2, 4, 1, 3, 5]),
        ((Tiled("1", "2", keys="few"),), [0, 1, 2, 4, 3, 5]),
        ((Tiled("1", axis=1),), None),
        ((), None),
    ],
)
def test_columns_of_a_product_follow_the_models_heads(layout: Any, columns: Any) -> None:
    """Of rows that a GGUF has tiled. Seen red: a sound llama.cpp differs at `beta_mm`."""
    info = SimpleNamespace(name="blk.0.ssm_beta.weight", shape=(6, 3))
    names = {"name": "L0.ssm_beta.weight", "roles": ("L0.ssm_beta.weight",), "layout": layout}
    tensor = SimpleNamespace(stored=(SimpleNamespace(info=info),), **names)
    hyper = {
        "delta_key_heads": 2,
        "few": 2,
        "delta_value_heads": 4 if layout and layout[0].keys == "few" else 6,
    }
    model: Any = SimpleNamespace(roles={"L0.ssm_beta.weight": tensor}, hyper=hyper)
    ((role, cut),) = stored_roles(model)[info.name]
    assert role == "L0.ssm_beta.weight"
    assert (None if cut is None else cut.tolist()) == columns


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, TypeError, ValueError, IndexError])
def test_a_reproduction_that_does_not_fit_its_operation_is_one_line(
    error: type[Exception], tmp_path: Path
) -> None:
    def fails(backend: Any) -> Any:
        raise error("a part")

    def refuses(backend: Any) -> Any:
        raise ArchError("no such role")

    bundle: Any = SimpleNamespace(cell=SimpleNamespace(key="L1.attn_q", run=fails))
    says = f"m: 'L1.attn_q' cannot be run from what the file holds: {error.__name__} "
    with pytest.raises(FormatError, match=says):
        run_cell(bundle, cast(Any, None), Path("m"))
    bundle.cell.run = refuses
    with pytest.raises(FormatError, match="m: no such role"):
        run_cell(bundle, cast(Any, None), Path("m"))
    bundle.cell.run = lambda backend: backend
    assert run_cell(bundle, cast(Any, 5), Path("m")) == 5


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema": 0}', '{"schema": "aprfmt.bundle/999"}', "5"]
)
def test_a_header_of_another_schema_is_no_reproduction(text: str) -> None:
    source: Any = SimpleNamespace(metadata={HEADER: text}, tensors={})
    with pytest.raises(FormatError, match=r"m: .*: schema .*; expected "):
        parse_bundle(source, Path("m"))


@pytest.mark.parametrize("rows", [[0], [0, 2], [2], [], [3], [-1], [0, 3]])
def test_rows_of_logits_are_those_of_the_pass(rows: list[int]) -> None:
    hp: Any = {"vocab_size": 10}
    if rows and 0 <= min(rows) and max(rows) < 3:
        facts = forward._pass_facts(hp, [4, 5, 6], None, None, rows)
        assert facts.logit_rows == tuple(rows) and facts.positions.tolist() == [0, 1, 2]
    else:
        with pytest.raises(UsageError, match="the pass has 3 tokens"):
            forward._pass_facts(hp, [4, 5, 6], None, None, rows)
    assert forward._pass_facts(hp, [4, 5], None, [7, 9], "all").logit_rows == (0, 1)
    assert forward._pass_facts(hp, [4, 5], None, None, "last").logit_rows == (1,)
    for places in ([0], [0, -1], [0, 1, 2]):
        with pytest.raises(UsageError, match="positions for 2 tokens"):
            forward._pass_facts(hp, [4, 5], None, places, "all")


@pytest.mark.parametrize("room", [-1, 0, 1])
def test_a_table_of_statistics_may_be_as_large_as_its_limit(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"name,mean\n")
    monkeypatch.setattr(statistics, "MAX_BYTES", 10 + room)
    if room < 0:
        with pytest.raises(FormatError, match="10 bytes; at most 9 of a table are read"):
            statistics._read_table(path)
    else:
        assert statistics._read_table(path) == b"name,mean\n"


@pytest.mark.parametrize("behind", ["", "zeros", "infinite", "numbers"])
@pytest.mark.parametrize("width", [3, 4, 5, 7])
def test_logits_are_cut_to_the_vocabulary_and_padding_is_not_remarked(
    width: int, behind: str
) -> None:
    values = np.arange(2 * width, dtype=np.float32).reshape(2, width)
    if behind in ("zeros", "infinite"):
        values[:, 4:] = 0 if behind == "zeros" else -np.inf
    if width < 4:
        with pytest.raises(ValueError, match="3 of the 4 columns of the vocabulary"):
            parts.cut_to_vocabulary(values, 4)
        return
    found, said = parts.cut_to_vocabulary(values, 4)
    assert found.shape == (2, 4) and np.array_equal(found, values[:, :4])
    odd = width > 4 and behind in ("", "numbers")
    assert said == (f"columns 4 to {width - 1} are after the vocabulary" if odd else "")


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 6, 8, 12])
def test_every_even_division_of_a_batch_is_tried_and_each_sample_is_in_one_group(
    samples: int,
) -> None:
    found = dict(micro_batches(samples))
    for groups in found.values():
        assert sorted(i for group in groups for i in group) == list(range(samples))
    for size in range(2, samples):
        if samples % size == 0 or size in (2, 4, 8):
            assert f"micro-batches of {size} samples" in found
        assert (f"{size} ranks that get samples in turn" in found) is (samples % size == 0)
    assert "micro-batches of 1 samples" not in found


@pytest.mark.parametrize("scored", [2, 3, 4])
def test_groups_of_which_two_have_a_mean_can_be_joined_wrongly(scored: int) -> None:
    """Four samples in micro-batches of two; with two scored ones a single group has a mean."""
    picked = [np.array([1.0 + i] * (i + 1) * (i < scored)) for i in range(4)]
    found = [(one.mistakes, one.value) for one in reported._guess_group_reductions(picked)]
    groups = [np.concatenate(picked[:2]), np.concatenate(picked[2:])]
    own = [float(group.mean()) for group in groups if group.size]
    assert ((("group_means",), sum(own) / 2) in found) is (scored > 2)
    if scored > 2:
        assert (("accumulated_sum",), sum(own)) in found


@pytest.mark.parametrize("convention", ["disjoint", "llama.cpp"])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("cut", [False, True])
def test_a_convention_of_others_has_whole_texts_without_overlap(
    cut: bool, overlap: int, convention: str
) -> None:
    sample = Sample("s", list(range(12)), prompt=4 if cut else 0, cut=cut)
    if convention != "disjoint" and (cut or overlap):
        said = "--overlap" if overlap else "prompt with its response"
        with pytest.raises(UsageError, match=f"--convention llama.cpp knows no {said}"):
            plan_windows([sample], 8, overlap, convention)
        return
    planned, skipped = plan_windows([sample], 8, overlap, convention)
    assert not skipped and [one for one, _ in planned] == [sample]


@pytest.mark.parametrize("lost", [(), (0,), (2, 3)])
def test_tokens_that_no_pass_has_are_counted(lost: tuple[int, ...]) -> None:
    run: Any = SimpleNamespace(positions=[i for i in range(6) if i not in lost])
    if not lost:
        sequences._refuse_gaps(run)
        return
    says = rf"{len(lost)} of 6 tokens .* in no pass \(position {lost[0]} is the first\)"
    with pytest.raises(FormatError, match=says):
        sequences._refuse_gaps(run)


@pytest.mark.parametrize("name", ["blabla", "kq2", "layer-0/other"])
def test_a_file_of_no_stage_is_refused_by_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    says = f"stage '{path.stem}' is not known; expected one of {', '.join(capture.STAGES)}"
    with pytest.raises(FormatError, match=says):
        load_aprt(tmp_path)


@pytest.mark.parametrize(
    ("said", "value", "bad"),
    [
        ("1.5", 1.5, 0),
        (2, 2.0, 0),
        ("", None, 0),
        (None, None, 0),
        ("nan", None, 1),
        ("inf", None, 1),
    ],
)
def test_a_statistic_that_is_missing_or_not_finite_is_open(
    said: Any, value: float | None, bad: int
) -> None:
    found = statistics._row_stats(
        {"mean": said, "min": "-3", "max": "2", "count": "12"}, "t: row 1"
    )
    assert (found.mean, found.nan, found.count) == (value, bad, 12)
    assert (found.min, found.max, found.std) == (-3.0, 2.0, None)
    for count in ("", None, "many", -1, 1.5):  # how many is not known: of none
        assert statistics._row_stats({"mean": "1", "count": count}, "t: row 1").count == 0
    with pytest.raises(FormatError, match="t: row 1: mean is 'x'; expected a number"):
        statistics._row_stats({"mean": "x"}, "t: row 1")


@pytest.mark.parametrize("dummies", [(), (0,), (0, 2)])
def test_warm_ups_are_left_out_and_named(dummies: tuple[int, ...]) -> None:
    ids = [np.zeros(3, int) if i in dummies else np.array([4, 5, 6]) for i in range(3)]
    passes: Any = [
        SimpleNamespace(step=i, batch={"ids": SimpleNamespace(read=lambda values=values: values)})
        for i, values in enumerate(ids)
    ]
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "_is_blank", lambda one: False)
        kept = [one.step for one in sequences._without_warm_ups(passes, notes)]
    assert kept == [i for i in range(3) if i not in dummies]
    names = ", ".join(map(str, dummies))
    assert [note.partition(":")[0] for note in notes] == ([f"pass {names}"] if dummies else [])


@pytest.mark.parametrize("empty", [(), ("b",), ("a", "c"), ("a", "b", "c")])
def test_files_of_a_dump_without_an_array_are_listed(
    empty: tuple[str, ...], tmp_path: Path
) -> None:
    def open_file(path: Path) -> Any:
        return SimpleNamespace(
            names={} if path.stem in empty else {"": ((3,), "float32")}, lists={}, values={},
            reader=lambda name: None, stored=lambda name: None, tiles=lambda name: None,
        )  # fmt: skip

    for name in "abc":
        np.save(tmp_path / f"{name}.npy", np.ones(3, np.float32))
    found, _, others, broken = dump_folders._gather_arrays(
        tmp_path, cast(Any, SimpleNamespace(open=open_file))
    )
    assert sorted(others) == [f"{name}.npy" for name in empty]
    assert len(found) == 3 - len(empty) and not broken


@pytest.mark.parametrize("explained", [(), (True,), (False,), (True, False)])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_pair_without_logits_has_its_other_checks(
    quantized: bool, explained: tuple[bool, ...]
) -> None:
    flips: Any = [SimpleNamespace(explained=each) for each in explained]
    losses: Any = None
    checks = outer.check_outcomes(
        None, losses, flips, quantized=quantized, text=True, vocab=9, where="a run"
    )
    said = [(check.name, check.outcome, check.where) for check in checks]
    experts = ("experts", "PASS" if all(explained) else "FAIL", "a run")
    assert said == [experts] * bool(explained) + [("logits", "NOT_RUN", "a run")]
    assert checks[-1].found == "no logits on both sides"


@pytest.mark.parametrize("fails", ["compileProgram", "getCUBIN"])
@pytest.mark.parametrize("name", ["softmax", "rope"])
def test_kernels_that_do_not_compile_say_why(
    name: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class NVRTCError(Exception):
        pass

    def fail(*given: object) -> None:
        raise NVRTCError("NVRTC_ERROR_COMPILATION")

    calls: dict[str, Any] = {
        "getVersion": lambda: (12, 0), "createProgram": lambda *given: "program",
        "compileProgram": lambda *given: None, "getCUBIN": lambda program: b"code",
        "getProgramLog": lambda program: "x.cu(3): error: no such type\n",
        "destroyProgram": closed.append,
    }  # fmt: skip
    monkeypatch.setenv("APRFMT_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(loader, "read_sources", lambda *names: "source")
    nvrtc = SimpleNamespace(NVRTCError=NVRTCError, **calls | {fails: fail})
    monkeypatch.setattr(loader, "import_module", lambda module: nvrtc)
    says = f"the kernels of {name} do not compile for sm_90: NVRTC_ERROR_.*no such type$"
    with pytest.raises(BackendUnavailableError, match=says):
        loader._compile_module.__wrapped__((name,), (), "90")
    assert closed == ["program"] and not list(tmp_path.iterdir())
    monkeypatch.setattr(
        loader, "import_module", lambda module: SimpleNamespace(NVRTCError=NVRTCError, **calls)
    )
    for _ in range(2):  # the second from the cache
        assert loader._compile_module.__wrapped__((name,), (), "90") == b"code"
    assert len(closed) == 2


@pytest.mark.parametrize("recorded", [set(), {"b"}, {"b", "c"}, {"a", "b", "c"}])
def test_points_that_equal_an_earlier_one_are_compared_there(recorded: set[str]) -> None:
    """`b` equals `a`, which comes first; `c` equals `d`, which comes later."""
    known = {
        key: SimpleNamespace(key=key, alias_of=target)
        for key, target in (("a", None), ("b", "a"), ("c", "d"), ("d", None))
    }
    patched: Any = SimpleNamespace(points=known, n_layers=0)
    trace: Any = SimpleNamespace(has_record=recorded.__contains__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "resolve_alias", lambda key, points: points.get(points[key].alias_of))
        assert shadow._equal_points(patched, trace) == ({"a": ["b"]} if "b" in recorded else {})


@pytest.mark.parametrize("operation", ["mask_left_out", None])
@pytest.mark.parametrize("padding", [0, 1, 2, 5])
def test_padding_is_no_key_where_the_mask_is_left_out_backward(
    padding: int, operation: Any
) -> None:
    """The values are those of the mask without padding, by torch's own masked softmax."""
    torch = pytest.importorskip("torch")
    from aprfmt.inference.gradients.changed_backend import ChangedBackend
    from aprfmt.inference.gradients.changes import BackwardChange

    rng = np.random.default_rng(5)
    q, k, v = (torch.tensor(rng.normal(size=(6, 2, 4))) for _ in range(3))
    mask = np.tri(6, dtype=bool)
    changed = ChangedBackend("cpu", "float64", BackwardChange(operation))
    changed.document = cast(Any, SimpleNamespace(padding=padding))
    found = changed.attention(q, k, v, Heads(mask, 0.5, None, None, "input"))
    seen = torch.from_numpy(mask.copy())
    if operation:
        seen[:, 6 - padding :] = False
    scores = torch.einsum("thd,khd->htk", q, k) * 0.5
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    assert np.allclose(found, torch.einsum("htk,khd->thd", probs, v), rtol=0, atol=1e-12)
    assert (mask == np.tri(6, dtype=bool)).all(), "the caller's mask is kept"


def test_a_stack_of_experts_and_each_of_them_are_seen_as_rows() -> None:
    values = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    stack = Weights({"stack": ArrayRows(values)}, 1 << 20, "test")["stack"]
    assert (stack.n_rows, stack.n_columns) == (6, 5)
    assert np.array_equal(stack.rows(2, 5), values.reshape(6, 5)[2:5])
    for at in range(2):
        expert = stack.expert(at)
        assert (expert.n_rows, expert.n_columns, expert.shape) == (3, 5, (3, 5))
        assert np.array_equal(expert.rows(1, 3), values[at, 1:])
    biases = Weights({"biases": ArrayRows(values[:, 0])}, 1 << 20, "test")["biases"]
    assert (biases.n_rows, biases.n_columns) == (2, 5)
    bias = biases.expert(1)
    assert (bias.n_rows, bias.n_columns) == (1, 5) and np.array_equal(bias.numpy(), values[1, 0])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ("", True),
        ("turned", False),  # a weight that does not lie row by row
        ("unplaced", False),  # one for which the budget has no room
        ("encoded", False),
        ("too large", False),
        ("wrong products", False),
    ],
)
def test_experts_are_multiplied_by_address_where_all_lie_as_they_must(
    spoil: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses are those of the weights, looked up once."""
    import torch

    from aprfmt.inference.fast import torch_products
    from aprfmt.inference.fast.cuda import batched

    placed: list[Any] = [torch.ones(3, 5) for _ in range(4)]
    if spoil == "turned":
        placed[2] = torch.ones(5, 3).T
    if spoil == "unplaced":
        placed[2] = None
    asked: list[int] = []

    def expert(at: int) -> Any:
        asked.append(at)
        return SimpleNamespace(placed_on=lambda backend: placed[at])

    stack: Any = SimpleNamespace(
        notes={}, encoding="Q8_0" if spoil == "encoded" else "F32", shape=(4, 3, 5),
        fits_budget=lambda backend: spoil != "too large", expert=expert,
    )  # fmt: skip

    class Products:  # a key of the stack's notes
        _decodes, dtype = True, "float32"
        _device, _type = torch.device("cpu"), torch.float32

        def _refuse_in_recording(self, what: str) -> None: ...

    products: Any = Products()
    right = spoil != "wrong products"
    monkeypatch.setattr(batched, "gives_right_products", lambda *of: right)
    found = torch_products.TorchProducts._expert_addresses(products, stack)
    if not told:
        assert found is None and not stack.notes
        return
    assert found is not None and found.tolist() == [w.data_ptr() for w in placed]
    assert torch_products.TorchProducts._expert_addresses(products, stack) is found
    assert asked == [0, 1, 2, 3]


@pytest.mark.parametrize("named", [False, True], ids=["by place", "by name"])
def test_a_modules_input_is_taken_however_it_is_given(named: bool) -> None:
    """transformers' layers give `hidden_states` by place or by name; a result may be a tuple."""
    import torch

    from aprfmt.inference.engines import transformers as engine
    from aprfmt.inference.engines.modules import ModuleMap

    class Output(torch.nn.Module):
        def forward(self, hidden_states: Any, scale: float = 2.0) -> Any:
            return hidden_states * scale, "weights"

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = Output()

        def forward(self, x: Any) -> Any:
            given = self.o_proj(scale=3.0, hidden_states=x) if named else self.o_proj(x, 3.0)
            return given[0]

    attention = Attention()
    layer = torch.nn.ModuleDict({"self_attn": attention})
    network = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    keys = ["layers.0.self_attn.o_proj", "layers.0.self_attn.o_proj#in"]
    known = ModuleMap(keys)
    taken: dict[str, Any] = {}
    assert all(known.read(key) for key in keys)
    x = torch.arange(4.0).reshape(1, 2, 2)
    with engine.hook_modules(network, known, taken.__setitem__):
        attention(x)
    assert sorted(taken) == sorted(keys)
    assert torch.equal(taken[keys[1]], x) and torch.equal(taken[keys[0]], 3 * x)


@pytest.mark.parametrize("shared", ["", "mlp.shared_expert", "mlp.shared_experts.down_proj"])
def test_experts_are_the_mixture_where_none_is_shared(shared: str) -> None:
    """A shared expert's result is added outside of the module."""
    from aprfmt.inference.engines.modules import ModuleMap

    keys = [f"model.layers.0.{name}" for name in ("mlp.gate", "mlp.experts", shared) if name]
    points = [reading.point.name for reading in ModuleMap(keys).read(keys[1])]
    assert points == ([] if shared else ["moe_out"])


def captured(arrays: dict[str, Any]) -> Captures:
    """Return captures of arrays in memory."""
    return Captures(
        Path("x.npz"), {name: value.shape for name, value in arrays.items()},
        {name: "F32" for name in arrays}, arrays.__getitem__,
    )  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
def test_a_joined_result_is_cut_into_its_parts_and_others_stay(known: bool) -> None:
    name = "model.layers.0.self_attn.qkv_proj"
    arrays = {name: np.arange(24.0).reshape(2, 12), "model.norm": np.ones((2, 5))}
    asked: list[Sequence[str]] = []

    def widths_of(names: Sequence[str]) -> Any:
        asked.append(list(names))
        return SimpleNamespace(parts={name: ((6, 2), (4, 2), (2, 2))} if known else {})

    found = dumps._under_transformers_names(captured(arrays), widths_of)
    assert asked == [[name]]
    above, cuts = name.rpartition(".")[0], {"q_proj": (0, 6), "k_proj": (6, 10), "v_proj": (10, 12)}
    expected = {f"{above}.{part}": arrays[name][:, slice(*cut)] for part, cut in cuts.items()}
    expected = {**(expected if known else {name: arrays[name]}), "model.norm": arrays["model.norm"]}
    assert list(found.shapes) == list(expected)
    for part, values in expected.items():
        assert found.shapes[part] == values.shape and found.dtypes[part] == "F32"
        assert np.array_equal(found.read(part), values)


@pytest.mark.parametrize("positions", [[[0, 1, 2, 0, 1]], [[0, 1, 2, 3, 4]]])
def test_positions_that_begin_anew_are_a_batch(positions: list[list[int]]) -> None:
    arrays = {
        "positions": np.array(positions), "input_ids": np.array([[5, 6, 7, 5, 6]]),
        "model.norm": np.ones((5, 3), np.float32),
    }  # fmt: skip
    found = dumps._batch_as_pass(captured(arrays))
    if positions == [[0, 1, 2, 3, 4]]:
        assert found is None
        return
    assert found is not None and set(found.batch) == {"positions", "ids"}
    ((name, one),) = found.arrays.items()
    assert (name, one.name, one.shape, one.dtype) == ("model.norm", "model.norm", (5, 3), "F32")
    assert np.array_equal(one.read(), arrays["model.norm"])


@pytest.mark.parametrize("length", [None, 2])
def test_an_array_that_does_not_fit_a_sequence_is_left_out_with_the_reason(
    length: int | None,
) -> None:
    def array(name: str, values: Any) -> JoinedArray:
        return JoinedArray(name, values.shape, "F32", lambda: values)

    hidden = np.arange(12, dtype=np.float32).reshape(4, 3)
    names = {"hidden": hidden, "odd": np.zeros((2, 3), np.float32)}
    made = dump_folders.Pass(0, 0, {key: array(key, value) for key, value in names.items()})
    made.batch["ids"] = array("ids", np.array([5, 6, 7, 8]))
    run = sequences.TokenRun(
        0, [sequences.Segment(0, 0, 0, 1, (0, 1, 2, 3), (0, 1, 2, 3), (5, 6, 7, 8))]
    )
    found = sequences._align_sequence([made], run, length, ["a note"])
    assert list(found.arrays) == ["hidden"] and list(found.left) == ["odd"]
    assert found.left["odd"] == "[2, 3] in pass 0, which has 4 tokens of 1 requests"
    assert np.array_equal(found.arrays["hidden"].read(), hidden[:length])
    assert (found.ids, found.notes) == ((5, 6, 7, 8)[:length], ("a note",))


@pytest.mark.parametrize("kept", [0, 4, 15])
def test_an_array_whose_file_was_cut_is_said_and_not_waited_for(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes()[:kept])
    array = captures._FileArray(path, (4,), "<f4")
    with pytest.raises(FormatError, match=r"x\.bin: was cut off while it was read"):
        next(part for part in array._windows() if not len(part))
    path.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    assert b"".join(map(bytes, array._windows())) == path.read_bytes()


def test_of_points_that_fit_alike_arrays_take_those_in_their_own_order() -> None:
    keys, names = ["L0.a", "L0.b", "L0.c"], ["x", "y", "z"]
    fits = {
        name: [mapping_proposal.PointFit(key, (), "all", 0.5) for key in keys] for name in names
    }
    found: dict[str, list[tuple[float, str]]] = {}
    for fit, name in mapping_proposal._best_pairs(fits, names, keys):
        assert 0.5 <= fit.distance <= 0.5 + 1e-9
        found.setdefault(name, []).append((fit.distance, fit.key))
    assert [min(found[name])[1] for name in names] == keys


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("first", [False, True])
def test_of_as_many_heads_as_tokens_the_likeness_says_which_axis_is_which(
    heads: int | None, first: bool
) -> None:
    x = np.random.default_rng(2).normal(size=(3, 3, 4))
    swapped = x.swapaxes(0, 1)
    for given in (x, swapped):
        assert np.array_equal(split_heads(given, heads, 3, x, first=first), x)
        expected = given.swapaxes(0, 1) if first else given
        assert np.array_equal(split_heads(given, heads, 3, None, first=first), expected)


def test_of_three_axes_of_positions_the_first_counts() -> None:
    """A multimodal rope has positions in time, height and width; tokens go by time."""
    positions = np.array([[[0, 1, 2, 3]], [[0, 1, 1, 1]], [[0, 1, 2, 2]]])

    def array(name: str, values: Any) -> JoinedArray:
        return JoinedArray(name, values.shape, "I64", lambda: values)

    one = dump_folders.Pass(0, 0, {"hidden": array("hidden", np.zeros((4, 2)))})
    one.batch["ids"] = array("ids", np.array([[5, 6, 7, 8]]))
    one.batch["positions"] = array("positions", positions)
    (segment,) = sequences._segments_of_pass(one, 0, ())
    assert (segment.positions, segment.ids) == ((0, 1, 2, 3), (5, 6, 7, 8))


def test_a_joined_projection_needs_the_models_sizes_to_be_cut() -> None:
    """Of two key heads, each with q, k of 2 and v and a gate of 3 columns."""
    reader: Any = SimpleNamespace(_collector=SimpleNamespace(hp=None), _delta_joined=False)
    values = np.arange(2 * 20, dtype=np.float32).reshape(2, 20)
    cut = partial(modules.ModuleReader._delta_net_columns, reader)
    assert cut("delta_qkv", values) is None
    reader._collector.hp = {
        "delta_key_heads": 2, "delta_key_dim": 2, "delta_value_heads": 2, "delta_value_dim": 3,
    }  # fmt: skip
    row = values[0].reshape(2, 10)
    wanted = [row[:, :2], row[:, 2:4], row[:, 4:7]]
    found = cut("delta_qkv", values)
    assert found is not None
    assert np.array_equal(found[0], np.concatenate([part.reshape(-1) for part in wanted]))
    gate = cut("delta_gate", values)
    assert gate is not None and np.array_equal(gate[0], row[:, 7:].reshape(-1))
    rates = np.arange(2 * 8).reshape(2, 8)
    for joined, columns in ((False, [0, 1, 4, 5]), (True, [0, 1, 2, 3])):
        reader._delta_joined = joined
        beta, alpha = cut("beta_mm", rates), cut("alpha", rates)
        assert beta is not None and np.array_equal(beta[0], columns)
        assert alpha is not None and np.array_equal(np.sort([*beta[0], *alpha[0]]), np.arange(8))
    whole = cut("delta_qkv", values)  # of all heads
    assert whole is not None and np.array_equal(whole[0], values[0, :14])


@pytest.mark.parametrize("through", [None, "Q8_0"])
def test_a_report_says_through_which_encoding_a_run_went(through: str | None) -> None:
    choice: Any = SimpleNamespace(requested="cpu", why="")
    trace: Any = SimpleNamespace(run={}, records={}, nonfinite=0)
    facts = run_comparison._run_facts(choice, trace, cast(Any, SimpleNamespace(through=through)))
    assert facts.weights == ("as stored" if through is None else f"through {through} and back")


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_logits_that_agree_in_every_row_agree_wholly(rows: int) -> None:
    logits = np.random.default_rng(1).normal(size=(rows, 40))
    found = compare_logits(logits, logits * 1.5, list(range(rows)), within=True)
    assert (found.argmax, found.top_k, found.flips) == (1.0, 1.0, ())


@pytest.mark.parametrize("vocab", [5, 90])
def test_a_loss_is_bounded_by_the_vocabulary_that_its_softmax_sums(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def bound(*given: Any) -> float:
        asked.append(given)
        return 1.0

    monkeypatch.setattr(outcomes, "label_loss_bound", bound)
    logits = np.random.default_rng(1).normal(size=(3, vocab)).astype(np.float32)
    outcomes.measure_backend_loss(backend("numpy:float32"), logits, [1, 2, 3])
    assert [given[1:] for given in asked] == [("float32", vocab)] * 2


@pytest.mark.parametrize("width", [64, 4096])
def test_a_model_without_layers_has_the_roundings_of_its_head_alone(width: int) -> None:
    """One product of `width` terms; each layer more has its own."""
    u = tolerances.ROUNDOFF["float32"]
    whole = tolerances.DEVIATIONS * tolerances.RMS_ROUNDING * u
    alone = tolerances.logit_bound("float32", 0, width, 1.0)
    assert alone == pytest.approx(whole * math.sqrt(tolerances.ROUNDINGS_OUTSIDE + 1 + width))
    each = tolerances.ROUNDINGS_OF_LAYER + tolerances.PRODUCTS_OF_LAYER * width
    more = tolerances.logit_bound("float32", 3, width, 1.0)
    assert more**2 - alone**2 == pytest.approx(whole**2 * 3 * each)


@pytest.mark.parametrize("code", [0, 0x41, sys.maxunicode - 1, sys.maxunicode, 0x110000, 2**32 - 1])
@pytest.mark.parametrize("order", ["<", ">"])
def test_a_text_of_an_archive_is_unicode_up_to_its_last_character(
    order: str, code: int, tmp_path: Path
) -> None:
    """Numpy makes a text of any number; Python's texts have none beyond U+10FFFF."""
    path = tmp_path / "x.npz"
    data = np.array([0x42, code, 0x43], f"{order}u4").view(f"{order}U3")
    np.savez(path, a=data)
    with ExitStack() as stack:
        held = NpzFile(path, stack)
        if code > sys.maxunicode:
            with pytest.raises(FormatError, match="'a' holds text that is no Unicode"):
                held.read("a")
            return
        assert held.read("a").tolist() == [f"B{chr(code)}C"]


@pytest.mark.parametrize("named", [None, "rids", "forward.req_ids", "meta.request_ids"])
@pytest.mark.parametrize("numbers", [None, [4, 9]])
def test_a_pass_names_its_requests_by_numbers_or_texts(
    named: str | None, numbers: list[int] | None
) -> None:
    """Other lists of texts name none; numbers of the batch count before texts."""
    one = dump_folders.Pass(0, 0, texts={"models": ["m", "m"], "rids_of": ["x"]})
    if named is not None:
        one.texts[named] = ["r1", "r2"]
    if numbers is not None:
        values = np.array(numbers)
        one.batch["requests"] = JoinedArray("requests", values.shape, "I64", lambda: values)
    wanted: list[Any] = numbers or (["r1", "r2"] if named else [])
    assert sequences._request_names(one) == wanted


@pytest.mark.parametrize("lost", [(), ("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("shape", [(3, 2), (4, 2)])
def test_experts_are_compared_where_both_runs_recorded_them_alike(
    lost: tuple[str, ...], shape: tuple[int, ...]
) -> None:
    """A trace of statistics alone holds no values, on either side."""

    def trace(side: str, experts: Any) -> Trace:
        record = Record("experts", 0, experts.shape, None, "float32", None, "cpu", None)
        values = {} if side in lost else {"L0.experts": experts}
        return Trace({}, {"L0.experts": record}, fetch=values.get)

    mine = np.array([[0, 1], [2, 3], [4, 5]])
    theirs = np.zeros(shape, np.int64)
    theirs[:3] = [[1, 0], [2, 7], [4, 5]]
    found = outcomes.compare_experts(trace("a", mine), trace("b", theirs))
    rows = [(flip.key, flip.position, flip.gone, flip.came) for flip in found]
    assert rows == ([] if lost or shape != mine.shape else [("L0.experts", 1, (3,), (7,))])


@pytest.mark.parametrize("point", ["q", "k", "v"])
@pytest.mark.parametrize("without", [None, "q", "k", "v"])
@pytest.mark.parametrize("more", [0, 1])
def test_a_point_is_cut_from_the_stage_that_joins_it_with_others(
    point: str, without: str | None, more: int
) -> None:
    """APRT writes q, k and v as one array; the widths of all three say where each begins."""
    widths = {"q": 4, "k": 2, "v": 3}
    joined = np.arange(5 * sum(widths.values()) + more, dtype=np.float32)
    record = Record("qkv", 0, joined.shape, None, "float32", None, "cpu", None)
    held = Trace({}, {"L0.qkv": record}, fetch={"L0.qkv": joined}.get)
    shapes = {f"L0.{name}": (5, width) for name, width in widths.items() if name != without}
    found = RecordedTrace(held, range(5), shapes).value_of(f"L0.{point}")
    if without is not None or more:
        assert found is None
        return
    start = {"q": 0, "k": 4, "v": 6}[point]
    wanted = joined.reshape(5, 9)[:, start : start + widths[point]]
    assert found is not None and np.array_equal(found.values, wanted)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("tapped", [False, True])
def test_a_point_is_wanted_if_it_is_changed_or_recorded(tapped: bool, wanted: bool) -> None:
    """A fused operation runs step by step for either, and for neither it stays fused."""
    asked: list[tuple[str, int]] = []

    def wants(point: str, layer: int) -> bool:
        asked.append((point, layer))
        return wanted

    model: Any = None
    taps: Any = {"q" if tapped else "k": ()}
    found = patched_model._Tapped(model, SimpleNamespace(wants=wants), taps).wants("q", 3)
    assert found is (tapped or wanted)
    assert asked == ([] if tapped else [("q", 3)])


@pytest.mark.parametrize("encoding", ["F32", "F16", "I64", "C64"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_pages_of_an_array_are_released_once_it_is_read(
    whole: bool, encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it read or refused: a dump of hundreds of arrays would else be held in memory."""
    import torch
    from safetensors.torch import save_file

    types = {"F32": "float32", "F16": "float16", "I64": "int64", "C64": "complex64"}
    values = torch.from_numpy(np.arange(6).reshape(2, 3).astype(types[encoding]))
    save_file({"x": values}, tmp_path / "x.safetensors")
    released: list[bool] = []
    with ExitStack() as stack:
        found = captures.read_array_file(tmp_path / "x.safetensors", stack)
        monkeypatch.setattr(StoredTensor, "drop", lambda *of: released.append(True))
        if not whole:

            def refuse(*of: Any) -> Any:
                raise CodecError("is damaged")

            monkeypatch.setattr(stored_arrays, "decode", refuse)
        if encoding == "C64" or (not whole and encoding != "I64"):
            with pytest.raises(FormatError, match=r"x: (is damaged|holds complex)"):
                found.read("x")
        else:
            assert np.array_equal(found.read("x"), values.numpy())
    assert released == ([] if encoding == "C64" else [True])


@pytest.mark.parametrize(
    "given", [(), ("labels",), ("attention_mask",), ("labels", "attention_mask")]
)
def test_a_batch_says_which_of_its_arrays_the_file_has(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    """Without labels all tokens of the mask are labels. Seen red: the other way."""
    ids = np.array([[5, 6, 7, 8], [5, 9, 3, 2]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    labels = np.where(np.arange(4) < 2, -100, ids)
    held: dict[str, Any] = {"labels": labels, "attention_mask": mask}
    np.savez(tmp_path / "b.npz", input_ids=ids, **{name: held[name] for name in given})
    batch = read_batch(tmp_path / "b.npz", 16)
    assert batch.labels_given is ("labels" in given)
    assert batch.mask_given is ("attention_mask" in given)
    masked = "attention_mask" in given
    assert int(batch.label.sum()) == (4 if "labels" in given else 8) - masked
    assert batch.edges == 0


class Recorded:
    """A trace of a few points."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def recorded_values(self, key: str) -> Any:
        return self.values.get(key)


def test_the_distance_of_a_run_is_that_of_the_points_that_both_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Points of another size, or of one run alone, are left out; the loss needs both logits."""
    rng = np.random.default_rng(6)
    x, logits = rng.normal(size=(4, 3)), rng.normal(size=(4, 9))
    run: Any = Recorded(a=x * 1.5, short=x[:2], alone=x, logits=logits)
    exact: Any = Recorded(a=x, short=x, other=x, logits=logits * 2)
    keys = ("a", "short", "alone", "other", "logits")
    monkeypatch.setattr(run_comparison, "common_keys", lambda one, two: keys)
    request: Any = SimpleNamespace(ids=(1, 2, 3, 4))
    found = run_comparison.measure_run_distance(3, "run", run, exact, request)
    away, loss = vars_of(found)
    assert {key: round(each, 12) for key, each in away.items()} == {"a": 0.5, "logits": 0.5}

    def cross_entropy(rows: Any) -> float:
        each = rows[:-1] - np.log(np.exp(rows[:-1]).sum(1, keepdims=True))
        return float(-np.mean([each[i, label] for i, label in enumerate((2, 3, 4))]))

    assert loss == pytest.approx(cross_entropy(logits) - cross_entropy(logits * 2))
    nothing: Any = Recorded(a=x)
    for one, two in ((run, nothing), (nothing, exact)):
        assert vars_of(run_comparison.measure_run_distance(3, "run", one, two, request))[1] is None


def vars_of(found: Any) -> tuple[dict[str, float], float | None]:
    """Return the distances by point, and that of the losses."""
    _, _, away, loss = (getattr(found, field.name) for field in fields(found))
    return away, loss


def test_the_arithmetic_of_arrays_is_that_of_their_types_or_of_few_norms() -> None:
    """numpy has no bfloat16: such a run is float32 whose norms have zeros in the low bits."""
    from aprfmt.inference.engines.npz import arithmetic_of_arrays

    short = np.array([1.5, -2.0, np.nan], np.float32)
    exact = np.array([1.5, 1 + 2**-20], np.float32)
    read: list[str] = []

    def arithmetic(held: dict[str, Any], **dtypes: str) -> str:
        read.clear()

        def values(key: str) -> Any:
            read.append(key)
            return held[key]

        return arithmetic_of_arrays(dtypes, values)

    assert arithmetic({}, a="bfloat16", b="float16", ids="int64") == "bfloat16"
    assert arithmetic({}, a="float16", ids="int64") == "float16"
    assert arithmetic({}, a="float64") == "float64"
    assert arithmetic({}, a="float64", b="float32") == arithmetic({}, a="float32") == "float32"
    assert arithmetic({}, a="float16", b="float32") == "float32" and not read
    # A run of 16 bits keeps logits and routers in float32.
    assert arithmetic({}, a="float16", b="float16", logits="float32") == "float16"
    assert arithmetic({}, a="bfloat16", b="bfloat16", logits="float32") == "bfloat16" and not read
    assert arithmetic({}, a="bfloat16", b="float32", c="float32") == "float32"
    norms = {f"norm{i}": "float32" for i in range(6)}
    assert arithmetic(dict.fromkeys(norms, short), q="float32", **norms) == "bfloat16"
    assert read == ["norm0", "norm1", "norm2", "norm3"]
    odd = dict.fromkeys(norms, short) | {"norm3": exact}
    assert arithmetic(odd, **norms) == "float32"
    late = dict.fromkeys(norms, short) | {"norm4": exact}
    assert arithmetic(late, **norms) == "bfloat16"  # the fifth is not read
    assert arithmetic({"norm": np.empty(0, np.float32)}, norm="float32") == "float32"


def test_a_ranks_share_of_a_point_is_told_by_its_place() -> None:
    """From two rows on, since one is the last token's; of columns one is enough."""
    from aprfmt.inference.engines.parts import _matched_share_text

    whole = np.random.default_rng(2).normal(size=(8, 6))
    for axis, part, word in ((0, 2, "rows"), (0, 4, "rows"), (1, 1, "columns"), (1, 3, "columns")):
        size = whole.shape[axis]
        for rank in range(size // part):
            share = np.split(whole, size // part, axis)[rank]
            first = rank * part
            assert _matched_share_text(share, whole, "L0.q", axis) == (
                f"{word} {first} to {first + part - 1} of the {size} of L0.q: rank {rank} of "
                f"{size // part}; put the ranks' {word} together"
            )
            assert _matched_share_text(share + 9, whole, "L0.q", axis) == ""
            assert _matched_share_text(share, whole, "L0.q", 1 - axis) == ""
    assert (
        _matched_share_text(whole[:1], whole, "L0.q", 0)
        == _matched_share_text(whole, whole, "L0.q", 0)
        == ""
    )
    assert _matched_share_text(whole[:3], whole, "L0.q", 0) == ""  # no share of eight


@pytest.mark.parametrize("off", [1e-6, 1e-3])
def test_a_measured_rate_is_one_that_somebody_wrote(off: float) -> None:
    """Three digits of it, within what the measurement may be off."""
    from aprfmt.causes.training import step_size

    recipe = parse_recipe("sgd:lr=0")
    for rate, near in ((0.00123, 0.00123), (0.00123 * (1 + 5e-4), 0.00123)):
        fit = SimpleNamespace(factors=(rate, off * rate, None))
        case: Any = SimpleNamespace(others={}, fit=lambda recipe, fit=fit: fit)
        (guess,) = step_size._guess_rate(case, recipe)
        wanted = near if rate == near or off > 1e-4 else rate
        number: Any = guess.number
        assert number == ("factor", pytest.approx(wanted, rel=1e-12))
        assert f"a rate of {wanted:.3g}; a rate of 0 is stated" in guess.says
    for rate, share in ((0.001, 0.06), (-0.001, 1e-6), (math.nan, 0.0)):
        fit = SimpleNamespace(factors=(rate, abs(rate) * share, None))
        case = SimpleNamespace(others={}, fit=lambda recipe, fit=fit: fit)
        assert not list(step_size._guess_rate(case, recipe))
