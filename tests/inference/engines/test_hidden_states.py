"""Entries of transformers' tuple `hidden_states`: read as the points they are, under any spelling.

The values are transformers' own (`output_hidden_states=True`). Seen red: the last entry taken for
the last layer's output, entry N for the output of layer N, an entry lost without a word.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.capture_point import find_other_capture_point
from aprfmt.causes.forward.mismatch import Mismatch
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.trace_pair import equal_neighbour
from aprfmt.inference.engines.modules import hidden_state_index, hidden_state_points
from aprfmt.inference.engines.opening import open_trace
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import record_points, run_shadow_pass, value_at
from aprfmt.inference.trace import Trace
from aprfmt.inference.trace_file import load_trace
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder, trace
from tests.models import IDS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

SPELLINGS = ("hidden_states.{}", "hidden_states_{}", "hidden_states[{}]", "model.hidden_state.{}")


def states(base: str) -> dict[int, Any]:
    """Return {entry: values} of transformers' run on a tiny model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder(base), dtype=torch.float32).eval()
    with torch.no_grad():
        made = model(torch.tensor([list(IDS)]), output_hidden_states=True)
    return {n: value.numpy() for n, value in enumerate(made.hidden_states)}


def saved(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write an .npz with the token ids."""
    np.savez(path, input_ids=np.array([IDS]), **arrays)
    return path


@pytest.mark.parametrize("base", ["llama", "gemma2", "gpt2", "qwen3", "olmo2"])
def test_each_entry_is_its_point(base: str, tmp_path: Path) -> None:
    made = states(base)
    path = saved(tmp_path / "h.npz", {f"hidden_states.{n}": v for n, v in made.items()})
    with (
        open_model(tiny_folder(base)) as model,
        open_trace(path, None, model) as found,
        load_trace(trace(tiny_folder(base), f"hidden-{base}")) as own,
    ):
        assert not found.run.get("unknown") and len(found.records) == len(made)
        assert {"final_norm", "L0.out"} <= found.records.keys()
        for key in found.records:
            mine, theirs = own.recorded_values(key), found.recorded_values(key)
            assert mine is not None and theirs is not None, key
            assert np.allclose(theirs, np.reshape(mine, theirs.shape), rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("layers", [None, 3])
def test_every_spelling_is_read_and_the_last_is_behind_the_final_norm(
    spelling: str, layers: int | None
) -> None:
    keys = {spelling.format(n): n for n in range(4)}
    found = hidden_state_points([*keys, "logits"], layers)
    assert {keys[key]: point for key, point in found.items()} == {
        0: ("embd", -1) if layers is None else ("in", 0),
        1: ("out", 0),
        2: ("out", 1),
        3: ("final_norm", -1),
    }


def test_entries_counted_from_the_end() -> None:
    found = hidden_state_points(["hidden_states[-1]", "hidden_states[-2]"], 3)
    assert [*found.values()] == [("final_norm", -1), ("out", 1)]
    assert [*hidden_state_points(["hidden_states.-1"], None).values()] == [("final_norm", -1)]
    assert hidden_state_index("last_hidden_state") == -1
    every = ["hidden_states.0", "hidden_states.1", "hidden_states.2", "last_hidden_state"]
    assert [*hidden_state_points(every, None).values()] == [
        ("embd", -1), ("out", 0), ("final_norm", -1), ("final_norm", -1)
    ]  # fmt: skip
    assert hidden_state_points(["hidden_states.4", "hidden_states.-9"], 3) == {}


def test_an_entry_that_may_be_the_last_is_not_guessed(tmp_path: Path) -> None:
    """Without the number of layers the largest of some entries may be behind the final norm."""
    names = ["hidden_states.1", "hidden_states.3"]
    assert hidden_state_points(names, None) == {"hidden_states.1": ("out", 0)}
    path = saved(tmp_path / "some.npz", dict.fromkeys(names, np.ones((1, len(IDS), 8))))
    with open_trace(path) as found:
        assert "give --model" in str(found.run["unknown"])
    assert hidden_state_index("past_hidden") is None


def test_a_module_beats_an_entry_of_the_same_point(tmp_path: Path) -> None:
    values = np.arange(8.0 * len(IDS), dtype=np.float32).reshape(1, len(IDS), 8)
    arrays = {f"hidden_states.{n}": values + n for n in range(3)} | {"model.layers.0": values + 9}
    for order in (arrays, dict(reversed(arrays.items()))):
        with open_trace(saved(tmp_path / "both.npz", order)) as found:
            held = found.recorded_values("L0.out")
            assert held is not None and np.array_equal(held, (values + 9)[0])


@pytest.mark.parametrize("with_model", [True, False])
def test_noise_under_these_names_is_no_rounding(with_model: bool, tmp_path: Path) -> None:
    made = states("llama")
    a = saved(tmp_path / "a.npz", {f"hidden_states.{n}": v for n, v in made.items()})
    rng = np.random.default_rng(1)
    noise = {f"hidden_states.{n}": rng.normal(size=v.shape) for n, v in made.items()}
    b = saved(tmp_path / "b.npz", {k: v.astype(np.float32) for k, v in noise.items()})
    options: dict[str, Any] = {"model": str(tiny_folder("llama"))} if with_model else {}
    assert diagnose(str(a), str(b), **options).exit_code == 1
    assert diagnose(str(a), str(a), **options).exit_code == 0


EMPTY: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "unknown names": {"residual_stream.0": np.ones((1, len(IDS), 24), np.float32)},
    "another width": {"logits": np.ones((1, len(IDS), 5), np.float32)},
}


@pytest.mark.parametrize("other", [*EMPTY])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_side_of_which_nothing_was_compared_agrees_with_nothing(
    other: str, swapped: bool, tmp_path: Path
) -> None:
    """Seen red: "precision", exit 0, from the other side's distance to the model."""
    made = states("llama")
    a = saved(tmp_path / "a.npz", {f"hidden_states.{n}": v for n, v in made.items()})
    b = saved(tmp_path / "b.npz", EMPTY[other])
    sides = (str(b), str(a)) if swapped else (str(a), str(b))
    found = diagnose(*sides, model=str(tiny_folder("llama")))
    assert (found.verdict, found.exit_code) == ("not_comparable", 2), found.sentence
    assert f"no point of {'A' if swapped else 'B'} could be compared" in found.sentence
    alone = diagnose(str(tiny_folder("llama")), str(b))
    assert alone.exit_code == 2, alone.sentence


def captured(path: Path, made: Mapping[int, Any], **arrays: Any) -> Path:
    """Write the entries under the names of layers: the last one is behind the final norm."""
    layers = {f"model.layers.{n - 1}": v for n, v in made.items() if n}
    return saved(path, {"model.embed_tokens": made[0]} | layers | arrays)


@pytest.mark.parametrize("with_model", [True, False])
def test_the_last_layers_output_taken_behind_the_norm_is_a_capture_point(
    with_model: bool, tmp_path: Path
) -> None:
    """The logits, which are computed from it, agree: no operation is at fault."""
    made = states("llama")
    with load_trace(trace(tiny_folder("llama"), "hidden-last")) as own:
        last = own.recorded_values(f"L{len(made) - 2}.out")
        logits = own.recorded_values("logits")
    a = captured(tmp_path / "a.npz", made | {len(made) - 1: last}, logits=logits)
    b = captured(tmp_path / "b.npz", made, logits=logits)
    options: dict[str, Any] = {"model": str(tiny_folder("llama"))} if with_model else {}
    found = diagnose(str(a), str(b), **options)
    assert [row.cause for row in found.findings if row.verdict == "bug"] == []
    assert found.cause == "capture_point" and found.exit_code == (0 if with_model else 2)
    if with_model:
        assert found.lead is not None and found.lead.where == (f"L{len(made) - 2}.out",)
        assert "final_norm" in found.sentence


# Array -> the point whose values it holds, of "embd", "L0.out", ... and "final_norm".
ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "one early": {"embd": "L0.out", "L0.out": "L1.out", "L1.out": "L2.out", "L2.out": "final_norm"},
    "one late": {"L0.out": "embd", "L1.out": "L0.out", "L2.out": "L1.out"},
    "two exchanged": {"L0.out": "L1.out", "L1.out": "L0.out"},
    "behind the norm": {"final_norm": "L2.out"},
}


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("kind", [*ELSEWHERE])
def test_points_with_the_values_of_other_points_are_named(
    kind: str, with_model: bool, tmp_path: Path
) -> None:
    """Seen red: "stale_tensor" of a sound embedding, "other values" of the last norm."""
    names = {"embd": "model.embed_tokens", "final_norm": "model.norm", "logits": "logits"}
    names |= {f"L{n}.out": f"model.layers.{n}" for n in range(3)}
    with load_trace(trace(tiny_folder("llama"), "hidden-last")) as own:
        right = {key: np.asarray(own.recorded_values(key)) for key in names}
    wrong = right | {key: right[other] for key, other in ELSEWHERE[kind].items()}
    a, b = (
        saved(tmp_path / file, {names[key]: value for key, value in rows.items()})
        for file, rows in (("a.npz", right), ("b.npz", wrong))
    )
    found = diagnose(str(tiny_folder("llama")) if with_model else str(a), str(b))
    assert (found.cause, found.exit_code) == ("capture_point", 0), found.sentence
    assert found.lead is not None and found.lead.certainty == "confirmed"
    assert {*found.lead.where} == {*ELSEWHERE[kind]}
    assert ELSEWHERE[kind][found.lead.first] in found.sentence


def test_a_layer_that_was_really_left_out_is_no_other_point() -> None:
    """The engine computed on with the output of the layer before: what follows says so."""
    with (
        open_model(tiny_folder("llama")) as model,
        load_trace(trace(tiny_folder("llama"), "hidden-last")) as own,
    ):
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        plain = record_points(patched)
        kept = {"L1.out": plain["L0.out"]}
        made = kept | {key: value_at(patched, kept, key) for key in ("L2.out", "logits")}
        records = {key: own.records[key] for key in ("embd", "L0.out", *made)}
        values = plain | made
        shapes = {key: value.shape for key, value in plain.items()}
        recorded = RecordedTrace(Trace(own.run, records, {}, values.get), IDS, shapes)
        found = run_shadow_pass(patched, recorded)
        assert [view.key for view in found.flagged] == ["L1.out"]
        case = Mismatch(patched, recorded, found.flagged[0], found, plain)
        assert find_other_capture_point(case) is None
        patched.weights.close()


def test_a_norm_that_was_really_applied_twice_is_a_bug(tmp_path: Path) -> None:
    """The engine computed on with the normed values: the logits say so."""
    made = states("llama")
    with open_model(tiny_folder("llama")) as model:
        weight = np.asarray(model["model.norm.weight"], np.float64)
        head = np.asarray(model["lm_head.weight"], np.float64)
        eps = float(model.hyper["norm_eps"])
    x = made[len(made) - 1].astype(np.float64)
    twice = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    with load_trace(trace(tiny_folder("llama"), "hidden-last")) as own:
        last, logits = own.recorded_values(f"L{len(made) - 2}.out"), own.recorded_values("logits")
    a = captured(tmp_path / "a.npz", made | {len(made) - 1: last}, logits=logits)
    wrong = (twice @ head.T).astype(np.float32)
    b = captured(tmp_path / "b.npz", made, logits=wrong)
    found = diagnose(str(a), str(b), model=str(tiny_folder("llama")))
    assert (found.verdict, found.exit_code) == ("bug", 1), found.sentence


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_layers_output_of_other_values_that_nothing_used_is_no_bug(
    layer: int, with_model: bool, tmp_path: Path
) -> None:
    """Later outputs agree, so what is recorded here was taken elsewhere: placed, not known."""
    made = states("llama")
    noise = np.random.default_rng(2).normal(size=made[1].shape).astype(np.float32)
    a = saved(tmp_path / "a.npz", {f"hidden_states.{n}": v for n, v in made.items()})
    other = made | {layer + 1: noise}
    b = saved(tmp_path / "b.npz", {f"hidden_states.{n}": v for n, v in other.items()})
    options: dict[str, Any] = {"model": str(tiny_folder("llama"))} if with_model else {}
    found = diagnose(str(a), str(b), **options)
    assert (found.cause, found.exit_code) == ("capture_point", 2), found.sentence
    assert found.lead is not None and found.lead.where == (f"L{layer}.out",)
    assert found.lead.certainty == "located"


@pytest.mark.parametrize("with_model", [True, False])
def test_outputs_without_the_residual_stream_in_every_layer_are_one_capture_point(
    with_model: bool, tmp_path: Path
) -> None:
    """What every layer adds is recorded, and the logits agree."""
    made = states("llama")
    with load_trace(trace(tiny_folder("llama"), "hidden-last")) as own:
        outs = [own.recorded_values(f"L{n}.out") for n in range(len(made) - 1)]
        logits = own.recorded_values("logits")
    real = {"model.embed_tokens": made[0], "logits": logits}
    a = saved(tmp_path / "a.npz", real | {f"model.layers.{n}": v for n, v in enumerate(outs)})
    before = [made[0].reshape(made[1].shape[1:]), *outs[:-1]]
    added = {f"model.layers.{n}": v - w for n, (v, w) in enumerate(zip(outs, before, strict=True))}
    b = saved(tmp_path / "b.npz", real | added)
    options: dict[str, Any] = {"model": str(tiny_folder("llama"))} if with_model else {}
    found = diagnose(str(a), str(b), **options)
    assert [row.cause for row in found.findings if row.verdict == "bug"] == [], found.sentence
    assert found.cause == "capture_point", found.sentence


@pytest.mark.parametrize("wrong", [{1}, {2}, {1, 2}, {2, 3}, {1, 3}], ids=str)
def test_only_points_that_were_taken_elsewhere_are_named(wrong: set[int], tmp_path: Path) -> None:
    """Outputs of some layers are those of the layer before.

    Seen red: all layers, some 0 apart; a KeyError of a search, for layers 1 and 2.
    """
    made = states("exaone4")
    layers = {n: made[n + 1].reshape(made[1].shape[1:]) for n in range(4)}
    early = {n: layers[n - 1] if n in wrong else value for n, value in layers.items()}
    a, b = (
        saved(tmp_path / name, {f"model.layers.{n}": row for n, row in rows.items() if n})
        for name, rows in (("a.npz", layers), ("b.npz", early))
    )
    found = diagnose(str(a), str(b), model=str(tiny_folder("exaone4")))
    assert found.cause == "capture_point" and found.lead is not None, found.sentence
    assert {*found.lead.where} == {f"L{n}.out" for n in wrong}


@pytest.mark.parametrize("times", [2, 3])
def test_random_values_of_another_width_are_no_rounding(times: int, tmp_path: Path) -> None:
    """They are judged nowhere, so nothing says that they are right. Seen red: confirmed, exit 0."""
    made = states("llama")
    rng = np.random.default_rng(3)
    width = times * made[0].shape[-1]
    noise = rng.standard_normal((1, len(IDS), width)).astype(np.float32)
    few = {n: value for n, value in made.items() if n < len(made) - 1}  # no final norm among them
    b = captured(tmp_path / "b.npz", few, **{"model.layers.0.self_attn.o_proj": noise})
    found = diagnose(str(tiny_folder("llama")), str(b))
    assert found.exit_code == 2 and "L0.attn_out (its rows have" in found.sentence, found.sentence


@pytest.mark.parametrize("point", ["self_attn.o_proj", "mlp.down_proj", "input_layernorm"])
def test_a_buffer_of_zeros_is_no_other_point(point: str, tmp_path: Path) -> None:
    """What is computed from zeros is zero as well. Seen red: "same: capture_point", exit 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32).eval()
    held: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name.startswith("model.layers.") and name.count(".") > 2 and not [*module.children()]:
            module.register_forward_hook(
                lambda _, __, out, name=name: held.update({name: out.detach().numpy()})
            )
    with torch.no_grad():
        model(torch.tensor([list(IDS)]))
    key = f"model.layers.1.{point}"
    path = saved(tmp_path / "b.npz", held | {key: np.zeros_like(held[key])})
    found = diagnose(str(tiny_folder("llama")), str(path))
    assert found.exit_code and found.verdict != "same", found.sentence


@pytest.mark.parametrize("fill", [0.0, 1.5])
def test_one_value_throughout_is_no_other_point(fill: float) -> None:
    """It equals any point that has that value throughout, which says nothing of where it is from.

    Seen red: "the values of attn_out", of a buffer that was never filled.
    """
    with load_trace(trace(tiny_folder("llama"), "whole")) as base:
        right = np.array(base.recorded_values("L0.attn_out"))
        for theirs, expected in ((np.full_like(right, fill), ""), (right, "attn_out")):
            mine = {key: base.recorded_values(key) for key in base.records} | {
                "L0.attn_out": theirs
            }
            a = replace(base, fetch=mine.get)
            b = replace(base, fetch={"L0.ffn_out": theirs}.get)
            found = equal_neighbour("L0.ffn_out", a, b, 1e-5)
            assert found.endswith(expected) and bool(found) == bool(expected)


def without_skip(layer: Any) -> None:
    """Leave out what skips the state (D x)."""
    layer.mixer.D.zero_()


def without_norm_weight(layer: Any) -> None:
    """Take the weight of the norm at the gate as ones."""
    layer.mixer.norm.weight.fill_(1.0)


# Name -> model, fault, layers that have it, its cause.
BEHIND: Mapping[str, tuple[str, Callable[[Any], None], tuple[int, ...], str]] = {
    "first": ("mamba", without_skip, (0,), "ssm_scan"),
    "middle": ("mamba", without_skip, (1,), "ssm_scan"),
    "last": ("mamba", without_skip, (2,), "ssm_scan"),
    "all": ("mamba", without_skip, (0, 1, 2), "ssm_scan"),
    "norm weight": ("mamba2", without_norm_weight, (0, 1, 2), "ssm_gate"),
}


def mamba_states(
    base: str,
    fault: Callable[[Any], None],
    layers: Collection[int],
    noise: float = 0.0,
    **config: Any,
) -> tuple[Any, list[Any]]:
    """Return (embedding rows, transformers' `hidden_states`) of a Mamba with faults.

    Its list has no embedding. `layers` have the fault; `noise` is added to the embedding. `config`
    are keys of the configuration that have other values.
    """
    from transformers import AutoModelForCausalLM

    config["dtype"] = torch.float32
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(base), **config).eval()
    ids = torch.tensor([list(IDS)])
    with torch.no_grad():
        table = model.get_input_embeddings()
        table.weight += noise * torch.randn(table.weight.shape, generator=torch.manual_seed(4))
        for layer in layers:
            fault(model.backbone.layers[layer])
        made = model(ids, output_hidden_states=True)
        rows = table(ids)[0].numpy()
    return rows, [value[0].numpy() for value in made.hidden_states]


@pytest.mark.parametrize("where", [*BEHIND])
def test_faults_are_judged_behind_a_list_without_its_embedding(where: str, tmp_path: Path) -> None:
    """One operation reproduces that has no fault, and shows the shift.

    Seen red: "stale_tensor" of the sound embedding led, and no cause of the norm's weight.
    """
    base, fault, layers, cause = BEHIND[where]
    _, made = mamba_states(base, fault, layers)
    path = saved(tmp_path / "h.npz", {f"hidden_states.{n}": v for n, v in enumerate(made)})
    found = diagnose(str(tiny_folder(base)), str(path))
    assert {row.cause for row in found.findings} == {cause, "capture_point"}, found.sentence
    assert found.lead is not None and found.lead.cause == cause
    assert found.lead.certainty == "confirmed"
    assert found.lead.first == f"L{layers[0]}.out"


@pytest.mark.parametrize("layers", [(), (0, 1, 2)])
def test_a_stale_embedding_is_no_shifted_list(layers: Collection[int], tmp_path: Path) -> None:
    """The list is whole: what the layers make of its first entry, they make of the stale one."""
    rows, made = mamba_states("mamba", without_skip, layers, noise=0.05)
    entries = [rows, *made[:-2], made[-1]]
    path = saved(tmp_path / "h.npz", {f"hidden_states.{n}": v for n, v in enumerate(entries)})
    found = diagnose(str(tiny_folder("mamba")), str(path))
    assert (found.cause, found.exit_code) == (None, 1), found.sentence
    assert found.lead is not None and "token_embd.weight" in found.lead.where
    assert "capture_point" not in [row.cause for row in found.findings]


def test_a_list_of_which_nothing_agrees_is_placed_by_what_is_nearer(tmp_path: Path) -> None:
    """All norms have another epsilon, the last one too. Seen red: "stale_tensor" led."""
    _, made = mamba_states("mamba", without_skip, (), layer_norm_epsilon=0.03)
    path = saved(tmp_path / "h.npz", {f"hidden_states.{n}": v for n, v in enumerate(made)})
    found = diagnose(str(tiny_folder("mamba")), str(path))
    assert (found.cause, found.exit_code) == ("norm_eps", 1), found.sentence
    assert found.lead is not None and found.lead.certainty == "confirmed"
