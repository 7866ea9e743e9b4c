"""A NaN or an infinity of one run or trace is named with point, index and count, by every command.

Seen red: a NaN taken for a masked score, logits of NaN at relative L2 0, an infinite router logit
that explains an expert's flip, a NaN that only statistics show.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.parity.outcomes import compare_experts
from aprfmt.measure.traces import compare_traces
from tests.cli.run import aprfmt
from tests.compare.test_nonfinite import TOKENS, WRONG, alone, folder
from tests.diagnosis.engines import place, stats_only, tiny_folder, trace
from tests.inference.judge import traced64

# --- captured traces ----------------------------------------------------------------------------


PLACES: dict[str, tuple[int, ...]] = {
    "L1.scores": (2, 20, 4), "L1.probs": (1, 7, 3), "L0.attn_out": (5, 2), "L2.ffn_mul": (28, 0),
    "final_norm": (0, 47), "logits": (28, 96), "L1.q_rope": (4, 3, 15), "embd": (9, 9),
}  # fmt: skip


@cache
def altered(key: str, wrong: str, name: str = "llama") -> Path:
    """Return a saved trace of a tiny model with one value put in by hand."""

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        if key:
            values[key] = values[key].copy()
            values[key][PLACES[key]] = WRONG[wrong]
        return values

    return trace(tiny_folder(name), f"nonfinite-{name}-{key}-{wrong}", rename=rename)


def whole() -> Path:
    return altered("", "")


@pytest.mark.parametrize(
    ("key", "wrong"),
    [*((key, "nan") for key in PLACES), ("L1.scores", "-inf"), ("logits", "inf"), ("embd", "-inf")],
)
def test_one_value_of_a_captured_trace(key: str, wrong: str) -> None:
    odd, model = altered(key, wrong), tiny_folder("llama")
    for x, y, side in ((whole(), odd, "b"), (odd, whole(), "a")):
        for options in ((), ("--model", model)) if side == "b" else ((),):
            done = aprfmt("diagnose", x, y, *options, "--json")
            assert (done.code, done.json["verdict"]) == (1, "bug"), done.json["sentence"]
            assert (done.json["cause"], done.json["first"]) == ("nonfinite", key)
            lead = done.json["findings"][0]
            found = lead["values"]["nonfinite"][key]
            assert (found["alone"], tuple(found["at"])) == (1, PLACES[key])
            assert lead["side"] == side.upper() and math.isfinite(lead["residual_after"])
            point = next(row for row in done.json["points"] if row["key"] == key)
            assert point["beyond"] and point["nonfinite"]["alone"] == 1
            sure = [
                row["cause"] for row in done.json["findings"] if row["confidence"] == "confirmed"
            ]
            assert set(sure) == {"nonfinite"}
        done = aprfmt("trace", "--load", x, "--reference", y, "--json")
        assert done.code == 1 and done.json["reference"]["first"] == key
        point = next(row for row in done.json["reference"]["points"] if row["key"] == key)
        alone(point["nonfinite"], PLACES[key], 1, side)
        assert point["beyond"] and point["rel_l2"] == "Infinity"
    done = aprfmt("diagnose", model, odd, "-v")
    begins = f"bug: nonfinite (located) - {key}: NaN or infinity on one"
    assert done.code == 1 and done.out.startswith(begins)
    assert f"the first at {list(PLACES[key])}" in done.out
    told = aprfmt("trace", "--load", odd, "--reference", whole())
    assert told.code == 1 and f"{key}: NaN or infinity on one side at 1 of" in told.out
    assert f"first point beyond tolerance: {key}" in told.out


def test_the_same_value_in_both_traces_is_named_and_no_difference() -> None:
    odd, again = altered("L0.attn_out", "nan"), altered("L0.attn_out", "nan", "llama")
    other = place("nonfinite-again.safetensors")
    other.write_bytes(again.read_bytes())
    said = f"both sides alike at 1 of {29 * 48} values, the first at {list(PLACES['L0.attn_out'])}"
    done = aprfmt("trace", "--load", odd, "--reference", other, "--json")
    assert done.json["reference"]["first"] is None
    point = next(p for p in done.json["reference"]["points"] if p["key"] == "L0.attn_out")
    assert not point["beyond"] and (point["nonfinite"]["alone"], point["nonfinite"]["both"]) == (
        0,
        1,
    )
    assert said in aprfmt("trace", "--load", odd, "--reference", other).out
    told = aprfmt("diagnose", odd, other, "-v")
    assert told.code == 0 and told.out.startswith("same") and said in told.out


def test_statistics_alone_show_a_nan_of_one_side() -> None:
    ours = traced64("llama")[1]
    bare = replace(ours, fetch=lambda key: None)
    record = ours.records["L1.attn"]
    assert record.stats is not None
    broken = replace(record, stats=replace(record.stats, nan=3))
    odd = replace(bare, records={**ours.records, "L1.attn": broken})
    for a, b in ((odd, bare), (bare, odd)):
        diff = compare_traces(a, b)
        assert (diff.first, diff.exit_code) == ("L1.attn", 1)
        point = next(point for point in diff.points if point.key == "L1.attn")
        assert point.beyond and "NaN or infinite" in point.why
    assert compare_traces(odd, odd).first is None
    assert stats_only(tiny_folder("llama"), "nonfinite-stats").is_file()


def test_what_is_no_choice_of_experts_is_beyond_all_the_same() -> None:
    ours = traced64("mixtral")[1]
    margin, router = ours.recorded_values("L1.router_margin"), ours.recorded_values("L1.router")
    assert margin is not None and router is not None
    for key, values in (("L1.router_margin", margin), ("L1.router", router)):
        odd = values.copy()
        odd[(4,) + (0,) * (values.ndim - 1)] = np.nan

        def fetch(name: str, key: str = key, odd: Any = odd) -> Any:
            return odd if name == key else ours.fetch(name)

        assert compare_traces(replace(ours, fetch=fetch), ours).first == key


def test_an_infinite_score_explains_no_flip() -> None:
    ours = traced64("mixtral")[1]
    experts, router = ours.recorded_values("L1.experts"), ours.recorded_values("L1.router")
    assert experts is not None and router is not None
    for value in WRONG.values():
        other, odd = experts.copy(), router.copy()
        spare = next(e for e in range(6) if e not in experts[20])
        other[20, 1], odd[20, spare] = spare, value
        changed = {"L1.experts": other, "L1.router": odd}

        def fetch(key: str, changed: Any = changed) -> Any:
            return changed.get(key, ours.fetch(key))

        [flip] = compare_experts(ours, replace(ours, fetch=fetch))
        assert not flip.explained and flip.position == 20


# --- runs ---------------------------------------------------------------------------------------


def hole(value: float, point: str) -> type[NumpyBackend]:
    """Return a backend that puts a value into one activation, or into the logits."""

    class Hole(NumpyBackend):
        def activate(self, x: Any, kind: str, *, steps: bool) -> Any:
            y = np.array(super().activate(x, kind, steps=steps))
            if point == "ffn_act":
                y[6, 11] = value
            return y

        def linear(self, x: Any, w: Any, bias: Any) -> Any:
            y = np.array(super().linear(x, w, bias))
            if point == "logits" and y.shape[-1] == 97:
                y[6, 11] = value
            return y

    return Hole


@pytest.fixture
def with_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    def put(wrong: str, point: str) -> None:
        rows = dict(BACKENDS._rows) | {"hole": ("tests.compare.test_nonfinite:unused", "")}
        monkeypatch.setattr(BACKENDS, "_rows", rows)
        monkeypatch.setitem(BACKENDS._loaded, "hole", hole(WRONG[wrong], point))

    yield put
    BACKENDS._loaded.pop("hole", None)


@pytest.mark.parametrize(
    ("point", "key", "wrong", "through"),
    [
        ("ffn_act", "L0.ffn_act", "nan", ()), ("ffn_act", "L0.ffn_act", "-inf", ()),
        ("logits", "logits", "nan", ("--through", "NF4")), ("logits", "logits", "-inf", ()),
        ("logits", "logits", "inf", ("--through", "NF4")),
    ],
)  # fmt: skip
def test_parity_names_the_point_the_index_and_the_count(
    point: str,
    key: str,
    wrong: str,
    through: tuple[str, ...],
    with_hole: Callable[[str, str], None],
) -> None:
    with_hole(wrong, point)
    model = tiny_folder("llama")
    for runs, side in ((("numpy", "hole"), "a"), (("hole", "numpy"), "b")):
        done = aprfmt("parity", model, "--between", *runs, *TOKENS, *through, "--json")
        assert (done.code, done.json["verdict"]) == (1, "bug")
        [pair] = done.json["pairs"]
        assert pair["first"] == key and key in pair["cause"]
        alone(next(p for p in pair["points"] if p["key"] == key)["nonfinite"], (6, 11), 1, side)
        checks = [c for c in pair["gate"]["checks"] if c["name"] == "finite"]
        assert [(c["outcome"], c["where"].partition(":")[0]) for c in checks] == [("FAIL", "hole")]
        assert f"first at {key}: 1 of " in checks[0]["found"] and "[6, 11]" in checks[0]["found"]
        outer = {c["name"]: c["outcome"] for c in pair["gate"]["checks"]}
        assert outer.get("quantized-logits", "FAIL") == "FAIL"
    told = aprfmt("parity", model, "--between", "numpy", "hole", *TOKENS, *through)
    assert told.code == 1 and f"makes {key} is wrong on equal inputs; NaN or infinity" in told.out


def test_a_reproduction_of_a_nan_is_written_and_replayed(
    with_hole: Callable[[str, str], None], tmp_path: Path
) -> None:
    with_hole("nan", "ffn_act")
    path = tmp_path / "b.safetensors"
    runs = ("--between", "numpy", "hole")
    done = aprfmt("parity", tiny_folder("llama"), *runs, *TOKENS, "--bundle", path, "--json")
    assert (done.code, done.json["bundle"]["residual"]) == (1, "Infinity")
    again = aprfmt("parity", "--replay", path, "--json")
    assert (again.code, again.json["replay"]["reproduced"]) == (1, True)
    assert again.json["replay"]["apart"] == again.json["replay"]["max_abs_diff"] == "Infinity"
    assert (
        again.json["replay"]["max_at"] == [6, 11] and again.json["replay"]["reference_moved"] == 0
    )
    right = aprfmt("parity", "--replay", path, "--between", "numpy", "torch", "--json")
    assert (right.code, right.json["replay"]["reproduced"]) == (0, False)


def test_a_nan_in_a_weight_fails_both_runs_and_is_no_difference() -> None:
    model = folder("nan", "F32", math.nan)
    done = aprfmt("parity", model, "--between", "numpy", "torch", *TOKENS, "--json")
    [pair] = done.json["pairs"]
    assert done.code == 1 and pair["cause"].startswith("finite: L1.ffn_up: ")
    assert "both sides alike at 29 of 2088 values, the first at [0, 3]" in pair["cause"]
    point = next(p for p in pair["points"] if p["key"] == "L1.ffn_up")
    assert (point["nonfinite"]["alone"], point["nonfinite"]["both"]) == (0, 29)
    assert point["nonfinite"]["both_at"] == [0, 3]
    finite = [c for c in pair["gate"]["checks"] if c["name"] == "finite"]
    assert len(finite) == 2 and all("L1.ffn_up: 29 of 2088 values" in c["found"] for c in finite)


@pytest.mark.parametrize("wrong", WRONG)
def test_trace_of_a_run_against_a_run(
    wrong: str, with_hole: Callable[[str, str], None], tmp_path: Path
) -> None:
    with_hole(wrong, "ffn_act")
    model = tiny_folder("llama")
    save = tmp_path / "odd.safetensors"
    run = ("trace", model, "--payload", *TOKENS, "--points", "ffn_act")
    done = aprfmt(*run, "--backend", "hole", "--save", save, "--json")
    assert done.code == 1 and done.json["nonfinite"] == "L0.ffn_act"
    done = aprfmt(*run, "--reference", save, "--json")
    point = done.json["reference"]["points"][0]
    assert done.code == 1 and done.json["reference"]["first"] == "L0.ffn_act" == point["key"]
    alone(point["nonfinite"], (6, 11), 1)
