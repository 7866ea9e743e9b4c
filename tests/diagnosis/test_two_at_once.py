"""Two things at once are each named: what was done to the whole model, and the fault beside it.

Seen red: a pruned and quantized model called damaged, a merge lost behind a tensor of zeros, a
turned sign counted as trained further, a doubled tensor's scales confirmed as shared ones.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.diagnosis.files import Rows

Edit = Callable[[Any, str], Any]  # a float32 array and its name -> another one

DOWN = "model.layers.3.mlp.down_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def each(*edits: Edit) -> Callable[[Rows], None]:
    """Return an editor that applies functions to every matrix of a bfloat16 model's layers."""

    def edit(rows: Rows) -> None:
        for name in [name for name in rows if name.endswith("proj.weight")]:
            kind, shape, raw = rows[name]
            values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
            for change in edits:
                values = np.asarray(change(values, name), "<f4")
            bits = values.view("<u4") + 0x7FFF + (values.view("<u4") >> 16 & 1)
            rows[name] = kind, shape, (bits >> 16).astype("<u2").tobytes()

    return edit


def pruned(x: Any, name: str) -> Any:
    return np.where(np.abs(x) < np.quantile(np.abs(x), 0.5), 0, x)


def merged(x: Any, name: str) -> Any:
    if "q_proj" not in name and "v_proj" not in name:
        return x
    rng = np.random.default_rng(len(name) + int(name.split(".")[2]))
    return x + 0.02 * rng.standard_normal((len(x), 4)) @ rng.standard_normal((4, x.shape[1]))


def only(target: str, change: Callable[[Any], Any]) -> Edit:
    return lambda x, name: change(x) if name == target else x


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_pruned_then_quantized(kind: str, tmp_path: Path) -> None:
    sparse = files.copy(DEMO, "pruned", tensors=each(pruned))
    aprfmt.convert(sparse, tmp_path / "b.gguf", encoding=kind, source_hash=False)
    report = aprfmt.diff(DEMO, tmp_path / "b.gguf", tensors=["L0.*"])
    (finding,) = report.findings
    assert (finding.cause, finding.certainty, len(finding.keys)) == ("derived", "located", 7)
    assert "7 of 7 matrices were pruned, " in finding.says
    assert f"then quantized: all others are within what {kind} rounds off" in finding.says


def test_a_quantization_alone_is_no_pruning(tmp_path: Path) -> None:
    """Of few bits it makes zeros too; and zeros that are no small values were lost."""
    aprfmt.convert(DEMO, tmp_path / "b.gguf", encoding="Q2_K", source_hash=False)
    assert not aprfmt.diff(DEMO, tmp_path / "b.gguf", tensors=["L0.*"]).findings

    def lost(x: Any, name: str) -> Any:
        return np.where(np.random.default_rng(0).random(x.shape) < 0.5, 0, x)

    holed = files.copy(DEMO, "holed", tensors=each(lost))
    aprfmt.convert(holed, tmp_path / "c.gguf", encoding="Q8_0", source_hash=False)
    found = aprfmt.diff(DEMO, tmp_path / "c.gguf", tensors=["L0.*"]).findings
    assert not [one for one in found if "pruned" in one.says]


@pytest.mark.parametrize(
    ("name", "edits", "fault", "says", "whole"),
    [
        ("merged-zero", (merged, only(DOWN, lambda x: 0 * x)), "stale_tensor",
         "B holds 0 everywhere", "lora_merge"),
        ("pruned-turned", (pruned, only(OUT, lambda x: -x)), "scale", "the sign is turned",
         "derived"),
        ("merged-rolled", (merged, only(DOWN, lambda x: np.roll(x, 64, 0))), "row_offset",
         "row i of B is row i-64 of A", "lora_merge"),
    ],
)  # fmt: skip
def test_a_fault_beside_what_was_done_to_all(
    name: str, edits: tuple[Edit, ...], fault: str, says: str, whole: str
) -> None:
    answer = diagnose(str(DEMO), str(files.copy(DEMO, name, tensors=each(*edits))))
    by_cause = {one.cause: one for one in answer.findings}
    assert set(by_cause) == {fault, whole}
    assert says in by_cause[fault].says and says in answer.sentence
    assert by_cause[whole].certainty == "located" and answer.exit_code == 1


UP, KEY = "model.layers.2.mlp.up_proj.weight", "model.layers.2.self_attn.k_proj.weight"
QUERY = "model.layers.2.self_attn.q_proj.weight"


def trained(x: Any, name: str, step: float = 0.02) -> Any:
    """Move every value by a share of the matrix's spread, another one in each matrix."""
    rng = np.random.default_rng([ord(letter) for letter in name])
    return x + step * x.std() * rng.standard_normal(x.shape)


def in_pairs(x: Any) -> Any:
    """Order the rows of two heads from split halves to adjacent pairs."""
    return x.reshape(2, 2, -1, x.shape[1]).transpose(0, 2, 1, 3).reshape(x.shape)


def with_zeros(x: Any) -> Any:
    x = x.copy()
    x[:, -60:] = 0
    return x


def drawn(x: Any) -> Any:
    return x.std() * np.random.default_rng(3).standard_normal(x.shape)


@pytest.mark.parametrize(
    ("name", "target", "change", "fault", "says"),
    [
        ("turned", UP, lambda x: -x, "scale", "the sign is turned"),
        ("doubled", UP, lambda x: 2 * x, "scale", "B's values are A's times 2"),
        ("transposed", QUERY, lambda x: x.T, "transpose", "rows and columns exchanged"),
        ("paired", KEY, in_pairs, "rope_pairing", "split halves in A, adjacent pairs in B"),
        ("reversed", DOWN, lambda x: x[::-1], "row_offset", "256 of 256 moved"),
        ("fresh", DOWN, drawn, "stale_tensor", "have nothing of A's"),
        ("holed", DOWN, with_zeros, "stale_tensor", "B holds 0 in 60 of 512 columns"),
    ],
)
def test_a_fault_of_one_matrix_is_no_part_of_a_training(
    name: str, target: str, change: Callable[[Any], Any], fault: str, says: str
) -> None:
    """Seen red: all matrices "belong to those of the other side", the faulty one among them."""
    copy = files.copy(DEMO, f"trained-{name}", tensors=each(trained, only(target, change)))
    answer = diagnose(str(DEMO), str(copy))
    by_cause = {one.cause: one for one in answer.findings}
    assert set(by_cause) == {fault, "derived"}
    assert says in by_cause[fault].says and says in answer.sentence
    assert by_cause[fault].keys and by_cause[fault].certainty == "located"
    assert "27 of 29 matrices differ" in by_cause["derived"].says
    assert answer.exit_code == 1


@pytest.mark.parametrize("both", [True, False])
def test_exchanged_matrices_are_no_part_of_a_training(both: bool) -> None:
    """Nor is one that was copied over another."""
    gate = UP.replace("up_proj", "gate_proj")

    def edit(rows: Rows) -> None:
        each(trained)(rows)
        rows[UP], rows[gate] = rows[gate], rows[UP] if both else rows[gate]

    answer = diagnose(str(DEMO), str(files.copy(DEMO, f"trained-exchanged-{both}", tensors=edit)))
    found = [one for one in answer.findings if one.cause != "derived"]
    assert {one.cause for one in found} == {"swapped_tensors" if both else "copied_tensor"}
    named = {"L2.ffn_up.weight", "L2.ffn_gate.weight"} if both else {"L2.ffn_up.weight"}
    assert {key for one in found for key in one.keys} == named


@pytest.mark.parametrize(
    "change",
    [
        lambda x, name: trained(x, name, 0.2 if ".3." in name else 0.02),  # a rate for each layer
        lambda x, name: trained(x, name, 0.6 if name == UP else 0.02),  # one learned most
        lambda x, name: 0.9 * trained(x, name),  # weights decay
        lambda x, name: trained(merged(x, name), name),
    ],
    ids=["rates", "one", "decay", "adapter"],
)
def test_a_training_that_moves_matrices_unlike_is_no_fault(change: Edit) -> None:
    copy = files.copy(DEMO, f"unlike-{id(change)}", tensors=each(change))
    answer = diagnose(str(DEMO), str(copy))
    assert {one.cause for one in answer.findings} <= {"derived", "lora_merge"}


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q8_0"])
def test_a_tensor_that_was_doubled_before_it_was_quantized(kind: str, tmp_path: Path) -> None:
    doubled = files.copy(DEMO, "doubled", tensors=each(only(GATE, lambda x: 2 * x)))
    aprfmt.convert(doubled, tmp_path / "b.gguf", encoding=kind, source_hash=False)
    (finding,) = aprfmt.diff(DEMO, tmp_path / "b.gguf", tensors=["L0.*"]).findings
    assert (finding.cause, finding.keys) == ("scale", ("L0.ffn_gate.weight",))
    times = re.search(r"A's times ([0-9.]+)", finding.says)
    assert times is not None and float(times[1]) == pytest.approx(2, rel=0.01)
