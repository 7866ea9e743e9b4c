"""Single checks of gates: each is the one that fails where only what it looks at is wrong.

Seen red: what a whole pass leaves behind not looked at, a fresh session not compared, the facts of
a copy not compared, the bounds on losses too wide to fail.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aprfmt as package
from aprfmt.checks.gates import parity
from aprfmt.checks.gates import running as qa
from aprfmt.checks.gates.model_under_test import ModelUnderTest, QaRequest
from aprfmt.checks.records import NotRun
from aprfmt.inference.device import parse_run
from aprfmt.inference.session import Session
from aprfmt.measure.tolerances import Tolerance
from aprfmt.model import open_model
from tests.checks.gates.faults import config, copied, swapped_tokens, tensors
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.models import VOCAB, save_tiny

NUDGE = np.float32(1 + 1e-6)


def failed(report: qa.QaReport) -> set[str]:
    return {each.name for gate in report.gates for each in gate.failed}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder)
    return folder


# --- state --------------------------------------------------------------------------------------


def test_what_a_whole_pass_leaves_behind_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing before the whole pass moves a bit; everything after it is nudged."""
    whole, prefill = Session.logits, Session.prefill
    used: set[int] = set()

    def logits(self: Session, ids: Any) -> Any:
        used.add(id(self))
        return whole(self, ids)

    def nudged(self: Session, *args: Any, **options: Any) -> Any:
        rows = prefill(self, *args, **options)
        return rows * NUDGE if id(self) in used else rows

    monkeypatch.setattr(Session, "logits", logits)
    monkeypatch.setattr(Session, "prefill", nudged)
    found = failed(qa.run(tiny, only=("state-isolation",), random_weights=True))
    assert found == {"same-after-a-whole-pass"}


def test_a_session_that_differs_from_a_fresh_one_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session is nudged from its first call on, so that all of its calls agree."""
    prefill = Session.prefill
    first: list[Session] = []

    def nudged(self: Session, *args: Any, **options: Any) -> Any:
        first.append(self)
        rows = prefill(self, *args, **options)
        return rows * NUDGE if self is first[0] else rows

    monkeypatch.setattr(Session, "prefill", nudged)
    found = failed(qa.run(tiny, only=("state-isolation",), random_weights=True))
    assert found == {"same-after-in-a-fresh-session"}


# --- the facts of copies ------------------------------------------------------------------------


def with_copy(monkeypatch: pytest.MonkeyPatch, other: Path) -> None:
    """Let another folder stand for every copy in another format."""
    monkeypatch.setattr(ModelUnderTest, "copy", lambda self, name: self.open_other(other))


def test_another_tokenizer_in_a_copy_is_found(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes, points and logits are equal: only the text they stand for is another."""
    other = copied(demo_model, tmp_path / "other")
    swapped_tokens(other)
    with_copy(monkeypatch, other)
    found = failed(qa.run(demo_model, only=("format-parity",)))
    assert found == {"gguf-facts", "apr-facts"}
    against = failed(qa.run(demo_model, only=("format-parity",), against=other))
    assert against == found | {"against-facts"}


@pytest.mark.parametrize("encoding", [None, "Q8_0"])
def test_tensors_of_a_copy_are_judged_by_their_verdicts_alone(
    demo_model: Path, tmp_path: Path, encoding: str | None
) -> None:
    """Each check of a copy answers its own question: equal or WITHIN tensors pass theirs."""
    other = copied(demo_model, tmp_path / "other")
    swapped_tokens(other)
    made = tmp_path / "made.gguf"
    options = () if encoding is None else ("--encoding", encoding)
    assert aprfmt("convert", other, made, *options).code == 0
    gate = qa.run(demo_model, only=("format-parity",), against=made).gate("format-parity")
    rows = {one.name: one for one in gate.checks if one.name.startswith("against-")}
    failed_rows = {name for name, one in rows.items() if one.outcome == "FAIL"}
    assert failed_rows == {"against-facts"}
    tensors = rows["against-tensors"]
    assert tensors.outcome == "PASS"
    assert ("WITHIN" in tensors.found) == (encoding is not None)


def test_a_hyperparameter_that_a_copy_lost_is_found(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copied(tiny, tmp_path / "other")
    config(rms_norm_eps=0.5)(other)
    with_copy(monkeypatch, other)
    report = qa.run(tiny, only=("format-parity",), random_weights=True)
    wrong = {f"{name}-{what}" for name in ("gguf", "apr") for what in ("facts", "points", "logits")}
    assert failed(report) == wrong
    said = {each.name: each.found for each in report.gate("format-parity").failed}
    assert said["gguf-facts"] == "1: norm_eps 0.0003 | 0.5"


def test_a_value_that_the_probe_never_reads_is_compared_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path / "model", tied=False)
    other = copied(tmp_path / "model", tmp_path / "other")
    with ModelUnderTest.open(QaRequest(other, random_weights=True)) as subject:
        unread = next(i for i in range(VOCAB) if i not in subject.probe)

    def move(found: dict[str, Any]) -> None:
        found["model.embed_tokens.weight"][unread, 0] += 1

    tensors(move)(other)
    with_copy(monkeypatch, other)
    report = qa.run(tmp_path / "model", only=("format-parity",), random_weights=True)
    assert failed(report) == {"gguf-bytes", "apr-bytes"}


def test_a_format_that_cannot_hold_the_model_gives_no_answer_and_says_so(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tensors(lambda found: found | {"model.extra.weight": found["model.norm.weight"].clone()})(
        tmp_path
    )
    gate = qa.run(tmp_path, only=("format-parity",), random_weights=True).gate("format-parity")
    (one,) = [each for each in gate.checks if each.name == "gguf-converts"]
    assert one.outcome == "NOT_RUN" and "model.extra.weight" in one.found


# --- what checks of the file say --------------------------------------------------------------


def test_shapes_of_another_configuration_are_said_with_those_it_gives(
    demo_model: Path, tmp_path: Path
) -> None:
    folder = copied(demo_model, tmp_path / "model")
    config(num_key_value_heads=1)(folder)
    gate = qa.run(folder, only=("tensor-contract",)).gate("tensor-contract")
    (one,) = gate.failed
    assert one.name == "tensors-shaped" and one.expected == "[64, 256]; [64]"
    assert "; shape [128, 256] 8: L0.attn_k.weight, L0.attn_v.weight, " in one.found
    assert "; shape [128] 8: L0.attn_k.bias, " in one.found


@pytest.mark.parametrize("dialect", ["gptq", "compressed_packed", "modelopt"])
def test_packed_weights_that_decode_are_known(dialect: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "m", dialect)
    package.convert(tmp_path / "m", tmp_path / "m.apr")
    for path in (tmp_path / "m", tmp_path / "m.apr"):
        report = qa.run(path, only=("tensor-contract",), against=tmp_path / "m")
        assert report.gate("tensor-contract").outcome == "PASS"


def test_a_checksum_that_is_wrong_fails_and_one_that_is_absent_is_no_pass(
    tiny: Path, tmp_path: Path
) -> None:
    path = tmp_path / "m.apr"
    package.convert(tiny, path)
    whole = path.read_bytes()
    for data, outcome in (
        (whole, "PASS"),
        (whole[:-4], "NOT_RUN"),
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "FAIL"),
    ):
        path.write_bytes(data)
        gate = qa.run(path, only=("tensor-contract",), random_weights=True).gate("tensor-contract")
        outcomes = {each.name: each.outcome for each in gate.checks}
        assert outcomes.pop("file-checksum") == outcome
        assert set(outcomes.values()) == {"PASS"}
        assert gate.outcome == ("FAIL" if outcome == "FAIL" else "PASS")


# --- bounds on losses ---------------------------------------------------------------------------


def louder(folder: Path, factor: float) -> None:
    """Make every logit of a folder's model larger by a factor."""

    def scale(found: dict[str, Any]) -> None:
        found["model.norm.weight"] *= factor

    tensors(scale)(folder)


@pytest.mark.parametrize(
    ("arch", "run", "factor", "rel", "ceiling"),
    [("llama", "numpy", 1, 2e-5, None), ("llama", "numpy", 30, 2e-5, None),
     ("llama", "torch:cpu:bfloat16", 0.1, 8e-2, None), ("llama", "numpy", 1e4, 2e-5, 0.05),
     ("llama", "torch:cpu:bfloat16", 1, 8e-2, 0.05),
     ("qwen3_moe", "torch:cpu:bfloat16", 1, 0.4, 0.5)],
)  # fmt: skip
@pytest.mark.parametrize("share", [0.98, 1.02, -0.98, -1.02])
def test_a_loss_of_another_device_is_bounded(
    arch: str,
    run: str,
    factor: float,
    rel: float,
    ceiling: float | None,
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other device's loss is off by a little less, or a little more, than is allowed.

    Two errors of a logit are allowed, each of the tolerance times the logits' root mean square,
    and where that is much, as large logits or 16 bits make it, a fixed number of nats.
    """
    save_tiny(arch, tmp_path)
    louder(tmp_path, factor)
    subject, choice = ModelUnderTest.open(QaRequest(tmp_path, random_weights=True)), parse_run(run)
    with subject, subject.open_session(subject.model, choice) as other:
        logits = other.logits(subject.probe).astype(np.float64)
        most = 2 * rel * float(np.sqrt(np.mean(logits**2)))
        assert (most > (ceiling or 0.05)) == (ceiling is not None)
        most = ceiling or most
        losses = iter((3.0 + share * most, 3.0))  # ours, then theirs
        monkeypatch.setattr(parity, "_mean_loss", lambda logits, labels: next(losses))
        checks, _ = parity._compare_devices(subject, other, choice)
    (one,) = [each for each in checks if each.name == f"{choice}-loss"]
    assert one.outcome == ("PASS" if abs(share) < 1 else "FAIL"), one.found
    assert one.expected.startswith(f"at most {most:.3g} nats apart: logits of size ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sides", ["this run", "numpy", "both", "this run, the other zero"])
def test_logits_that_are_not_finite_fail_a_device_by_their_place(
    sides: str, value: float, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN against zeros had a distance of 0; nothing else is counted from such logits."""
    whole = Session.logits
    first: list[Session] = []

    def odd(self: Session, ids: Any) -> Any:
        first.append(self)
        rows = whole(self, ids).copy()
        mine = self is first[0]
        if not mine and "zero" in sides:
            rows[:] = 0
        if sides == "both" or mine == sides.startswith("this run"):
            rows[2, 5:7] = value
        return rows

    monkeypatch.setattr(Session, "logits", odd)
    request = QaRequest(tiny, random_weights=True)
    with ModelUnderTest.open(request) as subject:
        other = subject.open_session(subject.model, request.choice)
        with other:
            checks, measure = parity._compare_devices(subject, other, request.choice)
    name = str(request.choice)
    outcomes = {each.name.removeprefix(f"{name}-"): each.outcome for each in checks}
    assert outcomes == {
        "logits": "FAIL",
        "cosine": "NOT_RUN",
        "top": "NOT_RUN",
        "loss": "NOT_RUN",
        "points": "PASS",
    }
    said = checks[0].found
    total = len(subject.probe) * VOCAB
    assert said.startswith("logits: NaN or infinity on ") and "the first at [2, 5]" in said
    assert f"at 2 of {total} values" in said
    if sides == "both":
        assert "both sides alike" in said
    else:
        mine, holder = (0, name) if sides == "numpy" else (2, "this run")
        assert f"(this run has {mine}, {name} {2 - mine})" in said
        assert f"{holder} {value:.6g}" in said
    assert measure.value == np.inf


def test_a_point_that_is_not_finite_on_one_device_is_placed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = Session.trace
    first: list[Session] = []

    def odd(self: Session, *args: Any, keep: Any, **options: Any) -> Any:
        first.append(self)

        def kept(record: Any, values: Any) -> None:
            if self is first[0] and record.key == "L1.ffn_norm":
                values = np.array(values)
                values[1, 3] = np.nan
            keep(record, values)

        return trace(self, *args, keep=kept, **options)

    monkeypatch.setattr(Session, "trace", odd)
    request = QaRequest(tiny, random_weights=True)
    with ModelUnderTest.open(request) as subject:
        with subject.open_session(subject.model, request.choice) as other:
            checks, _ = parity._compare_devices(subject, other, request.choice)
    (one,) = [each for each in checks if each.outcome == "FAIL"]
    assert one.name == f"{request.choice}-points"
    assert one.found.startswith("first beyond its bound: L1.ffn_norm, NaN or infinity on one side")
    assert "at 1 of " in one.found and "the first at [1, 3]: this run nan" in one.found


@pytest.mark.parametrize("off", [0.49, 0.51, -0.49, -0.51])
def test_a_loss_of_a_coarser_copy_is_bounded(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter((3.0 + off, 3.0))  # ours, then the copy's
    monkeypatch.setattr(parity, "_mean_loss", lambda logits, labels: next(losses))
    x = np.random.default_rng(0).normal(size=(4, 9))
    one = parity._check_coarser_loss(x, x, [1, 2, 3])
    assert one.outcome == ("PASS" if abs(off) < 0.5 else "FAIL"), one.found
    assert one.expected == "at most 0.5 nats apart"


def test_a_copy_whose_logits_are_not_finite_fails_by_their_place() -> None:
    x = np.random.default_rng(0).normal(size=(4, 9))
    y = x * (1 + 1e-3)
    assert parity._check_coarser_loss(x, y, [1, 2, 3]).outcome == "PASS"
    y[1, 4] = np.nan
    for a, b, holder in ((x, y, "the other nan"), (y, x, "this model nan")):
        one = parity._check_coarser_loss(a, b, [1, 2, 3])
        assert one.name == "against-loss" and one.outcome == "FAIL"
        assert "at 1 of 36 values" in one.found and "the first at [1, 4]" in one.found
        assert holder in one.found


@pytest.mark.parametrize(("off", "outcome"), [(0.019, "PASS"), (0.021, "FAIL"), (-0.021, "FAIL")])
def test_a_stated_loss_is_held_to_two_hundredths_of_a_nat(
    off: float, outcome: str, demo_model: Path, golden: Path, tmp_path: Path
) -> None:
    rows = json.loads(golden.read_text())
    rows["losses"][0]["nats_per_token"] += off
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(rows))
    gate = qa.run(demo_model, only=("loss",), golden=path).gate("loss")
    assert {c.name: c.outcome for c in gate.checks}["loss-as-stated"] == outcome
    assert gate.outcome == outcome


@pytest.mark.parametrize(
    ("length", "outcome"), [(7, "FAIL"), (8, "PASS"), (1 << 27, "PASS"), ((1 << 27) + 1, "FAIL")]
)
def test_a_context_is_as_long_as_a_context_can_be(
    length: int, outcome: str, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": length}))
    gate = qa.run(tmp_path, only=["metadata"]).gate("metadata")
    (found,) = [check for check in gate.checks if check.name == "context-length"]
    assert found.outcome == outcome


def test_the_cosine_that_is_asked_follows_from_the_distance() -> None:
    random = np.random.default_rng(3)
    x = random.standard_normal((4, 50))
    away = random.standard_normal((4, 50))
    away -= x * np.sum(x * away) / np.sum(x * x)
    y = x + away * (0.33 * np.linalg.norm(x) / np.linalg.norm(away))  # cosine 0.9496
    loose = Tolerance(0.25, "a test")  # 1 - 0.25 ** 2 / 2 = 0.96875
    checks, _ = parity._check_logits_close(y, x, [1, 2, 3], loose, "copy")
    cosine = next(each for each in checks if each.name == "copy-cosine")
    assert cosine.outcome == "FAIL" and "0.96875" in cosine.expected, cosine


@pytest.mark.parametrize(("gap", "outcome"), [(0.05, "PASS"), (0.5, "FAIL")])
def test_another_likeliest_token_is_seen_in_a_row_of_many(gap: float, outcome: str) -> None:
    """The other rows hide the distance of one row; rounding may exchange two near tokens."""
    x = np.random.default_rng(4).standard_normal((400, 60))
    y = x.copy()
    first, second = 1.0 + np.abs(x[7]).max() + np.array([gap, 0.0])
    x[7, :2], y[7, :2] = (first, second), (second, first)
    checks, distance = parity._check_logits_close(
        y, x, [1] * 399, Tolerance(0.01, "a test"), "copy"
    )
    assert distance < 0.01
    top = next(each for each in checks if each.name == "copy-top")
    assert top.outcome == outcome and (outcome == "PASS" or "position 7" in top.found), top


# --- statistics of weights ----------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["gemma3n", "gemma4"])
def test_a_layers_few_numbers_are_no_matrix(arch: str, tmp_path: Path) -> None:
    """Factors and coefficients have any mean, and a matrix of zeros is still none."""
    save_tiny(arch, tmp_path / "a")
    assert not failed(qa.run(tmp_path / "a", only=("init-statistics",)))
    lost = copied(tmp_path / "a", tmp_path / "b")
    tensors(lambda rows: rows | {
        name: 0 * x for name, x in rows.items() if name.endswith("0.mlp.up_proj.weight")
    })(lost)  # fmt: skip
    assert failed(qa.run(lost, only=("init-statistics",))) == {"weights-ffn_up.weight"}


@pytest.mark.parametrize("stops", [[1533], [1535, 1533]])
def test_a_turn_that_ends_with_no_stop_is_said(
    stops: list[int], demo_model: Path, tmp_path: Path
) -> None:
    """Seen red: the gate passed without a word. It is no failure: a base model's is so."""
    folder = copied(demo_model, tmp_path / "b")
    config("generation_config.json", eos_token_id=stops)(folder)
    config("tokenizer_config.json", eos_token="<|endoftext|>")(folder)
    gate = qa.run(folder, only=("metadata",)).gate("metadata")
    said = {one.name: one for one in gate.checks}
    assert gate.outcome == "PASS"
    if 1535 in stops:
        assert "turn-end" not in said
    else:
        assert said["turn-end"].outcome == "NOT_RUN"
        assert "'<|im_end|>' (1535)" in said["turn-end"].found
        assert "set eos_token_id to [1533, 1535]" in said["turn-end"].found


@pytest.mark.parametrize("free", [-1, 0, 1])
def test_copies_that_do_not_fit_the_disk_are_not_made(
    free: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the tensors, for two formats: then the gates of copies are NOT-RUN, and say why."""
    with open_model(tiny) as model:
        needed = 2 * sum(tensor.nbytes for tensor in model.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed + free))
    with ModelUnderTest.open(QaRequest(tiny, random_weights=True)) as subject:
        if free >= 0:
            assert subject.copy("gguf").format == "gguf"
            return
        says = rf"copies need about {needed} bytes in .*, {needed - 1} are free; set TMPDIR"
        with pytest.raises(NotRun, match=says):
            subject.copy("gguf")
