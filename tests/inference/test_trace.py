"""Recording: positions, slots, stops at NaN; saved and loaded again; APRT folders.

Seen red: positions shifted by one, a NaN passed over, all rows recorded under chosen positions, a
record's shape not held against its tensor, an APRT count that does not fit accepted.
"""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError, OutputError, UsageError
from aprfmt.inference import aprt
from aprfmt.inference.aprt import load_aprt, save_aprt
from aprfmt.inference.capture import STAGES, WHOLE
from aprfmt.inference.record import Record, record_from_json, record_to_json
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues, Trace, parse_positions
from aprfmt.inference.trace_file import HEADER, Spool, load_trace, save_trace
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from aprfmt.tensors.digest import decoded_sha256
from aprfmt.tensors.stats import compute_stats
from tests.inference.judge import backend, judged, traced64
from tests.models import IDS


def trace_of(name: str, wanted: list[str] | None = None, **options: Any) -> Trace:
    kept = KeptValues()
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            keys = tuple(session.points) if wanted is None else wanted
            return session.trace(IDS, keys, keep=kept.keep, fetch=kept.fetch, **options)


def test_records_carry_shape_positions_statistics_and_hash() -> None:
    trace = trace_of("qwen2", ["L1.q", "L1.scores", "logits", "L0.in"], hashes=True)
    record = trace.records["L1.q"]
    values = trace.recorded_values("L1.q")
    assert values is not None
    assert record.shape == values.shape == (29, 4, 12) and record.count == 29 * 48
    assert record.positions == tuple(range(29))
    assert record.stats == compute_stats(values)
    assert record.sha256 == decoded_sha256(values)
    assert (record.dtype, record.device, record.form) == ("float32", "cpu", "stepped")
    assert trace.records["L1.scores"].shape == (4, 29, 29)
    assert trace.records["logits"].positions == (28,)
    assert trace.aliases == {"L0.in": "embd"}
    assert trace.find_record("L0.in") is trace.records["embd"]
    assert trace.run["ids"] == list(IDS) and trace.run["architecture"] == "qwen2"


def test_a_record_is_the_same_from_its_json() -> None:
    """Layer 0 is a layer; a point of the whole model has none, a foreign file says less."""
    stats = compute_stats(np.arange(6, dtype=np.float32))
    for layer, key in ((-1, "logits"), (0, "L0.q"), (1, "L1.q")):
        point = key.rpartition(".")[2]
        for row in (
            Record(point, layer, (2, 3), (0, 4), "float32", "fused", "cpu", stats, "ab"),
            Record(point, layer, (), None, "bfloat16", None, "cuda:1", None),
        ):
            said = record_to_json(row)
            assert (said["key"], said["layer"]) == (key, None if layer < 0 else layer)
            assert said["count"] == math.prod(row.shape) and said["form"] == row.form
            assert record_from_json(json.loads(json.dumps(said)), "f") == row


@pytest.mark.parametrize("positions", ["last", (3, 7)])
def test_chosen_positions_are_rows_of_all(positions: Any) -> None:
    whole, some = trace_of("mixtral"), trace_of("mixtral", positions=positions)
    wanted = [28] if positions == "last" else list(positions)
    # Without a row of it the point is absent: a record of no values would read as zeros.
    assert whole.records.keys() - some.records.keys() == (
        set() if positions == "last" else {"logits"}
    )
    for key, record in some.records.items():
        expected, found = whole.recorded_values(key), some.recorded_values(key)
        assert expected is not None and found is not None
        assert record.positions == tuple(wanted), key
        if key == "logits":  # the pass computed the last row's alone
            np.testing.assert_array_equal(found, expected)
            continue
        scores = key.endswith((".scores", ".probs"))
        np.testing.assert_array_equal(found, expected[:, wanted] if scores else expected[wanted])


def test_positions_are_read_and_checked() -> None:
    assert parse_positions("1,3") == (1, 3) and parse_positions("last") == "last"
    with pytest.raises(UsageError, match="expected all, last"):
        parse_positions("1;3")
    with pytest.raises(UsageError, match="positions 29, 40 are not in the pass"):
        trace_of("llama", ["embd"], positions=[0, 40, 29])


def test_the_qkv_slot_joins_its_parts_and_is_absent_without_one() -> None:
    trace = trace_of("qwen2")
    parts = [trace.recorded_values(f"L2.{part}") for part in "qkv"]
    joined = np.concatenate([part.reshape(len(IDS), -1) for part in parts if part is not None], -1)
    slot = trace.slot_stats("qkv", 2)
    assert slot is not None and slot.count == joined.size
    assert slot.std == pytest.approx(compute_stats(joined).std, rel=1e-9)
    before = trace.slot_stats("qkv_nobias", 2)
    assert before is not None and before.std != slot.std
    assert trace_of("qwen2", ["L2.q"]).slot_stats("qkv", 2) is None
    assert traced64("deepseek_v3")[1].slot_stats("qkv", 1) is None


def test_recording_does_not_change_the_logits() -> None:
    everything, nothing = trace_of("llama"), trace_of("llama", ["logits"])
    a, b = everything.recorded_values("logits"), nothing.recorded_values("logits")
    again = trace_of("llama", ["logits"]).recorded_values("logits")
    assert a is not None and b is not None and again is not None
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))
    np.testing.assert_array_equal(b, again)


def test_a_nan_stops_the_pass_and_names_its_first_point() -> None:
    with open_model(judged("llama").folder) as model:
        weights = model_weights(model)
        broken = weights["L1.ffn_gate.weight"].numpy().copy()
        broken[3, 5] = np.nan
        session = Session(
            model.spec,
            model.hyper,
            weights.with_arrays({"L1.ffn_gate.weight": broken}),
            backend("numpy:float32"),
        )
        stopped = session.trace(IDS, tuple(session.points))
        assert stopped.nonfinite == "L1.ffn_gate" == list(stopped.records)[-1]
        on = session.trace(IDS, tuple(session.points), stop=False)
        assert on.nonfinite == "L1.ffn_gate" and "logits" in on.records
        record = on.records["L1.ffn_gate"]
        assert record.stats is not None and record.stats.nan == len(IDS)


def test_a_tracer_records_one_pass() -> None:
    from aprfmt.inference.trace import Tracer

    with open_model(judged("llama").folder) as model:
        with Session.open(model, backend("numpy:float32")) as session:
            tracer = Tracer(session.backend, session.points, ["embd"])
            session.logits(IDS, tracer)
            with pytest.raises(UsageError, match="one pass"):
                session.logits(IDS, tracer)


def test_a_trace_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with open_model(judged("mixtral").folder) as model, Spool(tmp_path) as spool:
        with Session.open(model, backend("numpy:float32")) as session:
            trace = session.trace(
                IDS,
                tuple(session.points),
                keep=spool.keep,
                fetch=spool.fetch,
                hashes=True,
                run={"prompt": "What is 2+2?"},
            )
            save_trace(path, trace)
            with pytest.raises(OutputError):
                save_trace(path, trace)
        with load_trace(path) as loaded:
            assert loaded.records == dict(trace.records)
            assert dict(loaded.aliases) == dict(trace.aliases)
            assert loaded.run == json.loads(json.dumps(trace.run))
            assert loaded.run["prompt"] == "What is 2+2?"
            for key in trace.records:
                a, b = loaded.recorded_values(key), trace.recorded_values(key)
                assert a is not None and b is not None and a.dtype == b.dtype
                np.testing.assert_array_equal(a, b)
    import safetensors.numpy

    others = safetensors.numpy.load_file(path)
    assert set(others) == set(trace.records) and others["L0.experts"].dtype == np.int64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(schema=7), "schema 7; expected 1"),
        (lambda h: h.update(records={}), "records, run or aliases"),
        (lambda h: h["records"][0].update(key="L0.nothing"), "is not known"),
        (lambda h: h["records"][0].update(shape=[-1]), "expected numbers not negative"),
        (lambda h: h["records"][0].update(shape=[1, 48]), "its tensor has"),
        (lambda h: h["records"][0].update(form="quick"), "form is 'quick'"),
        (lambda h: h["records"][0]["stats"].update(mean="high"), "statistic mean is 'high'"),
        (lambda h: h["records"][0].update(device=None), "device is None"),
    ],
)
def test_a_damaged_header_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    import safetensors.numpy

    path, bad = tmp_path / "run.safetensors", tmp_path / "bad.safetensors"
    save_trace(path, trace_of("llama", ["embd"]))
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "numpy") as file:
        header = json.loads(file.metadata()[HEADER])
    change(header)
    safetensors.numpy.save_file(tensors, bad, {HEADER: json.dumps(header)})
    with pytest.raises(FormatError, match=message), load_trace(bad):
        pass
    safetensors.numpy.save_file(tensors, bad)
    with pytest.raises(FormatError, match="expected a trace"), load_trace(bad):
        pass


def test_aprt_folders_hold_every_stage(tmp_path: Path) -> None:
    trace = trace_of("qwen2", logits_rows="all")
    written = save_aprt(tmp_path / "out", trace)
    stages = {path.stem for path in written if path.suffix == ".bin"}
    assert stages == set(STAGES) - {"moe_router", "moe_ffn_out"}
    path = tmp_path / "out" / "layer-2" / "qkv_bias.bin"
    count = 29 * (48 + 24 + 24)
    assert path.stat().st_size == 12 + 4 * count
    assert path.read_bytes()[:12] == struct.pack("<4sII", b"APRT", 2, count)
    whole = (tmp_path / "out" / "lm_head.bin").read_bytes()
    assert whole[:12] == struct.pack("<4sII", b"APRT", 0xFFFFFFFF, 29 * 97)
    loaded = load_aprt(tmp_path / "out")
    record = loaded.records["L2.qkv"]
    assert record.positions == tuple(range(29)) and record.shape == (29, 96)
    q = trace.recorded_values("L2.q")
    assert q is not None
    first = loaded.recorded_values("L2.qkv")
    assert first is not None
    np.testing.assert_array_equal(first[0, :48], q[0].reshape(-1))
    assert loaded.records["final_norm"].layer == WHOLE
    with pytest.raises(OutputError, match="not empty"):
        save_aprt(tmp_path / "out", trace)
    save_aprt(tmp_path / "out", trace, force=True)


def test_an_aprt_folder_says_its_tokens_beside_its_stages(tmp_path: Path) -> None:
    """What the layout has no room for stands in a file of ours; others read on without it."""
    trace = trace_of("qwen2", logits_rows="all")
    save_aprt(tmp_path, trace)
    loaded = load_aprt(tmp_path)
    assert loaded.run["ids"] == list(IDS) and loaded.run["architecture"] == "qwen2"
    for key, record in loaded.records.items():
        own = trace.find_record(key)
        assert own is not None
        assert (record.positions, record.dtype, record.form) == (own.positions, own.dtype, own.form)
        if key in trace.records:
            assert record.shape == own.shape
    facts = tmp_path / aprt.NAME
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".bin", ".json"}
    facts.rename(tmp_path / "elsewhere")
    foreign = load_aprt(tmp_path)
    assert "ids" not in foreign.run and set(foreign.records) == set(loaded.records)
    assert all(record.positions is None for record in foreign.records.values())
    for key in loaded.records:
        x, y = loaded.recorded_values(key), foreign.recorded_values(key)
        assert x is not None and y is not None
        np.testing.assert_array_equal(x.reshape(-1), y)


def test_a_wider_arithmetic_is_not_claimed_for_float32_values() -> None:
    record = trace_of("llama", ["embd"]).records["embd"]
    for dtype, kept in (("float64", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        assert aprt.stage_facts(replace(record, dtype=dtype), (1,), "").dtype == kept


def test_a_stage_that_is_not_the_one_written_is_refused(tmp_path: Path) -> None:
    save_aprt(tmp_path, trace_of("llama", logits_rows="all"))
    gate, up = (tmp_path / "layer-0" / f"{name}.bin" for name in ("ffn_gate", "ffn_up"))
    kept = gate.read_bytes()
    gate.write_bytes(up.read_bytes())  # a sound file of the right size: another run's, say
    with pytest.raises(FormatError, match=r"ffn_gate\.bin: is another file than aprfmt-trace"):
        load_aprt(tmp_path)
    gate.write_bytes(kept)
    (tmp_path / "layer-0" / "layer_output.bin").write_bytes(kept)
    with pytest.raises(FormatError, match="is not in aprfmt-trace"):
        load_aprt(tmp_path)
    (tmp_path / "layer-0" / "layer_output.bin").unlink()
    up.unlink()  # a missing file is allowed
    assert "L0.ffn_up" not in load_aprt(tmp_path).records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.update(schema=7), "schema 7; expected 1"),
        (lambda h: h.update(files=[]), "run or files"),
        (lambda h: h["run"].update(ids=[1, -2]), "ids is"),
        (lambda h: h["run"].update(ids="1,2"), "ids is"),
        (lambda h: h["files"].update({"layer-0/ffn_up.bin": 3}), "is not an object"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(sha256=None), "sha256 is None"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(sha256=""), "sha256 is ''; expected 64"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(dtype="int8"), "dtype 'int8'"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(form="quick"), "form is 'quick'"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(positions=[True]), "positions is"),
        (lambda h: h["files"]["layer-0/ffn_up.bin"].update(shape=[29, 71]), "says shape"),
    ],
)
def test_a_damaged_file_beside_the_stages_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    save_aprt(tmp_path, trace_of("llama", ["L0.ffn_up", "L1.ffn_up"]))
    path = tmp_path / aprt.NAME
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))
    with pytest.raises(FormatError, match=message):
        load_aprt(tmp_path)
    path.write_text(path.read_text()[:-1])
    with pytest.raises(FormatError):
        load_aprt(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"APRT", "an APRT header has 12"),
        (struct.pack("<4sII", b"NOPE", 0, 1) + bytes(4), "expected APRT"),
        (struct.pack("<4sII", b"APRT", 1, 1) + bytes(4), "says layer 1, its folder says 0"),
        (struct.pack("<4sII", b"APRT", 0, 2) + bytes(4), "2 values take 8"),
        (struct.pack("<4sII", b"APRT", 0, 1) + bytes(8), "1 values take 4"),
    ],
)
def test_aprt_files_that_lie_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    target = tmp_path / "layer-0" / "attn_norm.bin"
    target.parent.mkdir()
    target.write_bytes(content)
    with pytest.raises(FormatError, match=message):
        load_aprt(tmp_path)


def test_an_aprt_stage_must_be_known_and_nan_bits_stay(tmp_path: Path) -> None:
    target = tmp_path / "layer-0" / "layer_output.bin"
    target.parent.mkdir()
    bits = np.array([0x7FC01234, 0x3F800000], "<u4").tobytes()
    target.write_bytes(struct.pack("<4sII", b"APRT", 0, 2) + bits)
    values = load_aprt(tmp_path).recorded_values("L0.out")
    assert values is not None and values.tobytes() == bits
    target.rename(target.with_name("guess.bin"))
    with pytest.raises(FormatError, match="stage 'guess' is not known"):
        load_aprt(tmp_path)
    with pytest.raises(FormatError, match="is not a folder"):
        load_aprt(tmp_path / "nowhere")
