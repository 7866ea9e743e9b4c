"""The order of evidence, the sentences about what is not known, and the command itself."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.forward.attention import solve_cap
from aprfmt.causes.forward.relations import certainty_of_relations, relation_text
from aprfmt.diagnosis import conclusion as conclude
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.recorded_ids import hidden_causes
from aprfmt.inference import aprt
from aprfmt.inference.aprt import save_aprt
from aprfmt.inference.probe_ids import LONGEST, choose_ids
from aprfmt.inference.replay.recorded_trace import fit_values
from aprfmt.inference.trace_file import load_trace
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.short_numbers import short_numbers
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder, trace
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.silenced import without
from tests.diagnosis.table import answer
from tests.models import IDS, WINDOW


def wrong_theta() -> Path:
    return trace(tiny_folder("llama"), "wrong-theta", hp={"rope_theta": 1e4})


# --- evidence ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["eps-1e-6", "theta-odd", "pairing", "mask-none", "window-5", "bias-dropped", "experts",
     "activation", "residual-mlp", "routed-scale"],
)  # fmt: skip
def test_without_its_row_a_cause_is_not_named(name: str, monkeypatch: Any) -> None:
    """A cause is named only by its row of the table, not by resemblance."""
    fault = FAULTS[name]
    without(monkeypatch, fault.causes[0])
    a, b = fault.make()
    found = diagnose(str(a), str(b))
    assert found.verdict == "bug"
    assert fault.causes[0] not in {finding.cause for finding in found.findings}


def test_a_change_that_only_resembles_is_not_confirmed(monkeypatch: Any) -> None:
    """A hypothesis is an answer only if it makes the difference vanish."""
    folder = tiny_folder("llama")
    with monkeypatch.context() as patched:
        without(patched)
        found = diagnose(str(folder), str(wrong_theta()))
    assert (found.verdict, found.confidence, found.cause) == ("bug", "unconfirmed", None)
    assert found.first == "L0.q_rope"
    assert diagnose(str(folder), str(wrong_theta())).confidence == "confirmed"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("eps-1e-6", "norm_eps", 1e-6),
        ("theta", "rope_theta", 1e4),
        ("theta-odd", "rope_theta", 7345.0),
        ("linear-factor", "rope_scaling", {"type": "linear", "factor": 4.0}),
        ("window-5", "sliding_window", 5),
        ("attn-softcap-3", "attn_softcap", 3.0),
        ("attention-scale-1", "attn_scale", 1.0),
        ("partial-whole", "rope_dim", 12),
        ("positions-5", "offset", 5),
        ("positions-learned", "offset", 2),
        ("rows-one-off", "offset", 1),
        ("scaled", "factor", 1.5),
        ("one-bit", "index", [5, 7]),
        ("norm-offset", "offset", -1),
        ("heads", "order", [1, 0, 2, 3]),
        ("experts", "order", [1, 0, 2, 3, 4, 5]),
        ("logit-scale", "logit_scale", 1.0),
        ("gqa", "key_head_of_query_head", [0, 1, 0, 1]),
    ],
)
def test_the_wrong_value_is_solved_for(name: str, key: str, value: Any) -> None:
    lead = answer(name).lead
    assert lead is not None
    found = lead.values[key]
    assert found == pytest.approx(value, rel=1e-4) if isinstance(value, float) else found == value


def test_one_operation_is_blamed_and_not_what_it_was_fed() -> None:
    """Every point after a wrong rope differs; on its own input only rope does."""
    found = answer("theta-odd")
    rows = {row.key: row for row in found.points}
    beyond = [
        row.key for row in found.points if row.shadow is not None and row.shadow > row.tolerance
    ]
    assert {key.partition(".")[2] for key in beyond} == {"q_rope", "k_rope"}
    assert rows["L1.attn_out"].direct is not None and rows["L1.attn_out"].shadow is not None
    assert rows["L1.attn_out"].direct > 100 * rows["L1.attn_out"].shadow
    assert any("this operation is wrong, not its input" in row.says for row in found.evidence)


def test_levels_come_in_order_and_a_file_difference_is_not_sought_in_the_pass() -> None:
    found = answer("key-and-tensors")
    order = [row.level for row in found.evidence if row.level != "forward"]
    assert [level for i, level in enumerate(order) if level not in order[:i]] == [
        "identity",
        "config",
        "tensor",
    ]
    assert [finding.level for finding in found.findings] == ["config", "tensor", "tensor"]
    for finding in found.findings:
        assert finding.confirmed


def test_a_default_in_place_of_a_key_is_said() -> None:
    found = answer("demo-theta-lost")
    lead = found.lead
    assert lead is not None
    assert lead.side == "B" and "default" in lead.says


def test_tensors_that_contradict_the_keys_are_said() -> None:
    source = tiny_folder("llama-bias")
    copy = files.copy(source, "says-no-bias", config={"attention_bias": False})
    found = diagnose(str(source), str(copy))
    assert (found.verdict, found.cause, found.confidence) == ("bug", "missing_bias", "confirmed")
    assert found.lead is not None and "transformers and vLLM drop" in found.lead.says
    assert any("the tensors say" in row.says for row in found.evidence)


def test_gains_are_printed_so_that_a_spike_is_no_cause() -> None:
    rows = {row.key: row for row in answer("theta-odd").points}
    entering, here = rows["L0.out"].direct, rows["L1.attn_out"]
    assert entering and here.direct and here.gain == pytest.approx(here.direct / entering)
    spike = replace(here, gain=53.0, direct=0.5)
    (said,) = conclude.largest_gains(
        [here, spike] if (here.gain or 0) <= conclude.GAIN else [spike]
    )
    assert "53 times its layer's input: a gain, no cause by itself" in said.says


def test_common_faults_of_both_sides_are_no_difference_of_theirs() -> None:
    folder = tiny_folder("llama")
    first = trace(folder, "same-theta-a", hp={"rope_theta": 1e4})
    second = trace(folder, "same-theta-b", hp={"rope_theta": 1e4})
    found = diagnose(str(first), str(second), model=str(folder))
    assert found.verdict == "same"
    assert any("both sides depart from the model alike" in row.says for row in found.evidence)


def test_the_side_at_fault_is_found_between_two_traces() -> None:
    folder = tiny_folder("llama")
    good = trace(folder, "good")
    for a, b, side in ((wrong_theta(), good, "A"), (good, wrong_theta(), "B")):
        found = diagnose(str(a), str(b), model=str(folder))
        assert (found.cause, found.lead.side if found.lead else "") == ("rope_theta", side)


def test_two_traces_of_other_capture_points_need_no_model() -> None:
    folder = tiny_folder("qwen2")
    good = trace(folder, "good-qwen2")
    other = FAULTS["bias-elsewhere"].make()[1]
    found = diagnose(str(good), str(other))
    assert (found.verdict, found.cause) == ("same", "capture_point")
    assert found.lead is not None and found.lead.certainty == "confirmed"


def test_lengths_of_vectors_and_values_without_places_confirm_no_other_point() -> None:
    """Seen red: a relation of lengths taken for one that gives the values."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(6, 2, 8)).astype(np.float32)
    turned, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    others = (2 * x, x @ turned, rng.permuted(x, axis=0), -rng.random(x.shape))
    said = [relation_text(x, y, 1e-3) for y in others]
    assert [certainty_of_relations([text]) for text in said] == [
        "confirmed",
        "explained",
        "explained",
        "located",
    ]
    assert (
        certainty_of_relations(said[:2]) == "explained"
        and certainty_of_relations([said[0], ""]) == "located"
    )


def test_values_that_no_relation_gives_are_not_confirmed_as_another_point() -> None:
    """That what is computed from them agrees places them, and says not what they are.

    Seen red: a trace of some rows, whose noise was confirmed as rows of another point.
    """

    def noise(values: Any) -> Any:
        made = dict(values)
        made["L0.q"] = np.random.default_rng(5).normal(size=values["L0.q"].shape)
        return {key: value.astype(np.float32) for key, value in made.items()}

    folder = tiny_folder("llama")
    good, other = trace(folder, "good"), trace(folder, "noise-for-q", rename=noise)
    (found,) = diagnose(str(good), str(other)).findings
    assert (found.cause, found.certainty, found.share) == ("capture_point", "located", None)
    assert "q has other values" in found.says
    answer = diagnose(str(folder), str(other))
    (found,) = answer.findings
    assert (found.cause, found.certainty) == ("capture_point", "located")
    assert "q is other values" in found.says
    assert (answer.verdict, answer.exit_code) == ("not_comparable", 2), "what it is was not seen"
    assert {row.name for row in answer.left} >= {*found.where}
    few = trace(folder, "noise-for-q-in-some-rows", rename=noise, rows=[3, 5, 7, 8, 9])
    found, rows = diagnose(str(folder), str(few)).findings
    assert (found.cause, found.certainty, found.share) == ("capture_point", "located", None)
    assert "q is other values" in found.says and rows.cause == "capture_rows"


@pytest.mark.parametrize(
    ("points", "fill", "cause"),
    [
        (("L1.k_rope", "L1.v"), 0.0, "kv_cache"),
        (("L2.v",), 0.0, "kv_cache"),
        (("L1.k_rope", "L1.v"), 0.5, "capture_point"),
        (("L1.q_rope",), 0.0, "capture_point"),
    ],
)
def test_rows_of_zeros_in_a_cache_were_never_written(
    points: tuple[str, ...], fill: float, cause: str
) -> None:
    """Seen red: rows of zeros were said to be their values times a number of each row."""

    def emptied(values: Any) -> Any:
        made = {key: value for key, value in values.items() if key[2:] in (".k_rope", ".v")}
        made |= {key: values[key].copy() for key in (*points, "logits")}
        for key in points:
            made[key][[3, 4]] = fill
        return made

    folder = tiny_folder("llama")
    told = diagnose(str(folder), str(trace(folder, f"unwritten{points}{fill}", rename=emptied)))
    assert told.lead is not None and told.lead.cause == cause
    if cause == "kv_cache":
        assert told.lead.certainty == "confirmed" and {*told.lead.where} == {*points}
        assert told.lead.values["rows"] == {"3": -1, "4": -1}


# --- tokens --------------------------------------------------------------------------------------


def hyper(name: str) -> Any:
    with aprfmt.open(tiny_folder(name)) as model:
        return model.hyper


def test_chosen_ids_are_long_enough_for_windows_and_lengths() -> None:
    windowed = hyper("mistral")
    wide = windowed.with_values(sliding_window=200)
    assert len(choose_ids([wide], long=True)) > 200
    assert len(choose_ids([wide], long=False)) < 200
    assert len(choose_ids([windowed.with_values(sliding_window=10**6)], long=True)) <= LONGEST
    dynamic = hyper("llama-dynamic")
    assert len(choose_ids([dynamic], long=True)) > int(dynamic["context_length"])
    ids = choose_ids([windowed], long=False)
    assert all(0 <= token < int(windowed["vocab_size"]) for token in ids)
    assert len(set(ids)) > 20 and ids[3] == ids[4]


def test_what_tokens_cannot_show_is_said() -> None:
    windowed = hyper("mistral")
    said = " ".join(hidden_causes(windowed, 1))
    assert "mask" in said and "sliding_window" in said and "softmax_reduction" in said
    assert not any("sliding_window" in text for text in hidden_causes(windowed, WINDOW + 1))
    assert "rope_scaling" in " ".join(hidden_causes(hyper("llama-dynamic"), 10))
    source = tiny_folder("mistral")
    copy = files.copy(source, "no-window", config={"sliding_window": None})
    short = diagnose(str(source), str(copy), ids=IDS[:4])
    assert short.cause == "sliding_window" and short.confidence == "unconfirmed"
    assert any("does not show" in row.says for row in short.evidence)
    assert any(text.startswith("sliding_window") for text in short.not_checked)


def test_one_token_hides_a_wrong_base_and_it_is_said() -> None:
    folder = tiny_folder("llama")
    blind = trace(folder, "one-token-theta", ids=IDS[:1], hp={"rope_theta": 1e4})
    found = diagnose(str(folder), str(blind))
    assert found.verdict == "same"
    assert any("rope" in text for text in found.not_checked)


def test_two_tokens_leave_a_base_and_a_scaling_open() -> None:
    """If the tokens cannot distinguish causes, all of them are named."""
    folder = tiny_folder("llama")
    found = diagnose(
        str(folder), str(trace(folder, "two-tokens", ids=IDS[:2], hp={"activation": "relu"}))
    )
    assert found.cause == "activation"
    ambiguous = answer("final-softcap-only-logits")
    assert ambiguous.lead is not None
    assert (ambiguous.confidence, ambiguous.lead.also) == ("ambiguous", ("capture_point",))
    assert "capture_point would explain it as well" in ambiguous.sentence


# --- foreign traces ------------------------------------------------------------------------------


def test_aprt_folders_have_counts_only_and_are_judged(tmp_path: Path) -> None:
    folder = tiny_folder("qwen2")
    for name, hp, cause in (("sound", {}, "none"), ("eps", {"norm_eps": 1e-6}, "norm_eps")):
        with load_trace(trace(folder, f"aprt-{name}", hp=hp)) as made:
            save_aprt(tmp_path / name, made)
        found = diagnose(str(folder), str(tmp_path / name), ids=IDS)
        assert found.cause == cause, found.sentence
    assert diagnose(str(folder), str(tmp_path / "eps")).cause == "norm_eps"  # ours says its ids
    other = diagnose(str(folder), str(tmp_path / "eps"), ids=IDS[:-1])
    assert other.verdict == "not_comparable" and "other token ids" in other.reason
    (tmp_path / "eps" / aprt.NAME).unlink()  # a foreign folder has counts only
    blind = diagnose(str(folder), str(tmp_path / "eps"))
    assert blind.verdict == "not_comparable" and "--ids" in blind.reason
    told = diagnose(str(folder), str(tmp_path / "eps"), ids=IDS)
    assert told.cause == "norm_eps"
    assert any(text.startswith("B: token ids: not recorded") for text in told.not_checked)


@pytest.mark.parametrize("model", [True, False])
@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [((0, 1, 2), (1, 2, 8), "1, 2"), ((3,), (3, 4), "3"), ((0, 1), (2, 3), None)],
)
def test_rows_of_two_traces_go_by_position(
    a: tuple[int, ...], b: tuple[int, ...], shared: str | None, model: bool
) -> None:
    """Equal counts of other positions were compared row by row, and called rounding."""
    folder = tiny_folder("llama")
    paths = [trace(folder, f"rows-{rows}".replace(" ", ""), rows=rows) for rows in (a, b)]
    found = diagnose(*map(str, paths), model=str(folder) if model else None)
    if shared is None:
        assert found.verdict == "not_comparable" and found.exit_code == 2
        assert "no row in common" in found.reason and "the same --positions" in found.reason
    else:
        assert (found.verdict, found.cause) == ("same", "capture_rows"), found.sentence
        assert f"rows of positions {shared}" in found.sentence


# --- numbers -------------------------------------------------------------------------------------


def test_distances_rows_and_masks() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert rel_l2(x, x) == 0 and rel_l2(x, x[:2]) == math.inf
    assert rel_l2(np.array([np.nan, 1]), np.array([np.nan, 1])) == 0
    assert rel_l2(np.array([np.nan, 1]), np.array([2.0, 1])) == math.inf
    huge = np.array([4e25, 1], np.float32)  # its square overflows float32
    assert rel_l2(np.ones(2, np.float32), huge) == pytest.approx(1)
    assert rel_l2(np.zeros(3), np.zeros(3)) == 0 and rel_l2(np.ones(3), np.zeros(3)) == math.inf
    part = fit_values(x[[1, 3]], (1, 3), "float32", (4, 3), 0, 4)
    assert part is not None and part.rows is not None and part.rows.tolist() == [1, 3]
    assert part.distance(x, 0) == 0 and part.distance(x + 1, 0) > 0
    assert np.array_equal(part.fill_into(np.zeros((4, 3)), 0)[[0, 2]], np.zeros((2, 3)))
    last = fit_values(x[-1:].reshape(-1), None, "float32", (4, 3), 0, 4)
    assert last is not None and last.rows is not None and last.rows.tolist() == [3]
    assert fit_values(x.reshape(-1)[:5], None, "float32", (4, 3), 0, 4) is None
    scores = np.array([[[1.0, -np.inf], [2.0, 3.0]]])
    masked = fit_values(scores, (0, 1), "float32", (1, 2, 2), 1, 2)
    assert masked is not None and masked.distance(np.array([[[1.0, 9.0], [2.0, 3.0]]]), 1) == 0


def test_numbers_are_short_where_they_can_be() -> None:
    assert short_numbers(9999.7)[0] == 10000.0
    assert short_numbers(7345.2)[-1] == 7345.2
    plain = np.linspace(-20, 20, 101)
    assert solve_cap(plain, 7 * np.tanh(plain / 7)) == pytest.approx(7, rel=1e-4)
    assert solve_cap(plain, plain) is None
