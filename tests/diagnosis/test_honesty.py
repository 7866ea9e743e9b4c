"""`diagnose` claims only what it knows: evidence that is true of any damage confirms no cause, no
weight is blamed for its neighbour, zeros give no verdict, and what rounding hides is reported.

Seen red: every result of `judge_foreign` counted as sure, the last weight
blamed for all operations.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.causes.tensor import foreign_values, other_tensors
from aprfmt.causes.tensor.foreign_values import ForeignVerdict, judge_foreign
from aprfmt.causes.tensor.proof import make_finding
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.zero_values import hidden_by_rounding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.row_reader import RowReader
from aprfmt.measure.tolerances import ONE_OPERATION, SMALLEST_BUG
from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.engine_changes import ALL, heads, number
from tests.diagnosis.engines import COARSE, broken, place, tiny_folder, trace
from tests.diagnosis.faults import FAULTS, UP, neurons_moved
from tests.diagnosis.silenced import without
from tests.diagnosis.table import answer
from tests.models import IDS

# --- another tensor, or a damaged one -------------------------------------------------------------


class Held(RowReader):
    """A matrix in memory, as a tensor."""

    def __init__(self, values: Any, encoding: str = "F32") -> None:
        self.values = np.asarray(values, np.float32)
        self.shape, self.encoding = self.values.shape, encoding
        self.rows, self.columns = self.shape

    def take(self, index: Any) -> Any:
        return self.values[index]


def weights(seed: int, shape: tuple[int, int] = (96, 64)) -> Any:
    """Return heavy-tailed weights with large columns, as trained ones are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_t(8, shape) * (1 + np.arange(shape[1]) % 7)).astype(np.float32)


def misread(x: Any) -> Any:
    """Read BF16 values with their bytes exchanged."""
    raw = x.astype(ml_dtypes.bfloat16).view(np.uint16).byteswap()
    return raw.view(ml_dtypes.bfloat16).astype(np.float32)


DAMAGE: dict[str, tuple[Any, str]] = {
    "noise": (lambda x: x + np.std(x) * weights(5) / 9, "related"),
    "signs lost": (lambda x: np.abs(x), "related"),
    "signs at random": (lambda x: x * np.sign(weights(5)), "of their sizes"),
    "every second sign": (lambda x: x * np.where(np.indices(x.shape).sum(0) % 2, 1, -1),
                          "of their sizes"),
    "in any order": (lambda x: np.random.default_rng(3).permutation(x.ravel()).reshape(x.shape),
                     "in an order that has no name here"),
    "half of it gone": (lambda x: np.where(np.arange(96)[:, None] < 48, x, 0), "spread unlike"),
    "wild": (lambda x: np.exp(6 * weights(5) / 9), "times as large"),
    "bytes exchanged": (misread, "damage"),
    "infinite": (lambda x: np.where(x > 3, np.inf, x), "not finite"),
    "clipped noise": (lambda x: np.sign(weights(5)) * np.std(x), "spread unlike"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_not_taken_for_another_tensor(name: str) -> None:
    damage, why = DAMAGE[name]
    found = judge_foreign(Held(weights(1)), Held(damage(weights(1))))
    assert not found.sure and why in found.says, found.says


@pytest.mark.parametrize("seed", range(2, 8))
def test_another_tensor_is_told_and_so_is_a_constant(seed: int) -> None:
    assert judge_foreign(Held(weights(1)), Held(weights(seed))).sure
    filled = judge_foreign(Held(weights(1)), Held(np.full((96, 64), 0.5)))
    assert filled.sure and "0.5 everywhere" in filled.says
    assert not judge_foreign(Held(weights(1, (4, 8))), Held(weights(2, (4, 8)))).sure  # too few
    assert not judge_foreign(Held(np.ones((96, 64))), Held(np.ones((96, 64)))).sure


def test_an_order_is_seen_through_an_encoding() -> None:
    x = weights(1)
    moved = np.random.default_rng(3).permutation(x.ravel()).reshape(x.shape)
    rounded = moved.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert "order" in judge_foreign(Held(x), Held(rounded, "BF16")).says
    assert judge_foreign(Held(x), Held(weights(2).astype(ml_dtypes.bfloat16), "BF16")).sure


def test_a_stale_tensor_is_confirmed_by_evidence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A's tensor would remove the difference if B's were noise, too."""
    assert answer("old-weight").confidence == "confirmed"
    found = answer("noise")
    lead = found.lead
    assert lead is not None and (found.cause, lead.confirmed) == ("stale_tensor", False)
    assert lead.residual_after == 0 and lead.residual_before
    assert "true of any damage" in " ".join(row.says for row in found.evidence)
    for module in (foreign_values, other_tensors):
        monkeypatch.setattr(module, "judge_foreign", lambda a, b: ForeignVerdict(True, "believed"))
    a, b = FAULTS["noise"].make()
    assert diagnose(str(a), str(b)).confidence == "confirmed"


# --- the place of an unexplained divergence -------------------------------------------------------


def unexplained(monkeypatch: pytest.MonkeyPatch, base: str, **how: Any) -> Any:
    """Diagnose a trace of the ten slots with no hypothesis to try."""
    without(monkeypatch)
    folder = tiny_folder(base)
    made = trace(folder, f"unexplained-{base}-{'-'.join(how)}", points=COARSE, **how)
    return diagnose(str(folder), str(made))


def test_a_weight_is_not_blamed_for_the_attention_before_it(monkeypatch: Any) -> None:
    found = unexplained(
        monkeypatch, "llama", backend=lambda: broken("probs", heads(mask=ALL, causal=None))
    )
    lead = found.lead
    assert (found.verdict, found.cause, found.confidence) == ("bug", None, "unconfirmed")
    assert (set(lead.after), lead.first) == ({"L0.q", "L0.k", "L0.v"}, "L0.attn_out")
    assert {"L0.attn_output.weight", "rope", "scores", "probs", "mix", "linear"} == set(lead.where)
    assert "L0.q, L0.k, L0.v" in lead.says and "any of these operations may be wrong" in lead.says
    assert found.to_json()["findings"][0]["after"] == lead.after


def test_norms_and_experts_are_among_what_may_be_wrong(monkeypatch: Any) -> None:
    post = unexplained(monkeypatch, "gemma2", hp={"norm_eps": 1e-2}).findings
    norms = next(row for row in post if row.first == "L0.ffn_norm")
    assert {"L0.post_attention_norm.weight", "L0.ffn_norm.weight"} <= set(norms.where)
    assert "L0.attn_out" in norms.after and "rms_norm" in norms.where
    routed = unexplained(monkeypatch, "mixtral", hp={"norm_topk": False}).lead
    roles = {f"L0.ffn_{part}.weight" for part in ("gate_inp", "gate_exps", "up_exps", "down_exps")}
    assert roles <= set(routed.where) and routed.after == ("L0.ffn_norm",)


def test_a_product_alone_is_still_a_suspected_weight(monkeypatch: Any) -> None:
    def stale(weights: Any) -> dict[str, Any]:
        return {"L1.ffn_down.weight": number(weights, "L1.ffn_down.weight")[::-1]}

    found = unexplained(monkeypatch, "llama", weights=stale)
    lead = found.lead
    assert (found.cause, lead.where) == ("stale_tensor", ("L1.ffn_down.weight",))
    assert (lead.after, lead.first) == (("L1.ffn_mul",), "L1.ffn_out")


# --- what rounding hides --------------------------------------------------------------------------


def test_a_16_bit_trace_says_below_which_distance_it_shows_nothing() -> None:
    folder = tiny_folder("gpt2")
    wrong = files.copy(folder, "gelu-by-erf", config={"activation_function": "gelu"})
    saved = place("gelu-bf16.safetensors")
    for run, bound in ((f"{wrong}@torch:cpu:bfloat16", "0.03"), (str(wrong), "")):
        ids = ",".join(map(str, IDS))
        args = ("trace", run, "--payload", "--ids", ids, "--save", saved, "--force", "--quiet")
        assert command(*args).code == 0
        found = diagnose(str(folder), str(saved))
        lines = [text for text in found.not_checked if "differences below relL2" in text]
        if bound:  # the bug is there, smaller than the rounding
            assert found.verdict == "precision"
            assert len(lines) == 1 and f"relL2 {bound} at" in lines[0] and "bfloat16" in lines[0]
        else:
            assert (found.cause, lines) == ("activation", [])


def test_only_tolerances_that_hide_a_bug_are_named() -> None:
    rows = [(row.rel_l2, dtype) for dtype, row in ONE_OPERATION.items()]
    said = list(hidden_by_rounding("B", [*rows, *rows]))
    assert len(said) == sum(bound > SMALLEST_BUG for bound, _ in rows) == 3
    assert all("at 2 points" in text for text in said)
    assert not any("float64" in text for text in said)


@pytest.mark.parametrize("name", ["torch-bf16", "torch", "two-traces-blind"])
def test_runs_are_told_it_too(name: str) -> None:
    said = [text for text in answer(name).not_checked if "differences below relL2" in text]
    assert bool(said) == (name == "torch-bf16")


# --- zeros ----------------------------------------------------------------------------------------


def test_zeros_are_no_verdict(tmp_path: Path) -> None:
    a, b = FAULTS["zero-trace"].make()
    for pair in ((a, b), (b, a)):
        done = command("diagnose", *pair, "--json")
        assert done.code == 2 and done.json["verdict"] == "not_comparable"
        assert "are zero" in done.json["reason"]
    _, zeros = FAULTS["zeros"].make()
    assert command("diagnose", zeros, zeros).code == 0  # byte for byte the same file
    _, blank = FAULTS["zero-trace"].make()
    assert diagnose(str(blank), str(blank), ids=IDS).verdict == "not_comparable"
    one = files.copy(
        tiny_folder("llama"),
        "one-number",
        tensors=files.edit_all(
            "", lambda x: np.where(np.arange(x.size).reshape(x.shape) == 3, 1e-3, 0)
        ),
    )
    assert "are zero" not in diagnose(str(tiny_folder("llama")), str(one)).reason


def test_a_point_of_zeros_on_both_sides_is_not_counted() -> None:
    """A model whose own MLP is zero: its points say nothing, the others do."""
    folder = files.copy(tiny_folder("llama"), "no-mlp", tensors=files.edit(UP, lambda x: 0 * x))
    made = trace(folder, "no-mlp")
    found = diagnose(str(folder), str(made))
    assert found.verdict == "same"
    rows = {row.key: row for row in found.points}
    assert rows["L1.ffn_up"].shadow is None and rows["L1.ffn_up"].direct is None
    assert rows["L1.ffn_gate"].shadow == 0.0
    assert any("L1.ffn_up: zero on both sides" in text for text in found.not_checked)


@pytest.mark.parametrize("base", ["llama", "gemma2"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_series_of_layer_inputs_covers_no_last_layer(base: str, behind: bool) -> None:
    """Nothing computed in the last layer is there, unless a later point is."""

    def inputs(values: dict[str, Any]) -> dict[str, Any]:
        """Exchange each layer's output for what entered the layer."""
        first = max((k for k in values if k.startswith("embd")), key=len)
        outs = [key for key in values if key.endswith(".out")]
        moved = dict(zip(outs, [first, *outs], strict=False))
        return {k: values[moved.get(k, k)] for k in values if behind or k != "logits"}

    points = frozenset({"embd", "embd_scaled", "out", "logits"})
    run = trace(tiny_folder(base), f"inputs-{base}-{behind}", points=points, rename=inputs)
    found = diagnose(str(tiny_folder(base)), str(run))
    assert found.cause == "capture_point" and found.exit_code == (0 if behind else 2)
    last = max(key for key in found.findings[0].where if key.endswith(".out"))
    assert [row.name for row in found.left] == ([] if behind else [last])


def test_what_lies_behind_the_last_compared_point_is_said() -> None:
    folder = tiny_folder("llama")
    run = trace(
        folder, "two-layers", rename=lambda own: {key: own[key] for key in ("L0.out", "L1.out")}
    )
    found = diagnose(str(folder), str(run))
    assert "nothing after L1.out was compared" in found.sentence


# --- tensors of one side only, and units moved together -------------------------------------------


def test_an_extra_tensor_stays_in_the_count_and_the_rest_is_compared() -> None:
    found = answer("extra-and-scale")
    assert "31 tensors: 1 DIFFERENT, 1 ONLY_IN_B, 29 SAME_BYTES" in [
        row.says for row in found.evidence
    ]
    assert [row.confidence for row in found.findings] == ["confirmed", "confirmed"]
    a, b = FAULTS["extra"].make()
    other = diagnose(str(b), str(a))
    assert (other.cause, other.lead.side if other.lead else "") == ("extra_tensor", "A")
    assert any(text.startswith("model.layers.1.mlp.rotary_cache") for text in other.not_checked)
    assert command("diagnose", a, b).code == command("diff", a, b).code == 1, (
        "it may mean something"
    )
    assert command("diagnose", a, b, "--accept", "unread:*rotary_cache").code == 0


def test_what_moved_together_and_a_bug_beside_it() -> None:
    def both(rows: files.Rows) -> None:
        neurons_moved(rows)
        files.edit("model.layers.2.mlp.up_proj.weight", lambda x: 1.25 * x)(rows)

    folder = tiny_folder("llama")
    found = diagnose(str(folder), str(files.copy(folder, "neurons-and-scale", tensors=both)))
    assert (found.verdict, found.cause, found.confidence) == ("bug", "scale", "confirmed")
    assert {row.cause: row.verdict for row in found.findings}["permuted_neurons"] == "same"
    assert found.first == "L2.ffn_up"  # not where neurons stand in another order


def test_a_claim_of_equal_function_is_held_against_the_pass(monkeypatch: Any) -> None:
    """The explanation alone does not prove it: a difference in the logits is a bug."""
    from aprfmt.causes.tensor import symmetry

    def claimed(case: Any, row: Any, *rest: Any) -> Any:
        return make_finding(row.cause, (case.key,), (row.says,), 1.0, 0.0, unfitted_proof(100))

    monkeypatch.setattr(symmetry, "_order_explanation", claimed)
    folder = tiny_folder("llama")
    moved = files.copy(folder, "rows-only", tensors=files.edit(UP, lambda x: x[::-1]))
    found = diagnose(str(folder), str(moved))
    assert (found.verdict, found.cause, found.confidence) == (
        "bug",
        "permuted_neurons",
        "unconfirmed",
    )


@pytest.mark.parametrize("make", [
    lambda m: ("diagnose", m, f"{m}@wrong"), lambda m: ("qa", f"{m}@wrong"),
    lambda m: ("run", f"{m}@wrong", "--ids", "1"), lambda m: ("eval", f"{m}@wrong", "--ids", "1,2"),
    lambda m: ("trace", f"{m}@wrong", "--payload", "--ids", "1,2"),
    lambda m: ("trace", f"{m}@wrong"),
    lambda m: ("trace", m, "--payload", "--ids", "1,2", "--reference", f"{m}@wrong"),
])  # fmt: skip
def test_an_unknown_run_lists_the_known_ones(make: Any) -> None:
    done = command(*make(tiny_folder("llama")))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "'wrong' is not known" in done.err and "transformers" in done.err
