"""What is proven without a pass, what probes reach, what causes leave, and the next step."""

import json
import math
import shlex
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.compare import diff_models
from aprfmt.diagnosis import diagnose, finding_effects
from aprfmt.diagnosis.derived_quantities import compare_quantity
from aprfmt.diagnosis.finding_effects import Share, make_run_pair
from aprfmt.diagnosis.model_pair import finalize_finding
from aprfmt.diagnosis.paired_pass import PairedPass, Probe, kl_divergence, stages_equal
from aprfmt.diagnosis.probes import differing_rows
from aprfmt.diagnosis.progress import ProgressReporter
from aprfmt.diagnosis.records import KINDS, Diagnosis, Touched
from aprfmt.errors import AprfmtError
from aprfmt.inference.backends import blas
from aprfmt.inference.forward import StageOutput
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.measure.findings import Finding
from aprfmt.measure.nonfinite import NonFinite
from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.engines import place, tiny_folder
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.faults_diagnosis_order import EXERCISED, setting
from tests.diagnosis.table import answer
from tests.diagnosis.token_edits import DEMO
from tests.models import IDS

BOUND = 2e-5


# --- proof ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gguf-copy", "same-bytes", "window-is-context", "scaling-by-one"])
def test_equal_bytes_and_quantities_need_no_pass(name: str, monkeypatch: Any) -> None:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pass was run")

    monkeypatch.setattr(PatchedModel, "run", refused)
    a, b = FAULTS[name].make()
    found = diagnose(str(a), str(b))
    assert (found.verdict, found.exit_code, found.ids) == ("same", 0, ())
    assert found.proven.startswith("proven without a pass")
    assert found.complete is True


def test_one_value_that_differs_needs_passes() -> None:
    found = answer("bit")
    assert not found.proven and found.ids and found.coverage.run


# --- effective quantities ------------------------------------------------------------------------


def test_factors_of_a_named_rule_are_that_rule() -> None:
    """GGUF holds llama3's rule as one factor a pair; judged by the formula of Llama 3.1's code."""
    with aprfmt.open(tiny_folder("llama-llama3")) as model:
        hp = model.hyper
        rule, dim = hp["rope_scaling"], int(hp["rope_dim"])
        factors = []
        for i in range(0, dim, 2):
            wave = 2 * math.pi * float(hp["rope_theta"]) ** (i / dim)
            low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
            original = float(rule["original_context_length"])
            smooth = (original / wave - low) / (high - low)
            blended = 1 / ((1 - smooth) / float(rule["factor"]) + smooth)
            factors.append(
                1.0
                if wave < original / high
                else float(rule["factor"])
                if wave > original / low
                else blended
            )
        same = hp.with_values(rope_scaling={"type": "factors", "factors": factors})
        other = hp.with_values(rope_scaling={"type": "factors", "factors": [*factors[:-1], 7.5]})
        assert compare_quantity("rope_scaling", hp, same).equal  # type: ignore[union-attr]
        found = compare_quantity("rope_scaling", hp, other)
        assert found is not None and found.position == 1 and "3 layers" in found.says


@pytest.mark.parametrize(
    ("name", "changes", "position"),
    [
        ("sliding_window", {"sliding_window": 64}, 8),
        ("sliding_window", {"sliding_window": 5}, 5),
        ("sliding_window", {"sliding_window": None}, 8),
        ("rope_theta", {"rope_theta": 5001.0}, 1),
        ("rope_layers", {"rope_layers": (True, False, True)}, 0),
        ("activation", {"activation": "gelu"}, 0),
        ("activation", {"activation": "silu"}, None),
        ("attn_scale", {"attn_scale": 0.25 * (1 + 1e-9)}, None),
        ("attn_scale", {"attn_scale": 0.26}, 0),
        ("norm_topk", {"norm_topk": True}, None),
    ],
)
def test_quantities_say_from_where_they_differ(
    name: str, changes: dict[str, Any], position: int | None
) -> None:
    with aprfmt.open(tiny_folder("mistral")) as model:
        found = compare_quantity(name, model.hyper, model.hyper.with_values(**changes))
    assert found is not None and found.position == position, found


# --- passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base",
    ["llama", "gemma3", "deepseek_v3", "gpt2", "cohere", "deepseek_v32", "gemma3n", "gemma4"],
)
def test_a_pass_from_where_it_differs_is_the_whole_pass(base: str) -> None:
    """Judged by a pass from the ids to the logits: equal to the bit, at the same first point."""
    other = tiny_folder(base, seed=3)
    with aprfmt.open(tiny_folder(base)) as a, aprfmt.open(other) as b:
        passes = PairedPass(a, b, frozenset(), make_run_pair(a, b), "float32")
        last = max(key for key in a.roles if key.startswith("L") and "down" in key)
        kept = Touched((), tuple(key for key in a.roles if key != last))
        probe = Probe(IDS[:12])
        whole = record_points(PatchedModel.unpatched(a, probe.ids, "float32"))
        assert np.array_equal(passes.stage_inputs(probe)[-1], whole["logits"])
        mixed = PatchedModel.unpatched(a, probe.ids, "float32").with_weights(
            {last: b.roles[last].numpy()}
        )
        expected = record_points(mixed)["logits"]
        blend = passes.blend([kept])
        assert blend.own and blend.own[0] > 1
        found = passes.run_from_first_difference(blend, probe)
        far = np.linalg.norm(expected - whole["logits"]) / np.linalg.norm(whole["logits"])
        assert found.distance == pytest.approx(far, rel=1e-5) and not found.exact
        assert found.kl == pytest.approx(kl_divergence(whole["logits"], expected), rel=1e-4)
        assert found.first.startswith(last.partition(".")[0])
        assert passes.run_from_first_difference(
            passes.blend([kept, Touched((), (last,))]), probe
        ).exact
        passes.close()


SHARING = ("deepseek_v32", "gemma3n", "gemma4")


@pytest.mark.parametrize("base", SHARING)
def test_what_later_layers_share_is_compared_with_the_stream(base: str) -> None:
    """Two findings are measured alone, also where layers share keys, values or chosen keys."""
    changed = ("L0.ffn_down.weight", "L1.attn_output.weight")
    with aprfmt.open(tiny_folder(base)) as a, aprfmt.open(tiny_folder(base, seed=3)) as b:
        passes = PairedPass(a, b, frozenset(), make_run_pair(a, b), "float32")
        probe = Probe(IDS[:12])
        for one in changed:
            kept = tuple(key for key in a.roles if key != one)
            found = passes.run_from_first_difference(passes.blend([Touched((), kept)]), probe)
            assert 0 < found.distance < math.inf and found.first.startswith(one[:3])
        entering = passes.stage_inputs(probe)[2]
        assert isinstance(entering, StageOutput)
        other = replace(entering, state=entering.state.copy())
        assert stages_equal(entering, other) and not passes._stage_differs(entering, other, True)
        state = other.state
        if state.chosen is not None:
            state.chosen = ~np.asarray(state.chosen)
        elif state.shared:
            state.shared = {at: (k, v * 2) for at, (k, v) in state.shared.items()}
        else:
            state.per_layer = np.asarray(state.per_layer) * 2
        assert not stages_equal(entering, other)
        assert passes._stage_differs(entering, other, False)
        assert not stages_equal(entering, entering.stream)
        assert passes._stage_differs(entering, entering.stream, False)
        passes.close()


def test_rerouted_tokens_are_counted_where_layers_share_chosen_keys() -> None:
    """A sound run is rounded in its stream alone; the mask of chosen keys has no rounding."""
    with aprfmt.open(tiny_folder("deepseek_v32")) as a, aprfmt.open(
        tiny_folder("deepseek_v32", seed=3)
    ) as b:  # fmt: skip
        passes = PairedPass(a, b, frozenset(), make_run_pair(a, b), "float32")
        [router] = [key for key in a.roles if key.endswith("ffn_gate_inp.weight")][:1]
        found = passes.count_rerouted_tokens([router], [], Probe(IDS[:12]))
        assert found.keys() == {int(router[1 : router.index(".")])}
        assert not passes.count_rerouted_tokens([], [], Probe(IDS[:12]))
        passes.close()


def test_divergence_is_that_of_the_probabilities() -> None:
    import torch

    rng = np.random.default_rng(2)
    x, y = rng.normal(0, 3, (2, 19, 31)).astype(np.float32)
    p, q = (torch.log_softmax(torch.tensor(z, dtype=torch.float64), -1) for z in (x, y))
    judge = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert kl_divergence(x, y) == pytest.approx(float(judge), rel=1e-9)
    assert kl_divergence(x, x) == 0


def test_a_row_that_stands_out_of_another_encoding_is_among_the_ids() -> None:
    fine = tiny_folder("llama", vocab_size=997)
    half = tiny_folder("llama", "float16", vocab_size=997)
    zeroed = files.copy(
        half,
        "row-of-zeros",
        tensors=files.raw(
            "model.embed_tokens.weight", lambda raw: raw[: 611 * 96] + bytes(96) + raw[612 * 96 :]
        ),
    )
    with aprfmt.open(fine) as a, aprfmt.open(zeroed) as b:
        apart = differing_rows(a, b, diff_models(a, b))
    assert apart.rows == {"token_embd.weight": [611]}
    found = diagnose(str(fine), str(zeroed))
    assert 611 in found.ids and found.verdict == "bug" and found.exit_code == 1


def test_special_and_added_tokens_are_among_the_ids() -> None:
    rows = json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
    found = diagnose(str(DEMO), str(files.quantized(DEMO, "coverage-q8.gguf", "Q8_0")))
    assert found.verdict == "precision" and {row["id"] for row in rows} <= set(found.ids)
    assert any("special and added tokens" in line for line in found.coverage.run)


@pytest.mark.parametrize(("broken", "confidence"), [(0, "confirmed"), (2, "unconfirmed")])
def test_a_key_that_lets_a_configuration_be_read_is_confirmed_by_a_pass(
    broken: int, confidence: str, monkeypatch: Any
) -> None:
    a, b = FAULTS["sub-key-unread"].make()
    run, runs = PatchedModel.run, [0]

    def counted(self: PatchedModel, *args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        if runs[0] == broken:
            raise AprfmtError("no pass with the key put back")
        return run(self, *args, **kwargs)

    monkeypatch.setattr(PatchedModel, "run", counted)
    found = diagnose(str(a), str(b))
    assert found.lead is not None and found.lead.confidence == confidence and runs == [2]


def test_what_takes_minutes_is_said_before() -> None:
    said: list[str] = []
    told = ProgressReporter(None, said.append)
    told.announce_passes(1e9)
    told.announce_comparison(1000)
    assert said == []
    told.announce_passes(6e12)
    told.announce_comparison(7 * 10**9)
    assert "about 3 minutes" in said[0] and "about 6 minutes" in said[1]


# --- confirmed, complete -------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXERCISED)
def test_whether_a_difference_was_reached_is_known(name: str) -> None:
    found = answer(name)
    lead = found.lead
    assert lead is not None and lead.exercised == EXERCISED[name]
    assert found.exit_code == 1 and found.verdict == "bug"
    unreached = EXERCISED[name] == "not_exercised"
    assert (found.kind == "not_exercised") == unreached
    assert found.sentence.startswith("differs, not exercised: ") == unreached
    assert bool(found.coverage.not_reached) == unreached
    assert bool(found.next) and (not unreached or "diagnose" in found.next[0])


@pytest.mark.parametrize("before", [math.nan, math.inf, 1e-6, 0.0])
def test_nothing_is_confirmed_from_no_distance_or_an_endless_one(before: float) -> None:
    named = Finding("norm_eps", "", "config", "bug", ("norm_eps",), False)
    assert not finalize_finding(named, Share(before, 0.0, "L0.q"), BOUND).confirmed
    assert finalize_finding(named, Share(1e-3, 0.0, "L0.q"), BOUND).confirmed
    assert not finalize_finding(named, Share(1e-3, 1e-3, "L0.q"), BOUND).confirmed
    assert not finalize_finding(named, Share(1e-3, 0.0, "L0.q", alone=False), BOUND).confirmed
    odd = NonFinite(9, 0, 1, 1, (3,), ("1", "nan"), 0, None)
    assert not finalize_finding(named, Share(1e-3, 0.0, "L0.q", odd), BOUND).confirmed


def test_stacked_causes_are_taken_away_one_after_the_other() -> None:
    found = answer("three-stacked")
    assert found.complete is True and found.remainder == 0
    assert "complete: without it nothing but rounding is left" in found.sentence
    (row,) = [row.says for row in found.evidence if "one after the other" in row.says]
    numbers = [float(part.split()[0]) for part in row.partition("other: ")[2].split(", ")]
    assert len(numbers) == 4 and numbers[0] > 0.01 and numbers[-1] == 0
    for finding in found.findings:
        assert finding.kl_before and finding.kl_after == 0


def test_what_an_unconfirmed_cause_leaves_is_not_complete() -> None:
    found = answer("noise")
    assert found.complete is False and found.remainder
    assert "not complete: no cause is confirmed, which leaves" in found.sentence


# --- the class and the next step -----------------------------------------------------------------


def test_classes_and_exit_codes() -> None:
    none = Diagnosis("a", "b", (), (), (), ())
    far = Finding("derived", "a fine-tune", "identity", "not_comparable", (), True)
    bug = Finding("scale", "", "tensor", "bug", ("x",), True, exercised="not_exercised")
    rows = {
        "same": (none, 0),
        "derived": (replace(none, findings=(far,)), 1),
        "derived ": (replace(none, findings=(far,), reason="derived: of A"), 1),
        "not_comparable": (replace(none, findings=(far,), reason="of other tokens"), 2),
        "not_exercised": (replace(none, findings=(bug,)), 1),
        "bug": (replace(none, findings=(bug, replace(bug, exercised="shows"))), 1),
    }
    for kind, (found, code) in rows.items():
        assert (found.kind, found.exit_code) == (kind.strip(), code)
        assert found.to_json()["class"] == kind.strip()
        assert found.sentence.startswith(KINDS[found.kind])


@pytest.mark.parametrize("cause", ["derived", "lora_merge"])
def test_other_weights_made_from_these_are_derived_whatever_made_them(cause: str) -> None:
    far = Finding(cause, "other weights", "identity", "not_comparable", (), True)
    found = Diagnosis("a", "b", (far,), (), (), ())
    assert (found.kind, found.exit_code) == ("derived", 1)
    assert replace(found, reason="derived: of A").exit_code == 1
    assert replace(found, reason="of other tokens").exit_code == 2


@pytest.mark.parametrize("name", ["adapter-merged", "trained-a-little"])
def test_a_merge_and_a_training_exit_1_and_nothing_undoes_them(name: str) -> None:
    """As help says: B was made from A. The next step looks, and writes nothing."""
    found = answer(name)
    assert (found.kind, found.exit_code) == ("derived", 1)
    assert found.sentence.startswith("derived: ")
    assert [shlex.split(step)[:2] for step in found.next] == [["aprfmt", "diff"]]
    assert not any("--force" in step or " -o " in step for step in found.next)


def test_the_largest_rounding_is_the_headline() -> None:
    rows = tuple(
        Finding("quantisation", says, "tensor", "precision", where, True, residual_before=size)
        for says, where, size in (
            ("5 of Q6_K", ("a",) * 5, 0.01),
            ("24 of Q4_K", ("b",) * 24, 0.07),
            ("1 of Q8_0", ("c",), 0.001),
        )
    )
    for order in (rows, rows[::-1]):
        assert "24 of Q4_K" in Diagnosis("a", "b", order, (), (), ()).sentence
        unmeasured = tuple(replace(row, residual_before=None) for row in order)
        assert "24 of Q4_K" in Diagnosis("a", "b", unmeasured, (), (), ()).sentence
        bugs = tuple(replace(row, verdict="bug") for row in order)  # there the first is the cause
        assert Diagnosis("a", "b", bugs, (), (), ()).lead == bugs[0]


def test_the_next_step_mends_a_file() -> None:
    good = files.converted(tiny_folder("llama"), "next.gguf")
    bad, mended = place("next-theta.gguf"), place("next-mended.gguf")
    if not bad.exists():
        assert command("set", good, "llama.rope.freq_base=77", "-o", bad, "--quiet").code == 0
    done = command("diagnose", good, bad, "--json")
    assert done.code == 1 and done.json["cause"] == "rope_theta"
    name, *words = shlex.split(done.json["next"][0])
    assert name == "aprfmt" and words[-2] == "-o"
    assert command(*words[:-1], mended, "--force").code == 0
    after = command("diagnose", good, mended, "--json")
    assert (after.code, after.json["class"]) == (0, "same")


def test_the_next_step_of_damage_is_a_command_that_works() -> None:
    a, b = FAULTS["noise"].make()
    done = command("diagnose", a, b, "--json")
    words = shlex.split(done.json["next"][0])
    assert words[:2] == ["aprfmt", "diff"] and command(*words[1:]).code == 1
    engine = answer("theta")
    words = shlex.split(engine.next[0])
    assert words[:2] == ["aprfmt", "trace"] and command(*words[1:]).code == 1


def test_repeated_lines_are_one_line_with_a_count() -> None:
    def every(rows: files.Rows) -> None:
        for layer in range(3):
            files.edit(f"model.layers.{layer}.mlp.up_proj.weight", lambda x: x * 1.25)(rows)

    folder = tiny_folder("llama")
    bad = files.copy(folder, "repeated", tensors=every, config=setting(rms_norm_eps=1e-5))
    out = command("diagnose", folder, bad, "-v").out.splitlines()
    assert out[0].startswith("bug: norm_eps")
    assert sum("times its layer's input" in line for line in out) <= 1
    assert out[out.index("next") + 1].startswith("  aprfmt ")
    assert "run" in out


def test_the_page_shows_class_coverage_and_next_step(tmp_path: Any) -> None:
    a, b = FAULTS["window-beyond"].make()
    page = tmp_path / "page.html"
    done = command("diagnose", a, b, "--html", page, "--json")
    assert done.code == 1
    text = page.read_text()
    for word in (json.dumps(done.json["next"][0])[1:40], "not_exercised", "Not reached"):
        assert word in text


def test_ids_out_of_the_vocabulary_are_refused() -> None:
    folder = tiny_folder("llama")
    bad = files.copy(folder, "eps-only", config=setting(rms_norm_eps=1e-5))
    found = diagnose(str(folder), str(bad), ids=(3, 5000))
    assert found.kind == "not_comparable" and "5000" in found.reason
    with pytest.raises(AprfmtError):
        diagnose(str(folder), str(bad), ids=())


def test_a_trace_is_explained_when_its_last_pass_agrees_everywhere(monkeypatch: Any) -> None:
    assert answer("stacked").complete is True
    assert answer("stale-weight").complete is False
    assert answer("other-ids").complete is None


def test_what_was_not_taken_away_alone_is_said_and_not_confirmed(monkeypatch: Any) -> None:
    """As for many causes of a large model: passes for the first ones only."""
    monkeypatch.setattr(finding_effects, "BUDGET", 0.0)
    monkeypatch.setattr(finding_effects, "LEAST", 1)
    a, b = FAULTS["three-stacked"].make()
    found = diagnose(str(a), str(b))
    by_cause = {row.cause: row for row in found.findings}
    assert by_cause["norm_eps"].confirmed and not by_cause["rope_theta"].confirmed
    assert by_cause["scale"].confirmed  # by its values
    assert any("rope_theta was not taken away alone" in row.says for row in found.evidence)
    assert found.complete is False


def test_products_have_their_threads_again() -> None:
    before = blas.blas_threads()
    assert before is not None
    blas.set_blas_threads(2)
    try:
        with blas.limit_blas_threads(1):
            assert blas.blas_threads() == 1
        assert blas.blas_threads() == 2
    finally:
        blas.set_blas_threads(before)


@pytest.mark.parametrize(("size", "chooses"), [(7.0, True), (1e-3, False)])
def test_rounded_routers_that_choose_other_experts_are_said(
    size: float, chooses: bool, tmp_path: Any
) -> None:
    """Coarse near 7, fine near 0; seen red: without the count, as rounding like any other."""
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    source, key = tiny_folder("glm4_moe"), "model.layers.1.mlp.gate.e_score_correction_bias"
    held = safetensors.load_file(source / "model.safetensors")
    held[key] = size * (1 + 0.03 * torch.rand(8, generator=torch.Generator().manual_seed(1)))
    runs = {}
    for name, kind in (("a", torch.float32), ("b", torch.bfloat16)):
        (tmp_path / name).mkdir()
        safetensors.save_file(
            held | {key: held[key].to(kind)}, tmp_path / name / "model.safetensors"
        )
        config = (source / "config.json").read_bytes()
        (tmp_path / name / "config.json").write_bytes(config)
        with aprfmt.open(str(tmp_path / name)) as model:
            points = record_points(PatchedModel.unpatched(model, tuple(IDS), "float32"))
            runs[name] = points["L1.experts"]
    found = diagnose(str(tmp_path / "a"), str(tmp_path / "b"), ids=IDS)
    (cause,) = found.findings
    other = (np.sort(runs["a"], -1) != np.sort(runs["b"], -1)).any(-1).sum()
    assert cause.cause == "rounding" and bool(other) == chooses
    said = f"choose other experts for tokens: {other} of {len(IDS)} in layer 1"
    assert (said in cause.says) == chooses and ("other experts" in cause.says) == chooses


@pytest.mark.parametrize(
    ("parts", "bits", "verdict"),
    [("mlp.gate.", 3, "bug"), ("mlp.gate.", 8, "precision"), ("layers", 3, "precision")],
)
def test_routers_so_coarse_that_no_sound_run_chooses_so_are_a_bug(
    parts: str, bits: int, verdict: str, tmp_path: Any
) -> None:
    """Where all weights are as coarse their rounding moves the scores as far. Seen red: exit 0."""
    safetensors = pytest.importorskip("safetensors.torch")
    source = tiny_folder("qwen3_moe")
    held = safetensors.load_file(source / "model.safetensors")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((source / "config.json").read_bytes())
        safetensors.save_file(held, tmp_path / name / "model.safetensors")
        for key in [key for key in held if parts in key and held[key].ndim > 1]:
            scale = held[key].abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            held[key] = (held[key] / scale).round() * scale
    found = diagnose(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.verdict == verdict
    said = [row.says for row in found.findings if "choose other experts" in row.says]
    assert any("wider than rounding moves" in each for each in said) == (verdict == "bug")
